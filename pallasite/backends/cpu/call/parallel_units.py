"""Which programs of a kernel may run concurrently, in what units, and whether it pays.

The pass `share_programs` analyses the kernel's own pipeline: its parallel axes,
flattened, index the *units*; the sequential axes are loops inside a unit. It notes its
decision on the pipeline (`cpu.units=(0, 1)`), which `Sharing.of` reads.
`ops/programs.py` emits the loops, `threads.py` assigns units to threads; without a
Sharing the grid is plain loops.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from math import prod

from pallasite import target
from pallasite.backends.cpu.llvm.writer import Val
from pallasite.backends.cpu.tiles.lifetimes import flattened_refs
from pallasite.errors import InternalError
from pallasite.ir.nodes import Kernel, Op, Window, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.cost import seconds
from pallasite.passes.analysis.grid import GridInfo, analyze, find_pipeline
from pallasite.passes.analysis.memory import Roots
from pallasite.target import Host

# The notes of `share_programs`, which are the fields of a Sharing.
UNITS, UNIT_NS, ATOMICS, MOST = "cpu.units", "cpu.unit_ns", "cpu.atomics", "cpu.most"


@dataclass(frozen=True)
class Sharing:
    """How a kernel's grid is divided into units for threads."""

    op: Op  # the pipeline
    parallel: tuple[int, ...]
    sequential: tuple[int, ...]
    unit_ns: int  # estimated time of one unit; at least 1
    has_atomics: bool  # concurrent programs may update the same elements
    most: tuple[int | None, ...]  # sizes of parallel axes up to which it is valid

    @staticmethod
    def of(kernel: Kernel) -> "Sharing | None":
        """What `share_programs` has noted; None: one thread does it all."""
        op = kernel.body.ops[-1] if kernel.body.ops else None
        if op is None or UNITS not in op.attrs:
            return None
        parallel = op.attrs[UNITS]
        axes = range(len(Pipeline.of(op).grid))
        sequential = tuple(a for a in axes if a not in parallel)
        notes = (op.attrs[key] for key in (UNIT_NS, ATOMICS, MOST))
        return Sharing(op, parallel, sequential, *notes)

    @property
    def units(self) -> int | None:
        """The number of units; None if known only at run time."""
        grid = Pipeline.of(self.op).grid
        sizes = [n for a in self.parallel if (n := grid[a]) is not None]
        return prod(sizes) if len(sizes) == len(self.parallel) else None

    @property
    def is_even(self) -> bool:
        """Whether every unit certainly takes the same steps."""
        inside = [*walk(Pipeline.of(self.op).body)]
        numbers = {v for op in inside if op.name == "constant" for v in op.results}
        return all(
            op.name == "for" and numbers.issuperset(op.operands[:3])
            for op in inside
            if op.regions
        )

    @property
    def least_chunk(self) -> int:
        return max(1, Host.least_chunk_ns // self.unit_ns)

    @property
    def least_units(self) -> int:
        """The number of units from which threads pay off."""
        return max(2, -(-Host.least_part_ns // self.unit_ns))


def share_programs(kernel: Kernel) -> Kernel:
    """Note on the kernel's pipeline how threads share it, if they do."""
    sharing = sharing_of(kernel)
    if sharing is None:
        return kernel
    notes = {
        UNITS: sharing.parallel,
        UNIT_NS: sharing.unit_ns,
        ATOMICS: sharing.has_atomics,
        MOST: sharing.most,
    }
    op = sharing.op.with_(attrs={**sharing.op.attrs, **notes})
    return kernel.with_(body=replace(kernel.body, ops=(*kernel.body.ops[:-1], op)))


def sharing_of(kernel: Kernel) -> Sharing | None:
    """How to divide the work among threads; None: one thread does it all."""
    try:
        op = find_pipeline(kernel)
    except InternalError:
        return None
    pipeline = Pipeline.of(op)
    grid = pipeline.grid
    if op is not kernel.body.ops[-1] or not grid:
        return None
    names = {inner.name for inner in walk(pipeline.body)}
    if _has_hidden_atomics(names) or "debug_print" in names:
        return None  # lines are printed in grid order
    info = analyze(kernel)
    ruled_out = _axes_of_shared_copies(pipeline, info)
    parallel = tuple(a for a in info.parallel if a not in ruled_out and grid[a] != 1)
    parallel = _safe_if_too_large(parallel, info)
    if not parallel:
        return None
    sequential = tuple(a for a in range(len(grid)) if a not in parallel)
    units = prod(n for a in parallel if (n := grid[a]) is not None)
    unit_ns = max(1, round(nanoseconds(kernel) / max(units, 1)))
    has_atomics = _may_share_updates(kernel, info, parallel)
    most = tuple(info.axes[a].most for a in parallel)
    sharing = Sharing(op, parallel, sequential, unit_ns, has_atomics, most)
    if sharing.units is not None and sharing.units < sharing.least_units:
        return None
    return sharing


def _may_share_updates(kernel: Kernel, info: GridInfo, parallel: Sequence[int]) -> bool:
    """Whether programs that run concurrently may update the same elements.

    They share arrays, and blocks that do not lie apart.
    """
    pipeline = Pipeline.of(find_pipeline(kernel))
    roots = Roots(pipeline.body)
    pairs = zip(pipeline.blocks, info.windows, strict=True)
    blocks = {block for block, moves in pairs if not moves.apart.issuperset(parallel)}
    updates = [op for op in walk(pipeline.body) if op.name.startswith("atomic")]
    return any(roots.of(op.operands[0]) in {*blocks, *kernel.params} for op in updates)


def _safe_if_too_large(parallel: tuple[int, ...], info: GridInfo) -> tuple[int, ...]:
    """The axes, without those that may be too large to be parallel at run time.

    One thread then takes unit after unit. If all sequential axes come after the
    parallel ones, that is grid order, and those axes may stay.
    """
    before = range(max(parallel, default=0))
    if all(a in parallel or info.axes[a].size == 1 for a in before):
        return parallel
    return tuple(a for a in parallel if info.axes[a].most is None)


def _has_hidden_atomics(names: Set[str]) -> bool:
    """Atomics, and views that have no address for the element they update."""
    views = names & {"bitcast_view", "reshape_view"}
    return bool(views) and bool(names & {"atomic_rmw", "atomic_cas"})


def nanoseconds(kernel: Kernel) -> float:
    """Estimated time of a whole kernel on one thread."""
    return 1e9 * seconds(kernel, target.host())


def _axes_of_shared_copies(pipeline: Pipeline, info: GridInfo) -> frozenset[int]:
    """Axes along which programs may copy one block of an output out and back.

    Programs that write parts of one block may run concurrently only if the block is a
    view of the array: of two copies, the one stored last would undo the other.
    """
    everything = frozenset(range(len(pipeline.grid)))
    regrouped = flattened_refs(pipeline.body)
    found = frozenset[int]()
    for each, moves in zip(pipeline.shown, info.windows, strict=True):
        fits = _fits(each.window, each.array.ref.shape)
        is_view = fits and each.block not in regrouped
        if moves.written and not is_view:
            found |= everything - moves.apart
    return found


def _fits(window: Window, shape: Sequence[int]) -> bool:
    """Whether every block is certainly inside the array."""
    return all(
        dim.kind == "squeezed"
        or (dim.kind == "blocked" and dim.size > 0 and n % dim.size == 0)
        for dim, n in zip(window.dims, shape, strict=True)
    )


@dataclass(frozen=True)
class Share:
    """The part of the units that one call of the kernel function runs."""

    sharing: Sharing
    first: Val
    last: Val
