"""Builder: appends ops in order, with result types from the op table.

`Builder.emit` is the only way to make an op; the methods below it are shorthands for
the ops that passes and decompositions use most.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from pallasite.ir import types as T
from pallasite.ir.nodes import Access, Block, Index, Loc, Op, Span, Value, full_index
from pallasite.ir.opdef import table

Scalar = bool | int | float


def _plain(value: Any) -> Any:
    """Convert numpy's numbers and those of JAX tracing to Python's.

    An attribute is then exactly what its text says, and an emitter may print it as is.
    """
    if type(value) is tuple:
        return tuple(_plain(each) for each in cast(tuple[Any, ...], value))
    if isinstance(value, np.generic):
        return cast(object, value.item())
    return int(value) if isinstance(value, int) and type(value) is not bool else value


class Builder:
    """Collects ops for one block."""

    def __init__(
        self, loc: Loc | None = None, watch: Callable[[Op], None] | None = None
    ):
        self.ops: list[Op] = []
        self.loc = loc
        self.watch = watch  # called with each op

    def emit(
        self,
        name: str,
        *operands: Value,
        regions: Sequence[Block] = (),
        names: Sequence[str] = (),
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Append op `name`; its result types come from the row's type rule."""
        row = table()[name]
        attrs = {key: _plain(value) for key, value in attrs.items()}
        rule_attrs = {**attrs, "regions": tuple(regions)} if regions else attrs
        result_types = row.type_rule(tuple(v.type for v in operands), rule_attrs)
        hints = [*names, *[""] * (len(result_types) - len(names))]
        results = tuple(Value(t, n) for t, n in zip(result_types, hints, strict=True))
        op = Op(name, operands, results, attrs, tuple(regions), self.loc)
        self.ops.append(op)
        if self.watch is not None:
            self.watch(op)
        return results

    def op(self, name: str, *operands: Value, **attrs: Any) -> Value:
        """`emit` for ops with one result."""
        (result,) = self.emit(name, *operands, **attrs)
        return result

    def block(self, params: Sequence[Value] = (), yields: Sequence[Value] = ()):
        return Block(tuple(params), tuple(self.ops), tuple(yields))

    def constant(self, value: Scalar, type: T.TileType) -> Value:
        """A tile filled with one number."""
        return self.op("constant", value=python_scalar(value, type.dtype), type=type)

    def like(self, value: Scalar, other: Value) -> Value:
        """A constant of the same type as `other`."""
        return self.constant(value, other.tile)

    def index(self, value: int) -> Value:
        return self.constant(value, T.INDEX)

    def cast(self, x: Value, dtype: T.DType) -> Value:
        return x if x.tile.dtype == dtype else self.op("cast", x, dtype=dtype)

    def as_index(self, x: Value) -> Value:
        """Integers as indices; those that no index can be become the nearest one.

        A cast alone would wrap: 2**32 + 1 would be inside an array of two elements.
        """
        (low, high), (least, most) = x.tile.dtype.limits, T.INDEX.dtype.limits
        if low < least or high > most:
            low, high = self.like(max(low, least), x), self.like(most, x)
            if x.tile.shape:
                low, high = (self.broadcast(v, x.tile.shape) for v in (low, high))
            x = self.op("clamp", low, x, high)
        return self.cast(x, T.INDEX.dtype)

    def select(self, pred: Value, on_true: Value, on_false: Value) -> Value:
        return self.op("select_n", pred, on_false, on_true)

    def broadcast(
        self, x: Value, shape: Sequence[int], dims: Sequence[int] | None = None
    ) -> Value:
        """Broadcast; dimension d of `x` becomes `dims[d]` (default: trailing ones)."""
        shape = tuple(shape)
        if dims is None:
            dims = range(len(shape) - x.tile.rank, len(shape))
        if x.tile.shape == shape:
            return x
        return self.op("broadcast_in_dim", x, shape=shape, dims=tuple(dims))

    def load(
        self,
        ref: Value,
        index: Index | None = None,
        operands: Sequence[Value] = (),
        mask: Value | None = None,
        other: Value | None = None,
        **notes: Any,
    ) -> Value:
        index = full_index(ref.ref.shape) if index is None else index
        extra = [v for v in (mask, other) if v is not None]
        attrs = dict(index=index, mask=mask is not None, other=other is not None)
        return self.op("load", ref, *operands, *extra, **attrs, **notes)

    def store(
        self,
        ref: Value,
        value: Value,
        index: Index | None = None,
        operands: Sequence[Value] = (),
        mask: Value | None = None,
    ) -> None:
        index = full_index(ref.ref.shape) if index is None else index
        extra = [] if mask is None else [mask]
        self.emit(
            "store", ref, value, *operands, *extra, index=index, mask=mask is not None
        )

    def subview(
        self, ref: Value, index: Index, operands: Sequence[Value] = ()
    ) -> Value:
        return self.op("subview", ref, *operands, index=index)

    def __getattr__(self, name: str) -> Callable[..., Value]:
        """`b.add(x, y)`: any op of the table with one result."""
        if name.startswith("_") or name.rstrip("_") not in table():
            raise AttributeError(name)
        return partial(self.op, name.rstrip("_"))


def python_scalar(value: Any, dtype: T.DType) -> Scalar:
    """`value` rounded to `dtype`, as the Python number the text form prints."""
    if not hasattr(value, "dtype") and hasattr(value, "__jax_array__"):
        return value  # a symbolic size
    array = np.asarray(value).astype(dtype.np)
    if dtype.is_bool:
        return bool(array)
    return float(array) if dtype.is_float else int(array)


def part_start(
    b: Builder, span: Span, start: Value | None, size: int, offset: Value, masked: bool
) -> Value:
    """Where the part of a span starts that is `offset` elements into it.

    A part must not be clamped by itself: what an access clamps is the whole span.

    Args:
        b: where code goes.
        span: what is divided.
        start: its operand in the index, if it has one.
        size: that of the dimension.
        offset: in elements of the span.
        masked: the access has a mask, so its elements are clamped one by one.
    """
    step = offset if span.stride == 1 else b.mul(offset, b.index(span.stride))
    if start is None:
        assert span.start is not None
        return b.add(b.index(span.start), step) if span.start else step
    first = b.as_index(start)
    if not masked:
        first = b.clamp(b.index(0), first, b.index(size - span.extent))
    return b.add(first, step)


def access_operands(access: Access) -> tuple[Value, ...]:
    """The operand tuple of a memory op from its roles (inverse of `Access.of`)."""
    optional = (access.compare, access.value)
    tail = (access.mask, access.other)
    return (
        access.ref,
        *(v for v in optional if v is not None),
        *access.index_operands,
        *(v for v in tail if v is not None),
    )
