"""`grouped_matmul`: multiplies each group of rows by its own matrix.

A program works on a visit (`visits.py`): a block of rows and one group with rows in it.
The gradient of the matrices is a sum over the rows of each group. Quantised matrices
are in `grouped_quantized.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.kernels import common, configs
from pallasite.kernels.derivatives import Differentiable
from pallasite.kernels.glu import ACTIVATIONS, activation_of, gated_linear_unit
from pallasite.kernels.grouped_quantized import quantized_product
from pallasite.kernels.matmul import MatmulConfig, fitted
from pallasite.kernels.quantized import QuantizedWeights, check_quantized
from pallasite.kernels.visits import rows_of_groups, visits_of_groups
from pallasite.target import Host, Tpu


def grouped_matmul(
    x: jax.Array,
    y: jax.Array | QuantizedWeights,
    group_sizes: jax.Array,
    *,
    gate: jax.Array | QuantizedWeights | None = None,
    activation: str = "swish",
    implementation: common.Implementation = "pallasite",
    config: MatmulConfig | None = None,
) -> jax.Array:
    """`x[rows of g] @ y[g]` for every group g, like `jax.lax.ragged_dot`.

    Args:
        x: (m, k): the rows of group 0, then those of group 1, and so on.
        y: (groups, k, n), of x's dtype, or quantised by `quantize_weights`.
        group_sizes: (groups,) integers; negative ones count as 0. Rows past their sum
            give zeros.
        gate: like y: the result is `activation(x[rows of g] @ gate[g]) * (...)`. Unless
            quantised, both matmuls share one read of x.
        activation: one of `gated_linear_unit`'s activations, for a gate.

    Returns:
        (m, n) in x's dtype; sums are accumulated in float32.
    """
    _, k = common.check_rank("grouped_matmul", "x", x, "m, k")
    groups, _, n = common.check_rank("grouped_matmul", "y", y, "groups, k, n")
    is_quantized = isinstance(y, QuantizedWeights)
    if gate is not None and isinstance(gate, QuantizedWeights) != is_quantized:
        raise SpecError(
            "grouped_matmul: only one of y and gate is quantised",
            [("y", type(y).__name__), ("gate", type(gate).__name__)],
            fix="quantise both with quantize_weights, or neither",
        )
    for name, w in {"y": y, "gate": gate}.items():
        if isinstance(w, QuantizedWeights):
            check_quantized("grouped_matmul", name, w)
    floats = {"x": x} if is_quantized else {"x": x, "y": y, "gate": gate}
    common.check_floats("grouped_matmul", **floats)
    common.check_integers("grouped_matmul", group_sizes=group_sizes)
    common.check_shape("grouped_matmul", "y", y, (groups, k, n))
    common.check_shape("grouped_matmul", "group_sizes", group_sizes, (groups,))
    common.check_shape("grouped_matmul", "gate", gate, y.shape)
    activation = activation_of("grouped_matmul", activation)
    compute = common.choose(implementation, _grouped, _plain)
    default = _default(len(x), groups, gate is not None)
    # On a TPU a program costs hundreds of cycles, and memory for blocks is ample.
    if not is_quantized and configs.traced_for(Tpu):
        default = MatmulConfig(256, 512, 512)
    options: dict[str, Any] = {"bits": y.bits} if is_quantized else {}
    config = configs.tuned(
        "grouped_matmul",
        config,
        default,
        configs.PRODUCT,
        (x, *jax.tree.leaves((y, gate))) if is_quantized else (x, y, gate),
        **options,
    )
    group_sizes = jnp.clip(common.as_int32(group_sizes), 0, len(x))
    return compute(x, y, gate, group_sizes, activation=activation, config=config)


def _default(m: int, groups: int, is_gated: bool) -> MatmulConfig:
    """Blocks as tall as matrix units require; on a CPU, as groups allow.

    A block on a border is multiplied once for each of its groups. Blocks of an eighth
    of a group waste an eighth of the work, and a CPU is as fast with them.
    """
    # Two accumulators take the space of one twice as wide.
    if configs.traced_for(Host):
        rows = pl.next_power_of_2(max(m // (8 * max(groups, 1)), 1))
        return MatmulConfig(min(max(rows, 8), 128), 256 if is_gated else 512, 64)
    return MatmulConfig(128, 128 if is_gated else 256, 64)


def _plain(x, y, gate, group_sizes, *, activation, config):
    del config  # only kernels have blocks
    wide = common.statistics_dtype(x.dtype)
    y, gate = (
        w.dequantize().astype(x.dtype) if isinstance(w, QuantizedWeights) else w
        for w in (y, gate)
    )
    grouped = jnp.arange(len(x))[:, None] < jnp.sum(group_sizes)

    def product(y):
        out = lax.ragged_dot(x, y, group_sizes, preferred_element_type=wide)
        return jnp.where(grouped, out, 0)

    out = product(y)
    if gate is not None:
        out = ACTIVATIONS[activation](product(gate)) * out
    return out.astype(x.dtype)


def _grouped(x, y, gate, group_sizes, *, activation, config):
    if isinstance(y, QuantizedWeights):
        products: Any = [
            quantized_product(x, w, group_sizes, config, _dense)
            for w in (gate, y)
            if w is not None
        ]
        if len(products) == 1:
            return products[0]
        return gated_linear_unit(*products, activation=activation)
    if gate is None:
        return _product(x, y, group_sizes, config, False)
    return _gated(x, y, gate, group_sizes, activation, config)


def _dense(x, y, group_sizes, config):
    return _product(x, y, group_sizes, config, False)


@functools.partial(Differentiable, static=(4, 5))
def _gated(x, y, gate, group_sizes, activation, config):
    return _call(x, [y, gate], group_sizes, config, activation=activation)


def _gated_fwd(x, y, gate, group_sizes, activation, config):
    out = _gated(x, y, gate, group_sizes, activation, config)
    return out, (x, y, gate, group_sizes)


def _apart(activation, config, group_sizes):
    """The same by two matmuls, to be differentiated."""

    def compute(x, y, gate):
        products: Any = [_product(x, w, group_sizes, config, False) for w in (gate, y)]
        return gated_linear_unit(*products, activation=activation)

    return compute


def _gated_tangent(activation, config, kept, tangents):
    *operands, group_sizes = kept
    compute = _apart(activation, config, group_sizes)
    return jax.jvp(compute, tuple(operands), tangents[:3])[1]


def _gated_bwd(activation, config, kept, cotangent):
    """Recomputes both matmuls: only x and the matrices are kept."""
    *operands, group_sizes = kept
    _, pull = jax.vjp(_apart(activation, config, group_sizes), *operands)
    return *pull(cotangent), None


_gated.define(_gated_fwd, _gated_tangent, _gated_bwd)


@functools.partial(Differentiable, static=(3, 4))
def _product(x, y, group_sizes, config, transposed):
    """Rows times their group's matrix, or its transpose."""
    return _call(x, [y], group_sizes, config, transposed=transposed)


