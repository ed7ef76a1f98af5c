"""Programs are numbered by the block that they write. Text in, text out."""

import re

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.program_order import program_order
from tests.passes.normal.meaning import assert_same_meaning

# The map of the result and of the operand are the same code.
COPY = """
kernel @k(%x: ref<f32[12,16] any>, %o: ref<f32[12,16] any>) outputs 1 {
  pipeline %x, %o {grid=GRID, windows=(in[4, 4], out[4, 4]), semantics=SEMANTICS}
    map (IDS) {
      MAP
      yield %r, %c
    }
    map (IDS) {
      MAP
      yield %r, %c
    }
    body (IDS, %xb: ref<f32[4,4] block>, %ob: ref<f32[4,4] block>) {
      BODY
    }
}
"""
BODY = """
      %v: f32[4,4] = load %xb[:, :]
      store %ob[:, :] = %v
"""
FLAT = """
      %n: i32 = constant {value=4}
      %r: i32 = div %p, %n
      %c: i32 = rem %p, %n
"""
COLUMNS_FIRST = """
      %n: i32 = constant {value=3}
      %c: i32 = div %p, %n
      %r: i32 = rem %p, %n
"""
# Groups of two rows; the last group has one row.
GROUPED = """
      %n: i32 = constant {value=8}
      %two: i32 = constant {value=2}
      %three: i32 = constant {value=3}
      %g: i32 = div %p, %n
      %first: i32 = mul %g, %two
      %left: i32 = sub %three, %first
      %size: i32 = min %left, %two
      %in: i32 = rem %p, %n
      %row: i32 = rem %in, %size
      %r: i32 = add %first, %row
      %c: i32 = div %in, %size
"""
REVERSED = """
      %n: i32 = constant {value=2}
      %r: i32 = sub %n, %p
      %c: i32 = add %q, %zero
"""
SNAKE = """
      %one: i32 = constant {value=1}
      %n: i32 = constant {value=3}
      %odd: i32 = and %p, %one
      %back: i32 = sub %n, %q
      %is: bool = eq %odd, %one
      %c: i32 = select_n %is, %q, %back
      %r: i32 = add %p, %zero
"""


def kernel_of(code: str, grid: tuple[int, ...], body: str = BODY):
    names = "pq"[: len(grid)]
    text = COPY.replace("GRID", str(grid)).replace("BODY", body)
    said = ", ".join(['"arbitrary"'] * len(grid)) + ","
    text = text.replace("SEMANTICS", f"({said})")
    zero = "%zero: i32 = constant {value=0}\n"
    # Values are named once in a kernel: each region has its own.
    for number in range(3):
        ids = ", ".join(f"%{n}{number}: i32" for n in names)
        text = text.replace("IDS", ids, 1)
        if number < 2:
            own = re.sub(r"%(\w+)", rf"%\g<1>{number}", zero + code)
            at, end = text.index("MAP"), text.index("yield %r, %c")
            tail = text[end:].replace(
                "yield %r, %c", f"yield %r{number}, %c{number}", 1
            )
            text = text[:at] + own + tail
    return canonicalize(parse_kernel(text))


