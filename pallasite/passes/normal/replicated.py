"""replicated: tiles that repeat their elements are computed and stored without copies.

In: statistics of rows kept in all 128 lanes, as TPUs like them, and sliced back; copies
by `jnp.repeat` and `jnp.tile`; values broadcast before they are computed with. Out: the
same values with one element along such dimensions, broadcast where they meet tiles that
vary along them; scratch and loop-carried values have one element there, too.

Every element of a result along a uniform dimension is computed from equal operands by
the same operations, so computing it once gives the same bits. Positions (constants,
iotas, scalars) stay as they are: nothing is saved by computing them in parts.
"""

from collections.abc import Sequence
from typing import ClassVar

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Gather, Kernel, Op, Span, Value
from pallasite.passes.normal.form_walk import (
    Entry,
    FormWalk,
    Shape,
    plain_scratch,
    reformed,
)
from pallasite.passes.normal.uniform_dims import UniformDims, groups


def replicated(kernel: Kernel) -> Kernel:
    """Compute and store uniform dimensions with one element."""
    dims = UniformDims(kernel, plain_scratch(kernel, _is_plain))
    forms = _Replicated(dims)
    if not any(forms.shape(value) is not None for value in dims.dims):
        return kernel
    return reformed(kernel, forms)


def _is_plain(access: Access, op: Op) -> bool:
    """Loads may select anything; stores must not leave out parts of uniform dims."""
    return not any(isinstance(entry, Gather) for entry in access.index)


class _Replicated(FormWalk):
    def __init__(self, dims: UniformDims):
        super().__init__()
        self.dims = dims

    def shape(self, value: Value) -> Shape | None:
        uniform = self.dims.of(value)
        if not uniform or not self.dims.is_computed(value):
            return None
        return tuple(1 if d in uniform else n for d, n in enumerate(value.type.shape))

    def widened(self, b: Builder, formed: Value, value: Value) -> Value:
        return b.broadcast(formed, value.type.shape)

    def narrowed(self, b: Builder, value: Value, shape: Shape) -> Value:
        """From a tile in its own shape, the first of equal elements."""
        sizes = value.type.shape
        if all(n in (1, m) for n, m in zip(sizes, shape, strict=True)):
            return b.broadcast(value, shape)
        last = tuple(min(n, m) for n, m in zip(sizes, shape, strict=True))
        starts, strides = (0,) * len(shape), (1,) * len(shape)
        part = b.op("slice", value, starts=starts, limits=last, strides=strides)
        return b.broadcast(part, shape)

    def least(self, b: Builder, value: Value) -> Value:
        """A value in its narrowest form."""
        return self.formed[value] if value in self.formed else self.full(b, value)

    # --- rules ---

    def broadcast(self, b: Builder, op: Op) -> Value | None:
        """The operand's uniform dims have one element, which broadcasts as well."""
        x, shape = self.least(b, op.operands[0]), self.shape(op.result)
        if shape is None:
            shape = op.attrs["shape"]
        else:
            # Dimensions with one element now are uniform, those of the operand too.
            wanted = [shape[d] for d in op.attrs["dims"]]
            x = self.narrowed(b, x, tuple(map(min, x.type.shape, wanted)))
        return b.broadcast(x, shape, op.attrs["dims"])

    def transpose(self, b: Builder, op: Op) -> Value | None:
        return b.op("transpose", self.least(b, op.operands[0]), **op.attrs)

    def slice(self, b: Builder, op: Op) -> Value | None:
        """Nothing is left to select along dimensions with one element."""
        old, attrs = op.operands[0], op.attrs
        x = self.least(b, old)
        bounds = zip(attrs["starts"], attrs["limits"], attrs["strides"], strict=True)
        kept = [
            each if n == m else (0, min(1, new), 1)
            for each, n, m, new in zip(
                bounds, x.type.shape, old.type.shape, op.result.type.shape, strict=True
            )
        ]
        starts, limits, strides = zip(*kept, strict=True)
        x = b.op("slice", x, starts=starts, limits=limits, strides=strides)
        shape = self.shape(op.result)
        if shape is None:
            return b.broadcast(x, op.result.type.shape)
        return self.narrowed(b, x, shape)

    def concatenate(self, b: Builder, op: Op) -> Value | None:
        axis, shape = op.attrs["axis"], self.shape(op.result)
        if shape is None:
            return None
        if shape[axis] == 1 and op.result.type.shape[axis] > 1:
            return self.narrowed(b, self.least(b, op.operands[0]), shape)
        parts: list[Value] = []
        for value in op.operands:
            wanted = list(shape)
            wanted[axis] = value.type.shape[axis]
            parts.append(self.narrowed(b, self.least(b, value), tuple(wanted)))
        return b.op("concatenate", *parts, axis=axis)

    def reduce(self, b: Builder, op: Op) -> Value | None:
        """Dimensions that are reduced have all their elements."""
        (old,), axes = op.operands, op.attrs["axes"]
        x = self.least(b, old)
        shape = [
            old.type.shape[d] if d in axes else n for d, n in enumerate(x.type.shape)
        ]
        return b.op("reduce", b.broadcast(x, shape), **op.attrs)

    def reshape(self, b: Builder, op: Op) -> Value | None:
        shape, (old,) = self.shape(op.result), op.operands
        if shape is None:
            return None
        sizes = list(old.type.shape)
        for before, after in groups(sizes, op.attrs["shape"]):
            if any(shape[d] != op.attrs["shape"][d] for d in after):
                for d in before:
                    sizes[d] = 1
        x = self.narrowed(b, self.least(b, old), tuple(sizes))
        return b.op("reshape", x, shape=shape)

    def rev(self, b: Builder, op: Op) -> Value | None:
        return b.op("rev", self.least(b, op.operands[0]), **op.attrs)

    RULES: ClassVar = {
        "broadcast_in_dim": broadcast,
        "transpose": transpose,
        "slice": slice,
        "concatenate": concatenate,
        "reduce": reduce,
        "reshape": reshape,
        "rev": rev,
    }

    # --- scratch ---

    def access(self, b: Builder, op: Op) -> None:
        access = Access.of(op)
        old, new = access.ref.ref.shape, self.formed[access.ref].ref.shape
        entries: list[tuple[Entry, Value | None]] = []
        for (entry, start), n, m in zip(access.split_index(), old, new, strict=True):
            if n == m:
                entries.append((entry, start))
            else:
                entries.append((At(0) if isinstance(entry, At) else Span(0, 1), None))
        shape = _shape_of(entries)
        made = self.accessed(
            b, op, entries, lambda v: self.narrowed(b, self.least(b, v), shape)
        )
        if made is not None:
            wanted = self.shape(op.result) or op.result.type.shape
            self.note(b, op.result, self.narrowed(b, made, wanted))


def _shape_of(entries: Sequence[tuple[Entry, Value | None]]) -> Shape:
    return tuple(entry.size for entry, _ in entries if isinstance(entry, Span))
