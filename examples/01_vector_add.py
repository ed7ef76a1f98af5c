"""The smallest kernel: add two vectors whose length no block size divides."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl


def add_kernel(x_ref: Any, y_ref: Any, o_ref: Any):
    o_ref[...] = x_ref[...] + y_ref[...]


def add(x: jax.Array, y: jax.Array, block: int = 256):
    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        add_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(x.shape[0], block),
        in_specs=[spec, spec],
        out_specs=spec,
        interpret=True,
    )(x, y)


def main():
    x, y = jnp.arange(1000.0), jnp.ones(1000)
    result = jax.jit(add)(x, y)
    np.testing.assert_allclose(result, x + y)
    print("sum of 1000 numbers:", result.sum())


if __name__ == "__main__":
    main()
