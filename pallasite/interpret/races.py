"""Data races: concurrent programs that access the same element of memory.

Programs that differ along an axis that the author declares parallel, and that grid
analysis does not prove parallel, are in different *lanes*. For each element this
records the lanes that wrote and read it. Scratch is private to a lane: reading what
another lane wrote there gives an undefined value. Where lanes can wait for each other
(concurrent cores and roles), `clocks.py` determines which accesses are ordered.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pallasite.interpret.clocks import CLASHES, Access, Clocks, Timed
from pallasite.interpret.monitor import STALE, Monitor, Origin
from pallasite.interpret.numpy_memory import Elements, Region
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import PARALLEL, analyze

MANY = -1


def racing_axes(kernel: Kernel) -> tuple[int, ...]:
    """Axes declared parallel that grid analysis does not prove to be, or along which
    programs access each other's memory."""
    pipelines = [op for op in kernel.body.ops if op.name == "pipeline"]
    if len(pipelines) != 1:
        return ()
    (op,) = pipelines
    pipeline = Pipeline.of(op)
    axes = enumerate(zip(pipeline.grid, pipeline.semantics, strict=True))
    said = [a for a, (size, word) in axes if word in PARALLEL and size != 1]
    if not said:
        return ()
    silent = pipeline.with_(semantics=("arbitrary",) * len(pipeline.grid)).to_op()
    ops = tuple(silent if o is op else o for o in kernel.body.ops)
    proven = analyze(kernel.with_(body=Block((), ops))).parallel
    peers = {a for o in walk(kernel.body) if o.name == "peer_block" for a in _axes(o)}
    meet = {len(pipeline.grid) + a for a in peers}
    return tuple(a for a in said if a not in proven or a in meet)


def _axes(op: Op) -> tuple[int, ...]:
    """Axes of a cluster, counted from the grid's end."""
    return op.attrs["axes"]


class _Marks:
    """Who accessed each element in one way: its lane, and two programs' numbers."""

    def __init__(self, shape: Sequence[int]):
        self.lane = np.zeros(shape, np.int32)  # 0: no lane, MANY: several lanes
        self.first = np.zeros(shape, np.int32)
        self.second = np.zeros(shape, np.int32)  # of another lane than the first

    def add(self, elements: Elements, lane: int, program: int) -> None:
        before = elements.of(self.lane)
        fresh = before == 0
        if np.all(fresh):
            elements.set(self.lane, lane)
            elements.set(self.first, program)
            return
        other = ~fresh & (before != lane) & (before != MANY)
        if not (np.any(fresh) or np.any(other)):
            return
        lanes = np.where(fresh, lane, np.where(other, MANY, before))
        elements.set(self.lane, lanes)
        elements.set(self.first, np.where(fresh, program, elements.of(self.first)))
        elements.set(self.second, np.where(other, program, elements.of(self.second)))


class _RootMarks:
    """The marks of one root."""

    def __init__(self, ref: Value, private: bool):
        self.ref, self.private, self.shape = ref, private, ref.ref.shape
        self.marks = {"writes": _Marks(self.shape)}
        if not private:
            self.marks["reads"] = _Marks(self.shape)


_FIX_BLOCKS = (
    'give each program its own block, or declare the axis "arbitrary" in '
    "dimension_semantics"
)
_FIX_PARTS = "give each thread block its own part of the array"
_FIX_ORDER = (
    "order the two accesses: signal a semaphore, or arrive at a barrier, after one "
    "and wait before the other"
)


def _what(how: str, earlier: str) -> str:
    return f"data race: a program {how} an element that a concurrent program {earlier}"


