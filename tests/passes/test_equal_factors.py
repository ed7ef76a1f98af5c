"""Dots with a matrix of equal numbers are sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.verify import verify
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.optimise.equal_factors import equal_factors
from pallasite.sites import kernels_in
from tests.fuzz.agreement import run_numpy

F32, BF16, I8, I32 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32


def dot(a, b, left: int, right: int, dtype=F32):
    dims = (((left,), (right,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


SUMS = {
    "columns": lambda x: dot(jnp.ones((8, 11), x.dtype), x, 1, 0),
    "rows": lambda x: dot(x, jnp.full((7, 3), -0.5, x.dtype), 1, 0),
    "turned": lambda x: dot(jnp.ones((7, 3), x.dtype), x, 0, 1),
    "padded": lambda x: dot(
        jnp.ones((8, 16), x.dtype), jnp.pad(x[:3], ((0, 5), (0, 0))), 0, 0
    ),
}
OTHERS = {
    "a third": lambda x: dot(jnp.full((8, 11), 0.3, x.dtype), x, 1, 0),
    "zero": lambda x: dot(jnp.zeros((8, 11), x.dtype), x, 1, 0),
    "narrow sums": lambda x: dot(jnp.ones((8, 11), BF16), x.astype(BF16), 1, 0, BF16),
}


def kernel(form, x) -> Kernel:
    def body(x_ref, o_ref):
        o_ref[...] = form(x_ref[...])

    out = jax.eval_shape(form, x)
    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    (made,) = kernels_in(pl.pallas_call(body, shape, interpret=True), x)
    return normalize(made)


def agree(before: Kernel, after: Kernel, x) -> None:
    (want,), (got,) = (run_numpy(k, [x]) for k in (before, after))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_equal_factors_are_sums(name: str, dtype):
    x = np.random.default_rng(0).normal(size=(11, 7)).astype(dtype)
    before = kernel(SUMS[name], x)
    after = equal_factors(before)
    verify(after)
    names = [op.name for op in walk(after.body)]
    assert not {"dot", "pad"} & set(names) and "reduce" in names
    agree(before, after, x)
    x[2, 3] = np.inf
    agree(before, after, x)


def test_sums_of_integers():
    x = np.random.default_rng(0).integers(-99, 99, (11, 7)).astype(np.int8)
    form = lambda x: dot(jnp.ones((8, 11), I8), x, 1, 0, I32)
    before = kernel(form, x)
    after = equal_factors(before)
    assert "dot" not in after.text
    agree(before, after, x)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str):
    before = kernel(OTHERS[name], np.ones((11, 7), np.float32))
    assert equal_factors(before) is before
