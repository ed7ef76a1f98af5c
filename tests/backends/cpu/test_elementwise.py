"""Every elementwise row on every element type the backend has, against its meaning."""

import jax
import numpy as np
import pytest

from pallasite.backends import base
from pallasite.ir.opdef import OpDef, table
from pallasite.ir.types import DTYPES, DType
from tests.backends.cpu.direct import Code
from tests.backends.cpu.running import compute, run, tiles_kernel
from tests.fuzz.agreement import run_numpy
from tests.ops.sampling import (
    FLOAT_NAMES,
    INT_NAMES,
    attr_choices,
    result_dtype,
    rows_with,
    samples,
    special_operands,
    special_values,
    ulp_error,
)
from tests.xla import USUAL

SUPPORTED = [DTYPES[name] for name in ("bool", *INT_NAMES, *FLOAT_NAMES)]
TYPED = ("select_n", "cast", "bitcast")  # their rules differ; tested below
ROWS = [row for row in rows_with("meaning") if row.name not in TYPED]


def operands_of(row: OpDef, dtype: DType) -> list[np.ndarray]:
    drawn, special = samples(row, dtype, 200), special_operands(row, dtype)
    return [np.concatenate(pair) for pair in zip(drawn, special, strict=True)]


def assert_close(got: np.ndarray, want: np.ndarray, dtype: DType, max_ulp: float):
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    error = ulp_error(got, want, dtype)
    worst = int(np.argmax(error))
    assert error[worst] <= max_ulp, (
        f"{error[worst]} ulp at {worst}: got {got[worst]}, want {want[worst]}"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_follows_its_meaning(row: OpDef):
    dtypes = [d for d in SUPPORTED if d in row.dtypes]
    operands = {d: operands_of(row, d) for d in dtypes}
    cases = [(d, attrs) for d in dtypes for attrs in attr_choices(row.name, d)]

    def emit(b, *tiles):
        pending = iter(tiles)
        grouped = {d: [next(pending) for _ in operands[d]] for d in dtypes}
        return [b.op(row.name, *grouped[d], **attrs) for d, attrs in cases]

    results = compute(emit, *(x for d in dtypes for x in operands[d]))
    results = results if isinstance(results, list) else [results]
    for (dtype, attrs), got in zip(cases, results, strict=True):
        arity = len(operands[dtype])
        with np.errstate(all="ignore"):
            want = np.asarray(row.meaning(*operands[dtype], **attrs))
        try:
            result = result_dtype(row, dtype, arity, attrs)
            assert_close(got, want, result, row.max_ulp)
        except AssertionError as error:
            at = int(str(error).split(" at ")[-1].split(":")[0])
            values = [x[at] for x in operands[dtype]]
            what = f"{row.name}{tuple(values)} {dtype} {attrs}"
            raise AssertionError(f"{what}: {error}") from None


@pytest.mark.parametrize("source", SUPPORTED, ids=str)
def test_cast_follows_its_meaning(source: DType):
    row = table()["cast"]
    x = np.concatenate([samples(row, source, 200)[0], special_values(source)])
    if source.is_float:
        limits = [
            2.0**n + d for n in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, 0, 1)
        ]
        with np.errstate(over="ignore"):
            x = np.concatenate(
                [x, *(np.array(limits).astype(source.np) * s for s in (1, -1))]
            )
    targets = [d for d in SUPPORTED if d != source]
    results = compute(lambda b, t: [b.op("cast", t, dtype=d) for d in targets], x)
    for target, got in zip(targets, results, strict=True):
        with np.errstate(all="ignore"):
            want = row.meaning(x, dtype=target)
        # Through f32 on the way to 16 bits: rounded twice, as XLA's CPU code does.
        assert_close(got, want, target, 1 if target.bits == 16 else 0)


EIGHT_BITS = [d for d in DTYPES.values() if d.name.startswith("f8") and d.bits == 8]
EIGHT_BITS = [d for d in EIGHT_BITS if d.name != "f8e8m0fnu"]
TINY = [DTYPES["f4e2m1fn"], DTYPES["f8e8m0fnu"]]


def around(numbers: np.ndarray) -> np.ndarray:
    """Numbers, what is halfway between them, and what is next to that, either sign."""
    halfway = (numbers[1:].astype("f8") + numbers[:-1]) / 2
    points = np.concatenate([numbers, halfway]).astype("f4")
    near = [np.nextafter(points, np.float32(s)) for s in (-np.inf, np.inf)]
    every = np.concatenate([points, *near])
    return np.concatenate([every, -every])


@pytest.mark.parametrize("dtype", TINY, ids=str)
def test_4_bit_floats_and_powers_of_two_convert_bit_for_bit(dtype: DType):
    numbers = np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.np)
    widened = compute(lambda b, t: b.op("cast", t, dtype=DTYPES["f32"]), numbers)
    np.testing.assert_array_equal(widened, numbers.astype(np.float32))
    copied = compute(lambda b, t: t, numbers)
    np.testing.assert_array_equal(copied.view("u1"), numbers.view("u1"))
    spread = np.arange(0, 2**32, 2**16 - 15, np.uint64).astype(np.uint32).view("f4")
    ends = np.array([0, 2**-149, 2**-127, 3e38, np.inf, np.nan], "f4")
    ordered = np.unique(widened[np.isfinite(widened)])
    x = np.concatenate([around(ordered), spread, ends, -ends[:-1]])
    got = compute(lambda b, t: b.op("cast", t, dtype=dtype), x)
    convert = jax.jit(lambda v: v.astype(dtype.np), compiler_options=USUAL)
    want = np.asarray(convert(x))
    np.testing.assert_array_equal(got.view("u1"), want.view("u1"))
    with np.errstate(all="ignore"):
        numpys = x.astype(dtype.np).view("u1")
    # XLA gives both NaNs the same four bits.
    same = (numpys == want.view("u1")) | (np.isnan(x) & np.signbit(x))
    assert same.all()


