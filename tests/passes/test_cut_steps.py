"""Steps of running maxima and sums, split into narrower ones: the same meaning."""

import numpy as np
import pytest

from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.cut_steps import cut_steps
from pallasite.passes.schedule.widen_steps import widen_steps
from tests.passes.normal_text import normal_text
from tests.passes.test_same_meaning import outputs
from tests.passes.test_widen_steps import (
    FIRST,
    POSITIONS,
    REST,
    SCORES,
    UNMASKED,
    steps,
)


def cut(kernel: Kernel, size: int) -> Kernel:
    new = canonicalize(cut_steps(canonicalize(kernel), size))
    verify(new)
    return new


@pytest.mark.parametrize("size", [2, 1])
@pytest.mark.parametrize(
    "body", [FIRST + SCORES + REST, UNMASKED, FIRST + POSITIONS + REST]
)
def test_the_same_state_in_more_steps(body: str, size: int):
    kernel = steps(body)
    new = cut(kernel, size)
    assert f"grid=({32 // size},), windows=(in[8, {size}], out[8])" in new.text
    x = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    x[3, :3] = -np.inf  # parts without anything finite
    arrays = [x]
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-5)


INFINITE = FIRST.replace("-65536.0", "-inf")
LAST = """
%seven: i32 = constant {value=7}
%last: bool = eq %s, %seven
%end: i32 = cast %last {dtype=i32}
cond %end
  branch () {}
  branch () {
    %result: f32[8] = load %top[:]
    store %ob[:] = %result
  }
"""


@pytest.mark.parametrize("size", [2, 1])
def test_a_part_of_minus_infinities_adds_nothing(size: int):
    """The maximum before anything finite is the lowest finite number."""
    kernel = steps(INFINITE + SCORES + REST)
    new = cut(kernel, size)
    x = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    x[3, :3] = x[5, 1:] = -np.inf
    x[6, 9] = np.inf
    with np.errstate(invalid="ignore"):
        (want,), (got,) = outputs(kernel, [x]), outputs(new, [x])
    assert list(np.flatnonzero(np.isnan(want))) == [6]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_wide_steps_become_those_that_were_widened():
    kernel = canonicalize(steps(FIRST + SCORES + REST))
    wide = canonicalize(widen_steps(kernel, 16))
    assert normal_text(cut(wide, 4)) == normal_text(kernel)


def test_positions_are_those_of_the_new_steps():
    new = cut(steps(FIRST + POSITIONS + REST), 2)
    assert "div" not in new.text and "rem" not in new.text


def _swapped(body: str) -> str:
    """The maximum in the result, the sum in scratch."""
    return body.replace("%top", "%t").replace("%ob", "%top").replace("%t[", "%ob[")


@pytest.mark.parametrize(
    "body, reason",
    [
        (INFINITE + SCORES + REST + LAST, "the last step reads a maximum"),
        (_swapped(INFINITE + SCORES + REST), "is a result"),
        (SCORES + REST, "starts in another way"),
        (FIRST + SCORES + REST.replace("%sum: f32[8] = add", "%sum: f32[8] = mul"),
         "neither a maximum"),
    ],
)  # fmt: skip
def test_steps_that_stay(body: str, reason: str):
    with pytest.raises(CannotReblock, match=reason):
        cut(steps(body), 2)


