"""The bugs that checked mode is tested with: those that no data decide are refuted."""

import pytest

import pallasite as pl
from tests.checked import test_bugs  # noqa: F401  registers them
from tests.checked.bugs import BUGS

CLAIMS = {
    "bounds": "bounds",
    "unwritten": "coverage",
    "races": "races",
    "copies": "sync",
}
# Which elements these access depends on what they read.
BY_DATA = {"scalar_index_is_one_based", "histogram_is_not_atomic"}


def verdicts(bug, fixed):
    proof = pl.prove(lambda: bug.run(fixed), list(CLAIMS.values()))()
    claims = [c for kernel in proof.kernels for c in kernel.claims]
    return {(c.name, c.verdict) for c in claims}


@pytest.mark.parametrize("bug", BUGS, ids=repr)
def test_a_bug_is_refuted_and_its_fix_is_not(bug):
    assert not {v for v in verdicts(bug, True) if v[1] == "refuted"}
    claim = CLAIMS.get(bug.kind)
    if claim is not None:
        expected = "unknown" if bug.name in BY_DATA else "refuted"
        assert (claim, expected) in verdicts(bug, False)
