"""Matrix products: tiled, accumulated, quantised, grouped and pipelined."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.xla import put

from .case import Family, integers, normal

zoo = Family("matmul")

dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


def two_matrices(m, k, n, dtype=jnp.float32):
    return lambda rng: (normal(rng, m, k, dtype=dtype), normal(rng, k, n, dtype=dtype))


def accumulate_kernel(x_ref, y_ref, o_ref):
    """Accumulates in the output block along the last grid axis."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += dot(x_ref[...], y_ref[...])


@zoo.case(reference=dot, make_args=two_matrices(64, 96, 64), rtol=1e-4, atol=1e-4)
def matmul_accumulate(x, y, **call):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        accumulate_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // 32, n // 32, k // 32),
        in_specs=[
            pl.BlockSpec((32, 32), lambda i, j, k: (i, k)),
            pl.BlockSpec((32, 32), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((32, 32), lambda i, j, k: (i, j)),
        **call,
    )(x, y)


def strips_kernel(x_ref, y_ref, o_ref, *, block_k):
    """Full strips of both operands, and a loop over K inside the kernel."""

    def body(step, acc):
        strip = pl.ds(step * block_k, block_k)
        return acc + dot(x_ref[:, strip], y_ref[strip, :])

    acc = jnp.zeros(o_ref.shape, jnp.float32)
    steps = x_ref.shape[1] // block_k
    o_ref[...] = lax.fori_loop(0, steps, body, acc)


@zoo.case(reference=dot, make_args=two_matrices(48, 64, 64), rtol=1e-4, atol=1e-4)
def matmul_fori(x, y, **call):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        functools.partial(strips_kernel, block_k=16),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // 16, n // 32),
        in_specs=[
            pl.BlockSpec((16, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, 32), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((16, 32), lambda i, j: (i, j)),
        **call,
    )(x, y)


def load_kernel(x_ref, y_ref, o_ref, *, block_k):
    """An unrolled loop over K with explicit loads and one explicit store."""
    acc = jnp.zeros(o_ref.shape, dtype=jnp.float32)
    for k in range(0, x_ref.shape[1], block_k):
        x_tile = pl.load(x_ref, (slice(None), pl.ds(k, block_k)))
        y_tile = pl.load(y_ref, (pl.ds(k, block_k), slice(None)))
        acc += dot(x_tile, y_tile)
    pl.store(o_ref, (slice(None), slice(None)), acc.astype(o_ref.dtype))


@zoo.case(
    reference=dot,
    make_args=two_matrices(32, 64, 32),
    tags="masked",
    rtol=1e-4,
    atol=1e-4,
)
def matmul_load(x, y, **call):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        functools.partial(load_kernel, block_k=32),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // 16, n // 16),
        in_specs=[
            pl.BlockSpec((16, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, 16), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i, j: (i, j)),
        **call,
    )(x, y)


def scratch_kernel(x_ref, y_ref, o_ref, acc_ref):
    """A float32 accumulator in scratch, cast to the narrow output at the end."""
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += dot(x_ref[...], y_ref[...])

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


@zoo.case(
    reference=lambda x, y: dot(x, y).astype(jnp.bfloat16),
    make_args=two_matrices(32, 128, 64, jnp.bfloat16),
    tags="bf16 scratch",
    rtol=1e-2,
    atol=1e-2,
)
def matmul_scratch_bf16(x, y, **call):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        scratch_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(m // 16, n // 32, k // 64),
            in_specs=[
                pl.BlockSpec((16, 64), lambda i, j, k: (i, k)),
                pl.BlockSpec((64, 32), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((16, 32), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((16, 32), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        **call,
    )(x, y)


def transposed_rhs_kernel(x_ref, y_ref, o_ref):
    """Contracts the last axis of both operands: no transpose in memory."""
    o_ref[...] = lax.dot_general(
        x_ref[...],
        y_ref[...],
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


@zoo.case(
    reference=lambda x, y: dot(x, y.T),
    make_args=lambda rng: (normal(rng, 40, 48), normal(rng, 56, 48)),
    tags="odd",
    rtol=1e-4,
    atol=1e-4,
)
def matmul_transposed_rhs(x, y, **call):
    (m, k), n = x.shape, y.shape[0]
    return pl.pallas_call(
        transposed_rhs_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(pl.cdiv(m, 16), pl.cdiv(n, 16)),
        in_specs=[
            pl.BlockSpec((16, k), lambda i, j: (i, 0)),
            pl.BlockSpec((16, k), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i, j: (i, j)),
        **call,
    )(x, y)


def batched_kernel(x_ref, y_ref, o_ref):
    """Several products at once, batched inside the block."""
    o_ref[...] = jnp.einsum(
        "bmk,bkn->bmn", x_ref[...], y_ref[...], preferred_element_type=jnp.float32
    )


@zoo.case(
    reference=lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32),
    make_args=lambda rng: (normal(rng, 6, 16, 24), normal(rng, 6, 24, 32)),
    rtol=1e-4,
    atol=1e-4,
    vmap_axes=(0, None),
)
def matmul_batched(x, y, **call):
    return pl.pallas_call(
        batched_kernel,
        out_shape=jax.ShapeDtypeStruct((6, 16, 32), jnp.float32),
        grid=(3, 2),
        in_specs=[
            pl.BlockSpec((2, 16, 24), lambda b, j: (b, 0, 0)),
            pl.BlockSpec((2, 24, 16), lambda b, j: (b, 0, j)),
        ],
        out_specs=pl.BlockSpec((2, 16, 16), lambda b, j: (b, 0, j)),
        **call,
    )(x, y)


def bias_gelu_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref):
    """A linear layer whose bias and activation ride on the last step."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.broadcast_to(bias_ref[...], acc_ref.shape)

    acc_ref[...] += dot(x_ref[...], w_ref[...])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = jax.nn.gelu(acc_ref[...])


@zoo.case(
    reference=lambda x, w, bias: jax.nn.gelu(dot(x, w) + bias),
    make_args=lambda rng: (
        normal(rng, 32, 64),
        normal(rng, 64, 48),
        normal(rng, 1, 48),
    ),
    tags="scratch",
    rtol=1e-4,
    atol=1e-4,
    vmap_axes=(0, None, None),
)
def matmul_bias_gelu(x, w, bias, **call):
    return pl.pallas_call(
        bias_gelu_kernel,
        out_shape=jax.ShapeDtypeStruct((32, 48), jnp.float32),
        grid=(2, 3, 2),
        in_specs=[
            pl.BlockSpec((16, 32), lambda i, j, k: (i, k)),
            pl.BlockSpec((32, 16), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, 16), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((16, 16), jnp.float32)],
        **call,
    )(x, w, bias)


def int8_kernel(x_ref, y_ref, o_ref):
    """int8 operands, int32 accumulator."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.int32)


@zoo.case(
    reference=lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.int32),
    make_args=lambda rng: (
        integers(rng, 32, 64, low=-128, high=128, dtype=jnp.int8),
        integers(rng, 64, 32, low=-128, high=128, dtype=jnp.int8),
    ),
    tags="int8 int nograd nofloat",
)
def matmul_int8(x, y, **call):
    return pl.pallas_call(
        int8_kernel,
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.int32),
        grid=(2, 2, 2),
        in_specs=[
            pl.BlockSpec((16, 32), lambda i, j, k: (i, k)),
            pl.BlockSpec((32, 16), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)),
        **call,
    )(x, y)


@zoo.case(
    reference=dot,
    make_args=two_matrices(37, 50, 45),
    tags="odd fill",
    rtol=1e-4,
    atol=1e-4,
)
def matmul_odd_fill(x, y, **call):
    """No side divides its block; zeros outside the arrays make the sum over K right."""
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        accumulate_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(pl.cdiv(m, 16), pl.cdiv(n, 16), pl.cdiv(k, 16)),
        in_specs=[
            pl.BlockSpec((16, 16), lambda i, j, k: (i, k), fill=0.0),
            pl.BlockSpec((16, 16), lambda i, j, k: (k, j), fill=0.0),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)),
        **call,
    )(x, y)


def masked_k_kernel(x_ref, y_ref, o_ref, *, size_k):
    """Masks by hand what hangs over the end of K."""
    step = pl.program_id(2)
    remaining = size_k - step * x_ref.shape[1]
    x_inside = lax.broadcasted_iota(jnp.int32, x_ref.shape, 1) < remaining
    y_inside = lax.broadcasted_iota(jnp.int32, y_ref.shape, 0) < remaining

    @pl.when(step == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    x = jnp.where(x_inside, x_ref[...], 0.0)
    y = jnp.where(y_inside, y_ref[...], 0.0)
    o_ref[...] += dot(x, y)


@zoo.case(
    reference=dot,
    make_args=two_matrices(20, 70, 36),
    tags="odd",
    rtol=1e-4,
    atol=1e-4,
)
def matmul_masked_k(x, y, **call):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        functools.partial(masked_k_kernel, size_k=k),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(pl.cdiv(m, 8), pl.cdiv(n, 32), pl.cdiv(k, 32)),
        in_specs=[
            pl.BlockSpec((8, 32), lambda i, j, k: (i, k)),
            pl.BlockSpec((32, 32), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((8, 32), lambda i, j, k: (i, j)),
        **call,
    )(x, y)


def split_k_kernel(x_ref, y_ref, partial_ref):
    """One share of the sum over K; the shares are added afterwards."""

    @pl.when(pl.program_id(3) == 0)
    def _():
        partial_ref[...] = jnp.zeros_like(partial_ref)

    partial_ref[...] += dot(x_ref[...], y_ref[...])


@zoo.case(reference=dot, make_args=two_matrices(16, 256, 32), rtol=1e-4, atol=1e-4)
def matmul_split_k(x, y, **call):
    splits, steps, block_k = 4, 2, 32
    partials = pl.pallas_call(
        split_k_kernel,
        out_shape=jax.ShapeDtypeStruct((splits, 16, 32), jnp.float32),
        grid=(splits, 2, 2, steps),
        in_specs=[
            pl.BlockSpec((8, block_k), lambda s, i, j, k: (i, s * steps + k)),
            pl.BlockSpec((block_k, 16), lambda s, i, j, k: (s * steps + k, j)),
        ],
        out_specs=pl.BlockSpec((None, 8, 16), lambda s, i, j, k: (s, i, j)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        **call,
    )(x, y)
    return partials.sum(axis=0)


def matvec_kernel(x_ref, v_ref, o_ref):
    """Rows of a matrix times one vector; the result has one dimension."""
    o_ref[...] = jnp.dot(x_ref[...], v_ref[...])


@zoo.case(
    reference=lambda x, v: jnp.dot(x, v),
    make_args=lambda rng: (normal(rng, 60, 48), normal(rng, 48)),
    tags="odd",
    rtol=1e-4,
    atol=1e-4,
    vmap_axes=(None, 0),
)
def matvec(x, v, **call):
    rows, columns = x.shape
    return pl.pallas_call(
        matvec_kernel,
        out_shape=jax.ShapeDtypeStruct((rows,), x.dtype),
        grid=(pl.cdiv(rows, 16),),
        in_specs=[
            pl.BlockSpec((16, columns), lambda i: (i, 0)),
            pl.BlockSpec((columns,), lambda i: (0,)),
        ],
        out_specs=pl.BlockSpec((16,), lambda i: (i,)),
        **call,
    )(x, v)


def weight_only_int8_kernel(x_ref, w_ref, scale_ref, o_ref, acc_ref):
    """bfloat16 activations, int8 weights widened on chip, one scale per column."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += dot(x_ref[...], w_ref[...].astype(jnp.bfloat16))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = (acc_ref[...] * scale_ref[...]).astype(o_ref.dtype)


def weight_only_int8_reference(x, w, scale):
    return (dot(x, w.astype(jnp.bfloat16)) * scale).astype(jnp.bfloat16)


@zoo.case(
    reference=weight_only_int8_reference,
    make_args=lambda rng: (
        normal(rng, 16, 64, dtype=jnp.bfloat16),
        integers(rng, 64, 32, low=-127, high=128, dtype=jnp.int8),
        normal(rng, 1, 32, scale=0.01),
    ),
    tags="bf16 int8 scratch",
    rtol=1e-2,
    atol=1e-2,
    vmap_axes=(0, None, None),
)
def matmul_weight_only_int8(x, w, scale, **call):
    return pl.pallas_call(
        weight_only_int8_kernel,
        out_shape=jax.ShapeDtypeStruct((16, 32), jnp.bfloat16),
        grid=(2, 2),
        in_specs=[
            pl.BlockSpec((16, 32), lambda j, k: (0, k)),
            pl.BlockSpec((32, 16), lambda j, k: (k, j)),
            pl.BlockSpec((1, 16), lambda j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda j, k: (0, j)),
        scratch_shapes=[pltpu.VMEM((16, 16), jnp.float32)],
        **call,
    )(x, w, scale)


def gated_kernel(x_ref, gate_ref, up_ref, o_ref, gate_acc_ref, up_acc_ref):
    """Two products of one input, joined by a gate: the first half of an MLP."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        gate_acc_ref[...] = jnp.zeros_like(gate_acc_ref)
        up_acc_ref[...] = jnp.zeros_like(up_acc_ref)

    x = x_ref[...]
    gate_acc_ref[...] += dot(x, gate_ref[...])
    up_acc_ref[...] += dot(x, up_ref[...])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = jax.nn.silu(gate_acc_ref[...]) * up_acc_ref[...]


@zoo.case(
    reference=lambda x, gate, up: jax.nn.silu(dot(x, gate)) * dot(x, up),
    make_args=lambda rng: (
        normal(rng, 32, 64, scale=0.3),
        normal(rng, 64, 32, scale=0.3),
        normal(rng, 64, 32, scale=0.3),
    ),
    tags="scratch",
    rtol=1e-4,
    atol=1e-4,
    vmap_axes=(0, None, None),
)
def matmul_gated(x, gate, up, **call):
    weights = pl.BlockSpec((32, 16), lambda i, j, k: (k, j))
    acc = pltpu.VMEM((16, 16), jnp.float32)
    return pl.pallas_call(
        gated_kernel,
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        grid=(2, 2, 2),
        in_specs=[pl.BlockSpec((16, 32), lambda i, j, k: (i, k)), weights, weights],
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)),
        scratch_shapes=[acc, acc],
        **call,
    )(x, gate, up)


def strip_product_kernel(x_ref, y_ref, o_ref):
    """One output tile from one strip of each operand."""
    o_ref[...] = x_ref[...] @ y_ref[...]


@zoo.case(reference=dot, make_args=two_matrices(64, 32, 48), rtol=1e-4, atol=1e-4)
def matmul_swizzled(x, y, **call):
    """A flat grid that visits tiles in groups of two rows, for the sake of a cache."""
    columns, group = 3, 2

    def tile(step):
        within = step % (group * columns)
        return step // (group * columns) * group + within % group, within // group

    return pl.pallas_call(
        strip_product_kernel,
        out_shape=jax.ShapeDtypeStruct((64, 48), jnp.float32),
        grid=(4 * columns,),
        in_specs=[
            pl.BlockSpec((16, 32), lambda step: (tile(step)[0], 0)),
            pl.BlockSpec((32, 16), lambda step: (0, tile(step)[1])),
        ],
        out_specs=pl.BlockSpec((16, 16), tile),
        **call,
    )(x, y)


def gram_kernel(left_ref, right_ref, o_ref):
    """x.T @ x, summed over blocks of rows; both operands are the same array."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += lax.dot_general(
        left_ref[...],
        right_ref[...],
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


@zoo.case(
    reference=lambda x: dot(x.T, x),
    make_args=lambda rng: (normal(rng, 64, 32),),
    rtol=1e-4,
    atol=1e-4,
)
def gram_matrix(x, **call):
    return pl.pallas_call(
        gram_kernel,
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        grid=(2, 2, 4),
        in_specs=[
            pl.BlockSpec((16, 16), lambda i, j, k: (k, i)),
            pl.BlockSpec((16, 16), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)),
        **call,
    )(x, x)


def grouped_kernel(group_ids_ref, x_ref, w_ref, o_ref):
    """Each block of rows meets the weights of its own group."""
    o_ref[...] = dot(x_ref[...], w_ref[...])


def grouped_reference(group_ids, x, w):
    blocks = x.reshape(group_ids.shape[0], -1, x.shape[1])
    products = jnp.matmul(blocks, w[group_ids], preferred_element_type=jnp.float32)
    return products.reshape(x.shape[0], -1)


@zoo.case(
    reference=grouped_reference,
    make_args=lambda rng: (
        jnp.sort(integers(rng, 6, high=4)),
        normal(rng, 48, 32),
        normal(rng, 4, 32, 32),
    ),
    tags="prefetch",
    rtol=1e-4,
    atol=1e-4,
)
def grouped_matmul(group_ids, x, w, **call):
    return pl.pallas_call(
        grouped_kernel,
        out_shape=jax.ShapeDtypeStruct((48, 32), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(6, 2),
            in_specs=[
                pl.BlockSpec((8, 32), lambda i, j, group_ids: (i, 0)),
                pl.BlockSpec(
                    (None, 32, 16), lambda i, j, group_ids: (group_ids[i], 0, j)
                ),
            ],
            out_specs=pl.BlockSpec((8, 16), lambda i, j, group_ids: (i, j)),
        ),
        **call,
    )(group_ids, x, w)


def ragged_kernel(visit_group_ref, visit_tile_ref, offsets_ref, x_ref, w_ref, o_ref):
    """One group visits one tile of rows; a tile may belong to several groups."""
    visit = pl.program_id(0)
    group, tile = visit_group_ref[visit], visit_tile_ref[visit]
    previous_tile = visit_tile_ref[jnp.maximum(visit - 1, 0)]

    @pl.when((visit == 0) | (tile != previous_tile))
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    rows = tile * o_ref.shape[0] + lax.broadcasted_iota(jnp.int32, o_ref.shape, 0)
    mine = (rows >= offsets_ref[group]) & (rows < offsets_ref[group + 1])
    o_ref[...] = jnp.where(mine, dot(x_ref[...], w_ref[...]), o_ref[...])


def plan_visits(group_sizes, tiles, block):
    """At most `tiles + groups - 1` visits; unused ones repeat the last."""
    groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    first = offsets[:-1] // block
    visits = jnp.where(group_sizes > 0, (ends + block - 1) // block - first, 0)
    ordinal = jnp.arange(tiles + groups - 1, dtype=jnp.int32)
    ordinal = jnp.minimum(ordinal, visits.sum() - 1)
    visit_ends = jnp.cumsum(visits)
    group = jnp.sum(ordinal[:, None] >= visit_ends[None, :], axis=1).astype(jnp.int32)
    tile = first[group] + ordinal - (visit_ends - visits)[group]
    return group, tile, offsets


def ragged_reference(group_sizes, x, w):
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    group = jnp.sum(rows[:, None] >= jnp.cumsum(group_sizes)[None, :], axis=1)
    return jnp.einsum("mk,mkn->mn", x, w[group], preferred_element_type=jnp.float32)


@zoo.case(
    reference=ragged_reference,
    make_args=lambda rng: (
        put(rng.multinomial(48, [0.3, 0.0, 0.45, 0.25]), jnp.int32),
        normal(rng, 48, 16),
        normal(rng, 4, 16, 24),
    ),
    tags="prefetch",
    rtol=1e-4,
    atol=1e-4,
)
def ragged_matmul(group_sizes, x, w, **call):
    """Group boundaries fall anywhere, also inside a tile; a group may be empty."""
    tiles, block = 6, 8
    plan = plan_visits(group_sizes, tiles, block)
    return pl.pallas_call(
        ragged_kernel,
        out_shape=jax.ShapeDtypeStruct((48, 24), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(plan[0].shape[0],),
            in_specs=[
                pl.BlockSpec((block, 16), lambda v, group, tile, offsets: (tile[v], 0)),
                pl.BlockSpec(
                    (None, 16, 24), lambda v, group, tile, offsets: (group[v], 0, 0)
                ),
            ],
            out_specs=pl.BlockSpec(
                (block, 24), lambda v, group, tile, offsets: (tile[v], 0)
            ),
        ),
        **call,
    )(*plan, x, w)


def block_sparse_kernel(rows_ref, columns_ref, blocks_ref, y_ref, o_ref):
    """Adds up the stored blocks of a row; the list of blocks is sorted by row."""
    step = pl.program_id(1)
    first_of_row = rows_ref[step] != rows_ref[jnp.maximum(step - 1, 0)]

    @pl.when((step == 0) | first_of_row)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += dot(blocks_ref[...], y_ref[...])


def block_sparse_args(rng):
    """Ten of sixteen blocks, at least one in every row of blocks."""
    stored = {(row, int(rng.integers(4))) for row in range(4)}
    while len(stored) < 10:
        stored.add((int(rng.integers(4)), int(rng.integers(4))))
    rows, columns = np.array(sorted(stored), np.int32).T
    return (
        jnp.asarray(rows),
        jnp.asarray(columns),
        normal(rng, 10, 8, 16),
        normal(rng, 64, 32),
    )


def block_sparse_reference(rows, columns, blocks, y):
    dense = jnp.zeros((4, 4, 8, 16), jnp.float32).at[rows, columns].set(blocks)
    return dot(dense.transpose(0, 2, 1, 3).reshape(32, 64), y)


@zoo.case(
    reference=block_sparse_reference,
    make_args=block_sparse_args,
    tags="prefetch",
    rtol=1e-4,
    atol=1e-4,
    vmap_axes=(None, None, 0, 0),
)
def block_sparse_matmul(rows, columns, blocks, y, **call):
    return pl.pallas_call(
        block_sparse_kernel,
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(2, rows.shape[0]),
            in_specs=[
                pl.BlockSpec((None, 8, 16), lambda j, s, rows, columns: (s, 0, 0)),
                pl.BlockSpec((16, 16), lambda j, s, rows, columns: (columns[s], j)),
            ],
            out_specs=pl.BlockSpec((8, 16), lambda j, s, rows, columns: (rows[s], j)),
        ),
        **call,
    )(rows, columns, blocks, y)


@zoo.case(
    reference=dot,
    make_args=two_matrices(64, 64, 64),
    tags="mesh pipeline",
    rtol=1e-4,
    atol=1e-4,
)
def matmul_emit_pipeline(x, y, **call):
    """A kernel over whole arrays in main memory that writes its own pipeline."""
    (m, k), n = x.shape, y.shape[1]

    @pl.kernel(
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        mesh=pltpu.create_tensorcore_mesh("core"),
        **call,
    )
    def matmul(x_hbm_ref, y_hbm_ref, o_hbm_ref):
        pltpu.emit_pipeline(
            accumulate_kernel,
            grid=(m // 32, n // 32, k // 16),
            in_specs=[
                pl.BlockSpec((32, 16), lambda i, j, k: (i, k)),
                pl.BlockSpec((16, 32), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((32, 32), lambda i, j, k: (i, j)),
        )(x_hbm_ref, y_hbm_ref, o_hbm_ref)

    return matmul(x, y)


def inner_pipeline_kernel(x_hbm_ref, y_hbm_ref, o_ref, acc_ref):
    """Each program streams its strip of K through a pipeline of its own."""
    row = pl.program_id(0)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def step(x_ref, y_ref):
        acc_ref[...] += dot(x_ref[...], y_ref[...])

    pltpu.emit_pipeline(
        step,
        grid=(x_hbm_ref.shape[1] // 16,),
        in_specs=[
            pl.BlockSpec((16, 16), lambda k: (row, k)),
            pl.BlockSpec((16, y_hbm_ref.shape[1]), lambda k: (k, 0)),
        ],
    )(x_hbm_ref, y_hbm_ref)
    o_ref[...] = acc_ref[...]


@zoo.case(
    reference=dot,
    make_args=two_matrices(32, 48, 32),
    tags="pipeline scratch",
    rtol=1e-4,
    atol=1e-4,
)
def matmul_inner_pipeline(x, y, **call):
    (m, _), n = x.shape, y.shape[1]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        inner_pipeline_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // 16,),
        in_specs=[anywhere, anywhere],
        out_specs=pl.BlockSpec((16, n), lambda i: (i, 0)),
        scratch_shapes=[pltpu.VMEM((16, n), jnp.float32)],
        **call,
    )(x, y)
