"""The site's navigation: every page once, and few entries at a time."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 8  # entries per level


def entries() -> list[tuple[int, str]]:
    """The lines of the navigation: depth and text."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    lines = re.findall(r"^( +)- (.*)$", text, re.MULTILINE)
    return [(len(indent) // 4, line) for indent, line in lines]


def test_every_page_is_there_once():
    named = [line.rpartition(": ")[2] for _, line in entries() if line.endswith(".md")]
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(named) == sorted(str(p.relative_to(ROOT / "docs")) for p in pages)


def test_few_entries_per_level():
    counts: dict[tuple[str, ...], int] = {}
    path: list[str] = []
    for depth, line in entries():
        path[depth:] = [line]
        parent = tuple(path[:depth])
        counts[parent] = counts.get(parent, 0) + 1
    assert len(counts) > MOST
    assert {where: n for where, n in counts.items() if n > MOST} == {}
