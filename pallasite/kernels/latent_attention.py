"""`latent_attention`: decoding with multi-head latent attention (DeepSeek).

All heads share one key, a latent vector and a rotary part. The latent vector is also
the value, so it is read once for both matmuls.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.kernels import common, configs
from pallasite.kernels.attention import RunningSoftmax
from pallasite.kernels.decode import (
    Options,
    capped,
    check_table,
    joined,
    known,
    length_within,
    plain_paged,
    products,
)
from pallasite.target import Gpu


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
    """How decoding is split.

    Attributes:
        block_heads: heads per program.
        block_kv: keys per step; a whole page where it does not divide the page size.
        splits: parts of a sequence that run concurrently; their results are combined.
        block_latent: columns of the result that a program computes from all scores;
            divides their number. By default all of them.
        apart: whether the last, partly filled block of a sequence has its own kernel.
            The other blocks then need no masks, and matrix units read their keys
            directly from memory.
        batch_invariant: the operation's argument.
    """

    block_heads: int = 64
    block_kv: int = 64
    splits: int = 1
    block_latent: int | None = None
    apart: bool = False
    batch_invariant: bool = False


SPACE = {
    "block_heads": (16, 32, 64, 128),
    "block_kv": (32, 64, 128),
    "splits": (1, 2, 4, 8, 16),
}
# Of a warpgroup's matmul, which accumulates in registers.
MOST_COLUMNS = 256
LEAST_ROWS = 64


def _default(heads: int, latent: int) -> LatentAttentionConfig:
    """On a GPU, tensor core shapes: 64 rows, 256 columns, keys read from memory."""
    is_gpu = configs.traced_for(Gpu)
    if not is_gpu or heads < LEAST_ROWS or latent % MOST_COLUMNS:
        return LatentAttentionConfig()
    return LatentAttentionConfig(LEAST_ROWS, 64, 1, MOST_COLUMNS, apart=True)


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
    batch_invariant: bool = False,
) -> jax.Array:
    """Attention of one query per sequence to a cache of latent vectors.

    Args:
        query: (batch, heads, latent): queries already multiplied by the up-projection
            of keys.
        query_rotary: (batch, heads, rotary).
        latent_pages: (pages, page_size, latent), values and part of the keys.
        rotary_pages: (pages, page_size, rotary), the other part of the keys.
        lengths, page_table: as for `paged_attention`.
        scale: factor applied to scores: that of the heads before absorption.
        batch_invariant: as in `decode_attention`.

    Returns:
        (batch, heads, latent) in query's dtype, before the up-projection of values.
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
    common.check_real(operation, latent_pages=latent_pages, rotary_pages=rotary_pages)
    common.check_integers(operation, lengths=lengths)
    common.check_shape(operation, "query_rotary", query_rotary, (batch, heads, rotary))
    common.check_shape(operation, "latent_pages", latent_pages, (pages, size, latent))
    common.check_shape(operation, "rotary_pages", rotary_pages, (pages, size, rotary))
    common.check_shape(operation, "lengths", lengths, (batch,))
    check_table(operation, page_table, batch)
    common.check_numbers(operation, scale=scale)
    common.check_invariant(operation, implementation, batch_invariant)
    compute = common.choose(implementation, _streamed, _plain)
    asked = config is not None
    config = configs.tuned(
        operation,
        config,
        _default(heads, latent),
        SPACE,
        (query, latent_pages, page_table),
        batch_invariant,
    )
    if asked and latent % (config.block_latent or latent or 1):
        raise SpecError(
            f"{operation}: block_latent does not divide the width of latent vectors",
            [("block_latent", config.block_latent), ("latent", latent)],
            fix="a divisor of it, or None for all columns",
        )
    return compute(
        query,
        query_rotary,
        latent_pages,
        rotary_pages,
        common.as_int32(lengths),
        common.as_int32(page_table),
        options=Options.of(operation, latent, scale, soft_cap),
        config=config,
    )


def _plain(query, query_rotary, latent_pages, rotary_pages, lengths, table, **how):
    keys = jnp.concatenate([latent_pages, rotary_pages], axis=-1)[:, :, None]
    whole = jnp.concatenate([query, query_rotary], axis=-1)
    values = latent_pages[:, :, None]
    return plain_paged(whole, keys, values, None, None, lengths, table, **how)


def _streamed(query, query_rotary, latent_pages, rotary_pages, lengths, table, **how):
    config = how["config"]
    if not table.size or not latent_pages.size:
        return jnp.zeros(query.shape, query.dtype)
    operands = query, query_rotary, latent_pages, rotary_pages, lengths, table
    if config.apart:
        full = _parts(*operands, blocks="full", **how)
        last = _parts(*operands, blocks="last", **how)
        parts = [jnp.concatenate(both, axis=1) for both in zip(full, last, strict=True)]
    else:
        parts = _parts(*operands, blocks="all", **how)
    acc, maximum, total = parts
    return joined(acc, maximum, total, config, axis=1).astype(query.dtype)


