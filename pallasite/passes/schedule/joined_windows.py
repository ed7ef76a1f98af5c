"""joined_windows: pieces of blocks that adjoin in their array are one larger block.

In: a concatenation of parts of windows on one array, such as the last rows of the block
before and a block; beyond the array's edge a number, chosen by program, instead of what
a clamped window shows. Out: one load of a window that begins earlier or ends later, and
has that number past the edge. A GPU then loads shifted copies where they lie, and the
reverse adds to one overlapping block.

Proof: by enumeration of the grid. Where a piece is used, it begins where the others say
that it does, in all dimensions; where a number is, the piece would be past an edge.
Nothing writes the array, so it may be loaded once, and elements are only converted.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pallasite.ir.build import Builder, Scalar
from pallasite.ir.nodes import Access, Block, BlockDim, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import dead_code, inline, producers_of, substitute
from pallasite.ir.roles import Pipeline, Shown, filling
from pallasite.ir.types import DType
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import constant_inputs
from pallasite.passes.analysis.step_table import StepTable


class _Other(Exception):
    """Pieces do not adjoin, or are something else."""


class _Piece(NamedTuple):
    """A part of a block, or a number.

    Attributes:
        shown: the window.
        starts: the part's first elements in the block.
        shape: its shape.
        casts: the types to which elements are converted, one after another.
        guard: a scalar, and what it is where the part is used; None: always.
        number: what is there otherwise.
    """

    shown: Shown
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    casts: tuple[DType, ...]
    guard: tuple[Value, bool] | None
    number: Scalar | None


def joined_windows(kernel: Kernel) -> Kernel:
    """Larger windows instead of joined pieces of several."""
    names = {op.name for op in walk(kernel.body)}
    if kernel.level != "tile" or kernel.symbols or "concatenate" not in names:
        return kernel
    if sum(op.name == "pipeline" for op in walk(kernel.body)) != 1:
        return kernel
    for op in find_pipeline(kernel).regions[-1].ops:
        if op.name == "concatenate":
            try:
                return joined_windows(_Join(kernel, op).kernel_of_one())
            except _Other:
                continue
    return kernel


class _Join:
    """One concatenation of a kernel."""

    def __init__(self, kernel: Kernel, op: Op):
        self.kernel, self.op = kernel, op
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.made = producers_of(self.pipeline.body)
        self.constant = constant_inputs(kernel)
        self.shown = {each.block: each for each in self.pipeline.shown}
        self.axis = op.attrs["axis"]
        self.pieces = [self.piece(v) for v in op.operands]
        self.base = next((p for p in self.pieces if p.guard is None), self.pieces[0])
        self.check_alike()
        self.first = self.adjoin()

    # --- pieces ---

    def piece(self, value: Value) -> _Piece:
        starts, casts = (0,) * value.tile.rank, list[DType]()
        guard: tuple[Value, bool] | None = None
        number: Scalar | None = None
        shape = value.tile.shape
        while (op := self.made.get(value)) is not None and op.name != "load":
            if op.name == "slice" and set(op.attrs["strides"]) <= {1}:
                pairs = zip(starts, op.attrs["starts"], strict=True)
                starts = tuple(a + b for a, b in pairs)
            elif op.name == "cast":
                casts.insert(0, op.result.tile.dtype)
            elif op.name == "select_n" and guard is None:
                test, taken, number, value = self.chosen(op)
                guard = (test, taken)
                continue
            else:
                raise _Other
            (value,) = op.operands
        if op is None or Access.of(op).ref not in self.shown:
            raise _Other
        access = Access.of(op)
        plain = access.mask is None and not access.index_operands
        spans = [e for e in access.index if isinstance(e, Span) and e.stride == 1]
        plain &= len(spans) == len(access.index)
        shown = self.shown[access.ref]
        if not plain or shown.array not in self.constant:
            raise _Other
        inside = (entry.start or 0 for entry in spans)
        starts = tuple(a + b for a, b in zip(starts, inside, strict=True))
        return _Piece(shown, starts, shape, tuple(casts), guard, number)

    def chosen(self, op: Op) -> tuple[Value, bool, Scalar, Value]:
        """A scalar, what it is where a tile is chosen, the number, and the tile."""
        which, *cases = op.operands
        while (made := self.made.get(which)) and made.name == "broadcast_in_dim":
            (which,) = made.operands
        numbers = [filling(self.made, v) for v in cases]
        if which.tile.shape or len(cases) != 2 or numbers.count(None) != 1:
            raise _Other
        truth = numbers[0] is not None
        return which, truth, numbers[not truth], cases[truth]

    def check_alike(self) -> None:
        """Pieces are of one array, in several windows, and of one type."""
        base = self.base
        dtype = base.shown.array.ref.dtype
        if len({p.shown.block for p in self.pieces}) < 2 or base.guard is not None:
            raise _Other
        for p in self.pieces:
            if p.shown.array is not base.shown.array or p.casts != base.casts:
                raise _Other
            if _kept(p.shown) != _kept(base.shown):
                raise _Other
            if p.number is not None:
                exact = np.asarray(p.number, dtype.np)
                if float(exact) != float(p.number):
                    raise _Other
        if len(self.fills()) > 1:
            raise _Other

    def fills(self) -> set[Scalar]:
        """The numbers that have to be past the edges."""
        fills = {p.shown.window.fill for p in self.pieces}
        return {n for n in (*fills, *(p.number for p in self.pieces)) if n is not None}

    # --- where they begin ---

    def place(self, shown: Shown) -> list[np.ndarray]:
        """The first elements of a block at each step, per dimension of the array."""
        table = StepTable(shown.index_map.params, self.pipeline.grid)
        table.add_ops(shown.index_map.ops)
        found = list[np.ndarray]()
        sizes = shown.array.ref.shape
        if any(dim.kind == "bounded" for dim in shown.window.dims):
            raise _Other
        yields = shown.index_map.yields
        for dim, n, index in zip(shown.window.dims, sizes, yields, strict=True):
            numbers = table.of(index)
            if numbers is None:
                raise _Other
            numbers = np.clip(numbers.astype(np.int64), 0, last_number(dim, n))
            numbers = numbers * (dim.size if dim.kind == "blocked" else 1)
            found.append(numbers - dim.padding[0])
        return found

    def adjoin(self) -> np.ndarray:
        """Where the first piece begins along the dimension in which they are joined."""
        table = StepTable(self.pipeline.ids, self.pipeline.grid)
        table.add_ops(self.pipeline.body.ops)
        kept = _kept(self.base.shown)
        d = kept[self.axis]
        before, at = 0, list[int]()
        for p in self.pieces:
            at.append(before)
            before += p.shape[self.axis]
        base = self.place(self.base.shown)
        own = at[self.pieces.index(self.base)]
        self.offset = self.base.starts[self.axis] - own
        first = base[d] + self.offset
        n = self.base.shown.array.ref.shape[d]
        for p, start in zip(self.pieces, at, strict=True):
            used = np.ones((1,) * len(self.pipeline.grid), bool)
            if p.guard is not None:
                test = table.of(p.guard[0])
                if test is None:
                    raise _Other
                used = test.astype(bool) == p.guard[1]
            mine = self.place(p.shown)
            same = mine[d] + p.starts[self.axis] == first + start
            for t, k in enumerate(kept):
                if t != self.axis:
                    same = same & (
                        mine[k] + p.starts[t] == base[k] + self.base.starts[t]
                    )
            for k in {*range(len(mine))} - {*kept}:
                same = same & (mine[k] == base[k])
            end = first + start + p.shape[self.axis]
            outside = (end <= 0) | (first + start >= n)
            if not np.all(np.where(used, same, outside)):
                raise _Other
        return first

    # --- the larger window ---

    def kernel_of_one(self) -> Kernel:
        old, base = self.pipeline, self.base
        shown, b = self.larger(), Builder(self.op.loc)
        index = [Span(s, n) for s, n in zip(base.starts, base.shape, strict=True)]
        index[self.axis] = Span(0, self.op.result.tile.shape[self.axis])
        found = b.load(shown.block, tuple(index))
        for dtype in base.casts:
            found = b.cast(found, dtype)
        ops: list[Op] = []
        for op in old.body.ops:
            ops += b.ops if op is self.op else [op]
        body = substitute(Block((), tuple(ops)), {self.op.result: found})
        windows = [*old.shown, shown]
        params = (*old.ids, *(each.block for each in windows))
        new = old.showing(windows, Block(params, body.ops)).to_op()
        outer = (new if op is old.op else op for op in self.kernel.body.ops)
        outside = replace(self.kernel.body, ops=tuple(outer))
        return dead_code(self.kernel.with_(body=outside))

    def larger(self) -> Shown:
        """The window of the piece that is always used, as large as all of them."""
        base, old = self.base.shown, self.base.shown.window
        d, size = _kept(base)[self.axis], self.op.result.tile.shape[self.axis]
        n, dim = base.array.ref.shape[d], old.dims[d]
        low = max(0, -int(self.first.min()))
        high = max(0, int(self.first.max()) + size - n)
        ids = [Value(v.type, v.name) for v in base.index_map.params]
        b = Builder(self.op.loc)
        yields = list(inline(b, base.index_map, ids))
        start = b.clamp(b.index(0), yields[d], b.index(last_number(dim, n)))
        if dim.kind == "blocked":
            start = b.mul(start, b.index(dim.size))
        yields[d] = b.add(start, b.index(self.offset + low - dim.padding[0]))
        dims = list(old.dims)
        dims[d] = BlockDim(size, "element", (low, high))
        fill = next(iter(self.fills()), None)
        window = replace(old, dims=tuple(dims), fill=fill)
        type_ = base.block.ref.with_shape(window.block_shape)
        return Shown(
            base.array,
            window,
            b.block(ids, yields),
            Value(type_, base.block.name or "block"),
        )


def _kept(shown: Shown) -> list[int]:
    """The dimensions of an array that a block has."""
    return [n for n, dim in enumerate(shown.window.dims) if dim.kind != "squeezed"]
