"""Finite numbers where a block extends past its array's edge.

What a kernel reads there is undefined and must not affect its results. It would affect
cotangents: zero times infinity is NaN. `harmless_edges` reads zeros there, by the
window's `fill`, which copy engines honour and which leaves a loaded tile one that is
loaded: what is computed from zeros is finite, too, except by an op with a pole, such as
a division. Such an op gets a 1 in the rows (or columns) past the edge; `edge_reach.py`
follows them to it.

Where they cannot be followed, the first row (or column) of the block, which is inside
the array, takes the place of the others: code that is finite for that row is finite for
its copies, and their cotangent is zero.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pallasite.autodiff.edge_reach import Edge, Reach, reach_of
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Index, Op, Span, Value, Window, walk
from pallasite.passes.analysis.memory import VIEWS


def harmless_edges(body: Block) -> tuple[Block, set[Value]]:
    """The program with safe reads; and the copies, which count as constants."""
    walker = _Edges(body)
    return walker.block(body), walker.copies


class _Edges:
    def __init__(self, body: Block) -> None:
        ops, self.fixed = list(walk(body)), frozenset(body.ops)
        self.made = {v: op for op in ops for v in op.results}
        self.views = {op.result: op for op in ops if op.name in VIEWS}
        self.copies: set[Value] = set()
        loads = [op for op in ops if op.name == "load" and self.has_edges(op)]
        unsafe = [op for op in loads if self.window(op).fill is None]
        edges = {op.result: self.edges(op) for op in loads if not self.window(op).fill}
        self.reach = reach_of(body, edges) if edges else Reach()
        lost = {op.operands[0] for op in unsafe if op.result in self.reach.lost}
        lost |= {op.operands[0] for op in unsafe if self.window(op).mode != "in"}
        self.filled = {op.operands[0] for op in unsafe} - lost
        self.copied = {op for op in unsafe if op.operands[0] in lost}

    def edges(self, op: Op) -> tuple[Edge, ...]:
        """The dimensions of a loaded tile that may pass an edge."""
        view, access = self.views[op.operands[0]], Access.of(op)
        spans = [n for n, e in enumerate(access.index) if isinstance(e, Span)]
        starts = [operand for _, operand in access.split_index()]
        return tuple(
            Edge(op, spans.index(d), d, starts[d] is None and view in self.fixed)
            for d in _edges(view, access.index)
        )

    def block(self, block: Block) -> Block:
        b = Builder()
        for op in block.ops:
            b.loc = op.loc
            if op in self.copied:
                self.load(b, op)
                continue
            if op.name == "block_view" and op.result in self.filled:
                window: Window = replace(op.attrs["window"], fill=0.0)
                op = op.with_(attrs={**op.attrs, "window": window})
            if op in self.reach.poles:
                op = self.without_poles(b, op)
            if op.regions:
                op = op.with_(regions=tuple(map(self.block, op.regions)))
            b.ops.append(op)
        return Block(block.params, tuple(b.ops), block.yields)

    def without_poles(self, b: Builder, op: Op) -> Op:
        """The op, of ones past the edges."""
        operands = list(op.operands)
        uses = self.reach.poles[op]
        # Several loads of a block pass the same edge.
        different = {(use[:2], *self.passed(use[2])): use for use in uses}
        for position, dim, edge in different.values():
            operands[position] = self.ones(b, operands[position], dim, edge)
        return op.with_(operands=tuple(operands))

    def passed(self, edge: Edge) -> tuple[Any, ...]:
        """What decides which elements along a dimension are in the array."""
        view, access = self.views[edge.load.operands[0]], Access.of(edge.load)
        array_dim = _array_dims(view)[edge.dim]
        size = view.attrs["window"].dims[array_dim].size
        place = (view.operands[1 + array_dim], *access.split_index()[edge.dim])
        return view.operands[0].ref.shape[array_dim], size, *place

    def ones(self, b: Builder, value: Value, dim: int, edge: Edge) -> Value:
        """A value with ones past an edge; what is broadcast has them before that."""
        made = self.made.get(value)
        if made is not None and made.name == "broadcast_in_dim":
            (source,), dims = made.operands, made.attrs["dims"]
            source = self.ones(b, source, dims.index(dim), edge)
            return b.broadcast(source, value.tile.shape, dims)
        view, access = self.views[edge.load.operands[0]], Access.of(edge.load)
        inside = _inside(b, view, access, edge.dim, value.tile.shape, dim)
        return b.select(inside, value, b.constant(1.0, value.tile))

    def window(self, op: Op) -> Window:
        return self.views[op.operands[0]].attrs["window"]

    def has_edges(self, op: Op) -> bool:
        """Whether a load of floats may read past an edge, and without a mask."""
        view = self.views.get(op.operands[0])
        floats = op.result.tile.dtype.is_float
        if view is None or view.name != "block_view" or not floats:
            return False
        if op.attrs["mask"] or not op.result.tile.shape:
            return False
        entries = op.attrs["index"]
        spans = all(isinstance(e, (At, Span)) for e in entries)
        return spans and bool(_edges(view, entries))

    def load(self, b: Builder, op: Op) -> None:
        """Emit the load so that its old result is the safe value."""
        view, access = self.views[op.operands[0]], Access.of(op)
        raw = Value(op.result.tile, op.result.name)
        b.ops.append(op.with_(results=(raw,)))
        edges = _edges(view, access.index)
        value = self.safe(b, view, access, raw, edges)
        last = b.ops[-1]
        assert last.results == (value,)
        b.ops[-1] = last.with_(results=op.results)

    def safe(
        self, b: Builder, view: Op, access: Access, value: Value, edges: list[int]
    ) -> Value:
        for dim in edges:
            rest = [d for d in edges if d != dim]
            first = self.first(b, view, access, dim, rest)
            first = b.broadcast(first, value.tile.shape, range(value.tile.rank))
            axis = sum(isinstance(e, Span) for e in access.index[:dim])
            inside = _inside(b, view, access, dim, value.tile.shape, axis)
            value = b.select(inside, value, first)
        return value

    def first(
        self, b: Builder, view: Op, access: Access, dim: int, rest: list[int]
    ) -> Value:
        """The same load with only the block's first element along `dim`."""
        entries = [
            (Span(0, 1), None) if d == dim else entry
            for d, entry in enumerate(access.split_index())
        ]
        index: Index = tuple(entry for entry, _ in entries)
        operands = tuple(operand for _, operand in entries if operand is not None)
        value = b.load(access.ref, index, operands)
        self.copies.add(value)
        new = replace(access, index=index, index_operands=operands)
        value = self.safe(b, view, new, value, rest)
        self.copies.add(value)
        return value