def _call(x, factors, group_sizes, config, *, transposed=False, activation=None):
    """One matmul, or `activation(x @ factors[1]) * (x @ factors[0])`."""
    (m, k), (groups, *sides) = x.shape, factors[0].shape
    n = sides[0 if transposed else 1]
    if not x.size or not factors[0].size:
        return jnp.zeros((m, n), x.dtype)
    config = fitted(config, m, n, k)
    visits = visits_of_groups(group_sizes, m, config.block_m)
    steps = max(pl.cdiv(k, config.block_k), 1)
    ragged = {"fill": 0} if steps * config.block_k != k else {}
    wide = common.statistics_dtype(x.dtype)
    contract = (((1,), (1 if transposed else 0,)), ((), ()))

    def kernel(tile_ref, group_ref, start_ref, end_ref, x_ref, *refs):
        factor_refs, (o_ref, *sums) = refs[: len(factors)], refs[len(factors) :]
        visit, step = pl.program_id(1), pl.program_id(2)
        start, end = start_ref[visit], end_ref[visit]

        @pl.when(step == 0)
        def _():
            for acc_ref in sums:
                acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when((start < end) & (group_ref[visit] < groups))
        def _():
            for y_ref, acc_ref in zip(factor_refs, sums, strict=True):
                acc_ref[...] += lax.dot_general(
                    x_ref[...], y_ref[...], contract, preferred_element_type=wide
                )

        @pl.when(step == steps - 1)
        def _():
            rows = tile_ref[visit] * x_ref.shape[0] + lax.broadcasted_iota(
                jnp.int32, o_ref.shape, 0
            )
            out = sums[0][...]
            if activation is not None:
                out = ACTIVATIONS[activation](sums[1][...]) * out
            own = (rows >= start) & (rows < end)
            pl.store(o_ref, ..., out.astype(o_ref.dtype), mask=own)

    def matrix(j, v, s, tile_ref, group_ref, *_):
        group = jnp.minimum(group_ref[v], groups - 1)
        return (group, j, s) if transposed else (group, s, j)

    block = (config.block_k, config.block_n)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(pl.cdiv(n, config.block_n), len(visits.tile), steps),
            in_specs=[
                pl.BlockSpec(
                    (config.block_m, config.block_k),
                    lambda j, v, s, tile_ref, *_: (tile_ref[v], s),
                    **ragged,
                ),
                *[
                    pl.BlockSpec(
                        (None, *(block[::-1] if transposed else block)),
                        matrix,
                        **ragged,
                    )
                ]
                * len(factors),
            ],
            out_specs=pl.BlockSpec(
                (config.block_m, config.block_n),
                lambda j, v, s, tile_ref, *_: (tile_ref[v], j),
            ),
            scratch_shapes=[pltpu.VMEM((config.block_m, config.block_n), wide)]
            * len(factors),
        ),
        compiler_params=pltpu.CompilerParams(
            # Visits of one block store disjoint rows, so none waits for another.
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k * len(factors),
            transcendentals=0,
            bytes_accessed=x.dtype.itemsize
            * (x.size + m * n + sum(y.size for y in factors)),
        ),
        name="grouped_matmul",
    )(*visits, x, *factors)


