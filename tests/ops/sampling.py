"""Samples of an op row's operands, error in ulp, and evaluation of decompositions.

Shared by the generated tests of this folder. Operands come from the row's `domain`
plus the special values of the type; the error is counted in units of the last place of
the expected result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.interpret.walker import Walker
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Value
from pallasite.ir.opdef import OpDef, table
from pallasite.ir.types import DType, RefType, TileType, dtype_of

Arrays = list[np.ndarray]

FLOAT_NAMES = ("f32", "f64", "bf16", "f16")
INT_NAMES = tuple(f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64))

# Attributes to try for the rows that have some.
ATTRS: dict[str, list[dict[str, Any]]] = {
    "integer_pow": [{"y": y} for y in (-3, -1, 0, 1, 2, 3, 7)],
    "round": [{"rounding_method": 0}, {"rounding_method": 1}],
    "reduce_precision": [
        {"exponent_bits": e, "mantissa_bits": m}
        for e, m in ((8, 23), (8, 7), (5, 10), (4, 3), (5, 2), (8, 0))
    ],
}


def attr_choices(name: str, dtype: DType) -> list[dict[str, Any]]:
    choices = ATTRS.get(name, [{}])
    if name == "integer_pow" and not dtype.is_float:
        return [c for c in choices if c["y"] >= 0]
    return choices


def samples(row: OpDef, dtype: DType, count: int, seed: int = 0) -> Arrays:
    """`count` operands from the row's domain, one array per operand."""
    rng = np.random.default_rng(seed)
    low, high = row.domain or (-100.0, 100.0)
    return [_draw(rng, dtype, low, high, count) for _ in range(row.arity or 2)]


def _draw(
    rng: np.random.Generator, dtype: DType, low: float, high: float, count: int
) -> np.ndarray:
    if dtype.is_bool:
        return rng.integers(0, 2, count).astype(bool)
    if dtype.is_integer:
        info = np.iinfo(dtype.np)
        small = rng.integers(max(info.min, -9), 10, count, dtype=dtype.np)
        anything = rng.integers(info.min, info.max, count, dtype.np, endpoint=True)
        return np.where(rng.random(count) < 0.5, small, anything)
    limit = float(_finfo(dtype).max)
    low, high = max(low, -limit), min(high, limit)
    # Half evenly, half by size: most small numbers are near the ends of a domain.
    even = rng.uniform(low, high, count)
    largest = max(abs(low), abs(high))
    by_size = np.exp2(rng.uniform(-20, 0, count)) * largest
    by_size = np.where(rng.random(count) < 0.5, -by_size, by_size)
    inside = (by_size >= low) & (by_size <= high)
    x = np.where(inside & (rng.random(count) < 0.5), by_size, even).astype(dtype.np)
    return np.clip(x.astype(np.float64), low, high).astype(dtype.np)


def special_values(dtype: DType) -> np.ndarray:
    """Zeros, ones, infinities, NaN, limits: what formulas get wrong."""
    if dtype.is_bool:
        return np.array([False, True])
    if dtype.is_integer:
        info = np.iinfo(dtype.np)
        numbers = [info.min, info.min + 1, 0, 1, 2, 3, info.max - 1, info.max]
        numbers += [-1, -2, -3] if info.min < 0 else []
        return np.array(numbers, dtype.np)
    info = _finfo(dtype)
    sizes = [0.0, 1.0, 0.5, 2.0, 3.0, 1.5, 100.0, 1e4, float(info.max), np.inf]
    sizes += [float(info.smallest_normal), 1 + float(info.eps), 1 - float(info.eps) / 2]
    numbers = [s * x for x in sizes for s in (1, -1)] + [np.nan]
    return floats(numbers, dtype)


def floats(numbers: Sequence[float], dtype: DType) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.array(numbers).astype(dtype.np)


def special_operands(row: OpDef, dtype: DType) -> Arrays:
    """Every combination of special values."""
    values = special_values(dtype)
    grids = np.meshgrid(*[values] * (row.arity or 2), indexing="ij")
    return [g.ravel() for g in grids]


def _finfo(dtype: DType) -> Any:
    return ml_dtypes.finfo(dtype.np)


def ulp_error(got: np.ndarray, expected: np.ndarray, dtype: DType) -> np.ndarray:
    """|got - expected| in units of the last place; 0 or infinity where not finite.

    Subnormal numbers count as zero: every target may flush them.
    """
    if not dtype.is_float:
        return np.where(got == expected, 0.0, np.inf)
    info = _finfo(dtype)
    g, e = got.astype(np.longdouble), expected.astype(np.longdouble)
    smallest = np.longdouble(float(info.smallest_normal))
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(e), smallest)))
        unit = np.exp2(exponent) * np.longdouble(float(info.eps))
        error = np.abs(g - e) / unit
    same = (g == e) | (np.isnan(g) & np.isnan(e))
    flushed = (np.abs(e) < smallest) & (np.abs(g) <= smallest)
    flushed |= (np.abs(g) == 0) & (np.abs(e) <= smallest)
    error = np.where(same | flushed, 0.0, np.where(np.isnan(error), np.inf, error))
    return error.astype(np.float64)


def result_dtype(row: OpDef, dtype: DType, arity: int, attrs: Mapping[str, Any]):
    (result,) = row.type_rule((TileType((), dtype),) * arity, attrs)
    return result.dtype


# --- evaluation of built code ---

Lower = Callable[..., Any]


def lowered_kernel(
    lower: Lower, operands: Sequence[np.ndarray], attrs: Mapping[str, Any]
) -> Kernel:
    """A kernel that loads the operands, runs `lower`, and stores its results."""
    builder = Builder()
    inputs = [Value(RefType(x.shape, _dtype(x), "any")) for x in operands]
    made = lower(builder, *(builder.load(ref) for ref in inputs), **attrs)
    results = [made] if isinstance(made, Value) else list(made)
    outputs = [Value(RefType(v.tile.shape, v.tile.dtype, "any")) for v in results]
    for ref, value in zip(outputs, results, strict=True):
        builder.store(ref, value)
    return Kernel("lowered", (*inputs, *outputs), builder.block(), len(outputs))


def _dtype(x: np.ndarray) -> DType:
    found = dtype_of(x.dtype)
    assert found is not None
    return found


def evaluate(kernel: Kernel, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return Walker(kernel, NumpyNumbers()).run([np.array(x) for x in operands])


def run_lower(
    lower: Lower, operands: Sequence[np.ndarray], attrs: Mapping[str, Any]
) -> np.ndarray:
    """What a decomposition with one result computes; ops inside by their meaning."""
    return evaluate(lowered_kernel(lower, operands, attrs), operands)[0]


def rows_with(attribute: str) -> Iterator[OpDef]:
    """The elementwise rows that have a `meaning`, a `lower`, a `jax` name."""
    for row in table().values():
        if row.elementwise and getattr(row, attribute) is not None:
            yield row
