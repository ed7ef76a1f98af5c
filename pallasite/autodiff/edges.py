"""Finite numbers where a block extends past its array's edge.

What a kernel reads there is undefined and must not affect its results. It would affect
cotangents: zero times infinity is NaN. `harmless_edges` substitutes the first row (or
column) of the block, which is inside the array: code that is finite for that row is
finite for its copies, and their cotangent is zero.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Index, Op, Span, Value, Window
from pallasite.passes.analysis.memory import VIEWS


def harmless_edges(body: Block) -> tuple[Block, set[Value]]:
    """The program with safe reads; and the copies, which count as constants."""
    walker = _Edges()
    return walker.block(body), walker.copies


class _Edges:
    def __init__(self) -> None:
        self.views: dict[Value, Op] = {}
        self.copies: set[Value] = set()

    def block(self, block: Block) -> Block:
        b = Builder()
        for op in block.ops:
            b.loc = op.loc
            if op.name in VIEWS:
                self.views[op.result] = op
            if op.name == "load" and self.is_unsafe(op):
                self.load(b, op)
                continue
            if op.regions:
                op = op.with_(regions=tuple(map(self.block, op.regions)))
            b.ops.append(op)
        return Block(block.params, tuple(b.ops), block.yields)

    def is_unsafe(self, op: Op) -> bool:
        view = self.views.get(op.operands[0])
        floats = op.result.tile.dtype.is_float
        if view is None or view.name != "block_view" or not floats:
            return False
        window: Window = view.attrs["window"]
        if window.fill is not None or op.attrs["mask"] or not op.result.tile.shape:
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
            inside = _inside(b, view, access, dim, value.tile.shape)
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


def _inside(
    b: Builder, view: Op, access: Access, dim: int, shape: Sequence[int]
) -> Value:
    """Which elements of the access are in the array along a dimension of the block."""
    window: Window = view.attrs["window"]
    arrays = [d for d, each in enumerate(window.dims) if _is_kept(each)]
    array_dim = arrays[dim]
    n, size = view.operands[0].ref.shape[array_dim], window.dims[array_dim].size
    block = view.operands[1 + array_dim]
    entry, operand = access.split_index()[dim]
    assert isinstance(entry, Span)
    start = b.constant(entry.start or 0, T.INDEX)
    if operand is not None:
        start = b.cast(operand, T.I32)
    # A block index out of range stands for the nearest block.
    block = b.op("clamp", b.index(0), block, b.index(-(-n // size) - 1))
    start = b.add(start, b.mul(block, b.index(size)))
    axis = sum(isinstance(e, Span) for e in access.index[:dim])
    tile = T.TileType(tuple(shape), T.I32)
    position = b.op("iota", type=tile, dim=axis)
    if entry.stride != 1:
        position = b.mul(position, b.constant(entry.stride, tile))
    position = b.add(position, b.broadcast(start, shape, ()))
    return b.op("lt", position, b.constant(n, tile))
