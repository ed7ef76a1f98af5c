"""`linear_softmax_cross_entropy_loss`: the loss of a language model's last layer.

The logits are never in memory as a whole. The forward pass is one matmul that leaves
three numbers per token and vocabulary block: maximum, sum of exponentials, the label's
logit. The backward pass recomputes the logits, `block_vocab` columns at a time, and
stores only their cotangent in x's dtype, for the two matmuls of a linear layer's
gradient. On a CPU a matmul costs more than memory, so logits are kept from the forward
pass if they take no more space than that.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.kernels import common, configs
from pallasite.kernels.attention import LOWEST
from pallasite.kernels.derivatives import Differentiable
from pallasite.kernels.matmul import (
    MatmulConfig,
    SplitSum,
    fitted,
    narrow,
    product,
    row_blocks,
    row_partials,
    tiles,
)
from pallasite.target import Host

# Exponentials are base two, as in hardware: a multiplication and a subtraction then
# fuse into one instruction.
LOG2_E = math.log2(math.e)
# Most bytes of partial sums for x, over a CPU's threads, in the gradient.
MOST_SUMS = 256 << 20
MERGED = 128  # tokens of a program that merges the statistics of blocks


@dataclasses.dataclass(frozen=True)
class CrossEntropyConfig:
    """How the loss is split into blocks.

    Attributes:
        block_tokens, block_columns, block_hidden: block sizes of the logits' matmul.
        block_vocab: columns of logits that the gradient holds at a time.
        batch_invariant: the operation's argument.
    """

    block_tokens: int = 128
    block_columns: int = 256
    block_hidden: int = 64
    block_vocab: int = 8192
    batch_invariant: bool = False

    @property
    def blocks(self) -> MatmulConfig:
        sizes = self.block_tokens, self.block_columns, self.block_hidden
        return MatmulConfig(*sizes, batch_invariant=self.batch_invariant)


SPACE = {
    "block_tokens": (64, 128, 256),
    "block_columns": (128, 256),
    "block_hidden": (64, 128),
    "block_vocab": (4096, 8192, 16384),
}


def linear_softmax_cross_entropy_loss(
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    reduction: Literal["sum", "mean", "none"] = "sum",
    soft_cap: float | None = None,
    implementation: common.Implementation = "pallasite",
    config: CrossEntropyConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """`-log_softmax(x @ weights)[labels]`, without storing the logits.

    Args:
        x: (tokens, hidden), floating point.
        labels: (tokens,) integers. A label outside the vocabulary (such as -1) is
            padding: its token's loss is 0, and a mean does not count it.
        weights: (hidden, vocabulary).
        reduction: over tokens: "sum", "mean", or "none" for a loss per token.
        soft_cap: logits l become soft_cap * tanh(l / soft_cap).
        batch_invariant: whether the bits of a token's loss (reduction="none"), and of
            x's gradient, may not depend on how many tokens there are.

    Returns:
        The loss, float32: a scalar, or (tokens,) without a reduction.
    """
    operation = "linear_softmax_cross_entropy_loss"
    tokens, hidden = common.check_rank(operation, "x", x, "tokens, hidden")
    _, vocabulary = common.check_rank(
        operation, "weights", weights, "hidden, vocabulary"
    )
    common.check_floats(operation, x=x, weights=weights)
    common.check_integers(operation, labels=labels)
    common.check_shape(operation, "labels", labels, (tokens,))
    common.check_shape(operation, "weights", weights, (hidden, vocabulary))
    common.check_option(operation, "reduction", reduction, ["sum", "mean", "none"])
    common.check_soft_cap(operation, soft_cap)
    if x.dtype != weights.dtype:
        raise SpecError(
            f"{operation}: x and weights differ in dtype",
            [("x", x.dtype), ("weights", weights.dtype)],
            fix="convert one of them",
        )
    common.check_invariant(operation, implementation, batch_invariant)
    compute = common.choose(implementation, _streamed, _plain)
    default = CrossEntropyConfig()
    if configs.traced_for(Host):
        # Weights are packed either for each block of tokens or once for all.
        rows = configs.MANY_ROWS if batch_invariant else tokens
        columns = max(narrow(rows, vocabulary, default.block_columns), 128)
        default = CrossEntropyConfig(block_tokens=256, block_columns=columns)
    config = configs.tuned(
        operation, config, default, SPACE, (x, weights), batch_invariant
    )
    labels = common.as_int32(labels)
    counted = (labels >= 0) & (labels < vocabulary)
    if vocabulary:
        losses = compute(x, weights, labels, soft_cap=soft_cap, config=config)
    else:
        losses = jnp.zeros(tokens, common.statistics_dtype(x.dtype))
    losses = jnp.where(counted, losses, 0)
    if reduction == "none":
        return losses
    total = jnp.sum(losses)
    return total if reduction == "sum" else total / jnp.maximum(jnp.sum(counted), 1)


def _capped(logits, soft_cap: float | None):
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _plain(x, weights, labels, *, soft_cap, config):
    del config  # only kernels have blocks
    wide = common.statistics_dtype(x.dtype)
    logits = _capped(jnp.dot(x, weights, preferred_element_type=wide), soft_cap)
    found = jnp.take_along_axis(
        logits, labels[:, None], axis=1, mode="fill", fill_value=0
    )
    return jax.nn.logsumexp(logits, axis=1) - found[:, 0]


def _streamed(x, weights, labels, *, soft_cap, config):
    made: Any = _statistics(x, weights, labels, soft_cap, config)
    log_sum_exp, found = made
    return log_sum_exp - found


@functools.partial(Differentiable, static=(3, 4))
def _statistics(x, weights, labels, soft_cap, config):
    """The log-sum-exp of each token's logits, and the logit of its label (or 0)."""
    found, _ = _with_logits(x, weights, labels, soft_cap, config, keep=False)
    return found