@pytest.mark.parametrize(
    "code, grid",
    [
        (FLAT, (12,)),
        (COLUMNS_FIRST, (12,)),
        (GROUPED, (12,)),
        (REVERSED, (3, 4)),
        (SNAKE, (3, 4)),
    ],
    ids=["flat", "columns first", "grouped", "reversed", "snake"],
)
def test_orders_become_a_grid(code, grid):
    kernel = kernel_of(code, grid)
    new = program_order(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(3, 4)" in new.text
    assert new.text.count("{ yield %i0") == 2
    assert program_order(new) is new


def test_two_axes_along_one_dimension_are_one():
    code = """
      %n: i32 = constant {value=2}
      %t: i32 = mul %p, %n
      %c: i32 = add %t, %q
      %r: i32 = constant {value=0}
    """
    kernel = kernel_of(code, (2, 2))
    new = program_order(kernel)
    assert_same_meaning(kernel, new, checked=False)
    assert "grid=(4,)" in new.text
    # Each core of a TPU has its own part of such an axis.
    cores = parse_kernel(kernel.text.replace('"arbitrary",', '"core_parallel",', 1))
    assert program_order(cores) is cores


def test_fewer_programs_than_blocks():
    """Two whole rows of blocks are a box; one row and a half are not."""
    kernel = kernel_of(FLAT, (8,))
    new = program_order(kernel)
    assert_same_meaning(kernel, new, checked=False)
    assert "grid=(2, 4)" in new.text
    kernel = kernel_of(FLAT, (6,))
    assert program_order(kernel) is kernel


def test_programs_that_write_one_block_twice_keep_their_order():
    kernel = kernel_of(FLAT, (13,))  # the last one is clamped to a block of another
    assert program_order(kernel) is kernel


def test_an_empty_grid_stays():
    kernel = kernel_of(FLAT, (0,))
    assert program_order(kernel) is kernel


SKIPPED = """
      %twelve: i32 = constant {value=12}
      %in: bool = lt %p2, %twelve
      %w: i32 = cast %in {dtype=i32}
      cond %w
        branch () {}
        branch () {
          %v: f32[4,4] = load %xb[:, :]
          store %ob[:, :] = %v
        }
"""


def test_skipped_programs_go():
    kernel = kernel_of(FLAT, (15,), SKIPPED)
    new = program_order(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(3, 4)" in new.text
    assert "cond" not in new.text


def test_a_kernel_whose_programs_are_all_skipped_stays():
    kernel = kernel_of(FLAT, (15,), SKIPPED.replace("value=12", "value=0"))
    assert program_order(kernel) is kernel


def test_other_uses_of_the_number():
    """The number of a flattened program is affine in the new indices."""
    body = """
      %v: f32[4,4] = load %xb[:, :]
      %f: f32 = cast %p2 {dtype=f32}
      %t: f32[4,4] = broadcast_in_dim %f {shape=(4, 4), dims=()}
      %s: f32[4,4] = add %v, %t
      store %ob[:, :] = %s
"""
    kernel = kernel_of(FLAT, (12,), body)
    new = program_order(kernel)
    assert_same_meaning(kernel, new)
    assert "grid=(3, 4)" in new.text
    kernel = kernel_of(GROUPED, (12,), body)
    assert program_order(kernel) is kernel


CARRIED = """
kernel @k(%x: ref<f32[16] any>, %o: ref<f32[16] any>) outputs 1 {
  %acc: ref<f32[4] vmem> = alloc
  pipeline %x, %o {grid=(4,), windows=(in[4], out[4]), semantics=("arbitrary",)}
    map (%a: i32) {
      %n: i32 = constant {value=3}
      %r: i32 = sub %n, %a
      yield %r
    }
    map (%b: i32) {
      %m: i32 = constant {value=3}
      %s: i32 = sub %m, %b
      yield %s
    }
    body (%i: i32, %xb: ref<f32[4] block>, %ob: ref<f32[4] block>) {
      %c0: i32 = constant {value=0}
      %first: bool = eq %i, %c0
      %w: i32 = cast %first {dtype=i32}
      cond %w
        branch () {}
        branch () {
          %z: f32[4] = constant {value=0.0}
          store %acc[:] = %z
        }
      %old: f32[4] = load %acc[:]
      %v: f32[4] = load %xb[:]
      %t: f32[4] = add %old, %v
      store %acc[:] = %t
      store %ob[:] = %t
    }
}
"""


def test_programs_that_carry_a_value_keep_their_order():
    kernel = canonicalize(parse_kernel(CARRIED))
    assert program_order(kernel) is kernel


def test_the_bits_of_a_number_are_not_one_number():
    """A bitcast that adds a dimension, where ids are written anew."""
    kernel = parse_kernel("""
kernel @k(%o: ref<i16[4] any>) outputs 1 {
  pipeline %o {grid=(2,), windows=(out[2],), semantics=("arbitrary",)}
    map (%p: i32) {
      %one: i32 = constant {value=1}
      %r: i32 = sub %one, %p
      yield %r
    }
    body (%i: i32, %ob: ref<i16[2] block>) {
      %n: i32 = not %i
      %v: i16[2] = bitcast %n {dtype=i16}
      store %ob[:] = %v
    }
}
""")
    assert_same_meaning(kernel, program_order(kernel))
