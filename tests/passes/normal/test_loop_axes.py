"""Loops over blocks of results become axes of the grid. Text in, text out."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.loop_axes import loop_axes
from pallasite.passes.normal.program_order import program_order
from tests.passes.normal.meaning import assert_same_meaning

COPY = """
kernel @k(%x: ref<f32[40] any>, %o: ref<f32[40] any>) outputs 1 {
  pipeline %x, %o {grid=GRID, windows=(in[40], out[40]), semantics=("arbitrary",)}
    map (%a: i32) {
      %z1: i32 = constant {value=0}
      yield %z1
    }
    map (%b: i32) {
      %z2: i32 = constant {value=0}
      yield %z2
    }
    body (%i: i32, %xb: ref<f32[40] block>, %ob: ref<f32[40] block>) {
      %zero: i32 = constant {value=0}
      %one: i32 = constant {value=1}
      %three: i32 = constant {value=3}
      %four: i32 = constant {value=4}
      %ten: i32 = constant {value=10}
      LOOP
    }
}
"""
STRIDED = """
      for %i, %ten, %three
        body (%p: i32) {
          %s: i32 = mul %p, %four
          %v: f32[4] = load %xb[%s:+4]
          store %ob[%s:+4] = %v
        }
"""
COUNTED = """
      for %zero, %ten, %one
        body (%p: i32) {
          %s: i32 = mul %p, %four
          %v: f32[4] = load %xb[%s:+4]
          store %ob[%s:+4] = %v
        }
"""


def kernel_of(loop: str, grid: int):
    text = COPY.replace("LOOP", loop).replace("GRID", f"({grid},)")
    return canonicalize(parse_kernel(text))


def test_a_persistent_loop():
    kernel = kernel_of(STRIDED, 3)
    new = loop_axes(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(3, 4), windows=(in[4], out[4])" in new.text
    assert "for" not in new.text
    assert loop_axes(new) is new
    ordered = program_order(new)
    assert_same_meaning(kernel, ordered)
    assert "grid=(10,)" in ordered.text
    assert "cond" not in ordered.text


def test_a_program_alone():
    kernel = kernel_of(COUNTED, 1)
    new = loop_axes(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(1, 10), windows=(in[4], out[4])" in new.text
    assert "cond" not in new.text


@pytest.mark.parametrize(
    "old, new",
    [
        ("load %xb[%s:+4]", "load %ob[%s:+4]"),  # still a loop over blocks
        ("store %ob[%s:+4]", "store %ob[0:+4]"),
        ("mul %p, %four", "mul %p, %three"),
    ],
    ids=["in place", "one block", "overlapping"],
)
def test_what_stays_a_loop(old, new):
    kernel = kernel_of(COUNTED.replace(old, new), 1)
    made = loop_axes(kernel)
    assert (made is kernel) == ("%ob[%s" not in new)
    assert_same_meaning(kernel, made, checked=False)


CARRIED = """
      %z: f32[4] = constant {value=0.0}
      %t: f32[4] = for %zero, %ten, %one, %z
        body (%p: i32, %c: f32[4]) {
          %s: i32 = mul %p, %four
          %v: f32[4] = load %xb[%s:+4]
          %u: f32[4] = add %c, %v
          store %ob[%s:+4] = %u
          yield %u
        }
"""


def test_a_loop_that_carries_a_value_stays():
    kernel = kernel_of(CARRIED, 1)
    assert loop_axes(kernel) is kernel
