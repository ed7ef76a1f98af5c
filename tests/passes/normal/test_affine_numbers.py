"""Numbers that are affine in the grid indices are written so. Text in, text out."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.affine_numbers import affine_numbers
from pallasite.passes.normal.canonicalize import canonicalize
from tests.passes.normal.meaning import assert_same_meaning

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
