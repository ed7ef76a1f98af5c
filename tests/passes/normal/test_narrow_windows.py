"""Parts that grid indices pick become blocks. Text in, text out."""

import re

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.narrow_windows import narrow_windows
from tests.passes.normal.meaning import assert_same_meaning

COPY = """
kernel @k(%x: ref<f32[ROWS,8] any>, %o: ref<f32[ROWS,8] any>) outputs 1 {
  pipeline %x, %o {grid=GRID, windows=(in[ROWS, 8], out[ROWS, 8]),
      semantics=("arbitrary",)}
    map (%a: i32) {
      %z1: i32 = constant {value=0}
      yield %z1, %z1
    }
    map (%b: i32) {
      %z2: i32 = constant {value=0}
      yield %z2, %z2
    }
    body (%i: i32, %xb: ref<f32[ROWS,8] block>, %ob: ref<f32[ROWS,8] block>) {
      %c0: i32 = constant {value=0}
      %c1: i32 = constant {value=1}
      %c2: i32 = constant {value=2}
      %c3: i32 = constant {value=3}
      %c4: i32 = constant {value=4}
      CODE
    }
}
"""
PLAIN = """
      %s: i32 = mul %i, %c4
      %v: f32[4,8] = load %xb[%s:+4, :]
      store %ob[%s:+4, :] = %v
"""
# Pairs of blocks, the second one first: 1, 0, 3, 2.
SWAPPED = """
      %r: i32 = rem %i, %c2
      %d: i32 = mul %r, %c2
      %e: i32 = sub %c1, %d
      %f: i32 = add %i, %e
      %s: i32 = mul %f, %c4
      %v: f32[4,8] = load %xb[%s:+4, :]
      store %ob[%s:+4, :] = %v
"""


def kernel_of(code: str, rows: int = 16, grid: str = "(4,)"):
    text = COPY.replace("CODE", code).replace("ROWS", str(rows)).replace("GRID", grid)
    return canonicalize(parse_kernel(text))


def maps(kernel) -> list[str]:
    return re.findall(r"yield (.*?)[ \n]*\}", kernel.text)


@pytest.mark.parametrize("rows", [16, 19])
def test_affine_starts(rows):
    kernel = kernel_of(PLAIN, rows)
    new = narrow_windows(kernel)
    assert_same_meaning(kernel, new, checked=rows == 16)
    assert "windows=(in[4, 8], out[4, 8])" in new.text
    assert [m.split(",")[0] for m in maps(new)] == ["%i", "%i_1"]
    assert "load %x_1[:, :]" in new.text
    assert narrow_windows(new) is new


def test_computed_starts():
    kernel = kernel_of(SWAPPED)
    new = narrow_windows(kernel)
    assert_same_meaning(kernel, new)
    assert "windows=(in[4, 8], out[4, 8])" in new.text


def test_starts_that_would_be_clamped_stay():
    kernel = kernel_of(PLAIN, rows=14)
    assert narrow_windows(kernel) is kernel


def test_starts_between_blocks_stay():
    kernel = kernel_of(PLAIN.replace("mul %i, %c4", "mul %i, %c3"))
    assert narrow_windows(kernel) is kernel


def test_empty_grid():
    kernel = kernel_of(PLAIN, grid="(0,)")
    assert "windows=(in[4, 8]" in narrow_windows(kernel).text


GUARDED = """
      %s: i32 = mul %i, %c4
      %in: bool = lt %i, %c4
      %w: i32 = cast %in {dtype=i32}
      cond %w
        branch () {}
        branch () {
          %v: f32[4,8] = load %xb[%s:+4, :]
          store %ob[%s:+4, :] = %v
        }
"""


def test_only_steps_that_reach_an_access_count():
    kernel = kernel_of(GUARDED, grid="(7,)")
    new = narrow_windows(kernel)
    assert_same_meaning(kernel, new)
    assert "windows=(in[4, 8], out[4, 8])" in new.text


ROWS = """
      %v: f32[8] = load %xb[%i, :]
      store %ob[%i, :] = %v
"""


def test_one_row_is_a_squeezed_dimension():
    kernel = kernel_of(ROWS, grid="(16,)")
    new = narrow_windows(kernel)
    assert_same_meaning(kernel, new)
    assert "load %x_1[:]" in new.text


NEIGHBOURS = """
      %s: i32 = mul %i, %c4
      %i1: i32 = add %i, %c1
      %t: i32 = mul %i1, %c4
      %v: f32[4,8] = load %xb[%s:+4, :]
      %n: f32[4,8] = load %xb[%t:+4, :]
      %u: f32[4,8] = add %v, %n
      store %ob[%s:+4, :] = %u
"""


def test_each_place_has_its_window():
    kernel = kernel_of(NEIGHBOURS, grid="(3,)")
    new = narrow_windows(kernel)
    assert_same_meaning(kernel, new, checked=False)
    assert "windows=(in[4, 8], in[4, 8], out[4, 8])" in new.text


