"""What is known about integers: their range, and what divides them.

`Facts` takes values in program order and gives a `Fact` for each; for a tile, one that
holds for each of its elements. Indices known to be within a ref need no clamp, loops of
bounded trip count can be reversed, and Mosaic requires proof that starts are aligned to
its tiles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import INDEX, DType, TileType

LOWEST, HIGHEST = INDEX.dtype.limits


@dataclass(frozen=True)
class Fact:
    """`low <= value <= high`, and `multiple` divides value (0 divides only 0)."""

    low: int = LOWEST
    high: int = HIGHEST
    multiple: int = 1

    @property
    def number(self) -> int | None:
        return self.low if self.low == self.high else None

    def within(self, low: int, high: int) -> bool:
        return low <= self.low and self.high <= high

    def wrapped(self, dtype: DType) -> "Fact":
        """What is known after conversion to an integer type, which wraps around.

        If the range leaves the type, range and divisor are lost, except a divisor that
        is a power of two (which wrapping preserves).
        """
        low, high = dtype.limits
        if self.within(low, high):
            return self
        return Fact(low, high, self.multiple & -self.multiple if self.multiple else 1)


def exactly(number: int) -> Fact:
    return Fact(number, number, abs(number))


# --- rules, which ignore wrapping; None where nothing is known ---


def _add(x: Fact, y: Fact) -> Fact:
    return Fact(x.low + y.low, x.high + y.high, gcd(x.multiple, y.multiple))


def _sub(x: Fact, y: Fact) -> Fact:
    return Fact(x.low - y.high, x.high - y.low, gcd(x.multiple, y.multiple))


def _mul(x: Fact, y: Fact) -> Fact:
    ends = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    return Fact(min(ends), max(ends), x.multiple * y.multiple)


def _max(x: Fact, y: Fact) -> Fact:
    divisor = gcd(x.multiple, y.multiple)
    return Fact(max(x.low, y.low), max(x.high, y.high), divisor)


def _min(x: Fact, y: Fact) -> Fact:
    divisor = gcd(x.multiple, y.multiple)
    return Fact(min(x.low, y.low), min(x.high, y.high), divisor)


def _div(x: Fact, y: Fact) -> Fact | None:
    """The result is rounded towards zero."""
    if y.low <= 0:
        return None
    divides = y.number is not None and x.multiple % y.number == 0
    multiple = x.multiple // y.low if divides else 1
    low = x.low // y.high if x.low >= 0 else -(-x.low // y.low)
    high = x.high // y.low if x.high >= 0 else -(-x.high // y.high)
    return Fact(low, high, multiple)


def _rem(x: Fact, y: Fact) -> Fact | None:
    """The result has the sign of `x`."""
    if y.low <= 0:
        return None
    if y.number is not None and x.multiple % y.number == 0:
        return exactly(0)
    most = y.high - 1
    low = 0 if x.low >= 0 else -most
    return Fact(low, min(max(x.high, 0), most), gcd(x.multiple, y.multiple) or 1)


def _not_equal(x: Fact, y: Fact) -> Fact:
    if x.number is not None and x.number == y.number:
        return exactly(0)
    return exactly(1) if x.high < y.low or y.high < x.low else Fact(0, 1)


def _below(least: Fact, most: Fact, gap: int) -> Fact:
    """Whether one number is smaller than another by at least `gap`."""
    if least.high + gap <= most.low:
        return exactly(1)
    return exactly(0) if least.low + gap > most.high else Fact(0, 1)


def _chosen(which: Fact, *cases: Fact) -> Fact:
    return _any_of(*cases) if which.number is None else cases[which.number]


def _any_of(*cases: Fact) -> Fact:
    low, high = min(c.low for c in cases), max(c.high for c in cases)
    return Fact(low, high, gcd(*(c.multiple for c in cases)))


def _shift_left(x: Fact, y: Fact) -> Fact | None:
    by = y.number
    return _mul(x, exactly(1 << by)) if by is not None and 0 <= by < 31 else None


def _shift_right(x: Fact, y: Fact) -> Fact | None:
    if x.low < 0 or y.low < 0:
        return None
    return Fact(x.low >> min(y.high, 63), x.high >> min(y.low, 63))


def _and(x: Fact, y: Fact) -> Fact | None:
    """Only bits set in the non-negative operand can be set.

    With a negative power of two, a number is rounded down to a multiple of it.
    """
    for mask, other in ((x.number, y), (y.number, x)):
        if mask is not None and mask < 0 and mask & -mask == -mask:
            return Fact(other.low & mask, other.high & mask, -mask)
    bounds = [fact.high for fact in (x, y) if fact.low >= 0]
    return Fact(0, min(bounds)) if bounds else None


def _abs(x: Fact) -> Fact:
    ends = (abs(x.low), abs(x.high))
    return Fact(0 if x.low <= 0 <= x.high else min(ends), max(ends), x.multiple)


def _sign(x: Fact) -> Fact:
    return Fact(-1 if x.low < 0 else int(x.low > 0), 1 if x.high > 0 else -(x.high < 0))


def _same(x: Fact) -> Fact:
    return x


# Ops whose results are positions, and the number of positions.
_POSITIONS: dict[str, Callable[[Op], int]] = {
    "iota": lambda op: op.attrs["type"].shape[op.attrs["dim"]],
    "arg_reduce": lambda op: op.operands[0].tile.shape[op.attrs["axis"]],
    "device_number": lambda op: op.attrs["count"],
}

# Ops whose results contain only elements of their first operand.
_MOVES = (
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "slice",
    "rev",
    "exchange",
    "dynamic_slice",
)


_RULES: dict[str, Callable[..., Fact | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "max": _max,
    "min": _min,
    "div": _div,
    "rem": _rem,
    "ne": _not_equal,
    "eq": lambda x, y: _sub(exactly(1), _not_equal(x, y)),
    "lt": lambda x, y: _below(x, y, 1),
    "le": lambda x, y: _below(x, y, 0),
    "gt": lambda x, y: _below(y, x, 1),
    "ge": lambda x, y: _below(y, x, 0),
    "shift_right_logical": _shift_right,
    "shift_right_arithmetic": _shift_right,
    "select_n": _chosen,
    "concatenate": _any_of,
    "and": _and,
    "shift_left": _shift_left,
    "abs": _abs,
    "sign": _sign,
    "neg": lambda x: _sub(exactly(0), x),
    "clamp": lambda low, x, high: _min(_max(x, low), high),
    "cast": _same,
    **dict.fromkeys(_MOVES, _same),
}


class Facts:
    """What is known so far.

    `loaded` says what is known of a load; nothing, otherwise.
    """

    def __init__(self, loaded: "Loaded | None" = None) -> None:
        self._known: dict[Value, Fact] = {}
        self._loaded = loaded

    def of(self, value: Value) -> Fact:
        """The fact about an integer; that of its type if nothing more is known."""
        return self._known.get(value) or _of_type(value)

    def note(self, value: Value, fact: Fact) -> None:
        self._known[value] = fact

    def note_block(self, block: Block) -> None:
        """Process a block and its nested regions."""
        for op in walk(block):
            self.note_regions(op)
            self.note_op(op)

    def note_op(self, op: Op) -> None:
        """Process the result of one op."""
        if len(op.results) != 1 or not _is_number(op.result):
            return
        fact = self._fact(op)
        if fact is not None:
            self._known[op.result] = fact.wrapped(op.result.tile.dtype)

    def may_wrap(self, op: Op) -> bool:
        """Whether the result of an op may overflow its type and wrap around."""
        if len(op.results) != 1 or not _is_number(op.result):
            return True
        fact = self._fact(op)
        return fact is None or not fact.within(*op.result.tile.dtype.limits)

    def note_regions(self, op: Op) -> None:
        """Process grid indices, or the index of a loop, before the regions of an op."""
        if op.name == "pipeline":
            pipeline = Pipeline.of(op)
            for ids in (pipeline.ids, *(each.params for each in pipeline.maps)):
                self.note_grid(ids, pipeline.grid)
        elif op.name == "for":
            self.note_counter(Loop.of(op))

    def note_grid(self, ids: Sequence[Value], grid: Sequence[int | None]) -> None:
        """Process the indices of a grid; None is a size not yet known."""
        for value, n in zip(ids, grid, strict=True):
            self._known[value] = Fact(0, HIGHEST if n is None else max(n - 1, 0))

    def note_counter(self, loop: Loop) -> None:
        """Process the index of a loop, if it counts upwards."""
        first, limit, step = map(self.of, loop.bounds)
        if step.low >= 1:
            divisor = gcd(first.multiple, step.multiple)
            last = max(first.low, limit.high - 1)
            self._known[loop.index] = Fact(first.low, last, divisor)

    def may_overshoot(self, loop: Loop) -> bool:
        """Whether stepping past the limit may wrap around, and the loop never end."""
        _, limit, step = map(self.of, loop.bounds)
        return limit.high - 1 + step.high > loop.index.tile.dtype.limits[1]

    def most_steps(self, loop: Loop) -> int | None:
        """The maximum trip count of a loop that counts upwards."""
        first, limit, step = map(self.of, loop.bounds)
        if step.low < 1:
            return None
        return max(0, -(-(limit.high - first.low) // step.low))

    def _fact(self, op: Op) -> Fact | None:
        if op.name == "constant":
            value = op.attrs["value"]
            return exactly(int(value)) if isinstance(value, (int, float)) else None
        if op.name in _POSITIONS:
            size = _POSITIONS[op.name](op)
            return Fact(0, max(size - 1, 0) if isinstance(size, int) else HIGHEST)
        if op.name == "load" and self._loaded is not None:
            return self._loaded(op, self)
        values = op.operands[:1] if op.name in _MOVES else op.operands
        if not all(map(_is_number, values)):
            return None
        operands = [self.of(v) for v in values]
        if op.name == "assume_multiple":
            (x,), given = operands, op.attrs["multiple"]
            return Fact(
                x.low, x.high, given * x.multiple // (gcd(given, x.multiple) or 1)
            )
        rule = _RULES.get(op.name)
        return rule(*operands) if rule else None


Loaded = Callable[[Op, Facts], Fact | None]


def _is_number(value: Value) -> bool:
    """Integers, and bools, which count as 0 and 1."""
    t = value.type
    return isinstance(t, TileType) and not t.dtype.is_float


def _of_type(value: Value) -> Fact:
    return Fact(*value.tile.dtype.limits)
