"""Gradients of what optimisers and fused norms do: sums of everything, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.autodiff import backward
from pallasite.autodiff.explain_grad import chosen_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import calls_in
from pallasite.target import chip
from tests.xla import pull_back

F32 = jnp.float32
Struct = jax.ShapeDtypeStruct


def squares(block):
    """The sum of squares, in one block that all steps of a grid of two axes add to."""

    def kernel(x_ref, o_ref):
        @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
        def _():
            o_ref[...] = jnp.zeros((1, 1), F32)

        o_ref[...] += jnp.square(x_ref[...]).sum(keepdims=True)

    def run(x):
        n, d = x.shape
        return pl.pallas_call(
            kernel,
            out_shape=Struct((1, 1), F32),
            grid=(n // block, d // block),
            in_specs=[pl.BlockSpec((block, block), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((1, 1), lambda i, j: (0, 0)),
        )(x)

    return run


def in_place(order, rows):
    """Residual and scaled rows, stored over the operands: before or after reading."""

    def kernel(x_ref, r_ref, y_ref, s_ref):
        s = x_ref[...] + r_ref[...]
        if order == "first":
            s_ref[...] = s
            s = s_ref[...] * 1.0
        y_ref[...] = s * jax.lax.rsqrt((s * s).mean(-1, keepdims=True) + 1e-3)
        if order == "last":
            s_ref[...] = s
        if order == "twice":
            s_ref[...] = s + y_ref[...] + r_ref[...]

    def run(x, r):
        block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=(Struct(x.shape, x.dtype),) * 2,
            grid=pl.cdiv(x.shape[0], rows),
            in_specs=[block, block],
            out_specs=(block, block),
            input_output_aliases={0: 0, 1: 1},
        )(x, r)

    def reference(x, r):
        s = x + r
        y = s * jax.lax.rsqrt((s * s).mean(-1, keepdims=True) + 1e-3)
        return y, s + y + r if order == "twice" else s

    return run, reference


def steps_on_a_gpu(run, *operands):
    with config.override(target="gpu:h200"):
        (call,) = calls_in(run, *operands)
        found = [step.kernel for step in chosen_plan(call.kernel).steps]
    return [(k, Pipeline.of(find_pipeline(k))) for k in found]


def test_a_sum_over_two_axes_is_pulled_back_by_all_programs():
    ((_, pipeline),) = steps_on_a_gpu(squares(512), Struct((8192, 4096), F32))
    assert pipeline.grid == (16, 8)
    assert set(pipeline.semantics) == {"parallel"}


@pytest.mark.parametrize("order", ["first", "last", "twice"])
def test_what_is_updated_in_place_has_cotangents_of_its_own(order):
    run, _ = in_place(order, 8)
    x = Struct((8192, 1024), jnp.bfloat16)
    ((kernel, pipeline),) = steps_on_a_gpu(run, x, x)
    assert not kernel.aliases
    assert "parallel" in pipeline.semantics and pipeline.grid[0] >= 256


@pytest.mark.parametrize("target", ["h200", None])
@pytest.mark.parametrize("order", ["first", "last", "twice", "squares"])
def test_gradients(order, target, monkeypatch):
    if target:
        monkeypatch.setattr(backward, "chip_for", lambda backend: chip(target))
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=(24, 16)), F32) for _ in range(4)]
    operands, seeds = given[:2], tuple(given[2:])
    if order == "squares":
        run, reference = squares(8), lambda x: jnp.square(x).sum(keepdims=True)
        operands, seeds = given[:1], given[1][:1, :1]
    else:
        run, reference = in_place(order, 5)
    got, want = (pull_back(f, operands, seeds) for f in (run, reference))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
