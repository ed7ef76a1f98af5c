"""Every kernel of the zoo as machine code against its `jnp` reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo import Case, all_cases


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def assert_agrees(case: Case, got, want):
    for actual, expected in zip(
        jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        if jnp.issubdtype(expected.dtype, jnp.floating):
            actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
            np.testing.assert_allclose(actual, expected, case.rtol, case.atol)
        else:
            np.testing.assert_array_equal(actual, expected)


def native(case: Case):
    return functools.partial(case.run, interpret=False, backend="cpu")


@each(all_cases())
def test_native_code_agrees(case: Case):
    args = case.make_args(np.random.default_rng([5, *case.name.encode()]))
    assert_agrees(case, jax.jit(native(case))(*args), jax.jit(case.reference)(*args))
