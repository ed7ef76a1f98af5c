"""Sums of products of two matrices become dots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Kernel, walk
from pallasite.passes.normal.exact_factors import exact_factors
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.normal.sums_of_products import sums_of_products
from pallasite.sites import kernels_in
from tests.passes.normal.meaning import outputs

F32, BF16 = jnp.float32, jnp.bfloat16
FORMS = {
    "rows": lambda q, k: (q[:, None, :] * k[None, :, :]).sum(2),
    "other order": lambda q, k: (k[None, :, :] * q[:, None, :]).sum(2),
    "columns": lambda q, k: (q[:, :, None] * k.T[None, :, :]).sum(1),
    "kept": lambda q, k: (q[:, None, :] * k).sum(2, keepdims=True)[:, :, 0],
    "transposed": lambda q, k: (q[None, :, :] * k[:, None, :]).sum(2).T,
}
OTHERS = {
    "vector": lambda q, k: (q[:1, :] * k).sum(1, keepdims=True).T * q[:, :1],
    "diagonal": lambda q, k: (q * k[:5]).sum(1, keepdims=True) * k[:, 0][None],
    "maximum": lambda q, k: (q[:, None, :] * k[None, :, :]).max(2),
    "scaled": lambda q, k: (q[:, None, :] * k[None, :, :] + 1.0).sum(2),
}


def kernel(form, dtype=F32) -> Kernel:
    def body(q_ref, k_ref, o_ref):
        q, k = q_ref[...].astype(F32), k_ref[...].astype(F32)
        o_ref[...] = form(q, k)

    shape = jax.ShapeDtypeStruct((5, 11), F32)
    given = [jax.ShapeDtypeStruct((n, 33), dtype) for n in (5, 11)]
    (made,) = kernels_in(pl.pallas_call(body, shape, interpret=True), *given)
    return normalize(made)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_product_of_matrices_is_a_dot(name: str, dtype):
    before = kernel(FORMS[name], dtype)
    after = exact_factors(sums_of_products(before))
    (dot,) = (op for op in walk(after.body) if op.name == "dot")
    assert dot.operands[0].type.dtype.name == ("f32" if dtype == F32 else "bf16")
    assert "[5,11,33]" not in after.text and "[11,5,33]" not in after.text
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((n, 33)).astype(dtype) for n in (5, 11)]
    want, got = outputs(before, arrays)[0], outputs(after, arrays)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name: str):
    before = kernel(OTHERS[name])
    assert sums_of_products(before) is before
