"""Attention of one new token per sequence over its cache: `decode_attention` on a
contiguous cache, `paged_attention` on pages that a table puts in order.

All query heads of a key head are the rows of one product, so that the cache is read
once. Long caches are divided into `splits` that run side by side; XLA joins their
results. Blocks past a sequence's length are skipped.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.kernels import common
from pallasite.kernels.attention import LOWEST


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How a cache is divided.

    Attributes:
        block_kv: keys of a step (a paged cache: always one page).
        splits: parts of a sequence that run side by side.
    """

    block_kv: int = 128
    splits: int = 1


def decode_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: common.Implementation = "pallasite",
    config: DecodeConfig | None = None,
) -> jax.Array:
    """Attention of one query per sequence to the first `lengths` keys of its cache.

    Args:
        query: (batch, heads, width).
        key_cache: (batch, keys, kv_heads, width); kv_heads divides heads.
        value_cache: (batch, keys, kv_heads, value_width).
        lengths: (batch,) integers, at most `keys`. A sequence of length 0 gives zeros.
        scale: what scores are multiplied by; by default width ** -0.5.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).

    Returns:
        (batch, heads, value_width) in query's dtype.
    """
    batch, _, width = _rank("decode_attention", "query", query, 3)
    _, keys, kv_heads, _ = _rank("decode_attention", "key_cache", key_cache, 4)
    _check("decode_attention", query, key_cache, value_cache, lengths)
    for name, cache in {"key_cache": key_cache, "value_cache": value_cache}.items():
        wanted = (batch, keys, kv_heads, cache.shape[-1])
        common.check_shape("decode_attention", name, cache, wanted)
    options = _Options(width**-0.5 if scale is None else scale, soft_cap)
    compute = common.choose(implementation, _contiguous, _plain)
    return compute(
        query,
        key_cache,
        value_cache,
        lengths.astype(jnp.int32),
        options=options,
        config=config or DecodeConfig(),
    )


def paged_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: common.Implementation = "pallasite",
    config: DecodeConfig | None = None,
) -> jax.Array:
    """`decode_attention` on a cache of pages: page n of a sequence is page_table[b, n].

    Args:
        query: (batch, heads, width).
        key_pages: (pages, page_size, kv_heads, width).
        value_pages: (pages, page_size, kv_heads, value_width).
        lengths: (batch,) integers: keys of each sequence.
        page_table: (batch, pages of the longest sequence) integers. Entries past a
            sequence's length are not used, whatever they are.
    """
    batch, _, width = _rank("paged_attention", "query", query, 3)
    pages, size, kv_heads, _ = _rank("paged_attention", "key_pages", key_pages, 4)
    _check("paged_attention", query, key_pages, value_pages, lengths)
    for name, cache in {"key_pages": key_pages, "value_pages": value_pages}.items():
        wanted = (pages, size, kv_heads, cache.shape[-1])
        common.check_shape("paged_attention", name, cache, wanted)
    _rank("paged_attention", "page_table", page_table, 2)
    wanted = (batch, page_table.shape[1])
    common.check_shape("paged_attention", "page_table", page_table, wanted)
    options = _Options(width**-0.5 if scale is None else scale, soft_cap)
    compute = common.choose(implementation, _paged, _plain_paged)
    return compute(
        query,
        key_pages,
        value_pages,
        lengths.astype(jnp.int32),
        page_table.astype(jnp.int32),
        options=options,
        config=config or DecodeConfig(),
    )


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    soft_cap: float | None


def _rank(operation: str, name: str, x: jax.Array, rank: int) -> tuple[int, ...]:
    if x.ndim != rank:
        raise SpecError(
            f"{operation}: {name} has {x.ndim} dimensions",
            [("has shape", x.shape)],
            fix=f"pass {name} with {rank} dimensions",
        )
    return x.shape


def _check(operation: str, query, keys, values, lengths) -> None:
    common.check_floats(operation, query=query)
    heads, kv_heads = query.shape[1], keys.shape[2]
    if not kv_heads or heads % kv_heads:
        raise SpecError(
            f"{operation}: the number of key heads does not divide the query's",
            [("query heads", heads), ("key heads", kv_heads)],
            fix="repeat or regroup heads so that it does",
        )
    if keys.shape[-1] != query.shape[-1] or values.ndim != 4:
        raise SpecError(
            f"{operation}: the caches do not fit the query",
            [("query", query.shape), ("keys", keys.shape), ("values", values.shape)],
            fix="keys have the query's width; both caches have four dimensions",
        )
    common.check_shape(operation, "lengths", lengths, query.shape[:1])
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise SpecError(
            f"{operation}: lengths are {lengths.dtype}",
            fix="pass them as int32",
        )


def _capped(scores, options: _Options):
    scores = scores * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return scores


# --- plain jnp ---


