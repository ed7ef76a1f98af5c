"""Runs the code of README.md and of every page of docs, as a reader would.

A page's python blocks run in order in one fresh interpreter. A block after the line
`<!-- no-run -->` is left out. What a page's `output` blocks show is what its code
prints, in that order and nothing else; `...` in one stands for any text.
"""

import difflib
import doctest
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
OUTPUT = re.compile(r"^```output\n(.*?)^```$", re.M | re.S)
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


def check_output(markdown: str, printed: str) -> None:
    """Asserts that the page's `output` blocks, where it has any, are what it prints."""
    shown = "".join(OUTPUT.findall(markdown))
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if shown and not doctest.OutputChecker().check_output(shown, printed, options):
        lines = [text.splitlines() for text in (shown, printed)]
        raise AssertionError(
            "\n".join(difflib.unified_diff(*lines, "shown", "printed", lineterm=""))
        )


PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if python_code(page.read_text()).strip()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path, run_python: Callable[..., str]):
    text = page.read_text()
    code = python_code(text)
    skip_without_packages(code)
    # A tutorial shows all that its reader sees, warnings and exits included.
    quiet = page.parent.name == "learn"
    check_output(text, run_python("-c", RUNNER, page, code, quiet=quiet))


def test_output_blocks_are_compared():
    page = "```output\na 1\n```\n```text\nb\n```\n```output\nc ... d\n```\n"
    check_output(page, "a  1\nc 2 d\n")
    check_output("no output shown", "a\n")
    with pytest.raises(AssertionError, match="-a 1"):
        check_output(page, "a 2\nc 2 d\n")


def test_python_code_keeps_lines_and_leaves_out_no_run():
    page = "a\n```python\nx = 1\n```\n<!-- no-run -->\n\n```python\ny\n```\n"
    page += "```text\nz\n```\n    ```python\n    x += 1\n    ```\n"
    code = python_code(page).split("\n")
    assert [line for line in code if line] == ["x = 1", "x += 1"]
    assert (code[2], code[13]) == ("x = 1", "x += 1")
