"""row_tiles: programs of one row compute with matrices of one row.

In: programs that load a row at a point, `x_ref[0, :]` of a block (1, n) or a squeezed
row, and compute with lines (n,) and single numbers. Out: blocks (1, n), tiles (1, n)
and columns (1, 1): the rows are a dimension, along which blocks can grow
(`reblock.py`). A TPU computes eight rows or sixteen as fast as one.

Proof: inserting a dimension of size one renames the element at i to (0, i).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    At,
    BlockDim,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    walk,
)
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import Rewriter, map_ops, users_of
from pallasite.ir.roles import Loop, Pipeline, Shown, While
from pallasite.passes.analysis.grid import find_pipeline, with_pipeline
from pallasite.passes.normal.columns import columns
from pallasite.passes.normal.form_walk import FormWalk, Shape, reformed


def row_tiles(kernel: Kernel) -> Kernel:
    """The kernel with rows as a dimension; the same object if it has no lone rows."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != TILE or kernel.aliases or len(grids) != 1:
        return kernel
    others = ("dot", "pipeline")
    if any(op.name in others for op in walk(Pipeline.of(grids[0]).body)):
        return kernel
    blocked = _with_blocks_of_rows(kernel)
    places = _places(blocked)
    if not places:
        return kernel
    new = reformed(blocked, _Rows(places, _of_rows(blocked, places)))
    return kernel if new is blocked else columns(new)


def _row_dim(shown: Shown) -> int | None:
    """The last dimension of an array of which a window shows one element of many."""
    dims, extents = shown.window.dims, shown.array.ref.shape
    found = [
        d
        for d, (dim, n) in enumerate(zip(dims, extents, strict=True))
        if dim.size == 1 and n > 1 and dim.kind in ("squeezed", "blocked")
    ]
    return found[-1] if found else None


def _place(shown: Shown, d: int) -> int:
    """Where a dimension of an array is in the block, or would be."""
    return sum(dim.kind != "squeezed" for dim in shown.window.dims[:d])


def _with_blocks_of_rows(kernel: Kernel) -> Kernel:
    """The kernel whose windows show a row as a block of one row."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    users = users_of(pipeline.body)
    shown, places = [], dict[Value, tuple[Value, int]]()
    for each in pipeline.shown:
        d = _row_dim(each)
        squeezed = d is not None and each.window.dims[d].kind == "squeezed"
        plain = all(op.name in ("load", "store") for op in users[each.block])
        if d is None or not squeezed or not plain or each.block.ref.rank > 1:
            shown.append(each)
            continue
        place, shape = _place(each, d), list(each.block.ref.shape)
        shape.insert(place, 1)
        block = Value(each.block.ref.with_shape(tuple(shape)), each.block.name)
        dims = each.window.dims
        dims = (*dims[:d], BlockDim(1), *dims[d + 1 :])
        shown.append(each._replace(window=replace(each.window, dims=dims), block=block))
        places[each.block] = block, place
    if not places:
        return kernel

    def at_row(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name not in ("load", "store") or op.operands[0] not in places:
            return None
        block, place = places[op.operands[0]]
        index = op.attrs["index"]
        attrs = {**op.attrs, "index": (*index[:place], At(0), *index[place:])}
        return b.emit(op.name, block, *op.operands[1:], **attrs)

    body = map_ops(pipeline.body, at_row)
    body = replace(body, params=(*pipeline.ids, *(each.block for each in shown)))
    return with_pipeline(kernel, pipeline.showing(shown, body).to_op())


def _places(kernel: Kernel) -> dict[Value, int]:
    """Blocks of one row, with the place of the row among their dimensions."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    found = {}
    for each in pipeline.shown:
        d = _row_dim(each)
        if d is not None and each.window.dims[d].kind == "blocked":
            found[each.block] = _place(each, d)
    lines = [
        op
        for op in walk(pipeline.body)
        if op.name in ("load", "store")
        and op.operands[0] in found
        and op.attrs["index"][found[op.operands[0]]] == At(0)
    ]
    tiles = [op.result if op.results else op.operands[1] for op in lines]
    return found if lines and all(v.tile.rank < 2 for v in tiles) else {}


