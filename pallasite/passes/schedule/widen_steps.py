"""widen_steps: merges steps of running maxima and sums into fewer, wider ones.

In: a kernel whose last axis, or a loop in its body, steps along a dimension in blocks;
each step updates running maxima with those of its block and adds to sums that are kept
relative to them, as an online softmax does. Out: the same code with blocks several
times as wide, in fewer steps. Each step has overhead for the maxima and for rescaling
the sums; and a matmul with few columns leaves part of the matrix unit idle.
`merge_k_steps.py` does this to plain sums of matmuls, `gather_steps.py` keeps every
step as it is.

`step_sums.py` has the proof. A branch that skips some steps, as in causal attention, is
taken if any of the merged steps takes it; the others contribute nothing: minus infinity
to a maximum, zero to a sum.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    Block,
    BlockDim,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import Rewriter, dead_code, inline, map_ops, producers_of
from pallasite.ir.roles import Loop, Shown, number_of
from pallasite.ir.types import I32, TileType
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.guards import Guard, guard_of
from pallasite.passes.analysis.guards import Part as Condition
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, loop_dims
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.normal.resized_code import CannotReblock, Joined
from pallasite.passes.normal.step_sums import Fill, State, Steps
from pallasite.passes.schedule.loop_state import loop_state


def widen_steps(kernel: Kernel, widest: int) -> Kernel:
    """Merge steps of the last axis, or loop iterations, up to `widest` elements.

    Raises:
        CannotReblock: none can be merged; the message says why.
    """

    def factor(steps: RunningSteps | RunningLoop) -> int:
        most = min(steps.steps, widest // steps.dim.size)
        return largest_divisor(steps.steps, most)

    found = dims_of_steps(kernel)
    dim = walked(found)
    loops = [op for op in walk(found.pipeline.body) if op.name == "for"]
    if dim is not None and not loops:
        return wider_grid(RunningSteps(found, dim), factor)
    if len(loops) != 1:
        raise CannotReblock("no axis or loop iterates over a dimension of its blocks")
    found = dims_of_steps(loop_state(kernel))
    (loop,) = (op for op in walk(found.pipeline.body) if op.name == "for")
    return wider_loop(RunningLoop(found, Loop.of(loop)), factor)


def dims_of_steps(kernel: Kernel) -> LoopDims:
    """The dimensions of a kernel's work, if its steps may be merged or cut."""
    found = loop_dims(map_ops(kernel, with_own_tiles))
    if found is None:
        raise CannotReblock("its body is not a single grid")
    if found.refused or kernel.aliases:
        raise CannotReblock(found.refused or "operands alias results")
    return found


