"""Results that steps accumulate in are scratch until the last. Text in, text out."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.results_in_scratch import results_in_scratch
from tests.passes.normal.meaning import assert_same_meaning

SUMS = """
kernel @k(%x: ref<f32[SIZE] any>, %o: ref<f32[10] any>) outputs 1 {
  pipeline %x, %o {grid=GRID, windows=(in[8], out[8]),
      semantics=("arbitrary", "arbitrary")}
    map (%i1: i32, %j1: i32) { yield %j1 }
    map (%i2: i32, %j2: i32) { yield %i2 }
    body (%i: i32, %j: i32, %xb: ref<f32[8] block>, %ob: ref<f32[8] block>) {
      %zero: i32 = constant {value=0}
      %last: i32 = constant {value=2}
      %is: bool = eq FIRST, %zero
      %number: i32 = cast %is {dtype=i32}
      cond %number
        branch () {}
        branch () {
          %z: f32[8] = constant {value=0.0}
          store %ob[:] = %z
        }
      %a: f32[8] = load %ob[:]
      %v: f32[8] = load %xb[:]
      %s: f32[8] = add %a, %v
      store %ob[:] = %s
      END
    }
}
"""
SQUARED = """
      %e: bool = eq %j, %last
      %w: i32 = cast %e {dtype=i32}
      cond %w
        branch () {}
        branch () {
          %b: f32[8] = load %ob[:]
          %c: f32[8] = mul %b, %b
          store %ob[:] = %c
        }
"""


def kernel_of(end: str = "", grid: str = "(2, 3)", first: str = "%j", size: int = 24):
    text = SUMS.replace("END", end).replace("GRID", grid).replace("FIRST", first)
    return canonicalize(parse_kernel(text.replace("SIZE", str(size))))


@pytest.mark.parametrize("end", ["", SQUARED], ids=["sum", "squared at the end"])
def test_sums_are_stored_once(end):
    kernel = kernel_of(end)
    new = results_in_scratch(kernel)
    assert_same_meaning(kernel, new)
    assert "%ob: ref<f32[8] vmem> = alloc" in new.text
    assert new.text.count("cond") == 2
    assert new.text.count("store %ob_1") == 1
    assert "load %ob_1" not in new.text
    assert results_in_scratch(new) is new


def test_one_sum_beside_no_statistics_stays_where_it_is():
    kernel = kernel_of()
    assert results_in_scratch(kernel, least=2) is kernel
    assert results_in_scratch(kernel, least=1) is not kernel


def test_edge_blocks():
    kernel = kernel_of(size=21)
    assert_same_meaning(kernel, results_in_scratch(kernel), checked=False)


@pytest.mark.parametrize(
    "changes",
    [{"grid": "(2, 1)"}, {"first": "%i"}, {"grid": "(2, 0)"}],
    ids=["one step", "not set at its first step", "no step"],
)
def test_what_stays(changes):
    kernel = kernel_of(**changes)
    assert results_in_scratch(kernel) is kernel
