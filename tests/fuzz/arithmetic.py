"""Random elementwise ops: every row of the op table, in every type it takes.

Operands of functions with a domain are clamped into it. Ops that jump (comparisons,
rounding, remainders, conversions to integers) only get operands all engines agree on.
"""

from collections.abc import Callable, Sequence
from functools import cache

import ml_dtypes

from pallasite.ir import types as T
from pallasite.ir.build import python_scalar
from pallasite.ir.nodes import Value
from pallasite.ir.opdef import OpDef, table
from tests.fuzz.writer import BITS, EXACT, ROUGH, Writer
from tests.ops.sampling import ATTRS

WHOLE = (-100.0, 100.0)  # the domain of rows that take any number

# Rows whose float result is one of few numbers, or one of the operands.
MOVES = frozenset(
    ["neg", "abs", "max", "min", "clamp", "select_n", "sign", "floor", "ceil", "round"]
)
JUMPS = frozenset(
    [
        "rem",
        "sign",
        "floor",
        "ceil",
        "round",
        "is_finite",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "reduce_precision",
    ]
)


def elementwise(w: Writer) -> None:
    """Add one elementwise op."""
    row, dtypes = w.world.pick(rows_with(w.world.dtypes))
    _SPECIAL.get(row.name, _plain)(w, row, w.world.pick(dtypes))


@cache
def rows_with(dtypes: tuple[T.DType, ...]) -> list[tuple[OpDef, list[T.DType]]]:
    """The rows that take some of these types, with those types."""
    found = []
    for row in table().values():
        # JAX, and so the language, has no power of an integer base.
        only = T.FLOATS if row.name == "pow" else row.dtypes
        fits = [d for d in dtypes if d in only]
        if row.elementwise and fits:
            found.append((row, fits))
    return found


def _shape_of_a(w: Writer, dtype: T.DType) -> tuple[int, ...]:
    fits = [v for v in w.tiles[::-1] if v.tile.dtype == dtype]
    return w.world.pick(fits[:6]).tile.shape if fits else w.any_tile().tile.shape


def _operands(
    w: Writer, dtype: T.DType, shape: Sequence[int], count: int, level: int
) -> list[Value]:
    return [w.operand(dtype, shape, level) for _ in range(count)]


def _plain(w: Writer, row: OpDef, dtype: T.DType) -> None:
    shape = _shape_of_a(w, dtype)
    level = EXACT if row.name in JUMPS else ROUGH
    operands = _operands(w, dtype, shape, row.arity or 2, level)
    if dtype.is_float and row.domain not in (None, WHOLE):
        operands = [_into_domain(w, v, row.domain) for v in operands]
    if dtype.is_integer and row.name in ("div", "rem"):
        operands[1] = _divisor(w, operands[1])
    if row.name == "clz":
        operands[0] = _not_negative(w, operands[0])
    attrs = w.world.pick(ATTRS.get(row.name, [{}]))
    if row.name == "integer_pow" and not dtype.is_float:
        attrs = {"y": abs(attrs["y"])}
    moves = row.name in MOVES or row.name in JUMPS
    w.emit(row.name, *operands, most=EXACT if moves else ROUGH, **attrs)


def _divisor(w: Writer, y: Value) -> Value:
    """XLA in jax 0.10 crashes where it folds a division by a constant 0."""
    if y in w.world.unknown:
        return y
    return w.emit("or", y, w.number(1, y.tile.dtype, y.tile.shape))


def _not_negative(w: Writer, x: Value) -> Value:
    """XLA in jax 0.10 folds clz of a negative constant to a negative number."""
    dtype = x.tile.dtype
    if x in w.world.unknown or not dtype.is_signed_int:
        return x
    bits = w.number(2 ** (dtype.bits - 1) - 1, dtype, x.tile.shape)
    return w.emit("and", x, bits)


def _into_domain(w: Writer, value: Value, domain: tuple[float, float] | None) -> Value:
    assert domain is not None
    dtype = value.tile.dtype
    low, high = (w.number(_inside(x, dtype, domain), dtype) for x in domain)
    return w.emit("clamp", low, value, high, most=EXACT)


