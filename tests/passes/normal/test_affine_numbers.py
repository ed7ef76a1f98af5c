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


COMPARED = """
kernel @k(%x: ref<f32[5,8] any>, %o: ref<i32[5,4] any>) outputs 1 {
  pipeline %x {grid=(5, 4), windows=(in[1, 2]), semantics=("arbitrary", "arbitrary")}
    map (%a: i32, %b: i32) {
      yield %a, %b
    }
    body (%i: i32, %j: i32, %xb: ref<f32[1,2] block>) {
      %zero: i32 = constant {value=0}
      %one: i32 = constant {value=1}
      %two: i32 = constant {value=2}
      %three: i32 = constant {value=3}
      %more: i32 = add %i, ADDED
      %half: i32 = div %more, %two
      %end: i32 = min %half, %three
      %test: bool = TEST
      %n: i32 = cast %test {dtype=i32}
      store %o[%i, %j] = %n
    }
}
"""


@pytest.mark.parametrize("added", ["%zero", "%one", "%two", "%three"])
@pytest.mark.parametrize("test", ["lt %j, %end", "ge %end, %j", "gt %j, %end"])
def test_comparisons_with_quotients_are_of_positions(added, test):
    """Blocks of two columns end at the row's number, rounded up or down."""
    text = COMPARED.replace("ADDED", added).replace("TEST", test)
    kernel = canonicalize(parse_kernel(text))
    new = affine_numbers(kernel)
    assert_same_meaning(kernel, new, checked=False)
    if (added, test) != ("%three", "lt %j, %end"):  # the minimum is below
        assert "div" not in new.text and "min" not in new.text
        assert affine_numbers(new) is new


@pytest.mark.parametrize("test", ["lt %end, %zero", "ge %j, %zero", "lt %j, %i"])
def test_other_comparisons_stay(test):
    text = COMPARED.replace("ADDED", "%zero").replace("TEST", test)
    kernel = canonicalize(parse_kernel(text))
    assert affine_numbers(kernel) is kernel


def test_comparisons_that_no_line_divides_stay():
    text = COMPARED.replace("ADDED", "%zero").replace("div", "rem")
    kernel = canonicalize(parse_kernel(text.replace("TEST", "lt %j, %end")))
    assert affine_numbers(kernel) is kernel
