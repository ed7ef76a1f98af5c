"""Chunks that hand on a state have a program for each in their backward kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward_choice
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import calls_in

F32, I32 = jnp.float32, jnp.int32


def product(x, y, sides=((1,), (0,))):
    return lax.dot_general(x, y, (sides, ((), ())), preferred_element_type=F32)


def causal(size: int):
    row, column = (lax.broadcasted_iota(I32, (size, size), d) for d in (0, 1))
    return row >= column


def gated(q, k, v, g, chunk: int):
    """Decays by element; the state in scratch, steps of the grid."""

    def kernel(q_ref, k_ref, v_ref, g_ref, o_ref, state):
        @pl.when(pl.program_id(1) == 0)
        def _():
            state[...] = jnp.zeros_like(state)

        q, k, v = q_ref[...], k_ref[...], v_ref[...]
        along = jnp.cumsum(g_ref[...])
        gap = along[:, None] - along[None, :]
        keep = causal(chunk)
        decay = jnp.where(keep, jnp.exp(jnp.where(keep, gap, 0)), 0)
        s = (product(q, k, ((1,), (1,))) * decay).astype(v.dtype)
        grown = q.astype(F32) * jnp.exp(along)[:, None]
        o = product(s, v) + product(grown, state[...])
        faded = k.astype(F32) * jnp.exp(along[chunk - 1] - along)[:, None]
        more = product(faded, v.astype(F32), ((0,), (0,)))
        state[...] = jnp.exp(along[chunk - 1]) * state[...] + more
        o_ref[...] = o.astype(o_ref.dtype)

    heads, n, depth = q.shape
    block = pl.BlockSpec((None, chunk, depth), lambda h, t: (h, t, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(heads, n // chunk),
        in_specs=[block] * 3 + [pl.BlockSpec((None, chunk), lambda h, t: (h, t))],
        out_specs=block,
        scratch_shapes=[pltpu.VMEM((depth, depth), F32)],
    )(q, k, v, g)


def plain_gated(q, k, v, g, chunk: int):
    along = jnp.cumsum(g, axis=1)
    keep = causal(q.shape[1])
    gap = jnp.where(keep, along[:, :, None] - along[:, None, :], 0)
    s = jnp.einsum("hld,hmd->hlm", q, k, preferred_element_type=F32) * jnp.exp(gap)
    s = jnp.where(keep, s, 0).astype(v.dtype)
    return jnp.einsum("hlm,hmd->hld", s, v)


def normalised(q, k, v, g, chunk: int):
    """Two states that a loop carries: of the values, and of what divides them."""

    def kernel(q_ref, k_ref, v_ref, g_ref, o_ref):
        def step(t, states):
            state, total = states
            at = pl.ds(t * chunk, chunk)
            q, k = (jnp.exp(0.1 * ref[at, :].astype(F32)) for ref in (q_ref, k_ref))
            v = v_ref[at, :].astype(F32) * g_ref[at][:, None]
            s = jnp.where(causal(chunk), product(q, k, ((1,), (1,))), 0)
            o = product(s, v) + product(q, state)
            by = s.sum(axis=1) + (q * total[None]).sum(axis=1)
            o_ref[at, :] = (o / by[:, None]).astype(o_ref.dtype)
            return state + product(k, v, ((0,), (0,))), total + k.sum(axis=0)

        depth = q_ref.shape[1]
        start = (jnp.zeros((depth, depth), F32), jnp.zeros((depth,), F32))
        lax.fori_loop(0, q_ref.shape[0] // chunk, step, start)

    heads, n, depth = q.shape
    whole = pl.BlockSpec((None, n, depth), lambda h: (h, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(heads,),
        in_specs=[whole] * 3 + [pl.BlockSpec((None, n), lambda h: (h, 0))],
        out_specs=whole,
    )(q, k, v, g)


def plain_normalised(q, k, v, g, chunk: int):
    q, k = (jnp.exp(0.1 * x.astype(F32)) for x in (q, k))
    s = jnp.where(causal(q.shape[1]), jnp.einsum("hld,hmd->hlm", q, k), 0)
    o = jnp.einsum("hlm,hmd->hld", s, v.astype(F32) * g[:, :, None])
    return (o / s.sum(axis=2, keepdims=True)).astype(v.dtype)


def corrected(q, k, v, g, chunk: int):
    """A step's addend depends on the state (a delta rule without its inverse)."""

    def kernel(q_ref, k_ref, v_ref, g_ref, o_ref, state):
        @pl.when(pl.program_id(1) == 0)
        def _():
            state[...] = jnp.zeros_like(state)

        q, k, v = (ref[...].astype(F32) for ref in (q_ref, k_ref, v_ref))
        left = g_ref[...][:, None] * (v - jnp.tanh(product(k, state[...])))
        s = jnp.where(causal(chunk), product(q, k, ((1,), (1,))), 0)
        o_ref[...] = (product(q, state[...]) + product(s, left)).astype(o_ref.dtype)
        state[...] += product(k, left, ((0,), (0,)))

    heads, n, depth = q.shape
    block = pl.BlockSpec((None, chunk, depth), lambda h, t: (h, t, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(heads, n // chunk),
        in_specs=[block] * 3 + [pl.BlockSpec((None, chunk), lambda h, t: (h, t))],
        out_specs=block,
        scratch_shapes=[pltpu.VMEM((depth, depth), F32)],
    )(q, k, v, g)


def plain_corrected(q, k, v, g, chunk: int):
    def step(state, given):
        q, k, v, g = (x.astype(F32) for x in given)
        left = g[:, None] * (v - jnp.tanh(k @ state))
        s = jnp.where(causal(chunk), q @ k.T, 0)
        return state + k.T @ left, q @ state + s @ left

    def head(*given):
        parts = [x.reshape(-1, chunk, *x.shape[1:]) for x in given]
        start = jnp.zeros((q.shape[2],) * 2, F32)
        return lax.scan(step, start, tuple(parts))[1].reshape(q.shape[1:])

    return jax.vmap(head)(q, k, v, g).astype(v.dtype)


FUNCTIONS = [
    (gated, plain_gated),
    (normalised, plain_normalised),
    (corrected, plain_corrected),
]


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
@pytest.mark.parametrize(("ours", "plain"), FUNCTIONS)
def test_gradients_are_those_of_the_plain_function(ours, plain, dtype, monkeypatch):
    grid_of = lambda kernel: Pipeline.of(find_pipeline(kernel)).grid
    fits = lambda kernel, _: "d_q" not in kernel.name or grid_of(kernel) != (2,)
    monkeypatch.setattr(backward_choice, "may_fit", fits)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (0.3 * jax.random.normal(key, (2, 48, 8)) for key in keys[:3])
    given = [x.astype(dtype) for x in (q, k, v)]
    given.append(-jax.random.uniform(keys[3], (2, 48)))

    def loss(f, *operands):
        o = f(*operands, 16).astype(F32)
        return (o * jnp.cos(jnp.arange(o.size)).reshape(o.shape)).sum()

    gradient = lambda f: jax.grad(functools.partial(loss, f), (0, 1, 2, 3))
    with config.override(target="gpu:h200"):
        calls = calls_in(gradient(ours), *given)
        made = jax.make_jaxpr(gradient(ours))(*given)
    assert len(calls) >= 4, [call.kernel.name for call in calls]
    got = jax.core.eval_jaxpr(made.jaxpr, made.consts, *given)
    close = dict.fromkeys(("rtol", "atol"), 3e-2 if dtype == jnp.bfloat16 else 1e-4)
    for a, b in zip(got, gradient(plain)(*given), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), **close)


def test_every_step_is_a_program():
    bf16 = [jax.ShapeDtypeStruct((32, 2048, 128), jnp.bfloat16)] * 3
    run = functools.partial(gated, chunk=64)
    with config.override(target="gpu:h200"):
        (call,) = calls_in(run, *bf16, jax.ShapeDtypeStruct((32, 2048), F32))
        steps = chosen_plan(call.kernel, call.backend).steps
    grids = [Pipeline.of(find_pipeline(step.kernel)).grid for step in steps]
    assert grids[:2] == [(32,)] * 2
    assert {*grids[2:]} == {(32, 32)}
    states = [ref.ref for step in steps[:2] for ref in step.kernel.outputs]
    assert {(ref.shape, str(ref.dtype)) for ref in states} == {((32, 4096, 128), "f32")}
