"""Loops and branches: scalars in registers, tiles in buffers, memory in between."""

import numpy as np
import pytest

from pallasite.ir.nodes import At, Span, Value
from pallasite.ir.types import BOOL, F32, I32, TileType
from tests.backends.cpu.running import (
    compute,
    index_value,
    region,
    run,
    tile_type,
    with_refs,
)

RNG = np.random.default_rng(0)
VECTOR = tile_type(F32, 6)


def scalar(name: str = "", dtype=F32) -> Value:
    return Value(TileType((), dtype), name)


def for_loop(b, first, limit, step, carries, emit):
    params = [index_value(), *(Value(c.type) for c in carries)]
    body = region(params, emit)
    bounds = [b.index(n) if isinstance(n, int) else n for n in (first, limit, step)]
    return b.emit("for", *bounds, *carries, regions=(body,))


@pytest.mark.parametrize(
    ("first", "limit", "step"),
    [(0, 5, 1), (2, 11, 3), (5, 5, 1), (7, 2, 1), (9, 0, -2), (3, 4, 10)],
)
def test_for_counts_like_range(first: int, limit: int, step: int):
    def emit(b):
        zero = b.index(0)
        steps = lambda c, i, n, s: (c.add(n, c.index(1)), c.add(s, i))
        return for_loop(b, first, limit, step, [zero, zero], steps)

    count, total = compute(emit)
    expected = range(first, limit, step)
    assert (count, total) == (len(expected), sum(expected))


def test_for_with_dynamic_bounds():
    def emit(b, n):
        return for_loop(b, 0, n, 1, [b.index(0)], lambda c, i, s: c.add(s, i))[0]

    assert compute(emit, np.int32(10)) == 45
    assert compute(emit, np.int32(-3)) == 0


def test_for_carries_tiles():
    x = RNG.normal(size=6).astype(np.float32)

    def emit(b, v):
        double = lambda c, i, t: c.add(t, t)
        return for_loop(b, 0, 4, 1, [v], double)[0]

    np.testing.assert_array_equal(compute(emit, x), 16 * x)


def test_carried_tiles_change_places_all_at_once():
    x, y = np.arange(6, dtype=np.float32), np.full(6, 10, np.float32)

    def emit(b, u, v):
        swap = lambda c, i, p, q: (q, p)
        return for_loop(b, 0, 3, 1, [u, v], swap)

    got = compute(emit, x, y)
    np.testing.assert_array_equal(got, [y, x])


def test_carried_tiles_read_each_other():
    """Fibonacci: one yield is the other's old value, one reads both."""
    x, y = np.zeros(4, np.float32), np.ones(4, np.float32)

    def emit(b, u, v):
        return for_loop(b, 0, 7, 1, [u, v], lambda c, i, p, q: (q, c.add(p, q)))

    got = compute(emit, x, y)
    np.testing.assert_array_equal(got, [np.full(4, 13), np.full(4, 21)])


def test_a_yield_may_read_other_elements_of_its_carry():
    x = np.arange(6, dtype=np.float32)

    def emit(b, v):
        turn = lambda c, i, t: c.rev(t, axes=(0,))
        return for_loop(b, 0, 3, 1, [v], turn)[0]

    np.testing.assert_array_equal(compute(emit, x), x[::-1])


def test_while_runs_until_its_condition_fails():
    def emit(b, n):
        params = [scalar("n", I32), scalar("steps", I32)]
        goes_on = region(params, lambda c, n, s: c.gt(n, c.index(1)))

        def step(c, n, s):
            odd = c.cast(c.and_(n, c.index(1)), BOOL)
            up = c.add(c.mul(n, c.index(3)), c.index(1))
            down = c.shift_right_arithmetic(n, c.index(1))
            return c.select(odd, up, down), c.add(s, c.index(1))

        body = region([Value(p.type) for p in params], step)
        return b.emit("while", n, b.index(0), regions=(goes_on, body))[1]

    assert compute(emit, np.int32(27)) == 111
    assert compute(emit, np.int32(1)) == 0


def test_while_carries_tiles():
    x = np.ones(6, np.float32)

    def emit(b, v):
        params = [Value(VECTOR)]

        def goes_on(c, t):
            return c.lt(
                c.reduce(t, kind="max", axes=(0,)), c.constant(100.0, scalar().tile)
            )

        body = region([Value(VECTOR)], lambda c, t: c.add(t, t))
        return b.emit("while", v, regions=(region(params, goes_on), body))[0]

    np.testing.assert_array_equal(compute(emit, x), 128 * x)


@pytest.mark.parametrize(("which", "taken"), [(-4, 0), (0, 0), (1, 1), (2, 2), (9, 2)])
def test_cond_clamps_its_branch(which: int, taken: int):
    x = np.arange(6, dtype=np.float32)

    def emit(b, n, v):
        branches = [
            region((), lambda c: (c.neg(v), c.index(10))),
            region((), lambda c: (v, c.index(11))),
            region((), lambda c: (c.mul(v, v), c.index(12))),
        ]
        return b.emit("cond", n, regions=branches)

    got, number = compute(emit, np.int32(which), x)
    np.testing.assert_array_equal(got, [-x, x, x * x][taken])
    assert number == 10 + taken


def test_loops_nest_and_branch_inside():
    """Counts pairs i < j below 6 with even sum."""

    def emit(b):
        def outer(c, i, total):
            def inner(d, j, total):
                even = d.eq(d.rem(d.add(i, j), d.index(2)), d.index(0))
                both = d.and_(even, d.lt(i, j))
                more = region((), lambda e: e.add(total, e.index(1)))
                keep = region((), lambda e: total)
                return d.emit("cond", d.cast(both, I32), regions=(keep, more))

            return for_loop(c, 0, 6, 1, [total], inner)

        return for_loop(b, 0, 6, 1, [b.index(0)], outer)[0]

    assert compute(emit) == 6


def test_a_load_before_a_loop_that_stores_keeps_its_value():
    x = np.arange(6, dtype=np.float32)

    def emit(b, source, out):
        b.store(out, b.load(source))
        before = b.load(out)
        tripled = b.add(b.add(before, before), before)

        def step(c, i):
            c.store(out, c.constant(-1.0, VECTOR))

        for_loop(b, 0, 2, 1, [], step)
        b.store(out, b.add(b.load(out), tripled))

    (got,) = run(with_refs(emit, [x], [VECTOR]), x)
    np.testing.assert_array_equal(got, 3 * x - 1)


def test_a_tile_made_outside_is_used_in_a_loop():
    x = np.arange(6, dtype=np.float32)

    def emit(b, source, out):
        squared = b.mul(b.load(source), b.load(source))
        b.store(out, b.constant(0.0, VECTOR))

        def step(c, i):
            c.store(out, c.add(c.load(out), squared))

        for_loop(b, 0, 3, 1, [], step)

    (got,) = run(with_refs(emit, [x], [VECTOR]), x)
    np.testing.assert_array_equal(got, 3 * x * x)


def test_a_loop_over_rows_with_dynamic_indices():
    x = RNG.normal(size=(5, 4)).astype(np.float32)

    def emit(b, source, out):
        def step(c, i, total):
            row = c.load(source, (At(), Span(0, 4)), [i])
            total = c.add(total, row)
            c.store(out, total, (At(), Span(0, 4)), [i])
            return total

        for_loop(b, 0, 5, 1, [b.constant(0.0, tile_type(F32, 4))], step)

    (got,) = run(with_refs(emit, [x], [tile_type(F32, 5, 4)]), x)
    np.testing.assert_allclose(got, np.cumsum(x, 0), rtol=1e-5, atol=1e-6)
