"""Scratch that every iteration reads and overwrites is carried. Text in, text out."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.schedule.loop_state import loop_state
from tests.passes.normal.meaning import assert_same_meaning

SUMS = """
kernel @k(%x: ref<f32[4,8] any>, %o: ref<f32[4,2] any>) outputs 1 {
  %m: ref<f32[4,2] vmem> = alloc
  %s: ref<f32[4,2] vmem> = alloc
  pipeline %x, %o {grid=(1,), windows=(in[4, 8], out[4, 2]), semantics=("arbitrary",)}
    map (%a: i32) {
      %z1: i32 = constant {value=0}
      yield %z1, %z1
    }
    map (%b: i32) {
      %z2: i32 = constant {value=0}
      yield %z2, %z2
    }
    body (%i: i32, %xb: ref<f32[4,8] block>, %ob: ref<f32[4,2] block>) {
      %zero: i32 = constant {value=0}
      %one: i32 = constant {value=1}
      %two: i32 = constant {value=2}
      %four: i32 = constant {value=4}
      %low: f32[4,2] = constant {value=-9.0}
      %none: f32[4,2] = constant {value=0.0}
      store %m[:, :] = %low
      store %s[:, :] = %none
      BEFORE
      LOOP
        body (%k: i32CARRIED) {
          %at: i32 = mul %k, %two
          %p: f32[4,2] = load %xb[:, %at:+2]
          %old: f32[4,2] = load %m[:, :]
          %new: f32[4,2] = max %old, %p
          store %m[:, :] = %new
          %again: f32[4,2] = load %m[:, :]
          %sum: f32[4,2] = load %s[SPAN]
          %more: f32[4,2] = add %sum, %again
          store %s[:, :] = %more
          YIELD
        }
      %last: f32[4,2] = load %s[:, :]
      %top: f32[4,2] = load %m[:, :]
      %both: f32[4,2] = mul %last, %top
      store %ob[:, :] = %both
    }
}
"""
PLAIN = {"BEFORE": "", "LOOP": "for %zero, %four, %one", "CARRIED": "", "YIELD": ""}
PLAIN |= {"SPAN": ":, :"}


def kernel_of(**changes: str):
    text = SUMS
    rest = {old: new for old, new in PLAIN.items() if old not in changes}
    for old, new in {**changes, **rest}.items():
        text = text.replace(old, new)
    return parse_kernel(text)


def loop_of(kernel) -> str:
    return kernel.text.split(" for ")[1].split("}")[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "LOOP": "%r: f32[4,2] = for %zero, %four, %one, %low",
            "CARRIED": ", %c: f32[4,2]",
            "YIELD": "%d: f32[4,2] = add %c, %again\nyield %d",
        },
    ],
    ids=["nothing carried", "something carried"],
)
def test_state_is_carried(changes):
    kernel = kernel_of(**changes)
    new = loop_state(kernel)
    assert_same_meaning(kernel, new)
    assert "%m[" not in loop_of(new) and "%s[" not in loop_of(new)
    assert loop_state(new) is new


@pytest.mark.parametrize(
    "changes",
    [
        {"SPAN": ":, %i:+2"},
        {"%sum: f32[4,2] = load %s[SPAN]": "%sum: f32[4,2] = neg %p"},
        {
            "BEFORE": "%v: ref<f32[4,2] vmem> = subview %s[:, :]",
            "load %s[SPAN]": "load %v[:, :]",
        },
    ],
    ids=["a part", "never read", "through a view"],
)
def test_other_scratch_stays(changes):
    kernel = kernel_of(**changes)
    new = loop_state(kernel)
    assert_same_meaning(kernel, new)
    assert "%s[" in loop_of(new) or "%v[" in loop_of(new)
    assert "%m[" not in loop_of(new)


def test_loops_that_may_not_run_keep_it():
    """What scratch without a value holds is not to be read."""
    kernel = kernel_of(LOOP="for %i, %four, %one")
    assert loop_state(kernel) is kernel
