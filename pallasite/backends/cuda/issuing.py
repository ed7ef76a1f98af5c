"""What one thread does to multiply where accumulators are in tensor memory.

The program without its tiles. A matmul is issued when its operands have arrived and its
accumulator is ready; commits pass slots of operands back to the thread that copies, and
accumulators on to the warpgroups that take them.
"""

from typing import Any

from pallasite.backends.cuda.products import BEFORE_PRODUCTS, PAIRED, Product, Side
from pallasite.backends.cuda.rings import SCALAR, Group, RingMemory, alloc
from pallasite.backends.cuda.roles import SingleThread
from pallasite.backends.cuda.tensor_sums import Sums, TensorPlan
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.roles import Loop
from pallasite.ir.types import BOOL, TileType


class Issuing(SingleThread):
    """Issues matmuls in the program's order."""

    def __init__(self, tensors: TensorPlan, memory: RingMemory):
        super().__init__(tensors.plan, memory)
        self.tensors = tensors
        self.at = dict[Sums, Value]()  # the slots that are added to
        self.started = dict[Sums, Value]()  # whether there is something to add to
        self.waited_for = set[Group]()
        self.axes = PAIRED if self.plan.is_paired else ()  # of blocks that take part
        b = Builder()
        for part in tensors.parts:
            self.track(part, b)
        for sums in (s for s in tensors.sums if s.loop is not None):
            self.started[sums] = alloc(b, SCALAR, "started")
        self.states = [*self.states, *b.ops]

    def end(self, builder: Builder) -> None:
        """No thread block ends before what its matmuls arrive at."""
        last = self.barrier(builder, self.tensors.last, builder.index(0))
        inside = Builder(builder.loc)
        inside.emit("tensor_commit", last, axes=self.axes)
        self.in_first(inside, builder)
        builder.emit("barrier_wait", last, builder.index(0))

    def block(self, block: Block) -> Block:
        builder = Builder()
        for number, op in enumerate(block.ops):
            builder.loc = op.loc
            self.wait_for_operands(op, block, builder)
            self.op(op, builder)
            self.pass_back(block, block.ops[number + 1 :], builder)
        return Block(block.params, tuple(builder.ops), self.values(block.yields))

    def op(self, op: Op, builder: Builder) -> None:
        product = self.plan.by_op.get(id(op))
        if product is not None:
            self.multiply(product, builder)
        replaced = product is not None or id(op) in self.plan.group_of
        if replaced or op.name == "dot":
            self.new[op.result] = self.unknown(op.result, builder)
        elif op.name == "for" and self.tensors.added_in(Loop.of(op)):
            self.add_up(Loop.of(op), builder)
        else:
            super().op(op, builder)

    # --- operands ---

    def wait_for_operands(self, op: Op, block: Block, b: Builder) -> None:
        """Slots of a ring are waited for in the order in which they are filled."""
        groups = [g for g in self.plan.groups if g.block is block]
        order = {id(load): n for n, load in enumerate(block.ops)}
        groups.sort(key=lambda g: order[id(g.loads[-1])])
        needed = [n for n, g in enumerate(groups) if self.multiplies(op, g)]
        rings = [groups[n].ring for n in needed]
        for group in groups[: max(needed, default=-1) + 1]:
            if group.ring in rings and group not in self.waited_for:
                self.waited_for.add(group)
                slot, parity = self.advance(group.ring, b)
                full = self.barrier(b, self.memory.full[group.ring], slot)
                notes: dict[str, Any] = {BEFORE_PRODUCTS: True}
                b.emit("barrier_wait", full, parity, **notes)
                self.open[group] = slot

    def pass_back(self, block: Block, rest: tuple[Op, ...], b: Builder) -> None:
        for group in [g for g in self.open if g.block is block]:
            if not any(self.multiplies(op, group) for op in rest):
                empty = self.memory.empty[group.ring]
                slot = self.open.pop(group)
                b.emit("tensor_commit", self.barrier(b, empty, slot), axes=self.axes)

    def multiplies(self, op: Op, group: Group) -> bool:
        """Whether an op is a matmul of a group's tiles, or one in its regions is."""
        loads = {id(load) for load in group.loads}
        inner = (op, *(o for r in op.regions for o in walk(r)))
        found = (self.plan.by_op.get(id(each)) for each in inner)
        return any(
            id(side.load) in loads for p in found if p is not None for side in p.sides
        )

    def side(self, product: Product, side: Side, b: Builder) -> Value:
        if side.load is not None:
            return self.operand(side, b)
        given = self.tensors.given[product]
        assert given.ready is not None
        slot, parity = self.advance(given, b)
        b.emit("barrier_wait", self.barrier(b, given.ready, slot), parity)
        return given.view(b, slot)

    # --- matmuls ---

    def multiply(self, product: Product, b: Builder) -> None:
        sums = self.tensors.of[product]
        is_first, is_last = (product is sums.products[n] for n in (0, -1))
        if is_first and sums.loop is None:
            self.wait_for_sums(sums, b)
        lhs, rhs = (self.side(product, side, b) for side in product.sides)
        adds = b.constant(not is_first or sums.part.starts, TileType((), BOOL))
        if is_first and sums.loop is not None:
            adds = b.ne(b.load(self.started[sums]), b.index(0))
        view = sums.part.view(b, self.at[sums])
        scales = [self.scales(side, b) for side in product.sides if side.scales]
        contract = tuple((side.contract,) for side in product.sides)
        operands = (view, lhs, rhs, adds, *scales)
        b.emit("tensor_mma", *operands, contract=contract, axes=self.axes)
        if is_first and sums.loop is not None:
            b.store(self.started[sums], b.index(1))
        if is_last and sums.loop is None:
            self.pass_on(sums, b)

    def scales(self, side: Side, b: Builder) -> Value:
        """Those of an operand in tensor memory: copied before a matmul, in order."""
        assert side.scales is not None
        group = self.plan.group_of[id(side.scales)]
        source = self.buffer(b, group, side.scales, self.open[group])
        target = self.tensors.scales[side]
        b.emit("tensor_copy", source, target, axes=self.axes)
        return target

    def wait_for_sums(self, sums: Sums, b: Builder) -> None:
        part = sums.part
        assert part.ready is not None
        slot, parity = self.advance(part, b)
        # What is stored there is an arrival of this use, what is taken of the next one.
        phase = parity if part.starts else b.sub(b.index(1), parity)
        b.emit("barrier_wait", self.barrier(b, part.ready, slot), phase)
        self.at[sums] = slot

    def pass_on(self, sums: Sums, b: Builder) -> None:
        assert sums.part.done is not None
        done = self.barrier(b, sums.part.done, self.at.pop(sums))
        b.emit("tensor_commit", done, axes=self.axes)

    def add_up(self, loop: Loop, b: Builder) -> None:
        found = self.tensors.added_in(loop)
        for sums in found:
            self.wait_for_sums(sums, b)
            b.store(self.started[sums], b.index(int(sums.part.starts)))
        self.loop(loop, b)
        for sums in found:
            self.pass_on(sums, b)
