"""row_strips: processes a block a few rows at a time, where rows are reduced.

In: a kernel whose body computes each row of its blocks from the same row of others, as
softmax and the norms do. Out: the same code in a loop over strips of rows, each loaded,
computed and stored before the next. Tiles that are live across a reduction then stay in
the L1 cache, however many rows the author's blocks have. Bodies that do anything else
are left as they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Span, Value, full_index
from pallasite.ir.opdef import Effect, table
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX, TileType

# Ops whose result rows each need only the same whole row of the operand.
_ALONG_ROWS = {"reduce": "axes", "scan": "axis"}


def row_strips(kernel: Kernel, most_bytes: int) -> Kernel:
    """Split bodies of pipelines; no tile of a strip exceeds `most_bytes`."""
    if kernel.aliases:  # aliased refs: read through one, written through another
        return kernel
    ops = [
        _cut(op, most_bytes) if op.name == "pipeline" else op for op in kernel.body.ops
    ]
    return kernel.with_(body=replace(kernel.body, ops=tuple(ops)))


def _cut(op: Op, most_bytes: int) -> Op:
    pipeline = Pipeline.of(op)
    body = pipeline.body
    rows = _rows(body)
    if rows is None:
        return op
    apart = _apart(body, rows)
    if apart is None:
        return op
    size = _strip(rows, [v for inner in apart for v in inner.results], most_bytes)
    if size is None:
        return op
    return pipeline.with_(body=_Strips(body, rows, apart, size).body()).to_op()


def _rows(body: Block) -> int | None:
    """The number of rows of the blocks; None if nothing is reduced along rows."""
    for op in body.ops:
        if op.name in _ALONG_ROWS and op.operands[0].tile.rank > 1:
            return op.operands[0].tile.shape[0]
    return None


def _strip(rows: int, values: Sequence[Value], most_bytes: int) -> int | None:
    """Rows per strip, a divisor of all rows; None if splitting does not pay off."""
    row_bytes = max(prod(v.tile.shape[1:]) * v.tile.dtype.bytes for v in values)
    if rows < 2 or not row_bytes:
        return None
    most = max(1, most_bytes // row_bytes)
    best = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    # A few short rows are reduced more slowly than many; single long ones as fast.
    return best if best < rows and 8 * best * row_bytes > most_bytes else None


def _apart(body: Block, rows: int) -> set[Op] | None:
    """The ops that can run strip by strip, if all others can run before them."""
    apart, cut = set[Op](), set[Value]()
    loaded, stored = set[Value](), set[Value]()
    for op in body.ops:
        if op.name == "store" and _is_whole(op, rows) and op.operands[1] in cut:
            stored.add(op.operands[0])
            apart.add(op)
        elif op.name == "load" and _is_whole(op, rows):
            loaded.add(op.operands[0])
            apart.add(op)
            cut.update(op.results)
        elif _has_rows(op, rows) and _is_by_row(op, cut, rows):
            apart.add(op)
            cut.update(op.results)
        elif op.regions or cut & set(op.operands) or not _can_be_first(op):
            return None
        elif op.name == "load":
            loaded.add(op.operands[0])
    return apart if stored and not stored & loaded and not body.yields else None


def _is_whole(op: Op, rows: int) -> bool:
    return Access.of(op).is_whole and op.operands[0].ref.shape[:1] == (rows,)


def _has_rows(op: Op, rows: int) -> bool:
    types = [v.type for v in op.results]
    return (
        len(types) == 1 and isinstance(types[0], TileType) and _is_cut(types[0], rows)
    )


def _is_cut(type: TileType, rows: int) -> bool:
    return type.rank > 0 and type.shape[0] == rows


def _can_be_first(op: Op) -> bool:
    return table()[op.name].effect is Effect.PURE or op.name == "load"


def _is_by_row(op: Op, cut: set[Value], rows: int) -> bool:
    """Whether each row of the result is computed from the same row of the operands."""
    name, attrs = op.name, op.attrs
    if name == "constant":
        return True
    if name == "iota":
        return attrs["dim"] != 0
    if name == "broadcast_in_dim":
        (x,), dims = op.operands, attrs["dims"]
        if x in cut:
            return dims[0] == 0 and x.tile.shape[0] == rows
        return all(d != 0 or n == 1 for d, n in zip(dims, x.tile.shape, strict=True))
    if not all(v in cut for v in op.operands):
        return False
    if name in _ALONG_ROWS:
        axes = attrs[_ALONG_ROWS[name]]
        return 0 not in (axes if isinstance(axes, tuple) else (axes,))
    return name == "reshape" or table()[name].elementwise


class _Strips:
    """A body being split into strips."""

    def __init__(self, body: Block, rows: int, apart: set[Op], size: int):
        self.old, self.rows, self.apart, self.size = body, rows, apart, size
        self.new: dict[Value, Value] = {}  # strips of values

    def body(self) -> Block:
        before, inside = Builder(), Builder()
        start = Value(INDEX, "row")
        for op in self.old.ops:
            if op in self.apart:
                inside.loc = op.loc
                self._emit(inside, op, start)
            else:
                before.ops.append(op)
        limits = [before.index(n) for n in (0, self.rows, self.size)]
        before.emit("for", *limits, regions=(inside.block([start]),))
        return replace(self.old, ops=tuple(before.ops))

    def _emit(self, b: Builder, op: Op, start: Value) -> None:
        if op.name in ("load", "store"):
            ref = op.operands[0]
            index = (Span(None, self.size), *full_index(ref.ref.shape)[1:])
            if op.name == "load":
                self.new[op.result] = b.load(ref, index, [start])
            else:
                b.store(ref, self.new[op.operands[1]], index, [start])
            return
        attrs = dict(op.attrs)
        if "shape" in attrs:
            attrs["shape"] = (self.size, *attrs["shape"][1:])
        if "type" in attrs:
            attrs["type"] = TileType(
                (self.size, *attrs["type"].shape[1:]), attrs["type"].dtype
            )
        operands = [self.new.get(v, v) for v in op.operands]
        self.new[op.result] = b.op(op.name, *operands, **attrs)
