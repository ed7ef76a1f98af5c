"""Tiles that are folded, computed with and folded back. Text in, text out."""

import pytest

from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.folds import folds
from tests.passes.normal.meaning import assert_same_meaning

FOLDED = """
kernel @k(%x: ref<f32[6,8] any>, %m: ref<f32[6,1] any>, %o: ref<f32[6,8] any>) outputs 1 {
  %a: f32[6,8] = load %x[:, :]
  %b: f32[6,1] = load %m[:, :]
  %f: f32[6,2,4] = reshape %a {shape=(6, 2, 4)}
  %w: f32[6,2,4] = OTHER
  %d: f32[6,2,4] = sub %f, %w
  %two: f32[6,2,4] = constant {value=2.0}
  %e: f32[6,2,4] = mul %d, %two
  %g: f32[6,8] = reshape %e {shape=(6, 8)}
  store %o[:, :] = %g
}
"""  # noqa: E501
SAME_ALONG = "broadcast_in_dim %b {shape=(6, 2, 4), dims=(0, 2)}"
VARIES = """broadcast_in_dim %h {shape=(6, 2, 4), dims=(0, 1)}"""
HALVES = "  %h: f32[6,2] = slice %a {starts=(0, 0), limits=(6, 2), strides=(1, 1)}\n"


def names(kernel) -> list[str]:
    return [op.name for op in walk(kernel.body)]


@pytest.mark.parametrize(
    "other",
    [SAME_ALONG, "exp %f", "constant {value=3.0}", SAME_ALONG.replace("0, 2", "0, 1")],
)
def test_computed_in_its_own_shape(other: str):
    kernel = parse_kernel(FOLDED.replace("OTHER", other))
    new = folds(kernel)
    assert_same_meaning(kernel, new)
    assert "reshape" not in names(new) and "6,2,4" not in new.text
    assert folds(new) is new


def test_joined_instead_of_split():
    """Four dimensions become two and four again; the column loses one of its own."""
    text = """
    kernel @k(%x: ref<f32[6,2,4] any>, %m: ref<f32[6] any>, %o: ref<f32[6,2,4] any>)
        outputs 1 {
      %a: f32[6,2,4] = load %x[:, :, :]
      %b: f32[6] = load %m[:]
      %f: f32[6,8] = reshape %a {shape=(6, 8)}
      %w: f32[6,8] = broadcast_in_dim %b {shape=(6, 8), dims=(0,)}
      %d: f32[6,8] = sub %f, %w
      %g: f32[6,2,4] = reshape %d {shape=(6, 2, 4)}
      store %o[:, :, :] = %g
    }"""
    kernel = parse_kernel(text)
    new = folds(kernel)
    assert_same_meaning(kernel, new)
    assert "reshape" not in names(new)


def test_what_varies_along_a_part_stays():
    text = FOLDED.replace("OTHER", VARIES).replace("  %w:", HALVES + "  %w:")
    kernel = parse_kernel(text)
    assert folds(kernel) is kernel


def test_a_reshape_to_another_shape_stays():
    text = FOLDED.replace("OTHER", SAME_ALONG)
    text = text.replace("%g: f32[6,8] = reshape %e {shape=(6, 8)}",
                        "%g: f32[12,4] = reshape %e {shape=(12, 4)}")  # fmt: skip
    text = text.replace("%o: ref<f32[6,8]", "%o: ref<f32[12,4]")
    kernel = parse_kernel(text)
    assert folds(kernel) is kernel


SUMS = """
kernel @k(%x: ref<f32[6,8] any>, %y: ref<f32[8,4] any>, %o: ref<f32[2,3,4] any>)
    outputs 1 {
  %a: f32[6,8] = load %x[:, :]
  %b: f32[8,4] = load %y[:, :]
  %p: f32[6,4] = dot %a, %b {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
  %q: f32[6,4] = OTHER
  %f: f32[2,3,4] = reshape %p {shape=(2, 3, 4)}
  %g: f32[2,3,4] = reshape %q {shape=(2, 3, 4)}
  %s: f32[2,3,4] = add %f, %g
  %t: f32[2,3,4] = add %s, %f
  store %o[:, :, :] = %t
}
"""  # noqa: E501


def test_matmuls_are_added_up_before_they_are_folded():
    dot = (
        "dot %a, %b {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}"
    )
    kernel = parse_kernel(SUMS.replace("OTHER", dot))
    new = folds(kernel)
    assert_same_meaning(kernel, new)
    assert names(new).count("reshape") == 1 and "f32[6,4] = add" in new.text
    assert folds(new) is new


def test_other_tiles_are_added_up_as_they_are():
    text = SUMS.replace(
        "OTHER", "slice %a {starts=(0, 0), limits=(6, 4), strides=(1, 1)}"
    )
    kernel = parse_kernel(text)
    assert folds(kernel) is kernel
