"""`pallasite bench`: numbers, charts, and what it says without a clone."""

import json
import runpy
from pathlib import Path

import pytest

from pallasite import __main__ as command

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "docs" / "make_benchmarks.py"))
ROW = {"times faster": 2.0, "times faster than torch": 0.5}


@pytest.mark.machine_only
def test_it_measures_and_draws(tmp_path, capsys):
    arguments = ["bench", "softmax 64", "--forward", "--rounds", "1"]
    assert command.main([*arguments, "--save", str(tmp_path / "new")]) == 0
    assert "softmax 64 x 8192" in capsys.readouterr().out
    (numbers,) = (tmp_path / "new").glob("kernels_*.json")
    row = json.loads(numbers.read_text())["rows"]["softmax 64 x 8192"]
    assert row["ms"] > 0 and row["distance"] < 1e-5
    (picture,) = (tmp_path / "new").glob("bench_*_forward.svg")
    assert "softmax 64 x 8192" in picture.read_text()


def test_without_a_clone_it_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "pallasite/__main__.py"))
    assert command.main(["bench"]) == 2
    assert "clone the repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["sofmax"], "nothing has 'sofmax' in its name: did you mean 'softmax'?"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["softmax", "--save", __file__], "is a file: name a folder"),
    ],
)
def test_wrong_arguments_measure_nothing(given, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["bench", *given])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_chart_shows_what_is_slower_and_torch():
    rows = {"fast": ROW, "slow": {"times faster": 0.8}}
    ratios = PAGE["library"](rows)
    assert [(r.name, r.rival) for r in ratios] == [
        ("fast", "XLA"),
        ("fast", "torch"),
        ("slow", "XLA"),
    ]
    drawn = PAGE["chart"]("a chip", ratios)
    assert drawn.count(f'fill="{PAGE["BUSY"]}"') == 1
    assert drawn.count(f'fill="{PAGE["WRONG"]}"') == 1
    assert "prefers-color-scheme: dark" in drawn and ">0.80<" in drawn


def test_what_upstream_is_not_counted_for_is_left_out():
    row = {"ours": 10, "upstream": 1}
    rows = {"a": row, "b": row, "b (counted)": {"ours": 10, "upstream": 30}}
    values = {r.name: r.value for r in PAGE["cycles"](rows)}
    assert values == {"a": 0.1, "b (counted)": 3}
