"""unit_dims: tiles, scratch and blocks of rank 3 or more lose dimensions of size one.

In: blocks (1, 128, 64) of one head or one batch element, computed with as they are.
Out: the same code on (128, 64): such dimensions of blocks are squeezed, those of
scratch and loop-carried values are dropped, and ops work on what remains. Two
dimensions always remain: (n, 1) and (1, n) are the forms of columns and rows.

A dimension of size one holds one index, 0; dropping it renames (0, i, j) to (i, j). An
index map gives the same number for a block of size one and for a squeezed dimension.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    BlockDim,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import users_of
from pallasite.ir.roles import Dot, DotSide, Pipeline
from pallasite.passes.normal.form_walk import (
    Entry,
    FormWalk,
    Shape,
    plain_scratch,
    reformed,
)

LEAST_RANK = 2


def unit_dims(kernel: Kernel) -> Kernel:
    """Drop dimensions of size one from whatever has more than two dimensions."""
    refs = plain_scratch(kernel, _is_plain) | _plain_blocks(kernel)
    forms = _UnitDims(refs)
    values = [v for op in walk(kernel.body) for v in op.results]
    values += [p for op in walk(kernel.body) for r in op.regions for p in r.params]
    if not any(forms.shape(value) is not None for value in values):
        return kernel
    return reformed(kernel, forms)


def dropped(shape: Shape) -> tuple[int, ...]:
    """The dimensions of size one to drop: the first ones, until two are left."""
    found = [d for d, n in enumerate(shape) if n == 1]
    return tuple(found[: max(0, len(shape) - LEAST_RANK)])


def _without(shape: Sequence[int], dims: Collection[int]) -> Shape:
    return tuple(n for d, n in enumerate(shape) if d not in dims)


def _is_plain(access: Access, op: Op) -> bool:
    return not any(isinstance(entry, Gather) for entry in access.index)


def _plain_blocks(kernel: Kernel) -> set[Value]:
    """Blocks with a unit dimension to drop that are only loaded and stored."""
    users = users_of(kernel.body)
    found: set[Value] = set()
    for op in walk(kernel.body):
        if op.name != "pipeline":
            continue
        for shown in Pipeline.of(op).shown:
            if all(_is_access(user, shown.block) for user in users[shown.block]):
                found.add(shown.block)
    return {ref for ref in found if not ref.ref.is_semaphore}


def _is_access(op: Op, ref: Value) -> bool:
    if op.name not in ("load", "store") or op.operands.count(ref) != 1:
        return False
    return _is_plain(Access.of(op), op)


class _UnitDims(FormWalk):
    def __init__(self, refs: set[Value]):
        super().__init__()
        self.refs = refs

    def shape(self, value: Value) -> Shape | None:
        if value.is_ref and value not in self.refs:
            return None
        shape = value.type.shape
        return _without(shape, dropped(shape)) if dropped(shape) else None

    def widened(self, b: Builder, formed: Value, value: Value) -> Value:
        dims = dropped(value.type.shape)
        kept = [d for d in range(value.type.rank) if d not in dims]
        return b.broadcast(formed, value.type.shape, kept)

    def narrowed(self, b: Builder, value: Value, shape: Shape) -> Value:
        return value if value.type.shape == shape else b.reshape(value, shape=shape)

    def in_shape(self, b: Builder, value: Value, shape: Shape) -> Value:
        """A tile without some of its dimensions of size one."""
        new = self.formed.get(value)
        return self.narrowed(b, self.full(b, value) if new is None else new, shape)

    # --- blocks ---

    def op(self, b: Builder, op: Op) -> None:
        if op.name == "pipeline":
            op = self.squeezed(b, op)
        super().op(b, op)

    def squeezed(self, b: Builder, op: Op) -> Op:
        """The pipeline with windows of fewer dimensions; its body is still the old."""
        pipeline = Pipeline.of(op)
        windows = list(pipeline.windows)
        for n, shown in enumerate(pipeline.shown):
            shape = self.shape(shown.block)
            dims = [d for d in shown.window.dims if d.kind != "squeezed"]
            gone = dropped(shown.block.ref.shape)
            if shape is None or any(dims[d] != BlockDim(1) for d in gone):
                self.refs.discard(shown.block)
                continue
            windows[n] = _squeezed(shown.window, gone)
            new = Value(shown.block.ref.with_shape(shape), shown.block.name)
            self.formed[shown.block] = self.own[shown.block] = new
        return replace(pipeline, windows=tuple(windows)).to_op()

    def access(self, b: Builder, op: Op) -> None:
        access = Access.of(op)
        gone = dropped(access.ref.ref.shape)
        entries: list[tuple[Entry, Value | None]] = []
        shape: list[int] = []
        for d, (entry, start) in enumerate(access.split_index()):
            if d not in gone:
                entries.append((entry, start))
                shape += [entry.size] if isinstance(entry, Span) else []
        new = tuple(shape)
        made = self.accessed(b, op, entries, lambda v: self.in_shape(b, v, new))
        if made is not None:
            wanted = self.shape(op.result) or op.result.type.shape
            self.note(b, op.result, self.narrowed(b, made, wanted))

    # --- rules ---

    def broadcast(self, b: Builder, op: Op) -> Value | None:
        (x,), shape, dims = op.operands, op.attrs["shape"], op.attrs["dims"]
        gone = dropped(shape)
        kept = [n for n, d in enumerate(dims) if d not in gone]
        operand = self.in_shape(b, x, tuple(x.type.shape[n] for n in kept))
        places = [dims[n] - sum(d < dims[n] for d in gone) for n in kept]
        return b.broadcast(operand, _without(shape, gone), places)

    def reshape(self, b: Builder, op: Op) -> Value | None:
        shape = _without(op.attrs["shape"], dropped(op.attrs["shape"]))
        return self.in_shape(b, op.operands[0], shape)

    def transpose(self, b: Builder, op: Op) -> Value | None:
        """The dimensions that move, without those of the result that are dropped."""
        (x,), perm = op.operands, op.attrs["perm"]
        gone = dropped(op.result.type.shape)
        moved = [d for n, d in enumerate(perm) if n not in gone]
        operand = self.in_shape(b, x, tuple(x.type.shape[d] for d in sorted(moved)))
        new = tuple(sorted(moved).index(d) for d in moved)
        return b.op("transpose", operand, perm=new)

    def reduce(self, b: Builder, op: Op) -> Value | None:
        """Reductions keep the dimensions they reduce and their result has."""
        (x,), axes = op.operands, op.attrs["axes"]
        kept = [d for d in range(x.type.rank) if d not in axes]
        gone_later = {kept[n] for n in dropped(op.result.type.shape)}
        gone = [d for d in dropped(x.type.shape) if d not in axes]
        gone = sorted({*gone, *gone_later})
        operand = self.in_shape(b, x, _without(x.type.shape, gone))
        new = tuple(a - sum(d < a for d in gone) for a in axes)
        made = b.op("reduce", operand, kind=op.attrs["kind"], axes=new)
        wanted = self.shape(op.result) or op.result.type.shape
        return self.narrowed(b, made, wanted)

    def slice(self, b: Builder, op: Op) -> Value | None:
        (x,), attrs = op.operands, op.attrs
        gone = dropped(x.type.shape)
        names = ("starts", "limits", "strides")
        if any(op.result.type.shape[d] != 1 for d in gone):
            return None
        new = {name: _without(attrs[name], gone) for name in names}
        made = b.op("slice", self.in_shape(b, x, _without(x.type.shape, gone)), **new)
        return self.narrowed(b, made, self.shape(op.result) or op.result.type.shape)

    def concatenate(self, b: Builder, op: Op) -> Value | None:
        axis, gone = op.attrs["axis"], dropped(op.result.type.shape)
        gone = tuple(d for d in gone if d != axis)
        if any(x.type.shape[d] != 1 for x in op.operands for d in gone):
            return None
        parts = [self.in_shape(b, x, _without(x.type.shape, gone)) for x in op.operands]
        new = axis - sum(d < axis for d in gone)
        made = b.op("concatenate", *parts, axis=new)
        return self.narrowed(b, made, self.shape(op.result) or op.result.type.shape)

    def constant(self, b: Builder, op: Op) -> Value | None:
        type_ = op.attrs["type"]
        shape = _without(type_.shape, dropped(type_.shape))
        return b.op("constant", **{**op.attrs, "type": type_.with_shape(shape)})

    def iota(self, b: Builder, op: Op) -> Value | None:
        type_, dim = op.attrs["type"], op.attrs["dim"]
        gone = dropped(type_.shape)
        if dim in gone:
            return None
        new = type_.with_shape(_without(type_.shape, gone))
        return b.op("iota", type=new, dim=dim - sum(d < dim for d in gone))

    def dot(self, b: Builder, op: Op) -> Value | None:
        """Batch dimensions and free ones of size one are dropped.

        One contracted dimension stays, and so does one free dimension of each side.
        """
        lhs, rhs = Dot.of(op).sides
        gone = (set(_spare(lhs)), set(_spare(rhs)))
        for left, right in _pairs(lhs, rhs):
            if left not in gone[0] or right not in gone[1]:
                gone[0].discard(left)
                gone[1].discard(right)
        made = b.op(
            "dot",
            *(
                self.in_shape(b, side.value, _without(side.value.type.shape, dims))
                for side, dims in zip((lhs, rhs), gone, strict=True)
            ),
            contract=tuple(
                _renumbered(side.contract, dims)
                for side, dims in zip((lhs, rhs), gone, strict=True)
            ),
            batch=tuple(
                _renumbered(side.batch, dims)
                for side, dims in zip((lhs, rhs), gone, strict=True)
            ),
            **{k: v for k, v in op.attrs.items() if k not in ("contract", "batch")},
        )
        return self.narrowed(b, made, self.shape(op.result) or op.result.type.shape)

    RULES: ClassVar = {
        "broadcast_in_dim": broadcast,
        "reshape": reshape,
        "transpose": transpose,
        "reduce": reduce,
        "slice": slice,
        "concatenate": concatenate,
        "constant": constant,
        "iota": iota,
        "dot": dot,
    }


def _spare(side: DotSide) -> list[int]:
    """The dimensions of one operand of a dot that may be dropped."""
    shape = side.value.type.shape
    units = {d for d, n in enumerate(shape) if n == 1}
    found = [d for d in side.batch if d in units]
    for dims in (side.free, side.contract):
        spare = [d for d in dims if d in units]
        found += spare[: max(0, len(dims) - 1)]
    return found


def _pairs(lhs: DotSide, rhs: DotSide) -> list[tuple[int, int]]:
    pairs = [*zip(lhs.batch, rhs.batch, strict=True)]
    return [*pairs, *zip(lhs.contract, rhs.contract, strict=True)]


def _renumbered(dims: Sequence[int], gone: Collection[int]) -> tuple[int, ...]:
    """Dimensions by their numbers after some are dropped."""
    return tuple(d - sum(g < d for g in gone) for d in dims if d not in gone)


def _squeezed(window: Window, gone: Sequence[int]) -> Window:
    """The window without some dimensions of its block."""
    dims: list[BlockDim] = []
    place = 0
    for dim in window.dims:
        if dim.kind != "squeezed":
            dim = BlockDim(1, "squeezed") if place in gone else dim
            place += 1
        dims.append(dim)
    return replace(window, dims=tuple(dims))
