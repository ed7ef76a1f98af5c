"""Random kernels from the op table: the emulation agrees with the numpy evaluator.

Kernels are compiled in batches, since XLA's compile time is most of the cost. Each test
draws its kernels by hypothesis, so that a failure shrinks to a small one.
"""

import hypothesis
import pytest
from hypothesis import given

from pallasite.ir.text import parse_kernel
from pallasite.passes.canonicalize import canonicalize
from tests.fuzz.agreement import expected, mismatch, run_numpy
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import FAMILIES, random_kernel
from tests.fuzz.running import batches, check, emulated

BATCH = 12
BATCHES = {"elementwise": 34, "tiles": 34, "memory": 34, "control": 30, "grids": 30}
EDGES, WIDE = 5, 6
CHECKED = [hypothesis.HealthCheck.data_too_large, hypothesis.HealthCheck.too_slow]
SLOW = {"deadline": None, "suppress_health_check": CHECKED}


def test_there_are_enough_kernels():
    assert BATCHES.keys() == FAMILIES.keys()
    assert BATCH * (sum(BATCHES.values()) + EDGES + WIDE) >= 2000


@pytest.mark.parametrize("family", sorted(BATCHES))
@pytest.mark.parametrize("part", [0, 1])
def test_emulation_agrees_with_numpy(family, part):
    @hypothesis.seed(part)
    @hypothesis.settings(max_examples=BATCHES[family] // 2, derandomize=False, **SLOW)
    @given(cases=batches(family, BATCH))
    def run(cases):
        check(emulated, cases)

    run()


@pytest.mark.parametrize("first", range(0, EDGES * BATCH, BATCH))
def test_blocks_over_the_edge_agree(first):
    seeds = range(first, first + BATCH)
    check(emulated, [random_kernel(Seeded(seed), "edges") for seed in seeds])


@hypothesis.settings(max_examples=WIDE, **SLOW)
@given(cases=batches("elementwise", BATCH, wide=True))
def test_64_bit_types_agree(cases):
    check(emulated, cases)


@hypothesis.settings(max_examples=20, **SLOW)
@given(cases=batches("grids", 4))
def test_text_round_trips_and_canonicalize_keeps_the_meaning(cases):
    for case in cases:
        kernel = case.kernel
        assert parse_kernel(kernel.text).text == kernel.text
        values, bounds = expected(case)
        simpler = run_numpy(canonicalize(kernel), case.arrays)
        assert mismatch(simpler, values, bounds) is None
