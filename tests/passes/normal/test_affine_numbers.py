"""Numbers that are affine in the grid indices are written so. Text in, text out."""

import itertools

import numpy as np
import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.affine_numbers import affine_numbers
from pallasite.passes.normal.canonicalize import canonicalize
from tests.passes.normal.meaning import assert_same_meaning, outputs

NUMBERS = """
kernel @k(%o: ref<i32[16] any>) outputs 1 {
  pipeline {grid=GRID, windows=(), semantics=("arbitrary",)}
    body (%i: i32) {
      %one: i32 = constant {value=1}
      %three: i32 = constant {value=3}
      %four: i32 = constant {value=4}
      CODE
      store %o[%i] = %n
    }
}
"""
ROUNDED_UP = """
      %m: i32 = add %i, %one
      %a: i32 = mul %m, %four
      %b: i32 = add %a, %three
      %n: i32 = div %b, %four
"""
QUOTIENT = "%n: i32 = div %i, %four"


# A flat number, taken apart and put together again.
APART = """
      %q: i32 = div %i, %four
      %r: i32 = rem %i, %four
      %a: i32 = mul %q, %four
      %n: i32 = add %a, %r
"""


def kernel_of(code: str, grid: str = "(5,)"):
    text = NUMBERS.replace("CODE", code).replace("GRID", grid)
    return canonicalize(parse_kernel(text))


def test_rounded_quotient():
    kernel = kernel_of(ROUNDED_UP)
    new = affine_numbers(kernel)
    assert_same_meaning(kernel, new, checked=False)
    assert "div" not in new.text and "mul" not in new.text
    assert affine_numbers(new) is new


def test_sum_of_quotient_and_remainder():
    kernel = kernel_of(APART, "(11,)")
    new = affine_numbers(kernel)
    assert_same_meaning(kernel, new, checked=False)
    assert not any(name in new.text for name in ("div", "rem", "mul", "add"))
    assert affine_numbers(new) is new


@pytest.mark.parametrize("grid, changes", [("(5,)", False), ("(4,)", True)])
def test_only_if_equal_at_every_step(grid, changes):
    kernel = kernel_of(QUOTIENT, grid)
    new = affine_numbers(kernel)
    assert (new is not kernel) is changes
    assert_same_meaning(kernel, new, checked=False)


def test_an_empty_grid():
    kernel = kernel_of(QUOTIENT, "(0,)")
    assert affine_numbers(kernel) is kernel


COMPARED = """
kernel @k(%o: ref<bool[N,M] any>) outputs 1 {
  pipeline {grid=(N, M), windows=(), semantics=("arbitrary", "arbitrary")}
    body (%i: i32, %j: i32) {
      %zero: i32 = constant {value=0}
      %one: i32 = constant {value=1}
      %two: i32 = constant {value=2}
      %three: i32 = constant {value=3}
      %five: i32 = constant {value=5}
      CODE
      store %o[%i, %j] = %t
    }
}
"""
# Of a causal loop whose blocks of keys are larger than those of queries, and of the
# first keys in a window.
AFTER = """
      %a: i32 = mul %i, %two
      %b: i32 = add %a, %five
      %q: i32 = div %b, %three
      %n: i32 = min %five, %q
"""
FROM = """
      %a: i32 = mul %i, %three
      %b: i32 = sub %a, %five
      %m: i32 = max %zero, %b
      %n: i32 = div %m, %three
"""
BELOW_ZERO = """
      %a: i32 = mul %i, %two
      %b: i32 = sub %five, %a
      %n: i32 = div %b, %three
"""


def compared(code, test, grid=(7, 5)):
    text = COMPARED.replace("CODE", f"{code}\n %t: bool = {test}")
    for letter, n in zip("NM", grid, strict=True):
        text = text.replace(f"({letter},", f"({n},").replace(f" {letter})", f" {n})")
        text = text.replace(f"[{letter},", f"[{n},").replace(f",{letter}]", f",{n}]")
    return canonicalize(parse_kernel(text))


@pytest.mark.parametrize("kind", ["lt", "le", "gt", "ge"])
@pytest.mark.parametrize("sides", ["%j, %n", "%n, %j", "%n, %three"])
@pytest.mark.parametrize("code", [AFTER, FROM, BELOW_ZERO])
def test_comparisons_with_rounded_numbers(code, sides, kind):
    kernel = compared(code, f"{kind} {sides}")
    new = affine_numbers(kernel)
    assert_same_meaning(kernel, new, checked=False)
    assert affine_numbers(new) is new
    (holds,) = outputs(kernel, [])
    rounded = any(name in new.text for name in ("div", "min", "max"))
    if code is not BELOW_ZERO:  # rounded up there: only lines of other rates
        assert rounded != has_line(holds)


def has_line(holds):
    """Whether some line is between the steps where a comparison holds and the rest."""
    i, j = np.indices(holds.shape)
    if holds.all() or not holds.any():
        return False
    for a, b in itertools.product(range(4), range(-3, 4)):
        sums = a * j + b * i
        here, there = sums[holds], sums[~holds]
        if here.max() < there.min() or there.max() < here.min():
            return True
    return False


def test_a_line_between_blocks_of_keys_and_queries():
    """`j < cdiv(2 (i + 1), 3)`, as a comparison of positions."""
    new = affine_numbers(compared(AFTER, "lt %j, %n"))
    code = new.text.split("body")[-1]
    counts = [code.count(f"= {name} ") for name in ("mul", "add", "lt", "ge")]
    assert counts == [2, 1, 1, 0]


def test_no_line():
    """The remainder goes up and down: nothing affine says when a number is below."""
    kernel = compared("%n: i32 = rem %i, %three", "lt %j, %n")
    assert affine_numbers(kernel) is kernel


@pytest.mark.parametrize("grid", [(0, 5), (1, 5), (7, 1), (1, 1)])
def test_short_grids_with_comparisons(grid):
    kernel = compared(AFTER, "lt %j, %n", grid)
    assert_same_meaning(kernel, affine_numbers(kernel), checked=False)


def test_numbers_that_would_wrap():
    """Twice the other side would be no index any more."""
    code = """
      %large: i32 = constant {value=300000001}
      %x: i32 = mul %j, %large
      %a: i32 = mul %i, %large
      %n: i32 = div %a, %two
    """
    kernel = compared(code, "lt %x, %n")
    assert affine_numbers(kernel) is kernel
    small = compared(code.replace("300000001", "200000001"), "lt %x, %n")
    new = affine_numbers(small)
    assert "div" not in new.text
    assert_same_meaning(small, new, checked=False)
