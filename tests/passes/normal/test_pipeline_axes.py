"""Pipelines inside programs become axes of the grid. Text in, text out."""

import textwrap

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.pipeline_axes import pipeline_axes
from tests.passes.normal.meaning import assert_same_meaning

INNER = """\
pipeline %x {grid=(SIZE,), windows=(in[4] fill 0.0,), semantics=("arbitrary",)}
  map (%j1: i32) {
    %three: i32 = constant {value=3}
    %row: i32 = mul %i, %three
    %at: i32 = add %row, %j1
    yield %at
  }
  body (%j: i32, %xb: ref<f32[4] block>) {
    %old: f32[4] = load %acc[:]
    %v: f32[4] = load %xb[:]
    %w: f32[4] = mul %v, %scale
    %new: f32[4] = add %old, %w
    store %acc[:] = %new
  }
"""
SUMS = """
kernel @k(%s: ref<f32[4] any>, %x: ref<f32[22] any>, %o: ref<f32[8] any>) outputs 1 {
  %acc: ref<f32[4] vmem> = alloc
  pipeline %s, %o {grid=(2,), windows=(in[4], out[4]), semantics=("arbitrary",)}
    map (%i1: i32) {
      %c: i32 = constant {value=0}
      yield %c
    }
    map (%i2: i32) { yield %i2 }
    body (%i: i32, %sb: ref<f32[4] block>, %ob: ref<f32[4] block>) {
      %z: f32[4] = constant {value=0.0}
      store %acc[:] = %z
      %scale: f32[4] = load %sb[:]
      INNER
      %total: f32[4] = load %acc[:]
      %half: f32[4] = mul %total, %scale
      store %ob[:] = %half
    }
}
"""


def kernel_of(text: str, **replaced: str):
    for old, new in {"INNER": textwrap.indent(INNER, " " * 6), **replaced}.items():
        assert old in text
        text = text.replace(old, new)
    return canonicalize(parse_kernel(text))


def test_code_around_a_pipeline_runs_in_its_first_and_last_step():
    kernel = kernel_of(SUMS, SIZE="3")
    new = pipeline_axes(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(2, 3), windows=(in[4], in[4] fill 0.0, out[4])" in new.text
    body = new.text[new.text.index("body") :]
    assert body.count("pipeline") == 0
    assert body.count("cond") == 2
    assert "eq %j_3, " in body and "{value=2}" in body
    assert pipeline_axes(new) is new


@pytest.mark.parametrize("size, changes", [("1", True), ("0", False)])
def test_a_pipeline_without_steps_keeps_the_code_around_it(size, changes):
    kernel = kernel_of(SUMS, SIZE=size)
    new = pipeline_axes(kernel)
    assert (new is not kernel) is changes
    assert_same_meaning(kernel, new)
    assert "cond" not in new.text


ALONE = """
kernel @k(%x: ref<f32[22] any>, %o: ref<f32[22] any>) outputs 1 {
  pipeline {grid=(), windows=(), semantics=()}
    body () {
      pipeline %x, %o {grid=(SIZE,), windows=(in[4], out[4]), semantics=("parallel",)}
        map (%i1: i32) { yield %i1 }
        map (%i2: i32) { yield %i2 }
        body (%i: i32, %xb: ref<f32[4] block>, %ob: ref<f32[4] block>) {
          %v: f32[4] = load %xb[:]
          store %ob[:] = %v
        }
    }
}
"""


@pytest.mark.parametrize("size", ["6", "0"])
def test_a_kernel_that_is_one_pipeline_is_a_grid(size):
    kernel = parse_kernel(ALONE.replace("SIZE", size))
    new = pipeline_axes(kernel)
    assert (
        f'grid=({size},), windows=(in[4], out[4]), semantics=("parallel",)' in new.text
    )
    assert new.text.count("pipeline") == 1
    if size != "0":
        assert_same_meaning(kernel, new, checked=False)


BLOCKS_OF_BLOCKS = """
kernel @k(%x: ref<f32[SHAPE] any>, %o: ref<f32[SHAPE] any>) outputs 1 {
  pipeline %x, %o {grid=(2,), windows=(in[8], out[8]), semantics=("arbitrary",)}
    map (%i1: i32) { yield %i1 }
    map (%i2: i32) { yield %i2 }
    body (%i: i32, %xb: ref<f32[8] block>, %ob: ref<f32[8] block>) {
      pipeline %xb, %ob {grid=(STEPS,), windows=(in[4], out[4]),
          semantics=("arbitrary",)}
        map (%j1: i32) { yield %j1 }
        map (%j2: i32) { yield %j2 }
        body (%j: i32, %xc: ref<f32[4] block>, %oc: ref<f32[4] block>) {
          %v: f32[4] = load %xc[:]
          store %oc[:] = %v
        }
    }
}
"""


def test_blocks_of_blocks_are_blocks():
    kernel = parse_kernel(BLOCKS_OF_BLOCKS.replace("SHAPE", "16").replace("STEPS", "2"))
    new = pipeline_axes(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(2, 2), windows=(in[4], out[4])" in new.text
    assert "clamp" not in new.text


def test_blocks_of_blocks_stay_inside_their_block():
    kernel = parse_kernel(BLOCKS_OF_BLOCKS.replace("SHAPE", "16").replace("STEPS", "3"))
    new = pipeline_axes(kernel)
    assert_same_meaning(kernel, new)
    assert "clamp" in new.text


@pytest.mark.parametrize("number", ["sub %i1, %one", "add %i1, %one"])
def test_blocks_of_blocks_past_the_edge_are_of_the_nearest_block(number: str):
    """The outer number is clamped before the inner one is added to it."""
    text = BLOCKS_OF_BLOCKS.replace("SHAPE", "24").replace("STEPS", "2")
    one = "%one: i32 = constant {value=1}"
    outer = "map (%i1: i32) { yield %i1 }"
    moved = f"map (%i1: i32) {{\n{one}\n%n: i32 = {number}\nyield %n\n}}"
    for size, may_pass in (("24", number.startswith("sub")), ("16", True)):
        given = text.replace("f32[24]", f"f32[{size}]", 1)
        assert outer in given
        kernel = parse_kernel(given.replace(outer, moved))
        new = pipeline_axes(kernel)
        assert new is not kernel
        assert_same_meaning(kernel, new, checked=False)
        assert ("clamp" in new.text) == may_pass


def test_blocks_of_edge_blocks_stay_nested():
    kernel = parse_kernel(BLOCKS_OF_BLOCKS.replace("SHAPE", "11").replace("STEPS", "2"))
    assert pipeline_axes(kernel) is kernel


def test_values_that_cannot_be_computed_again_keep_the_nest():
    written = kernel_of(
        SUMS,
        SIZE="3",
        **{"%scale: f32[4] = load %sb[:]": "%scale: f32[4] = load %ob[:]"},
    )
    assert pipeline_axes(written) is written


def test_a_size_that_the_program_computes():
    text = SUMS.replace("INNER", textwrap.indent(INNER, " " * 6))
    text = text.replace("%z: f32[4]", "%one: i32 = constant {value=1}\n%z: f32[4]", 1)
    text = text.replace("pipeline %x {", "pipeline %size, %x {")
    text = text.replace("SIZE", "None")
    size = "%size: i32 = add %i, %one\n      %scale: f32[4] ="
    kernel = canonicalize(parse_kernel(text.replace("%scale: f32[4] =", size, 1)))
    new = pipeline_axes(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(2, 2)" in new.text
    assert new.text.count("cond") == 3
