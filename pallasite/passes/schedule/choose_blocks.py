"""choose_blocks: resizes the author's blocks to sizes that suit a chip.

`for_threads` here, `for_gpu` in `gpu_blocks.py` and `for_tpu` in `tpu_blocks.py` look
at the dimensions of a kernel's work (`analysis/loop_dims.py`) and at one row of
`target/`, try the sizes that the rewrites of `reblock.py` allow, and estimate the cost
of each. A kernel is changed only if its blocks do not fit the chip or the estimated
gain is large; otherwise it stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import ceil, prod

from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, producers_of
from pallasite.ir.roles import Dot
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, Place, loop_dims
from pallasite.passes.analysis.step_table import StepTable, reached
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.cut_steps import cut_steps
from pallasite.passes.schedule.loop_over_k import loop_over_k
from pallasite.passes.schedule.reblock import cut, grow, may_cut, padded
from pallasite.passes.schedule.separate_uses import separate_uses
from pallasite.target import Host

LEAST_ROW = 64  # contiguous elements, so that accesses stay wide
LEAST_ROWS = 8  # of a part; fewer would not fill the registers of a matmul
FEW_ELEMENTS = 8  # of a matmul that a program stores
JOINED_ROWS = 32  # of a matmul, once programs are merged
ENDLESS = 1 << 20  # programs
EVEN = 0.8  # share of the threads' time that programs must fill
# Ops whose result depends on the order in which a backend goes through a tile.
MIXING = frozenset({"reduce", "arg_reduce", "scan", "sort", "atomic_rmw"})

Sizes = Mapping[LoopDim, int]  # of the dimensions that are resized


class Blocks:
    """A kernel's blocks, and what they would be with other sizes.

    Args:
        fills: whether programs may be merged of which only some take a step (`grow`).
        endless: whether there is no end of rows. What is chosen then is the same for
            any number of them, and so is the order of every sum in a row.
    """

    def __init__(self, found: LoopDims, fills: bool = False, endless: bool = False):
        self.found, self.kernel, self.fills = found, found.kernel, fills
        self.endless = endless
        self.body = found.pipeline.body
        self.dims = {(v, d): dim for dim in found.dims for v, d in dim.members.items()}

    def of(self, kernel: Kernel) -> "Blocks | None":
        """Those of another kernel, chosen in the same way."""
        return blocks_of(kernel, self.fills, self.endless)

    def shape(self, value: Value, sizes: Sizes) -> tuple[int, ...]:
        found = (self.dims.get((value, d)) for d in range(len(value.type.shape)))
        pairs = zip(value.type.shape, found, strict=True)
        return tuple(
            sizes[dim] * dim.per(value) if dim and dim in sizes else n
            for n, dim in pairs
        )

    @cached_property
    def dots(self) -> list[Dot]:
        return [Dot.of(op) for op in walk(self.body) if op.name == "dot"]

    @cached_property
    def tiles(self) -> list[Value]:
        ops = walk(self.body)
        return [v for op in ops for v in op.results if not v.is_ref and v.tile.rank]

    def programs(self, sizes: Sizes) -> float:
        """How many programs may run concurrently."""
        if self.endless:
            parts = (d.size / n for d, n in sizes.items() if not d.products)
            return ENDLESS * prod(parts)
        grid = self.found.pipeline.grid
        steps = [n for a in self.found.info.parallel if (n := grid[a]) is not None]
        changed = (
            self._blocks_along(dim, n) / self._blocks_along(dim, dim.size)
            for dim, n in sizes.items()
            if not dim.products
        )
        return prod(steps) * prod(changed)

    def _blocks_along(self, dim: LoopDim, size: int) -> int:
        """The number of blocks of a size along a dimension: at least one."""
        number, d = dim.windows[0]
        shown = self.found.pipeline.shown[number]
        extent = shown.array.ref.shape[d]
        return max(-(-extent // (size * dim.per(shown.block))), 1)

    @property
    def steps(self) -> int:
        """How many times a program runs its body."""
        grid = self.found.pipeline.grid
        return prod(n for a in self.found.info.sequential if (n := grid[a]) is not None)

    @cached_property
    def runs(self) -> dict[Op, float]:
        """At which share of all steps each matmul runs, as far as that is known."""
        table = StepTable(self.found.pipeline.ids, self.found.pipeline.grid)
        table.add_ops(self.body.ops)
        found = reached(self.body, table)
        return {op: float(at.mean()) for op, at in found if op.name == "dot"}

    @property
    def is_sized_at_run_time(self) -> bool:
        """Whether the number of programs is known only at run time."""
        grid = self.found.pipeline.grid
        return any(grid[a] is None for a in self.found.info.parallel)

    @cached_property
    def free(self) -> list[LoopDim]:
        """Dimensions that can be split between programs."""
        found = self.found
        return [d for d in found.dims if found.why_not_free(d) is None]

    def parts(self, dim: LoopDim, least: int) -> list[int]:
        """Sizes that a dimension can be split to, largest first."""
        counts = (
            n for n in range(2, dim.size // max(least, 1) + 1) if not dim.size % n
        )
        return [dim.size // n for n in counts if may_cut(self.found, dim, n)]

    def multiples(self, dim: LoopDim, most: int) -> list[int]:
        """Sizes that blocks can grow to, by doubling."""
        if self.endless:  # how many programs there are to merge is not known
            return []
        factors = [2**n for n in range(1, 12) if dim.size * 2**n <= most]
        while factors:
            try:
                grow(self.kernel, dim.windows[0], factors[-1], fills=self.fills)
                break
            except CannotReblock:
                factors.pop()
        return [dim.size * n for n in factors]

    def rewritten(self, sizes: Sizes) -> Kernel:
        kernel = self.kernel
        for dim, n in sizes.items():
            place = dim.windows[0]
            if n > dim.size:
                kernel = grow(kernel, place, n // dim.size, fills=self.fills)
            elif dim.products:
                kernel = _shallower(kernel, place, n)
            elif n < dim.size:
                kernel = cut(kernel, place, dim.size // n)
        return kernel


def blocks_of(
    kernel: Kernel, fills: bool = False, endless: bool = False
) -> Blocks | None:
    # Dimensions tied only by dead code would separate at the first rewrite.
    found = loop_dims(dead_code(kernel))
    if found is not None and any(dim.is_twice for dim in found.dims):
        found = loop_dims(_with_own_constants(found.kernel))
    if found is None or found.refused or 0 in found.pipeline.grid:
        return None
    return Blocks(found, fills, endless)


def adds_in_one_order(kernel: Kernel) -> bool:
    """Whether the only sums are those of matrix units: each along the depth, in units
    of an instruction's, whatever else is in a block."""
    ops = list(walk(kernel.body))
    sides = [s.value for op in ops if op.name == "dot" for s in Dot.of(op).sides]
    alone = not any(op.name in MIXING for op in ops)
    return alone and all(v.tile.dtype.bytes == 2 for v in sides)


