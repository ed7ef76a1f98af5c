"""`attention`: softmax(q kᵀ) v without the scores in memory, forward and backward.

Blocks of keys come along the last grid axis; the running maximum, sum and output of
each query are scratch. Blocks that the mask rules out are skipped. The gradient is the
generated backward kernels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import KernelWarning, SpecError, warn
from pallasite.kernels import common, configs, dropout, masks
from pallasite.target import Gpu

# Where a running maximum starts: finite, so that differences stay finite where a row
# has seen no allowed key yet, even times log2(e). Below the numbers that stand for
# -inf in a bias (-1e9, -1e30): a query with such scores alone has equal weights.
LOWEST = -2e38
MANY_HEADS = 64  # more than most models have: may be the length


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How attention is divided: queries of a program, keys of a step.

    Attributes:
        block_q, block_kv: these.
        block_q_alone: queries of a program in calls that no derivative is taken of; by
            default as many as in the others.
        halves_alone: in such calls, where a mask allows nothing in one half of a
            block's keys, a step is of the other half; and the last keys come first,
            so that the last steps of all programs have the same keys.
        batch_invariant: the operation's argument.
    """

    block_q: int = 128
    block_kv: int = 128
    block_q_alone: int | None = None
    halves_alone: bool = False
    batch_invariant: bool = False


