"""tpu_blocks: chooses blocks that fill a TPU's on-chip memory (`choose_blocks.py`).

A TPU runs one program after another, at a cost for each: blocks grow along dimensions
in which programs are independent, steps along k are merged, and other consecutive steps
are gathered into one program, as long as the estimate falls and everything fits.
A loop of matmuls is also tried as steps of the grid (`loop_steps.py`), a program of one
row as a block of one row (`row_tiles.py`), and rows that steps go through part by part
as whole rows (`whole_rows.py`). Kernels that gain little stay as they
are, and blocks that do not fit are split.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from math import inf, prod

from pallasite.errors import ChipMemoryError
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import producers_of
from pallasite.ir.roles import Dot, Loop, Pipeline
from pallasite.ir.types import RefType, TileType
from pallasite.passes.analysis.cost import cost, most_trips
from pallasite.passes.analysis.grid import WindowMoves
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.known_comparisons import known_comparisons
from pallasite.passes.normal.loop_steps import loop_steps
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.choose_blocks import Blocks, blocks_of
from pallasite.passes.schedule.cut_steps import cut_steps
from pallasite.passes.schedule.gather_steps import (
    followed_dim,
    gather_programs,
    gather_steps,
)
from pallasite.passes.schedule.merge_k_steps import merge_k_steps
from pallasite.passes.schedule.reblock import axis_of, cut, grow
from pallasite.passes.schedule.row_tiles import row_tiles
from pallasite.passes.schedule.unroll_rounds import MOST_ROUNDS, unroll_rounds
from pallasite.passes.schedule.whole_rows import whole_rows
from pallasite.passes.schedule.widen_steps import widen_steps
from pallasite.target import Machine, Tpu

GAIN = 1.05  # below this, estimates are not good enough to change an author's blocks
SERIAL = 0.5  # of the shorter of matmuls and vector code that a lone step cannot hide
POSITIONS = 0.25  # of arithmetic on positions, most of which rows and columns share
JOINED = (2, 4, 8)  # programs of which some take a branch, as one
MOST_STEPS = 8  # that are gathered into one
WIDEST = 512  # columns of a step of running sums; more do better as steps of their own
MOST_CODE = 32_000  # operations on vector registers in a body; compilers unroll tiles
MOST_SETTLED = 40_000  # of those, where no version for other programs is made of them
MOST_UNROLLED = 24_000  # of those, in the body of a loop
# Of operations without a unit, as counted in libtpu's code.
FORMULAS = {
    **dict.fromkeys(("sin", "cos", "tan"), 100),
    **dict.fromkeys(("asin", "acos", "atan", "atan2", "sinh", "cosh", "pow"), 32),
    **dict.fromkeys(("asinh", "acosh", "atanh", "cbrt", "expm1"), 32),
    "log1p": 14,
}
COPIES = 3  # of the largest tile that Mosaic may keep besides what the author names
BUFFERS = 2  # of a window
VMEM_SHARE = 0.9  # of on-chip memory, for what is counted here


def for_tpu(kernel: Kernel, chip: Tpu, vmem_bytes: int | None = None) -> Kernel:
    """Larger blocks, where programs are many and small.

    Args:
        kernel: what to rewrite.
        chip: the TPU.
        vmem_bytes: the on-chip memory that a kernel may use; None: XLA's limit.
    """
    allowed = chip.scoped_vmem if vmem_bytes is None else vmem_bytes
    limit = VMEM_SHARE * allowed
    start = _Estimate.of(kernel, chip)
    if start is None:
        return kernel
    fits = start.named_vmem <= allowed
    if fits and start.overhead < (1 - 1 / GAIN) * start.seconds:
        return kernel
    if not fits:
        start = _cut_to_fit(start, limit)
    best = _largest(start, limit)
    rows = whole_rows(start.kernel, None, largest=inf)
    for apart in (loop_steps(start.kernel), row_tiles(start.kernel), rows):
        other = None if apart is start.kernel else _Estimate.of(apart, chip)
        if other is not None and other.fits(limit):
            new = _largest(other, limit)
            best = new if best.seconds > GAIN * new.seconds else best
    gains = not fits or start.seconds > GAIN * best.seconds
    return best.blocks.kernel if gains else kernel


def _largest(start: "_Estimate", limit: float) -> "_Estimate":
    """The best that larger blocks and merged steps and programs make of a kernel."""
    wide = _widened(start, limit)
    best = _side_by_side(_grown(wide, limit), limit)
    for joined in _with_branches(wide):
        # Merged programs skip only what all of them skip: more programs skip less.
        if joined.fits(limit):
            new = _side_by_side(_grown(joined, limit), limit)
            best = new if best.seconds > GAIN * new.seconds else best
    return best


def unroll_for_tpu(kernel: Kernel, chip: Tpu) -> Kernel:
    """Unroll loops with matmuls as far as the code size allows."""
    size = partial(code_size, chip=chip)
    return unroll_rounds(kernel, size, MOST_UNROLLED, MOST_SETTLED)


def why_small(kernel: Kernel) -> str:
    """Why steps along the longest axis stay as they are; empty if they can merge."""
    blocks = blocks_of(kernel)
    grid = [n or 0 for n in blocks.found.pipeline.grid] if blocks is not None else []
    steps = max(grid, default=0)
    if blocks is None or steps < 2:
        return ""
    axis = grid.index(steps)
    factor = next(n for n in range(2, steps + 1) if steps % n == 0)
    try:
        if blocks.found.info.axes[axis].parallel:
            gather_programs(kernel, axis, factor)
        elif axis == len(grid) - 1:
            gather_steps(kernel, factor)
    except CannotReblock as error:
        return str(error)
    return ""


def _widened(start: "_Estimate", limit: float) -> "_Estimate":
    """Widen the steps of a running softmax until they fill registers.

    Plain accumulations of matmuls are merged as long as that pays (`_merged`).
    """
    if _merged(start) is not None:
        return start
    try:
        plain = canonicalize(known_comparisons(start.kernel))
        kernel = canonicalize(widen_steps(plain, WIDEST))
    except CannotReblock:
        return start
    wide = _Estimate.of(kernel, start.chip)
    return wide if wide is not None and wide.fits(limit) else start


def _grown(best: "_Estimate", limit: float) -> "_Estimate":
    """Larger blocks and gathered steps, as long as they fit and the estimate falls."""
    while True:
        larger = [
            *(_Estimate.of(k, best.chip, best.gathered) for k in _larger(best)),
            *(_Estimate.of(best.kernel, best.chip, n) for n in _more_steps(best)),
        ]
        fits = [e for e in larger if e is not None and e.fits(limit)]
        new = min(fits, key=lambda e: e.seconds, default=best)
        if new.seconds >= best.seconds:
            return best
        best = new


def _more_steps(best: "_Estimate") -> Iterator[int]:
    """How many steps of the last axis can be gathered, if they are consecutive."""
    found = best.source.found
    steps = found.pipeline.grid[-1] if found.pipeline.grid else None
    if steps is None or found.info.axes[-1].parallel or _merged(best) is not None:
        return
    if not _parts_are_tiles(found, -1, best.chip):
        return
    for number in range(best.gathered + 1, min(steps, MOST_STEPS) + 1):
        if steps % number == 0 and best.has_room_for(number / best.gathered):
            yield number


def _side_by_side(best: "_Estimate", limit: float) -> "_Estimate":
    """Merge several programs along a parallel axis, where blocks cannot grow."""
    pipeline, chip = best.source.found.pipeline, best.chip
    found = [best]
    for axis in best.source.found.info.parallel:
        steps = pipeline.grid[axis] or 0
        if pipeline.semantics[axis] in ("core_parallel", "subcore_parallel"):
            continue  # each core needs its share
        rows = _rows_of_tiles(best.source.found, axis, chip)
        if not rows and not _parts_are_tiles(best.source.found, axis, chip):
            continue
        own = _has_own_branches(pipeline, axis)
        most = min(steps // chip.cores, MOST_STEPS * max(rows, 1))
        for number in range(max(rows, 2), most + 1, max(rows, 1)):
            # Where all programs are one, it is known which branches each of them takes.
            settled = own and number == steps
            if steps % number or not (settled or best.has_room_for(number)):
                continue
            try:
                kernel = gather_programs(best.kernel, axis, number)
            except CannotReblock:
                continue
            new = _Estimate.of(kernel, chip, best.gathered, number, settled)
            if new is not None and new.fits(limit):
                found.append(new)
    return min(found, key=lambda e: e.seconds)


def _has_own_branches(pipeline: Pipeline, axis: int) -> bool:
    """Whether all matmuls are in branches that depend on the index along an axis.

    This is the case in causal attention, where the index determines which blocks of
    keys a program needs.
    """
    decided = {pipeline.ids[axis]}
    for op in pipeline.body.ops:
        if decided.intersection(op.operands):
            decided.update(op.results)
    free = [op for op in pipeline.body.ops if not decided.intersection(op.operands)]
    return all(op.name != "dot" for op in walk(Block((), tuple(free))))


def _rows_of_tiles(found: LoopDims, axis: int, chip: Tpu) -> int:
    """How many programs that move a row make whole tiles; 0: they do something else.

    What is computed of rows is computed of several at once (`row_tiles.py`).
    """
    made = (op for op in walk(found.pipeline.body) if op.name != "load")
    if any(not v.is_ref and v.tile.rank for op in made for v in op.results):
        return 0
    most = 0
    for shown in found.pipeline.shown:
        d = followed_dim(shown, axis)
        if d is None:
            continue
        dims, array = shown.window.dims, shown.array.ref
        inner = [dims[i].size == array.shape[i] for i in range(d + 1, array.rank)]
        if dims[d].size > 1 or inner != [True]:
            return 0
        most = max(most, _granule_at(array, d, chip))
    return most


def _parts_are_tiles(found: LoopDims, axis: int, chip: Tpu) -> bool:
    """Whether blocks that move along an axis can become one window.

    Each must begin and end at a vector register, and be adjacent to the next in memory:
    libtpu has no estimate of copies that gather pieces from all over an array.
    """
    for shown in found.pipeline.shown:
        dims, array = shown.window.dims, shown.array.ref
        for d in range(array.rank):
            if d != followed_dim(shown, axis):
                continue
            inner = range(d + 1, array.rank)
            whole = all(dims[i].size == array.shape[i] for i in inner)
            if d < array.rank - 2 and not whole:
                return False
            if dims[d].size % _granule_at(array, d, chip):
                return False
    return True


def _merged(best: "_Estimate") -> Kernel | None:
    """The kernel with steps along k merged, twice as deep."""
    deep = [dim.size for dim in best.source.found.dims if dim.products]
    if not deep:
        return None
    merged = merge_k_steps(best.kernel, 2 * max(deep), best.chip.vmem.bytes)
    return None if merged is best.kernel else merged


def _cut_to_fit(best: "_Estimate", limit: float) -> "_Estimate":
    """Smaller blocks, for kernels whose windows and scratch alone do not fit.

    Raises:
        ChipMemoryError: they do not fit, and cannot be split.
    """
    while best.vmem > limit:
        smaller = [_Estimate.of(k, best.chip) for k in _smaller(best.blocks, best.chip)]
        less = [e for e in smaller if e is not None and e.vmem < best.vmem]
        if not less:
            break
        best = min(less, key=lambda e: (e.vmem > limit, e.seconds))
    kernel, available = best.blocks.kernel, best.chip.vmem.bytes
    if best.named_vmem > available:
        raise ChipMemoryError(
            "the blocks of a program do not fit in the VMEM of a core "
            f"of {best.chip.name}",
            [
                ("kernel", kernel.name),
                ("needed", f"{best.named_vmem} bytes"),
                ("available", f"{available} bytes"),
                *_reasons(best.blocks.found),
            ],
            kernel.loc,
            "use smaller blocks along the dimensions that are kept whole",
        )
    return best


def _reasons(found: LoopDims) -> Iterator[tuple[str, str]]:
    for dim in found.dims:
        reason = found.why_not_free(dim)
        if reason is not None:
            number, d = dim.windows[0]
            name = found.pipeline.arrays[number].name or f"window {number}"
            yield f"{name}, dimension {d}", reason


def _smaller(blocks: Blocks, chip: Tpu) -> Iterator[Kernel]:
    """The kernel with blocks halved, along one dimension each."""
    for dim in blocks.found.dims:
        half = dim.size // 2
        if dim.size % 2 or half % _granule(blocks, dim, chip):
            continue
        try:
            if dim.products:
                yield cut_steps(blocks.kernel, half, dim.windows[0])
            else:
                yield cut(blocks.kernel, dim.windows[0], 2)
        except CannotReblock:
            continue


def _granule(blocks: Blocks, dim: LoopDim, chip: Tpu) -> int:
    """What must divide a block's size along a dimension: whole vector registers."""
    granule = 1
    for number, d in dim.windows:
        ref = blocks.found.pipeline.arrays[number].ref
        granule = max(granule, _granule_at(ref, d, chip))
    return granule


