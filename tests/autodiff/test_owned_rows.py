"""Cotangents of rows that loops read: programs for blocks of rows on a GPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward, backward_kernels, owned_rows
from pallasite.autodiff.explain_grad import chosen_plan, full_plan
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.run import run as shared_passes
from pallasite.sites import calls_in
from pallasite.target import Machine, chip
from tests.backends.triton import harness
from tests.xla import pull_back, put

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
ROWS, WIDTH, PER, STEPS = 60, 5, 2, 6
RANGES = {
    "segments": np.sort(np.random.default_rng(0).integers(0, ROWS, PER * STEPS + 1)),
    "some empty": np.array([0, 9, 9, 9, 20, 33, 34, 34, 50, 50, 60, 60, 60]),
    "that meet": np.array([0, 30, 10, 60, 3, 50, 20, 25, 0, 60, 59, 60, 2]),
    "outside": np.array([-3, 5, 70, -2, 1, 57, 64, 90, 20, 62, 63, -1, 4]),
}


def sums(starts, weights, x, nested=False, numbered=False):
    """Of weighted rows between offsets; a program has some of the ranges.

    `numbered`: rows are multiplied by their number, too.
    """

    def kernel(starts_ref, weights_ref, x_ref, o_ref):
        first = pl.program_id(0) * PER

        def one(n, _=None):
            def step(r, acc):
                row = x_ref[r, :].astype(F32)
                number = r.astype(F32) if numbered else 1.0
                return acc + weights_ref[r] * number * row * row

            zero = jnp.zeros((o_ref.shape[1],), F32)
            low, high = starts_ref[first + n], starts_ref[first + n + 1]
            o_ref[n, :] = lax.fori_loop(low, high, step, zero)

        if nested:
            lax.fori_loop(0, PER, one, None)
        else:
            for n in range(PER):
                one(n)

    count = starts.shape[0] - 1
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(count // PER,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_specs=pl.BlockSpec((PER, x.shape[1]), lambda i, _: (i, 0)),
    )
    shape = jax.ShapeDtypeStruct((count, x.shape[1]), F32)
    return pl.pallas_call(kernel, shape, grid_spec=grid)(starts, weights, x)


def reference(starts, weights, x):
    """Indices outside are those of the nearest row."""
    ranges = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    at = np.clip(np.concatenate(ranges), 0, len(x) - 1)
    ids = np.repeat(np.arange(len(ranges)), [len(r) for r in ranges])
    terms = weights[at, None] * jnp.square(x[at].astype(F32))
    return jnp.zeros((len(ranges), x.shape[1]), F32).at[ids].add(terms)


def operands(dtype=F32):
    rng = np.random.default_rng(1)
    weights, x = rng.normal(size=ROWS), rng.normal(size=(ROWS, WIDTH))
    return put(weights, F32), put(x, dtype), put(rng.normal(size=(12, WIDTH)), F32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owned_rows, "MOST_ELEMENTS", 4 * WIDTH)
    backward.plan.cache_clear()
    yield
    backward.plan.cache_clear()


def test_blocks_of_rows_are_programs():
    types = [((1025,), I32), ((4096,), F32), ((4096, 256), BF16)]
    shapes = [jax.ShapeDtypeStruct(*each) for each in types]
    with config.override(target="gpu:h200"):
        (call,) = calls_in(sums, *shapes)
        steps = [step.kernel for step in chosen_plan(call.kernel).steps]
    grids = {k.name: Pipeline.of(find_pipeline(k)) for k in steps}
    (rows,) = (p for name, p in grids.items() if name.endswith("d_x"))
    assert rows.semantics == ("parallel",) and rows.sizes == (4096,)


@pytest.mark.parametrize("target", ["cpu", "gpu:h200"])
@pytest.mark.parametrize(
    ("name", "nested", "dtype"),
    [*((name, False, F32) for name in RANGES), ("that meet", True, F32),
     ("outside", True, BF16)],
)  # fmt: skip
def test_gradient_of_rows_in_ranges(name: str, nested: bool, dtype, target: str):
    starts = RANGES[name]
    weights, x, seed = operands(dtype)
    function = lambda w, x: sums(put(starts, I32), w, x, nested)
    with config.override(target=target):
        got = pull_back(function, (weights, x), seed)
    want = pull_back(lambda w, x: reference(starts, w, x), (weights, x), seed)
    tol = 1e-5 if dtype == F32 else 2e-2
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = (np.asarray(v, np.float32) for v in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=tol, atol=tol * abs(theirs).max())


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("target", ["cpu", "gpu:h200"])
def test_rows_get_addends_in_the_order_of_steps(
    numbered: bool, target: str, monkeypatch: pytest.MonkeyPatch
):
    """As in one program after another, to the bit."""
    weights, x, seed = operands()
    starts = put(RANGES["that meet"], I32)
    function = lambda w, x: sums(starts, w, x, False, numbered)
    with config.override(target=target):
        (call,) = calls_in(lambda *a: sums(starts, *a, False, numbered), weights, x)
        steps = [step.kernel.text for step in chosen_plan(call.kernel).steps]
        assert any("rows_0" in text for text in steps)
        at_once = any("%again" in text for text in steps)
        assert at_once == (target != "cpu" and not numbered)
        got = pull_back(function, (weights, x), seed)
        monkeypatch.setattr(backward_kernels, "owned_rows", lambda *_: None)
        backward.plan.cache_clear()
        want = pull_back(function, (weights, x), seed)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", ["segments", "outside"])
def test_triton_runs_it(name: str):
    weights, x, seed = operands()
    starts = put(RANGES[name], I32)
    (call,) = calls_in(sums, starts, weights, x)
    made = full_plan(call.kernel, machine=Machine.usual(chip("h200")))
    assert any("rows_0" in step.kernel.text for step in made.steps)
    known = dict(zip(made.primals, (starts, weights, x), strict=True))
    known |= {made.seeds[0]: np.asarray(seed)}
    want = pull_back(lambda w, x: reference(RANGES[name], w, x), (weights, x), seed)
    for step in made.steps:
        if step.steps is not None:
            now = step.steps.arrays(known)
            known |= {ref: np.asarray(array) for ref, array in now.items()}
        given = [known[ref] for ref in step.operands]
        found = harness.simulated(shared_passes(step.kernel), given, chip=chip("h200"))
        known |= dict(zip(step.results, found, strict=True))
    for n, theirs in zip((1, 2), want, strict=True):
        np.testing.assert_allclose(known[made.targets[n]], theirs, rtol=1e-4, atol=1e-4)
