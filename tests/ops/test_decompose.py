"""Generated: each elementwise row's decomposition against the row's own meaning.

Samples of the domain plus special values, within the row's `max_ulp`: once with the ops
inside computed exactly, once with everything decomposed down to ops that have no
decomposition. `SHOW_ULP=1 pytest -s` prints the worst error of each.
"""

import os
from typing import Any

import numpy as np
import pytest

from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.interpret.walker import Walker
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.opdef import OpDef, table
from pallasite.ir.types import DTYPES, DType
from pallasite.ops import decompose
from pallasite.ops.decompose_trig import F64_LIMIT
from pallasite.passes.lower.legalize import legalize
from tests.ops.sampling import (
    FLOAT_NAMES,
    INT_NAMES,
    Arrays,
    attr_choices,
    evaluate,
    lowered_kernel,
    result_dtype,
    rows_with,
    run_lower,
    samples,
    special_operands,
    ulp_error,
)
from tests.xla import USUAL

COUNT = 10_000
ROWS = [row for row in rows_with("lower") if row.name != "clamp"]
CASES = [
    pytest.param(row, DTYPES[name], id=f"{row.name}-{name}")
    for row in ROWS
    for name in (*FLOAT_NAMES, *INT_NAMES)
    if DTYPES[name] in row.dtypes
]
BOTTOM = frozenset(row.name for row in table().values() if row.lower is None)


def _operands(row: OpDef, dtype: DType, count: int = COUNT) -> Arrays:
    special = special_operands(row, dtype)
    if dtype.name == "f64" and row.name in ("sin", "cos", "tan"):
        special = [np.where(np.abs(x) > F64_LIMIT, 1.0, x) for x in special]
    pairs = zip(samples(row, dtype, count), special, strict=True)
    return [np.concatenate(pair) for pair in pairs]


def _check(row: OpDef, dtype: DType, attrs: dict, operands: Arrays, got) -> None:
    with np.errstate(all="ignore"):
        expected = np.asarray(row.meaning(*operands, **attrs))
    type_ = result_dtype(row, dtype, len(operands), attrs)
    assert got.dtype == type_.np
    error = ulp_error(got, expected, type_)
    worst = int(np.argmax(error))
    if os.environ.get("SHOW_ULP"):
        print(f"\nulp {row.name} {dtype} {error[worst]:.2f} of {row.max_ulp}")
    assert error[worst] <= row.max_ulp, (
        f"{row.name} {dtype} {attrs} of {[x[worst] for x in operands]}: "
        f"{got[worst]}, expected {expected[worst]}, {error[worst]} ulp"
    )


@pytest.mark.parametrize(("row", "dtype"), CASES)
def test_decomposition_meets_the_bound(row: OpDef, dtype: DType):
    operands = _operands(row, dtype)
    for attrs in attr_choices(row.name, dtype):
        got = run_lower(row.lower, operands, attrs)
        _check(row, dtype, attrs, operands, got)


@pytest.mark.parametrize(("row", "dtype"), CASES)
def test_decomposition_to_the_bottom_meets_the_bound(row: OpDef, dtype: DType):
    operands = _operands(row, dtype)
    for attrs in attr_choices(row.name, dtype):
        kernel = lowered_kernel(row.lower, operands, attrs)
        kernel = legalize(kernel, BOTTOM, "bottom")
        _check(row, dtype, attrs, operands, evaluate(kernel, operands)[0])


@pytest.mark.parametrize("dtype", [DTYPES[n] for n in FLOAT_NAMES], ids=str)
@pytest.mark.parametrize(
    ("name", "through"),
    # Bitcasts between widths, through others, are tested with the backend's gathers.
    [(n, t) for n, ways in decompose.SHORTCUTS.items() for t, _ in ways if t != n],
)
def test_shortcut_meets_the_bound(name: str, through: str, dtype: DType):
    row, lower = table()[name], dict(decompose.SHORTCUTS[name])[through]
    operands = _operands(row, dtype)
    _check(row, dtype, {}, operands, run_lower(lower, operands, {}))


@pytest.mark.parametrize("dtype", [DTYPES[n] for n in ("f32", "f64", "i32")], ids=str)
def test_clamp_broadcasts_scalar_bounds(dtype: DType):
    row = table()["clamp"]
    x = samples(row, dtype, COUNT)[0]
    for low, high in ((x[:1][0], x[1:2][0]), tuple(np.sort(samples(row, dtype, 2)[0]))):
        bounds = [np.asarray(low), np.asarray(high)]
        got = run_lower(row.lower, [bounds[0], x, bounds[1]], {})
        np.testing.assert_array_equal(got, row.meaning(bounds[0], x, bounds[1]))


