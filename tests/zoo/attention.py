"""Attention: streamed, masked in every usual way, paged, split, and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

from .case import Family, integers, normal, permutation

zoo = Family("attention")

# What a score becomes where attention is not allowed: finite, so that differences stay
# finite too.
MASKED = -1e30
LOOSE = {"rtol": 1e-4, "atol": 1e-4}


def plain_attention(q, k, v, allowed=None, bias=None):
    """Attention over (..., length, width) in plain jnp."""
    scores = jnp.einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = jnp.where(allowed, scores, MASKED)
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores, axis=-1), v)


def heads(*shape):
    return lambda rng: (normal(rng, *shape), normal(rng, *shape), normal(rng, *shape))


def causal(queries, keys):
    return jnp.arange(queries)[:, None] >= jnp.arange(keys)[None, :]


def positions(block_shape, axis, start):
    """The positions along one axis of a block of scores that begins at `start`."""
    return start + lax.broadcasted_iota(jnp.int32, block_shape, axis)


def score(q, k):
    """Scaled products of a block of queries with a block of keys."""
    products = lax.dot_general(
        q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return products * q.shape[-1] ** -0.5


def absorb(state, scores, v):
    """Brings one block into the running softmax (maximum, sum, output)."""
    maximum, total, out = state
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
    shrink = jnp.exp(maximum - new_maximum)
    weights = jnp.exp(scores - new_maximum)
    total = total * shrink + weights.sum(axis=-1, keepdims=True)
    out = out * shrink + jnp.dot(weights, v, preferred_element_type=jnp.float32)
    return new_maximum, total, out


def empty_state(rows, width):
    return (
        jnp.full((rows, 1), MASKED, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )


def softmax_scratch(rows, width):
    return [
        pltpu.VMEM((rows, 1), jnp.float32),
        pltpu.VMEM((rows, 1), jnp.float32),
        pltpu.VMEM((rows, width), jnp.float32),
    ]


def write_state(state_refs, state):
    for ref, value in zip(state_refs, state, strict=True):
        ref[...] = value


def read_state(state_refs):
    return tuple(ref[...] for ref in state_refs)


def flash_scratch_kernel(q_ref, k_ref, v_ref, o_ref, *state_refs, is_causal):
    """Keys come along the last grid axis; the softmax state is in scratch."""
    q_start = pl.program_id(1) * q_ref.shape[0]
    kv_block, last_kv_block = pl.program_id(2), pl.num_programs(2) - 1
    kv_start = kv_block * k_ref.shape[0]

    @pl.when(kv_block == 0)
    def start():
        write_state(state_refs, empty_state(*q_ref.shape))

    def step():
        scores = score(q_ref[...], k_ref[...])
        if is_causal:
            rows, columns = (
                positions(scores.shape, 0, q_start),
                positions(scores.shape, 1, kv_start),
            )
            scores = jnp.where(rows >= columns, scores, MASKED)
        write_state(state_refs, absorb(read_state(state_refs), scores, v_ref[...]))

    if is_causal:
        pl.when(kv_start < q_start + q_ref.shape[0])(step)
    else:
        step()

    @pl.when(kv_block == last_kv_block)
    def finish():
        _, total, out = read_state(state_refs)
        o_ref[...] = (out / total).astype(o_ref.dtype)


def flash_scratch_call(q, k, v, is_causal, block_q, block_kv, **call):
    num_heads, length, width = q.shape
    query = pl.BlockSpec((None, block_q, width), lambda h, i, j: (h, i, 0))
    key = pl.BlockSpec((None, block_kv, width), lambda h, i, j: (h, j, 0))
    return pl.pallas_call(
        functools.partial(flash_scratch_kernel, is_causal=is_causal),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_heads, length // block_q, k.shape[1] // block_kv),
        in_specs=[query, key, key],
        out_specs=query,
        scratch_shapes=softmax_scratch(block_q, width),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        **call,
    )(q, k, v)


@zoo.case(
    reference=plain_attention, make_args=heads(2, 64, 16), tags="scratch", **LOOSE
)
def flash_scratch(q, k, v, **call):
    return flash_scratch_call(q, k, v, False, 16, 32, **call)


@zoo.case(
    reference=lambda q, k, v: plain_attention(q, k, v, causal(64, 64)),
    make_args=heads(2, 64, 16),
    tags="scratch",
    **LOOSE,
)
def flash_scratch_causal(q, k, v, **call):
    """Blocks above the diagonal are skipped."""
    return flash_scratch_call(q, k, v, True, 32, 16, **call)


@zoo.case(
    reference=lambda q, k, v: plain_attention(
        *(x.astype(jnp.float32) for x in (q, k, v))
    ).astype(jnp.bfloat16),
    make_args=lambda rng: tuple(
        normal(rng, 2, 32, 32, dtype=jnp.bfloat16) for _ in "qkv"
    ),
    tags="scratch bf16",
    rtol=2e-2,
    atol=2e-2,
)
def flash_scratch_bf16(q, k, v, **call):
    """bfloat16 operands, float32 state; values are widened for the product."""

    def kernel(q_ref, k_ref, v_ref, o_ref, *state_refs):
        @pl.when(pl.program_id(1) == 0)
        def start():
            write_state(state_refs, empty_state(*q_ref.shape))

        scores = score(q_ref[...], k_ref[...])
        values = v_ref[...].astype(jnp.float32)
        write_state(state_refs, absorb(read_state(state_refs), scores, values))
        _, total, out = read_state(state_refs)
        o_ref[...] = (out / total).astype(o_ref.dtype)

    query = pl.BlockSpec((None, 32, 32), lambda h, j: (h, 0, 0))
    key = pl.BlockSpec((None, 16, 32), lambda h, j: (h, j, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(2, 2),
        in_specs=[query, key, key],
        out_specs=query,
        scratch_shapes=softmax_scratch(32, 32),
        **call,
    )(q, k, v)


def flash_fori_kernel(q_ref, k_ref, v_ref, o_ref, *, block_kv, is_causal):
    """A loop brings the keys; its carry is the softmax state."""
    q = q_ref[...]
    q_start = pl.program_id(1) * q.shape[0]

    def body(step, state):
        strip = pl.ds(step * block_kv, block_kv)
        scores = score(q, k_ref[strip, :])
        if is_causal:
            rows = positions(scores.shape, 0, q_start)
            columns = positions(scores.shape, 1, step * block_kv)
            scores = jnp.where(rows >= columns, scores, MASKED)
        return absorb(state, scores, v_ref[strip, :])

    steps = k_ref.shape[0] // block_kv
    if is_causal:
        steps = lax.div(q_start + q.shape[0] + block_kv - 1, block_kv)
    _, total, out = lax.fori_loop(0, steps, body, empty_state(*q.shape))
    o_ref[...] = (out / total).astype(o_ref.dtype)


def flash_fori_call(q, k, v, is_causal, block_kv, **call):
    num_heads, length, width = q.shape
    query = pl.BlockSpec((None, 16, width), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, k.shape[1], width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        functools.partial(flash_fori_kernel, block_kv=block_kv, is_causal=is_causal),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_heads, length // 16),
        in_specs=[query, keys, keys],
        out_specs=query,
        **call,
    )(q, k, v)


@zoo.case(reference=plain_attention, make_args=heads(2, 64, 16), **LOOSE)
def flash_fori(q, k, v, **call):
    return flash_fori_call(q, k, v, False, 32, **call)


@zoo.case(
    reference=lambda q, k, v: plain_attention(q, k, v, causal(64, 64)),
    make_args=heads(2, 64, 16),
    tags="while nograd",
    **LOOSE,
)
def flash_fori_causal(q, k, v, **call):
    """The number of steps depends on the program, so the loop has no static length."""
    return flash_fori_call(q, k, v, True, 16, **call)


def grouped_query_reference(q, k, v):
    group = q.shape[0] // k.shape[0]
    return plain_attention(
        q, jnp.repeat(k, group, axis=0), jnp.repeat(v, group, axis=0)
    )


@zoo.case(
    reference=grouped_query_reference,
    make_args=lambda rng: (
        normal(rng, 6, 32, 16),
        normal(rng, 2, 48, 16),
        normal(rng, 2, 48, 16),
    ),
    tags="scratch",
    **LOOSE,
)
def flash_grouped_query(q, k, v, **call):
    """Three query heads share one head of keys: only an index map knows."""
    group = q.shape[0] // k.shape[0]
    query = pl.BlockSpec((None, 16, 16), lambda h, i, j: (h, i, 0))
    key = pl.BlockSpec((None, 16, 16), lambda h, i, j: (h // group, j, 0))
    return pl.pallas_call(
        functools.partial(flash_scratch_kernel, is_causal=False),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(6, 2, 3),
        in_specs=[query, key, key],
        out_specs=query,
        scratch_shapes=softmax_scratch(16, 16),
        **call,
    )(q, k, v)


def segment_kernel(
    q_segment_ref, kv_segment_ref, q_ref, k_ref, v_ref, o_ref, *state_refs
):
    """Tokens attend only to tokens of their own segment."""
    kv_block = pl.program_id(2)

    @pl.when(kv_block == 0)
    def start():
        write_state(state_refs, empty_state(*q_ref.shape))

    same_segment = q_segment_ref[...] == kv_segment_ref[...]
    scores = jnp.where(same_segment, score(q_ref[...], k_ref[...]), MASKED)
    write_state(state_refs, absorb(read_state(state_refs), scores, v_ref[...]))

    @pl.when(kv_block == pl.num_programs(2) - 1)
    def finish():
        _, total, out = read_state(state_refs)
        o_ref[...] = out / total


@zoo.case(
    reference=lambda segments, q, k, v: plain_attention(
        q, k, v, segments[:, None] == segments[None, :]
    ),
    make_args=lambda rng: (jnp.sort(integers(rng, 48, high=3)), *heads(2, 48, 16)(rng)),
    tags="scratch",
    **LOOSE,
)
def flash_segments(segments, q, k, v, **call):
    query = pl.BlockSpec((None, 16, 16), lambda h, i, j: (h, i, 0))
    key = pl.BlockSpec((None, 16, 16), lambda h, i, j: (h, j, 0))
    return pl.pallas_call(
        segment_kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(2, 3, 3),
        in_specs=[
            pl.BlockSpec((16, 1), lambda h, i, j: (i, 0)),
            pl.BlockSpec((1, 16), lambda h, i, j: (0, j)),
            query,
            key,
            key,
        ],
        out_specs=query,
        scratch_shapes=softmax_scratch(16, 16),
        **call,
    )(segments[:, None], segments[None, :], q, k, v)


def bias_kernel(q_ref, k_ref, v_ref, bias_ref, o_ref, *, block_kv):
    """A bias per pair of positions, sliced along with the keys."""
    q = q_ref[...]
    state = empty_state(*q.shape)
    for start in range(0, k_ref.shape[0], block_kv):
        strip = slice(start, min(start + block_kv, k_ref.shape[0]))
        scores = score(q, k_ref[strip, :]) + bias_ref[:, strip]
        state = absorb(state, scores, v_ref[strip, :])
    o_ref[...] = state[2] / state[1]


@zoo.case(
    reference=lambda q, k, v, bias: plain_attention(q, k, v, bias=bias),
    make_args=lambda rng: (*heads(2, 40, 16)(rng), normal(rng, 2, 40, 40)),
    tags="odd",
    **LOOSE,
)
def flash_bias(q, k, v, bias, **call):
    """The last block of queries hangs over; the last strip of keys is short."""
    num_heads, length, width = q.shape
    query = pl.BlockSpec((None, 16, width), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, length, width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        functools.partial(bias_kernel, block_kv=16),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_heads, pl.cdiv(length, 16)),
        in_specs=[
            query,
            keys,
            keys,
            pl.BlockSpec((None, 16, length), lambda h, i: (h, i, 0)),
        ],
        out_specs=query,
        **call,
    )(q, k, v, bias)


def window_kernel(q_ref, k_ref, v_ref, o_ref, *state_refs, window):
    """Causal attention to the last `window` positions; skips idle blocks."""
    block = q_ref.shape[0]
    q_start, kv_start = pl.program_id(0) * block, pl.program_id(1) * block

    @pl.when(pl.program_id(1) == 0)
    def start():
        write_state(state_refs, empty_state(*q_ref.shape))

    reaches_back = kv_start + block > q_start - window + 1
    not_ahead = kv_start < q_start + block

    @pl.when(reaches_back & not_ahead)
    def step():
        scores = score(q_ref[...], k_ref[...])
        distance = positions(scores.shape, 0, q_start) - positions(
            scores.shape, 1, kv_start
        )
        scores = jnp.where((distance >= 0) & (distance < window), scores, MASKED)
        write_state(state_refs, absorb(read_state(state_refs), scores, v_ref[...]))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def finish():
        _, total, out = read_state(state_refs)
        o_ref[...] = out / total


def window_reference(q, k, v):
    distance = jnp.arange(64)[:, None] - jnp.arange(64)[None, :]
    return plain_attention(q, k, v, (distance >= 0) & (distance < 20))


@zoo.case(reference=window_reference, make_args=heads(64, 16), tags="scratch", **LOOSE)
def sliding_window(q, k, v, **call):
    query = pl.BlockSpec((16, 16), lambda i, j: (i, 0))
    key = pl.BlockSpec((16, 16), lambda i, j: (j, 0))
    return pl.pallas_call(
        functools.partial(window_kernel, window=20),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(4, 4),
        in_specs=[query, key, key],
        out_specs=query,
        scratch_shapes=softmax_scratch(16, 16),
        **call,
    )(q, k, v)


def ragged_kernel(lengths_ref, q_ref, k_ref, v_ref, o_ref, *state_refs, soft_cap):
    """Keys end at a length that is known only at run time; scores are softly capped."""
    length = lengths_ref[pl.program_id(0)]
    kv_block = pl.program_id(1)
    kv_start = kv_block * k_ref.shape[0]

    @pl.when(kv_block == 0)
    def start():
        write_state(state_refs, empty_state(*q_ref.shape))

    @pl.when(kv_start < length)
    def step():
        scores = soft_cap * jnp.tanh(score(q_ref[...], k_ref[...]) / soft_cap)
        inside = positions(scores.shape, 1, kv_start) < length
        scores = jnp.where(inside, scores, MASKED)
        write_state(state_refs, absorb(read_state(state_refs), scores, v_ref[...]))

    @pl.when(kv_block == pl.num_programs(1) - 1)
    def finish():
        _, total, out = read_state(state_refs)
        o_ref[...] = out / total


def ragged_reference(lengths, q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k) * q.shape[-1] ** -0.5
    scores = 5.0 * jnp.tanh(scores / 5.0)
    inside = jnp.arange(k.shape[1])[None, None, :] < lengths[:, None, None]
    weights = jax.nn.softmax(jnp.where(inside, scores, MASKED), axis=-1)
    return jnp.einsum("bqk,bkd->bqd", weights, v)


@zoo.case(
    reference=ragged_reference,
    make_args=lambda rng: (integers(rng, 3, low=1, high=51), *heads(3, 50, 16)(rng)),
    tags="prefetch scratch odd fill",
    **LOOSE,
)
def ragged_lengths(lengths, q, k, v, **call):
    """`fill` keeps missing values at zero: a weight of zero times NaN is NaN."""
    key = pl.BlockSpec((None, 16, 16), lambda b, j, lengths: (b, j, 0), fill=0.0)
    query = pl.BlockSpec((None, 50, 16), lambda b, j, lengths: (b, 0, 0))
    return pl.pallas_call(
        functools.partial(ragged_kernel, soft_cap=5.0),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(3, pl.cdiv(50, 16)),
            in_specs=[query, key, key],
            out_specs=query,
            scratch_shapes=softmax_scratch(50, 16),
        ),
        **call,
    )(lengths, q, k, v)


def paged_decode_kernel(
    lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, *state_refs
):
    """One new token per sequence attends to pages anywhere in a pool."""
    page, page_size = pl.program_id(2), k_ref.shape[0]
    length = lengths_ref[pl.program_id(0)]

    @pl.when(page == 0)
    def start():
        write_state(state_refs, empty_state(*q_ref.shape))

    @pl.when(page * page_size < length)
    def step():
        scores = score(q_ref[...], k_ref[...])
        inside = positions(scores.shape, 1, page * page_size) < length
        scores = jnp.where(inside, scores, MASKED)
        write_state(state_refs, absorb(read_state(state_refs), scores, v_ref[...]))

    @pl.when(page == pl.num_programs(2) - 1)
    def finish():
        _, total, out = read_state(state_refs)
        o_ref[...] = out / total


def paged_decode_reference(lengths, table, q, k_pages, v_pages):
    """q (batch, kv head, group, width); pages (kv head, page, position, width)."""
    batch, kv_heads, _, width = q.shape
    flat = lambda pages: (
        pages[:, table].reshape(kv_heads, batch, -1, width).swapaxes(0, 1)
    )
    k, v = flat(k_pages), flat(v_pages)
    inside = jnp.arange(k.shape[2])[None, None, None, :] < lengths[:, None, None, None]
    return plain_attention(q, k, v, inside)


@zoo.case(
    reference=paged_decode_reference,
    make_args=lambda rng: (
        integers(rng, 3, low=1, high=33),
        permutation(rng, 12).reshape(3, 4),
        normal(rng, 3, 2, 4, 16),
        normal(rng, 2, 12, 8, 16),
        normal(rng, 2, 12, 8, 16),
    ),
    tags="prefetch scratch",
    **LOOSE,
)
def paged_decode(lengths, table, q, k_pages, v_pages, **call):
    batch, kv_heads, group, width = q.shape
    page = pl.BlockSpec(
        (None, None, 8, width), lambda b, h, p, lengths, table: (h, table[b, p], 0, 0)
    )
    query = pl.BlockSpec(
        (None, None, group, width), lambda b, h, p, lengths, table: (b, h, 0, 0)
    )
    return pl.pallas_call(
        paged_decode_kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, table.shape[1]),
            in_specs=[query, page, page],
            out_specs=query,
            scratch_shapes=softmax_scratch(group, width),
        ),
        **call,
    )(lengths, table, q, k_pages, v_pages)


def split_decode_kernel(q_ref, k_ref, v_ref, o_ref, max_ref, sum_ref):
    """One share of the keys: an unnormalised result with its maximum and sum."""
    maximum, total, out = absorb(
        empty_state(*q_ref.shape), score(q_ref[...], k_ref[...]), v_ref[...]
    )
    max_ref[...], sum_ref[...], o_ref[...] = maximum, total, out


@zoo.case(
    reference=plain_attention,
    make_args=lambda rng: (
        normal(rng, 2, 8, 16),
        normal(rng, 2, 64, 16),
        normal(rng, 2, 64, 16),
    ),
    **LOOSE,
)
def split_decode(q, k, v, **call):
    """Shares of long keys run at once and are combined afterwards."""
    batch, rows, width = q.shape
    splits, block = 4, 16
    key = pl.BlockSpec((None, block, width), lambda b, s: (b, s, 0))
    part = lambda last: pl.BlockSpec(
        (None, None, rows, last), lambda b, s: (b, s, 0, 0)
    )
    shape = lambda last: jax.ShapeDtypeStruct((batch, splits, rows, last), jnp.float32)
    outs, maxima, sums = pl.pallas_call(
        split_decode_kernel,
        out_shape=(shape(width), shape(1), shape(1)),
        grid=(batch, splits),
        in_specs=[pl.BlockSpec((None, rows, width), lambda b, s: (b, 0, 0)), key, key],
        out_specs=(part(width), part(1), part(1)),
        **call,
    )(q, k, v)
    weights = jnp.exp(maxima - maxima.max(axis=1, keepdims=True))
    return (outs * weights).sum(axis=1) / (sums * weights).sum(axis=1)


def flash_backward_kernel(
    q_ref, k_ref, v_ref, do_ref, log_sum_ref, delta_ref, dk_ref, dv_ref
):
    """Gradients of one block of keys and values, summed over blocks of queries."""

    @pl.when(pl.program_id(1) == 0)
    def start():
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    q, do = q_ref[...], do_ref[...]
    weights = jnp.exp(score(q, k_ref[...]) - log_sum_ref[...])
    dv_ref[...] += jnp.dot(weights.T, do, preferred_element_type=jnp.float32)
    d_weights = jnp.dot(do, v_ref[...].T, preferred_element_type=jnp.float32)
    d_scores = weights * (d_weights - delta_ref[...]) * q.shape[-1] ** -0.5
    dk_ref[...] += jnp.dot(d_scores.T, q, preferred_element_type=jnp.float32)


def flash_backward_reference(q, k, v, do):
    return jax.vjp(lambda k, v: plain_attention(q, k, v), k, v)[1](do)


@zoo.case(
    reference=flash_backward_reference,
    make_args=lambda rng: tuple(normal(rng, 48, 16) for _ in range(4)),
    **LOOSE,
)
def flash_backward(q, k, v, do, **call):
    scores = jnp.dot(q, k.T) * q.shape[-1] ** -0.5
    log_sum = jax.nn.logsumexp(scores, axis=1, keepdims=True)
    delta = jnp.sum(do * plain_attention(q, k, v), axis=1, keepdims=True)
    query = pl.BlockSpec((16, 16), lambda j, i: (i, 0))
    key = pl.BlockSpec((16, 16), lambda j, i: (j, 0))
    column = pl.BlockSpec((16, 1), lambda j, i: (i, 0))
    return pl.pallas_call(
        flash_backward_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(k.shape, jnp.float32),
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
        ),
        grid=(3, 3),
        in_specs=[query, key, key, query, column, column],
        out_specs=(key, key),
        **call,
    )(q, k, v, do, log_sum, delta)


def splash_kernel(
    count_ref,
    blocks_ref,
    partial_ref,
    mask_ref,
    q_ref,
    k_ref,
    v_ref,
    o_ref,
    *state_refs,
):
    """Visits only blocks that the mask leaves; full blocks skip the mask."""
    q_block, step = pl.program_id(0), pl.program_id(1)

    @pl.when(step == 0)
    def start():
        write_state(state_refs, empty_state(*q_ref.shape))

    @pl.when(step < count_ref[q_block])
    def visit():
        scores = score(q_ref[...], k_ref[...])
        scores = lax.cond(
            partial_ref[q_block, step] == 1,
            lambda: jnp.where(mask_ref[...], scores, MASKED),
            lambda: scores,
        )
        write_state(state_refs, absorb(read_state(state_refs), scores, v_ref[...]))

    @pl.when(step == pl.num_programs(1) - 1)
    def finish():
        _, total, out = read_state(state_refs)
        o_ref[...] = out / total


def splash_mask():
    """Causal inside documents of 24 tokens, plus one global token."""
    row, column = np.arange(64)[:, None], np.arange(64)[None, :]
    return (row >= column) & (row // 24 == column // 24) | (column == 0) & (
        row >= column
    )


def splash_plan(mask, block):
    """Per block of queries: how many blocks of keys, which, which need the mask."""
    tiles = mask.reshape(4, block, 4, block).swapaxes(1, 2).reshape(4, 4, -1)
    some, every = tiles.any(axis=-1), tiles.all(axis=-1)
    order = np.argsort(~some, axis=1, kind="stable").astype(np.int32)
    partial = np.take_along_axis(some & ~every, order, axis=1).astype(np.int32)
    count = some.sum(axis=1).astype(np.int32)
    last = np.take_along_axis(order, count[:, None] - 1, axis=1)
    blocks = np.where(np.arange(4)[None, :] < count[:, None], order, last)
    return count, blocks.astype(np.int32), partial


@zoo.case(
    reference=lambda q, k, v: plain_attention(q, k, v, splash_mask()),
    make_args=heads(64, 16),
    tags="prefetch scratch bool",
    **LOOSE,
)
def splash_attention(q, k, v, **call):
    block, mask = 16, splash_mask()
    count, blocks, partial = splash_plan(mask, block)
    query = pl.BlockSpec((block, 16), lambda i, s, count, blocks, partial: (i, 0))
    key = pl.BlockSpec(
        (block, 16), lambda i, s, count, blocks, partial: (blocks[i, s], 0)
    )
    tile = pl.BlockSpec(
        (block, block), lambda i, s, count, blocks, partial: (i, blocks[i, s])
    )
    return pl.pallas_call(
        splash_kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(4, int(count.max())),
            in_specs=[tile, query, key, key],
            out_specs=query,
            scratch_shapes=softmax_scratch(block, 16),
        ),
        **call,
    )(count, blocks, partial, jnp.asarray(mask), q, k, v)