SPACE = {"block_q": (64, 128, 256, 512), "block_kv": (64, 128, 256, 512)}


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = ...,
    mask: masks.Mask | None = ...,
    *,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    sinks: jax.Array | None = ...,
    dropout_rate: float = ...,
    dropout_key: jax.Array | None = ...,
    return_log_sum_exp: Literal[False] = ...,
    implementation: common.Implementation = ...,
    config: AttentionConfig | None = ...,
    batch_invariant: bool = ...,
) -> jax.Array: ...
@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = ...,
    mask: masks.Mask | None = ...,
    *,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    sinks: jax.Array | None = ...,
    dropout_rate: float = ...,
    dropout_key: jax.Array | None = ...,
    return_log_sum_exp: Literal[True],
    implementation: common.Implementation = ...,
    config: AttentionConfig | None = ...,
    batch_invariant: bool = ...,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = ...,
    mask: masks.Mask | None = ...,
    *,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    sinks: jax.Array | None = ...,
    dropout_rate: float = ...,
    dropout_key: jax.Array | None = ...,
    return_log_sum_exp: bool = ...,
    implementation: common.Implementation = ...,
    config: AttentionConfig | None = ...,
    batch_invariant: bool = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: masks.Mask | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_log_sum_exp: bool = False,
    implementation: common.Implementation = "pallasite",
    config: AttentionConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention, with the layout of `jax.nn.dot_product_attention`.

    Args:
        query: (batch, queries, heads, width).
        key: (batch, keys, kv_heads, width); kv_heads divides heads, and each serves
            heads / kv_heads of them in turn.
        value: (batch, keys, kv_heads, value_width).
        bias: added to the scaled and capped scores: (batch or 1, heads or 1, queries,
            keys). A query with -inf for all keys gives zeros. Use -inf, not a large
            number, for such queries: where all scores of a query are -2e38 or less,
            its result lies between zeros and the mean of the values.
        mask: which pairs are allowed (`pallasite.kernels.masks`). A query that may look
            at nothing gives zeros.
        scale: what scores are multiplied by; by default width ** -0.5.
        soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap).
        sinks: (heads,): a score per head that takes weight and has no value.
        dropout_rate: the share of weights that become zero, a number; the others are
            divided by 1 - dropout_rate. Which ones depends on dropout_key, the head and
            the positions only.
        dropout_key: a key of `jax.random`.
        return_log_sum_exp: also return log(sum(exp(scores))), (batch, heads, queries),
            float32.
        batch_invariant: whether the bits of a sequence's result, and of its gradients,
            may not depend on how many sequences there are.

    Returns:
        (batch, queries, heads, value_width) in query's dtype.
    """
    sizes = _Sizes.of(query, key, value)
    _check(sizes, query, key, value, bias, sinks)
    if scale is not None:
        common.check_numbers("attention", scale=scale)
    common.check_soft_cap("attention", soft_cap)
    if mask is not None:
        masks.check_mask("attention", mask)
    dropout.check_rate("attention", dropout_rate, dropout_key)
    options = _Options(
        scale=max(sizes.width, 1) ** -0.5 if scale is None else scale,
        soft_cap=soft_cap,
        dropout_rate=dropout_rate,
        return_log_sum_exp=return_log_sum_exp,
    )
    seeds = None
    if dropout_rate and dropout_key is not None:
        rows = (sizes.batch, sizes.heads, sizes.queries)
        seeds = dropout.row_seeds(dropout_key, *rows)
    # With nothing to multiply there is no kernel.
    kernel = _streamed if query.size and value.size else _plain
    compute = common.choose(implementation, kernel, _plain)
    common.check_invariant("attention", implementation, batch_invariant)
    default = _default(sizes, query.dtype, mask, batch_invariant)
    if bias is not None or dropout_rate:  # tiles beside the scores
        default = dataclasses.replace(default, block_q_alone=None, halves_alone=False)
    config = configs.tuned(
        "attention",
        config,
        default,
        SPACE,
        (query, key, value, bias),
        batch_invariant,
        mask=masks.kind(mask),
        soft_cap=soft_cap is not None,
        **({"dropout": True} if dropout_rate else {}),
    )
    if config.block_q != default.block_q and config.block_q_alone is not None:
        # Tuned: for all calls.
        config = dataclasses.replace(config, block_q_alone=None, halves_alone=False)
    out, *log_sum_exp = compute(
        query,
        key,
        value,
        bias,
        sinks,
        seeds,
        mask=masks.Everything() if mask is None else mask,
        sizes=sizes,
        options=options,
        config=config,
    )
    return (out, *log_sum_exp) if return_log_sum_exp else out


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    soft_cap: float | None
    dropout_rate: float
    return_log_sum_exp: bool  # as a second result


@dataclasses.dataclass(frozen=True)
class _Sizes:
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    value_width: int

    @staticmethod
    def of(query, key, value) -> "_Sizes":
        for name, x in {"query": query, "key": key, "value": value}.items():
            common.check_array("attention", name, x)
            if x.ndim != 4:
                raise SpecError(
                    f"attention: {name} has {x.ndim} dimensions",
                    [("has shape", x.shape)],
                    fix="pass (batch, length, heads, width); [None] adds a batch",
                )
        batch, queries, heads, width = query.shape
        _, keys, kv_heads, value_width = value.shape
        return _Sizes(batch, queries, keys, heads, kv_heads, width, value_width)


def _check(sizes: _Sizes, query, key, value, bias, sinks) -> None:
    s = sizes
    common.check_floats("attention", query=query, key=key, value=value, bias=bias)
    common.check_floats("attention", sinks=sinks)
    common.check_shape("attention", "key", key, (s.batch, s.keys, s.kv_heads, s.width))
    common.check_shape(
        "attention", "value", value, (s.batch, s.keys, s.kv_heads, s.value_width)
    )
    common.check_shape("attention", "sinks", sinks, (s.heads,))
    if not s.kv_heads or s.heads % s.kv_heads:
        raise SpecError(
            "attention: the number of key heads does not divide the query's",
            [("query heads", s.heads), ("key heads", s.kv_heads)],
            fix="repeat or regroup heads so that it does; operands are (batch, length, "
            "heads, width): jnp.swapaxes(x, 1, 2) if heads come first",
        )
    if s.heads >= MANY_HEADS and s.heads >= 8 * max(s.queries, s.keys) > 0:
        warn(
            f"attention of {s.heads} heads with {s.queries} queries and {s.keys} keys: "
            "are heads and length swapped? Operands are (batch, length, heads, width): "
            "jnp.swapaxes(x, 1, 2)",
            KernelWarning,
        )
    if bias is not None:
        wanted = (s.batch, s.heads, s.queries, s.keys)
        fits = bias.ndim == 4 and all(
            have in (1, want)
            for have, want in zip(bias.shape[:2], wanted[:2], strict=True)
        )
        if not fits or bias.shape[2:] != wanted[2:]:
            raise SpecError(
                "attention: bias does not match the other operands",
                [("has shape", bias.shape), ("needs shape", wanted)],
                fix="batch and heads may be 1; broadcast the other two",
            )


def _scores(q, k, options: _Options):
    """Scaled, capped products of queries with keys, in the statistics' dtype."""
    wide = common.statistics_dtype(q.dtype)
    scores = lax.dot_general(
        q, k, (((1,), (1,)), ((), ())), preferred_element_type=wide
    )
    scores = scores * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return scores


