"""The checks of `gpu_check.py` and `plgpu_check.py`, on a GPU that they are for."""

import re

import pytest

from tests.backends.cuda import plgpu_check
from tests.backends.cuda.gpu_check import CHECKS

NAMES = [name for name in CHECKS if not name.startswith(("time", "zoo"))]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_check(name: str):
    said = CHECKS[name]()
    found = [float(x) for x in re.findall(r"[\d.]+e[+-]\d+|nan", said)]
    assert found and max(found) < 2e-2, said


@pytest.mark.gpu
@pytest.mark.parametrize("name", plgpu_check.CHECKS)
def test_upstreams_kernels(name: str):
    said = plgpu_check.CHECKS[name]()
    (error, *_) = re.findall(r"[\d.]+e[+-]\d+|nan", said)
    assert float(error) < 2e-2, said