def _granule_at(ref: RefType, dim: int, chip: Tpu) -> int:
    if dim == ref.rank - 1:
        return chip.lanes
    if dim == ref.rank - 2:
        return chip.sublanes_of(max(ref.dtype.bits, 8))
    return 1


def _larger(best: "_Estimate") -> Iterator[Kernel]:
    """The kernel with blocks doubled, along one dimension each."""
    blocks, chip = best.source, best.chip
    for dim in blocks.free:
        if _may_grow(blocks, dim, 2, chip):
            try:
                yield grow(blocks.kernel, dim.windows[0], 2)
            except CannotReblock:
                continue
    merged = _merged(best)
    if merged is not None:
        yield merged


def _may_grow(blocks: Blocks, dim: LoopDim, factor: int, chip: Tpu) -> bool:
    """Whether there are enough programs along a dimension, also for all cores."""
    found = blocks.found
    axis = axis_of(found, dim)
    steps = None if axis is None else found.pipeline.grid[axis]
    if axis is None or steps is None or steps < factor:
        return False
    if found.pipeline.semantics[axis] in ("core_parallel", "subcore_parallel"):
        return False  # each core needs its share
    return blocks.programs({dim: factor * dim.size}) >= chip.cores


def _with_branches(start: "_Estimate") -> Iterator["_Estimate"]:
    """Larger blocks of which only some rows take a branch, as in causal attention.

    They grow in one go: growing twice would select twice what a branch stores.
    """
    blocks, chip = start.source, start.chip
    for dim in blocks.free:
        for factor in JOINED:
            if not _may_grow(blocks, dim, factor, chip):
                break
            place = dim.windows[0]
            try:
                grow(blocks.kernel, place, factor)
                break  # without branches that differ
            except CannotReblock:
                pass
            try:
                kernel = grow(blocks.kernel, place, factor, selects=True)
            except CannotReblock:
                break
            new = _Estimate.of(canonicalize(kernel), chip)
            if new is not None:
                yield new


