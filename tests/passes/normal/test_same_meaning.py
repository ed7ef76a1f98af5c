"""Kernels of the zoo mean the same in normal form, which is stable."""

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.normalize import normalize
from pallasite.sites import calls_in
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

CASES = [case for case in all_cases() if not case.tags & {"dma", "mesh", "prints"}]


def inputs(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays: list[np.ndarray] = []
    for ref in (p.ref for p in kernel.inputs):
        if ref.dtype.is_float:
            array = rng.standard_normal(ref.shape)
        else:
            array = rng.integers(0, 2, ref.shape)
        arrays.append(array.astype(ref.dtype.np))
    return arrays


def results(kernel: Kernel, arrays: list[np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        found = Walker(kernel, NumpyNumbers()).run([a.copy() for a in arrays])
    return [np.asarray(out) for out in found]


def same_meaning(kernel: Kernel, tolerance: float = 2e-6) -> Kernel:
    """The normal form, after comparing what it computes with what the kernel does."""
    new = normalize(kernel)
    verify(new)
    assert normalize(new) is new
    arrays = inputs(kernel)
    for old, out in zip(results(kernel, arrays), results(new, arrays), strict=True):
        old, out = (x.astype(np.float64) for x in (old, out))
        size = np.nanmax(np.abs(old), initial=1.0, where=np.isfinite(old))
        np.testing.assert_allclose(out, old, rtol=1e-5, atol=tolerance * size)
    return new


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_zoo(case):
    args = arguments(case, 0)
    for call in calls_in(case.run, *args):
        same_meaning(call.kernel)
