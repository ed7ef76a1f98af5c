"""`softmax` of rows: each row is read once and written once."""

import jax
import jax.numpy as jnp

from pallasite.kernels import common, configs


def softmax(
    x: jax.Array,
    *,
    scale: float = 1.0,
    implementation: common.Implementation = "pallasite",
    config: common.RowConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """`exp(scale * x) / sum(exp(scale * x))` over the last dimension, in x's dtype.

    A row of only -inf gives NaN, as in `jax.nn.softmax`. `batch_invariant`: as in
    `rms_norm`.
    """
    common.check_rows("softmax", "x", x)
    common.check_numbers("softmax", scale=scale)
    kernel = configs.rows_kernel(_softmax_rows, _plain_softmax, x)
    compute = common.choose(implementation, kernel, _plain_softmax)
    common.check_invariant("softmax", implementation, batch_invariant)
    config = configs.tuned_rows("softmax", config, x, batch_invariant=batch_invariant)
    if not x.size:  # empty rows have no maximum
        return jnp.asarray(x)
    return compute(x, scale=scale, config=config)


def _normalise(x, scale: float):
    wide = x.astype(common.statistics_dtype(x.dtype)) * scale
    weights = jnp.exp(wide - jnp.max(wide, axis=-1, keepdims=True))
    # One division per row: the sum is at least 1, so its reciprocal is finite.
    return (weights * (1 / jnp.sum(weights, axis=-1, keepdims=True))).astype(x.dtype)


def _plain_softmax(x, *, scale: float, config: common.RowConfig):
    del config  # only kernels have blocks
    return _normalise(x, scale)


def _softmax_rows(x, *, scale: float, config: common.RowConfig):
    def kernel(x_ref, o_ref):
        o_ref[...] = _normalise(x_ref[...], scale)

    (out,) = common.over_rows(kernel, [x], [], [x.dtype], config=config, name="softmax")
    return out
