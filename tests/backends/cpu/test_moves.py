"""Data that only moves: transposed, reversed, cut and joined, against numpy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallasite as pl
from pallasite import target
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Span, Value
from pallasite.ir.types import BOOL, F32, I32, TileType
from tests.backends.cpu.running import (
    compute,
    index_value,
    llvm_of,
    region,
    run,
    tiles_kernel,
    with_refs,
)

HOSTS = {"host": None, "avx2": target.AVX2, "sse": target.SSE}
DTYPES = (np.int8, np.bool_, ml_dtypes.bfloat16, np.float16, np.float32, np.float64)
RNG = np.random.default_rng(0)


@pytest.fixture(params=list(HOSTS))
def host(request):
    chosen = HOSTS[request.param]
    if chosen is None:
        yield
        return
    with target.using(chosen):
        yield


def some(*shape: int, dtype=np.float32) -> np.ndarray:
    return (RNG.normal(size=shape) * 50).astype(dtype)


def check(function, arrays, want) -> None:
    """`function(builder, *tiles)` gives what `want` of the arrays is."""
    got = compute(function, *arrays)
    got, want = ([g] if isinstance(g, np.ndarray) else g for g in (got, want(*arrays)))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.astype("f8"), other.astype("f8"))


# --- transposed ---

SQUARES = [(4, 4), (5, 7), (3, 40), (16, 16), (17, 33), (31, 64), (40, 6), (130, 70)]


def test_transposes_of_every_width(host):
    """Whole squares and what is left over, of each element type in transpose."""
    types = itertools.cycle(DTYPES)
    arrays = [some(*s, dtype=next(types)) for s in SQUARES for _ in DTYPES[:3]]
    transpose = lambda b, *vs: [b.transpose(v, perm=(1, 0)) for v in vs]
    check(transpose, arrays, lambda *xs: [x.T for x in xs])


def test_permutations(host):
    arrays = [some(9, 10, 11), some(1, 21, 18), some(21, 1, 18)]
    perms = list(itertools.permutations(range(3)))
    transpose = lambda b, *vs: [b.transpose(v, perm=p) for v in vs for p in perms]
    check(transpose, arrays, lambda *xs: [x.transpose(p) for x in xs for p in perms])


def test_turning_reads_no_element_alone():
    x = some(64, 64)
    text = llvm_of(tiles_kernel(lambda b, v: b.transpose(v, perm=(1, 0)), [x]))
    assert "@transpose_i32" in text
    assert "masked.gather" not in text


def test_parts_and_mirror_images_of_turned_tiles():
    x = some(30, 40)

    def emit(b: Builder, v: Value):
        part = b.slice(v, starts=(3, 5), limits=(29, 39), strides=(1, 2))
        return [
            b.transpose(part, perm=(1, 0)),
            b.rev(b.transpose(v, perm=(1, 0)), axes=(1,)),
        ]

    check(emit, [x], lambda x: [x[3:29, 5:39:2].T, x.T[:, ::-1]])


def test_chains_with_turned_operands(host):
    x, y = some(37, 21), some(21, 37)

    def emit(b: Builder, x: Value, y: Value):
        transposed = b.transpose(y, perm=(1, 0))
        total = b.add(x, transposed)
        back = b.transpose(b.mul(total, total), perm=(1, 0))
        return [total, back, b.sub(transposed, x), b.add(transposed, transposed)]

    def want(x, y):
        total = x + y.T
        return [total, (total * total).T, y.T - x, y.T + y.T]

    check(emit, [x, y], want)


def test_a_turned_tile_used_in_a_loop_and_after_it():
    """The copy made inside the loop is not the tile that comes after."""
    x, y = some(20, 24), some(24, 20)

    def emit(b: Builder, x: Value, y: Value):
        transposed = b.transpose(y, perm=(1, 0))
        i, sum = index_value(), Value(x.tile)
        body = region((i, sum), lambda c, i, s: c.add(s, transposed))
        bounds = [b.index(n) for n in (0, 3, 1)]
        (looped,) = b.emit("for", *bounds, x, regions=(body,))
        return [looped, b.mul(transposed, x)]

    add3 = lambda x, y: [x + y.T + y.T + y.T, y.T * x]
    check(emit, [x, y], add3)


def test_a_tile_from_outside_a_loop_is_turned_inside():
    """Its copy lasts until it is used, not only while it is transposed."""
    x, y = some(20, 24), some(24, 20)

    def emit(b: Builder, x_ref: Value, y_ref: Value, out: Value) -> None:
        mask = b.constant(True, TileType(y.shape, BOOL))
        whole = (Span(0, 24), Span(0, 20))
        part = b.load(
            y_ref, whole, mask=mask, other=b.constant(0.0, TileType(y.shape, F32))
        )

        def step(c: Builder, i: Value, sum: Value) -> Value:
            transposed = c.transpose(part, perm=(1, 0))
            twice = c.concatenate(sum, c.neg(sum), axis=0)
            cut = c.slice(twice, starts=(0, 0), limits=(20, 24), strides=(1, 1))
            return c.add(c.mul(cut, cut), transposed)

        body = region((index_value(), Value(TileType(x.shape, F32))), step)
        bounds = [b.index(n) for n in (0, 2, 1)]
        b.store(out, b.emit("for", *bounds, b.load(x_ref), regions=(body,))[0])

    kernel = with_refs(emit, [x, y], [TileType(x.shape, F32)])
    (got,) = run(kernel, x, y)
    np.testing.assert_allclose(got, (x * x + y.T) ** 2 + y.T, rtol=1e-5)


def _repeats(part, row):
    return jnp.broadcast_to(part[None], (4, *part.shape))[row]


def _picks(part, row):
    return jnp.take(part, part, mode="clip") + row


def _splits(part, row):
    return jax.lax.bitcast_convert_type(part, jnp.int4)[:, 0] + row


@pytest.mark.parametrize("move", [_repeats, _picks, _splits])
def test_a_tile_from_outside_a_loop_is_stored_inside_until_it_is_used(move):
    """What takes memory between its copy and its use does not get the copy's."""

    def kernel(x_ref, o_ref):
        part = pl.load(x_ref, slice(0, 8), mask=jnp.ones(8, bool), other=0)

        def step(row, sums):
            moved = move(part, row)
            return jnp.sort(sums + 1)[::-1] + moved.astype(jnp.int32)

        o_ref[...] = jax.lax.fori_loop(0, 3, step, jnp.zeros(8, jnp.int32))

    x = jnp.arange(8, dtype=jnp.int8)[::-1]
    shape = jax.ShapeDtypeStruct(x.shape, jnp.int32)
    call = functools.partial(pl.pallas_call, kernel, out_shape=shape)
    want = call(interpret=True)(x)
    np.testing.assert_array_equal(call(backend="cpu")(x), want)


