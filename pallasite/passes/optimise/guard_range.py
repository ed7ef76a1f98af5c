"""guard_range: a loop whose guard asks data runs from the first to the last such step.

In: a loop whose iterations do something only if a test of loaded tiles says so, as
where blocks of sorted numbers are compared with a range (`ids.max() >= first`). Out:
the same loop over the range of iterations that pass; a short loop before it computes
the test alone, and finds the range. Loads of a loop without branches are prefetched;
those before a branch are waited for, one after another. Where blocks of several
iterations lie one after another, the test is computed for all of them at once: each
reduction to a scalar makes all threads wait for each other.

Proof: an iteration that does not pass changes nothing, those in the range are tested
again, and the test depends on operands that nothing writes.
"""

from collections.abc import Mapping
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, BlockDim, Kernel, Op, Value, walk
from pallasite.ir.rewrite import inline, is_pure
from pallasite.ir.roles import Cond, Loop, Pipeline, number_of
from pallasite.ir.types import BOOL, INDEX, TileType
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.memory import VIEWS, constant_inputs, root_among
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.stacked_code import Stacked
from pallasite.passes.optimise.guard_bounds import guards_of

LEAST_STEPS = 16  # of a loop that is worth another one
MOST_AT_ONCE = 16  # iterations
MOST_ELEMENTS = 1 << 13  # of what they load
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
        ops += [op] if test is None else _narrowed(Loop.of(op), test, made)
    if len(ops) == len(pipeline.body.ops):
        return kernel
    body = replace(pipeline.body, ops=tuple(ops))
    return canonicalize(with_pipeline(kernel, pipeline.with_(body=body).to_op()))


def _test(
    loop: Loop, made: dict[Value, Op], given: frozenset[Value]
) -> list[Op] | None:
    """What computes the test that guards all of a loop's body; the last op does."""
    first, limit, step = (number_of(made, v) for v in loop.bounds)
    few = first is not None and limit is not None and limit - first < LEAST_STEPS
    if step != 1 or few:
        return None
    guards = guards_of(loop, made)
    if len(guards) != 1 or not any(op.name in HEAVY for op in walk(guards[0].taken)):
        return None
    found = _code_of(Cond.of(guards[0].op).which, loop, made, given)
    reads = any(op.name == "load" and op.result.tile.shape for op in found or ())
    return found if reads else None


def _code_of(
    value: Value, loop: Loop, made: Mapping[Value, Op], given: frozenset[Value]
) -> list[Op] | None:
    """What computes a value in an iteration, from operands and the loop's index."""
    wanted, found = {value}, list[Op]()
    for op in reversed(loop.body.ops):
        if wanted.isdisjoint(op.results):
            continue
        is_given = op.name == "load" and root_among(made, op.operands[0]) in given
        if not (is_pure(op) or op.name in VIEWS or is_given):
            return None
        wanted.update(op.operands)
        found.append(op)
    is_by_index = loop.index in wanted and not wanted & {*loop.carried}
    return found[::-1] if is_by_index else None


def _narrowed(loop: Loop, test: list[Op], made: dict[Value, Op]) -> list[Op]:
    size = MOST_AT_ONCE
    while size > 1:
        found = _several(loop, test, made, size)
        if found is not None:
            return found
        size //= 2
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


def _several(
    loop: Loop, test: list[Op], made: dict[Value, Op], size: int
) -> list[Op] | None:
    """`_narrowed`, with the test of so many iterations at a time."""
    begin = number_of(made, loop.first)
    if begin is None or begin < 0:
        return None
    b, inner = Builder(loop.op.loc), Builder(loop.op.loc)
    end = b.max(loop.first, loop.limit)
    group, low, high = (Value(INDEX, n) for n in ("group", "low", "high"))
    tile = TileType((size,), INDEX.dtype)
    every = lambda x: inner.broadcast(x, (size,), ())
    number = inner.op("iota", type=tile, dim=0)
    number = inner.add(number, every(inner.mul(group, inner.index(size))))
    code = _Tests(inner, loop.index, size, {loop.index: number})
    code.group = group
    if not all(map(code.emit, test)):
        return None
    asked = code.wide(test[-1].result, ())
    assert asked is not None
    inside = inner.and_(
        inner.ge(number, every(loop.first)), inner.lt(number, every(loop.limit))
    )
    passes = inner.and_(inner.cast(asked, BOOL), inside)
    after = inner.add(number, inner.like(1, number))
    lows = inner.select(passes, number, every(end))
    highs = inner.select(passes, after, every(loop.first))
    low_now = inner.min(low, inner.op("reduce", lows, kind="min", axes=(0,)))
    high_now = inner.max(high, inner.op("reduce", highs, kind="max", axes=(0,)))
    region = Block((group, low, high), tuple(inner.ops), (low_now, high_now))
    groups = b.div(b.add(end, b.index(size - 1)), b.index(size))
    bounds = b.index(begin // size), groups, b.index(1)
    first, limit = b.emit("for", *bounds, end, loop.first, regions=(region,))
    return [*b.ops, loop.with_(first=first, limit=limit).to_op()]


class _Tests(Stacked):
    """Tests of as many iterations as a group has, whose blocks are one after another.

    A view of blocks is one of a block that is as many times as long.
    """

    group: Value

    def access(self, op: Op) -> Value | None:
        if op.name == "block_view":
            return self.view(op)
        if op.name != "load":
            return None
        ref = self.new(op.operands[0])
        access, tile = Access.of(op), op.result.tile
        many = self.size * tile.size
        is_all = covers_whole(access.ref.ref.shape, access.index)
        if access.ref not in self.varies or not is_all or access.index_operands:
            return None
        if access.mask is not None or many > MOST_ELEMENTS:
            return None
        shape = (self.size, *tile.shape)
        return self.b.op("reshape", self.b.load(ref), shape=shape)

    def view(self, op: Op) -> Value | None:
        array, *numbers = op.operands
        window = op.attrs["window"]
        moving = [d for d, v in enumerate(numbers) if self.depends([v])]
        if len(moving) != 1 or numbers[moving[0]] is not self.index:
            return None
        (d,) = moving
        dim = window.dims[d]
        if dim.kind not in ("blocked", "squeezed") or any(dim.padding):
            return None
        if any(each.size != 1 for each in window.dims[:d]):
            return None  # blocks are not one after another
        size = self.size * (dim.size if dim.kind == "blocked" else 1)
        if array.ref.shape[d] % size:
            return None
        dims = list(window.dims)
        dims[d] = BlockDim(size)
        numbers = [self.group if n == d else self.new(v) for n, v in enumerate(numbers)]
        return self.b.op(
            "block_view", array, *numbers, window=replace(window, dims=tuple(dims))
        )
