"""What is known of integer scalars: their range, and what divides them.

The emitter notes a Fact for each scalar it writes. Indices known to lie inside a ref
need no clamp, and Mosaic wants proof that dynamic starts are aligned to its tiles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import INDEX

LOWEST, HIGHEST = -(2**31), 2**31 - 1


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


ANYTHING = Fact()


def exactly(number: int) -> Fact:
    return Fact(number, number, abs(number))


def _bounded(low: int, high: int, multiple: int) -> Fact:
    """Arithmetic wraps: a range that leaves i32 says nothing, nor does its divisor,
    unless that is a power of two (which wrapping by 2**32 preserves)."""
    if low >= LOWEST and high <= HIGHEST:
        return Fact(low, high, multiple)
    return Fact(multiple=multiple & -multiple if multiple else 1)


def _add(x: Fact, y: Fact) -> Fact:
    return _bounded(x.low + y.low, x.high + y.high, gcd(x.multiple, y.multiple))


def _sub(x: Fact, y: Fact) -> Fact:
    return _bounded(x.low - y.high, x.high - y.low, gcd(x.multiple, y.multiple))


def _mul(x: Fact, y: Fact) -> Fact:
    ends = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    return _bounded(min(ends), max(ends), x.multiple * y.multiple)


def _max(x: Fact, y: Fact) -> Fact:
    divisor = gcd(x.multiple, y.multiple)
    return Fact(max(x.low, y.low), max(x.high, y.high), divisor)


def _min(x: Fact, y: Fact) -> Fact:
    divisor = gcd(x.multiple, y.multiple)
    return Fact(min(x.low, y.low), min(x.high, y.high), divisor)


def _div(x: Fact, y: Fact) -> Fact:
    by = y.number
    if by is None or by <= 0 or x.low < 0:
        return ANYTHING
    divides = x.multiple % by == 0
    return Fact(x.low // by, x.high // by, x.multiple // by if divides else 1)


def _rem(x: Fact, y: Fact) -> Fact:
    by = y.number
    if by is None or by <= 0:
        return ANYTHING
    low = 0 if x.low >= 0 else 1 - by
    return Fact(low, min(max(x.high, 0), by - 1), gcd(x.multiple, by) or 1)


def _select(_: Fact, *cases: Fact) -> Fact:
    low, high = min(c.low for c in cases), max(c.high for c in cases)
    return Fact(low, high, gcd(*(c.multiple for c in cases)))


def _shift_left(x: Fact, y: Fact) -> Fact:
    by = y.number
    return _mul(x, exactly(1 << by)) if by is not None and 0 <= by < 31 else ANYTHING


_RULES: dict[str, Callable[..., Fact]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "max": _max,
    "min": _min,
    "div": _div,
    "rem": _rem,
    "select_n": _select,
    "shift_left": _shift_left,
    "neg": lambda x: _sub(exactly(0), x),
    "clamp": lambda low, x, high: _min(_max(x, low), high),
    "reshape": lambda x: x,
    "broadcast_in_dim": lambda x: x,
}


class Facts:
    """Facts of the scalars written so far."""

    def __init__(self) -> None:
        self._known: dict[Value, Fact] = {}

    def of(self, value: Value) -> Fact:
        return self._known.get(value, _of_type(value))

    def note(self, value: Value, fact: Fact) -> None:
        self._known[value] = fact

    def note_op(self, op: Op) -> None:
        """Take in an op with one i32 result."""
        if len(op.results) != 1 or not _is_integer(op.result):
            return
        operands = [self.of(v) for v in op.operands if not v.is_ref]
        fact = self._fact(op, operands)
        if fact is not None:
            self._known[op.result] = fact

    def _fact(self, op: Op, operands: Sequence[Fact]) -> Fact | None:
        if op.name == "constant":
            return exactly(op.attrs["value"])
        if op.name == "assume_multiple":
            (x,), given = operands, op.attrs["multiple"]
            return Fact(
                x.low, x.high, given * x.multiple // (gcd(given, x.multiple) or 1)
            )
        if op.name == "cast":
            return self._cast(op, operands[0])
        rule = _RULES.get(op.name)
        return rule(*operands) if rule else None

    def _cast(self, op: Op, x: Fact) -> Fact | None:
        if op.operands[0].tile.dtype.is_bool:
            return Fact(0, 1)
        return x if op.operands[0].tile.dtype.is_integer else None


def _is_integer(value: Value) -> bool:
    """Rules below count in i32: other widths wrap elsewhere."""
    return value.type == INDEX


def _of_type(value: Value) -> Fact:
    """Narrow integers have narrow ranges; bools count as 0 and 1."""
    dtype = value.tile.dtype
    if dtype.is_bool:
        return Fact(0, 1)
    if not dtype.is_integer or dtype.bits >= 32:
        return ANYTHING  # of u32 and i64, a cast to i32 keeps nothing
    if dtype.is_signed_int:
        return Fact(-(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1)
    return Fact(0, 2**dtype.bits - 1)
