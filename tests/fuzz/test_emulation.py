"""Random kernels: the emulation agrees with the numpy evaluator.

Each kernel also keeps its meaning through its printed form and through canonicalize.
Kernels come in batches, which go through XLA as one program. One test is one part of
one family, so that workers share them out. `make fuzz` draws more.
"""

from collections.abc import Sequence

import pytest

from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from tests.fuzz.agreement import expected, mismatch, run_numpy
from tests.fuzz.batches import check_batches, most_of
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import FAMILIES, Case, random_kernel
from tests.fuzz.running import OPTIMISED, check, emulated
from tests.share import SHARE

BATCH = 8  # kernels that XLA compiles together
BATCHES = 6  # in one test
WIDE_BATCHES = 3
PARTS = {
    "elementwise": 2,
    "tiles": 2,
    "memory": 2,
    "control": 2,
    "grids": 3,
    "products": 1,
    "edges": 1,
}


def parts() -> list[tuple[str, int]]:
    return [(family, n) for family, count in PARTS.items() for n in range(count)]


@pytest.mark.parametrize("family, part", parts())
def test_emulation_agrees_with_numpy(family: str, part: int):
    count = max(BATCHES // SHARE, 2)
    assert agree(family, part, count) >= most_of(count * BATCH)


@pytest.mark.parametrize("family", PARTS)
def test_emulation_agrees_with_numpy_in_64_bits(family: str):
    count = max(WIDE_BATCHES // SHARE, 2)
    assert agree(family, 0, count, wide=True) >= most_of(count * BATCH)


@pytest.mark.parametrize("family", ["memory", "control"])
def test_optimised_emulation_agrees_with_numpy(family: str):
    cases = [random_kernel(Seeded(seed), family) for seed in range(BATCH)]
    check(lambda cases: emulated(cases, OPTIMISED), cases)


def test_more_than_five_hundred_kernels():
    assert set(PARTS) == {*FAMILIES, "edges"}
    count = len(parts()) * most_of(BATCHES * BATCH)
    assert count + len(PARTS) * most_of(WIDE_BATCHES * BATCH) >= 500


def agree(family: str, part: int, count: int, wide: bool = False) -> int:
    """Check `count` batches; how many different kernels there were."""
    return check_batches(check_all, family, part, count, BATCH, wide)


def check_all(cases: Sequence[Case]) -> None:
    for case in cases:
        keeps_meaning(case)
    check(emulated, cases, quick=True)


def keeps_meaning(case: Case) -> None:
    """The printed form says everything; a canonical kernel does the same."""
    kernel = case.kernel
    parsed = parse_kernel(kernel.text)
    assert parsed.text == kernel.text
    new = canonicalize(parsed)
    verify(new)
    found, exact = run_numpy(new, case.arrays), [None] * len(kernel.outputs)
    wrong = mismatch(found, run_numpy(kernel, case.arrays), exact)
    if wrong is not None:  # numpy may have another pow for one number than for many
        wrong = mismatch(found, *expected(case))
    assert wrong is None, f"canonicalize: {wrong}"
