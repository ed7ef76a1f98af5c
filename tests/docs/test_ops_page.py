"""The generated op table in the docs is the one the code has."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ops_page_is_up_to_date():
    made = runpy.run_path(str(ROOT / "docs" / "make_ops.py"))["page"]()
    assert (ROOT / "docs" / "ops.md").read_text() == made, "run python docs/make_ops.py"
