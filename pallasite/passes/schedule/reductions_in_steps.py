"""reductions_in_steps: what programs reduce, step by step along an axis of the grid.

In: programs that reduce a dimension of their blocks, all at once or in a loop, such as
a kernel without a grid that sums an array. Out: parts of the dimension as the steps of
a last axis, with what they have reduced so far in scratch. `plan_parts.py` asks for
this where there are fewer programs than cores, and runs the steps in parts.

The proofs are those of `loop_over_rows.py` and `loop_over_k.py`, which make a loop of
what is reduced at once, and of `loop_steps.py`, which makes steps of a loop.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from pallasite.ir.nodes import Kernel
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import users_of
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline, with_pipeline
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.loop_steps import loop_steps
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.loop_over_k import loop_over_k
from pallasite.passes.schedule.loop_over_rows import loop_over_rows

MOST_STEPS = 1 << 10
LEAST_SIZE = 1 << 12  # elements of the widest block that a step loads


def reductions_in_steps(kernel: Kernel) -> Kernel:
    """The kernel with one of its loops or dimensions as a last axis; else itself."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != TILE or len(grids) != 1:
        return kernel
    for looped in _with_a_loop(_with_late_stores(kernel)):
        stepped = loop_steps(looped, reduces=True)
        if stepped is not looped:
            return stepped
    return kernel


def _with_late_stores(kernel: Kernel) -> Kernel:
    """Blocks that one op stores to, and no other accesses, are stored at the end.

    Otherwise the first step would store what the last one can.
    """
    whole = Pipeline.of(find_pipeline(kernel))
    ops = whole.body.ops
    used = users_of(whole.body)
    late = [
        op
        for op in ops
        if op.name == "store"
        and op.operands[0] in whole.blocks
        and used[op.operands[0]] == [op]
    ]
    if kernel.aliases or not late:
        return kernel
    kept = [op for op in ops if op not in late]
    body = replace(whole.body, ops=(*kept, *late))
    return with_pipeline(kernel, whole.with_(body=body).to_op())


def _with_a_loop(kernel: Kernel) -> Iterator[Kernel]:
    yield kernel
    found = LoopDims(kernel)
    blocks = found.pipeline.blocks
    dims = [d for d in found.dims if d.reduces or d.products]
    for dim in sorted(dims, key=lambda d: -d.size):
        widest = max(blocks[n].ref.size for n, _ in dim.windows)
        size = _size(dim, widest)
        if size < dim.size:
            in_loop = loop_over_rows if dim.reduces else loop_over_k
            with suppress(CannotReblock):
                yield canonicalize(in_loop(kernel, dim.windows[0], size))


def _size(dim: LoopDim, widest: int) -> int:
    """Elements of a part: of many parts, but of no less than a step is worth."""
    most = min(MOST_STEPS, widest // LEAST_SIZE)
    return next(
        size
        for size in range(-(-dim.size // max(most, 1)), dim.size + 1)
        if dim.size % size == 0
    )
