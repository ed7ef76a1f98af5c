"""The kernel zoo: many small, different kernels, each with its meaning in plain `jnp`.

Every mode and every backend is held to it. `case.py` says what an entry is; one file
holds one family.
"""

from . import (
    attention,
    control,
    elementwise,
    histogram,
    matmul,
    memory,
    softmax_norms,
    stencil_scan,
)
from .case import Case as Case

_FAMILIES = (
    elementwise,
    softmax_norms,
    matmul,
    attention,
    memory,
    stencil_scan,
    histogram,
    control,
)

CASES: list[Case] = [case for family in _FAMILIES for case in family.zoo.cases]


def all_cases() -> list[Case]:
    """Every case of every family, in a fixed order."""
    return list(CASES)
