"""The elements of a ref that accesses at known places select, and their overlap."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

from pallasite.ir.nodes import Access, At, Index, Op, Span

Box = tuple[Span, ...]  # one per dimension of the ref


def box_of(op: Op) -> Box | None:
    """The elements that an unmasked load, store or addition selects; None: unknown."""
    access = Access.of(op)
    if access.mask is not None:
        return None
    return box_at(access.index, access.ref.ref.shape)


def box_at(index: Index, shape: Sequence[int]) -> Box | None:
    """The elements that an index selects, if always the same."""
    spans: list[Span] = []
    for entry, n in zip(index, shape, strict=True):
        if isinstance(entry, At):
            entry = Span(entry.start, 1)
        if not isinstance(entry, Span):
            return None
        if entry.extent == n:
            entry = replace(entry, start=0)  # starts are clamped to fit
        if entry.start is None:
            return None
        if not 0 <= entry.start <= n - entry.extent:
            return None  # clamped at run time
        spans.append(entry)
    return tuple(spans)


def disjoint(ops: Sequence[Op]) -> bool:
    """Whether accesses to one ref are pairwise disjoint."""
    boxes = [box_of(op) for op in ops]
    known = [box for box in boxes if box is not None]
    if len(known) < len(boxes):
        return len(boxes) < 2
    return all(_apart(*pair) for pair in combinations(known, 2))


def elements(op: Op) -> int:
    """How many elements an access selects."""
    box = box_of(op)
    return 0 if box is None else prod(span.size for span in box)


def _apart(one: Box, other: Box) -> bool:
    return any(_spans_apart(*pair) for pair in zip(one, other, strict=True))


def _spans_apart(one: Span, other: Span) -> bool:
    assert one.start is not None and other.start is not None
    if one.start + one.extent <= other.start or other.start + other.extent <= one.start:
        return True
    # Even elements, and odd ones.
    same = one.stride == other.stride
    return same and (one.start - other.start) % one.stride != 0
