"""`top_k`, the largest elements of each row, and `sort`, whole rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite.errors import SpecError
from pallasite.kernels import common, configs
from pallasite.kernels.derivatives import Differentiable


def top_k(
    x: jax.Array,
    k: int,
    *,
    implementation: common.Implementation = "pallasite",
    config: common.RowConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k largest elements of each row and their positions, like `jax.lax.top_k`.

    Args:
        x: (..., width), floating point. Equal elements keep their order. NaN is above
            all other numbers.

    Returns:
        (..., k) in x's dtype, the largest first, and (..., k) int32.
    """
    common.check_rows("top_k", "x", x)
    is_integer = isinstance(k, int | np.integer) and not isinstance(k, bool)
    if not is_integer or not 0 <= k <= x.shape[-1]:
        raise SpecError(
            "top_k: k is not an integer from 0 to the length of a row",
            [("k", k), ("x", x.shape)],
            fix=f"pass a k from 0 to {x.shape[-1]}",
        )
    compute = common.choose(implementation, _best_rows, _plain_top_k)
    if k == 0:
        compute = _plain_top_k
    return compute(x, k=k, config=configs.tuned_rows("top_k", config, x))


# Columns that a GPU sorts in a kernel: its network of comparisons takes XLA's compiler
# 16 seconds for these, minutes for more.
MOST_SORTED = 512


def sort(
    x: jax.Array,
    *,
    descending: bool = False,
    implementation: common.Implementation = "pallasite",
    config: common.RowConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Each row in order, and the positions its elements had.

    Args:
        x: (..., width), floating point. Equal elements keep their order. NaN is above
            all other numbers, as in `jax.numpy.sort`.

    Returns:
        (..., width) in x's dtype, and (..., width) int32.
    """
    common.check_rows("sort", "x", x)
    kernel = configs.rows_kernel(_sorted_rows, _plain_sort, x, MOST_SORTED)
    compute = common.choose(implementation, kernel, _plain_sort)
    if not x.size:
        compute = _plain_sort
    config = configs.tuned_rows("sort", config, x)
    return compute(x, descending=descending, config=config)


def _plain_top_k(x, *, k: int, config: common.RowConfig):
    del config  # only kernels have blocks
    values, places = lax.top_k(x, k)
    return values, places


def _plain_sort(x, *, descending: bool, config: common.RowConfig):
    del config  # only kernels have blocks
    order = jnp.argsort(x, axis=-1, descending=descending, stable=True)
    return jnp.take_along_axis(x, order, axis=-1), order.astype(jnp.int32)


def _best_rows(x, *, k: int, config: common.RowConfig):
    return _ordered(x, functools.partial(lax.top_k, k=k), k, config, "top_k")


def _sorted_rows(x, *, descending: bool, config: common.RowConfig):
    def in_order(x):
        place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        if not descending:
            return lax.sort((x, place), num_keys=1, is_stable=True)
        # Reversed before and after: equal elements keep their order, and NaN comes
        # first, which negation would not achieve.
        backwards = jnp.flip(x, -1), x.shape[-1] - 1 - place
        rising = lax.sort(backwards, num_keys=1, is_stable=True)
        return tuple(jnp.flip(each, -1) for each in rising)

    return _ordered(x, in_order, x.shape[-1], config, "sort")


@functools.partial(Differentiable, static=(1, 2, 3, 4))
def _ordered(x, function, size: int, config: common.RowConfig, name: str):
    """`function` on blocks of whole rows: ordered elements and their positions."""
    shape = (*x.shape[:-1], size)
    rows = x.reshape(-1, x.shape[-1])

    def kernel(x_ref, values_ref, places_ref):
        values_ref[...], places_ref[...] = function(x_ref[...])

    def blocks(width):
        return pl.BlockSpec((config.block_rows, width), lambda i: (i, 0))

    results = [
        jax.ShapeDtypeStruct((len(rows), size), dtype) for dtype in (x.dtype, jnp.int32)
    ]
    compared = x.shape[-1].bit_length() ** 2 // 2 + 1  # rounds of a sorting network
    values, places = pl.pallas_call(
        kernel,
        out_shape=results,
        grid=(pl.cdiv(len(rows), config.block_rows),),
        in_specs=[blocks(x.shape[-1])],
        out_specs=[blocks(size), blocks(size)],
        cost_estimate=common.cost(x.size * compared, [x, *results]),
        name=name,
    )(rows)
    return values.reshape(shape), places.reshape(shape)


def _ordered_fwd(x, *how):
    made: Any = _ordered(x, *how)
    values, places = made
    return (values, places), (places, x)


def _ordered_tangent(function, size, config, name, kept, tangents):
    places, _ = kept
    return jnp.take_along_axis(tangents[0], places, axis=-1), None


def _ordered_bwd(function, size, config, name, kept, cotangents):
    """Returns each cotangent to its element's original position."""
    places, x = kept
    d_x = jnp.zeros_like(x)
    return (jnp.put_along_axis(d_x, places, cotangents[0], axis=-1, inplace=False),)


_ordered.define(_ordered_fwd, _ordered_tangent, _ordered_bwd)
