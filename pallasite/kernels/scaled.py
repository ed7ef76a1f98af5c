"""`scaled_matmul`: a matmul of small floats with a scale for a few of them along k.

The block-scaled formats of tensor cores: mxfp8, with a power of two for 32 elements,
and others alike. Products of a number and its scale are exact in bf16, so the kernel
multiplies bf16 wherever a chip does not multiply by scales itself.
"""

from typing import Any

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.ir.types import dtype_of
from pallasite.kernels import common, configs
from pallasite.kernels.matmul import MatmulConfig
from pallasite.placement import chip_for
from pallasite.target import Chip, Gpu, Host

OPERATION = "scaled_matmul"
VALUES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
SCALES = ("float8_e8m0fnu", "float8_e4m3fn")
SPACE = {"block_m": (128, 256), "block_n": (128, 256)}


def scaled_matmul(
    x: jax.Array,
    y: jax.Array,
    x_scales: jax.Array,
    y_scales: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    implementation: common.Implementation = "pallasite",
    config: MatmulConfig | None = None,
) -> jax.Array:
    """`dequantized(x) @ dequantized(y).T`, of blocks along k that share a scale.

    Args:
        x: (m, k), of float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
        y: (n, k), of the same type: contiguous along k, as tensor cores take it.
        x_scales: (m, k / width), of float8_e8m0fnu, or of float8_e4m3fn whose sign is
            ignored. The formats mxfp8 and mxfp4 have the first for a width of 32,
            nvfp4 the second for a width of 16.
        y_scales: (n, k / width).
        out_dtype: of the result.

    Returns:
        (m, n) in out_dtype; sums are accumulated in float32.
    """
    m, k = common.check_rank(OPERATION, "x", x, "m, k")
    n, _ = common.check_rank(OPERATION, "y", y, "n, k")
    common.check_shape(OPERATION, "y", y, (n, k))
    common.check_arrays(OPERATION, x_scales=x_scales, y_scales=y_scales)
    _, columns = common.check_rank(OPERATION, "x_scales", x_scales, "m, k / width")
    common.check_shape(OPERATION, "x_scales", x_scales, (m, columns))
    common.check_shape(OPERATION, "y_scales", y_scales, (n, columns))
    _check_types("values", VALUES, x=x, y=y)
    _check_types("scales", SCALES, x_scales=x_scales, y_scales=y_scales)
    if not columns or k % columns:
        raise SpecError(
            f"{OPERATION}: the scales do not divide k",
            [("k", k), ("x_scales", x_scales.shape)],
            fix="pass a scale for every block of k",
        )
    compute = common.choose(implementation, _scaled, _plain)
    return compute(
        x,
        y,
        x_scales,
        y_scales,
        out_dtype=common.checked_dtype(f"{OPERATION}: out_dtype", out_dtype),
        config=configs.tuned(OPERATION, config, _usual(m, n), SPACE, (x, y)),
    )


def _check_types(what: str, known: tuple[str, ...], **arrays: jax.Array) -> None:
    """Checks that both operands have one of the types."""
    names = {name: jnp.dtype(x.dtype).name for name, x in arrays.items()}
    if len(set(names.values())) > 1 or not set(names.values()) <= set(known):
        raise SpecError(
            f"{OPERATION}: no {what} of these types",
            list(names.items()),
            fix=f"pass both as one of {', '.join(known)}",
        )


def _usual(m: int, n: int) -> MatmulConfig:
    """Wide blocks, where there are enough of them for the multiprocessors of a GPU."""
    wide = pl.cdiv(m, 128) * pl.cdiv(n, 256) >= 128
    return MatmulConfig(128, 256 if wide else 128, 128)


def dequantized(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Numbers (rows, k) times their scales (rows, k / width), exact in bf16."""
    width = values.shape[1] // scales.shape[1]
    return values.astype(jnp.bfloat16) * jnp.repeat(_factors(scales), width, axis=1)


def _factors(scales: jax.Array) -> jax.Array:
    """Scales as numbers; a sign, which powers of two have not, is ignored."""
    if scales.dtype != jnp.float8_e8m0fnu:
        scales = jnp.abs(scales)
    return scales.astype(jnp.bfloat16)


def _plain(x, y, x_scales, y_scales, *, out_dtype, config):
    del config  # only kernels have blocks
    left, right = dequantized(x, x_scales), dequantized(y, y_scales)
    product = jnp.dot(left, right.T, preferred_element_type=jnp.float32)
    return product.astype(out_dtype)


def _scaled(x, y, x_scales, y_scales, *, out_dtype, config):
    width = x.shape[1] // x_scales.shape[1]
    # XLA converts what kernels for the chip cannot have; all of this is exact.
    chip = chip_for(None)
    if x.dtype == jnp.float4_e2m1fn and not isinstance(chip, Host):
        x, y = (v.astype(jnp.float8_e4m3fn) for v in (x, y))
    if not _takes(chip, x.dtype, x_scales.dtype, width):
        x_scales, y_scales = (_factors(s) for s in (x_scales, y_scales))
    depth = pl.align_to(config.block_k, width)
    x, y = (_deep(v, depth, 0) for v in (x, y))
    x_scales, y_scales = (_deep(v, depth // width, 1) for v in (x_scales, y_scales))
    (m, k), n = x.shape, len(y)

    def kernel(x_ref, y_ref, x_scale_ref, y_scale_ref, o_ref, acc_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jax.lax.dot_general(
            dequantized(x_ref[...], x_scale_ref[...]),
            dequantized(y_ref[...], y_scale_ref[...]),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

        @pl.when(step == k // depth - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(out_dtype)

    rows, columns = config.block_m, config.block_n
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(pl.cdiv(m, rows), pl.cdiv(n, columns), k // depth),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, s: (i, s)),
            pl.BlockSpec((columns, depth), lambda i, j, s: (j, s)),
            pl.BlockSpec((rows, depth // width), lambda i, j, s: (i, s)),
            pl.BlockSpec((columns, depth // width), lambda i, j, s: (j, s)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, s: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        compiler_params=common.compiler_params(
            config, "parallel", "parallel", "arbitrary"
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k,
            transcendentals=0,
            bytes_accessed=(m + n) * k * x.dtype.itemsize + m * n * out_dtype.itemsize,
        ),
        name=OPERATION,
    )(x, y, x_scales, y_scales)


def _takes(chip: Chip | Host, values: Any, scales: Any, width: int) -> bool:
    """Whether kernels for a chip can have scales of a type."""
    if isinstance(chip, Gpu):
        from pallasite.backends.cuda.instruction_sets import instruction_set

        found = instruction_set(chip)
        names = dtype_of(values), dtype_of(scales)
        known = {} if found is None else found.scaled
        return known.get(str(names[0])) == (str(names[1]), width)
    return isinstance(chip, Host)


def _deep(x: jax.Array, multiple: int, value: int) -> jax.Array:
    """With whole steps of columns."""
    more = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, more)), constant_values=value) if more else x
