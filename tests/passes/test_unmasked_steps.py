"""Steps whose mask is all true run without it. Text in, text out; and random masks."""

import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Kernel, Value, walk
from pallasite.ir.roles import Cond
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import I32, RefType, TileType
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.unmasked_steps import unmasked_loops, unmasked_steps

LOWEST, HIGHEST = I32.limits

STEPS = """
kernel @k(%n: ref<i32[1] smem>, %x: ref<f32[4,8] any>, %o: ref<f32[16,8] any>)
    outputs 1 {
  pipeline %x, %o {grid=(4, 4), windows=(in[4, 8], out[4, 8]),
      semantics=("parallel", "arbitrary")}
    map (%i1: i32, %j1: i32) {
      %z1: i32 = constant {value=0}
      yield %z1, %z1
    }
    map (%i2: i32, %j2: i32) {
      %z2: i32 = constant {value=0}
      yield %i2, %z2
    }
    body (%i: i32, %j: i32, %xb: ref<f32[4,8] block>, %ob: ref<f32[4,8] block>) {
      %c4: i32 = constant {value=4}
      %c8: i32 = constant {value=8}
      %length: i32 = load %n[0]
      %qi: i32 = mul %i, %c8
      %kj: i32 = mul %j, %c8
      %v: f32[4,8] = load %xb[:, :]
      %low: f32[4,8] = constant {value=-100.0}
      %r: i32[4,8] = iota {dim=0}
      %c: i32[4,8] = iota {dim=1}
      %q: i32[4,8] = broadcast_in_dim %qi {shape=(4, 8), dims=()}
      %k: i32[4,8] = broadcast_in_dim %kj {shape=(4, 8), dims=()}
      %l: i32[4,8] = broadcast_in_dim %length {shape=(4, 8), dims=()}
      %rows: i32[4,8] = add %q, %r
      %columns: i32[4,8] = add %k, %c
      MASK
      %s: f32[4,8] = SELECT
      store %ob[:, :] = %s
    }
}
"""
KEEP, DROP = "select_n %m, %low, %v", "select_n %m, %v, %low"


def steps(mask: str, select: str = KEEP) -> Kernel:
    text = STEPS.replace("MASK", mask).replace("SELECT", select)
    kernel = canonicalize(parse_kernel(text))
    verify(kernel)
    return kernel


def changed(kernel: Kernel) -> Kernel:
    new = unmasked_steps(kernel, least=2, needed=None)
    verify(new)
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    for length in (0, 5, 8, 17, 1000, -3, LOWEST, HIGHEST):
        a, b = (
            np.asarray(Walker(k, NumpyNumbers()).run([np.array([length], "i4"), x])[0])
            for k in (kernel, new)
        )
        np.testing.assert_array_equal(a, b)
    return new


def branches(kernel: Kernel) -> tuple[list[str], list[str]]:
    """The names of the ops of a step with masks, and without."""
    (cond,) = [op for op in walk(kernel.body) if op.name == "cond"]
    masked, plain = Cond.of(cond).branches
    return [op.name for op in masked.ops], [op.name for op in plain.ops]


def test_causal():
    """One comparison of scalars: is the last column before the first row?"""
    text = changed(steps("%m: bool[4,8] = ge %rows, %columns")).text
    body = text[text.index("      %qi: i32") : text.rindex("    }\n}")]
    assert textwrap.dedent(body) == textwrap.dedent("""\
        %qi: i32 = mul %i, %c8
        %kj: i32 = mul %j, %c8
        %0: i32 = constant {value=7}
        %1: i32 = add %kj, %0
        %2: bool = ge %qi, %1
        %3: i32 = cast %2 {dtype=i32}
        cond %3
          branch () {
            %v: f32[4,8] = load %xb[:, :]
            %low: f32[4,8] = constant {value=-100.0}
            %r: i32[4,8] = iota {dim=0}
            %c: i32[4,8] = iota {dim=1}
            %q: i32[4,8] = broadcast_in_dim %qi {shape=(4, 8), dims=()}
            %k: i32[4,8] = broadcast_in_dim %kj {shape=(4, 8), dims=()}
            %rows: i32[4,8] = add %q, %r
            %columns: i32[4,8] = add %k, %c
            %m: bool[4,8] = ge %rows, %columns
            %s: f32[4,8] = select_n %m, %low, %v
            store %ob[:, :] = %s
          }
          branch () {
            %v_1: f32[4,8] = load %xb[:, :]
            store %ob[:, :] = %v_1
          }
    """)


