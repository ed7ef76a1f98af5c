"""`causal_conv1d`: a short depthwise convolution along time (Mamba)."""

import dataclasses

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite.kernels import common, configs
from pallasite.kernels.glu import ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class ConvConfig:
    """How a convolution is split: positions and channels per program."""

    block_length: int = 128
    block_channels: int = 128


SPACE = {"block_length": (32, 64, 128, 256), "block_channels": (64, 128, 256, 512)}


def causal_conv1d(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "identity",
    implementation: common.Implementation = "pallasite",
    config: ConvConfig | None = None,
) -> jax.Array:
    """`activation(sum(weights[i] * x[:, t - taps + 1 + i] for i) + bias)`.

    Args:
        x: (batch, length, channels), floating point; zero-padded at its start.
        weights: (taps, channels); the last tap applies to the position itself.
        bias: (channels,), or None for zeros.
        activation: one of `gated_linear_unit`'s activations.

    Returns:
        Like x; sums are accumulated in float32.
    """
    operation = "causal_conv1d"
    *_, channels = common.check_rank(operation, "x", x, "batch, length, channels")
    taps, _ = common.check_rank(operation, "weights", weights, "taps, channels")
    common.check_floats(operation, x=x, weights=weights, bias=bias)
    common.check_shape(operation, "weights", weights, (taps, channels))
    common.check_shape(operation, "bias", bias, (channels,))
    common.check_option(operation, "activation", activation, [*ACTIVATIONS])
    compute = common.choose(implementation, _by_blocks, _plain)
    bias = (
        jnp.zeros(channels, common.result_dtype(None, weights))
        if bias is None
        else bias
    )
    config = configs.tuned(operation, config, ConvConfig(), SPACE, (x, weights))
    how = {"activation": ACTIVATIONS[activation], "config": config}
    return compute(x, weights, bias, **how)


def _summed(parts, weights, bias, activation):
    """Sum of the shifted positions, first tap first, times their weights."""
    wide = common.statistics_dtype(parts[0].dtype)
    total = bias.astype(wide)
    for part, weight in zip(parts, weights, strict=True):
        total = total + part.astype(wide) * weight.astype(wide)
    return activation(total).astype(parts[0].dtype)


def _plain(x, weights, bias, *, activation, config):
    del config  # only kernels have blocks
    taps, length = len(weights), x.shape[1]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    parts = [padded[:, i : i + length] for i in range(taps)]
    return _summed(parts, list(weights), bias, activation)


def _by_blocks(x, weights, bias, *, activation, config):
    batch, length, channels = x.shape
    taps = len(weights)
    block = min(config.block_length, max(length, 1))
    wide = min(config.block_channels, max(channels, 1))

    def kernel(x_ref, weights_ref, bias_ref, o_ref):
        parts = [x_ref[i : i + block] for i in range(taps)]
        rows = [weights_ref[i : i + 1] for i in range(taps)]
        o_ref[...] = _summed(parts, rows, bias_ref[...], activation)

    def per_channel(rows):
        return pl.BlockSpec((rows, wide), lambda b, j, i: (0, j))

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(batch, pl.cdiv(channels, wide), pl.cdiv(length, block)),
        in_specs=[
            pl.BlockSpec(
                (None, pl.Element(block + taps - 1, (taps - 1, 0)), wide),
                lambda b, j, i: (b, i * block, j),
                fill=0,
            ),
            per_channel(taps),
            per_channel(1),
        ],
        out_specs=pl.BlockSpec((None, block, wide), lambda b, j, i: (b, i, j)),
        cost_estimate=common.cost(2 * taps * x.size, [x, x, weights, bias]),
        name="causal_conv1d",
    )(x, weights, bias[None])
