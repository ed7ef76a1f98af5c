"""Accumulators in tensor memory: which matmuls add to them, and how roles pass them on.

The thread that multiplies and the warpgroups that take results share rings of
accumulators (`Part`), in the same way as those that copy and multiply share operands.
A slot is `ready` when the warpgroups have taken what was in it, or have stored what is
added to; it is `done` when its matmuls have completed. Left operands that warpgroups
compute are passed in tensor memory, too Both roles walk the same program, so
that they need nothing but barriers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pallasite.backends.cuda.blackwell import LANES
from pallasite.backends.cuda.block_pairs import PAIR
from pallasite.backends.cuda.products import Plan, Product
from pallasite.backends.cuda.rings import alloc
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, Span, Value, walk
from pallasite.ir.roles import Loop
from pallasite.ir.types import I32, DType, Layout, RefType, TileType
from pallasite.ops.scaled import COLUMNS, PACKED
from pallasite.passes.analysis.intervals import Facts

MOST_STAGES = 2  # of an accumulator: one is taken while the other is added to
WORD = 4  # bytes of a column


@dataclass(eq=False)
class Part:
    """Slots of tensor memory for tiles, and the barriers that pass them on."""

    shape: tuple[int, int]
    dtype: DType
    held_rows: int
    is_result: bool  # of matmuls; or a left operand
    starts: bool  # with a tile that is stored there, not with zeros
    blocks: set[Block]  # in which it is used, each for one tile
    stages: int = 1
    memory: Value | None = None
    ready: Value | None = None
    done: Value | None = None

    @property
    def columns(self) -> int:
        """Of tensor memory, for a slot."""
        return self.held_rows // LANES * self.shape[1] * self.dtype.bytes // WORD

    def view(self, b: Builder, slot: Value) -> Value:
        assert self.memory is not None
        index = (At(None), *(Span(0, n) for n in self.shape))
        return b.subview(self.memory, index, [slot])

    def alloc(self, b: Builder, arrivals: int) -> None:
        """So many arrivals make a slot ready."""
        shape = (self.stages, self.held_rows, self.shape[1])
        name = "sums" if self.is_result else "given"
        self.memory = alloc(b, RefType(shape, self.dtype, "tmem"), name)
        self.ready = alloc(b, barriers(self.stages, arrivals), "ready")
        if self.is_result:
            self.done = alloc(b, barriers(self.stages, 1), "done")


@dataclass(frozen=True, eq=False)
class Sums:
    """An accumulator, and the matmuls that add to it one after another.

    With a loop, its iterations do, and what they add to is what the loop starts with.
    """

    products: tuple[Product, ...]
    part: Part
    loop: Loop | None
    place: int  # among what the loop carries

    @property
    def result(self) -> Value:
        last = self.products[-1].result
        return last if self.loop is None else self.loop.results[self.place]

    @property
    def start(self) -> Value | None:
        return self.loop.inits[self.place] if self.loop else self.products[0].addend


def barriers(stages: int, arrivals: int) -> RefType:
    """Of which a wait or an arrival orders accesses to tensor memory, too."""
    return RefType((stages,), I32, "mbarrier", Layout("arrivals", (arrivals, 1)))


def scale_columns(ref: RefType) -> int:
    """Columns of tensor memory for packed scales."""
    return ref.size // PACKED * COLUMNS


class TensorPlan:
    """The tensor memory of a program."""

    def __init__(self, plan: Plan, b: Builder):
        self.plan, self.set = plan, plan.set
        self.facts = Facts()
        self.facts.note_block(plan.program)
        self.parts: list[Part] = []
        self.of = dict[Product, Sums]()
        self.sums = [self.sums_of(chain) for chain in self.chains()]
        self.given = {p: self.given_of(p) for p in plan.products if p.lhs.load is None}
        self.scale_types = {
            side: RefType(side.scales.result.tile.shape, side.scales.result.tile.dtype,
                          "tmem")
            for product in plan.products
            for side in product.sides
            if side.scales is not None
        }  # fmt: skip
        self.choose_stages()
        for part in self.parts:
            # Of a pair, each thread block arrives as one, otherwise each warp does.
            part.alloc(b, PAIR if plan.is_paired else 4 * plan.warpgroups)
        self.scales = {s: alloc(b, t, "scales") for s, t in self.scale_types.items()}
        self.last = alloc(b, barriers(1, 1), "last")  # after all matmuls

    def part(self, tile: TileType, block: Block, is_result: bool, starts: bool) -> Part:
        """Slots for a tile of a block.

        Other blocks can have the same ones: at the end of a block, and before another
        one inside it, all that was passed on has been taken.
        """
        rows, columns = tile.shape
        made = Part(
            (rows, columns), tile.dtype, self.set.held_rows(rows), is_result, starts,
            {block},
        )  # fmt: skip
        alike = ("shape", "dtype", "is_result", "starts")
        for part in self.parts:
            same = all(getattr(part, name) == getattr(made, name) for name in alike)
            if same and block not in part.blocks:
                part.blocks.add(block)
                return part
        self.parts.append(made)
        return made

    def chains(self) -> Iterator[tuple[Product, ...]]:
        """Matmuls of which each adds to the one before."""
        later = {id(after) for p in self.plan.products if (after := self.plan.after(p))}
        for product in self.plan.products:
            chain = [product] if id(product) not in later else []
            while chain and (after := self.plan.after(chain[-1])) is not None:
                chain.append(after)
            if chain:
                yield tuple(chain)

    def sums_of(self, chain: tuple[Product, ...]) -> Sums:
        first, last = chain[0], chain[-1]
        loop, place = self.adding_loop(chain)
        home, starts = self.plan.home[id(first.dot)], first.addend is not None
        if loop is not None:
            zero = self.plan.made.get(loop.inits[place])
            is_zero = zero is not None and zero.attrs.get("value") == 0
            home = self.plan.home[id(loop.op)]
            starts = not (is_zero and self.is_entered(loop))
        tile = last.result.tile.with_dtype(last.sums)
        found = Sums(chain, self.part(tile, home, True, starts), loop, place)
        self.of |= dict.fromkeys(chain, found)
        return found

    def adding_loop(self, chain: tuple[Product, ...]) -> tuple[Loop | None, int]:
        """The loop that does nothing with a carried tile but add a chain to it."""
        first, last = chain[0], chain[-1]
        loop = self.loops.get(self.plan.home[id(first.dot)])
        if loop is None or first.addend not in loop.carried:
            return None, 0
        place = loop.carried.index(first.addend)
        users = self.plan.users
        carried = loop.carried[place]
        alone = len(users[carried]) == len(users[last.result]) == 1
        loaded = all(p.lhs.load is not None for p in chain)
        is_sum = loop.yields[place] is last.result and alone and loaded
        return (loop, place) if is_sum else (None, 0)

    @cached_property
    def loops(self) -> dict:
        found = (Loop.of(op) for op in walk(self.plan.program) if op.name == "for")
        return {loop.body: loop for loop in found}

    def is_entered(self, loop: Loop) -> bool:
        return self.facts.of(loop.first).high < self.facts.of(loop.limit).low

    def added_in(self, loop: Loop) -> list[Sums]:
        """The accumulators that a loop adds to."""
        return [s for s in self.sums if s.loop is not None and s.loop.op is loop.op]

    def given_of(self, product: Product) -> Part:
        home = self.plan.home[id(product.dot)]
        return self.part(product.lhs.value.tile, home, False, True)

    def choose_stages(self) -> None:
        """Two slots for what is taken while more is added up, if there is room."""
        most = self.set.tensor_columns
        used = sum(part.columns for part in self.parts)
        used += sum(map(scale_columns, self.scale_types.values()))
        if used > most:
            self.plan.refuse(
                self.plan.products[0].dot,
                f"its accumulators need {used} columns of tensor memory, the limit is "
                f"{most}",
                "use smaller blocks",
            )
        for part in (p for p in self.parts if not p.starts):
            if used + part.columns <= most:
                used += part.columns
                part.stages = MOST_STAGES
