"""Two loops over adjoining ranges become one. Text in, text out."""

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.joined_loops import joined_loops
from tests.passes.normal.meaning import assert_same_meaning

# Sums of the elements up to the diagonal, by blocks of columns: those that are below
# the program's rows, then those that a mask cuts.
TRIANGLE = """
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
      %whole: i32 = mul %i, %two
      %more: i32 = add %whole, %two
      %first: f32[4,1] = for %zero, FIRST_END, %one, %start
        body (%j: i32, %c: f32[4,1]) {
          FIRST
        }
      %second: f32[4,1] = for SECOND_BEGIN, SECOND_END, %one, %first
        body (%k: i32, %d: f32[4,1]) {
          SECOND
        }
      store %ob[:, :] = STORED
    }
}
"""
BOUNDS = {"FIRST_END": "%whole", "SECOND_BEGIN": "%whole", "SECOND_END": "%more"}


def step(index: str, carried: str, mask: str = "", by: str = "%two") -> str:
    """Adds the row sums of a block, with or without a mask."""
    n = index[1]
    return f"""
          %{n}at: i32 = mul {index}, {by}
          %{n}x: f32[4,2] = load %xb[:, %{n}at:+2]
          %{n}row: i32 = mul %i, %four
          %{n}rows: i32[4,2] = iota {{dim=0}}
          %{n}rowb: i32[4,2] = broadcast_in_dim %{n}row {{shape=(4, 2), dims=()}}
          %{n}r: i32[4,2] = add %{n}rowb, %{n}rows
          %{n}columns: i32[4,2] = iota {{dim=1}}
          %{n}atb: i32[4,2] = broadcast_in_dim %{n}at {{shape=(4, 2), dims=()}}
          %{n}c: i32[4,2] = add %{n}atb, %{n}columns
          %{n}none: f32[4,2] = constant {{value=-3.0}}
          %{n}in: bool[4,2] = {mask or "le"} %{n}c, %{n}r
          %{n}m: f32[4,2] = select_n %{n}in, %{n}none, %{n}x
          %{n}s: f32[4] = reduce {"%" + n + ("m" if mask else "x")} {{kind="sum", axes=(1,)}}
          %{n}t: f32[4,1] = reshape %{n}s {{shape=(4, 1)}}
          %{n}new: f32[4,1] = add {carried}, %{n}t
          yield %{n}new"""  # noqa: E501


PLAIN, MASKED = step("%j", "%c"), step("%k", "%d", "le")


def kernel_of(**changes: str):
    text = TRIANGLE
    code = {"FIRST\n": PLAIN + "\n", "SECOND\n": MASKED + "\n", "STORED": "%second"}
    for old, new in {**BOUNDS, **code, **changes}.items():
        text = text.replace(old, new)
    return canonicalize(parse_kernel(text))


def loops(kernel) -> int:
    return kernel.text.count(" for ")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"FIRST\n": step("%j", "%c", "le") + "\n"},
        {"FIRST\n": step("%j", "%c", "lt") + "\n"},
        {"SECOND\n": step("%k", "%d") + "\n"},
    ],
    ids=["masked last", "both masked", "two masks", "never masked"],
)
def test_a_range_that_needs_no_mask_and_one_that_does(changes):
    kernel = kernel_of(**changes)
    assert loops(kernel) == 2
    new = joined_loops(kernel)
    assert_same_meaning(kernel, new)
    assert loops(new) == 1
    assert joined_loops(new) is new


def test_the_masked_range_first():
    """As in a window whose left edge cuts blocks: here, blocks of no element at all."""
    changes = {"FIRST\n": step("%j", "%c", "ge") + "\n"}
    bounds = {"FIRST_END": "%more", "SECOND_BEGIN": "%more", "SECOND_END": "%ten"}
    kernel = kernel_of(**changes, **bounds, **{"SECOND\n": step("%k", "%d") + "\n"})
    new = joined_loops(kernel)
    assert_same_meaning(kernel, new)
    assert loops(new) == 1 and "ge" in new.text


@pytest.mark.parametrize(
    "changes",
    [
        {"FIRST_END": "%more", "SECOND_BEGIN": "%more", "SECOND_END": "%ten"},
        {"SECOND_BEGIN": "%one"},
        {"SECOND_END": "%one"},
        {"SECOND\n": step("%k", "%d", "le", by="%one") + "\n"},
        {"STORED": "%sum", "store": "%sum: f32[4,1] = add %first, %second\nstore"},
    ],
    ids=["a mask cuts both", "a gap", "downwards", "other blocks", "used between"],
)
def test_what_stays(changes):
    kernel = kernel_of(**changes)
    assert loops(kernel) == 2
    assert joined_loops(kernel) is kernel
