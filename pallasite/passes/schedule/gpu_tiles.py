"""gpu_tiles: tiles of code without matmuls that fit a GPU's registers.

Blocks are divided by rows first, then along rows; those of a few elements grow. What is
reduced may be divided into loops. For `gpu_blocks.py`.
"""

from collections.abc import Callable, Iterable
from math import inf, prod

from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.rewrite import users_of
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.live_tiles import LiveTiles
from pallasite.passes.analysis.loop_dims import LoopDim
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.choose_blocks import (
    LEAST_ROW,
    Blocks,
    Sizes,
    blocks_of,
    is_last,
    with_uses_apart,
)
from pallasite.passes.schedule.loop_over_rows import loop_over_rows
from pallasite.target import Gpu, physical

TILE_ELEMENTS = 8192  # of the largest tile
MOST_PARTS = 1024  # of what is reduced, in a loop
TINY_TILE, SMALL_TILE = 512, 2048  # fewer elements than this grow to that
# Contiguous elements of a tile that would not fit otherwise.
LEAST_LINE = 8
# Of bytes that programs load and store, by which rows in parts are better than whole
# ones; and how many more may be moved for longer parts.
GAIN_OF_PARTS, LONGER_PARTS = 1.25, 1.25
PAIRED, PAIRS = 8, 4096  # times what is loaded; elements of a tile then
MOST_HELD = 0.3  # of an SM's registers, by the tiles that a program holds at once
WARP, SCHEDULERS = 32, 4  # of an SM, each of which runs warps of its own
MOST_CORES = 0.9  # so many are about all
MOVES = frozenset({"slice", "concatenate", "dynamic_slice", "pad", "rev", "gather"})


def without_products(blocks: Blocks, chip: Gpu, tuned: bool) -> Kernel:
    """Tiles no larger than fit a program's registers, and not tiny."""
    kernel, own = blocks.kernel, largest(blocks, {})
    if tuned:
        return kernel
    if own > 2 * TILE_ELEMENTS:
        blocks = with_uses_apart(blocks)
    rows = [d for d in blocks.free if not is_last(blocks, d)]
    lines = [d for d in blocks.free if is_last(blocks, d)]
    sizes: Sizes = {}
    if own > 2 * TILE_ELEMENTS:
        sizes = _cut_for_traffic(blocks, rows, lines)
        least = LEAST_LINE
        while largest(blocks, sizes) > _most_elements(blocks, chip) and least:
            sizes = cut(blocks, ((rows, 1), (lines, least)))
            least //= 2
    elif 0 < own < TINY_TILE:
        for dim in (*lines, *rows):
            for n in blocks.multiples(dim, SMALL_TILE):
                new = {**sizes, dim: n}
                enough = blocks.programs(new) >= chip.programs_per_core * chip.cores
                if enough and largest(blocks, new) <= SMALL_TILE:
                    sizes = new
    sizes = _held_at_once(blocks, rows, _of_pairs(blocks, sizes), chip)
    if _goes_step_by_step(blocks):
        sizes = _narrow(blocks, lines, SCHEDULERS * chip.cores, sizes)
    return _summed_in_loops(blocks.rewritten(sizes) if sizes else kernel, chip)


def _of_pairs(blocks: Blocks, sizes: Sizes) -> Sizes:
    """Fewer elements of one side, where tiles pair each of them with all of another.
    Such a tile is many times what is loaded, and computed op by op: all of it is in
    registers."""
    loads = [op.result for op in walk(blocks.body) if op.name == "load"]
    loaded = max((prod(blocks.shape(v, sizes)) for v in loads), default=0)
    if largest(blocks, sizes) < PAIRED * max(loaded, 1):
        return sizes
    wide = max(blocks.tiles, key=lambda v: prod(blocks.shape(v, sizes)))
    last = wide.tile.rank - 1  # its elements are for the threads of a warp
    dims = [d for d in blocks.free if d.members.get(wide, last) != last]
    is_large = lambda sizes: largest(blocks, sizes) > PAIRS
    return _smaller(blocks, dims, WARP, sizes, is_large)


def _held_at_once(
    blocks: Blocks, rows: list[LoopDim], sizes: Sizes, chip: Gpu
) -> Sizes:
    """Fewer rows, where many tiles are live at the same time: their registers are those
    of one program, and some are needed for what computes them."""
    words, own = LiveTiles(blocks.kernel).peak_words(), largest(blocks, {})

    def is_much(sizes: Sizes) -> bool:
        held = words * largest(blocks, sizes) / max(own, 1)
        return held > MOST_HELD * chip.registers

    return _smaller(blocks, rows, 1, sizes, is_much)


def _smaller(
    blocks: Blocks,
    dims: Iterable[LoopDim],
    least: int,
    sizes: Sizes,
    goes_on: Callable[[Sizes], bool],
) -> Sizes:
    """Smaller sizes of dimensions, one after another, as long as `goes_on` says so."""
    for dim in dims:
        for n in blocks.parts(dim, least):
            if n < sizes.get(dim, dim.size) and goes_on(sizes):
                sizes = {**sizes, dim: n}
    return sizes


