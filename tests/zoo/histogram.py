"""Counting, ranking and ordering: histograms, segment sums, extremes, sorting."""

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

from .case import Family, integers, normal

zoo = Family("histogram")


def count_reference(bins):
    return lambda ids: jnp.zeros((bins,), jnp.int32).at[ids].add(1)


def histogram_vector_kernel(ids_ref, counts_ref):
    """One atomic addition for a vector of bins, in which a bin may occur twice."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        counts_ref[...] = jnp.zeros_like(counts_ref)

    ids = ids_ref[...]
    pl.atomic_add(counts_ref, (ids,), jnp.ones_like(ids))


@zoo.case(
    reference=count_reference(10),
    make_args=lambda rng: (integers(rng, 128, high=10),),
    tags="atomic int nograd nofloat",
)
def histogram_atomic_vector(ids, **call):
    return pl.pallas_call(
        histogram_vector_kernel,
        out_shape=jax.ShapeDtypeStruct((10,), jnp.int32),
        grid=(4,),
        in_specs=[pl.BlockSpec((32,), lambda i: (i,))],
        out_specs=pl.BlockSpec((10,), lambda i: (0,)),
        **call,
    )(ids)


def weighted_histogram_kernel(ids_ref, weights_ref, totals_ref):
    """Adds one element after the other to the bin that it names."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        totals_ref[...] = jnp.zeros_like(totals_ref)

    def body(i, carry):
        pl.atomic_add(totals_ref, (ids_ref[i],), weights_ref[i])
        return carry

    lax.fori_loop(0, ids_ref.shape[0], body, 0)


@zoo.case(
    reference=lambda ids, weights: jnp.zeros((6,), jnp.float32).at[ids].add(weights),
    make_args=lambda rng: (integers(rng, 48, high=6), normal(rng, 48)),
    tags="atomic",
)
def histogram_atomic_scalar(ids, weights, **call):
    block = pl.BlockSpec((16,), lambda i: (i,))
    return pl.pallas_call(
        weighted_histogram_kernel,
        out_shape=jax.ShapeDtypeStruct((6,), jnp.float32),
        grid=(3,),
        in_specs=[block, block],
        out_specs=pl.BlockSpec((6,), lambda i: (0,)),
        **call,
    )(ids, weights)


def one_hot_histogram_kernel(ids_ref, counts_ref, *, size):
    """Compares every element with every bin; what hangs over counts nothing."""
    step = pl.program_id(0)
    shape = (ids_ref.shape[0], counts_ref.shape[1])

    @pl.when(step == 0)
    def _():
        counts_ref[...] = jnp.zeros_like(counts_ref)

    bins = lax.broadcasted_iota(jnp.int32, shape, 1)
    rows = step * shape[0] + lax.broadcasted_iota(jnp.int32, shape, 0)
    hits = (ids_ref[...] == bins) & (rows < size)
    counts_ref[...] += jnp.sum(hits.astype(jnp.int32), axis=0, keepdims=True)


@zoo.case(
    reference=lambda ids: count_reference(12)(ids)[None, :],
    make_args=lambda rng: (integers(rng, 150, high=12),),
    tags="int odd nograd nofloat",
)
def histogram_one_hot(ids, **call):
    return pl.pallas_call(
        lambda *refs: one_hot_histogram_kernel(*refs, size=ids.shape[0]),
        out_shape=jax.ShapeDtypeStruct((1, 12), jnp.int32),
        grid=(pl.cdiv(ids.shape[0], 32),),
        in_specs=[pl.BlockSpec((32, 1), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 12), lambda i: (0, 0)),
        **call,
    )(ids[:, None])


