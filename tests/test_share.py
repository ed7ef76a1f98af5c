"""The part of large tests that a run with another Python does."""

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


def test_a_whole_run_has_all():
    assert share.SHARE > 1 or list(share.share_of([1, 2, 3], 5)) == [1, 2, 3]
