"""Attention of one new token per sequence over its cache: `decode_attention` on a
contiguous cache, `paged_attention` on pages addressed through a table.

All query heads of a key head are rows of one matmul, so the cache is read once. Long
caches are split into `splits` that run concurrently; XLA combines their results.
Blocks past a sequence's length are skipped.
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
from pallasite.kernels import common, configs
from pallasite.kernels.attention import LOWEST, RunningSoftmax
from pallasite.target import Gpu


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How a cache is split.

    Attributes:
        block_kv: keys per step (always one page for a paged cache).
        splits: parts of a sequence that run concurrently.
        batch_invariant: the operations' argument.
    """

    block_kv: int = 128
    splits: int = 1
    batch_invariant: bool = False


def decode_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    implementation: common.Implementation = "pallasite",
    config: DecodeConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Attention of one query per sequence to the first `lengths` keys of its cache.

    Args:
        query: (batch, heads, width).
        key_cache: (batch, keys, kv_heads, width); kv_heads divides heads. Caches may
            have any dtype that converts to query's, including int8 and 8-bit floats.
        value_cache: (batch, keys, kv_heads, value_width).
        lengths: (batch,) integers; more than `keys` means all. Length 0 gives zeros.
        scale: factor applied to scores; by default width ** -0.5.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
        key_scales, value_scales: factors of a quantised cache: (kv_heads,), or one per
            token (batch, keys, kv_heads).
        batch_invariant: whether the bits of a sequence's result may not depend on the
            other sequences; caches are then split as for a single one.

    Returns:
        (batch, heads, value_width) in query's dtype.
    """
    operation = "decode_attention"
    common.check_invariant(operation, implementation, batch_invariant)
    batch, _, width = common.check_rank(operation, "query", query, HEADS)
    _, keys, kv_heads, _ = common.check_rank(operation, "key_cache", key_cache, CACHE)
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    _check(operation, (batch, keys, kv_heads), query, caches, lengths)
    return attend(
        common.choose(implementation, _contiguous, _plain),
        query,
        [key_cache, value_cache],
        [lengths],
        check_scales(operation, key_cache.shape, key_scales, value_scales),
        options=Options.of(operation, width, scale, soft_cap),
        config=_tuned(
            operation,
            config,
            SPACE,
            (1 if batch_invariant else batch * kv_heads, keys),
            [query, key_cache, value_cache],
            batch_invariant,
        ),
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
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    implementation: common.Implementation = "pallasite",
    config: DecodeConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """`decode_attention` on a paged cache: page n of sequence b is page_table[b, n].

    Args:
        query: (batch, heads, width).
        key_pages: (pages, page_size, kv_heads, width).
        value_pages: (pages, page_size, kv_heads, value_width).
        lengths: (batch,) integers: keys of each sequence; more than its pages hold
            means all of them.
        page_table: (batch, pages of the longest sequence) integers. Entries past a
            sequence's length are ignored.
        key_scales, value_scales: (kv_heads,), or (pages, page_size, kv_heads).
        batch_invariant: as in `decode_attention`.
    """
    operation = "paged_attention"
    common.check_invariant(operation, implementation, batch_invariant)
    batch, _, width = common.check_rank(operation, "query", query, HEADS)
    pages, size, kv_heads, _ = common.check_rank(
        operation, "key_pages", key_pages, PAGES
    )
    caches = {"key_pages": key_pages, "value_pages": value_pages}
    _check(operation, (pages, size, kv_heads), query, caches, lengths)
    check_table(operation, page_table, batch)
    return attend(
        common.choose(implementation, _paged, plain_paged),
        query,
        [key_pages, value_pages],
        [lengths, page_table],
        check_scales(operation, key_pages.shape, key_scales, value_scales),
        options=Options.of(operation, width, scale, soft_cap),
        config=_tuned(
            operation,
            config,
            PAGED,
            (1 if batch_invariant else batch * kv_heads, page_table.shape[1] * size),
            [query, key_pages, page_table],
            batch_invariant,
        ),
    )


# A step over a paged cache is one page, or a part of a large one.
PAGED = {"splits": (1, 2, 4, 8, 16)}
SPACE = {"block_kv": (64, 128, 256, 512), **PAGED}


# Programs that keep a GPU's memory busy: nearly two per SM. On an H200, four sequences
# of eight key heads and 8192 keys take 175 us unsplit, 49 in eight parts; sixteen
# sequences take 197 us unsplit, 144 in two parts; sixty-four are fastest unsplit.
ENOUGH_PROGRAMS = 256
LEAST_KEYS = 512  # per part


def _tuned(
    operation: str,
    given: DecodeConfig | None,
    space,
    sizes,
    operands,
    batch_invariant: bool,
):
    """`sizes`: programs if sequences are not split, and most keys per sequence."""
    programs, keys = sizes
    splits = 1
    if configs.traced_for(Gpu):
        most = min(ENOUGH_PROGRAMS // max(programs, 1), keys // LEAST_KEYS)
        splits = max((n for n in PAGED["splits"] if n <= most), default=1)
    default = DecodeConfig(splits=splits)
    return configs.tuned(operation, given, default, space, operands, batch_invariant)


HEADS = "batch, heads, width"
CACHE = "batch, keys, kv_heads, width"
PAGES = "pages, page_size, kv_heads, width"


@dataclasses.dataclass(frozen=True)
class Options:
    """What is done to scores."""

    scale: float
    soft_cap: float | None

    @staticmethod
    def of(
        operation: str, width: int, scale: float | None, soft_cap: float | None
    ) -> "Options":
        if scale is not None:
            common.check_numbers(operation, scale=scale)
        common.check_soft_cap(operation, soft_cap)
        return Options(max(width, 1) ** -0.5 if scale is None else scale, soft_cap)


def check_heads(operation: str, heads: int, kv_heads: int) -> None:
    if not kv_heads or heads % kv_heads:
        raise SpecError(
            f"{operation}: the number of key heads does not divide the query's",
            [("query heads", heads), ("key heads", kv_heads)],
            fix="repeat or regroup heads so that it does",
        )


def check_table(operation: str, page_table: jax.Array, sequences: int) -> None:
    common.check_rank(operation, "page_table", page_table, "sequences, pages")
    common.check_integers(operation, page_table=page_table)
    wanted = (sequences, page_table.shape[1])
    common.check_shape(operation, "page_table", page_table, wanted)


def _check(operation: str, sizes, query, caches: dict[str, Any], lengths) -> None:
    """Checks that caches are (*sizes, width), the first with the query's width."""
    common.check_floats(operation, query=query)
    common.check_real(operation, **caches)
    common.check_integers(operation, lengths=lengths)
    common.check_shape(operation, "lengths", lengths, query.shape[:1])
    check_heads(operation, query.shape[1], sizes[2])
    for name, cache in caches.items():
        is_values = name.startswith("value") and cache.ndim == 4
        width = cache.shape[-1] if is_values else query.shape[-1]
        common.check_shape(operation, name, cache, (*sizes, width))


