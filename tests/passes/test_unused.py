"""drop_unused: loops carry, and scratch holds, only what somebody needs."""

from pallasite.ir.nodes import walk
from pallasite.ir.text import parse_kernel
from pallasite.passes.optimise.hoist import hoist
from pallasite.passes.optimise.unused import drop_unused

LOOP = """
kernel @k(%x: ref<f32[8] any>, %o: ref<f32[8] any>) outputs 1 {{
  pipeline {{grid=(), windows=(), semantics=()}}
    body () {{
      %0: i32 = constant {{value=0}}
      %1: i32 = constant {{value=4}}
      %2: i32 = constant {{value=1}}
      %3: f32[8] = load %x[:]
      {before}
      %a: f32[8], %b: f32[8], %c: f32[8] = for %0, %1, %2, %3, %3, %3
        body (%i: i32, %p: f32[8], %q: f32[8], %r: f32[8]) {{
          {inside}
          %4: f32[8] = sin %p
          %5: f32[8] = exp %q
          %6: f32[8] = add %4, %r
          yield %6, %5, %r
        }}
      store %o[:] = %a
    }}
}}
"""


def ops_of(text):
    return list(walk(drop_unused(parse_kernel(text)).body))


def test_carries_that_nobody_needs_or_that_never_change():
    ops = ops_of(LOOP.format(before="", inside=""))
    (loop,) = [op for op in ops if op.name == "for"]
    # `q` only feeds itself; `r` is always the loaded value.
    assert len(loop.results) == 1
    assert "exp" not in {op.name for op in ops}
    assert "sin" in {op.name for op in ops}


def test_scratch_that_is_only_written():
    scratch = "%s: ref<f32[8] vmem> = alloc"
    ops = ops_of(LOOP.format(before=scratch, inside="store %s[:] = %q"))
    assert "alloc" not in {op.name for op in ops}
    assert [op.name for op in ops].count("store") == 1
    (loop,) = [op for op in ops if op.name == "for"]
    assert len(loop.results) == 1


def test_a_carry_that_an_effect_needs_stays():
    ops = ops_of(LOOP.format(before="", inside="store %o[:] = %q"))
    (loop,) = [op for op in ops if op.name == "for"]
    assert len(loop.results) == 2


RESET = """
kernel @k(%x: ref<f32[8] any>, %o: ref<f32[8] any>) outputs 1 {
  pipeline {grid=(), windows=(), semantics=()}
    body () {
      %0: i32 = constant {value=0}
      %1: i32 = constant {value=4}
      %2: i32 = constant {value=1}
      %3: f32[8] = constant {value=0.0}
      %a: f32[8] = for %0, %1, %2, %3
        body (%i: i32, %p: f32[8]) {
          %4: bool = eq %i, %0
          %5: i32 = cast %4 {dtype=i32}
          %6: f32[8] = cond %5
            branch () { yield %p }
            branch () {
              %7: f32[8] = load %x[:]
              yield %7
            }
          %8: f32[8] = sin %6
          yield %8
        }
      store %o[:] = %a
    }
}
"""


def test_a_first_step_that_loads_becomes_the_initial_value():
    kernel = hoist(parse_kernel(RESET))
    assert "cond" not in {op.name for op in walk(kernel.body)}
