"""`ragged_paged_attention`: sequences with any number of new tokens, in one call.

Mixes prefill, chunked prefill and decoding: the new tokens of all sequences are the
rows of one array, and their keys are already in the pages. A program works on a visit
(`visits.py`): a block of rows and one sequence with rows in it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.kernels import common, configs
from pallasite.kernels.attention import RunningSoftmax
from pallasite.kernels.decode import (
    PAGES,
    Options,
    attend,
    capped,
    check_heads,
    check_scales,
    check_table,
    known,
    plain_paged,
    products,
    scaled_by_token,
    times_scales,
)
from pallasite.kernels.visits import visits_of_groups
from pallasite.target import Tpu


@dataclasses.dataclass(frozen=True)
class RaggedAttentionConfig:
    """How attention is split: new tokens per program; a step is a page of keys."""

    block_q: int


SPACE = {"block_q": (8, 16, 32, 64, 128)}


def ragged_paged_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    query_lengths: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    implementation: common.Implementation = "pallasite",
    config: RaggedAttentionConfig | None = None,
) -> jax.Array:
    """Causal attention of the last tokens of each sequence to its cache.

    Args:
        query: (tokens, heads, width): the new tokens of sequence 0, then of sequence 1,
            and so on. Tokens past the sum of query_lengths give zeros.
        key_pages: (pages, page_size, kv_heads, width); kv_heads divides heads.
        value_pages: (pages, page_size, kv_heads, value_width).
        lengths: (sequences,) integers: keys per sequence, including new tokens.
        page_table: (sequences, pages of the longest sequence) integers: page n of a
            sequence. Entries past a sequence's length may be anything.
        query_lengths: (sequences,) integers: new tokens per sequence; 0 is allowed.
        scale: factor applied to scores; by default width ** -0.5.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
        window: a token sees itself and the window - 1 tokens before it.
        key_scales, value_scales: factors of quantised pages: (kv_heads,), or one per
            token (pages, page_size, kv_heads).

    Returns:
        (tokens, heads, value_width) in query's dtype.
    """
    operation = "ragged_paged_attention"
    _, heads, width = common.check_rank(
        operation, "query", query, "tokens, heads, width"
    )
    pages, size, kv_heads, _ = common.check_rank(
        operation, "key_pages", key_pages, PAGES
    )
    _, _, _, value_width = common.check_rank(
        operation, "value_pages", value_pages, PAGES
    )
    common.check_floats(operation, query=query)
    common.check_real(operation, key_pages=key_pages, value_pages=value_pages)
    common.check_integers(operation, lengths=lengths, query_lengths=query_lengths)
    if window is not None:
        fix = "pass an integer, 1 (the token itself) or more, or None for all tokens"
        common.check_count(operation, "window", window, 1, fix)
    for name, x, last in (
        ("key_pages", key_pages, width),
        ("value_pages", value_pages, value_width),
    ):
        common.check_shape(operation, name, x, (pages, size, kv_heads, last))
    check_heads(operation, heads, kv_heads)
    common.check_rank(operation, "lengths", lengths, "sequences")
    check_table(operation, page_table, len(lengths))
    common.check_shape(operation, "query_lengths", query_lengths, lengths.shape)
    compute = common.choose(implementation, _streamed, _plain)
    default = _default(len(query), len(lengths), heads // kv_heads)
    operands = (query, key_pages, page_table)
    return attend(
        compute,
        query,
        [key_pages, value_pages],
        [lengths, page_table, query_lengths],
        check_scales(operation, key_pages.shape, key_scales, value_scales),
        window=window,
        options=Options.of(operation, width, scale, soft_cap),
        config=configs.tuned(operation, config, default, SPACE, operands),
    )


def _default(tokens: int, sequences: int, group: int) -> RaggedAttentionConfig:
    """Blocks of 64 rows: new tokens times query heads per key head.

    With more, multiplying for a single token takes longer than reading its keys. Not
    on TPUs, where small tiles cost as much as that: no more tokens than a sequence has
    on average.
    """
    rows = 64
    if not configs.traced_for(Tpu):
        mean = pl.cdiv(tokens, max(sequences, 1))
        rows = min(rows, group * pl.next_power_of_2(mean))
    return RaggedAttentionConfig(max(rows // group, 1))


def _places(tokens: int, lengths, query_lengths):
    """Each token's sequence and position in it; -1 for tokens past the sequences."""
    end = jnp.cumsum(query_lengths)
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(end, token, side="right").astype(jnp.int32)
    within = jnp.minimum(sequence, len(lengths) - 1)
    position = lengths[within] - end[within] + token
    return within, jnp.where(sequence < len(lengths), position, -1)


def _plain(
    query,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    lengths,
    page_table,
    query_lengths,
    *,
    window,
    options,
    config,
):
    if not len(lengths):
        return jnp.zeros((*query.shape[:2], value_pages.shape[3]), query.dtype)
    sequence, position = _places(len(query), lengths, query_lengths)
    return plain_paged(
        query,
        key_pages,
        value_pages,
        key_scales,
        value_scales,
        position + 1,
        page_table[sequence],
        first=0 if window is None else position + 1 - window,
        options=options,
        config=config,
    )


