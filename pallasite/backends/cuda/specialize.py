"""specialize: programs with products become roles of warps that run side by side.

In: a kernel after `promote` (programs, loops, values). Out: a persistent grid of as many
programs as the chip has multiprocessors, in each of which one thread copies operands of
products into rings in shared memory (role "load") and whole warpgroups multiply and do
everything else (role "compute"). Both walk the same programs in the same order; full
and empty barriers with phases pass the slots of a ring from one to the other.

The copying role is the program without everything that no copy needs. The computing
role is the program with its loads replaced by waits and its products by `wgmma`, which
are waited for where their result is first used. Nothing here knows what the products
are for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pallasite.backends.cuda.products import Group, Plan, Product
from pallasite.ir.build import Builder
from pallasite.ir.levels import with_level
from pallasite.ir.nodes import Access, At, Block, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import clone, inline, writes
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import I32, INDEX, Layout, RefType, TileType
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.promote import promote_refs
from pallasite.passes.unused import drop_unused
from pallasite.target import Gpu

LOAD, COMPUTE = "load", "compute"
# Registers of a thread in each role, by the number of computing warpgroups; None: all
# threads keep what the kernel starts with.
REGISTERS = {1: None, 2: (40, 232), 3: (32, 160)}
ROWS_TOGETHER = 16  # blocks of rows whose columns are taken together, for the L2 cache


def specialize(kernel: Kernel, chip: Gpu) -> Kernel:
    """Roles instead of a program, where it has products."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    if not any(op.name == "dot" for op in walk(pipeline.body)):
        return kernel
    plan = Plan(kernel, pipeline.body, chip)
    rings = _Rings(plan)
    grid = [n for n in pipeline.grid if n is not None]
    programs = prod(grid)
    blocks = min(programs, chip.cores)
    roles = []
    for role in (_Loading(plan, rings), _Computing(plan, rings)):
        program = role.program(pipeline)
        alone = _persistent(kernel, pipeline, program, role.states, blocks)
        alone = drop_unused(promote_refs(alone))
        made = Pipeline.of(find_pipeline(alone))
        roles.append(made)
    _check_scalar(plan, roles[0].body)
    whole = Builder(pipeline.op.loc)
    block_number = Value(INDEX, "block")
    inner = Builder(pipeline.op.loc)
    inner.ops += rings.ops
    regions = [clone(Block((), r.body.ops), {r.ids[0]: block_number}) for r in roles]
    inner.ops.append(
        Op(
            "roles",
            attrs={
                "cuda.names": (LOAD, COMPUTE),
                "cuda.warpgroups": (1, plan.warpgroups),
                "cuda.registers": REGISTERS[plan.warpgroups],
            },
            regions=tuple(regions),
            loc=pipeline.op.loc,
        )
    )
    before = [op for op in kernel.body.ops if op is not pipeline.op]
    whole.ops += before
    whole.emit(
        "pipeline",
        regions=(inner.block([block_number]),),
        grid=(blocks,),
        windows=(),
        semantics=("parallel",),
    )
    return with_level(kernel.with_(body=whole.block()))


def _check_scalar(plan: Plan, body: Block) -> None:
    """The copying thread has no tiles."""
    for op in walk(body):
        for value in op.results:
            if isinstance(value.type, TileType) and value.type.shape:
                plan.refuse(
                    plan.products[0].dot,
                    f"where its operands are depends on a computed {value.type}",
                )


# --- the programs of one block of threads, one after another ---


def _persistent(
    kernel: Kernel,
    pipeline: Pipeline,
    program: Block,
    states: Sequence[Op],
    blocks: int,
) -> Kernel:
    grid = [n for n in pipeline.grid if n is not None]
    number, block = Value(INDEX, "program"), Value(INDEX, "block")
    inside = Builder(pipeline.op.loc)
    ids = _decoded(inside, number, grid)
    inline(inside, program, ids)
    body = Builder(pipeline.op.loc)
    body.ops += states
    limit, step = body.index(prod(grid)), body.index(blocks)
    body.emit("for", block, limit, step, regions=(inside.block([number]),))
    outside = Builder(pipeline.op.loc)
    outside.ops += [op for op in kernel.body.ops if op is not pipeline.op]
    outside.emit(
        "pipeline",
        regions=(body.block([block]),),
        grid=(blocks,),
        windows=(),
        semantics=("parallel",),
    )
    return with_level(kernel.with_(body=outside.block()))


