"""Loops that compute the same in every iteration move out of the loop around them."""

import pytest

from pallasite.ir.parse import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.guard_bounds import guard_bounds
from pallasite.passes.optimise.hoist import hoist

# How segment ids are compared with blocks of segments, parts of them at a time.
KERNEL = """
kernel @k(%ids: ref<i32[64] any>, %o: ref<f32[8] any>) outputs 1 {
  pipeline {grid=(), windows=(), semantics=()}
    body () {
      %c0: i32 = constant {value=0}
      %c1: i32 = constant {value=1}
      %c4: i32 = constant {value=4}
      %c8: i32 = constant {value=8}
      %low: i32 = constant {value=-1}
      %one: f32 = constant {value=1.0}
      for %c0, %c8, %c1
        body (%i: i32) {
          %top: i32 = for %c0, %c4, %c1, %low
            body (%part: i32, %old: i32) {
              %at: i32 = mul %part, %c8
              %id: i32[8] = load %ids[%at:+8]
              %most: i32 = reduce %id {kind="max", axes=(0,)}
              %new: i32 = max %old, %most
              yield %new
            }
          %reached: bool = ge %top, %i
          %which: i32 = cast %reached {dtype=i32}
          cond %which
            branch () {}
            branch () { store %o[%i] = %one }
        }
    }
}
"""


def test_a_loop_over_constant_memory_runs_once():
    new = hoist(parse_kernel(KERNEL))
    verify(new)
    assert new.text.index("load %ids") < new.text.index("body (%i: i32)")
    # Its result is known before the loop, whose limit it becomes.
    assert "cond" not in guard_bounds(new).text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("store %o[%i] = %one", "store %o[%i] = %one store %ids[%i] = %i"),
        ("mul %part, %c8", "mul %i, %c8"),
    ],
)
def test_a_loop_over_what_iterations_change_stays(old: str, new: str):
    text = hoist(parse_kernel(KERNEL.replace(old, new))).text
    assert text.index("body (%i: i32)") < text.index("load %ids")


# A sum that the first iteration of a loop around it completes, and another result.
LAST = """
kernel @k(%x: ref<f32[4,8] any>, %s: ref<f32[8] any>, %o: ref<f32[4,8] any>) outputs 2 {
  pipeline {grid=(), windows=(), semantics=()}
    body () {
      %c0: i32 = constant {value=0}
      %c1: i32 = constant {value=1}
      %c3: i32 = constant {value=3}
      %c4: i32 = constant {value=4}
      %zero: f32[8] = constant {value=0.0}
      %view: ref<f32[8] block> = block_view %s, %c0 {window=out[8]}
      %end: f32[8] = for %c0, %c4, %c1, %zero
        body (%i: i32, %sum: f32[8]) {
          %row: f32[8] = load %x[%i, :]
          %new: f32[8] = add %sum, %row
          %is_last: bool = eq %i, %c3
          %which: i32 = cast %is_last {dtype=i32}
          cond %which
            branch () {}
            branch () { store %view[:] = %new }
          store %o[%i, :] = %row
          yield %new
        }
    }
}
"""


def test_the_last_step_moves_over_stores_to_other_memory():
    new = hoist(parse_kernel(LAST))
    verify(new)
    assert "cond" not in new.text and "store %view[:] = %end" in new.text
    # What is stored behind it there would be overwritten.
    same = LAST.replace("store %o[%i, :] = %row", "store %s[:] = %row")
    assert "cond" in hoist(parse_kernel(same)).text
    # An operand may be the same memory as a result.
    assert "cond" in hoist(parse_kernel(LAST).with_(aliases=((0, 1),))).text