def segment_sum_kernel(ids_ref, x_ref, o_ref):
    """Sums rows by segment with a product of zeros and ones."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    shape = (o_ref.shape[0], ids_ref.shape[1])
    member = lax.broadcasted_iota(jnp.int32, shape, 0) == ids_ref[...]
    o_ref[...] += jnp.dot(
        member.astype(jnp.float32), x_ref[...], preferred_element_type=jnp.float32
    )


@zoo.case(
    reference=lambda ids, x: jax.ops.segment_sum(x, ids, num_segments=7),
    make_args=lambda rng: (integers(rng, 64, high=7), normal(rng, 64, 24)),
)
def segment_sum(ids, x, **call):
    return pl.pallas_call(
        segment_sum_kernel,
        out_shape=jax.ShapeDtypeStruct((7, 24), jnp.float32),
        grid=(4,),
        in_specs=[
            pl.BlockSpec((1, 16), lambda i: (0, i)),
            pl.BlockSpec((16, 24), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((7, 24), lambda i: (0, 0)),
        **call,
    )(ids[None, :], x)


def argmax_kernel(x_ref, value_ref, index_ref, best_ref, best_index_ref):
    """The best value so far and its place travel along the row."""
    step = pl.program_id(1)
    columns = step * x_ref.shape[1]
    value = jnp.max(x_ref[...], axis=1, keepdims=True)
    index = columns + jnp.argmax(x_ref[...], axis=1, keepdims=True).astype(jnp.int32)

    @pl.when(step == 0)
    def _():
        best_ref[...] = value
        best_index_ref[...] = index

    @pl.when(step > 0)
    def _():
        better = value > best_ref[...]
        best_index_ref[...] = jnp.where(better, index, best_index_ref[...])
        best_ref[...] = jnp.where(better, value, best_ref[...])

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        value_ref[...] = best_ref[...]
        index_ref[...] = best_index_ref[...]


def argmax_reference(x):
    return (
        jnp.max(x, axis=1, keepdims=True),
        jnp.argmax(x, axis=1, keepdims=True).astype(jnp.int32),
    )


@zoo.case(
    reference=argmax_reference,
    make_args=lambda rng: (normal(rng, 16, 96),),
    tags="scratch int nograd",
)
def argmax_rows(x, **call):
    column = pl.BlockSpec((8, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        argmax_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((16, 1), jnp.float32),
            jax.ShapeDtypeStruct((16, 1), jnp.int32),
        ),
        grid=(2, 3),
        in_specs=[pl.BlockSpec((8, 32), lambda i, j: (i, j))],
        out_specs=(column, column),
        scratch_shapes=[pltpu.VMEM((8, 1), jnp.float32), pltpu.VMEM((8, 1), jnp.int32)],
        **call,
    )(x)


def global_argmin_kernel(x_ref, o_ref, best_ref):
    """The place of the smallest integer, kept as scalars; the first one wins a tie."""
    step = pl.program_id(0)
    value = jnp.min(x_ref[...])
    index = step * x_ref.shape[0] + jnp.argmin(x_ref[...]).astype(jnp.int32)

    @pl.when((step == 0) | (value < best_ref[0]))
    def _():
        best_ref[0] = value
        o_ref[0] = index


@zoo.case(
    reference=lambda x: jnp.argmin(x).astype(jnp.int32)[None],
    make_args=lambda rng: (integers(rng, 80, low=-20, high=20),),
    tags="smem scratch int nograd nofloat",
)
def global_argmin(x, **call):
    return pl.pallas_call(
        global_argmin_kernel,
        out_shape=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(5,),
        in_specs=[pl.BlockSpec((16,), lambda i: (i,))],
        out_specs=pl.BlockSpec(memory_space=pltpu.SMEM),
        scratch_shapes=[pltpu.SMEM((1,), jnp.int32)],
        **call,
    )(x)


def top_k_kernel(x_ref, values_ref, indices_ref):
    """Takes the maximum, strikes it out, and again."""
    columns = lax.broadcasted_iota(jnp.int32, x_ref.shape, 1)

    def body(rank, x):
        index = jnp.argmax(x, axis=1, keepdims=True).astype(jnp.int32)
        values_ref[:, pl.ds(rank, 1)] = jnp.max(x, axis=1, keepdims=True)
        indices_ref[:, pl.ds(rank, 1)] = index
        return jnp.where(columns == index, -jnp.inf, x)

    lax.fori_loop(0, values_ref.shape[1], body, x_ref[...])


@zoo.case(
    reference=lambda x: tuple(lax.top_k(x, 4)),
    make_args=lambda rng: (normal(rng, 12, 40),),
    tags="odd int nograd",
)
def top_k(x, **call):
    best = pl.BlockSpec((8, 4), lambda i: (i, 0))
    return pl.pallas_call(
        top_k_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((12, 4), jnp.float32),
            jax.ShapeDtypeStruct((12, 4), jnp.int32),
        ),
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 40), lambda i: (i, 0))],
        out_specs=(best, best),
        **call,
    )(x)


def bitonic_sort_kernel(x_ref, o_ref):
    """Sorts rows with a network: log(n)**2 rounds, no data-dependent step."""
    rows, size = x_ref.shape
    x = x_ref[...]
    column = lax.broadcasted_iota(jnp.int32, (rows, size), 1)
    run = 2
    while run <= size:
        distance = run // 2
        while distance > 0:
            pairs = x.reshape(rows, size // (2 * distance), 2, distance)
            partner = jnp.flip(pairs, axis=2).reshape(rows, size)
            is_lower = (column & distance) == 0
            ascending = (column & run) == 0
            small, large = jnp.minimum(x, partner), jnp.maximum(x, partner)
            x = jnp.where(is_lower == ascending, small, large)
            distance //= 2
        run *= 2
    o_ref[...] = x


@zoo.case(
    reference=lambda x: jnp.sort(x, axis=1),
    make_args=lambda rng: (normal(rng, 8, 32),),
)
def bitonic_sort(x, **call):
    rows = pl.BlockSpec((4, 32), lambda i: (i, 0))
    return pl.pallas_call(
        bitonic_sort_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(2,),
        in_specs=[rows],
        out_specs=rows,
        **call,
    )(x)


def count_above_kernel(threshold_ref, x_ref, o_ref):
    """Counts into one scalar, tile after tile, over the whole grid."""
    first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)

    @pl.when(first)
    def _():
        o_ref[0] = 0

    o_ref[0] += jnp.sum((x_ref[...] > threshold_ref[0]).astype(jnp.int32))


@zoo.case(
    reference=lambda threshold, x: jnp.sum(x > threshold[0]).astype(jnp.int32)[None],
    make_args=lambda rng: (normal(rng, 1), normal(rng, 32, 64)),
    tags="smem int nograd",
)
def count_above(threshold, x, **call):
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        count_above_kernel,
        out_shape=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(2, 2),
        in_specs=[scalars, pl.BlockSpec((16, 32), lambda i, j: (i, j))],
        out_specs=scalars,
        **call,
    )(threshold, x)


def bucket_extremes_kernel(ids_ref, x_ref, high_ref, low_ref):
    """Largest and smallest element of every bucket."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        high_ref[...] = jnp.full_like(high_ref, -1000)
        low_ref[...] = jnp.full_like(low_ref, 1000)

    def body(i, carry):
        pl.atomic_max(high_ref, (ids_ref[i],), x_ref[i])
        pl.atomic_min(low_ref, (ids_ref[i],), x_ref[i])
        return carry

    lax.fori_loop(0, ids_ref.shape[0], body, 0)


