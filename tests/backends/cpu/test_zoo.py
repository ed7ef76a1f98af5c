"""Every kernel of the zoo as machine code against its `jnp` reference; some vmapped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo import Case, all_cases

VMAPPED = {
    "add_vectors",
    "matmul_accumulate",
    "flash_scratch",
    "paged_decode",
    "histogram_atomic_vector",
    "linear_recurrence",
}


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


@each([case for case in all_cases() if case.name in VMAPPED])
def test_vmapped_native_code_agrees(case: Case):
    examples = [case.make_args(np.random.default_rng(seed)) for seed in range(3)]
    axes = case.vmap_axes
    axes = axes if isinstance(axes, tuple) else (axes,) * len(examples[0])
    shared = [
        [examples[0 if axis is None else n][k] for k, axis in enumerate(axes)]
        for n in range(3)
    ]
    batched = [
        shared[0][k] if axis is None else jnp.stack([s[k] for s in shared], axis)
        for k, axis in enumerate(axes)
    ]
    got = jax.jit(jax.vmap(native(case), axes))(*batched)
    reference = jax.jit(case.reference)
    results = [reference(*example) for example in shared]
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
    assert_agrees(case, got, want)
