"""Writes docs/error_index.md: the messages of all errors, and what to do about each.

`python docs/make_error_index.py` rewrites the page; a test fails if it is out of date.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from pallasite import errors

PAGE = Path(__file__).with_name("error_index.md")
PACKAGE = Path(errors.__file__).parent

HEAD = """# Index of error messages

Generated from the source (`docs/make_error_index.py`): the first line of every error
that Pallasite raises, by class, with its fix. `…` stands for a name or number of your
kernel. [Errors](errors.md) says what the classes mean and which built-in exception each
one is; [Checked mode](checked.md) shows its own reports (`CheckError`).

"""
# Classes in the page's order; those left out name a mistake of ours, not of a kernel.
CLASSES = (
    "SpecError",
    "KernelTypeError",
    "RefIndexError",
    "UnsupportedError",
    "ResourceError",
    "ChipMemoryError",
    "CompileError",
)


def text(node: ast.expr | None) -> str | None:
    """A message with `…` for what is known only when it is raised."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(text(part) or "…" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (text(left) or "…") + (text(right) or "…")
        case ast.IfExp(body=body, orelse=other):
            return f"{text(body) or '…'}; or: {text(other) or '…'}"
    return None


def messages(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Class, first line and fix of every error that a module makes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        class_ = ast.unparse(node.func).rpartition(".")[2]
        if class_ not in CLASSES or not node.args:
            continue
        given = {word.arg: word.value for word in node.keywords}
        what = text(node.args[0])
        fix = text(node.args[3] if len(node.args) > 3 else given.get("fix"))
        if what and what.strip("… "):
            yield class_, what, fix or ""


def cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;")


def page() -> str:
    """The whole page as text."""
    files = sorted(PACKAGE.rglob("*.py"))
    found = {each for file in files for each in messages(ast.parse(file.read_text()))}
    lines = [HEAD.rstrip()]
    for class_ in CLASSES:
        lines += ["", f"## {class_}", "", "| message | fix |", "| --- | --- |"]
        rows = {(cell(what), cell(fix)) for name, what, fix in found if name == class_}
        lines += [f"| {what} | {fix} |" for what, fix in sorted(rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
