"""Cotangents of the weights of recurrent layers are products over all steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward
from pallasite.ir.nodes import walk
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine

F32 = jnp.float32
GPU = Machine.usual(GPUS["h200"])
sigmoid = jax.nn.sigmoid


def product(h, w):
    return jnp.dot(h.astype(w.dtype), w, preferred_element_type=F32)


def rnn(state, x, w):
    (h,) = state
    return (jnp.tanh(x.astype(F32) + product(h, w)),)


def gru(state, x, w):
    (h,) = state
    d, y, x = h.shape[1], product(h, w), x.astype(F32)
    r = sigmoid(x[:, :d] + y[:, :d])
    z = sigmoid(x[:, d : 2 * d] + y[:, d : 2 * d])
    new = jnp.tanh(x[:, 2 * d :] + r * y[:, 2 * d :])
    return ((1 - z) * new + z * h,)


def lstm(state, x, w):
    h, c = state
    d, y = h.shape[1], product(h, w) + x.astype(F32)
    i, f, o = (sigmoid(y[:, k * d : (k + 1) * d]) for k in range(3))
    c = f * c + i * jnp.tanh(y[:, 3 * d :])
    return o * jnp.tanh(c), c


def projected(state, x, w):
    """A gate of the input alone: no product waits for the step before."""
    (h,) = state
    y = product(x, w)
    d = h.shape[1]
    z = sigmoid(y[:, :d])
    return ((1 - z) * h + z * y[:, d:],)


CELLS = {rnn: (1, 1), gru: (3, 1), lstm: (4, 2), projected: (2, 1)}


def recurrent(cell, rows: int):
    """A layer whose program has some rows, and a grid step for each step of time."""
    gates, states = CELLS[cell]

    def kernel(x_ref, w_ref, o_ref, *refs):
        @pl.when(pl.program_id(1) == 0)
        def _():
            for ref in refs:
                ref[...] = jnp.zeros_like(ref)

        new = cell(tuple(ref[...] for ref in refs), x_ref[...], w_ref[...])
        for ref, value in zip(refs, new, strict=True):
            ref[...] = value
        o_ref[...] = new[0]

    def function(x, w):
        b, n, width = x.shape
        d = w.shape[1] // gates
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((b, n, d), F32),
            grid=(b // rows, n),
            in_specs=[
                pl.BlockSpec((rows, None, width), lambda i, t: (i, t, 0)),
                pl.BlockSpec(w.shape, lambda i, t: (0, 0)),
            ],
            out_specs=pl.BlockSpec((rows, None, d), lambda i, t: (i, t, 0)),
            scratch_shapes=[pltpu.VMEM((rows, d), F32)] * states,
        )(x, w)

    return function


def plain(cell):
    gates, states = CELLS[cell]

    def function(x, w):
        def step(state, x):
            new = cell(state, x, w)
            return new, new[0]

        start = (jnp.zeros((x.shape[0], w.shape[1] // gates)),) * states
        return jax.lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    return function


def shapes(cell, b: int, n: int, d: int):
    gates, _ = CELLS[cell]
    return (b, n, d if cell is projected else gates * d), (d, gates * d)


@pytest.mark.parametrize("cell", [rnn, gru, lstm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("b, n, d", [(8, 5, 16), (4, 1, 12), (12, 3, 64)])
def test_the_products_of_all_steps_have_a_kernel(monkeypatch, cell, b, n, d):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (
        jax.random.normal(k, s)
        for k, s in zip(keys, shapes(cell, b, n, d), strict=False)
    )
    w = w / d**0.5
    (call,) = calls_in(recurrent(cell, 4), x, w)
    made = backward._plan(call.kernel, (True, True), (True,), GPU)
    ways = [way for way in made.choices if len(way.steps) > 1]
    if n > 1:
        assert ways
    for way in ways:
        *_, last = way.steps
        assert sum(op.name == "dot" for op in walk(last.kernel.body)) == 1
        chosen = replace(made, steps=way.steps)
        monkeypatch.setattr(backward, "plan", lambda *_, chosen=chosen: chosen)
        monkeypatch.setattr(backward, "keeping_plan", lambda *_: None)
        g = jax.random.normal(keys[2], (b, n, d))
        got = backward.cotangents(call, [x, w], [g], (True, True))
        want = jax.vjp(plain(cell), x, w)[1](g)
        for a, e in zip(got, want, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cell", list(CELLS), ids=lambda f: f.__name__)
@pytest.mark.parametrize("d", [192, 256])
def test_large_cells_are_native_on_a_gpu(cell, d):
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes(cell, 64, 32, d)]
    loss = lambda *a: jnp.sum(recurrent(cell, 16)(*a))
    with config.override(target="gpu:h200"):
        report = pl.explain(jax.grad(loss, (0, 1)), "gpu:h200", measure=False)
        found = report(*structs).kernels
    assert found and all(each.backend in ("triton", "cuda", "xla") for each in found)
