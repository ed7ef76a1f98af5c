"""Decompositions of tile ops into slices, concatenations, selects and smaller ops.

Elements move only by constant distances: a reversal, or a move by a variable distance,
is a few rotations by powers of two, each applied or not. `tile.py` names these
functions as the `lower` of its rows; `decompose_sort.py` and `decompose_gather.py` have
the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import BOOL, F32, I32, DType
from pallasite.ops.formula import INF, NotApplicable, float_formula, where
from pallasite.ops.neutral import neutral

Combine = Callable[[Value, Value], Value]

# --- moving elements along one axis ---


def take_range(b: Builder, x: Value, axis: int, start: int, limit: int) -> Value:
    """Elements start to limit along one axis."""
    shape = x.tile.shape
    if (start, limit) == (0, shape[axis]):
        return x
    starts = [start if d == axis else 0 for d in range(len(shape))]
    limits = [limit if d == axis else n for d, n in enumerate(shape)]
    ones = (1,) * len(shape)
    return b.op("slice", x, starts=tuple(starts), limits=tuple(limits), strides=ones)


def join(b: Builder, parts: Sequence[Value], axis: int) -> Value:
    parts = [p for p in parts if p.tile.shape[axis]]
    return parts[0] if len(parts) == 1 else b.op("concatenate", *parts, axis=axis)


def rotate(b: Builder, x: Value, axis: int, distance: int) -> Value:
    """Element i becomes element i + distance, wrapping around."""
    n = x.tile.shape[axis]
    cut = (n - distance) % n
    if not cut:
        return x
    head, tail = take_range(b, x, axis, 0, cut), take_range(b, x, axis, cut, n)
    return join(b, [tail, head], axis)


def filled(b: Builder, x: Value, axis: int, size: int, value: Any) -> Value:
    """A constant tile like `x` with another size along one axis."""
    shape = list(x.tile.shape)
    shape[axis] = size
    return b.constant(value, x.tile.with_shape(shape))


def lengthened(b: Builder, x: Value, axis: int, size: int) -> Value:
    """`x` with zeros after it; no chip has a constant without elements."""
    more = size - x.tile.shape[axis]
    return join(b, [x, filled(b, x, axis, more, 0)], axis) if more else x


def positions(b: Builder, x: Value, axis: int) -> Value:
    return b.op("iota", type=x.tile.with_dtype(I32), dim=axis)


def exchange(b: Builder, x: Value, *, axis: int, distance: int) -> Value:
    n = x.tile.shape[axis]
    if n == 2 * distance:
        return rotate(b, x, axis, distance)
    place = positions(b, x, axis)
    lower = b.eq(b.and_(place, b.like(distance, place)), b.like(0, place))
    down = rotate(b, x, axis, n - distance)
    return b.select(lower, down, rotate(b, x, axis, distance))


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def rev(b: Builder, x: Value, *, axes: Sequence[int]) -> Value:
    for axis in axes:
        x = _reverse(b, x, axis)
    return x


def _reverse(b: Builder, x: Value, axis: int) -> Value:
    """Few elements one by one; more by exchanging over each bit of the position."""
    n = x.tile.shape[axis]
    if n < 2:
        return x
    if n <= 8:
        return join(b, [take_range(b, x, axis, i, i + 1) for i in range(n)[::-1]], axis)
    size = next_power_of_two(n)
    x = lengthened(b, x, axis, size)
    distance = 1
    while distance < size:
        x = b.op("exchange", x, axis=axis, distance=distance)
        distance *= 2
    return take_range(b, x, axis, size - n, size)


def pad(
    b: Builder,
    x: Value,
    value: Value,
    *,
    low: Sequence[int],
    high: Sequence[int],
    interior: Sequence[int],
) -> Value:
    for axis, edges in enumerate(zip(low, high, interior, strict=True)):
        x = _pad_axis(b, x, value, axis, *edges)
    return x


def _pad_axis(
    b: Builder, x: Value, value: Value, axis: int, low: int, high: int, interior: int
) -> Value:
    def space(size: int) -> Value:
        shape = list(x.tile.shape)
        shape[axis] = size
        return b.broadcast(value, shape, ())

    if interior and x.tile.shape[axis] > 1:
        x = _spread(b, x, value, axis, interior)
    n = x.tile.shape[axis]
    first, last = min(max(-low, 0), n), max(n - max(-high, 0), 0)
    if last <= first or low + n < 0 or high + n < 0:  # nothing of x remains
        return space(max(0, low + n + high))
    kept = take_range(b, x, axis, first, last)
    before = [space(low)] if low > 0 else []
    after = [space(high)] if high > 0 else []
    return join(b, [*before, kept, *after], axis)


def _spread(b: Builder, x: Value, value: Value, axis: int, interior: int) -> Value:
    """`interior` elements after each but the last, through a new dimension."""
    shape, n = list(x.tile.shape), x.tile.shape[axis]
    single = b.op("reshape", x, shape=(*shape[: axis + 1], 1, *shape[axis + 1 :]))
    gap = b.broadcast(value, (*shape[: axis + 1], interior, *shape[axis + 1 :]), ())
    shape[axis] = n * (interior + 1)
    both = b.op("concatenate", single, gap, axis=axis + 1)
    flat = b.op("reshape", both, shape=tuple(shape))
    return take_range(b, flat, axis, 0, shape[axis] - interior)


# --- variable starts ---


def dynamic_slice(b: Builder, x: Value, *starts: Value, sizes: Sequence[int]) -> Value:
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        last = x.tile.shape[axis] - size
        if last:
            x = _rotate_by(b, x, axis, _clamped(b, start, last), last, left=True)
            x = take_range(b, x, axis, 0, size)
    return x


def dynamic_update_slice(b: Builder, x: Value, update: Value, *starts: Value) -> Value:
    inside: Value | None = None
    for axis, start in enumerate(starts):
        n, size = x.tile.shape[axis], update.tile.shape[axis]
        last = n - size
        if not last:
            continue
        start = _clamped(b, start, last)
        update = lengthened(b, update, axis, n)
        update = _rotate_by(b, update, axis, start, last, left=False)
        place = positions(b, x, axis)
        offset = b.sub(place, b.broadcast(start, x.tile.shape))
        # One unsigned comparison would do; few targets have it for vectors.
        here = b.and_(
            b.ge(offset, b.like(0, offset)), b.lt(offset, b.like(size, offset))
        )
        inside = here if inside is None else b.and_(inside, here)
    return update if inside is None else b.select(inside, update, x)


def _clamped(b: Builder, start: Value, last: int) -> Value:
    start = b.min(b.max(start, b.like(0, start)), b.like(last, start))
    return b.cast(start, I32)


def _rotate_by(
    b: Builder, x: Value, axis: int, distance: Value, most: int, left: bool
) -> Value:
    """A rotation for each bit of the distance, applied where the bit is set."""
    n = x.tile.shape[axis]
    for bit in range(most.bit_length()):
        step = 1 << bit
        moved = rotate(b, x, axis, n - step if left else step)
        is_set = b.ne(b.and_(distance, b.like(step, distance)), b.like(0, distance))
        x = b.select(is_set, moved, x)
    return x


# --- reductions and scans ---


def combining(b: Builder, kind: str) -> Combine:
    """How two partial results are combined."""
    if kind == "logsumexp":
        return lambda x, y: _log_add_exp(b, x, y)
    name = {"sum": "add", "prod": "mul"}.get(kind, kind)
    return lambda x, y: b.op(name, x, y)


@float_formula
def _log_add_exp(x: Any, y: Any) -> Any:
    larger = x.max(y)
    result = larger + (-abs(x - y)).op("exp").op("log1p")
    return where(abs(larger) < INF, result, larger)


def _accumulating(dtype: DType) -> DType:
    """Narrow floats are summed in f32 and rounded once."""
    return F32 if dtype.is_float and dtype.bits < 32 else dtype


def reduce(b: Builder, x: Value, *, kind: str, axes: Sequence[int]) -> Value:
    """Booleans by max and min; else combine halves until one element is left."""
    own = x.tile.dtype
    if own == BOOL and kind in ("and", "or", "max", "min"):
        numbers = b.cast(x, I32)
        larger = kind in ("or", "max")
        result = b.op(
            "reduce", numbers, kind="max" if larger else "min", axes=tuple(axes)
        )
        return b.gt(result, b.like(0, result))
    x = b.cast(x, _accumulating(own))
    for axis in axes:
        x = _halved(b, x, axis, combining(b, kind), neutral(kind, x.tile.dtype))
    shape = [n for d, n in enumerate(x.tile.shape) if d not in axes]
    return b.cast(b.op("reshape", x, shape=tuple(shape)), own)


def _halved(b: Builder, x: Value, axis: int, combine: Combine, start: Any) -> Value:
    n = x.tile.shape[axis]
    if not n:
        return filled(b, x, axis, 1, start)
    while n > 1:
        half = (n + 1) // 2
        low = take_range(b, x, axis, 0, n - half)
        both = combine(low, take_range(b, x, axis, half, n))
        x = join(b, [both, take_range(b, x, axis, n - half, half)], axis)
        n = half
    return x


def scan(b: Builder, x: Value, *, kind: str, axis: int, reverse: bool) -> Value:
    """Each step combines elements 1, 2, 4, ... apart."""
    own = x.tile.dtype
    x = b.cast(x, _accumulating(own))
    combine, start = combining(b, kind), neutral(kind, x.tile.dtype)
    n, distance = x.tile.shape[axis], 1
    while distance < n:
        space = filled(b, x, axis, distance, start)
        if reverse:
            moved = join(b, [take_range(b, x, axis, distance, n), space], axis)
        else:
            moved = join(b, [space, take_range(b, x, axis, 0, n - distance)], axis)
        x = combine(moved, x)
        distance *= 2
    return b.cast(x, own)


def arg_reduce(b: Builder, x: Value, *, kind: str, axis: int, dtype: DType) -> Value:
    """The smallest position whose element is the extremum, or NaN."""
    if x.tile.dtype.is_bool:
        x = b.cast(x, I32)
    shape = x.tile.shape
    if not shape[axis]:
        raise NotApplicable("the argmax or argmin of an empty tile")
    best = b.op("reduce", x, kind=kind, axes=(axis,))
    others = tuple(d for d in range(len(shape)) if d != axis)
    hit = b.eq(x, b.broadcast(best, shape, others))
    if x.tile.dtype.is_float:  # if there is a NaN, `best` equals nothing
        hit = b.or_(hit, b.ne(x, x))
    place = positions(b, x, axis)
    candidates = b.select(hit, place, b.like(shape[axis], place))
    return b.cast(b.op("reduce", candidates, kind="min", axes=(axis,)), dtype)
