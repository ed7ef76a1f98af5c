"""Row reductions: softmax, normalisations, losses; whole and streamed."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

from .case import Family, integers, normal, uniform

zoo = Family("softmax_norms")


def row_softmax_kernel(x_ref, o_ref):
    """Softmax of whole rows, several rows at a time."""
    x = x_ref[...]
    weights = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    o_ref[...] = weights / jnp.sum(weights, axis=1, keepdims=True)


@zoo.case(
    reference=lambda x: jax.nn.softmax(x, axis=1),
    make_args=lambda rng: (normal(rng, 50, 80, scale=3.0),),
    tags="odd",
)
def row_softmax(x, **call):
    rows = pl.BlockSpec((16, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        row_softmax_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], 16),),
        in_specs=[rows],
        out_specs=rows,
        **call,
    )(x)


@zoo.case(
    reference=lambda x: jax.nn.softmax(x, axis=1),
    make_args=lambda rng: (normal(rng, 24, 100, scale=3.0),),
    tags="odd fill",
)
def filled_softmax(x, **call):
    """Blocks wider than the array: `fill` makes the missing columns weigh nothing."""
    fill = pl.BlockSpec((8, 128), lambda i: (i, 0), fill=-jnp.inf)
    return pl.pallas_call(
        row_softmax_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        in_specs=[fill],
        out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
        **call,
    )(x)


def two_pass_softmax_kernel(x_ref, o_ref, max_ref, sum_ref):
    """First pass over the columns: running maximum and sum. Second pass: the result."""
    phase, column = pl.program_id(1), pl.program_id(2)
    x = x_ref[...]

    @pl.when((phase == 0) & (column == 0))
    def start():
        max_ref[...] = jnp.full_like(max_ref, -jnp.inf)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(phase == 0)
    def gather_statistics():
        previous = max_ref[...]
        current = jnp.maximum(previous, jnp.max(x, axis=1, keepdims=True))
        block_sum = jnp.sum(jnp.exp(x - current), axis=1, keepdims=True)
        sum_ref[...] = sum_ref[...] * jnp.exp(previous - current) + block_sum
        max_ref[...] = current

    @pl.when(phase == 1)
    def normalise():
        o_ref[...] = jnp.exp(x - max_ref[...]) / sum_ref[...]


@zoo.case(
    reference=lambda x: jax.nn.softmax(x, axis=1),
    make_args=lambda rng: (normal(rng, 16, 256, scale=3.0),),
    tags="scratch",
)
def two_pass_softmax(x, **call):
    """In the first pass the output rests on the block written next."""
    return pl.pallas_call(
        two_pass_softmax_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 8, 2, x.shape[1] // 64),
        in_specs=[pl.BlockSpec((8, 64), lambda i, phase, j: (i, j))],
        out_specs=pl.BlockSpec((8, 64), lambda i, phase, j: (i, phase * j)),
        scratch_shapes=[
            pltpu.VMEM((8, 1), jnp.float32),
            pltpu.VMEM((8, 1), jnp.float32),
        ],
        **call,
    )(x)


def layer_norm_kernel(
    x_ref, scale_ref, offset_ref, o_ref, mean_ref, rstd_ref, *, epsilon
):
    """Layer normalisation that also keeps what a backward pass needs."""
    x = x_ref[...]
    mean = jnp.mean(x, axis=1, keepdims=True)
    centred = x - mean
    rstd = lax.rsqrt(jnp.mean(centred * centred, axis=1, keepdims=True) + epsilon)
    o_ref[...] = centred * rstd * scale_ref[...] + offset_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_reference(x, scale, offset):
    mean = jnp.mean(x, axis=1, keepdims=True)
    rstd = 1.0 / jnp.sqrt(jnp.var(x, axis=1, keepdims=True) + 1e-6)
    return (x - mean) * rstd * scale + offset, mean, rstd


@zoo.case(
    reference=layer_norm_reference,
    make_args=lambda rng: (normal(rng, 32, 96), normal(rng, 1, 96), normal(rng, 1, 96)),
    vmap_axes=(0, None, None),
)
def layer_norm(x, scale, offset, **call):
    rows = pl.BlockSpec((8, 96), lambda i: (i, 0))
    shared = pl.BlockSpec((1, 96), lambda i: (0, 0))
    column = pl.BlockSpec((8, 1), lambda i: (i, 0))
    statistic = jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32)
    return pl.pallas_call(
        functools.partial(layer_norm_kernel, epsilon=1e-6),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype), statistic, statistic),
        grid=(4,),
        in_specs=[rows, shared, shared],
        out_specs=(rows, column, column),
        **call,
    )(x, scale, offset)


def rms(x):
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rms_norm_kernel(x_ref, scale_ref, o_ref):
    """Root-mean-square normalisation of bfloat16 rows, computed in float32."""
    scale = scale_ref[...].astype(jnp.float32)[None, :]
    o_ref[...] = (rms(x_ref[...]) * scale).astype(o_ref.dtype)


@zoo.case(
    reference=lambda x, scale: (rms(x) * scale.astype(jnp.float32)[None, :]).astype(
        x.dtype
    ),
    make_args=lambda rng: (
        normal(rng, 21, 128, dtype=jnp.bfloat16),
        normal(rng, 128, dtype=jnp.bfloat16),
    ),
    tags="bf16 odd",
    rtol=1e-2,
    atol=1e-2,
)
def rms_norm_bf16(x, scale, **call):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        rms_norm_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], 8),),
        in_specs=[rows, pl.BlockSpec((128,), lambda i: (0,))],
        out_specs=rows,
        **call,
    )(x, scale)


def residual_rms_norm_kernel(x_ref, residual_ref, scale_ref, o_ref, sum_ref):
    """Adds the residual, keeps the sum for the next layer, and normalises it."""
    total = x_ref[...] + residual_ref[...]
    sum_ref[...] = total
    o_ref[...] = rms(total) * (1.0 + scale_ref[...])


def residual_rms_norm_reference(x, residual, scale):
    total = x + residual
    return rms(total) * (1.0 + scale), total


@zoo.case(
    reference=residual_rms_norm_reference,
    make_args=lambda rng: (
        normal(rng, 24, 64),
        normal(rng, 24, 64),
        normal(rng, 1, 64),
    ),
    tags="alias",
    vmap_axes=(0, 0, None),
)
def residual_rms_norm(x, residual, scale, **call):
    """The sum takes the memory of the residual."""
    rows = pl.BlockSpec((8, 64), lambda i: (i, 0))
    return pl.pallas_call(
        residual_rms_norm_kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        grid=(3,),
        in_specs=[rows, rows, pl.BlockSpec((1, 64), lambda i: (0, 0))],
        out_specs=[rows, rows],
        input_output_aliases={1: 1},
        **call,
    )(x, residual, scale)


def group_norm_kernel(x_ref, scale_ref, offset_ref, o_ref, *, groups):
    """Normalises groups of channels of one image."""
    channels, positions = x_ref.shape
    grouped = x_ref[...].reshape(groups, channels // groups * positions)
    grouped = grouped - jnp.mean(grouped, axis=1, keepdims=True)
    variance = jnp.mean(jnp.square(grouped), axis=1, keepdims=True)
    normal = (grouped * lax.rsqrt(variance + 1e-5)).reshape(channels, positions)
    o_ref[...] = normal * scale_ref[...] + offset_ref[...]


def group_norm_reference(x, scale, offset):
    grouped = x.reshape(x.shape[0], 4, -1)
    mean = grouped.mean(axis=2, keepdims=True)
    variance = grouped.var(axis=2, keepdims=True)
    normal = ((grouped - mean) / jnp.sqrt(variance + 1e-5)).reshape(x.shape)
    return normal * scale[None] + offset[None]


@zoo.case(
    reference=group_norm_reference,
    make_args=lambda rng: (
        normal(rng, 3, 16, 36),
        normal(rng, 16, 1),
        normal(rng, 16, 1),
    ),
    vmap_axes=(0, None, None),
)
def group_norm(x, scale, offset, **call):
    image = pl.BlockSpec((None, 16, 36), lambda n: (n, 0, 0))
    channel = pl.BlockSpec((16, 1), lambda n: (0, 0))
    return pl.pallas_call(
        functools.partial(group_norm_kernel, groups=4),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        in_specs=[image, channel, channel],
        out_specs=image,
        **call,
    )(x, scale, offset)


def log_softmax_kernel(x_ref, o_ref):
    """Log-softmax down the columns, through the library function."""
    o_ref[...] = jax.nn.log_softmax(x_ref[...], axis=0)


@zoo.case(
    reference=lambda x: jax.nn.log_softmax(x, axis=0),
    make_args=lambda rng: (normal(rng, 40, 70, scale=3.0),),
    tags="odd",
)
def log_softmax_columns(x, **call):
    columns = pl.BlockSpec((40, 32), lambda j: (0, j))
    return pl.pallas_call(
        log_softmax_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[1], 32),),
        in_specs=[columns],
        out_specs=columns,
        **call,
    )(x)


def streaming_logsumexp_kernel(x_ref, o_ref, max_ref, sum_ref):
    """Running log-sum-exp; the one-dimensional result appears with the last block."""
    column = pl.program_id(1)

    @pl.when(column == 0)
    def start():
        max_ref[...] = jnp.full(max_ref.shape, -1e30, max_ref.dtype)
        sum_ref[...] = jnp.zeros(sum_ref.shape, sum_ref.dtype)

    x = x_ref[...]
    previous = max_ref[...]
    current = jnp.maximum(previous, x.max(axis=1))
    exponents = jnp.exp(x - current[:, None])
    sum_ref[...] = sum_ref[...] * jnp.exp(previous - current) + exponents.sum(axis=1)
    max_ref[...] = current

    @pl.when(column == pl.num_programs(1) - 1)
    def finish():
        o_ref[...] = max_ref[...] + jnp.log(sum_ref[...])


@zoo.case(
    reference=lambda x: jax.nn.logsumexp(x, axis=1),
    make_args=lambda rng: (normal(rng, 16, 192, scale=5.0),),
    tags="scratch",
)
def streaming_logsumexp(x, **call):
    return pl.pallas_call(
        streaming_logsumexp_kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0],), x.dtype),
        grid=(2, 3),
        in_specs=[pl.BlockSpec((8, 64), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((8,), lambda i, j: (i,)),
        scratch_shapes=[pltpu.VMEM((8,), jnp.float32), pltpu.VMEM((8,), jnp.float32)],
        **call,
    )(x)


def cross_entropy_kernel(
    logits_ref, labels_ref, loss_ref, max_ref, sum_ref, picked_ref, *, vocabulary
):
    """Streams the vocabulary; picks the logit of the label as it comes by."""
    block = pl.program_id(1)

    @pl.when(block == 0)
    def start():
        max_ref[...] = jnp.full_like(max_ref, -1e30)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        picked_ref[...] = jnp.zeros_like(picked_ref)

    columns = lax.broadcasted_iota(jnp.int32, logits_ref.shape, 1)
    columns = columns + block * logits_ref.shape[1]
    logits = jnp.where(columns < vocabulary, logits_ref[...], -1e30)
    previous = max_ref[...]
    current = jnp.maximum(previous, logits.max(axis=1, keepdims=True))
    total = jnp.exp(logits - current).sum(axis=1, keepdims=True)
    sum_ref[...] = sum_ref[...] * jnp.exp(previous - current) + total
    max_ref[...] = current
    is_label = columns == labels_ref[...]
    picked_ref[...] += jnp.where(is_label, logits, 0.0).sum(axis=1, keepdims=True)

    @pl.when(block == pl.num_programs(1) - 1)
    def finish():
        loss_ref[...] = max_ref[...] + jnp.log(sum_ref[...]) - picked_ref[...]


def cross_entropy_reference(logits, labels):
    log_probabilities = jax.nn.log_softmax(logits, axis=1)
    return -jnp.take_along_axis(log_probabilities, labels, axis=1)


@zoo.case(
    reference=cross_entropy_reference,
    make_args=lambda rng: (
        normal(rng, 16, 200, scale=3.0),
        integers(rng, 16, 1, high=200),
    ),
    tags="odd scratch",
)
def cross_entropy(logits, labels, **call):
    tokens, vocabulary = logits.shape
    column = pl.BlockSpec((8, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        functools.partial(cross_entropy_kernel, vocabulary=vocabulary),
        out_shape=jax.ShapeDtypeStruct((tokens, 1), jnp.float32),
        grid=(tokens // 8, pl.cdiv(vocabulary, 64)),
        in_specs=[pl.BlockSpec((8, 64), lambda i, j: (i, j)), column],
        out_specs=column,
        scratch_shapes=[pltpu.VMEM((8, 1), jnp.float32)] * 3,
        **call,
    )(logits, labels)


def batch_moments_kernel(x_ref, mean_ref, variance_ref):
    """Merges the mean and variance of each block of rows into the running ones."""
    step = pl.program_id(0)
    rows = x_ref.shape[0]
    block_mean = jnp.mean(x_ref[...], axis=0, keepdims=True)
    block_variance = jnp.mean(
        jnp.square(x_ref[...] - block_mean), axis=0, keepdims=True
    )

    @pl.when(step == 0)
    def start():
        mean_ref[...] = block_mean
        variance_ref[...] = block_variance

    @pl.when(step > 0)
    def merge():
        seen = (step * rows).astype(jnp.float32)
        weight = rows / (seen + rows)
        delta = block_mean - mean_ref[...]
        mean_ref[...] += weight * delta
        spread = variance_ref[...] * (1.0 - weight) + block_variance * weight
        variance_ref[...] = spread + weight * (1.0 - weight) * delta * delta


@zoo.case(
    reference=lambda x: (x.mean(axis=0, keepdims=True), x.var(axis=0, keepdims=True)),
    make_args=lambda rng: (normal(rng, 64, 32) + 2.0,),
)
def batch_moments(x, **call):
    total = pl.BlockSpec((1, 32), lambda i: (0, 0))
    return pl.pallas_call(
        batch_moments_kernel,
        out_shape=[jax.ShapeDtypeStruct((1, 32), x.dtype)] * 2,
        grid=(4,),
        in_specs=[pl.BlockSpec((16, 32), lambda i: (i, 0))],
        out_specs=[total, total],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        **call,
    )(x)


def softmax_backward_kernel(y_ref, dy_ref, dx_ref):
    """Gradient of softmax from its own output."""
    y, dy = y_ref[...], dy_ref[...]
    dx_ref[...] = y * (dy - jnp.sum(y * dy, axis=-1, keepdims=True))


def softmax_backward_reference(y, dy):
    """The gradient of softmax at log(y), whose value is y."""
    return jax.vjp(lambda x: jax.nn.softmax(x, axis=-1), jnp.log(y))[1](dy)[0]


@zoo.case(
    reference=softmax_backward_reference,
    make_args=lambda rng: (
        jax.nn.softmax(normal(rng, 2, 20, 48), axis=-1),
        normal(rng, 2, 20, 48),
    ),
    tags="odd",
)
def softmax_backward(y, dy, **call):
    rows = pl.BlockSpec((pl.Squeezed(), 8, 48), lambda b, i: (b, i, 0))
    return pl.pallas_call(
        softmax_backward_kernel,
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid=(2, 3),
        in_specs=[rows, rows],
        out_specs=rows,
        **call,
    )(y, dy)


def normalise_columns_kernel(x_ref, o_ref, norm_ref):
    """Accumulates squared column norms, then divides the whole matrix at the end."""
    step = pl.program_id(0)
    rows = x_ref.shape[0]

    @pl.when(step == 0)
    def start():
        norm_ref[...] = jnp.zeros_like(norm_ref)

    block = x_ref[...]
    norm_ref[...] += jnp.sum(block * block, axis=0, keepdims=True)
    o_ref[pl.ds(step * rows, rows), :] = block

    @pl.when(step == pl.num_programs(0) - 1)
    def finish():
        o_ref[...] = o_ref[...] * lax.rsqrt(norm_ref[...])


@zoo.case(
    reference=lambda x: x / jnp.linalg.norm(x, axis=0, keepdims=True),
    make_args=lambda rng: (uniform(rng, 48, 40, low=0.5, high=2.0),),
    tags="scratch",
)
def normalise_columns(x, **call):
    """The whole output stays resident while its rows arrive block by block."""
    return pl.pallas_call(
        normalise_columns_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(6,),
        in_specs=[pl.BlockSpec((8, 40), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((48, 40), lambda i: (0, 0)),
        scratch_shapes=[pltpu.VMEM((1, 40), jnp.float32)],
        **call,
    )(x)