def _with_logits(x, weights, labels, soft_cap, config, keep: bool):
    """The statistics, and the logits if `keep` is set."""
    tokens, vocabulary = len(x), weights.shape[1]
    blocks = fitted(config.blocks, tokens, vocabulary, x.shape[1])
    ragged = vocabulary % blocks.block_n != 0
    wide = common.statistics_dtype(x.dtype)

    def finish(sums, refs):
        label_ref, max_ref, sum_ref, found_ref, *kept = refs
        logits = _capped(sums[0], soft_cap)
        for ref in kept:
            ref[...] = logits
        columns = pl.program_id(1) * blocks.block_n + lax.broadcasted_iota(
            jnp.int32, logits.shape, 1
        )
        if ragged:
            logits = jnp.where(columns < vocabulary, logits, LOWEST)
        is_label = columns == label_ref[...]
        found = jnp.sum(jnp.where(is_label, logits, 0), axis=1, keepdims=True)
        maximum = LOG2_E * jnp.max(logits, axis=1, keepdims=True)
        shifted = LOG2_E * logits - maximum
        total = jnp.sum(jnp.exp2(shifted), axis=1, keepdims=True)
        # All stores come last, so that no computation waits behind one.
        max_ref[...], sum_ref[...], found_ref[...] = maximum, total, found

    partial = jax.ShapeDtypeStruct(
        (pl.cdiv(vocabulary, blocks.block_n), tokens, 1), wide
    )
    logits = jax.ShapeDtypeStruct((tokens, vocabulary), wide)
    maxima, sums, found, *kept = product(
        x,
        [weights],
        finish,
        [(_inside(labels, vocabulary), row_blocks)],
        [(partial, row_partials)] * 3 + [(logits, tiles)] * keep,
        config=blocks,
        name="cross_entropy",
    )
    # With a last dimension of one, XLA on a CPU takes ten times as long.
    parts = [each[:, :, 0] for each in (maxima, sums, found)]
    merge = _merged_by_kernel if config.batch_invariant and partial.size else _merged
    return merge(*parts), kept[0] if keep else None


