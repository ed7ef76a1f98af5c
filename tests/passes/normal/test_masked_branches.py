"""Masks in one of two branches that are the same otherwise. Text in, text out."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.masked_branches import masked_branches
from tests.passes.normal.meaning import assert_same_meaning

# Blocks of two columns; only those that the diagonal crosses need a mask.
KERNEL = """
kernel @k(%x: ref<f32[12,20] any>, %o: ref<f32[12,1] any>) outputs 1 {
  pipeline %x, %o {grid=(3,), windows=(in[4, 20], out[4, 1]), semantics=("arbitrary",)}
    map (%a: i32) {
      %z1: i32 = constant {value=0}
      yield %a, %z1
    }
    map (%b: i32) {
      %z2: i32 = constant {value=0}
      yield %b, %z2
    }
    body (%i: i32, %xb: ref<f32[4,20] block>, %ob: ref<f32[4,1] block>) {
      %zero: i32 = constant {value=0}
      %one: i32 = constant {value=1}
      %two: i32 = constant {value=2}
      %four: i32 = constant {value=4}
      %ten: i32 = constant {value=10}
      %start: f32[4,1] = constant {value=0.5}
      %row: i32 = mul %i, %four
      %sum: f32[4,1] = for %zero, %ten, %one, %start
        body (%j: i32, %c: f32[4,1]) {
          %at: i32 = mul %j, %two
          %v: f32[4,2] = load %xb[:, %at:+2]
          %end: i32 = add %at, %two
          %needs: bool = gt %end, LIMIT
          %which: i32 = cast %needs {dtype=i32}
          %w: f32[4,2] = cond %which
            branch () { PLAIN }
            branch () {
              %rows: i32[4,2] = iota {dim=0}
              %first: i32[4,2] = broadcast_in_dim %row {shape=(4, 2), dims=()}
              %r: i32[4,2] = add %first, %rows
              %columns: i32[4,2] = iota {dim=1}
              %from: i32[4,2] = broadcast_in_dim %at {shape=(4, 2), dims=()}
              %k: i32[4,2] = add %from, %columns
              %in: bool[4,2] = le %k, %r
              %none: f32[4,2] = constant {value=-3.0}
              %m: f32[4,2] = select_n %in, %none, %v
              yield %m
            }
          %s: f32[4] = reduce %w {kind="sum", axes=(1,)}
          %t: f32[4,1] = reshape %s {shape=(4, 1)}
          %new: f32[4,1] = add %c, %t
          yield %new
        }
      store %ob[:, :] = %sum
    }
}
"""


def kernel_of(limit: str, plain: str = "yield %v"):
    text = KERNEL.replace("LIMIT", limit).replace("PLAIN", plain)
    return canonicalize(parse_kernel(text))


@pytest.mark.parametrize("limit", ["%row", "%zero"])
def test_a_mask_that_is_left_out_where_it_lets_all_through(limit: str):
    kernel = kernel_of(limit)
    new = masked_branches(kernel)
    assert_same_meaning(kernel, new)
    assert "cond" not in new.text and "select_n" in new.text
    assert masked_branches(new) is new


@pytest.mark.parametrize(
    ("limit", "plain"),
    [
        ("%ten", "yield %v"),  # it is left out where it is needed
        ("%row", "%n: f32[4,2] = neg %v\nyield %n"),
    ],
)
def test_other_branches_stay(limit: str, plain: str):
    kernel = kernel_of(limit, plain)
    assert masked_branches(kernel) is kernel
