"""What a mask implies about the positions it enables.

An access is masked by comparing its positions with a limit: `first + iota < n`. Where
such a mask is on, the position is below `n`, and a backend need not clamp it.

Positions, and both sides of comparisons, are *sums*: a number plus multiples of terms.
A term is a value of the kernel, or the position along an axis of the access. Only
arithmetic that cannot wrap around is decomposed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pallasite.ir.nodes import Op, Value
from pallasite.passes.analysis.intervals import Fact, Facts

# For each axis of a value, the corresponding axis of the access.
Axes = tuple[int, ...]
# A value; None stands for the position along an axis.
Term = tuple[Value | None, Axes]

_ONE_ELEMENT = -1  # an axis of size one


@dataclass(frozen=True)
class Sum:
    """`number + factor * term + ...`"""

    number: int = 0
    factors: Mapping[Term, int] = field(default_factory=dict)

    def plus(self, other: "Sum", times: int = 1) -> "Sum":
        factors = dict(self.factors)
        for term, factor in other.factors.items():
            factors[term] = factors.get(term, 0) + times * factor
        kept = {term: factor for term, factor in factors.items() if factor}
        return Sum(self.number + times * other.number, kept)


class Positions:
    """Ranges of one access's positions where its mask is on."""

    def __init__(self, facts: Facts, producers: Mapping[Value, Op], mask: Value | None):
        self.facts, self.producers = facts, producers
        self._lengths: dict[Term, int] = {}
        self._sums: dict[tuple[Value, Axes], Sum] = {}
        self._below: list[Sum] = []  # negative wherever the mask is on
        if mask is not None:
            self._below = list(self._negative(mask, _own_axes(mask)))

    def along(self, axis: int, length: int) -> Sum:
        """The position along one axis of the access."""
        if length < 2:
            return Sum()
        term: Term = (None, (axis,))
        self._lengths[term] = length
        return Sum(0, {term: 1})

    def of(self, value: Value, axes: Axes | None = None) -> Sum:
        """A value as a sum."""
        axes = _own_axes(value) if axes is None else axes
        key = value, axes
        if key not in self._sums:
            self._sums[key] = self._taken_apart(value, axes) or Sum(0, {key: 1})
        return self._sums[key]

    def _taken_apart(self, value: Value, axes: Axes) -> Sum | None:
        number = self.facts.of(value).number
        if number is not None:
            return Sum(number)
        op = self.producers.get(value)
        rule = None if op is None else _RULES.get(op.name)
        if op is None or rule is None or self.facts.may_wrap(op):
            return None
        return rule(self, op, axes)

    def range(self, position: Sum) -> Fact:
        """The range of a position where the mask is on."""
        fact = self._everywhere(position)
        low, high = fact.low, fact.high
        for below in self._below:
            # position = (position - below) + below, where below is at most -1,
            high = min(high, self._everywhere(position.plus(below, -1)).high - 1)
            # position = (position + below) - below.
            low = max(low, self._everywhere(position.plus(below)).low + 1)
        return Fact(low, high)

    def _everywhere(self, position: Sum) -> Fact:
        low = high = position.number
        for term, factor in position.factors.items():
            value, _ = term
            in_term = (
                Fact(0, self._lengths[term] - 1)
                if value is None
                else self.facts.of(value)
            )
            ends = factor * in_term.low, factor * in_term.high
            low, high = low + min(ends), high + max(ends)
        return Fact(low, high)

    def _negative(self, mask: Value, axes: Axes) -> Iterator[Sum]:
        op = self.producers.get(mask)
        if op is None:
            return
        if op.name == "and":
            for operand in dict.fromkeys(op.operands):
                yield from self._negative(operand, axes)
        elif op.name in _MOVES:
            moved = _MOVES[op.name](op, axes)
            if moved is not None:
                yield from self._negative(op.operands[0], moved)
        elif op.name in _SMALLER and op.operands[0].tile.dtype.is_integer:
            x, y = (self.of(v, axes) for v in op.operands)
            smaller, larger = (x, y) if _SMALLER[op.name] == 0 else (y, x)
            or_equal = Sum(int(op.name in ("le", "ge")))
            yield smaller.plus(larger, -1).plus(or_equal, -1)


def _own_axes(value: Value) -> Axes:
    return tuple(range(value.tile.rank))


# --- axes through ops that move elements; None where they are not preserved ---


def _broadcast(op: Op, axes: Axes) -> Axes:
    return tuple(axes[d] for d in op.attrs["dims"])


def _reshape(op: Op, axes: Axes) -> Axes | None:
    """A reshape that adds or removes axes of size one."""
    before, after = op.operands[0].tile.shape, op.result.tile.shape
    kept = [axis for axis, n in zip(axes, after, strict=True) if n != 1]
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    pending = iter(kept)
    return tuple(_ONE_ELEMENT if n == 1 else next(pending) for n in before)


_MOVES: dict[str, Callable[[Op, Axes], Axes | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
}

# Which operand of a comparison is the smaller one if it holds.
_SMALLER = {"lt": 0, "le": 0, "gt": 1, "ge": 1}


# --- sums that cannot wrap around; None where the value itself is a term ---


def _iota(p: Positions, op: Op, axes: Axes) -> Sum:
    dim = op.attrs["dim"]
    return p.along(axes[dim], op.result.tile.shape[dim])


def _moved(p: Positions, op: Op, axes: Axes) -> Sum | None:
    moved = _MOVES[op.name](op, axes)
    return None if moved is None else p.of(op.operands[0], moved)


def _added(times: int) -> Callable[[Positions, Op, Axes], Sum]:
    def rule(p: Positions, op: Op, axes: Axes) -> Sum:
        x, y = (p.of(v, axes) for v in op.operands)
        return x.plus(y, times)

    return rule


def _multiplied(p: Positions, op: Op, axes: Axes) -> Sum | None:
    x, y = (p.of(v, axes) for v in op.operands)
    x, y = (x, y) if not y.factors else (y, x)
    return None if y.factors else Sum().plus(x, y.number)


def _cast(p: Positions, op: Op, axes: Axes) -> Sum | None:
    (x,) = op.operands
    return p.of(x, axes) if x.tile.dtype.is_integer else None


_RULES: dict[str, Callable[[Positions, Op, Axes], Sum | None]] = {
    "iota": _iota,
    "broadcast_in_dim": _moved,
    "reshape": _moved,
    "add": _added(1),
    "sub": _added(-1),
    "mul": _multiplied,
    "cast": _cast,
}
