"""Rows that memory names for each iteration between offsets, as of a sparse matrix."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config
from pallasite.autodiff.explain_grad import chosen_plan, full_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.run import run as shared_passes
from pallasite.sites import calls_in
from pallasite.target import Machine, chip
from tests.backends.triton import harness
from tests.xla import pull_back, put

F32, I32 = jnp.float32, jnp.int32
ROWS, ENTRIES, COLUMNS, WIDTH = 7, 23, 9, 5
OFFSETS = {
    "segments": [0, 2, 2, 9, 10, 17, 17, 23],
    "that meet": [4, 9, 3, 20, 1, 8, 2, 23],
    "outside": [-2, 3, 25, 20, 24, -1, 2, 30],
}


def product(offsets, columns, values, x):
    """A sparse matrix, given by its rows, times a dense one."""

    def kernel(offsets_ref, columns_ref, values_ref, x_ref, o_ref):
        i = pl.program_id(0)

        def entry(e, acc):
            return acc + values_ref[e] * x_ref[pl.ds(columns_ref[e], 1), :]

        zero = jnp.zeros((1, x_ref.shape[1]), F32)
        o_ref[...] = lax.fori_loop(offsets_ref[i], offsets_ref[i + 1], entry, zero)

    rows, width = offsets.shape[0] - 1, x.shape[1]
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((rows, width), F32),
        grid=(rows,),
        out_specs=pl.BlockSpec((1, width), lambda i: (i, 0)),
    )(offsets, columns, values, x)


def reference(offsets, columns, values, x):
    """Places outside are the nearest ones."""
    ranges = [np.arange(a, b) for a, b in itertools.pairwise(offsets)]
    at = np.clip(np.concatenate(ranges), 0, ENTRIES - 1)
    ids = np.repeat(np.arange(len(ranges)), [len(r) for r in ranges])
    named = x[np.clip(columns, 0, COLUMNS - 1)[at]]
    terms = values[at, None] * named
    return jnp.zeros((len(ranges), x.shape[1]), F32).at[ids].add(terms)


def operands():
    rng = np.random.default_rng(0)
    columns = rng.integers(0, COLUMNS - 1, ENTRIES)  # none names the last
    columns[3], columns[5] = -4, COLUMNS + 3
    values, x = rng.normal(size=ENTRIES), rng.normal(size=(COLUMNS, WIDTH))
    seed = rng.normal(size=(ROWS, WIDTH))
    return columns, put(values, F32), put(x, F32), put(seed, F32)


@pytest.mark.parametrize("name", OFFSETS)
def test_gradient_of_a_sparse_product(name: str):
    columns, values, x, seed = operands()
    offsets = np.array(OFFSETS[name])
    function = lambda v, x: product(put(offsets, I32), put(columns, I32), v, x)
    want = pull_back(lambda v, x: reference(offsets, columns, v, x), (values, x), seed)
    with config.override(target="gpu:h200"):
        got = pull_back(function, (values, x), seed)
        again = pull_back(function, (values, x), seed)
    for mine, theirs, twice in zip(got, want, again, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(mine, twice)


def test_all_kernels_are_parallel():
    types = [((4097,), I32), ((32768,), I32), ((32768,), F32), ((4096, 128), F32)]
    shapes = [jax.ShapeDtypeStruct(*each) for each in types]
    with config.override(target="gpu:h200"):
        (call,) = calls_in(product, *shapes)
        steps = chosen_plan(call.kernel).steps
    grids = {s.kernel.name: Pipeline.of(find_pipeline(s.kernel)) for s in steps}
    for pipeline in grids.values():
        assert pipeline.sizes == (4096,) and pipeline.semantics == ("parallel",)


def test_triton_runs_it():
    columns, values, x, seed = operands()
    offsets = np.array(OFFSETS["outside"])
    given = put(offsets, I32), put(columns, I32), values, x
    (call,) = calls_in(product, *given)
    made = full_plan(call.kernel, machine=Machine.usual(chip("h200")))
    known = dict(zip(made.primals, map(np.asarray, given), strict=True))
    known |= {made.seeds[0]: np.asarray(seed)}
    want = pull_back(lambda v, x: reference(offsets, columns, v, x), (values, x), seed)
    for step in made.steps:
        if step.steps is not None:
            now = step.steps.arrays(known)
            known |= {ref: np.asarray(array) for ref, array in now.items()}
        arrays = [known[ref] for ref in step.operands]
        kernel = shared_passes(step.kernel)
        found = harness.simulated(kernel, arrays, chip=chip("h200"))
        known |= dict(zip(step.results, found, strict=True))
    for n, theirs in zip((2, 3), want, strict=True):
        np.testing.assert_allclose(known[made.targets[n]], theirs, rtol=1e-4, atol=1e-4)