def _plain(query, key_cache, value_cache, lengths, *, options, config):
    del config  # blocks are a kernel's
    batch, heads, width = query.shape
    _, keys, kv_heads, _ = key_cache.shape
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, width)
    wide = common.statistics_dtype(query.dtype)
    scores = jnp.einsum(
        "bhgd,bkhd->bhgk", grouped, key_cache, preferred_element_type=wide
    )
    allowed = jnp.arange(keys) < lengths[:, None, None, None]
    scores = jnp.where(allowed, _capped(scores, options), LOWEST)
    weights = jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0)
    out = jnp.einsum("bhgk,bkhd->bhgd", weights.astype(value_cache.dtype), value_cache)
    return out.reshape(batch, heads, -1).astype(query.dtype)


def _plain_paged(query, key_pages, value_pages, lengths, page_table, **how):
    def cache(pages):
        gathered = jnp.take(pages, page_table, axis=0, mode="clip")
        return gathered.reshape(len(page_table), -1, *pages.shape[2:])

    return _plain(query, cache(key_pages), cache(value_pages), lengths, **how)


# --- kernels ---


def _contiguous(query, key_cache, value_cache, lengths, *, options, config):
    block = min(config.block_kv, pl.align_to(max(key_cache.shape[1], 1), 16))
    return _streamed(
        query,
        key_cache,
        value_cache,
        [lengths],
        block=block,
        steps=pl.cdiv(key_cache.shape[1], block),
        block_of=lambda b, step, lengths_ref: (b, step),
        options=options,
        splits=config.splits,
    )


def _paged(query, key_pages, value_pages, lengths, page_table, *, options, config):
    return _streamed(
        query,
        key_pages,
        value_pages,
        [lengths, page_table],
        block=key_pages.shape[1],
        steps=page_table.shape[1],
        # A sequence without keys has no page: its entry may be anything.
        block_of=lambda b, step, lengths_ref, table_ref: (
            jnp.clip(table_ref[b, step], 0, key_pages.shape[0] - 1),
            0,
        ),
        options=options,
        splits=config.splits,
    )


def _streamed(
    query,
    keys,
    values,
    scalars: list[jax.Array],
    *,
    block: int,
    steps: int,
    block_of: Callable[..., tuple[Any, Any]],
    options: _Options,
    splits: int,
):
    """Both operations: `block_of` says where a step's keys are in the cache."""
    batch, heads, width = query.shape
    kv_heads, value_width = keys.shape[2], values.shape[3]
    group = heads // kv_heads
    steps = max(steps, 1)
    splits = max(1, min(splits, steps))
    per_split = pl.cdiv(steps, splits)
    wide = common.statistics_dtype(query.dtype)

    def cache(x):
        def index(b, h, s, j, *refs):
            # A step past the end looks where the last one did, so that nothing moves.
            last = jnp.maximum((refs[0][b] + block - 1) // block, 1) - 1
            step = jnp.minimum(s * per_split + j, jnp.minimum(last, steps - 1))
            first, second = block_of(b, step, *refs)
            return first, second, h, 0

        ragged = x.shape[1] % block != 0
        fill: dict[str, Any] = {"fill": 0} if ragged else {}
        return pl.BlockSpec((None, block, None, x.shape[3]), index, **fill)

    def partial_result(size):
        return pl.BlockSpec(
            (None, None, None, group, size), lambda b, h, s, j, *_: (b, h, s, 0, 0)
        )

    sizes = (value_width, 1, 1)
    shape = (batch, kv_heads, splits, group)
    acc, maximum, total = pl.pallas_call(
        functools.partial(_kernel, options=options, per_split=per_split),
        out_shape=[jax.ShapeDtypeStruct((*shape, size), wide) for size in sizes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, splits, per_split),
            in_specs=[
                pl.BlockSpec(
                    (None, None, group, width), lambda b, h, s, j, *_: (b, h, 0, 0)
                ),
                cache(keys),
                cache(values),
            ],
            out_specs=[partial_result(size) for size in sizes],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        name="decode_attention",
    )(*scalars, query.reshape(batch, kv_heads, group, width), keys, values)

    top = jnp.max(maximum, axis=2, keepdims=True)
    shrink = jnp.exp(maximum - top)
    total = jnp.sum(total * shrink, axis=2)
    out = jnp.sum(acc * shrink, axis=2) / jnp.where(total == 0, 1, total)
    return out.reshape(batch, heads, value_width).astype(query.dtype)


def _kernel(lengths_ref, *refs, options: _Options, per_split: int):
    q_ref, k_ref, v_ref, acc_ref, max_ref, sum_ref = refs[-6:]
    split, j = pl.program_id(2), pl.program_id(3)
    length = lengths_ref[pl.program_id(0)]
    start = (split * per_split + j) * k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, LOWEST)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(start < length)
    def _():
        q = q_ref[...]
        scores = lax.dot_general(
            q,
            k_ref[...].astype(q.dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=max_ref.dtype,
        )
        columns = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(columns < length, _capped(scores, options), -jnp.inf)
        old = max_ref[...]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - new), jnp.exp(old - new)
        sum_ref[...] = sum_ref[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        values = v_ref[...].astype(q.dtype)
        # Keys past the length may be anything in a cache, NaN too: 0 * NaN is NaN.
        rows = start + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where(rows < length, values, 0)
        acc_ref[...] = acc_ref[...] * shrink + jnp.dot(
            weights.astype(q.dtype), values, preferred_element_type=acc_ref.dtype
        )
        max_ref[...] = new