MASKS = {
    "causal": ("%m: bool[4,8] = ge %rows, %columns", KEEP),
    "dropped": ("%m: bool[4,8] = lt %rows, %columns", DROP),
    "distance": (
        """%d: i32[4,8] = sub %rows, %columns
           %zero: i32[4,8] = constant {value=0}
           %near: i32[4,8] = constant {value=20}
           %m1: bool[4,8] = ge %d, %zero
           %m2: bool[4,8] = lt %d, %near
           %m: bool[4,8] = and %m1, %m2""",
        KEEP,
    ),
    "length": ("%m: bool[4,8] = lt %columns, %l", KEEP),
    "blocks of rows, rounded down": (
        """%mask: i32[4,8] = constant {value=-2}
           %first: i32[4,8] = and %rows, %mask
           %m: bool[4,8] = le %columns, %first""",
        KEEP,
    ),
    "numbers of blocks of rows": (
        """%two: i32[4,8] = constant {value=2}
           %number: i32[4,8] = div %r, %two
           %block: i32[4,8] = add %q, %number
           %m: bool[4,8] = ge %block, %columns""",
        KEEP,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_plain_steps_have_no_mask(name: str):
    kernel = steps(*MASKS[name])
    masked, plain = branches(changed(kernel))
    assert "select_n" in masked and "iota" in masked
    assert plain == ["load", "store"] or plain == ["store"]


KEPT = {
    "may wrap around": "%t: i32[4,8] = add %l, %r\n%m: bool[4,8] = ge %t, %columns",
    "equal": "%m: bool[4,8] = eq %rows, %columns",
    "either": """%m1: bool[4,8] = ge %rows, %columns
        %m2: bool[4,8] = ge %columns, %rows
        %m: bool[4,8] = or %m1, %m2""",
    "data": "%zero: f32[4,8] = constant {value=0.0}\n%m: bool[4,8] = lt %v, %zero",
    "never all true": """%seven: i32[4,8] = constant {value=7}
        %m: bool[4,8] = lt %columns, %seven""",
}


@pytest.mark.parametrize("why", KEPT)
def test_kept(why: str):
    kernel = steps(KEPT[why])
    assert unmasked_steps(kernel, least=2, needed=None) is kernel


def test_selects_by_number_are_kept():
    kernel = steps("%m: i32[4,8] = sub %columns, %rows", "select_n %m, %low, %v, %low")
    assert unmasked_steps(kernel, least=2, needed=None) is kernel


def test_small_masks_and_steps_without_products_are_kept():
    kernel = steps(*MASKS["causal"])
    assert unmasked_steps(kernel, least=64, needed=None) is kernel
    assert unmasked_steps(kernel, least=2) is kernel


def test_a_step_in_a_branch_has_versions_of_its_own():
    """The step before it ends there, and positions that both use are made again."""
    inner = """
      store %ob[:, :] = %s
      %some: bool = gt %qi, %kj
      %which: i32 = cast %some {dtype=i32}
      cond %which
        branch () {}
        branch () {
          %old: f32[4,8] = load %ob[:, :]
          %d: f32[4,4] = dot %old, %v {contract=((1,), (1,)), batch=((), ()),
              dtype=f32, precision=None}
          %later: i32[4,8] = add %columns, %r
          %m2: bool[4,8] = ge %rows, %later
          %t: f32[4,8] = select_n %m2, %low, %old
          store %ob[:, :] = %t
        }
    """
    text = STEPS.replace("MASK", "%m: bool[4,8] = ge %rows, %columns")
    text = text.replace("SELECT", KEEP).replace("      store %ob[:, :] = %s\n", inner)
    kernel = canonicalize(parse_kernel(text))
    new = changed(kernel)
    first, branch = [o for o in pipeline_body(new).ops if o.name == "cond"]
    assert not first.results and [len(r.ops) for r in first.regions][1] == 2
    assert [op.name for op in walk(new.body)].count("cond") == 3
    assert any(op.name == "cond" for op in walk(branch.regions[1]))


def pipeline_body(kernel: Kernel):
    (pipeline,) = [op for op in kernel.body.ops if op.name == "pipeline"]
    return pipeline.regions[-1]


# --- random masks ---


class Maker:
    """Draws a loop that sums a tile, masked at random by its positions."""

    def __init__(self, data: st.DataObject):
        self.data = data

    def pick(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def kernel(self) -> Kernel:
        shape = self.pick((3, 4), (1, 6), (5,))
        numbers = Value(RefType((2,), I32, "smem"), "n")
        x, o = (Value(RefType(shape, I32, "any"), name) for name in "xo")
        b = Builder()
        fixed = [b.load(numbers, (At(n),)) for n in range(2)]
        fixed.append(b.clamp(b.index(-20), fixed[0], b.index(20)))
        tile = b.load(x)
        inner, j = Builder(), Value(fixed[0].type, "j")
        total = Value(tile.type, "total")
        mask = self.mask(inner, j, fixed, shape, depth=2)
        other = inner.constant(self.pick(0, 1), tile.tile)
        cases = self.pick((tile, other), (other, tile))
        value = inner.select(mask, *cases)
        if self.pick(True, False):
            again = self.mask(inner, j, fixed, shape, depth=0)
            value = inner.select(again, value, other)
        two = inner.constant(2, tile.tile)
        after = inner.add(inner.mul(total, two), value)
        body = inner.block((j, total), (after,))
        bounds = [b.index(n) for n in (0, 6, 1)]
        (result,) = b.emit("for", *bounds, tile, regions=(body,))
        b.store(o, result)
        return Kernel("masks", (numbers, x, o), b.block(), 1)

    def mask(self, b: Builder, j: Value, fixed, shape, depth: int) -> Value:
        if depth and self.pick(True, False):
            parts = [self.mask(b, j, fixed, shape, depth - 1) for _ in range(2)]
            return b.op(self.pick("and", "and", "or"), *parts)
        x, y = (self.positions(b, j, fixed, shape) for _ in range(2))
        test = b.op(self.pick("lt", "le", "gt", "ge", "eq"), x, y)
        return b.not_(test) if self.pick(True, False) else test

    def positions(self, b: Builder, j: Value, fixed, shape) -> Value:
        """A sum of positions in a tile and of scalars, some of which may be large."""
        start = self.pick(b.index(self.pick(0, 3, 9)), j, fixed[2], *fixed)
        if self.pick(True, False):
            start = b.mul(start, b.index(self.pick(2, 3, -1)))
        value = b.broadcast(start, shape, ())
        for _ in range(self.pick(0, 1, 2)):
            dim = self.pick(*range(len(shape)))
            line = b.iota(type=TileType(shape, I32), dim=dim)
            value = b.op(
                self.pick("add", "sub"), *self.pick((value, line), (line, value))
            )
        if self.pick(True, False):
            name, number = self.pick(("and", -4), ("and", 5), ("div", 2), ("div", -2))
            value = b.op(name, value, b.constant(number, value.tile))
        return value


def run(kernel: Kernel, *arrays: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        (result,) = Walker(kernel, NumpyNumbers()).run([a.copy() for a in arrays])
    return np.asarray(result)


def test_random_masks():
    count = {True: 0, False: 0}
    sizes = st.one_of(st.integers(-20, 20), st.sampled_from((LOWEST, HIGHEST - 3)))

    @given(st.data())
    @settings(max_examples=200)
    def check(data: st.DataObject):
        kernel = Maker(data).kernel()
        verify(kernel)
        new = unmasked_steps(kernel, least=2, needed=None)
        verify(new)
        count[new is not kernel] += 1
        x = np.arange(kernel.params[1].ref.size, dtype=np.int32) + 7
        x = x.reshape(kernel.params[1].ref.shape)
        for _ in range(2):
            numbers = np.array([data.draw(sizes) for _ in range(2)], np.int32)
            np.testing.assert_array_equal(run(kernel, numbers, x), run(new, numbers, x))

    check()
    assert count[True] > 30, count


# --- loops of their own ---

LOOP = """
kernel @k(%n: ref<i32[2] smem>, %x: ref<f32[4,8] any>, %o: ref<f32[16,8] any>)
    outputs 1 {
  pipeline %x, %o {grid=(4,), windows=(in[4, 8], out[4, 8]), semantics=("parallel",)}
    map (%i1: i32) {
      %z1: i32 = constant {value=0}
      yield %z1, %z1
    }
    map (%i2: i32) {
      %z2: i32 = constant {value=0}
      yield %i2, %z2
    }
    body (%i: i32, %xb: ref<f32[4,8] block>, %ob: ref<f32[4,8] block>) {
      %first: i32 = constant {value=FIRST}
      %one: i32 = constant {value=1}
      %end: i32 = load %n[0]
      %length: i32 = load %n[1]
      %c4: i32 = constant {value=4}
      %c8: i32 = constant {value=8}
      %c20: i32[4,8] = constant {value=20}
      %qi: i32 = mul %i, %c8
      %v: f32[4,8] = load %xb[:, :]
      %low: f32[4,8] = constant {value=-100.0}
      %part: f32[4,8] = constant {value=0.375}
      %r: i32[4,8] = iota {dim=0}
      %c: i32[4,8] = iota {dim=1}
      %q: i32[4,8] = broadcast_in_dim %qi {shape=(4, 8), dims=()}
      %l: i32[4,8] = broadcast_in_dim %length {shape=(4, 8), dims=()}
      %rows: i32[4,8] = add %q, %r
      %sums: f32[4,8] = for %first, %limit, %one, %low
        body (%j: i32, %sum: f32[4,8]) {
          %kj: i32 = mul %j, %c8
          %k: i32[4,8] = broadcast_in_dim %kj {shape=(4, 8), dims=()}
          %columns: i32[4,8] = add %k, %c
          MASK
          %s: f32[4,8] = select_n %m, %low, %v
          %less: f32[4,8] = mul %sum, %part
          %more: f32[4,8] = add %less, %s
          yield %more
        }
      store %ob[:, :] = %sums
    }
}
"""
LIMIT = """%c6: i32 = constant {value=6}
      %c0: i32 = constant {value=0}
      %above: i32 = max %end, %c0
      %limit: i32 = min %above, %c6
      %sums"""
LOOP = LOOP.replace("%sums: f32[4,8] = for", LIMIT + ": f32[4,8] = for")


def looped(mask: str, first: int = 0) -> Kernel:
    text = LOOP.replace("MASK", mask).replace("FIRST", str(first))
    kernel = canonicalize(parse_kernel(text))
    verify(kernel)
    return kernel


def bodies(kernel: Kernel) -> list[bool]:
    """Of each loop, whether its steps have a mask."""
    loops = [op for op in walk(kernel.body) if op.name == "for"]
    return [any(op.name == "select_n" for op in walk(o.regions[0])) for o in loops]


WINDOW = """%near: i32[4,8] = sub %rows, %columns
          %inside: bool[4,8] = lt %near, %c20
          %before: bool[4,8] = ge %rows, %columns
          %m: bool[4,8] = and %inside, %before"""
LOOPS = {
    "causal": ("%m: bool[4,8] = ge %rows, %columns", [False, True]),
    "later": ("%m: bool[4,8] = le %rows, %columns", [True, False]),
    "edge": ("%m: bool[4,8] = lt %columns, %l", [False, True]),
    "window": (WINDOW, [True, False, True]),
    "rows": ("%m: bool[4,8] = lt %rows, %l", [False, True]),
    "equal": ("%m: bool[4,8] = eq %rows, %columns", [True]),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("first", [0, 1])
def test_steps_without_masks_have_a_loop_of_their_own(name: str, first: int):
    mask, wanted = LOOPS[name]
    kernel = looped(mask, first)
    new = unmasked_loops(kernel, least=2, needed=None)
    verify(new)
    assert bodies(new) == wanted
    assert (new is kernel) == (wanted == [True])
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    for end in (-1, 0, 1, 2, 5, 6, 9):
        for length in (0, 5, 8, 17, 48, -3, LOWEST, HIGHEST):
            a, b = (
                np.asarray(
                    Walker(k, NumpyNumbers()).run([np.array([end, length], "i4"), x])[0]
                )
                for k in (kernel, new)
            )
            np.testing.assert_array_equal(a, b)


def test_small_masks_are_not_worth_a_loop():
    kernel = looped(LOOPS["causal"][0])
    assert unmasked_loops(kernel, least=33, needed=None) is kernel
    assert unmasked_loops(kernel, least=2, needed="dot") is kernel
