"""Every elementwise row on every element type the backend has, against its meaning."""

import ml_dtypes
import numpy as np
import pytest

from pallasite.backends import base
from pallasite.ir.opdef import OpDef, table
from pallasite.ir.types import DTYPES, DType
from tests.backends.cpu.running import compute

NAMES = ["bool", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"]
NAMES += ["bf16", "f16", "f32", "f64"]
SUPPORTED = [DTYPES[name] for name in NAMES]
ROWS = [row for row in table().values() if row.elementwise]
SPECIAL = ("select_n", "cast", "bitcast")
ATTRS = {
    "integer_pow": [dict(y=y) for y in (-3, -1, 0, 1, 2, 7)],
    "round": [dict(rounding_method=n) for n in (0, 1)],
    "reduce_precision": [
        dict(exponent_bits=e, mantissa_bits=m) for e, m in ((5, 10), (8, 7), (4, 3))
    ],
}
SIZE = 211


def specials(dtype: DType) -> np.ndarray:
    """Zeros, ones, extremes, NaN and infinities; no denormals, which XLA flushes."""
    if dtype.is_bool:
        return np.array([False, True])
    if dtype.is_float:
        largest = float(ml_dtypes.finfo(dtype.np).max)
        numbers = [0.0, 0.5, 1.0, 1.5, 2.5, 3.0, largest, np.inf]
        return np.array([s * x for x in numbers for s in (1, -1)] + [np.nan], dtype.np)
    info = ml_dtypes.iinfo(dtype.np)
    numbers = {0, 1, 2, 3, dtype.bits - 1, dtype.bits, int(info.max), int(info.min)}
    if dtype.is_signed_int:
        numbers |= {-1, -2, -dtype.bits}
    return np.array(sorted(numbers), dtype.np)


def samples(rng: np.random.Generator, row: OpDef, dtype: DType) -> np.ndarray:
    low, high = row.domain or (-100.0, 100.0)
    if dtype.is_bool:
        return rng.integers(0, 2, SIZE).astype(bool)
    if dtype.is_float:
        return rng.uniform(low, high, SIZE).astype(dtype.np)
    low = max(low, 0 if dtype.kind == "uint" else -(2 ** (dtype.bits - 1)))
    return rng.integers(int(low), int(high) + 1, SIZE).astype(dtype.np)


def operands(rng: np.random.Generator, row: OpDef, dtype: DType) -> list[np.ndarray]:
    arity = row.arity or 1
    columns = [samples(rng, row, dtype) for _ in range(arity)]
    exact = row.max_ulp == 0 or not dtype.is_float
    if exact and row.name not in ("pow", "integer_pow"):
        grids = np.meshgrid(*[specials(dtype)] * arity)
        columns = [
            np.concatenate([c, g.ravel()])
            for c, g in zip(columns, grids, strict=True)
        ]
    return columns


def assert_close(got: np.ndarray, want: np.ndarray, dtype: DType, max_ulp: float):
    assert got.dtype == want.dtype and got.shape == want.shape
    if not dtype.is_float:
        np.testing.assert_array_equal(got, want)
        return
    info = ml_dtypes.finfo(dtype.np)
    a, b = got.astype(np.float64), want.astype(np.float64)
    smallest = float(info.smallest_normal)
    _, exponent = np.frexp(np.where(np.isfinite(b), b, 1.0))
    ulp = np.maximum(np.ldexp(1.0, exponent - 1 - info.nmant), smallest)
    with np.errstate(invalid="ignore"):
        close = np.abs(a - b) <= max_ulp * ulp
    flushed = (np.abs(b) < smallest) & (a == 0)
    good = close | flushed | (a == b) | (np.isnan(a) & np.isnan(b))
    where = np.flatnonzero(~good)[:5]
    assert good.all(), f"got {a[where]}, want {b[where]} at {where}"


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.name not in SPECIAL], ids=lambda row: row.name
)
def test_row_follows_its_meaning(row: OpDef):
    rng = np.random.default_rng(0)
    dtypes = [d for d in SUPPORTED if d in row.dtypes]
    variants = ATTRS.get(row.name, [{}])
    arrays = {d: operands(rng, row, d) for d in dtypes}
    if row.name == "pow":
        for d in dtypes:
            if not d.is_float:
                arrays[d][1] = np.clip(arrays[d][1], 0, 6)

    def emit(b, *tiles):
        pending = iter(tiles)
        grouped = [[next(pending) for _ in arrays[d]] for d in dtypes]
        return [b.op(row.name, *group, **v) for group in grouped for v in variants]

    results = compute(emit, *(a for d in dtypes for a in arrays[d]))
    results = iter(results if isinstance(results, list) else [results])
    for d in dtypes:
        for attrs in variants:
            with np.errstate(all="ignore"):
                want = np.asarray(row.meaning(*arrays[d], **attrs))
            got = next(results)
            try:
                result = DTYPES["bool"] if want.dtype == bool else d
                assert_close(got, want, result, row.max_ulp)
            except AssertionError as error:
                raise AssertionError(f"{row.name} {d} {attrs}: {error}") from None


