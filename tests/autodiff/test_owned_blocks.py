"""Cotangents whose blocks computed indices choose: programs of their own on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward, owned_blocks
from pallasite.autodiff.explain_grad import chosen_plan, full_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.run import run as shared_passes
from pallasite.sites import calls_in
from pallasite.target import Machine, chip
from tests.backends.triton import harness
from tests.xla import pull_back, put

F32, BF16 = jnp.float32, jnp.bfloat16
TILES, ROWS, DEPTH, WIDTH, EXPERTS = 6, 4, 8, 5, 3


def grouped(which, x, w):
    """Tiles of rows, each times the matrix that a prefetched number names."""

    def kernel(which_ref, x_ref, w_ref, o_ref):
        product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)
        o_ref[...] = product.astype(o_ref.dtype)

    tiles, rows = which.shape[0], x.shape[0] // which.shape[0]
    _, depth, width = w.shape
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(tiles,),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, n: (i, 0)),
            pl.BlockSpec((None, depth, width), lambda i, n: (n[i], 0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, width), lambda i, n: (i, 0)),
    )
    shape = jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)
    return pl.pallas_call(kernel, shape, grid_spec=grid)(which, x, w)


def reference(which, x, w):
    rows = x.shape[0] // which.shape[0]
    chosen = w[jnp.clip(which, 0, w.shape[0] - 1)]
    tiles = x.reshape(which.shape[0], rows, -1)
    return jnp.einsum("trd,tdn->trn", tiles, chosen).reshape(x.shape[0], -1)


def test_blocks_are_an_axis_of_the_grid():
    operands = [jax.ShapeDtypeStruct((256,), jnp.int32),
                jax.ShapeDtypeStruct((256 * 16, 256), BF16),
                jax.ShapeDtypeStruct((8, 256, 256), BF16)]  # fmt: skip
    with config.override(target="gpu:h200"):
        (call,) = calls_in(grouped, *operands)
        steps = [step.kernel for step in chosen_plan(call.kernel).steps]
    (kernel,) = (k for k in steps if k.name.endswith("d_w"))
    pipeline = Pipeline.of(find_pipeline(kernel))
    assert (pipeline.grid, pipeline.semantics) == ((8, 256), ("parallel", "sequential"))
    # Its sums are one block, not all of them.
    assert "f32[256,256]" in kernel.text and "f32[8,256,256]" not in kernel.text


def test_many_blocks_or_steps_stay(monkeypatch):
    monkeypatch.setattr(backward, "MOST_SCATTERED", 0)
    backward.plan.cache_clear()
    monkeypatch.setattr(owned_blocks, "MOST_TESTS", EXPERTS * TILES - 1)
    operands = [jax.ShapeDtypeStruct(s, d) for s, d in shapes(F32)]
    with config.override(target="gpu:h200"):
        (call,) = calls_in(grouped, *operands)
        kernels = [step.kernel for step in chosen_plan(call.kernel).steps]
    assert all(f"grid=({EXPERTS}, {TILES})" not in kernel.text for kernel in kernels)


def shapes(dtype):
    return (((TILES,), jnp.int32), ((TILES * ROWS, DEPTH), dtype),
            ((EXPERTS, DEPTH, WIDTH), dtype))  # fmt: skip


def arrays(dtype):
    rng = np.random.default_rng(0)
    which = put(np.array([1, 0, 1, 7, -3, 1]), jnp.int32)  # outside: the nearest
    (_, x, w) = shapes(dtype)
    return which, put(rng.normal(size=x[0]), dtype), put(rng.normal(size=w[0]), dtype)


@pytest.mark.parametrize("most", [0, 100])  # the other way writes all addends
@pytest.mark.parametrize("dtype, tol", [(F32, 1e-5), (BF16, 2e-2)])
def test_gradient_of_chosen_matrices(dtype, tol, most, monkeypatch):
    monkeypatch.setattr(backward, "MOST_SCATTERED", most)
    backward.plan.cache_clear()
    which, x, w = arrays(dtype)
    seed = put(np.random.default_rng(1).normal(size=(TILES * ROWS, WIDTH)), dtype)
    want = pull_back(lambda x, w: reference(which, x, w), (x, w), seed)
    with config.override(target="gpu:h200"):
        got = pull_back(lambda x, w: grouped(which, x, w), (x, w), seed)
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = (np.asarray(v, np.float32) for v in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=tol, atol=tol * abs(theirs).max())


def test_triton_runs_it(monkeypatch):
    monkeypatch.setattr(backward, "MOST_SCATTERED", 0)
    backward.plan.cache_clear()
    which, x, w = arrays(F32)
    seed = (
        np.random.default_rng(1).normal(size=(TILES * ROWS, WIDTH)).astype(np.float32)
    )
    (call,) = calls_in(grouped, which, x, w)
    made = full_plan(call.kernel, machine=Machine.usual(chip("h200")))
    known = dict(zip(made.primals, (which, x, w), strict=True)) | {made.seeds[0]: seed}
    want = pull_back(lambda x, w: reference(which, x, w), (x, w), seed)
    for step in made.steps:
        operands = [known[ref] for ref in step.operands]
        found = harness.simulated(
            shared_passes(step.kernel), operands, chip=chip("h200")
        )
        known |= dict(zip(step.results, found, strict=True))
    for n, theirs in zip((1, 2), want, strict=True):
        np.testing.assert_allclose(known[made.targets[n]], theirs, rtol=1e-4, atol=1e-4)
