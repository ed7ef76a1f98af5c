"""`group_norm`: normalises groups of channels over all positions of an image.

One kernel computes each block's mean and centred sum of squares per channel; XLA
combines them into a factor and an offset per channel, which a second kernel applies.
x is read twice and written once, whatever its size.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite.errors import SpecError
from pallasite.kernels import common, configs


def group_norm(
    x: jax.Array,
    groups: int,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    implementation: common.Implementation = "pallasite",
    config: common.RowConfig | None = None,
) -> jax.Array:
    """`(x - mean) / sqrt(variance + epsilon) * scale + bias`, statistics per group.

    Args:
        x: (batch, ..., channels), floating point.
        groups: divides channels; a group is a run of consecutive channels.
        scale, bias: (channels,), or None for ones and zeros.

    Returns:
        Like x; statistics are float32.
    """
    common.check_array("group_norm", "x", x)
    common.check_floats("group_norm", x=x, scale=scale, bias=bias)
    common.check_numbers("group_norm", epsilon=epsilon)
    fix = "pass a divisor of the channels; under jit, groups is a static argument"
    common.check_count("group_norm", "groups", groups, 1, fix)
    if x.ndim < 2 or x.shape[-1] % groups:
        raise SpecError(
            "group_norm: groups do not divide the channels",
            [("x", x.shape), ("groups", groups)],
            fix="pass x as (batch, ..., channels) and a divisor of channels",
        )
    for name, weight in {"scale": scale, "bias": bias}.items():
        common.check_shape("group_norm", name, weight, x.shape[-1:])
    compute = common.choose(implementation, _by_blocks, _plain)
    options = {"groups": groups, "epsilon": epsilon}
    positions = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    config = configs.tuned_rows("group_norm", config, positions)
    if not x.size:
        return jnp.asarray(x)
    out = compute(positions, scale, bias, config=config, **options)
    return out.reshape(x.shape)


def _plain(x, scale, bias, *, groups, epsilon, config):
    del config  # only kernels have blocks
    wide = common.statistics_dtype(x.dtype)
    grouped = x.astype(wide).reshape(*x.shape[:2], groups, -1)
    centred = grouped - jnp.mean(grouped, axis=(1, 3), keepdims=True)
    variance = jnp.mean(centred * centred, axis=(1, 3), keepdims=True)
    out = (centred * lax.rsqrt(variance + epsilon)).reshape(x.shape)
    if scale is not None:
        out = out * scale.astype(wide)
    if bias is not None:
        out = out + bias.astype(wide)
    return out.astype(x.dtype)


def _by_blocks(x, scale, bias, *, groups, epsilon, config):
    batch, positions, channels = x.shape
    block = min(config.block_rows, positions)
    blocks = pl.cdiv(positions, block)
    wide = common.statistics_dtype(x.dtype)
    rows = pl.BlockSpec((None, block, channels), lambda b, i: (b, i, 0))

    def statistics(x_ref, mean_ref, squares_ref):
        count = jnp.minimum(block, positions - pl.program_id(1) * block)
        inside = lax.broadcasted_iota(jnp.int32, x_ref.shape, 0) < count
        wide_x = jnp.where(inside, x_ref[...].astype(wide), 0)
        mean = jnp.sum(wide_x, axis=0, keepdims=True) / count.astype(wide)
        centred = jnp.where(inside, wide_x - mean, 0)
        mean_ref[...] = mean
        squares_ref[...] = jnp.sum(centred * centred, axis=0, keepdims=True)

    partial = pl.BlockSpec((None, None, 1, channels), lambda b, i: (b, i, 0, 0))
    means, squares = pl.pallas_call(
        statistics,
        out_shape=[jax.ShapeDtypeStruct((batch, blocks, 1, channels), wide)] * 2,
        grid=(batch, blocks),
        in_specs=[rows],
        out_specs=[partial, partial],
        cost_estimate=common.cost(4 * x.size, [x]),
        name="group_norm_statistics",
    )(x)

    # Combined by Chan's formula, which avoids cancellation in the sums of squares.
    shape = (batch, blocks, groups, channels // groups)
    means, squares = means.reshape(shape), squares.reshape(shape)
    counts = jnp.minimum(block, positions - block * jnp.arange(blocks))
    counts = counts.astype(wide)[:, None, None]
    number = positions * (channels // groups)
    mean = jnp.sum(means * counts, axis=(1, 3), keepdims=True) / number
    squares = squares + counts * (means - mean) ** 2
    variance = jnp.sum(squares, axis=(1, 3), keepdims=True) / number
    per_channel = (batch, 1, channels // groups * groups)
    spread = (batch, 1, groups, channels // groups)
    factor = jnp.broadcast_to(lax.rsqrt(variance + epsilon), spread)
    factor = factor.reshape(per_channel)
    mean = jnp.broadcast_to(mean, spread).reshape(per_channel)
    if scale is not None:
        factor = factor * scale.astype(wide)
    summand = -mean * factor
    if bias is not None:
        summand = summand + bias.astype(wide)

    def normalise(x_ref, factor_ref, summand_ref, o_ref):
        out = x_ref[...].astype(wide) * factor_ref[...] + summand_ref[...]
        o_ref[...] = out.astype(o_ref.dtype)

    of_channel = pl.BlockSpec((None, 1, channels), lambda b, i: (b, 0, 0))
    return pl.pallas_call(
        normalise,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(batch, blocks),
        in_specs=[rows, of_channel, of_channel],
        out_specs=rows,
        cost_estimate=common.cost(2 * x.size, [x, x]),
        name="group_norm",
    )(x, factor, summand)
