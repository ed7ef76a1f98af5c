"""Refs while the evaluator runs: a view is a root and how to reach its elements.

A view is a rectangle of the root (one Range per root dimension), then, rarely, steps
that are not rectangles: reshape, transpose, bitcast, and slices after those.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pallasite.interpret.numbers import Numbers, Pick
from pallasite.ir.nodes import At, Gather, Index, Span, Value

Array = Any


@dataclass(frozen=True)
class Range:
    """One root dimension as a view sees it; `kept` False: the view has no such dim.

    `low`/`high`: the root positions that exist, where the run may leave them.
    """

    start: Array | int
    size: int
    stride: int = 1
    kept: bool = True
    low: Array | int | None = None
    high: Array | int | None = None


@dataclass(frozen=True)
class Fill:
    """What reading outside a window's array gives.

    `bounds`: per root dimension the first and past-last position of that array; None
    where the window never leaves it.
    """

    value: Any
    bounds: tuple[tuple[Array | int, Array | int] | None, ...]

    def picks(self, picks: Sequence[Pick]) -> list[Pick]:
        """The same positions with the array's bounds."""
        pairs = zip(picks, self.bounds, strict=True)
        ends = ((p, bounds or (None, None)) for p, bounds in pairs)
        return [replace(p, low=low, high=high) for p, (low, high) in ends]


@dataclass(frozen=True)
class View:
    """A ref: where its elements are."""

    root: Value
    ranges: tuple[Range, ...]
    steps: tuple[tuple[str, Any], ...] = ()
    # Of windows on the way to it, outermost first, where it is not padding already.
    fills: tuple[Fill, ...] = ()

    @property
    def rectangle_shape(self) -> tuple[int, ...]:
        return tuple(r.size for r in self.ranges if r.kept)


# One dimension of an access: a run or a gather, with its (possibly dynamic) numbers.
Entry = tuple[At | Span | Gather, Array | None]


def narrow(view: View, entries: Sequence[Entry], numbers: Numbers) -> View:
    """The view of a subview."""
    if view.steps:
        return replace(view, steps=(*view.steps, ("index", tuple(entries))))
    kept = iter(entries)
    ranges = []
    for r in view.ranges:
        if not r.kept:
            ranges.append(r)
            continue
        entry, operand = next(kept)
        assert not isinstance(entry, Gather)
        start, size, stride, keeps = _run(entry, operand, r.size, numbers)
        ranges.append(
            Range(
                numbers.add(r.start, numbers.mul(start, r.stride)),
                size,
                r.stride * stride,
                keeps,
                r.low,
                r.high,
            )
        )
    return replace(view, ranges=tuple(ranges))


# --- views of what the copy engine of a GPU brings ---


def reach(view: View, entries: Sequence[Entry], numbers: Numbers) -> View:
    """The view of a subview that is not clamped: outside are zeros, and nothing that
    is written there stays."""
    kept, ranges, bounds = iter(entries), [], []
    for r in view.ranges:
        if not r.kept:
            ranges.append(r)
            bounds.append(None)
            continue
        entry, operand = next(kept)
        assert not isinstance(entry, Gather)
        size, stride = (1, 1) if isinstance(entry, At) else (entry.size, entry.stride)
        extent = (size - 1) * stride + 1
        start = entry.start if operand is None else operand
        low, high, ends = r.low, r.high, None
        if not (isinstance(start, int) and 0 <= start <= r.size - extent):
            ends = (r.start, numbers.add(r.start, (r.size - 1) * r.stride + 1))
            low = ends[0] if low is None else numbers.larger(low, ends[0])
            high = ends[1] if high is None else numbers.smaller(high, ends[1])
        place = numbers.add(r.start, numbers.mul(start, r.stride))
        keeps = isinstance(entry, Span)
        ranges.append(Range(place, size, r.stride * stride, keeps, low, high))
        bounds.append(ends)
    fills = (*view.fills, Fill(0, tuple(bounds))) if any(bounds) else view.fills
    return replace(view, ranges=tuple(ranges), fills=fills)


def _run(entry: At | Span, operand: Any, extent: int, numbers: Numbers):
    """Start, size, stride and kept of a run inside `extent` elements, clamped."""
    size, stride = (1, 1) if isinstance(entry, At) else (entry.size, entry.stride)
    reach = 1 if isinstance(entry, At) else entry.extent
    start = entry.start
    if start is None:
        start = numbers.clamp(operand, 0, numbers.larger(extent - reach, 0))
    return start, size, stride, isinstance(entry, Span)


def picks_of(
    ranges: Sequence[Range],
    entries: Sequence[Entry],
    numbers: Numbers,
    masked: bool,
    reads: bool = False,
) -> list[Pick]:
    """Root positions of an access through a rectangle.

    With a mask, starts are not clamped: each element outside the view is, by a read,
    or dropped, by a write.
    """
    kept = iter(entries)
    picks = []
    for r in ranges:
        if not r.kept:
            picks.append(Pick(r.start, 1, 1, False, None, r.low, r.high))
            continue
        entry, operand = next(kept)
        picks.append(_pick(r, entry, operand, numbers, masked, reads))
    return picks


def _pick(
    r: Range, entry: Any, operand: Any, numbers: Numbers, masked: bool, reads: bool
) -> Pick:
    low, high, clip = r.low, r.high, None
    if isinstance(entry, Gather) or (masked and entry.start is None):
        # The positions of this view's own elements.
        first, last = r.start, numbers.add(r.start, (r.size - 1) * r.stride + 1)
        if reads:
            clip = (first, last)
        else:
            low = first if low is None else numbers.larger(low, first)
            high = last if high is None else numbers.smaller(high, last)
    if isinstance(entry, Gather):
        # Far outside is as good as just outside, and cannot overflow below.
        operand = numbers.clamp(operand, -1, r.size)
        gather = numbers.add(r.start, numbers.mul(operand, r.stride))
        return Pick(gather=gather, low=low, high=high, clip=clip)
    if masked and entry.start is None:
        reach = 1 if isinstance(entry, At) else entry.extent
        start: Any = numbers.clamp(operand, -reach, r.size)
        size, stride = (1, 1) if isinstance(entry, At) else (entry.size, entry.stride)
        keeps = isinstance(entry, Span)
    else:
        start, size, stride, keeps = _run(entry, operand, r.size, numbers)
    start = numbers.add(r.start, numbers.mul(start, r.stride))
    return Pick(start, size, stride * r.stride, keeps, None, low, high, clip)


def whole_picks(ranges: Sequence[Range]) -> list[Pick]:
    return [
        Pick(r.start, r.size, r.stride, r.kept, None, r.low, r.high) for r in ranges
    ]


def entries_of(index: Index, operands: Sequence[Array]) -> list[Entry]:
    """Pair index entries with the operand values they take."""
    pending = iter(operands)
    return [
        (e, next(pending) if isinstance(e, Gather) or e.start is None else None)
        for e in index
    ]
