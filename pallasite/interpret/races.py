"""Races: programs that may run at once and touch the same element of memory.

Programs that differ along an axis that the author calls parallel, and that grid
analysis does not find parallel by itself, are in different *lanes*. Per element this
remembers the lanes that wrote and read it. Scratch is each lane's own: reading there
what another lane wrote gives an undefined value.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.interpret.monitor import STALE, Monitor, Origin
from pallasite.interpret.numpy_memory import Elements, Region
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import PARALLEL, analyze

MANY = -1


def racing_axes(kernel: Kernel) -> tuple[int, ...]:
    """Axes said to be parallel that grid analysis does not prove to be."""
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
    return tuple(a for a in said if a not in proven)


class _Marks:
    """Who touched each element in one way: its lane, and two programs' numbers."""

    def __init__(self, shape: Sequence[int]):
        self.lane = np.zeros(shape, np.int32)  # 0: nobody, MANY: several lanes
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


class _Memory:
    """The marks of one root."""

    def __init__(self, ref: Value, private: bool):
        self.ref, self.private, self.shape = ref, private, ref.ref.shape
        self.marks = {"writes": _Marks(self.shape)}
        if not private:
            self.marks["reads"] = _Marks(self.shape)


# Which earlier accesses of another lane an access must not meet.
_CLASHES = {
    "reads": ("writes", "updates"),
    "writes": ("writes", "reads", "updates"),
    "updates": ("writes", "reads"),
}


class Races:
    """The memory that lanes share, and the lane that runs now."""

    def __init__(self, monitor: Monitor, axes: Sequence[int]):
        self.monitor, self.axes = monitor, tuple(axes)
        self.memories: dict[Value, _Memory] = {}
        self.lane = 0
        self._lanes: dict[tuple[int, ...], int] = {}
        self._lane_of_program = [0]

    def add(self, root: Value, private: bool) -> None:
        if self.axes:
            self.memories[root] = _Memory(root, private)

    def enter_program(self, ids: Sequence[Any]) -> None:
        if self.axes:
            key = tuple(int(ids[a]) for a in self.axes)
            self.lane = self._lanes.setdefault(key, len(self._lanes) + 1)
            self._lane_of_program.append(self.lane)

    def access(self, root: Value, how: str, elements: Elements) -> None:
        """`how`: "reads", "writes", or "updates" for atomics."""
        memory = self.memories.get(root)
        if memory is None or not self.lane:
            return
        if memory.private:
            if how != "reads":  # only the last writer matters
                elements.set(memory.marks["writes"].lane, self.lane)
                elements.set(memory.marks["writes"].first, self.monitor.program)
            return
        for earlier in _CLASHES[how]:
            marks = memory.marks.get(earlier)
            if marks is not None:
                lanes = elements.of(marks.lane)
                clash = (lanes != 0) & (lanes != self.lane)
                if np.any(clash):
                    self._report(memory, how, earlier, elements, np.ravel(clash))
        if how not in memory.marks:
            memory.marks[how] = _Marks(memory.shape)
        memory.marks[how].add(elements, self.lane, self.monitor.program)

    def stale(self, root: Value, region: Region) -> np.ndarray | None:
        """Codes of scratch elements that another lane wrote last."""
        memory = self.memories.get(root)
        if memory is None or not memory.private or not self.lane:
            return None
        marks = memory.marks["writes"]
        lanes = np.asarray(region.take(marks.lane, 0))
        found = (lanes != 0) & (lanes != self.lane)
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
        memory: _Memory,
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
        other = next(p for p in programs if p and self._lane_of_program[p] != self.lane)
        element = elements.position(memory.shape, n)
        facts = [
            ("ref", self.monitor.describe(self._named(memory.ref))),
            ("element", element),
            ("other program", self.monitor.program_text(other)),
        ]
        self.monitor.report(
            "races",
            f"a program {how} an element that another, which may run at the same "
            f"time, {earlier}",
            facts,
            "give each program its own block, or leave the axis out of "
            'dimension_semantics ("arbitrary")',
        )

    def _named(self, root: Value) -> Value:
        """An operand that is also a result is shown as the result."""
        kernel = self.monitor.kernel
        aliased = {kernel.inputs[i]: kernel.outputs[o] for i, o in kernel.aliases}
        return aliased.get(root, root)


def top_level_memory(kernel: Kernel) -> list[Op]:
    """Scratch that all programs of a kernel share."""
    return [op for op in kernel.body.ops if op.name == "alloc"]
