"""`embedding_bag`: sums the rows of a table selected by each bag of indices.

The last grid axis visits the rows, one per step; a bag's gathered rows are never
stored in memory.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.kernels import common, configs
from pallasite.kernels.derivatives import Differentiable
from pallasite.target import Host

ENTRIES = 64  # table entries that a program of the gradient adds to


def embedding_bag(
    table: jax.Array,
    indices: jax.Array,
    weights: jax.Array | None = None,
    *,
    reduction: Literal["sum", "mean"] = "sum",
    implementation: common.Implementation = "pallasite",
) -> jax.Array:
    """`sum(weights[b, i] * table[indices[b, i]] for i)` for every bag b.

    Args:
        table: (entries, width), floating point.
        indices: (bags, size) integers. A negative index is padding: it adds 0 times
            entry 0, which must be finite. One past the last entry means the last.
        weights: (bags, size), floating point; by default ones.
        reduction: "mean" divides by the number of indices that are not padding.

    Returns:
        (bags, width) in table's dtype; sums are accumulated in float32.
    """
    operation = "embedding_bag"
    common.check_rank(operation, "table", table, "entries, width")
    common.check_rank(operation, "indices", indices, "bags, size")
    common.check_integers(operation, indices=indices)
    common.check_floats(operation, table=table, weights=weights)
    common.check_shape(operation, "weights", weights, indices.shape)
    common.check_option(operation, "reduction", reduction, ["sum", "mean"])
    wide = common.statistics_dtype(table.dtype)
    used = (indices >= 0).astype(wide)
    weights = used if weights is None else weights.astype(wide) * used
    if reduction == "mean":
        count = jnp.sum(used, axis=1, keepdims=True)
        weights = weights / jnp.maximum(count, 1)
    compute = common.choose(implementation, _summed, _plain)
    return compute(table, common.as_int32(jnp.maximum(indices, 0)), weights)


def _plain(table, indices, weights):
    rows = jnp.take(table, indices, axis=0, mode="clip").astype(weights.dtype)
    return jnp.einsum("bid,bi->bd", rows, weights).astype(table.dtype)


@Differentiable
def _summed(table, indices, weights):
    (entries, width), (bags, size) = table.shape, indices.shape
    if not indices.size:
        return jnp.zeros((bags, width), table.dtype)
    wide = weights.dtype

    def kernel(indices_ref, weight_ref, row_ref, o_ref, acc_ref):
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += row_ref[...].astype(wide) * weight_ref[...]

        @pl.when(step == size - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def entry(b, i, indices_ref):
        return jnp.minimum(indices_ref[b, i], entries - 1), 0, 0

    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((bags, 1, width), table.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(bags, size),
            in_specs=[
                pl.BlockSpec((None, None, 1, 1), lambda b, i, _: (b, i, 0, 0)),
                pl.BlockSpec((None, 1, width), entry),
            ],
            out_specs=pl.BlockSpec((None, 1, width), lambda b, i, _: (b, 0, 0)),
            scratch_shapes=[pltpu.VMEM((1, width), wide)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
        cost_estimate=common.cost(
            2 * indices.size * width,
            [
                indices,
                weights,
                jax.ShapeDtypeStruct((bags, size + 1, width), table.dtype),
            ],
        ),
        name="embedding_bag",
    )(indices, weights[:, :, None, None], table[:, None])
    return out[:, 0]


def _summed_fwd(table, indices, weights):
    return _summed(table, indices, weights), (table, indices, weights)


def _summed_tangent(kept, tangents):
    (table, indices, weights), (d_table, _, d_weights) = kept, tangents
    by_table = _summed(d_table, indices, weights)
    return by_table + _summed(table, indices, d_weights)


def _summed_bwd(kept, cotangent):
    """The gradient of a gather is a scatter, left to XLA; but see `_scattered`."""
    table, indices, weights = kept
    if configs.traced_for(Host) and indices.size and table.size:
        _, pull = jax.vjp(lambda w: _plain(table, indices, w), weights)
        return _scattered(table, indices, weights, cotangent), None, *pull(cotangent)
    _, pull = jax.vjp(lambda t, w: _plain(t, indices, w), table, weights)
    d_table, d_weights = pull(cotangent)
    return d_table, None, d_weights


def _scattered(table, indices, weights, cotangent):
    """The table's cotangent on a CPU, where XLA scatters on one thread.

    Indices are sorted so that each program adds only to its own entries.
    """
    (entries, width), (_, size) = table.shape, indices.shape
    wide = weights.dtype
    flat = jnp.minimum(indices.reshape(-1), entries - 1)
    order = jnp.argsort(flat)
    block = min(ENTRIES, entries)
    blocks = pl.cdiv(entries, block)
    numbers = flat[order]
    edges = jnp.arange(blocks + 1, dtype=jnp.int32) * block
    starts = jnp.searchsorted(numbers, edges).astype(jnp.int32)

    def kernel(starts_ref, numbers_ref, bags_ref, weight_ref, rows_ref, o_ref, acc_ref):
        first = pl.program_id(0) * block
        acc_ref[...] = jnp.zeros_like(acc_ref)

        def add(n, _):
            entry = pl.ds(numbers_ref[n] - first, 1)
            row = rows_ref[pl.ds(bags_ref[n], 1), :].astype(wide)
            acc_ref[entry, :] += row * weight_ref[n]

        lax.fori_loop(
            starts_ref[pl.program_id(0)], starts_ref[pl.program_id(0) + 1], add, None
        )
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(table.shape, table.dtype),
        grid=(blocks,),
        in_specs=[anywhere] * 5,
        out_specs=pl.BlockSpec((block, width), lambda i: (i, 0)),
        scratch_shapes=[pltpu.VMEM((block, width), wide)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=common.cost(
            2 * indices.size * width,
            [table, jax.ShapeDtypeStruct((indices.size, width), cotangent.dtype)],
        ),
        name="embedding_bag_gradient",
    )(
        starts,
        numbers,
        (order // size).astype(jnp.int32),
        weights.reshape(-1)[order],
        cotangent,
    )


_summed.define(_summed_fwd, _summed_tangent, _summed_bwd)