def _parts(
    query,
    query_rotary,
    latent_pages,
    rotary_pages,
    lengths,
    table,
    *,
    blocks: Literal["all", "full", "last"],
    options: Options,
    config: LatentAttentionConfig,
):
    """Weighted sums, maxima and sums of weights over some blocks of each sequence.

    Each has shape (batch, splits, heads, columns). "full" selects the full blocks of a
    sequence, "last" its partly filled last block, if any.
    """
    batch, heads, latent = query.shape
    pages, size, rotary = rotary_pages.shape
    rows = min(config.block_heads, heads)
    block = size if size % config.block_kv else min(config.block_kv, size)
    per_page = size // block
    steps = table.shape[1] * per_page
    splits = 1 if blocks == "last" else max(1, min(config.splits, steps))
    per_split = 1 if blocks == "last" else pl.cdiv(steps, splits)
    keys = splits * per_split * block
    columns = config.block_latent or latent
    columns = latent if latent % columns else columns  # a table's, of another width
    shares = latent // columns
    wide = common.statistics_dtype(query.dtype)

    def block_number(length, s, j):
        return length // block if blocks == "last" else s * per_split + j

    def kernel(lengths_ref, table_ref, *refs):
        del table_ref  # read by index maps
        take = iter(refs)
        q_refs = [next(take) for _ in range(shares)]
        rotary_ref = next(take)
        k_refs = [next(take) for _ in range(shares)]
        kr_ref, acc_ref, max_ref, sum_ref = take
        state = RunningSoftmax(max_ref, sum_ref, acc_ref)
        j = pl.program_id(4)
        length = length_within(lengths_ref[pl.program_id(0)], steps * block)
        start = block_number(length, pl.program_id(3), j) * block

        @pl.when(j == 0)
        def _():
            state.start()

        @pl.when(start + (block if blocks == "full" else 1) <= length)
        def _():
            values, *others = [ref[...].astype(query.dtype) for ref in k_refs]
            scores = products(q_refs[0][...], values, wide)
            for q_ref, more in zip(q_refs[1:], others, strict=True):
                scores = scores + products(q_ref[...], more, wide)
            scores = scores + products(rotary_ref[...], kr_ref[...], wide)
            scores = capped(scores, options)
            if blocks != "full":
                places = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                scores = jnp.where(places < length, scores, -jnp.inf)
                values = known(values, start, length)
            state.absorb(scores, values)

    def of_page(b, s, j, lengths_ref, table_ref):
        # A step past the end repeats the last block index: nothing is copied.
        length = length_within(lengths_ref[b], steps * block)
        last = jnp.maximum((length + block - 1) // block, 1) - 1
        step = jnp.minimum(block_number(length, s, j), last)
        page = jnp.clip(table_ref[b, step // per_page], 0, pages - 1)
        return page, step % per_page

    # The keys' column blocks start with the result's: block c, then the others in
    # turn.
    def column(c, share):
        return 0 if share is None else (c + share) % shares

    def of_heads(width, share=None):
        return pl.BlockSpec(
            (None, rows, width), lambda b, h, c, s, j, *_: (b, h, column(c, share))
        )

    def of_keys(width, share=None):
        return pl.BlockSpec(
            (None, block, width),
            lambda b, h, c, s, j, *scalars: (
                *of_page(b, s, j, *scalars),
                column(c, share),
            ),
        )

    statistics = jax.ShapeDtypeStruct((batch, shares, splits, heads, 1), wide)
    of_statistics = pl.BlockSpec(
        (None, None, None, rows, 1), lambda b, h, c, s, j, *_: (b, c, s, h, 0)
    )
    acc, *rest = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, splits, heads, latent), wide),
            statistics,
            statistics,
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, pl.cdiv(heads, rows), shares, splits, per_split),
            in_specs=[
                *(of_heads(columns, share) for share in range(shares)),
                of_heads(rotary),
                *(of_keys(columns, share) for share in range(shares)),
                of_keys(rotary),
            ],
            out_specs=[
                pl.BlockSpec(
                    (None, None, rows, columns),
                    lambda b, h, c, s, j, *_: (b, s, h, c),
                ),
                of_statistics,
                of_statistics,
            ],
        ),
        compiler_params=common.compiler_params(config, *("parallel",) * 4, "arbitrary"),
        cost_estimate=common.cost(
            2 * batch * heads * keys * (shares * (latent + rotary) + latent),
            [
                query,
                query_rotary,
                *(
                    jax.ShapeDtypeStruct((batch, keys, x.shape[2]), x.dtype)
                    for x in (latent_pages, rotary_pages)
                ),
            ],
            batch * heads * shares * keys,
        ),
        name="latent_attention" if blocks != "last" else "latent_attention_last",
    )(
        lengths,
        table,
        *[query] * shares,
        query_rotary,
        *[latent_pages] * shares,
        rotary_pages,
    )
    return acc, *(x[:, 0] for x in rest)
