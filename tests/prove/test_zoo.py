"""How much of the zoo is proved, and that nothing is refuted that holds."""

from dataclasses import replace

import pytest

from pallasite.passes.normal.drop_rules import drop_rules
from pallasite.proofs.assume import Given
from pallasite.proofs.batch import batch
from pallasite.proofs.replay import Replay
from pallasite.proofs.rows import refuted
from pallasite.sites import kernels_in
from tests.prove.zoo import counts, proofs
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

# Every kernel of the zoo is right, so bugs are never refuted; rows of attention with
# positions, of recurrences and of dropout do depend on their place.
PROVED = {"bounds": 143, "coverage": 143, "races": 146, "order": 146, "sync": 145}
INVARIANT, DEPENDENT = 66, 30


@pytest.fixture(scope="module")
def found():
    return list(proofs())


def test_how_much_is_proved(found):
    number = counts(found)
    for claim, floor in PROVED.items():
        assert number[claim, "proved"] >= floor, claim
        assert number[claim, "refuted"] == 0, claim
    assert number["batch", "proved"] >= INVARIANT
    assert number["batch", "refuted"] >= DEPENDENT


def test_rows_of_invariant_kernels_stay_when_others_change(found):
    """The experiment that refutes invariance does not refute what is proved."""
    run = 0
    cases = {case.name: case for case in all_cases()}
    for name, proof in found:
        case = cases[name]
        if any(k.batch.verdict != "proved" for k in proof.kernels):
            continue
        for kernel in kernels_in(case.run, *arguments(case, 0)):
            rows = batch(drop_rules(kernel))
            if rows.claim.verdict != "proved":
                continue  # its rows are another dimension
            doubted = replace(rows, claim=replace(rows.claim, verdict="unknown"))
            assert (
                refuted(kernel, doubted, Replay(Given(kernel))).verdict == "unknown"
            ), case
            run += 1
    assert run >= 60
