"""Checked mode finds a read of scratch that nobody initialised, and says where."""

from typing import Any

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import tpu as pltpu


def row_sums_kernel(x_ref: Any, o_ref: Any, acc_ref: Any):
    """Forgets to clear the accumulator before the first step."""
    acc_ref[...] += x_ref[...].sum(axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = acc_ref[...]


def row_sums(x: jax.Array, interpret: Any):
    return pl.pallas_call(
        row_sums_kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype),
        grid=(x.shape[0] // 8, x.shape[1] // 128),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((8, 1), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((8, 1), jnp.float32)],
        interpret=interpret,
    )(x)


def main():
    x = jnp.ones((16, 256))
    try:
        row_sums(x, pl.Checked())
    except RuntimeError as report:
        print(report)
    else:
        raise AssertionError("checked mode missed the bug")


if __name__ == "__main__":
    main()
