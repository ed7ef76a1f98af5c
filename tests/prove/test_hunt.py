"""A few random kernels of every family; `python -m tests.prove.hunt` runs more."""

from collections import Counter

from tests.prove.hunt import hunt


def test_no_claim_about_random_kernels_is_false():
    counted = Counter[tuple[str, str]]()
    assert not list(hunt(range(60), counted))
    assert counted["bounds", "proved"] >= 10
    assert counted["bounds", "refuted"] >= 10
    assert counted["coverage", "proved"] >= 30
    assert counted["coverage of mutants", "refuted"] >= 5