def _log_sum_exp(found):
    """-inf for rows that look at nothing, whose sum was taken as exp(LOWEST).

    The logarithm of no sum at all would have a gradient of 0 / 0.
    """
    return jnp.where(found > LOWEST, found, -jnp.inf)


def _plain(query, key, value, bias, sinks, seeds, *, mask, sizes, options, config):
    del config  # blocks are a kernel's
    group = sizes.heads // sizes.kv_heads
    repeat = functools.partial(jnp.repeat, repeats=group, axis=2)
    over_heads = jax.vmap(functools.partial(_scores, options=options), in_axes=(1, 1))
    scores = jax.vmap(over_heads)(query, repeat(key))  # (batch, heads, queries, keys)
    if bias is not None:
        scores = scores + bias
    allowed = masks.pairs(mask, sizes.batch, sizes.queries, sizes.keys)[:, None]
    scores = jnp.where(allowed, scores, -jnp.inf)
    maximum = jnp.max(scores, axis=-1, keepdims=True, initial=LOWEST)
    if sinks is not None:
        sink = sinks.astype(scores.dtype)[None, :, None, None]
        maximum = jnp.maximum(maximum, sink)
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - maximum)
    weights = weights / jnp.where(total == 0, 1, total)
    if seeds is not None:
        rate = options.dropout_rate
        stays = dropout.kept(seeds, jnp.arange(sizes.keys, dtype=jnp.int32), rate)
        weights = jnp.where(stays, weights * dropout.scale(rate), 0)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), repeat(value))
    if not options.return_log_sum_exp:
        return (out.astype(query.dtype),)
    found = maximum + jnp.log(total + jnp.exp(LOWEST - maximum))
    return out.astype(query.dtype), _log_sum_exp(found)[..., 0]


# A Hopper program of three computing warpgroups, 64 queries of each: one more than
# usual hides what the others wait for, and has registers for 128 scores of a query,
# as many weights of 16 bits, and a narrow result. On an H200 it takes 0.88 to 0.94 of
# the time of two.
THREE, TWO, GAIN = 192, 128, 1.06
NARROW = 64  # numbers of a value
WIDE = 256  # numbers of a head beyond which fewer rows at a time fit on a GPU

LANES = 128  # what divides half a block's keys: whole vector registers of a TPU
# Queries and keys of a head, and their width, whose blocks become one program on a TPU
# (`passes/schedule/tpu_blocks.py`).
ONE_PROGRAM, ONE_WIDTH = 2048, 128


def _is_one_program(config: AttentionConfig, sizes: "_Sizes", mask) -> bool:
    """Whether halves need no branches on a TPU.

    It is then known which steps a program has. Elsewhere, branches cost more than what
    they skip.
    """
    if mask is None or [*mask.arrays()]:
        return False
    lengths = (sizes.queries, sizes.keys)
    blocks = (config.block_q_alone or config.block_q, config.block_kv)
    fits = max(lengths) <= ONE_PROGRAM
    fits = fits and max(sizes.width, sizes.value_width) <= ONE_WIDTH
    whole = not any(n % block for n, block in zip(lengths, blocks, strict=True))
    return fits and whole and _has_halves(config, sizes, mask)


def _has_halves(config: AttentionConfig, sizes: "_Sizes", mask) -> bool:
    """Whether steps may be of halves: the mask is one of positions."""
    if mask is None or isinstance(mask, masks.Everything):
        return False
    fits = config.block_kv % (2 * LANES) == 0 and config.block_kv <= sizes.keys
    plain = all(side == "batch" for _, side, _ in mask.arrays())
    return config.halves_alone and fits and plain


