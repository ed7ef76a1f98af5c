"""Matmuls with quantised weights: `weight_only_matmul` and `block_scaled_matmul`.

Weight-only: weights have 8 or 4 bits, with a scale per group of rows and column, and
become floats only in the kernel, so memory traffic is that of the small form. For few
rows of x that traffic is all of the time. A group's products are sums of unscaled
integers times x; its scale is applied afterwards.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import KernelTypeError, SpecError
from pallasite.kernels import common, configs
from pallasite.kernels.matmul import MatmulConfig, SplitSum, fitted


@dataclasses.dataclass(frozen=True)
class WeightOnlyConfig:
    """How a matmul is split into blocks.

    Attributes:
        block_m, block_n: rows and columns per program. A step is a group of weights.
        splits: parts of the sum over k that run concurrently; XLA adds their results.
            By default enough for about 256 programs.
        batch_invariant: the operations' argument.
    """

    block_m: int = 64
    block_n: int = 128
    splits: int | None = None
    batch_invariant: bool = False


WEIGHT_ONLY_SPACE = {"block_m": (16, 32, 64, 128), "block_n": (64, 128, 256)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights (..., k, n) as small numbers times scales. A pytree.

    Attributes:
        values: int8 or 8-bit floats (..., k, n). With 4 bits, int8 (..., k / 2, n):
            row i in the low half of a byte, row i + k / 2 in the high half.
        scales: (..., k / group_size, n).
        bits: 8 or 4.
    """

    values: jax.Array
    scales: jax.Array
    bits: Literal[4, 8] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, rows, columns = self.values.shape
        return *leading, rows * 8 // self.bits, columns

    @property
    def ndim(self) -> int:
        return len(self.values.shape)

    def dequantize(self) -> jax.Array:
        """The weights in the dtype of the scales."""
        values = self.values
        if self.bits == 4:
            values = jnp.concatenate(halves(values), axis=-2)
        group_size = self.shape[-2] // max(self.scales.shape[-2], 1)
        scales = jnp.repeat(self.scales, group_size, axis=-2)
        return values.astype(scales.dtype) * scales


