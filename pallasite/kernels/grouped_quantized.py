"""`grouped_matmul` with quantised matrices.

As in `weight_only_matmul`, weights are converted to floats in the kernel, and a step is
a group of weights that share a scale; as in `grouped_matmul`, a program works on a
visit (`visits.py`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.kernels import common
from pallasite.kernels.derivatives import Differentiable
from pallasite.kernels.matmul import MatmulConfig, fitted
from pallasite.kernels.quantized import QuantizedWeights, halves
from pallasite.kernels.visits import visits_of_groups


def quantized_product(x, weights: QuantizedWeights, group_sizes, config, dense):
    """`x[rows of g] @ weights[g]`, (m, n) in x's dtype.

    `dense(x, y)` is the same matmul with float matrices, for the gradient.
    """
    product = functools.partial(_product, weights.bits, config, dense)
    return product(x, weights.values, weights.scales, group_sizes)


@functools.partial(Differentiable, static=(0, 1, 2))
def _product(bits, config, dense, x, values, scales, group_sizes):
    del dense  # used by the gradient
    return _call(x, QuantizedWeights(values, scales, bits), group_sizes, config)


def _product_fwd(bits, config, dense, x, values, scales, group_sizes):
    out = _product(bits, config, dense, x, values, scales, group_sizes)
    return out, (x, values, scales, group_sizes)


def _by_floats(bits, config, dense, values, group_sizes):
    """The same by dequantised matrices, as in training; the values are constants."""

    def product(x, scales):
        weights = QuantizedWeights(values, scales, bits).dequantize()
        return dense(x, weights.astype(x.dtype), group_sizes, config)

    return product


def _product_tangent(bits, config, dense, kept, tangents):
    x, values, scales, group_sizes = kept
    product = _by_floats(bits, config, dense, values, group_sizes)
    return jax.jvp(product, (x, scales), (tangents[0], tangents[2]))[1]


def _product_bwd(bits, config, dense, kept, cotangent):
    x, values, scales, group_sizes = kept
    product = _by_floats(bits, config, dense, values, group_sizes)
    _, pull = jax.vjp(product, x, scales)
    d_x, d_scales = pull(cotangent)
    return d_x, None, d_scales, None


_product.define(_product_fwd, _product_tangent, _product_bwd)


def _call(x, weights: QuantizedWeights, group_sizes, config: MatmulConfig):
    (m, k), (groups, _, n) = x.shape, weights.shape
    if not x.size or not weights.values.size:
        return jnp.zeros((m, n), x.dtype)
    parts = 8 // weights.bits  # parts of k packed in a row of bytes
    depth = k // weights.scales.shape[1]
    steps = k // parts // depth
    blocks = fitted(config, m, n, k)
    visits = visits_of_groups(group_sizes, m, blocks.block_m)
    wide = common.statistics_dtype(x.dtype)

    def kernel(tile_ref, group_ref, start_ref, end_ref, *refs):
        x_refs, y_ref = refs[:parts], refs[parts]
        scale_refs, (o_ref, acc_ref) = refs[parts + 1 : -2], refs[-2:]
        visit, step = pl.program_id(1), pl.program_id(2)
        start, end = start_ref[visit], end_ref[visit]

        @pl.when(step == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when((start < end) & (group_ref[visit] < groups))
        def _():
            stored = y_ref[...]
            pieces = (stored,) if parts == 1 else halves(stored)
            for x_ref, y, scale_ref in zip(x_refs, pieces, scale_refs, strict=True):
                product = jnp.dot(
                    x_ref[...], y.astype(x.dtype), preferred_element_type=wide
                )
                acc_ref[...] += product * scale_ref[...].astype(wide)

        @pl.when(step == steps - 1)
        def _():
            rows = tile_ref[visit] * blocks.block_m + lax.broadcasted_iota(
                jnp.int32, o_ref.shape, 0
            )
            own = (rows >= start) & (rows < end)
            pl.store(o_ref, ..., acc_ref[...].astype(o_ref.dtype), mask=own)

    def matrix(group_ref, v):
        return jnp.minimum(group_ref[v], groups - 1)

    def left(part):
        return pl.BlockSpec(
            (blocks.block_m, depth),
            lambda j, v, s, tile_ref, *_: (tile_ref[v], part * steps + s),
        )

    def scale(part):
        return pl.BlockSpec(
            (None, None, 1, blocks.block_n),
            lambda j, v, s, tile_ref, group_ref, *_: (
                matrix(group_ref, v),
                part * steps + s,
                0,
                j,
            ),
        )

    out = jax.ShapeDtypeStruct((m, n), x.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(pl.cdiv(n, blocks.block_n), len(visits.tile), steps),
            in_specs=[
                *map(left, range(parts)),
                pl.BlockSpec(
                    (None, depth, blocks.block_n),
                    lambda j, v, s, tile_ref, group_ref, *_: (
                        matrix(group_ref, v),
                        s,
                        j,
                    ),
                ),
                *map(scale, range(parts)),
            ],
            out_specs=pl.BlockSpec(
                (blocks.block_m, blocks.block_n),
                lambda j, v, s, tile_ref, *_: (tile_ref[v], j),
            ),
            scratch_shapes=[pltpu.VMEM((blocks.block_m, blocks.block_n), wide)],
        ),
        compiler_params=pltpu.CompilerParams(
            # Visits of one block store disjoint rows, so none waits for another.
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=common.cost(
            2 * m * n * k, [x, weights.values, weights.scales, out]
        ),
        name="grouped_weight_only_matmul",
    )(*visits, *[x] * parts, weights.values, *[weights.scales[:, :, None]] * parts)