def test_turned_iota_needs_no_memory():
    def emit(b: Builder, x: Value):
        rows, columns = (
            b.op("iota", type=TileType((24, 40), I32), dim=d) for d in (0, 1)
        )
        below = b.transpose(b.op("le", columns, rows), perm=(1, 0))
        return b.select_n(below, x, b.neg(x))

    x = some(40, 24)
    mask = np.tril(np.ones((24, 40), bool)).T
    check(emit, [x], lambda x: [np.where(mask, -x, x)])
    assert "@transpose" not in llvm_of(tiles_kernel(emit, [x]))


def test_reductions_of_turned_tiles(host):
    x = RNG.integers(-9, 9, (12, 18, 21)).astype(np.float32)
    perms = [(2, 0, 1), (1, 2, 0), (2, 1, 0)]
    axes = [(0,), (1,), (2,), (0, 2), (0, 1, 2)]

    def emit(b: Builder, x: Value):
        for p in perms:
            transposed = b.transpose(x, perm=p)
            doubled = b.add(transposed, transposed)
            for a in axes:
                yield b.op("reduce", transposed, kind="sum", axes=a)
                yield b.op("reduce", doubled, kind="max", axes=a)

    def want(x):
        transposed = [x.transpose(p) for p in perms]
        return [r for t in transposed for a in axes for r in (t.sum(a), 2 * t.max(a))]

    check(emit, [x], want)


