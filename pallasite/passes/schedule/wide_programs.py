"""wide_programs: larger blocks and steps for a kernel whose reverse a TPU will run.

A TPU runs programs one after another, and each waits for its own matmuls and
reductions. `tpu_blocks.py` makes the most of a kernel's blocks, but a reverse adds to
cotangents in order: its steps and loops are those of the forward kernel. So that one is
resized before: a loop of matmuls is an axis, steps of a running softmax are merged
(`widen_steps.py`), a program of one row has a block of one row (`row_tiles.py`), and
programs are merged along free dimensions, also those of which a branch skips some
(`reblock.py`, `fills`).
"""

from math import prod

from pallasite.ir.nodes import Kernel
from pallasite.passes.analysis.loop_dims import LoopDim
from pallasite.passes.normal.loop_steps import loop_steps
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.choose_blocks import Blocks, blocks_of, is_last
from pallasite.passes.schedule.row_tiles import row_tiles
from pallasite.passes.schedule.widen_steps import widen_steps
from pallasite.target import Tpu

WIDE_STEP = 256  # elements along a step that is merged from several
MOST_ROWS = 512  # of a program, unless it has all of them: then it adds up nothing
# Of on-chip memory, for the largest tile: a reverse has several at a time, and
# cotangents of whole operands.
TILE_SHARE = 1 / 32
MORE_WORK = 1.5  # that merged programs may do, because they skip less


def wide_programs(kernel: Kernel, chip: Tpu) -> Kernel:
    """The kernel with larger blocks and steps, as far as they fit."""
    try:
        wide = widen_steps(loop_steps(kernel), WIDE_STEP)
    except CannotReblock:
        wide = row_tiles(kernel)
    blocks = blocks_of(wide, fills=True)
    if blocks is None or blocks.is_sized_at_run_time:
        return kernel
    more = _with_more_rows(blocks, chip)
    return wide if more is blocks else more.kernel


def _with_more_rows(blocks: Blocks, chip: Tpu) -> Blocks:
    """Programs merged along the dimensions that are rows or columns of matmuls; without
    matmuls, along rows."""
    own = _work(blocks)
    for dim in [d for d in blocks.free if _is_of_rows(blocks, d)]:
        place, start, size = dim.windows[0], blocks, dim.size
        while (dim := start.found.at(place)) is not None:
            size *= 2
            try:
                # In one go: growing twice would mask twice what a branch skips.
                wider = blocks_of(start.rewritten({dim: size}), fills=True)
            except CannotReblock:
                break
            if wider is None or not _suits(wider, place, chip, own):
                break
            blocks = wider
    return blocks


def _suits(blocks: Blocks, place: tuple[int, int], chip: Tpu, own: float) -> bool:
    dim = blocks.found.at(place)
    sizes = (prod(v.tile.shape) * v.tile.dtype.bytes for v in blocks.tiles)
    largest = max(sizes, default=0)
    return (
        dim is not None
        and (dim.size <= MOST_ROWS or _has_all(blocks, dim))
        and largest <= TILE_SHARE * chip.scoped_vmem
        and blocks.programs({}) >= chip.cores
        and _work(blocks) <= MORE_WORK * own
    )


def _has_all(blocks: Blocks, dim: LoopDim) -> bool:
    arrays = blocks.found.pipeline.arrays
    return all(dim.size >= arrays[n].ref.shape[d] for n, d in dim.windows)


def _is_of_rows(blocks: Blocks, dim: LoopDim) -> bool:
    """Whether it is rows of a matmul's left operand or columns of its right one."""
    if not blocks.dots:
        return not is_last(blocks, dim)
    sides = (side for dot in blocks.dots for side in dot.sides)
    return any(dim.members.get(side.value) in side.free for side in sides)


def _work(blocks: Blocks) -> float:
    """Operations of matmuls in all steps, as far as it is known which are skipped."""
    runs = blocks.runs
    each = (runs.get(d.op, 1.0) * d.op.result.tile.size * d.depth for d in blocks.dots)
    return sum(each) * prod(n or 1 for n in blocks.found.pipeline.grid)
