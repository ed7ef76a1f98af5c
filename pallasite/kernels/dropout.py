"""Which elements dropout keeps, computed where they are needed and never stored.

The bits of an element follow from the seed of its row and from its column alone. So a
forward and a backward kernel agree, whatever their blocks are, on every chip and on
however many devices.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallasite import jaxcompat
from pallasite.errors import SpecError

# Integers are signed, which every chip multiplies; shifts are those of unsigned ones.
_MULTIPLIERS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))


def check_rate(operation: str, rate: float, key: jax.Array | None) -> None:
    """A rate is a number from 0 to 1, and one above 0 comes with a key."""
    if not jaxcompat.is_concrete(rate) or not 0 <= rate <= 1:
        raise SpecError(
            f"{operation}: dropout_rate is {rate}",
            fix="pass a Python number from 0 to 1; under jit as a static argument",
        )
    if rate > 0 and key is None:
        raise SpecError(
            f"{operation}: dropout_rate is {rate}, and there is no dropout_key",
            fix="pass dropout_key=jax.random.key(seed), another one in each step",
        )


def row_seeds(key: jax.Array, *shape: int) -> tuple[jax.Array, jax.Array]:
    """Two int32 (*shape, 1) for the rows of an array (*shape, columns)."""
    words = jax.random.bits(key, (2, *shape, 1), jnp.uint32)
    first, second = lax.bitcast_convert_type(words, jnp.int32)
    return first, second


def kept(
    seeds: tuple[jax.Array, jax.Array], columns: jax.Array, rate: float
) -> jax.Array:
    """Which elements stay: seeds (..., rows, 1), columns that broadcast to (rows, n).

    The first seed says where in the sequence of `_mixed` a row starts; the second one
    keeps rows apart whose sequences overlap.
    """
    first, second = seeds
    bits = _mixed(_mixed(columns + first) ^ second)
    dropped = round(rate * (1 << 31))
    if dropped == 1 << 31:
        return jnp.full(bits.shape, False)
    return lax.shift_right_logical(bits, jnp.full_like(bits, 1)) >= dropped


def scale(rate: float) -> float:
    """What kept elements are multiplied by, so that means stay as they are."""
    return 0.0 if rate == 1 else 1 / (1 - rate)


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of 32-bit integers in which every bit depends on all of x's.

    (The last steps of MurmurHash3.)
    """
    for shift, multiplier in zip((16, 13), _MULTIPLIERS, strict=True):
        x = (x ^ lax.shift_right_logical(x, jnp.full_like(x, shift))) * multiplier
    return x ^ lax.shift_right_logical(x, jnp.full_like(x, 16))
