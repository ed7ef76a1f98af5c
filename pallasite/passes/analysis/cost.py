"""cost: how much a kernel computes and moves, from its IR.

`cost(kernel)` counts arithmetic, transcendentals and main-memory bytes over the whole
grid and all loops. A trip count or size known only at run time counts as one, and the
result says that it is not exact. Backends and `tools/` read it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Unit, table
from pallasite.ir.roles import Cond, Dot, Loop, Pipeline, While
from pallasite.ir.types import Type
from pallasite.passes.analysis.intervals import HIGHEST, Facts
from pallasite.passes.analysis.memory import MAIN_MEMORY, VIEWS
from pallasite.target import Gpu, Host, Machine

UNKNOWN_ROUNDS = 8  # a guess for trip counts known only at run time


@dataclass(frozen=True)
class Cost:
    """Totals of a kernel. `exact` is False if some length is unknown."""

    flops: int = 0
    transcendentals: int = 0
    bytes_accessed: int = 0
    exact: bool = True

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.transcendentals + other.transcendentals,
            self.bytes_accessed + other.bytes_accessed,
            self.exact and other.exact,
        )

    def times(self, count: int | None) -> "Cost":
        """`count` runs; None: an unknown number, counted as one."""
        n = 1 if count is None else count
        return Cost(
            self.flops * n,
            self.transcendentals * n,
            self.bytes_accessed * n,
            self.exact and count is not None,
        )

    @staticmethod
    def worst(costs: Iterable["Cost"]) -> "Cost":
        """For branches: the maximum over them, count by count."""
        costs = list(costs) or [Cost()]
        return Cost(
            max(c.flops for c in costs),
            max(c.transcendentals for c in costs),
            max(c.bytes_accessed for c in costs),
            all(c.exact for c in costs),
        )


def cost(kernel: Kernel, trips: Mapping[Op, int] | None = None) -> Cost:
    """What one call of the kernel computes and moves.

    `trips`: of loops whose trip count is not constant (`most_trips`).
    """
    # Operands that start on chip (such as prefetched scalars) are copied once.
    on_chip = [p for p in kernel.params if not is_main(p)]
    prefetched = sum(bytes_of(p.type) for p in on_chip if not p.ref.is_semaphore)
    return _Counter(trips or {}).block(kernel.body) + Cost(bytes_accessed=prefetched)


def seconds(
    kernel: Kernel, chip: Gpu | Host, programs: int = 1, uneven: bool = False
) -> float:
    """Estimated time of a kernel that has a number of programs of equal work.

    `uneven`: of work that differs from program to program, as data says.
    """
    total = cost(kernel)
    rounds = 1 if total.exact else UNKNOWN_ROUNDS
    grids = [Pipeline.of(op).grid for op in kernel.body.ops if op.name == "pipeline"]
    steps = sum(prod(n for n in grid if n is not None) for grid in grids)
    flops, special = rounds * total.flops, rounds * total.transcendentals
    moved = rounds * total.bytes_accessed
    machine = Machine.usual(chip)
    return machine.kernel(flops, special, moved, steps, programs, uneven)


def most_trips(kernel: Kernel) -> dict[Op, int]:
    """How often each loop runs where it runs most often, as in the last program.

    Of a loop up to what only data says, nothing is known.
    """
    facts, found = Facts(), dict[Op, int]()
    for op in walk(kernel.body):
        facts.note_regions(op)
        facts.note_op(op)
        if op.name != "for":
            continue
        loop = Loop.of(op)
        most = facts.most_steps(loop)
        if most is not None and facts.of(loop.limit).high < HIGHEST:
            found[op] = most
    return found


class _Counter:
    def __init__(self, trips: Mapping[Op, int]) -> None:
        self.trips = trips
        self.numbers: dict[Value, int] = {}  # scalars known to be constant

    def block(self, block: Block) -> Cost:
        total = Cost()
        for op in block.ops:
            total += self.op(op)
        return total

    def op(self, op: Op) -> Cost:
        if op.name == "constant" and not op.result.tile.rank:
            self.numbers[op.result] = op.attrs["value"]
        structured = _STRUCTURED.get(op.name)
        if structured is not None:
            return structured(self, op)
        row = table()[op.name]
        if row.unit is Unit.SPECIAL:
            return Cost(transcendentals=op.result.tile.size)
        if row.unit is Unit.ALU and op.name != "bitcast":
            return Cost(flops=operations(op))
        if row.unit is Unit.MEMORY:
            return Cost(bytes_accessed=moved_by(op))
        return Cost()

    def count_dot(self, op: Op) -> Cost:
        return Cost(flops=2 * op.result.tile.size * Dot.of(op).depth)

    def count_for(self, op: Op) -> Cost:
        loop = Loop.of(op)
        first, limit, step = (self.numbers.get(v) for v in loop.bounds)
        trips = self.trips.get(op)
        if first is not None and limit is not None and step:
            trips = len(range(int(first), int(limit), int(step)))
        return self.block(loop.body).times(trips)

    def count_while(self, op: Op) -> Cost:
        loop = While.of(op)
        return (self.block(loop.condition) + self.block(loop.body)).times(None)

    def count_cond(self, op: Op) -> Cost:
        return Cost.worst(self.block(branch) for branch in Cond.of(op).branches)

    def count_pipeline(self, op: Op) -> Cost:
        """The body at each step; each block whenever its window moves."""
        from pallasite.passes.analysis.grid import window_axes

        pipeline = Pipeline.of(op)
        grid, arrays, windows = pipeline.grid, pipeline.arrays, pipeline.windows
        total = self.block(pipeline.body).times(_steps(grid))
        moves = window_axes(op)
        for ref, window, axes in zip(arrays, windows, moves, strict=True):
            if window.space in MAIN_MEMORY or not is_main(ref):
                continue
            # Steps up to the last axis it moves along: the inner ones keep the block.
            outer = max((a for a in axes if grid[a] != 1), default=-1) + 1
            dims = zip(window.dims, ref.ref.shape, strict=True)
            sizes = [1 if d.kind == "squeezed" else min(d.size, n) for d, n in dims]
            block = Cost(bytes_accessed=bytes_of(ref.ref.with_shape(sizes)))
            total += block.times(_steps(grid[:outer]))
        return total


_STRUCTURED = {
    "dot": _Counter.count_dot,
    "for": _Counter.count_for,
    "while": _Counter.count_while,
    "cond": _Counter.count_cond,
    "pipeline": _Counter.count_pipeline,
}


def _steps(grid: Iterable[int | None]) -> int | None:
    sizes = list(grid)
    if 0 in sizes:
        return 0
    return None if None in sizes else prod(sizes)  # type: ignore[arg-type]


def operations(op: Op) -> int:
    """Operations of an ALU op: one per element of the larger side."""
    size = max(v.tile.size for v in (*op.operands, *op.results))
    if op.name == "sort":
        n = op.operands[0].tile.shape[op.attrs["axis"]]
        return size * max(1, (n - 1).bit_length())
    return size


def bytes_of(type: Type) -> int:
    return -(-type.size * max(type.dtype.bits, 1) // 8)


def moved_by(op: Op) -> int:
    """Main-memory bytes of a load, store, atomic or copy."""
    return moved_through(op, [v for v in op.operands if v.is_ref and is_main(v)])


def moved_through(op: Op, refs: Sequence[Value]) -> int:
    """Bytes that an op moves through some of its refs."""
    if op.name in VIEWS:
        return 0
    if op.name == "copy_start":
        return sum(bytes_of(value.type) for value in refs)
    return accessed_by(op) if refs else 0


def is_main(ref: Value) -> bool:
    return ref.ref.space in MAIN_MEMORY


def accessed_by(op: Op) -> int:
    """Bytes that a load, store or atomic reads and writes, in any memory."""
    if op.name == "load":
        return bytes_of(op.result.tile)
    if op.name == "store":
        return bytes_of(op.operands[1].tile)
    if op.name in ("atomic_rmw", "atomic_cas"):
        return 2 * bytes_of(op.result.tile)
    return 0
