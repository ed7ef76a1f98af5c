"""Windows: checks blocks against Mosaic's tiles, and finds edges that need a fill.

`check_window` implements the compiler's own rule (its error E2002), so that the error
can name the operand and a shape that works.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pallasite.backends.tpu.views import LANES, SUBLANES
from pallasite.errors import SpecError, UnsupportedError
from pallasite.ir.nodes import BlockDim, Kernel, Loc, Value, Window
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import RefType
from pallasite.passes.analysis.block_table import all_steps, blocks_shown
from pallasite.passes.analysis.carried import carried_from, is_overwritten
from pallasite.passes.analysis.grid import WindowMoves, analyze
from pallasite.passes.analysis.intervals import Fact


def memref_shape(window: Window) -> tuple[int, ...]:
    """The block as Mosaic sees it: with squeezed dimensions, of size one."""
    return tuple(1 if d.kind == "squeezed" else d.size for d in window.dims)


def is_whole(window: Window, ref: RefType) -> bool:
    plain = all(d.kind == "blocked" for d in window.dims)
    return plain and window.block_shape == ref.shape


def by_element(window: Window) -> bool:
    return any(d.kind == "element" for d in window.dims)


def tiling(ref: RefType) -> tuple[int, ...]:
    """What must divide the last dimensions of a block."""
    if ref.rank == 1:
        return (LANES * (32 // min(ref.dtype.bits, 32)),)
    return (SUBLANES, LANES)


def fits(ref: RefType, window: Window) -> bool:
    """Whether the block consists of whole tiles, or is as large as the array."""
    if not ref.shape:
        return True
    tiles = tiling(ref)
    count = len(tiles)
    pairs = zip(memref_shape(window)[-count:], ref.shape[-count:], tiles, strict=True)
    return all(n == full or n % tile == 0 for n, full, tile in pairs)


def check_window(
    kernel: Kernel, operand: Value, window: Window, loc: Loc | None
) -> None:
    """Raise SpecError if the block does not fit the chip's tiles."""
    ref = operand.ref
    if fits(ref, window):
        return
    tiles = tiling(ref)
    last = "last dimension" if len(tiles) == 1 else "last two dimensions"
    raise SpecError(
        "block shape does not fit the tiles of a TPU",
        [
            ("kernel", kernel.name),
            ("operand", f"{operand_name(kernel, operand)}, {ref.tile}"),
            ("block", shown_block(window)),
            (
                "rule",
                f"the {last} must be multiples of {tiles}, or as large as the array",
            ),
        ],
        at=loc,
        fix=f"use a block of {fitting_block(ref, window)}",
    )


def check_left_once(kernel: Kernel, pipeline: Pipeline) -> None:
    """Reject a written window whose blocks are revisited and would have to be kept."""
    for shown, outer, inner in returned_to(kernel, pipeline):
        name = operand_name(kernel, shown.array)
        found = "uninitialised" if shown.window.mode == "out" else "as it was given"
        moves = f"moves along axis {inner}, again in each step of axis {outer}"
        order = f"make axis {outer} the last axis of the grid"
        if outer == inner:
            moves = f"returns along axis {inner}"
            order = f"visit each block in consecutive steps of axis {inner}"
        raise UnsupportedError(
            f"backend 'tpu' does not support revisiting a block of {name}",
            [
                ("kernel", kernel.name),
                ("grid", pipeline.grid),
                ("block", moves),
                ("why", f"a revisited block is {found}"),
            ],
            at=pipeline.op.loc or kernel.loc,
            fix=f"write the whole block at each visit, or {order}",
        )


def returned_to(kernel: Kernel, pipeline: Pipeline) -> Iterator[tuple[Shown, int, int]]:
    """Written windows whose blocks are left, revisited, and needed as they were.

    Mosaic writes a result's block back when the next step has another one, and a block
    that a step enters starts uninitialised, or as the operand was given. That shows
    unless steps fill the blocks they enter. Each comes with an axis along which the
    block stays, and one inside it, or the same, along which it moves.
    """
    pairs = kernel.aliases
    aliased = {v for i, o in pairs for v in (kernel.inputs[i], kernel.outputs[o])}
    moves = analyze(kernel).windows
    for shown, move in zip(pipeline.shown, moves, strict=True):
        is_own = shown.array in kernel.params and shown.array not in aliased
        if not (is_own and move.written):
            continue
        found = _entered_again(pipeline.grid, shown, move)
        if found is not None and not _fills(pipeline, shown.block, move):
            yield shown, *found


