"""Windows stand still where a guard ignores them. Text in, text out."""

import textwrap

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.roles import Pipeline
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.idle_windows import idle_windows

SUMS = """
kernel @k(%n: ref<i32[4] smem>, %x: ref<f32[32] any>, %o: ref<f32[32] any>) outputs 1 {
  pipeline %x, %o {grid=(4, 4), windows=(in[8], out[8]),
      semantics=("parallel", "arbitrary")}
    map (%i1: i32, %j1: i32) { yield %j1 }
    map (%i2: i32, %j2: i32) { yield %i2 }
    body (%i: i32, %j: i32, %xb: ref<f32[8] block>, %ob: ref<f32[8] block>) {
      %c0: i32 = constant {value=0}
      %c1: i32 = constant {value=1}
      %c2: i32 = constant {value=2}
      %c8: i32 = constant {value=8}
      %first: bool = eq %j, %c0
      %number: i32 = cast %first {dtype=i32}
      cond %number
        branch () {}
        branch () {
          %z: f32[8] = constant {value=0.0}
          store %ob[:] = %z
        }
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
NUMBERS = np.array([3, 1, 4, 2], np.int32)


def changed(guard: str, **replaced: str) -> str:
    """The map of the input after the pass; what the kernel computes is the same."""
    text = SUMS.replace("GUARD", guard)
    for old, new in replaced.items():
        assert old in text or not old
        text = text.replace(old, new)
    kernel = canonicalize(parse_kernel(text))
    new = idle_windows(kernel)
    verify(new)
    x = np.arange(32, dtype=np.float32)
    for lengths in (NUMBERS, -NUMBERS, NUMBERS * 1000):
        a, b = (
            Walker(k, NumpyNumbers()).run([lengths.copy(), x.copy()])[0]
            for k in (kernel, new)
        )
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if new is kernel:
        return "same"
    lines = new.text.split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith("    map"))
    end = next(n for n, line in enumerate(lines[start:]) if line == "    }")
    return textwrap.dedent("\n".join(lines[start : start + end + 1]))


def test_causal():
    assert changed("%g: bool = le %j, %i") == textwrap.dedent("""\
        map (%i1: i32, %j1: i32) {
          %0: i32 = constant {value=1}
          %1: i32 = add %i1, %0
          %2: i32 = sub %1, %0
          %3: i32 = min %j1, %2
          yield %3
        }""")


def test_an_axis_of_one_step_moves_nothing():
    grid = {"grid=(4, 4)": "grid=(4, 1)"}
    assert changed("%g: bool = le %j, %i", **grid) == "same"
    loaded = "%d: i32 = load %n[%i] %g: bool = lt %j, %d"
    assert changed(loaded, **grid) == "same"


WINDOW = """
      %d: i32 = sub %i, %j
      %g1: bool = ge %d, %c0
      %g2: bool = lt %d, %c2
      %g: bool = and %g1, %g2
    """


def test_window():
    assert changed(WINDOW) == textwrap.dedent("""\
        map (%i1: i32, %j1: i32) {
          %0: i32 = constant {value=0}
          %1: i32 = constant {value=1}
          %2: i32 = add %i1, %1
          %3: i32 = constant {value=2}
          %4: i32 = sub %i1, %3
          %5: i32 = add %4, %1
          %6: i32 = max %5, %0
          %7: i32 = sub %2, %1
          %8: i32 = min %j1, %7
          %9: i32 = max %8, %6
          yield %9
        }""")


SECOND = """
      cond %w
        branch () {}
        branch () {
          %b: f32[8] = load %ob[:]
          %u: f32[8] = load %xb[:]
          %t: f32[8] = mul %b, %u
          store %ob[:] = %t
        }
      %g3: bool = ge %j, %i
      %g4: bool = le %j, %c2
      %g5: bool = and %g3, %g4
      %w2: i32 = cast %g5 {dtype=i32}
      cond %w2
"""


def test_two_guards():
    """From `i - 1` on, to the last step that either of them lets through."""
    found = changed(WINDOW, **{"      cond %w\n": SECOND.lstrip("\n")})
    assert found == textwrap.dedent("""\
        map (%i1: i32, %j1: i32) {
          %0: i32 = constant {value=0}
          %1: i32 = constant {value=1}
          %2: i32 = add %i1, %1
          %3: i32 = constant {value=2}
          %4: i32 = sub %i1, %3
          %5: i32 = add %4, %1
          %6: i32 = max %5, %0
          %7: i32 = constant {value=3}
          %8: i32 = min %6, %i1
          %9: i32 = max %2, %7
          %10: i32 = sub %9, %1
          %11: i32 = min %j1, %10
          %12: i32 = max %11, %8
          yield %12
        }""")


def test_length_by_prefetch():
    """Lengths may be negative or too long: the map stays within the grid."""
    guard = """
      %length: i32 = load %n[%i]
      %start: i32 = mul %j, %c8
      %g: bool = lt %start, %length
    """
    assert changed(guard) == textwrap.dedent("""\
        map (%i1: i32, %j1: i32) {
          %0: i32 = constant {value=0}
          %1: i32 = load %n[%i1]
          %2: i32 = constant {value=-1}
          %3: i32 = max %1, %2
          %4: i32 = constant {value=25}
          %5: i32 = min %3, %4
          %6: i32 = constant {value=8}
          %7: i32 = max %5, %0
          %8: i32 = constant {value=7}
          %9: i32 = add %7, %8
          %10: i32 = div %9, %6
          %11: i32 = constant {value=1}
          %12: i32 = sub %10, %11
          %13: i32 = min %j1, %12
          %14: i32 = max %13, %0
          yield %14
        }""")


KEPT = {
    "no comparison can be solved, and floats are divided": (
        """
      %q: f32 = constant {value=2.0}
      %jf: f32 = cast %j {dtype=f32}
      %h: f32 = div %jf, %q
      %m: i32 = mul %j, %j
      %gm: bool = lt %m, %c8
      %gh: bool = lt %h, %q
      %g: bool = and %gm, %gh
        """,
        {},
    ),
    "another axis moves it": ("%g: bool = le %j, %i", {"yield %j1": "yield %i1"}),
    "read in every step": (
        "%u: f32[8] = load %xb[:]\nstore %ob[:] = %u\n%g: bool = le %j, %i",
        {},
    ),
    "not solved": ("%r: i32 = rem %j, %c2\n%g: bool = eq %r, %i", {}),
}


@pytest.mark.parametrize("why", KEPT)
def test_kept(why: str):
    guard, replaced = KEPT[why]
    assert changed(guard, **replaced) == "same"


def test_memory_that_changes_is_fetched_again():
    """A block of an operand that is a result's memory, too."""
    text = SUMS.replace("GUARD", "%g: bool = le %j, %i")
    kernel = parse_kernel(text.replace("outputs 1 {", "outputs 1 aliases {1: 0} {"))
    assert Pipeline.of(kernel.body.ops[-1]).windows
    assert idle_windows(kernel) is kernel
