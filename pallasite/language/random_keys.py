"""Random keys for kernels, and sampling that does not depend on blocks."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError
from pallasite.language.refs import program_id
from pallasite.language.trace import user_location


def to_pallas_key(key: jax.Array) -> jax.Array:
    """Converts any key, or array of keys, to keys usable in kernels.

    They are threefry keys, which every backend can draw from.
    """
    is_key = jaxcompat.is_key_dtype(key.dtype)
    words: Callable[[Any], Any] = lambda k: jax.random.bits(k, (2,), jnp.uint32)
    for _ in range(key.ndim if is_key else key.ndim - 1):
        words = jax.vmap(words)
    return jax.random.wrap_key_data(words(key), impl="threefry2x32")


def sample_block(
    sampler_fn: Callable[..., jax.Array],
    global_key: jax.Array,
    block_size: Sequence[int],
    tile_size: Sequence[int],
    total_size: Sequence[int],
    block_index: Sequence[Any] | None = None,
    **kwargs: Any,
) -> jax.Array:
    """Random numbers for one block of an array that do not depend on the block shape.

    Every tile of the array has its own key, so kernels with other block sizes or
    another program order draw the same array.

    Args:
        sampler_fn: a function of a key and a shape, such as `jax.random.uniform`.
        global_key: the key of the whole array.
        block_size: the block's shape, a multiple of `tile_size`.
        tile_size: the shape drawn from one key.
        total_size: the array's shape.
        block_index: the block's index; by default this program's.
        kwargs: passed to `sampler_fn`.

    Returns:
        An array of shape `block_size`.
    """
    divides = all(b % t == 0 for b, t in zip(block_size, tile_size, strict=False))
    if len(block_size) != len(tile_size) or not divides:
        raise KernelTypeError(
            "the block is not made of whole tiles",
            [("block_size", tuple(block_size)), ("tile_size", tuple(tile_size))],
            user_location(),
            fix="use block sizes that are multiples of the tile's",
        )
    if block_index is None:
        block_index = [program_id(axis) for axis in range(len(block_size))]
    per_block = [b // t for b, t in zip(block_size, tile_size, strict=True)]
    in_total = [-(-n // t) for n, t in zip(total_size, tile_size, strict=True)]

    def tile(place: Sequence[int]) -> jax.Array:
        number: Any = 0
        parts = zip(block_index, per_block, place, in_total, strict=True)
        for block, tiles, n, count in parts:
            number = number * count + block * tiles + n
        key = jax.random.fold_in(global_key, number)
        return sampler_fn(key, shape=tuple(tile_size), **kwargs)

    rows: Any = [tile(p) for p in itertools.product(*map(range, per_block))]
    for axis in reversed(range(len(per_block))):
        count = per_block[axis]
        groups = [rows[n : n + count] for n in range(0, len(rows), count)]
        rows = [jnp.concatenate(g, axis=axis) if count > 1 else g[0] for g in groups]
    return rows[0]
