"""Several steps of the last axis in one. Text in, text out."""

import numpy as np
import pytest

from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.known_comparisons import known_comparisons
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.gather_steps import gather_programs, gather_steps
from tests.passes.test_promote import expect
from tests.passes.test_row_strips import code
from tests.passes.test_same_meaning import outputs


def kernel(body: str, x_map: str = "yield %z, %i", n: int = 32) -> Kernel:
    """Eight steps over x[8,4], rows of w and a block o that stays."""
    text = f"""
    kernel @k(%x: ref<f32[8,{n}] any>, %w: ref<f32[8,4] any>, %o: ref<f32[8,4] any>)
        outputs 1 {{
      pipeline %x, %w, %o {{grid=(8,),
          windows=(in[8, 4], in[squeezed 1, 4], out[8, 4]), semantics=("arbitrary",)}}
        map (%i: i32) {{ %z: i32 = constant {{value=0}} {x_map} }}
        map (%i1: i32) {{ %z1: i32 = constant {{value=0}} yield %i1, %z1 }}
        map (%i2: i32) {{ %z2: i32 = constant {{value=0}} yield %z2, %z2 }}
        body (%s: i32, %xb: ref<f32[8,4] block>, %wb: ref<f32[4] block>,
              %ob: ref<f32[8,4] block>) {{
          {body}
        }}
    }}"""
    made = parse_kernel(text)
    verify(made)
    return made


RUNNING = """
%zero: i32 = constant {value=0}
%first: bool = eq %s, %zero
%which: i32 = cast %first {dtype=i32}
cond %which
  branch () {}
  branch () { %one: f32[8,4] = constant {value=1.0} store %ob[:, :] = %one }
%x0: f32[8,4] = load %xb[:, :]
%w0: f32[4] = load %wb[:]
%w1: f32[8,4] = broadcast_in_dim %w0 {shape=(8, 4), dims=(1,)}
%old: f32[8,4] = load %ob[:, :]
%sum: f32[8,4] = add %x0, %w1
%new: f32[8,4] = max %old, %sum
store %ob[:, :] = %new
"""


def gathered(made: Kernel, factor: int) -> Kernel:
    new = canonicalize(known_comparisons(gather_steps(made, factor)))
    verify(new)
    return new


def test_each_step_has_its_part_of_larger_windows():
    new = gathered(kernel(RUNNING), 2)
    assert "grid=(4,), windows=(in[8, 8], in[2, 4], out[8, 4])" in new.text
    assert code(new) == expect(
        """
        %0: i32 = constant {value=2}
        %1: i32 = mul %s, %0
        %2: i32 = constant {value=0}
        %first: bool = eq %1, %2
        %which: i32 = cast %first {dtype=i32}
        cond %which
          branch () {}
          branch () {
            %one: f32[8,4] = constant {value=1.0}
            store %ob[:, :] = %one
          }
        %3: f32[8,4] = load %xb[:, 0:+4]
        %4: f32[4] = load %wb[0, :]
        %w1: f32[8,4] = broadcast_in_dim %4 {shape=(8, 4), dims=(1,)}
        %old: f32[8,4] = load %ob[:, :]
        %sum: f32[8,4] = add %3, %w1
        %new: f32[8,4] = max %old, %sum
        store %ob[:, :] = %new
        %5: f32[8,4] = load %xb[:, 4:+4]
        %6: f32[4] = load %wb[1, :]
        %w1_1: f32[8,4] = broadcast_in_dim %6 {shape=(8, 4), dims=(1,)}
        %old_1: f32[8,4] = load %ob[:, :]
        %sum_1: f32[8,4] = add %5, %w1_1
        %new_1: f32[8,4] = max %old_1, %sum_1
        store %ob[:, :] = %new_1
        """
    )


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_meaning_stays(factor: int):
    made = kernel(RUNNING)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=p.ref.shape).astype("f4") for p in made.inputs]
    (got,), (want,) = outputs(gathered(made, factor), arrays), outputs(made, arrays)
    np.testing.assert_array_equal(got, want)


