"""Several devices that run one kernel: copies and signals between them.

Each device has a walker with its own memory; they share one schedule and the clocks. A
copy to another device is two halves in flight: one reads the source here, the other,
some time later, writes the destination there. Memory of another device that is accessed
directly (`peer_device`) has a stand-in here, a root whose accesses are done there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from pallasite.interpret.copies import End, Receive, Send
from pallasite.interpret.schedule import Pause, Steps
from pallasite.interpret.views import View
from pallasite.interpret.waits import WaitingWalker
from pallasite.ir.nodes import Op, Value, walk

# Ops that give others access to memory: to which operand's.
SHARING = {"remote_copy_start": 1, "peer_device": 0, "peer_block": 0}


class Arrival(Pause):
    """Until another device has allocated what a copy or a signal goes to."""

    def __init__(self, op: Op, other: "DeviceWalker", is_there: Callable[[], bool]):
        super().__init__(op)
        self.other, self.is_there = other, is_there

    def ready(self) -> bool:
        return self.other.ended or self.is_there()

    def text(self) -> str:
        return f"waits for {self.other.name} to allocate what it copies or signals to"

    def report(self) -> None:
        what = "a copy or a signal to memory that the other device never allocates"
        facts = [("to device", self.other.name)]
        fix = "allocate it on every device (scratch_shapes, or run_scoped around all)"
        self.other.monitor.report("copies", what, facts, fix, self.op.loc)


class DeviceWalker(WaitingWalker):
    """The walker of one of several devices."""

    devices: Sequence["DeviceWalker"]  # all of them, including this one, by number
    ended = False  # the kernel has, on this device

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Stand-ins for memory of other devices: whose it is, and its root there.
        self.elsewhere: dict[Value, tuple[DeviceWalker, Value]] = {}
        self._stand_ins: dict[tuple[int, Value], Value] = {}

    def begin(self, inputs: Sequence[Any]) -> None:
        super().begin(inputs)
        for root in self.barriers_of_devices():
            self.allocate(root)
        for root in self._watched:
            if root in self.memory:
                self.races.watch(root)

    def allocate(self, root: Value) -> None:
        super().allocate(root)
        if self._named(root) in self._watched:
            self.races.watch(root)

    def kernel_steps(self) -> Steps:
        yield from super().kernel_steps()
        self.ended = True

    # --- what other devices reach ---

    @cached_property
    def _watched(self) -> set[Value]:
        """Roots that other devices or blocks access, where races are looked for."""
        ops = [o for o in walk(self.kernel.body) if o.name in SHARING]
        refs = [op.operands[SHARING[op.name]] for op in ops]
        refs = [ref for ref in refs if ref.ref.space != "mbarrier"]
        races = self.monitor.options.races
        return {self.roots.of(ref) for ref in refs} if races else set()

    def barriers_of_devices(self) -> list[Value]:
        """The barrier semaphore, identified by the first op that returns it."""
        ops = [o for o in walk(self.kernel.body) if o.name == "barrier_semaphore"]
        return [op.result for op in ops[:1]]

    def do_barrier_semaphore(self, op: Op) -> tuple[View]:
        (root,) = self.barriers_of_devices()
        return (View(root, ()),)

    def steps_barrier_semaphore(self, op: Op) -> Steps:
        return self.do_barrier_semaphore(op)
        yield

    def do_device_number(self, op: Op) -> tuple[Any]:
        return (np.int32(self.devices.index(self)),)

    def steps_device_number(self, op: Op) -> Steps:
        return self.do_device_number(op)
        yield

    def _named(self, root: Value) -> Value:
        """What names a core's own memory in the IR."""
        context = self.schedule.current
        mine = (context.memory if context is not None else None) or {}
        return next((name for name, own in mine.items() if own is root), root)

    def _device(self, op: Op, number: Value) -> "DeviceWalker":
        found = int(self.numbers.certain(self.env[number], "a device's number"))
        count = len(self.devices)
        if not 0 <= found < count:
            facts = [("device number", found), ("devices", count)]
            used = "ref of" if op.name == "peer_device" else "copy or a signal to"
            what = f"a {used} a device that does not exist"
            fix = (
                f"devices are numbered 0 to {count - 1}: wrap with lax.rem(i + 1, size)"
            )
            self.monitor.report("copies", what, facts, fix)
        return self.devices[min(max(found, 0), count - 1)]

    def _root_there(
        self, other: "DeviceWalker", root: Value, core: int | None = None
    ) -> Callable[[], Value | None]:
        """Finds another device's counterpart of `root`; None: not allocated yet.

        Whichever context runs when it is called.
        """
        context, name = self.schedule.current, self._named(root)
        if context is None or context.memory is None or name is root:
            return lambda: root if root in other.memory else None
        place = context.core if core is None else core

        def find() -> Value | None:
            if place is None or not 0 <= place < len(other.cores):
                return None
            found = (other.cores[place].memory or {}).get(name)
            return found if found in other.memory else None

        return find

    def _ends_there(
        self, op: Op, other: "DeviceWalker", refs: Sequence[Value], core: int | None
    ) -> Any:
        """The ends of a copy or a signal on another device, once they are allocated."""
        ends = [self._end(ref) for ref in refs]
        each = [self._root_there(other, e.root, core) for e in ends]
        find = lambda: [find_one() for find_one in each]
        if None in find():
            yield Arrival(op, other, lambda: None not in find())
        self._look_at_device(other, ends)
        return [
            End(end.ref, replace(end.view, root=root or end.root), end.elements)
            for end, root in zip(ends, find(), strict=True)
        ]

    def _look_at_device(self, other: "DeviceWalker", ends: Sequence[End]) -> None:
        """Report a device that has finished the kernel, or may not have started it."""
        barriers = self.barriers_of_devices()
        facts: list[tuple[str, Any]] = [("to device", other.name)]
        facts.append(("to", self.monitor.describe(ends[0].ref)))
        if other.ended:
            what = "a copy or a signal to a device that has finished the kernel"
            fix = "wait there for as many copies and signals as it is sent"
            self.monitor.report("copies", what, facts, fix)
        if not barriers or ends[0].root in barriers:
            return
        if not self.races.knows_entered(other.races):
            what = "a copy or a signal to a device that may not have started the kernel"
            fix = (
                "wait for the barrier semaphore first, and let that device signal this "
                "one's (pltpu.get_barrier_semaphore)"
            )
            self.monitor.report("copies", what, facts, fix)

    # --- memory of another device, accessed directly ---

    def steps_peer_device(self, op: Op) -> Steps:
        other, view = self._device(op, op.operands[1]), self.env[op.operands[0]]
        if other is self:
            return (view,)
        find = self._root_there(other, view.root)
        if find() is None:
            yield Arrival(op, other, lambda: find() is not None)
        root = find() or view.root
        key = self.devices.index(other), root
        if key not in self._stand_ins:
            made = self._stand_ins[key] = Value(root.type, root.name)
            self.elsewhere[made] = other, root
            self.races.elsewhere[made] = other.races, root
            self.monitor.stand_for(made, view.root)
        return (replace(view, root=self._stand_ins[key]),)

    @contextmanager
    def there(self, stand_in: Value) -> Iterator[tuple["DeviceWalker", Value]]:
        """Accesses of the other device's memory, by what runs here."""
        other, root = self.elsewhere[stand_in]
        if other.ended:
            what = "an access to memory of a device that has finished the kernel"
            fix = "wait there until all accesses from other devices are done"
            facts = [("ref", self.monitor.describe(root)), ("of device", other.name)]
            self.monitor.report("copies", what, facts, fix)
        monitor, saved = other.monitor, other.state()
        device, flags = monitor.device, (other.moving, other.quiet, other.touched)
        by, other.races.by = other.races.by, self.monitor
        other._set_state(((self.monitor.op, [], 0, self.monitor.part), (0, 0)))
        other.races.lane, monitor.device = self.races.lane, self.monitor.device
        other.moving, other.quiet, other.touched = self.moving, self.quiet, self.touched
        try:
            yield other, root
        finally:
            other._set_state(saved)
            other.races.by, monitor.device = by, device
            other.moving, other.quiet, other.touched = flags

    def take(self, root: Value, picks: Any, mask: Any = None, other: Any = None) -> Any:
        if root not in self.elsewhere:
            return super().take(root, picks, mask, other)
        with self.there(root) as (walker, theirs):
            return walker.take(theirs, picks, mask, other)

    def put(self, root: Value, picks: Any, value: Any, mask: Any = None) -> None:
        if root not in self.elsewhere:
            super().put(root, picks, value, mask)
            return
        with self.there(root) as (walker, theirs):
            walker.put(theirs, picks, value, mask)

    def rmw(self, root: Value, picks: Any, kind: str, value: Any, mask: Any) -> Any:
        if root not in self.elsewhere:
            return super().rmw(root, picks, kind, value, mask)
        with self.there(root) as (walker, theirs):
            return walker.rmw(theirs, picks, kind, value, mask)

    def _painted(self, view: View, entries: Any, mask: Any | None) -> Any:
        if view.root not in self.elsewhere:
            return super()._painted(view, entries, mask)
        with self.there(view.root) as (walker, theirs):
            return walker._painted(replace(view, root=theirs), entries, mask)

    # --- copies ---

    def steps_remote_copy_start(self, op: Op) -> Steps:
        other = self._device(op, op.operands[4])
        there = (op.operands[1], op.operands[3])
        target, received = yield from self._ends_there(op, other, there, None)
        source, sent = self._end(op.operands[0]), self._end(op.operands[2])
        program = self.monitor.program_text(self.monitor.program)
        state, by = self.state(), self.monitor
        through_window = self._is_block(op.operands[0])
        where = self.schedule.current, program, state, self.races.start_copy()
        send = Send(op, source, source, sent, through_window, *where)
        (here, programs, _, part), lanes = state
        arriving = ((here, programs, other.monitor.program, part), lanes)
        where = None, program, arriving, self.races.start_copy()
        receive = Receive(op, target, target, received, False, *where, send=send)
        self.copies.start(send)
        other.copies.arrive(receive)
        with self.races.as_lane(send.lane):
            self.races.access(source.root, "reads", source.elements)
        with other.races.as_lane(receive.lane):
            other.races.access(target.root, "writes", target.elements, by)
        if self.schedule.is_early:
            self.move(send)
            other.move(receive)
        yield Pause(op)

    # --- signals ---

    def steps_sem_signal_device(self, op: Op) -> Steps:
        other = self._device(op, op.operands[2])
        core = None
        if len(op.operands) > 3:
            given = self.env[op.operands[3]]
            core = int(self.numbers.certain(given, "a core's number"))
        (end,) = yield from self._ends_there(op, other, op.operands[:1], core)
        amount = self._plain_amount(op)
        other.signals[end.root] = op
        with other.races.as_lane(self.races.lane):
            other.races.signal(end.key, int(amount))
        other._count(end.view, end.ref, amount)
        yield Pause(op)

    RULES: ClassVar = {
        **WaitingWalker.RULES,
        "barrier_semaphore": do_barrier_semaphore,
        "device_number": do_device_number,
    }
    RESUMABLE: ClassVar = {
        **WaitingWalker.RESUMABLE,
        "remote_copy_start": steps_remote_copy_start,
        "peer_device": steps_peer_device,
        "sem_signal_device": steps_sem_signal_device,
        "barrier_semaphore": steps_barrier_semaphore,
        "device_number": steps_device_number,
    }
