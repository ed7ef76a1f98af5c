"""results_in_scratch: results that steps accumulate in are scratch until the last step.

In: an output block that the grid revisits along its last axes, set in the first of
those steps, read back in others: `o_ref[...] += ...`, or the statistics of a softmax
kept in results. Out: scratch of the block's type in its place, and one store of the
whole block in the last of those steps. Proof: no step but these sees the block, and in
the first of them it is overwritten before anything reads it; so what they read is what
they wrote, and what is in the array after the last of them is the same.

For backends that keep such state in registers, and for gradients; elsewhere an output
block is on chip anyway, and a copy of it would only take room. TPUs keep statistics in
all lanes, if they are scratch: there it is for results beside statistics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import substitute, used_values
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import INDEX, RefType
from pallasite.passes.analysis.affine import moving_axes
from pallasite.passes.analysis.carried import covers_whole, is_overwritten
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.normal.order import order


def results_in_scratch(kernel: Kernel, least: int = 1) -> Kernel:
    """The kernel with scratch for the results that its steps read back.

    `least`: it stays as it is if there are fewer such results.
    """
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return kernel
    whole = Pipeline.of(grids[0])
    axes = {each.block: _first_axis(kernel, whole, each) for each in whole.shown}
    found = {block: first for block, first in axes.items() if first is not None}
    if len(found) < least:
        return kernel
    allocs = Builder(whole.op.loc)
    scratch: dict[Value, Value] = {}
    for block in found:
        kind = RefType(block.ref.shape, block.ref.dtype, "vmem")
        (scratch[block],) = allocs.emit("alloc", names=[block.name], type=kind)
    ops = substitute(Block((), whole.body.ops), scratch).ops
    for first in sorted({*found.values()}):
        blocks = [block for block, axis in found.items() if axis == first]
        ops = _with_stores(whole, ops, first, {b: scratch[b] for b in blocks})
    body = replace(whole.body, ops=ops)
    new = with_pipeline(kernel, whole.with_(body=body).to_op())
    ops = (*allocs.ops, *new.body.ops)
    return order(new.with_(body=replace(new.body, ops=ops)))


def _first_axis(kernel: Kernel, whole: Pipeline, shown: Shown) -> int | None:
    """The first of the axes along which steps share a block as their own; or None."""
    block, array = shown.block, shown.array
    if shown.window.mode != "out" or shown.window.fill is not None:
        return None
    if shown.window.space != "block" or array in kernel.aliased_results.values():
        return None
    if [each.array for each in whole.shown].count(array) > 1:
        return None
    if array in used_values(whole.body):
        return None
    uses = [op for op in walk(whole.body) if block in op.operands]
    if {op.name for op in uses} != {"load", "store"}:
        return None
    first = max(moving_axes(shown.index_map), default=-1) + 1
    sizes = [n for n in whole.grid[first:] if n]
    if len(sizes) < len(whole.grid) - first or max(sizes, default=1) < 2:
        return None
    known = dict.fromkeys(whole.ids[first:], 0)
    if not is_overwritten(whole.body.ops, block, known):
        return None
    return first


def _with_stores(
    whole: Pipeline, ops: Sequence[Op], first: int, scratch: Mapping[Value, Value]
) -> tuple[Op, ...]:
    """The ops of a step, and the stores of the last step along some axes."""
    b = Builder(whole.op.loc)
    b.ops += ops
    pairs = zip(whole.ids[first:], whole.grid[first:], strict=True)
    last = [(i, n - 1) for i, n in pairs if n is not None and n > 1]
    if _runs_last(whole, ops, last):
        b.ops[-1] = _ending(ops[-1], scratch)
        return tuple(b.ops)
    test = None
    for index, n in last:
        own = b.eq(index, b.index(n))
        test = own if test is None else b.and_(test, own)
    assert test is not None
    inside = Block((), _final(Block(), scratch))
    b.emit("cond", b.cast(test, INDEX.dtype), regions=(Block(), inside))
    return tuple(b.ops)


def _runs_last(
    whole: Pipeline, ops: Sequence[Op], last: Sequence[tuple[Value, int]]
) -> bool:
    """Whether a body ends with code for just the last step along some axes."""
    if not ops or ops[-1].name != "cond" or len(ops[-1].regions) != 2:
        return False
    if ops[-1].regions[0].ops or ops[-1].results:
        return False
    table = StepTable(whole.ids, whole.grid)
    table.add_ops(ops[:-1])
    which, wanted = table.of(ops[-1].operands[0]), np.ones((), bool)
    for index, n in last:
        steps = table.of(index)
        if steps is None:
            return False
        wanted = wanted & (steps == n)
    if which is None:
        return False
    runs, wanted = np.broadcast_arrays(which > 0, wanted)
    return np.array_equal(runs, wanted)


def _ending(op: Op, scratch: Mapping[Value, Value]) -> Op:
    """The author's code for the last step, with the stores of the results."""
    idle, taken = op.regions
    return op.with_(regions=(idle, replace(taken, ops=_final(taken, scratch))))


def _final(block: Block, scratch: Mapping[Value, Value]) -> tuple[Op, ...]:
    """Code for the last step; the last value of a result goes to it directly."""
    b = Builder()
    b.ops += block.ops
    for result, ref in scratch.items():
        users = [n for n, op in enumerate(b.ops) if ref in used_values(_only(op))]
        op = b.ops[users[-1]] if users else None
        if op is not None and _replaces(op, ref):
            b.ops[users[-1]] = op.with_(operands=(result, *op.operands[1:]))
            continue
        b.store(result, b.load(ref))
    return tuple(b.ops)


def _only(op: Op) -> Block:
    return Block((), (op,))


def _replaces(op: Op, ref: Value) -> bool:
    """Whether an op stores all of a ref."""
    whole = op.name == "store" and covers_whole(ref.ref.shape, op.attrs["index"])
    return whole and not op.attrs["mask"]
