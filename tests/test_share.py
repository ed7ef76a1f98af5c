"""The part of large tests that `make test` does."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import share


def test_tests_of_one_table_see_all_of_it_between_them(monkeypatch):
    monkeypatch.setattr(share, "SHARE", 8)
    table = list(range(20))
    parts = [share.share_of(table, number) for number in range(8)]
    assert sorted(case for part in parts for case in part) == table
    assert max(map(len, parts)) == 3


def test_every_test_has_a_case(monkeypatch):
    monkeypatch.setattr(share, "SHARE", 8)
    for count in range(1, 12):
        assert all(share.share_of(range(count), number) for number in range(20))


def test_a_whole_run_has_all(monkeypatch):
    monkeypatch.setattr(share, "SHARE", 1)
    assert list(share.share_of([1, 2, 3], 5)) == [1, 2, 3]
    assert share.sample_of(["a-b", "a-c", "d"], 5) == [0, 1, 2]


OPS, TYPES, PLACES = ("exp", "sin", "add", "log"), ("f32", "bf16", "i8"), ("cpu", "tpu")


@pytest.mark.parametrize("part", [2, 4, 16])
def test_every_word_is_in_the_sample(part, monkeypatch):
    monkeypatch.setattr(share, "SHARE", part)
    names = ["-".join(words) for words in itertools.product(OPS, TYPES, PLACES)]
    taken = share.chosen(names)
    assert taken == share.chosen(names), "the same each time"
    assert len(taken) <= max(len(names) // part, 8 // part, len(OPS))
    assert {word for name in taken for word in name.split("-")} == {
        *OPS,
        *TYPES,
        *PLACES,
    }


def test_every_worker_has_the_same_sample():
    """Whatever the order of its sets."""
    code = (
        "from tests.share import chosen; from itertools import product as p;"
        "print(chosen(['-'.join(x) for x in p('abcdefg', 'hijk', 'lmn', 'op', 'qr')]))"
    )
    given = {**os.environ, "PALLASITE_TEST_SHARE": "4", "PYTHONPATH": "."}
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[1],
            env={**given, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123456"
    }
    assert len(found) == 1


def test_a_sample_has_as_many_pairs_of_words_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr(share, "SHARE", 2)
    names = ["-".join(words) for words in itertools.product(OPS, TYPES, PLACES)]
    found = [name.split("-") for name in share.chosen(names)]
    pairs = lambda a, b: {(words[a], words[b]) for words in found}
    assert pairs(0, 1) == {*itertools.product(OPS, TYPES)}
    assert pairs(0, 2) == {*itertools.product(OPS, PLACES)}
    assert pairs(1, 2) == {*itertools.product(TYPES, PLACES)}


def test_tests_with_two_cases_take_turns(monkeypatch):
    monkeypatch.setattr(share, "SHARE", 5)
    assert [share.chosen(["a", "b"], n) for n in range(4)] == [["a"], ["b"]] * 2


def test_cases_are_spread_over_places(monkeypatch):
    cases = [*range(12)]
    parts = lambda: [share.spread(cases, place, 5) for place in range(5)]
    monkeypatch.setattr(share, "SHARE", 4)
    assert sorted(itertools.chain.from_iterable(parts())) == cases
    monkeypatch.setattr(share, "SHARE", 1)
    assert parts() == [cases] * 5


def test_of_few_cases_more_are_taken(monkeypatch):
    monkeypatch.setattr(share, "SHARE", 4)
    taken = [len(share.sample_of([f"c{n}" for n in range(k)], 0)) for k in range(1, 17)]
    assert taken == [1, *[2] * 7, *[3] * 4, *[4] * 4]


def test_names_without_common_words_are_taken_evenly(monkeypatch):
    monkeypatch.setattr(share, "SHARE", 4)
    names = [f"case{n}" for n in range(10)]
    parts = [share.sample_of(names, number) for number in range(4)]
    assert parts[1] == [1, 5, 9]
    assert {case for part in parts for case in part} == {*range(10)}