# What the window over x shows: a block near the one of the step's own number.
NEAR = {
    "before": "%c: i32 = constant {value=1} %a: i32 = sub %i, %c %j: i32 = max %a, %z",
    "after": """%c: i32 = constant {value=1} %last: i32 = constant {value=7}
        %a: i32 = add %c, %i %j: i32 = min %a, %last""",
    "outside": "%c: i32 = constant {value=-3} %j: i32 = add %i, %c",
    "past the end": "%c: i32 = constant {value=5} %j: i32 = add %i, %c",
    "between": """%c: i32 = constant {value=2} %last: i32 = constant {value=5}
        %a: i32 = max %i, %c %j: i32 = min %a, %last""",
}


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_blocks_near_the_step_are_gathered(name: str, factor: int):
    made = kernel(RUNNING, NEAR[name] + " yield %z, %j", n=40 if factor == 4 else 32)
    arrays = [
        np.arange(p.ref.size, dtype="f4").reshape(p.ref.shape) for p in made.inputs
    ]
    new = gathered(made, factor)
    (got,), (want,) = outputs(new, arrays), outputs(made, arrays)
    np.testing.assert_array_equal(got, want)
    (pipeline,) = [op for op in new.body.ops if op.name == "pipeline"]
    assert pipeline.attrs["windows"][0].dims[1].size == 4 * factor


@pytest.mark.parametrize("name", ["twice", "of both"])
def test_blocks_farther_and_farther_from_the_step_are_not(name: str):
    maps = {
        "twice": "%j: i32 = add %i, %i yield %z, %j",
        "of both": "%c: i32 = constant {value=1} %j: i32 = add %i, %c yield %i, %j",
    }
    with pytest.raises(CannotReblock, match="does not follow the axis"):
        gather_steps(kernel(RUNNING, maps[name]), 2)


@pytest.mark.parametrize(
    "made, factor, reason",
    [
        (kernel(RUNNING), 3, "8 steps are not a multiple of 3"),
        (kernel(RUNNING, n=30), 2, "the last block of x extends past the edge"),
        (
            kernel(RUNNING, "%j: i32 = sub %z, %i yield %z, %j"),
            2,
            "x does not follow the axis block by block",
        ),
    ],
    ids=["count", "edge", "order"],
)
def test_steps_that_cannot_be_gathered(made: Kernel, factor: int, reason: str):
    with pytest.raises(CannotReblock, match=reason):
        gather_steps(made, factor)


HEADS = """
kernel @k(%x: ref<f32[4,8,4] any>, %o: ref<f32[4,4] any>) outputs 1 {
  %m: ref<f32[4] vmem> = alloc {type=ref<f32[4] vmem>}
  pipeline %x, %o {grid=(4, 8), windows=(in[squeezed 1, squeezed 1, 4],
      out[squeezed 1, 4]), semantics=("arbitrary", "arbitrary")}
    map (%h: i32, %i: i32) { %z: i32 = constant {value=0} yield %h, %i, %z }
    map (%h1: i32, %i1: i32) { %z1: i32 = constant {value=0} yield %h1, %z1 }
    body (%h2: i32, %s: i32, %xb: ref<f32[4] block>, %ob: ref<f32[4] block>) {
      %zero: i32 = constant {value=0}
      %first: bool = eq %s, %zero
      %which: i32 = cast %first {dtype=i32}
      cond %which
        branch () {}
        branch () { %one: f32[4] = constant {value=1.0} store %m[:] = %one }
      %x0: f32[4] = load %xb[:]
      %old: f32[4] = load %m[:]
      %new: f32[4] = max %old, %x0
      store %m[:] = %new
      store %ob[:] = %new
    }
}
"""


