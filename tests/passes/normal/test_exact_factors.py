"""Dots of what their f32 operands were widened from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.ir.nodes import Kernel, walk
from pallasite.passes.normal.exact_factors import exact_factors
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.normal.sums_of_products import sums_of_products
from pallasite.sites import kernels_in
from tests.backends.triton import harness
from tests.passes.normal.meaning import outputs

F32, BF16, F16, I8 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8
M, K, N = 24, 40, 33


def widened(x, y):
    return jnp.dot(x.astype(F32), y.astype(F32))


def turned(x, y):
    return lax.dot_general(x.T.astype(F32), y.astype(F32), (((0,), (0,)), ((), ())))


def highest(x, y):
    return jnp.dot(x.astype(F32), y.astype(F32), precision="highest")


def one_hot(x, y):
    rows = lax.broadcasted_iota(jnp.int32, (M, K), 1)
    hot = (x[:, :1].astype(jnp.int32) == rows).astype(F32)
    return jnp.dot(hot, y.astype(F32))


def chosen(x, y):
    return jnp.dot(jnp.where(x > 0, 1.0, -0.5), y.astype(F32))


def summed(x, y):
    return (x.astype(F32)[:, None, :] * y.T.astype(F32)[None]).sum(axis=2)


CASES = {
    "bf16": (widened, BF16, BF16, ("bf16", "bf16")),
    "f16": (widened, F16, F16, ("f16", "f16")),
    "bytes": (widened, I8, BF16, ("bf16", "bf16")),
    "left": (widened, BF16, F32, ("bf16", "f32")),
    "right": (turned, F32, BF16, ("f32", "bf16")),
    "apart": (widened, BF16, F16, ("bf16", "f32")),
    "highest": (highest, BF16, F32, ("bf16", "f32")),
    "one hot": (one_hot, F32, F32, ("bf16", "f32")),
    "chosen": (chosen, F32, BF16, ("bf16", "bf16")),
    "sum": (summed, BF16, F32, ("bf16", "f32")),
    "wide": (widened, F32, F32, ("f32", "f32")),
    "half": (widened, F32, F16, ("f32", "f32")),
}


def kernel_of(body, *types) -> Kernel:
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = body(x_ref[...], y_ref[...])

    shape = jax.ShapeDtypeStruct((M, N), F32)
    given = [
        jax.ShapeDtypeStruct(s, t) for s, t in zip(((M, K), (K, N)), types, strict=True)
    ]
    (made,) = kernels_in(pl.pallas_call(kernel, shape, interpret=True), *given)
    return normalize(made)


def arrays(kernel):
    rng = np.random.default_rng(0)
    return [
        (10 * rng.standard_normal(p.ref.shape)).astype(p.ref.dtype.np)
        for p in kernel.inputs
    ]


@pytest.mark.parametrize("name", CASES)
def test_types(name):
    body, *types, wanted = CASES[name]
    before = sums_of_products(kernel_of(body, *types))
    after = exact_factors(before)
    (dot,) = (op for op in walk(after.body) if op.name == "dot")
    assert tuple(v.type.dtype.name for v in dot.operands) == wanted
    assert (after is before) == (name in ("wide", "half"))
    given = arrays(before)
    want, got = outputs(before, given)[0], outputs(after, given)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
    text, _ = harness.compiled(before)
    dots = [line for line in text.splitlines() if "tt.dot" in line]
    wanted_dots = 1 if wanted[0] == wanted[1] else 3
    # Rows that numbers pick are a gather (`one_hots.py`).
    assert len(dots) == (0 if name == "one hot" else wanted_dots)
    assert all("f32> *" not in line for line in dots) or name in ("wide", "half")
    (got,) = harness.simulated(before, given)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


def test_other_precisions_and_types_stay():
    tf32 = lambda x, y: jnp.dot(x.astype(F32), y.astype(F32), precision="high")
    short = lambda x, y: jnp.dot(x, y).astype(F32)
    for body in (tf32, short):
        before = kernel_of(body, BF16, BF16)
        assert exact_factors(before) is before


@pytest.mark.parametrize("other", [BF16, I8])
def test_numbers_that_are_not_finite(other):
    kernel = kernel_of(widened, F32, other)
    x, y = arrays(kernel)
    y = np.abs(y) + np.ones_like(y)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = np.inf, -np.inf, np.nan, 1e38
    if other == BF16:
        y[5, 0], x[:, 5] = np.inf, 1.0 - 2.0**-12  # its pieces have both signs
    with np.errstate(all="ignore"):
        (want,) = outputs(kernel, [x, y])
    (got,) = harness.simulated(kernel, [x, y])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