def code_size(block: Block, chip: Tpu) -> float:
    """Operations on vector registers in a block; compilers unroll tiles."""
    total = 0.0
    for op in walk(block):
        if op.name == "dot":
            total += op.result.tile.size * Dot.of(op).depth / chip.lanes
        if op.name != "load":
            size = sum(v.tile.size for v in op.results if not v.is_ref)
            total += FORMULAS.get(op.name, 1) * size
    return total / (chip.lanes * chip.sublanes)


def _repeated_dots(
    block: Block, trips: Mapping[Op, int], times: int = 1
) -> Iterator[tuple[Dot, int]]:
    """Matmuls in a block and how often each runs; unknown counts are one."""
    for op in block.ops:
        if op.name == "dot":
            yield Dot.of(op), times
        inner = times * (trips.get(op, 1) if op.name == "for" else 1)
        for region in op.regions:
            yield from _repeated_dots(region, trips, inner)


class _Estimate:
    """The estimated cost of a kernel on a TPU.

    Args:
        source: the blocks of the kernel before steps were gathered.
        blocks: those after that.
        gathered: how many steps are in one.
        programs: how many are merged into one.
        most_code: the largest size of a body.
    """

    def __init__(
        self,
        source: Blocks,
        blocks: Blocks,
        chip: Tpu,
        gathered: int = 1,
        programs: int = 1,
        most_code: int = MOST_CODE,
    ):
        self.source, self.blocks, self.chip = source, blocks, chip
        self.machine = Machine.usual(chip)
        self.most_code = most_code
        self.kernel, self.gathered, self.programs = source.kernel, gathered, programs
        grid = blocks.found.pipeline.grid
        self.grid = [n for n in grid if n is not None]
        products, rest = self._computed()
        # Vector code of one step is hidden behind the matmuls of the next one.
        serial = SERIAL * min(products, rest) / (gathered * self._together)
        share = self._share()
        starts = prod(self.grid) * (1 + self._rounds())
        dots = prod(self.grid) * sum(times for _, times in self._dots)
        started = self.machine.starting(starts, dots)
        self.overhead = share * (started + serial)
        busy = max(self._copied(), max(products, rest))
        self.seconds = self.overhead + share * busy + self._exposed()

    @staticmethod
    def of(
        kernel: Kernel,
        chip: Tpu,
        gathered: int = 1,
        programs: int = 1,
        settled: bool = False,
    ) -> "_Estimate | None":
        """None if steps cannot be gathered this way, or the grid size is dynamic.

        `settled`: branches are decided by known grid indices, and merged programs take
        theirs one after another.
        """
        source = blocks = blocks_of(kernel)
        if source is None or None in source.found.pipeline.grid:
            return None
        if gathered > 1:
            try:
                blocks = blocks_of(gather_steps(source.kernel, gathered))
            except CannotReblock:
                return None
        if settled and blocks is not None:
            blocks = blocks_of(canonicalize(known_comparisons(blocks.kernel)))
            programs = 1
        most = MOST_SETTLED if settled else MOST_CODE
        return blocks and _Estimate(source, blocks, chip, gathered, programs, most)

    def _share(self) -> float:
        """The share of the steps that one core runs."""
        if self.chip.cores == 1:
            return 1.0
        shares = [1.0]
        for axis in self.blocks.found.info.parallel:
            steps = self.grid[axis]
            shares.append(-(-steps // self.chip.cores) / steps if steps else 1.0)
        return min(shares)

    def fits(self, limit: float) -> bool:
        return self.vmem <= limit and self.code <= self.most_code

    def has_room_for(self, times: float) -> bool:
        """Whether a body so many times as large may be within the limit."""
        return times * self.code <= self.most_code

    @cached_property
    def code(self) -> float:
        return code_size(self.blocks.body, self.chip)

    def _copied(self) -> float:
        """Seconds to copy blocks, each whenever its window moves."""
        found, total = self.blocks.found, 0
        pairs = zip(found.pipeline.shown, found.info.windows, strict=True)
        for shown, moves in pairs:
            axes = self._moved_along(moves)
            visits = prod(self.grid[: max(axes, default=-1) + 1])
            total += visits * self._bytes(shown.block.ref)
        return self.machine.copying(total)

    def _exposed(self) -> float:
        """Seconds to fetch the first blocks and to write back the last ones."""
        shown = self.blocks.found.pipeline.shown
        return self.machine.copying(sum(self._bytes(each.block.ref) for each in shown))

    def _moved_along(self, moves: WindowMoves) -> list[int]:
        return [a for a in moves.axes if self.grid[a] != 1]

    def _computed(self) -> tuple[float, float]:
        """Seconds of the matrix units, and of the vector unit."""
        steps, products = prod(self.grid), 0.0
        flops = 0
        for dot, times in self._dots:
            count = 2 * dot.op.result.tile.size * dot.depth * times
            flops += count
            types = (side.value.tile.dtype.name for side in dot.sides)
            products += self.machine.multiplying(count, types)
        total = cost(self.blocks.kernel, self._trips)
        shared = (1 - POSITIONS) * self._integers()
        rest = max(total.flops - steps * (flops + shared), 0)
        computing = self.machine.computing(rest, total.transcendentals)
        return steps * products, computing

    def _integers(self) -> int:
        """Integer elements that a program computes: mostly positions."""
        made = (op for op in walk(self.blocks.body) if table()[op.name].elementwise)
        tiles = (op.result.tile for op in made)
        return sum(t.size for t in tiles if t.rank and not t.dtype.is_float)

    @cached_property
    def _dots(self) -> list[tuple[Dot, int]]:
        """Matmuls, and how often a program runs each."""
        return list(_repeated_dots(self.blocks.body, self._trips))

    @cached_property
    def _trips(self) -> dict[Op, int]:
        return most_trips(self.blocks.kernel)

    def _rounds(self) -> float:
        """How many loops with matmuls a program runs that nothing overlaps."""
        return 0 if self._together == self._most else self._most / self._together

    @cached_property
    def _most(self) -> int:
        """How many iterations of loops with matmuls a program runs."""
        return max((times for _, times in self._dots), default=1)

    @cached_property
    def _together(self) -> int:
        """Of those, how many become one (`unroll_rounds.py`)."""
        made = producers_of(self.blocks.kernel.body)
        loops = (op for op in walk(self.blocks.body) if op.name == "for")
        if not all(Loop.of(op).rounds(made) for op in loops):
            return 1
        most = min(self._most, MOST_ROUNDS, MOST_UNROLLED // max(self.code, 1))
        return int(max(most, 1))

    @cached_property
    def named_vmem(self) -> int:
        """Bytes of on-chip memory for what the author names: windows and scratch."""
        found = self.blocks.found
        pairs = zip(found.pipeline.shown, found.info.windows, strict=True)
        windows = sum(
            (each.window.buffers or (BUFFERS if self._moved_along(moves) else 1))
            * self._bytes(each.block.ref)
            for each, moves in pairs
            if each.window.space in ("block", "vmem")
        )
        ops = walk(self.blocks.kernel.body)
        scratch = [op.result.ref for op in ops if op.name == "alloc"]
        return windows + sum(map(self._bytes, scratch))

    @cached_property
    def vmem(self) -> int:
        """Bytes of on-chip memory, including intermediate tiles."""
        largest = max((self._bytes(v.tile) for v in self._computed_tiles()), default=0)
        loops = (op for op in walk(self.blocks.body) if op.name == "for")
        carried = (sum(self._bytes(v.tile) for v in op.results) for op in loops)
        tiles = largest + max(carried, default=0)
        return self.named_vmem + COPIES * self.programs * tiles

    def _computed_tiles(self) -> Iterator[Value]:
        for op in walk(self.blocks.body):
            if op.name != "load":
                yield from (v for v in op.results if not v.is_ref)

    def _bytes(self, type_: RefType | TileType) -> int:
        return self.chip.tile_bytes(type_.shape, 8 * type_.dtype.bytes)
