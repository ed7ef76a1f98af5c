"""Windows: checks blocks against Mosaic's tiles, and finds edges that need a fill.

`check_window` implements the compiler's own rule (its error E2002), so that the error
can name the operand and a shape that works.
"""

from collections.abc import Iterator, Sequence

from pallasite.backends.tpu.views import LANES, SUBLANES
from pallasite.errors import SpecError, UnsupportedError
from pallasite.ir.nodes import BlockDim, Kernel, Loc, Value, Window
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import RefType
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
    """Reject an output whose blocks are revisited and would have to be kept."""
    for shown, outer, inner in returned_to(kernel, pipeline):
        name = operand_name(kernel, shown.array)
        raise UnsupportedError(
            f"backend 'tpu' does not support revisiting a block of {name}",
            [
                ("kernel", kernel.name),
                ("grid", pipeline.grid),
                (
                    "block",
                    f"moves along axis {inner}, again in each step of axis {outer}",
                ),
                ("why", "a revisited block is uninitialised"),
            ],
            at=pipeline.op.loc or kernel.loc,
            fix=f"make axis {outer} the last axis of the grid, or write the whole block"
            " at each visit",
        )


def returned_to(kernel: Kernel, pipeline: Pipeline) -> Iterator[tuple[Shown, int, int]]:
    """Outputs whose blocks are left, revisited, and needed as they were.

    Mosaic writes a block back when the next step has another one, and a block that a
    step enters starts uninitialised. That shows unless steps fill the blocks they
    enter. Each comes with an axis along which the block stays, and one inside it along
    which it moves.
    """
    aliased = {kernel.outputs[result] for _, result in kernel.aliases}
    moves = analyze(kernel).windows
    for shown, move in zip(pipeline.shown, moves, strict=True):
        if shown.array not in kernel.outputs or shown.array in aliased:
            continue
        found = _entered_again(pipeline.grid, move)
        if found is not None and not _fills(pipeline, shown.block, move):
            yield shown, *found


def _entered_again(
    grid: Sequence[int | None], moves: WindowMoves
) -> tuple[int, int] | None:
    """An axis along which the window stays, and one inside it along which it moves.

    Or may do so, where the map is a sum of grid indices. Numbers read from operands are
    taken as the author's promise that visits of a block are consecutive.
    """
    computed = all(form.affine is not None for form in moves.forms)
    leaving = moves.apart if computed else moves.axes
    moving = moves.axes if computed else moves.apart
    several = [a for a, n in enumerate(grid) if n is None or n > 1]
    for outer in several:
        for inner in several:
            if outer < inner and outer not in leaving and inner in moving:
                return outer, inner
    return None


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