def _merged(maxima, sums, found):
    """The statistics of the whole vocabulary from those of its blocks (blocks, n)."""
    maximum = jnp.max(maxima, axis=0, initial=LOWEST)
    total = jnp.sum(sums * jnp.exp2(maxima - maximum), axis=0)
    return (maximum + jnp.log2(total)) / LOG2_E, jnp.sum(found, axis=0)


def _merged_by_kernel(*parts):
    """The same in blocks of tokens: XLA's order of sums follows from their number."""

    def kernel(max_ref, sum_ref, found_ref, log_ref, label_ref):
        log, label = _merged(max_ref[...], sum_ref[...], found_ref[...])
        log_ref[...], label_ref[...] = log[None], label[None]

    blocks, tokens = parts[0].shape
    of_block = lambda rows: pl.BlockSpec((rows, MERGED), lambda i: (0, i))
    one = jax.ShapeDtypeStruct((1, tokens), parts[0].dtype)
    made = pl.pallas_call(
        kernel,
        out_shape=[one, one],
        grid=(pl.cdiv(tokens, MERGED),),
        in_specs=[of_block(blocks)] * 3,
        out_specs=[of_block(1)] * 2,
        compiler_params=pltpu.CompilerParams(batch_invariant=True),
        name="cross_entropy_merge",
    )(*parts)
    return tuple(each[0] for each in made)


def _inside(labels, vocabulary: int):
    """Labels as a column; padding matches no column, even past the vocabulary."""
    return jnp.where(labels < vocabulary, labels, -1)[:, None]


def _statistics_fwd(x, weights, labels, soft_cap, config):
    wide = jnp.dtype(common.statistics_dtype(x.dtype))
    bytes_of_block = config.block_vocab * x.dtype.itemsize
    fits = weights.shape[1] * wide.itemsize <= bytes_of_block
    keep = fits and configs.traced_for(Host)
    if keep:
        out, logits = _with_logits(x, weights, labels, soft_cap, config, keep)
    else:
        out, logits = _statistics(x, weights, labels, soft_cap, config), None
    return out, (x, weights, labels, out[0], logits)


def _statistics_tangent(soft_cap, config, kept, tangents):
    """Tangents of both statistics, over `block_vocab` logits at a time."""
    (x, weights, labels, log_sum_exp, _), (d_x, d_weights, _) = kept, tangents
    vocabulary = weights.shape[1]
    block = min(config.block_vocab, max(vocabulary, 1))
    wide = common.statistics_dtype(x.dtype)
    labels = _inside(labels, vocabulary)

    def part(start, size):
        columns, d_columns = (
            lax.dynamic_slice_in_dim(w, start, size, axis=1)
            for w in (weights, d_weights)
        )
        over = lambda a, b: _contracted(a, b, (1, 0), wide)
        logits = _capped(over(x, columns), soft_cap)
        d_logits = over(d_x, columns) + over(x, d_columns)
        if soft_cap is not None:
            d_logits *= 1 - (logits / soft_cap) ** 2
        softmax = jnp.exp2(LOG2_E * (logits - log_sum_exp[:, None]))
        places = start + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        d_found = jnp.where(places == labels, d_logits, 0)
        return jnp.sum(softmax * d_logits, axis=1), jnp.sum(d_found, axis=1)

    def step(n, sums):
        return tuple(a + b for a, b in zip(sums, part(n * block, block), strict=True))

    sums = (jnp.zeros(len(x), wide), jnp.zeros(len(x), wide))
    whole, rest = divmod(vocabulary, block)
    sums = lax.fori_loop(0, whole, step, sums)
    if rest:
        more = part(whole * block, rest)
        sums = tuple(a + b for a, b in zip(sums, more, strict=True))
    return sums


def _statistics_bwd(soft_cap, config, kept, cotangents):
    x, weights, labels, log_sum_exp, logits = kept
    rows = [
        _inside(labels, weights.shape[1]),
        *(c[:, None] for c in (log_sum_exp, *cotangents)),
    ]
    chip = configs.chip_for(None)
    compute = _by_columns
    counts = not config.batch_invariant  # tokens decide whether their sums fit
    if isinstance(chip, Host) and x.size and weights.size and counts:
        parts = _parts(chip, x, weights, config)
        if parts.count * x.size * 4 <= MOST_SUMS:
            compute = functools.partial(_at_once, parts=parts)
    d_x, d_weights = compute(x, weights, rows, logits, soft_cap, config)
    return d_x.astype(x.dtype), d_weights, None


