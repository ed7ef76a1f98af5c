"""`latent_attention`: decoding of multi-head latent attention (DeepSeek).

All heads share one key, a latent vector and a rotary part, and the latent vector is the
value, too: it is read once for both products.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.kernels import common, configs
from pallasite.kernels.decode import (
    Options,
    RunningSoftmax,
    capped,
    check_table,
    joined,
    known,
    plain_paged,
    products,
)


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
    """How decoding is divided.

    Attributes:
        block_heads: heads of a program.
        block_kv: keys of a step; at most a page, and divides it.
        splits: parts of a sequence that run side by side; XLA joins their results.
    """

    block_heads: int = 64
    block_kv: int = 64
    splits: int = 1


SPACE = {
    "block_heads": (16, 32, 64, 128),
    "block_kv": (32, 64, 128),
    "splits": (1, 2, 4, 8, 16),
}


def latent_attention(
    query: jax.Array,
    query_rotary: jax.Array,
    latent_pages: jax.Array,
    rotary_pages: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    implementation: common.Implementation = "pallasite",
    config: LatentAttentionConfig | None = None,
) -> jax.Array:
    """Attention of one query per sequence to a cache of latent vectors.

    Args:
        query: (batch, heads, latent): queries already multiplied by the up-projection
            of keys.
        query_rotary: (batch, heads, rotary).
        latent_pages: (pages, page_size, latent), values and part of the keys.
        rotary_pages: (pages, page_size, rotary), the other part of the keys.
        lengths, page_table: as for `paged_attention`.
        scale: what scores are multiplied by: that of the heads before absorption.

    Returns:
        (batch, heads, latent) in query's dtype, for the up-projection of values.
    """
    operation = "latent_attention"
    batch, heads, latent = common.check_rank(
        operation, "query", query, "batch, heads, latent"
    )
    *_, rotary = common.check_rank(
        operation, "query_rotary", query_rotary, "batch, heads, rotary"
    )
    pages, size, _ = common.check_rank(
        operation, "latent_pages", latent_pages, "pages, page_size, latent"
    )
    common.check_floats(operation, query=query, query_rotary=query_rotary)
    common.check_integers(operation, lengths=lengths)
    common.check_shape(operation, "query_rotary", query_rotary, (batch, heads, rotary))
    common.check_shape(operation, "latent_pages", latent_pages, (pages, size, latent))
    common.check_shape(operation, "rotary_pages", rotary_pages, (pages, size, rotary))
    common.check_shape(operation, "lengths", lengths, (batch,))
    check_table(operation, page_table, batch)
    compute = common.choose(implementation, _streamed, _plain)
    return compute(
        query,
        query_rotary,
        latent_pages,
        rotary_pages,
        lengths.astype(jnp.int32),
        page_table.astype(jnp.int32),
        options=Options(scale, soft_cap),
        config=configs.tuned(
            operation,
            config,
            LatentAttentionConfig(),
            SPACE,
            (query, latent_pages, page_table),
        ),
    )


def _plain(query, query_rotary, latent_pages, rotary_pages, lengths, table, **how):
    keys = jnp.concatenate([latent_pages, rotary_pages], axis=-1)[:, :, None]
    whole = jnp.concatenate([query, query_rotary], axis=-1)
    values = latent_pages[:, :, None]
    return plain_paged(whole, keys, values, None, None, lengths, table, **how)


def _streamed(
    query, query_rotary, latent_pages, rotary_pages, lengths, table, *, options, config
):
    batch, heads, latent = query.shape
    pages, size, rotary = rotary_pages.shape
    if not table.size or not latent_pages.size:
        return jnp.zeros(query.shape, query.dtype)
    rows = min(config.block_heads, heads)
    block = size if size % config.block_kv else min(config.block_kv, size)
    blocks = size // block  # of a page
    steps = table.shape[1] * blocks
    splits = max(1, min(config.splits, steps))
    per_split = pl.cdiv(steps, splits)
    wide = common.statistics_dtype(query.dtype)

    def kernel(lengths_ref, table_ref, q_ref, rotary_ref, k_ref, kr_ref, *state_refs):
        del table_ref  # read by index maps
        acc_ref, max_ref, sum_ref = state_refs
        state = RunningSoftmax(max_ref, sum_ref, acc_ref)
        split, j = pl.program_id(2), pl.program_id(3)
        length = lengths_ref[pl.program_id(0)]
        start = (split * per_split + j) * block

        @pl.when(j == 0)
        def _():
            state.start()

        @pl.when(start < length)
        def _():
            keys = k_ref[...].astype(q_ref.dtype)
            scores = products(q_ref[...], keys, wide)
            scores = scores + products(rotary_ref[...], kr_ref[...], wide)
            columns = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where(columns < length, capped(scores, options), -jnp.inf)
            state.absorb(scores, known(keys, start, length))

    def of_page(b, h, s, j, lengths_ref, table_ref):
        # A step past the end looks where the last one did, so that nothing moves.
        last = jnp.maximum((lengths_ref[b] + block - 1) // block, 1) - 1
        step = jnp.minimum(s * per_split + j, jnp.minimum(last, steps - 1))
        page = jnp.clip(table_ref[b, step // blocks], 0, pages - 1)
        return page, step % blocks, 0

    def of_heads(width):
        return pl.BlockSpec((None, rows, width), lambda b, h, s, j, *_: (b, h, 0))

    sizes = (latent, 1, 1)
    parts = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, splits, heads, width), wide) for width in sizes
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, pl.cdiv(heads, rows), splits, per_split),
            in_specs=[
                of_heads(latent),
                of_heads(rotary),
                pl.BlockSpec((None, block, latent), of_page),
                pl.BlockSpec((None, block, rotary), of_page),
            ],
            out_specs=[
                pl.BlockSpec(
                    (None, None, rows, width), lambda b, h, s, j, *_: (b, s, h, 0)
                )
                for width in sizes
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=common.cost(
            2 * batch * heads * steps * block * (2 * latent + rotary),
            [
                query,
                query_rotary,
                *(
                    jax.ShapeDtypeStruct((batch, steps * block, x.shape[2]), x.dtype)
                    for x in (latent_pages, rotary_pages)
                ),
            ],
            batch * heads * steps * block,
        ),
        name="latent_attention",
    )(lengths, table, query, query_rotary, latent_pages, rotary_pages)
    return joined(*parts, axis=1).astype(query.dtype)
