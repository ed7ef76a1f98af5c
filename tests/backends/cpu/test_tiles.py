"""Ops on whole tiles against numpy: shapes, reductions, scans, dot."""

import ml_dtypes
import numpy as np
import pytest

from pallasite import target
from pallasite.ir.types import BF16, DTYPES, F32, F64, I32, TileType
from tests.backends.cpu.running import compute, llvm_of, tiles_kernel

RNG = np.random.default_rng(0)
F32_NP, BF16_NP = np.float32, ml_dtypes.bfloat16


def normal(*shape: int, dtype=np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got, want)


# --- shapes ---


def test_constant_and_iota():
    shape = TileType((3, 5), I32)
    got = compute(
        lambda b: [
            b.constant(7, shape),
            b.op("iota", type=shape, dim=0),
            b.op("iota", type=TileType((3, 5), F32), dim=1),
        ]
    )
    same(got[0], np.full((3, 5), 7, np.int32))
    same(got[1], np.broadcast_to(np.arange(3, dtype=np.int32)[:, None], (3, 5)))
    same(got[2], np.broadcast_to(np.arange(5, dtype=np.float32), (3, 5)))


def test_broadcast_of_rows_columns_and_scalars():
    x, s = normal(3, 1), F32_NP(2.5)
    same(compute(lambda b, v: b.broadcast(v, (3, 4), (0, 1)), x), np.tile(x, (1, 4)))
    want = np.broadcast_to(x.reshape(3, 1, 1), (3, 2, 4))
    same(compute(lambda b, v: b.broadcast(v, (3, 2, 4), (0, 2)), x), want)
    same(compute(lambda b, v: b.broadcast(v, (2, 3)), s), np.full((2, 3), s))


@pytest.mark.parametrize("shape", [(12,), (4, 3), (2, 6), (2, 1, 2, 3), (1, 12, 1)])
@pytest.mark.parametrize("lazy", [False, True])
def test_reshape(shape: tuple[int, ...], lazy: bool):
    x = normal(3, 4)

    def emit(b, v):
        v = b.transpose(b.neg(v) if lazy else v, perm=(1, 0))
        return b.reshape(v, shape=shape)

    same(compute(emit, x), (-x if lazy else x).T.reshape(shape))


def test_transpose_of_three_dimensions():
    x = normal(2, 3, 4)
    same(compute(lambda b, v: b.transpose(v, perm=(2, 0, 1)), x), x.transpose(2, 0, 1))
    same(
        compute(lambda b, v: b.transpose(b.exp2(v), perm=(1, 2, 0)), np.round(x)),
        np.exp2(np.round(x)).transpose(1, 2, 0),
    )


def test_slice_with_strides_and_rev():
    x = normal(7, 9)
    attrs = dict(starts=(1, 0), limits=(7, 8), strides=(2, 3))
    same(compute(lambda b, v: b.slice(v, **attrs), x), x[1:7:2, 0:8:3])
    same(compute(lambda b, v: b.rev(v, axes=(0,)), x), x[::-1])
    same(compute(lambda b, v: b.rev(b.abs(v), axes=(0, 1)), x), np.abs(x)[::-1, ::-1])


def test_concatenate_of_three_parts():
    parts = [normal(2, n, 3) for n in (1, 4, 2)]
    same(
        compute(lambda b, *v: b.concatenate(*v, axis=1), *parts),
        np.concatenate(parts, 1),
    )


@pytest.mark.parametrize(
    ("low", "high", "interior"),
    [
        ((1, 2), (3, 0), (0, 0)),
        ((0, 1), (0, 1), (2, 1)),
        ((-1, 0), (-1, 2), (0, 0)),
        ((-3, 1), (2, -4), (1, 2)),
    ],
)
def test_pad(low, high, interior):
    import jax

    x, value = normal(4, 5), F32_NP(9)
    attrs = dict(low=low, high=high, interior=interior)
    got = compute(lambda b, v, p: b.pad(v, p, **attrs), x, value)
    config = list(zip(low, high, interior, strict=True))
    same(got, np.asarray(jax.lax.pad(x, value, config)))


@pytest.mark.parametrize("start", [(0, 0), (2, 3), (-5, 100), (1, -1)])
def test_dynamic_slices_are_clamped(start: tuple[int, int]):
    x, update = normal(5, 6), normal(2, 4)
    where = [np.int32(s) for s in start]
    i, j = (max(0, min(s, m)) for s, m in zip(start, (3, 2), strict=True))
    got = compute(lambda b, v, *s: b.dynamic_slice(v, *s, sizes=(2, 4)), x, *where)
    same(got, x[i : i + 2, j : j + 4])
    got = compute(
        lambda b, v, u, *s: b.dynamic_update_slice(v, u, *s), x, update, *where
    )
    want = x.copy()
    want[i : i + 2, j : j + 4] = update
    same(got, want)


def test_empty_tiles():
    x = normal(0, 4)
    same(compute(lambda b, v: b.neg(v), x), x)
    same(
        compute(lambda b, v: b.reduce(v, kind="sum", axes=(0,)), x),
        np.zeros(4, np.float32),
    )


# --- reductions ---