def _streamed(
    query,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    lengths,
    page_table,
    query_lengths,
    *,
    window,
    options,
    config,
):
    tokens, heads, width = query.shape
    pages, size, kv_heads, value_width = value_pages.shape
    group = heads // kv_heads
    sequences, steps = page_table.shape
    if not query.size or not page_table.size:
        return jnp.zeros((tokens, heads, value_width), query.dtype)
    rows = tokens * group
    block = min(config.block_q, max(tokens, 1)) * group
    wide = common.statistics_dtype(query.dtype)
    visits = visits_of_groups(query_lengths * group, rows, block)
    _, position = _places(tokens, lengths, query_lengths)

    # The keys that some row of a visit sees: from `first` to `limit`.
    last_row = jnp.minimum(visits.end, (visits.tile + 1) * block) - 1
    first_row = jnp.maximum(visits.start, visits.tile * block)
    limit = jnp.where(visits.start < visits.end, position[last_row // group] + 1, 0)
    first = jnp.zeros_like(limit)
    if window is not None:
        first = jnp.maximum(position[first_row // group] + 1 - window, 0)
    sequence = jnp.minimum(visits.group, sequences - 1)
    scalars = (visits.tile, visits.start, visits.end, sequence, first, limit)

    def kernel(tile_ref, start_ref, end_ref, sequence_ref, first_ref, limit_ref, *refs):
        _, q_ref, position_ref, k_ref, v_ref, *rest = refs
        take = iter(rest)
        key_scale_ref = next(take) if key_scales is not None else None
        value_scale_ref = next(take) if value_scales is not None else None
        o_ref, *scratch = take
        visit, step = pl.program_id(1), pl.program_id(2)
        state = RunningSoftmax(*scratch)
        first, limit, start = first_ref[visit], limit_ref[visit], step * size

        @pl.when(step == 0)
        def _():
            state.start()

        @pl.when((start < limit) & (start + size > first))
        def _():
            scores = products(q_ref[...], k_ref[...], wide)
            scores = scaled_by_token(scores, key_scale_ref)
            columns = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            allowed = columns <= position_ref[...]
            if window is not None:
                allowed &= columns > position_ref[...] - window
            scores = jnp.where(allowed, capped(scores, options), -jnp.inf)
            values = known(v_ref[...].astype(q_ref.dtype), start, limit)
            state.absorb(scores, values, times_scales(value_scale_ref, start, limit))

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            total = state.total[...]
            out = state.acc[...] / jnp.where(total == 0, 1, total)
            row = tile_ref[visit] * block + lax.broadcasted_iota(
                jnp.int32, o_ref.shape, 0
            )
            own = (row >= start_ref[visit]) & (row < end_ref[visit])
            pl.store(o_ref, ..., out.astype(o_ref.dtype), mask=own)

    def rows_of_visit(h, v, s, tile_ref, *_):
        return h, tile_ref[v], 0

    def page(h, v, s, *refs):
        sequence_ref, first_ref, limit_ref, table_ref = refs[3:]
        # A skipped step repeats its neighbour's block index: nothing is copied.
        last = jnp.maximum((limit_ref[v] + size - 1) // size, 1) - 1
        step = jnp.clip(s, first_ref[v] // size, jnp.minimum(last, steps - 1))
        number = table_ref[sequence_ref[v], step]
        return jnp.clip(number, 0, pages - 1), 0, h, 0

    scales = [x[..., None] for x in (key_scales, value_scales) if x is not None]
    read = sequences * steps * size  # keys, if all sequences have the longest length
    by_head = query.reshape(tokens, kv_heads, group, width).swapaxes(0, 1)
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((kv_heads, rows, value_width), query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars) + 1,
            grid=(kv_heads, len(visits.tile), steps),
            in_specs=[
                pl.BlockSpec((None, block, width), rows_of_visit),
                pl.BlockSpec((block, 1), lambda *at: rows_of_visit(*at)[1:]),
                pl.BlockSpec((None, size, None, width), page),
                pl.BlockSpec((None, size, None, value_width), page),
                *[pl.BlockSpec((None, size, None, 1), page)] * len(scales),
            ],
            out_specs=pl.BlockSpec((None, block, value_width), rows_of_visit),
            scratch_shapes=[
                pltpu.VMEM((block, 1), wide),
                pltpu.VMEM((block, 1), wide),
                pltpu.VMEM((block, value_width), wide),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            # Visits of one block store disjoint rows, so none waits for another.
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=common.cost(
            2 * rows * kv_heads * steps * size * (width + value_width),
            [
                query,
                *(
                    jax.ShapeDtypeStruct((read, *x.shape[2:]), x.dtype)
                    for x in (key_pages, value_pages, *scales)
                ),
                jax.ShapeDtypeStruct((tokens, heads, value_width), query.dtype),
            ],
            rows * kv_heads * steps * size,
        ),
        name="ragged_paged_attention",
    )(
        *scalars,
        page_table,
        by_head.reshape(kv_heads, rows, width),
        jnp.repeat(position, group)[:, None],
        key_pages,
        value_pages,
        *scales,
    )
    out = out.reshape(kv_heads, tokens, group, value_width).swapaxes(0, 1)
    return out.reshape(tokens, heads, value_width)
