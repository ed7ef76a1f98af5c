"""Grid analysis: which axes of a pipeline may run in parallel, and which may not.

`analyze(kernel)` reads the kernel's pipeline and determines, for each grid axis,
whether it is parallel or sequential and why; for each window, along which axes it
moves; for each scratch ref, along which axes it carries. Programs run as if
sequentially in grid order, so an axis is parallel only if that makes no difference:
every program along it writes its own part of every output, and scratch carries nothing;
or if the author says so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

from pallasite.errors import InternalError
from pallasite.ir.nodes import Access, At, Block, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.affine import (
    Affine,
    Form,
    Forms,
    moving_axes,
    recoverable,
)
from pallasite.passes.analysis.block_table import last_number, told_apart
from pallasite.passes.analysis.carried import (
    carried_from,
    is_overwritten,
    reads_unwritten,
)
from pallasite.passes.analysis.memory import MAIN_MEMORY, Roots, read_refs
from pallasite.passes.lower.place_windows import unclamped

PARALLEL = ("parallel", "core_parallel", "subcore_parallel", "cluster")
Part = tuple[Affine | None, int]  # a position that steps access, and the reach past it


@dataclass(frozen=True)
class Axis:
    """One grid axis."""

    size: int | None  # None: known only at run time
    parallel: bool
    reason: str
    most: int | None = None  # it is parallel only up to this size


@dataclass(frozen=True)
class WindowMoves:
    """How a window moves over its array."""

    name: str
    mode: str
    forms: tuple[Form, ...]  # what the index map yields
    axes: frozenset[int]  # it may show another block at another step along these
    own: frozenset[int]  # steps that differ along these never access the same elements
    written: bool  # an output, or an operand whose block the body writes
    apart: frozenset[int] = frozenset()  # ... and never even see the same block
    certain: bool = False  # along all other axes, some steps do see the same block


@dataclass(frozen=True)
class Carry:
    """A ref that steps share: scratch, or main memory written without a window."""

    name: str
    axes: frozenset[int]  # along these a step may see what another left


class GridInfo:
    """What `analyze` finds, computed where it is asked for.

    Attributes:
        axes: of the grid.
        windows: how they move.
        carries: what steps hand on to each other.
    """

    def __init__(self, analysis: "_Analysis"):
        self._analysis = analysis

    @cached_property
    def windows(self) -> tuple[WindowMoves, ...]:
        return tuple(map(self._analysis.window, range(len(self._analysis.maps))))

    @cached_property
    def carries(self) -> tuple[Carry, ...]:
        return tuple(self._analysis.carries())

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        each = range(len(self._analysis.grid))
        return tuple(self._analysis.axis(a, self.windows, self.carries) for a in each)

    @property
    def parallel(self) -> tuple[int, ...]:
        return tuple(a for a, axis in enumerate(self.axes) if axis.parallel)

    @property
    def sequential(self) -> tuple[int, ...]:
        return tuple(a for a, axis in enumerate(self.axes) if not axis.parallel)

    def __str__(self) -> str:
        sizes = " x ".join("?" if a.size is None else str(a.size) for a in self.axes)
        lines = [f"grid {sizes}" if self.axes else "no grid: one step"]
        for number, axis in enumerate(self.axes):
            kind = "parallel" if axis.parallel else "sequential"
            lines.append(f"  axis {number}  {kind:<10}  {axis.reason}")
        for window in self.windows:
            index = ", ".join(map(str, window.forms))
            moves = _axes_text(window.axes) or "nothing"
            text = f"  {window.mode:<3} {window.name}  ({index})  moves along {moves}"
            if window.written:
                text += f"; own along {_axes_text(window.own) or 'nothing'}"
            lines.append(text)
        for carry in self.carries:
            along = _axes_text(carry.axes)
            text = f"carried along {along}" if along else "not carried"
            lines.append(f"  ref {carry.name}  {text}")
        return "\n".join(lines)


def _axes_text(axes: Iterable[int]) -> str:
    return " ".join(f"i{a}" for a in sorted(axes))


def find_pipeline(kernel: Kernel) -> Op:
    """The only pipeline in the body of a `pallas_call` kernel."""
    found = [op for op in kernel.body.ops if op.name == "pipeline"]
    if len(found) != 1:
        raise InternalError(
            "a kernel's body must hold one pipeline",
            [("kernel", kernel.name), ("found", len(found))],
        )
    return found[0]


def window_axes(op: Op) -> list[frozenset[int]]:
    """The axes along which each window of a pipeline may show another block.

    `analyze` finds fewer where maps use constants from outside the pipeline.
    """
    found = []
    for array, window, index_map, _ in Pipeline.of(op).shown:
        numbers = unclamped(index_map, window, array.ref.shape)
        found.append(moving_axes(replace(index_map, yields=numbers)))
    return found


def with_pipeline(kernel: Kernel, new: Op) -> Kernel:
    """The kernel with another pipeline in place of its own."""
    old = find_pipeline(kernel)
    ops = tuple(new if op is old else op for op in kernel.body.ops)
    return kernel.with_(body=replace(kernel.body, ops=ops))


_analyzed: WeakKeyDictionary[Block, dict[tuple[Value, ...], GridInfo]]
_analyzed = WeakKeyDictionary()


def analyze(kernel: Kernel) -> GridInfo:
    """Grid analysis of a kernel's own pipeline."""
    aliased = kernel.aliased_results
    known = _analyzed.setdefault(kernel.body, {})
    pairs = (*aliased, *aliased.values())
    if pairs not in known:
        op = find_pipeline(kernel)
        before = kernel.body.ops[: kernel.body.ops.index(op)]
        # An operand that aliases a result counts as that result.
        known[pairs] = analyze_pipeline(op, before, aliased)
    return known[pairs]


