"""folded_ranges: elements of tiles as what an operation makes of a range of others.

Scans that are written out consist of shifted copies: slices, padding, concatenations
and choices by position. Here each element along a dimension is followed through such
code, as the sum (the product, maximum, minimum) of a range of elements of one tile, or
as the state of a recurrence, `h[t] = a[t] * h[t - 1] + b[t]`, after a range of steps.

Proof: a slice picks ranges, a concatenation joins them, as a choice does whose
positions are known. An operation on two elements gives the union of their ranges if
these are adjoining, or overlap and the operation is a maximum or minimum; one on its
neutral element gives the other. The state after the steps [i, k) is that after [j, k)
plus the product of their factors with the state after [i, j).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.roles import number_of
from pallasite.ops.neutral import neutral

KINDS = {"add": "sum", "max": "max", "min": "min", "mul": "prod"}
IDEMPOTENT = ("max", "min")
STATE, MOVED = "state", "moved"
LEAST = 4  # elements of a scan

_COMPARE: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


@dataclass(frozen=True, eq=False)
class Ranges:
    """Each element along a dimension as what an operation makes of a range.

    Attributes:
        base: the tile whose elements these are.
        dim: the dimension.
        low, high: of the range.
        filled: elements that are a number instead, which is in `low`; else NaN.
        kind: the operation; "" for single elements; "state" of a recurrence; "moved":
            a state times the factors of the steps from `middle` on.
        factor: the tile of a recurrence's factors.
        start: the state before all steps, equal along the dimension; None: zero.
        back: whether later steps come first.
    """

    base: Value
    dim: int
    low: np.ndarray
    high: np.ndarray
    filled: np.ndarray
    kind: str = ""
    factor: Value | None = None
    middle: np.ndarray | None = None
    start: Value | None = None
    back: bool = False

    def picked(self, pick: Callable[[np.ndarray], np.ndarray]) -> "Ranges | None":
        if self.kind == MOVED:
            return None
        low, high, filled = map(pick, (self.low, self.high, self.filled))
        return replace(self, low=low, high=high, filled=filled)

    @property
    def is_range(self) -> np.ndarray:
        return np.isnan(self.filled)

    def is_whole(self, back: bool = False) -> bool:
        """Whether these are all elements up to each one, or from each one on."""
        n, at = len(self.low), np.arange(len(self.low))
        if not self.kind or self.kind == MOVED or not self.is_range.all():
            return False
        if n < LEAST or n != self.base.tile.shape[self.dim]:
            return False
        if back:
            return bool((self.low == at).all() and (self.high == n).all())
        return bool((self.low == 0).all() and (self.high == at + 1).all())


def ranges_in(block: Block, made: Mapping[Value, Op]) -> dict[Value, Ranges]:
    """What is known of the tiles that a block makes."""
    return _Search(made).block(block)


class _Search:
    def __init__(self, made: Mapping[Value, Op]):
        self.made = made
        self.known: dict[Value, Ranges] = {}

    def block(self, block: Block) -> dict[Value, Ranges]:
        for op in block.ops:
            rule = _RULES.get(op.name)
            if rule is None or len(op.results) != 1 or not op.result.tile.rank:
                continue
            found = rule(self, op)
            if found is not None:
                self.known[op.result] = found
        return self.known

    # --- single elements, numbers ---

    def elements(self, value: Value, dim: int) -> Ranges:
        """A tile as elements of its own."""
        at = np.arange(value.tile.shape[dim])
        return Ranges(value, dim, at, at + 1, np.full(len(at), np.nan))

    def numbers(self, value: Value, like: Ranges) -> Ranges | None:
        """A tile of which all elements are one number."""
        number = self.number(value)
        if number is None or number != number:  # NaN marks ranges
            return None
        n = value.tile.shape[like.dim]
        none = np.full(n, -1)
        return replace(like, low=none, high=none, filled=np.full(n, float(number)))

    def number(self, value: Value) -> float | None:
        op = self.made.get(value)
        while op is not None and op.name in ("broadcast_in_dim", "cast"):
            op = self.made.get(op.operands[0])
        if op is None or op.name != "constant":
            return None
        number = op.attrs["value"]
        return number if isinstance(number, int | float) else None

    def along(self, value: Value, dim: int) -> np.ndarray | None:
        """The elements of a tile along a dimension, if only their position decides."""
        op = self.made.get(value)
        number = self.number(value)
        if op is None or number is not None:
            return None if number is None else np.asarray(number)
        if op.name == "iota" and op.attrs["dim"] == dim:
            return np.arange(value.tile.shape[dim])
        if op.name in ("broadcast_in_dim", "cast"):
            (x,) = op.operands
            dims = op.attrs.get("dims", range(x.tile.rank))
            inner = {to: d for d, to in enumerate(dims)}
            return self.along(x, inner[dim]) if dim in inner else None
        if op.name in _COMPARE:
            one, two = (self.along(v, dim) for v in op.operands)
            if one is not None and two is not None:
                return _COMPARE[op.name](one, two)
        return None

    # --- moves ---

    def slice_(self, op: Op) -> Ranges | None:
        (x,) = op.operands
        names = ("starts", "limits", "strides")
        parts = [
            slice(*each)
            for each in zip(*(op.attrs[name] for name in names), strict=True)
        ]
        cut = [
            d
            for d, (part, n) in enumerate(zip(parts, x.tile.shape, strict=True))
            if part != slice(0, n, 1)
        ]
        if len(cut) != 1:
            return None
        (dim,) = cut
        ranges = self.known.get(x) or self.elements(x, dim)
        return ranges.picked(lambda a: a[parts[dim]]) if ranges.dim == dim else None

    def rev(self, op: Op) -> Ranges | None:
        (x,), (dim, *more) = op.operands, op.attrs["axes"]
        ranges = self.known.get(x) or self.elements(x, dim)
        same = not more and ranges.dim == dim
        return ranges.picked(lambda a: a[::-1]) if same else None

    def concatenate(self, op: Op) -> Ranges | None:
        found = [self.known.get(v) for v in op.operands]
        like = next((p for p in found if p is not None), None)
        if like is None or op.attrs["axis"] != like.dim:
            return None
        pairs = zip(op.operands, found, strict=True)
        parts = [p or self.numbers(v, like) for v, p in pairs]
        pieces = [p for p in parts if p is not None]
        first = _same(pieces)
        if first is None or len(pieces) < len(parts):
            return None
        join = lambda name: np.concatenate([getattr(p, name) for p in pieces])
        low, high, filled = map(join, ("low", "high", "filled"))
        return replace(first, low=low, high=high, filled=filled)

    def pad(self, op: Op) -> Ranges | None:
        x, filling = op.operands
        ranges, number = self.known.get(x), number_of(self.made, filling)
        low, high, interior = (op.attrs[name] for name in ("low", "high", "interior"))
        dims = [d for d in range(x.tile.rank) if low[d] or high[d] or interior[d]]
        if number is None or number != number or len(dims) != 1:
            return None
        (d,) = dims
        ranges = ranges or self.elements(x, d)
        if ranges.dim != d or min(*low, *high) < 0:
            return None
        places = low[d] + np.arange(len(ranges.low)) * (interior[d] + 1)

        def spread(a: np.ndarray) -> np.ndarray:
            rest = number if a is ranges.filled else -1
            wide = np.full(op.result.tile.shape[d], rest, a.dtype)
            wide[places] = a
            return wide

        return ranges.picked(spread)

    def select(self, op: Op) -> Ranges | None:
        """A choice by position."""
        which, *values = op.operands
        found = [self.known.get(v) for v in values]
        like = next((p for p in found if p is not None), None)
        if like is None or len(values) != 2 or not which.tile.rank:
            return None
        test = self.along(which, like.dim)
        pairs = zip(values, found, strict=True)
        parts = [p or self.numbers(v, like) or self.leaf(v, like) for v, p in pairs]
        first = _same(parts)
        if first is None or test is None:
            return None
        pick = lambda name: np.where(test, *(getattr(p, name) for p in parts[::-1]))
        low, high, filled = map(pick, ("low", "high", "filled"))
        return replace(first, low=low, high=high, filled=filled)

    def leaf(self, value: Value, like: Ranges) -> Ranges:
        return self.elements(value, like.dim)

    # --- operations ---

    def binary(self, op: Op) -> Ranges | None:
        found = [self.known.get(v) for v in op.operands]
        like = next((p for p in found if p is not None), None)
        if like is None or any(not v.tile.rank for v in op.operands):
            return None
        pairs = zip(op.operands, found, strict=True)
        x, y = (p or self.numbers(v, like) or self.leaf(v, like) for v, p in pairs)
        if op.name == "add":
            after = self.next_state(x, y) or self.next_state(y, x)
            if after is not None:
                return after
        union = self.union(op, x, y)
        if union is None and op.name == "mul":
            one, two = op.operands
            return (
                self.moved(x, y)
                or self.moved(y, x)
                or self.moved_start(x, two)
                or self.moved_start(y, one)
            )
        return union

    def union(self, op: Op, x: Ranges, y: Ranges) -> Ranges | None:
        first = _same([x, y])
        if first is None or first.kind == MOVED:
            return None
        one = float(neutral(KINDS[op.name], op.result.tile.dtype))
        no_x, no_y = ~x.is_range, ~y.is_range
        for part in (x, y):
            if not (part.is_range | (part.filled == one)).all():
                return None
        apart = no_x | no_y
        low = np.where(no_x, y.low, np.where(no_y, x.low, np.minimum(x.low, y.low)))
        high = np.where(
            no_x, y.high, np.where(no_y, x.high, np.maximum(x.high, y.high))
        )
        filled = np.where(no_x, y.filled, x.filled)
        result = replace(first, low=low, high=high, filled=filled)
        if apart.all():
            return result
        if first.kind not in ("", op.name):
            return None
        touch = (x.high == y.low) | (y.high == x.low)
        if op.name in IDEMPOTENT:
            touch |= (x.high >= y.low) & (y.high >= x.low)
        return replace(result, kind=op.name) if (touch | apart).all() else None

    def moved(self, factors: Ranges, states: Ranges) -> Ranges | None:
        """States times the factors of the steps after them; zero stays zero."""
        if factors.kind not in ("", "mul") or states.kind not in ("", STATE):
            return None
        factor, ranges = factors.base, states.is_range
        if factors.dim != states.dim or not factors.is_range.all():
            return None
        if states.kind and states.factor is not factor:
            return None
        if not ranges.any() or not (ranges | (states.filled == 0)).all():
            return None
        found = [
            back
            for back in (False, True)
            if all(
                (factors.high == states.low if back else factors.low == states.high)
                | ~ranges
            )
        ]
        if not found or (states.kind and states.back not in found):
            return None
        back = found[0]
        low, high = (factors.low, states.high) if back else (states.low, factors.high)
        middle = factors.high if back else factors.low
        rest = replace(states, factor=factor, kind=MOVED, back=back)
        return replace(rest, low=low, high=high, middle=middle)

    def moved_start(self, factors: Ranges, start: Value) -> Ranges | None:
        """What the steps make of a state before all of them."""
        if factors.kind not in ("", "mul") or not factors.is_range.all():
            return None
        op, dim = self.made.get(start), factors.dim
        if op is None or op.name != "broadcast_in_dim":
            return None
        (x,), dims = op.operands, op.attrs["dims"]
        if dim in dims and x.tile.shape[dims.index(dim)] != 1:
            return None
        n = factors.base.tile.shape[dim]
        forward, back = (factors.low == 0).all(), (factors.high == n).all()
        if not forward and not back:
            return None
        middle = factors.low if forward else factors.high
        return replace(
            factors,
            kind=MOVED,
            factor=factors.base,
            middle=middle,
            start=start,
            back=not forward,
        )

    def next_state(self, states: Ranges, earlier: Ranges) -> Ranges | None:
        """States after the steps of both."""
        if earlier.kind != MOVED or states.kind not in ("", STATE):
            return None
        factor, back = earlier.factor, earlier.back
        if states.kind and (states.factor is not factor or states.back != back):
            return None
        if states.dim != earlier.dim or states.start is not None:
            return None
        if earlier.start is None and states.base is not earlier.base:
            return None
        moves = earlier.is_range
        begin = states.high if back else states.low
        end, ends = (states.low, earlier.low) if back else (states.high, earlier.high)
        same = (begin == earlier.middle) & (end == ends)
        if not states.is_range.all() or not (same | ~moves).all():
            return None
        reached = earlier.high if back else earlier.low
        if earlier.start is not None:
            reached = begin
        reached = np.where(moves, reached, begin)
        low, high = (states.low, reached) if back else (reached, states.high)
        rest = replace(states, kind=STATE, factor=factor, back=back)
        return replace(rest, low=low, high=high, start=earlier.start)


def _same(parts: list[Ranges]) -> Ranges | None:
    """One with the operation of all, if they are of the same elements."""
    ranges = [p for p in parts if p.is_range.any()]
    kinds = {p.kind for p in ranges} - {""}
    if not ranges or len(kinds) > 1:
        return None
    first = next((p for p in ranges if p.kind), ranges[0])
    for p in ranges:
        if (p.base, p.dim) != (first.base, first.dim) or p.start is not None:
            return None
        if p.kind and (p.factor, p.back) != (first.factor, first.back):
            return None
    return first


_RULES: Mapping[str, Callable[[_Search, Op], Ranges | None]] = {
    "slice": _Search.slice_,
    "rev": _Search.rev,
    "concatenate": _Search.concatenate,
    "pad": _Search.pad,
    "select_n": _Search.select,
    **dict.fromkeys(KINDS, _Search.binary),
}
