"""Approximations are taken where a result is rounded to 16 bits anyway, only there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated

ROUGH, EXACT = ("math.exp", "arith.divf"), ("__nv_expf", "tt.precise_divf")


def text_of(body, dtype, *more):
    """TTIR of a kernel that stores `body(x)` of an f32 block x, as `dtype`."""

    def kernel(x_ref, *o_refs):
        found = body(x_ref[...])
        found = found if isinstance(found, tuple) else (found,)
        for ref, value in zip(o_refs, found, strict=True):
            ref[...] = value.astype(ref.dtype)

    outs = [jax.ShapeDtypeStruct((8, 128), d) for d in (dtype, *more)]
    call = pl.pallas_call(kernel, out_shape=outs)
    (kernel,) = kernels_in(call, np.zeros((8, 128), np.float32))
    return compiled(kernel)[0]


def softmax(x):
    e = jnp.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_softmax_to_narrow_floats(dtype):
    text = text_of(softmax, dtype)
    assert all(op in text for op in ROUGH)
    assert not any(op in text for op in EXACT)


def test_softmax_in_f32_stays_exact():
    text = text_of(softmax, jnp.float32)
    assert all(op in text for op in EXACT)
    assert not any(op in text for op in ROUGH)


SEEN = {
    "difference": lambda x: jnp.exp(x) - 1,
    "argument": lambda x: jnp.sin(jnp.exp(x)),
    "comparison": lambda x: jnp.where(jnp.exp(x) > 1, x, 0.0),
    "integer": lambda x: jnp.exp(x).astype(jnp.int32).astype(jnp.float32),
    "product of f32": lambda x: jnp.dot(jnp.exp(x), x.T),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_shows_the_last_bits_stays_exact(name):
    body = SEEN[name]
    wide = lambda x: jnp.broadcast_to(body(x)[:, :1], x.shape)
    text = text_of(wide if name == "product of f32" else body, jnp.bfloat16)
    assert "__nv_expf" in text and "math.exp" not in text


def test_a_second_use_in_f32_is_exact():
    text = text_of(lambda x: (jnp.exp(x), jnp.exp(x)), jnp.bfloat16, jnp.float32)
    assert "__nv_expf" in text and "math.exp" not in text


def test_sums_carried_through_a_loop():
    """As in attention: carried along, and rounded after the last step."""

    def body(x):
        step = lambda i, acc: 0.5 * acc + jnp.exp(x * i.astype(jnp.float32))
        return jax.lax.fori_loop(0, 8, step, jnp.zeros_like(x))

    assert "math.exp" in text_of(body, jnp.bfloat16)
    assert "__nv_expf" in text_of(body, jnp.float32)


def test_reductions_of_all_elements_move_none():
    text = text_of(lambda x: jnp.broadcast_to(x.sum(), x.shape), jnp.float32)
    assert "allow_reorder" in text and text.count('"tt.reduce"') == 1


@pytest.mark.parametrize("of_bytes", [True, False])
def test_pieces_of_f32_are_all_of_it(of_bytes: bool):
    """Rows that ones select are what they were, to the bit; others are not finite."""
    order = np.random.default_rng(0).permutation(32)
    ones = np.eye(32, dtype=np.float32)[order]
    bits = np.random.default_rng(1).integers(0, 1 << 32, (32, 64), np.uint32)
    x = (bits & 0x7FFFFF | 0x3F800000 | bits & 0x80000000).view(np.float32)
    x[:, :8] *= np.logspace(-30, 35, 8, dtype=np.float32)
    x[3, 9], x[4, 10], x[5, 11] = np.inf, -np.inf, np.nan
    if of_bytes:  # rounded to bf16 it would be infinite
        x[6, 12] = np.finfo(np.float32).max

    def kernel(order_ref, ones_ref, x_ref, o_ref):
        hot = abs(order_ref[...] - lax.broadcasted_iota(jnp.int32, (32, 32), 1)) < 1
        hot = hot.astype(jnp.float32) if of_bytes else ones_ref[...].astype(jnp.float32)
        o_ref[...] = jnp.dot(hot, x_ref[...], precision="highest")

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, jnp.float32))
    given = [order.astype(np.int32)[:, None], ones.astype(jnp.bfloat16), x]
    (made,) = kernels_in(call, *given)
    text, _ = compiled(run(made))
    assert text.count("tt.dot") == 3
    (got,) = simulated(run(made), given)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, ones @ x)