def _default(
    sizes: "_Sizes", dtype: Any, mask: masks.Mask | None, batch_invariant: bool
) -> AttentionConfig:
    """Blocks of a call that was never tuned, and has scores and a mask of positions.

    Backward kernels have more tiles than a third warpgroup has registers for, so that
    blocks of three are for calls alone; and only where rounds of all multiprocessors
    are filled with them as well.
    """
    if (tpu := configs.tpu()) is not None:
        config = AttentionConfig(512, 512)
        halves = dataclasses.replace(config, block_q_alone=256, halves_alone=True)
        # Two cores share the blocks of a head: they are two programs.
        one = tpu.cores == 1 and _is_one_program(halves, sizes, mask)
        return halves if one else config
    chip, widths = configs.hopper(), (sizes.width, sizes.value_width)
    if configs.traced_for(Gpu) and max(widths) > WIDE:
        most = configs.most_rows(max(widths))
        return AttentionConfig(most, most)
    fits = max(widths) <= NARROW and not any(w % 16 for w in widths)
    fits = fits and jnp.dtype(dtype).itemsize == 2
    arrays = mask.arrays() if mask is not None else ()
    if chip is None or not fits or any(side != "batch" for _, side, _ in arrays):
        return AttentionConfig()

    def rows(block: int) -> int:
        batch = configs.MANY_ROWS if batch_invariant else sizes.batch
        programs = batch * sizes.heads * pl.cdiv(sizes.queries, block)
        return pl.cdiv(programs, chip.cores) * block

    is_faster = rows(THREE) < GAIN * rows(TWO)
    return AttentionConfig(block_q_alone=THREE if is_faster else None)


def _streamed(query, key, value, bias, sinks, seeds, *, mask, sizes, options, config):
    operands = (query, key, value, bias, sinks, seeds, mask)
    by_blocks = functools.partial(_by_blocks, sizes=sizes, options=options)
    rows = config.block_q_alone or config.block_q
    halves = bias is None and seeds is None and _has_halves(config, sizes, mask)
    both = dataclasses.replace(config, block_q_alone=None, halves_alone=False)
    alone = dataclasses.replace(both, block_q=rows, halves_alone=halves)
    if alone == both:
        return by_blocks(*operands, config=both)
    return common.differentiated_as(
        functools.partial(by_blocks, config=alone),
        functools.partial(by_blocks, config=both),
        *operands,
    )


def _by_blocks(query, key, value, bias, sinks, seeds, mask, *, sizes, options, config):
    s = sizes
    block_q = min(config.block_q, pl.align_to(max(s.queries, 1), 16))
    block_kv = min(config.block_kv, pl.align_to(max(s.keys, 1), 16))
    group = s.heads // s.kv_heads
    wide = common.statistics_dtype(query.dtype)
    steps = max(pl.cdiv(s.keys, block_kv), 1)  # without keys one step writes zeros
    ragged = s.keys != steps * block_kv
    if ragged:
        # What a block reads past the last key must neither weigh nor be NaN.
        mask = mask & masks.Prefix(s.keys)
    fill: dict[str, Any] = {"fill": 0} if ragged else {}
    # Queries past the last one are zeros: gradients then need not tell them apart.
    fill_q: dict[str, Any] = {"fill": 0} if s.queries % block_q else {}
    arrays = masks.checked_arrays(mask, s.batch, s.queries, s.keys)
    keys_at = lambda j: steps - 1 - j if config.halves_alone else j

    operands: list[Any] = [query, key, value]
    specs = [
        pl.BlockSpec(
            (None, block_q, None, s.width),
            lambda b, h, i, j, *_: (b, i, h, 0),
            **fill_q,
        ),
        *(
            pl.BlockSpec(
                (None, block_kv, None, width),
                lambda b, h, i, j, *_: (b, keys_at(j), h // group, 0),
                **fill,
            )
            for width in (s.width, s.value_width)
        ),
    ]
    if bias is not None:
        by_batch, by_head = (int(size > 1) for size in bias.shape[:2])
        operands.append(bias)
        specs.append(
            pl.BlockSpec(
                (None, None, block_q, block_kv),
                lambda b, h, i, j, *_: (b * by_batch, h * by_head, i, j),
            )
        )
    if sinks is not None:
        operands.append(sinks.astype(wide).reshape(s.heads, 1, 1))
        specs.append(pl.BlockSpec((None, 1, 1), lambda b, h, i, j, *_: (h, 0, 0)))
    if seeds is not None:
        of_row = pl.BlockSpec(
            (None, None, block_q, 1), lambda b, h, i, j, *_: (b, h, i, 0)
        )
        operands += seeds
        specs += [of_row] * len(seeds)
    scalars, tiled = [], []
    for _, side, array in arrays:
        if side == "batch":
            scalars.append(array)
        elif side == "pair":
            table = array.table(s.queries, s.keys, block_q, block_kv)
            tiled.append(table.tiles is not None)
            if table.tiles is not None:
                operands.append(jnp.asarray(table.tiles))
                specs.append(_tile_of_pairs(block_q, block_kv, len(scalars)))
            scalars.append(jnp.asarray(table.codes))
        elif side == "query":
            operands.append(array[:, :, None])
            specs.append(
                pl.BlockSpec((None, block_q, 1), lambda b, h, i, j, *_: (b, i, 0))
            )
        else:
            operands.append(array[:, None, :])
            specs.append(
                pl.BlockSpec((None, 1, block_kv), lambda b, h, i, j, *_: (b, 0, j))
            )
    kernel = functools.partial(
        _kernel,
        options=options,
        mask=mask,
        sides=[side for _, side, _ in arrays],
        tiled=tiled,
        has_bias=bias is not None,
        has_sinks=sinks is not None,
        has_seeds=seeds is not None,
        halves=config.halves_alone,
    )
    shape = (s.batch, s.queries, s.heads, s.value_width)
    results = [jax.ShapeDtypeStruct(shape, query.dtype)]
    result_specs = [
        pl.BlockSpec(
            (None, block_q, None, s.value_width),
            lambda b, h, i, j, *_: (b, i, h, 0),
        )
    ]
    if options.return_log_sum_exp:
        shape = (s.batch, s.heads, s.queries, 1)
        results.append(jax.ShapeDtypeStruct(shape, wide))
        result_specs.append(
            pl.BlockSpec((None, None, block_q, 1), lambda b, h, i, j, *_: (b, h, i, 0))
        )
    out, *log_sum_exp = pl.pallas_call(
        kernel,
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(s.batch, s.heads, pl.cdiv(s.queries, block_q), steps),
            in_specs=specs,
            out_specs=result_specs,
            scratch_shapes=[
                pltpu.VMEM((block_q, 1), wide),
                pltpu.VMEM((block_q, 1), wide),
                pltpu.VMEM((block_q, s.value_width), wide),
            ],
        ),
        compiler_params=common.compiler_params(
            config, "parallel", "parallel", "parallel", "arbitrary"
        ),
        # Of all pairs: what a mask leaves out is known when the kernel runs.
        cost_estimate=common.cost(
            2 * s.batch * s.heads * s.queries * s.keys * (s.width + s.value_width),
            [*operands, query],
            s.batch * s.heads * s.queries * s.keys,
        ),
        name="attention",
    )(*scalars, *operands)
    return out, *(_log_sum_exp(found[..., 0]) for found in log_sum_exp)


