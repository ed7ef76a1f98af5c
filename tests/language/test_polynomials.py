"""Functions that JAX computes by polynomials, whose coefficients have an order."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import pytest

import pallasite as pl

RNG = np.random.default_rng(3)
X = jnp.asarray(RNG.uniform(-3, 3, (5, 13)), jnp.float32)
COEFFICIENTS = jnp.asarray([3.0, -2.0, 0.5, 7.0, -0.25], jnp.float32)

FUNCTIONS = {
    "polyval": (lambda x: jnp.polyval(COEFFICIENTS, x), X),
    "polyval_of_arrays": (lambda x: jnp.polyval(jnp.stack([x, x + 1, 2 * x]), x), X),
    "sinc": (jnp.sinc, X),
    "ndtri": (special.ndtri, jax.nn.sigmoid(X)),
    "erf": (jax.lax.erf, X),
    "erfc": (jax.lax.erfc, X),
    "ndtr": (special.ndtr, X),
    "cdf": (jax.scipy.stats.norm.cdf, X),
    "gelu": (functools.partial(jax.nn.gelu, approximate=False), X),
}


def in_kernel(fn, **options):
    def kernel(x_ref, o_ref):
        o_ref[...] = fn(x_ref[...])

    return lambda x: pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), **options
    )(x)


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_and_derivative_are_those_outside_a_kernel(name, emulated):
    fn, x = FUNCTIONS[name]
    mine = in_kernel(fn, interpret=emulated)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    close(mine(x), fn(x))
    value, tangent = jax.jvp(mine, [x], [jnp.ones_like(x)])
    wanted = jax.jvp(fn, [x], [jnp.ones_like(x)])
    close(value, wanted[0])
    close(tangent, wanted[1])
    close(jax.vjp(mine, x)[1](x)[0], jax.vjp(fn, x)[1](x)[0])