def test_a_tile_kept_by_the_reduction_of_a_turned_one():
    """As in softmax: the exponentials are stored while they are summed up."""
    x = some(40, 36) / 50

    def emit(b: Builder, x: Value):
        powers = b.exp(b.transpose(x, perm=(1, 0)))
        sums = b.reshape(b.op("reduce", powers, kind="sum", axes=(1,)), shape=(36, 1))
        wide = b.broadcast_in_dim(sums, shape=(36, 40), dims=(0, 1))
        return b.div(powers, wide)

    powers = np.exp(x.T)
    want = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(compute(emit, x), want, rtol=1e-6)


def test_regrouped_after_turning():
    x = some(6, 20, 24)

    def emit(b: Builder, x: Value):
        merged = [((1, 0, 2), (20, 144)), ((0, 2, 1), (6, 480)), ((2, 1, 0), (48, 60))]
        transposed = [b.reshape(b.transpose(x, perm=p), shape=s) for p, s in merged]
        return [*transposed, b.add(transposed[1], transposed[1])]

    def want(x):
        heads, flat = x.transpose(1, 0, 2).reshape(20, 144), x.swapaxes(1, 2)
        flat = flat.reshape(6, 480)
        return [heads, flat, x.transpose(2, 1, 0).reshape(48, 60), flat + flat]

    check(emit, [x], want)


def test_stores_to_turned_views():
    x = some(40, 36)

    def emit(b: Builder, x: Value, out: Value, doubled: Value) -> None:
        value = b.load(x)
        b.store(b.transpose_view(out, perm=(1, 0)), value)
        b.store(b.transpose_view(doubled, perm=(1, 0)), b.add(value, value))

    kernel = with_refs(emit, [x], [TileType((36, 40), F32)] * 2)
    transposed, doubled = run(kernel, x)
    np.testing.assert_array_equal(transposed, x.T)
    np.testing.assert_array_equal(doubled, 2 * x.T)
    assert "scatter" not in llvm_of(kernel)


def test_turning_in_place():
    x = some(33, 33)
    transpose = lambda b, x, out: b.store(out, b.transpose(b.load(out), perm=(1, 0)))
    kernel = with_refs(transpose, [x], [TileType((33, 33), F32)], [(0, 0)])
    np.testing.assert_array_equal(run(kernel, x)[0], x.T)


# --- steps ---


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.bfloat16, np.float64])
def test_steps(host, dtype):
    x = some(3, 101, dtype=dtype)
    steps = (2, 3, 4, 5)

    def emit(b: Builder, x: Value):
        yield b.rev(x, axes=(1,))
        for n in steps:
            part = b.slice(x, starts=(0, 1), limits=(3, 101), strides=(1, n))
            yield part
            yield b.rev(part, axes=(0, 1))

    def want(x):
        parts = [x[:, 1::n] for n in steps]
        return [x[:, ::-1], *(p for q in parts for p in (q, q[::-1, ::-1]))]

    check(emit, [x], want)


# --- joined ---


def test_joined_tiles(host):
    x, y = some(5, 33), some(5, 20)

    def emit(b: Builder, x: Value, y: Value):
        beside = b.concatenate(x, y, x, axis=1)
        around = b.concatenate(beside, b.add(beside, beside), axis=0)
        cut = b.slice(
            b.concatenate(y, x, axis=1), starts=(1, 15), limits=(4, 50), strides=(1, 1)
        )
        odd = b.slice(
            b.concatenate(y, x, axis=1), starts=(1, 15), limits=(4, 50), strides=(2, 3)
        )
        return [b.concatenate(y, y, axis=1), around, b.neg(cut), cut, odd]

    def want(x, y):
        beside, both = np.hstack([x, y, x]), np.hstack([y, x])
        cut = both[1:4, 15:50]
        around = np.vstack([beside, 2 * beside])
        return [np.hstack([y, y]), around, -cut, cut, both[1:4:2, 15:50:3]]

    check(emit, [x, y], want)