@dataclasses.dataclass(frozen=True)
class RunningSoftmax:
    """Refs of the maximum, the sum and the weighted values of the keys so far."""

    maximum: Any
    total: Any
    acc: Any

    def start(self) -> None:
        self.maximum[...] = jnp.full_like(self.maximum, LOWEST)
        self.total[...] = jnp.zeros_like(self.total)
        self.acc[...] = jnp.zeros_like(self.acc)

    def absorb(self, scores, values, reweighted: Callable = lambda x: x) -> None:
        """Adds one block of keys.

        Takes its scores (rows, keys), its values (keys, width), and what is made of the
        weights, whose sum is known, before they are multiplied by values.
        """
        old = self.maximum[...]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - new), jnp.exp(old - new)
        self.total[...] = self.total[...] * shrink + jnp.sum(
            weights, axis=1, keepdims=True
        )
        weights = reweighted(weights)
        self.acc[...] = self.acc[...] * shrink + jnp.dot(
            weights.astype(values.dtype), values, preferred_element_type=self.acc.dtype
        )
        self.maximum[...] = new


def _tile_of_pairs(block_q: int, block_kv: int, scalar: int) -> pl.BlockSpec:
    """The tile that the prefetched table number `scalar` names for a block."""

    def index(b, h, i, j, *scalar_refs):
        return scalar_refs[scalar][i, j], 0, 0

    return pl.BlockSpec((None, block_q, block_kv), index)


def _mask_data(sides, tiled, scalar_refs, other_refs) -> masks.Data:
    """What the mask reads for the block of this program."""
    batch, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    scalars, others, has_tile = iter(scalar_refs), iter(other_refs), iter(tiled)
    values: list[Any] = []
    for side in sides:
        if side == "batch":
            values.append(next(scalars)[batch])
        elif side == "pair":
            tile = next(others) if next(has_tile) else None
            values.append(masks.Pairs(next(scalars)[i, j], tile))
        else:
            values.append(next(others)[...])
    return masks.Data(tuple(values))


