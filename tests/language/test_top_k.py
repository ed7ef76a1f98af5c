"""lax.top_k and its approximations in kernels: values, batches, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl

K = 5
RNG = np.random.default_rng(0)


def rows(best, interpret: bool = False):
    """A kernel that applies `best` to the rows of two blocks."""

    def kernel(x_ref, values_ref, places_ref):
        values_ref[...], places_ref[...] = best(x_ref[...])

    def call(x):
        of = lambda dtype: jax.ShapeDtypeStruct((x.shape[0], K), dtype)
        block = lambda columns: pl.BlockSpec((4, columns), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(of(x.dtype), of(jnp.int32)),
            grid=(x.shape[0] // 4,),
            in_specs=[block(x.shape[1])],
            out_specs=(block(K), block(K)),
            interpret=interpret,
        )(x)

    return call


def same(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("interpret", [False, True])
def test_order(interpret: bool):
    odd = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1], np.float32)
    x = RNG.choice(odd, (8, 23))
    call, want = rows(lambda v: lax.top_k(v, K), interpret), lax.top_k(x, K)
    same(call(x), want)
    np.testing.assert_array_equal(np.signbit(call(x)[0]), np.signbit(want[0]))


def test_approximations_are_exact():
    x = RNG.normal(size=(8, 23)).astype(np.float32)
    same(rows(lambda v: lax.approx_max_k(v, K))(x), lax.top_k(x, K))
    values, places = lax.top_k(-x, K)
    same(rows(lambda v: lax.approx_min_k(v, K))(x), (-values, places))


def test_batches_and_derivatives():
    x, weights = (RNG.normal(size=s).astype(np.float32) for s in ((2, 8, 23), (K,)))
    call, best = rows(lambda v: lax.top_k(v, K)), lambda v: lax.top_k(v, K)
    same(jax.vmap(call)(x), best(x))
    loss = lambda f: lambda v: (f(v)[0] * weights).sum()
    want = jax.grad(loss(best))(x[0])
    np.testing.assert_allclose(jax.grad(loss(call))(x[0]), want)
    _, tangent = jax.jvp(lambda v: call(v)[0], (x[0],), (x[1],))
    _, wanted = jax.jvp(lambda v: best(v)[0], (x[0],), (x[1],))
    np.testing.assert_allclose(tangent, wanted)
