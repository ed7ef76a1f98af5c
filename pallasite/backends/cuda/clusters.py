"""Clusters: multicast copies, and memory and barriers of other thread blocks.

The thread blocks of a cluster are consecutive in the launch, so the position of one is
its number modulo their count, and the cluster's axes are digits of it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product as each_of

from pallasite.backends.cuda.role_code import RoleCode
from pallasite.ir.nodes import Op, Value
from pallasite.ir.roles import Pipeline

CLUSTER = "cluster"  # the semantics of such axes
MOST_BLOCKS = 8  # supported by every chip with clusters


class Clusters(RoleCode):
    """Emits interactions between thread blocks of a cluster."""

    def __init__(self) -> None:
        super().__init__()
        # For each axis (-1 is the grid's last): its size, the stride to the next thread
        # block along it, this thread block's position.
        self.cluster: dict[int, tuple[int, int, str]] = {}
        self.in_block: dict[Value, str] = {}  # other blocks' barriers: whose they are
        self.has_peers = False  # blocks write each other's shared memory

    exchanges = False  # thread blocks read what others write to main memory

    @property
    def blocks(self) -> int:
        """Thread blocks of a cluster."""
        count = 1
        for size, _, _ in self.cluster.values():
            count *= size
        return count

    def note_cluster(self, pipeline: Pipeline) -> None:
        """Record which axes of the grid are those of clusters, from the last on."""
        step = 1
        for axis in reversed(range(len(pipeline.grid))):
            if pipeline.semantics[axis] != CLUSTER:
                break
            size = pipeline.grid[axis]
            assert size is not None
            place = self.env[pipeline.ids[axis]].name
            self.cluster[axis - len(pipeline.grid)] = size, step, place
            step *= size
        if step > MOST_BLOCKS:
            self.refuse(
                pipeline.op, f"a cluster of {step} blocks; the limit is {MOST_BLOCKS}"
            )

    def first_peer(self, axes: Sequence[int]) -> str:
        """The position of the first thread block that shares all axes but `axes`."""
        rest = [
            f"{place} * {step}"
            for axis, (size, step, place) in self.cluster.items()
            if axis not in axes and size > 1
        ]
        return " + ".join(rest) or "0"

    def peers(self, axes: Sequence[int]) -> list[int]:
        """Offsets from the first thread block to those that differ only in `axes`."""
        steps = [
            [n * step for n in range(size)]
            for axis, (size, step, _) in self.cluster.items()
            if axis in axes
        ]
        return sorted(sum(parts) for parts in each_of(*steps))

    def emit_cluster_barrier(self, op: Op) -> None:
        if self.in_role or self.has_roles:
            self.out.line("blocks_meet();")
        else:
            self.starts_together = True  # after barriers are initialised

    def emit_peer_block(self, op: Op) -> None:
        """The same place in another block: a number, for barriers, or a pointer."""
        ref, *numbers = op.operands
        axes = op.attrs["axes"]
        parts = [self.first_peer(axes)]
        for axis, number in zip(axes, numbers, strict=True):
            size, step, _ = self.cluster[axis]
            place = f"min(max({self.env[number].name}, 0), {size - 1})"
            parts.append(f"{place} * {step}")
        block = self.out.fresh("block")
        self.out.line(f"const u32 {block} = {' + '.join(parts)};")
        view = self.views[ref]
        if ref in self.barriers:
            self.barriers[op.result] = self.barriers[ref]
            self.in_block[op.result] = block
        else:
            pointer = self.out.fresh("there")
            self.out.line(f"auto* {pointer} = in_block({view.pointer}, {block});")
            view = replace(view, pointer=pointer)
        self.views[op.result] = view

    def emit_subview(self, op: Op) -> None:
        super().emit_subview(op)
        if op.operands[0] in self.in_block:
            self.in_block[op.result] = self.in_block[op.operands[0]]

    def emit_barrier_expect(self, op: Op) -> None:
        block = self.in_block.get(op.operands[0])
        if block is None:
            super().emit_barrier_expect(op)
            return
        at = self.barriers[op.operands[0]]
        self.out.line("writes_before_arrival();")
        self.out.line("__syncwarp();")
        self.out.line(f"if (thread % 32 == 0) arrive_at({at}, {block});")

    def emit_barrier_wait(self, op: Op) -> None:
        super().emit_barrier_wait(op)
        if self.has_peers:  # the wait orders what this block did
            self.out.line("writes_before_arrival();")

    def emit_cluster_arrive(self, op: Op) -> None:
        axes, at = op.attrs["axes"], self.barriers[op.operands[0]]
        further = self.peers(axes)
        if op.attrs["to"] == "first":
            further = further[:1]
        if self.exchanges or self.has_peers:
            self.out.line("writes_before_arrival();")
        self.out.line("__syncwarp();")
        for lane, step in enumerate(further):
            block = f"{self.first_peer(axes)} + {step}"
            self.out.line(f"if (thread % 32 == {lane}) arrive_at({at}, {block});")

    def emit_cluster_copy(self, op: Op) -> None:
        source, target, barrier = op.operands
        if op.attrs["to"] == "first":
            self.refuse(op, "a copy that arrives at another block's barrier")
        self.meet_before(op)
        axes = op.attrs["axes"]
        pattern = sum(1 << n for n in self.peers(axes))
        to = f"{pattern} << ({self.first_peer(axes)})"
        for at, map_, places in self.boxes(op, self.views[source], target):
            where = f"{map_}, {self.barriers[barrier]}, {to}"
            call = f"copy_to_blocks_{len(places)}({at}, {where}, {', '.join(places)});"
            self.out.line(self.once + call)


RULES = {
    "peer_block": Clusters.emit_peer_block,
    "subview": Clusters.emit_subview,
    "barrier_expect": Clusters.emit_barrier_expect,
    "barrier_wait": Clusters.emit_barrier_wait,
    "cluster_barrier": Clusters.emit_cluster_barrier,
    "cluster_arrive": Clusters.emit_cluster_arrive,
    "cluster_copy": Clusters.emit_cluster_copy,
}