# Sums over blocks of rows of x: of tanh(x + row) times y, from 1, doubled at the end.
SUMS = """
kernel @k(%x: ref<f32[64,8] any>, %y: ref<f32[64,8] any>, %o: ref<f32[2,8,8] any>) outputs 1 {
  %acc: ref<f32[8,8] vmem> = alloc
  pipeline %x, %y, %o {grid=(2, 4), windows=(in[16, 8], in[16, 8], out[squeezed 1, 8, 8]), semantics=("parallel", "sequential")}
    map (%i: i32, %j: i32) { %z: i32 = constant {value=0} yield %j, %z }
    map (%i1: i32, %j1: i32) { %z1: i32 = constant {value=0} yield %j1, %z1 }
    map (%i2: i32, %j2: i32) { %z2: i32 = constant {value=0} yield %i2, %z2, %z2 }
    body (%p: i32, %s: i32, %xb: ref<f32[16,8] block>, %yb: ref<f32[16,8] block>, %ob: ref<f32[8,8] block>) {
      %c0: i32 = constant {value=0}
      %c3: i32 = constant {value=3}
      %c16: i32 = constant {value=16}
      %first: bool = eq %s, %c0
      %f: i32 = cast %first {dtype=i32}
      cond %f
        branch () {}
        branch () {
          %one: f32[8,8] = constant {value=1.0}
          store %acc[:, :] = %one
        }
      %a: f32[16,8] = load %xb[:, :]
      %b: f32[16,8] = load %yb[:, :]
      %rows: i32[16,8] = iota {dim=0}
      %start: i32 = mul %s, %c16
      %starts: i32[16,8] = broadcast_in_dim %start {shape=(16, 8), dims=()}
      %place: i32[16,8] = add %rows, %starts
      %number: f32[16,8] = cast %place {dtype=f32}
      %sum: f32[16,8] = add %a, %number
      %t: f32[16,8] = tanh %sum
      %all: bool = ge %s, %p
      %g: i32 = cast %all {dtype=i32}
      cond %g
        branch () {}
        branch () {
          %d: f32[8,8] = dot %t, %b {contract=((0,), (0,)), batch=((), ()), dtype=f32, precision=None}
          %dt: f32[8,8] = transpose %d {perm=(1, 0)}
          %old: f32[8,8] = load %acc[:, :]
          %new: f32[8,8] = add %old, %dt
          store %acc[:, :] = %new
        }
      %last: bool = eq %s, %c3
      %l: i32 = cast %last {dtype=i32}
      cond %l
        branch () {}
        branch () {
          %end: f32[8,8] = load %acc[:, :]
          %two: f32[8,8] = add %end, %end
          store %ob[:, :] = %two
        }
    }
}
"""  # noqa: E501
X_ROWS = (0, 0)


def parsed(text: str) -> Kernel:
    kernel = parse_kernel(text)
    verify(kernel)
    return kernel


@pytest.mark.parametrize("parts", [2, 4])
def test_the_same_sums_in_more_steps(parts: int):
    kernel = parsed(SUMS)
    made = cut_steps(kernel, 16 // parts, X_ROWS)
    verify(made)
    assert f"grid=(2, {4 * parts})" in made.text
    assert f"in[{16 // parts}, 8], in[{16 // parts}, 8]" in made.text
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(64, 8)).astype("f4") for _ in range(2)]
    for a, b in zip(outputs(kernel, arrays), outputs(made, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    # The first and the last step are still known as such.
    text = canonicalize(made).text
    assert f"constant {{value={4 * parts - 1}}}" in text


def test_parts_of_blocks_that_lie_one_below_another():
    """Steps move along rows of the array, but its blocks' columns are what they sum."""
    text = SUMS.replace("%y: ref<f32[64,8]", "%y: ref<f32[32,16]")
    text = text.replace("in[16, 8], in[16, 8]", "in[16, 8], in[8, 16]")
    text = text.replace("%yb: ref<f32[16,8]", "%yb: ref<f32[8,16]")
    load = "%b: f32[16,8] = load %yb[:, :]"
    turned = (
        "%bt: f32[8,16] = load %yb[:, :] %b: f32[16,8] = transpose %bt {perm=(1, 0)}"
    )
    kernel = parsed(text.replace(load, turned))
    made = cut_steps(kernel, 4, X_ROWS)
    verify(made)
    assert "in[4, 8], in[8, 4]" in made.text
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=n).astype("f4") for n in ((64, 8), (32, 16))]
    for a, b in zip(outputs(kernel, arrays), outputs(made, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [50, 53])
def test_parts_past_the_edge_read_what_fills_it(rows: int):
    """Of the last block, which has an index; a part that is all fill has none."""
    text = SUMS.replace("%x: ref<f32[64,8]", f"%x: ref<f32[{rows},8]")
    kernel = parsed(text.replace("windows=(in[16, 8],", "windows=(in[16, 8] fill 0.0,"))
    made = cut_steps(kernel, 4, X_ROWS)
    verify(made)
    assert "element" in made.text
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(n, 8)).astype("f4") for n in (rows, 64)]
    for a, b in zip(outputs(kernel, arrays), outputs(made, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A sum that is looked at, or not only added to.
        ("%new: f32[8,8] = add %old, %dt", "%new: f32[8,8] = mul %old, %dt"),
        ("%dt: f32[8,8] = transpose %d {perm=(1, 0)}", "%dt: f32[8,8] = tanh %d"),
        ("%sum: f32[16,8] = add %a, %number", "%u: f32[8,8] = load %acc[:, :] "
         "%v: f32[8,8] = add %u, %u store %acc[:, :] = %v "
         "%sum: f32[16,8] = add %a, %number"),
        # Something that each step does.
        ("%last: bool = eq %s, %c3", "%last: bool = ge %s, %c3"),
    ],
)  # fmt: skip
def test_other_steps_stay(old: str, new: str):
    assert old in SUMS
    with pytest.raises(CannotReblock):
        cut_steps(parsed(SUMS.replace(old, new)), 8, X_ROWS)
