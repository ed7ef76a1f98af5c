"""Accumulators in tensor memory: which matmuls add to them, and how roles pass them on.

The thread that multiplies and the warpgroups that take results share a ring of
accumulators per `Sums`, in the same way as those that copy and multiply share operands.
A slot is `ready` when the warpgroups have taken what was in it, or have stored what is
added to; it is `done` when its matmuls have completed. Left operands that warpgroups
compute are passed in tensor memory, too (`Given`). Both roles walk the same program, so
that they need nothing but barriers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pallasite.backends.cuda.products import Plan, Product
from pallasite.backends.cuda.rings import alloc
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Span, Value, walk
from pallasite.ir.roles import Loop
from pallasite.ir.types import I32, DType, Layout, RefType
from pallasite.passes.analysis.intervals import Facts

MOST_STAGES = 2  # of an accumulator: one is taken while the other is added to
WORD = 4  # bytes of a column


@dataclass(eq=False)
class Part:
    """Slots of tensor memory for a tile, and the barriers that pass them on."""

    shape: tuple[int, int]
    dtype: DType
    held_rows: int
    stages: int = 1
    memory: Value | None = None
    ready: Value | None = None

    def columns(self, rows: int) -> int:
        """Of tensor memory, where an instruction has that many rows."""
        words = self.shape[1] * self.dtype.bytes // WORD
        return self.stages * self.held_rows // rows * words

    def view(self, b: Builder, slot: Value) -> Value:
        assert self.memory is not None
        index = (At(None), *(Span(0, n) for n in self.shape))
        return b.subview(self.memory, index, [slot])

    def alloc(self, b: Builder, warps: int, name: str) -> None:
        """`warps` make a slot ready."""
        shape = (self.stages, self.held_rows, self.shape[1])
        self.memory = alloc(b, RefType(shape, self.dtype, "tmem"), name)
        self.ready = alloc(b, barriers(self.stages, warps), f"{name}_ready")


@dataclass(eq=False)
class Sums(Part):
    """An accumulator, and the matmuls that add to it one after another.

    With a loop, its iterations do, and what they add to is what the loop starts with.
    """

    products: tuple[Product, ...] = ()
    loop: Loop | None = None
    place: int = 0  # among what the loop carries
    starts: bool = False  # with a tile that is stored there, not with zeros
    done: Value | None = None

    @property
    def result(self) -> Value:
        last = self.products[-1].result
        return last if self.loop is None else self.loop.results[self.place]

    def alloc(self, b: Builder, warps: int, name: str) -> None:
        super().alloc(b, warps, name)
        self.done = alloc(b, barriers(self.stages, 1), f"{name}_done")

    @property
    def start(self) -> Value | None:
        return self.loop.inits[self.place] if self.loop else self.products[0].addend


@dataclass(eq=False)
class Given(Part):
    """The left operand of a matmul, which warpgroups compute."""


def barriers(stages: int, arrivals: int) -> RefType:
    """Of which a wait or an arrival orders accesses to tensor memory, too."""
    return RefType((stages,), I32, "mbarrier", Layout("arrivals", (arrivals, 1)))


class TensorPlan:
    """The tensor memory of a program."""

    def __init__(self, plan: Plan, b: Builder):
        self.plan, self.set = plan, plan.set
        self.facts = Facts()
        self.facts.note_block(plan.program)
        self.of = dict[Product, Sums]()
        self.sums = [self.sums_of(chain) for chain in self.chains()]
        self.given = {p: self.given_of(p) for p in plan.products if p.lhs.load is None}
        self.choose_stages()
        warps = 4 * plan.warpgroups
        for each in self.sums:
            each.alloc(b, warps, "sums")
        for each in self.given.values():
            each.alloc(b, warps, "given")
        self.last = alloc(b, barriers(1, 1), "last")  # after all matmuls

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
        rows, columns = last.result.tile.shape
        found = Sums(
            (rows, columns), last.sums, self.set.held_rows(rows), products=chain,
            loop=loop, place=place, starts=first.addend is not None,
        )  # fmt: skip
        if loop is not None:
            zero = self.plan.made.get(loop.inits[place])
            is_zero = zero is not None and zero.attrs.get("value") == 0
            found.starts = not (is_zero and self.is_entered(loop))
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

    def given_of(self, product: Product) -> Given:
        tile = product.lhs.value.tile
        rows, depth = tile.shape
        return Given((rows, depth), tile.dtype, self.set.held_rows(rows))

    def choose_stages(self) -> None:
        """Two slots for what is taken while more is added up, if there is room."""
        parts = [*self.sums, *self.given.values()]
        rows, most = self.set.rows, self.set.tensor_columns
        used = sum(part.columns(rows) for part in parts)
        if used > most:
            self.plan.refuse(
                self.plan.products[0].dot,
                f"its accumulators need {used} columns of tensor memory, the limit is "
                f"{most}",
                "use smaller blocks",
            )
        for each in (s for s in self.sums if not s.starts):
            if used + each.columns(rows) <= most:
                used += each.columns(rows)
                each.stages = MOST_STAGES