def _edges(view: Op, index: Index) -> list[int]:
    """Dimensions of the block that an access spans and that may pass the edge."""
    window: Window = view.attrs["window"]
    sizes = view.operands[0].ref.shape
    kept = [(d, n) for d, n in zip(window.dims, sizes, strict=True) if _is_kept(d)]
    return [
        number
        for number, ((dim, n), entry) in enumerate(zip(kept, index, strict=True))
        if isinstance(entry, Span) and dim.kind == "blocked" and n % max(dim.size, 1)
    ]


def _is_kept(dim: object) -> bool:
    return getattr(dim, "kind", "") != "squeezed"


def _array_dims(view: Op) -> list[int]:
    """The dimensions of the array, by those of the block."""
    dims = view.attrs["window"].dims
    return [d for d, each in enumerate(dims) if _is_kept(each)]


def _inside(
    b: Builder, view: Op, access: Access, dim: int, shape: Sequence[int], axis: int
) -> Value:
    """Which elements along an axis of a tile are in the array: the axis is that of a
    dimension of the block, as an access spans it."""
    window: Window = view.attrs["window"]
    array_dim = _array_dims(view)[dim]
    n, size = view.operands[0].ref.shape[array_dim], window.dims[array_dim].size
    block = view.operands[1 + array_dim]
    entry, operand = access.split_index()[dim]
    assert isinstance(entry, Span)
    start = b.constant(entry.start or 0, T.INDEX)
    if operand is not None:
        start = b.as_index(operand)
    # A block index out of range stands for the nearest block.
    block = b.op("clamp", b.index(0), block, b.index(-(-n // size) - 1))
    start = b.add(start, b.mul(block, b.index(size)))
    tile = T.TileType(tuple(shape), T.I32)
    position = b.op("iota", type=tile, dim=axis)
    if entry.stride != 1:
        position = b.mul(position, b.constant(entry.stride, tile))
    position = b.add(position, b.broadcast(start, shape, ()))
    return b.op("lt", position, b.constant(n, tile))
