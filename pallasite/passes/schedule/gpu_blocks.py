"""gpu_blocks: blocks that fit a GPU's registers and shared memory (`choose_blocks.py`).

Matmul tiles are split or grown in m and n to sizes that keep the tensor cores of all
SMs busy, and in k to what several stages of loads have room for; other code is split to
fit a program's registers.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, inf, prod

from pallasite.errors import ChipMemoryError
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import producers_of, users_of
from pallasite.ir.roles import Dot
from pallasite.passes.analysis.loop_dims import LoopDim
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.columns import columns
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.normal.unit_dims import unit_dims
from pallasite.passes.schedule.choose_blocks import (
    Blocks,
    Sizes,
    adds_in_one_order,
    asks_elements,
    blocks_of,
    divisible,
    is_last,
    is_loaded,
    loads_less,
    with_uses_apart,
)
from pallasite.passes.schedule.cut_steps import cut_steps
from pallasite.passes.schedule.gpu_tiles import (
    TILE_ELEMENTS,
    cut,
    is_too_large,
    largest,
    moved,
    without_products,
)
from pallasite.passes.schedule.join_rows import join_rows
from pallasite.passes.schedule.loop_over_k import why_not_in_rounds
from pallasite.passes.schedule.loop_over_rows import loop_over_rows
from pallasite.passes.schedule.merge_k_steps import merge_k_steps
from pallasite.passes.schedule.separate_uses import SMALL
from pallasite.passes.schedule.widen_steps import widen_steps
from pallasite.target import Gpu, Machine, physical

# Shares of an SM's resources: the rest is for addresses, masks and data in flight.
SHARED_SHARE = 0.88  # of shared memory, for matmul operands
LEAST_SIDE = 16  # of a matmul's tile
LARGEST_SIDE = 256
MERGED_DEPTH = 128  # of a matmul along rows of several dimensions
ROW_BYTES = 128  # of an operand along k: the swizzle width of shared memory
# Measured: an m x n tile costs as much as one without edge effects that has this many
# more rows and columns. Blocks are changed only if that gains a quarter; those of the
# kind of kernel that was measured, one matmul of operands that are loaded, grow if it
# gains enough to be seen.
EDGE_ROWS, EDGE_COLUMNS = 20, 28
GAIN, GAIN_OF_GROWTH = 1.25, 1.05
# Two warpgroups instead of one alone: while one computes, the other multiplies.
GAIN_OF_WARPGROUPS = 1.08
GAIN_OF_STEPS = 1.05
LEAST_LAUNCHES = 2  # a kernel that takes no longer than these is not worth optimising
# Full-precision f32 matmuls do not use tensor cores: each thread holds the whole depth
# of its part in registers, and deeper ones are several times slower.
EXACT = (None, "default", "highest", "ieee", "f32_f32_f32")
EXACT_DEPTH, TOO_DEEP = 16, 4.0
EXACT_BYTES = 1 << 16  # of their results
# By how much smaller results are if f32 is multiplied in pieces where tests of data ask
# for it: programs of fewer rows and columns do so less often, and while one makes its
# pieces, another on its SM multiplies.
SMALLER_IN_PIECES = 4
# Of a block, whose cotangent would be a sum of as many: half of an SM's registers.
SUMMED_ELEMENTS = 1 << 15
COMPUTED_BYTES = 1 << 15  # of a tile that is computed before its matmul
STEP = 128  # elements of a block along which running maxima and sums go, when split
SHORT_TILE = 64  # rows of Hopper's wgmma
WARPGROUP = 128  # threads
SMALL_BATCH = 1 << 16  # elements of one operand times those of the other
ADDED = frozenset({"add", "pad", "reshape", "transpose"})


@dataclass(frozen=True)
class Tiles:
    """What a backend's matmuls take of an SM.

    Args:
        register_share: of its registers, for results.
        keeps_operands: whether computed operands take registers too.
        stages: buffers of operands that keep the tensor cores busy.
        stages_alone: the same, if a program does nothing else in the meantime.
        padded: whether each side of a tile is padded to a power of two.
        rows: of a result, are padded to a multiple of this.
        most_sums: of one result, in the registers of a thread of its warpgroups.
        least_side: the smallest side to split to.
        most_columns: of one matmul's result.
        lone: how much longer the matmuls of a warpgroup take if it is alone on its SM.
        reloads: whether operands that exceed shared memory are multiplied in parts.
        of_thread: registers of a thread for results and operands; None: no limit other
            than the share of its SM's.
        of_shared_thread: the same, if two programs share an SM.
        fills: whether programs may be merged of which only some take a step.
    """

    register_share: float = 0.5
    stages: int = 3
    stages_alone: int = 3
    padded: bool = True
    rows: int = 1
    most_sums: int | None = None
    keeps_operands: bool = False
    least_side: int = LEAST_SIDE
    most_columns: int | None = None
    lone: float = 1.0
    reloads: bool = True
    of_thread: int | None = None
    of_shared_thread: int | None = None
    fills: bool = False

    @staticmethod
    def of(chip: Gpu) -> "Tiles":
        """As in Triton."""
        stages = min(Tiles.stages, chip.stages_in_shared)
        return Tiles(chip.share_of_results, stages, stages)

    def elements(self, shape: Sequence[int]) -> int:
        return prod(physical(shape) if self.padded else shape)

    def in_registers(self, shape: Sequence[int], rows: int) -> int:
        """Elements of a result, or of what is multiplied with its rows.

        `rows`: of all results, some of which are held transposed.
        """
        if self.padded or not shape:
            return self.elements(shape)
        if rows not in shape:
            return whole(shape[0], self.rows) * prod(shape[1:])
        return whole(rows, self.rows) * (prod(shape) // rows)

    def is_too_large(self, rows: int, columns: int) -> bool:
        """Whether threads have no registers for a result."""
        sums = whole(rows, SHORT_TILE) * columns // (WARPGROUP * warpgroups(rows))
        return self.most_sums is not None and sums > self.most_sums


def whole(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def warpgroups(rows: int) -> int:
    """How many warpgroups share the rows of a matmul, 64 at a time."""
    blocks = -(-rows // SHORT_TILE)
    return 2 if blocks % 2 == 0 else 3 if blocks % 3 == 0 else 1


def for_gpu(
    kernel: Kernel,
    chip: Gpu,
    tuned: bool = False,
    tiles: Tiles | None = None,
    batch_invariant: bool = False,
) -> Kernel:
    """Blocks that fit an SM's registers and shared memory.

    Args:
        kernel: what to rewrite.
        chip: the GPU.
        tuned: the author chose stages or warps for these blocks: keep them if they fit.
        tiles: what matmuls take; None: as in Triton.
        batch_invariant: whether the order of sums must not follow from the number of
            programs.

    Raises:
        ChipMemoryError: blocks do not fit and cannot be split.
    """
    tiles = tiles or Tiles.of(chip)
    # What Triton makes of a tile of another shape is not known.
    free = not tiles.padded and adds_in_one_order(kernel)
    endless = batch_invariant and not free
    blocks = blocks_of(kernel, tiles.fills, endless)
    if blocks is None:
        return kernel
    if not blocks.dots:
        return without_products(blocks, chip, tuned)
    products = _products(blocks, chip, tiles)
    if not tuned:
        products = _joined(products) or _wider_steps(products) or products
    if products.seconds({}) is None:
        fits = products.best() < inf
        found = products.kernel(tuned) if fits else None
        if found is None or is_too_large(found, chip):
            made = _rows_in_loops(products.blocks)
            if made is not None:
                return for_gpu(made, chip, tuned, tiles, batch_invariant)
    return products.kernel(tuned)


def seconds_of_products(kernel: Kernel, chip: Gpu) -> tuple[float, float]:
    """Of a kernel's matmuls, and with the best blocks; infinite if they may not fit."""
    blocks = blocks_of(kernel)
    if blocks is None or not blocks.dots:
        return inf, inf
    products = _products(blocks, chip, Tiles.of(chip))
    own = products.seconds({})
    return inf if own is None else own, products.best()