def _decoded(b: Builder, number: Value, grid: Sequence[int]) -> list[Value]:
    """Grid indices from a program's number; two axes in groups of rows."""
    if len(grid) == 2 and grid[0] > 1 and grid[1] > 1:
        rows, columns = grid
        together = min(ROWS_TOGETHER, rows)
        size = b.index(together * columns)
        group, rest = b.div(number, size), b.rem(number, size)
        first = b.mul(group, b.index(together))
        height = b.index(together)
        if rows % together:
            height = b.min(b.sub(b.index(rows), first), height)
        return [b.add(first, b.rem(rest, height)), b.div(rest, height)]
    ids: list[Value] = []
    for axis, size in enumerate(grid):
        inner = prod(grid[axis + 1 :])
        value = number if inner == 1 else b.div(number, b.index(inner))
        ids.append(b.rem(value, b.index(size)) if axis else value)
    return ids


# --- rings in shared memory ---


@dataclass(frozen=True, eq=False)
class Ring:
    """A group's memory and barriers."""

    buffers: dict[int, Value]  # by the load's identity
    full: Value
    empty: Value


class _Rings:
    """Shared memory and barriers of all groups."""

    def __init__(self, plan: Plan):
        builder = Builder()
        self.of: dict[int, Ring] = {}
        for group in plan.groups:
            buffers = {}
            for load in group.loads:
                tile = load.result.tile
                shape, layout = (group.stages, *tile.shape), Layout("swizzle", (128,))
                ref = RefType(shape, tile.dtype, "smem", layout)
                (buffers[id(load)],) = builder.emit("alloc", type=ref, names=["ring"])
            warps = 4 * plan.warpgroups
            full, empty = (
                builder.emit(
                    "alloc",
                    type=RefType(
                        (group.stages,), I32, "mbarrier", Layout("arrivals", (n,))
                    ),
                    names=[name],
                )[0]
                for name, n in (("full", 1), ("empty", warps))
            )
            self.of[id(group)] = Ring(buffers, full, empty)
        self.ops = builder.ops


