"""Copies, semaphores and barriers of concurrent contexts.

A copy moves its data when the schedule picks it, between its start and its wait. A wait
for a semaphore, a copy or a barrier is a Pause that knows when the context can continue
and what to report if it never can.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from pallasite.interpret.copies import Copies, Copy, End, InFlight, Receive, Send
from pallasite.interpret.monitor import Monitor
from pallasite.interpret.numpy_memory import Elements, region_of
from pallasite.interpret.races import Races
from pallasite.interpret.resume import ResumableWalker
from pallasite.interpret.schedule import Context, Pause, Schedule, Steps
from pallasite.interpret.shadow import CheckedNumbers
from pallasite.interpret.shadow_tiles import value_of
from pallasite.interpret.views import View, entries_of, whole_picks
from pallasite.interpret.walker import Walker
from pallasite.ir.nodes import Kernel, Op, Span, Value, full_index
from pallasite.ir.roles import Pipeline

Array = Any


class SemaphoreWait(Pause):
    """Until a semaphore is at least `amount`."""

    def __init__(self, op: Op, walker: "WaitingWalker", end: End, amount: int):
        super().__init__(op)
        self.walker, self.end, self.amount = walker, end, amount

    def ready(self) -> bool:
        return self.walker.count_of(self.end.view) >= self.amount

    def wanted(self) -> Sequence[InFlight]:
        return self.walker.copies.signalling(self.end.key)

    def text(self) -> str:
        name, count = self._facts()
        return f"waits for {self.amount} of {name}, which is {count}"

    def _facts(self) -> tuple[str, int]:
        describe = self.walker.monitor.describe
        return describe(self.end.ref), self.walker.count_of(self.end.view)

    def report(self) -> None:
        name, count = self._facts()
        facts = [("semaphore", name), ("waits for", self.amount), ("count", count)]
        what = "a wait for a semaphore that nothing signals"
        fix = "signal it before the wait"
        self.walker.monitor.report("copies", what, facts, fix)


class SemaphorePoll(Pause):
    """A look at a semaphore, perhaps one of many until it is signalled."""

    polls = True

    def __init__(self, op: Op, copies: Copies, end: End):
        super().__init__(op)
        self.copies, self.end = copies, end

    def wanted(self) -> Sequence[InFlight]:
        return self.copies.signalling(self.end.key)


class CopyWait(Pause):
    """Until a copy has moved its data."""

    def __init__(self, op: Op, copies: Copies, semaphore: End | None, target: End):
        super().__init__(op)
        self.copies, self.target = copies, target
        self.semaphore_key = None if semaphore is None else semaphore.key

    def copy(self) -> Copy | None:
        return self.copies.awaited(self.semaphore_key, self.target)

    def ready(self) -> bool:
        copy = self.copy()
        return copy is not None and copy.moved

    def wanted(self) -> Sequence[InFlight]:
        copy = self.copy()
        return () if copy is None else (copy.next_to_move,)

    def text(self) -> str:
        name = self.copies.monitor.describe(self.target.ref)
        return f"waits for a copy to {name}, which was not started"

    def report(self) -> None:
        self.copies.report_not_started(self.target)


class BarrierWait(Pause):
    """Until every role has reached a barrier as often as this one."""

    def __init__(self, op: Op, context: Context, monitor: Monitor):
        super().__init__(op)
        self.roles, self.count = context.siblings, context.arrived
        self.monitor = monitor

    def _missing(self) -> list[str]:
        return [c.name for c in self.roles if c.arrived < self.count]

    def ready(self) -> bool:
        return not self._missing()

    def text(self) -> str:
        return f"waits at a barrier for {', '.join(self._missing())}"

    def report(self) -> None:
        facts = [("never arrived", ", ".join(self._missing()))]
        what = "not every role reaches a barrier"
        self.monitor.report(
            "copies", what, facts, "let each role reach it equally often"
        )


class WaitingWalker(ResumableWalker):
    """The walker with copies in flight and blocking waits."""

    numbers: CheckedNumbers

    def __init__(
        self, kernel: Kernel, numbers: CheckedNumbers, races: Races, schedule: Schedule
    ):
        super().__init__(kernel, numbers)
        self.monitor, self.races, self.schedule = numbers.monitor, races, schedule
        self.copies = Copies(self.monitor)
        self.moving = False  # the data of a copy: its ends were looked at before
        self.quiet = False
        self.touched: Elements | None = None  # represents the elements of a view
        self.signals: dict[Value, Op] = {}  # the last signal of each semaphore
        self._in_window: dict[Value, bool] = {}

    # --- contexts ---

    def state(self) -> Any:
        monitor, races = self.monitor, self.races
        return (
            (monitor.op, list(monitor.programs), monitor.program, monitor.part),
            (races.program_lane, races.lane),
        )

    def _set_state(self, state: Any) -> None:
        monitor, races = self.monitor, self.races
        (monitor.op, programs, monitor.program, monitor.part) = state[0]
        monitor.programs = list(programs)
        races.program_lane, races.lane = state[1]

    def go_to(self, context: Context) -> None:
        super().go_to(context)
        self._set_state(context.state)

    @property
    def name(self) -> str:
        return self.monitor.device or super().name

    def core_name(self, op: Op, axes: Sequence[int], place: Sequence[int]) -> str:
        core = self.monitor.ids_text(op, place, axes) or "a core"
        return f"{self.monitor.device}, {core}" if self.monitor.device else core

    def forked(self, op: Op, roles: Sequence[Context]) -> None:
        if self.monitor.options.races:
            for root in self.roots.written(*op.regions):
                if not root.ref.is_semaphore:
                    self.races.watch(self.own_root(root))
        where, (program_lane, _) = self.state()
        for n, role in enumerate(roles):
            if self.monitor.part is not None:
                role.name = f"{self.monitor.part}, {role.name}"
            role.lane = self.races.start_role((op, n))
            role.state = ((*where[:3], role.name), (program_lane, role.lane))

    def joined(self, roles: Sequence[Context]) -> None:
        for role in roles:
            self.races.end(role.lane)

    def deadlock(self, waiting: Sequence[Context]) -> None:
        """Report a deadlock."""
        self.schedule.switch_to(waiting[0])
        if len(waiting) == 1:
            assert waiting[0].pause is not None
            waiting[0].pause.report()
            return
        facts: list[tuple[str, Any]] = []
        for context in waiting:
            assert context.pause is not None
            facts.append((context.name, context.pause.text()))
            facts.append(("  at", context.pause.op.loc))
        what = "deadlock: everything that runs is waiting"
        fix = "signal before waiting, in the same order everywhere"
        self.monitor.report("copies", what, facts, fix)

    # --- copies ---

    def steps_copy_start(self, op: Op) -> Steps:
        source, target = (self._end(v) for v in op.operands[:2])
        copy = Copy(
            op,
            source,
            target,
            self._semaphore(op),
            any(self._is_block(v) for v in op.operands[:2]),
            self.schedule.current,
            self.monitor.program_text(self.monitor.program),
            self.state(),
            self.races.start_copy(),
        )
        self.copies.start(copy)
        with self.races.as_lane(copy.lane):
            self.races.access(source.root, "reads", source.elements)
            self.races.access(target.root, "writes", target.elements)
        if self.schedule.is_early:
            self.move(copy)
        yield Pause(op)

    def move(self, copy: Copy) -> None:
        """Move a copy's data, and signal its semaphore."""
        assert not copy.moved
        saved, copy.moved = self.state(), True
        self._set_state(copy.state)
        self.moving = True
        self._move_data(copy)
        if copy.semaphore is not None:
            with self.races.as_lane(copy.lane):
                self.races.signal(copy.semaphore.key, 1)
            self._count(copy.semaphore.view, copy.semaphore.ref, 1)
        self.moving = False
        self._set_state(saved)

    def _move_data(self, copy: Copy) -> None:
        if isinstance(copy, Send):
            copy.data = self.read(copy.source.view)
            return
        found = copy.send.data if isinstance(copy, Receive) else None
        data = self.read(copy.source.view) if found is None else found
        everything = entries_of(full_index(copy.target.ref.ref.shape), ())
        self.write(copy.target.view, everything, data, None)

    def steps_copy_wait(self, op: Op) -> Steps:
        semaphore, target = self._semaphore(op), self._end(op.operands[1])
        wait = CopyWait(op, self.copies, semaphore, target)
        yield wait
        copy = wait.copy()
        if copy is not None:
            self.copies.flying.remove(copy)
            self.races.end_copy(copy.lane)
        if semaphore is not None:
            self.races.wait(semaphore.key, 1)
            self._count(semaphore.view, semaphore.ref, -1)

    def steps_indexed_copy_start(self, op: Op) -> Steps:
        """Done where it starts: only its wait is watched."""
        self.do_indexed_copy_start(op)
        semaphore = self._end(op.operands[2])
        self.signals[semaphore.root] = op
        self.races.signal(semaphore.key, 1)
        yield Pause(op)

    def steps_indexed_copy_wait(self, op: Op) -> Steps:
        semaphore = self._end(op.operands[2])
        yield SemaphoreWait(op, self, semaphore, 1)
        self.races.wait(semaphore.key, 1)
        self._count(semaphore.view, semaphore.ref, -1)

    def _end(self, ref: Value) -> End:
        view: View = self.env[ref]
        if view.steps:
            return End(ref, view, self._painted(view, None, None))
        region = region_of(whole_picks(view.ranges), view.root.ref.shape)
        return End(ref, view, region.elements())

    def _painted(self, view: View, entries: Any, mask: Array | None) -> Elements:
        """Write ones into zeros through the view, and see where they are."""
        root = view.root
        memory = self.memory[root]
        blank = np.zeros(memory.shape, memory.dtype)
        self.memory[root], self.quiet = blank, True
        try:
            if entries is None:
                shape = np.shape(value_of(Walker.read(self, view)))
                entries = [(Span(0, n), None) for n in shape]
            paint = _ones_like(value_of(Walker.read(self, view, entries)))
            Walker.write(self, view, entries, paint, value_of(mask))
        finally:
            self.memory[root], self.quiet = memory, False
        painted = blank.reshape(-1).view(np.uint8).reshape(*blank.shape, -1)
        found = np.asarray(painted.any(axis=-1))
        return Elements(np.nonzero(found)) if found.ndim else Elements((), found)

    def _semaphore(self, op: Op) -> End | None:
        return None if len(op.operands) < 3 else self._end(op.operands[2])

    def _is_block(self, ref: Value) -> bool:
        """Whether a ref is a window's block, or part of one."""
        if ref not in self._in_window:
            blocks = {
                p
                for op in self.kernel.body.ops
                if op.name == "pipeline"
                for p in Pipeline.of(op).blocks
            }
            self._in_window[ref] = not blocks.isdisjoint(self.roots.reached([ref]))
        return self._in_window[ref]

    # --- semaphores ---

    def steps_sem_signal(self, op: Op) -> Steps:
        self._signal(op, self._end(op.operands[0]))
        yield Pause(op)

    def steps_sem_signal_core(self, op: Op) -> Steps:
        mine = self._end(op.operands[0])
        core = self.numbers.certain(self.env[op.operands[2]], "a core's number")
        other = self._on_core(mine.root, int(core), "signal to a semaphore")
        if other is not None:
            view = View(other, mine.view.ranges, mine.view.steps)
            self._signal(op, End(mine.ref, view, mine.elements))
        yield Pause(op)

    def steps_fetch_and_add(self, op: Op) -> Steps:
        mine, context = self._end(op.operands[0]), self.schedule.current
        increment, number = (
            self.numbers.certain(self.env[v], "what fetch_and_add is given")
            for v in op.operands[1:]
        )
        together = context.siblings if context is not None else []
        subcore = int(number)
        core = together[subcore].core if 0 <= subcore < len(together) else -1
        other = mine.root
        if together:
            other = self._on_core(mine.root, core or 0, "number added")
        view = View(mine.root if other is None else other, mine.view.ranges)
        old = self.read(view)
        self.write(view, entries_of((), ()), self.numbers.add(old, increment), None)
        yield Pause(op)
        return (old,)

    def _on_core(self, root: Value, core: int, what: str) -> Value | None:
        """The memory of another core that corresponds to `root`."""
        context = self.schedule.current
        mine = (context.memory if context is not None else None) or {}
        there = self.cores[core].memory if 0 <= core < len(self.cores) else None
        names = [name for name, own in mine.items() if own is root]
        found = (there or {}).get(names[0]) if names else None
        if found is None:
            facts = [
                ("ref", self.monitor.describe(root)),
                ("core", f"{core}, of {len(self.cores)}"),
            ]
            what = f"a {what} that does not exist on that core"
            fix = "cores are numbered from 0; allocate the ref in scratch_shapes"
            self.monitor.report("copies", what, facts, fix)
        return found

    def _signal(self, op: Op, end: End) -> None:
        amount = self._plain_amount(op)
        self.signals[end.root] = op
        self.races.signal(end.key, int(amount))
        self._count(end.view, end.ref, amount)

    def steps_sem_wait(self, op: Op) -> Steps:
        amount, end = self._plain_amount(op), self._end(op.operands[0])
        yield SemaphoreWait(op, self, end, int(amount))
        self.races.wait(end.key, int(amount))
        self._count(end.view, end.ref, self.numbers.mul(amount, -1))

    def steps_sem_reach(self, op: Op) -> Steps:
        amount, end = self._plain_amount(op), self._end(op.operands[0])
        yield SemaphoreWait(op, self, end, int(amount))
        self.races.reach(end.key, int(amount))

    def steps_sem_read(self, op: Op) -> Steps:
        yield SemaphorePoll(op, self.copies, self._end(op.operands[0]))
        return self.do_sem_read(op)

    def _plain_amount(self, op: Op) -> Array:
        return self.numbers.certain(self.env[op.operands[1]], "a semaphore's count")

    def count_of(self, view: View) -> int:
        with self._quietly():
            found = value_of(Walker.read(self, view))
        return int(np.min(found, initial=2**31 - 1))

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Read memory without checks."""
        saved, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = saved

    # --- barriers ---

    def steps_barrier(self, op: Op) -> Steps:
        context = self.schedule.current
        assert context is not None
        if not context.siblings:  # a mesh of one
            return
        context.arrived += 1
        barrier = (context.siblings[0], context.arrived)
        self.races.arrive(barrier)
        yield BarrierWait(op, context, self.monitor)
        self.races.meet(barrier)

    RESUMABLE: ClassVar = {
        **ResumableWalker.RESUMABLE,
        "copy_start": steps_copy_start,
        "copy_wait": steps_copy_wait,
        "indexed_copy_start": steps_indexed_copy_start,
        "indexed_copy_wait": steps_indexed_copy_wait,
        "sem_signal": steps_sem_signal,
        "sem_signal_core": steps_sem_signal_core,
        "sem_wait": steps_sem_wait,
        "sem_reach": steps_sem_reach,
        "sem_read": steps_sem_read,
        "fetch_and_add": steps_fetch_and_add,
        "barrier": steps_barrier,
    }


def _ones_like(value: Array) -> np.ndarray:
    """Every bit set."""
    value = np.asarray(value)
    raw = np.full(value.size * value.dtype.itemsize, 0xFF, np.uint8)
    return raw.view(value.dtype).reshape(value.shape)
