"""Patterns on refs: known starts become static, views merge into their users.

Rewrites are applied only where they are equivalent under the clamping rules of
`ops/effects.py`. `canonicalize.py` applies the table.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.build import access_operands
from pallasite.ir.nodes import Access, At, Gather, Op, Span, Value, full_index
from pallasite.ir.opdef import names
from pallasite.ir.rewrite import Pattern, Rewriter
from pallasite.passes.normal.algebra import constant_of, reshape, transpose

Entry = tuple[At | Span | Gather, Value | None]  # an index entry and its operand


def static_starts(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """Write known, in-range starts into the index.

    A start out of range would be clamped at run time; it stays as it is, for checked
    mode to report.
    """
    access = Access.of(op)
    old = access.split_index()
    shape = access.ref.ref.shape
    new = [_static(*entry, n, b) for entry, n in zip(old, shape, strict=True)]
    return None if new == old else _emit(op, access, access.ref, new, b)


def _static(
    entry: At | Span | Gather, operand: Value | None, n: int, b: Rewriter
) -> Entry:
    start = None if operand is None else constant_of(b, operand)
    if start is None or isinstance(entry, Gather):
        return entry, operand
    last = n - (1 if isinstance(entry, At) else entry.extent)
    if not 0 <= start <= last:
        return entry, operand
    return replace(entry, start=int(start)), None


def merge_view(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """An access to a view of a ref becomes an access to the ref."""
    access = Access.of(op)
    view_op = b.producer(access.ref, "subview")
    if view_op is None:
        return None
    view = Access.of(view_op)
    if access.mask is not None and view.index_operands:
        return None  # a view's start is clamped as a whole, a masked access is not
    inner = iter(access.split_index())
    entries: list[Entry] = []
    for (outer, operand), n in zip(view.split_index(), view.ref.ref.shape, strict=True):
        merged = (outer, operand)
        if isinstance(outer, Span):
            merged = _merge(outer, operand, *next(inner), n)
        if merged is None:
            return None
        entries.append(merged)
    return _emit(op, access, view.ref, entries, b)


def _merge(
    outer: Span,
    outer_operand: Value | None,
    inner: At | Span | Gather,
    inner_operand: Value | None,
    n: int,
) -> Entry | None:
    """The entry that composes `outer` with `inner`, over `n` elements."""
    if outer == Span(0, n):
        return inner, inner_operand
    if inner == Span(0, outer.size):
        return outer, outer_operand
    if outer.size == 1 and inner == At(0):
        return At(outer.start), outer_operand
    if isinstance(inner, Gather) or inner.start is None or outer.start is None:
        return None
    start = outer.start + inner.start * outer.stride
    if isinstance(inner, At):
        return At(start), None
    return Span(start, inner.size, inner.stride * outer.stride), None


def _emit(
    op: Op, access: Access, ref: Value, entries: Sequence[Entry], b: Rewriter
) -> Sequence[Value]:
    """The same op on `ref` with another index."""
    operands = tuple(operand for _, operand in entries if operand is not None)
    new = replace(access, ref=ref, index_operands=operands)
    attrs = {**op.attrs, "index": tuple(entry for entry, _ in entries)}
    return b.emit(op.name, *access_operands(new), **attrs)


def whole_view(op: Op, b: Rewriter) -> Value | None:
    """A view of the whole ref is the ref."""
    ref = op.operands[0]
    return ref if op.attrs["index"] == full_index(ref.ref.shape) else None


def same_dtype(op: Op, b: Rewriter) -> Value | None:
    (ref,) = op.operands
    return ref if ref.ref.dtype == op.attrs["dtype"] else None


_ACCESSES = sorted(names(lambda row: row.indexed))

PATTERNS: tuple[Pattern, ...] = (
    ("subview", whole_view),
    *((name, static_starts) for name in _ACCESSES),
    *((name, merge_view) for name in _ACCESSES),
    ("reshape_view", reshape),
    ("transpose_view", transpose),
    ("bitcast_view", same_dtype),
)
