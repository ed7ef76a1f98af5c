"""Cotangents of overlapping blocks, gathered where they would be scattered.

A kernel that reads overlapping blocks of an operand (`pl.Element`: a convolution, a
stencil) has a reverse that adds to overlapping blocks of its cotangent, which programs
can only do in sequence, in memory. Where each addend is a block of a cotangent of the
result, times factors that are the same for all rows, an element's sum may be written
the other way round: as what the blocks around it add to it. Then blocks of both arrays
change roles: those that are read overlap, and those that are written do not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, BlockDim, Op, Span, Value, walk
from pallasite.ir.rewrite import producers_of, used_values
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program

ROWWISE = ("cast", "neg")  # linear, element by element


def gather_overlaps(program: Program, results: Iterable[Value]) -> Program:
    """The program with sums over overlapping blocks of results gathered, if it can."""
    for ref in results:
        program = _gathered(program, ref) or program
    return program


def _gathered(program: Program, ref: Value) -> Program | None:
    uses = [op for op in walk(program.body) if ref in op.operands]
    if len(uses) != 1 or uses[0].name != "block_view":
        return None
    overlap = _overlap(program, uses[0])
    if overlap is None:
        return None
    addends = [op for op in walk(program.body) if uses[0].result in op.operands]
    offsets = [_offset(op, overlap, program.body) for op in addends]
    if None in offsets or len(addends) < 2:
        return None
    shifts = [overlap.before - o for o in offsets if o is not None]
    gather = _Gather(program, overlap, min(shifts), max(shifts))
    total = None
    for op, shift in zip(addends, shifts, strict=True):
        value = gather.shifted(op.operands[1], shift)
        if value is None:
            return None
        total = value if total is None else gather.builder.add(total, value)
    assert total is not None
    gather.add_to_own_block(total)
    ops = [op for op in program.body.ops if op not in addends and op is not uses[0]]
    body = Block(program.body.params, (*ops, *gather.builder.ops))
    return program.with_body(body).simplified()


@dataclass(frozen=True)
class _Overlap:
    """A view whose blocks start `rows` apart along one dimension, and overlap."""

    view: Op
    dim: int  # of the array
    tile_dim: int  # of the block
    axis: int  # of the grid
    rows: int
    before: int  # elements that the first block has before the array


def _overlap(program: Program, view: Op) -> _Overlap | None:
    window, indices = view.attrs["window"], view.operands[1:]
    dims = [d for d, dim in enumerate(window.dims) if dim.kind == "element"]
    if len(dims) != 1:
        return None
    (d,) = dims
    forms = Forms(program.body.params)
    forms.add_ops(program.body.ops)
    form = forms.of(indices[d])
    if form.affine is None or form.affine.const != 0 or len(form.axes) != 1:
        return None
    (axis,) = form.axes
    rows = form.affine.coeffs[axis]
    blocks = -(-view.operands[0].ref.shape[d] // rows) if rows > 0 else None
    if blocks != program.sizes[axis] or window.dims[d].size <= rows:
        return None
    before = window.dims[d].padding[0]
    tile_dim = sum(dim.kind != "squeezed" for dim in window.dims[:d])
    return _Overlap(view, d, tile_dim, axis, rows, before)


def _offset(op: Op, overlap: _Overlap, body: Block) -> int | None:
    """The row of the block at which an addend starts; None: it is not one of rows."""
    if op.name != "atomic_rmw" or op not in body.ops or op.attrs["mask"]:
        return None
    index = op.attrs["index"]
    shape = overlap.view.result.ref.shape
    rows = index[overlap.tile_dim]
    whole = (*index[: overlap.tile_dim], *index[overlap.tile_dim + 1 :])
    rest = (*shape[: overlap.tile_dim], *shape[overlap.tile_dim + 1 :])
    is_rows = isinstance(rows, Span) and (rows.size, rows.stride) == (overlap.rows, 1)
    if op.attrs["kind"] != "add" or not is_rows or not covers_whole(rest, whole):
        return None
    return rows.start


class _Gather:
    """Computes addends of other blocks for the rows of a program's own block."""

    def __init__(self, program: Program, overlap: _Overlap, first: int, last: int):
        self.program, self.overlap = program, overlap
        self.first, self.last = first, last  # the least and the greatest shift
        self.builder = Builder(overlap.view.loc)
        self.index = program.body.params[overlap.axis]
        self.made = producers_of(program.body)
        roots = Roots(program.body)
        self.written = roots.written(program.body)
        self.views: dict[Op, Value] = {}
        self.known: dict[tuple[Value, int], Value] = {}

    def shifted(self, value: Value, shift: int) -> Value | None:
        """A value of the rows that are `shift` further down; None: unknown."""
        if (value, shift) not in self.known:
            made = self._shifted(value, shift)
            if made is None:
                return None
            self.known[value, shift] = made
        return self.known[value, shift]

    def _shifted(self, value: Value, shift: int) -> Value | None:
        op = self.made.get(value)
        if op is None or op not in self.program.body.ops:
            return None
        if op.name == "load":
            return self._load(op, shift)
        moving = [not self.is_fixed(v) for v in op.operands]
        both = op.name in ("add", "sub") and all(moving)
        scaled = op.name == "mul" and sum(moving) == 1
        divided = op.name == "div" and moving == [True, False]
        if not (op.name in ROWWISE or both or scaled or divided):
            return None
        operands = [
            self.shifted(v, shift) if m else v
            for v, m in zip(op.operands, moving, strict=True)
        ]
        known = [v for v in operands if v is not None]
        if len(known) < len(operands):
            return None
        return self.builder.op(op.name, *known, **op.attrs)

    def _load(self, op: Op, shift: int) -> Value | None:
        """Rows of a larger block; past the edges of the array they are zero."""
        view = self.made.get(op.operands[0])
        whole = covers_whole(op.operands[0].ref.shape, op.attrs["index"])
        if view is None or not whole or Access.of(op).mask is not None:
            return None
        if view not in self.views:
            larger = self._larger_view(view)
            if larger is None:
                return None
            self.views[view] = larger
        spans = [Span(0, n) for n in op.result.tile.shape]
        spans[self.overlap.tile_dim] = Span(shift - self.first, self.overlap.rows)
        return self.builder.load(self.views[view], tuple(spans))

    def _larger_view(self, view: Op) -> Value | None:
        if view.name != "block_view" or view.operands[0] in self.written:
            return None
        array, *indices = view.operands
        window = view.attrs["window"]
        kept = [d for d, dim in enumerate(window.dims) if dim.kind != "squeezed"]
        d, rows = kept[self.overlap.tile_dim], self.overlap.rows
        others = [v for n, v in enumerate(indices) if n != d]
        by_axis = indices[d] is self.index and window.dims[d] == BlockDim(rows)
        has_zeros = window.fill is not None and window.fill == 0
        if not by_axis or not has_zeros or not all(map(self.is_same, others)):
            return None
        b = self.builder
        padding = max(0, -self.first)
        end = rows * self.program.sizes[self.overlap.axis] + self.last
        after = max(0, end - array.ref.shape[d])
        size = rows + self.last - self.first
        dims = list(window.dims)
        dims[d] = BlockDim(size, "element", (padding, after))
        start = b.mul(self.index, b.index(rows))
        indices[d] = b.add(start, b.index(self.first + padding))
        larger = replace(window, dims=tuple(dims))
        return b.op("block_view", array, *indices, window=larger)

    def is_fixed(self, value: Value) -> bool:
        """Whether all rows of all blocks along the axis have this value."""
        op = self.made.get(value)
        if op is None or op.name not in ("constant", "broadcast_in_dim"):
            return False
        if op.name == "broadcast_in_dim":
            (source,), dims = op.operands, op.attrs["dims"]
            if self.overlap.tile_dim in dims:
                n = source.tile.shape[dims.index(self.overlap.tile_dim)]
                if n != 1:
                    return False
        return self.is_same(value)

    def is_same(self, value: Value) -> bool:
        """Whether a value does not depend on the axis, nor on what is written."""
        pending, seen = [value], set[Value]()
        while pending:
            each = pending.pop()
            if each is self.index or each in self.written:
                return False
            op = self.made.get(each)
            if op is not None and each not in seen:
                seen.add(each)
                pending += [*op.operands, *_captured(op)]
        return True

    def add_to_own_block(self, total: Value) -> None:
        b, view = self.builder, self.overlap.view
        array, *indices = view.operands
        window = view.attrs["window"]
        dims = list(window.dims)
        dims[self.overlap.dim] = BlockDim(self.overlap.rows)
        indices[self.overlap.dim] = self.index
        window = replace(window, dims=tuple(dims))
        block = b.op("block_view", array, *indices, window=window)
        spans = tuple(Span(0, n) for n in block.ref.shape)
        b.emit("atomic_rmw", block, total, kind="add", index=spans, mask=False)


def _captured(op: Op) -> Sequence[Value]:
    return [v for region in op.regions for v in used_values(region)]