def _kernel(
    *refs,
    options: _Options,
    mask: masks.Mask,
    sides,
    tiled,
    has_bias,
    has_sinks,
    has_seeds,
    halves,
):
    take = iter(refs)
    i, j = pl.program_id(2), pl.program_id(3)
    scalar_refs = [next(take) for side in sides if side in ("batch", "pair")]
    q_ref, k_ref, v_ref = next(take), next(take), next(take)
    bias_ref = next(take) if has_bias else None
    sink_ref = next(take) if has_sinks else None
    seed_refs = [next(take), next(take)] if has_seeds else []
    vectors = sum(side in ("query", "key") for side in sides)
    other_refs = [next(take) for _ in range(vectors + sum(tiled))]
    o_ref = next(take)
    log_sum_exp_ref = next(take) if options.return_log_sum_exp else None
    max_ref, sum_ref, acc_ref = take

    data = _mask_data(sides, tiled, scalar_refs, other_refs)
    keys_at = pl.num_programs(3) - 1 - j if halves else j
    rows = masks.Span(i * q_ref.shape[0], q_ref.shape[0])
    columns = masks.Span(keys_at * k_ref.shape[0], k_ref.shape[0])

    state = RunningSoftmax(max_ref, sum_ref, acc_ref)
    pl.when(j == 0)(state.start)

    def absorb(columns: masks.Span, part: slice):
        """A step of some columns, which are this part of the block's keys."""
        scores = _scores(q_ref[...], k_ref[part, :], options)
        if bias_ref is not None:
            scores = scores + bias_ref[:, part].astype(scores.dtype)
        columns_of = columns.start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        if not isinstance(mask, masks.Everything):
            rows_of = rows.start + lax.broadcasted_iota(jnp.int32, scores.shape, 0)

            def masked(scores):
                allowed = mask.allows(rows_of, columns_of, data)
                return jnp.where(allowed, scores, -jnp.inf)

            if tiled:  # of positions alone, the compiler finds such steps itself
                all_allowed = mask.allows_all(rows, columns, data)
                scores = lax.cond(all_allowed, lambda scores: scores, masked, scores)
            else:
                scores = masked(scores)

        def dropped(weights):
            if not seed_refs:
                return weights
            seeds = (seed_refs[0][...], seed_refs[1][...])
            stays = dropout.kept(seeds, columns_of, options.dropout_rate)
            return jnp.where(stays, weights, 0)

        state.absorb(scores, v_ref[part, :], dropped)

    @pl.when(mask.may_allow(rows, columns, data))
    def step():
        if halves:
            _by_halves(absorb, mask, rows, columns, data)
        else:
            absorb(columns, slice(None))

    @pl.when(j == pl.num_programs(3) - 1)
    def finish():
        maximum, total, acc = max_ref[...], sum_ref[...], acc_ref[...]
        if sink_ref is not None:
            with_sink = jnp.maximum(maximum, sink_ref[...])
            shrink = jnp.exp(maximum - with_sink)
            total = total * shrink + jnp.exp(sink_ref[...] - with_sink)
            maximum, acc = with_sink, acc * shrink
        # A row that may look at nothing has no weights: it is divided by 1. As a sum
        # that scales with the others it leaves the gradient one of plain sums.
        divisor = total + jnp.exp(LOWEST - maximum)
        if seed_refs:
            acc = acc * dropout.scale(options.dropout_rate)
        o_ref[...] = (acc / divisor).astype(o_ref.dtype)
        if log_sum_exp_ref is not None:
            log_sum_exp_ref[...] = maximum + jnp.log(divisor)


def _by_halves(absorb, mask, rows: masks.Span, columns: masks.Span, data) -> None:
    """A step; if the mask allows nothing in one half of its columns, of the other."""
    half = columns.size // 2
    parts = [
        (masks.Span(columns.start + n, half), slice(n, n + half)) for n in (0, half)
    ]
    first, second = (mask.may_allow(rows, span, data) for span, _ in parts)

    @pl.when(first & second)
    def whole():
        absorb(columns, slice(None))

    @pl.when(first & ~second)
    def left():
        absorb(*parts[0])

    @pl.when(~first & second)
    def right():
        absorb(*parts[1])
