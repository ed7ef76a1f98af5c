"""Code written for upstream Pallas runs unmodified after `pallasite.install()`."""

# pyright: basic

import jax
import jax.numpy as jnp
import numpy as np

import pallasite


def main():
    pallasite.install()
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def gather_kernel(index_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def gather_rows(index, x):
        row = lambda i, index_ref: (index_ref[i], 0)
        return pl.pallas_call(
            gather_kernel,
            out_shape=jax.ShapeDtypeStruct((index.shape[0], x.shape[1]), x.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(index.shape[0],),
                in_specs=[pl.BlockSpec((1, x.shape[1]), row)],
                out_specs=pl.BlockSpec((1, x.shape[1]), lambda i, _: (i, 0)),
            ),
            interpret=True,
        )(index, x)

    x = jnp.arange(12.0).reshape(4, 3)
    index = jnp.array([2, 0, 3, 3, 1])
    np.testing.assert_array_equal(gather_rows(index, x), x[index])
    print("pl is", pl.__name__)


if __name__ == "__main__":
    main()
