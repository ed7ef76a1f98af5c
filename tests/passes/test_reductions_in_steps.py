"""What one program reduces, as steps of a grid: its form, its values, and its plan."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import target
from pallasite import tpu as pltpu
from pallasite.passes.analysis.axis_state import state_along
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.run import run
from pallasite.passes.schedule.plan_parts import plan
from pallasite.passes.schedule.reductions_in_steps import reductions_in_steps
from pallasite.passes.schedule.split_axis import split
from pallasite.sites import kernels_in
from pallasite.target import GPUS
from tests.passes.normal.meaning import operands, outputs

F32 = jnp.float32
ONE = jax.ShapeDtypeStruct((1, 1), F32)


def at_once(x_ref, o_ref):
    o_ref[0, 0] = jnp.sum(x_ref[...])


def kept(x_ref, o_ref):
    o_ref[...] = jnp.max(x_ref[...], keepdims=True)


def in_a_loop(x_ref, o_ref):
    part = lambda i, total: total + jnp.sum(x_ref[pl.ds(i * 3, 3), :] ** 2)
    o_ref[...] = lax.fori_loop(0, x_ref.shape[0] // 3, part, 0.0)[None, None]


def in_a_while_loop(x_ref, o_ref):
    more = lambda c: c[0] < x_ref.shape[0]
    step = lambda c: (c[0] + 1, jnp.minimum(c[1], jnp.min(x_ref[c[0], :])))
    _, least = lax.while_loop(more, step, (0, jnp.float32(jnp.inf)))
    o_ref[...] = jnp.full((1, 1), least)


def of_rows(x_ref, o_ref):
    rows = jax.nn.logsumexp(x_ref[...], axis=1, keepdims=True)
    o_ref[...] = jnp.sum(rows, keepdims=True)


def of_a_product(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = jnp.sum(x * jnp.tanh(x), keepdims=True)


EVERY = [at_once, kept, in_a_loop, in_a_while_loop, of_rows, of_a_product]


def call(kernel, shape, out=ONE):
    function = lambda x: pl.pallas_call(kernel, out_shape=out)(x)
    return function, jax.ShapeDtypeStruct(shape, F32)


def made(kernel, shape, out=ONE):
    function, x = call(kernel, shape, out)
    (found,) = kernels_in(function, x)
    return run(found)


@pytest.mark.parametrize("kernel", EVERY)
def test_steps_reduce_the_same(kernel):
    one = made(kernel, (63, 517))
    stepped = reductions_in_steps(one)
    (axis,) = analyze(stepped).sequential
    assert analyze(stepped).axes[axis].size > 1
    state = state_along(stepped, axis)
    assert not state.reason
    given = operands(one)
    (want,) = outputs(one, given)
    (got,) = outputs(stepped, given)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len(split(stepped, state, 4).kernels) >= 2


def test_maxima_of_nan_and_infinities():
    one = made(kept, (63, 517))
    stepped = reductions_in_steps(one)
    (x,) = operands(one)
    for place, value in (((5, 7), np.nan), ((slice(None),), -np.inf)):
        x = x.copy()
        x[place] = value
        np.testing.assert_array_equal(outputs(stepped, [x]), outputs(one, [x]))


@pytest.mark.parametrize("kernel", EVERY)
def test_a_gpu_has_a_program_for_every_core(kernel):
    planned = plan(made(kernel, (8192, 4096)), GPUS["h200"])
    assert planned.program is not None
    assert planned.parts >= GPUS["h200"].cores - 4


def test_what_is_divided_anyway_stays_one_kernel():
    def softmax(x_ref, o_ref):
        o_ref[...] = jax.nn.softmax(x_ref[...], axis=-1)

    out = jax.ShapeDtypeStruct((4096, 1024), F32)
    assert plan(made(softmax, out.shape, out), GPUS["h200"]).program is None
    assert plan(made(at_once, (64, 64)), GPUS["h200"]).program is None


def test_an_author_may_forbid_it():
    def summed(x):
        return pl.pallas_call(
            at_once,
            out_shape=ONE,
            grid=(1,),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("sequential",)),
        )(x)

    (kernel,) = kernels_in(summed, jax.ShapeDtypeStruct((8192, 4096), F32))
    assert plan(kernel, GPUS["h200"]).program is None


@pytest.mark.parametrize("kernel", EVERY)
def test_a_cpu_divides_it_among_threads(kernel):
    function, x = call(kernel, (3000, 1501))
    x = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    want = jax.jit(function)(x)
    with target.using(replace(target.host(), threads=4)):
        jax.clear_caches()
        (found,) = kernels_in(function, x)
        assert plan(found, target.host()).program is not None
        got = jax.jit(function)(x)
        np.testing.assert_array_equal(jax.jit(function)(x), got)
    jax.clear_caches()
    np.testing.assert_allclose(got, want, rtol=1e-5)
