"""Clusters: concurrent thread blocks that share copies and barriers.

Each block is a context with its own memory (`resume.py`). An access to another block
uses the memory that the other one has in the same place.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from pallasite.interpret.copies import End
from pallasite.interpret.gpu_level import Barrier, GpuWalker, Load
from pallasite.interpret.schedule import Context, Pause, Steps
from pallasite.interpret.views import View
from pallasite.ir.nodes import Op, Value
from pallasite.ir.roles import Pipeline


class ClusterWait(Pause):
    """Until every block of the cluster has reached a barrier as often as this one."""

    def __init__(self, op: Op, walker: "ClusterWalker", block: Context):
        super().__init__(op)
        self.walker, self.count = walker, block.arrived
        self.blocks = [walker.cores[n] for n in walker.peers_along(walker.cluster_axes)]

    def _missing(self) -> list[str]:
        return [c.name for c in self.blocks if c.arrived < self.count]

    def ready(self) -> bool:
        return not self._missing()

    def text(self) -> str:
        return (
            f"waits for the other blocks of its cluster: {', '.join(self._missing())}"
        )

    def report(self) -> None:
        facts = [("never arrived", ", ".join(self._missing()))]
        what = "blocks of a cluster wait for one that never arrives"
        fix = "let every block reach its end"
        self.walker.monitor.report("copies", what, facts, fix)


def _whole(source: View, target: View) -> Any:
    """The whole copy of which each block does a part: the same for each of them.

    A part has the same position in the source and in the destination, so the distance
    between the two is that of the whole. None: not known.
    """
    if source.steps or target.steps:
        return None
    froms, tos = ([r for r in v.ranges if r.kept] for v in (source, target))
    fixed = [int(r.start) for v in (source, target) for r in v.ranges if not r.kept]
    if any(r.stride != 1 for r in (*froms, *tos)) or len(froms) != len(tos):
        return None
    apart = [int(a.start) - int(b.start) for a, b in zip(froms, tos, strict=True)]
    return source.root, (*fixed, *apart)


class ClusterWalker(GpuWalker):
    """The walker with accesses between blocks of a cluster."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # By op and blocks: what each block copied together with the others so far.
        self.copied_together: dict[Any, dict[int, list[Any]]] = {}

    def _look_at_sharing(self, op: Op, blocks: Sequence[int], target: End) -> None:
        """Report blocks that do not copy parts of the same whole."""
        context, source = self.schedule.current, self._end(op.operands[0])
        assert context is not None and context.core is not None
        of_op = self.copied_together.setdefault((op, tuple(blocks)), {})
        mine = of_op.setdefault(context.core, [])
        mine.append((_whole(source.view, target.view), source.elements.box))
        what, box = mine[-1]
        for other, theirs in of_op.items():
            if len(theirs) < len(mine):
                continue
            whole, there = theirs[len(mine) - 1]
            if whole is None or what is None or whole == what:
                continue
            facts = [
                ("source", self.monitor.describe(source.root)),
                ("part of this block", _box_text(box)),
                ("other block", self.cores[other].name),
                ("part of that block", _box_text(there)),
            ]
            self.monitor.report(
                "copies",
                "blocks of a cluster start different copies as one collective copy",
                facts,
                "give each block the same source and destination, or remove "
                "collective_axes",
            )

    @cached_property
    def cluster_axes(self) -> tuple[int, ...]:
        """The grid's axes along which blocks are in one cluster, -1 being the last."""
        (op,) = (op for op in self.kernel.body.ops if op.name == "pipeline")
        semantics = Pipeline.of(op).semantics
        axes = (n for n, s in enumerate(semantics) if s == "cluster")
        return tuple(n - len(semantics) for n in axes)

    def peers(self, op: Op) -> list[int]:
        """The blocks that differ from this one along the axes of an op only."""
        found = self.peers_along(op.attrs["axes"])
        return found[:1] if op.attrs.get("to") == "first" else found

    def peers_along(self, axes: Sequence[int]) -> list[int]:
        context = self.schedule.current
        assert context is not None
        fixed = [(a, n) for a, n in context.place.items() if a not in axes]
        blocks = enumerate(self.cores)
        return [k for k, b in blocks if all(b.place[a] == n for a, n in fixed)]

    def steps_peer_block(self, op: Op) -> Steps:
        ref, *numbers = op.operands
        context, view = self.schedule.current, self.env[ref]
        assert context is not None and context.core is not None
        wanted = dict(context.place)
        for axis, number in zip(op.attrs["axes"], numbers, strict=True):
            found = self.numbers.certain(self.env[number], "a block's position")
            wanted[axis] = int(found)
        same = (n for n, block in enumerate(self.cores) if block.place == wanted)
        block = next(same, None)
        if block is None:
            facts = [("ref", self.monitor.describe(ref))]
            facts += [("position", ", ".join(map(str, wanted.values())))]
            fix = "wrap it: lax.rem(position + 1, lax.axis_size(axis))"
            what = "a ref of a thread block that is not in the cluster"
            self.monitor.report("copies", what, facts, fix)
            return (view,)
        root = self._on_core(view.root, block, "ref")
        return (view if root is None else replace(view, root=root),)
        yield

    def end_at(self, end: End, block: int) -> End:
        """The same place in the memory of another block."""
        root = self._on_core(end.root, block, "copy to a ref")
        if root is None:
            return end
        return End(end.ref, View(root, end.view.ranges, end.view.steps), end.elements)

    def barriers_at(self, ref: Value, blocks: Sequence[int]) -> list[Barrier]:
        mine = self._end(ref)
        return [self.barrier_of(self.end_at(mine, block)) for block in blocks]

    def steps_cluster_barrier(self, op: Op) -> Steps:
        context = self.schedule.current
        if context is None or context.core is None:
            return
        block = self.cores[context.core]
        block.arrived += 1
        first, *_ = self.peers_along(self.cluster_axes)
        meeting = (self.cores[first], "cluster", block.arrived)
        self.races.arrive(meeting)
        yield ClusterWait(op, self, block)
        self.races.meet(meeting)

    def steps_cluster_arrive(self, op: Op) -> Steps:
        for barrier in self.barriers_at(op.operands[0], self.peers(op)):
            self._arrive(barrier, 1)
        yield Pause(op)

    def steps_cluster_copy(self, op: Op) -> Steps:
        blocks = self.peers(op)
        barriers = self.barriers_at(op.operands[2], blocks)
        target, context = self._end(op.operands[1]), self.schedule.current
        assert context is not None and context.core is not None
        if op.attrs["to"] == "first":
            blocks = [context.core]
        else:
            self._look_at_sharing(op, blocks, target)
        for block, barrier in zip(blocks, barriers, strict=True):
            load: Load = self._started(Load, op, barrier.end)
            load.target = self.end_at(target, block)
            self.start_load(load, barrier)
        yield Pause(op)

    RESUMABLE: ClassVar[Any] = {
        **GpuWalker.RESUMABLE,
        "cluster_barrier": steps_cluster_barrier,
        "cluster_arrive": steps_cluster_arrive,
        "cluster_copy": steps_cluster_copy,
        "peer_block": steps_peer_block,
    }


def _box_text(box: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{low}:{high}" for low, high in box)
