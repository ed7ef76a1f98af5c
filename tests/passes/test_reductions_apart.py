"""What depends on a reduction of a whole array, as kernels that fill a chip."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import target
from pallasite.errors import PerformanceWarning
from pallasite.passes.run import run
from pallasite.passes.schedule.plan_parts import plan
from pallasite.passes.schedule.reductions_apart import first_reduction
from pallasite.sites import kernels_in
from pallasite.target import GPUS
from tests.passes.normal.meaning import operands, outputs

F32 = jnp.float32


def unit_norm(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = x * lax.rsqrt(jnp.sum(x * x))


def between_extremes(x_ref, o_ref):
    low, high = jnp.min(x_ref[...]), jnp.max(x_ref[...])
    o_ref[...] = (x_ref[...] - low) / (high - low)


def softmax_of_all(x_ref, o_ref):
    p = jnp.exp(x_ref[...] - jnp.max(x_ref[...]))
    o_ref[...] = p / jnp.sum(p)


def standardised(x_ref, o_ref):
    mean = jnp.mean(x_ref[...])
    spread = jnp.mean((x_ref[...] - mean) ** 2)
    o_ref[...] = (x_ref[...] - mean) * lax.rsqrt(spread + 1e-5)


EVERY = [unit_norm, between_extremes, softmax_of_all, standardised]


def call(kernel, shape):
    x = jax.ShapeDtypeStruct(shape, F32)
    return lambda x: pl.pallas_call(kernel, out_shape=x)(x), x


def made(kernel, shape):
    (found,) = kernels_in(*call(kernel, shape))
    return run(found)


def ran(program, arrays):
    arrays = list(arrays)
    for step in program.steps:
        given = zip(step.operands, step.kernel.inputs, strict=True)
        arrays += outputs(
            step.kernel, [arrays[n].reshape(r.ref.shape) for n, r in given]
        )
    return [arrays[result.array] for result in program.results]


@pytest.mark.parametrize("kernel", EVERY)
def test_two_kernels_compute_what_one_does(kernel):
    one = made(kernel, (280, 517))
    cut = first_reduction(one)
    (x,) = operands(one)
    (between,) = outputs(cut.first, [x])
    given = {cut.array: between}
    (got,) = outputs(cut.second, [given.get(ref, x) for ref in cut.second.inputs])
    np.testing.assert_array_equal(got, *outputs(one, [x]))


@pytest.mark.parametrize("kernel", EVERY)
def test_a_gpu_has_programs_for_all_cores(kernel):
    program = plan(made(kernel, (8192, 2048)), GPUS["h200"]).program
    assert program is not None
    assert len(program.kernels) >= 3
    small = made(kernel, (2048, 512))
    x = operands(small)
    program = plan(small, replace(GPUS["h200"], launch_seconds=1e-9)).program
    assert program is not None
    (got,), (want,) = ran(program, x), outputs(small, x)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6)


def test_what_is_small_or_divided_stays_one_kernel():
    def softmax(x_ref, o_ref):
        o_ref[...] = jax.nn.softmax(x_ref[...], axis=-1)

    assert plan(made(unit_norm, (64, 64)), GPUS["h200"]).program is None
    assert plan(made(softmax, (4096, 2048)), GPUS["h200"]).program is None


@pytest.mark.parametrize("axis", [None, 0])
def test_a_large_result_that_is_only_stored_is_not_cut_again(axis):
    """Each cut would leave a kernel like the one before, without end."""

    def least(x_ref, o_ref):
        sums = jnp.cumsum(x_ref[...], axis=1)
        found = jnp.argmin(sums, axis=0, keepdims=axis is None)
        o_ref[...] = found.astype(jnp.int32)

    n = 70000
    x = jax.ShapeDtypeStruct((16, n), F32)
    out = jax.ShapeDtypeStruct((1, n) if axis is None else (n,), jnp.int32)
    (kernel,) = kernels_in(lambda x: pl.pallas_call(least, out_shape=out)(x), x)
    assert first_reduction(run(kernel)) is None
    assert plan(kernel, GPUS["h200"]).program is None


@pytest.mark.parametrize("kernel", EVERY)
def test_a_cpu_divides_them_among_threads(kernel):
    function, x = call(kernel, (3000, 1501))
    x = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    want = jax.jit(function)(x)
    with target.using(replace(target.host(), threads=8)):
        jax.clear_caches()
        got = jax.jit(function)(x)
        np.testing.assert_array_equal(jax.jit(function)(x), got)
    jax.clear_caches()
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-7)


def test_what_cannot_be_divided_is_said():
    def summed_along_all(x_ref, o_ref):
        x = x_ref[...]
        for axis in (0, 1, 0):
            x = jnp.cumsum(x, axis=axis)
        o_ref[...] = x

    serial = plan(made(summed_along_all, (4096, 2048)), GPUS["h200"]).serial
    assert serial.axis is None and "one program does" in serial.reason
    function, x = call(summed_along_all, (4096, 2048))
    with target.using(replace(target.host(), threads=16)):
        jax.clear_caches()
        with pytest.warns(PerformanceWarning, match="what one program does") as said:
            jax.jit(function).lower(x)
    jax.clear_caches()
    assert "summed_along_all" in str(said[0].message)
    assert "test_reductions_apart.py" in str(said[0].message)
