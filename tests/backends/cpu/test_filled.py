"""Stores to blocks with `fill=`, and to others that are reached element by element."""

from unittest import mock

import numpy as np
import pytest

from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.target import Host
from tests.backends.cpu.direct import Code
from tests.backends.cpu.filled import arrays_for, kernels
from tests.fuzz.agreement import run_numpy

KERNELS = dict(kernels())


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("pool", [1, 3])
def test_machine_code_agrees_with_numpy(name: str, pool: int):
    kernel = KERNELS[name]
    verify(kernel)
    arrays = arrays_for(kernel)
    with (
        mock.patch.object(Host, "least_part_ns", 0),
        mock.patch.object(Host, "least_chunk_ns", 0),
    ):
        code = Code(kernel, optimise=False)
    got = code(*arrays, pool=pool)
    assert_close(got, run_numpy(kernel, arrays), kernel)


def assert_close(got: list[np.ndarray], want: list[np.ndarray], kernel: Kernel) -> None:
    for a, b, out in zip(got, want, kernel.outputs, strict=True):
        assert np.isfinite(b.astype(np.float64)).all(), "a test of something else"
        exact = not out.ref.dtype.is_float
        tolerance = 0 if exact else (2e-2 if out.ref.dtype.bits == 16 else 1e-5)
        np.testing.assert_allclose(
            a.astype(np.float64),
            b.astype(np.float64),
            rtol=tolerance,
            atol=tolerance
            * max(1.0, float(np.abs(b.astype(np.float64)).max(initial=0))),
        )