class _Role:
    """A program on its way into one role: values replaced, states of rings."""

    def __init__(self, plan: Plan, rings: _Rings):
        self.plan, self.rings = plan, rings
        self.new: dict[Value, Value] = {}
        builder = Builder()
        scalar = RefType((), I32, "regs")
        self.slots, self.parities = {}, {}
        for group in plan.groups:
            for table_, name in ((self.slots, "slot"), (self.parities, "parity")):
                (table_[id(group)],) = builder.emit("alloc", type=scalar, names=[name])
        self.states = builder.ops

    def program(self, pipeline: Pipeline) -> Block:
        body = self.block(pipeline.body)
        return Block(pipeline.body.params, body.ops, ())

    def block(self, block: Block) -> Block:
        builder = Builder()
        for op in block.ops:
            builder.loc = op.loc
            self.op(op, builder)
        return Block(block.params, tuple(builder.ops), self.values(block.yields))

    def op(self, op: Op, builder: Builder) -> None:
        raise NotImplementedError("each role says what becomes of an op")

    def values(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(self.new.get(v, v) for v in values)

    def kept(self, op: Op, builder: Builder) -> None:
        regions = tuple(self.block(r) for r in op.regions)
        new = op.with_(operands=self.values(op.operands), regions=regions)
        builder.ops.append(new)

    def advance(self, group: Group, b: Builder) -> tuple[Value, Value]:
        """The slot and parity of a ring's next use; the state moves on."""
        slot_ref, parity_ref = self.slots[id(group)], self.parities[id(group)]
        slot, parity = b.load(slot_ref), b.load(parity_ref)
        other = b.sub(b.index(1), parity)
        if group.stages == 1:
            b.store(parity_ref, other)
            return b.index(0), parity
        last = b.eq(slot, b.index(group.stages - 1))
        b.store(slot_ref, b.select(last, b.index(0), b.add(slot, b.index(1))))
        b.store(parity_ref, b.select(last, other, parity))
        return slot, parity

    def barrier(self, b: Builder, barriers: Value, slot: Value) -> Value:
        return b.subview(barriers, (At(None),), [slot])

    def buffer(self, b: Builder, ring: Ring, load: Op, slot: Value) -> Value:
        ref = ring.buffers[id(load)]
        rows = tuple(Span(0, n) for n in ref.ref.shape[1:])
        return b.subview(ref, (At(None), *rows), [slot])


class _Loading(_Role):
    """What one thread does to copy operands: the program without the rest."""

    def op(self, op: Op, builder: Builder) -> None:
        group = self.plan.group_of.get(id(op))
        if group is not None and op is group.loads[-1]:
            self.copy(group, builder)
        if group is not None or op.name == "dot":
            self.new[op.result] = builder.constant(0, op.result.tile)
        elif op.regions or not _is_effect(op):
            self.kept(op, builder)

    def copy(self, group: Group, b: Builder) -> None:
        ring = self.rings.of[id(group)]
        slot, parity = self.advance(group, b)
        empty, full = (self.barrier(b, x, slot) for x in (ring.empty, ring.full))
        b.emit("barrier_wait", empty, b.sub(b.index(1), parity))
        b.emit("barrier_expect", full, bytes=group.bytes)
        for load in group.loads:
            access = Access.of(load)
            source = b.subview(
                self.new.get(access.ref, access.ref),
                access.index,
                self.values(access.index_operands),
            )
            target = self.buffer(b, ring, load, slot)
            b.emit("copy_start", source, target, full, priority=0)


def _is_effect(op: Op) -> bool:
    return op.name != "alloc" and table()[op.name].effect is Effect.WRITE


@dataclass(eq=False)
class _Flight:
    """A product in flight, and the slots that are free when it has ended."""

    product: Product
    result: Value
    frees: list[tuple[Group, Value]]


class _Computing(_Role):
    """What the warpgroups do: products in flight, waited for at their first use."""

    def __init__(self, plan: Plan, rings: _Rings):
        super().__init__(plan, rings)
        self.flights: list[_Flight] = []
        self.open: dict[int, Value] = {}  # group -> slot in use
        self.skipped = {id(p.dot) for p in plan.products if p.add is not None}
        self.pending: set[Value] = set()
        builder = Builder()
        self.held: dict[int, Value] = {}  # group -> slot not freed yet, or -1
        for group in plan.groups:
            scalar = RefType((), I32, "regs")
            (ref,) = builder.emit("alloc", type=scalar, names=["held"])
            builder.store(ref, builder.index(-1))
            self.held[id(group)] = ref
        self.states = [*self.states, *builder.ops]

    def block(self, block: Block) -> Block:
        builder = Builder()
        ordered = self.products_first(block)
        for number, op in enumerate(ordered):
            builder.loc = op.loc
            self.op(op, builder)
            self.free_after(op, block, ordered[number + 1 :], builder)
        self.drain(builder, block.yields)
        return Block(block.params, tuple(builder.ops), self.values(block.yields))

    def products_first(self, block: Block) -> list[Op]:
        """Products that need nothing computed in this block go before the rest."""
        here = {v: op for op in block.ops for v in op.results}
        order = {id(op): n for n, op in enumerate(block.ops)}
        needed: set[int] = set()
        for op in block.ops:
            product = self.plan.by_op.get(id(op))
            if product is None:
                continue
            found = self.slice_of(product, here)
            if found is not None:
                needed |= found | {id(op)}
        moved = [op for op in block.ops if id(op) in needed]
        if any(writes(op) for op in block.ops[: max(map(order.get, needed), default=0)]
               if id(op) not in needed):  # fmt: skip
            return list(block.ops)
        return moved + [op for op in block.ops if id(op) not in needed]

    def slice_of(self, product: Product, here: dict[Value, Op]) -> set[int] | None:
        """The ops of a block that a product needs; None: it computes tiles."""
        found: set[int] = set()
        pending = [v for v in product.depends_on if v in here]
        while pending:
            op = here[pending.pop()]
            if id(op) in found:
                continue
            computes = any(v.type.shape and not v.is_ref for v in op.results)
            is_plain = op.name in ("constant", "load", "transpose")
            if op.regions or (computes and not is_plain):
                return None
            found.add(id(op))
            pending += [v for v in op.operands if v in here]
        return found

    def op(self, op: Op, builder: Builder) -> None:
        product = self.plan.by_op.get(id(op))
        group = self.plan.group_of.get(id(op))
        if product is not None:
            self.issue(product, builder)
        elif id(op) in self.skipped:
            return
        elif group is not None:
            self.arrived(op, group, builder)
        elif op.name == "for" and self.is_stream(Loop.of(op)):
            self.stream(Loop.of(op), builder)
        else:
            used = self.used_by(op)
            self.settle(used, builder)
            if op.regions:
                self.settle([f.product.result for f in self.flights], builder)
            self.kept(op, builder)

    def used_by(self, op: Op) -> list[Value]:
        used = list(op.operands)
        for inner in (o for r in op.regions for o in walk(r)):
            used += inner.operands
        return used

    # --- operands ---

    def arrived(self, op: Op, group: Group, b: Builder) -> None:
        """A staged load: the first of its group waits for all of them."""
        if op is group.loads[0] or id(group) not in self.open:
            slot, parity = self.advance(group, b)
            ring = self.rings.of[id(group)]
            b.emit("barrier_wait", self.barrier(b, ring.full, slot), parity)
            self.open[id(group)] = slot
        if any(
            not self.is_product_use(u, op.result) for u in self.plan.users[op.result]
        ):
            self.kept(op, b)  # used in another way, too: loaded as any tile

    def is_product_use(self, user: Op, value: Value) -> bool:
        if user.name == "transpose":
            inner = self.plan.users[user.result]
            return all(self.is_product_use(u, user.result) for u in inner)
        return user.name == "dot"

    def operand(self, side, b: Builder) -> Value:
        if side.load is None:
            return self.new.get(side.value, side.value)
        group = self.plan.group_of[id(side.load)]
        ring = self.rings.of[id(group)]
        return self.buffer(b, ring, side.load, self.open[id(group)])

    def free_after(self, op: Op, block: Block, rest: Sequence[Op], b: Builder) -> None:
        """Slots whose last use is in `op`: now, or when its product has ended."""
        for group in self.plan.groups:
            if group.block is not block or id(group) not in self.open:
                continue
            if self.uses(op, group) and not any(self.uses(o, group) for o in rest):
                slot = self.open.pop(id(group))
                if self.flights and self.plan.by_op.get(id(op)):
                    self.flights[-1].frees.append((group, slot))
                else:
                    self.free(group, slot, b)

    def uses(self, op: Op, group: Group) -> bool:
        loads = {id(x) for x in group.loads}
        for inner in (op, *(o for r in op.regions for o in walk(r))):
            product = self.plan.by_op.get(id(inner))
            if product and any(id(s.load) in loads for s in product.sides if s.load):
                return True
            if id(inner) in loads:
                return True
        return False

    def free(self, group: Group, slot: Value, b: Builder) -> None:
        ring = self.rings.of[id(group)]
        b.emit("barrier_arrive", self.barrier(b, ring.empty, slot))

    # --- products ---

    def issue(self, product: Product, b: Builder) -> None:
        if product.addend is not None:
            self.settle([product.addend], b)
        if product.lhs.load is None:
            self.settle([product.lhs.value], b)
        tile = product.result.tile.with_dtype(product.sums)
        sums = (
            b.constant(0, tile)
            if product.addend is None
            else self.new.get(product.addend, product.addend)
        )
        lhs, rhs = (self.operand(side, b) for side in product.sides)
        contract = tuple((side.contract,) for side in product.sides)
        (result,) = b.emit("wgmma", sums, lhs, rhs, contract=contract)
        self.flights.append(_Flight(product, result, []))

    def settle(self, values: Sequence[Value], b: Builder) -> None:
        """Wait for the products among values, and for those started before them."""
        wanted = [
            n for n, f in enumerate(self.flights) if f.product.result in set(values)
        ]
        if not wanted:
            return
        ended = self.flights[: wanted[-1] + 1]
        self.flights = self.flights[wanted[-1] + 1 :]
        made = b.emit(
            "wgmma_wait", *(f.result for f in ended), pending=len(self.flights)
        )
        for flight, value in zip(ended, made, strict=True):
            dtype = flight.product.result.tile.dtype
            self.new[flight.product.result] = b.cast(value, dtype)
            for group, slot in flight.frees:
                self.free(group, slot, b)

    def drain(self, b: Builder, yields: Sequence[Value] = ()) -> None:
        self.settle([f.product.result for f in self.flights], b)

    # --- loops whose sums stay in flight ---

    def is_stream(self, loop: Loop) -> bool:
        """Whether a loop's sums are only added to, so that nothing waits for them."""
        products = [
            p for p in map(lambda o: self.plan.by_op.get(id(o)), loop.body.ops) if p
        ]
        inside = [o for o in walk(loop.body) if o.name == "dot"]
        if not products or len(products) != len(inside):
            return False
        for product in products:
            carried = product.addend
            if carried not in loop.carried or product.lhs.load is None:
                return False
            place = loop.carried.index(carried)
            if loop.yields[place] is not product.result:
                return False
            own = self.plan.users[carried]
            if len(own) != 1 or len(self.plan.users[product.result]) != 1:
                return False
        return not any(op.regions for op in loop.body.ops)

    def stream(self, loop: Loop, b: Builder) -> None:
        """Products of one step end while those of the next are in flight."""
        self.settle([f.product.result for f in self.flights], b)
        self.settle(self.used_by(loop.op), b)
        inside = Builder(loop.op.loc)
        for op in self.products_first(loop.body):
            inside.loc = op.loc
            self.op(op, inside)
        started, self.flights = self.flights, []
        results = {f.product.result: f.result for f in started}
        inside.emit("wgmma_wait", pending=len(started))
        for group in [g for g in self.plan.groups if id(g) in self.open]:
            if group.block is not loop.body:
                continue
            slot = self.open.pop(id(group))
            self.free_held(group, inside)
            inside.store(self.held[id(group)], slot)
        yields = tuple(results.get(v) or self.new.get(v, v) for v in loop.yields)
        body = Block(loop.body.params, tuple(inside.ops), yields)
        new = loop.with_(
            inits=self.values(loop.inits),
            first=self.new.get(loop.first, loop.first),
            limit=self.new.get(loop.limit, loop.limit),
            step=self.new.get(loop.step, loop.step),
            body=body,
        )
        b.ops.append(new.to_op())
        sums = [
            r for r, v in zip(loop.results, loop.yields, strict=True) if v in results
        ]
        made = b.emit("wgmma_wait", *sums, pending=0)
        self.new.update(zip(sums, made, strict=True))
        for group in self.plan.groups:
            if group.block is loop.body:
                self.free_held(group, b)
                b.store(self.held[id(group)], b.index(-1))

    def free_held(self, group: Group, b: Builder) -> None:
        """Free the slot of the step before, if there was one."""
        held = b.load(self.held[id(group)])
        there = b.cast(b.ge(held, b.index(0)), I32)
        inside = Builder(b.loc)
        self.free(group, held, inside)
        b.emit("cond", there, regions=(Block(), inside.block()))
