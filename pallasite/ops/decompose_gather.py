"""Gathers and scatters of values: one slice, or single elements along one axis.

One slice at a dynamic place is a `dynamic_slice` or a `dynamic_update_slice`. Elements
along an axis, with whole rows of the other dimensions (`x[indices]`, take_along_axis
and their derivatives), are found by comparing: every candidate with every index, so
this suits short axes and few updates. Others are rejected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import BOOL, I32, TileType, scalar
from pallasite.ops.decompose_tile import positions, take_range
from pallasite.ops.formula import NotApplicable
from pallasite.ops.neutral import neutral

MOST_CANDIDATES = 256
MOST_UPDATES = 256
MOST_COMPARED = 1 << 15  # elements of one tile: all updates beside all places
REDUCTIONS = {"add": "sum", "mul": "prod"}

DimensionNumbers = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Slices:
    """Which slices of `x` a gather reads, or a scatter updates.

    `tile` is what it returns, or the updates: `offset_dims` are the dimensions of a
    slice in it, the others those of the indices.
    """

    x: TileType
    tile: TileType
    sizes: tuple[int, ...]
    offset_dims: tuple[int, ...]
    collapsed: tuple[int, ...]
    index_map: tuple[int, ...]
    operand_batch: tuple[int, ...]
    index_batch: tuple[int, ...]

    @property
    def window(self) -> list[int]:
        dropped = (*self.collapsed, *self.operand_batch)
        return [d for d in range(self.x.rank) if d not in dropped]

    @property
    def batch_dims(self) -> list[int]:
        return [d for d in range(self.tile.rank) if d not in self.offset_dims]

    def axis(self) -> int:
        """The one axis along which single elements are indexed."""
        if len(self.index_map) != 1 or self.sizes[self.index_map[0]] != 1:
            raise NotApplicable("supports only one axis, indexed by element")
        (axis,) = self.index_map
        for d, (n, size) in enumerate(zip(self.x.shape, self.sizes, strict=True)):
            if size != (1 if d == axis or d in self.operand_batch else n):
                raise NotApplicable("supports only whole rows")
        if not self.x.size:
            raise NotApplicable("supports no empty operands")
        return axis

    def dims_in_tile(self, axis: int) -> dict[int, int]:
        """Where each dimension of x but the indexed one is in `tile`."""
        batch = self.batch_dims
        pairs = zip(self.operand_batch, self.index_batch, strict=True)
        found = {d: batch[k] for d, k in pairs}
        found |= dict(zip(self.window, self.offset_dims, strict=True))
        return {d: place for d, place in found.items() if d != axis}


def read_slices(
    x: TileType, result: TileType, numbers: DimensionNumbers, sizes: Sequence[int]
) -> Slices:
    """What a gather with these attributes reads."""
    return Slices(x, result, tuple(sizes), *map(tuple, numbers))


def updated_slices(x: TileType, updates: TileType, numbers: DimensionNumbers) -> Slices:
    """What a scatter with these attributes updates."""
    window_dims, inserted, _, batch, _ = numbers
    dims = [d for d in range(x.rank) if d not in (*inserted, *batch)]
    sizes = [1] * x.rank
    for d, place in zip(dims, window_dims, strict=True):
        sizes[d] = updates.shape[place]
    return Slices(x, updates, tuple(sizes), *map(tuple, numbers))


def gather(
    b: Builder,
    x: Value,
    indices: Value,
    *,
    dimension_numbers: DimensionNumbers,
    slice_sizes: Sequence[int],
    mode: str,
    fill_value: Any,
    type: TileType,
) -> Value:
    slices = read_slices(x.tile, type, dimension_numbers, slice_sizes)
    fill = b.constant(fill_value, type) if mode == "fill" else None
    if _is_one(slices, indices):
        starts = _starts(b, slices, indices)
        found = b.op("dynamic_slice", x, *starts, sizes=slices.sizes)
        result = b.op("reshape", found, shape=type.shape)
        if fill is None:
            return result
        valid = b.broadcast(_is_inside(b, slices, starts), type.shape)
        return b.select(valid, result, fill)
    axis = slices.axis()
    n = x.tile.shape[axis]
    if n > MOST_CANDIDATES:
        raise NotApplicable(
            f"supports at most {MOST_CANDIDATES} elements along the axis"
        )
    target = slices.dims_in_tile(axis)
    order = sorted(target, key=lambda d: target[d])
    rows = b.op("transpose", x, perm=(axis, *order))
    index = index_numbers(b, b.op("reshape", indices, shape=indices.tile.shape[:-1]), n)
    clamped = b.min(b.max(index, b.like(0, index)), b.like(n - 1, index))
    dims = [target[d] for d in order]
    place = b.broadcast(clamped, type.shape, slices.batch_dims)
    result = b.broadcast(_row(b, rows, 0), type.shape, dims)
    for k in range(1, n):
        hit = b.eq(place, b.like(k, place))
        row = b.broadcast(_row(b, rows, k), type.shape, dims)
        result = b.select(hit, row, result)
    if fill is None:
        return result
    valid = b.broadcast(b.eq(index, clamped), type.shape, slices.batch_dims)
    return b.select(valid, result, fill)


def scatter(
    b: Builder,
    x: Value,
    indices: Value,
    updates: Value,
    *,
    dimension_numbers: DimensionNumbers,
    kind: str,
    mode: str,
    type: TileType,
) -> Value:
    slices = updated_slices(x.tile, updates.tile, dimension_numbers)
    if _is_one(slices, indices):
        starts = _starts(b, slices, indices)
        old = b.op("dynamic_slice", x, *starts, sizes=slices.sizes)
        update = b.op("reshape", updates, shape=slices.sizes)
        new = _combined(b, kind, old, update)
        if mode == "fill":
            valid = b.broadcast(_is_inside(b, slices, starts), slices.sizes)
            new = b.select(valid, new, old)
        return b.op("dynamic_update_slice", x, new, *starts)
    return _scattered_rows(b, x, indices, updates, slices, kind, mode)


def _scattered_rows(
    b: Builder,
    x: Value,
    indices: Value,
    updates: Value,
    slices: Slices,
    kind: str,
    mode: str,
) -> Value:
    """Updates are combined with the elements whose positions along the axis they have.

    All at once if few, else one after another.
    """
    axis = slices.axis()
    target = slices.dims_in_tile(axis)
    order = sorted(target)
    single = [d for d in range(updates.tile.rank) if d not in target.values()]
    count = prod(updates.tile.shape[d] for d in single)
    if count > MOST_UPDATES:
        raise NotApplicable(f"supports at most {MOST_UPDATES} updates along the axis")
    n = x.tile.shape[axis]
    index = b.op("reshape", indices, shape=indices.tile.shape[:-1])
    index = index_numbers(b, index, n)
    if mode != "fill":
        index = b.min(b.max(index, b.like(0, index)), b.like(n - 1, index))
    if kind != "set" and count * x.tile.size <= MOST_COMPARED:
        shape = (*updates.tile.shape, n)  # the axis is last
        rank = len(shape)
        place = b.broadcast(index, shape, slices.batch_dims)
        update = b.broadcast(updates, shape, range(rank - 1))
        hit = b.eq(positions(b, update, rank - 1), place)
        update = b.select(hit, update, b.constant(left_alone(kind, x), update.tile))
        name = REDUCTIONS.get(kind, kind)
        total = b.op("reduce", update, kind=name, axes=tuple(single))
        found = [*sorted(target, key=lambda d: target[d]), axis]
        perm = tuple(found.index(d) for d in range(x.tile.rank))
        return b.op(kind, x, b.op("transpose", total, perm=perm))
    if slices.operand_batch:
        raise NotApplicable("supports few updates where rows have their own indices")
    rows = _in_rows(b, updates, single, [target[d] for d in order])
    index = b.op("reshape", index, shape=(count,))
    position = positions(b, x, axis)
    for k in range(count):
        place = b.broadcast(_row(b, index, k), x.tile.shape)
        update = b.broadcast(_row(b, rows, k), x.tile.shape, order)
        hit = b.eq(position, place)
        if kind != "set":  # x has one use: compilers follow every use, at every step
            update = b.select(hit, update, b.constant(left_alone(kind, x), x.tile))
            x = b.op(kind, x, update)
        else:
            x = b.select(hit, update, x)
    return x


def left_alone(kind: str, x: Value) -> int | float:
    """What an element is combined with where nothing is scattered to it."""
    dtype = x.tile.dtype
    if kind == "add" and dtype.is_float:
        return -0.0  # 0.0 would change the sign of -0.0
    if kind in ("min", "max") and dtype.is_float and dtype.bits < 16:
        raise NotApplicable("supports only types with infinities")
    return neutral(REDUCTIONS.get(kind, kind), dtype)


def _is_one(slices: Slices, indices: Value) -> bool:
    is_one = prod(indices.tile.shape[:-1]) == 1 and not slices.operand_batch
    return is_one and bool(slices.x.size)


def _starts(b: Builder, slices: Slices, indices: Value) -> list[Value]:
    """Of the only slice, per dimension of x; those outside stay outside."""
    count = len(slices.index_map)
    line = b.op("reshape", indices, shape=(count,))
    starts = [b.index(0)] * slices.x.rank
    for k, d in enumerate(slices.index_map):
        start = b.op("reshape", take_range(b, line, 0, k, k + 1), shape=())
        starts[d] = index_numbers(b, start, slices.x.shape[d])
    return starts


def _is_inside(b: Builder, slices: Slices, starts: Sequence[Value]) -> Value:
    inside = None
    for d in slices.index_map:
        last = slices.x.shape[d] - slices.sizes[d]
        start = starts[d]
        valid = b.and_(b.ge(start, b.like(0, start)), b.le(start, b.like(last, start)))
        inside = valid if inside is None else b.and_(inside, valid)
    return b.constant(True, scalar(BOOL)) if inside is None else inside


def index_numbers(b: Builder, index: Value, n: int) -> Value:
    """Indices along a dimension of size n as i32; those outside stay outside."""
    lowest, highest = index.tile.dtype.limits
    if highest > I32.limits[1]:
        index = b.min(index, b.like(n, index))
    if lowest < I32.limits[0]:
        index = b.max(index, b.like(-1, index))
    return b.cast(index, I32)


def _combined(b: Builder, kind: str, old: Value, update: Value) -> Value:
    return update if kind == "set" else b.op(kind, old, update)


def _in_rows(
    b: Builder, tile: Value, lead: Sequence[int], rest: Sequence[int]
) -> Value:
    """Dimensions `lead` as one, then `rest`."""
    shape = tile.tile.shape
    tile = b.op("transpose", tile, perm=(*lead, *rest))
    rows = prod(shape[d] for d in lead)
    return b.op("reshape", tile, shape=(rows, *(shape[d] for d in rest)))


def _row(b: Builder, rows: Value, k: int) -> Value:
    row = take_range(b, rows, 0, k, k + 1)
    return b.op("reshape", row, shape=rows.tile.shape[1:])