@pytest.mark.parametrize("source", SUPPORTED, ids=str)
def test_cast_follows_its_meaning(source: DType):
    rng = np.random.default_rng(1)
    row = table()["cast"]
    x = np.concatenate([samples(rng, row, source), specials(source)])
    if source.is_float:
        wide = rng.normal(size=SIZE) * 10.0 ** rng.integers(-4, 12, SIZE)
        with np.errstate(over="ignore"):
            x = np.concatenate([x, wide.astype(source.np)])
    targets = [d for d in SUPPORTED if d != source]
    results = compute(lambda b, t: [b.op("cast", t, dtype=d) for d in targets], x)
    for target, got in zip(targets, results, strict=True):
        with np.errstate(all="ignore"):
            want = row.meaning(x, dtype=target)
        # Through f32 on the way to 16 bits: rounded twice, as XLA's CPU code does.
        assert_close(got, want, target, 1 if target.bits == 16 else 0)


@pytest.mark.parametrize(
    ("source", "target"),
    [("f32", "i32"), ("i32", "f32"), ("bf16", "u16"), ("u16", "bf16"), ("f16", "i16")]
    + [("i16", "f16"), ("f64", "u64"), ("i64", "f64"), ("u8", "i8")],
)
def test_bitcast_keeps_the_bits(source: str, target: str):
    rng = np.random.default_rng(2)
    s, t = DTYPES[source], DTYPES[target]
    x = rng.integers(0, 256, (37, s.bytes), np.uint8).view(s.np)[:, 0]
    if s.is_float or t.is_float:  # NaN payloads are not kept by every conversion
        x = np.where(np.isnan(x.view((s if s.is_float else t).np)), s.np.type(0), x)
    got = compute(lambda b, v: b.op("bitcast", v, dtype=t), x)
    np.testing.assert_array_equal(got, x.view(t.np))


@pytest.mark.parametrize(
    ("source", "target"), [("u32", "u8"), ("f32", "u16"), ("i64", "i32")]
)
def test_bitcast_changes_width(source: str, target: str):
    s, t = DTYPES[source], DTYPES[target]
    x = np.arange(6 * s.bytes, dtype=np.uint8).view(s.np).reshape(2, 3)
    got = compute(lambda b, v: b.op("bitcast", v, dtype=t), x)
    want = x.view(t.np).reshape(2, 3, -1)
    np.testing.assert_array_equal(got, want)
    back = compute(lambda b, v: b.op("bitcast", v, dtype=s), want)
    np.testing.assert_array_equal(back, x)


def test_select_n_by_bool_and_by_number():
    rng = np.random.default_rng(3)
    cases = [rng.normal(size=(4, 5)).astype(np.float32) for _ in range(3)]
    mask = rng.integers(0, 2, (4, 5)).astype(bool)
    number = rng.integers(-2, 5, (4, 5)).astype(np.int32)
    got = compute(lambda b, *v: b.select_n(*v), mask, *cases[:2])
    np.testing.assert_array_equal(got, np.where(mask, cases[1], cases[0]))
    got = compute(lambda b, *v: b.select_n(*v), number, *cases)
    np.testing.assert_array_equal(got, np.choose(np.clip(number, 0, 2), cases))
    scalar = np.asarray(True)
    got = compute(lambda b, *v: b.select_n(*v), scalar, *cases[:2])
    np.testing.assert_array_equal(got, cases[1])


def test_clamp_takes_scalar_bounds():
    x = np.array([-5.0, 0.0, 5.0, np.nan], np.float32)
    bounds = [np.float32(-1), np.float32(2)]
    got = compute(lambda b, lo, v, hi: b.clamp(lo, v, hi), bounds[0], x, bounds[1])
    np.testing.assert_array_equal(got, [-1, 0, 2, np.nan])


def test_scalars_are_computed_in_registers():
    got = compute(lambda b, x, y: b.add(b.mul(x, y), x), np.float32(3), np.float32(4))
    assert got == 15


def test_integers_never_trap():
    x = np.array([7, -7, 0, -(2**31)], np.int32)
    y = np.array([0, 0, 0, -1], np.int32)
    got = compute(lambda b, a, c: [b.div(a, c), b.rem(a, c)], x, y)
    np.testing.assert_array_equal(got[0], [-1, -1, -1, -(2**31)])
    np.testing.assert_array_equal(got[1], [7, -7, 0, 0])


def test_every_elementwise_row_is_native():
    assert {row.name for row in ROWS} <= base.get("cpu").native
