"""Which block an index map shows at each step, by enumerating all steps.

`told_apart` is for index maps that are not affine, and for blocks that are clamped.
Used by `grid.py` and, for the block indices themselves, by `partition.py` and
`place_windows.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod

import numpy as np

from pallasite.ir.nodes import Block, BlockDim, Op, Window
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import is_elementwise
from pallasite.ir.types import TileType

_MOST_STEPS = 1 << 16  # of grids that are enumerated


def last_number(dim: BlockDim, n: int) -> int:
    """The largest block index along a dimension; the smallest is 0.

    A dimension without elements also has one block, an empty one.
    """
    if dim.kind == "blocked":
        return max(-(-n // max(dim.size, 1)) - 1, 0)
    return max(n + sum(dim.padding) - 1, 0)


def told_apart(
    index_map: Block,
    window: Window,
    shape: Sequence[int],
    grid: Sequence[int | None],
) -> frozenset[int] | None:
    """Axes recoverable from the block indices, by enumerating a small grid."""
    steps, shown = all_steps(grid), blocks_shown(index_map, window, shape, grid)
    if steps is None or shown is None:
        return None
    _, block = np.unique(shown, axis=1, return_inverse=True)
    block = block.ravel()
    count = int(block.max()) + 1
    return frozenset(
        axis for axis, position in enumerate(steps) if _tells(block, position, count)
    )


def blocks_shown(
    index_map: Block,
    window: Window,
    shape: Sequence[int],
    grid: Sequence[int | None],
) -> np.ndarray | None:
    """The block indices at every step, a row per dimension, clamped to the array.

    None if the grid is not small, or the map or the window is of another kind.
    """
    steps = all_steps(grid)
    whole_blocks = all(d.kind in ("blocked", "squeezed") for d in window.dims)
    if steps is None or not whole_blocks:
        return None
    indices = evaluate_map(index_map, steps)
    if indices is None:
        return None
    dims = zip(indices, window.dims, shape, strict=True)
    return np.stack([np.clip(i, 0, last_number(dim, n)) for i, dim, n in dims])


def all_steps(grid: Sequence[int | None]) -> np.ndarray | None:
    """The grid indices of every step, a row per axis, if a small grid has any."""
    sizes = [n for n in grid if n is not None]
    if len(sizes) < len(grid) or not 0 < prod(sizes) <= _MOST_STEPS:
        return None
    return np.indices(sizes, dtype=np.int32).reshape(len(sizes), prod(sizes))


def _tells(block: np.ndarray, position: np.ndarray, count: int) -> bool:
    """Whether all steps that share a block are at one position along an axis."""
    low = np.full(count, inf)
    high = np.full(count, -inf)
    np.minimum.at(low, block, position)
    np.maximum.at(high, block, position)
    return bool(np.all(low == high))


def exact_meaning(op: Op) -> Callable[..., np.ndarray] | None:
    """An elementwise op as a function of arrays; None if a chip may round otherwise."""
    row = table()[op.name]
    if not is_elementwise(op) or row.meaning is None:
        return None
    if row.max_ulp and any(v.tile.dtype.is_float for v in op.results):
        return None
    return partial(row.meaning, **op.own_attrs)


def evaluate_map(index_map: Block, steps: np.ndarray) -> list[np.ndarray] | None:
    """The block indices at all steps, if the map is plain arithmetic.

    None also where a chip may round another way: the block may then be another one.
    """
    values = dict(zip(index_map.params, steps, strict=True))
    for op in index_map.ops:
        meaning = exact_meaning(op)
        if op.name == "constant":
            tile: TileType = op.attrs["type"]
            full = np.full(steps.shape[1], op.attrs["value"], tile.dtype.np)
            values[op.result] = full
        elif meaning is not None and all(v in values for v in op.operands):
            with np.errstate(all="ignore"):
                values[op.result] = meaning(*(values[v] for v in op.operands))
        else:
            return None
    if any(v not in values for v in index_map.yields):
        return None
    return [np.asarray(values[v]) for v in index_map.yields]
