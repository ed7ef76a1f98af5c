"""XLA's gather and scatter of values, in numpy.

Dimension numbers are tuples in the order of jax.lax.GatherDimensionNumbers and
ScatterDimensionNumbers; the index vector is the last dimension of `indices`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any
Numbers = Sequence[Sequence[int]]


def gather(
    x: np.ndarray,
    indices: np.ndarray,
    numbers: Numbers,
    slice_sizes: Sequence[int],
    fill: Any,
) -> np.ndarray:
    """Slices of `x` named by `indices`; out of range: clamped, or `fill` if given."""
    offset_dims, collapsed, index_map, operand_batch, index_batch = numbers
    window = [d for d in range(x.ndim) if d not in (*collapsed, *operand_batch)]
    starts, valid = _starts(
        x.shape, indices, index_map, operand_batch, index_batch, slice_sizes
    )
    positions = _positions(starts, window, slice_sizes)
    batch_rank = indices.ndim - 1
    if x.size:
        value = x[tuple(positions)]
    else:
        shape = np.broadcast_shapes(*(p.shape for p in positions))
        value = np.zeros(shape, x.dtype)
    if fill is not None and not valid.all():
        keep = valid.reshape(valid.shape + (1,) * len(window))
        value = np.where(keep, value, np.array(fill).astype(x.dtype))
    return np.moveaxis(value, range(batch_rank, value.ndim), offset_dims)


def scatter(
    x: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    numbers: Numbers,
    kind: str,
    drop: bool,
) -> np.ndarray:
    """`x` with slices updated; out of range: dropped, or clamped."""
    window_dims, inserted, index_map, operand_batch, index_batch = numbers
    window = [d for d in range(x.ndim) if d not in (*inserted, *operand_batch)]
    sizes = [1] * x.ndim
    for d, n in zip(window, (updates.shape[k] for k in window_dims), strict=True):
        sizes[d] = n
    starts, valid = _starts(
        x.shape, indices, index_map, operand_batch, index_batch, sizes
    )
    batch_rank = indices.ndim - 1
    last = range(batch_rank, updates.ndim)
    updates = np.moveaxis(updates, window_dims, last)
    out = np.array(x)
    if not out.size or not updates.size:
        return out
    positions = [
        np.broadcast_to(p, updates.shape) for p in _positions(starts, window, sizes)
    ]
    if drop and not valid.all():
        keep = valid.reshape(valid.shape + (1,) * len(window))
        keep = np.broadcast_to(keep, updates.shape)
        positions = [p[keep] for p in positions]
        updates = updates[keep]
    _UPDATE[kind](out, tuple(positions), updates)
    return out


_UPDATE = {
    "set": lambda out, where, value: out.__setitem__(where, value),
    "add": np.add.at,
    "mul": np.multiply.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


def _starts(
    shape: Sequence[int],
    indices: np.ndarray,
    index_map: Sequence[int],
    operand_batch: Sequence[int],
    index_batch: Sequence[int],
    sizes: Sequence[int],
) -> tuple[list[np.ndarray], np.ndarray]:
    """First position of each slice per operand dimension, and which are in range."""
    batch = indices.shape[:-1]
    starts = [np.zeros(batch, np.int64) for _ in shape]
    valid = np.ones(batch, bool)
    for k, d in enumerate(index_map):
        start = indices[..., k].astype(np.int64)
        high = shape[d] - sizes[d]
        valid &= (start >= 0) & (start <= high)
        starts[d] = np.clip(start, 0, max(high, 0))
    for d, b in zip(operand_batch, index_batch, strict=True):
        along = [1] * len(batch)
        along[b] = -1
        starts[d] = np.broadcast_to(np.arange(batch[b]).reshape(along), batch)
    return starts, valid


def _positions(
    starts: Sequence[np.ndarray], window: Sequence[int], sizes: Sequence[int]
) -> list[np.ndarray]:
    """Operand positions over the batch dimensions, then the window's."""
    rank = len(window)
    positions = []
    for d, start in enumerate(starts):
        position = start.reshape(start.shape + (1,) * rank)
        if d in window:
            along = [1] * rank
            along[window.index(d)] = -1
            position = position + np.arange(sizes[d]).reshape(along)
        positions.append(position)
    return positions
