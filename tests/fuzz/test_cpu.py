"""Random kernels: machine code agrees with the numpy evaluator.

The code is called directly, as XLA would. Most kernels skip LLVM's optimisation, which
is most of the time; every kernel of some batches has it. Vector widths and the number
of threads change from kernel to kernel. `make fuzz` draws more.
"""

from collections.abc import Sequence
from unittest import mock

import pytest

from pallasite import target
from pallasite.target import Host
from tests.backends.cpu.direct import Code, Memory
from tests.fuzz.batches import check_batches, most_of
from tests.fuzz.generate import FAMILIES, Case
from tests.fuzz.running import Results, check
from tests.share import SHARE

BATCH = 8
OPTIMISED_EVERY = 40  # batches
HOSTS = (None, target.AVX2, target.SSE)
# Batches per family and type width; families with little code have more.
PARTS = {
    "elementwise": (10, 4),
    "tiles": (18, 6),
    "memory": (32, 10),
    "control": (34, 10),
    "grids": (26, 8),
    "products": (10, 4),
    "edges": (10, 4),
}
THREADS = 3


class Native:
    """An engine: the machine code's results."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, cases: Sequence[Case]) -> Results:
        self.batches += 1
        optimise = self.batches % OPTIMISED_EVERY == 1
        return [self.run(case, n, optimise) for n, case in enumerate(cases)]

    def run(
        self, case: Case, number: int, optimise: bool, memory: Memory | None = None
    ):
        shared = 0 if number % 2 else Host.least_part_ns
        host = HOSTS[number % 3] or target.host()
        with (
            target.using(host),
            mock.patch.object(Host, "least_part_ns", shared),
            mock.patch.object(Host, "least_chunk_ns", 0),
        ):
            code = Code(case.kernel, optimise, memory)
        return code(*case.arrays, pool=THREADS)


def parts() -> list[tuple[str, bool]]:
    return [(family, wide) for family in PARTS for wide in (False, True)]


@pytest.mark.parametrize("family, wide", parts())
def test_machine_code_agrees_with_numpy(family: str, wide: bool):
    native, count = Native(), max(PARTS[family][wide] // SHARE, 2)
    check_all = lambda cases: check(native, cases, quick=True)
    # Other kernels than in a whole run.
    seen = check_batches(check_all, family, SHARE - 1, count, BATCH, wide)
    assert seen >= most_of(count * BATCH)


def test_more_than_a_thousand_kernels():
    assert set(PARTS) == {*FAMILIES, "edges"}
    counts = [count for counts in PARTS.values() for count in counts]
    assert sum(most_of(BATCH * count) for count in counts) >= 1000