def check_scales(operation: str, cache: tuple[int, ...], *scales):
    """Checks the scales of keys and values: one per head, or per token and head."""
    common.check_floats(operation, key_scales=scales[0], value_scales=scales[1])
    for name, x in zip(("key_scales", "value_scales"), scales, strict=True):
        if x is not None and x.shape not in (cache[2:3], cache[:3]):
            raise SpecError(
                f"{operation}: {name} does not match the cache",
                [("has shape", x.shape), ("cache", cache)],
                fix=f"pass one value per head, {cache[2:3]}, or per token, {cache[:3]}",
            )
    return scales


def attend(compute: Callable, query, caches, numbers, scales, **how):
    """Runs `compute`; per-head scales are applied to the query and the result."""
    by_head = [x if x is not None and x.ndim == 1 else None for x in scales]
    by_token = [x if x is not None and x.ndim == 3 else None for x in scales]
    if by_head[0] is not None:
        query = scale_heads(query, by_head[0])
    numbers = map(common.as_int32, numbers)
    out = compute(query, *caches, *by_token, *numbers, **how)
    return out if by_head[1] is None else scale_heads(out, by_head[1])


def scale_heads(x, scales):
    """(..., heads, width) times a number per group of heads."""
    repeated = jnp.repeat(scales, x.shape[-2] // len(scales))[:, None]
    return (x * repeated.astype(common.statistics_dtype(x.dtype))).astype(x.dtype)


def capped(scores, options: Options):
    scores = scores * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return scores


# --- plain jnp ---


def _plain(
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    lengths,
    *,
    options,
    config,
    first=0,
):
    """`first`: how many leading keys to skip, for all queries or per query."""
    del config  # only kernels have blocks
    batch, heads, width = query.shape
    _, keys, kv_heads, _ = key_cache.shape
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, width)
    key_cache, value_cache = (x.astype(query.dtype) for x in (key_cache, value_cache))
    wide = common.statistics_dtype(query.dtype)
    scores = jnp.einsum(
        "bhgd,bkhd->bhgk", grouped, key_cache, preferred_element_type=wide
    )
    if key_scales is not None:
        scores = scores * key_scales.swapaxes(1, 2)[:, :, None].astype(wide)
    first, lengths = (jnp.reshape(x, (-1, 1, 1, 1)) for x in (first, lengths))
    position = jnp.arange(keys)
    allowed = (position >= first) & (position < lengths)
    scores = jnp.where(allowed, capped(scores, options), LOWEST)
    weights = jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0)
    if value_scales is not None:
        scaled = weights * value_scales.swapaxes(1, 2)[:, :, None].astype(wide)
        weights = jnp.where(allowed, scaled, 0)
    out = jnp.einsum("bhgk,bkhd->bhgd", weights.astype(value_cache.dtype), value_cache)
    return out.reshape(batch, heads, value_cache.shape[3]).astype(query.dtype)


