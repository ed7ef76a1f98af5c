"""Guards become bounds of loops. Text in, text out; and random guards, run."""

import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, Kernel, Value
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import I32, I64, RefType, scalar
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.guard_bounds import guard_bounds

LOWEST, HIGHEST = I32.limits


def shortened(text: str) -> str:
    kernel = canonicalize(parse_kernel(text))
    verify(kernel)
    new = guard_bounds(kernel)
    verify(new)
    lines = new.text.rstrip().split("\n")[1:-1]
    return textwrap.dedent("\n".join(lines))


def expect(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


LOOP = """
kernel @k(%n: ref<i32[4] smem>, %o: ref<i32[8] any>) outputs 1 {
  pipeline {grid=(8,), windows=(), semantics=("parallel",)}
    body (%i: i32) {
      %c0: i32 = constant {value=0}
      %c1: i32 = constant {value=1}
      %c8: i32 = constant {value=8}
      %c4: i32 = constant {value=4}
      %length: i32 = load %n[0]
      %last: i32 = for %c0, LIMIT, %c1, %c0
        body (%j: i32, %acc: i32) {
          GUARD
          %w: i32 = cast %g {dtype=i32}
          %r: i32 = cond %w
            branch () { yield %acc }
            branch () {
              %s: i32 = add %acc, %j
              yield %s
            }
          yield %r
        }
      store %o[%i] = %last
    }
}
"""


def loop_with(guard: str, limit: str = "%c8") -> str:
    return LOOP.replace("GUARD", guard).replace("LIMIT", limit)


def test_causal_guard_is_the_limit():
    """`j * 4 < (i + 1) * 8`: no branch is left."""
    guard = """
          %x: i32 = mul %j, %c4
          %i1: i32 = add %i, %c1
          %y: i32 = mul %i1, %c8
          %g: bool = lt %x, %y
    """
    assert shortened(loop_with(guard)) == expect("""
        pipeline {grid=(8,), windows=(), semantics=("parallel",)}
          body (%i: i32) {
            %c0: i32 = constant {value=0}
            %c1: i32 = constant {value=1}
            %c8: i32 = constant {value=8}
            %c4: i32 = constant {value=4}
            %0: i32 = add %i, %c1
            %1: i32 = mul %0, %c8
            %2: i32 = constant {value=3}
            %3: i32 = add %1, %2
            %4: i32 = div %3, %c4
            %5: i32 = min %c8, %4
            %last: i32 = for %c0, %5, %c1, %c0
              body (%j: i32, %acc: i32) {
                %s: i32 = add %acc, %j
                yield %s
              }
            store %o[%i] = %last
          }
    """)


def test_a_guard_on_a_quotient_of_the_index_is_a_bound():
    """`i * 4 < (j / 2 + 1) * 4`, `j` counting halves of blocks: from `2 i` on."""
    guard = """
          %c2: i32 = constant {value=2}
          %half: i32 = div %j, %c2
          %next: i32 = add %half, %c1
          %x: i32 = mul %i, %c4
          %y: i32 = mul %next, %c4
          %g: bool = lt %x, %y
    """
    text = shortened(loop_with(guard))
    assert "cond" not in text and "for %c0" not in text
    kernel = guard_bounds(canonicalize(parse_kernel(loop_with(guard))))
    (results,) = Walker(kernel, NumpyNumbers()).run([np.zeros(4, np.int32)])
    for i, total in enumerate(results):
        assert total == sum(j for j in range(8) if i * 4 < (j // 2 + 1) * 4)


CEILING = """
          %c3: i32 = constant {{value=3}}
          %next: i32 = add %j, %c1
          %up: i32 = mul %next, {rows}
          %down: i32 = neg %up
          %cut: i32 = div %down, %c4
          %sign: i32 = sign %down
          %differ: bool = ne %sign, %c1
          %rest: i32 = rem %down, %c4
          %some: bool = ne %rest, %c0
          %which: bool = and %differ, %some
          %less: i32 = sub %cut, %c1
          %floor: i32 = select_n %which, %cut, %less
          %ceil: i32 = neg %floor
          %end: i32 = min %c8, %ceil
          %g: bool = lt %i, %end
"""


@pytest.mark.parametrize("rows", (3, 4, 8))
def test_a_guard_on_a_minimum_and_a_rounded_quotient_is_a_bound(rows: int):
    """`i < min(8, cdiv((j + 1) * rows, 4))`: the end of another loop, seen by keys."""
    text = loop_with(CEILING.format(rows=f"%c{rows}"))
    new = shortened(text)
    assert "cond" not in new and "for %c0" not in new and "select" not in new
    kernel = guard_bounds(canonicalize(parse_kernel(text)))
    (results,) = Walker(kernel, NumpyNumbers()).run([np.zeros(4, np.int32)])
    for i, total in enumerate(results):
        assert total == sum(j for j in range(8) if i < min(8, -(-(j + 1) * rows // 4)))


def test_a_comparison_of_two_quotients_is_asked():
    guard = CEILING.format(rows="%c3").replace("lt %i, %end", "lt %back, %ceil")
    back = """
          %c2: i32 = constant {value=2}
          %half: i32 = div %j, %c2
          %back: i32 = neg %half
    """
    assert "cond" in shortened(loop_with(back + guard))


def test_a_guard_on_a_maximum_is_no_bound_from_above():
    """`j < max(i, min(j, 4))`: none of both alone."""
    guard = """
          %m: i32 = min %j, %c4
          %y: i32 = max %i, %m
          %g: bool = lt %j, %y
    """
    assert "cond" in shortened(loop_with(guard))


def test_window_has_a_first_step_too():
    guard = """
          %x: i32 = mul %j, %c4
          %y: i32 = mul %i, %c4
          %low: i32 = sub %y, %c8
          %g1: bool = gt %x, %low
          %g2: bool = le %x, %y
          %g: bool = and %g1, %g2
    """
    assert shortened(loop_with(guard)) == expect("""
        pipeline {grid=(8,), windows=(), semantics=("parallel",)}
          body (%i: i32) {
            %c0: i32 = constant {value=0}
            %c1: i32 = constant {value=1}
            %c8: i32 = constant {value=8}
            %c4: i32 = constant {value=4}
            %0: i32 = mul %i, %c4
            %1: i32 = sub %0, %c8
            %2: i32 = add %1, %c1
            %3: i32 = max %2, %c0
            %4: i32 = constant {value=3}
            %5: i32 = add %3, %4
            %6: i32 = div %5, %c4
            %7: i32 = add %0, %c1
            %8: i32 = add %7, %4
            %9: i32 = div %8, %c4
            %last: i32 = for %6, %9, %c1, %c0
              body (%j: i32, %acc: i32) {
                %s: i32 = add %acc, %j
                yield %s
              }
            store %o[%i] = %last
          }
    """)


def test_length_from_memory_may_be_any_number():
    """What is loaded is kept near what it is compared with: no sum wraps around."""
    guard = """
          %x: i32 = mul %j, %c4
          %end: i32 = add %x, %c4
          %g: bool = ge %length, %end
    """
    assert shortened(loop_with(guard)) == expect("""
        pipeline {grid=(8,), windows=(), semantics=("parallel",)}
          body (%i: i32) {
            %c0: i32 = constant {value=0}
            %c1: i32 = constant {value=1}
            %c4: i32 = constant {value=4}
            %length: i32 = load %n[0]
            %0: i32 = constant {value=3}
            %1: i32 = max %length, %0
            %2: i32 = constant {value=33}
            %3: i32 = min %1, %2
            %4: i32 = sub %3, %c4
            %5: i32 = add %4, %c1
            %6: i32 = add %5, %0
            %7: i32 = div %6, %c4
            %last: i32 = for %c0, %7, %c1, %c0
              body (%j: i32, %acc: i32) {
                %s: i32 = add %acc, %j
                yield %s
              }
            store %o[%i] = %last
          }
    """)


def test_condition_that_never_changes_decides_once():
    assert shortened(loop_with("%g: bool = lt %c4, %length")) == expect("""
        pipeline {grid=(8,), windows=(), semantics=("parallel",)}
          body (%i: i32) {
            %c0: i32 = constant {value=0}
            %c1: i32 = constant {value=1}
            %c8: i32 = constant {value=8}
            %c4: i32 = constant {value=4}
            %length: i32 = load %n[0]
            %0: bool = lt %c4, %length
            %1: i32 = select_n %0, %c0, %c8
            %last: i32 = for %c0, %1, %c1, %c0
              body (%j: i32, %acc: i32) {
                %s: i32 = add %acc, %j
                yield %s
              }
            store %o[%i] = %last
          }
    """)


def test_what_cannot_be_solved_is_asked_at_every_step():
    guard = """
          %g1: bool = lt %j, %i
          %odd: i32 = rem %j, %c4
          %g2: bool = ne %odd, %c1
          %g: bool = and %g1, %g2
    """
    assert shortened(loop_with(guard)) == expect("""
        pipeline {grid=(8,), windows=(), semantics=("parallel",)}
          body (%i: i32) {
            %c0: i32 = constant {value=0}
            %c1: i32 = constant {value=1}
            %c4: i32 = constant {value=4}
            %last: i32 = for %c0, %i, %c1, %c0
              body (%j: i32, %acc: i32) {
                %odd: i32 = rem %j, %c4
                %g2: bool = ne %odd, %c1
                %0: i32 = cast %g2 {dtype=i32}
                %r: i32 = cond %0
                  branch () { yield %acc }
                  branch () {
                    %s: i32 = add %acc, %j
                    yield %s
                  }
                yield %r
              }
            store %o[%i] = %last
          }
    """)


KEPT = {
    "may wrap around": ("%x: i32 = mul %j, %c8\n%g: bool = lt %x, %i", "%length"),
    "no sum": ("%x: i32 = rem %j, %c4\n%g: bool = lt %x, %i", "%c8"),
    "not equal": ("%g: bool = ne %j, %i", "%c8"),
    "carried": ("%g: bool = lt %j, %acc", "%c8"),
    "stored there": (
        "store %o[%j] = %j\n%g: bool = lt %j, %i",
        "%c8",
    ),
}


@pytest.mark.parametrize("why", KEPT)
def test_kept(why: str):
    guard, limit = KEPT[why]
    kernel = canonicalize(parse_kernel(loop_with(guard, limit)))
    assert guard_bounds(kernel) is kernel


def test_yields_that_change_in_idle_steps_keep_the_loop():
    text = loop_with("%g: bool = lt %j, %i").replace(
        "branch () { yield %acc }", "branch () { yield %j }"
    )
    kernel = canonicalize(parse_kernel(text))
    assert guard_bounds(kernel) is kernel


def test_limit_rounded_up_is_enough_to_know():
    """A loop over the blocks of a length: `j * 8` cannot wrap around below it."""
    text = loop_with("%x: i32 = mul %j, %c8\n%g: bool = lt %x, %i", "%blocks")
    divided = "%length: i32 = load %n[0]\n%blocks: i32 = div %length, %c8"
    text = text.replace("%length: i32 = load %n[0]", divided)
    assert "cond" not in shortened(text)


# --- random guards ---

EXTREMES = (LOWEST, LOWEST + 1, LOWEST + 7, HIGHEST - 7, HIGHEST - 1, HIGHEST)
SIZES = st.one_of(st.integers(-20, 60), st.sampled_from(EXTREMES))
COMPARED = ("lt", "le", "gt", "ge", "lt", "le", "gt", "ge", "eq", "ne")


class Maker:
    """Draws a loop that writes down which steps it runs, guarded at random."""

    def __init__(self, data: st.DataObject):
        self.data = data

    def pick(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def kernel(self) -> Kernel:
        numbers = Value(RefType((4,), I32, "smem"), "n")
        seen = Value(RefType((2, 16), I32, "any"), "seen")
        b = Builder()
        b.store(seen, b.constant(0, seen.ref.tile))
        dtype = self.pick(I32, I32, I64)
        fixed = [b.cast(b.load(numbers, (At(n),)), dtype) for n in range(4)]
        bounded = [b.clamp(b.like(-9, v), v, b.like(40, v)) for v in fixed[:2]]
        first = self.pick(b.constant(self.pick(0, 0, 3, -2), scalar(dtype)), bounded[0])
        limit = self.pick(b.constant(self.pick(12, 5), scalar(dtype)), bounded[1])
        step = b.constant(self.pick(1, 1, 1, 2, 3), scalar(dtype))
        j, count = Value(scalar(dtype), "j"), Value(scalar(I32), "count")
        carried: list[Value] = [count]
        inner = Builder()
        for row in range(self.pick(1, 1, 2)):
            carried = [self.guarded(inner, row, j, carried[0], fixed + bounded, seen)]
        body = inner.block((j, count), carried)
        (total,) = b.emit("for", first, limit, step, b.index(0), regions=(body,))
        b.store(seen, total, (At(0), At(15)))
        return Kernel("guards", (numbers, seen), b.block(), 1)

    def guarded(
        self, b: Builder, row: int, j: Value, count: Value, fixed: list[Value], seen
    ) -> Value:
        """Note step j in a row of `seen` and count it, if a condition holds."""
        test = self.test(b, j, fixed, depth=2)
        then = Builder()
        at = then.rem(then.add(then.cast(j, I32), then.index(64)), then.index(15))
        then.store(seen, then.add(count, then.index(1)), (At(row), At()), (at,))
        counted = then.add(count, then.index(1))
        branches = (Block((), (), (count,)), then.block((), (counted,)))
        if self.pick(True, False):
            branches, test = branches[::-1], b.not_(test)
        return b.emit("cond", b.cast(test, I32), regions=branches)[0]

    def test(self, b: Builder, j: Value, fixed: list[Value], depth: int) -> Value:
        kind = self.pick("compare", "compare", "both") if depth else "compare"
        if kind == "both":
            parts = [self.test(b, j, fixed, depth - 1) for _ in range(2)]
            return b.op(self.pick("and", "and", "and", "or"), *parts)
        other = self.pick(j, *fixed, *fixed)
        x, y = self.sum(b, j, fixed), self.sum(b, other, fixed)
        test = b.op(self.pick(*COMPARED), *self.pick((x, y), (y, x)))
        return b.not_(test) if self.pick(True, False, False) else test

    def sum(self, b: Builder, j: Value, fixed: list[Value]) -> Value:
        value = self.pick(*[j] * 7, b.div(j, b.like(self.pick(2, 3), j)))
        for _ in range(self.pick(0, 1, 2)):
            number = b.like(self.pick(-3, -1, 0, 1, 2, 4, 7), j)
            other = self.pick(number, number, number, *fixed)
            kind = self.pick("add", "sub", "mul" if other is number else "add")
            value = b.op(kind, *self.pick((value, other), (other, value)))
        if self.pick(*[False] * 5, True):
            value = self.rounded(b, value)
        if self.pick(*[False] * 5, True):
            other = self.pick(b.like(self.pick(-2, 3, 20), j), *fixed)
            value = b.op(
                self.pick("min", "max"), *self.pick((value, other), (other, value))
            )
        return value

    def rounded(self, b: Builder, value: Value) -> Value:
        """`value // n`, or `-(-value // n)`, as Python has them."""
        upwards, by = self.pick(False, True), b.like(self.pick(1, 2, 3, 8), value)
        value = b.op("neg", value) if upwards else value
        cut, one = b.div(value, by), b.like(1, value)
        differs = b.op("ne", b.op("sign", value), one)
        which = b.and_(differs, b.op("ne", b.rem(value, by), b.like(0, value)))
        value = b.op("select_n", which, cut, b.sub(cut, one))
        return b.op("neg", value) if upwards else value


def run(kernel: Kernel, numbers: np.ndarray) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        results = Walker(kernel, NumpyNumbers()).run([numbers.copy()])
    return [np.asarray(out) for out in results]


@given(st.data())
@settings(max_examples=150)
def test_random_guards_let_the_same_steps_through(data: st.DataObject):
    kernel = Maker(data).kernel()
    verify(kernel)
    new = guard_bounds(kernel)
    verify(new)
    for _ in range(3):
        numbers = np.array([data.draw(SIZES) for _ in range(4)], np.int32)
        for a, b in zip(run(kernel, numbers), run(new, numbers), strict=True):
            np.testing.assert_array_equal(a, b)


def test_many_random_guards_become_bounds():
    """The test above is about something."""
    count = {True: 0, False: 0}

    @given(st.data())
    @settings(max_examples=100, database=None)
    def tally(data: st.DataObject):
        kernel = Maker(data).kernel()
        count[guard_bounds(kernel) is not kernel] += 1

    tally()
    assert count[True] > 30, count
