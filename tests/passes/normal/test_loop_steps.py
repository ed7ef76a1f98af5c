"""Loops of matmuls over blocks become steps of the grid. Text in, text out."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.loop_steps import loop_steps
from tests.passes.normal.meaning import assert_same_meaning

MATMUL = """
kernel @k(%x: ref<f32[8,12] any>, %y: ref<f32[12,4] any>, %o: ref<f32[8,4] any>)
    outputs 1 {
  pipeline %x, %y, %o {grid=(2,), windows=(in[4, 12], in[12, 4], out[4, 4]),
      semantics=("arbitrary",)}
    map (%a: i32) {
      %z1: i32 = constant {value=0}
      yield %a, %z1
    }
    map (%b: i32) {
      %z2: i32 = constant {value=0}
      yield %z2, %z2
    }
    map (%c: i32) {
      %z3: i32 = constant {value=0}
      yield %c, %z3
    }
    body (%i: i32, %xb: ref<f32[4,12] block>, %yb: ref<f32[12,4] block>,
        %ob: ref<f32[4,4] block>) {
      %zero: i32 = constant {value=0}
      %one: i32 = constant {value=1}
      %two: i32 = constant {value=2}
      %three: i32 = constant {value=3}
      %four: i32 = constant {value=4}
      %twelve: i32 = constant {value=12}
      %start: f32[4,4] = constant {value=0.5}
      LIMIT
      %sum: f32[4,4] = for FIRST, %limit, STEP, %start
        body (%k: i32, %c1: f32[4,4]) {
          AT
          %p: f32[4,4] = load %xb[:, %at:+4]
          %q: f32[4,4] = load %yb[%at:+4, :]
          %d: f32[4,4] = dot %p, %q {contract=((1,), (0,)), batch=((), ()),
              dtype=f32, precision=None}
          %t: f32[4,4] = add %c1, %d
          yield %t
        }
      %r: f32[4,4] = mul %sum, %sum
      store %ob[:, :] = %r
    }
}
"""
WHOLE = {"LIMIT": "%limit: i32 = add %zero, %three", "FIRST": "%zero", "STEP": "%one"}
OFFSETS = {"LIMIT": "%limit: i32 = add %zero, %twelve", "STEP": "%four"}


def kernel_of(**changes: str):
    text = MATMUL
    for old, new in {**WHOLE, "AT": "%at: i32 = mul %k, %four", **changes}.items():
        text = text.replace(old, new)
    return canonicalize(parse_kernel(text))


@pytest.mark.parametrize(
    "changes",
    [{}, {**OFFSETS, "AT": "%at: i32 = add %k, %zero"}],
    ids=["counted", "by offsets"],
)
def test_a_loop_over_k(changes):
    kernel = kernel_of(**changes)
    new = loop_steps(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(2, 3), windows=(in[4, 4], in[4, 4], out[4, 4])" in new.text
    assert "for" not in new.text.split("body")[-1]
    assert new.text.count("cond") == 2
    assert loop_steps(new) is new


@pytest.mark.parametrize("first", ["%zero", "%one"])
def test_a_length_that_the_program_computes(first):
    """The second program has one iteration more than the first; one may have none."""
    limit = "%limit: i32 = add %i, %one"
    kernel = kernel_of(LIMIT=limit, FIRST=first)
    new = loop_steps(kernel)
    assert_same_meaning(kernel, new)
    steps = 2 if first == "%zero" else 1
    assert f"grid=(2, {steps})" in new.text
    assert new.text.count("cond") == (3 if steps > 1 else 1)


@pytest.mark.parametrize("limit", ["%three", "%two", "%one", "%zero"])
def test_a_first_iteration_that_the_program_computes(limit):
    """The second program skips a step, or all of them."""
    kernel = kernel_of(LIMIT=f"%limit: i32 = add {limit}, %zero", FIRST="%i")
    new = loop_steps(kernel)
    assert_same_meaning(kernel, new)
    steps = {"%three": 3, "%two": 2, "%one": 1}.get(limit)
    assert steps is None or f"grid=(2, {steps})" in new.text
    assert steps is None or "for" not in new.text.split("body")[-1]


@pytest.mark.parametrize("back", ["%one", "%four"])
def test_a_first_iteration_before_zero(back):
    """Parts before the first are clamped to it: they are no blocks of their own."""
    changes = {"LIMIT": f"%limit: i32 = add %i, %two\n %early: i32 = sub %i, {back}"}
    kernel = kernel_of(**changes, FIRST="%early")
    assert_same_meaning(kernel, loop_steps(kernel), checked=False)


def test_steps_of_two_from_elsewhere_keep_the_loop():
    kernel = kernel_of(FIRST="%i", STEP="%two")
    assert loop_steps(kernel) is kernel


def test_parts_between_blocks_keep_the_loop():
    kernel = kernel_of(AT="%at: i32 = mul %k, %two")
    assert loop_steps(kernel) is kernel


@pytest.mark.parametrize("dtype", ["i8", "u32", "i64"])
def test_counters_of_other_types_keep_the_loop(dtype):
    """The steps of a grid are counted in 32 bits, and the code uses the counter."""
    numbers = f"""
      %first: {dtype} = cast %zero {{dtype={dtype}}}
      %limit: {dtype} = cast %three {{dtype={dtype}}}
      %step: {dtype} = cast %one {{dtype={dtype}}}"""
    at = "%k32: i32 = cast %k {dtype=i32}\n %at: i32 = mul %k32, %four"
    changes = {"FIRST": "%first", "STEP": "%step", "(%k: i32,": f"(%k: {dtype},"}
    kernel = kernel_of(LIMIT=numbers, AT=at, **changes)
    assert loop_steps(kernel) is kernel


def test_a_length_that_is_rounded():
    """The guard has no quotient, so that programs and steps can be merged."""
    limit = """
      %m: i32 = add %i, %three
      %limit: i32 = div %m, %two"""
    kernel = kernel_of(LIMIT=limit)
    new = loop_steps(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(2, 2)" in new.text and "div" not in new.text.split("body")[-1]
