"""Every seeded bug is refuted, with a counterexample that checked mode replays."""

import pytest

import pallasite as pl
from tests.prove.bugs import BUGS


@pytest.mark.parametrize("bug", BUGS, ids=repr)
def test_a_seeded_bug_is_refuted(bug):
    proof = pl.prove(bug.function)(*bug.operands)
    (kernel,) = proof.kernels
    claim = kernel.claim(bug.claim)
    assert claim.verdict == "refuted", str(proof)
    assert not proof.ok
    assert claim.counterexample is not None
    report = claim.counterexample.replay()
    assert bool(report) == bug.seen, f"{proof}\n{report}"


def test_there_are_bugs_of_every_claim():
    assert len(BUGS) >= 30
    assert {bug.claim for bug in BUGS} == {
        "bounds",
        "coverage",
        "races",
        "order",
        "sync",
        "batch",
    }