def _by_columns(x, weights, rows, logits, soft_cap, config):
    """Cotangents of x (float32) and the weights: three matmuls per `block_vocab`."""
    vocabulary = weights.shape[1]
    block = min(config.block_vocab, max(vocabulary, 1))
    wide = common.statistics_dtype(x.dtype)

    def part(start, size):
        """Cotangents of x and of the weights from `size` columns of the logits."""
        columns = lax.dynamic_slice_in_dim(weights, start, size, axis=1)
        shifted = [rows[0] - start, *rows[1:]]
        if logits is None:
            d_logits = _logits_cotangent(x, columns, shifted, soft_cap, config)
        else:
            places = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            d_logits = _cotangent(logits, places, shifted, soft_cap).astype(x.dtype)
        return (
            _contracted(d_logits, columns, (1, 1), wide, config.batch_invariant),
            _contracted(x, d_logits, (0, 0), weights.dtype),
        )

    def step(n, sums):
        d_x, d_weights = sums
        more, columns = part(n * block, block)
        return d_x + more, lax.dynamic_update_slice_in_dim(
            d_weights, columns, n * block, axis=1
        )

    sums = jnp.zeros(x.shape, wide), jnp.zeros_like(weights)
    whole, rest = divmod(vocabulary, block)
    d_x, d_weights = lax.fori_loop(0, whole, step, sums)
    if rest:
        more, columns = part(whole * block, rest)
        d_x, d_weights = d_x + more, d_weights.at[:, whole * block :].set(columns)
    return d_x, d_weights


def _parts(chip: Host, x, weights, config) -> SplitSum:
    """Splits vocabulary blocks in two parts per thread, as cores differ in speed."""
    columns = min(config.block_columns, weights.shape[1])
    return SplitSum.of(pl.cdiv(weights.shape[1], columns), 2 * chip.threads)


def _at_once(x, weights, rows, logits, soft_cap, config, *, parts: SplitSum):
    """The same on a CPU: all three matmuls of a block while it is in a near cache.

    Each part of the vocabulary has its own partial sums for x, which XLA adds up.
    """
    (tokens, hidden), vocabulary = x.shape, weights.shape[1]
    wide = common.statistics_dtype(x.dtype)
    height, width = (
        min(config.block_tokens, tokens),
        min(config.block_columns, vocabulary),
    )
    chunks = pl.cdiv(tokens, height)

    def kernel(x_ref, weights_ref, *refs):
        row_refs, kept = refs[: len(rows)], refs[len(rows) : -3]
        d_x_ref, d_weights_ref, sums_ref = refs[-3:]
        part, step, chunk = (pl.program_id(n) for n in range(3))

        @pl.when(step == 0)
        def _():
            d_x_ref[chunk] = jnp.zeros((height, hidden), wide)

        @pl.when(parts.has(part, step))
        def _():
            @pl.when(chunk == 0)
            def _():
                sums_ref[...] = jnp.zeros_like(sums_ref)

            left, right = x_ref[...], weights_ref[...]
            if kept:
                found = kept[0][...]
            else:
                found = jnp.dot(left, right, preferred_element_type=wide)
                found = _capped(found, soft_cap)
            columns = parts.step(part, step) * width + lax.broadcasted_iota(
                jnp.int32, found.shape, 1
            )
            numbers = [ref[...] for ref in row_refs]
            d_logits = _cotangent(found, columns, numbers, soft_cap).astype(x.dtype)
            over = lambda a, b, dims: lax.dot_general(
                a, b, (dims, ((), ())), preferred_element_type=wide
            )
            d_x_ref[chunk] += over(d_logits, right, ((1,), (1,)))
            sums_ref[...] += over(left, d_logits, ((0,), (0,)))

            @pl.when(chunk == chunks - 1)
            def _():
                d_weights_ref[...] = sums_ref[...].astype(d_weights_ref.dtype)

    # Zeros past the edge do not contribute to the sums.
    spec = functools.partial(pl.BlockSpec, fill=0)
    across = lambda i, j, t: (0, parts.step(i, j))
    down = lambda i, j, t: (t, 0)
    d_x, d_weights = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((parts.count, chunks, height, hidden), wide),
            jax.ShapeDtypeStruct(weights.shape, weights.dtype),
        ],
        grid=(parts.count, parts.each, chunks),
        in_specs=[
            spec((height, hidden), down),
            spec((hidden, width), across),
            *[spec((height, 1), down)] * len(rows),
            *[spec((height, width), lambda i, j, t: (t, parts.step(i, j)))]
            * (logits is not None),
        ],
        out_specs=[
            pl.BlockSpec((None, chunks, height, hidden), lambda i, j, t: (i, 0, 0, 0)),
            pl.BlockSpec((hidden, width), across),
        ],
        scratch_shapes=[pltpu.VMEM((hidden, width), wide)],
        compiler_params=common.compiler_params(
            config, "parallel", "arbitrary", "arbitrary"
        ),
        name="cross_entropy_gradient",
    )(x, weights, *rows, *([] if logits is None else [logits]))
    d_x = common.added(d_x.reshape(parts.count, -1, hidden), config)
    return d_x[:tokens], d_weights


