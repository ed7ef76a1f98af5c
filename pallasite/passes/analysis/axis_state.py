"""What the steps of a grid axis hand on to each other, and how parts of it merge.

Programs run as if one after another, so an axis is sequential where outputs or scratch
carry contents along it. Often that order cannot be seen: a sum, a maximum, or a set of
atomics may be computed in parts that are merged afterwards. `state_along(kernel, axis)`
follows every value that a step computes from what it found, and says for each ref that
carries along the axis how contents of two parts merge; or which op makes that unknown.

What a step does to such a ref (a *state*) is one of

- an update: each element is merged with something that depends on no state, like
  `acc[...] += x` or `m[...] = jnp.maximum(m[...], x)`;
- at the first step only, anything: the first part begins there, as the axis does;
- at the last step only, anything: a *finish*, which needs the merged state.

Proof that the parts may be merged: between its first and its last step, a part adds
updates only, so with a neutral state at its start it ends with the merge of its own
updates, whatever the parts before it did; merging is associative and keeps the order.
Rounding may differ, as docs/semantics.md says.

What depends on a state in other steps (a running sum that is stored, too) needs the
state at the start of its part: `prefix`. `schedule/split_axis.py` makes the kernels.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from pallasite.ir.nodes import Access, Block, Kernel, Loc, Op, Value, Window, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import producers_of, users_of
from pallasite.ir.roles import Loop, Pipeline
from pallasite.passes.analysis.axis_maxima import Maxima, without_units
from pallasite.passes.analysis.carried import carried_from, covers_whole
from pallasite.passes.analysis.commuting import ATOMIC_MERGES, is_merge
from pallasite.passes.analysis.exponents import Powers
from pallasite.passes.analysis.grid import GridInfo, WindowMoves, analyze, find_pipeline
from pallasite.passes.analysis.memory import MAIN_MEMORY, Roots
from pallasite.passes.analysis.old_elements import (
    RELATIVE,
    Abstract,
    Old,
    Relative,
    Sources,
    Tainted,
    computed,
    elements,
    gathers,
    joined,
    kept,
    numbers,
    place_of,
    same_value,
)
from pallasite.passes.analysis.step_facts import FIRST, LAST, MIDDLE, facts_of_steps

# What a memory op on a state or an output is to the parts of the axis.
INIT, UPDATE, FINISH, FREE, EACH = "init", "update", "finish", "free", "each"
Role = Literal["init", "update", "finish", "free", "each"]


@dataclass(frozen=True)
class State:
    """A ref that carries along the axis.

    Attributes:
        ref: the body's block, or scratch.
        merge: how contents of two parts merge: a kind of reduction; or "relative", for
            a sum that is kept relative to a running maximum.
        output: the number of its window; None: scratch.
        start: what the author's first step sets a maximum or minimum to, if it is one
            number; parts start with it too.
        scale: for a relative sum, the ref of the maximum.
        rate: for a relative sum, the factor in the exponent; infinite: it counts what
            is equal to the maximum.
        axes: for a relative sum, for each of its dimensions that of the maximum.
        first: it is no sum, but what belongs to the first of equal maxima: its index.
    """

    ref: Value
    merge: str
    output: int | None
    start: float | None = None
    scale: Value | None = None
    rate: float = 1.0
    axes: tuple[int | None, ...] = ()
    first: bool = False


@dataclass(frozen=True, eq=False)
class AxisState:
    """What `state_along` found.

    Attributes:
        axis: the grid axis.
        states: the refs that carry along it.
        roles: of the stores and atomics on states and outputs.
        aliases: values that an update stores, each with the update's op.
        last: numbers of windows that the last step alone decides.
        prefix: whether other steps than the last need the state.
        reason: what is unknown; empty if nothing is.
        loc: the line of the op that makes it so.
    """

    axis: int
    states: tuple[State, ...] = ()
    roles: Mapping[Op, Role] = field(default_factory=dict[Op, Role])
    aliases: Mapping[Op, Value] = field(default_factory=dict[Op, Value])
    last: tuple[int, ...] = ()
    prefix: bool = False
    reason: str = ""
    loc: Loc | None = None

    @property
    def kind(self) -> str:
        """In a word, for reports."""
        if self.reason:
            return "unknown"
        if any(s.merge == RELATIVE and not s.first for s in self.states):
            return "online softmax"
        if any(s.first for s in self.states):
            return "max and what belongs to it"
        merges = " and ".join(dict.fromkeys(s.merge for s in self.states))
        return f"prefix {merges}" if self.prefix else merges or "nothing"


class _Unknown(Exception):
    def __init__(self, reason: str, op: Op | None = None):
        super().__init__(reason)
        self.op = op


def state_along(kernel: Kernel, axis: int, info: GridInfo | None = None) -> AxisState:
    """What the steps of one grid axis hand on.

    Args:
        kernel: a kernel with one pipeline.
        axis: a sequential axis of its grid.
        info: its grid analysis, if at hand.
    """
    try:
        return _Search(kernel, axis, info or analyze(kernel)).result()
    except _Unknown as found:
        loc = found.op.loc if found.op is not None else None
        return AxisState(axis, reason=str(found), loc=loc)


NEVER = -1  # the version of a load whose state is later updated again


@dataclass(frozen=True)
class _Path:
    """Where in the body an op is.

    Attributes:
        may: the scenarios in which it may run.
        sources: the states that decide whether it runs.
        in_loop: it may run more than once in a step.
        gated: it may also not run, depending on something else than position.
        test: the only test of states that decides whether it runs, if it holds.
        outer: where that test is.
    """

    may: frozenset[object]
    sources: Sources = frozenset()
    in_loop: bool = False
    gated: bool = False
    test: Value | None = None
    outer: "_Path | None" = None


_STARTED = (frozenset[object]({FIRST}), frozenset[object]({MIDDLE, LAST}))


class _Search(Maxima):
    def __init__(self, kernel: Kernel, axis: int, info: GridInfo):
        self.kernel, self.axis, self.info = kernel, axis, info
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.body, self.grid = self.pipeline.body, self.pipeline.grid
        size = self.grid[axis]
        if size is None or size < 2:
            raise _Unknown("its number of steps is known only at run time")
        self.size = size
        self.uses = users_of(self.body)
        self.roots = Roots(self.body, windows=False)
        self.states: dict[Value, int | None] = {}
        self.last: dict[Value, int] = {}
        self.own: set[Value] = set()
        self.local: set[Value] = set()
        self.scenarios = facts_of_steps(kernel, axis)
        self.values: dict[Value, Abstract] = {}
        self.roles: dict[Op, Role] = {}
        self.aliases: dict[Op, Value] = {}
        self.merges: dict[Value, str] = {}
        self.versions: dict[Value, int] = {}
        self.finished: set[Value] = set()
        self.spoiled: dict[Value, Sources] = {}
        self.wanted: list[tuple[Op, Sources]] = []
        self.counted: dict[Value, Value] = {}
        self.each = False
        self.idle = set[Op]()

    def result(self) -> AxisState:
        self.check_effects()
        self.find_states()
        while True:
            spoiled = dict(self.spoiled)
            self.walk_body()
            if spoiled == self.spoiled:
                break
        for ref in self.states:
            if ref not in self.merges:
                raise _Unknown(f"{_name(ref)} carries values along it")
        final = {(ref, self.versions.get(ref, 0)) for ref in self.states}
        prefix = self.each or any(not used <= final for _, used in self.wanted)
        states = tuple(self.state(ref, output) for ref, output in self.states.items())
        if prefix and self.relatives:
            raise _Unknown("other steps than the last use sums that are rescaled")
        self.check_inner(prefix)
        last = tuple(self.last.values())
        return AxisState(
            self.axis, states, self.roles, self.aliases, last, prefix=prefix
        )

    def state(self, ref: Value, output: int | None) -> State:
        merge = self.merges[ref]
        if merge != RELATIVE:
            start = self.starts.get(ref) if merge in ("max", "min") else None
            return State(ref, merge, output, start)
        op, relative = self.relatives[ref]
        scale, version = self.scales[relative.old]
        updates = [o for o in self.roles if o.operands[0] is scale]
        updates = [o for o in updates if self.roles[o] == UPDATE and o not in self.idle]
        # Both are updated in the same steps, and once in each.
        again = self.versions.get(ref) != 1 or self.versions.get(scale) != 1
        stored = [o.operands[1] for o in updates if self.where[o] == self.where[op]]
        both_scratch = output is None and self.states[scale] is None
        same = stored == [relative.new]
        if relative.first and len(stored) == 1 and not same:
            made = self.powers.made.get(stored[0])
            same = made is not None and self.is_larger(made, relative)
        if again or version or not same or not both_scratch:
            raise _Unknown(f"{_name(ref)} is rescaled in another way", op)
        whole = covers_whole(scale.ref.shape, updates[0].attrs["index"])
        if not whole or updates[0].attrs["mask"] or op.attrs["mask"]:
            raise _Unknown(f"{_name(ref)} is rescaled in part", op)
        how = relative.rate, relative.axes, relative.first
        return State(ref, merge, output, None, scale, *how)

    # --- what may carry ---

    def check_effects(self) -> None:
        for op in walk(self.body):
            effect = table()[op.name].effect
            known = op.regions or op.name in ("store", "atomic_rmw", "alloc")
            if effect is Effect.WRITE and not known:
                raise _Unknown(f"{op.name} happens in the order of the steps", op)
            if op.name in ("pipeline", "roles", "warps"):
                raise _Unknown(f"{op.name} inside a step", op)
        if self.kernel.level != "tile":
            raise _Unknown("the author schedules it")

    def find_states(self) -> None:
        shown = zip(self.pipeline.shown, self.info.windows, strict=True)
        for number, (each, moves) in enumerate(shown):
            if not moves.written:
                continue
            name = moves.name
            if each.window.mode != "out":
                raise _Unknown(f"the operand {name} is written")
            if each.array in self.kernel.aliased_results.values():
                raise _Unknown(f"{name} aliases an operand")
            if self.axis in moves.own:
                self.own.add(each.block)
            else:
                self.check_window(each.window, moves)
                self.note_window(number, each.block)
        inside = {v for op in walk(self.body) for v in op.results}
        inside |= {v for op in walk(self.body) for r in op.regions for v in r.params}
        inside |= set(self.body.params)
        used = (v for op in walk(self.body) for v in op.operands if v.is_ref)
        for ref in dict.fromkeys(used):
            if ref not in inside:
                self.note_shared(ref)

    def check_window(self, window: Window, moves: WindowMoves) -> None:
        """A state's block is fixed along the axis, and not shared by outer steps."""
        if self.axis in moves.axes:
            raise _Unknown(f"several steps may write a block of {moves.name}")
        if any(d.kind not in ("blocked", "squeezed") for d in window.dims):
            raise _Unknown(f"blocks of {moves.name} may overlap")
        for axis, n in enumerate(self.grid):
            if n == 1 or axis == self.axis:
                continue
            if axis < self.axis and axis not in moves.apart:
                raise _Unknown(f"{moves.name} also carries along axis {axis}")
            if axis in moves.axes and axis not in moves.apart:
                raise _Unknown(f"several steps may write a block of {moves.name}")

    def note_window(self, number: int, block: Value) -> None:
        is_read = any(op.name != "store" for op in self.uses.get(block, ()))
        if is_read:
            self.states[block] = number
        else:
            self.last[block] = number

    def note_shared(self, ref: Value) -> None:
        if ref.ref.is_semaphore:
            raise _Unknown(f"{_name(ref)} is a semaphore")
        if ref not in self.roots.all_written(self.body):
            return
        defined = {op.result for op in self.kernel.body.ops if op.name == "alloc"}
        if ref.ref.space in MAIN_MEMORY or ref not in defined:
            raise _Unknown(f"{_name(ref)} is written without a block")
        start = carried_from(self.body, ref, self.pipeline.ids, self.grid)
        if start > self.axis:
            self.local.add(ref)
        elif start < self.axis:
            raise _Unknown(f"{_name(ref)} also carries along axis {start}")
        else:
            self.states[ref] = None

    def check_inner(self, prefix: bool) -> None:
        """A state that inner steps share is finished only after the last of them."""
        if prefix:
            return
        for op, role in self.roles.items():
            if role != FINISH:
                continue
            path, number = self.where[op], self.last.get(op.operands[0])
            for axis in self.shared_inner():
                # Of stores at every step, the last one remains.
                moves = None if number is None else self.info.windows[number]
                again = moves is not None and axis not in moves.axes
                again &= not path.gated and path.may == frozenset(self.scenarios)
                if ("early", axis) in path.may and not again:
                    raise _Unknown("inner steps use what is not yet merged", op)

    def shared_inner(self) -> Iterator[int]:
        """Inner axes along which a state does not move."""
        inner = [a for a in range(self.axis + 1, len(self.grid)) if self.grid[a] != 1]
        for axis in inner:
            for output in self.states.values():
                moves = None if output is None else self.info.windows[output]
                if moves is None or axis not in moves.axes:
                    yield axis
                    break

    # --- positions ---

    def inside(self, op: Op, number: int, path: _Path) -> _Path:
        """The path of a region of an op."""
        sources = Sources()
        controls = op.operands[:1] if op.name == "cond" else op.operands[:3]
        for value in controls:
            sources |= self.sources(value)
        if op.name != "cond":
            return replace(path, sources=path.sources | sources, in_loop=True)
        top = len(op.regions) - 1
        which, may = op.operands[0], set[object]()
        decided = True
        for name in path.may:
            fact = self.scenarios[name].of(which)
            low, high = (min(max(n, 0), top) for n in (fact.low, fact.high))
            if low <= number <= high:
                may.add(name)
                decided &= low == high
        gated = path.gated or not decided
        test = self.powers.made.get(which) if sources and number == 1 else None
        alone = test is not None and test.name == "cast" and not path.sources
        only = (test.operands[0], path) if test is not None and alone else (None, None)
        sources |= path.sources
        return _Path(frozenset(may), sources, path.in_loop, gated, *only)

    # --- the walk ---

    def walk_body(self) -> None:
        self.values, self.roles, self.aliases = {}, {}, {}
        self.versions, self.finished, self.merges = {}, set(), {}
        self.wanted, self.each = [], False
        self.where: dict[Op, _Path] = {}
        made = producers_of(self.body)
        self.powers = Powers(made, {})
        self.scales: dict[Value, tuple[Value, int]] = {}
        self.relatives: dict[Value, tuple[Op, Relative]] = {}
        self.starts: dict[Value, float | None] = {}
        self.block(self.body, _Path(frozenset(self.scenarios)))

    def block(self, block: Block, path: _Path) -> None:
        for op in block.ops:
            self.op(op, path)

    def op(self, op: Op, path: _Path) -> None:
        if op.name == "load":
            self.load(op)
        elif op.name == "store":
            self.store(op, path)
        elif op.name == "atomic_rmw":
            self.atomic(op, path)
        elif op.name == "for":
            self.loop(op, path)
        elif op.name == "cond":
            self.cond(op, path)
        elif op.regions:
            self.opaque(op, path)
        else:
            states = [v for v in op.operands if v in self.states]
            if states:
                raise _Unknown(f"{_name(states[0])} is used by {op.name}", op)
            self.compute(op)

    def compute(self, op: Op) -> None:
        known = [self.values.get(v) for v in op.operands]
        if not any(known):
            return
        self.powers.op(op)
        found = self.started(op, known) or self.larger(op, known) or computed(op, known)
        found = found or self.rescaled(op, known) or self.of_equal(op, known)
        if found is None:
            sources = Sources()
            found = Tainted(sources.union(*(k.sources for k in known if k)))
        for result in op.results:
            self.values[result] = found

    def started(self, op: Op, known: Sequence[Abstract | None]) -> Abstract | None:
        """What a select gives that has a case for the first step."""
        if op.name != "select_n" or known[0] is not None:
            return None
        test = self.scalar(op.operands[0])
        return None if test is None else self.later(test, known[1:])

    def later(self, which: Value, cases: Sequence[Abstract | None]) -> Abstract | None:
        """One of several values, if all are alike that are taken after the first step.

        What the first step takes is what the axis starts with, like the store of a
        guarded start: the first part has that step, and runs it as written.
        """
        first, rest = (self.taken(which, len(cases), at) for at in _STARTED)
        if first & rest:
            rest = set(range(len(cases)))
        return joined(cases[n] for n in sorted(rest))

    def scalar(self, value: Value) -> Value | None:
        """The scalar that a tile repeats."""
        while value.tile.shape:
            made = self.powers.made.get(value)
            if made is None or made.name not in ("broadcast_in_dim", "reshape"):
                return None
            value = made.operands[0]
        return value

    def taken(self, which: Value, count: int, at: frozenset[object]) -> set[int]:
        """Which of several cases may be taken at some steps."""
        found = set[int]()
        for name in at & self.scenarios.keys():
            fact = self.scenarios[name].of(which)
            low, high = (min(max(n, 0), count - 1) for n in (fact.low, fact.high))
            found |= set(range(int(low), int(high) + 1))
        return found

    def opaque(self, op: Op, path: _Path) -> None:
        """Loops of unknown length: nothing is known of what they carry."""
        inside = set(op.operands)
        for region in op.regions:
            inside |= {v for o in walk(region) for v in o.operands}
            if any(v in self.states for o in walk(region) for v in o.operands):
                raise _Unknown(f"a state is used inside {op.name}", op)
        sources = Sources().union(*map(self.sources, inside))
        if op.name != "while" and sources:
            raise _Unknown(f"{op.name} depends on a state", op)
        if sources:
            taint = Tainted(sources)
            params = [p for r in op.regions for p in r.params]
            self.values |= dict.fromkeys((*params, *op.results), taint)
        path = replace(path, sources=path.sources | sources, in_loop=True, gated=True)
        for region in op.regions:
            self.block(region, path)

    def cond(self, op: Op, path: _Path) -> None:
        before = dict(self.versions)
        after = dict(before)
        finished = set(self.finished)
        ends = set(finished)
        for number, region in enumerate(op.regions):
            self.versions, self.finished = dict(before), set(finished)
            self.block(region, self.inside(op, number, path))
            for ref, version in self.versions.items():
                after[ref] = max(after.get(ref, 0), version)
            ends |= self.finished
        self.versions, self.finished = after, ends
        which = self.sources(op.operands[0])
        for n, result in enumerate(op.results):
            cases = [self.values.get(r.yields[n]) for r in op.regions]
            found = None if which else self.later(op.operands[0], cases)
            if found is None and (which or any(cases)):
                all_of = (c.sources for c in cases if c)
                found = Tainted(which.union(*all_of))
            if found is not None:
                self.values[result] = found

    def loop(self, op: Op, path: _Path) -> None:
        loop = Loop.of(op)
        path = self.inside(op, 0, path)
        stored = self.stored_in(loop.body)
        # What was loaded before the loop is not what its second iteration finds.
        for ref in stored:
            self.versions[ref] = self.versions.get(ref, 0) + 1
        guess = [self.values.get(v) for v in loop.inits]
        guess = self.settled(loop, path, guess)
        self.enter(loop, guess)
        self.block(loop.body, path)
        for ref in stored:
            self.versions[ref] = self.versions.get(ref, 0) + 1
        for result, known in zip(loop.results, guess, strict=True):
            if known is not None:
                self.values[result] = known

    def stored_in(self, block: Block) -> list[Value]:
        names = ("store", "atomic_rmw")
        inside = (op.operands[0] for op in walk(block) if op.name in names)
        return [ref for ref in dict.fromkeys(inside) if ref in self.states]

    def enter(self, loop: Loop, guess: Sequence[Abstract | None]) -> None:
        for param, known in zip(loop.carried, guess, strict=True):
            self.values.pop(param, None)
            if known is not None:
                self.values[param] = known

    def settled(
        self, loop: Loop, path: _Path, guess: list[Abstract | None]
    ) -> list[Abstract | None]:
        """What a loop carries, if every iteration keeps to it."""
        while True:
            with self.unrecorded():
                self.enter(loop, guess)
                self.block(loop.body, path)
                ends = [self.values.get(v) for v in loop.yields]
            new = [kept(g, e) for g, e in zip(guess, ends, strict=True)]
            if all(map(same_value, new, guess)):
                return new
            guess = new

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        before = (
            dict(self.roles),
            dict(self.aliases),
            dict(self.versions),
            set(self.finished),
            list(self.wanted),
            self.each,
            dict(self.where),
            dict(self.merges),
        )
        yield
        (
            self.roles,
            self.aliases,
            self.versions,
            self.finished,
            self.wanted,
            self.each,
            self.where,
            self.merges,
        ) = before

    # --- memory ---

    def load(self, op: Op) -> None:
        access = Access.of(op)
        found = Sources()
        for value in op.operands[1:]:
            found |= self.sources(value)
        ref = access.ref
        if ref in self.states:
            self.values[op.result] = self.old(op, access, found)
            return
        found |= self.spoiled.get(ref, frozenset())
        if found:
            self.values[op.result] = Tainted(found)

    def old(self, op: Op, access: Access, found: Sources) -> Abstract:
        ref, version = access.ref, self.versions.get(access.ref, 0)
        number = NEVER if ref in self.finished else version
        if found or access.other is not None or gathers(access.index):
            return Tainted(found | {(ref, number)})
        shape = op.result.tile.shape
        place = place_of(access)
        whole = covers_whole(ref.ref.shape, access.index) and place is None
        if (
            whole
            and without_units(shape) == without_units(ref.ref.shape)
            and ref.ref.dtype.is_float
        ):
            self.powers.add_scale(op.result)
            self.scales[op.result] = ref, version
        if place is None:
            index = elements(ref.ref.shape, access.index)
        else:
            index = numbers(shape)
        return Old(ref, place, index.reshape(shape), None, number)

    def store(self, op: Op, path: _Path) -> None:
        access = Access.of(op)
        ref, value = access.ref, access.value
        assert value is not None
        others = Sources()
        for operand in op.operands[2:]:
            others |= self.sources(operand)
        sources = others | path.sources | self.sources(value)
        if ref in self.states:
            is_update = not (others | path.sources) and self.updates(access)
            known = self.values.get(value)
            if is_update and isinstance(known, Old) and known.merge is None:
                self.idle.add(op)  # what is there anyway
            elif (now := self.guarded(access, path.test)) is not None and path.outer:
                known, path, is_update = now, path.outer, ref not in self.finished
            self.write_state(op, path, sources, is_update, known)
        elif ref in self.last:
            self.write_last(op, path, sources)
        elif ref in self.own:
            self.record(op, EACH if sources else FREE, path)
            self.each |= bool(sources)
        elif ref in self.local:
            if sources:
                self.spoiled[ref] = self.spoiled.get(ref, frozenset()) | sources
        else:
            raise _Unknown(f"{_name(ref)} is written", op)

    def record(self, op: Op, role: Role, path: _Path) -> None:
        self.roles[op] = role
        self.where[op] = path

    def write_state(
        self,
        op: Op,
        path: _Path,
        sources: Sources,
        is_update: bool,
        known: Abstract | None = None,
    ) -> None:
        ref = op.operands[0]
        if is_update and ref not in self.finished and op in self.idle:
            self.record(op, UPDATE, path)
        elif is_update and ref not in self.finished:
            self.update(op, path, known)
        elif not path.may & {MIDDLE, LAST}:
            self.record(op, INIT, path)
            self.starts[ref] = self.start_of(op) if ref not in self.starts else None
        elif not path.may & {FIRST, MIDDLE}:
            self.record(op, FINISH, path)
            self.wanted.append((op, frozenset(s for s in sources if s[1] != NEVER)))
            self.finished.add(ref)
        else:
            raise _Unknown(f"{_name(ref)} carries values that do not merge", op)

    def start_of(self, op: Op) -> float | None:
        """The number that a store at the first step fills a ref with."""
        whole = covers_whole(op.operands[0].ref.shape, op.attrs["index"])
        made = self.powers.made.get(op.operands[1])
        if op.name != "store" or op.attrs["mask"] or not whole:
            return None
        return made.attrs["value"] if made and made.name == "constant" else None

    def update(self, op: Op, path: _Path, known: Abstract | None) -> None:
        ref, value = op.operands[:2]
        if op.name == "atomic_rmw":
            merge = ATOMIC_MERGES[op.attrs["kind"]]
        else:
            assert isinstance(known, Old)
            merge = known.merge
            if known.relative is not None:
                self.relatives[ref] = op, known.relative
        if merge is not None and self.merges.setdefault(ref, merge) != merge:
            raise _Unknown(f"{_name(ref)} is merged in two ways", op)
        self.record(op, UPDATE, path)
        self.versions[ref] = self.versions.get(ref, 0) + 1
        whole = covers_whole(ref.ref.shape, op.attrs["index"])
        plain = op.name == "store" and whole and not op.attrs["mask"]
        everywhere = not path.gated and path.may == frozenset(self.scenarios)
        guarded = known is not self.values.get(value)
        if plain and everywhere and not path.in_loop and not guarded:
            # From here on the value is the state.
            self.aliases[op] = value
            self.values[value] = Tainted(frozenset({(ref, self.versions[ref])}))

    def updates(self, access: Access) -> bool:
        """Whether a store merges each element it writes with something free."""
        assert access.value is not None
        known = self.values.get(access.value)
        if not isinstance(known, Old) or known.ref is not access.ref:
            return False
        if known.version != self.versions.get(access.ref, 0):
            return False
        place = place_of(access)
        if known.place is None and access.mask is not None:
            place = place_of(replace(access, mask=None))
        if known.place != place or gathers(access.index):
            return False
        shape = access.value.tile.shape
        if place is None:
            expected = elements(access.ref.ref.shape, access.index).reshape(shape)
        else:
            expected = numbers(shape)
        return np.array_equal(known.index, expected)

    def write_last(self, op: Op, path: _Path, sources: Sources) -> None:
        """A store to a block that all steps overwrite and none reads."""
        access = Access.of(op)
        at_last = not path.may & {FIRST, MIDDLE}
        always = path.may == frozenset(self.scenarios)
        always &= not (path.gated or path.in_loop or access.mask is not None)
        fixed = not access.index_operands
        if not at_last and not (always and fixed):
            name = _name(access.ref)
            raise _Unknown(f"which step writes {name} last is not known", op)
        self.record(op, FINISH, path)
        self.wanted.append((op, frozenset(s for s in sources if s[1] != NEVER)))

    def atomic(self, op: Op, path: _Path) -> None:
        access = Access.of(op)
        ref = access.ref
        if ref not in self.states:
            raise _Unknown(f"atomics on {_name(ref)}", op)
        sources = path.sources
        for operand in op.operands[1:]:
            sources |= self.sources(operand)
        self.write_state(op, path, sources, is_merge(op, self.uses) and not sources)


def _name(ref: Value) -> str:
    return ref.name or "scratch"
