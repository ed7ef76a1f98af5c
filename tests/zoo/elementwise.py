"""Elementwise kernels: grids, odd shapes, element types, several outputs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

from .case import Family, booleans, integers, normal, uniform

zoo = Family("elementwise")


def add_vectors_kernel(x_ref, y_ref, o_ref):
    """One block of the sum of two vectors."""
    o_ref[...] = x_ref[...] + y_ref[...]


@zoo.case(
    reference=jnp.add,
    make_args=lambda rng: (normal(rng, 1024), normal(rng, 1024)),
)
def add_vectors(x, y, **call):
    block = pl.BlockSpec((256,), lambda i: (i,))
    return pl.pallas_call(
        add_vectors_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // 256,),
        in_specs=[block, block],
        out_specs=block,
        **call,
    )(x, y)


def gelu_chain_kernel(x_ref, o_ref):
    """A chain of activations on one tile of a matrix."""
    x = x_ref[...]
    o_ref[...] = jax.nn.gelu(x) * jnp.tanh(x) + jax.nn.silu(0.5 * x)


@zoo.case(
    reference=lambda x: jax.nn.gelu(x) * jnp.tanh(x) + jax.nn.silu(0.5 * x),
    make_args=lambda rng: (normal(rng, 64, 256),),
)
def gelu_chain(x, **call):
    tile = pl.BlockSpec((16, 128), lambda i, j: (i, j))
    return pl.pallas_call(
        gelu_chain_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 16, x.shape[1] // 128),
        in_specs=[tile],
        out_specs=tile,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
        **call,
    )(x)


def bias_residual_kernel(x_ref, bias_ref, residual_ref, o_ref):
    """Adds a bias row and a residual, then a ReLU."""
    total = x_ref[...] + bias_ref[...][None, :] + residual_ref[...]
    o_ref[...] = jnp.maximum(total, 0.0)


@zoo.case(
    reference=lambda x, bias, residual: jnp.maximum(x + bias[None, :] + residual, 0.0),
    make_args=lambda rng: (
        normal(rng, 37, 100),
        normal(rng, 100),
        normal(rng, 37, 100),
    ),
    tags="odd",
    vmap_axes=(0, None, 0),
)
def bias_residual(x, bias, residual, **call):
    rows, columns = x.shape
    tile = pl.BlockSpec((16, 32), lambda i, j: (i, j))
    return pl.pallas_call(
        bias_residual_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(rows, 16), pl.cdiv(columns, 32)),
        in_specs=[tile, pl.BlockSpec((32,), lambda i, j: (j,)), tile],
        out_specs=tile,
        **call,
    )(x, bias, residual)


def odd_parabola_kernel(x_ref, o_ref):
    """A polynomial of a vector whose length no block size divides."""
    x = x_ref[...]
    o_ref[...] = 3.0 - 2.0 * x + x * x


@zoo.case(
    reference=lambda x: 3.0 - 2.0 * x + x * x,
    make_args=lambda rng: (normal(rng, 1003),),
    tags="odd",
)
def odd_parabola(x, **call):
    block = pl.BlockSpec((96,), lambda i: (i,))
    return pl.pallas_call(
        odd_parabola_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.size, 96),),
        in_specs=[block],
        out_specs=block,
        **call,
    )(x)


def swiglu_kernel(gate_ref, up_ref, o_ref):
    """Gated linear unit: bfloat16 in memory, float32 in registers."""
    gate = gate_ref[...].astype(jnp.float32)
    up = up_ref[...].astype(jnp.float32)
    o_ref[...] = (jax.nn.silu(gate) * up).astype(o_ref.dtype)


def swiglu_reference(gate, up):
    product = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return product.astype(gate.dtype)


@zoo.case(
    reference=swiglu_reference,
    make_args=lambda rng: (
        normal(rng, 32, 128, dtype=jnp.bfloat16),
        normal(rng, 32, 128, dtype=jnp.bfloat16),
    ),
    tags="bf16",
    rtol=1e-2,
    atol=1e-2,
)
def swiglu_bf16(gate, up, **call):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        swiglu_kernel,
        out_shape=jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        grid=(4,),
        in_specs=[rows, rows],
        out_specs=rows,
        **call,
    )(gate, up)


def integer_mix(x, y):
    bits = (x << 3) ^ (y >> 2) | (x & y)
    return bits + lax.population_count(x) * lax.clz(y) + x // y - x % y + ~x


def integer_mix_kernel(x_ref, y_ref, o_ref):
    """Shifts, logic, bit counts, floor division and remainder of int32."""
    o_ref[...] = integer_mix(x_ref[...], y_ref[...])


@zoo.case(
    reference=integer_mix,
    make_args=lambda rng: (
        integers(rng, 40, 128, low=-5000, high=5000),
        integers(rng, 40, 128, low=1, high=300),
    ),
    tags="int nograd nofloat",
)
def integer_bits(x, y, **call):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        integer_mix_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(5,),
        in_specs=[rows, rows],
        out_specs=rows,
        **call,
    )(x, y)


def scramble(x):
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def hash_kernel(x_ref, o_ref):
    """An integer hash that relies on products wrapping modulo 2**32."""
    o_ref[...] = scramble(x_ref[...])


@zoo.case(
    reference=scramble,
    make_args=lambda rng: (integers(rng, 512, low=0, high=2**32, dtype=jnp.uint32),),
    tags="int nograd nofloat",
)
def hash_uint32(x, **call):
    block = pl.BlockSpec((128,), lambda i: (i,))
    return pl.pallas_call(
        hash_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4,),
        in_specs=[block],
        out_specs=block,
        **call,
    )(x)


def bool_logic_kernel(x_ref, y_ref, score_ref, o_ref, any_ref):
    """Boolean algebra, and whether each row holds a true value."""
    result = (x_ref[...] & ~y_ref[...]) ^ (score_ref[...] > 1.0)
    o_ref[...] = result
    any_ref[...] = jnp.any(result, axis=1, keepdims=True)


def bool_logic_reference(x, y, score):
    result = (x & ~y) ^ (score > 1.0)
    return result, jnp.any(result, axis=1, keepdims=True)


@zoo.case(
    reference=bool_logic_reference,
    make_args=lambda rng: (
        booleans(rng, 24, 8),
        booleans(rng, 24, 8),
        normal(rng, 24, 8),
    ),
    tags="bool nograd",
)
def bool_logic(x, y, score, **call):
    rows = pl.BlockSpec((8, 8), lambda i: (i, 0))
    return pl.pallas_call(
        bool_logic_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, jnp.bool_),
            jax.ShapeDtypeStruct((x.shape[0], 1), jnp.bool_),
        ),
        grid=(3,),
        in_specs=[rows, rows, rows],
        out_specs=(rows, pl.BlockSpec((8, 1), lambda i: (i, 0))),
        **call,
    )(x, y, score)


def where_clip_kernel(x_ref, low_ref, high_ref, o_ref):
    """Clamps to two bounds that vary, keeping values that are already small."""
    x = x_ref[...]
    clipped = jnp.clip(x, low_ref[...], high_ref[...])
    o_ref[...] = jnp.where(jnp.abs(x) < 0.25, x, clipped)


@zoo.case(
    reference=lambda x, low, high: jnp.where(
        jnp.abs(x) < 0.25, x, jnp.clip(x, low, high)
    ),
    make_args=lambda rng: (
        normal(rng, 4, 10, 50),
        uniform(rng, 4, 10, 50, low=-1.0, high=0.0),
        uniform(rng, 4, 10, 50, low=0.0, high=1.0),
    ),
    tags="odd",
)
def where_clip(x, low, high, **call):
    """A three-dimensional array, walked with its axes in another order."""
    tile = pl.BlockSpec((2, 8, 32), lambda k, j, i: (i, j, k))
    return pl.pallas_call(
        where_clip_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(2, 2, 2),
        in_specs=[tile, tile, tile],
        out_specs=tile,
        **call,
    )(x, low, high)


def quantize_rows(x):
    scale = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127.0
    return jnp.clip(jnp.round(x / scale), -127.0, 127.0).astype(jnp.int8), scale


def quantize_kernel(x_ref, quantized_ref, scale_ref):
    """Symmetric int8 quantisation with one scale per row."""
    quantized_ref[...], scale_ref[...] = quantize_rows(x_ref[...])


def quantize_args(rng):
    """Values so far from a tie that rounding errors cannot show."""
    levels = rng.integers(-126, 127, size=(16, 64)) + rng.uniform(-0.3, 0.3, (16, 64))
    levels[:, 0] = 127.0
    return (jnp.asarray(levels * rng.uniform(0.5, 2.0, (16, 1)), jnp.float32),)


@zoo.case(reference=quantize_rows, make_args=quantize_args, tags="int8 nograd")
def quantize_int8(x, **call):
    rows = pl.BlockSpec((8, 64), lambda i: (i, 0))
    return pl.pallas_call(
        quantize_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, jnp.int8),
            jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32),
        ),
        grid=(2,),
        in_specs=[rows],
        out_specs=(rows, pl.BlockSpec((8, 1), lambda i: (i, 0))),
        **call,
    )(x)


def rescale_f8_kernel(x_ref, scale_ref, wide_ref, narrow_ref):
    """float8 to bfloat16 with a scale, and to the other float8 format."""
    wide = x_ref[...].astype(jnp.float32) * scale_ref[...]
    wide_ref[...] = wide.astype(jnp.bfloat16)
    narrow_ref[...] = wide.astype(jnp.float8_e5m2)


def rescale_f8_reference(x, scale):
    wide = x.astype(jnp.float32) * scale
    return wide.astype(jnp.bfloat16), wide.astype(jnp.float8_e5m2)


@zoo.case(
    reference=rescale_f8_reference,
    make_args=lambda rng: (
        normal(rng, 16, 32, dtype=jnp.float8_e4m3fn),
        jnp.exp2(integers(rng, 16, 1, low=-3, high=4).astype(jnp.float32)),
    ),
    tags="f8 bf16 nograd",
    rtol=0.0,
    atol=0.0,
)
def rescale_f8(x, scale, **call):
    """Powers of two as scales keep every product exact."""
    rows = pl.BlockSpec((8, 32), lambda i: (i, 0))
    return pl.pallas_call(
        rescale_f8_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(x.shape, jnp.float8_e5m2),
        ),
        grid=(2,),
        in_specs=[rows, pl.BlockSpec((8, 1), lambda i: (i, 0))],
        out_specs=(rows, rows),
        **call,
    )(x, scale)


def scalar_affine_kernel(coefficients_ref, x_ref, o_ref):
    """Scale and offset come as scalars from SMEM and are broadcast."""
    o_ref[...] = coefficients_ref[0] * x_ref[...] + coefficients_ref[1]


@zoo.case(
    reference=lambda coefficients, x: coefficients[0] * x + coefficients[1],
    make_args=lambda rng: (normal(rng, 2), normal(rng, 48, 64)),
    tags="smem",
)
def scalar_affine(coefficients, x, **call):
    rows = pl.BlockSpec((16, 64), lambda i: (i, 0))
    return pl.pallas_call(
        scalar_affine_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), rows],
        out_specs=rows,
        **call,
    )(coefficients, x)


def rope_kernel(x_ref, cos_ref, sin_ref, o_ref):
    """Rotary position embedding of one block of positions, all heads."""
    half = x_ref.shape[-1] // 2
    left, right = x_ref[:, :, :half], x_ref[:, :, half:]
    cos, sin = cos_ref[...][:, None, :], sin_ref[...][:, None, :]
    o_ref[:, :, :half] = left * cos - right * sin
    o_ref[:, :, half:] = right * cos + left * sin


def rope_reference(x, cos, sin):
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


@zoo.case(
    reference=rope_reference,
    make_args=lambda rng: (
        normal(rng, 32, 4, 16),
        uniform(rng, 32, 8, low=-1.0),
        uniform(rng, 32, 8, low=-1.0),
    ),
    vmap_axes=(0, None, None),
)
def rope(x, cos, sin, **call):
    positions = pl.BlockSpec((8, 4, 16), lambda i: (i, 0, 0))
    angles = pl.BlockSpec((8, 8), lambda i: (i, 0))
    return pl.pallas_call(
        rope_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4,),
        in_specs=[positions, angles, angles],
        out_specs=positions,
        **call,
    )(x, cos, sin)


def adam_kernel(
    weight_ref,
    grad_ref,
    mean_ref,
    square_ref,
    new_weight_ref,
    new_mean_ref,
    new_square_ref,
    *,
    learning_rate,
    decay,
    square_decay,
):
    """One optimiser step: three outputs from one pass over memory."""
    grad = grad_ref[...]
    mean = decay * mean_ref[...] + (1.0 - decay) * grad
    square = square_decay * square_ref[...] + (1.0 - square_decay) * grad * grad
    new_weight_ref[...] = weight_ref[...] - learning_rate * mean / (
        jnp.sqrt(square) + 1e-6
    )
    new_mean_ref[...] = mean
    new_square_ref[...] = square


def adam_reference(weight, grad, mean, square):
    mean = 0.9 * mean + 0.1 * grad
    square = 0.99 * square + 0.01 * grad * grad
    return weight - 0.01 * mean / (jnp.sqrt(square) + 1e-6), mean, square


@zoo.case(
    reference=adam_reference,
    make_args=lambda rng: (
        normal(rng, 24, 128),
        normal(rng, 24, 128),
        normal(rng, 24, 128),
        uniform(rng, 24, 128, low=0.1),
    ),
)
def adam_update(weight, grad, mean, square, **call):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    kernel = functools.partial(
        adam_kernel, learning_rate=0.01, decay=0.9, square_decay=0.99
    )
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(weight.shape, weight.dtype)] * 3,
        grid=(3,),
        in_specs=[rows] * 4,
        out_specs=[rows] * 3,
        **call,
    )(weight, grad, mean, square)


def special(x, y):
    bounded = lax.erf(x) + jnp.log1p(y) + jnp.expm1(-y) + jnp.atan2(x, y)
    return (
        bounded + jnp.arcsinh(x) + lax.rsqrt(y) + jnp.cbrt(x) + jnp.sin(x) * jnp.cos(y)
    )


def special_kernel(x_ref, y_ref, o_ref):
    """Transcendental functions that a backend may have to build from others."""
    o_ref[...] = special(x_ref[...], y_ref[...])


@zoo.case(
    reference=special,
    make_args=lambda rng: (
        normal(rng, 16, 128),
        uniform(rng, 16, 128, low=0.1, high=3.0),
    ),
    rtol=2e-5,
    atol=2e-5,
)
def special_functions(x, y, **call):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        special_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(2,),
        in_specs=[rows, rows],
        out_specs=rows,
        **call,
    )(x, y)


def rounding(x):
    whole = jnp.floor(x) + jnp.ceil(0.5 * x) + jnp.round(x) + jnp.trunc(x)
    return (
        whole + jnp.sign(x) + lax.rem(x, jnp.full_like(x, 1.5)) + jnp.remainder(x, 0.75)
    )


def rounding_kernel(x_ref, o_ref):
    """All ways of rounding, and both remainders, in float16."""
    o_ref[...] = rounding(x_ref[...])


@zoo.case(
    reference=rounding,
    make_args=lambda rng: (normal(rng, 20, 64, dtype=jnp.float16, scale=4.0),),
    tags="f16 odd nograd",
    rtol=1e-2,
    atol=2e-2,
)
def rounding_f16(x, **call):
    rows = pl.BlockSpec((8, 64), lambda i: (i, 0))
    return pl.pallas_call(
        rounding_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        in_specs=[rows],
        out_specs=rows,
        **call,
    )(x)


def blend(first, second):
    total = (3 * first.astype(jnp.int32) + 2 * second.astype(jnp.int32)) // 4
    return jnp.minimum(total, 255).astype(jnp.uint8)


def blend_kernel(first_ref, second_ref, o_ref):
    """Mixes two images of bytes, saturating at white."""
    o_ref[...] = blend(first_ref[...], second_ref[...])


@zoo.case(
    reference=blend,
    make_args=lambda rng: (
        integers(rng, 18, 40, 3, high=256, dtype=jnp.uint8),
        integers(rng, 18, 40, 3, high=256, dtype=jnp.uint8),
    ),
    tags="int odd nograd nofloat",
)
def blend_uint8(first, second, **call):
    tile = pl.BlockSpec((8, 16, 3), lambda i, j: (i, j, 0))
    return pl.pallas_call(
        blend_kernel,
        out_shape=jax.ShapeDtypeStruct(first.shape, first.dtype),
        grid=(pl.cdiv(18, 8), pl.cdiv(40, 16)),
        in_specs=[tile, tile],
        out_specs=tile,
        **call,
    )(first, second)
