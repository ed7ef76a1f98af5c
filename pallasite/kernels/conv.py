"""`causal_conv1d`: a short depthwise convolution along time (Mamba)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

import pallasite as pl
from pallasite.errors import SpecError
from pallasite.kernels import common, configs
from pallasite.kernels.glu import ACTIVATIONS, activation_of
from pallasite.target import Gpu


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
    if weights.shape[1] != channels:
        shapes = [("x has shape", x.shape), ("weights have shape", weights.shape)]
        fix = "pass x (batch, length, channels) and weights (taps, channels)"
        if weights.shape[0] == channels:
            fix = f"pass weights.T, of shape {weights.shape[::-1]}: (taps, channels)"
        elif weights.shape[1] == x.shape[1]:
            fix = "pass jnp.swapaxes(x, 1, 2): x is (batch, length, channels)"
        raise SpecError(
            f"{operation}: x and weights differ in their channels", shapes, fix=fix
        )
    if not taps:
        raise SpecError(
            f"{operation}: weights have no taps",
            [("weights", weights.shape)],
            fix="pass weights (taps, channels) with at least one tap",
        )
    common.check_shape(operation, "bias", bias, (channels,))
    activation = activation_of(operation, activation)
    compute = common.choose(implementation, _by_blocks, _plain)
    bias = (
        jnp.zeros(channels, common.result_dtype(None, weights))
        if bias is None
        else bias
    )
    config = configs.tuned(operation, config, ConvConfig(), SPACE, (x, weights))
    how = {"activation": ACTIVATIONS[activation], "config": config}
    return compute(x, weights, bias, **how)


def _summed(parts, weights, bias):
    """Sum of the shifted positions, first tap first, times their weights."""
    wide = common.statistics_dtype(parts[0].dtype)
    total = bias.astype(wide)
    for part, weight in zip(parts, weights, strict=True):
        total = total + part.astype(wide) * weight.astype(wide)
    return total


def _plain(x, weights, bias, *, activation, config):
    del config  # only kernels have blocks
    taps, length = len(weights), x.shape[1]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    parts = [padded[:, i : i + length] for i in range(taps)]
    return activation(_summed(parts, list(weights), bias)).astype(x.dtype)


def _by_blocks(x, weights, bias, *, activation, config):
    return _convolved(x, weights, bias[None], activation, config)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _convolved(x, weights, bias, activation, config):
    """The convolution; a kernel of its own adds up what a tangent of x contributes.

    Blocks of x overlap: a backward kernel derived from this one adds to x's cotangent
    in memory, once per tap, one block after another. In two steps, one kernel writes
    the cotangent of the sums, whose blocks do not overlap, and another gathers x's.
    """
    return _kernel(x, weights, bias, activation=activation, config=config)


def _convolved_jvp(activation, config, primals, tangents):
    x, weights, bias = primals
    d_x, *d_rest = tangents
    call = functools.partial(_kernel, activation=activation)
    d_rest = common.instantiated(tuple(d_rest), (weights, bias))
    if isinstance(d_x, SymbolicZero):
        of_weights = functools.partial(call, x, config=config)
        return jax.jvp(of_weights, (weights, bias), d_rest)
    d_total = _kernel(
        d_x, weights, jnp.zeros_like(bias), activation=lambda x: x, config=config
    )
    out = _convolved(x, weights, bias, activation, config)
    tangents = (d_total, *d_rest)
    return out, call(x, weights, bias, tangents, config=_for_tangents(config))


_convolved.defjvp(_convolved_jvp, symbolic_zeros=True)


def _for_tangents(config):
    """Blocks for the kernel of tangents, and so for that of the cotangents.

    The latter holds several tiles at a time and sums over positions. On a GPU, tiles of
    few positions and many channels stay in registers, each thread sums its channels
    by itself, and two programs share an SM.
    """
    if not configs.traced_for(Gpu):
        return config
    length, channels = min(config.block_length, 4), max(config.block_channels, 512)
    return ConvConfig(length, channels)


def _kernel(x, weights, bias, tangents=None, *, activation, config):
    """The result, or the tangent for those of the sums, the weights and the bias."""
    batch, length, channels = x.shape
    taps = len(weights)
    block = min(config.block_length, max(length, 1))
    wide = min(config.block_channels, max(channels, 1))

    def per_tap(ref, rows):
        return [ref[i : i + rows] for i in range(taps)]

    def kernel(x_ref, weights_ref, bias_ref, o_ref):
        parts, rows = per_tap(x_ref, block), per_tap(weights_ref, 1)
        total = _summed(parts, rows, bias_ref[...])
        o_ref[...] = activation(total).astype(o_ref.dtype)

    def tangent_kernel(x_ref, weights_ref, bias_ref, *refs):
        d_total_ref, *d_weights_refs, d_bias_ref, o_ref = refs
        parts, rows = per_tap(x_ref, block), per_tap(weights_ref, 1)
        total = _summed(parts, rows, bias_ref[...])
        d_rows = [ref[...] for ref in d_weights_refs]
        d_total = d_total_ref[...].astype(total.dtype)
        d_total = d_total + _summed(parts, d_rows, d_bias_ref[...])
        _, d_out = jax.jvp(activation, (total,), (d_total,))
        o_ref[...] = d_out.astype(o_ref.dtype)

    overlapping = pl.BlockSpec(
        (None, pl.Element(block + taps - 1, (taps - 1, 0)), wide),
        lambda b, j, i: (b, i * block, j),
        fill=0,
    )
    own = pl.BlockSpec((None, block, wide), lambda b, j, i: (b, i, j))

    def per_channel(rows):
        return pl.BlockSpec((rows, wide), lambda b, j, i: (0, j))

    operands = [x, weights, bias]
    specs = [overlapping, per_channel(taps), per_channel(1)]
    if tangents is not None:
        d_total, d_weights, d_bias = tangents
        # A sum for each tap can stay in registers; rows of a block could not.
        operands += [d_total, *jnp.split(d_weights, taps), d_bias]
        specs += [own] + [per_channel(1)] * (taps + 1)
    return pl.pallas_call(
        kernel if tangents is None else tangent_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(batch, pl.cdiv(channels, wide), pl.cdiv(length, block)),
        in_specs=specs,
        out_specs=own,
        cost_estimate=common.cost(2 * taps * x.size, [x, *operands]),
        name="causal_conv1d",
    )(*operands)
