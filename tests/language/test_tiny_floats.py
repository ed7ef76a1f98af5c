"""f4e2m1fn and f8e8m0fnu through pallas_call: emulation, checked mode, a CPU."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.ir.types import DTYPES

S = jax.ShapeDtypeStruct
TINY = [DTYPES["f4e2m1fn"].np, DTYPES["f8e8m0fnu"].np]


def agree(kernel, want, *args):
    for mode in (True, pl.Checked(), False):
        call = pl.pallas_call(kernel, S(want.shape, want.dtype), interpret=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it runs natively
            got = np.asarray(call(*args))
        np.testing.assert_array_equal(got.astype("f4"), want.astype("f4"))


def powers(dtype, *shape):
    rng = np.random.default_rng(0)
    return np.exp2(rng.integers(-1, 3, shape)).astype(dtype)


@pytest.mark.parametrize("dtype", TINY, ids=str)
def test_blocks_at_the_edge_and_in_any_order(dtype):
    x = powers(dtype, 7, 16)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[jnp.array([-1, 0])] = x_ref[jnp.array([0, -1])]
        pl.store(o_ref, (pl.ds(2, 2), slice(None)), x_ref[:2], mask=x_ref[:2] > 1)

    want = x.copy()
    want[[-1, 0]] = x[[0, -1]]
    want[2:4] = np.where(x[:2].astype("f4") > 1, x[:2], x[2:4])
    agree(kernel, want, x)

    def halves(x_ref, o_ref):
        o_ref[...] = x_ref[...] * jnp.full(x_ref.shape, 0.5, dtype)

    spec = pl.BlockSpec((4, 16), lambda i: (i, 0))
    call = pl.pallas_call(halves, S(x.shape, dtype), grid=2, in_specs=[spec],
                          out_specs=spec)  # fmt: skip
    want = (x.astype("f4") / 2).astype(dtype)
    np.testing.assert_array_equal(np.asarray(call(x)).view("u1"), want.view("u1"))


@pytest.mark.parametrize("dtype", TINY, ids=str)
def test_products(dtype):
    x, y = powers(dtype, 8, 16), powers(dtype, 16, 8)

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = lax.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    agree(kernel, x.astype("f4") @ y.astype("f4"), x, y)


REDUCTIONS = {
    "max": (lambda x: lax.reduce_max(x, (1,)), lambda x: x.max(1)),
    "min": (lambda x: lax.reduce_min(x, (1,)), lambda x: x.min(1)),
    "sum": (lambda x: lax.reduce_sum(x[:, :1], (1,)), lambda x: x[:, 0]),
    "cummax": (lambda x: lax.cummax(x, axis=1),
               lambda x: np.maximum.accumulate(x, axis=1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TINY, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, dtype):
    reduce, numpy_reduce = REDUCTIONS[name]
    x = powers(dtype, 8, 16)

    def kernel(x_ref, o_ref):
        o_ref[...] = reduce(x_ref[...])

    agree(kernel, numpy_reduce(x.astype("f4")).astype(dtype), x)


@pytest.mark.parametrize("dtype", TINY, ids=str)
def test_positions(dtype):
    x = powers(dtype, 8, 16)

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.argmax(x_ref[...], axis=1)

    agree(kernel, x.astype("f4").argmax(1).astype(np.int32), x)
