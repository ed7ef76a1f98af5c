"""states_in_scratch: results that steps of an axis read are scratch until the last one.

In: a kernel whose steps along its last axis read and write blocks of results, such as
the maximum and the sum of an online softmax. Out: the same with scratch in place of
these blocks, which the last step stores. `axis_state.py` merges sums that are relative
to a maximum if both are scratch, because a result may have any window.

Proof: a block that stays along the last axis, and that no other step of the axes around
it sees, is written to its array after the last step of the axis. Until then it is read
and written by these steps only, as scratch is; both hold nothing when they begin.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel
from pallasite.ir.rewrite import substitute, users_of
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.grid import GridInfo, find_pipeline


def states_in_scratch(kernel: Kernel, axis: int, info: GridInfo) -> Kernel:
    """The kernel with such scratch; itself if it needs none.

    Args:
        kernel: a kernel with one pipeline.
        axis: of its grid.
        info: its grid analysis.
    """
    pipeline = Pipeline.of(find_pipeline(kernel))
    found = _carrying(kernel, pipeline, axis, info)
    if not found:
        return kernel
    b, top, last = (Builder(pipeline.op.loc) for _ in range(3))
    size = pipeline.grid[axis]
    assert size is not None
    is_last = b.cast(b.eq(pipeline.ids[axis], b.index(size - 1)), b.index(0).tile.dtype)
    scratch = {
        each.block: top.op(
            "alloc",
            type=replace(each.block.ref, space="vmem"),
            names=[each.block.name],
        )
        for each in found
    }
    for block, ref in scratch.items():
        last.store(block, last.load(ref))
    b.emit("cond", is_last, regions=(Block(), last.block()))
    steps = substitute(pipeline.body, scratch)
    body = replace(steps, ops=(*steps.ops, *b.ops))
    new = pipeline.with_(body=body).to_op()
    ops = (new if op is pipeline.op else op for op in kernel.body.ops)
    return kernel.with_(body=replace(kernel.body, ops=(*top.ops, *ops)))


def _carrying(
    kernel: Kernel, pipeline: Pipeline, axis: int, info: GridInfo
) -> Sequence[Shown]:
    """The blocks of results that the steps of the last axis hand on to each other."""
    several = [a for a, n in enumerate(pipeline.grid) if n != 1]
    if kernel.aliases or axis != several[-1] or pipeline.grid[axis] is None:
        return ()
    users = users_of(pipeline.body)
    return [
        each
        for each, moves in zip(pipeline.shown, info.windows, strict=True)
        if each.window.mode == "out"
        and axis not in moves.axes
        and moves.apart.issuperset(several[:-1])
        and all(d.kind in ("blocked", "squeezed") for d in each.window.dims)
        and any(op.name != "store" for op in users.get(each.block, ()))
    ]