@pytest.mark.parametrize("interior", [0, 1])
def test_padded_tiles(interior):
    x = some(6, 19)
    sides = [
        ((2, 0), (0, 3)),
        ((0, 17), (1, 0)),
        ((-2, 1), (1, -4)),
        ((3, -9), (-8, 2)),
    ]

    def emit(b: Builder, x: Value):
        for low, high in sides:
            inside = dict(low=low, high=high, interior=(0, interior))
            yield b.pad(x, b.constant(7.0, TileType((), F32)), **inside)
            twice = b.pad(b.add(x, x), b.constant(7.0, TileType((), F32)), **inside)
            yield b.slice(twice, starts=(1, 1), limits=twice.tile.shape, strides=(1, 1))

    def padded(x, low, high):
        wide = np.full((6, 19 + 18 * interior), 7.0, np.float32)
        wide[:, :: 1 + interior] = x
        for d in range(2):
            wide = np.moveaxis(wide, d, 0)
            for n, end in ((low[d], 0), (high[d], 1)):
                more = np.full((max(n, 0), *wide.shape[1:]), 7.0, np.float32)
                wide = np.concatenate([wide, more] if end else [more, wide])
                wide = wide[: len(wide) + min(n, 0)] if end else wide[max(-n, 0) :]
            wide = np.moveaxis(wide, 0, d)
        return wide

    def want(x):
        for low, high in sides:
            yield padded(x, low, high)
            yield padded(2 * x, low, high)[1:, 1:]

    check(emit, [x], lambda x: list(want(x)))


def test_rows_padded_and_used_at_once(host):
    """Whole rows before and after: a sum is one loop, and nothing is stored first."""
    x = some(5, 6, 19)

    def padded(b: Builder, x: Value, low: int, high: int, d: int) -> Value:
        sides = {"low": low, "high": high, "interior": 0}
        sides = {
            k: tuple(n if d == e else 0 for e in range(3)) for k, n in sides.items()
        }
        return b.pad(x, b.constant(7.0, TileType((), F32)), **sides)

    def emit(b: Builder, x: Value):
        shifted = [padded(b, b.neg(x), n, -n, 0) for n in (0, 1, 3, -2, 6)]
        yield functools.reduce(b.add, shifted)
        wide = padded(b, padded(b, x, 2, 1, 1), 1, 0, 0)
        yield b.mul(wide, wide)
        yield b.transpose(b.neg(padded(b, x, 2, 1, 1)), perm=(0, 2, 1))
        yield b.concatenate(
            b.neg(padded(b, b.concatenate(x, x, axis=0), 1, 0, 1)), axis=0
        )

    def want(x):
        def shift(n):
            pad = [(max(n, 0), max(-n, 0)), (0, 0), (0, 0)]
            wide = np.pad(-x, pad, constant_values=7.0)
            return wide[:5] if n >= 0 else wide[-5:]

        yield functools.reduce(np.add, [shift(n) for n in (0, 1, 3, -2, 6)])
        around = lambda x, *sides: np.pad(x, sides, constant_values=7.0)
        yield around(x, (1, 0), (2, 1), (0, 0)) ** 2
        yield -around(x, (0, 0), (2, 1), (0, 0)).swapaxes(1, 2)
        yield -around(np.concatenate([x, x]), (0, 0), (1, 0), (0, 0))

    check(emit, [x], lambda x: list(want(x)))
    add = lambda b, x: b.add(x, padded(b, x, 1, -1, 0))
    assert not _places_in_arena(tiles_kernel(add, [x]))


