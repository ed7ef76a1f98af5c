"""Reverses of programs that shift tiles along all of a sequence, in blocks of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.autodiff import backward, row_blocks
from pallasite.autodiff.explain_grad import full_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import kernels_in
from pallasite.target import Machine, chip

LENGTH, WIDTH = 64, 12


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(row_blocks, "LARGE", 128)
    monkeypatch.setattr(row_blocks, "MOST", 16 * WIDTH)
    monkeypatch.setattr(backward, "chip_for", lambda backend: chip("h200"))


def call(body):
    """A program per sequence has all of time."""

    def run(x, w):
        spec = pl.BlockSpec((None, LENGTH, WIDTH), lambda b: (b, 0, 0))
        whole = pl.BlockSpec(w.shape, lambda b: (0, 0))

        def kernel(x_ref, w_ref, o_ref):
            x = x_ref[...].astype(jnp.float32)
            o_ref[...] = body(x, w_ref[...].astype(jnp.float32)).astype(o_ref.dtype)

        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=x.shape[:1],
            in_specs=[spec, whole],
            out_specs=spec,
        )(x, w)

    def reference(x, w):
        wide, taps = x.astype(jnp.float32), w.astype(jnp.float32)
        return jax.vmap(lambda one: body(one, taps))(wide).astype(x.dtype)

    return run, reference


def position(x):
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)


def causal(x, w):
    y = x * w[:1]
    for n in range(1, 4):
        y += jnp.where(position(x) >= n, jnp.roll(x, n, axis=0), 0.0) * w[n : n + 1]
    return y


def activated(x, w):
    """What is shifted depends on the operand, and a mask asks for positions."""
    h = jnp.tanh(x * w[:1])
    ahead = jnp.concatenate([h[2:], jnp.ones((2, WIDTH))], axis=0)
    y = jnp.where(position(x) < LENGTH - 5, ahead * h, x * w[1:2])
    return y + jnp.sum(w, axis=0, keepdims=True)


def padded(x, w):
    before = jnp.pad(x[:-3] * w[:1], ((3, 0), (0, 0)))
    return before * x + jnp.pad(x[4:], ((0, 4), (0, 0))) * w[3:]


def logarithmic(x, w):
    """Beyond a sequence there are zeros, whose logarithm is not finite."""
    scaled = x * jnp.log(x * x)
    return jnp.pad(scaled[:-2], ((2, 0), (0, 0))) * w[:1] + x


def operands(dtype):
    rng = np.random.default_rng(0)
    shapes = (2, LENGTH, WIDTH), (4, WIDTH)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def grids(run, args):
    (kernel,) = kernels_in(run, *args)
    steps = full_plan(kernel, machine=Machine.usual(chip("h200"))).steps
    return [Pipeline.of(find_pipeline(step.kernel)) for step in steps]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("body", [causal, activated, padded, logarithmic])
def test_blocks_of_rows_are_programs(body, dtype):
    run, reference = call(body)
    args = operands(dtype)
    (pipeline,) = grids(run, args)
    assert sorted(pipeline.sizes) == [2, 4]
    assert set(pipeline.semantics) == {"parallel"}
    total = lambda f: lambda *xs: jnp.sin(f(*xs).astype(jnp.float32)).sum()
    got, want = (jax.jit(jax.grad(total(f), (0, 1)))(*args) for f in (run, reference))
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, tolerance, tolerance * np.abs(b).max())


def test_rows_that_need_all_others_stay():
    run, _ = call(lambda x, w: jnp.roll(x, 1, axis=0) / jnp.sum(x * w[:1], axis=0))
    args = operands(jnp.float32)
    assert all(prod == 2 for p in grids(run, args) for prod in p.sizes)


def test_rows_that_are_not_shifted_stay():
    run, _ = call(lambda x, w: jnp.tanh(x) * w[:1])
    assert [p.sizes for p in grids(run, operands(jnp.float32))] == [(2,)]
