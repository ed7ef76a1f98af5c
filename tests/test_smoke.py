"""Under ten seconds: the path from Python to numbers, before every commit."""

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.sites import kernels_in

BLOCK = pl.BlockSpec((128,), lambda i: (i,))


def add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def add(x, y, interpret=True):
    return pl.pallas_call(
        add_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(x.shape[0], 128),
        in_specs=[BLOCK, BLOCK],
        out_specs=BLOCK,
        interpret=interpret,
    )(x, y)


def test_vector_add_in_every_mode():
    x, y = jnp.arange(1000.0), jnp.ones(1000)
    for interpret in (True, pl.Checked()):
        np.testing.assert_array_equal(add(x, y, interpret), x + y)
    np.testing.assert_array_equal(jax.vmap(add)(x[None], y[None])[0], x + y)


def test_ir_is_verified_and_round_trips():
    (kernel,) = kernels_in(add, jnp.ones(1000), jnp.ones(1000))
    verify(kernel)
    assert parse_kernel(kernel.text).text == kernel.text
