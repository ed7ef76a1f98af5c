"""Random arrays: ordinary numbers, special ones, small and large."""

from collections.abc import Sequence

import numpy as np

from pallasite.ir.types import DType
from tests.ops.sampling import special_values


def random_array(
    rng: np.random.Generator, shape: Sequence[int], dtype: DType, style: int
) -> np.ndarray:
    """Style 0: numbers around 0; 1: up to 100; 2: small whole numbers; 3: special ones
    among them (infinities, NaN, the limits of the type)."""
    shape = tuple(shape)
    if dtype.is_bool:
        return rng.random(shape) < 0.5
    if dtype.is_integer:
        return _integers(rng, shape, dtype, style)
    scale = (1.0, 100.0, 1.0, 10.0)[style]
    values = rng.standard_normal(shape) * scale
    if style == 2:
        values = np.rint(values * 3)
    array = np.asarray(values).astype(dtype.np)
    return _mix(rng, array, _special_floats(dtype)) if style == 3 else array


def _integers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, style: int
) -> np.ndarray:
    info = np.iinfo(dtype.np)
    small = rng.integers(max(info.min, -4), 12, shape).astype(dtype.np)
    if style in (0, 2):
        return small
    anything = rng.integers(info.min, info.max, shape, dtype.np, endpoint=True)
    array = np.where(rng.random(shape) < 0.5, small, anything)
    return _mix(rng, array, special_values(dtype)) if style == 3 else array


def _special_floats(dtype: DType) -> np.ndarray:
    """No negative zero: `max` and `min` may give a zero of either sign."""
    values = special_values(dtype)
    return values[~((values == 0) & np.signbit(values))]


def _mix(
    rng: np.random.Generator, array: np.ndarray, special: np.ndarray
) -> np.ndarray:
    chosen = rng.choice(special, array.shape)
    return np.where(rng.random(array.shape) < 0.2, chosen, array).astype(array.dtype)