def quantize_weights(
    weights: jax.Array,
    *,
    bits: Literal[4, 8] = 8,
    group_size: int = 128,
    dtype: Any = jnp.int8,
) -> QuantizedWeights:
    """Quantises weights (..., k, n), with a scale per group of rows and column.

    Args:
        bits: 8, or 4 for integers packed two to a byte.
        group_size: rows that share a scale; divides k (with 4 bits, k / 2).
        dtype: with 8 bits, int8 or an 8-bit float.
    """
    common.check_array("quantize_weights", "weights", weights)
    common.check_floats("quantize_weights", weights=weights)
    if weights.ndim < 2:
        common.check_rank("quantize_weights", "weights", weights, "k, n")
    *leading, k, n = weights.shape
    check_bits("quantize_weights", bits)
    rows = k * bits // 8
    if k * bits % 8 or not rows:
        raise SpecError(
            "quantize_weights: the rows do not fill whole bytes",
            [("weights", weights.shape), ("bits", bits)],
            fix=f"pass weights with a multiple of {8 // bits} rows, padded with zeros",
        )
    fix = f"pass a group_size that divides {rows}"
    common.check_count("quantize_weights", "group_size", group_size, 1, fix)
    if rows % group_size:
        raise SpecError(
            "quantize_weights: groups do not divide the rows",
            [("weights", weights.shape), ("group_size", group_size), ("bits", bits)],
            fix=fix,
        )
    dtype = common.checked_dtype("quantize_weights: dtype", dtype)
    is_integer = dtype == jnp.int8
    if dtype.itemsize != 1 or not (is_integer or bits == 8):
        raise SpecError(
            f"quantize_weights: {bits} bits as {dtype}",
            fix="pass dtype=jnp.int8, or with 8 bits an 8-bit float",
        )
    most = 2 ** (bits - 1) - 1 if is_integer else float(jnp.finfo(dtype).max)
    groups = weights.astype(jnp.float32).reshape(*leading, -1, group_size, n)
    scales = jnp.maximum(jnp.max(jnp.abs(groups), axis=-2), 1e-30) / most
    values = groups / scales[..., None, :]
    values = jnp.round(values) if is_integer else jnp.clip(values, -most, most)
    values = values.astype(dtype).reshape(weights.shape)
    if bits == 4:
        low, high = values[..., : k // 2, :], values[..., k // 2 :, :]
        values = (high << 4) | (low & 15)
    return QuantizedWeights(values, scales.astype(weights.dtype), bits)


def check_bits(operation: str, bits: Any) -> None:
    """Checks that weights have 4 or 8 bits, which is known at trace time."""
    common.check_count(operation, "bits", bits, 1, "one of 4, 8, not traced")
    common.check_option(operation, "bits", bits, [4, 8])


def check_quantized(operation: str, name: str, weights: QuantizedWeights) -> None:
    """Checks that scales and values of weights (..., k, n) belong together."""
    check_bits(operation, weights.bits)
    common.check_array(operation, f"{name}.values", weights.values)
    common.check_floats(operation, **{f"{name}.scales": weights.scales})
    scales, (*leading, rows, columns) = weights.scales.shape, weights.values.shape
    fits = len(scales) == len(leading) + 2
    fits = fits and (*scales[:-2], scales[-1]) == (*leading, columns)
    # With 4 bits, each half of the bytes has whole groups.
    groups = scales[-2] * weights.bits // 8 if fits else 0
    if not groups or rows % groups:
        raise SpecError(
            f"{operation}: the scales of {name} do not match its values",
            [("weights", weights.shape), ("scales", scales), ("bits", weights.bits)],
            fix=f"pass scales {(*leading, 'k / group_size', columns)}, as from "
            "quantize_weights",
        )


def halves(packed):
    """The signed 4-bit integers in the low and high halves of bytes."""
    return (packed << 4) >> 4, packed >> 4


def weight_only_matmul(
    x: jax.Array,
    weights: QuantizedWeights,
    *,
    implementation: common.Implementation = "pallasite",
    config: WeightOnlyConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """`x @ weights.dequantize()`.

    Args:
        x: (..., k), floating point.
        weights: (k, n) from `quantize_weights`.
        batch_invariant: whether a row's bits may not depend on how many rows x has; the
            sum over k then has the parts that suit few of them.

    Returns:
        (..., n) in x's dtype; sums are accumulated in float32.
    """
    if not isinstance(weights, QuantizedWeights):
        raise KernelTypeError(
            "weight_only_matmul: weights are not quantised",
            [("is of type", type(weights).__name__)],
            fix="pass quantize_weights(weights), or use matmul",
        )
    k, _ = common.check_rank("weight_only_matmul", "weights", weights, "k, n")
    check_quantized("weight_only_matmul", "weights", weights)
    common.check_rows("weight_only_matmul", "x", x)
    common.check_shape("weight_only_matmul", "x", x, (*x.shape[:-1], k))
    common.check_invariant("weight_only_matmul", implementation, batch_invariant)
    compute = common.choose(implementation, _weight_only, _plain_weight_only)
    config = configs.tuned(
        "weight_only_matmul",
        config,
        WeightOnlyConfig(),
        WEIGHT_ONLY_SPACE,
        (x, weights.values, weights.scales),
        batch_invariant,
        bits=weights.bits,
    )
    return compute(x, weights, config=config)


def _plain_weight_only(x, weights, *, config):
    del config  # only kernels have blocks
    wide = common.statistics_dtype(x.dtype)
    y = weights.dequantize().astype(x.dtype)
    return jnp.dot(x, y, preferred_element_type=wide).astype(x.dtype)


def _weight_only(x, weights, *, config):
    if config.batch_invariant:  # derived kernels add up by blocks of a fixed height
        call = functools.partial(_by_groups, config=config)
        whole = functools.partial(call, uncounted=True)
        return common.differentiated_as(call, whole, x, weights)
    return _by_groups(x, weights, config=config)


def _by_groups(x, weights, *, config, uncounted=False):
    (k, n), bits = weights.shape, weights.bits
    rows = x.reshape(-1, k)
    m, parts = len(rows), 8 // bits  # parts of k packed in a row of bytes
    group = k // len(weights.scales)
    steps = k // parts // group
    sizes = MatmulConfig(config.block_m, config.block_n, group)
    sizes = dataclasses.replace(sizes, batch_invariant=uncounted)
    blocks, known = fitted(sizes, m, n, group), {"fill": 0} if uncounted else {}
    counted = 1 if config.batch_invariant else pl.cdiv(m, blocks.block_m)
    programs = max(counted * pl.cdiv(n, blocks.block_n), 1)
    wanted = 256 // programs if config.splits is None else config.splits
    sums = SplitSum.of(steps, wanted)
    wide = common.statistics_dtype(x.dtype)

    def kernel(*refs):
        x_refs, y_ref = refs[:parts], refs[parts]
        scale_refs, o_ref = refs[parts + 1 : -1], refs[-1]
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(sums.has(pl.program_id(2), step))
        def _():
            integers = y_ref[...]
            pieces = (integers,) if parts == 1 else halves(integers)
            for x_ref, y, scale_ref in zip(x_refs, pieces, scale_refs, strict=True):
                product = jnp.dot(
                    x_ref[...], y.astype(x.dtype), preferred_element_type=wide
                )
                o_ref[...] += product * scale_ref[...].astype(wide)

    def left(part):
        return pl.BlockSpec(
            (blocks.block_m, group),
            lambda i, j, s, t: (i, part * steps + sums.step(s, t)),
            **known,
        )

    def scale(part):
        return pl.BlockSpec(
            (None, 1, blocks.block_n),
            lambda i, j, s, t: (part * steps + sums.step(s, t), 0, j),
        )

    sums = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((sums.count, m, n), wide),
        grid=(
            pl.cdiv(m, blocks.block_m),
            pl.cdiv(n, blocks.block_n),
            sums.count,
            sums.each,
        ),
        in_specs=[
            *(left(part) for part in range(parts)),
            pl.BlockSpec(
                (group, blocks.block_n), lambda i, j, s, t: (sums.step(s, t), j)
            ),
            *(scale(part) for part in range(parts)),
        ],
        out_specs=pl.BlockSpec(
            (None, blocks.block_m, blocks.block_n), lambda i, j, s, t: (s, i, j)
        ),
        compiler_params=common.compiler_params(
            config, "parallel", "parallel", "parallel", "arbitrary"
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k,
            transcendentals=0,
            bytes_accessed=(m * k + m * n) * x.dtype.itemsize + k * n * bits // 8,
        ),
        name="weight_only_matmul",
    )(*[rows] * parts, weights.values, *[weights.scales[:, None]] * parts)
    return common.added(sums, config).astype(x.dtype).reshape(*x.shape[:-1], n)


def block_scaled_matmul(
    x: jax.Array,
    y: jax.Array,
    x_scales: jax.Array,
    y_scales: jax.Array,
    *,
    out_dtype=jnp.bfloat16,
    implementation: common.Implementation = "pallasite",
    config: MatmulConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """A matmul of 8-bit floats (or others) with a scale per block of each operand.

    Args:
        x: (m, k), with a scale per row and `block` elements of k, where block is
            k / columns of x_scales, usually 128.
        y: (k, n), with a scale per block x block.
        x_scales: (m, k / block), floating point.
        y_scales: (k / block, n / block rounded up).
        batch_invariant: as in `matmul`.

    Returns:
        (m, n) in out_dtype: the sum over blocks of x_scales * y_scales * products.
    """
    operation = "block_scaled_matmul"
    m, k = common.check_rank(operation, "x", x, "m, k")
    _, n = common.check_rank(operation, "y", y, "k, n")
    common.check_shape(operation, "y", y, (k, n))
    common.check_real(operation, x=x, y=y)
    common.check_arrays(operation, x_scales=x_scales, y_scales=y_scales)
    common.check_floats(operation, x_scales=x_scales, y_scales=y_scales)
    _, blocks = common.check_rank(operation, "x_scales", x_scales, "m, k / block")
    if not blocks or k % blocks:
        raise SpecError(
            f"{operation}: the scales do not divide k",
            [("k", k), ("x_scales", x_scales.shape)],
            fix="pass a scale for every block of k",
        )
    common.check_shape(operation, "x_scales", x_scales, (m, blocks))
    wanted = (blocks, pl.cdiv(n, k // blocks))
    common.check_shape(operation, "y_scales", y_scales, wanted)
    common.check_invariant(operation, implementation, batch_invariant)
    compute = common.choose(implementation, _block_scaled, _plain_block_scaled)
    return compute(
        x,
        y,
        x_scales,
        y_scales,
        out_dtype=common.checked_dtype(f"{operation}: out_dtype", out_dtype),
        # Blocks along n and k are those that share a scale.
        config=configs.tuned(
            operation,
            config,
            MatmulConfig(),
            {"block_m": (64, 128, 256)},
            (x, y),
            batch_invariant,
        ),
    )


def _plain_block_scaled(x, y, x_scales, y_scales, *, out_dtype, config):
    del config  # only kernels have blocks
    block = x.shape[1] // x_scales.shape[1]
    wide = x_scales.dtype
    left = x.astype(wide) * jnp.repeat(x_scales, block, axis=1)
    scales = jnp.repeat(jnp.repeat(y_scales, block, axis=0), block, axis=1)
    right = y.astype(wide) * scales[:, : y.shape[1]]
    return jnp.dot(left, right).astype(out_dtype)


def _block_scaled(x, y, x_scales, y_scales, *, out_dtype, config):
    (m, k), n = x.shape, y.shape[1]
    steps = x_scales.shape[1]
    block = k // steps
    wide = x_scales.dtype
    block_m = fitted(config, m, n, k).block_m
    if config.batch_invariant:  # whole blocks: one kernel has any number of rows
        more = ((0, -m % block_m), (0, 0))
        x_scales = jnp.pad(x_scales, more)

    def kernel(x_ref, y_ref, x_scale_ref, y_scale_ref, o_ref, acc_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        product = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=wide)
        acc_ref[...] += product * (x_scale_ref[...] * y_scale_ref[...])

        @pl.when(step == steps - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(out_dtype)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(pl.cdiv(m, block_m), pl.cdiv(n, block), steps),
        in_specs=[
            pl.BlockSpec((block_m, block), lambda i, j, s: (i, s)),
            pl.BlockSpec((block, block), lambda i, j, s: (s, j)),
            pl.BlockSpec((None, block_m, 1), lambda i, j, s: (s, i, 0)),
            pl.BlockSpec((None, None, 1, 1), lambda i, j, s: (s, j, 0, 0)),
        ],
        out_specs=pl.BlockSpec((block_m, block), lambda i, j, s: (i, j)),
        scratch_shapes=[pltpu.VMEM((block_m, block), wide)],
        compiler_params=common.compiler_params(
            config, "parallel", "parallel", "arbitrary"
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k,
            transcendentals=0,
            bytes_accessed=(m * k + k * n) * x.dtype.itemsize
            + m * n * out_dtype.itemsize,
        ),
        name="block_scaled_matmul",
    )(x, y, x_scales.T[:, :, None], y_scales[:, :, None, None])