@pytest.mark.parametrize("factor", [2, 4])
def test_programs_side_by_side_have_scratch_of_their_own(factor: int):
    made = parse_kernel(HEADS)
    new = canonicalize(gather_programs(made, 0, factor))
    verify(new)
    windows = f"in[{factor}, squeezed 1, 4], out[{factor}, 4]"
    assert f"grid=({4 // factor}, 8), windows=({windows})" in new.text
    assert new.text.count("= alloc") == factor
    assert new.text.count("cond") == 1, "all of them begin at the same step"
    x = np.random.default_rng(0).normal(size=(4, 8, 4)).astype("f4")
    (got,), (want,) = outputs(new, [x]), outputs(made, [x])
    np.testing.assert_array_equal(got, want)


def test_programs_that_depend_on_each_other_stay_apart():
    with pytest.raises(CannotReblock, match="depend on each other"):
        gather_programs(parse_kernel(HEADS), 1, 2)


FALLING = "%l: i32 = constant {value=7} %r: i32 = sub %l, %i yield %z, %r"


def test_windows_that_move_backwards():
    """The first step has the last part of a window, which moves backwards too."""
    made = kernel(RUNNING, FALLING)
    new = gathered(made, 2)
    assert "grid=(4,), windows=(in[8, 8], in[2, 4], out[8, 4])" in new.text
    loads = [line for line in new.text.splitlines() if "load %xb" in line]
    assert ["4:+4" in line for line in loads] == [True, False]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=p.ref.shape).astype(np.float32) for p in made.inputs]
    for a, b in zip(outputs(made, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def test_windows_that_move_backwards_from_elsewhere_are_refused():
    with pytest.raises(CannotReblock, match="does not follow the axis"):
        gather_steps(kernel(RUNNING, FALLING.replace("7", "8"), n=64), 2)


STENCIL = """
kernel @stencil(%x: ref<f32[LENGTH,6] any>, %o: ref<f32[16,6] any>) outputs 1 {
  pipeline %x, %o {grid=(8, 1), windows=(in[element 5, 6], out[2, 6]),
      semantics=("arbitrary", "arbitrary")}
    map (%i: i32, %j: i32) {
      %two: i32 = constant {value=2}
      %s: i32 = mul %i, %two
      yield %s, %j
    }
    map (%i1: i32, %j1: i32) { yield %i1, %j1 }
    body (%i2: i32, %j2: i32, %xb: ref<f32[5,6] block>, %ob: ref<f32[2,6] block>) {
      %v: f32[5,6] = load %xb[:, :]
      %a: f32[2,6] = slice %v {starts=(0, 0), limits=(2, 6), strides=(1, 1)}
      %b: f32[2,6] = slice %v {starts=(3, 0), limits=(5, 6), strides=(1, 1)}
      %c: f32[2,6] = add %a, %b
      store %ob[:, :] = %c
    }
}
"""


@pytest.mark.parametrize("factor", [2, 8])
def test_overlapping_windows_of_elements(factor: int):
    """Several of them are one, in which each program's part starts two rows later."""
    made = parse_kernel(STENCIL.replace("LENGTH", "19"))
    new = canonicalize(gather_programs(made, 0, factor))
    verify(new)
    rows = 5 + 2 * (factor - 1)
    windows = f"in[element {rows}, 6], out[{2 * factor}, 6]"
    assert f"grid=({8 // factor}, 1), windows=({windows})" in new.text
    assert "load %xb[2:+5, :]" in new.text
    x = np.random.default_rng(0).normal(size=(19, 6)).astype("f4")
    (got,), (want,) = outputs(new, [x]), outputs(made, [x])
    np.testing.assert_array_equal(got, want)


def test_overlapping_windows_that_are_moved_back_at_the_end_stay():
    """The last one would start past the end, and is the nearest inside."""
    with pytest.raises(CannotReblock, match="does not follow the axis"):
        gather_programs(parse_kernel(STENCIL.replace("LENGTH", "18")), 0, 2)
