"""commuting_steps: steps that share only memory into which atomics merge, in any order.

In: a kernel with sequential axes along which nothing is handed on but the contents of
results that atomics add to (or take maxima with, and so on; `analysis/commuting.py`),
as where rows are scattered. Results may be windows or whole refs, alias operands, and
be filled in the first step. Out: a `Program` of a kernel for what the first step
stores, if it stores anything, and of one whose steps are all parallel, which merges
into these contents in place.

Proof: without these atomics and stores, the steps are independent (`grid.py` says so of
the kernel without them). The stores come before all atomics and depend on nothing that
is written. Atomics of one kind commute, and nobody reads what they leave.

Unlike the parts of `split_axis.py`, steps need no copy of the results. But sums of
floats are rounded in the order in which atomics happen to come, so small ones are left
to parts (`plan_parts.py`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import dead_code, replace_ops, users_of, writes
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.commuting import only_merged
from pallasite.passes.analysis.grid import (
    GridInfo,
    analyze,
    find_pipeline,
    with_pipeline,
)
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import MAIN_MEMORY, Roots, accesses_of, read_refs
from pallasite.passes.analysis.step_facts import LAST, MIDDLE, facts_of_steps
from pallasite.passes.schedule.split_axis import Program, Result, Step

Merged = Mapping[Value, Sequence[Op]]  # results, and what stores to or merges into them


@dataclass(frozen=True)
class Commuting:
    """What may run in any order.

    Attributes:
        axes: of the grid.
        results: into which atomics merge.
        starts: the first step's stores into them.
    """

    axes: tuple[int, ...]
    results: tuple[Value, ...]
    starts: tuple[Op, ...] = ()


def commuting_steps(kernel: Kernel, info: GridInfo | None = None) -> Commuting | None:
    """The sequential axes whose steps commute, if there are any.

    Args:
        kernel: a kernel with one pipeline, in normal form.
        info: its grid analysis, if at hand.
    """
    if all(op.name != "atomic_rmw" for op in walk(kernel.body)):
        return None
    info, merged = info or analyze(kernel), dict(_merged(kernel))
    if not merged or kernel.level != "tile":
        return None
    rest = analyze(_without(kernel, merged))
    semantics = Pipeline.of(find_pipeline(kernel)).semantics
    axes = tuple(
        a
        for a in info.sequential
        if rest.axes[a].parallel and semantics[a] != "sequential"
    )
    starts = tuple(op for ops in merged.values() for op in ops if op.name == "store")
    if not axes or not _Starts(kernel, info, axes, merged).come_first():
        return None
    return Commuting(axes, tuple(merged), starts)


def in_any_order(kernel: Kernel, found: Commuting, any_order: bool = True) -> Program:
    """The kernels that compute the same with steps in any order, or as they are."""
    numbers = {ref: n for n, ref in enumerate(kernel.inputs)}
    if not found.starts:
        steps = [Step(_in_parallel(kernel, found, {}), tuple(numbers.values()))]
    else:
        start = _start(kernel, found)
        before = {r: Value(r.type, f"{r.name}_before") for r in start.outputs}
        numbers |= {v: len(numbers) + n for n, v in enumerate(before.values())}
        after = found if any_order else replace(found, axes=())
        made = _in_parallel(kernel, after, before)
        steps = [
            Step(each, tuple(numbers[ref] for ref in each.inputs))
            for each in (start, made)
        ]
    results = [Result(len(numbers) + n) for n in range(kernel.num_outputs)]
    return Program(tuple(steps), tuple(results))


def starts_apart(kernel: Kernel) -> Program | None:
    """What a single step stores before a loop as a kernel of its own, if it is enough.

    The loop may then become an axis (`loop_axes.py`), in place of a body that fills a
    result and then changes parts of it. The stores, and what else is outside the loop,
    read nothing that is written.
    """
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return None
    pipeline, roots = Pipeline.of(grids[0]), Roots(kernel)
    *starts, loop = [op for op in pipeline.body.ops if writes(op)] or [grids[0]]
    is_one = all(n == 1 for n in pipeline.grid) and loop.name == "for"
    if not starts or not is_one or any(op.name != "store" for op in starts):
        return None
    results = tuple(dict.fromkeys(roots.of(op.operands[0]) for op in starts))
    outside = [op for op in pipeline.body.ops if op is not loop]
    reads = {r for op in walk(Block((), tuple(outside))) for r in read_refs(op)}
    written = roots.all_written(pipeline.body)
    if reads & written or not set(results) <= set(kernel.outputs):
        return None
    return in_any_order(kernel, Commuting((), results, tuple(starts)))


def first_stores(kernel: Kernel, info: GridInfo | None = None) -> Program | None:
    """What the first step alone stores to results before anything else does, as a
    kernel of its own, and the rest, which has that already."""
    info, found = info or analyze(kernel), dict[Value, list[Op]]()
    axes = [a for a in info.sequential if info.axes[a].size != 1]
    for ref, ops in accesses_of(kernel).items():
        ops = [op for op in ops if op.name != "pipeline"]
        stores = list(takewhile(lambda op: op.name == "store", ops))
        is_result = ref in kernel.outputs and ref.ref.space in MAIN_MEMORY
        if is_result and stores and len(stores) < len(ops):
            starts = _Starts(kernel, info, axes, {ref: stores})
            found |= {ref: stores} if starts.come_first() else {}
    stores = tuple(op for ops in found.values() for op in ops)
    if not stores or kernel.level != "tile":
        return None
    commuting = Commuting(tuple(axes), tuple(found), stores)
    return in_any_order(kernel, commuting, False)


# --- what commutes ---


def _merged(kernel: Kernel) -> Iterator[tuple[Value, list[Op]]]:
    """Results that are stored to and then merged into, with the ops that do so."""
    users = users_of(kernel.body)
    for ref, ops in accesses_of(kernel).items():
        ops = [op for op in ops if op.name != "pipeline"]
        atomics = [n for n, op in enumerate(ops) if op.name != "store"]
        if ref not in kernel.outputs or ref.ref.space not in MAIN_MEMORY or not atomics:
            continue
        if only_merged(ops[atomics[0] :], users):
            yield ref, ops


def _without(kernel: Kernel, merged: Merged) -> Kernel:
    """The kernel without these results, for analysis."""
    gone = {op for ops in merged.values() for op in ops}
    pipeline, same = Pipeline.of(find_pipeline(kernel)), kernel.aliased_results
    kept = [e for e in pipeline.shown if same.get(e.array, e.array) not in merged]
    body = replace_ops(pipeline.body, lambda op: () if op in gone else None)
    params = (*pipeline.ids, *(each.block for each in kept))
    new = pipeline.showing(kept, replace(body, params=params))
    return with_pipeline(kernel, new.to_op())


class _Starts:
    """Whether stores happen in the first step only, before anything else."""

    def __init__(
        self, kernel: Kernel, info: GridInfo, axes: Sequence[int], merged: Merged
    ):
        self.kernel, self.info, self.axes, self.merged = kernel, info, axes, merged
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.stores = {
            op: ref for ref, ops in merged.items() for op in ops if op.name == "store"
        }
        self.outside = list[list[Facts]]()  # of later steps, for each axis

    def come_first(self) -> bool:
        if not self.stores:
            return True
        grid = self.pipeline.grid
        if any(grid[a] is None for a in self.axes):
            return False
        for axis in self.axes:
            facts = facts_of_steps(self.kernel, axis)
            later = [facts[name] for name in (MIDDLE, LAST) if name in facts]
            self.outside.append(later)
        found = set[Op]()
        self.block(self.pipeline.body, [], found)
        return found == self.stores.keys() and self.read_nothing_written()

    def block(
        self, block: Block, branches: list[tuple[Value, int, int]], found: set[Op]
    ) -> None:
        """Notes stores that only branches of the first step reach."""
        for op in block.ops:
            if op in self.stores and self.is_first(op, branches):
                found.add(op)
            if op.name == "cond":
                top = len(op.regions) - 1
                for number, region in enumerate(op.regions):
                    here = (op.operands[0], number, top)
                    self.block(region, [*branches, here], found)

    def is_first(self, op: Op, branches: Sequence[tuple[Value, int, int]]) -> bool:
        grid = self.pipeline.grid
        others = [a for a in range(len(grid)) if a not in self.axes and grid[a] != 1]
        if not all(self.is_apart(op, axis) for axis in others):
            return False
        return all(
            any(_is_skipped(facts, branch) for branch in branches)
            for later in self.outside
            for facts in later
        )

    def is_apart(self, op: Op, axis: int) -> bool:
        """Whether steps along an axis have blocks of their own."""
        refs = {each.operands[0] for each in self.merged[self.stores[op]]}
        shown = zip(self.pipeline.blocks, self.info.windows, strict=True)
        apart = {block for block, moves in shown if axis in moves.apart}
        return refs <= apart

    def read_nothing_written(self) -> bool:
        """Whether the stores need nothing else that steps do."""
        written = Roots(self.kernel).all_written(self.pipeline.body)
        ops = list(walk(_only(self.pipeline.body, self.stores)))
        made = {v for op in walk(self.pipeline.body) if writes(op) for v in op.results}
        used = {v for op in ops for v in op.operands}
        reads = {r for op in ops for r in read_refs(op)}
        return not reads & written and not used & made


def _is_skipped(facts: Facts, branch: tuple[Value, int, int]) -> bool:
    which, number, top = branch
    fact = facts.of(which)
    low, high = (min(max(n, 0), top) for n in (fact.low, fact.high))
    return not low <= number <= high


def _only(body: Block, stores: Collection[Op]) -> Block:
    """The body with no effect but some stores."""
    other = lambda op: not op.regions and writes(op) and op not in stores
    body = replace_ops(body, lambda op: () if other(op) else None)
    kernel = Kernel("starts", (), body, 0)
    return dead_code(kernel).body


# --- the kernels ---


def _start(kernel: Kernel, found: Commuting) -> Kernel:
    """What the first step stores."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    body = _only(pipeline.body, found.starts)
    used = {v for op in walk(body) for v in op.operands}
    shown = [each for each in pipeline.shown if each.block in used]
    body = replace(body, params=(*pipeline.ids, *(each.block for each in shown)))
    grid = tuple(1 if a in found.axes else n for a, n in enumerate(pipeline.grid))
    new = replace(pipeline, grid=grid).showing(shown, body).to_op()
    kernel = dead_code(with_pipeline(kernel, new))
    used = {v for op in walk(kernel.body) for v in op.operands}
    outputs = [ref for ref in kernel.outputs if ref in used]
    same = {operand: r for operand, r in kernel.aliased_results.items() if r in outputs}
    inputs = [ref for ref in kernel.inputs if ref in used | same.keys()]
    aliases = tuple((inputs.index(x), outputs.index(r)) for x, r in same.items())
    return kernel.with_(
        name=f"{kernel.name}_start",
        params=(*inputs, *outputs),
        num_outputs=len(outputs),
        aliases=aliases,
    )


def _in_parallel(
    kernel: Kernel, found: Commuting, before: Mapping[Value, Value]
) -> Kernel:
    """All steps at once; `before` are what some results contain already."""
    pipeline, same = Pipeline.of(find_pipeline(kernel)), kernel.aliased_results
    body = replace_ops(pipeline.body, lambda op: () if op in found.starts else None)
    shown = [each for each in pipeline.shown if same.get(each.array) not in before]
    body = replace(body, params=(*pipeline.ids, *(each.block for each in shown)))
    semantics = tuple(
        "parallel" if a in found.axes else said
        for a, said in enumerate(pipeline.semantics)
    )
    new = replace(pipeline, semantics=semantics).showing(shown, body).to_op()
    same = {x: r for x, r in same.items() if r not in before}
    same |= {value: ref for ref, value in before.items()}
    inputs = [x for x in kernel.inputs if kernel.aliased_results.get(x) not in before]
    inputs += before.values()
    outputs = kernel.outputs
    aliases = tuple((inputs.index(x), outputs.index(r)) for x, r in same.items())
    made = dead_code(with_pipeline(kernel, new))
    return made.with_(params=(*inputs, *outputs), aliases=aliases)
