"""Rows padded to a power of two become blocks that hang over the array's edge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import triton as plt
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.normal.wide_blocks import wide_blocks
from pallasite.sites import kernels_in
from tests.passes.normal.meaning import assert_same_meaning

F32 = jnp.float32
X = jax.ShapeDtypeStruct((6, 13), F32)


def softmax(x_ref, o_ref):
    row, lanes = pl.program_id(0), jnp.arange(16)
    at, mask = (row, pl.ds(0, 16)), lanes < 13
    x = pl.load(x_ref, at, mask=mask, other=-jnp.inf)
    e = jnp.exp(x - x.max())
    pl.store(o_ref, at, e / e.sum(), mask=mask)


def pointers(x_ref, o_ref):
    rows = pl.program_id(0) * 4 + jnp.arange(4)
    lanes = jnp.arange(16)
    mask = (rows[:, None] < 6) & (lanes[None] < 13)
    at = rows[:, None], lanes[None]
    x = plt.load(x_ref.at[at], mask=mask, other=0.0)
    plt.store(o_ref.at[at], x - x.sum(1, keepdims=True), mask=mask)


def two_widths(x_ref, o_ref):
    row = pl.program_id(0)
    for n in (16, 32):
        lanes = jnp.arange(n)
        x = pl.load(x_ref, (row, pl.ds(0, n)), mask=lanes <= 12, other=1.0)
        x = jnp.where(lanes < 4, x * n, x)
        pl.store(o_ref, (row, pl.ds(0, n)), x, mask=lanes != 20)


def unmasked_places(x_ref, o_ref):
    row, lanes = pl.program_id(0), jnp.arange(16)
    # Element 14 is the last one of the row.
    x = pl.load(x_ref, (row, pl.ds(0, 16)), mask=lanes < 15, other=0.0)
    o_ref[row] = x[:13] + x[14]


def made(kernel, **more):
    grid = 2 if kernel is pointers else 6
    return pl.pallas_call(kernel, out_shape=X, grid=grid, **more)


@pytest.mark.parametrize("kernel", [softmax, pointers, two_widths])
@pytest.mark.parametrize("aliased", [False, True])
def test_masked_accesses_are_slices(kernel, aliased: bool):
    call = made(kernel, input_output_aliases={0: 0} if aliased else {})
    (before,) = kernels_in(call, X)
    after = normalize(before)
    assert "gather" in before.text and "gather" not in after.text
    assert "13]" not in after.text.split("map")[0].split("windows")[1]
    assert_same_meaning(before, after)


def test_what_leaves_the_array_stays():
    (kernel,) = kernels_in(made(unmasked_places), X)
    assert wide_blocks(kernel) is kernel
    assert_same_meaning(kernel, normalize(kernel), checked=False)


@pytest.mark.parametrize("kernel", [softmax, pointers, two_widths])
def test_gradients(kernel):
    x = jnp.asarray(np.random.default_rng(0).normal(size=X.shape), F32)
    weights = jnp.cos(jnp.arange(78.0)).reshape(X.shape)

    def reference(x):
        if kernel is softmax:
            return jax.nn.softmax(x)
        if kernel is pointers:
            return x - x.sum(1, keepdims=True)
        lanes = jnp.arange(13)
        return jnp.where(lanes < 4, 32 * x, x)

    got = jax.grad(lambda x: (made(kernel)(x) * weights).sum())(x)
    want = jax.grad(lambda x: (reference(x) * weights).sum())(x)
    np.testing.assert_allclose(got, want, atol=1e-6)
