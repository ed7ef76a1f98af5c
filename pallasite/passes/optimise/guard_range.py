"""guard_range: a loop whose guard asks data runs from the first to the last such step.

In: a loop whose iterations do something only if a test of loaded tiles says so, as
where blocks of sorted numbers are compared with a range (`ids.max() >= first`). Out:
the same loop over the range of iterations that pass; a short loop before it computes
the test alone, and finds the range. Loads of a loop without branches are prefetched;
those before a branch are waited for, one after another.

Proof: an iteration that does not pass changes nothing, those in the range are tested
again, and the test depends on operands that nothing writes.
"""

from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import inline, is_pure
from pallasite.ir.roles import Cond, Loop, Pipeline
from pallasite.ir.types import BOOL, INDEX
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.memory import VIEWS, constant_inputs, root_among
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.guard_bounds import guards_of

LEAST_STEPS = 16  # of a loop that is worth another one
HEAVY = frozenset({"dot", "for"})  # what is guarded


def guard_range(kernel: Kernel) -> Kernel:
    """Narrow the ranges of a program's loops, if tests of data are all that they do."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if len(grids) != 1:
        return kernel
    pipeline = Pipeline.of(grids[0])
    made = {v: op for op in walk(kernel.body) for v in op.results}
    given = constant_inputs(kernel)
    ops: list[Op] = []
    for op in pipeline.body.ops:
        test = _test(Loop.of(op), made, given) if op.name == "for" else None
        ops += [op] if test is None else _narrowed(Loop.of(op), test)
    if len(ops) == len(pipeline.body.ops):
        return kernel
    body = replace(pipeline.body, ops=tuple(ops))
    return canonicalize(with_pipeline(kernel, pipeline.with_(body=body).to_op()))


def _test(
    loop: Loop, made: dict[Value, Op], given: frozenset[Value]
) -> list[Op] | None:
    """What computes the test that guards all of a loop's body; the last op does."""
    first, limit, step = (_number(v, made) for v in loop.bounds)
    few = first is not None and limit is not None and limit - first < LEAST_STEPS
    if step != 1 or few:
        return None
    guards = guards_of(loop, made)
    if len(guards) != 1 or not any(op.name in HEAVY for op in walk(guards[0].taken)):
        return None
    wanted, found = {Cond.of(guards[0].op).which}, list[Op]()
    for op in reversed(loop.body.ops):
        if wanted.isdisjoint(op.results):
            continue
        is_given = op.name == "load" and root_among(made, op.operands[0]) in given
        if not (is_pure(op) or op.name in VIEWS or is_given):
            return None
        wanted.update(op.operands)
        found.append(op)
    reads = any(op.name == "load" and op.result.tile.shape for op in found)
    if not reads or loop.index not in wanted or wanted & {*loop.carried}:
        return None
    return found[::-1]


def _number(value: Value, made: dict[Value, Op]) -> int | None:
    op = made.get(value)
    return op.attrs["value"] if op is not None and op.name == "constant" else None


def _narrowed(loop: Loop, test: list[Op]) -> list[Op]:
    b, inner = Builder(loop.op.loc), Builder(loop.op.loc)
    end = b.max(loop.first, loop.limit)
    index, low, high = (Value(INDEX, n) for n in ("step", "low", "high"))
    code = Block((loop.index,), tuple(test), test[-1].results)
    (which,) = inline(inner, code, (index,))
    passes = inner.cast(which, BOOL)
    after = inner.add(index, inner.index(1))
    low_now = inner.min(low, inner.select(passes, index, end))
    high_now = inner.max(high, inner.select(passes, after, loop.first))
    region = Block((index, low, high), tuple(inner.ops), (low_now, high_now))
    first, limit = b.emit("for", *loop.bounds, end, loop.first, regions=(region,))
    return [*b.ops, loop.with_(first=first, limit=limit).to_op()]
