"""choose_blocks: blocks of the size that a chip wants, from the author's.

`for_gpu`, `for_tpu` and `for_threads` look at the dimensions of a kernel's work
(`analysis/loop_dims.py`) and at one row of `target/`, try the sizes that the rewrites
of `reblock.py` allow, and estimate each. A kernel is changed only if its blocks do not
fit the chip, or if that gains much by the estimate; otherwise it stays as it is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import ceil, prod

from pallasite.errors import ResourceError
from pallasite.ir.nodes import Kernel, Value, walk
from pallasite.ir.roles import Dot
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, Place, loop_dims
from pallasite.passes.loop_over_k import loop_over_k, why_not_in_rounds
from pallasite.passes.merge_k_steps import merge_k_steps, split_k_steps
from pallasite.passes.reblock import CannotReblock, cut, grow, may_cut
from pallasite.target import Gpu

Sizes = Mapping[LoopDim, int]  # of those that get another size


class _Blocks:
    """A kernel's blocks, and what they would be with other sizes."""

    def __init__(self, found: LoopDims):
        self.found, self.kernel = found, found.kernel
        self.body = found.pipeline.body
        self.dims = {(v, d): dim for dim in found.dims for v, d in dim.members.items()}

    def shape(self, value: Value, sizes: Sizes) -> tuple[int, ...]:
        found = (self.dims.get((value, d)) for d in range(len(value.type.shape)))
        pairs = zip(value.type.shape, found, strict=True)
        return tuple(n if dim is None else sizes.get(dim, n) for n, dim in pairs)

    @cached_property
    def dots(self) -> list[Dot]:
        return [Dot.of(op) for op in walk(self.body) if op.name == "dot"]

    @cached_property
    def tiles(self) -> list[Value]:
        ops = walk(self.body)
        return [v for op in ops for v in op.results if not v.is_ref and v.tile.rank]

    def programs(self, sizes: Sizes) -> float:
        """How many programs may run at once."""
        grid = self.found.pipeline.grid
        steps = [n for a in self.found.info.parallel if (n := grid[a]) is not None]
        changed = (dim.size / n for dim, n in sizes.items() if not dim.products)
        return prod(steps) * prod(changed)

    @property
    def steps(self) -> int:
        """How often a program runs its body."""
        grid = self.found.pipeline.grid
        return prod(n for a in self.found.info.sequential if (n := grid[a]) is not None)

    @property
    def is_sized_at_run_time(self) -> bool:
        """Whether only the run knows how many programs there are."""
        grid = self.found.pipeline.grid
        return any(grid[a] is None for a in self.found.info.parallel)

    @cached_property
    def free(self) -> list[LoopDim]:
        """Dimensions that programs can have parts of."""
        found = self.found
        return [d for d in found.dims if found.why_not_free(d) is None]

    def parts(self, dim: LoopDim, least: int) -> list[int]:
        """Sizes of which a dimension can be cut, the author's own first."""
        counts = (
            n for n in range(2, dim.size // max(least, 1) + 1) if not dim.size % n
        )
        return [dim.size // n for n in counts if may_cut(self.found, dim, n)]

    def multiples(self, dim: LoopDim, most: int) -> list[int]:
        """Sizes to which blocks can grow, twice as large each."""
        factors = [2**n for n in range(1, 12) if dim.size * 2**n <= most]
        while factors:
            try:
                grow(self.kernel, dim.windows[0], factors[-1])
                break
            except CannotReblock:
                factors.pop()
        return [dim.size * n for n in factors]

    def rewritten(self, sizes: Sizes) -> Kernel:
        kernel = self.kernel
        for dim, n in sizes.items():
            place = dim.windows[0]
            if n > dim.size:
                kernel = grow(kernel, place, n // dim.size)
            elif dim.products:
                kernel = _shallower(kernel, place, n)
            elif n < dim.size:
                kernel = cut(kernel, place, dim.size // n)
        return kernel


def _blocks(kernel: Kernel) -> _Blocks | None:
    found = loop_dims(kernel)
    if found is None or found.refused or 0 in found.pipeline.grid:
        return None
    return _Blocks(found)


def _shallower(kernel: Kernel, place: Place, depth: int) -> Kernel:
    """Products in rounds of `depth`: steps of the grid where it has them, or a loop."""
    new = split_k_steps(kernel, depth)
    return new if new is not kernel else loop_over_k(kernel, place, depth)


# --- GPUs ---

# Of what a multiprocessor has: the rest is for addresses, masks and what is in flight.
SHARED_SHARE = 0.88  # of shared memory, for operands of products
REGISTER_SHARE = 0.5  # of registers, for results of products
STAGES = 3  # buffers of operands that keep the tensor cores busy
LEAST_SIDE = 16  # of a product's tile
LARGEST_SIDE = 256
ROW_BYTES = 128  # of an operand along k: what shared memory is swizzled by
# By measurement a tile of m x n costs as much as one without edges that has this many
# more rows and columns; and blocks are changed only if that gains a quarter.
EDGE_ROWS, EDGE_COLUMNS = 20, 28
GAIN = 1.25
LEAST_SECONDS = 5e-6  # what a launch takes: not worth looking at
COMPUTED_BYTES = 1 << 15  # of a tile that is computed before it is multiplied
SHORT_TILE = 64  # rows below which Hopper's large matrix instructions are not used
TILE_ELEMENTS = 8192  # of the largest tile in code without products
LEAST_ROW = 64  # elements next to each other, so that accesses stay wide


def for_gpu(kernel: Kernel, chip: Gpu, tuned: bool = False) -> Kernel:
    """Blocks that fit a multiprocessor's registers and shared memory.

    Args:
        kernel: what to rewrite.
        chip: the GPU.
        tuned: the author chose stages or warps for these blocks: they stay if they fit.

    Raises:
        ResourceError: blocks do not fit, and cannot be cut.
    """
    blocks = _blocks(kernel)
    if blocks is None:
        return kernel
    if not blocks.dots:
        return _without_products(blocks, chip, tuned)
    return _WithProducts(blocks, chip).kernel(tuned)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _physical(shape: Sequence[int]) -> int:
    """Elements of a tile on a GPU, where each side is a power of two."""
    return prod(map(_power_of_two, shape))


class _WithProducts:
    """Blocks of a kernel with products."""

    def __init__(self, blocks: _Blocks, chip: Gpu):
        self.blocks, self.chip = blocks, chip

    def kernel(self, tuned: bool) -> Kernel:
        own = self.seconds({})
        if own is not None and (tuned or own < LEAST_SECONDS):
            return self.blocks.kernel
        found = [(t, s) for s in self.choices() if (t := self.seconds(s)) is not None]
        if not found:
            self.refuse()
            return self.blocks.kernel
        best, sizes = min(found, key=lambda pair: pair[0])
        if not sizes or (own is not None and own < GAIN * best):
            return self.blocks.kernel
        return self._deeper(self.blocks.rewritten(sizes), sizes)

    def _deeper(self, kernel: Kernel, sizes: Sizes) -> Kernel:
        """Steps that are shallower than a row of shared memory, merged."""
        depth = ROW_BYTES // self._widest(self.blocks.dots)
        own = [d for d in self._deep if d.size < depth and d not in sizes]
        if self._stages({**sizes, **dict.fromkeys(own, depth)}) < STAGES:
            return kernel
        return merge_k_steps(kernel, depth, COMPUTED_BYTES) if own else kernel

    def _widest(self, dots: Iterable[Dot]) -> int:
        return max(side.value.tile.dtype.bytes for d in dots for side in d.sides)

    # --- what there is to choose ---

    def choices(self) -> Iterator[Sizes]:
        sides = [dim for dim in self.blocks.free if self._is_side(dim)]
        options = [[d.size, *self._sizes(d)] for d in sides]
        for chosen in product(*options):
            pairs = zip(sides, chosen, strict=True)
            sizes = {dim: n for dim, n in pairs if n != dim.size}
            yield sizes | self._depths(sizes)

    def _is_side(self, dim: LoopDim) -> bool:
        """Whether a dimension is one of the rows or columns of a product's result."""
        return any(dot.op.result in dim.members for dot in self.blocks.dots)

    def _sizes(self, dim: LoopDim) -> list[int]:
        return [
            *self.blocks.parts(
                dim, LEAST_SIDE if self.seconds({}) is None else SHORT_TILE
            ),
            *self.blocks.multiples(dim, LARGEST_SIDE),
        ]

    def _depths(self, sizes: Sizes) -> dict[LoopDim, int]:
        """How deep products may be, so that there is room for all stages."""
        found = dict[LoopDim, int]()
        for dim, depths in self._deep.items():
            fits = (
                n for n in depths if self._stages({**sizes, **found, dim: n}) >= STAGES
            )
            depth = next(fits, depths[-1])
            if depth != dim.size:
                found[dim] = depth
        return found

    @cached_property
    def _deep(self) -> dict[LoopDim, list[int]]:
        """Dimensions that products sum over, with the depths they may have."""
        deep = {}
        for dim in self.blocks.found.dims:
            if dim.products and why_not_in_rounds(self.blocks.found, dim) is None:
                widest = self._widest(map(Dot.of, dim.products))
                halves = [
                    dim.size >> n for n in range(1, 20) if not dim.size % (1 << n)
                ]
                swizzled = [n for n in halves if LEAST_SIDE <= n <= ROW_BYTES // widest]
                deep[dim] = [dim.size, *swizzled]
        return deep

    # --- what it takes ---

    def _operand_bytes(self, sizes: Sizes) -> int:
        """Shared memory for one stage of the largest product's operands."""
        return max(
            sum(
                _physical(self.blocks.shape(side.value, sizes))
                * side.value.tile.dtype.bytes
                for side in dot.sides
            )
            for dot in self.blocks.dots
        )

    def _stages(self, sizes: Sizes) -> int:
        available = int(SHARED_SHARE * self.chip.shared.bytes)
        return available // max(self._operand_bytes(sizes), 1)

    def _result_bytes(self, sizes: Sizes) -> int:
        """Registers for the results of all products."""
        shapes = (self.blocks.shape(d.op.result, sizes) for d in self.blocks.dots)
        return 4 * sum(map(_physical, shapes))

    def seconds(self, sizes: Sizes) -> float | None:
        """An estimate; None: it does not fit."""
        stages = self._stages(sizes)
        if stages < 1:
            return None
        if self._result_bytes(sizes) > REGISTER_SHARE * 4 * self.chip.registers:
            return None
        waves = ceil(self.blocks.programs(sizes) / self.chip.cores)
        work = sum(self._work(dot, sizes) for dot in self.blocks.dots)
        steps = self.blocks.steps
        return waves * steps * work * (1 + 0.3 * max(STAGES - stages, 0)) / self._rate

    @cached_property
    def _rate(self) -> float:
        """Products per second of one multiprocessor."""
        types = {
            side.value.tile.dtype.name for d in self.blocks.dots for side in d.sides
        }
        rates = [self.chip.rate(name) for name in types]
        known = [rate for rate in rates if rate is not None]
        return min(known, default=max(self.chip.rates.values())) / 2 / self.chip.cores

    def _work(self, dot: Dot, sizes: Sizes) -> float:
        """Products of one program's dot, with the depth the author gave it."""
        depth = dot.depth
        sides = []
        for side in dot.sides:
            shape = self.blocks.shape(side.value, sizes)
            free = [shape[d] for d in side.free]
            sides.append(max(_physical(free), LEAST_SIDE))
        shape = self.blocks.shape(dot.lhs.value, sizes)
        batch = prod(shape[d] for d in dot.lhs.batch)
        m, n = sides
        short = 1.5 if m < SHORT_TILE else 1.0
        return batch * m * n * depth * (1 + EDGE_ROWS / m + EDGE_COLUMNS / n) * short

    def refuse(self) -> None:
        """Raise if what a product needs at once is surely more than there is."""
        blocks, available = self.blocks, self.chip.shared.bytes
        smallest = {d: n[-1] for d, n in self._deep.items()}
        for dim in filter(self._is_side, blocks.free):
            smallest[dim] = min([dim.size, *blocks.parts(dim, LEAST_SIDE)])
        for dot in blocks.dots:
            value = dot.rhs.value
            shape = blocks.shape(value, smallest)
            needed = _physical(shape) * value.tile.dtype.bytes
            if needed > available:
                raise ResourceError(
                    f"a block needs more shared memory than {self.chip.name} has",
                    [
                        ("kernel", blocks.kernel.name),
                        ("operand", value.type),
                        ("needed", f"{needed} bytes"),
                        ("available", f"{available} bytes"),
                        *_reasons(blocks, value),
                    ],
                    dot.op.loc or blocks.kernel.loc,
                    "smaller blocks along the dimensions that are kept whole",
                )


def _reasons(blocks: _Blocks, value: Value) -> Iterator[tuple[str, str]]:
    for d, n in enumerate(value.type.shape):
        dim = blocks.dims.get((value, d))
        reason = None if dim is None else blocks.found.why_not_free(dim)
        if dim is not None and dim.products and reason is not None:
            reason = why_not_in_rounds(blocks.found, dim)
        if reason is not None:
            yield "kept whole", f"dimension {d} ({n} elements): {reason}"


def _without_products(blocks: _Blocks, chip: Gpu, tuned: bool) -> Kernel:
    """Tiles that are not larger than what a program has registers for."""
    sizes: dict[LoopDim, int] = {}

    def elements() -> int:
        return max((_physical(blocks.shape(v, sizes)) for v in blocks.tiles), default=0)

    if elements() <= 2 * TILE_ELEMENTS or tuned:
        return blocks.kernel
    # Rows first: elements that are next to each other stay together.
    rows = [d for d in blocks.free if not _is_last(blocks, d)]
    lines = [d for d in blocks.free if _is_last(blocks, d)]
    for dims, least in ((rows, 1), (lines, LEAST_ROW)):
        for dim in dims:
            for n in blocks.parts(dim, least):
                if elements() > TILE_ELEMENTS:
                    sizes[dim] = n
    return blocks.rewritten(sizes)


def _is_last(blocks: _Blocks, dim: LoopDim) -> bool:
    """Whether a dimension is one whose elements are next to each other in memory."""
    arrays = blocks.found.pipeline.arrays
    return any(d == arrays[n].ref.rank - 1 for n, d in dim.windows)


# --- CPUs ---

# Waking a thread takes 10 us or more: parts take longer than that.
LEAST_PART_NS = 40_000
LEAST_ROWS = 8  # of a part; fewer would not fill the registers of a product
EVEN = 0.8  # of the threads' time that programs fill: enough


def for_threads(
    kernel: Kernel, threads: int, nanoseconds: Callable[[Kernel], float]
) -> Kernel:
    """Enough programs for all threads, where a kernel has too few for its work.

    Args:
        kernel: what to rewrite.
        threads: how many there are.
        nanoseconds: what one thread takes for all of a kernel, by estimate.
    """
    blocks = _blocks(kernel) if threads > 1 else None
    if blocks is None or blocks.is_sized_at_run_time:
        return kernel
    programs = blocks.programs({})
    if _used(programs, threads) >= EVEN:
        return kernel
    most = nanoseconds(kernel) // LEAST_PART_NS
    sizes: dict[LoopDim, int] = {}
    for dim in sorted(blocks.free, key=lambda d: (_is_last(blocks, d), -d.size)):
        least = LEAST_ROW if _is_last(blocks, dim) else LEAST_ROWS
        for n in blocks.parts(dim, least):
            count = blocks.programs({**sizes, dim: n})
            if count > most or _used(blocks.programs(sizes), threads) >= EVEN:
                break
            if _used(count, threads) > _used(blocks.programs(sizes), threads):
                sizes[dim] = n
    return blocks.rewritten(sizes) if sizes else kernel


def _used(programs: float, threads: int) -> float:
    """The part of the threads' time that equal programs fill."""
    return programs / (threads * max(ceil(programs / threads), 1))
