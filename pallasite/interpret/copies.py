"""Async copies and semaphores: what is in flight, and who touches it too early.

The evaluator moves the data when a copy is started; this remembers the copy until it is
waited for, and reports reads of its destination and writes of either end before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallasite.interpret.monitor import Monitor
from pallasite.interpret.numpy_memory import Elements
from pallasite.ir.nodes import Op, Value


@dataclass(frozen=True)
class End:
    """One end of a copy: elements of a root."""

    ref: Value
    root: Value
    elements: Elements


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy that was started."""

    op: Op
    source: End
    target: End
    semaphore: tuple[Value, tuple] | None
    program: str | None
    through_window: bool  # an end is a block, which is gone after the program


class Copies:
    """The copies in flight."""

    def __init__(self, monitor: Monitor):
        self.monitor = monitor
        self.flying: list[Copy] = []

    def start(self, copy: Copy) -> None:
        self.flying.append(copy)

    def wait(self, semaphore: Any, target: End) -> None:
        waiting = [c for c in self.flying if c.semaphore == semaphore]
        if not waiting:
            facts = [("destination", self.monitor.describe(target.ref))]
            what = "a copy that was not started is waited for"
            fix = "start() it first, with the same semaphore"
            self.monitor.report("copies", what, facts, fix)
            return
        box = target.elements.box()
        same = [
            c
            for c in waiting
            if c.target.root is target.root and c.target.elements.box() == box
        ]
        self.flying.remove((same or waiting)[0])

    # --- memory in flight ---

    def read(self, root: Value, elements: Elements) -> None:
        for copy in self.flying:
            self._meet(copy, copy.target, root, elements, "destination", "read")

    def written(self, root: Value, elements: Elements) -> None:
        for copy in self.flying:
            self._meet(copy, copy.target, root, elements, "destination", "written")
            self._meet(copy, copy.source, root, elements, "source", "written")

    def _meet(
        self,
        copy: Copy,
        end: End,
        root: Value,
        elements: Elements,
        which: str,
        done: str,
    ) -> None:
        if end.root is not root:
            return
        place = _common(end.elements, elements, root.ref.shape)
        if place is None:
            return
        facts = [
            ("ref", self.monitor.describe(end.ref)),
            ("element", place),
            ("started at", copy.op.loc),
            ("started by", copy.program),
        ]
        what = f"the {which} of a copy is {done} before the copy is waited for"
        self.monitor.report("copies", what, facts, "wait() for the copy first")

    # --- ends ---

    def end_program(self) -> None:
        for copy in self.flying:
            if copy.through_window:
                self._left(copy, "a copy is still in flight when its program ends")

    def end_memory(self, roots: Sequence[Value]) -> None:
        """The given allocations are gone."""
        for copy in self.flying:
            ends = [copy.source.root, copy.target.root]
            if copy.semaphore is not None:
                ends.append(copy.semaphore[0])
            if any(r in roots for r in ends):
                self._left(copy, "a copy is still in flight when its memory is gone")

    def end_kernel(self) -> None:
        for copy in self.flying:
            self._left(copy, "a copy is never waited for")

    def _left(self, copy: Copy, what: str) -> None:
        facts = [
            ("source", self.monitor.describe(copy.source.ref)),
            ("destination", self.monitor.describe(copy.target.ref)),
        ]
        self.monitor.report(
            "copies", what, facts, "wait() for it", copy.op.loc, copy.program
        )


def _common(a: Elements, b: Elements, shape: Sequence[int]) -> tuple[int, ...] | None:
    """An element of both, if there is one."""
    first = []
    for (low_a, high_a), (low_b, high_b) in zip(a.box(), b.box(), strict=True):
        if max(low_a, low_b) >= min(high_a, high_b):
            return None
        first.append(max(low_a, low_b))
    if a.is_dense and b.is_dense:
        return tuple(first)
    both = np.argwhere(a.mask(shape) & b.mask(shape))
    return tuple(int(i) for i in both[0]) if len(both) else None
