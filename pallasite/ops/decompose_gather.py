"""Gathers of single elements along one axis, by comparing and selecting.

Covers `x[indices]` along one axis (whole rows) and take_along_axis. Every candidate is
compared with every index, so this suits short axes; other gathers are rejected.
"""

from collections.abc import Sequence
from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import I32, TileType
from pallasite.ops.decompose_tile import take_range
from pallasite.ops.formula import NotApplicable

MOST_CANDIDATES = 256

DimensionNumbers = Sequence[Sequence[int]]


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
    axis = _gathered_axis(x.tile, dimension_numbers, slice_sizes)
    offset_dims, _, _, operand_batch, index_batch = dimension_numbers
    batch_dims = [d for d in range(type.rank) if d not in offset_dims]
    # Where each dimension of x but the gathered one goes in the result.
    target = {d: batch_dims[k] for d, k in zip(operand_batch, index_batch, strict=True)}
    window = [d for d in range(x.tile.rank) if d != axis and d not in target]
    target |= dict(zip(window, offset_dims, strict=True))
    order = sorted(target, key=lambda d: target[d])
    rows = b.op("transpose", x, perm=(axis, *order))

    index = b.op("reshape", indices, shape=indices.tile.shape[:-1])
    n = x.tile.shape[axis]
    clamped = b.min(b.max(index, b.like(0, index)), b.like(n - 1, index))
    dims = [target[d] for d in order]
    place = b.broadcast(b.cast(clamped, I32), type.shape, batch_dims)
    result = _candidate(b, rows, 0, type, dims)
    for k in range(1, n):
        hit = b.eq(place, b.like(k, place))
        result = b.select(hit, _candidate(b, rows, k, type, dims), result)
    if mode != "fill":
        return result
    valid = b.broadcast(b.eq(index, clamped), type.shape, batch_dims)
    return b.select(valid, result, b.constant(fill_value, type))


def _gathered_axis(
    x: TileType, numbers: DimensionNumbers, slice_sizes: Sequence[int]
) -> int:
    _, collapsed, index_map, operand_batch, _ = numbers
    if len(index_map) != 1 or tuple(collapsed) != tuple(index_map):
        raise NotApplicable("supports only gathers of single elements along one axis")
    (axis,) = index_map
    for d, (n, size) in enumerate(zip(x.shape, slice_sizes, strict=True)):
        if size != (1 if d == axis or d in operand_batch else n):
            raise NotApplicable("supports only whole rows")
    if not 0 < x.shape[axis] <= MOST_CANDIDATES:
        raise NotApplicable(
            f"supports at most {MOST_CANDIDATES} elements along the axis"
        )
    return axis


def _candidate(
    b: Builder, rows: Value, k: int, type: TileType, dims: Sequence[int]
) -> Value:
    row = take_range(b, rows, 0, k, k + 1)
    row = b.op("reshape", row, shape=rows.tile.shape[1:])
    return b.broadcast(row, type.shape, dims)
