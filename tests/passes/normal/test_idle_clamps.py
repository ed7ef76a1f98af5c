"""Clamps of index maps that a guard makes idle go. Text in, text out."""

import re

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.idle_clamps import idle_clamps
from pallasite.passes.optimise.idle_windows import idle_windows
from tests.passes.normal.meaning import assert_same_meaning

# Sums of blocks up to the diagonal; a block has 8 elements, a program 16.
SUMS = """
kernel @k(%n: ref<i32[4] smem>, %x: ref<f32[30] any>, %o: ref<f32[16] any>) outputs 1 {
  pipeline %x, %o {grid=(2, 4), windows=(in[8] fill 0.0, out[8]),
      semantics=("arbitrary", "arbitrary")}
    map (%i1: i32, %j1: i32) {
      %one: i32 = constant {value=1}
      %two: i32 = constant {value=2}
      %zero: i32 = constant {value=0}
      MAP
      yield %at
    }
    map (%i2: i32, %j2: i32) { yield %i2 }
    body (%i: i32, %j: i32, %xb: ref<f32[8] block>, %ob: ref<f32[8] block>) {
      %c0: i32 = constant {value=0}
      %c1: i32 = constant {value=1}
      %c8: i32 = constant {value=8}
      %c16: i32 = constant {value=16}
      %first: bool = eq %j, %c0
      %number: i32 = cast %first {dtype=i32}
      cond %number
        branch () {}
        branch () {
          %z: f32[8] = constant {value=0.0}
          store %ob[:] = %z
        }
      %k: i32 = mul %j, %c8
      %i3: i32 = add %i, %c1
      %end: i32 = mul %i3, %c16
      %runs: bool = lt %k, %end
      GUARD
      %w: i32 = cast %g {dtype=i32}
      cond %w
        branch () {}
        branch () {
          %a: f32[8] = load %ob[:]
          %v: f32[8] = load %xb[:]
          %s: f32[8] = add %a, %v
          store %ob[:] = %s
        }
    }
}
"""
MINIMUM = """
      %m: i32 = mul %i1, %two
      %last: i32 = add %m, %one
      %at: i32 = min %j1, %last
"""
CHOICE = """
      %m: i32 = mul %i1, %two
      %last: i32 = add %m, %one
      %in: bool = le %j1, %last
      %at: i32 = select_n %in, %zero, %j1
"""
TOO_SMALL = MINIMUM.replace("add %m, %one", "add %m, %zero")
RUNS = "%g: bool = and %runs, %runs"
PARTLY_KNOWN = """%l: i32 = load %n[%i]
      %more: bool = lt %j, %l
      %g: bool = and %runs, %more"""
ALWAYS = "%g: bool = ge %k, %c0"


def kernel_of(code: str, guard: str):
    text = SUMS.replace("MAP", code).replace("GUARD", guard)
    return canonicalize(parse_kernel(text))


@pytest.mark.parametrize("code", [MINIMUM, CHOICE], ids=["minimum", "choice"])
@pytest.mark.parametrize("guard", [RUNS, PARTLY_KNOWN], ids=["known", "partly known"])
def test_idle_clamps_go(code, guard):
    kernel = kernel_of(code, guard)
    new = idle_clamps(kernel)
    assert_same_meaning(kernel, new)
    assert re.search(r"map \(%i1: i32, %j1: i32\) { yield %j1 }", new.text)
    assert idle_clamps(new) is new
    still = idle_windows(new)
    assert "min" in still.text[: still.text.index("body")]
    assert_same_meaning(kernel, still)


@pytest.mark.parametrize(
    "code, guard",
    [(MINIMUM, ALWAYS), (CHOICE, ALWAYS), (TOO_SMALL, RUNS)],
    ids=["minimum", "choice", "too small"],
)
def test_clamps_that_matter_stay(code, guard):
    kernel = kernel_of(code, guard)
    assert idle_clamps(kernel) is kernel


def test_clamps_that_never_act_go():
    kernel = kernel_of("%at: i32 = max %j1, %zero", ALWAYS)
    new = idle_clamps(kernel)
    assert "max" not in new.text
    assert_same_meaning(kernel, new)