def loads_less(new: Kernel, old: Kernel) -> bool:
    """Whether a matmul has two computed operands, one of which had been loaded: it is
    filled where steps are skipped."""

    def loads(kernel: Kernel) -> bool:
        made = producers_of(kernel.body)
        dots = [Dot.of(op) for op in walk(kernel.body) if op.name == "dot"]
        return all(any(is_loaded(s.value, made) for s in d.sides) for d in dots)

    return loads(old) and not loads(new)


def asks_elements(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a number depends on a tile."""
    op = made.get(value)
    if op is None or op.name == "load":
        return False
    tiles = any(not v.is_ref and v.tile.rank for v in op.operands)
    return tiles or any(asks_elements(v, made) for v in op.operands if not v.is_ref)


def is_loaded(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a tile is a load or the transpose of one."""
    op = made.get(value)
    while op is not None and op.name in ("transpose", "reshape"):
        op = made.get(op.operands[0])
    return op is not None and op.name == "load"


def _with_own_constants(kernel: Kernel) -> Kernel:
    """The kernel with a copy of tiles that only constants make, for each use.

    One tile of zeros, used by the rows of one array and the columns of another, would
    tie them; so would the start of a block, added to positions in both.
    """

    def filled(value: Value, b: Rewriter) -> Op | None:
        op = b.producer(value)
        if op is None or value.is_ref or not value.tile.rank:
            return None
        is_scalar = op.name == "broadcast_in_dim" and not op.operands[0].tile.rank
        return op if is_scalar or op.name in ("constant", "iota") else None

    def own(op: Op, b: Rewriter) -> Sequence[Value] | None:
        sources = [filled(v, b) for v in op.operands]
        if op.regions or not any(sources):
            return None
        operands = list(op.operands)
        for n, source in enumerate(sources):
            if source is not None:
                (operands[n],) = b.emit(source.name, *source.operands, **source.attrs)
        results = tuple(Value(v.type, v.name) for v in op.results)
        b.ops.append(op.with_(operands=tuple(operands), results=results))
        return results

    return dead_code(map_ops(kernel, own))


def with_uses_apart(blocks: Blocks) -> Blocks:
    """The blocks of the kernel after `separate_uses`, if more of them can be split."""
    made = separate_uses(blocks.kernel)
    apart = None if made is blocks.kernel else blocks.of(made)
    if apart is None or len(apart.free) <= len(blocks.free):
        return blocks
    return apart


def divisible(blocks: Blocks, least: int, step: int) -> Blocks:
    """Blocks that end past their arrays, of sides of matmuls that have no parts of
    `least` elements or more otherwise; they have a multiple of `step`."""
    for dim in blocks.free:
        is_side = any(dot.op.result in dim.members for dot in blocks.dots)
        if is_side and dim.size > step and not blocks.parts(dim, least):
            with suppress(CannotReblock):
                more = -(-dim.size // step) * step
                made = blocks_of(padded(blocks.kernel, dim.windows[0], more))
                return blocks if made is None else divisible(made, least, step)
    return blocks


def _shallower(kernel: Kernel, place: Place, depth: int) -> Kernel:
    """Split matmuls to depth `depth`: grid steps where the grid has them, or a loop."""
    try:
        return cut_steps(kernel, depth, place)
    except CannotReblock:
        return loop_over_k(kernel, place, depth)


def is_last(blocks: Blocks, dim: LoopDim) -> bool:
    """Whether the elements of a dimension are contiguous in memory."""
    arrays = blocks.found.pipeline.arrays
    return any(d == arrays[n].ref.rank - 1 for n, d in dim.windows)


def for_threads(
    kernel: Kernel, threads: int, nanoseconds: Callable[[Kernel], float]
) -> Kernel:
    """Enough programs for all threads, where a kernel has too few for its work.

    And fewer programs, where each computes only a few elements of a matmul.

    Args:
        kernel: what to rewrite.
        threads: how many there are.
        nanoseconds: estimated time of the whole kernel on one thread.
    """
    blocks = blocks_of(kernel)
    if blocks is None or blocks.is_sized_at_run_time:
        return kernel
    joined = _joined(blocks, threads)
    if joined is not None or threads < 2:
        return joined or kernel
    most = nanoseconds(kernel) // max(Host.least_part_ns, 1)
    if most < 2 or _used(blocks.programs({}), threads) >= EVEN:
        return kernel
    blocks = with_uses_apart(blocks)
    sizes: dict[LoopDim, int] = {}
    for dim in sorted(blocks.free, key=lambda d: (is_last(blocks, d), -d.size)):
        least = LEAST_ROW if is_last(blocks, dim) else LEAST_ROWS
        for n in blocks.parts(dim, least):
            count = blocks.programs({**sizes, dim: n})
            if count > most or _used(blocks.programs(sizes), threads) >= EVEN:
                break
            if _used(count, threads) > _used(blocks.programs(sizes), threads):
                sizes[dim] = n
    return blocks.rewritten(sizes) if sizes else kernel


def _joined(blocks: Blocks, threads: int) -> Kernel | None:
    """Merge programs that each compute few elements of a matmul; None if not such.

    A matmul of one row and one column reads both for a single sum. (To LLVM, programs
    without matmuls are a loop, which it merges by itself.)
    """
    windows = blocks.found.pipeline.windows
    stored = [prod(w.block_shape) for w in windows if w.mode == "out"]
    if not blocks.dots or not stored or max(stored) > FEW_ELEMENTS:
        return None
    sizes: dict[LoopDim, int] = {}
    for dim in sorted(blocks.free, key=lambda d: not is_last(blocks, d)):
        most = LEAST_ROW if is_last(blocks, dim) else JOINED_ROWS
        number, d = dim.windows[0]
        extent = blocks.found.pipeline.arrays[number].ref.shape[d]
        for n in reversed(blocks.multiples(dim, min(most, extent))):
            enough = blocks.programs({**sizes, dim: n}) >= threads
            if enough and (extent % n == 0 or n * 2 > most):
                sizes[dim] = n
                break
    return blocks.rewritten(sizes) if sizes else None


def _used(programs: float, threads: int) -> float:
    """The share of the threads' time that equal programs fill."""
    return programs / (threads * max(ceil(programs / threads), 1))
