"""Axes of which a quotient or a remainder chooses a cotangent's block, as two axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.passes.analysis.grid import analyze

STEPS, PART = 24, 6


def scaled(digit):
    """Rows of x times the row of w that a digit of their number names."""

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.sin(x_ref[...]) * w_ref[...]

    def function(x, w):
        row = pl.BlockSpec((8, 128), lambda i: (i, 0))
        shared = pl.BlockSpec((1, 128), lambda i: (digit(i), 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(STEPS,),
            in_specs=[row, shared],
            out_specs=row,
        )(x, w)

    return function


@pytest.mark.parametrize(
    "digit, rows",
    [(lambda i: i // PART, STEPS // PART), (lambda i: i % PART, PART)],
    ids=["quotient", "remainder"],
)
def test_a_digit_that_chooses_a_block_is_an_axis(digit, rows):
    function = scaled(digit)
    x = jax.random.normal(jax.random.key(0), (STEPS * 8, 128))
    w = jax.random.normal(jax.random.key(1), (rows, 128))
    report = pl.explain_grad(function)(x, w)
    (kernel,) = [k for k in report.kernels if "d_w" in k.name]
    sizes = {axis.size for axis in analyze(kernel).axes if axis.parallel}
    assert rows in sizes and STEPS not in sizes
    dw = jax.grad(lambda w: function(x, w).sum())(w)
    parts = np.sin(x).reshape(STEPS, 8, 128).sum(1)
    want = np.zeros((rows, 128), np.float32)
    for i in range(STEPS):
        want[digit(i)] += parts[i]
    np.testing.assert_allclose(dw, want, rtol=1e-5, atol=1e-5)