REDUCTIONS = {
    "sum": np.sum,
    "prod": np.prod,
    "max": np.max,
    "min": np.min,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_reduce_floats(kind: str, axes: tuple[int, ...]):
    x = normal(3, 4, 17)
    got = compute(lambda b, v: b.reduce(v, kind=kind, axes=axes), x)
    want = REDUCTIONS[kind](x.astype(np.float64), axis=axes).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("name", ["i8", "u32", "i64"])
def test_reduce_integers(kind: str, name: str):
    dtype = DTYPES[name].np
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max, (5, 6), dtype, endpoint=True)
    for axis in (0, 1):
        got = compute(lambda b, v: b.reduce(v, kind=kind, axes=(axis,)), x)
        if kind in ("sum", "prod"):
            want = REDUCTIONS[kind](x, axis=axis, dtype=dtype)
        else:
            want = REDUCTIONS[kind](x, axis=axis)
        same(got, want)


def test_reduce_bools():
    x = RNG.integers(0, 2, (4, 6)).astype(bool)
    for kind, want in (("and", x.all(1)), ("or", x.any(1)), ("max", x.any(1))):
        same(compute(lambda b, v: b.reduce(v, kind=kind, axes=(1,)), x), want)


def test_reduce_propagates_nan():
    x = normal(3, 8)
    x[1, 5] = np.nan
    got = compute(lambda b, v: b.reduce(v, kind="max", axes=(1,)), x)
    np.testing.assert_array_equal(np.isnan(got), [False, True, False])


def test_bf16_sums_are_kept_in_f32():
    x = np.ones((2, 1000), BF16_NP)
    for axes, data in (((1,), x), ((0,), x.T.copy())):
        got = compute(lambda b, v: b.reduce(v, kind="sum", axes=axes), data)
        same(got, np.full(2, 1000, BF16_NP))


@pytest.mark.parametrize("name", ["f32", "bf16", "f64", "i32", "u8", "bool"])
def test_arg_reduce_takes_the_first_best(name: str):
    dtype = DTYPES[name]
    x = RNG.integers(0, 7, (9, 37)).astype(dtype.np)
    if dtype.is_float:
        x[3, 3] = x[5, 3] = x[5, 30] = np.nan
        x[0], x[1, 4:] = -np.inf, np.inf
    cases = [(pick, axis) for pick in ("max", "min") for axis in (0, 1)]
    every = lambda b, v: [
        b.arg_reduce(v, kind=kind, axis=axis, dtype=I32) for kind, axis in cases
    ]
    for (kind, axis), got in zip(cases, compute(every, x), strict=True):
        pick = {"max": np.argmax, "min": np.argmin}[kind]
        wide = x.astype(np.float64)
        same(got, pick(wide, axis).astype(np.int32))


SCANS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def scanned(x: np.ndarray, kind: str, axis: int, reverse: bool) -> np.ndarray:
    """numpy's scan, in f64 where elements are floats."""
    wide = x if x.dtype.kind in "iu" else x.astype(np.float64)
    flip = (lambda v: np.flip(v, axis)) if reverse else (lambda v: v)
    scan = SCANS.get(kind, np.logaddexp).accumulate
    with np.errstate(invalid="ignore"):
        return flip(scan(flip(wide), axis=axis, dtype=wide.dtype))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [*SCANS, "logsumexp"])
def test_scan(kind: str, reverse: bool):
    x = normal(3, 5, 37)  # full vectors and a part of one
    x[1, 2, 20] = np.nan if kind in ("max", "logsumexp") else 0.5
    x[0, 0, 3] = -np.inf if kind in ("min", "logsumexp") else 0.5
    every = lambda b, v: [
        b.scan(v, kind=kind, axis=axis, reverse=reverse) for axis in range(3)
    ]
    for axis, got in enumerate(compute(every, x)):
        want = scanned(x, kind, axis, reverse)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["i8", "u16", "i64", "bf16", "f64"])
def test_scan_types(name: str):
    dtype = DTYPES[name].np
    # Of bf16, numbers whose sums it does not hold: they are kept in f32.
    x = RNG.integers(0, 9, (7, 33)).astype(dtype)
    cases = [(0, "sum"), (1, "sum"), (1, "max")]
    every = lambda b, v: [
        b.scan(v, kind=kind, axis=axis, reverse=False) for axis, kind in cases
    ]
    for (axis, kind), got in zip(cases, compute(every, x), strict=True):
        same(got, scanned(x, kind, axis, False).astype(dtype))


def test_scans_of_few_elements_and_lanes():
    """One element, none at all, what is the same everywhere; vectors of four lanes."""
    with target.using(target.SSE):
        for shape, axis in (((1, 1), 0), ((3, 1), 1), ((0, 4), 0), ((9, 5, 1), 1)):
            attrs = dict(kind="sum", axis=axis, reverse=True)
            x = normal(*shape)
            got = compute(lambda b, v, a=attrs: b.scan(v, **a), x)
            want = scanned(x, "sum", axis, True)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    count = lambda b, v: b.scan(b.like(1.0, v), kind="sum", axis=0, reverse=False)
    same(compute(count, normal(21)), np.arange(1, 22, dtype=np.float32))


