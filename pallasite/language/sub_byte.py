"""Packs two- and four-bit elements into bytes, and unpacks them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.errors import KernelTypeError
from pallasite.language.trace import user_location


def join_bits(*, two_bits: Any = None, four_bits: Any = None) -> jax.Array:
    """Bytes whose lowest bits are `four_bits`, then `two_bits`; the others are 0."""
    parts = [(p, n) for p, n in ((four_bits, 4), (two_bits, 2)) if p is not None]
    joined: Any = None
    place = 0
    for part, width in parts:
        if jnp.iinfo(part.dtype).bits != width:
            raise _refusal(f"expected an array of {width}-bit integers", part.dtype)
        low = part.astype(jnp.int32) & (2**width - 1)
        joined = low if joined is None else joined | (low << place)
        place += width
    if joined is None:
        raise _refusal("join_bits needs at least one array", None)
    if two_bits is not None and four_bits is not None:
        shapes = two_bits.shape, four_bits.shape
        if shapes[0] != shapes[1]:
            raise _refusal("join_bits needs arrays of the same shape", shapes)
    return joined.astype(jnp.int8)


def split_bits(x: Any, bitwidths: Sequence[int]) -> tuple[jax.Array, ...]:
    """Elements of two or four bits from bytes, the lowest bits first."""
    if jnp.iinfo(x.dtype).bits != 8:
        raise _refusal("split_bits needs an 8-bit dtype", x.dtype)
    if sum(bitwidths) > 8 or not set(bitwidths) <= {2, 4}:
        raise _refusal(
            "a byte can be split into 2 and 4 bits, at most 8 in all", tuple(bitwidths)
        )
    parts, place, wide = [], 0, x.astype(jnp.int32)
    for width in bitwidths:
        kept = wide << (32 - place - width)  # the element's top bit becomes the sign
        narrow = jnp.int4 if width == 4 else jnp.int2
        parts.append((kept >> (32 - width)).astype(narrow))
        place += width
    return tuple(parts)


def unpack_fp6(two_bits: Any, four_bits: Any) -> jax.Array:
    """Bytes holding six-bit floats, from the arrays that `pack_fp6` returns."""
    return join_bits(two_bits=two_bits, four_bits=four_bits)


def pack_fp6(fp6_in_8b: Any) -> tuple[jax.Array, jax.Array]:
    """Splits six-bit floats in bytes into arrays of two upper and four lower bits."""
    four_bits, two_bits = split_bits(fp6_in_8b, (4, 2))
    return two_bits, four_bits


def _refusal(what: str, got: Any) -> KernelTypeError:
    return KernelTypeError(what, [("got", got)], user_location())