def _floats_of_any_size(dtype: DType, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    word = DTYPES[f"u{dtype.bits}"].np
    x = rng.integers(0, np.iinfo(word).max, count, word).view(dtype.np)
    return np.where(np.isfinite(x), x, dtype.np.type(1))


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_f32_trigonometry_is_right_at_any_size(name: str):
    row, dtype = table()[name], DTYPES["f32"]
    near_zeros = (np.arange(1, 20_000) * (np.pi / 2) * 37).astype(np.float32)
    operands = [np.concatenate([_floats_of_any_size(dtype, 100_000, 0), near_zeros])]
    _check(row, dtype, {}, operands, run_lower(row.lower, operands, {}))


@pytest.mark.parametrize("name", ["f32", "f64"])
def test_rem_is_exact_at_any_size(name: str):
    dtype = DTYPES[name]
    x, y = (_floats_of_any_size(dtype, 20_000, seed) for seed in (1, 2))
    got = run_lower(table()["rem"].lower, [x, y], {})
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, np.fmod(x, y))


ANY_SIZE: dict[str, Any] = {
    "asinh": None,
    "atan": None,
    "cbrt": None,
    "cosh": (-89.0, 89.0),
    "erf": None,
    "exp": (-87.0, 88.7),
    "exp2": (-126.0, 127.9),
    "expm1": (-100.0, 88.7),
    "log": (0.0, 3e38),
    "log1p": (-0.999, 3e38),
    "log2": (0.0, 3e38),
    "logistic": (-87.0, 87.0),
    "sinh": (-89.0, 89.0),
    "tanh": None,
}


@pytest.mark.parametrize("name", ANY_SIZE)
def test_f32_decomposition_holds_far_outside_the_domain(name: str):
    row, dtype, limits = table()[name], DTYPES["f32"], ANY_SIZE[name]
    x = _floats_of_any_size(dtype, 50_000, 3)
    if limits is not None:
        low, high = limits
        even = np.random.default_rng(4).uniform(max(low, -1e3), min(high, 1e3), 50_000)
        x = np.concatenate([x[(x > low) & (x < high)], even.astype(np.float32)])
    kernel = legalize(lowered_kernel(row.lower, [x], {}), BOTTOM, "bottom")
    _check(row, dtype, {}, [x], evaluate(kernel, [x])[0])


@pytest.mark.parametrize("dtype", [DTYPES["f32"], DTYPES["f64"]], ids=str)
def test_powers_of_two_that_are_zero(dtype: DType):
    """Down to where even half the exponent is none of a normal number."""
    info = np.finfo(dtype.np)
    least = float(info.minexp - info.nmant)  # of the smallest number's exponent
    x = np.arange(2 * least, least - 1, 1 / 16).astype(dtype.np)
    two = np.full_like(x, 2)
    lowers = [(table()["exp2"].lower, [x]), (table()["pow"].lower, [two, x])]
    lowers += [(lower, [x]) for _, lower in decompose.SHORTCUTS["exp2"]]
    for lower, operands in lowers:
        assert lower is not None
        np.testing.assert_array_equal(run_lower(lower, operands, {}), np.zeros_like(x))


class _FusingWalker(Walker):
    """Rounds a product and the f32 sum it goes into once, as a compiler may."""

    def __init__(self, kernel: Kernel):
        super().__init__(kernel, NumpyNumbers())
        self.products: dict[Value, Any] = {}

    def op(self, op: Op) -> None:
        super().op(op)
        if not op.results or op.results[0].type.dtype != DTYPES["f32"]:
            return
        if op.name == "mul":
            x, y = (np.asarray(self.env[v], np.longdouble) for v in op.operands)
            self.products[op.result] = x * y
        elif op.name in ("add", "sub"):
            fused = next((v for v in op.operands if v in self.products), None)
            x, y = (
                self.products[v] if v is fused else np.asarray(self.env[v], np.float64)
                for v in op.operands
            )
            exact = x + y if op.name == "add" else x - y
            self.env[op.result] = exact.astype(np.float32)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_decomposition_survives_fused_multiply_and_add(row: OpDef):
    dtype = DTYPES["f32"]
    if dtype not in row.dtypes:
        pytest.skip("not a float op")
    operands = _operands(row, dtype)
    for attrs in attr_choices(row.name, dtype):
        kernel = lowered_kernel(row.lower, operands, attrs)
        kernel = legalize(kernel, BOTTOM, "bottom")
        with np.errstate(all="ignore"):
            (got,) = _FusingWalker(kernel).run(operands)
        _check(row, dtype, attrs, operands, got)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_decomposition_survives_an_optimizing_compiler(row: OpDef):
    """XLA reassociates constants, turns a/b/c into a/(b*c) and flushes subnormals."""
    import jax

    from pallasite.emulation.emulate import emulate

    dtype = DTYPES["f32"]
    if dtype not in row.dtypes:
        pytest.skip("not a float op")
    operands = _operands(row, dtype, 2000)
    attrs = attr_choices(row.name, dtype)[-1]
    kernel = legalize(lowered_kernel(row.lower, operands, attrs), BOTTOM, "bottom")
    (got,) = jax.jit(emulate(kernel), compiler_options=USUAL)(*operands)
    _check(row, dtype, attrs, operands, np.asarray(got))


def test_core_ops_without_decomposition_are_known():
    """What a backend must have: everything else follows."""
    elementwise = {row.name for row in rows_with("meaning")}
    assert elementwise & BOTTOM == {
        *("add", "sub", "mul", "div", "neg", "abs", "max", "min", "sqrt"),
        *("and", "or", "xor", "not"),
        *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
        *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "cast", "bitcast"),
    }