def _products(blocks: Blocks, chip: Gpu, tiles: Tiles) -> "_WithProducts":
    """What there is to choose from: with narrower steps, if only those fit."""
    blocks = _batches_apart(blocks)
    products = _WithProducts(blocks, chip, tiles)
    if products.seconds({}) is None:  # it does not fit
        blocks = divisible(with_uses_apart(blocks), LEAST_SIDE, SHORT_TILE)
        products = _WithProducts(blocks, chip, tiles)
        narrow = _narrow_steps(products)
        if narrow is not None and narrow.best() < products.best():
            products = narrow
    return products


def may_fit(kernel: Kernel, chip: Gpu) -> bool:
    """Whether there are blocks whose matmuls certainly fit an SM; rough otherwise."""
    blocks = blocks_of(kernel)
    if blocks is None or not blocks.dots:
        return True
    products = _WithProducts(blocks, chip, Tiles.of(chip))
    if products.seconds({}) is not None:
        return True
    blocks = with_uses_apart(_batches_apart(blocks))
    return _WithProducts(blocks, chip, Tiles.of(chip)).best() < inf


def _joined(products: "_WithProducts") -> "_WithProducts | None":
    """Merged programs, where matmuls have fewer rows than an instruction."""
    blocks, tiles = products.blocks, products.tiles
    rows = max(prod(dot.lhs.sizes(dot.lhs.free)) for dot in blocks.dots)
    if blocks.endless or rows >= (LEAST_SIDE if tiles.padded else tiles.rows):
        return None
    found = list[_WithProducts]()
    for axis, steps in enumerate(blocks.found.pipeline.grid):
        for factor in range(2, LARGEST_SIDE // rows + 1):
            if steps is None or steps % factor:
                continue
            try:
                made = join_rows(blocks.kernel, axis, factor, tiles.padded)
            except CannotReblock:
                break
            joined = blocks.of(canonicalize(made))
            if joined is not None:
                found.append(_WithProducts(joined, products.chip, tiles))
    best = min(found, key=_with_loads, default=None)
    return best if best and _with_loads(products) > GAIN * _with_loads(best) else None


def _with_loads(products: "_WithProducts") -> float:
    """The least estimated time; in Triton with what all programs load and store."""
    count = moved(products.blocks, {}) if products.tiles.padded else 0
    return products.best() + products.machine.reading_cache(count)


def _rows_in_loops(blocks: Blocks, least: int = 0) -> Kernel | None:
    """The kernel with loops over parts of a dimension that is reduced, if it may be;
    with narrower steps where the grid has steps along it.

    `least`: the elements of a block for which this is done.
    """
    arrays = blocks.found.pipeline.blocks
    for dim in sorted(blocks.found.dims, key=lambda dim: -dim.size):
        largest = max(arrays[n].ref.size for n, _ in dim.windows)
        reduced = max((op.operands[0].tile.size for op in dim.reduces), default=0)
        # What is small can be reduced by each program (`separate_uses.py`).
        may_stay = bool(least) and reduced <= SMALL * largest
        even = (n for n in range(STEP, LEAST_SIDE - 1, -1) if dim.size % n == 0)
        size = next(even, STEP)
        if dim.reduces and dim.size > STEP and largest > least and not may_stay:
            for cut_dim in (cut_steps, loop_over_rows):
                with suppress(CannotReblock):
                    made = cut_dim(blocks.kernel, place=dim.windows[0], size=size)
                    return columns(canonicalize(made))
    return None


def _narrow_steps(products: "_WithProducts") -> "_WithProducts | None":
    """The same work with steps of fewer elements, where steps may be split."""
    try:
        cut = canonicalize(cut_steps(products.blocks.kernel, STEP))
        narrow = products.blocks.of(cut)
    except CannotReblock:
        return None
    if narrow is None:
        return None
    return _WithProducts(narrow, products.chip, products.tiles)


def _wider_steps(products: "_WithProducts") -> "_WithProducts | None":
    """The same work with steps of more elements, where that gains enough."""
    blocks = products.blocks
    if not blocks.fills or products.shares_core:
        return None
    try:
        made = blocks.of(canonicalize(widen_steps(blocks.kernel, STEP)))
    except CannotReblock:
        return None
    if made is None or loads_less(made.kernel, blocks.kernel):
        return None
    wide = _WithProducts(made, products.chip, products.tiles)
    if wide._stages({}) < 2:  # a step is not loaded during the one before
        return None
    own, new = products.seconds({}), wide.seconds({})
    if own is None or new is None:  # sides may grow without wider steps, too
        own, new = products.best(), wide.best()
    return wide if own > GAIN_OF_STEPS * new else None


def _batches_apart(blocks: Blocks) -> Blocks:
    """One matmul of each batch per program, or per iteration where the batch is summed.

    It is one of two matrices then.
    """
    refused = set[tuple[int, int]]()
    while True:
        dims = (d for d in blocks.found.dims if d.windows[0] not in refused)
        dim = next((d for d in dims if _is_batch(blocks, d)), None)
        if dim is None:
            return blocks
        refused.add(dim.windows[0])
        with suppress(CannotReblock):
            if dim.reduces:
                apart = loop_over_rows(blocks.kernel, dim.windows[0], 1)
            elif dim in blocks.free and 1 in blocks.parts(dim, 1):
                apart = blocks.rewritten({dim: 1})
            else:
                continue
            blocks = blocks.of(unit_dims(canonicalize(apart))) or blocks


def _is_batch(blocks: Blocks, dim: LoopDim) -> bool:
    """Whether the steps along a dimension are separate matmuls, and not small ones."""
    return dim.size > 1 and any(
        blocks.dims.get((dot.lhs.value, d)) is dim
        for dot in blocks.dots
        if dot.lhs.value.tile.size * dot.rhs.value.tile.size >= SMALL_BATCH
        for d in dot.lhs.batch
    )


class _WithProducts:
    """Blocks of a kernel with matmuls."""

    def __init__(self, blocks: Blocks, chip: Gpu, tiles: Tiles):
        self.blocks, self.chip, self.tiles = blocks, chip, tiles
        self.machine = Machine.peak(chip)
        self.most_in_registers = tiles.register_share * 4 * chip.registers
        if _is_in_asked_pieces(blocks.body):
            self.most_in_registers /= SMALLER_IN_PIECES

    @cached_property
    def _made(self) -> dict[Value, Op]:
        return producers_of(self.blocks.body)

    @cached_property
    def in_registers(self) -> list[list[tuple[Value, int]]]:
        """What is in registers at the same time, with the bytes of an element."""
        return [self._held(dots) for dots in _at_once(self.blocks.body)]

    def _held(self, dots: Iterable[Op]) -> list[tuple[Value, int]]:
        found = list(map(Dot.of, dots))
        # Accumulators have 32 bits, whatever they are rounded to; one is enough for
        # matmuls that are added up.
        sums = {self._total(dot.op.result): dot.op.result for dot in found}
        held = [(result, 4) for result in sums.values()]
        if self.tiles.keeps_operands:
            sides = [side.value for dot in found for side in dot.sides]
            held += [
                (v, v.tile.dtype.bytes)
                for v in dict.fromkeys(sides)
                if not is_loaded(v, self._made)
            ]
        return held

    def _total(self, value: Value) -> Value:
        """The sum that a tile is only a term of, perhaps moved or reshaped before."""
        while len(users := self._users[value]) == 1 and users[0].name in ADDED:
            value = users[0].result
        return value

    @cached_property
    def _users(self) -> dict[Value, list[Op]]:
        return users_of(self.blocks.body)

    def kernel(self, tuned: bool) -> Kernel:
        own = self.seconds({})
        if own is not None and (tuned or own < LEAST_LAUNCHES * self.machine.launch):
            return self.blocks.kernel
        found = [(t, s) for s in self.choices() if (t := self.seconds(s)) is not None]
        for best, sizes in sorted(found, key=lambda pair: pair[0]):
            if not sizes:
                return self.blocks.kernel
            if own is not None and own < self._gain(sizes) * best:
                continue
            try:
                made = self.blocks.rewritten(sizes)
            except CannotReblock:
                continue  # one dimension can be split, but not after another
            if not loads_less(made, self.blocks.kernel):
                return self._deeper(made, sizes)
        return self._smallest() if own is None else self.blocks.kernel

    def best(self) -> float:
        """The least estimated time; infinite if no sizes fit."""
        found = (self.seconds(sizes) for sizes in self.choices())
        return min((t for t in found if t is not None), default=inf)

    def _gain(self, sizes: Sizes) -> float:
        """How many times faster blocks of other sizes must be."""
        shrinks = any(n < dim.size for dim, n in sizes.items() if self._is_side(dim))
        one = self._is_one_product
        more = warpgroups(self._rows({})) < warpgroups(self._rows(sizes))
        if more and (one or all(n > dim.size for dim, n in sizes.items())):
            return GAIN if self.shares_core and not one else GAIN_OF_WARPGROUPS
        return GAIN if shrinks or not one else GAIN_OF_GROWTH

    @cached_property
    def shares_core(self) -> bool:
        """Whether a program of one warpgroup leaves room for a second one."""
        if warpgroups(self._rows({})) > 1:
            return False
        of_thread = self._register_bytes({}) // (4 * WARPGROUP)
        sides = [side.value for dot in self.blocks.dots for side in dot.sides]
        loaded = [v for v in dict.fromkeys(sides) if is_loaded(v, self._made)]
        bytes_ = sum(v.tile.size * v.tile.dtype.bytes for v in loaded)
        most = self.tiles.of_shared_thread
        if most is None or of_thread > most:
            return False
        return 2 * self.tiles.stages * bytes_ <= SHARED_SHARE * self.chip.shared.bytes

    @cached_property
    def _is_one_product(self) -> bool:
        """Whether there is one matmul only, of loaded operands, which is only added."""
        if len(self.blocks.dots) != 1:
            return False
        (dot,), ops = self.blocks.dots, walk(self.blocks.body)
        users = {op.name for op in ops if dot.op.result in op.operands}
        loaded = all(is_loaded(side.value, self._made) for side in dot.sides)
        return loaded and users <= {"add", "store"}

    def _deeper(self, kernel: Kernel, sizes: Sizes) -> Kernel:
        """Merge steps that are shallower than a row of shared memory."""
        depth = ROW_BYTES // self._widest(self.blocks.dots)
        own = [d for d in self._deep if d.size < depth and d not in sizes]
        own = [d for d in own if not any(map(_is_exact, map(Dot.of, d.products)))]
        if self._stages({**sizes, **dict.fromkeys(own, depth)}) < self.tiles.stages:
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
        """Whether a dimension is the rows or columns of a matmul's result."""
        return any(dot.op.result in dim.members for dot in self.blocks.dots)

    def _sizes(self, dim: LoopDim) -> list[int]:
        fits = self.seconds({}) is not None
        least = SHORT_TILE if fits else self.tiles.least_side
        results = (dot.op.result for dot in self.blocks.dots)
        per = max(dim.per(v) for v in results if v in dim.members)
        parts = self.blocks.parts(dim, -(-least // per))
        if per > 1:  # rows of several dimensions
            return parts
        sizes = [*parts, *self.blocks.multiples(dim, LARGEST_SIDE)]
        # Others are padded to a power of two, or are not whole rows of shared memory.
        return [n for n in sizes if n % SHORT_TILE == 0 or n & (n - 1) == 0]

    def _depths(self, sizes: Sizes) -> dict[LoopDim, int]:
        """How deep matmuls may be, so that there is room for all stages.

        One that others run in each iteration of comes first, as its loop is around
        theirs. How deep it may be depends on theirs, and theirs on it.
        """
        order = sorted(self._deep, key=self._is_summed_only)
        found = dict[LoopDim, int]()
        for _ in order:
            for dim in order:
                others = {d: n for d, n in found.items() if d is not dim}
                found[dim] = self._depth(dim, {**sizes, **others})
        return {dim: found[dim] for dim in order if found[dim] != dim.size}

    def _depth(self, dim: LoopDim, sizes: Sizes) -> int:
        depths = self._deep[dim]
        options = {n: {**sizes, dim: n} for n in depths}
        stages = {n: self._stages(options[n]) for n in depths}
        fits = [n for n in depths if stages[n] >= self.tiles.stages]
        if self._is_summed_only(dim):
            # More, shallower stages hold as much and are filled sooner.
            fits = [n for n in fits if stages[n] >= self.chip.stages_in_shared] or fits
        held = [n for n in fits if self._fits_registers(options[n])]
        return next(iter(held or fits), depths[-1])

    def _is_summed_only(self, dim: LoopDim) -> bool:
        """Whether splitting a dimension makes no matmul run again in each iteration."""
        return not any(
            self.blocks.dims.get((side.value, d)) is dim
            for dot in self.blocks.dots
            for side in dot.sides
            for d in side.free
        )

    @cached_property
    def _deep(self) -> dict[LoopDim, list[int]]:
        """Contracted dimensions, with their allowed depths."""
        deep = {}
        for dim in self.blocks.found.dims:
            products = list(map(Dot.of, dim.products))
            exact, wide = any(map(_is_exact, products)), any(map(_is_wide, products))
            why_not = why_not_in_rounds(self.blocks.found, dim, reduced=wide)
            if dim.products and why_not is None:
                widest = self._widest(products)
                halves = [
                    dim.size >> n for n in range(1, 20) if not dim.size % (1 << n)
                ]
                swizzled = [n for n in halves if LEAST_SIDE <= n <= ROW_BYTES // widest]
                if dim.is_merged:
                    swizzled = self._merged_depths(dim, products)
                depths = [dim.size, *swizzled]
                if exact:
                    depths = [n for n in depths if n <= EXACT_DEPTH] or depths
                deep[dim] = depths
        return deep

    def _merged_depths(self, dim: LoopDim, products: Iterable[Dot]) -> list[int]:
        """Sizes of a dimension whose positions are several of a depth, each.

        Matrix units pad most multiples: of these, the largest part that they use.
        """
        per = max(dim.per(v) for dot in products for v in dot.op.operands)
        sizes = [n for n in range(1, dim.size) if not dim.size % n]
        sizes = [n for n in sizes if LEAST_SIDE <= n * per <= MERGED_DEPTH]
        used = {n: n * per / whole(n * per, LEAST_SIDE) for n in sizes}
        best = max(used.values(), default=0.0)
        return sorted((n for n in sizes if used[n] == best), reverse=True)

    # --- resources and time ---

    def _operand_bytes(self, sizes: Sizes) -> int:
        """Shared memory for one stage of the largest matmul's operands."""
        return max(
            sum(
                self.tiles.elements(self.blocks.shape(side.value, sizes))
                * side.value.tile.dtype.bytes
                for side in dot.sides
            )
            for dot in self.blocks.dots
        )

    def _stages(self, sizes: Sizes) -> int:
        available = int(SHARED_SHARE * self.chip.shared.bytes)
        return available // max(self._operand_bytes(sizes), 1)

    def _rows_deep(self, sizes: Sizes) -> float:
        """How many rows of shared memory a stage of a merged depth has, or one."""
        deep = [
            sizes.get(dim, dim.size) * dim.per(dot.lhs.value)
            for dim in self._deep
            if dim.is_merged
            for dot in map(Dot.of, dim.products)
        ]
        widest = self._widest(self.blocks.dots)
        return max(min(deep, default=0) * widest / ROW_BYTES, 1)

    def _register_bytes(self, sizes: Sizes) -> int:
        """Registers for results of matmuls, and for operands that are kept there."""
        rows = self._rows(sizes)
        return max(
            sum(
                self.tiles.in_registers(self.blocks.shape(v, sizes), rows) * width
                for v, width in held
            )
            for held in self.in_registers
        )

    def _fits_registers(self, sizes: Sizes) -> bool:
        most, of_thread = self.most_in_registers, self.tiles.of_thread
        if of_thread is not None:
            threads = WARPGROUP * warpgroups(self._rows(sizes))
            most = min(most, 4 * of_thread * threads)
        return self._register_bytes(sizes) <= most

    def _rows(self, sizes: Sizes) -> int:
        """Rows that warpgroups share: of what is computed before it is multiplied."""
        made = self._made
        computed = [
            next((side for side in dot.sides if not is_loaded(side.value, made)), None)
            for dot in self.blocks.dots
        ]
        sides = [side for side in computed if side is not None]
        return min(
            prod(self.blocks.shape(side.value, sizes)[d] for d in side.free)
            for side in sides or [dot.lhs for dot in self.blocks.dots]
        )

    def _is_too_wide(self, sizes: Sizes) -> bool:
        most = self.tiles.most_columns
        for dot in self.blocks.dots:
            shapes = (self.blocks.shape(side.value, sizes) for side in dot.sides)
            rows, columns = (
                prod(shape[d] for d in side.free)
                for shape, side in zip(shapes, dot.sides, strict=True)
            )
            if most is not None and columns > most:
                return True
            if self.tiles.is_too_large(rows, columns):
                return True
        return False

    def seconds(self, sizes: Sizes) -> float | None:
        """Estimated time; None: it does not fit."""
        stages = self._stages(sizes)
        if stages < 1:
            return None
        if not self._fits_registers(sizes) or self._is_too_wide(sizes):
            return None
        is_exact = any(map(_is_exact, self.blocks.dots))
        if is_exact and self._register_bytes(sizes) > EXACT_BYTES:
            return None
        waves = ceil(self.blocks.programs(sizes) / self.chip.cores)
        runs = self.blocks.runs
        work = sum(runs[d.op] * self._work(d, sizes) for d in self.blocks.dots)
        steps = self.blocks.steps
        wanted = self.tiles.stages
        if self._is_one_product:
            wanted = self.tiles.stages_alone
        missing = max(wanted - stages * self._rows_deep(sizes), 0)
        work *= waves * steps * self.chip.cores * (1 + 0.3 * missing)
        return self.machine.multiplying(2 * work, self._types)

    @cached_property
    def _types(self) -> set[str]:
        return {
            side.value.tile.dtype.name for d in self.blocks.dots for side in d.sides
        }

    def _work(self, dot: Dot, sizes: Sizes) -> float:
        """Multiply-adds of one program's dot, with the author's depth.

        A dot with a side that is another's contracted dimension is recomputed in each
        iteration of that one's loop.
        """
        depth, rounds = dot.depth, 1.0
        sides = []
        for side in dot.sides:
            shape = self.blocks.shape(side.value, sizes)
            free = [shape[d] for d in side.free]
            number = self.tiles.elements(free)
            if side is dot.lhs:
                number = whole(number, self.tiles.rows)
            sides.append(max(number, LEAST_SIDE))
            for d in side.free:
                dim = self.blocks.dims.get((side.value, d))
                if dim is not None and dim.products:
                    rounds *= dim.size / shape[d]
        shape = self.blocks.shape(dot.lhs.value, sizes)
        batch = prod(shape[d] for d in dot.lhs.batch)
        m, n = sides
        slow = 1.5 if m < SHORT_TILE else 1.0
        if m == SHORT_TILE and self._stages(sizes) < 2 * self.tiles.stages:
            slow = self.tiles.lone  # there is no room for a second program
        at_once = prod(shape[d] for d in dot.lhs.contract)
        slow *= TOO_DEEP if _is_exact(dot) and at_once > EXACT_DEPTH else 1.0
        work = rounds * batch * m * n * depth
        return work * (1 + EDGE_ROWS / m + EDGE_COLUMNS / n) * slow

    def _smallest(self) -> Kernel:
        """The smallest blocks, where none are known to fit.

        Raises:
            ChipMemoryError: a matmul is certain to need more memory than there is.
        """
        blocks, available = self.blocks, self.chip.shared.bytes
        smallest = dict[LoopDim, int]()
        for dim in filter(self._is_side, blocks.free):
            parts = blocks.parts(dim, self.tiles.least_side)
            if parts:
                smallest[dim] = parts[-1]
        smallest |= {d: n[-1] for d, n in self._deep.items() if n[-1] != d.size}
        for dot in blocks.dots:
            value = dot.rhs.value
            shape = blocks.shape(value, smallest)
            needed = prod(physical(shape)) * value.tile.dtype.bytes
            # What is multiplied in parts still has to fit in registers.
            most = 4 * self.chip.registers if self.tiles.reloads else available
            if needed > max(most, available):
                raise ChipMemoryError(
                    f"a block needs more shared memory than {self.chip.name} has",
                    [
                        ("kernel", blocks.kernel.name),
                        ("operand", value.type),
                        ("needed", f"{needed} bytes"),
                        ("available", f"{available} bytes"),
                        *_reasons(blocks, value),
                    ],
                    dot.op.loc or blocks.kernel.loc,
                    "use smaller blocks along the dimensions that are kept whole",
                )
        made, taken = blocks.kernel, dict[LoopDim, int]()
        for dim, size in smallest.items():
            try:
                made = blocks.rewritten({**taken, dim: size})
                taken[dim] = size
            except CannotReblock:
                continue  # a dimension can be split, but not after another
        return made


def _at_once(block: Block) -> list[list[Op]]:
    """Matmuls whose results are in registers at the same time, at each such time.

    Those of two loops, or two branches, one after the other: what the second takes from
    the first is carried on in the same registers.
    """
    own = [op for op in block.ops if op.name == "dot"]
    inner = [
        dots for op in block.ops for region in op.regions for dots in _at_once(region)
    ]
    return [[*own, *dots] for dots in inner if dots] or [own]


def _is_exact(dot: Dot) -> bool:
    types = {side.value.tile.dtype.name for side in dot.sides}
    return types == {"f32"} and _is_wide(dot)


def _is_in_asked_pieces(body: Block) -> bool:
    """Whether an f32 operand becomes several that tensor cores multiply, where a test
    of elements of an operand says so."""
    made = producers_of(body)
    return any(
        op.name == "cond"
        and asks_elements(op.operands[0], made)
        and any(
            _is_in_pieces(Dot.of(o)) for o in walk(op.regions[-1]) if o.name == "dot"
        )
        for op in body.ops
    )


def _is_in_pieces(dot: Dot) -> bool:
    return {side.value.tile.dtype.name for side in dot.sides} == {"f32", "bf16"}


def _is_wide(dot: Dot) -> bool:
    """Whether threads hold f32 operands in registers: exact ones, or in pieces."""
    types = {side.value.tile.dtype.name for side in dot.sides}
    precision = dot.op.attrs["precision"]
    asked = precision.lower() if isinstance(precision, str) else precision
    return "f32" in types and asked in EXACT


def _reasons(blocks: Blocks, value: Value) -> Iterator[tuple[str, str]]:
    for d, n in enumerate(value.type.shape):
        dim = blocks.dims.get((value, d))
        reason = None if dim is None else blocks.found.why_not_free(dim)
        if dim is not None and dim.products and reason is not None:
            reason = why_not_in_rounds(blocks.found, dim)
        if reason is not None:
            yield "kept whole", f"dimension {d} ({n} elements): {reason}"


def fewer_rows(kernel: Kernel) -> Kernel:
    """Split code with more rows than registers: by rows, or into loops over them.

    For derived kernels, which may sum over rows: after that no pass can split them any
    more.
    """
    blocks = blocks_of(kernel)
    if blocks is None or largest(blocks, {}) <= 2 * TILE_ELEMENTS:
        return kernel
    if blocks.dots:
        return _rows_in_loops(blocks, SUMMED_ELEMENTS) or kernel
    rows = [d for d in blocks.free if not is_last(blocks, d)]
    sizes = cut(blocks, ((rows, 1),))
    try:
        return blocks.rewritten(sizes) if sizes else kernel
    except CannotReblock:
        return kernel  # one dimension can be split, but not after another
