"""Backward kernels of whole operands in a block: cut to what a GPU's programs hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.backends import base
from pallasite.passes.schedule import gpu_blocks
from pallasite.sites import calls_in
from pallasite.target import chip
from tests.xla import pull_back, put

F32, BF16 = jnp.float32, jnp.bfloat16


def kernels_of(function, *shapes, dtype=BF16):
    """The backward kernels on an H200, all of which Triton must take."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with config.override(target="gpu:h200"):
        (call,) = calls_in(function, *operands)
        kernels = [step.kernel for step in chosen_plan(call.kernel).steps]
    for kernel in kernels:
        options = base.Options(chip=chip("h200"))
        assert base.Compiled(base.get("triton"), kernel, options)["scheduled"]
    return kernels


def assert_right(function, reference, *shapes, tol=2e-5):
    arrays = [put(np.random.default_rng(n).normal(size=s), F32)
              for n, s in enumerate(shapes)]  # fmt: skip
    seed = jnp.cos(jnp.arange(reference(*arrays).size).reshape(shapes[0]) * 1.0)
    want = pull_back(reference, arrays, seed)
    with config.override(target="gpu:h200"):
        got = pull_back(function, arrays, seed)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tol, atol=tol * abs(theirs).max())


# --- rows of scores for all keys ---


def softmax(s):
    return jax.nn.softmax(s, axis=-1)  # which stops the gradient of the maximum


def by_hand(s):
    p = jnp.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def partly_stopped(s):
    """Not a softmax to derivatives: its maximum has a cotangent."""
    high = s.max(axis=-1, keepdims=True)
    p = jnp.exp(s - lax.stop_gradient(high))
    return p / jnp.exp(s - high).sum(axis=-1, keepdims=True)


def whole_keys(q, k, v, weights, rows):
    def kernel(q_ref, k_ref, v_ref, o_ref):
        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=F32)
        o_ref[...] = (weights(s).astype(v_ref.dtype) @ v_ref[...]).astype(o_ref.dtype)

    each = pl.BlockSpec((rows, q.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec(k.shape, lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0] // rows,),
        in_specs=[each, whole, whole],
        out_specs=each,
    )(q, k, v)


@pytest.mark.parametrize("weights", [softmax, by_hand])
def test_all_keys_at_once_become_blocks_of_keys(weights):
    run = functools.partial(whole_keys, weights=weights, rows=64)
    made = kernels_of(run, (2048, 128), (1024, 128), (1024, 128))
    assert len(made) == 3  # statistics, over queries, over keys
    assert all("f32[1024" not in kernel.text for kernel in made)


@pytest.mark.parametrize("weights", [softmax, by_hand, partly_stopped])
def test_gradient_of_all_keys_at_once(weights, monkeypatch):
    monkeypatch.setattr(gpu_blocks, "TILE_ELEMENTS", 16)
    monkeypatch.setattr(gpu_blocks, "SUMMED_ELEMENTS", 64)
    monkeypatch.setattr(gpu_blocks, "STEP", 8)
    run = functools.partial(whole_keys, weights=weights, rows=4)
    reference = lambda q, k, v: weights(q @ k.T) @ v
    assert_right(run, reference, (12, 8), (24, 8), (24, 8))
