"""`group_norm`: normalises groups of channels over all positions of an image.

One kernel computes each block's mean and centred sum of squares per channel; XLA
combines them into a factor and an offset per channel, which a second kernel applies.
x is read twice and written once, whatever its size. Its gradient reads x and the
result's cotangent twice and writes once: one kernel computes the sums over positions,
and XLA the rest, as the two terms of x's cotangent are elementwise.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

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
    return _normalised(x, scale, bias, groups, epsilon, config)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _normalised(x, scale, bias, groups, epsilon, config):
    mean, variance = _statistics(x, groups, config)
    factors = _factors(x, mean, variance, scale, bias, epsilon=epsilon)
    return _applied(x, *factors, config)


def _normalised_jvp(groups, epsilon, config, primals, tangents):
    """What tangents of x and of its statistics add is elementwise: XLA's to fuse.

    The kernels' own derivatives would each write a cotangent of x, and XLA a third.
    """
    x, *weights = primals
    d_x, *d_weights = tangents
    mean, _ = statistics = _statistics(x, groups, config)
    if isinstance(d_x, SymbolicZero):
        d_x = None
        d_statistics = jax.tree.map(jnp.zeros_like, statistics)
    else:
        d_x = d_x.astype(mean.dtype)
        d_groups = d_x.reshape(*x.shape[:2], groups, -1)
        centred = x.astype(mean.dtype).reshape(d_groups.shape) - mean
        average = functools.partial(jnp.mean, axis=(1, 3), keepdims=True)
        d_statistics = average(d_groups), 2 * average(centred * d_groups)
    factors, d_factors = jax.jvp(
        functools.partial(_factors, x, epsilon=epsilon),
        (*statistics, *weights),
        (*d_statistics, *common.instantiated(d_weights, weights)),
    )
    applied = functools.partial(_applied, x, config=config)
    out, d_out = jax.jvp(applied, factors, d_factors)
    if d_x is not None:
        d_out = d_out + (d_x * factors[0]).astype(d_out.dtype)
    return out, d_out


_normalised.defjvp(_normalised_jvp, symbolic_zeros=True)


def _statistics(x, groups, config):
    """Mean and variance per group: (batch, 1, groups, 1)."""
    batch, positions, channels = x.shape
    block = min(config.block_rows, positions)
    blocks = pl.cdiv(positions, block)
    wide = common.statistics_dtype(x.dtype)

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
        in_specs=[pl.BlockSpec((None, block, channels), lambda b, i: (b, i, 0))],
        out_specs=[partial, partial],
        cost_estimate=common.cost(4 * x.size, [x]),
        name="group_norm_statistics",
    )(x)

    # Combined by Chan's formula, which avoids cancellation in the sums of squares.
    shape = (batch, blocks, groups, channels // groups)
    means, squares = means.reshape(shape), squares.reshape(shape)
    counts = np.minimum(block, positions - block * np.arange(blocks))
    counts = counts.astype(wide)[:, None, None]
    number = positions * (channels // groups)
    mean = jnp.sum(means * counts, axis=(1, 3), keepdims=True) / number
    squares = squares + counts * (means - mean) ** 2
    return mean, jnp.sum(squares, axis=(1, 3), keepdims=True) / number


def _factors(x, mean, variance, scale, bias, *, epsilon):
    """What x is multiplied by, and what is then added: (batch, 1, channels)."""
    batch, _, channels = x.shape
    groups = mean.shape[2]
    per_channel = (batch, 1, channels)
    spread = (batch, 1, groups, channels // groups)
    factor = jnp.broadcast_to(lax.rsqrt(variance + epsilon), spread)
    factor = factor.reshape(per_channel)
    mean = jnp.broadcast_to(mean, spread).reshape(per_channel)
    if scale is not None:
        factor = factor * scale.astype(mean.dtype)
    summand = -mean * factor
    if bias is not None:
        summand = summand + bias.astype(mean.dtype)
    return factor, summand


def _applied(x, factor, summand, config):
    batch, positions, channels = x.shape
    block = min(config.block_rows, positions)

    def normalise(x_ref, factor_ref, summand_ref, o_ref):
        out = x_ref[...].astype(factor.dtype) * factor_ref[...] + summand_ref[...]
        o_ref[...] = out.astype(o_ref.dtype)

    rows = pl.BlockSpec((None, block, channels), lambda b, i: (b, i, 0))
    of_channel = pl.BlockSpec((None, 1, channels), lambda b, i: (b, 0, 0))
    return pl.pallas_call(
        normalise,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(batch, pl.cdiv(positions, block)),
        in_specs=[rows, of_channel, of_channel],
        out_specs=rows,
        cost_estimate=common.cost(2 * x.size, [x, x]),
        name="group_norm",
    )(x, factor, summand)