def bucket_extremes_reference(ids, x):
    high = jnp.full((5,), -1000, jnp.int32).at[ids].max(x)
    return high, jnp.full((5,), 1000, jnp.int32).at[ids].min(x)


@zoo.case(
    reference=bucket_extremes_reference,
    make_args=lambda rng: (
        integers(rng, 40, high=5),
        integers(rng, 40, low=-500, high=500),
    ),
    tags="atomic int nograd nofloat",
)
def bucket_extremes(ids, x, **call):
    block = pl.BlockSpec((20,), lambda i: (i,))
    whole = pl.BlockSpec((5,), lambda i: (0,))
    return pl.pallas_call(
        bucket_extremes_kernel,
        out_shape=(jax.ShapeDtypeStruct((5,), jnp.int32),) * 2,
        grid=(2,),
        in_specs=[block, block],
        out_specs=(whole, whole),
        **call,
    )(ids, x)


def hash_chains_kernel(buckets_ref, head_ref, next_ref):
    """Linked lists: an element becomes the head of its bucket, keeps the old one."""
    start = pl.program_id(0) * buckets_ref.shape[0]

    @pl.when(start == 0)
    def _():
        head_ref[...] = jnp.full_like(head_ref, -1)

    def body(i, carry):
        next_ref[i] = pl.atomic_xchg(head_ref, (buckets_ref[i],), start + i)
        return carry

    lax.fori_loop(0, buckets_ref.shape[0], body, 0)


