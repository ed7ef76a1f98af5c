"""Elementwise ops: one row each, from our op to a C++ expression of one element.

`NATIVE` lists what this backend has. A row is a function of the op and the operands'
expressions. Narrow floats arrive as f32, and the caller rounds their result once; every
other type is computed as it is.
"""

from collections.abc import Callable

from pallasite.backends.cuda.text import c_type, is_narrow, number
from pallasite.backends.libdevice import LINES
from pallasite.ir.nodes import Op
from pallasite.ir.types import DTYPES, F32, I32, DType

Row = Callable[..., str]


def computed(dtype: DType) -> DType:
    """The type in which a dtype is computed."""
    return F32 if is_narrow(dtype) else dtype


def widened(text: str, dtype: DType) -> str:
    return f"from_{dtype}({text})" if is_narrow(dtype) else text


def narrowed(text: str, dtype: DType) -> str:
    return f"to_{dtype}({text})" if is_narrow(dtype) else text


def _dtype(op: Op) -> DType:
    return op.operands[0].tile.dtype


def _as(op: Op, text: str) -> str:
    """Wrapped to the operand's type where C++ promotes small integers to int."""
    dtype = _dtype(op)
    small = not dtype.is_float and not dtype.is_bool and dtype.bits < 32
    return f"({c_type(dtype)})({text})" if small else text


def infix(word: str) -> Row:
    def row(op: Op, x: str, y: str) -> str:
        dtype = _dtype(op)
        if dtype.is_signed_int and dtype.bits >= 32 and word in ("+", "-", "*"):
            u = "u64" if dtype.bits == 64 else "u32"  # wraps around
            return f"({c_type(dtype)})(({u}){x} {word} ({u}){y})"
        return _as(op, f"{x} {word} {y}")

    return row


def compare(word: str) -> Row:
    return lambda op, x, y: f"{x} {word} {y}"


def function(single: str, double: str) -> Row:
    """A function of CUDA's."""

    def row(op: Op, *xs: str) -> str:
        name = double if _dtype(op).bits == 64 else single
        return f"{name}({', '.join(xs)})"

    return row


def choice(word: str) -> Row:
    """The maximum or the minimum; NaN if either operand is NaN."""

    def row(op: Op, x: str, y: str) -> str:
        dtype = _dtype(op)
        if dtype.is_float:
            wide = "f64" if dtype.bits == 64 else "f32"
            return f"{word}_{wide}({x}, {y})"
        if dtype.is_bool:
            return f"{x} {'||' if word == 'max' else '&&'} {y}"
        return f"{'greatest' if word == 'max' else 'least'}({x}, {y})"

    return row


def _rough_div(op: Op, x: str, y: str) -> str:
    return f"divide_fast({x}, {y})" if _dtype(op).is_float else _div(op, x, y)


def _div(op: Op, x: str, y: str) -> str:
    return f"{x} / {y}" if _dtype(op).is_float else f"divide({x}, {y})"


def _rem(op: Op, x: str, y: str) -> str:
    if _dtype(op).is_float:
        return function("fmodf", "fmod")(op, x, y)
    return f"remainder_of({x}, {y})"


def _neg(op: Op, x: str) -> str:
    if _dtype(op).is_float:
        return f"-{x}"
    if _dtype(op) == I32:
        return f"negated({x})"
    return infix("-")(op, number(0, _dtype(op)), x)


def _abs(op: Op, x: str) -> str:
    if _dtype(op).is_float:
        return function("fabsf", "fabs")(op, x)
    minus = infix("-")(op, number(0, _dtype(op)), x)
    return _as(op, f"{x} < 0 ? {minus} : {x}")


def _clamp(op: Op, low: str, x: str, high: str) -> str:
    return choice("min")(op, choice("max")(op, x, low), high)


