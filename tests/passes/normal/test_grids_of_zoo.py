"""The kernels of the zoo compute the same in normal form, also in checked mode."""

import pytest

import pallasite as pl
from pallasite.errors import CheckError
from pallasite.interpret.checked import run_checked
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.drop_rules import drop_rules
from pallasite.passes.normal.loop_steps import loop_steps
from pallasite.passes.normal.results_in_scratch import results_in_scratch
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.passes.normal.meaning import assert_same_meaning, operands
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments


def is_clean(kernel, arrays) -> bool:
    """Whether checked mode finds nothing: random indices may be out of range."""
    try:
        run_checked(kernel, [array.copy() for array in arrays], pl.Checked())
    except CheckError:
        return False
    return True


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_same_results(case):
    for kernel in kernels_in(case.run, *arguments(case, 0))[:2]:
        before = canonicalize(drop_rules(kernel))
        after = results_in_scratch(loop_steps(run(kernel)))
        if before.text == after.text:
            continue
        arrays = operands(before)
        assert_same_meaning(before, after, arrays, is_clean(before, arrays))