def hash_chains_reference(buckets):
    """Head: the last of its bucket. Next: the one before it in its bucket."""
    size = buckets.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    head = jnp.full((6,), -1, jnp.int32).at[buckets].max(place)
    earlier = (buckets[:, None] == buckets[None, :]) & (place[:, None] > place[None, :])
    return head, jnp.max(jnp.where(earlier, place[None, :], -1), axis=1)


@zoo.case(
    reference=hash_chains_reference,
    make_args=lambda rng: (integers(rng, 36, high=6),),
    tags="atomic int nograd nofloat",
)
def hash_chains(buckets, **call):
    block = pl.BlockSpec((12,), lambda i: (i,))
    return pl.pallas_call(
        hash_chains_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((6,), jnp.int32),
            jax.ShapeDtypeStruct((36,), jnp.int32),
        ),
        grid=(3,),
        in_specs=[block],
        out_specs=(pl.BlockSpec((6,), lambda i: (0,)), block),
        **call,
    )(buckets)


def bitmap_kernel(values_ref, o_ref):
    """Sets one bit per value seen, in words of 32."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    def body(i, carry):
        value = values_ref[i]
        bit = jnp.left_shift(jnp.uint32(1), (value % 32).astype(jnp.uint32))
        pl.atomic_or(o_ref, (value // 32,), bit)
        return carry

    lax.fori_loop(0, values_ref.shape[0], body, 0)


def bitmap_reference(values):
    seen = jnp.zeros((128,), jnp.uint32).at[values].set(jnp.uint32(1)).reshape(4, 32)
    return jnp.sum(
        seen << jnp.arange(32, dtype=jnp.uint32)[None, :], axis=1, dtype=jnp.uint32
    )


@zoo.case(
    reference=bitmap_reference,
    make_args=lambda rng: (integers(rng, 40, high=128),),
    tags="atomic int nograd nofloat",
)
def seen_bitmap(values, **call):
    return pl.pallas_call(
        bitmap_kernel,
        out_shape=jax.ShapeDtypeStruct((4,), jnp.uint32),
        grid=(2,),
        in_specs=[pl.BlockSpec((20,), lambda i: (i,))],
        out_specs=pl.BlockSpec((4,), lambda i: (0,)),
        **call,
    )(values)


def counting_sort_kernel(keys_ref, o_ref, *, bins):
    """Stable counting sort: counts, starts, ranks among equals, one scatter."""
    keys = keys_ref[...]
    one_hot = (
        keys[:, None] == lax.broadcasted_iota(jnp.int32, (keys.size, bins), 1)
    ).astype(jnp.int32)
    counts = jnp.sum(one_hot, axis=0, keepdims=True)
    starts = jnp.cumsum(counts, axis=1) - counts
    rank = jnp.cumsum(one_hot, axis=0) - one_hot
    place = jnp.sum(one_hot * (starts + rank), axis=1)
    o_ref[place] = lax.iota(jnp.int32, keys.size)


@zoo.case(
    reference=lambda keys: jnp.argsort(keys, stable=True).astype(jnp.int32),
    make_args=lambda rng: (integers(rng, 40, high=8),),
    tags="int nograd nofloat",
)
def counting_sort(keys, **call):
    return pl.pallas_call(
        lambda *refs: counting_sort_kernel(*refs, bins=8),
        out_shape=jax.ShapeDtypeStruct(keys.shape, jnp.int32),
        **call,
    )(keys)
