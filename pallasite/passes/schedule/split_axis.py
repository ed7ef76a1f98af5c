"""split_axis: an axis that carries something becomes parts that run concurrently.

`split(kernel, state, parts)` divides a sequential grid axis of n steps into parts of
consecutive steps. What was one kernel becomes a `Program` of up to three:

- *parts*: every part runs its steps with states of its own, which start neutral; their
  final contents are extra outputs with a leading dimension for the part;
- *merge*: reduces these outputs along the parts, in a fixed order. If other steps than
  the last need the state (`AxisState.prefix`), it is a scan along the parts instead;
- *finish*: what the last step does with the merged state. For a prefix, the original
  code, part by part, each from the state that the parts before it leave.

All are ordinary kernels; results are the same, bit for bit, from run to run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, BlockDim, Kernel, Op, Value, Window, walk
from pallasite.ir.rewrite import clone, dead_code, inline, with_regions
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ops.neutral import neutral
from pallasite.passes.analysis.axis_state import (
    EACH,
    FINISH,
    FREE,
    INIT,
    UPDATE,
    AxisState,
    State,
)
from pallasite.passes.analysis.grid import GridInfo, analyze, find_pipeline
from pallasite.passes.analysis.old_elements import RELATIVE
from pallasite.passes.optimise.unused import drop_unused
from pallasite.passes.schedule.merge_parts import (
    finite_start,
    merge_kernel,
    online_merge,
)


@dataclass(frozen=True)
class Step:
    """One kernel of a program, and which arrays are its operands.

    Arrays are numbered: the program's operands, then the outputs of all steps in order.
    An operand may have another shape than the array, with as many elements.
    """

    kernel: Kernel
    operands: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return self.kernel.num_outputs


@dataclass(frozen=True)
class Order:
    """Steps sorted by a number of each, which XLA does before a kernel.

    Its outputs: where the steps of each number start in the order, with the end, and
    the order, of steps numbered as in a grid. Steps of a number keep their order.

    Attributes:
        number: a kernel without a grid: the number of a step, given its grid indices,
            and further operands.
        sizes: the axes of the steps.
        count: how many numbers there are.
        operands: arrays, as those of a `Step`.
    """

    number: Kernel
    sizes: tuple[int, ...]
    count: int
    operands: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return 2


@dataclass(frozen=True)
class Result:
    """A result of a program: an array, or the last element along its first axis."""

    array: int
    last: bool = False


@dataclass(frozen=True)
class Program:
    """Several kernels that together compute what one did."""

    steps: tuple[Step | Order, ...]
    results: tuple[Result, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(step.kernel for step in self.steps if isinstance(step, Step))

    def with_step(self, n: int, inner: "Program", operands: int) -> "Program":
        """The same with a kernel as a program itself.

        `operands`: how many this program has.
        """
        one = self.steps[n]
        first = operands + sum(s.outputs for s in self.steps[:n])
        given, made = len(one.operands), one.outputs
        more = sum(step.outputs for step in inner.steps)

        def inside(array: int) -> int:
            return one.operands[array] if array < given else first + array - given

        def after(array: int) -> int:
            if array < first:
                return array
            own = array - first
            return (
                inside(inner.results[own].array) if own < made else array + more - made
            )

        at = lambda steps, number: [
            replace(step, operands=tuple(map(number, step.operands))) for step in steps
        ]
        steps = at(inner.steps, inside), at(self.steps[n + 1 :], after)
        results = [replace(r, array=after(r.array)) for r in self.results]
        return Program((*self.steps[:n], *steps[0], *steps[1]), tuple(results))


def split(kernel: Kernel, state: AxisState, parts: int) -> Program:
    """Divide an axis.

    Args:
        kernel: a kernel with one pipeline.
        state: what its axis carries, with a known merge.
        parts: how many parts are wanted; there may be fewer, so that none is empty.
    """
    assert not state.reason, state.reason
    return _Split(kernel, state, parts).program()


def even_parts(steps: int, parts: int) -> int:
    """A number of parts near the given one, of equal lengths if there is one.

    Equal parts need no check for steps past the end; up to twice as many, or two thirds
    as many, do no harm.
    """
    parts = max(1, min(parts, steps))
    near = range(-(-2 * parts // 3), min(2 * parts, steps) + 1)
    even = [n for n in near if steps % n == 0]
    if even:
        return min(even, key=lambda n: abs(n - parts))
    return -(-steps // -(-steps // parts))


@dataclass(frozen=True)
class _Place:
    """How a kernel's pipeline sees the axis: new grid, ids and the old index."""

    grid: tuple[int | None, ...]
    semantics: tuple[str, ...]
    make_ids: Callable[[], tuple[Value, ...]]
    old_ids: Callable[[Builder, Sequence[Value]], list[Value]]


