"""Narrow elements in wide words, and stochastic rounding: upstream's names for TPUs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.errors import KernelTypeError, UnsupportedError
from pallasite.language.trace import user_location


def pack_elementwise(xs: Sequence[Any], *, packed_dtype: Any) -> jax.Array:
    """Packs elements of several arrays into words of the arrays' width, the first
    array in the lowest bits; integers are truncated."""
    word, narrow = _words(xs[0].dtype), _words(packed_dtype)
    width = jnp.iinfo(narrow).bits
    if len(xs) * width != jnp.iinfo(word).bits:
        raise KernelTypeError(
            "the packed elements do not fill a word",
            [
                ("arrays", len(xs)),
                ("dtype", xs[0].dtype),
                ("packed_dtype", jnp.dtype(packed_dtype)),
            ],
            user_location(),
            f"pack {jnp.iinfo(word).bits // width} arrays together",
        )
    packed = jnp.zeros(xs[0].shape, word)
    for n, x in enumerate(xs):
        bits = jax.lax.bitcast_convert_type(x.astype(packed_dtype), narrow)
        packed |= bits.astype(word) << word.type(n * width)
    return packed


def unpack_elementwise(
    x: Any, *, index: int, packed_dtype: Any, unpacked_dtype: Any
) -> jax.Array:
    """The elements that `pack_elementwise` took from array `index`."""
    word, narrow = _words(x.dtype), _words(packed_dtype)
    words = jax.lax.bitcast_convert_type(x, word)
    shift = word.type(index * jnp.iinfo(narrow).bits)
    elements = jax.lax.bitcast_convert_type(
        (words >> shift).astype(narrow), packed_dtype
    )
    return elements.astype(unpacked_dtype)


def _words(dtype: Any) -> np.dtype:
    """The unsigned integer type of the same width."""
    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return jnp.dtype(f"uint{kind(dtype).bits}")


def stochastic_round(x: Any, random_bits: Any, *, target_dtype: Any) -> jax.Array:
    """float32 to bfloat16, rounding up with probability equal to the truncated part."""
    if jnp.dtype(target_dtype) != jnp.bfloat16 or x.dtype != jnp.float32:
        raise UnsupportedError(
            "stochastic_round supports only float32 to bfloat16",
            [("dtype", x.dtype), ("target_dtype", jnp.dtype(target_dtype))],
            user_location(),
            fix="use x.astype(jnp.float32), and bfloat16 as the target",
        )
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    moved = bits + (random_bits.astype(jnp.uint32) & jnp.uint32(0xFFFF))
    cut = jnp.where(jnp.isfinite(x), moved, bits) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(cut, jnp.float32).astype(jnp.bfloat16)
