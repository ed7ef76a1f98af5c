"""Elementwise ops: one row each, from IR op to Triton op.

`NATIVE` lists what this backend has; a row is a function of the emitter and the op that
returns the result. Most are made by `arith` (one Triton op per kind of number) or
`function` (of NVIDIA's libdevice or AMD's OCML). Narrow floats compute in f32 where
Triton or the promised accuracy requires it, and round once at the end.
"""

from collections.abc import Callable

from pallasite.backends.triton.called_functions import Kind, kind_of
from pallasite.backends.triton.core import FLOAT_BITS, Core
from pallasite.backends.triton.text import Val, Writer, type_text
from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import DType

Row = Callable[["Elementwise", Op], Val]


class Elementwise(Core):
    """Looks rows up, and holds what several rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.called: frozenset[Kind] = frozenset()
        self.functions: dict[Kind, list[str]] = {}

    def emit_elementwise(self, op: Op) -> None:
        self.layout(op.result.tile, op)
        kind = kind_of(op, self.is_rough(op)) if self.called else None
        if kind is not None and kind in self.called:
            self.env[op.result] = self.call(op, kind)
        else:
            self.env[op.result] = NATIVE[op.name](self, op)

    def call(self, op: Op, kind: Kind) -> Val:
        """By a function of the module (`called_functions.py`)."""
        if kind not in self.functions:
            self.functions[kind] = self.function(op, f"{op.name}_{len(self.functions)}")
        name = self.functions[kind][0]
        operands = self.operands(op)
        names, types = (
            ", ".join(map(str, operands)),
            ", ".join(v.type for v in operands),
        )
        shape, elem = self.layout(op.result.tile, op)
        to = type_text(shape, elem)
        return self.let(f"tt.call @{name}({names}) : ({types}) -> {to}", shape, elem)

    def function(self, op: Op, name: str) -> list[str]:
        """The name of the function that computes an op, then its lines."""
        out, values = self.out, [self.env[v] for v in op.operands]
        self.out = Writer()
        self.out.depth = 2
        params = [Val(f"%x{n}", v.shape, v.elem) for n, v in enumerate(values)]
        self.env.update(zip(op.operands, params, strict=True))
        result = NATIVE[op.name](self, op)
        self.out.line(f"tt.return {result} : {result.type}")
        lines, self.out = self.out.lines, out
        self.env.update(zip(op.operands, values, strict=True))
        head = ", ".join(f"{v}: {v.type}" for v in params)
        head = f"  tt.func private @{name}({head}) -> {result.type}"
        return [name, f"{head} attributes {{noinline = true}} {{", *lines, "  }"]

    def operands(self, op: Op) -> list[Val]:
        return [self.env[v] for v in op.operands]

    def known_number(self, value: Value) -> int | float | bool | None:
        """The number that fills a tile, if its producer shows it."""
        op = self.producers.get(value)
        while op is not None and op.name in ("broadcast_in_dim", "reshape"):
            op = self.producers.get(op.operands[0])
        return op.attrs["value"] if op is not None and op.name == "constant" else None

    def is_rough(self, op: Op) -> bool:
        """Whether the result is rounded to 16 bits or fewer, here or further on."""
        return _dtype(op).bits <= 16 or op.result in self.rounded_away

    def widened(self, op: Op, compute: Callable[..., Val], always: bool = True) -> Val:
        """Apply `compute` in f32 for narrower floats (`always` False: for f8 only)."""
        operands = self.operands(op)
        narrow = operands[0].elem
        bits = FLOAT_BITS[narrow]
        if bits >= 32 or (bits == 16 and not always):
            return compute(*operands)
        result = compute(*(self.to_float(v, "f32") for v in operands))
        return self.to_float(result, narrow) if result.elem == "f32" else result


def _dtype(op: Op) -> DType:
    return op.operands[0].tile.dtype


def arith(
    f: str | None = None,
    i: str | None = None,
    u: str | None = None,
    b: str | None = None,
    wide: bool = False,
) -> Row:
    """The Triton op for floats, ints, uints (by default as ints) and bools.

    `wide`: 16-bit floats compute in f32 too.
    """
    names = {"float": f, "int": i, "uint": u or i, "bool": b}

    def row(e: Elementwise, op: Op) -> Val:
        name = names[_dtype(op).kind]
        if name is None:
            e.refuse(op)
        if _dtype(op).is_float:
            return e.widened(op, lambda *v: e.apply(name, *v), always=wide)
        return e.apply(name, *e.operands(op))

    return row


def function(name: str, narrow: str | None = None) -> Row:
    """A function of the chip's library; `narrow`: an op accurate enough for 16-bit
    results."""

    def row(e: Elementwise, op: Op) -> Val:
        def compute(*operands: Val) -> Val:
            if narrow and operands[0].elem != "f64" and e.is_rough(op):
                return e.apply(narrow, *operands)
            return e.library(name, *operands)

        return e.widened(op, compute)

    return row


def compare(f: str, i: str, u: str) -> Row:
    kinds = {"float": f, "int": i, "uint": u, "bool": u}

    def row(e: Elementwise, op: Op) -> Val:
        kind = kinds[_dtype(op).kind]
        if _dtype(op).is_float:
            return e.widened(op, lambda x, y: e.compare(kind, x, y), always=False)
        return e.compare(kind, *e.operands(op))

    return row


def bits(name: str) -> Row:
    return arith(i=name, b=name)


def _float(compute: Callable[..., Val], always: bool = True) -> Row:
    """A row for floats only, given as code over emitted values."""
    return lambda e, op: e.widened(op, lambda *v: compute(e, *v), always)


# --- arithmetic ---


def _div(e: Elementwise, op: Op) -> Val:
    dtype = _dtype(op)
    if dtype.is_float:
        # Triton's f32 division is approximate; rounding to a narrow type hides that.
        exact = dtype.name == "f32" and not e.is_rough(op)
        name = "tt.precise_divf" if exact else "arith.divf"
        return e.widened(op, lambda x, y: e.apply(name, x, y))
    x, y = e.operands(op)
    name = "arith.divsi" if dtype.is_signed_int else "arith.divui"
    if _is_plain_divisor(e, op):
        return e.apply(name, x, y)
    zero, safe, minus_one = _safe_divisor(e, dtype, y)
    result = e.apply(name, x, safe)
    if minus_one is not None:  # MIN / -1 does not fit: -MIN wraps to MIN
        result = e.select(minus_one, e.apply("arith.subi", e.like(0, x), x), result)
    return e.select(zero, e.like(-1, x), result)


def _rem(e: Elementwise, op: Op) -> Val:
    dtype = _dtype(op)
    if dtype.is_float:
        return function("fmod")(e, op)
    x, y = e.operands(op)
    name = "arith.remsi" if dtype.is_signed_int else "arith.remui"
    if _is_plain_divisor(e, op):
        return e.apply(name, x, y)
    zero, safe, minus_one = _safe_divisor(e, dtype, y)
    result = e.apply(name, x, safe)
    if minus_one is not None:
        result = e.select(minus_one, e.like(0, x), result)
    return e.select(zero, x, result)


def _is_plain_divisor(e: Elementwise, op: Op) -> bool:
    divisor = e.known_number(op.operands[1])
    return divisor is not None and divisor not in (0, -1)


def _safe_divisor(e: Elementwise, dtype: DType, y: Val) -> tuple[Val, Val, Val | None]:
    """Where `y` is 0, `y` without 0 and -1, where `y` is -1 (both would trap)."""
    zero = e.compare("eq", y, e.like(0, y))
    safe = e.select(zero, e.like(1, y), y)
    if not dtype.is_signed_int:
        return zero, safe, None
    minus_one = e.compare("eq", y, e.like(-1, y))
    return zero, e.select(minus_one, e.like(1, y), safe), minus_one


# On Hopper, ptxas up to CUDA 13.0 turns max(max(x, -x), y) into max(x, y): it loses the
# negation of the second operand when it fuses two 32-bit ones into one VIMNMX3, and
# LLVM writes abs like this. It does not recognise these two as negations.
ABSOLUTE = "abs.s32 $0, $1;"
NEGATED = "not.b32 $0, $1; add.s32 $0, $0, 1;"


def _neg(e: Elementwise, op: Op) -> Val:
    if _dtype(op).is_float:
        return arith(f="arith.negf")(e, op)
    (x,) = e.operands(op)
    if x.shape and x.elem == "i32" and not e.amd:
        return e.assembly(NEGATED, x)
    return e.apply("arith.subi", e.like(0, x), x)


def _abs(e: Elementwise, op: Op) -> Val:
    if _dtype(op).is_float:
        return arith(f="math.absf")(e, op)
    (x,) = e.operands(op)
    if x.shape and x.elem == "i32" and not e.amd:
        return e.assembly(ABSOLUTE, x)
    return arith(i="math.absi")(e, op)


def _sign(e: Elementwise, op: Op) -> Val:
    dtype = _dtype(op)
    less, more = ("olt", "ogt") if dtype.is_float else ("slt", "sgt")

    def compute(x: Val) -> Val:
        zero = e.like(0, x)
        if dtype.kind == "uint":
            return e.select(e.compare("ne", x, zero), e.like(1, x), zero)
        # Zeros and NaN are unchanged.
        result = e.select(e.compare(less, x, zero), e.like(-1, x), x)
        return e.select(e.compare(more, x, zero), e.like(1, x), result)

    if dtype.is_float:
        return e.widened(op, compute, always=False)
    return compute(*e.operands(op))


_MAX = arith(
    f="arith.maximumf",
    i="arith.maxsi",
    u="arith.maxui",
    b="arith.ori",
    wide=True,
)
_MIN = arith(
    f="arith.minimumf",
    i="arith.minsi",
    u="arith.minui",
    b="arith.andi",
    wide=True,
)


def _clamp(e: Elementwise, op: Op) -> Val:
    low, x, high = e.operands(op)
    dtype = op.operands[1].tile.dtype
    low, high = e.spread(low, x.shape), e.spread(high, x.shape)
    wide = "f32" if dtype.is_float and dtype.bits < 32 else x.elem
    if wide != x.elem:
        low, high = e.to_float(low, wide), e.to_float(high, wide)
    value = e.to_float(x, wide) if dtype.is_float else x
    bigger, smaller = {
        "float": ("arith.maximumf", "arith.minimumf"),
        "int": ("arith.maxsi", "arith.minsi"),
    }.get(dtype.kind, ("arith.maxui", "arith.minui"))
    result = e.apply(smaller, e.apply(bigger, value, low), high)
    return e.to_float(result, x.elem) if dtype.is_float else result


def _square(e: Elementwise, op: Op) -> Val:
    if _dtype(op).is_float:
        return e.widened(op, lambda x: e.apply("arith.mulf", x, x), always=False)
    (x,) = e.operands(op)
    return e.apply("arith.muli", x, x)


def _integer_pow(e: Elementwise, op: Op) -> Val:
    """Repeated multiplication; a negative power is one division at the end."""
    power, dtype = op.attrs["y"], _dtype(op)
    if power < 0 and not dtype.is_float:
        e.refuse(op, "a negative power of an integer")
    multiply = "arith.mulf" if dtype.is_float else "arith.muli"

    def compute(x: Val) -> Val:
        result, base, n = None, x, abs(power)
        while n:
            if n & 1:
                result = base if result is None else e.apply(multiply, result, base)
            n >>= 1
            if n:
                base = e.apply(multiply, base, base)
        result = e.like(1, x) if result is None else result
        if power < 0:
            exact = x.elem == "f32" and not e.is_rough(op)
            divide = "tt.precise_divf" if exact else "arith.divf"
            result = e.apply(divide, e.like(1, x), result)
        return result

    return e.widened(op, compute) if dtype.is_float else compute(*e.operands(op))


def _round(e: Elementwise, op: Op) -> Val:
    if op.attrs["rounding_method"] == 1:
        return function("rint")(e, op)
    return function("round")(e, op)


def _is_finite(e: Elementwise, x: Val) -> Val:
    size = e.apply("math.absf", x)
    return e.compare("olt", size, e.like(float("inf"), x))


# --- functions ---


def _sqrt(e: Elementwise, x: Val) -> Val:
    return e.apply("tt.precise_sqrt" if x.elem == "f32" else "math.sqrt", x)


def _rsqrt(e: Elementwise, x: Val) -> Val:
    return e.library("rsqrt", x) if x.elem == "f64" else e.apply("math.rsqrt", x)


def _logistic(e: Elementwise, op: Op) -> Val:
    rough = e.is_rough(op)

    def compute(x: Val) -> Val:
        one, minus = e.like(1.0, x), e.apply("arith.negf", x)
        power = e.apply("math.exp", minus) if rough else e.library("exp", minus)
        bottom = e.apply("arith.addf", one, power)
        exact = x.elem == "f32" and not rough
        return e.apply("tt.precise_divf" if exact else "arith.divf", one, bottom)

    return e.widened(op, compute)


def _pow(e: Elementwise, op: Op) -> Val:
    x, y = e.operands(op)
    if not _dtype(op).is_float:
        e.refuse(op, "an integer to an integer power", "use x ** constant")
    wide = "f64" if x.elem == "f64" else "f32"
    kind = op.operands[1].tile.dtype
    if kind.is_float:
        y = e.to_float(y, wide)
    else:
        name = "arith.sitofp" if kind.is_signed_int else "arith.uitofp"
        y = e.convert(name, y, wide)
    return e.to_float(e.library("pow", e.to_float(x, wide), y), x.elem)


# --- bits ---


def _not(e: Elementwise, op: Op) -> Val:
    (x,) = e.operands(op)
    return e.apply("arith.xori", x, e.like(True if x.elem == "i1" else -1, x))


def _shift(name: str, past: Callable[[Elementwise, Val], Val]) -> Row:
    """A shift; `past` gives the result where the amount is not a bit position."""

    def row(e: Elementwise, op: Op) -> Val:
        x, amount = e.operands(op)
        width = _dtype(op).bits
        known = e.known_number(op.operands[1])
        if known is not None and 0 <= known < width:
            return e.apply(name, x, amount)
        inside = e.compare("ult", amount, e.like(width, amount))
        safe = e.select(inside, amount, e.like(0, amount))
        return e.select(inside, e.apply(name, x, safe), past(e, x))

    return row


def _sign_bits(e: Elementwise, x: Val) -> Val:
    return e.apply("arith.shrsi", x, e.like(int(x.elem[1:]) - 1, x))


def _counted(name: str, amd: str, leading: bool) -> Row:
    """Bit counting: libdevice takes 32 or 64 bits and returns an i32, as does AMD's
    OCKL, except for leading zeros of 64 bits."""

    def row(e: Elementwise, op: Op) -> Val:
        (x,) = e.operands(op)
        width = _dtype(op).bits
        if width == 64:
            symbol = f"__ockl_{amd}_u64" if e.amd else f"__nv_{name}ll"
            count = e.extern(symbol, x, elem="i64" if e.amd and leading else "i32")
            return e.convert("arith.extui", count, "i64")
        symbol = f"__ockl_{amd}_u32" if e.amd else f"__nv_{name}"
        count = e.extern(symbol, e.convert("arith.extui", x, "i32"))
        if leading and width < 32:
            count = e.apply("arith.subi", count, e.like(32 - width, count))
        return e.convert("arith.trunci", count, x.elem)

    return row


# --- selection and conversion ---


def _select_n(e: Elementwise, op: Op) -> Val:
    which, *cases = e.operands(op)
    if op.operands[0].tile.dtype.is_bool:
        return e.select(which, cases[-1], cases[0])
    result = cases[-1]
    for n in range(len(cases) - 2, -1, -1):  # below 0 counts as 0
        result = e.select(e.compare("sle", which, e.like(n, which)), cases[n], result)
    return result


def _cast(e: Elementwise, op: Op) -> Val:
    old, new = _dtype(op), op.attrs["dtype"]
    return cast_value(e, op, e.env[op.operands[0]], old, new)


def cast_value(e: Elementwise, op: Op, x: Val, old: DType, new: DType) -> Val:
    """`x` of type `old` as `new`, the way XLA converts."""
    elem = e.elem(new, op)
    e.elem(old, op)
    if old == new:
        return x
    if new.is_bool:
        return e.compare("une" if old.is_float else "ne", x, e.like(0, x))
    if old.is_float:
        return e.to_float(x, elem) if new.is_float else _float_to_int(e, x, new)
    if new.is_float:
        name = "arith.sitofp" if old.is_signed_int else "arith.uitofp"
        if elem in ("f16", "f32", "f64"):
            return e.convert(name, x, elem)
        return e.to_float(e.convert(name, x, "f32"), elem)
    old_bits = 1 if old.is_bool else old.bits
    if new.bits == 4 and old_bits >= 4:
        return e.four_bits(e.convert("arith.trunci", x, elem), new)
    if x.elem == elem:
        return x
    if old_bits > new.bits:
        return e.convert("arith.trunci", x, elem)
    return e.convert("arith.extsi" if old.is_signed_int else "arith.extui", x, elem)


def _float_to_int(e: Elementwise, x: Val, new: DType) -> Val:
    """Truncate and saturate; NaN gives 0."""
    if FLOAT_BITS[x.elem] < 32:
        x = e.to_float(x, "f32")
    signed = new.is_signed_int
    low = -(1 << (new.bits - 1)) if signed else 0
    past = 1 << (new.bits - 1 if signed else new.bits)  # first number too large
    # low - 1 may round to low itself, which is then handled like smaller ones.
    too_small = e.compare("ole", x, e.like(float(low) - 1.0, x))
    too_large = e.compare("oge", x, e.like(float(past), x))
    outside = e.apply("arith.ori", too_small, too_large)
    outside = e.apply("arith.ori", outside, e.compare("uno", x, x))
    safe = e.select(outside, e.like(0.0, x), x)
    name = "arith.fptosi" if signed else "arith.fptoui"
    result = e.convert(name, safe, f"i{max(new.bits, 8)}")
    result = e.select(too_small, e.like(low, result), result)
    return e.select(too_large, e.like(past - 1, result), result)


def _bitcast(e: Elementwise, op: Op) -> Val:
    (x,) = e.operands(op)
    new: DType = op.attrs["dtype"]
    elem = e.elem(new, op)
    if "i1" in (x.elem, elem):
        e.refuse(op, "a bool has one bit in registers", "convert it with astype")
    if x.elem == elem:
        return x
    to = Val("", x.shape, elem).type
    return e.let(f"tt.bitcast {x} : {x.type} -> {to}", x.shape, elem)


NATIVE: dict[str, Row] = {
    "add": arith(f="arith.addf", i="arith.addi"),
    "sub": arith(f="arith.subf", i="arith.subi"),
    "mul": arith(f="arith.mulf", i="arith.muli"),
    "div": _div,
    "rem": _rem,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "max": _MAX,
    "min": _MIN,
    "clamp": _clamp,
    "floor": arith(f="math.floor", wide=True),
    "ceil": arith(f="math.ceil", wide=True),
    "round": _round,
    "is_finite": _float(_is_finite, always=False),
    "square": _square,
    "integer_pow": _integer_pow,
    "pow": _pow,
    "sqrt": _float(_sqrt),
    "rsqrt": _float(_rsqrt),
    "cbrt": function("cbrt"),
    # Triton's own exp is an approximation of 2**x: accurate enough only for 16 bits.
    "exp": function("exp", narrow="math.exp"),
    "exp2": function("exp2", narrow="math.exp2"),
    "expm1": function("expm1"),
    "log": function("log"),
    "log1p": function("log1p"),
    "log2": function("log2"),
    "logistic": _logistic,
    "sin": function("sin"),
    "cos": function("cos"),
    "tan": function("tan"),
    "asin": function("asin"),
    "acos": function("acos"),
    "atan": function("atan"),
    "atan2": function("atan2"),
    "sinh": function("sinh"),
    "cosh": function("cosh"),
    "tanh": function("tanh"),
    "asinh": function("asinh"),
    "acosh": function("acosh"),
    "atanh": function("atanh"),
    "erf": function("erf"),
    "erfc": function("erfc"),
    "erf_inv": function("erfinv"),
    "lgamma": function("lgamma"),
    "and": bits("arith.andi"),
    "or": bits("arith.ori"),
    "xor": bits("arith.xori"),
    "not": _not,
    "shift_left": _shift("arith.shli", lambda e, x: e.like(0, x)),
    "shift_right_logical": _shift("arith.shrui", lambda e, x: e.like(0, x)),
    "shift_right_arithmetic": _shift("arith.shrsi", _sign_bits),
    "population_count": _counted("popc", "popcount", leading=False),
    "clz": _counted("clz", "clz", leading=True),
    "eq": compare("oeq", "eq", "eq"),
    "ne": compare("une", "ne", "ne"),
    "lt": compare("olt", "slt", "ult"),
    "le": compare("ole", "sle", "ule"),
    "gt": compare("ogt", "sgt", "ugt"),
    "ge": compare("oge", "sge", "uge"),
    "select_n": _select_n,
    "cast": _cast,
    "bitcast": _bitcast,
}
