# pyright: strict
"""Kernels as an author with a strict type checker writes them: no Any, no ignores.

`test_ref_type.py` runs pyright on this file, and the kernels.
"""

import jax
import jax.numpy as jnp

import pallasite as pl


def scale_kernel(x_ref: pl.Ref, o_ref: pl.Ref) -> None:
    rows, columns = x_ref.shape
    assert isinstance(x_ref, pl.Ref) and x_ref.ndim == 2
    assert x_ref.size == rows * columns
    o_ref[...] = (2 * x_ref[...]).astype(o_ref.dtype)


def scaled(x: jax.Array) -> jax.Array:
    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        scale_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(x.shape[0], 8),
        in_specs=[rows],
        out_specs=rows,
    )(x)


def product_kernel(x_ref: pl.Ref, y_ref: pl.Ref, o_ref: pl.Ref) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], precision="highest")


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        product_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(pl.cdiv(m, 8), pl.cdiv(k, 128)),
        in_specs=[
            pl.BlockSpec((8, 128), lambda i, j: (i, j)),
            pl.BlockSpec((128, n), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((8, n), lambda i, j: (i, 0)),
    )(x, y)


def parts_kernel(x_ref: pl.Ref, o_ref: pl.Ref) -> None:
    first: pl.Ref = o_ref.at[0:4]
    first[...] = x_ref[pl.ds(4, 4), :]

    @pl.loop(0, 4)
    def _(i: jax.Array) -> None:
        o_ref[4 + i, :] = x_ref[i] + 1.0


def parts(x: jax.Array) -> jax.Array:
    return pl.pallas_call(parts_kernel, out_shape=x)(x)


def steps(n: jax.Array) -> jax.Array:
    whole: int = pl.cdiv(9, 2)
    return pl.cdiv(n, 2) + whole
