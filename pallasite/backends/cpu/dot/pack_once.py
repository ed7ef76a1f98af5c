"""pack_once: notes which operands of dots are packed once per call.

A block that is multiplied at several grid steps or loop iterations would be packed
again each time. The pass looks for boxes of the kernel's inputs, tiled evenly, that
dots read more than once, and notes them on the dots (`cpu.packed_once`): for each side
of the dot, the number of the input, the sizes of its boxes, and the dimensions that the
operand keeps; None for a side that is packed at its use. `PackedOnce.of` reads the
notes: the packed boxes are in memory that all threads share, and the first thread that
needs one packs it. `packed_boxes.py` emits the code.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from pallasite.backends.cpu.dot.cache_blocks import Blocking, PackedLayout, Parts
from pallasite.backends.cpu.dot.choose_scheme import (
    Groups,
    groups_of,
    is_small,
    scheme_for,
    sizes_of,
)
from pallasite.backends.cpu.dot.fusion import running_dtype
from pallasite.backends.cpu.dot.packing import direction
from pallasite.backends.cpu.dot.rows_uncounted import counted
from pallasite.backends.cpu.dot.scheme import UNKNOWN_LAYOUT, MemoryLayout
from pallasite.backends.cpu.llvm.writer import Function, Module, Val, integer
from pallasite.backends.cpu.tiles import tiles
from pallasite.backends.cpu.tiles.lifetimes import flattened_refs
from pallasite.ir.nodes import Access, At, Block, Kernel, Op, Span, Value, walk
from pallasite.ir.roles import Dot, Pipeline
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import constant_inputs

USES = 2  # average uses of a box from which packing it once pays off
MOST_BYTES = 64 << 20  # of all boxes; the process keeps it (`kept_memory.py`)

PACKED_ONCE = "cpu.packed_once"

# A box has two counters: parts that some thread has started to pack, then parts that
# are done.
DONE, COUNTERS_BYTES = 8, 16


class Role(NamedTuple):
    """A value as a dot uses it: the packed layout it requires."""

    value: Value
    groups: Groups
    layout: PackedLayout


class Cut(NamedTuple):
    """A ref or a tile as one of the equal boxes that tile an array."""

    array: Value  # one of the kernel's inputs
    sizes: tuple[int, ...]  # of a box along each dimension of the array
    kept: tuple[int, ...]  # the dimensions that the ref or tile has

    @staticmethod
    def whole(array: Value) -> "Cut":
        shape = array.ref.shape
        return Cut(array, tuple(shape), tuple(range(len(shape))))

    @property
    def count(self) -> int:
        return prod(self.counts)

    @property
    def counts(self) -> list[int]:
        """Boxes along each dimension."""
        shape = self.array.ref.shape
        return [n // size for n, size in zip(shape, self.sizes, strict=True)]

    def smaller(self, sizes: Sequence[int | None]) -> "Cut | None":
        """Boxes within this one; None for a dimension that is dropped."""
        new = list(self.sizes)
        for d, size in zip(self.kept, sizes, strict=True):
            new[d] = 1 if size is None else size
            if not new[d] or self.sizes[d] % new[d]:
                return None
        pairs = zip(self.kept, sizes, strict=True)
        return Cut(self.array, tuple(new), tuple(d for d, n in pairs if n is not None))

    def number(self, f: Function, offset: Val) -> Val:
        """The index of the box that starts `offset` elements into the array."""
        number = integer(0)
        shape, steps = self.array.ref.shape, tiles.row_major(self.array.ref.shape)
        dims = zip(shape, steps, self.sizes, self.counts, strict=True)
        for n, step, size, count in dims:
            if count > 1:
                place = f.binary("udiv", offset, step)
                place = f.binary("urem", place, integer(n))
                place = f.binary("udiv", place, integer(size))
                number = f.add(f.mul(number, integer(count)), place)
        return number

    def strides(self, groups: Groups) -> list[Val] | None:
        """Strides of batch, width and depth; None if they are not regular."""
        unused = Function(Module(), "unused")
        steps = tiles.row_major(self.array.ref.shape)
        order = [self.kept[d] for group in groups for d in group]
        old = [self.sizes[d] for d in order]
        new = [prod(self.sizes[self.kept[d]] for d in group) for group in groups]
        return tiles.reshape_strides(unused, old, [steps[d] for d in order], new)


@dataclass(frozen=True)
class Boxes:
    """All boxes of an array, packed in one layout."""

    cut: Cut
    groups: Groups
    layout: PackedLayout
    blocking: Blocking = field(compare=False)  # of the first matmul that uses them
    # Offsets in the shared memory of their counters and of the packed boxes.
    counters_at: int = 0
    packed_at: int = 0

    @property
    def operand_strides(self) -> list[Val]:
        strides = self.cut.strides(self.groups)
        assert strides is not None
        return strides

    @property
    def parts(self) -> Parts:
        """The parts of one box."""
        dtype, (_, *strides) = self.cut.array.ref.dtype, self.operand_strides
        return Parts.of(self.layout, direction(dtype, self.layout.dtype, *strides))

    @property
    def bytes(self) -> int:
        return self.cut.count * self.layout.bytes

    @property
    def counter_bytes(self) -> int:
        return self.cut.count * COUNTERS_BYTES


@dataclass(frozen=True)
class PackedOnce:
    """The boxes that a kernel packs once, and for which dots; may be empty."""

    boxes: tuple[Boxes, ...] = ()
    roles: dict[Role, int] = field(default_factory=dict[Role, int])

    @staticmethod
    def of(kernel: Kernel) -> "PackedOnce":
        """What `pack_once` has noted on the kernel's dots."""
        numbers: dict[Boxes, int] = {}
        roles: dict[Role, int] = {}
        for op in walk(kernel.body):
            for side, note in enumerate(op.attrs.get(PACKED_ONCE, ())):
                if note is None:
                    continue
                place, sizes, kept = note
                value = Dot.of(op).sides[side].value
                boxes = _boxes(op, side, Cut(kernel.inputs[place], sizes, kept))
                if boxes is None:
                    continue  # noted for another CPU: here it is read in place
                number = numbers.setdefault(boxes, len(numbers))
                roles[Role(value, boxes.groups, boxes.layout)] = number
        return PackedOnce(tuple(_placed([*numbers])), roles)

    @property
    def counter_bytes(self) -> int:
        """At the start of the shared memory; zero before the kernel runs."""
        return -(-sum(each.counter_bytes for each in self.boxes) // 64) * 64

    @property
    def bytes(self) -> int:
        return self.counter_bytes + sum(each.bytes for each in self.boxes)


# --- what to pack once ---


def pack_once(kernel: Kernel) -> Kernel:
    """The kernel with notes on those of its dots whose operands are packed once."""
    times: dict[Boxes, int] = {}
    sides: list[tuple[Op, int, Boxes]] = []
    for use in _Search(kernel).uses(kernel.body, 1):
        boxes = _boxes(use.dot, use.side, use.cut)
        if boxes is not None:
            sides.append((use.dot, use.side, boxes))
            times[boxes] = times.get(boxes, 0) + use.times
    chosen: set[Boxes] = set()
    total = 0
    for boxes, often in times.items():
        if often >= USES * boxes.cut.count and total + boxes.bytes <= MOST_BYTES:
            chosen.add(boxes)
            total += boxes.bytes
    notes: dict[Op, list[_Note | None]] = {}
    for op, side, boxes in sides:
        if boxes in chosen:
            array, sizes, kept = boxes.cut
            note = (kernel.inputs.index(array), sizes, kept)
            notes.setdefault(op, [None, None])[side] = note
    return kernel.with_(body=_noted(kernel.body, notes)) if notes else kernel


_Note = tuple[int, tuple[int, ...], tuple[int, ...]]


def _noted(block: Block, notes: Mapping[Op, Sequence[_Note | None]]) -> Block:
    ops: list[Op] = []
    for op in block.ops:
        if op in notes:
            op = op.with_(attrs={**op.attrs, PACKED_ONCE: tuple(notes[op])})
        elif op.regions:
            op = op.with_(regions=tuple(_noted(r, notes) for r in op.regions))
        ops.append(op)
    return replace(block, ops=tuple(ops))


def _placed(chosen: Sequence[Boxes]) -> Iterator[Boxes]:
    """All counters come first, then the packed boxes."""
    counters_at, packed_at = 0, PackedOnce(tuple(chosen)).counter_bytes
    for boxes in chosen:
        yield replace(boxes, counters_at=counters_at, packed_at=packed_at)
        counters_at += boxes.counter_bytes
        packed_at += boxes.bytes


class _Use(NamedTuple):
    """A box that a dot reads, with the estimated total number of `times`."""

    cut: Cut
    dot: Op
    side: int
    times: int


class _Search:
    """Walks a kernel's code for dots of boxes of its inputs."""

    def __init__(self, kernel: Kernel):
        self.facts = Facts()
        constant = constant_inputs(kernel)
        same = [v for v in kernel.inputs if v in constant and v.ref.size]
        self.cuts = {v: Cut.whole(v) for v in same}
        self.times: dict[Value, int] = {}  # of boxes, each time their code runs

    def uses(self, block: Block, times: int) -> Iterator[_Use]:
        """Uses in a block that runs `times` times."""
        for op in block.ops:
            self.facts.note_op(op)
            if op.name in ("load", "subview"):
                self._pick(op)
            elif op.name in ("dot", "dot_add", "dot_store"):
                for side, (value, *_) in enumerate(Dot.of(op).sides):
                    if value in self.cuts:
                        often = times * self.times.get(value, 1)
                        yield _Use(self.cuts[value], op, side, often)
            elif op.name == "pipeline":
                pipeline = Pipeline.of(op)
                self._open(pipeline)
                steps = prod(n for n in pipeline.grid if n is not None)
                yield from self.uses(pipeline.body, times * steps)
            else:
                for region in op.regions:
                    yield from self.uses(region, times)

    def _open(self, pipeline: Pipeline) -> None:
        """Windows whose blocks divide their array are boxes of it."""
        copied = flattened_refs(pipeline.body)
        for array, window, _, block in pipeline.shown:
            kinds = {dim.kind for dim in window.dims}
            if block in copied or not kinds <= {"blocked", "squeezed"}:
                continue
            if array in self.cuts:
                sizes = [None if d.kind == "squeezed" else d.size for d in window.dims]
                self._note(block, self.cuts[array].smaller(sizes))

    def _pick(self, op: Op) -> None:
        """A plain slice whose start is a multiple of its size is a box."""
        access = Access.of(op)
        cut = self.cuts.get(access.ref)
        if cut is None or access.mask is not None:
            return
        sizes: list[int | None] = []
        often = 1
        for entry, start in access.split_index():
            if isinstance(entry, At):
                sizes.append(None)
            elif isinstance(entry, Span) and entry.stride == 1 and entry.size:
                multiple = (
                    entry.start if start is None else self.facts.of(start).multiple
                )
                if (multiple or 0) % entry.size:
                    return
                sizes.append(entry.size)
            else:
                return
            if start is not None:  # a loop is likely to visit all of them
                d = cut.kept[len(sizes) - 1]
                often *= max(1, cut.sizes[d] // (sizes[-1] or 1))
        self._note(op.result, cut.smaller(sizes))
        self.times[op.result] = often * self.times.get(access.ref, 1)

    def _note(self, value: Value, cut: Cut | None) -> None:
        if cut is not None:
            self.cuts[value] = cut


def _boxes(dot: Op, side: int, cut: Cut) -> Boxes | None:
    """The boxes that a dot reads, in the layout it requires, if packing them helps."""
    is_rows, groups = side == 0, groups_of(dot)[side]
    strides = cut.strides(groups)
    sizes = sizes_of(dot)
    kind = counted(dot, sizes)
    if strides is None or is_small(kind, in_rows=True):
        return None
    lhs, rhs = (side.value.tile.dtype for side in Dot.of(dot).sides)
    running = running_dtype(lhs, rhs, dot.attrs["dtype"])
    here = MemoryLayout.of(lhs if is_rows else rhs, *strides[1:])
    layouts = (here, UNKNOWN_LAYOUT) if is_rows else (UNKNOWN_LAYOUT, here)
    scheme = scheme_for(lhs, rhs, running, sizes, *layouts, kind=kind)
    other = sizes.columns if is_rows else sizes.rows
    if other >= scheme.pack_once_below or scheme.apart(is_rows):
        return None
    blocking = Blocking.of(scheme, sizes)
    return Boxes(cut, groups, blocking.layout(is_rows), blocking)