def with_own_tiles(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """The op with private copies of constant tiles and positions.

    One iota may serve as positions of both rows and columns.
    """
    made = [b.producers.get(v) for v in op.operands]
    shared = [o if o and o.name in ("constant", "iota") else None for o in made]
    if not any(o and o.result.tile.rank for o in shared):
        return None
    operands = tuple(
        v if o is None else b.op(o.name, **o.attrs)
        for v, o in zip(op.operands, shared, strict=True)
    )
    b.ops.append(op.with_(operands=operands))
    return op.results


def walked(found: LoopDims) -> LoopDim | None:
    """The dimension along which the last axis moves windows.

    The largest that is only read: of another, an array may have the steps' blocks in a
    row that are not parts of one block (saved tiles, one below another).
    """
    grid = found.pipeline.grid
    if not grid or grid[-1] is None or found.info.axes[-1].parallel:
        return None
    modes = [shown.window.mode for shown in found.pipeline.shown]
    moved = [dim for dim in found.dims if any(_moves(found, *w) for w in dim.windows)]
    read = [d for d in moved if all(modes[number] == "in" for number, _ in d.windows)]
    return max(read, key=lambda dim: dim.size, default=moved[0] if moved else None)


def _moves(found: LoopDims, number: int, array_dim: int) -> bool:
    """Whether the last axis is the index of a window's blocks along a dimension."""
    index_map = found.pipeline.shown[number].index_map
    *_, step = index_map.params
    return index_map.yields[array_dim] is step


def largest_divisor(count: int, most: int) -> int:
    """How many steps to merge into one."""
    return max((n for n in range(2, most + 1) if count % n == 0), default=1)


def _checked(factor: int, steps: int, size: int) -> int:
    if factor == 1:
        raise CannotReblock(f"{steps} steps of {size} are already wide or few")
    return factor


def _check_sums(steps: Steps) -> None:
    if not steps.sums:
        raise CannotReblock("steps accumulate into nothing")


# --- the code of merged steps ---


class Wider(Joined):
    """Code of several steps at once.

    Args:
        dim: the dimension along which it steps.
        size: its new size.
        step: the index that counts steps; in the new code, merged ones.
        made: the op that defines each value, including those outside the code.
        small: integers small enough to be multiplied by a block's size.
    """

    def __init__(
        self,
        dim: LoopDim,
        size: int,
        step: Value,
        made: Mapping[Value, Op],
        small: Iterable[Value] = (),
    ):
        super().__init__(dim, size, step)
        self.small = {step, *small}
        for op in made.values():
            if op.name == "constant":
                self._note_number(op)
        self.ends: Mapping[Op, tuple[Guard, int]] = {}
        self.guard: Guard | None = None
        self.fills: Mapping[Value, Fill] = {}

    def op(self, b: Builder, op: Op) -> None:
        b.loc = op.loc
        if op in self.dim.spans:
            self.new[op.result] = self._span(b, op)
        elif op in self.ends:
            self._end(b, op, *self.ends[op])
        elif self.guard is not None and op is self.guard.op:
            self._guarded(b, self.guard)
        else:
            super().op(b, op)
        for value in op.results:
            if value in self.fills:
                self.new[value] = self._filled(b, value, self.fills[value])

    def _span(self, b: Builder, op: Op) -> Value:
        """Widen a load of the part that one step sees to what all of them see."""
        access, to = Access.of(op), self.dim.members[op.result]
        index, starts, at = list(access.index), list[Value](), 0
        for d, (entry, start) in enumerate(access.split_index()):
            if isinstance(entry, Span) and at == to:
                index[d] = Span(None, self.size)
                start = self._first(b, entry, start, access)
            elif start is not None:
                (start,) = self.used(b, [start])
            at += isinstance(entry, Span)
            starts += [start] if start is not None else []
        return b.load(access.ref, tuple(index), starts)

    def _first(
        self, b: Builder, span: Span, start: Value | None, access: Access
    ) -> Value:
        form = None if start is None else self.forms.get(start)
        follows = form is not None and (form.program, form.position) == (span.size, 0)
        if form is None or not follows or form.rest is not None or access.mask:
            raise CannotReblock("a load does not follow the steps part by part")
        return b.mul(self.step, b.index(self.size))

    def _end(self, b: Builder, op: Op, guard: Guard, number: int) -> None:
        """A branch at the first or the last step."""
        tests = [
            b.op("eq", self.step, b.index(number))
            if self._varies(part.value)
            else self._condition(b, part)
            for part in guard.parts
        ]
        self._branch_if(b, guard, tests, self.block(guard.taken))

    def _guarded(self, b: Builder, guard: Guard) -> None:
        """A branch that only some steps take."""
        some = [self._some(b, part.value, part.truth) for part in guard.parts]
        tests = [test for test in some if test is not None]
        if len(tests) < len(some):
            raise CannotReblock("which of the merged steps are skipped is not known")
        self._branch_if(b, guard, tests, self.block(guard.taken))

    def _branch_if(
        self, b: Builder, guard: Guard, tests: Sequence[Value], taken: Block
    ) -> None:
        if not tests:
            b.ops += taken.ops
            return
        total = tests[0]
        for test in tests[1:]:
            total = b.and_(total, test)
        idle = Block((), ())
        which = b.cast(total, self.step.tile.dtype)
        b.emit("cond", which, regions=(idle, taken))

    def _condition(self, b: Builder, part: Condition) -> Value:
        new = self.new.get(part.value, part.value)
        return new if part.truth else b.not_(new)

    def _filled(self, b: Builder, value: Value, fill: Fill) -> Value:
        new, d = self.new[value], self.dim.members[value]
        shape = new.tile.shape
        for part in fill.unless:
            taken = self._taken(b, part.value, shape, d)
            sides = new, b.like(fill.number, new)
            new = b.select(taken, *(sides if part.truth else sides[::-1]))
        return new

    def _taken(self, b: Builder, test: Value, shape: tuple[int, ...], d: int) -> Value:
        """Which positions belong to steps for which a bool is true.

        Comparisons of a step's number become comparisons of its positions, which
        probably exist already, while the number would be a quotient. `number <= n` is
        `position <= size * n + size - 1`.
        """
        op = self.made.get(test)
        if op is None or op.name not in _LAST or not self.small.issuperset(op.operands):
            return super()._taken(b, test, shape, d)
        adds = _LAST[op.name]
        sides: list[Value] = []
        for value, to_last in zip(op.operands, adds, strict=True):
            if value is self.step:
                first = b.broadcast(b.mul(value, b.index(self.size)), shape)
                line = b.op("iota", type=TileType(shape, I32), dim=d)
                sides.append(b.add(first, line))
                continue
            edge = b.mul(value, b.index(self.dim.size))
            if to_last:
                edge = b.add(edge, b.index(self.dim.size - 1))
            sides.append(b.broadcast(edge, shape))
        return b.op(op.name, *sides)


# Comparisons of a step's number; on which side another number is the end of its block.
_LAST = {"le": (0, 1), "lt": (1, 0), "ge": (1, 0), "gt": (0, 1)}


class RunningSteps:
    """Steps of the last axis that only update maxima and add to sums.

    Args:
        found: the kernel.
        dim: the dimension along which it steps.
        cut: whether steps are to become shorter, not longer.

    Raises:
        CannotReblock: they do more, or are not known to.
    """

    def __init__(self, found: LoopDims, dim: LoopDim, cut: bool = False):
        self.found, self.dim, self.pipeline = found, dim, found.pipeline
        self.cut = cut
        steps = self.pipeline.grid[-1]
        assert steps is not None
        self.steps, self.step = steps, self.pipeline.ids[-1]
        if dim.is_twice:
            raise CannotReblock("steps iterate over two dimensions of one tile")
        if dim.spans:
            raise CannotReblock(
                "a load selects a part of the dimension that steps iterate over"
            )
        for number, shown in enumerate(self.pipeline.shown):
            self._check_window(number, shown)
        self.made = producers_of(found.kernel.body)
        self.begins: dict[Value, Value] = {}  # by ref, what the first step stores
        self.ends: dict[Op, tuple[Guard, int]] = {}
        self.guard: Guard | None = None
        self.code: list[Op] = []
        for op in self.pipeline.body.ops:
            self._take(op)
        states = [*self._states()]
        self.proved = Steps(self.code, states, dim, self.made)
        _check_sums(self.proved)
        self._check_ends({state.new for state in states})

    def _check_window(self, number: int, shown: Shown) -> None:
        """Windows must show the next part of the dimension at each step, or stay.

        Where steps are cut, what is read may move in any way: parts of a step see its
        window, or a part of it.
        """
        name = shown.array.name or f"window {number}"
        (*_, step), yields = shown.index_map.params, shown.index_map.yields
        places = [d for d, value in enumerate(yields) if value is step]
        inside = any(step in op.operands for op in walk(shown.index_map))
        wanted = [d for n, d in self.dim.windows if n == number]
        is_read = shown.window.mode == "in"
        follows = not inside and places == wanted
        if not follows and not (self.cut and is_read):
            raise CannotReblock(f"{name} does not follow the steps block by block")
        if any(d.kind == "bounded" for d in shown.window.dims):
            raise CannotReblock(f"{name} has blocks of several sizes")
        if wanted and not is_read:
            raise CannotReblock(f"{name} is written at each step")
        for d in wanted:
            extent = shown.array.ref.shape[d]
            if follows:
                past_edge = self.steps * self.dim.size > extent
            else:
                past_edge = extent % self.dim.size != 0
            if past_edge and not (
                follows and self._may_hang_over(shown.window, extent)
            ):
                raise CannotReblock(f"the last block of {name} extends past the edge")

    # --- what the body does ---

    def _may_hang_over(self, window: Window, extent: int) -> bool:
        """Whether blocks of another size show the same past the end of an array.

        Merged ones do as long as each step's block begins inside, since others would be
        moved back. Parts may be past the end entirely, and are zero then.
        """
        if self.cut:
            return window.fill == 0
        return (self.steps - 1) * self.dim.size < extent

    def _take(self, op: Op) -> None:
        guard = guard_of(op, self.made) if op.name == "cond" else None
        if op.name != "cond":
            self.code.append(op)
            return
        if guard is None or op.results:
            raise CannotReblock("steps have two different branches")
        number = next((n for p in guard.parts if (n := self._end(p)) is not None), None)
        if number is None:
            if self.guard is not None:
                raise CannotReblock("steps have two branches")
            self.guard = guard
            self.code += guard.taken.ops
            return
        if sum(self.depends(part, [self.step]) for part in guard.parts) > 1:
            raise CannotReblock(
                "a branch at the first or last step has a further condition"
            )
        if (number == 0) == any(o.name == "store" for o in self.code):
            raise CannotReblock("a branch at the first or last step is out of order")
        if any(self.step in o.operands for o in walk(guard.taken)):
            raise CannotReblock("a branch at one step uses the number of that step")
        self.ends[op] = guard, number
        if number == 0:
            stores = [o for o in guard.taken.ops if o.name == "store"]
            self.begins.update((o.operands[0], o.operands[1]) for o in stores)

    def _check_ends(self, totals: set[Value]) -> None:
        """Branches at one step may use totals, but nothing else of that step."""
        own = {*self.dim.members, *(s.old for s in self.proved.states)}
        for op in self.code:
            if own.intersection(op.operands):
                own.update(v for v in op.results if v not in totals)
        for guard, _ in self.ends.values():
            if own.intersection(v for op in walk(guard.taken) for v in op.operands):
                raise CannotReblock("a branch at one step uses the block of that step")

    def _end(self, part: Condition) -> int | None:
        """The number of the first or last step, if a condition tests for it."""
        op = self.made.get(part.value)
        if op is None or op.name != "eq" or not part.truth:
            return None
        if self.step not in op.operands:
            return None
        for value in op.operands:
            number = None if value is self.step else number_of(self.made, value)
            if number is not None and number in (0, self.steps - 1):
                return int(number)
        return None

    def _states(self) -> Iterator[State]:
        """Memory that steps read, change and store, once each."""
        stores = [op for op in self.code if op.name == "store"]
        refs = [op.operands[0] for op in stores]
        if self.guard is not None:
            inside = set(self.guard.taken.ops)
            if not inside.issuperset(stores):
                raise CannotReblock("steps store outside their branch, too")
        kept = {*self.pipeline.blocks}
        kept |= {o.result for o in self.found.kernel.body.ops if o.name == "alloc"}
        if len(set(refs)) < len(refs) or not kept.issuperset(refs):
            raise CannotReblock("steps store twice, or a part")
        for op in self.code:
            row = table()[op.name]
            if op.regions or (row.effect is Effect.WRITE and op.name != "store"):
                raise CannotReblock(f"steps have a '{op.name}'")
            views = (v for v in op.results if v.is_ref)
            if any(views) and set(refs) & set(op.operands):
                raise CannotReblock("steps read their accumulators in another way")
        for store in stores:
            yield self._state(store)

    def _state(self, store: Op) -> State:
        ref, new, *_ = store.operands
        before = self.code[: self.code.index(store)]
        loads = [o for o in self.code if o.name == "load" and o.operands[0] is ref]
        if len(loads) != 1 or loads[0] not in before:
            raise CannotReblock("steps do not read once what they store")
        (load,) = loads
        whole = tuple(Span(0, n) for n in ref.ref.shape)
        accesses = Access.of(load), Access.of(store)
        if any(a.index != whole or a.mask is not None for a in accesses):
            raise CannotReblock("steps store a part of a block")
        number = number_of(self.made, self.begins[ref]) if ref in self.begins else None
        return State(load.result, new, number is not None and isfinite(number))

    @property
    def all_take_the_first(self) -> bool:
        """Whether no program skips the first step."""
        if self.guard is None:
            return True
        table = StepTable(self.pipeline.ids, self.pipeline.grid)
        table.add_ops(self.pipeline.body.ops)
        tests = [(table.of(part.value), part.truth) for part in self.guard.parts]
        return all(
            test is not None and (test[..., 0] == truth).all() for test, truth in tests
        )

    def depends(self, part: Condition, on: Sequence[Value]) -> bool:
        pending = [part.value]
        while pending:
            value = pending.pop()
            if value in on:
                return True
            op = self.made.get(value)
            pending += op.operands if op is not None else ()
        return False


def wider_grid(steps: RunningSteps, factor: Callable[[RunningSteps], int]) -> Kernel:
    """Merge steps of the last axis.

    Args:
        steps: what they do.
        factor: how many become one.

    Raises:
        CannotReblock: the factor is one, or a value has no wider form.
    """
    dim, pipeline, guard = steps.dim, steps.pipeline, steps.guard
    number = _checked(factor(steps), steps.steps, dim.size)
    size = dim.size * number
    code = Wider(dim, size, steps.step, steps.made, pipeline.ids)
    code.guard = guard
    code.ends = {op: (test, n // number) for op, (test, n) in steps.ends.items()}
    if guard is not None:
        skips = tuple(p for p in guard.parts if steps.depends(p, [steps.step]))
        same = tuple(p for p in skips if not steps.depends(p, pipeline.ids[:-1]))
        code.fills = steps.proved.fills(skips, same) if skips else {}
    windows = list(pipeline.windows)
    for window, d in dim.windows:
        dims = list(windows[window].dims)
        dims[d] = BlockDim(size)
        windows[window] = replace(windows[window], dims=tuple(dims))
    new = pipeline.with_(
        grid=(*pipeline.grid[:-1], steps.steps // number),
        windows=tuple(windows),
        body=code.block(pipeline.body),
    ).to_op()
    return dead_code(with_pipeline(steps.found.kernel, new))


class RunningLoop:
    """Iterations of a loop that only update maxima and add to sums.

    Raises:
        CannotReblock: they do more, or are not known to.
    """

    def __init__(self, found: LoopDims, loop: Loop):
        self.found, self.loop = found, loop
        body = found.pipeline.body
        self.made = producers_of(body)
        self.made |= {v: o for o in found.kernel.body.ops for v in o.results}
        ops = loop.body.ops
        dims = [d for d in found.inner if any(op in d.spans for op in ops)]
        if len(dims) != 1 or dims[0].is_twice:
            raise CannotReblock("loop iterations do not run along one dimension")
        (self.dim,) = dims
        self._check_code(ops)
        bounds = [number_of(self.made, v) for v in loop.bounds]
        if bounds[0] != 0 or bounds[2] != 1 or not isinstance(bounds[1], int):
            raise CannotReblock("the trip count is known only at run time")
        self.steps = bounds[1]
        for op in self.dim.spans:
            self._check_inside(op)
        triples = zip(loop.carried, loop.yields, loop.inits, strict=True)
        states = [State(old, new, self._is_finite(init)) for old, new, init in triples]
        self.proved = Steps(ops, states, self.dim, self.made)
        _check_sums(self.proved)

    def _is_finite(self, value: Value) -> bool:
        number = number_of(self.made, value)
        return number is not None and isfinite(number)

    def _check_code(self, ops: Sequence[Op]) -> None:
        """Everything that gets wider must be defined in the loop, or be constant."""
        for op in ops:
            if op.regions or table()[op.name].effect is Effect.WRITE:
                raise CannotReblock(f"iterations have a '{op.name}'")
        inside = {v for op in ops for v in op.results}
        self.outside: list[Op] = []
        for value in self.dim.members:
            if value in inside:
                continue
            op = self.made.get(value)
            if op is None or op.name not in ("constant", "iota"):
                raise CannotReblock(
                    "the dimension that the loop iterates over is used outside the loop"
                )
            self.outside.append(op)

    def _check_inside(self, op: Op) -> None:
        access, to = Access.of(op), self.dim.members[op.result]
        spans = [d for d, e in enumerate(access.index) if isinstance(e, Span)]
        if len(spans) != op.result.tile.rank or len(access.index) != len(
            access.ref.ref.shape
        ):
            raise CannotReblock("a load does not follow the steps part by part")
        if self.steps * self.dim.size > access.ref.ref.shape[spans[to]]:
            raise CannotReblock("the last iteration reads past the end")


def wider_loop(steps: RunningLoop, factor: Callable[[RunningLoop], int]) -> Kernel:
    """Merge iterations of a loop; arguments as for `wider_grid`."""
    loop, dim = steps.loop, steps.dim
    number = _checked(factor(steps), steps.steps, dim.size)

    def joined(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op is not loop.op:
            return None
        code = Wider(dim, dim.size * number, loop.index, steps.made)
        before = Builder(op.loc)
        for each in steps.outside:
            code.op(before, each)
        body = code.block(loop.body)
        body = replace(body, ops=(*before.ops, *body.ops))
        if number == steps.steps:
            return inline(b, body, [loop.first, *loop.inits])
        limit = b.like(steps.steps // number, loop.limit)
        bounds = loop.first, limit, loop.step
        return b.emit("for", *bounds, *loop.inits, regions=(body,))

    return dead_code(map_ops(steps.found.kernel, joined))