def _of_rows(kernel: Kernel, places: dict[Value, int]) -> set[Value]:
    """Values that depend on a row."""
    found: set[Value] = set()
    body, before = Pipeline.of(find_pipeline(kernel)).body, -1
    while before != len(found):
        before = len(found)
        for op in walk(body):
            groups: list[tuple[Sequence[Value], Sequence[Value]]]
            if op.name == "for":
                loop = Loop.of(op)
                parts = (loop.inits, loop.yields, loop.carried, op.results)
                groups = [(each, each) for each in zip(*parts, strict=True)]
            elif op.name == "while":
                both = While.of(op)
                inner = (both.condition.params, both.body.params, both.body.yields)
                parts = (both.inits, *inner, op.results)
                groups = [(each, each) for each in zip(*parts, strict=True)]
            elif op.regions:
                parts = (*(region.yields for region in op.regions), op.results)
                groups = [(each, each[-1:]) for each in zip(*parts, strict=True)]
            elif op.name == "load" and op.operands[0] in places:
                row = op.attrs["index"][places[op.operands[0]]] == At(0)
                groups = [(op.results, op.results)] if row else []
                found.update(op.results if row else ())
            else:
                groups = [(op.operands, op.results)]
            for sources, results in groups:
                if any(v in found for v in sources):
                    found.update(v for v in results if not v.is_ref)
    return found


class _Rows(FormWalk):
    """Values that depend on a row have a first dimension for it."""

    def __init__(self, places: dict[Value, int], values: set[Value]):
        super().__init__()
        self.places, self.values = places, values
        self.formed |= {block: block for block in places}

    def shape(self, value: Value) -> Shape | None:
        return (1, *value.type.shape) if value in self.values else None

    def widened(self, b: Builder, formed: Value, value: Value) -> Value:
        return b.reshape(formed, shape=value.type.shape)

    def narrowed(self, b: Builder, value: Value, shape: Shape) -> Value:
        return b.broadcast(value, shape, range(1, len(shape)))

    def row(self, b: Builder, value: Value) -> Value:
        return self.formed.get(value) or self.narrowed(
            b, self.full(b, value), (1, *value.type.shape)
        )

    # --- rules ---

    def elementwise(self, b: Builder, op: Op) -> Value | None:
        shape = self.shape(op.result)
        operands = [self.full(b, v) for v in op.operands]
        if shape is not None:
            operands = [self._fitted(b, v, shape) for v in op.operands]
        return b.op(op.name, *operands, **op.attrs)

    def _fitted(self, b: Builder, value: Value, shape: Shape) -> Value:
        if value not in self.formed and len(shape) > 1 + value.type.rank:
            return self.full(b, value)  # one number for all elements
        row = self.row(b, value)
        return row if row.type.shape == shape else b.broadcast(row, shape, (0,))

    def broadcast(self, b: Builder, op: Op) -> Value | None:
        (x,), dims = op.operands, op.attrs["dims"]
        shape = (1, *op.attrs["shape"])
        return b.broadcast(self.row(b, x), shape, (0, *(d + 1 for d in dims)))

    def reshape(self, b: Builder, op: Op) -> Value | None:
        return b.reshape(self.row(b, op.operands[0]), shape=(1, *op.attrs["shape"]))

    def slice(self, b: Builder, op: Op) -> Value | None:
        new = {
            name: (first, *op.attrs[name])
            for name, first in (("starts", 0), ("limits", 1), ("strides", 1))
        }
        return b.op("slice", self.row(b, op.operands[0]), **{**op.attrs, **new})

    def along_axes(self, b: Builder, op: Op) -> Value | None:
        new = {"axes": tuple(a + 1 for a in op.attrs["axes"])}
        return b.op(op.name, self.row(b, op.operands[0]), **{**op.attrs, **new})

    def along_axis(self, b: Builder, op: Op) -> Value | None:
        operands = [self.row(b, v) for v in op.operands]
        return b.op(op.name, *operands, **{**op.attrs, "axis": op.attrs["axis"] + 1})

    RULES: ClassVar[dict[str, Callable[..., Value | None]]] = {
        "broadcast_in_dim": broadcast,
        "reshape": reshape,
        "slice": slice,
        "reduce": along_axes,
        "rev": along_axes,
        "scan": along_axis,
        "concatenate": along_axis,
        "arg_reduce": along_axis,
    }

    # --- the rows ---

    def access(self, b: Builder, op: Op) -> None:
        access, place = Access.of(op), self.places[op.operands[0]]
        entries = access.split_index()
        points = all(isinstance(entry, At) for entry, _ in entries[: place + 1])
        gathers = any(isinstance(entry, Gather) for entry, _ in entries)
        if not points or gathers:
            return self.kept(b, op)
        entries[place] = Span(0, 1), None

        accessed = access.value or op.result

        def tile(value: Value) -> Value:
            """A scalar mask stays one for tiles; one element becomes a row of one."""
            is_scalar = not value.type.shape and bool(accessed.type.shape)
            return self.full(b, value) if is_scalar else self.row(b, value)

        made = self.accessed(b, op, entries, tile)
        if made is not None:
            self.note(b, op.result, made)
        return None
