"""Functions of libdevice that a kernel uses often are called, those used rarely not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated
from tests.ops.sampling import evaluate


def repeated(function, uses: int, shape, dtype="f4"):
    def kernel(x_ref, o_ref):
        y = x_ref[...]
        for n in range(uses):
            y = function(y + n)
        o_ref[...] = y

    x = jnp.linspace(-1, 1, int(np.prod(shape)), dtype=dtype).reshape(shape)
    (made,) = map(run, kernels_in(pl.pallas_call(kernel, x), x))
    return made, np.asarray(x)


@pytest.mark.parametrize("shape", [(8, 1024), (5, 999)])
def test_many_uses_are_one_function(shape):
    kernel, x = repeated(jnp.sin, 9, shape)
    text, _ = compiled(kernel)
    assert text.count("noinline = true") == text.count("__nv_sinf") == 1
    assert text.count("tt.call @sin_0") == 9
    (got,), (want,) = simulated(kernel, [x]), evaluate(kernel, [x])
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_each_kind_has_its_function():
    kernel, x = repeated(lambda y: jnp.arctan2(jnp.tan(y), y), 9, (8, 1024))
    text, _ = compiled(kernel)
    assert text.count("noinline = true") == 2
    (got,), (want,) = simulated(kernel, [x]), evaluate(kernel, [x])
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("uses, shape", [(2, (8, 1024)), (9, (1, 1024))])
def test_few_uses_are_inline(uses: int, shape):
    text, _ = compiled(repeated(jnp.sin, uses, shape)[0])
    assert "tt.call" not in text


def test_narrow_floats_and_numbers():
    kernel, x = repeated(jnp.sin, 9, (8, 1024), jnp.bfloat16)
    text, _ = compiled(kernel)
    assert text.count("tt.call @sin_0") == 9
    (got,), (want,) = simulated(kernel, [x]), evaluate(kernel, [x])
    np.testing.assert_array_equal(got, want)


def test_inside_a_loop():
    def kernel(x_ref, o_ref):
        def step(n, y):
            for _ in range(80):
                y = jnp.sin(y)
            return y + n

        o_ref[...] = jax.lax.fori_loop(0, 3, step, x_ref[...])

    x = np.linspace(-1, 1, 65536, dtype=np.float32).reshape(-1, 1024)
    (made,) = map(run, kernels_in(pl.pallas_call(kernel, jnp.asarray(x)), x))
    text, _ = compiled(made)
    assert text.count("tt.call") == 80
    (got,), (want,) = simulated(made, [x]), evaluate(made, [x])
    np.testing.assert_allclose(got, want, rtol=1e-5)
