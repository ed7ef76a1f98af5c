"""loop_steps: a loop of matmuls over blocks of operands becomes steps of the grid.

In: programs with one loop that multiplies parts of blocks at `pl.ds(k * n, n)`. Out:
the iterations as the last axis of the grid, with blocks of n elements; what the loop
carried is in scratch of the same type, set before the first step and read after the
last one (`pipeline_axes.py`). The iterations are the same ones in the same order, and
each value is rounded as before. Where a loop begins elsewhere in each program, a guard
skips the steps before its first iteration, too. So a loop and a grid axis are one thing
to the scheduler, which resizes blocks of either.

For GPUs, where the steps of one program become a loop again. On TPUs and CPUs a block
that stays and blocks that move differ in what is kept on chip: TPUs take what costs
less (`tpu_blocks.py`), and CPUs what the author chose.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import inline, producers_of, substitute
from pallasite.ir.roles import Loop, Pipeline, number_of
from pallasite.ir.types import INDEX, RefType
from pallasite.passes.analysis.affine import moving_axes
from pallasite.passes.analysis.grid import find_pipeline, with_pipeline
from pallasite.passes.analysis.intervals import HIGHEST, LOWEST, Facts
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.normal.affine_numbers import affine_numbers
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.guarded_updates import guarded_updates
from pallasite.passes.normal.narrow_windows import narrow_windows
from pallasite.passes.normal.order import order
from pallasite.passes.normal.pipeline_axes import pipeline_axes


def loop_steps(kernel: Kernel, reduces: bool = False) -> Kernel:
    """The kernel with the loop of its matmuls as an axis of its grid.

    `reduces`: also a loop that carries anything else.
    """
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return kernel
    whole = Pipeline.of(grids[0])
    loops = [op for op in walk(whole.body) if op.name in ("for", "while", "pipeline")]
    if len(loops) != 1 or loops[0] not in whole.body.ops or loops[0].name != "for":
        return kernel
    loop = Loop.of(loops[0])
    span = _range(kernel, whole, loop) if _suits(loop, reduces) else None
    if span is None:
        return kernel
    nested = _as_pipeline(kernel, whole, loop, span)
    merged = pipeline_axes(nested)
    if merged is nested:
        return kernel
    new = narrow_windows(merged)
    return order(guarded_updates(affine_numbers(new))) if _moves_all(new) else kernel


def _suits(loop: Loop, reduces: bool) -> bool:
    if loop.index.tile != INDEX:  # as the steps of a grid are counted
        return False
    if reduces:
        return not any(v.is_ref for v in loop.inits)
    multiplies = any(op.name == "dot" for op in walk(loop.body))
    return multiplies and all(not v.is_ref and v.tile.rank for v in loop.inits)


def _range(kernel: Kernel, whole: Pipeline, loop: Loop) -> range | None:
    """The indices that a loop may have in any program; None if not known."""
    ops = (*kernel.body.ops[: kernel.body.ops.index(whole.op)], *whole.body.ops)
    facts, table = Facts(), StepTable(whole.ids, whole.grid)
    facts.note_grid(whole.ids, whole.grid)
    table.add_ops(ops)
    for op in ops:
        facts.note_op(op)
    first, limit, step = map(facts.of, loop.bounds)
    if step.number is None or step.number < 1 or facts.may_overshoot(loop):
        return None
    if first.number is None and step.number != 1:
        return None  # programs begin at different remainders
    if first.number is not None and limit.low - first.number < LOWEST:
        return None  # their difference may wrap around
    low, high = table.of(loop.first), table.of(loop.limit)
    begin = first.low if low is None else int(low.min())
    end = limit.high if high is None else int(high.max())
    known = begin > LOWEST and end < HIGHEST
    return range(begin, end, step.number) or None if known else None


def _as_pipeline(kernel: Kernel, whole: Pipeline, loop: Loop, span: range) -> Kernel:
    """The loop as a pipeline without windows, its carried values in scratch."""
    b = Builder(loop.op.loc)
    allocs = Builder(loop.op.loc)
    scratch = []
    for value in loop.results:
        kind = RefType(value.tile.shape, value.tile.dtype, "vmem")
        scratch += allocs.emit("alloc", names=[value.name], type=kind)
    at = whole.body.ops.index(loop.op)
    b.ops += whole.body.ops[:at]
    for ref, value in zip(scratch, loop.inits, strict=True):
        b.store(ref, value)
    index = Value(INDEX, loop.index.name or f"i{len(whole.grid)}")
    inner = Builder(loop.op.loc)
    static = number_of(producers_of(kernel.body), loop.first) is None
    if static:
        number = inner.mul(index, loop.step)
        number = inner.add(number, inner.index(span.start))
        inside = Builder(loop.op.loc)
        _iteration(inside, loop, number, scratch)
        test = inner.and_(inner.ge(number, loop.first), inner.lt(number, loop.limit))
        which = inner.cast(test, INDEX.dtype)
        inner.emit("cond", which, regions=(Block(), inside.block()))
    else:
        number = inner.add(loop.first, inner.mul(index, loop.step))
        _iteration(inner, loop, number, scratch)
    b.emit(
        "pipeline",
        *(() if static else (_count(b, loop),)),
        regions=(inner.block([index]),),
        grid=(len(span) if static else None,),
        windows=(),
        semantics=("arbitrary",),
    )
    after = {v: b.load(r) for v, r in zip(loop.results, scratch, strict=True)}
    rest = Block((), whole.body.ops[at + 1 :])
    b.ops += substitute(rest, after).ops
    new = whole.with_(body=replace(whole.body, ops=tuple(b.ops))).to_op()
    made = with_pipeline(kernel, new)
    ops = (*allocs.ops, *made.body.ops)
    return canonicalize(_with_static_size(made.with_(body=Block((), ops))))


def _iteration(b: Builder, loop: Loop, number: Value, scratch: Sequence[Value]) -> None:
    carried = [b.load(ref) for ref in scratch]
    yields = inline(b, loop.body, (number, *carried))
    for ref, value in zip(scratch, yields, strict=True):
        b.store(ref, value)


def _count(b: Builder, loop: Loop) -> Value:
    """The trip count of a loop; not positive if there is none."""
    count = b.cast(b.sub(loop.limit, loop.first), INDEX.dtype)
    less = b.sub(loop.step, b.index(1))
    return b.div(b.add(count, less), loop.step)


def _with_static_size(kernel: Kernel) -> Kernel:
    """The size of the inner pipeline as a number, if it is a constant."""
    kernel = canonicalize(kernel)
    whole = Pipeline.of(find_pipeline(kernel))
    known = {
        op.result: op.attrs["value"]
        for op in whole.body.ops
        if op.name == "constant" and not op.result.tile.shape
    }

    def static(op: Op) -> Op:
        if op.name != "pipeline" or not known.keys() & op.operands[:1]:
            return op
        inner = Pipeline.of(op)
        size = int(known[inner.dynamic_sizes[0]])
        return inner.with_(grid=(size,), dynamic_sizes=()).to_op()

    body = replace(whole.body, ops=tuple(map(static, whole.body.ops)))
    return with_pipeline(kernel, whole.with_(body=body).to_op())


def _moves_all(kernel: Kernel) -> bool:
    """Whether the last axis picks blocks, and nothing else picks a part by it."""
    whole = Pipeline.of(find_pipeline(kernel))
    index = whole.ids[-1]
    made = producers_of(whole.body)

    def depends(value: Value) -> bool:
        op = made.get(value)
        return value is index or (op is not None and any(map(depends, op.operands)))

    for op in walk(whole.body):
        if op.name in ("load", "store") and op.operands[0] in whole.blocks:
            scalars = (v for v in op.operands[1:] if not v.is_ref and not v.tile.shape)
            if any(map(depends, scalars)):
                return False
    last = len(whole.grid) - 1
    return any(last in moving_axes(each) for each in whole.maps)