def analyze_pipeline(
    op: Op,
    before: Sequence[Op] = (),
    same_memory: dict[Value, Value] | None = None,
) -> GridInfo:
    """Grid analysis of any pipeline.

    Args:
      op: the pipeline.
      before: the ops whose values it may use (constants among them are understood).
      same_memory: refs that alias another ref.
    """
    return GridInfo(_Analysis(op, before, same_memory or {}))


class _Analysis:
    def __init__(self, op: Op, before: Sequence[Op], same: dict[Value, Value]):
        pipeline = Pipeline.of(op)
        self.same, self.semantics = same, pipeline.semantics
        self.grid, self.window_attrs = pipeline.grid, pipeline.windows
        self.maps, self.body = pipeline.maps, pipeline.body
        self.refs, self.ids, self.blocks = (
            pipeline.arrays,
            pipeline.ids,
            pipeline.blocks,
        )
        self.everything = frozenset(range(len(self.grid)))
        self.roots = Roots(self.body)
        self.written = self.roots.all_written(self.body)
        self.allocated = {op.results[0] for op in before if op.name == "alloc"}
        outer = Forms([])
        outer.add_ops(before)
        zeros = (0,) * len(self.grid)
        self.outer = {
            v: Form(frozenset(), Affine(zeros, f.affine.const if f.affine else None))
            for v, f in outer.known.items()
        }
        self.forms = Forms(self.ids, self.outer)
        self.forms.add_ops(self.body.ops)
        self.most: dict[int, int] = {}  # sizes up to which blocks are not clamped

    # --- axes ---

    def axis(
        self, axis: int, windows: Sequence[WindowMoves], carries: Sequence[Carry]
    ) -> Axis:
        size, said = self.grid[axis], self.semantics[axis]
        if said in PARALLEL:
            state = None if size in (0, 1) else self.handed_on(axis, windows)
            if state is None:
                return Axis(size, True, f"dimension_semantics says {said}")
            return Axis(size, False, f"values are carried between steps in {state}")
        if said == "sequential":
            return Axis(size, False, "dimension_semantics says sequential")
        if size in (0, 1):
            return Axis(size, True, "it has one step" if size else "it has no step")
        for window in windows:
            if window.written and axis not in window.own:
                return Axis(
                    size, False, f"several steps may write a block of {window.name}"
                )
        for carry in carries:
            if axis in carry.axes:
                return Axis(size, False, f"{carry.name} carries values along it")
        clash = self.aliased_read(windows, axis)
        if clash is not None:
            return Axis(size, False, clash)
        most = self.most.get(axis) if size is None else None
        return Axis(size, True, "each step writes its own blocks", most)

    def handed_on(self, axis: int, windows: Sequence[WindowMoves]) -> str | None:
        """What certainly makes steps along an axis depend on each other, if anything.

        The author's declaration stands where a dependence is merely possible, but not
        where it is certain: kernels that only ever ran on one core of a TPU declare
        axes parallel lightly.
        """
        return (
            self.written_scalars()
            or self.shared_block(axis, windows)
            or self.inherited(axis)
        )

    def written_scalars(self) -> str | None:
        """An operand in scalar memory that the body writes.

        Each core of a TPU has its own copy of it, so kernels keep state there even
        along axes they declare parallel; here all steps see the same one.
        """
        for ref in self.shared:
            given = ref.ref.space == "smem" and ref not in self.allocated
            if given and self.is_written(ref):
                return f"the operand {ref.name}"
        return None

    def shared_block(self, axis: int, windows: Sequence[WindowMoves]) -> str | None:
        """A block that several steps along an axis read and write, or write whole.

        Each core of a TPU has its own copy of this too: kernels use such outputs as
        scratch, or leave them to the last step.
        """
        for window, block in zip(windows, self.blocks, strict=True):
            again = axis not in window.own | window.apart
            again &= window.certain or axis not in window.axes
            if not (window.written and again):
                continue
            if self.is_read(block) or self.is_rewritten(block, axis):
                return f"the block of {window.name}"
        return None

    def is_rewritten(self, block: Value, axis: int) -> bool:
        """Whether the first two steps along an axis certainly write all of a block."""
        positions = (
            {i: n * (a == axis) for a, i in enumerate(self.ids)} for n in (0, 1)
        )
        return all(is_overwritten(self.body.ops, block, at) for at in positions)

    def inherited(self, axis: int) -> str | None:
        """Scratch that a step reads and only steps elsewhere along an axis fill."""
        for ref in self.shared:
            if ref in self.allocated and reads_unwritten(
                self.body, ref, self.ids, axis
            ):
                return f"the scratch {ref.name}"
        return None

    def aliased_read(self, windows: Sequence[WindowMoves], axis: int) -> str | None:
        """An output read as an operand, elsewhere than where it is written, and maybe
        where steps elsewhere along an axis write it."""
        results = {self.memory(r) for r in self.same}
        for ref in self.shared:
            if ref in self.same or (ref in results and not self.is_written(ref)):
                return f"{ref.name} aliases an operand and has no window"
        direct = {self.memory(r) for r in self.shared if self.is_written(r)}
        for i, ref in enumerate(self.refs):
            if self.window_attrs[i].mode == "out" or not self.is_used(self.blocks[i]):
                continue
            if self.memory(ref) in direct:
                return f"{windows[i].name} aliases one without a window"
            for o, out in enumerate(self.refs):
                apart = o == i or self.memory(ref) is not self.memory(out)
                if apart or not windows[o].written:
                    continue
                same_dims = self.window_attrs[i].dims == self.window_attrs[o].dims
                same_maps = windows[i].forms == windows[o].forms
                known = all(map(_is_known, windows[i].forms))
                if not (same_dims and same_maps and known):
                    if same_dims and axis in self.in_common(i, o, windows):
                        continue
                    names = f"{windows[i].name} and {windows[o].name}"
                    return f"{names} alias, but their blocks do not move together"
        return None

    def in_common(
        self, one: int, other: int, windows: Sequence[WindowMoves]
    ) -> frozenset[int]:
        """The axes that tell blocks of both windows apart, by where both are alike."""
        pairs = zip(
            self.block_parts(one, windows[one].forms),
            self.block_parts(other, windows[other].forms),
            strict=True,
        )
        alike = [p for p, q in pairs if p == q and p[0] and p[0].const is not None]
        return recoverable(alike, self.grid)

    def memory(self, ref: Value) -> Value:
        return self.same.get(ref, ref)

    def is_used(self, value: Value) -> bool:
        return value in self.used

    @cached_property
    def used(self) -> set[Value]:
        return {v for op in walk(self.body) for v in op.operands}

    # --- windows ---

    def window(self, number: int) -> WindowMoves:
        region, attr = self.maps[number], self.window_attrs[number]
        forms = Forms(region.params, self.outer)
        forms.add_ops(region.ops, loads_vary=False)
        numbers = unclamped(region, attr, self.refs[number].ref.shape)
        found = tuple(map(forms.of, numbers))
        moves = frozenset[int]().union(*(f.axes for f in found))
        own = apart = frozenset[int]()
        certain = False
        written = attr.mode == "out" or self.is_written(self.blocks[number])
        if written:
            parts = list(self.block_parts(number, found))
            apart, certain = self.apart_axes(number, parts, moves)
            own = apart | self.own_axes(number, parts)
            whatever = list(self.block_parts(number, found, any_size=True))
            if whatever != parts:
                # Only an axis of unknown size can turn out to be too large.
                fixed = {a for a, n in enumerate(self.grid) if n is not None}
                always, _ = self.apart_axes(number, whatever, moves)
                apart -= fixed - always
                own -= fixed - always - self.own_axes(number, whatever)
        name = self.refs[number].name or f"window {number}"
        return WindowMoves(name, attr.mode, found, moves, own, written, apart, certain)

    def apart_axes(
        self, number: int, parts: Sequence[Part], moves: frozenset[int]
    ) -> tuple[frozenset[int], bool]:
        """Axes along which blocks differ; and whether others certainly share one.

        The table of all steps is for maps that are not affine, and for clamped blocks.
        """
        apart = recoverable(parts, self.grid)
        if moves <= apart:
            return apart, True
        window, shape = self.window_attrs[number], self.refs[number].ref.shape
        table = told_apart(self.maps[number], window, shape, self.grid)
        return (apart, False) if table is None else (apart | table, True)

    def own_axes(self, number: int, parts: Sequence[Part]) -> frozenset[int]:
        """Axes along which an output's blocks, or what is written of them, differ."""
        if any(
            d.kind not in ("blocked", "squeezed")
            for d in self.window_attrs[number].dims
        ):
            return frozenset()
        inside = self.access_parts(*self.same_blocks(number))
        return recoverable([*parts, *inside], self.grid)

    def same_blocks(self, number: int) -> list[Value]:
        """The blocks that show a window's memory: its own, and an aliased operand's.

        Where they do not move together, `aliased_read` finds that.
        """
        memory = self.memory(self.refs[number])
        pairs = zip(self.refs, self.blocks, strict=True)
        return [block for ref, block in pairs if self.memory(ref) is memory]

    def block_parts(
        self, number: int, forms: Sequence[Form], any_size: bool = False
    ) -> Iterable[Part]:
        """The results of an index map, with how far neighbouring blocks overlap.

        An index out of range is clamped to the nearest block: then two indices may name
        the same block. `any_size`: axes of unknown size may be so large.
        """
        window, shape = self.window_attrs[number], self.refs[number].ref.shape
        pending = iter(forms)
        for dim, n in zip(window.dims, shape, strict=True):
            overlap = dim.size - 1 if dim.kind in ("element", "bounded") else 0
            affine = next(pending).affine
            fits = self.never_clamped(affine, last_number(dim, n), any_size)
            yield (affine if fits else None), overlap
            if dim.kind == "bounded":
                next(pending)

    def never_clamped(self, affine: Affine | None, last: int, any_size: bool) -> bool:
        """Whether all indices are in [0, last], given the sizes noted in `most`.

        An offset known only at run time is assumed to be in range.
        """
        if affine is None or affine.const is None:
            return affine is not None
        dynamic = [a for a, c in enumerate(affine.coeffs) if c and self.grid[a] is None]
        if len(dynamic) > 1 or (dynamic and any_size):
            return False
        sizes = [1 if n is None else n for n in self.grid]
        low, high = affine.range(sizes)
        if low < 0 or high > last:
            return False
        for axis in dynamic:
            if affine.coeffs[axis] < 0:
                return False
            most = 1 + int(last - high) // affine.coeffs[axis]
            self.most[axis] = min(most, self.most.get(axis, most))
        return True

    def access_parts(self, *refs: Value) -> list[Part]:
        """Positions that all accesses have in common, per dimension.

        Several refs show the same memory.
        """
        uses = [op for op in walk(self.body) if any(r in op.operands for r in refs)]
        if any(
            not table()[op.name].indexed or op.operands[0] not in refs for op in uses
        ):
            return []
        if len({r.ref.shape for r in refs}) > 1:
            return []
        picks = [self.picks(op) for op in uses]
        columns = [set(column) for column in zip(*picks, strict=True)]
        common = [column.pop() for column in columns if len(column) == 1]
        if len(uses) == 1:
            return common
        # Two unknown offsets look the same but may differ.
        return [(a, reach) for a, reach in common if a and a.const is not None]

    def picks(self, op: Op) -> list[Part]:
        """First element and reach past it of an access, per dimension of its ref."""
        access = Access.of(op)
        result: list[Part] = []
        shape = access.ref.ref.shape
        for n, (entry, operand) in zip(shape, access.split_index(), strict=True):
            start = 0 if isinstance(entry, Gather) else entry.start
            form = (
                self.forms.fixed(start) if operand is None else self.forms.of(operand)
            )
            reach = entry.extent - 1 if isinstance(entry, Span) else form.spread
            if isinstance(entry, At):
                reach = 0
            affine = form.affine
            # A start past the end is clamped: then it is not a distinct place. Writes
            # element by element drop what is out of range instead.
            dropped = op.name == "store" and (access.mask or isinstance(entry, Gather))
            if affine is not None and not dropped:
                low, high = affine.range(self.grid)
                affine = affine if low >= 0 and high + reach < n else None
            result.append((affine, reach))
        return result

    # --- refs that all steps share ---

    @cached_property
    def shared(self) -> list[Value]:
        """Refs captured by the pipeline's body, without a window."""
        inside = {v for op in walk(self.body) for v in op.results}
        inside |= {v for op in walk(self.body) for r in op.regions for v in r.params}
        inside |= set(self.body.params)
        used = (v for op in walk(self.body) for v in op.operands if v.is_ref)
        return [v for v in dict.fromkeys(used) if v not in inside]

    def carries(self) -> Iterable[Carry]:
        mapped = {v for region in self.maps for op in walk(region) for v in op.operands}
        aliased = {*self.same, *self.same.values()}
        constant = {
            v for v in self.shared if not self.is_written(v) and v not in aliased
        }
        for number, ref in enumerate(self.shared):
            name = ref.name or f"shared {number}"
            if not self.is_written(ref) and not ref.ref.is_semaphore:
                continue
            if ref in mapped:
                yield Carry(name, self.everything)
            elif ref in self.outer or ref.ref.space not in MAIN_MEMORY:
                start = carried_from(self.body, ref, self.ids, self.grid, constant)
                yield Carry(name, frozenset(range(start, len(self.grid))))
            else:
                own = recoverable(self.access_parts(ref), self.grid)
                yield Carry(name, self.everything - own)

    def is_written(self, ref: Value) -> bool:
        return ref in self.written

    def is_read(self, ref: Value) -> bool:
        """Whether anything but atomics reads a ref: those add to it in any order."""
        ops = (op for op in walk(self.body) if not op.name.startswith("atomic"))
        return ref in self.roots.reached(r for op in ops for r in read_refs(op))


def _is_known(form: Form) -> bool:
    return form.affine is not None and form.affine.const is not None