def test_two_places_of_a_result_stay():
    both = (
        PLAIN
        + """
      %t: i32 = rem %s, %c4
      store %ob[%t:+4, :] = %v
"""
    )
    assert "out[16, 8]" in narrow_windows(kernel_of(both)).text


# Halves of a block of two rows, swapped.
HALVES = """
      %s: i32 = mul %i, %c2
      %t: i32 = add %s, %c1
      %v: f32[1,8] = load %xb[%s:+1, :]
      %w: f32[8] = load %xb[%t, :]
      store %ob[%t:+1, :] = %v
      store %ob[%s, :] = %w
"""


def test_parts_side_by_side_are_parts_of_a_block():
    kernel = kernel_of(HALVES, grid="(8,)")
    new = narrow_windows(kernel)
    assert_same_meaning(kernel, new)
    assert "windows=(in[2, 8], out[2, 8])" in new.text
    assert "store %o_1[1:+1, :]" in new.text and "load %x_1[1, :]" in new.text


@pytest.mark.parametrize("gap, by", [("%c1", "%c3"), ("%c2", "%c4")])
def test_parts_of_a_result_that_are_no_block_stay(gap: str, by: str):
    """They end before the next block starts, or leave rows out between them."""
    code = HALVES.replace("mul %i, %c2", f"mul %i, {by}")
    code = code.replace("add %s, %c1", f"add %s, {gap}")
    assert "out[16, 8]" in narrow_windows(kernel_of(code)).text


DYNAMIC = """
kernel @k(%x: ref<f32[16,8] any>, %n: ref<i32[1] smem>,
    %o: ref<f32[16,8] any>) outputs 1 {
  %c: i32 = constant {value=0}
  %count: i32 = load %n[%c]
  pipeline %count {grid=(None, 4), windows=(), semantics=("arbitrary", "arbitrary")}
    body (%t: i32, %i: i32) {
      %c4: i32 = constant {value=4}
      %s: i32 = mul %i, %c4
      %v: f32[4,8] = load %x[%s:+4, :]
      store %o[%s:+4, :] = %v
    }
}
"""


def test_arrays_without_windows_and_axes_of_unknown_size():
    kernel = canonicalize(parse_kernel(DYNAMIC))
    new = narrow_windows(kernel)
    assert_same_meaning(kernel, new, checked=False)
    assert "grid=(None, 4), windows=(in[4, 8], out[4, 8])" in new.text
    moving = DYNAMIC.replace("mul %i, %c4", "mul %t, %c4")
    kernel = canonicalize(parse_kernel(moving))
    assert narrow_windows(kernel) is kernel


HALO = """
kernel @k(%x: ref<f32[ROWS,8] any>, %o: ref<f32[16,8] any>) outputs 1 {
  pipeline %o {grid=(4,), windows=(out[4, 8],), semantics=("arbitrary",)}
    map (%b: i32) {
      %z: i32 = constant {value=0}
      yield %b, %z
    }
    body (%i: i32, %ob: ref<f32[4,8] block>) {
      %c4: i32 = constant {value=4}
      %s: i32 = mul %i, %c4
      %v: f32[6,8] = load %x[%s:+6, :]
      %a: f32[4,8] = slice %v {starts=(0, 0), limits=(4, 8), strides=(1, 1)}
      %e: f32[4,8] = slice %v {starts=(2, 0), limits=(6, 8), strides=(1, 1)}
      %r: f32[4,8] = add %a, %e
      store %ob[:, :] = %r
    }
}
"""


def test_overlapping_parts_are_windows_of_elements_where_asked():
    made = canonicalize(parse_kernel(HALO.replace("ROWS", "18")))
    assert narrow_windows(made) is made
    new = narrow_windows(made, overlapping=True)
    assert "in[element 6, 8]" in new.text
    assert_same_meaning(made, new)


def test_overlapping_parts_that_would_be_clamped_stay():
    made = canonicalize(parse_kernel(HALO.replace("ROWS", "17")))
    assert narrow_windows(made, overlapping=True) is made


def test_elements_of_a_row_that_the_grid_picks():
    code = """
      for %c0, %c4, %c1
        body (%t: i32) {
          %v: f32 = load %xb[%i, %t]
          store %ob[%i, %t] = %v
        }
    """
    kernel = kernel_of(code)
    new = narrow_windows(kernel)
    assert_same_meaning(kernel, new, checked=False)  # some elements are not written
    assert "windows=(in[squeezed 1, 8], out[squeezed 1, 8])" in new.text


def test_single_elements_are_looked_up():
    code = """
      %v: f32 = load %xb[%i, %i]
      store %ob[%i, %i] = %v
    """
    kernel = kernel_of(code)
    assert narrow_windows(kernel) is kernel
