"""What warpgroups do that hold accumulators in registers, as Hopper's.

The program with its loads replaced by waits and its matmuls by `wgmma`, which are
waited for at the first use of their result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pallasite.backends.cuda.overlap import uses_product
from pallasite.backends.cuda.products import (
    AFTER_LOADS,
    BEHIND,
    ENDS_TURN,
    IN_TURN,
    TURN_DEPTH,
    TURN_PRODUCTS,
    Plan,
    Product,
    note_product,
)
from pallasite.backends.cuda.program_ops import is_of_rows
from pallasite.backends.cuda.rings import SCALAR, Group, Ring, RingMemory, alloc
from pallasite.backends.cuda.roles import Role, holds
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import is_pure, writes
from pallasite.ir.roles import Loop
from pallasite.ir.types import I32

SAME_NUMBERS = ("reshape", "broadcast_in_dim")  # ops that compute nothing
# Registers of a thread for matmuls that stay in flight across iterations. With more,
# ptxas serialises all matmuls of a kernel.
MOST_IN_FLIGHT = 200


@dataclass(eq=False)
class _Flight:
    """A matmul in flight, and the slots to release when it has completed."""

    product: Product
    result: Value
    frees: list[tuple[Group, Value]]


@dataclass(frozen=True)
class _Chained:
    """Accumulators in flight across iterations, and what is issued alongside them."""

    sums: list[Product]
    early: list[Product]


class Computing(Role):
    """The warpgroups' code: matmuls in flight, waited for at their first use."""

    def __init__(self, plan: Plan, memory: RingMemory):
        super().__init__(plan, memory)
        self.flights: list[_Flight] = []
        self.waits_for: dict[int, Value] = {}  # results, by ops of matmuls after them
        self.freed_at_wait: list[Group] = []  # slots of the previous iteration
        b = Builder()
        self.held: dict[Ring, Value] = {}  # the slot not yet released, or -1
        for ring in plan.rings:
            self.held[ring] = alloc(b, SCALAR, "held")
            b.store(self.held[ring], b.index(-1))
        memory.zeros_after_rows(b)
        self.states = [*self.states, *b.ops]

    def block(self, block: Block) -> Block:
        builder = Builder()
        ordered = self.ordered(block)
        for number, op in enumerate(ordered):
            builder.loc = op.loc
            self.op(op, builder)
            self.free_after(op, block, ordered[number + 1 :], builder)
        self.settle_all(builder)
        return Block(block.params, tuple(builder.ops), self.values(block.yields))

    def op(self, op: Op, builder: Builder) -> None:
        product = self.plan.by_op.get(id(op))
        group = self.plan.group_of.get(id(op))
        if product is not None:
            self.start(product, builder)
        elif id(op) in self.plan.fused:
            return
        elif group is not None:
            self.arrived(op, group, builder)
        elif op.name == "for" and self.is_stream(Loop.of(op)):
            self.stream(Loop.of(op), builder)
        elif op.name == "for" and (chained := self.chained_sums(Loop.of(op))):
            self.chained(Loop.of(op), chained, builder)
        elif op.regions:
            self.settle_all(builder)
            self.kept(op, builder)
        else:
            for value in op.results:
                if value in self.plan.register_operands and not self.is_prepared(op):
                    self.settle_register_operands(value, builder)
            self.settle(op.operands, builder)
            self.kept(op, builder)

    # --- order ---

    def ordered(self, block: Block) -> list[Op]:
        """Matmuls that can start at once come first, operands of the next ones last.

        The registers of a matmul's left operand must not change while it is in flight,
        so what computes the next one ends the block: the rest overlaps with the matmul.
        """
        ops = self.products_first(block)
        late = [op for op in ops if self.is_next_operand(op, block)]
        return [op for op in ops if op not in late] + late

    def is_next_operand(self, op: Op, block: Block) -> bool:
        """Whether an op computes a left operand that only later blocks multiply."""
        if len(op.results) != 1 or op.result not in self.plan.register_operands:
            return False
        users = self.plan.users[op.result]  # not in branches and loops of this block
        return is_pure(op) and not any(holds(each, users) for each in block.ops)

    def products_first(self, block: Block) -> list[Op]:
        """Matmuls that need nothing computed in this block come before the rest."""
        here = {v: op for op in block.ops for v in op.results}
        moved: list[set[int]] = []  # a matmul and what it needs, each
        for op in block.ops:
            product = self.plan.by_op.get(id(op))
            needed = None if product is None else self.needs(product, here)
            if needed is not None:
                moved.append(needed | {id(op)})
        early = set[int]().union(*moved)
        while (passing := self.passing(block, early)) is not None:
            moved = [ops for ops in moved if id(passing) not in ops]
            early = set[int]().union(*moved)
        last = max((n for n, op in enumerate(block.ops) if id(op) in early), default=-1)
        if any(writes(op) for op in block.ops[:last] if id(op) not in early):
            early = set()
        first = [op for op in block.ops if id(op) in early]
        rest = [op for op in block.ops if id(op) not in early]
        return self.loads_at_their_use([*first, *rest])

    def loads_at_their_use(self, ops: Sequence[Op]) -> list[Op]:
        """Reorder ops so that threads' loads occupy no registers before their use."""
        late = list[Op]()
        values = set[Value]()
        for op in ops:
            group = self.plan.group_of.get(id(op))
            is_loaded = group is not None and group.is_loaded(op)
            if is_loaded or (op.name in SAME_NUMBERS and op.operands[0] in values):
                late.append(op)
                values.add(op.result)
        placed = list(ops)
        for op in reversed(late):
            users = self.plan.users[op.result]
            uses = (n for n, each in enumerate(placed) if holds(each, users))
            place = next(uses, None)
            if place is not None:
                placed.remove(op)
                placed.insert(place - 1, op)
        return placed

    def passing(self, block: Block, early: set[int]) -> Op | None:
        """A load that would precede one that takes an earlier slot of its ring.

        Loads of its own group arrive with it, in the same slot.
        """
        taken = list[Group]()
        for op in block.ops:
            loads = [op, *(inner for r in op.regions for inner in walk(r))]
            found = [self.plan.group_of.get(id(load)) for load in loads]
            groups = [group for group in found if group is not None]
            pairs = [(group, other) for group in groups for other in taken]
            if id(op) not in early:
                taken += groups
            elif any(a.ring is b.ring and a is not b for a, b in pairs):
                return op
        return None

    def needs(self, product: Product, here: dict[Value, Op]) -> set[int] | None:
        """The ops of a block that a matmul needs; None: some compute tiles."""
        found: set[int] = set()
        pending = [v for v in product.depends_on if v in here]
        while pending:
            op = here[pending.pop()]
            if id(op) in found:
                continue
            makes_tiles = any(v.type.shape and not v.is_ref for v in op.results)
            is_plain = op.name in ("constant", "load", "transpose") or is_of_rows(op)
            is_plain = is_plain or self.is_prepared(op)
            if op.regions or (makes_tiles and not is_plain):
                return None
            found.add(id(op))
            pending += [v for v in op.operands if v in here]
        return found

    def is_prepared(self, op: Op) -> bool:
        """Whether an op computes a left operand while earlier matmuls are in flight.

        Two in flight take registers that concurrent programs do not leave.
        """
        return self.plan.per_core == 1 and id(op) in self.plan.prepared

    # --- operands ---

    def arrived(self, op: Op, group: Group, b: Builder) -> None:
        """A staged load: the first of its group waits for all of them."""
        if group not in self.open:
            slot, parity = self.advance(group.ring, b)
            full = self.barrier(b, self.memory.full[group.ring], slot)
            b.emit("barrier_wait", full, parity)
            self.open[group] = slot
        if group.is_loaded(op):
            self.new[op.result] = b.load(self.buffer(b, group, op, self.open[group]))
        elif not self.is_multiplied_only(op.result):
            self.kept(op, b)  # has other uses too: loaded like any tile

    def free_after(self, op: Op, block: Block, rest: Sequence[Op], b: Builder) -> None:
        """Release slots last used in `op`: now, or once no matmul reads them."""
        for group in [g for g in self.open if g.block is block]:
            if self.uses(op, group) and not any(self.uses(o, group) for o in rest):
                slot = self.open.pop(group)
                # A line may be loaded from the slot while a matmul is in flight.
                groups = [self.groups_of(flight.product) for flight in self.flights]
                reading = [n for n, read in enumerate(groups) if group in read]
                if reading:
                    self.flights[reading[-1]].frees.append((group, slot))
                else:
                    self.free(group, slot, b)

    def uses(self, op: Op, group: Group) -> bool:
        return self.plan.uses(op, group)

    def free(self, group: Group, slot: Value, b: Builder) -> None:
        notes: dict[str, Any] = {AFTER_LOADS: True} if group.ring.loaded else {}
        empty = self.barrier(b, self.memory.empty[group.ring], slot)
        b.emit("barrier_arrive", empty, **notes)

    # --- matmuls ---

    def start(self, product: Product, b: Builder) -> None:
        before = self.waits_for.get(id(self.plan.place_of(product)))
        if before is not None:
            self.settle([before], b)
        computed = [] if product.addend is None else [product.addend]
        if product.lhs.load is None:
            computed.append(product.lhs.value)
        before_it = self.summed_before(product)
        if before_it is None:
            self.settle(computed, b)
        if product.addend is None:
            sums = b.constant(0, product.result.tile.with_dtype(product.sums))
        elif before_it is not None:
            sums = before_it.result
        else:
            sums = self.value(product.addend)
        lhs, rhs = (self.operand(side, b) for side in product.sides)
        contract = tuple((side.contract,) for side in product.sides)
        (result,) = b.emit("wgmma", sums, lhs, rhs, contract=contract)
        self.flights.append(_Flight(product, result, []))
        if before_it is not None:  # its slots are free once it alone has ended
            self.flights.remove(before_it)
            b.emit("wgmma_wait", pending=1)
            for group, slot in before_it.frees:
                self.free(group, slot, b)

    def summed_before(self, product: Product) -> _Flight | None:
        """The only matmul in flight, if this one adds to its result."""
        if len(self.flights) != 1 or self.freed_at_wait:
            return None
        (flight,) = self.flights
        return flight if self.plan.after(flight.product) is product else None

    def settle(self, values: Sequence[Value], b: Builder) -> None:
        """Wait for the matmuls among values, and for those issued before them."""
        wanted = [n for n, f in enumerate(self.flights) if f.product.result in values]
        if not wanted:
            return
        end = wanted[-1] + 1
        ended, self.flights = self.flights[:end], self.flights[end:]
        sums = [f.result for f in ended]
        made = b.emit("wgmma_wait", *sums, pending=len(self.flights))
        for group in self.freed_at_wait:
            self.free_held(group, b)
        self.freed_at_wait = []
        for flight, value in zip(ended, made, strict=True):
            result = flight.product.result
            self.new[result] = b.cast(value, result.tile.dtype)
            for group, slot in flight.frees:
                self.free(group, slot, b)

    def settle_register_operands(self, value: Value, b: Builder) -> None:
        """Wait for matmuls whose left operand is in the registers of a new one.

        Where programs share an SM, there are registers for only one.
        """
        same = self.plan.register_operands
        reading = [
            f.product.result
            for f in self.flights
            if f.product.lhs.load is None
            and (self.plan.per_core > 1 or f.product.lhs.value in same[value])
        ]
        self.settle(reading, b)

    def settle_all(self, b: Builder) -> None:
        self.settle([f.product.result for f in self.flights], b)

    # --- loops whose accumulators stay in flight ---

    def is_stream(self, loop: Loop) -> bool:
        """Whether nothing waits for a loop's accumulators: they are only added to."""
        found = [self.plan.by_op.get(id(op)) for op in loop.body.ops]
        products = [p for p in found if p is not None]
        dots = [op for op in walk(loop.body) if op.name == "dot"]
        if not products or len(products) != len(dots):
            return False
        for product in products:
            if product.addend not in loop.carried or product.lhs.load is None:
                return False
            place = loop.carried.index(product.addend)
            if loop.yields[place] is not product.result:
                return False
            uses = self.plan.users[product.addend], self.plan.users[product.result]
            if any(len(each) != 1 for each in uses):
                return False
        # The slots of two iterations are in use at the same time.
        groups = [g for g in self.plan.groups if g.block is loop.body]
        if any(group.ring.stages < 2 for group in groups):
            return False
        return not any(op.regions for op in loop.body.ops)

    def stream(self, loop: Loop, b: Builder) -> None:
        """Matmuls of one iteration complete while those of the next are in flight."""
        self.settle_all(b)
        inside = Builder(loop.op.loc)
        for op in self.products_first(loop.body):
            inside.loc = op.loc
            self.op(op, inside)
        started, self.flights = self.flights, []
        results = {f.product.result: f.result for f in started}
        inside.emit("wgmma_wait", pending=len(started))
        groups = [g for g in self.open if g.block is loop.body]
        if self.plan.can_start_apart(loop):
            note_product(inside.ops, BEHIND)
        for group in groups:
            self.free_held(group, inside)
            inside.store(self.held[group.ring], self.open.pop(group))
        self.end_loop(loop, inside, results, groups, b)

    def end_loop(
        self,
        loop: Loop,
        inside: Builder,
        left: Mapping[Value, Value],
        groups: Sequence[Group],
        b: Builder,
    ) -> None:
        """The loop with the body `inside`, and a wait for its last accumulators."""
        yields = tuple(left.get(v) or self.value(v) for v in loop.yields)
        first, limit, step = self.values(loop.bounds)
        new = loop.with_(
            first=first,
            limit=limit,
            step=step,
            inits=self.values(loop.inits),
            body=Block(loop.body.params, tuple(inside.ops), yields),
        )
        b.ops.append(new.to_op())
        pairs = zip(loop.results, loop.yields, strict=True)
        sums = [result for result, value in pairs if value in left]
        made = b.emit("wgmma_wait", *sums, pending=0)
        self.new.update(zip(sums, made, strict=True))
        for group in groups:
            self.free_held(group, b)
            b.store(self.held[group.ring], b.index(-1))

    # --- loops whose iterations end by accumulating what they computed ---

    def chained_sums(self, loop: Loop) -> "_Chained | None":
        """Accumulators that an iteration need not wait for, because the next one does.

        Each iteration accumulates a matmul of something that it computed from another
        matmul. When the next iteration waits for that other one, it waits for
        everything issued before; only then does it add to the accumulator. This covers
        only the last accumulator, and the next iteration issues only its first matmul
        before that wait: with more in flight, iterations take longer (attention's
        gradient on an H200: by 5 to 20 percent).
        """
        if any(op.regions for op in loop.body.ops):
            return None
        here = {v: op for op in loop.body.ops for v in op.results}
        products = [self.plan.by_op.get(id(op)) for op in loop.body.ops]
        found = []
        for product in products:
            if product is None or product.addend not in loop.carried:
                continue
            place = loop.carried.index(product.addend)
            users = self.plan.users
            alone = len(users[product.addend]) == len(users[product.result]) == 1
            is_yield = loop.yields[place] is product.result
            late = product.lhs.load is None and uses_product(product.lhs.value, here)
            if alone and is_yield and late:
                found.append(product)
        groups = [g for p in found for g in self.groups_of(p) if g.block is loop.body]
        if not found or any(g.ring.stages < 2 for g in groups):
            return None  # the slots of two iterations are in use at the same time
        started = [p for p in products if p is not None]
        early = [p for p in started if self.needs(p, here) is not None]
        sums = [p.result for p in started if p not in early]
        left, first = found[-1:], early[:1]
        used = [p.lhs.value for p in left] + [p.result for p in first]
        fits = sum(map(self.registers, [*sums, *used])) <= MOST_IN_FLIGHT
        return _Chained(left, first) if fits else None

    def registers(self, value: Value) -> int:
        """Registers of a thread for a tile."""
        return value.tile.size * value.tile.dtype.bytes // 4 // self.plan.threads

    def first_alone(self, ops: list[Op], chained: "_Chained") -> list[Op]:
        """Reorder ops so that other early matmuls wait for the first."""
        early = [op for op in ops if self.plan.by_op.get(id(op)) in chained.early]
        here = {v: op for op in ops for v in op.results}
        late = [
            op
            for op in ops
            if (product := self.plan.by_op.get(id(op))) is not None
            and op not in early
            and self.needs(product, here) is not None
        ]
        if not late:
            return ops
        result = chained.early[0].result
        self.waits_for = {id(op): result for op in late}
        rest = [op for op in ops if op not in late]
        used = {result, *(value for op in late for value in op.results)}
        place = next(n for n, op in enumerate(rest) if used & {*op.operands})
        return [*rest[:place], *late, *rest[place:]]

    def groups_of(self, product: Product) -> list[Group]:
        loads = [side.load for side in product.sides if side.load is not None]
        return [self.plan.group_of[id(load)] for load in loads]

    def chained(self, loop: Loop, chained: "_Chained", b: Builder) -> None:
        """One iteration's sums complete while the first matmuls of the next run."""
        self.settle_all(b)
        sums = chained.sums
        ordered = self.first_alone(self.products_first(loop.body), chained)
        groups = [g for g in self.plan.groups if g.block is loop.body]
        products = [self.plan.by_op[id(o)] for o in ordered if id(o) in self.plan.by_op]
        readers = {g: [p for p in products if g in self.groups_of(p)] for g in groups}
        kept = [group for group in groups if readers[group][-1] in sums]
        inside = Builder(loop.op.loc)
        self.freed_at_wait = kept
        for number, op in enumerate(ordered):
            inside.loc = op.loc
            self.op(op, inside)
            self.free_after(op, loop.body, ordered[number + 1 :], inside)
        others = [f.product.result for f in self.flights if f.product not in sums]
        self.settle(others, inside)
        if self.plan.warpgroups > 1 and chained.early:
            self.take_turns(chained.early[0], inside)
        left, self.flights = self.flights, []
        frees = dict(each for flight in left for each in flight.frees)
        for group in kept:
            slot = frees.get(group) or inside.index(-1)
            inside.store(self.held[group.ring], slot)
        results = {f.product.result: f.result for f in left}
        self.end_loop(loop, inside, results, kept, b)

    def take_turns(self, first: Product, step: Builder) -> None:
        """A warpgroup issues its first matmul once the previous warpgroup has.

        So one computes while matmuls of another run. If the first is short, the second
        belongs to the same turn. Deep ones of two loops (masked or not) leave it no
        registers.
        """
        depth = first.rhs.value.tile.shape[first.rhs.contract]
        work, is_deep = first.result.tile.shape[1] * depth, depth >= TURN_DEPTH
        homes = {self.plan.home[id(p.dot)] for p in self.plan.products}
        if work < TURN_PRODUCTS or (is_deep and len(homes) > 1):
            return
        note_product(step.ops, IN_TURN)
        note_product(step.ops, ENDS_TURN, 0 if is_deep else 1)

    def free_held(self, group: Group, b: Builder) -> None:
        """Release the slot of the previous iteration, if there was one."""
        held = b.load(self.held[group.ring])
        there = b.cast(b.ge(held, b.index(0)), I32)
        inside = Builder(b.loc)
        self.free(group, held, inside)
        b.emit("cond", there, regions=(Block(), inside.block()))
