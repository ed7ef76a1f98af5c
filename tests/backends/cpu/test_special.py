"""Special values as XLA treats them: denormals, zeros, infinities, NaN, integer limits.

Generated from the op table: one kernel and one XLA program per element type compute
every row on every combination of special values, and give the same numbers. Rows of
`FLUSHED_OR_NOT` are compared with their meaning instead.
"""

from itertools import product

import jax
import numpy as np
import pytest

from pallasite.ir.opdef import OpDef
from pallasite.ir.types import DTYPES, DType
from tests.backends.cpu.running import compute
from tests.ops.sampling import (
    attr_choices,
    floats,
    result_dtype,
    rows_with,
    special_values,
    ulp_error,
)
from tests.ops.test_meaning import LAX_NAMES, XLA_ULP
from tests.xla import USUAL

# A zero of either sign is right (max, min), or XLA's own code is not exact there.
NO_SIGN = ("max", "min", "clamp", "erf_inv", "lgamma", "digamma", "sinh", "tan")
# Calls of a library, here or in XLA, and only one of the two may flush denormals: right
# is the row's meaning, of denormals or of the zeros in their place.
FLUSHED_OR_NOT = ("rem",)
# Where XLA neither flushes a denormal operand nor computes with it.
NO_DENORMALS = ("cbrt", "atan2", "log1p")
# XLA on CPU folds or rewrites these at the edges of their domain; the row's meaning,
# which other tests hold the machine code to, is the law there.
LEFT_OUT = ("select_n", "pow", "integer_pow", "lgamma", "nextafter", "reduce_precision")
TYPES = ("f32", "f64", "i32", "u8", "i64")


def values_of(dtype: DType) -> np.ndarray:
    special = special_values(dtype)
    if not dtype.is_float:
        return special
    smallest = float(np.finfo(dtype.np).smallest_normal)
    tiny = [smallest / 2, -smallest / 2, smallest * 2**-20, -smallest * 2**-20]
    return np.concatenate([special, floats(tiny, dtype)])


def operands_of(row: OpDef, dtype: DType) -> list[np.ndarray]:
    values = values_of(dtype)
    if (row.arity or 2) > 2:
        values = values[::3]
    grids = np.meshgrid(*[values] * (row.arity or 2), indexing="ij")
    return [g.ravel() for g in grids]


def rows_of(dtype: DType) -> list[tuple[OpDef, dict]]:
    rows = [row for row in rows_with("jax") if row.name not in LEFT_OUT]
    found = [row for row in rows if dtype in row.dtypes and _lax(row) is not None]
    return [(row, attrs) for row in found for attrs in attr_choices(row.name, dtype)]


def _lax(row: OpDef):
    return getattr(jax.lax, LAX_NAMES.get(row.name, row.name), None)


def _jax_attrs(attrs: dict) -> dict:
    if "rounding_method" in attrs:
        return {"rounding_method": jax.lax.RoundingMethod(attrs["rounding_method"])}
    return attrs


@pytest.mark.parametrize("name", TYPES)
def test_special_values_follow_xla(name: str):
    dtype = DTYPES[name]
    rows = rows_of(dtype)
    operands = {n: operands_of(row, dtype) for n, (row, _) in enumerate(rows)}
    arities = sorted({len(o) for o in operands.values()})
    shared = {len(o): o for o in operands.values()}
    flat = [x for arity in arities for x in shared[arity]]

    def grouped(values):
        pending = iter(values)
        return {arity: [next(pending) for _ in range(arity)] for arity in arities}

    def emit(b, *tiles):
        by_arity = grouped(tiles)
        return [
            b.op(row.name, *by_arity[len(operands[n])], **attrs)
            for n, (row, attrs) in enumerate(rows)
        ]

    def plain(*arrays):
        by_arity = grouped(arrays)
        return [
            _lax(row)(*by_arity[len(operands[n])], **_jax_attrs(attrs))
            for n, (row, attrs) in enumerate(rows)
        ]

    from_xla = jax.jit(plain, compiler_options=USUAL)
    with jax.enable_x64(True):
        wanted = [np.asarray(w) for w in from_xla(*flat)]
    found = compute(emit, *flat)
    wrong = []
    for n, (row, attrs) in enumerate(rows):
        type_ = result_dtype(row, dtype, len(operands[n]), attrs)
        bad = _differ(row, type_, found[n], wanted[n])
        if row.name in FLUSHED_OR_NOT and dtype.is_float:
            choices = [
                _differ(row, type_, found[n], w) for w in _meant(row, operands[n])
            ]
            bad = np.all(choices, axis=0)
        if row.name in NO_DENORMALS and dtype.is_float:
            bad &= ~np.any([_is_denormal(x) for x in operands[n]], axis=0)
        if bad.any():
            at = int(np.argmax(bad))
            given = [x[at] for x in operands[n]]
            pair = f"machine code {found[n][at]!r}, XLA {wanted[n][at]!r}"
            wrong.append(f"{row.name} {attrs} of {given}: {pair}")
    assert not wrong, "\n".join(wrong)


def _meant(row: OpDef, operands: list[np.ndarray]) -> list[np.ndarray]:
    """What a row means where each operand and the result is flushed or is not."""
    assert row.meaning is not None
    with np.errstate(all="ignore"):
        given = product(*[(x, _flushed(x)) for x in operands])
        results = [row.meaning(*chosen) for chosen in given]
    return [*results, *map(_flushed, results)]


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(_is_denormal(x), np.copysign(x.dtype.type(0), x), x)


def _is_denormal(x: np.ndarray) -> np.ndarray:
    return (x != 0) & (np.abs(x) < np.finfo(x.dtype).smallest_normal)


def _differ(row: OpDef, type_: DType, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    bad = ulp_error(got, want, type_) > max(row.max_ulp, XLA_ULP.get(row.name, 0))
    if not type_.is_float:
        return bad
    zeros = (got == 0) & (want == 0)
    if row.name not in NO_SIGN:
        bad |= zeros & (np.signbit(got) != np.signbit(want))
    return bad
