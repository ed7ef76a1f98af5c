"""Generated: each elementwise row's numpy meaning against the JAX primitive it names.

Samples of the row's domain and all combinations of special values, in every type the
row allows. The allowed error is the row's `max_ulp`, or XLA's own where it errs more.
"""

import platform

import jax
import numpy as np
import pytest

from pallasite.ir.opdef import OpDef
from pallasite.ir.types import DTYPES, DType
from pallasite.ops import meaning
from tests.ops.sampling import (
    FLOAT_NAMES,
    INT_NAMES,
    attr_choices,
    floats,
    result_dtype,
    rows_with,
    samples,
    special_operands,
    special_values,
    ulp_error,
)
from tests.xla import USUAL

LAX_NAMES = {
    "and": "bitwise_and",
    "not": "bitwise_not",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
# What XLA on CPU is off by (jax 0.10 to 0.12) where that is more than our bound: exp2
# is exp(x log 2) there, atan is up to 5.4 ulp off on aarch64 (on x86 within our bound),
# lgamma has no relative accuracy around its zeros.
XLA_ULP = {
    "atan": 6 if platform.machine() in ("aarch64", "arm64") else 0,
    "exp2": 128,
    "log1p": 256,
    "sinh": 16,
    "cosh": 16,
    "atanh": 256,
    "erf_inv": 32,
    "lgamma": np.inf,
}
LGAMMA_ABSOLUTE = 1e-6
ROWS = [row for row in rows_with("jax") if row.name != "select_n"]


def _types(row: OpDef) -> list[DType]:
    names = [*FLOAT_NAMES, *INT_NAMES, "bool"]
    if row.name == "pow":  # JAX has no integer base
        names = FLOAT_NAMES
    return [DTYPES[n] for n in names if DTYPES[n] in row.dtypes]


def _operands(row: OpDef, dtype: DType) -> list[np.ndarray]:
    parts = zip(samples(row, dtype, 2000), special_operands(row, dtype), strict=True)
    return [np.concatenate(pair) for pair in parts]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_meaning_is_that_of_jax(row: OpDef):
    fn = getattr(jax.lax, LAX_NAMES.get(row.name, row.name), None)
    if fn is None:
        pytest.skip(f"this jax has no lax.{row.name}")
    cases = [(d, a) for d in _types(row) for a in attr_choices(row.name, d)]
    operands = {dtype: _operands(row, dtype) for dtype, _ in cases}

    def run_all(arrays):
        return [fn(*arrays[d.name], **_jax_attrs(attrs)) for d, attrs in cases]

    with jax.enable_x64(True):
        from_jax = jax.jit(run_all, compiler_options=USUAL)
        results = from_jax({d.name: o for d, o in operands.items()})
    for (dtype, attrs), result in zip(cases, results, strict=True):
        _compare(row, dtype, attrs, operands[dtype], np.asarray(result))


def _jax_attrs(attrs: dict) -> dict:
    if "rounding_method" in attrs:
        return {"rounding_method": jax.lax.RoundingMethod(attrs["rounding_method"])}
    return attrs


def _compare(row: OpDef, dtype: DType, attrs: dict, operands, from_jax) -> None:
    with np.errstate(all="ignore"):
        ours = np.asarray(row.meaning(*operands, **attrs))
    type_ = result_dtype(row, dtype, len(operands), attrs)
    assert ours.dtype == type_.np
    error = ulp_error(from_jax, ours, type_)
    if row.name == "lgamma":
        with np.errstate(invalid="ignore"):
            close = np.abs(from_jax - ours).astype(np.float64) < LGAMMA_ABSOLUTE
        error = np.where(close & (error > row.max_ulp), 0, error)
    worst = int(np.argmax(error))
    assert error[worst] <= max(row.max_ulp, XLA_ULP.get(row.name, 0)), (
        f"{row.name} {dtype} {attrs}: {[x[worst] for x in operands]} gives "
        f"{ours[worst]}, jax {from_jax[worst]}, {error[worst]} ulp"
    )


SELECTED = {
    "bool": np.array([True, False, True]),
    "i32": np.array([0, 2, 1], np.int32),
}


@pytest.mark.parametrize("kind", SELECTED)
def test_select_n_is_that_of_jax(kind: str):
    cases = [np.arange(3, dtype=np.float32) + 10 * k for k in range(3)]
    cases = cases[: 2 if kind == "bool" else 3]
    expected = jax.lax.select_n(SELECTED[kind], *cases)
    np.testing.assert_array_equal(meaning.select_n(SELECTED[kind], *cases), expected)


CAST_TYPES = (*FLOAT_NAMES, *INT_NAMES, "bool")
BETWEEN = [0.9, -0.9, 127.5, 200.0, -129.0, 300.0, 70000.0, 3e9, -3e9, 1e10]


@pytest.mark.parametrize("source", CAST_TYPES)
def test_cast_is_that_of_jax(source: str):
    dtype = DTYPES[source]
    x = special_values(dtype)
    if dtype.is_float:
        x = np.concatenate([x, floats(BETWEEN, dtype)])
    # All of them again, up to whole vectors: of 8n + 3 int64, XLA on aarch64 converts
    # the last two to int8 wrong (jax 0.10).
    x = np.resize(x, -(-len(x) // 16) * 16)

    def run_all(x):
        return [jax.lax.convert_element_type(x, DTYPES[t].np) for t in CAST_TYPES]

    with jax.enable_x64(True):
        results = jax.jit(run_all, compiler_options=USUAL)(x)
    for target, result in zip(map(DTYPES.get, CAST_TYPES), results, strict=True):
        assert target is not None
        with np.errstate(all="ignore"):
            ours = meaning.cast(x, dtype=target)
        wrong = ulp_error(np.asarray(result), ours, target) > 0
        pairs = list(zip(x[wrong], ours[wrong], np.asarray(result)[wrong], strict=True))
        assert not pairs, f"{source} to {target}: (value, ours, jax) {pairs}"


def test_casts_leave_nothing_open_to_the_cpu():
    """Numpy warns where the result of a cast differs between x86 and aarch64."""
    x = np.array([np.nan, np.inf, -np.inf, 2.0**63, -(2.0**63), 2.0**64, -1.5, 0.5])
    targets = (DTYPES[name] for name in CAST_TYPES if DTYPES[name].is_integer)
    found = {target.name: meaning.cast(x, dtype=target).tolist() for target in targets}
    assert found["u64"] == [0, 2**64 - 1, 0, 2**63, 0, 2**64 - 1, 0, 0]
    assert found["i64"][1:6] == [2**63 - 1, -(2**63), 2**63 - 1, -(2**63), 2**63 - 1]
    assert found["u8"] == [0, 255, 0, 255, 0, 255, 0, 0]
