"""What one thread does to copy operands: the program without the rest."""

from typing import Any

from pallasite.backends.cuda.block_pairs import PAIR
from pallasite.backends.cuda.products import PAIRED, ROUNDED
from pallasite.backends.cuda.rings import Group
from pallasite.backends.cuda.roles import SingleThread
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Op, Span, Value
from pallasite.ir.types import F32


class Loading(SingleThread):
    """Starts the copy of each group of loads once its slot is free."""

    def op(self, op: Op, builder: Builder) -> None:
        group = self.plan.group_of.get(id(op))
        if group is not None and op is group.loads[-1]:
            self.copy(group, builder)
        if group is not None or op.name == "dot":
            self.new[op.result] = self.unknown(op.result, builder)
        else:
            super().op(op, builder)

    def copy(self, group: Group, b: Builder) -> None:
        ring, memory = group.ring, self.memory
        slot, parity = self.advance(ring, b)
        empty = self.barrier(b, memory.empty[ring], slot)
        full = self.barrier(b, memory.full[ring], slot)
        b.emit("barrier_wait", empty, b.sub(b.index(1), parity))
        is_paired = self.plan.is_paired
        expecting = Builder(b.loc)
        bytes_ = ring.tile_bytes * (PAIR if is_paired else 1)
        expecting.emit("barrier_expect", full, bytes=bytes_)
        self.in_first(expecting, b)
        for load in group.loads:
            access = Access.of(load)
            indices = self.values(access.index_operands)
            source = b.subview(self.value(access.ref), access.index, indices)
            target = self.buffer(b, group, load, slot)
            half = ring.halves.get(group.loads.index(load))
            if half is not None:
                source = self.own_half(b, source, half)
            if target.ref.shape != source.ref.shape:
                target = b.op("reshape_view", target, shape=source.ref.shape)
            # f32 matmuls use the upper 19 bits, to which copies round.
            is_f32 = load.result.tile.dtype == F32 and not group.is_loaded(load)
            notes: dict[str, Any] = {ROUNDED: True} if is_f32 else {}
            if is_paired:  # the first one's barrier counts both copies
                how = {"axes": PAIRED, "to": "first", **notes}
                b.emit("cluster_copy", source, target, full, **how)
            else:
                b.emit("copy_start", source, target, full, priority=0, **notes)

    def own_half(self, b: Builder, source: Value, dim: int) -> Value:
        shape = source.ref.shape
        size = shape[dim] // PAIR
        first = b.mul(self.rank, b.index(size))
        index = [Span(0, n) for n in shape]
        index[dim] = Span(None, size)
        return b.subview(source, tuple(index), [first])
