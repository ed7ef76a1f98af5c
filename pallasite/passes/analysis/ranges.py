"""Ranges of integers: what lets a backend leave out bounds checks.

`Ranges` is told about values in program order (grid indices and loop counters by the
caller) and answers with the least and greatest number each can be; of a tile, each of
its elements.
"""

from collections.abc import Callable, Sequence

from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import DType, TileType

Range = tuple[int, int]  # both ends included


class Ranges:
    """What is known so far."""

    def __init__(self) -> None:
        self.known: dict[Value, Range] = {}

    def set(self, value: Value, low: int, high: int) -> None:
        self.known[value] = (low, high)

    def of(self, value: Value) -> Range:
        """The range of an integer; that of its type if nothing is known."""
        return self.known.get(value) or type_range(value.tile.dtype)

    def number(self, value: Value) -> int | None:
        low, high = self.of(value)
        return low if low == high else None

    def add(self, op: Op) -> None:
        """Take in one op."""
        if len(op.results) != 1 or not _is_integer(op.results[0]):
            return
        result = op.results[0]
        if op.name == "constant":
            self.set(result, op.attrs["value"], op.attrs["value"])
            return
        found = self._found(op)
        limits = type_range(result.tile.dtype)
        # Arithmetic wraps around: a range that leaves the type says nothing.
        if found is not None and limits[0] <= found[0] and found[1] <= limits[1]:
            self.known[result] = found

    def _found(self, op: Op) -> Range | None:
        if op.name in _POSITIONS:
            return 0, max(_POSITIONS[op.name](op) - 1, 0)
        rule = _RULES.get(op.name)
        operands = op.operands[:1] if op.name in _MOVES else op.operands
        if rule is None or not all(map(_is_number, operands)):
            return None
        return rule(*(self.of(v) for v in operands))


def _is_integer(value: Value) -> bool:
    t = value.type
    return isinstance(t, TileType) and t.dtype.is_integer


def _is_number(value: Value) -> bool:
    t = value.type
    return isinstance(t, TileType) and (t.dtype.is_integer or t.dtype.is_bool)


def type_range(dtype: DType) -> Range:
    if dtype.is_bool:
        return 0, 1
    if dtype.is_signed_int:
        return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    return 0, (1 << dtype.bits) - 1


def _product(x: Range, y: Range) -> Range:
    ends = [a * b for a in x for b in y]
    return min(ends), max(ends)


def _quotient(x: Range, y: Range) -> Range | None:
    if x[0] < 0 or y[0] <= 0:
        return None
    return x[0] // y[1], x[1] // y[0]


def _remainder(x: Range, y: Range) -> Range | None:
    if x[0] < 0 or y[0] <= 0:
        return None
    return 0, min(x[1], y[1] - 1)


def _any_of(*cases: Range) -> Range:
    return min(c[0] for c in cases), max(c[1] for c in cases)


def _and(x: Range, y: Range) -> Range | None:
    """No bit is set that is not set in the one that is not negative."""
    bounds = [r[1] for r in (x, y) if r[0] >= 0]
    return (0, min(bounds)) if bounds else None


# Ops whose results are positions: how many there are.
_POSITIONS: dict[str, Callable[[Op], int]] = {
    "iota": lambda op: op.attrs["type"].shape[op.attrs["dim"]],
    "arg_reduce": lambda op: op.operands[0].tile.shape[op.attrs["axis"]],
}

# Ops that give elements of their first operand and nothing else.
_MOVES = ("broadcast_in_dim", "reshape", "transpose", "slice", "rev", "dynamic_slice")

_RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _product,
    "neg": lambda x: (-x[1], -x[0]),
    "div": _quotient,
    "rem": _remainder,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "clamp": lambda low, x, high: (
        min(max(x[0], low[0]), high[0]),
        min(max(x[1], low[1]), high[1]),
    ),
    "cast": lambda x: x,
    "assume_multiple": lambda x: x,
    "and": _and,
    "select_n": lambda which, *cases: _any_of(*cases),
    "concatenate": _any_of,
    **dict.fromkeys(_MOVES, lambda x: x),
}


def loop_range(ranges: Ranges, operands: Sequence[Value]) -> Range | None:
    """What the counter of a `for` (first, limit, step) can be."""
    first, limit, step = (ranges.of(v) for v in operands[:3])
    if step[0] < 1:
        return None
    return first[0], max(first[0], limit[1] - 1)