@pytest.mark.parametrize("dtype", TINY, ids=str)
def test_arithmetic_of_4_bit_floats_and_powers_of_two(dtype: DType):
    numbers = np.arange(1 << dtype.bits, dtype=np.uint8)
    if dtype.bits == 8:  # XLA's threads flush what is subnormal in f32
        numbers = np.append(numbers[64:192], numbers[-1])
    numbers = numbers.view(dtype.np)
    x, y = (g.ravel() for g in np.meshgrid(numbers, numbers))
    names = ("add", "sub", "mul", "max", "min")

    def emit(b, x, y):
        parts = [b.op(name, x, y) for name in names]
        return [*parts, b.lt(x, y), b.neg(x), b.cast(b.cast(x, DTYPES["i32"]), dtype)]

    kernel = tiles_kernel(emit, [x, y])
    for got, want in zip(run(kernel, x, y), run_numpy(kernel, [x, y]), strict=True):
        np.testing.assert_array_equal(got.astype("f4"), want.astype("f4"))


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_8_bit_floats_round_to_nearest_even(dtype: DType):
    numbers = np.arange(256, dtype=np.uint8).view(dtype.np)
    widened = compute(lambda b, t: b.op("cast", t, dtype=DTYPES["f32"]), numbers)
    np.testing.assert_array_equal(widened, numbers.astype(np.float32))
    finite = np.sort(widened[np.isfinite(widened)])
    halfway = (finite[1:] + finite[:-1]) / 2
    around = [np.nextafter(halfway, np.float32(s)) for s in (-1e9, 1e9)]
    beyond = finite[-1] * np.array([1.01, 1.06, 1.0625, 1.1, 2, np.inf, np.nan], "f4")
    x = np.concatenate([finite, halfway, *around, beyond, -beyond]).astype("f4")
    got = compute(lambda b, t: b.op("cast", t, dtype=dtype), x)
    with np.errstate(all="ignore"):
        want = x.astype(dtype.np)
    bits = [np.where(np.isnan(a.astype("f4")), 0, a.view("u1")) for a in (got, want)]
    np.testing.assert_array_equal(*bits)
    total = compute(lambda b, t: b.add(t, t), numbers)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            total.astype("f4"), (numbers + numbers).astype("f4")
        )


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(("f32", "i32"), ("i32", "f32"), ("bf16", "u16"), ("u16", "bf16")),
        *(("f16", "i16"), ("i16", "f16"), ("f64", "u64"), ("i64", "f64"), ("u8", "i8")),
    ],
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
    ("source", "target"), [("i8", "i4"), ("u16", "u4"), ("u8", "i2"), ("bf16", "u4")]
)
def test_bitcast_to_parts_of_a_byte(source: str, target: str):
    s, t = DTYPES[source], DTYPES[target]
    x = np.arange(6 * s.bytes, dtype=np.uint8).view(s.np).reshape(2, 3)
    there = tiles_kernel(lambda b, v: b.op("bitcast", v, dtype=t), [x])
    (parts,) = Code(there, optimise=False)(x)
    (want,) = run_numpy(there, [x])
    np.testing.assert_array_equal(parts, want)
    back = tiles_kernel(lambda b, v: b.op("bitcast", v, dtype=s), [want])
    (whole,) = Code(back, optimise=False)(want)
    np.testing.assert_array_equal(whole.view(np.uint8), x.view(np.uint8))


@pytest.mark.parametrize("name", ["i2", "u2", "i4", "u4"])
def test_parts_of_a_byte(name: str):
    """XLA packs them; the kernel sees a byte each."""
    dtype = DTYPES[name]
    low = -(2 ** (dtype.bits - 1)) if dtype.is_signed_int else 0
    numbers = np.arange(low, low + 2**dtype.bits)
    x, y = (g.ravel().astype(dtype.np) for g in np.meshgrid(numbers, numbers))

    def emit(b, x, y):
        wide = b.cast(x, DTYPES["f32"])
        narrow = [b.op(op, x, y) for op in ("add", "sub", "mul", "max", "div", "and")]
        return [*narrow, b.lt(x, y), wide, b.cast(b.mul(wide, wide), dtype)]

    kernel = tiles_kernel(emit, [x, y])
    for got, want in zip(run(kernel, x, y), run_numpy(kernel, [x, y]), strict=True):
        np.testing.assert_array_equal(got, want)


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
    names = {row.name for row in table().values() if row.elementwise}
    # The first is gone before a backend sees the kernel (passes/normal/drop_rules.py);
    # the second is the same few operations on bits everywhere (ops/decompose_basic.py).
    assert names - {"stop_gradient", "reduce_precision"} <= base.get("cpu").native