class _Split:
    def __init__(self, kernel: Kernel, state: AxisState, parts: int):
        self.kernel, self.state, self.axis = kernel, state, state.axis
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.info: GridInfo = analyze(kernel)
        size = self.pipeline.grid[self.axis]
        assert size is not None
        self.size = size
        parts = even_parts(size, parts)
        self.length = -(-size // parts)
        self.parts = -(-size // self.length)
        self.outputs = {ref: n for n, ref in enumerate(kernel.outputs)}
        self.arrays = len(kernel.inputs)  # how many the program has so far
        self.steps: list[Step] = []

    def program(self) -> Program:
        written = {op.operands[0] for op in self.with_role(FINISH)}
        partial, own = self.parts_kernel()
        merged: dict[State, int] = {}
        for group in self.groups():
            merged |= self.merge(group, partial)
        if self.state.prefix:
            return self.prefix(merged)
        results = dict(own)
        for state in self.state.states:
            if state.output is not None:
                results[self.array_of(state.output)] = Result(merged[state])
        if written:
            results |= self.finish(merged, written)
        found = tuple(results[ref] for ref in self.kernel.outputs)
        return Program(tuple(self.steps), found)

    # --- the three kernels ---

    def parts_kernel(self) -> tuple[dict[State, int], dict[Value, Result]]:
        """Every part's own states; and outputs that depend on no state."""
        kept = (INIT, UPDATE) if self.state.prefix else (INIT, UPDATE, FREE)
        body = self.kept(kept)
        code = _Kernel(self, "parts", self.split_place())
        for state in self.state.states:
            code.add_state(state, "out", self.neutral_value)
        code.finish(body, guarded=True)
        kernel, numbers = code.kernel, self.add(code)
        partial = {s: numbers[code.array(s)] for s in self.state.states}
        own = {
            ref: Result(numbers[ref]) for ref in kernel.outputs if ref in self.outputs
        }
        return partial, own

    def groups(self) -> list[list[State]]:
        """States that merge together: a maximum, and the sums relative to it."""
        found = {s.ref: [s] for s in self.state.states if s.scale is None}
        for state in self.state.states:
            if state.scale is not None:
                found[state.scale].append(state)
        return list(found.values())

    def merge(
        self, group: Sequence[State], partial: Mapping[State, int]
    ) -> dict[State, int]:
        """The states of all parts as one; or, for a prefix, of all up to each part."""
        name = f"{self.kernel.name}_merge"
        first, *sums = group
        size = prod(self.partial_shape(first)[1:])
        if sums:
            outer = prod(n or 1 for n in self.pipeline.grid[: self.axis])
            kernel = online_merge(name, self.parts, outer, first, sums)
        else:
            dtype, scan = first.ref.ref.dtype, self.state.prefix
            kernel = merge_kernel(name, first.merge, self.parts, size, dtype, scan)
        self.steps.append(Step(kernel, tuple(partial[s] for s in group)))
        before, self.arrays = self.arrays, self.arrays + len(group)
        return {state: before + n for n, state in enumerate(group)}

    def finish(
        self, merged: Mapping[State, int], written: set[Value]
    ) -> dict[Value, Result]:
        """What the last step does once the states are merged."""
        code = _Kernel(self, "finish", self.last_place())
        body = self.kept((FINISH,), reload=True)
        for state in self.state.states:
            code.add_merged(state, merged[state], state.ref in written)
        code.finish(body)
        numbers = self.add(code)
        return {r: Result(numbers[r]) for r in code.kernel.outputs}

    def prefix(self, merged: Mapping[State, int]) -> Program:
        """The original code, each part from the state that those before it leave."""
        code = _Kernel(self, "prefix", self.split_place())
        for state in self.state.states:
            code.add_start(state, merged[state])
        for number in self.state.last:
            code.add_part_of(number)
        code.finish(self.kept((INIT, UPDATE, FINISH, FREE, EACH)), guarded=True)
        numbers = self.add(code)
        results = []
        for ref in self.kernel.outputs:
            array = code.replaced.get(ref, ref)
            results.append(Result(numbers[array], array is not ref))
        return Program(tuple(self.steps), tuple(results))

    def add(self, code: "_Kernel") -> dict[Value, int]:
        """Append a kernel to the program; gives the numbers of its outputs."""
        kernel = code.kernel
        inputs = {ref: n for n, ref in enumerate(self.kernel.inputs)} | code.operands
        self.steps.append(Step(kernel, tuple(inputs[ref] for ref in kernel.inputs)))
        first, self.arrays = self.arrays, self.arrays + kernel.num_outputs
        return {ref: first + n for n, ref in enumerate(kernel.outputs)}

    # --- parts of the original code ---

    def with_role(self, role: str) -> list[Op]:
        return [op for op, found in self.state.roles.items() if found == role]

    def idle_starts(self) -> set[Op]:
        """First steps that set a state to what every part starts with anyway."""
        body = self.pipeline.body
        made = {op.result: op for op in walk(body) if op.name == "constant"}
        states = {state.ref: state for state in self.state.states}
        changed, found = set[Value](), set[Op]()
        for op in walk(body):
            role = self.state.roles.get(op)
            if role is None or op.operands[0] not in states:
                continue
            state = states[op.operands[0]]
            value = made.get(op.operands[1])
            same = value is not None and value.attrs["value"] == self.start(state)
            if role == INIT and same and state.ref not in changed:
                # Inner steps may set it again.
                if not self.inner_shared(state):
                    found.add(op)
            else:
                changed.add(state.ref)
        return found

    def kept(self, roles: Sequence[str], reload: bool = False) -> Block:
        """The body without the writes that have other roles.

        `reload`: a value that a dropped update stored is read back instead.
        """
        mapping: dict[Value, Value] = {}
        idle = self.idle_starts()

        def strip(block: Block) -> Block:
            ops: list[Op] = []
            for op in block.ops:
                role = self.state.roles.get(op)
                if op in idle:
                    continue
                if role is None or role in roles:
                    regions = [strip(r) for r in op.regions]
                    operands = tuple(mapping.get(v, v) for v in op.operands)
                    ops.append(with_regions(op.with_(operands=operands), regions))
                elif reload and op in self.state.aliases:
                    b = Builder(op.loc)
                    mapping[self.state.aliases[op]] = b.load(op.operands[0])
                    ops += b.ops
            yields = tuple(mapping.get(v, v) for v in block.yields)
            return Block(block.params, tuple(ops), yields)

        return strip(self.pipeline.body)

    def array_of(self, output: int) -> Value:
        return self.pipeline.arrays[output]

    def partial_shape(self, state: State) -> tuple[int, ...]:
        """The shape of a state of all parts."""
        if state.output is not None:
            return (self.parts, *self.array_of(state.output).ref.shape)
        outer = [n or 1 for n in self.pipeline.grid[: self.axis]]
        return (self.parts, *outer, *state.ref.ref.shape)

    def neutral_value(self, b: Builder, state: State) -> Value:
        return b.constant(self.start(state), state.ref.ref.tile)

    def start(self, state: State) -> int | float:
        """What a state of a part starts with."""
        # What equals a maximum is counted, also where that is minus infinity.
        sums = (s for s in self.state.states if s.rate < inf)
        is_scale = any(each.scale is state.ref for each in sums)
        if is_scale:
            return finite_start(state)
        merge = "sum" if state.merge == RELATIVE else state.merge
        return neutral(merge, state.ref.ref.dtype)

    def inner_shared(self, state: State) -> list[int]:
        """Inner axes along which a state does not move."""
        inner = range(self.axis + 1, len(self.pipeline.grid))
        moves = None if state.output is None else self.info.windows[state.output]
        return [
            a
            for a in inner
            if self.pipeline.grid[a] != 1 and (moves is None or a not in moves.axes)
        ]

    # --- how the kernels see the axis ---

    def split_place(self) -> _Place:
        """Two axes instead of one: parts, and steps in a part."""
        old, a = self.pipeline, self.axis

        def old_ids(b: Builder, ids: Sequence[Value]) -> list[Value]:
            first = b.mul(ids[a], b.index(self.length))
            return [*ids[:a], b.add(first, ids[a + 1]), *ids[a + 2 :]]

        return _Place(
            (*old.grid[:a], self.parts, self.length, *old.grid[a + 1 :]),
            (*old.semantics[:a], "parallel", "arbitrary", *old.semantics[a + 1 :]),
            lambda: _fresh((*old.ids[: a + 1], *old.ids[a:])),
            old_ids,
        )

    def last_place(self) -> _Place:
        """One step along the axis, which is its last."""
        old, a = self.pipeline, self.axis

        def old_ids(b: Builder, ids: Sequence[Value]) -> list[Value]:
            return [*ids[:a], b.index(self.size - 1), *ids[a + 1 :]]

        return _Place(
            (*old.grid[:a], 1, *old.grid[a + 1 :]),
            old.semantics,
            lambda: _fresh(old.ids),
            old_ids,
        )


def _fresh(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(Value(v.type, v.name) for v in values)


class _Kernel:
    """One kernel in the making: windows for states, and code before the body."""

    def __init__(self, split: _Split, suffix: str, place: _Place):
        self.split, self.suffix, self.place = split, suffix, place
        self.axis = split.axis
        self.ids = place.make_ids()
        self.shown: list[Shown] = []
        self.mapping: dict[Value, Value] = {}  # states to what holds them here
        self.replaced: dict[Value, Value] = {}  # output arrays to those of all parts
        self.operands: dict[Value, int] = {}  # further operands, by number of array
        self.first: list[tuple[State, Callable[[Builder], Value]]] = []
        self.arrays: dict[State, Value] = {}

    def array(self, state: State) -> Value:
        return self.arrays[state]

    # --- windows ---

    def window(
        self,
        state: State,
        mode: str,
        part: Callable[[Builder, Sequence[Value]], Value] | None,
        name: str,
    ) -> Shown:
        """A window on the states of all parts (or on one, if `part` is None)."""
        split = self.split
        shape = split.partial_shape(state)
        array = Value(
            T.RefType(shape if part else shape[1:], state.ref.ref.dtype, "any"), name
        )
        ids = self.place.make_ids()
        b = Builder()
        old_ids = self.place.old_ids(b, ids)
        lead = [part(b, ids)] if part else []
        dims = [BlockDim(1, "squeezed") for _ in lead]
        if state.output is not None:
            shown = split.pipeline.shown[state.output]
            yields = inline(b, shown.index_map, old_ids)
            dims += shown.window.dims
        else:
            outer = old_ids[: self.axis]
            yields = (*outer, *(b.index(0) for _ in state.ref.ref.shape))
            dims += [BlockDim(1, "squeezed") for _ in outer]
            dims += [BlockDim(n) for n in state.ref.ref.shape]
        region = b.block(ids, (*lead, *yields))
        block = Value(T.RefType(state.ref.ref.shape, state.ref.ref.dtype), name)
        return Shown(array, Window(tuple(dims), mode), region, block)

    def part(self, b: Builder, ids: Sequence[Value]) -> Value:
        return ids[self.axis]

    def part_before(self, b: Builder, ids: Sequence[Value]) -> Value:
        return b.max(b.sub(ids[self.axis], b.index(1)), b.index(0))

    def add_state(
        self, state: State, mode: str, start: Callable[[Builder, State], Value]
    ) -> None:
        """A state of the part's own, which is also an output."""
        shown = self.window(state, mode, self.part, state.ref.name or "state")
        self.shown.append(shown)
        self.mapping[state.ref] = shown.block
        self.arrays[state] = shown.array
        if state.output is not None:
            self.replaced[self.split.array_of(state.output)] = shown.array
        self.first.append((state, lambda b: start(b, state)))

    def add_merged(self, state: State, number: int, written: bool) -> None:
        """A merged state; where the code writes it, in the output or scratch."""
        shown = self.window(state, "in", None, f"{state.ref.name or 'state'}_merged")
        self.shown.append(shown)
        self.operands[shown.array] = number
        if written:
            self.first.append((state, lambda b: b.load(shown.block)))
        else:
            self.mapping[state.ref] = shown.block

    def add_start(self, state: State, number: int) -> None:
        """A state that starts a part as those before it leave it."""
        name = f"{state.ref.name or 'state'}_before"
        shown = self.window(state, "in", self.part_before, name)
        self.shown.append(shown)
        self.operands[shown.array] = number

        def start(b: Builder, state: State = state) -> Value:
            before = b.load(shown.block)
            is_first = b.eq(self.ids[self.axis], b.index(0))
            which = b.broadcast(is_first, before.tile.shape)
            return b.select(which, self.split.neutral_value(b, state), before)

        if state.output is not None:
            self.add_state(state, "out", lambda b, _: start(b))
        else:
            self.first.append((state, start))

    def add_part_of(self, number: int) -> None:
        """An output that the last step decides: one for each part."""
        block = self.split.pipeline.blocks[number]
        shown = self.window(State(block, "", number), "out", self.part, block.name)
        self.shown.append(shown)
        self.mapping[block] = shown.block
        self.replaced[self.split.array_of(number)] = shown.array

    # --- the kernel ---

    def finish(self, body: Block, guarded: bool = False) -> None:
        split, old = self.split, self.split.pipeline
        b = Builder(old.op.loc)
        old_ids = self.place.old_ids(b, self.ids)
        self.emit_starts(b, guarded)
        inner = clone(
            Block((), body.ops),
            dict(zip(old.ids, old_ids, strict=True)) | self.mapping,
        )
        if guarded and split.parts * split.length != split.size:
            inside = b.lt(old_ids[self.axis], b.index(split.size))
            _when(b, inside, inner.ops)
        else:
            b.ops += inner.ops
        shown = [*self.old_windows(b.ops), *self.shown]
        params = (*self.ids, *(each.block for each in shown))
        pipeline = replace(old, grid=self.place.grid, semantics=self.place.semantics)
        op = pipeline.showing(shown, Block(params, tuple(b.ops))).to_op()
        ops = [op if each is old.op else each for each in split.kernel.body.ops]
        self.kernel = self.cleaned(Block((), tuple(ops)))

    def old_windows(self, ops: Sequence[Op]) -> list[Shown]:
        """The original windows that the code still uses."""
        used = {v for op in walk(Block((), tuple(ops))) for v in op.operands}
        found = []
        for each in self.split.pipeline.shown:
            if each.block not in used:
                continue
            ids = self.place.make_ids()
            b = Builder()
            yields = inline(b, each.index_map, self.place.old_ids(b, ids))
            found.append(each._replace(index_map=b.block(ids, yields)))
        return found

    def emit_starts(self, b: Builder, in_part: bool) -> None:
        """Set each state at its first step here."""
        for state, value in self.first:
            ref = self.mapping.get(state.ref, state.ref)
            shift = 1 if in_part else 0
            axes = [a + shift for a in self.split.inner_shared(state)]
            if in_part:
                axes.insert(0, self.axis + 1)
            inside = Builder(b.loc)
            inside.store(ref, value(inside))
            test: Value | None = None
            for axis in axes:
                first = b.eq(self.ids[axis], b.index(0))
                test = first if test is None else b.and_(test, first)
            if test is None:
                b.ops += inside.ops
            else:
                _when(b, test, inside.ops)

    def cleaned(self, body: Block) -> Kernel:
        """With the refs and scratch that are used, in their original order."""
        old = self.split.kernel
        used = {v for op in walk(body) for v in op.operands}
        added = [each for each in self.shown if each.array in used]
        inputs = [ref for ref in old.inputs if ref in used]
        inputs += [each.array for each in added if each.window.mode == "in"]
        outputs = [ref for ref in old.outputs if ref in used]
        outputs += [each.array for each in added if each.window.mode == "out"]
        body = _without_unused_allocs(body, used)
        kernel = Kernel(
            f"{old.name}_{self.suffix}",
            (*inputs, *outputs),
            body,
            len(outputs),
            (),
            old.level,
            old.loc,
        )
        return drop_windows(drop_unused(dead_code(kernel)))


def _without_unused_allocs(body: Block, used: set[Value]) -> Block:
    ops = [op for op in body.ops if op.name != "alloc" or op.result in used]
    return replace(body, ops=tuple(ops))


def drop_windows(kernel: Kernel) -> Kernel:
    """Without operands whose blocks nothing reads."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    used = {v for op in walk(pipeline.body) for v in op.operands}
    kept = [e for e in pipeline.shown if e.window.mode == "out" or e.block in used]
    if len(kept) == len(pipeline.shown):
        return kernel
    op = pipeline.showing(kept).to_op()
    ops = tuple(op if each is pipeline.op else each for each in kernel.body.ops)
    body = replace(kernel.body, ops=ops)
    named = {v for each in walk(body) for v in each.operands}
    params = (*(p for p in kernel.inputs if p in named), *kernel.outputs)
    return kernel.with_(params=params, body=body)


def _when(b: Builder, test: Value, ops: Sequence[Op]) -> None:
    b.emit("cond", b.cast(test, T.I32), regions=(Block(), Block((), tuple(ops))))
