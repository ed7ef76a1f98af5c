"""Attention that leaves out blocks: no branch in its loop, on the way to the GPU."""

import re

import pytest

from pallasite.passes.run import run
from pallasite.primitive import kernels_in
from tests.backends.triton.harness import compiled
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

GUARDED = {
    "flash_scratch_causal",
    "sliding_window",
    "ragged_lengths",
    "paged_decode",
}


@pytest.mark.parametrize("name", sorted(GUARDED))
def test_guarded_steps_are_bounds(name: str):
    """Each loop ends where the guard says, and asks nothing."""
    (case,) = [case for case in all_cases() if case.name == name]
    function = lambda *args: case.run(*args, interpret=False)
    (kernel,) = kernels_in(function, *arguments(case, 0))
    ttir, _ = compiled(run(kernel))
    assert "scf.if" not in ttir
    loops = re.findall(r"scf\.for \S+ = (\S+) to (\S+) step", ttir)
    ((_, limit),) = loops
    assert not re.fullmatch(r"%c\d+\S*", limit), loops
    assert "__nv_exp2f" in ttir and "__nv_expf" not in ttir
