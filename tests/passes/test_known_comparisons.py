"""Comparisons that ranges decide. Text in, text out."""

import pytest

from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.known_comparisons import known_comparisons
from tests.passes.test_row_strips import code, kernel

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
