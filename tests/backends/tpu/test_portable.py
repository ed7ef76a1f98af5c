"""Portable kernels on a TPU: none is refused, and each means what it should."""

import pytest

from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.tpu.harness import random_arrays, simulated
from tests.backends.tpu.portable import CASES
from tests.backends.tpu.test_meaning import assert_close
from tests.fuzz.agreement import run_numpy


@pytest.mark.parametrize("name", CASES)
def test_portable_kernel(name):
    case = CASES[name]
    (kernel,) = map(run, kernels_in(case.function, *case.shapes))
    arrays = random_arrays(kernel)
    assert_close(simulated(kernel, arrays), run_numpy(kernel, arrays))
