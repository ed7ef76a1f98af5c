"""Roles of a program with matmuls: slices of it, with the states of its rings.

A role is the program in which ops are replaced or left out (`Role`). One of a single
thread (`SingleThread`) has no tiles: each is replaced by a placeholder (`unknown`) from
which nothing is computed, and code left without a use is dropped.
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol

from pallasite.backends.cuda.products import Plan, Side
from pallasite.backends.cuda.program_ops import is_of_rows
from pallasite.backends.cuda.rings import SCALAR, Group, RingMemory, alloc
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, Op, Span, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.roles import Loop
from pallasite.ir.types import I32, INDEX, TileType


class Slots(Protocol):
    """What roles pass to each other: used in turn, and then again."""

    @property
    def stages(self) -> int: ...


class Role:
    """A program being turned into one role: replaced values, ring states."""

    def __init__(self, plan: Plan, memory: RingMemory):
        self.plan, self.memory = plan, memory
        self.rank = Value(INDEX, "rank")  # of a pair's thread blocks
        self.new: dict[Value, Value] = {}
        b = Builder()
        self.slots: dict[Slots, Value] = {
            r: alloc(b, SCALAR, "slot") for r in plan.rings
        }
        self.parities: dict[Slots, Value] = {
            r: alloc(b, SCALAR, "parity") for r in plan.rings
        }
        self.states = b.ops
        self.open: dict[Group, Value] = {}  # slots in use

    def block(self, block: Block) -> Block:
        builder = Builder()
        for op in block.ops:
            builder.loc = op.loc
            self.op(op, builder)
        return Block(block.params, tuple(builder.ops), self.values(block.yields))

    def op(self, op: Op, builder: Builder) -> None:
        raise NotImplementedError("each role says what becomes of an op")

    def end(self, builder: Builder) -> None:
        """After the last program."""

    def in_first(self, inside: Builder, b: Builder) -> None:
        """Code for the first thread block of a pair, or for all that are alone."""
        if not self.plan.is_paired:
            b.ops += inside.ops
            return
        is_first = b.cast(b.eq(self.rank, b.index(0)), I32)
        b.emit("cond", is_first, regions=(Block(), inside.block()))

    def value(self, value: Value) -> Value:
        return self.new.get(value, value)

    def values(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(map(self.value, values))

    def kept(self, op: Op, builder: Builder) -> None:
        regions = tuple(self.block(r) for r in op.regions)
        operands = self.values(op.operands)
        builder.ops.append(op.with_(operands=operands, regions=regions))

    def track(self, part: Slots, b: Builder) -> None:
        """Allocate the state of other slots than those of rings."""
        self.slots[part] = alloc(b, SCALAR, "slot")
        self.parities[part] = alloc(b, SCALAR, "parity")

    def advance(self, ring: Slots, b: Builder) -> tuple[Value, Value]:
        """The slot and parity of a ring's next use; advances the state."""
        slot, parity = b.load(self.slots[ring]), b.load(self.parities[ring])
        other = b.sub(b.index(1), parity)
        if ring.stages == 1:
            b.store(self.parities[ring], other)
            return b.index(0), parity
        last = b.eq(slot, b.index(ring.stages - 1))
        after = b.select(last, b.index(0), b.add(slot, b.index(1)))
        b.store(self.slots[ring], after)
        b.store(self.parities[ring], b.select(last, other, parity))
        return slot, parity

    def barrier(self, b: Builder, barriers: Value, slot: Value) -> Value:
        return b.subview(barriers, (At(None),), [slot])

    def buffer(
        self, b: Builder, group: Group, load: Op, slot: Value, depth: int | None = None
    ) -> Value:
        """The memory of a loaded tile; `depth`: with so many rows."""
        number, ring = group.loads.index(load), group.ring
        ref, own = self.memory.buffers[ring][number], ring.own(number)
        shape = ref.ref.shape[1:]
        if number in ring.lefts or number in ring.deeps:
            shape = (depth or prod(own[:-1]), own[-1])
        return b.subview(ref, (At(None), *(Span(0, n) for n in shape)), [slot])

    def operand(self, side: Side, b: Builder) -> Value:
        if side.load is None:
            return self.value(side.value)
        group = self.plan.group_of[id(side.load)]
        number = group.loads.index(side.load)
        depth = group.ring.depth(number) if side.contract == 0 else None
        return self.buffer(b, group, side.load, self.open[group], depth)

    def is_multiplied_only(self, value: Value) -> bool:
        return all(
            user.name == "dot"
            or (
                (user.name in ("transpose", "scaled") or is_of_rows(user))
                and self.is_multiplied_only(user.result)
            )
            for user in self.plan.users[value]
        )

    def shorter(self, loop: Loop, kept: Sequence[int], b: Builder) -> None:
        """The loop with some of what it carries."""
        body = self.block(loop.body)
        params = (loop.index, *(loop.carried[n] for n in kept))
        first, limit, step = self.values(loop.bounds)
        new = loop.with_(
            first=first,
            limit=limit,
            step=step,
            inits=tuple(self.value(loop.inits[n]) for n in kept),
            body=Block(params, body.ops, tuple(body.yields[n] for n in kept)),
            results=tuple(loop.results[n] for n in kept),
        )
        b.ops.append(new.to_op())


class SingleThread(Role):
    """A program without its tiles; subclasses say what is left of its matmuls."""

    def op(self, op: Op, builder: Builder) -> None:
        if op.name == "for":
            self.loop(Loop.of(op), builder)
        elif op.name == "cond":
            self.branches(op, builder)
        elif op.regions or not is_effect(op):
            self.kept(op, builder)

    def unknown(self, value: Value, b: Builder) -> Value:
        return b.op("iota", dim=0, type=value.tile)

    def loop(self, loop: Loop, b: Builder) -> None:
        kept = [n for n, v in enumerate(loop.results) if not is_tile(v)]
        for n, result in enumerate(loop.results):
            if n not in kept:
                unknown = self.unknown(result, b)
                self.new[result] = self.new[loop.carried[n]] = unknown
        self.shorter(loop, kept, b)

    def branches(self, op: Op, b: Builder) -> None:
        kept = [n for n, v in enumerate(op.results) if not is_tile(v)]
        for result in op.results:
            if is_tile(result):
                self.new[result] = self.unknown(result, b)
        regions = []
        for region in op.regions:
            made = self.block(region)
            yields = tuple(made.yields[n] for n in kept)
            regions.append(Block((), made.ops, yields))
        b.ops.append(
            op.with_(
                operands=self.values(op.operands),
                results=tuple(op.results[n] for n in kept),
                regions=tuple(regions),
            )
        )


def is_tile(value: Value) -> bool:
    return isinstance(value.type, TileType) and value.type.size > 1


def holds(op: Op, users: Sequence[Op]) -> bool:
    """Whether an op, or one in its regions, is among given ones."""
    return op in users or any(o in users for r in op.regions for o in walk(r))


def is_effect(op: Op) -> bool:
    return op.name != "alloc" and table()[op.name].effect is Effect.WRITE
