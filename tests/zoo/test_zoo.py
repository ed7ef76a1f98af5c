"""Every kernel of the zoo agrees with its `jnp` reference, in every mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from tests.zoo import Case, all_cases

BATCH = 3
# Without jit each operation outside the kernel is a call of its own: a few cases show
# that this works too.
EAGER = {
    "add_vectors",
    "bias_residual",
    "two_pass_softmax",
    "matmul_accumulate",
    "ragged_matmul",
    "flash_scratch",
    "paged_decode",
    "scatter_rows",
    "dma_double_buffer",
    "linear_recurrence",
    "histogram_atomic_vector",
    "dictionary_outputs",
    "no_inputs",
}


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def arguments(case: Case, seed: int) -> tuple:
    return case.make_args(np.random.default_rng([seed, *case.name.encode()]))


def assert_agrees(case: Case, got, want):
    """Same structure, shapes, dtypes; floats within tolerance, all else exact."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for actual, expected in zip(
        jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        if jnp.issubdtype(expected.dtype, jnp.floating):
            np.testing.assert_allclose(
                np.asarray(actual, np.float32),
                np.asarray(expected, np.float32),
                rtol=case.rtol,
                atol=case.atol,
                equal_nan=False,
            )
        else:
            np.testing.assert_array_equal(actual, expected)


@each(all_cases())
def test_emulation_agrees(case):
    args = arguments(case, 0)
    assert_agrees(case, jax.jit(case.run)(*args), jax.jit(case.reference)(*args))


@each([case for case in all_cases() if case.name in EAGER])
def test_eager_emulation_agrees(case):
    args = arguments(case, 1)
    assert_agrees(case, case.run(*args), case.reference(*args))


@each(all_cases())
def test_checked_mode_agrees_and_reports_nothing(case):
    args = arguments(case, 2)
    got = case.run(*args, interpret=pl.Checked())
    assert_agrees(case, got, jax.jit(case.reference)(*args))


@each([case for case in all_cases() if case.vmap_axes is not None])
def test_vmap_agrees_with_each_example(case):
    examples = [arguments(case, seed) for seed in range(BATCH)]
    axes = case.vmap_axes
    if not isinstance(axes, tuple):
        axes = (axes,) * len(examples[0])

    def pick(index, axis):
        """One argument of every example; a shared one is that of the first."""
        return [
            (examples[0] if axis is None else example)[index] for example in examples
        ]

    columns = [pick(index, axis) for index, axis in enumerate(axes)]
    batched = [
        column[0] if axis is None else np.stack(column, axis)
        for column, axis in zip(columns, axes, strict=True)
    ]
    got = jax.jit(jax.vmap(case.run, axes))(*batched)
    reference = jax.jit(case.reference)
    each_result = [reference(*example) for example in zip(*columns, strict=True)]
    assert_agrees(
        case, got, jax.tree.map(lambda *leaves: np.stack(leaves), *each_result)
    )


def test_zoo_is_large_and_well_formed():
    cases = all_cases()
    names = {case.name for case in cases}
    assert len(cases) >= 65
    assert len(names) == len(cases)
    assert names >= EAGER
    assert all(case.why for case in cases if case.vmap_axes is None)