def _inside(bound: float, dtype: T.DType, domain: tuple[float, float]) -> float:
    """The bound as a number of `dtype` that does not round out of the domain."""
    limit = float(ml_dtypes.finfo(dtype.np).max)
    low, high = max(domain[0], -limit), min(domain[1], limit)
    bound = min(max(bound, low), high)
    rounded = python_scalar(bound, dtype)
    while not low <= rounded <= high:
        bound += (high - low) / 256 * (1 if bound == low or rounded < low else -1)
        rounded = python_scalar(bound, dtype)
    return float(rounded)


# --- rows with operands of several types ---


def _clamp(w: Writer, row: OpDef, dtype: T.DType) -> None:
    shape = _shape_of_a(w, dtype)
    bounds = shape if w.world.chance(50) else ()
    low, x, high = (w.operand(dtype, s) for s in (bounds, shape, bounds))
    w.emit("clamp", low, x, high, most=EXACT)


def _select(w: Writer, row: OpDef, dtype: T.DType) -> None:
    shape = _shape_of_a(w, dtype)
    which_shape = () if w.world.chance(25) else shape
    if w.world.chance(30):
        which, count = w.operand(T.I32, which_shape), w.world.integer(1, 4)
    else:
        which, count = w.bool_tile(which_shape), 2
    if which.tile.dtype == T.I32:  # the branch number is in range in a legal kernel
        low, high = w.number(0, T.I32), w.number(count - 1, T.I32)
        which = w.emit("clamp", low, which, high)
    cases = _operands(w, dtype, shape, count, ROUGH)
    w.emit("select_n", which, *cases, most=EXACT)


def _cast(w: Writer, row: OpDef, dtype: T.DType) -> None:
    target = w.world.dtype()
    level = EXACT if dtype.is_float and not target.is_float else ROUGH
    w.cast(w.operand(dtype, _shape_of_a(w, dtype), level), target)


def _pow(w: Writer, row: OpDef, dtype: T.DType) -> None:
    shape = _shape_of_a(w, dtype)
    base = _into_domain(w, w.operand(dtype, shape), row.domain)
    if w.world.chance(30):
        low, high = w.number(-3, T.I32), w.number(3, T.I32)
        exponent = w.emit("clamp", low, w.operand(T.I32, shape), high)
    else:
        exponent = _into_domain(w, w.operand(dtype, shape), (-3.0, 3.0))
    w.emit("pow", base, exponent, most=ROUGH)


def _bitcast(w: Writer, row: OpDef, dtype: T.DType) -> None:
    """Bits of floats only from values that have the same bits everywhere."""
    if dtype.is_bool:
        return
    value = w.operand(dtype, _shape_of_a(w, dtype), BITS)
    shape, bits = value.tile.shape, dtype.bits
    targets = [d for d in w.world.dtypes if not d.is_bool and d.bits >= 8]
    targets = [
        d for d in targets if d.bits <= bits or (shape and shape[-1] == d.bits // bits)
    ]
    target = w.world.pick(targets)
    if target == dtype:
        return
    result = w.emit("bitcast", value, dtype=target)
    if target.is_float:
        tame(w, result)


def tame(w: Writer, value: Value) -> Value:
    """`value` with 0 for NaN, infinities and what a machine may flush to zero."""
    dtype, shape = value.tile.dtype, value.tile.shape
    w.world.used.add(value)
    w.tiles.remove(value)
    w.own.remove(value)
    tiny = {"f32": 2.0**-120, "f64": 2.0**-1000, "f16": 2.0**-13}
    least = w.number(tiny.get(dtype.name, 2.0**-120), dtype, shape)
    size = w.b.abs(value)
    usual = w.b.and_(w.b.is_finite(value), w.b.ge(size, least))
    zero = w.number(0.0, dtype, shape)
    return w.add(w.b.select(usual, value, zero), BITS)


_SPECIAL: dict[str, Callable[[Writer, OpDef, T.DType], None]] = {
    "clamp": _clamp,
    "select_n": _select,
    "cast": _cast,
    "pow": _pow,
    "bitcast": _bitcast,
}
