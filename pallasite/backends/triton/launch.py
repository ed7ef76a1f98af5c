"""Warps, stages and program order, from a small cost model of the chip.

`schedule_launch` is a pass: it notes its choices on the grid (`triton.warps`,
`triton.stages`, `triton.group`) and on loops that stream memory without a matmul
(`triton.stages`); `emit.py` and the launch read them. The author's `CompilerParams` are
taken as they are. Loads have no notes: eviction policies, tried for norms on an H200,
cost 2 to 7 percent.

The model counts, for one program: peak live 32-bit words (registers), bytes of shared
memory by the number of stages (`shared_memory.py`), and bytes loaded at a time. These
determine registers per thread and programs per SM.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isqrt, prod
from typing import Any

from pallasite.backends.triton.shared_memory import (
    SharedMemory,
    picked_bytes,
    tile_bytes,
)
from pallasite.errors import ChipMemoryError
from pallasite.ir.nodes import Access, Block, Gather, Kernel, Op, Value, walk
from pallasite.ir.roles import Dot, Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.live_tiles import LiveTiles
from pallasite.passes.analysis.memory import Roots, read_refs, written_refs
from pallasite.target import Gpu
from pallasite.target.chip import physical, power_of_two

WARPS, STAGES, GROUP = "triton.warps", "triton.stages", "triton.group"
AGAIN = "triton.again"  # on a load that must not be merged with an earlier one

COMFORTABLE = 128  # registers per thread with which two matmuls still overlap
BUSY_WARPS = 16  # per SM, to hide the latency of arithmetic
VECTOR_BYTES = 16  # of a thread's widest load
GOOD_STAGES = 3  # copies for two iterations in flight during a third
WARPGROUP_ROWS = 64  # of a matmul that four warps compute together
HOPPER = "sm_90"  # the chips whose warpgroups hold a matmul's result in registers
WIDEST = 256  # columns of such a matmul
# Registers of its threads besides the result. ptxas compiles 256 columns for 154.
BESIDE_RESULT = 26
PADDED = 24  # of so many bytes of a row there is one more, for AMD's chips, at most
RESERVED = 1024  # bytes of shared memory for barriers and reductions


def schedule_launch(kernel: Kernel, params: Mapping[str, Any], chip: Gpu) -> Kernel:
    """Note the launch on the grid and its loops.

    Raises:
        ChipMemoryError: the operands of matmuls, or a transposed tile, do not fit
            into shared memory.
    """
    need = Need.of(kernel)
    warps = chosen_warps(need, params, chip)
    shared = SharedMemory(kernel, warps, chip)
    if shared.bytes(stages=1) > chip.shared.bytes:
        raise _too_large(shared, chip)
    stages = params.get("num_stages") or _stages(need, shared, chip)
    notes: dict[str, Any] = {WARPS: warps, STAGES: int(stages)}
    group = _group(kernel, need, shared, chip)
    if group > 1:
        notes[GROUP] = group
    asked = params.get("num_stages")
    sizes = Pipeline.of(find_pipeline(kernel)).sizes
    programs = prod(n for n in sizes if isinstance(n, int))
    streams = {
        op: int(asked or _stream_stages(size, programs, need, shared, chip))
        for op, size in need.streams.items()
    }
    loops = {op: n for op, n in streams.items() if n > 1}
    loops |= dict.fromkeys(need.in_order, 1)
    return _Notes(notes, loops).kernel(kernel)


@dataclass
class _Notes:
    """Writes attributes onto the grid and loops."""

    grid: Mapping[str, Any]
    loops: Mapping[Op, int]

    def kernel(self, kernel: Kernel) -> Kernel:
        return kernel.with_(body=self.block(kernel.body))

    def block(self, block: Block) -> Block:
        return replace(block, ops=tuple(map(self.op, block.ops)))

    def op(self, op: Op) -> Op:
        attrs = dict(op.attrs)
        if op.name == "pipeline":
            attrs |= self.grid
        elif op in self.loops:
            attrs[STAGES] = self.loops[op]
        return op.with_(attrs=attrs, regions=tuple(map(self.block, op.regions)))


# --- what a program takes ---


@dataclass
class Need:
    """What one program takes of an SM."""

    words: int  # peak live 32-bit words of tiles
    elements: int  # of the largest tile
    narrowest: int  # bytes of the narrowest element that memory accesses move
    loaded: int  # bytes of all loads outside loops, or of one iteration
    rows: int  # of the largest matmul; 0: there is none
    # Columns of matmuls whose results meet: there, warps share only the rows of each.
    columns: frozenset[int] = frozenset()
    in_order: frozenset[Op] = frozenset()  # loops whose iterations may not overlap
    streams: dict[Op, int] = field(default_factory=dict)  # loop -> bytes of its loads

    @staticmethod
    def of(kernel: Kernel) -> "Need":
        return _Count(kernel).need()

    def registers(self, warps: int, chip: Gpu) -> int:
        """Registers per thread."""
        return chip.overhead_registers + -(-self.words // (chip.wave * warps))

    def can_have(self, warps: int, chip: Gpu) -> bool:
        """Whether the widest matrix instruction fits a thread's registers.

        More warps have fewer registers each, and an instruction has no smaller part
        that could be spilled.
        """
        most = chip.registers // (32 * warps)
        if chip.arch != HOPPER or most >= chip.registers_per_thread:
            return True
        at_once = (min(columns, WIDEST) for columns in self.columns)
        return all(columns // 2 + BESIDE_RESULT <= most for columns in at_once)

    def resident(self, warps: int, chip: Gpu, shared: int = 0) -> int:
        """Programs resident on an SM at the same time; at least one."""
        threads = chip.wave * warps
        registers = min(self.registers(warps, chip), chip.registers_per_thread)
        rounded = -(-registers // 8) * 8
        limits = [
            chip.registers // (rounded * threads),
            chip.threads_per_core // threads,
        ]
        if shared:
            limits.append(chip.shared.bytes // shared)
        return max(1, min(limits))


class _Count(LiveTiles):
    """Walks a promoted kernel once."""

    def __init__(self, kernel: Kernel):
        super().__init__(kernel)
        self.dots = [Dot.of(op) for op in self.ops if op.name == "dot"]
        self.same = kernel.aliased_results
        self.roots = Roots(kernel)
        refs = [ref for op in self.ops for ref in written_refs(op)]
        self.written = set(map(self.root, refs))

    def root(self, ref: Value) -> Value:
        """The memory that a ref is part of."""
        root = self.roots.of(ref)
        return self.same.get(root, root)

    def need(self) -> Need:
        loops = [op for op in self.ops if op.name == "for"]
        in_loops = {
            op for loop in loops for op in walk(loop.regions[0]) if op.name == "load"
        }
        loads = [op for op in self.ops if op.name == "load"]
        tiles = [v for op in self.ops for v in op.results if not v.is_ref]
        outside = sum(tile_bytes(op.result) for op in loads if op not in in_loops)
        inside = max((self.step_bytes(loop) for loop in loops), default=0)
        return Need(
            words=self.peak_words(),
            elements=max(map(_elements, tiles), default=1),
            narrowest=min(self.widths(), default=4),
            loaded=max(outside, inside),
            rows=max((_rows(dot) for dot in self.dots), default=0),
            columns=frozenset(self.connected_columns()),
            in_order=frozenset(filter(self.is_in_order, loops)),
            streams={
                loop: self.step_bytes(loop) for loop in loops if self.is_stream(loop)
            },
        )

    def connected_columns(self) -> Iterator[int]:
        """The columns of matmuls, if there are several, whose results may meet."""
        for dot in self.dots if len(self.dots) > 1 else ():
            if _rows(dot) >= WARPGROUP_ROWS:  # others have another instruction
                yield _columns(dot)

    def widths(self) -> Iterator[int]:
        for op in self.ops:
            if op.name in ("load", "store"):
                yield max(1, op.operands[0].ref.dtype.bits // 8)

    def step_bytes(self, loop: Op) -> int:
        """Bytes of the loads of one iteration, without nested loops."""
        inner = loop.regions[0].ops
        return sum(tile_bytes(op.result) for op in inner if op.name == "load")

    def is_stream(self, loop: Op) -> bool:
        """Whether Triton may prefetch an iteration of the loop: no matmul (which it
        pipelines anyway), no write to what is loaded, no addresses from memory."""
        inner = list(walk(loop.regions[0]))
        if any(op.name in ("dot", "while", "for") for op in inner):
            return False
        loads = [op for op in loop.regions[0].ops if op.name == "load"]
        return bool(loads) and all(
            self.is_plain(op) for op in inner if op.name == "load"
        )

    def is_plain(self, load: Op) -> bool:
        index = Access.of(load).index
        gathers = any(isinstance(entry, Gather) for entry in index)
        return not gathers and self.root(load.operands[0]) not in self.written

    def is_in_order(self, loop: Op) -> bool:
        """Whether results would change if Triton overlapped a loop's iterations.

        It loads ahead of the writes before, puts a branch whose results nothing needs
        behind all else, whatever memory it writes, and one that is needed in front.
        """
        inside = walk(loop.regions[0])
        loads = (op for op in inside if op.name == "load")
        if any(self.root(op.operands[0]) in self.written for op in loads):
            return True
        ops = loop.regions[0].ops
        for op in ops:
            if op.name != "cond":
                continue
            reads, writes = self.touched([op])
            other_reads, other_writes = self.touched(o for o in ops if o is not op)
            if writes & (other_reads | other_writes) or reads & other_writes:
                return True
        return False

    def touched(self, ops: Iterable[Op]) -> tuple[set[Value], set[Value]]:
        """The memory that ops read, and what they write."""
        inside = list(walk(Block((), tuple(ops))))
        reads = {self.root(ref) for op in inside for ref in read_refs(op)}
        return reads, {self.root(ref) for op in inside for ref in written_refs(op)}


def _rows(dot: Dot) -> int:
    return power_of_two(prod(dot.lhs.sizes(dot.lhs.free)))


def _columns(dot: Dot) -> int:
    return power_of_two(prod(dot.rhs.sizes(dot.rhs.free)))


def _elements(value: Value) -> int:
    return prod(physical(value.tile.shape))


# --- choices ---


def chosen_warps(need: Need, params: Mapping[str, Any], chip: Gpu) -> int:
    """The author's number of warps, else the model's; fewer where ptxas needs that."""
    if params.get("num_warps"):
        warps = int(params["num_warps"])
    else:
        find = _product_warps if need.rows else _stream_warps
        warps = find(need, chip)
    while not need.can_have(warps, chip):
        warps //= 2
    return warps


def _product_warps(need: Need, chip: Gpu) -> int:
    """A warpgroup per 64 rows, at most two unless registers require more."""
    useful = 8 if need.rows >= 2 * WARPGROUP_ROWS else 4
    warps = 4
    while warps < useful and need.registers(warps, chip) > COMFORTABLE:
        warps *= 2
    while warps < 16 and need.registers(warps, chip) > chip.registers_per_thread:
        warps *= 2
    return warps


def _stream_warps(need: Need, chip: Gpu) -> int:
    """The fewest that keep memory busy, with the widest possible loads."""
    per_warp = chip.wave * (VECTOR_BYTES // need.narrowest)
    fewest = max(1, min(4, need.elements // per_warp))
    most = max(fewest, min(16, need.elements // per_warp))
    counts = [w for w in (1, 2, 4, 8, 16) if fewest <= w <= most]
    return max(counts, key=lambda warps: (_busy(need, warps, chip), -warps))


def _busy(need: Need, warps: int, chip: Gpu) -> float:
    """The share of the memory bandwidth that programs can request; negative if tiles do
    not fit into registers."""
    if need.registers(warps, chip) > chip.registers_per_thread:
        return -float(need.registers(warps, chip))  # tiles would spill
    programs = need.resident(warps, chip)
    wanted = chip.core_bytes_in_flight
    in_flight = min(1.0, programs * need.loaded / wanted) if wanted else 1.0
    return in_flight * min(1.0, programs * warps / BUSY_WARPS)


def _stages(need: Need, shared: SharedMemory, chip: Gpu) -> int:
    """As many buffers as fit, with as many programs as registers allow."""
    if need.in_order or not shared.has_loads_ahead():
        return 1
    for programs in range(need.resident(shared.warps, chip), 0, -1):
        found = _most_stages(shared, chip, programs)
        if found >= GOOD_STAGES:
            return found
    return _most_stages(shared, chip)


def _most_stages(shared: SharedMemory, chip: Gpu, programs: int = 1) -> int:
    for stages in range(chip.stages, 1, -1):
        needed = shared.bytes(stages)
        needed += needed // PADDED if chip.is_amd else 0
        if needed + RESERVED <= chip.shared.bytes // programs:
            return stages
    return 1


def _too_large(shared: SharedMemory, chip: Gpu) -> ChipMemoryError:
    needed, op, _ = shared.peak(stages=1)
    what = "the operands of a matmul do"
    if op is not None and op.name == "transpose":
        what = "a transposed tile does"
    elif op is not None and picked_bytes(op) == needed:
        what = f"the elements that a {op.name} moves do"
    facts = [("needed", f"{needed} bytes"), (chip.name, f"{chip.shared.bytes} bytes")]
    return ChipMemoryError(
        f"{what} not fit in shared memory",
        facts,
        op.loc if op is not None else None,
        fix="use smaller blocks",
    )


def _stream_stages(
    size: int, all_programs: int, need: Need, shared: SharedMemory, chip: Gpu
) -> int:
    """In-flight iterations, in shared memory, of a loop without matmuls."""
    programs = need.resident(shared.warps, chip)
    programs = max(1, min(programs, -(-all_programs // chip.cores)))
    left = chip.shared.bytes // programs - shared.bytes(stages=1) - RESERVED
    return max(1, min(GOOD_STAGES, left // max(size, 1)))


def _group(kernel: Kernel, need: Need, shared: SharedMemory, chip: Gpu) -> int:
    """Rows of tiles that programs go through together, column by column.

    Concurrent programs then need few rows and few columns of the operands, which the
    cache holds. 1: programs are in the grid's own order.
    """
    found = _tiled_axes(kernel)
    if found is None:
        return 1
    (rows, columns), (row_bytes, column_bytes) = found
    resident = need.resident(shared.warps, chip, shared.bytes(stages=1))
    wave = chip.cores * resident
    # rows * row_bytes + wave / rows * column_bytes is minimal at
    best = power_of_two(isqrt(max(1, wave * column_bytes // row_bytes)))
    best = min(best, power_of_two(rows) // 2 or 1)
    return best if columns > max(1, wave // best) else 1


def _tiled_axes(kernel: Kernel) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Sizes of the last two axes of the grid, and bytes of the operands that move along
    only one of them, if each has some."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    if any(not isinstance(n, int) for n in pipeline.sizes):
        return None
    sizes = [n for n in pipeline.sizes if isinstance(n, int)]
    if len(sizes) < 2 or min(sizes[-2:]) == 1:
        return None
    row, column = pipeline.ids[-2:]
    taken = {row: 0, column: 0}
    loops = [op for op in walk(pipeline.body) if op.name == "for"]
    in_loops = {inner for loop in loops for inner in walk(loop.regions[0])}
    for op, axes in _moving_with(pipeline).items():
        if op.name == "load" and op in in_loops:
            for axis, other in ((row, column), (column, row)):
                if axis in axes and other not in axes:
                    taken[axis] += tile_bytes(op.result)
    if not all(taken.values()):
        return None
    return (sizes[-2], sizes[-1]), (taken[row], taken[column])


def _moving_with(pipeline: Pipeline) -> dict[Op, frozenset[Value]]:
    """The grid indices that each op's operands depend on."""
    moves = {v: frozenset({v}) for v in pipeline.ids}
    found: dict[Op, frozenset[Value]] = {}
    for op in walk(pipeline.body):
        axes = frozenset[Value]().union(
            *(moves.get(v, frozenset()) for v in op.operands)
        )
        found[op] = axes
        moves |= dict.fromkeys(op.results, axes)
    return found