def plain_paged(query, *operands, **how):
    """`_plain` on paged caches; the last operand is the page table."""
    *caches, lengths, page_table = operands

    def cache(pages):
        if pages is None:
            return None
        gathered = jnp.take(pages, page_table, axis=0, mode="clip")
        keys = page_table.shape[1] * pages.shape[1]
        return gathered.reshape(len(page_table), keys, *pages.shape[2:])

    contiguous = [*map(cache, caches), lengths]
    return _plain(query, *contiguous, **how)


# --- kernels ---


def _contiguous(query, key_cache, value_cache, *operands, options, config):
    *scales, lengths = operands
    block = min(config.block_kv, pl.align_to(max(key_cache.shape[1], 1), 16))
    return _streamed(
        query,
        key_cache,
        value_cache,
        scales,
        [lengths],
        block=block,
        most_keys=key_cache.shape[1],
        block_of=lambda b, step, lengths_ref: (b, step),
        options=options,
        config=config,
    )


def _paged(query, key_pages, value_pages, *operands, options, config):
    *scales, lengths, page_table = operands
    parts = _parts(key_pages.shape[1], max(key_pages.shape[3], value_pages.shape[3]))

    def block_of(b, step, lengths_ref, table_ref):
        page, part = (step, 0) if parts == 1 else (step // parts, step % parts)
        # A sequence without keys has no page: its table entry may be anything.
        return jnp.clip(table_ref[b, page], 0, key_pages.shape[0] - 1), part

    return _streamed(
        query,
        key_pages,
        value_pages,
        scales,
        [lengths, page_table],
        block=key_pages.shape[1] // parts,
        most_keys=page_table.shape[1] * key_pages.shape[1],
        block_of=block_of,
        options=options,
        config=config,
    )


def _parts(page: int, width: int) -> int:
    """Steps over a page: more than one where a GPU has no room for all of it."""
    if not configs.traced_for(Gpu):
        return 1
    most = configs.most_rows(width)
    counts = (n for n in range(1, max(page, 1) + 1) if page % n == 0)
    return next((n for n in counts if page // n <= most), 1)


def _streamed(
    query,
    keys,
    values,
    scales: list[jax.Array | None],
    scalars: list[jax.Array],
    *,
    block: int,
    most_keys: int,
    block_of: Callable[..., tuple[Any, Any]],
    options: Options,
    config: DecodeConfig,
):
    """Kernel of both operations; `block_of` locates a step's keys in the cache."""
    batch, heads, width = query.shape
    kv_heads, value_width = keys.shape[2], values.shape[3]
    group = heads // kv_heads
    if not all(x.size for x in (query, keys, values, *scalars)):
        return jnp.zeros((batch, heads, value_width), query.dtype)
    steps = pl.cdiv(most_keys, block)
    splits = max(1, min(config.splits, steps))
    per_split = pl.cdiv(steps, splits)
    wide = common.statistics_dtype(query.dtype)

    def cache(x):
        def index(b, h, s, j, *refs):
            # A step past the end repeats the last block index: nothing is copied.
            length = length_within(refs[0][b], most_keys)
            last = jnp.maximum((length + block - 1) // block, 1) - 1
            step = jnp.minimum(s * per_split + j, last)
            first, second = block_of(b, step, *refs)
            return first, second, h, 0

        ragged = x.shape[1] % block != 0
        fill: dict[str, Any] = {"fill": 0} if ragged else {}
        return pl.BlockSpec((None, block, None, x.shape[3]), index, **fill)

    def partial_result(size):
        return pl.BlockSpec(
            (None, None, None, group, size), lambda b, h, s, j, *_: (b, h, s, 0, 0)
        )

    read = [keys, values, *(x[..., None] for x in scales if x is not None)]
    sizes = (value_width, 1, 1)
    shape = (batch, kv_heads, splits, group)
    acc, maximum, total = pl.pallas_call(
        functools.partial(
            _kernel,
            options=options,
            per_split=per_split,
            most_keys=most_keys,
            scalars=len(scalars),
            has_scales=[x is not None for x in scales],
        ),
        out_shape=[jax.ShapeDtypeStruct((*shape, size), wide) for size in sizes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, splits, per_split),
            in_specs=[
                pl.BlockSpec(
                    (None, None, group, width), lambda b, h, s, j, *_: (b, h, 0, 0)
                ),
                *map(cache, read),
            ],
            out_specs=[partial_result(size) for size in sizes],
        ),
        compiler_params=common.compiler_params(
            config, "parallel", "parallel", "parallel", "arbitrary"
        ),
        cost_estimate=common.cost(
            2 * batch * heads * steps * block * (width + value_width),
            [
                query,
                *(
                    jax.ShapeDtypeStruct((batch, steps * block, *x.shape[2:]), x.dtype)
                    for x in read
                ),
            ],
            batch * heads * steps * block,
        ),
        name="decode_attention",
    )(*scalars, query.reshape(batch, kv_heads, group, width), *read)

    out = joined(acc, maximum, total, config, axis=2)
    return out.reshape(batch, heads, value_width).astype(query.dtype)


def joined(acc, maximum, total, config: Any, axis: int):
    """Combines the results of the splits, which are along `axis`."""
    shrink = jnp.exp(maximum - jnp.max(maximum, axis=axis, keepdims=True))
    total = common.added(total * shrink, config, axis)
    out = common.added(acc * shrink, config, axis)
    return out / jnp.where(total == 0, 1, total)


def _kernel(
    lengths_ref,
    *refs,
    options: Options,
    per_split: int,
    most_keys: int,
    scalars: int,
    has_scales: list[bool],
):
    take = iter(refs[scalars - 1 :])
    q_ref, k_ref, v_ref = next(take), next(take), next(take)
    key_scale_ref, value_scale_ref = (next(take) if has else None for has in has_scales)
    acc_ref, max_ref, sum_ref = take
    split, j = pl.program_id(2), pl.program_id(3)
    length = length_within(lengths_ref[pl.program_id(0)], most_keys)
    start = (split * per_split + j) * k_ref.shape[0]
    state = RunningSoftmax(max_ref, sum_ref, acc_ref)

    @pl.when(j == 0)
    def _():
        state.start()

    @pl.when(start < length)
    def _():
        scores = products(q_ref[...], k_ref[...], max_ref.dtype)
        columns = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = scaled_by_token(scores, key_scale_ref)
        scores = jnp.where(columns < length, capped(scores, options), -jnp.inf)
        values = known(v_ref[...].astype(q_ref.dtype), start, length)
        state.absorb(scores, values, times_scales(value_scale_ref, start, length))


def length_within(length, most_keys: int):
    """A sequence's length; what is past the end of its cache does not exist.

    A split may have steps past the last block, which see that block again.
    """
    return jnp.clip(length, 0, most_keys)


def scaled_by_token(scores, scale_ref):
    """Scores (rows, keys) times a factor per key, from a ref (keys, 1)."""
    if scale_ref is None:
        return scores
    return scores * scale_ref[...].reshape(1, -1).astype(scores.dtype)


def times_scales(scale_ref, start, length):
    """Multiplies weights by the scales of values, if any, masked as in `known`."""
    if scale_ref is None:
        return lambda weights: weights
    scales = known(scale_ref[...], start, length).reshape(1, -1)
    return lambda weights: weights * scales.astype(weights.dtype)


def products(q, k, wide):
    """Dot products of query rows with key rows of any dtype."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(q, k.astype(q.dtype), contract, preferred_element_type=wide)


def known(values, start, length):
    """Values of keys from position `start`, with zeros from `length` on.

    Past the length a cache may hold anything, even NaN, and 0 * NaN is NaN.
    """
    rows = start + lax.broadcasted_iota(jnp.int32, values.shape, 0)
    return jnp.where(rows < length, values, 0)