def _cotangent(logits, columns, rows, soft_cap):
    """The cotangent of capped logits, from those of log-sum-exp and label logit."""
    labels, log_sum_exp, d_log_sum_exp, d_found = rows
    softmax = jnp.exp2(LOG2_E * logits - LOG2_E * log_sum_exp)
    out = softmax * d_log_sum_exp
    out = out + jnp.where(columns == labels, d_found, 0)
    return out if soft_cap is None else out * (1 - (logits / soft_cap) ** 2)


def _contracted(x, y, dims: tuple[int, int], dtype, batch_invariant=False):
    """The matmul over these dimensions, summed in float32; on a CPU by our kernel."""
    ours = batch_invariant or configs.traced_for(Host)
    if not ours or not x.size or not y.size:
        over = (((dims[0],), (dims[1],)), ((), ()))
        wide = common.statistics_dtype(x.dtype)
        return lax.dot_general(x, y, over, preferred_element_type=wide).astype(dtype)

    def finish(sums, refs):
        refs[0][...] = sums[0].astype(dtype)

    shape = (x.shape[1 - dims[0]], y.shape[1 - dims[1]])
    (out,) = product(
        x,
        [y],
        finish,
        [],
        [(jax.ShapeDtypeStruct(shape, dtype), tiles)],
        config=MatmulConfig(256, 256, batch_invariant=batch_invariant)
        if configs.traced_for(Host)
        else MatmulConfig(block_n=256, batch_invariant=batch_invariant),
        name="linear_gradient",
        contract=dims,
    )
    return out


def _logits_cotangent(x, weights, rows, soft_cap, config):
    """The logits' cotangent in x's dtype, from those of log-sum-exp and label logit."""

    def finish(sums, refs):
        o_ref = refs[-1]
        logits = _capped(sums[0], soft_cap)
        columns = pl.program_id(1) * o_ref.shape[1] + lax.broadcasted_iota(
            jnp.int32, logits.shape, 1
        )
        numbers = [ref[...] for ref in refs[:-1]]
        o_ref[...] = _cotangent(logits, columns, numbers, soft_cap).astype(o_ref.dtype)

    result = jax.ShapeDtypeStruct((len(x), weights.shape[1]), x.dtype)
    (out,) = product(
        x,
        [weights],
        finish,
        [(row, row_blocks) for row in rows],
        [(result, tiles)],
        config=config.blocks,
        name="cross_entropy_gradient",
    )
    return out


_statistics.define(_statistics_fwd, _statistics_tangent, _statistics_bwd)
