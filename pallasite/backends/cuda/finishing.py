"""What warpgroups do where accumulators are in tensor memory: all but the matmuls.

They take the result of a matmul at its first use, give what others need, and compute
the rest of the program with tiles in registers.
"""

from collections.abc import Sequence
from typing import Any

from pallasite.backends.cuda.products import AFTER_LOADS, PAIRED, Product
from pallasite.backends.cuda.rings import Group, RingMemory
from pallasite.backends.cuda.roles import Role
from pallasite.backends.cuda.tensor_sums import Part, Sums, TensorPlan
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.roles import Loop


class Finishing(Role):
    """The program with matmuls replaced by waits for their results."""

    def __init__(self, tensors: TensorPlan, memory: RingMemory):
        super().__init__(tensors.plan, memory)
        self.tensors = tensors
        self.pending = dict[Value, Sums]()  # results that are not yet taken
        self.stored = dict[Sums, tuple[Value, Value]]()  # slot and parity
        b = Builder()
        for part in tensors.parts:
            self.track(part, b)
        self.states = [*self.states, *b.ops]

    def block(self, block: Block) -> Block:
        builder = Builder()
        for number, op in enumerate(block.ops):
            builder.loc = op.loc
            self.op(op, builder)
            self.free_after(op, block, block.ops[number + 1 :], builder)
        self.take_all(builder)
        return Block(block.params, tuple(builder.ops), self.values(block.yields))

    def op(self, op: Op, builder: Builder) -> None:
        product = self.plan.by_op.get(id(op))
        group = self.plan.group_of.get(id(op))
        if product is not None:
            self.give(product, builder)
        elif id(op) in self.plan.fused:
            return
        elif group is not None:
            self.arrived(op, group, builder)
        elif op.name == "for" and self.tensors.added_in(Loop.of(op)):
            self.take_all(builder)
            self.without_sums(Loop.of(op), builder)
        else:
            self.take(self.pending if op.regions else op.operands, builder)
            self.kept(op, builder)

    # --- operands that threads load ---

    def arrived(self, op: Op, group: Group, b: Builder) -> None:
        """A staged load: of a tile that threads compute with, or only of matmuls."""
        if group.is_loaded(op):
            if group not in self.open:
                slot, parity = self.advance(group.ring, b)
                full = self.barrier(b, self.memory.full[group.ring], slot)
                b.emit("barrier_wait", full, parity)
                self.open[group] = slot
            self.new[op.result] = b.load(self.buffer(b, group, op, self.open[group]))
        elif not self.is_multiplied_only(op.result):
            self.kept(op, b)  # has other uses too: loaded like any tile

    def free_after(self, op: Op, block: Block, rest: Sequence[Op], b: Builder) -> None:
        """Release slots whose last tile was loaded in `op`."""
        for group in [g for g in self.open if g.block is block]:
            loads = [each for each in group.loads if group.is_loaded(each)]
            if not any(each in loads for each in rest):
                empty = self.memory.empty[group.ring]
                notes: dict[str, Any] = {AFTER_LOADS: True}
                free = self.barrier(b, empty, self.open.pop(group))
                b.emit("barrier_arrive", free, **notes)

    # --- matmuls ---

    def give(self, product: Product, b: Builder) -> None:
        """What a matmul needs of this role; its result can be taken later."""
        sums = self.tensors.of[product]
        if product is sums.products[0] and sums.loop is None and sums.part.starts:
            self.store_start(sums, b)
        given = self.tensors.given.get(product)
        if given is not None:
            self.take([product.lhs.value], b)
            slot, _ = self.advance(given, b)
            self.store(given, slot, self.value(product.lhs.value), b)
        if product is sums.products[-1] and sums.loop is None:
            self.pending[sums.result] = sums

    def store_start(self, sums: Sums, b: Builder) -> None:
        assert sums.start is not None
        self.take([sums.start], b)
        part, start = sums.part, self.value(sums.start)
        self.stored[sums] = slot, _ = self.advance(part, b)
        self.store(part, slot, b.cast(start, part.dtype), b)

    def store(self, part: Part, slot: Value, tile: Value, b: Builder) -> None:
        assert part.ready is not None
        b.store(part.view(b, slot), tile)
        b.emit("tensor_wait", what="stores")
        self.make_ready(self.barrier(b, part.ready, slot), b)

    def make_ready(self, barrier: Value, b: Builder) -> None:
        """Tell the thread that multiplies, which may be another thread block's."""
        if self.plan.is_paired:
            b.emit("cluster_arrive", barrier, axes=PAIRED, to="first")
        else:
            b.emit("barrier_arrive", barrier)

    def without_sums(self, loop: Loop, b: Builder) -> None:
        """The loop without the tiles that are added up in tensor memory."""
        found = self.tensors.added_in(loop)
        for sums in found:
            if sums.part.starts:
                self.store_start(sums, b)
        places = {sums.place for sums in found}
        kept = [n for n in range(len(loop.results)) if n not in places]
        self.shorter(loop, kept, b)
        self.pending |= {sums.result: sums for sums in found}

    def take(self, values: Sequence[Value] | dict[Value, Sums], b: Builder) -> None:
        """Wait for those of the values that matmuls compute, and load them."""
        for value in [v for v in self.pending if v in values]:
            sums = self.pending.pop(value)
            part = sums.part
            assert part.done is not None and part.ready is not None
            slot, parity = self.stored.pop(sums, None) or self.advance(part, b)
            b.emit("barrier_wait", self.barrier(b, part.done, slot), parity)
            tile = b.load(part.view(b, slot))
            b.emit("tensor_wait", what="loads")
            if not part.starts:
                self.make_ready(self.barrier(b, part.ready, slot), b)
            self.new[value] = b.cast(tile, value.tile.dtype)

    def take_all(self, b: Builder) -> None:
        self.take(self.pending, b)