# --- dot ---


def dot(b, x, y, contract, batch=((), ()), dtype=F32):
    return b.op(
        "dot", x, y, contract=contract, batch=batch, dtype=dtype, precision=None
    )


@pytest.mark.parametrize(
    ("x_shape", "y_shape", "contract", "batch", "equation"),
    [
        ((5, 7), (7, 9), ((1,), (0,)), ((), ()), "ik,kj->ij"),
        ((5, 7), (9, 7), ((1,), (1,)), ((), ()), "ik,jk->ij"),
        ((7, 5), (7, 9), ((0,), (0,)), ((), ()), "ki,kj->ij"),
        ((2, 5, 7), (2, 7, 9), ((2,), (1,)), ((0,), (0,)), "bik,bkj->bij"),
        ((5, 2, 7), (9, 7, 2), ((2,), (1,)), ((1,), (2,)), "ibk,jkb->bij"),
        ((3, 4, 5), (4, 5, 6), ((1, 2), (0, 1)), ((), ()), "iab,abj->ij"),
        ((7,), (7,), ((0,), (0,)), ((), ()), "k,k->"),
        ((4, 7), (7,), ((1,), (0,)), ((), ()), "ik,k->i"),
        ((3,), (4,), ((), ()), ((), ()), "i,j->ij"),
    ],
)
def test_dot_layouts(x_shape, y_shape, contract, batch, equation):
    x, y = normal(*x_shape), normal(*y_shape)
    got = compute(lambda b, u, v: dot(b, u, v, contract, batch), x, y)
    want = np.einsum(equation, x, y)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("operand", "result"),
    [
        *(("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32"), ("f64", "f64")),
        *(("i8", "i32"), ("u8", "i32"), ("i32", "i32"), ("f8e4m3fn", "f32")),
    ],
)
def test_dot_types(operand: str, result: str):
    source, target = DTYPES[operand], DTYPES[result]
    if source.is_float:
        x, y = normal(6, 33).astype(source.np), normal(33, 8).astype(source.np)
    else:
        low = 0 if source.kind == "uint" else -100
        x, y = (RNG.integers(low, 100, s).astype(source.np) for s in ((6, 33), (33, 8)))
    got = compute(lambda b, u, v: dot(b, u, v, ((1,), (0,)), dtype=target), x, y)
    want = x.astype(np.float64) @ y.astype(np.float64)
    assert got.dtype == target.np
    exact = not source.is_float
    tolerance = 0 if exact else {"bf16": 1e-2, "f64": 1e-12}.get(result, 1e-5)
    np.testing.assert_allclose(got.astype(np.float64), want, tolerance, 10 * tolerance)


def test_dot_of_computed_operands():
    x, y = normal(4, 6), normal(6, 5)
    got = compute(lambda b, u, v: dot(b, b.exp(u), b.neg(v), ((1,), (0,))), x, y)
    np.testing.assert_allclose(got, np.exp(x) @ -y, rtol=1e-5, atol=1e-5)


# --- what is stored and what is not ---


def test_a_chain_of_elementwise_ops_is_one_loop():
    kernel = tiles_kernel(lambda b, v: b.exp(b.neg(b.mul(v, v))), [normal(64)])
    kernel_code = llvm_of(kernel).split("define")[1]
    assert kernel_code.count("phi i64") == 1


def test_a_shared_tile_is_computed_once():
    def emit(b, v):
        e = b.exp(v)
        return b.add(b.mul(e, e), b.reshape(b.reshape(e, shape=(64,)), shape=(8, 8)))

    x = normal(8, 8)
    # exp limits its operand by selects; nothing else here has any.
    once = llvm_of(tiles_kernel(lambda b, v: b.exp(v), [x])).count(" select ")
    assert llvm_of(tiles_kernel(emit, [x])).count(" select ") == once > 0
    np.testing.assert_allclose(compute(emit, x), np.exp(x) ** 2 + np.exp(x), rtol=1e-5)


def test_scratch_is_reused_when_its_tile_is_dead():
    def emit(b, v):
        for _ in range(20):
            v = b.add(b.exp(v), b.rev(v, axes=(0,)))
        return v

    text = llvm_of(tiles_kernel(emit, [np.zeros(1024, np.float32)]))
    size = int(text.split("@malloc(i64 ")[1].split(")")[0])
    assert size <= 5 * 4096


def test_long_chains_are_cut_and_powers_of_powers_are_not_repeated():
    x = np.full(16, 1.0, np.float32)

    def emit(b, v, w):
        for _ in range(500):
            v = b.add(v, b.neg(w))
        for _ in range(60):
            v = b.mul(v, v)
        return v

    kernel = tiles_kernel(emit, [x, x])
    assert len(llvm_of(kernel).splitlines()) < 3000
    np.testing.assert_array_equal(compute(emit, x, 0 * x), x)


def test_f64_and_bf16_meet_in_casts():
    x = normal(10, dtype=np.float64)
    got = compute(lambda b, v: b.cast(b.cast(v, BF16), F64), x)
    same(got, x.astype(BF16_NP).astype(np.float64))
