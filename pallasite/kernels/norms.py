"""`rms_norm` and `layer_norm` of rows, each with an optional residual.

Rows are the last dimension; statistics are float32 whatever the operands' dtypes. The
gradients are generated backward kernels (docs/backward_kernels.md).
"""

import dataclasses
import functools
from typing import overload

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.kernels import common, configs


@overload
def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = ...,
    *,
    residual: None = ...,
    epsilon: float = ...,
    scale_offset: float = ...,
    implementation: common.Implementation = ...,
    config: common.RowConfig | None = ...,
    batch_invariant: bool = ...,
) -> jax.Array: ...
@overload
def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = ...,
    *,
    residual: jax.Array,
    epsilon: float = ...,
    scale_offset: float = ...,
    implementation: common.Implementation = ...,
    config: common.RowConfig | None = ...,
    batch_invariant: bool = ...,
) -> tuple[jax.Array, jax.Array]: ...
def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: common.Implementation = "pallasite",
    config: common.RowConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`x / sqrt(mean(x²) + epsilon) * (scale + scale_offset)` over the last dimension.

    Args:
        x: (..., width), floating point.
        scale: (width,), or None for ones.
        residual: like x. The sum `x + residual`, rounded to x's dtype, is normalised
            and is also the second result.
        scale_offset: 1.0 for weights stored around zero.
        batch_invariant: whether a row's bits, and those of its gradient, may not depend
            on how many rows there are, and where it is among them.

    Returns:
        The normalised rows in x's dtype; with `residual`, also the sum.
    """
    _check("rms_norm", x, residual, scale=scale)
    kernel = configs.rows_kernel(_norm_rows, _plain_norm, x)
    compute = common.choose(implementation, kernel, _plain_norm)
    common.check_invariant("rms_norm", implementation, batch_invariant)
    config = configs.tuned_rows(
        "rms_norm", config, x, residual, batch_invariant=batch_invariant
    )
    common.check_numbers("rms_norm", epsilon=epsilon, scale_offset=scale_offset)
    options = _Options("rms_norm", epsilon, scale_offset, centred=False)
    normed, total = compute(x, scale, None, residual, options=options, config=config)
    return normed if residual is None else (normed, total)


@overload
def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = ...,
    bias: jax.Array | None = ...,
    *,
    residual: None = ...,
    epsilon: float = ...,
    scale_offset: float = ...,
    implementation: common.Implementation = ...,
    config: common.RowConfig | None = ...,
    batch_invariant: bool = ...,
) -> jax.Array: ...
@overload
def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = ...,
    bias: jax.Array | None = ...,
    *,
    residual: jax.Array,
    epsilon: float = ...,
    scale_offset: float = ...,
    implementation: common.Implementation = ...,
    config: common.RowConfig | None = ...,
    batch_invariant: bool = ...,
) -> tuple[jax.Array, jax.Array]: ...
def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: common.Implementation = "pallasite",
    config: common.RowConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`(x - mean(x)) / sqrt(var(x) + epsilon) * (scale + scale_offset) + bias`.

    Arguments and results are those of `rms_norm`; bias is (width,), or None for zeros.
    """
    _check("layer_norm", x, residual, scale=scale, bias=bias)
    kernel = configs.rows_kernel(_norm_rows, _plain_norm, x)
    compute = common.choose(implementation, kernel, _plain_norm)
    common.check_invariant("layer_norm", implementation, batch_invariant)
    config = configs.tuned_rows(
        "layer_norm", config, x, residual, batch_invariant=batch_invariant
    )
    common.check_numbers("layer_norm", epsilon=epsilon, scale_offset=scale_offset)
    options = _Options("layer_norm", epsilon, scale_offset, centred=True)
    normed, total = compute(x, scale, bias, residual, options=options, config=config)
    return normed if residual is None else (normed, total)


@dataclasses.dataclass(frozen=True)
class _Options:
    name: str
    epsilon: float
    scale_offset: float
    centred: bool


def _normalise(x, scale, bias, options: _Options):
    """The arithmetic of both norms on rows `x`, in the kernel and the plain form."""
    wide = x.astype(common.statistics_dtype(x.dtype))
    if options.centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    out = wide * lax.rsqrt(variance + options.epsilon)
    if scale is not None:
        out = out * (scale.astype(out.dtype) + options.scale_offset)
    if bias is not None:
        out = out + bias.astype(out.dtype)
    return out.astype(x.dtype)


def _plain_norm(
    x, scale, bias, residual, *, options: _Options, config: common.RowConfig
):
    del config  # only kernels have blocks
    total = x if residual is None else (x + residual).astype(x.dtype)
    return _normalise(total, scale, bias, options), total


def _norm_rows(
    x, scale, bias, residual, *, options: _Options, config: common.RowConfig
):
    rows = [x] if residual is None else [x, residual]
    weights = [w for w in (scale, bias) if w is not None]
    kernel = functools.partial(
        _kernel, options=options, scaled=scale is not None, biased=bias is not None
    )
    out = common.over_rows(
        kernel,
        rows,
        weights,
        [x.dtype] * len(rows),
        config=config,
        name=options.name,
    )
    return out[0], out[-1]


def _kernel(*refs, options: _Options, scaled: bool, biased: bool):
    has_residual = len(refs) - scaled - biased == 4
    take = iter(refs)
    x = next(take)[...]
    if has_residual:
        x = (x + next(take)[...]).astype(x.dtype)
    scale = next(take)[...] if scaled else None
    bias = next(take)[...] if biased else None
    next(take)[...] = _normalise(x, scale, bias, options)
    if has_residual:
        next(take)[...] = x


def _check(operation: str, x, residual, **weights) -> None:
    common.check_rows(operation, "x", x)
    common.check_floats(operation, residual=residual, **weights)
    common.check_shape(operation, "residual", residual, x.shape)
    for name, weight in weights.items():
        common.check_shape(operation, name, weight, x.shape[-1:])
