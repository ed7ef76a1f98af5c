"""Which elements dropout keeps, computed where they are needed and never stored.

An element's bits depend only on its row's seed and its column. So forward and backward
kernels agree whatever their blocks, on every chip and any number of devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.errors import KernelTypeError, SpecError
from pallasite.kernels import common

# Integers are signed, as every chip can multiply those; shifts are logical.
_MULTIPLIERS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))


def check_rate(operation: str, rate: float, key: jax.Array | None) -> None:
    """Checks that the rate is between 0 and 1, and has a key if it is above 0."""
    is_number = isinstance(rate, int | float | np.number)
    if not is_number or not 0 <= rate <= 1:
        raise SpecError(
            f"{operation}: dropout_rate is {rate}",
            fix="pass a Python number from 0 to 1; under jit as a static argument",
        )
    if rate > 0 and key is None:
        raise SpecError(
            f"{operation}: dropout_rate is {rate}, but there is no dropout_key",
            fix="pass dropout_key=jax.random.key(seed), a different one in each step",
        )
    if rate > 0 and not _is_key(key):
        raise KernelTypeError(
            f"{operation}: dropout_key is not one key of jax.random",
            [("is", common.shown(key))],
            fix="pass dropout_key=jax.random.key(seed); for several, use jax.vmap",
        )


def _is_key(key: Any) -> bool:
    """Whether this is one key: a typed one, or its words."""
    if not hasattr(key, "dtype") or not hasattr(key, "shape"):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return not key.shape
    return key.dtype == jnp.uint32 and len(key.shape) == 1


def row_seeds(key: jax.Array, *shape: int) -> tuple[jax.Array, jax.Array]:
    """Two int32 (*shape, 1) for the rows of an array (*shape, columns)."""
    words = jax.random.bits(key, (2, *shape, 1), jnp.uint32)
    first, second = lax.bitcast_convert_type(words, jnp.int32)
    return first, second


def kept(
    seeds: tuple[jax.Array, jax.Array], columns: jax.Array, rate: float
) -> jax.Array:
    """Which elements to keep: seeds (..., rows, 1), columns broadcast to (rows, n).

    The first seed says where in the sequence of `_mixed` a row starts; the second
    distinguishes rows whose sequences overlap.
    """
    first, second = seeds
    bits = _mixed(_mixed(columns + first) ^ second)
    dropped = round(rate * (1 << 31))
    if dropped == 1 << 31:
        return jnp.full(bits.shape, False)
    return lax.shift_right_logical(bits, jnp.full_like(bits, 1)) >= dropped


def scale(rate: float) -> float:
    """The factor of kept elements that preserves the mean."""
    return 0.0 if rate == 1 else 1 / (1 - rate)


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of 32-bit integers in which every bit depends on all of x's.

    (The finaliser of MurmurHash3.)
    """
    for shift, multiplier in zip((16, 13), _MULTIPLIERS, strict=True):
        x = (x ^ lax.shift_right_logical(x, jnp.full_like(x, shift))) * multiplier
    return x ^ lax.shift_right_logical(x, jnp.full_like(x, 16))