class Races:
    """The memory that lanes share, and the current lane.

    Args:
        monitor: the position of the run.
        axes: the axes of the kernel's grid whose programs are in different lanes.
        clocks: given if contexts run concurrently; those of all devices.
        device: which device this is.
    """

    def __init__(
        self,
        monitor: Monitor,
        axes: Sequence[int],
        clocks: Clocks | None,
        device: int = 0,
    ):
        self.monitor, self.axes, self.clocks = monitor, tuple(axes), clocks
        self.device, self.device_lane, self.entered = device, 0, 0
        self.memories: dict[Value, _RootMarks] = {}
        self.timed: dict[Value, Timed] = {}
        # What stands for memory of another device: its races, and what it is there.
        self.elsewhere: dict[Value, tuple[Races, Value]] = {}
        self.by: Monitor | None = None  # of the device that accesses memory of this one
        self.program_lane = 0
        self.lane = 0  # that of the program, of a role in it, or of a copy
        self._lanes: dict[Hashable, int] = {}
        self._lane_of_program = [0]
        self._copies = 0  # lanes of copies so far
        self._free: dict[int, list[int]] = {}  # lanes of copies that have ended
        self._ended: list[tuple[int, int]] = []  # those waited for by anyone, and when

    @property
    def is_watching(self) -> bool:
        return bool(self.memories or self.timed)

    def add(self, root: Value, private: bool) -> None:
        if not self.axes:
            return
        if self.clocks is not None and not private:
            self.timed[root] = Timed(root)
        else:
            self.memories[root] = _RootMarks(root, private)

    def watch(self, root: Value) -> None:
        """Memory that roles share."""
        self.timed.setdefault(root, Timed(root))

    def renew(self, root: Value) -> None:
        """Memory that is allocated again: its previous contents are undefined, and no
        signal that was left over counts."""
        if root in self.timed:
            self.timed[root] = Timed(root)
        if self.clocks is not None and root.ref.is_semaphore:
            self.clocks.forget((self.device, root))

    def enter_program(self, ids: Sequence[Any]) -> None:
        if self.axes:
            self.program_lane = self._lane(*(int(ids[a]) for a in self.axes))
            self.lane = self.program_lane
            self._lane_of_program.append(self.program_lane)
            if self.clocks is not None and self.device_lane:
                self.clocks.fork(self.device_lane, self.lane)

    def _lane(self, *key: Hashable) -> int:
        if self.clocks is not None:
            return self.clocks.lane(self.device, *key)
        return self._lanes.setdefault(key, len(self._lanes) + 1)

    # --- devices ---

    def enter_kernel(self) -> None:
        """This device starts the kernel, concurrently with others."""
        assert self.clocks is not None
        self.device_lane = self.lane = self._lane("device")
        self.entered = self.clocks.add(self.lane, Access(None, 0, None, self.monitor))

    def knows_entered(self, other: "Races") -> bool:
        """Whether another device is known to have started the kernel."""
        assert self.clocks is not None
        known = self.clocks.known(self.lane)
        return other is self or known.get(other.device_lane, 0) >= other.entered

    def access(
        self, root: Value, how: str, elements: Elements, by: Monitor | None = None
    ) -> None:
        """`how`: "reads", "writes", or "updates" for atomics. `by`: of the device that
        does it, if it is another one."""
        if root in self.elsewhere:
            races, theirs = self.elsewhere[root]
            with races.as_lane(self.lane):
                races.access(theirs, how, elements, by or self.monitor)
            return
        timed, memory = self.timed.get(root), self.memories.get(root)
        if timed is not None and self.lane:
            self._access_timed(timed, how, elements, by or self.by or self.monitor)
        if memory is None or not self.program_lane:
            return
        if memory.private:
            if how != "reads":  # only the last writer matters
                elements.set(memory.marks["writes"].lane, self.program_lane)
                elements.set(memory.marks["writes"].first, self.monitor.program)
            return
        for earlier in CLASHES[how]:
            marks = memory.marks.get(earlier)
            if marks is not None:
                lanes = elements.of(marks.lane)
                clash = (lanes != 0) & (lanes != self.program_lane)
                if np.any(clash):
                    self._report(memory, how, earlier, elements, np.ravel(clash))
        if how not in memory.marks:
            memory.marks[how] = _Marks(memory.shape)
        memory.marks[how].add(elements, self.program_lane, self.monitor.program)

    def _access_timed(
        self, timed: Timed, how: str, elements: Elements, monitor: Monitor
    ) -> None:
        assert self.clocks is not None
        found = timed.clash(self.clocks, self.lane, how, elements)
        if found is not None:
            earlier, place, other = found
            there = other.monitor or monitor
            facts = [
                ("ref", monitor.describe(self._named(timed.root))),
                ("element", place),
                ("other device", there.device),
                ("other program", there.program_text(other.program)),
                ("other part", other.who),
                ("other access at", other.op.loc if other.op is not None else None),
            ]
            monitor.report("races", _what(how, earlier), facts, _FIX_ORDER)
        access = Access(monitor.op, monitor.program, monitor.part, monitor)
        timed.add(self.clocks, self.lane, how, elements, access)

    # --- order between lanes ---

    def signal(self, semaphore: tuple[Hashable, ...], amount: int) -> None:
        if self.clocks is not None:
            self.clocks.signal(self.lane, (self.device, *semaphore), amount)

    def wait(self, semaphore: tuple[Hashable, ...], amount: int) -> None:
        if self.clocks is not None:
            self.clocks.wait(self.lane, (self.device, *semaphore), amount)

    def reach(self, semaphore: tuple[Hashable, ...], amount: int) -> None:
        if self.clocks is not None:
            self.clocks.reach(self.lane, (self.device, *semaphore), amount)

    def arrive(self, barrier: Hashable) -> None:
        if self.clocks is not None:
            self.clocks.arrive(self.lane, barrier)

    def meet(self, barrier: Hashable) -> None:
        if self.clocks is not None:
            self.clocks.meet(self.lane, barrier)

    def start_role(self, key: Hashable) -> int:
        """The lane of a role; the same for each run of it by one lane."""
        assert self.clocks is not None
        lane = self._lane(self.lane, key)
        self.clocks.fork(self.lane, lane)
        return lane

    def start_copy(self) -> int:
        if self.clocks is None:
            return 0
        free = self._free.get(self.lane)
        lane = free.pop() if free else self._known_end()
        if not lane:
            self._copies += 1
            lane = self._lane("copy", self._copies)
        self.clocks.fork(self.lane, lane)
        return lane

    def _known_end(self) -> int:
        """The lane of a copy that another lane waited for, if this lane knows."""
        assert self.clocks is not None
        known = self.clocks.known(self.lane)
        for n, (lane, end) in enumerate(self._ended):
            if known.get(lane, 0) >= end:
                del self._ended[n]
                return lane
        return 0

    def retire(self, lane: int) -> None:
        """A copy has ended; lanes that know of it may reuse its lane."""
        if self.clocks is not None:
            self._ended.append((lane, self.clocks.last(lane)))

    def end(self, lane: int) -> None:
        """A role or a copy has ended, and this lane knows."""
        if self.clocks is not None:
            self.clocks.join(self.lane, lane)

    def end_copy(self, lane: int) -> None:
        """A copy was waited for: its lane can be that of this lane's next copy."""
        self.end(lane)
        self._free.setdefault(self.lane, []).append(lane)

    @contextmanager
    def as_lane(self, lane: int) -> Iterator[None]:
        saved, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = saved

    def stale(self, root: Value, region: Region) -> np.ndarray | None:
        """Codes of scratch elements that another lane wrote last."""
        memory = self.memories.get(root)
        if memory is None or not memory.private or not self.program_lane:
            return None
        marks = memory.marks["writes"]
        lanes = np.asarray(region.take(marks.lane, 0))
        found = (lanes != 0) & (lanes != self.program_lane)
        if not found.any():
            return None
        writers = np.asarray(region.take(marks.first, 0))[found]
        origin = Origin(
            STALE,
            self.monitor.describe(root),
            self.monitor.op.loc if self.monitor.op else None,
            other=self.monitor.program_text(int(writers.flat[0])),
        )
        return np.where(found, np.int32(self.monitor.code(origin)), 0)

    def _report(
        self,
        memory: _RootMarks,
        how: str,
        earlier: str,
        elements: Elements,
        clash: np.ndarray,
    ) -> None:
        n = int(np.argmax(clash))
        marks = memory.marks[earlier]
        programs = [
            int(np.ravel(elements.of(m))[n]) for m in (marks.first, marks.second)
        ]
        mine, lanes = self.program_lane, self._lane_of_program
        other = next(p for p in programs if p and lanes[p] != mine)
        element = elements.position(memory.shape, n)
        facts = [
            ("ref", self.monitor.describe(self._named(memory.ref))),
            ("element", element),
            ("other program", self.monitor.program_text(other)),
        ]
        of_gpu = memory.ref.ref.space == "gmem"  # whose blocks run at the same time
        fix = _FIX_PARTS if of_gpu else _FIX_BLOCKS
        self.monitor.report("races", _what(how, earlier), facts, fix)

    def _named(self, root: Value) -> Value:
        """An operand that is also a result is shown as the result."""
        return self.monitor.kernel.aliased_results.get(root, root)


def top_level_memory(kernel: Kernel) -> list[Op]:
    """Scratch that all programs of a kernel share."""
    return [op for op in kernel.body.ops if op.name == "alloc"]
