"""`rotary_embedding`: rotates pairs of a head's elements by an angle per position.

XLA computes a table of cosines and sines per token, once for all heads; the kernel
reads x once and writes it once. The gradient is a generated kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.kernels import common, configs


def rotary_embedding(
    x: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array | None = None,
    *,
    base: float = 10_000.0,
    interleaved: bool = False,
    implementation: common.Implementation = "pallasite",
    config: common.RowConfig | None = None,
) -> jax.Array:
    """Rotates pair p of each head by `positions * frequencies[p]` (RoPE).

    Args:
        x: (batch, length, heads, width): queries or keys.
        positions: (batch, length) integers.
        frequencies: (pairs,), at most width / 2 of them; elements in no pair are
            unchanged. By default `base ** (-2 p / width)` for all pairs.
        interleaved: whether pair p is elements 2p and 2p + 1 (GPT-J) instead of p and
            p + pairs (GPT-NeoX, Llama).

    Returns:
        Like x. Angles and products are float32.
    """
    batch, length, _, width = common.check_rank(
        "rotary_embedding", "x", x, "batch, length, heads, width"
    )
    common.check_floats("rotary_embedding", x=x, frequencies=frequencies)
    common.check_integers("rotary_embedding", positions=positions)
    common.check_shape("rotary_embedding", "positions", positions, (batch, length))
    if frequencies is None:
        _check_base(base)
        frequencies = default_frequencies(width, base)
    if frequencies.ndim != 1 or 2 * len(frequencies) > width:
        raise SpecError(
            "rotary_embedding: more frequencies than half the head width",
            [("frequencies", frequencies.shape), ("head width", width)],
            fix=f"pass at most {width // 2} frequencies",
        )
    wide = common.statistics_dtype(x.dtype)
    angles = positions[..., None, None].astype(wide) * frequencies.astype(wide)
    compute = common.choose(implementation, _turn_by_kernel, _turn)
    return compute(
        x,
        jnp.cos(angles),
        jnp.sin(angles),
        interleaved=interleaved,
        config=configs.tuned_rows("rotary_embedding", config, x),
    )


def _check_base(base: Any) -> None:
    common.check_numbers("rotary_embedding", base=base)
    if jaxcompat.is_concrete(base) and not base > 0:
        raise SpecError(
            f"rotary_embedding: base is {base}",
            fix="pass a positive number, such as 10000.0",
        )


def default_frequencies(width: int, base: float = 10_000.0) -> jax.Array:
    """One per pair of a head: from 1 down to nearly 1 / base."""
    return base ** (-2.0 * jnp.arange(width // 2, dtype=jnp.float32) / width)


def _halves(pairs: int, interleaved: bool) -> tuple[slice, slice]:
    """The slices of the first and of the second elements of all pairs."""
    if interleaved:
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    return slice(0, pairs), slice(pairs, 2 * pairs)


def _turned(first, second, cos, sin):
    """The rotated pair, in its own dtype."""
    wide = cos.dtype
    a, b = first.astype(wide), second.astype(wide)
    turned = a * cos - b * sin, b * cos + a * sin
    return [x.astype(first.dtype) for x in turned]


def _turn(x, cos, sin, *, interleaved: bool, config: common.RowConfig):
    del config  # only kernels have blocks
    first, second = _halves(cos.shape[-1], interleaved)
    a, b = _turned(x[..., first], x[..., second], cos, sin)
    return x.at[..., first].set(a).at[..., second].set(b)


def _turn_by_kernel(x, cos, sin, *, interleaved: bool, config: common.RowConfig):
    if not interleaved:
        return _turn_rows(x, cos, sin, config)
    # XLA deinterleaves: no chip reads every second element efficiently.
    pairs = cos.shape[-1]
    apart = x[..., : 2 * pairs].reshape(*x.shape[:-1], pairs, 2).swapaxes(-1, -2)
    apart = _turn_rows(apart.reshape(*x.shape[:-1], 2 * pairs), cos, sin, config)
    joined = apart.reshape(*x.shape[:-1], 2, pairs).swapaxes(-1, -2)
    joined = joined.reshape(*x.shape[:-1], 2 * pairs)
    return jnp.concatenate([joined, x[..., 2 * pairs :]], axis=-1)


def _turn_rows(x, cos, sin, config: common.RowConfig):
    batch, length, heads, width = x.shape
    pairs = cos.shape[-1]
    first, second = _halves(pairs, interleaved=False)
    block = min(max(config.block_rows // max(heads, 1), 1), max(length, 1))

    def kernel(x_ref, cos_ref, sin_ref, o_ref):
        o_ref[..., first], o_ref[..., second] = _turned(
            x_ref[..., first], x_ref[..., second], cos_ref[...], sin_ref[...]
        )
        if 2 * pairs < width:
            o_ref[..., 2 * pairs :] = x_ref[..., 2 * pairs :]

    def tokens(heads, width):
        return pl.BlockSpec((None, block, heads, width), lambda b, i: (b, i, 0, 0))

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(batch, pl.cdiv(length, block)),
        in_specs=[tokens(heads, width), tokens(1, pairs), tokens(1, pairs)],
        out_specs=tokens(heads, width),
        cost_estimate=common.cost(3 * x.size, [x, x, cos, sin]),
        name="rotary_embedding",
    )(x, cos, sin)
