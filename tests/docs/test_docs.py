"""Runs the code of README.md and docs/*.md, a page at a time, as a reader would.

A page's python blocks run in order in one fresh interpreter. A block after the line
`<!-- no-run -->` is left out.
"""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.optional import skip_without_packages

ROOT = Path(__file__).parents[2]
NO_RUN = "<!-- no-run -->"
BLOCK = re.compile(
    r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)
# The code compiles under the page's own name, so an error points at its line there.
RUNNER = """
import sys
page, code = sys.argv[1:]
exec(compile(code, page, "exec"), {"__name__": "__main__"})
"""


def python_code(markdown: str) -> str:
    """The python blocks of a page, each line at its own line number, the rest blank."""
    code = ""
    for block in BLOCK.finditer(markdown):
        before = markdown[: block.start("code")]
        if not markdown[: block.start()].rstrip().endswith(NO_RUN):
            code += "\n" * (before.count("\n") - code.count("\n"))
            code += textwrap.dedent(block["code"])
    return code


PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if python_code(page.read_text()).strip()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path, run_python: Callable[..., str]):
    code = python_code(page.read_text())
    skip_without_packages(code)
    run_python("-c", RUNNER, page, code)


def test_python_code_keeps_lines_and_leaves_out_no_run():
    page = "a\n```python\nx = 1\n```\n<!-- no-run -->\n\n```python\ny\n```\n"
    page += "```text\nz\n```\n    ```python\n    x += 1\n    ```\n"
    code = python_code(page).split("\n")
    assert [line for line in code if line] == ["x = 1", "x += 1"]
    assert (code[2], code[13]) == ("x = 1", "x += 1")
