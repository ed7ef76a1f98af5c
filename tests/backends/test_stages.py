"""A backend's first stage starts from the scheduled kernel or from its text alone."""

from collections.abc import Iterator

import pytest

from pallasite.backends import base
from pallasite.errors import PallasError
from pallasite.ir.nodes import Kernel
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import FAMILIES, random_kernel
from tests.fuzz.placement import placed_kernel

SEEDS = range(6)


def kernels() -> Iterator[Kernel]:
    for seed in SEEDS:
        yield placed_kernel(Seeded(seed), for_tpu=True).kernel
        for family in FAMILIES:
            yield random_kernel(Seeded(seed), family).kernel


@pytest.mark.parametrize("name", base.names())
def test_the_text_says_everything_that_a_first_stage_needs(name: str):
    """What compiles from nodes alone could not be dumped, changed and compiled."""
    backend, options, compared = base.get(name), base.Options(), 0
    first = backend.stages(options)[0]
    for kernel in kernels():
        compiled = base.Compiled(backend, kernel, options)
        try:
            made = compiled[first.name]
        except PallasError:
            continue  # a refusal
        text = str(compiled["scheduled"])
        assert not isinstance(text, base.Scheduled)
        assert first.make(text) == made, text
        compared += 1
    assert compared >= 4