def test_joined_parts_of_memory_that_changes():
    """What is joined is what the parts were then, also where the result goes."""
    x = some(4, 40)

    def emit(b: Builder, x: Value, out: Value, moved: Value, masked: Value) -> None:
        half = lambda at: b.load(out, (Span(0, 4), Span(at, 20)))
        swapped = b.concatenate(half(20), half(0), axis=1)
        around = b.concatenate(half(10), half(20), axis=1)
        some = b.concatenate(half(20), half(0), axis=1)
        b.store(out, swapped)
        b.store(moved, around)
        b.store(masked, b.load(x))
        b.store(masked, some, mask=b.constant(True, TileType((4, 40), BOOL)))

    kernel = with_refs(emit, [x], [TileType(x.shape, F32)] * 3, [(0, 0)])
    out, moved, masked = run(kernel, x)
    np.testing.assert_array_equal(out, np.roll(x, 20, 1))
    np.testing.assert_array_equal(moved, np.hstack([x[:, 10:30], x[:, 20:]]))
    np.testing.assert_array_equal(masked, np.roll(x, 20, 1))


def test_what_is_only_stored_has_no_buffer_of_its_own():
    x = some(8, 64)
    join = lambda b, v: b.concatenate(v, b.neg(v), axis=1)
    assert not _places_in_arena(tiles_kernel(join, [x]))
    assert _places_in_arena(tiles_kernel(lambda b, v: b.neg(join(b, v)), [x]))


def _places_in_arena(kernel: Kernel) -> list[str]:
    body = llvm_of(kernel).split("@kernel(")[1].split("\n}")[0]
    return [line for line in body.splitlines()[1:] if "%arena" in line]


# --- joined, and computed with ---


def joins_agree(x) -> None:
    """Rolled along each dimension; parts end in the middle of vectors."""
    for axis, n in enumerate(x.shape):
        first = n // 2

        def function(b, v, axis=axis, first=first, n=n):
            limits = lambda high: tuple(
                high if d == axis else m for d, m in enumerate(x.shape)
            )
            start = tuple(first * (d == axis) for d in range(x.ndim))
            zeros, ones = (0,) * x.ndim, (1,) * x.ndim
            later = b.slice(v, starts=start, limits=x.shape, strides=ones)
            sooner = b.slice(v, starts=zeros, limits=limits(first), strides=ones)
            sooner = b.max(sooner, sooner)  # one that is computed
            return b.max(v, b.op("concatenate", later, sooner, axis=axis))

        if first:
            want = [np.maximum(x, np.roll(x, -first, axis))]
            check(function, [x], lambda x, want=want: want)


@pytest.mark.parametrize("shape", [(5, 37), (1, 130), (4, 3, 33)])
def test_parts_that_are_computed_with(shape, host):
    joins_agree(some(*shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_every_type_that_are_computed_with(dtype):
    joins_agree(some(6, 41, dtype=dtype))


@pytest.mark.parametrize("shape", [(5, 37), (1, 130), (4, 3, 33)])
def test_padded_parts_that_are_computed_with(shape, host):
    x, wide = some(*shape), some(*(n + 1 for n in shape))
    for low in (2, -1):
        low = tuple(max(low, 1 - n) for n in shape)
        high = tuple(1 - a for a in low)

        def function(b, v, w, low=low, high=high):
            value = b.constant(7.0, TileType((), F32))
            zeros = (0,) * len(low)
            padded = b.op("pad", v, value, low=low, high=high, interior=zeros)
            return b.add(padded, w)

        pairs = [*zip(low, high, strict=True)]
        cut = lambda n, a, z: slice(max(-a, 0), n + min(z, 0))
        kept = tuple(cut(n, *pair) for n, pair in zip(shape, pairs, strict=True))
        edges = [(max(a, 0), max(z, 0)) for a, z in pairs]
        want = [np.pad(x[kept], edges, constant_values=7) + wide]
        check(function, [x, wide], lambda v, w, want=want: want)
