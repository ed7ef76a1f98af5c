"""The generated tables in the docs are the ones the code has."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["ops", "targets"])
def test_page_is_up_to_date(page: str):
    script = DOCS / f"make_{page}.py"
    made = runpy.run_path(str(script))["page"]()
    assert (DOCS / f"{page}.md").read_text() == made, f"run python docs/{script.name}"


def test_pictures_are_up_to_date():
    made = runpy.run_path(str(DOCS / "make_pictures.py"))["pictures"]()
    for name, text in made.items():
        drawn = (DOCS / "pictures" / name).read_text()
        assert drawn == text, "run python docs/make_pictures.py"
