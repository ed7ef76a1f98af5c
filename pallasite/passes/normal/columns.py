"""columns: one number per row has the rank of the rows, with one element in each.

In: statistics of rows kept as (n,), such as the maxima and sums of a running softmax,
or the variance that a norm broadcasts along its rows. Out: the same numbers as (n, 1),
which is how reductions with `keepdims` spell them. What becomes a column: tiles that
are broadcast along a further, last dimension, and all tiles, scratch and loop-carried
values that elementwise ops combine them with.

Inserting a dimension of size one renames the element at i to (i, 0).
"""

from collections.abc import Sequence
from typing import ClassVar

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Kernel, Op, Span, Value, full_index, walk
from pallasite.ir.rewrite import is_elementwise
from pallasite.ir.roles import Loop, While
from pallasite.passes.normal.form_walk import (
    Entry,
    FormWalk,
    Shape,
    plain_scratch,
    reformed,
)


def columns(kernel: Kernel) -> Kernel:
    """Insert a last dimension into tiles that are broadcast along one."""
    scratch = plain_scratch(kernel, lambda access, op: _is_whole(access))
    lines = _Lines(kernel, scratch)
    return reformed(kernel, _Columns(lines)) if lines.roots else kernel


def _is_whole(access: Access) -> bool:
    return access.index == full_index(access.ref.ref.shape)


def _column_dims(op: Op) -> tuple[int, ...] | None:
    """Where the dimensions of a broadcast line go, with one that follows them."""
    dims, rank = op.attrs["dims"], op.result.type.rank
    if not dims or dims[-1] + 1 == rank or not op.operands[0].type.shape:
        return None
    return (*dims, dims[-1] + 1)


class _Lines:
    """Which values have one number per row, without a dimension for the row."""

    def __init__(self, kernel: Kernel, scratch: set[Value]):
        self.parent: dict[Value, Value] = {}
        computed: set[Value] = set()  # by more than a load
        broadcast: list[Value] = []
        for op in walk(kernel.body):
            if op.name in ("for", "while", "cond"):
                self._join_control(op)
            elif op.name in ("load", "store") and op.operands[0] in scratch:
                self._join(op.operands[0], op.result if op.results else op.operands[1])
            elif is_elementwise(op):
                for value in op.operands:
                    if value.type.shape == op.result.type.shape:
                        self._join(value, op.result)
                computed.add(op.result)
            elif op.name == "broadcast_in_dim" and _column_dims(op) is not None:
                broadcast.append(op.operands[0])
        roots = {self._root(value) for value in computed}
        self.roots = {root for v in broadcast if (root := self._root(v)) in roots}

    def has(self, value: Value) -> bool:
        return bool(value.type.shape) and self._root(value) in self.roots

    def _root(self, value: Value) -> Value:
        root = value
        while root in self.parent:
            root = self.parent[root]
        while value is not root:  # the next walk is short
            self.parent[value], value = root, self.parent[value]
        return root

    def _join(self, x: Value, y: Value) -> None:
        x, y = self._root(x), self._root(y)
        if x is not y:
            self.parent[x] = y

    def _join_control(self, op: Op) -> None:
        if op.name == "for":
            loop = Loop.of(op)
            parts = (loop.inits, loop.carried, loop.yields, op.results)
        elif op.name == "while":
            both = While.of(op)
            inner = (both.condition.params, both.body.params, both.body.yields)
            parts = (both.inits, *inner, op.results)
        else:
            parts = (*(region.yields for region in op.regions), op.results)
        for first, *rest in zip(*parts, strict=True):
            for value in rest if not first.is_ref else ():
                self._join(first, value)


class _Columns(FormWalk):
    def __init__(self, lines: _Lines):
        super().__init__()
        self.lines = lines

    def shape(self, value: Value) -> Shape | None:
        return (*value.type.shape, 1) if self.lines.has(value) else None

    def widened(self, b: Builder, formed: Value, value: Value) -> Value:
        return b.reshape(formed, shape=value.type.shape)

    def narrowed(self, b: Builder, value: Value, shape: Shape) -> Value:
        return b.broadcast(value, shape, range(len(shape) - 1))

    # --- rules ---

    def constant(self, b: Builder, op: Op) -> Value | None:
        shape = (*op.result.type.shape, 1)
        return b.op(
            "constant", **{**op.attrs, "type": op.result.tile.with_shape(shape)}
        )

    def iota(self, b: Builder, op: Op) -> Value | None:
        shape = (*op.result.type.shape, 1)
        return b.op("iota", **{**op.attrs, "type": op.result.tile.with_shape(shape)})

    def broadcast(self, b: Builder, op: Op) -> Value | None:
        (x,), shape, dims = op.operands, op.attrs["shape"], op.attrs["dims"]
        if self.shape(op.result) is not None:
            shape = (*shape, 1)
            if x in self.formed and dims and dims[-1] + 2 == len(shape):
                return b.broadcast(self.formed[x], shape, (*dims, len(shape) - 1))
            return b.broadcast(self.full(b, x), shape, dims)
        wider = _column_dims(op)
        if wider is None:
            return None
        return b.broadcast(self.formed[x], shape, wider)

    def reshape(self, b: Builder, op: Op) -> Value | None:
        """A reshape that only adds the dimension is the column itself."""
        (x,), shape = op.operands, op.attrs["shape"]
        if self.shape(op.result) is None and shape == (*x.type.shape, 1):
            return self.formed[x]
        return None

    RULES: ClassVar = {
        "constant": constant,
        "iota": iota,
        "broadcast_in_dim": broadcast,
        "reshape": reshape,
    }

    # --- scratch ---

    def access(self, b: Builder, op: Op) -> None:
        entries: Sequence[tuple[Entry, Value | None]] = Access.of(op).split_index()
        value = op.result if op.results else op.operands[1]
        is_column = self.shape(value) is not None
        last = Span(0, 1) if is_column else At(0)
        made = self.accessed(
            b,
            op,
            [*entries, (last, None)],
            lambda v: self.yielded(b, v, value),
        )
        if made is not None:
            self.note(b, op.result, made)
