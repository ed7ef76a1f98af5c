"""Sorting by a bitonic network: compare and exchange at constant distances.

Floats are compared as integers of the same order; the position is the last key, which
makes the order total and the sort stable.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import I32
from pallasite.ops.decompose_tile import (
    exchange,
    filled,
    join,
    next_power_of_two,
    positions,
    take_range,
)
from pallasite.ops.formula import NAN, Expr, bits, float_formula, format_of, where


def sort(
    b: Builder, *operands: Value, axis: int, num_keys: int, stable: bool
) -> tuple[Value, ...]:
    """Ascending by the first `num_keys` operands, NaN last."""
    n = operands[0].tile.shape[axis]
    size = next_power_of_two(n)
    padded = [join(b, [x, filled(b, x, axis, size - n, 0)], axis) for x in operands]
    place = positions(b, padded[0], axis)
    keys = [_sort_key(b, x) for x in padded[:num_keys]]
    if size > n:  # what was added sorts last
        keys.insert(0, b.cast(b.ge(place, b.like(n, place)), I32))
    network = _Network(b, axis, size, place)
    rows = network.run([*keys, place, *padded], len(keys) + 1)
    return tuple(take_range(b, x, axis, 0, n) for x in rows[len(keys) + 1 :])


class _Network:
    def __init__(self, b: Builder, axis: int, size: int, place: Value):
        self.b, self.axis, self.size, self.place = b, axis, size, place

    def run(self, rows: list[Value], num_keys: int) -> list[Value]:
        run = 2
        while run <= self.size:
            distance = run // 2
            while distance:
                rows = self.step(rows, num_keys, run, distance)
                distance //= 2
            run *= 2
        return rows

    def step(
        self, rows: list[Value], num_keys: int, run: int, distance: int
    ) -> list[Value]:
        """Order each pair `distance` apart; upwards in every other run."""
        b = self.b
        partners = [exchange(b, x, self.axis, distance) for x in rows]
        is_less = self.less(partners[:num_keys], rows[:num_keys])
        # The lower of an ascending pair takes the smaller, and so on: keys differ.
        wants_smaller = b.eq(self.clear(distance), self.clear(run))
        swap = b.eq(is_less, wants_smaller)
        return [b.select(swap, y, x) for x, y in zip(rows, partners, strict=True)]

    def clear(self, bit: int) -> Value:
        """Where a bit of the position is not set."""
        b, place = self.b, self.place
        return b.eq(b.and_(place, b.like(bit, place)), b.like(0, place))

    def less(self, left: Sequence[Value], right: Sequence[Value]) -> Value:
        """Lexicographic."""
        b = self.b
        result = b.lt(left[-1], right[-1])
        for x, y in zip(left[-2::-1], right[-2::-1], strict=True):
            result = b.or_(b.lt(x, y), b.and_(b.eq(x, y), result))
        return result


def _sort_key(b: Builder, x: Value) -> Value:
    if x.tile.dtype.is_bool:
        return b.cast(x, I32)
    return _float_key(b, x) if x.tile.dtype.is_float else x


@float_formula
def _float_key(x: Expr) -> Expr:
    """An integer in the order of floats: zeros are equal, NaN is above all."""
    x = where(x.eq(x), where(x.eq(0.0), 0.0, x), NAN)
    pattern = bits(x)
    return where(pattern < 0, pattern ^ ~format_of(x).sign_mask, pattern)
