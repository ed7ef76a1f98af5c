"""Memory of a GPU program that needs fences, because its threads share it.

`fenced(kernel, accesses)` is for kernels whose grid has become programs and loops. An
element is written by one thread and may be read or overwritten by another: by another
access, or by the same access in a later iteration. A fence around the writes keeps them
in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pallasite.ir.nodes import Access, Block, Gather, Kernel, Op, Span, Value
from pallasite.ir.opdef import table
from pallasite.ir.roles import Loop
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import Affine, Form, Forms, recoverable
from pallasite.passes.analysis.boxes import disjoint
from pallasite.passes.analysis.memory import VIEWS

Path = tuple[tuple[Op, Block], ...]  # the regions around an op, outermost first


def fenced(kernel: Kernel, accesses: Mapping[Value, list[Op]]) -> set[Value]:
    """Memory that threads of a program may access after other threads wrote it."""
    written = {m for m, ops in accesses.items() if any(o.name != "load" for o in ops)}
    paths = dict(_paths(kernel.body, ())) if written else {}
    return {m for m in written if not _are_apart(accesses[m], paths)}


def _are_apart(ops: Sequence[Op], paths: Mapping[Op, Path]) -> bool:
    """Whether no element is accessed twice, except by a thread that wrote it before.

    By one write, or by stores to disjoint parts of one view, each of them once.
    """
    if len(ops) == 1:
        return not _overlaps(ops[0], paths)
    if len({op.operands[0] for op in ops}) > 1 or any(o.name != "store" for o in ops):
        return False
    loops = {outer.name for op in ops for outer, _ in paths[op]} & {"for", "while"}
    return not loops and disjoint(ops)


def _paths(block: Block, path: Path) -> Iterator[tuple[Op, Path]]:
    for op in block.ops:
        yield op, path
        for region in op.regions:
            yield from _paths(region, (*path, (op, region)))


def _overlaps(write: Op, paths: Mapping[Op, Path]) -> bool:
    """Whether a write may hit the same element in several iterations of its loops.

    Where all iterations write to the same place, each thread overwrites its own
    elements.
    """
    path = paths[write]
    if any(op.name == "roles" for op, _ in path):
        return False  # whoever writes roles synchronises them
    loops = [op for op, _ in path if op.name in ("for", "while")]
    if not loops:
        return False
    numbers = {
        op.result: op.attrs["value"]
        for op in paths
        if op.name == "constant" and not op.result.tile.shape
    }
    counters = [_Counter.of(loop, numbers) for loop in loops]
    sizes = [counter.size for counter in counters]
    forms = _forms(write, path, counters, numbers)
    views = {op.result: op for op in paths if op.name in VIEWS}
    found = list(_places(write, views, forms, sizes))
    moves = frozenset[int]().union(*(form.axes for form, _ in found))
    told = recoverable([(f.affine, reach + f.spread) for f, reach in found], sizes)
    return not moves <= told


@dataclass(frozen=True)
class _Counter:
    """The induction variable of a loop."""

    value: Value
    size: int | None = None  # the trip count
    step: int = 1  # a lower bound
    first: int | None = None

    @staticmethod
    def of(op: Op, numbers: Mapping[Value, int]) -> "_Counter":
        if op.name == "while":
            return _Counter(Value(INDEX))  # nothing derived from it is affine
        loop = Loop.of(op)
        first, limit, step = (numbers.get(v) for v in loop.bounds)
        if first is None or limit is None or not step:
            return _Counter(loop.index)
        return _Counter(loop.index, len(range(first, limit, step)), step, first)


def _forms(
    write: Op, path: Path, counters: Sequence[_Counter], numbers: Mapping[Value, int]
) -> Forms:
    """The values around a write, as affine forms of the loops' iteration numbers."""
    forms = Forms([counter.value for counter in counters])
    own: set[Value] = set()
    for axis, counter in enumerate(counters):
        coeffs = tuple(counter.step * (a == axis) for a in range(len(counters)))
        form = Form(frozenset([axis]), Affine(coeffs, counter.first))
        forms.known[counter.value] = form
        own.add(counter.value)
    for value, number in numbers.items():
        forms.known[value] = forms.fixed(number)
    inside = False
    for n, (op, region) in enumerate(path):
        inside |= op.name in ("for", "while")
        if not inside:
            continue
        for param in region.params:
            if param not in own:
                forms.known[param] = forms.anything()
        following = path[n + 1][0] if n + 1 < len(path) else write
        forms.add_ops(region.ops[: region.ops.index(following)])
    return forms


# --- where a write goes ---


def _places(
    write: Op, views: Mapping[Value, Op], forms: Forms, sizes: Sequence[int | None]
) -> Iterator[tuple[Form, int]]:
    """Numbers that give the place, each with how far an element may be past it."""
    op: Op | None = write
    while op is not None:
        if op.name == "block_view":
            yield from _block_places(op, forms)
        elif table()[op.name].indexed:
            yield from _index_places(op, forms, sizes)
        op = views.get(op.operands[0])


def _block_places(op: Op, forms: Forms) -> Iterator[tuple[Form, int]]:
    numbers = iter(op.operands[1:])
    for dim in op.attrs["window"].dims:
        overlap = dim.size - 1 if dim.kind in ("element", "bounded") else 0
        yield forms.of(next(numbers)), overlap
        if dim.kind == "bounded":
            next(numbers)


def _index_places(
    op: Op, forms: Forms, sizes: Sequence[int | None]
) -> Iterator[tuple[Form, int]]:
    access = Access.of(op)
    pairs = zip(access.ref.ref.shape, access.split_index(), strict=True)
    for size, (entry, operand) in pairs:
        if operand is None:
            continue
        form = forms.of(operand)
        reach = entry.extent - 1 if isinstance(entry, Span) else 0
        # Elements past the end are dropped; without a mask the start is clamped, and
        # several iterations may end up in one place.
        if form.affine and access.mask is None and not isinstance(entry, Gather):
            low, high = form.affine.range(sizes)
            if form.axes and (low < 0 or high + reach >= size):
                form = Form(form.axes)
        yield form, reach
