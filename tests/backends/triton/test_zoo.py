"""The zoo through the Triton backend: on numpy anywhere, on a GPU where there is one.

On numpy the emitted code runs as it stands, programs in random order, padding full of
garbage, every pointer checked.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import primitive
from pallasite.passes.run import run
from tests.backends.cpu import filled
from tests.backends.triton.harness import simulated
from tests.fuzz.agreement import run_numpy
from tests.xla import put
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments, assert_agrees

VMAPPED = {
    "add_vectors",
    "layer_norm",
    "matmul_accumulate",
    "flash_scratch",
    "gather_rows",
    "alias_partial_update",
    "prefix_sum_carried",
}

each_case = pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)


@pytest.fixture
def simulator(monkeypatch):
    """Kernels called outside jit run on the simulator."""

    def simulate(*operands, call):
        return [put(x, x.dtype) for x in simulated(run(call.kernel), operands)]

    monkeypatch.setattr(primitive.call_p, "impl", simulate)


@each_case
def test_simulated_kernel_agrees(case, simulator):
    args = arguments(case, 0)
    want = jax.jit(case.reference)(*args)
    assert_agrees(case, case.run(*args, interpret=False), want)


@pytest.mark.parametrize(
    "case",
    [case for case in all_cases() if case.name in VMAPPED],
    ids=lambda case: case.name,
)
def test_simulated_vmap_agrees(case, simulator):
    examples = [arguments(case, seed) for seed in range(2)]
    axes = case.vmap_axes
    if not isinstance(axes, tuple):
        axes = (axes,) * len(examples[0])
    columns = list(zip(*examples, strict=True))
    batched = [
        column[0] if axis is None else jnp.stack(column, axis)
        for column, axis in zip(columns, axes, strict=True)
    ]
    singles = [
        [
            column[0] if axis is None else column[n]
            for column, axis in zip(columns, axes, strict=True)
        ]
        for n in range(2)
    ]
    got = jax.vmap(lambda *a: case.run(*a, interpret=False), axes)(*batched)
    want = [case.reference(*single) for single in singles]
    assert_agrees(case, got, jax.tree.map(lambda *x: jnp.stack(x), *want))


@pytest.mark.gpu
@each_case
def test_gpu_kernel_agrees(case):
    args = arguments(case, 0)
    run = jax.jit(lambda *a: case.run(*a, interpret=False, backend="triton"))
    # Some cases multiply outside their kernels too, where XLA would take TF32.
    with jax.default_matmul_precision("highest"):
        want = jax.jit(case.reference)(*args)
        got = jax.tree.map(np.asarray, run(*args))
    assert_agrees(case, got, want)


FILLED = {
    name: kernel
    for name, kernel in filled.kernels()
    if ("odd" in name and not name.startswith("written_input")) or "alias" in name
}


@pytest.mark.parametrize("name", FILLED)
def test_stores_to_filled_blocks_on_the_simulator(name: str):
    """What is stored outside is dropped, and the fill value is read there again."""
    kernel = FILLED[name]
    arrays = filled.arrays_for(kernel)
    for got, want in zip(
        simulated(kernel, arrays), run_numpy(kernel, arrays), strict=True
    ):
        share = 2e-2 if want.dtype.itemsize == 2 else 1e-5
        want = want.astype(np.float64)
        bound = share * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got.astype(np.float64), want, share, bound)