def _goes_step_by_step(blocks: Blocks) -> bool:
    """Whether a loop, or a program's steps, carry tiles or keep them in scratch: they
    wait for memory, and for themselves."""
    scratch = {o.result for o in walk(blocks.kernel.body) if o.name == "alloc"}
    loops = [Loop.of(op) for op in walk(blocks.body) if op.name == "for"]
    code = [blocks.body] if blocks.steps > 1 else [loop.body for loop in loops]
    return any(v.tile.rank for loop in loops for v in loop.carried) or any(
        op.name == "store" and op.operands[0] in scratch
        for each in code
        for op in walk(each)
    )


def _narrow(
    blocks: Blocks, lines: list[LoopDim], enough: float, sizes: Sizes | None = None
) -> Sizes:
    """So many programs, of a warp or more each; `sizes`: the most elements of them."""
    is_few = lambda sizes: blocks.programs(sizes) < enough
    return _smaller(blocks, lines, WARP, sizes or {}, is_few)


def narrow_steps(kernel: Kernel, chip: Gpu) -> Kernel:
    """Code that goes step by step in about as many programs as there are SMs.

    For derived kernels, which may sum over what programs are divided by.
    """
    blocks = blocks_of(kernel)
    if blocks is None or blocks.dots or not _goes_step_by_step(blocks):
        return kernel
    lines = [d for d in blocks.free if is_last(blocks, d)]
    sizes = _narrow(blocks, lines, MOST_CORES * chip.cores)
    try:
        return blocks.rewritten(sizes) if sizes else kernel
    except CannotReblock:
        return kernel  # one dimension can be split, but not after another


def _summed_in_loops(kernel: Kernel, chip: Gpu) -> Kernel:
    """Loops over parts of what is reduced or scanned, where its tiles exceed all
    registers."""
    blocks = blocks_of(kernel)
    if blocks is None or largest(blocks, {}) < chip.registers:
        return kernel
    most = min(2 * TILE_ELEMENTS, chip.registers // 2)
    reduced = (dim for dim in blocks.found.dims if dim.reduces or dim.scans)
    for dim in sorted(reduced, key=lambda d: is_last(blocks, d)):
        parts = range(2, min(dim.size, MOST_PARTS) + 1)
        sizes = [dim.size // n for n in parts if dim.size % n == 0] or [dim.size]
        fits = (n for n in sizes if largest(blocks, {dim: n}) <= most)
        size = next(fits, sizes[-1])
        try:
            return _summed_in_loops(loop_over_rows(kernel, dim.windows[0], size), chip)
        except CannotReblock:
            continue
    return kernel


def _cut_for_traffic(
    blocks: Blocks, rows: list[LoopDim], lines: list[LoopDim]
) -> Sizes:
    """Rows first, so that contiguous elements stay together, unless programs then load
    more: what is the same for several rows each of them loads for itself."""
    best = cut(blocks, ((rows, 1), (lines, LEAST_ROW)))
    most = max(TILE_ELEMENTS, largest(blocks, best))
    found = list[tuple[float, Sizes]]()
    least = LEAST_ROW
    while any(dim.size > least for dim in lines):
        sizes = cut(blocks, ((lines, least), (rows, 1)))
        if largest(blocks, sizes) <= most:
            found.append((moved(blocks, sizes), sizes))
        least *= 2
    fewest = min((moved for moved, _ in found), default=inf)
    if GAIN_OF_PARTS * fewest < moved(blocks, best):
        best = [sizes for moved, sizes in found if moved <= LONGER_PARTS * fewest][-1]
    return best


def moved(blocks: Blocks, sizes: Sizes) -> float:
    """Bytes that all programs load and store."""
    accesses = [op for op in walk(blocks.body) if op.name in ("load", "store")]
    tiles = [op.result if op.results else op.operands[1] for op in accesses]
    bytes_of = lambda v: prod(blocks.shape(v, sizes)) * v.tile.dtype.bytes
    return blocks.programs(sizes) * sum(map(bytes_of, tiles))


def _most_elements(blocks: Blocks, chip: Gpu) -> int:
    """Elements of a tile that an SM can hold, in shared memory if they are moved."""
    moves = any(op.name in MOVES for op in walk(blocks.body))
    return min(chip.registers, chip.shared.bytes // 4) if moves else chip.registers


def largest_tile(kernel: Kernel) -> float:
    """Elements of the largest tile; infinite if the blocks of a kernel are unknown."""
    blocks = blocks_of(kernel)
    return inf if blocks is None else largest(blocks, {})


def is_too_large(kernel: Kernel, chip: Gpu) -> bool:
    """Whether a tile that is not only multiplied takes most of an SM's registers."""
    users = users_of(kernel.body)
    tiles = (v for op in walk(kernel.body) for v in op.results if not v.is_ref)
    held = (v for v in tiles if any(user.name != "dot" for user in users[v]))
    return any(2 * prod(physical(v.tile.shape)) > chip.registers for v in held)


def largest(blocks: Blocks, sizes: Sizes) -> int:
    """Elements of the largest tile."""
    shapes = (blocks.shape(v, sizes) for v in blocks.tiles)
    return max((prod(physical(shape)) for shape in shapes), default=0)


def cut(blocks: Blocks, dims: Iterable[tuple[list[LoopDim], int]]) -> Sizes:
    """Sizes of dimensions in the order to split them, each with its minimum."""
    sizes: dict[LoopDim, int] = {}
    for group, least in dims:
        for dim in group:
            for n in blocks.parts(dim, -(-least // dim.most_per)):
                if largest(blocks, sizes) > TILE_ELEMENTS:
                    sizes[dim] = n
    return sizes
