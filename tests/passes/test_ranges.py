"""Ranges of integer scalars."""

import pytest

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.ranges import Ranges, loop_range

CASES = {
    "x * 8": (lambda b, x: b.mul(x, b.index(8)), (0, 24)),
    "x * 8 - 3": (lambda b, x: b.sub(b.mul(x, b.index(8)), b.index(3)), (-3, 21)),
    "x / 2": (lambda b, x: b.div(x, b.index(2)), (0, 1)),
    "x rem 2": (lambda b, x: b.rem(x, b.index(2)), (0, 1)),
    "min(x, 2)": (lambda b, x: b.min(x, b.index(2)), (0, 2)),
    "max(-x, -1)": (lambda b, x: b.max(b.neg(x), b.index(-1)), (-1, 0)),
    "clamp": (lambda b, x: b.clamp(b.index(1), x, b.index(2)), (1, 2)),
    "choice": (lambda b, x: b.select(b.eq(x, x), x, b.index(9)), (0, 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_range_of_expression(name: str):
    make, expected = CASES[name]
    x, builder, ranges = Value(INDEX), Builder(), Ranges()
    ranges.set(x, 0, 3)
    result = make(builder, x)
    for op in builder.ops:
        ranges.add(op)
    assert ranges.of(result) == expected


def test_unknown_and_overflowing_values_have_the_range_of_their_type():
    x, builder, ranges = Value(INDEX), Builder(), Ranges()
    whole = (-(1 << 31), (1 << 31) - 1)
    assert ranges.of(x) == whole
    ranges.set(x, 0, 1 << 20)
    product = builder.mul(x, builder.index(1 << 20))
    for op in builder.ops:
        ranges.add(op)
    assert ranges.of(product) == whole


def test_loop_counter():
    builder, ranges = Builder(), Ranges()
    bounds = [builder.index(n) for n in (2, 10, 3)]
    for op in builder.ops:
        ranges.add(op)
    assert loop_range(ranges, bounds) == (2, 9)
