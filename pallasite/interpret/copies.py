"""Async copies in flight, and accesses that touch their memory too early.

A copy is in flight from its start until it is waited for; its data moves at any time in
between (`waits.py`). Reads of its destination and writes of either end are reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from pallasite.interpret.monitor import Monitor
from pallasite.interpret.numpy_memory import Elements
from pallasite.interpret.schedule import Context
from pallasite.interpret.views import View
from pallasite.ir.nodes import Op, Value


@dataclass(frozen=True)
class End:
    """One end of a copy, or its semaphore: elements of a root."""

    ref: Value
    view: View
    elements: Elements

    # Each access asks every copy in flight for these.
    @cached_property
    def root(self) -> Value:
        return self.view.root

    @cached_property
    def key(self) -> tuple[Value, tuple[Any, ...]]:
        return self.root, self.elements.box


class InFlight:
    """Something started and not yet waited for: a copy, or a matmul of a GPU
    (`gpu_level.py`, `tensor_memory.py`)."""

    kind: str
    fix: str
    fix_left: str = "wait() for it"  # where nothing waits for it
    op: Op
    starter: Context | None
    program: str | None
    through_window: bool  # an end is a block, whose lifetime ends with the program
    moved: bool
    reads: Mapping[str, End]
    writes: Mapping[str, End]
    ends: Sequence[End]

    @property
    def next_to_move(self) -> "InFlight":
        """What has to move next for this to be done; itself, if it may move now."""
        return self


@dataclass(eq=False)
class Copy(InFlight):
    """A copy that was started."""

    kind: ClassVar[str] = "copy"
    fix: ClassVar[str] = "wait() for the copy first"

    op: Op
    source: End
    target: End
    semaphore: End | None
    through_window: bool
    starter: Context | None
    program: str | None
    state: Any  # where the evaluator was at the start, for reports
    lane: int = 0  # its lane
    moved: bool = False

    @cached_property
    def semaphore_key(self) -> Any:
        return None if self.semaphore is None else self.semaphore.key

    @cached_property
    def reads(self) -> dict[str, End]:
        return {"source": self.source}

    @cached_property
    def writes(self) -> dict[str, End]:
        return {"destination": self.target}

    @property
    def ends(self) -> list[End]:
        return [self.source, self.target, self.semaphore or self.source]


@dataclass(eq=False)
class Send(Copy):
    """The half of a copy to another device that reads the source here."""

    kind: ClassVar[str] = "copy to another device"
    fix: ClassVar[str] = "wait_send() for the copy first"
    data: Any = None  # what was read

    @cached_property
    def writes(self) -> dict[str, End]:
        return {}


@dataclass(eq=False)
class Receive(Copy):
    """The half that writes the destination, on the device where that is."""

    kind: ClassVar[str] = "copy from another device"
    fix: ClassVar[str] = "wait_recv() for the copy first"
    send: Any = None  # the other half

    @cached_property
    def reads(self) -> dict[str, End]:
        return {}

    @property
    def next_to_move(self) -> Copy:
        return self if self.send.moved else self.send


class Copies:
    """What is in flight."""

    def __init__(self, monitor: Monitor):
        self.monitor = monitor
        self.flying: list[InFlight] = []

    def start(self, copy: InFlight) -> None:
        for end in copy.reads.values():
            self.read(end.root, end.elements)
        for end in copy.writes.values():
            self.written(end.root, end.elements)
        self.flying.append(copy)

    def arrive(self, copy: "Receive") -> None:
        """Started by another device; the clocks decide whether that is a race."""
        self.flying.append(copy)

    def pending(self) -> list[InFlight]:
        """Those whose data has not moved yet and may move now."""
        return [c for c in self.flying if not c.moved and c.next_to_move is c]

    def signalling(self, semaphore_key: Any) -> list[InFlight]:
        """What must move for a semaphore to be signalled."""
        waiting = self._counted_by(semaphore_key)
        return [c.next_to_move for c in waiting if not c.moved]

    def awaited(self, semaphore_key: Any, target: End) -> Copy | None:
        """The copy that a wait is for: by its semaphore, and by its end if possible."""
        waiting = self._counted_by(semaphore_key)
        same = [c for c in waiting if c.target.key == target.key]
        return next(iter(same or waiting), None)

    def _counted_by(self, semaphore_key: Any) -> list[Copy]:
        copies = (c for c in self.flying if isinstance(c, Copy))
        return [c for c in copies if c.semaphore_key == semaphore_key]

    def report_not_started(self, target: End) -> None:
        """The report of a wait for a copy that is never started."""
        facts = [("destination", self.monitor.describe(target.ref))]
        what = "a wait for a copy that was never started"
        fix = "start() it first, with the same semaphore"
        self.monitor.report("copies", what, facts, fix)

    # --- memory in flight ---

    def read(self, root: Value, elements: Elements) -> None:
        for copy in self.flying:
            self._meet(copy, copy.writes, root, elements, "read")

    def written(self, root: Value, elements: Elements) -> None:
        for copy in self.flying:
            # What another device sends there at the same time is a race.
            if not isinstance(copy, Receive):
                ends = {**copy.writes, **copy.reads}
                self._meet(copy, ends, root, elements, "written")

    def _meet(
        self,
        copy: InFlight,
        ends: Mapping[str, End],
        root: Value,
        elements: Elements,
        done: str,
    ) -> None:
        for which, end in ends.items():
            if end.root is not root:
                continue
            place = _common(end.elements, elements, root.ref.shape)
            if place is None:
                continue
            facts = [
                ("ref", self.monitor.describe(end.ref)),
                ("element", place),
                ("started at", copy.op.loc),
                ("started by", copy.program),
            ]
            kind = copy.kind
            what = f"the {which} of a {kind} is {done} before the {kind} is waited for"
            self.monitor.report("copies", what, facts, copy.fix)

    # --- ends ---

    def end_program(self, context: Context | None) -> None:
        for copy in self.flying:
            if copy.through_window and copy.starter is context:
                self._left(copy, "a copy is still in flight when its program ends")

    def end_memory(self, roots: Sequence[Value]) -> list[InFlight]:
        """Report copies that use the given allocations after their lifetime."""
        left = []
        for copy in self.flying:
            if any(end.root in roots for end in copy.ends):
                what = (
                    f"a {copy.kind} is still in flight at the end of its memory's "
                    "lifetime"
                )
                self._left(copy, what)
                left.append(copy)
        return left

    def end_kernel(self, core: Context | None) -> None:
        """The kernel ends, or one core of it."""
        for copy in self.flying:
            if core is None or copy.starter is core:
                self._left(copy, f"a {copy.kind} is never waited for")

    def _left(self, copy: InFlight, what: str) -> None:
        ends = {**copy.reads, **copy.writes}
        facts = [(which, self.monitor.describe(e.ref)) for which, e in ends.items()]
        self.monitor.report(
            "copies", what, facts, copy.fix_left, copy.op.loc, copy.program
        )


def _common(a: Elements, b: Elements, shape: Sequence[int]) -> tuple[int, ...] | None:
    """An element in both, if there is one."""
    first = []
    for (low_a, high_a), (low_b, high_b) in zip(a.box, b.box, strict=True):
        if max(low_a, low_b) >= min(high_a, high_b):
            return None
        first.append(max(low_a, low_b))
    if a.is_dense and b.is_dense:
        return tuple(first)
    both = np.argwhere(a.mask(shape) & b.mask(shape))
    return tuple(int(i) for i in both[0]) if len(both) else None