@functools.partial(Differentiable, static=(3, 4))
def _sums_of_groups(x, y, group_sizes, groups, config):
    """`x[rows of g].T @ y[rows of g]` for every group g: (groups, k, n)."""
    (m, k), n = x.shape, y.shape[1]
    if not x.size or not y.size:
        return jnp.zeros((groups, k, n), x.dtype)
    # The sum is over blocks of rows here: rows take the place of k.
    blocks = fitted(config, k, n, m)
    wide = common.statistics_dtype(x.dtype)
    start, end = rows_of_groups(group_sizes, m)
    # The kernel multiplies rows of no group by 0; NaN and infinity survive that.
    x = jnp.where(jnp.arange(m)[:, None] < jnp.sum(group_sizes), x, 0)
    rows_of_step = blocks.block_k
    steps = max(pl.cdiv(m, rows_of_step), 1)
    ragged = {"fill": 0} if steps * rows_of_step != m else {}

    def kernel(start_ref, end_ref, x_ref, y_ref, o_ref, acc_ref):
        group, step = pl.program_id(0), pl.program_id(3)
        start, end = start_ref[group], end_ref[group]
        first = start // rows_of_step

        @pl.when(step == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(step < pl.cdiv(end, rows_of_step) - first)
        def _():
            rows = (first + step) * rows_of_step + lax.broadcasted_iota(
                jnp.int32, y_ref.shape, 0
            )
            own = jnp.where((rows >= start) & (rows < end), y_ref[...], 0)
            acc_ref[...] += lax.dot_general(
                x_ref[...], own, (((0,), (0,)), ((), ())), preferred_element_type=wide
            )

        @pl.when(step == steps - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def rows(width, column):
        def index(g, i, j, s, start_ref, end_ref):
            last = jnp.maximum(pl.cdiv(end_ref[g], rows_of_step) - 1, 0)
            block = jnp.minimum(start_ref[g] // rows_of_step + s, last)
            return block, column(i, j)

        return pl.BlockSpec((rows_of_step, width), index, **ragged)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((groups, k, n), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(
                groups,
                pl.cdiv(k, blocks.block_m),
                pl.cdiv(n, blocks.block_n),
                steps,
            ),
            in_specs=[
                rows(blocks.block_m, lambda i, j: i),
                rows(blocks.block_n, lambda i, j: j),
            ],
            out_specs=pl.BlockSpec(
                (None, blocks.block_m, blocks.block_n),
                lambda g, i, j, s, *_: (g, i, j),
            ),
            scratch_shapes=[pltpu.VMEM((blocks.block_m, blocks.block_n), wide)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k,
            transcendentals=0,
            bytes_accessed=(x.size + y.size + groups * k * n) * x.dtype.itemsize,
        ),
        name="sums_of_groups",
    )(start.astype(jnp.int32), end.astype(jnp.int32), x, y)


def _product_fwd(x, y, group_sizes, config, transposed):
    return _product(x, y, group_sizes, config, transposed), (x, y, group_sizes)


def _product_tangent(config, transposed, kept, tangents):
    (x, y, group_sizes), (d_x, d_y, _) = kept, tangents
    by_x = _product(d_x, y, group_sizes, config, transposed)
    return by_x + _product(x, d_y, group_sizes, config, transposed)


def _product_bwd(config, transposed, kept, cotangent):
    x, y, group_sizes = kept
    d_x = _product(cotangent, y, group_sizes, config, not transposed)
    sides = (cotangent, x) if transposed else (x, cotangent)
    return d_x, _sums_of_groups(*sides, group_sizes, len(y), config), None


_product.define(_product_fwd, _product_tangent, _product_bwd)


def _sums_fwd(x, y, group_sizes, groups, config):
    return _sums_of_groups(x, y, group_sizes, groups, config), (x, y, group_sizes)


def _sums_tangent(groups, config, kept, tangents):
    (x, y, group_sizes), (d_x, d_y, _) = kept, tangents
    by_x = _sums_of_groups(d_x, y, group_sizes, groups, config)
    return by_x + _sums_of_groups(x, d_y, group_sizes, groups, config)


def _sums_bwd(groups, config, kept, cotangent):
    del groups
    x, y, group_sizes = kept
    d_x = _product(y, cotangent, group_sizes, config, True)
    return d_x, _product(x, cotangent, group_sizes, config, False), None


_sums_of_groups.define(_sums_fwd, _sums_tangent, _sums_bwd)
