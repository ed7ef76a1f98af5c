"""The reports shown in docs/checked.md are those that checked mode gives."""

import re
from collections.abc import Callable
from pathlib import Path

import pallasite as pl
from tests.docs.test_docs import RUNNER, python_code

PAGE = Path(__file__).parents[2] / "docs" / "checked.md"


def test_shown_reports_are_real(run_python: Callable[..., str]):
    text = PAGE.read_text()
    shown = re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S)
    assert len(shown) >= 8
    assert run_python("-c", RUNNER, PAGE, python_code(text)) == "".join(shown)


def test_every_field_is_on_the_page():
    text = PAGE.read_text()
    assert not [f for f in pl.Checked.__dataclass_fields__ if f"`{f}`" not in text]
