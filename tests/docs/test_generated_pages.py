"""The generated tables in the docs are the ones the code has."""

import runpy
from pathlib import Path
from types import ModuleType

import pytest

import pallasite as pl

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["error_index", "ops", "targets"])
def test_page_is_up_to_date(page: str):
    script = DOCS / f"make_{page}.py"
    made = runpy.run_path(str(script))["page"]()
    assert (DOCS / f"{page}.md").read_text() == made, f"run python docs/{script.name}"


def test_tables_of_speed_are_up_to_date():
    script = runpy.run_path(str(DOCS / "make_speed.py"))
    for name in script["PAGES"]:
        text = (DOCS / f"{name}.md").read_text()
        assert text == script["filled"](text), "run python docs/make_speed.py"


def test_charts_are_up_to_date():
    script = runpy.run_path(str(DOCS / "make_benchmarks.py"))
    for name, text in script["charts"]().items():
        drawn = (DOCS / "pictures" / name).read_text()
        assert drawn == text, "run python docs/make_speed.py"


def test_every_table_of_speed_is_in_a_page_that_is_filled():
    script = runpy.run_path(str(DOCS / "make_speed.py"))
    pages = [p for p in DOCS.rglob("*.md") if "<!-- speed: " in p.read_text()]
    marked = {p.relative_to(DOCS).with_suffix("").as_posix() for p in pages}
    assert marked == set(script["PAGES"])


def test_reference_is_up_to_date():
    script = runpy.run_path(str(DOCS / "make_api.py"))
    for name in script["PAGES"]:
        written = (DOCS / "api" / f"{name}.md").read_text()
        assert written == script["page"](name), "run python docs/make_api.py"


def test_reference_names_everything_public():
    script = runpy.run_path(str(DOCS / "make_api.py"))
    text = script["page"]("pallasite")
    listed = {name for name in vars(pl) if f"### {name}\n" in text}
    public = {
        name
        for name, value in vars(pl).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert listed == public


def test_pictures_are_up_to_date():
    made = runpy.run_path(str(DOCS / "make_pictures.py"))["pictures"]()
    for name, text in made.items():
        drawn = (DOCS / "pictures" / name).read_text()
        assert drawn == text, "run python docs/make_pictures.py"
