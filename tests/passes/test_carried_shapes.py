"""Loops carry tiles in the shape in which they compute them. Text in, text out."""

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.carried_shapes import carried_shapes

KERNEL = """\
kernel @k(%x: ref<f32[5,8] any>, %o: ref<f32[1,8] any>) outputs 1 {
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %rows: i32 = constant {value=5}
  %start: f32[1,8] = load %o[:, :]
  %end: f32[1,8] = for %0, %rows, %1, %start
    body (%i: i32, %sum: f32[1,8]) {
      %row: f32[8] = load %x[%i, :]
      LINES
    }
  store %o[:, :] = %end
}
"""
ADDED = """\
%flat: f32[8] = reshape %sum {shape=(8,)}
%next: f32[8] = add %flat, %row
%wide: f32[1,8] = broadcast_in_dim %next {shape=(1, 8), dims=(1,)}
yield %wide"""
USED = """\
%twice: f32[1,8] = add %sum, %sum
%flat: f32[8] = reshape %twice {shape=(8,)}
%next: f32[8] = add %flat, %row
%wide: f32[1,8] = broadcast_in_dim %next {shape=(1, 8), dims=(1,)}
yield %wide"""
REPLACED = """\
%wide: f32[1,8] = reshape %row {shape=(1, 8)}
yield %wide"""


def kernel(lines: str) -> Kernel:
    made = parse_kernel(KERNEL.replace("LINES", lines))
    verify(made)
    return made


def test_what_is_carried_has_the_shape_of_the_sum():
    before = kernel(ADDED)
    after = carried_shapes(before)
    verify(after)
    (loop,) = (op for op in walk(after.body) if op.name == "for")
    assert [v.tile.shape for v in loop.results] == [(8,)]
    inside = [op.name for op in loop.regions[0].ops]
    assert inside == ["load", "add"]
    assert carried_shapes(after) is after
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    got, want = (
        np.asarray(Walker(made, NumpyNumbers()).run([x])[0]) for made in (after, before)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("lines", [USED, REPLACED], ids=["used", "replaced"])
def test_other_loops_stay(lines):
    before = kernel(lines)
    assert carried_shapes(before) is before
