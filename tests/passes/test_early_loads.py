"""Loops over rows load several rows at once. Text in, text out."""

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.early_loads import early_loads

KERNEL = """\
kernel @k(%n: ref<i32[2] any>, %x: ref<f32[ROWS,128] any>, %a: ref<f32[ROWS,128] any>, \
%o: ref<f32[ROWS,128] any>) outputs 1 {
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %rows: i32 = constant {value=ROWS}
  %low: i32 = load %n[0]
  %high: i32 = load %n[1]
  %start: f32[128] = constant {value=0.0}
  %end: f32[128] = for BOUNDS, %1, %start
    body (%i: i32, %h: f32[128]) {
      %decay: f32[128] = load %a[%i, :]
      %kept: f32[128] = mul %decay, %h
      %new: f32[128] = load FROM[%i, :]
      %next: f32[128] = add %kept, %new
      store %o[%i, :] = %next
      yield %next
    }
}
"""


def kernel(rows: int, bounds: str = "%0, %rows", source: str = "%x") -> Kernel:
    text = KERNEL.replace("ROWS", str(rows)).replace("BOUNDS", bounds)
    made = parse_kernel(text.replace("FROM", source))
    verify(made)
    return made


def loops_of(made: Kernel) -> list[list[str]]:
    """The names of the memory ops of each loop."""
    found = []
    for loop in (op for op in walk(made.body) if op.name == "for"):
        ops = loop.regions[0].ops
        found.append([op.name for op in ops if op.name in ("load", "store")])
    return found


def results(made: Kernel, rows: int) -> np.ndarray:
    rng = np.random.default_rng(rows)
    x, a = (rng.normal(size=(rows, 128)).astype(np.float32) for _ in range(2))
    arrays = [np.zeros(2, np.int32), x, a]
    return np.asarray(Walker(made, NumpyNumbers()).run(arrays)[0])


@pytest.mark.parametrize("rows", [16, 24, 36, 37, 61])
def test_all_loads_of_a_round_come_first(rows):
    before = kernel(rows)
    after = early_loads(before)
    verify(after)
    first, *rest = loops_of(after)
    count = first.count("store")
    assert count in (4, 5, 6, 7, 8)
    assert first == ["load"] * (2 * count) + ["store"] * count
    assert rest == ([] if rows % count == 0 else [["load", "load", "store"]])
    one, other = (results(k, rows) for k in (before, after))
    np.testing.assert_array_equal(one, other)


def test_bounds_known_at_run_time_stay():
    before = kernel(40, "%low, %high")
    assert early_loads(before) is before


def test_loads_of_what_the_loop_writes_stay():
    before = kernel(64, source="%o")
    assert early_loads(before) is before


def test_large_loads_are_enough():
    text = KERNEL.replace("ROWS", "64").replace("BOUNDS", "%0, %rows")
    text = text.replace("FROM", "%x").replace("128]", "4096]")
    before = parse_kernel(text)
    assert early_loads(before) is before


def test_places_that_depend_on_what_is_carried_stay():
    text = """\
kernel @k(%x: ref<i32[64] any>, %o: ref<i32[1] any>) outputs 1 {
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %n: i32 = constant {value=64}
  %end: i32 = for %0, %n, %1, %0
    body (%i: i32, %at: i32) {
      %next: i32 = load %x[%at]
      yield %next
    }
  store %o[0] = %end
}
"""
    before = parse_kernel(text)
    assert early_loads(before) is before


AGAIN = """\
kernel @k(%x: ref<f32[64,128] any>, %o: ref<f32[64,128] any>) outputs 1 {
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %n: i32 = constant {value=64}
  %last: i32 = constant {value=63}
  %start: f32[128] = constant {value=0.0}
  %kept: ref<f32[64,128] vmem> = alloc
  %end: f32[128] = for %0, %n, %1, %start
    body (%i: i32, %h: f32[128]) {
      %a: f32[128] = load %x[%i, :]
      %b: f32[128] = add %h, %a
      store %kept[%i, :] = %b
      yield %b
    }
  %back: f32[128] = for %0, %n, %1, %start
    body (%i_1: i32, %g: f32[128]) {
      %at: i32 = sub %last, %i_1
      %c: f32[128] = load %kept[%at, :]
      %d: f32[128] = mul %c, %g
      %e: f32[128] = add %d, %c
      store TO[%at, :] = %e
      yield %e
    }
}
"""


@pytest.mark.parametrize(("to", "loads"), [("%o", 16), ("%kept", 1)])
def test_what_an_earlier_loop_wrote_is_loaded_early(to: str, loads: int):
    before = parse_kernel(AGAIN.replace("TO", to))
    verify(before)
    after = early_loads(before)
    verify(after)
    first, second = loops_of(after)
    assert first == ["load"] * 16 + ["store"] * 16
    assert second == ["load"] * loads + ["store"] * loads
    x = np.full((64, 128), 0.01, np.float32)
    one, two = (Walker(k, NumpyNumbers()).run([x])[0] for k in (before, after))
    if to == "%o":
        np.testing.assert_array_equal(one, two)


def test_loops_that_compute_more_than_they_wait_for_stay():
    """Rows compared with many numbers: what is loaded early is held once for each."""
    text = """\
kernel @k(%x: ref<i32[64,512] any>, %o: ref<i32[PLACES] any>) outputs 1 {
  %0: i32 = constant {value=0}
  %1: i32 = constant {value=1}
  %rows: i32 = constant {value=64}
  %start: i32[PLACES] = constant {value=0}
  %place: i32[512,PLACES] = iota {dim=1}
  %end: i32[PLACES] = for %0, %rows, %1, %start
    body (%i: i32, %sum: i32[PLACES]) {
      %ids: i32[512] = load %x[%i, :]
      %wide: i32[512,PLACES] = broadcast_in_dim %ids {shape=(512, PLACES), dims=(0,)}
      %hit: bool[512,PLACES] = eq %wide, %place
      %one: i32[512,PLACES] = cast %hit {dtype=i32}
      %more: i32[PLACES] = reduce %one {kind="sum", axes=(0,)}
      %next: i32[PLACES] = add %sum, %more
      yield %next
    }
  store %o[:] = %end
}
"""
    few, many = (parse_kernel(text.replace("PLACES", n)) for n in ("4", "64"))
    assert early_loads(few) is not few
    assert early_loads(many) is many


def test_much_code_around_loads_that_start_ahead_has_fewer_rounds():
    total = "%next: f32[128] = add %kept, %new"
    steps = [total.replace("%next", "%t0")]
    steps += [f"%t{n + 1}: f32[128] = exp %t{n}" for n in range(29)]
    steps.append("%next: f32[128] = exp %t29")
    rounds = []
    for code in (total, "\n".join(steps)):
        text = KERNEL.replace(total, code).replace("FROM", "%x")
        text = text.replace("ROWS", "168").replace("BOUNDS", "%0, %rows")
        made = early_loads(parse_kernel(text.replace("128", "32")))
        rounds.append(loops_of(made)[0].count("store"))
    assert rounds == [14, 8]