def _entered_again(
    grid: Sequence[int | None], shown: Shown, moves: WindowMoves
) -> tuple[int, int] | None:
    """An axis along which the window stays, and one along which it moves in between.

    Or may do so, where the map cannot be enumerated but is a sum of grid indices.
    Numbers read from operands are taken as the author's promise that visits of a block
    are consecutive.
    """
    if not moves.axes:
        return None
    if (steps := all_steps(grid)) is not None:
        blocks = _blocks(shown, grid)
        if blocks is not None:
            return _first_return(blocks, steps)
    for axis, size in enumerate(grid):  # in larger grids: each axis by itself
        line = [size if a == axis else 1 for a in range(len(grid))]
        steps, blocks = all_steps(line), _blocks(shown, line)
        if steps is not None and blocks is not None and _first_return(blocks, steps):
            return axis, axis
    computed = all(form.affine is not None for form in moves.forms)
    leaving = moves.apart if computed else moves.axes
    moving = moves.axes if computed else moves.apart
    several = [a for a, n in enumerate(grid) if n is None or n > 1]
    for outer in several:
        for inner in several:
            if outer < inner and outer not in leaving and inner in moving:
                return outer, inner
    return None


def _blocks(shown: Shown, grid: Sequence[int | None]) -> np.ndarray | None:
    """The number of the block that a window shows at each step."""
    indices = blocks_shown(shown.index_map, shown.window, shown.array.ref.shape, grid)
    if indices is None:
        return None
    return np.unique(indices, axis=1, return_inverse=True)[1].ravel()


def _first_return(blocks: np.ndarray, steps: np.ndarray) -> tuple[int, int] | None:
    """The axis along which a block is first entered again, and that along which it was
    left; None if the steps of each block are consecutive."""
    entered = np.flatnonzero(np.diff(blocks, prepend=-1))
    _, first = np.unique(blocks[entered], return_index=True)
    again = np.setdiff1d(np.arange(len(entered)), first)
    if not len(again):
        return None
    here = entered[again[0]]
    before = np.flatnonzero(blocks[:here] == blocks[here])[-1]
    differ = (steps[:, before] != steps[:, other] for other in (here, before + 1))
    outer, inner = (int(np.argmax(axes)) for axes in differ)
    return outer, inner


def _fills(pipeline: Pipeline, block: Value, moves: WindowMoves) -> bool:
    """Whether each visit of a block, or at least the last, overwrites it all."""
    ids, grid = pipeline.ids, pipeline.grid
    last = max(moves.axes)
    first = {i: 0 for a, i in enumerate(ids) if a > last or grid[a] == 1}
    if is_overwritten(pipeline.body.ops, block, first):
        return True
    at_end = dict(first)
    for axis, (index, size) in enumerate(zip(ids, grid, strict=True)):
        if size is not None and axis < last and axis not in moves.axes:
            at_end[index] = size - 1
    reads_old = carried_from(pipeline.body, block, ids, grid) < len(ids)
    return not reads_old and is_overwritten(pipeline.body.ops, block, at_end)


def operand_name(kernel: Kernel, operand: Value) -> str:
    """`input 1 ('y')`: how the author knows an operand."""
    hint = f" ('{operand.name}')" if operand.name else ""
    for kind, values in (("input", kernel.inputs), ("output", kernel.outputs)):
        for position, value in enumerate(values):
            if value is operand:
                return f"{kind} {position}{hint}"
    return f"a ref{hint}"


def _shown(dim: BlockDim) -> int | None:
    return None if dim.kind == "squeezed" else dim.size


def shown_block(window: Window) -> tuple[int | None, ...]:
    """The block as the author wrote it."""
    return tuple(_shown(d) for d in window.dims)


def fitting_block(ref: RefType, window: Window) -> tuple[int | None, ...]:
    """The nearest block that fits: rounded up, or the whole dimension."""
    shape, tiles = [*shown_block(window)], tiling(ref)
    for position, tile in enumerate(tiles, len(shape) - len(tiles)):
        size, full = shape[position] or 1, ref.shape[position]
        if size == full:
            continue
        rounded = -(-size // tile) * tile
        shape[position] = min(rounded, full) if size % tile else size
    return tuple(shape)


def touching(dim: BlockDim, size: int) -> tuple[int, int]:
    """The range of first elements of blocks not entirely in the padding."""
    low = dim.padding[0]
    return max(low - dim.size + 1, 0), max(low + size - 1, 0)


def hangs_over(dim: BlockDim, size: int, index: Fact) -> bool:
    """Whether a valid block may extend past the array's edge along this dimension."""
    if dim.kind == "blocked":
        return size % dim.size != 0
    if dim.kind == "squeezed":
        return False
    low = dim.padding[0]
    return not index.within(low, low + size - dim.size)