def _integer_pow(op: Op, x: str) -> str:
    """Repeated multiplication; a negative power is one division at the end."""
    power, terms = op.attrs["y"], abs(op.attrs["y"])
    one = number(1, computed(_dtype(op)))

    def raised(n: int) -> str:
        if n == 1:
            return x
        half = raised(n // 2)
        square = f"({infix('*')(op, half, half)})"
        return f"({infix('*')(op, square, x)})" if n % 2 else square

    result = raised(terms) if terms else one
    return f"{one} / {result}" if power < 0 else result


def _round(op: Op, x: str) -> str:
    if op.attrs["rounding_method"] == 1:
        return function("rintf", "rint")(op, x)
    return function("roundf", "round")(op, x)


def _is_finite(op: Op, x: str) -> str:
    infinity = number(float("inf"), computed(_dtype(op)))
    return f"{_abs(op, x)} < {infinity}"


def _logistic(op: Op, x: str) -> str:
    dtype = computed(_dtype(op))
    one = number(1.0, dtype)
    below = f"{one} + {_EXP(op, f'-{x}')}"
    return f"reciprocal({below})" if dtype == F32 else f"{one} / ({below})"


def _rough_logistic(op: Op, x: str) -> str:
    return f"divide_fast(1.0f, 1.0f + __expf(-{x}))"


def _not(op: Op, x: str) -> str:
    return f"!{x}" if _dtype(op).is_bool else _as(op, f"~{x}")


def _bits(word: str) -> Row:
    def row(op: Op, x: str, y: str) -> str:
        if _dtype(op).is_bool:
            return f"{x} {'!=' if word == '^' else word + word} {y}"
        return _as(op, f"{x} {word} {y}")

    return row


def _shift(word: str, logical: bool, past: str) -> Row:
    """A shift; `past`: the result where the amount is not a bit position."""

    def row(op: Op, x: str, y: str) -> str:
        dtype = _dtype(op)
        bits, kind = dtype.bits, c_type(dtype)
        shifted = DTYPES[f"{'u' if logical else 'i'}{bits}"]
        held = f"({c_type(shifted)}){x}"
        far = f"{held} >> {bits - 1}" if past == "sign" else "0"
        inside = f"(u{bits}){y} < {bits}"
        return f"({kind})({inside} ? {held} {word} ({y} & {bits - 1}) : {far})"

    return row


def _counted(single: str, double: str, leading: bool) -> Row:
    def row(op: Op, x: str) -> str:
        dtype = _dtype(op)
        if dtype.bits == 64:
            return f"({c_type(dtype)}){double}({x})"
        count = f"{single}((u{dtype.bits}){x})"
        if leading and dtype.bits < 32:
            count += f" - {32 - dtype.bits}"
        return f"({c_type(dtype)})({count})"

    return row


def _select(op: Op, which: str, *cases: str) -> str:
    if _dtype(op).is_bool:
        return f"{which} ? {cases[-1]} : {cases[0]}"
    result = cases[-1]
    for n in range(len(cases) - 2, -1, -1):  # below 0 counts as 0
        result = f"{which} <= {n} ? {cases[n]} : ({result})"
    return result


def _cast(op: Op, x: str) -> str:
    return cast(x, _dtype(op), op.attrs["dtype"])


def cast(x: str, old: DType, new: DType) -> str:
    """An element of type `old` (widened) as `new` (not narrowed yet)."""
    wide = computed(new)
    if new.is_bool:
        return f"{x} != {number(0, computed(old))}"
    if old.is_float and new.is_integer:
        return _to_integer(x, computed(old), new)
    if old.name in ("i8", "u8") and c_type(wide) == "float":
        return f"float_of({x})"
    return x if computed(old) == wide else f"({c_type(wide)}){x}"


def _to_integer(x: str, old: DType, new: DType) -> str:
    """Truncated and saturated; NaN gives 0."""
    source = "double" if old.bits == 64 else "float"
    whole = f"__{source}2int_rz({x})"
    if new.bits == 64:
        whole = f"__{source}2{'ull' if new.kind == 'uint' else 'll'}_rz({x})"
    elif new.name == "u32":
        whole = f"__{source}2uint_rz({x})"
    # PTX converts NaN to 0 only between types of at most 32 bits.
    if 64 in (old.bits, new.bits):
        whole = f"({x} == {x} ? {whole} : 0)"
    if new.bits >= 32:
        return whole
    low, high = new.limits
    return f"({c_type(new)})min(max({whole}, {low}), {high})"


def _bitcast(op: Op, x: str) -> str:
    return f"bits_as<{c_type(op.attrs['dtype'])}>({x})"


def _pow(op: Op, x: str, y: str) -> str:
    wide = computed(_dtype(op))
    exponent = cast(y, op.operands[1].tile.dtype, wide)
    return function("powf", "pow")(op, x, exponent)


_EXP = function("expf", "exp")

NATIVE: dict[str, Row] = {
    "add": infix("+"),
    "sub": infix("-"),
    "mul": infix("*"),
    "div": _div,
    "rem": _rem,
    "neg": _neg,
    "abs": _abs,
    "sign": lambda op, x: f"sign_of({x})",
    "max": choice("max"),
    "min": choice("min"),
    "clamp": _clamp,
    "floor": function("floorf", "floor"),
    "ceil": function("ceilf", "ceil"),
    "round": _round,
    "is_finite": _is_finite,
    "square": lambda op, x: infix("*")(op, x, x),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "sqrt": function("sqrtf", "sqrt"),
    "rsqrt": function("reciprocal_root", "rsqrt"),
    "cbrt": function("cbrtf", "cbrt"),
    "exp": _EXP,
    "exp2": function("exp2_fast", "exp2"),  # flushes results below 1e-38 to 0
    "expm1": function("expm1f", "expm1"),
    "log": function("logf", "log"),
    "log1p": function("log1pf", "log1p"),
    "log2": function("log2f", "log2"),
    "logistic": _logistic,
    "sin": function("sinf", "sin"),
    "cos": function("cosf", "cos"),
    "tan": function("tanf", "tan"),
    "asin": function("asinf", "asin"),
    "acos": function("acosf", "acos"),
    "atan": function("atanf", "atan"),
    "atan2": function("atan2f", "atan2"),
    "sinh": function("sinhf", "sinh"),
    "cosh": function("coshf", "cosh"),
    "tanh": function("tanhf", "tanh"),
    "asinh": function("asinhf", "asinh"),
    "acosh": function("acoshf", "acosh"),
    "atanh": function("atanhf", "atanh"),
    "erf": function("erff", "erf"),
    "erfc": function("erfcf", "erfc"),
    "erf_inv": function("erfinvf", "erfinv"),
    "lgamma": function("lgammaf", "lgamma"),
    "and": _bits("&"),
    "or": _bits("|"),
    "xor": _bits("^"),
    "not": _not,
    "shift_left": _shift("<<", logical=True, past="0"),
    "shift_right_logical": _shift(">>", logical=True, past="0"),
    "shift_right_arithmetic": _shift(">>", logical=False, past="sign"),
    "population_count": _counted("__popc", "__popcll", leading=False),
    "clz": _counted("__clz", "__clzll", leading=True),
    "eq": compare("=="),
    "ne": compare("!="),
    "lt": compare("<"),
    "le": compare("<="),
    "gt": compare(">"),
    "ge": compare(">="),
    "select_n": _select,
    "cast": _cast,
    "bitcast": _bitcast,
}

CALLED = frozenset(LINES) - {"logistic"}  # rows that are one function of CUDA's


def called(row: Row) -> Row:
    """A row by a function that is not inlined (`functions.py`)."""
    return lambda op, *xs: f"called_{row(op, *xs)}"


# Accurate enough for results that are rounded to 16 bits or fewer.
ROUGH: dict[str, Row] = {
    "div": _rough_div,
    "exp": function("__expf", "exp"),
    "logistic": _rough_logistic,
}

# These take and return the bits of an element as it is held.
OF_BITS = frozenset({"bitcast"})
