"""Comparisons that ranges decide. Text in, text out."""

import pytest

from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.known_comparisons import known_comparisons
from tests.passes.test_row_strips import code, kernel

# Parts of a row of four, of which the last ends inside or past its end.
MASKED = """
%j: i32 = constant {{value={start}}}
%at: i32 = add %i3, %j
%j2: i32[2] = broadcast_in_dim %at {{shape=(2,), dims=()}}
%l: i32[2] = iota {{dim=0, type=i32[2]}}
%p: i32[2] = add %j2, %l
%n: i32[2] = constant {{value={number}}}
%m: bool[2] = lt %p, %n
%zero: f32[2] = constant {{value=0.0}}
%v: f32[2] = load %xb[0, %at:+2] mask %m other %zero
%w: f32[2] = select_n %m, %zero, %v
store %ob[0, %at:+2] = %w mask %m
"""


def test_masks_that_are_always_true():
    new = known_comparisons(kernel(MASKED.format(start=1, number=4)))
    verify(new)
    assert "mask" not in code(new) and "select_n" not in code(new)


@pytest.mark.parametrize("start, number", [(1, 3), (3, 9), (-1, 9)])
def test_masks_of_edges_and_of_starts_outside_stay(start: int, number: int):
    """Without a mask, the start would be clamped."""
    new = known_comparisons(kernel(MASKED.format(start=start, number=number)))
    assert code(new).count("mask") == 2


# The grid has two steps, %i3 is 0 or 1.
ASK = """
%n: i32 = constant {{value={number}}}
%four: i32 = constant {{value=4}}
%m: i32 = mul %i3, %four
%ask: bool = {compare} %m, %n
%which: i32 = cast %ask {{dtype=i32}}
cond %which
  branch () {{}}
  branch () {{ %v: f32[8,4] = load %xb[:, :] store %ob[:, :] = %v }}
"""
ALWAYS = [("ge", 0), ("le", 4), ("lt", 5), ("gt", -1), ("ne", 6)]
NEVER = [("lt", 0), ("gt", 4), ("ge", 5), ("le", -1), ("eq", 6)]
SOMETIMES = [("eq", 0), ("ne", 4), ("lt", 4), ("ge", 1), ("le", 3), ("gt", 0)]


def decided(compare: str, number: int) -> str:
    new = known_comparisons(kernel(ASK.format(compare=compare, number=number)))
    verify(new)
    return code(canonicalize(new))


@pytest.mark.parametrize("compare, number", ALWAYS)
def test_true_of_every_index(compare: str, number: int):
    text = decided(compare, number)
    assert "cond" not in text and "store" in text


@pytest.mark.parametrize("compare, number", NEVER)
def test_true_of_no_index(compare: str, number: int):
    text = decided(compare, number)
    assert "cond" not in text and "store" not in text


@pytest.mark.parametrize("compare, number", SOMETIMES)
def test_others_are_asked(compare: str, number: int):
    assert "cond" in decided(compare, number)
