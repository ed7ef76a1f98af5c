"""docs/architecture.md names files that exist, and every package."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "pallasite"


def test_files_exist():
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE)) - {"backends/X/__init__.py"}
    missing = [n for n in named if not any(f"/{f}".endswith(f"/{n}") for f in files)]
    assert not [n for n in missing if not (ROOT / n).exists()]
    assert len(named) > 30


def test_every_package_is_listed():
    packages = {
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()
    }
    rooms = (PACKAGE / "passes").glob("*/__init__.py")
    packages |= {f"passes/{path.parent.name}" for path in rooms}
    table = PAGE[PAGE.index("## The packages") : PAGE.index("## Passes and stages")]
    assert packages == set(re.findall(r"`([\w/]+)/`", table)) - {
        *("llvm", "tiles", "dot", "call"),
    } | ({"ops"} & packages)


def test_walks_are_short():
    exp = PAGE[PAGE.index("How `exp`") : PAGE.index("How a matmul")]
    matmul = PAGE[PAGE.index("How a matmul") : PAGE.index("## The packages")]
    for walk in (exp, matmul):
        steps = [int(n) for n in re.findall(r"^(\d+)\. ", walk, re.M)]
        assert len(steps) >= 6 and max(steps) <= 8
