"""Writes docs/api/*.md, the reference of all public names, from docstrings.

`python docs/make_api.py` rewrites the pages; a test fails if one is out of date.
Signatures are the source's own text, so that they read the same under every version of
Python and JAX. A name is public if its module defines it, or imports it as itself.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).with_name("api")

# Page, title, module, and how its names are imported.
PAGES = {
    "pallasite": ("pallasite", "import pallasite as pl"),
    "kernels": ("pallasite.kernels", "from pallasite import kernels"),
    "masks": ("pallasite.kernels.masks", "from pallasite.kernels import masks"),
    "tpu": ("pallasite.tpu", "from pallasite import tpu as pltpu"),
    "tpu_sc": ("pallasite.tpu_sc", "from pallasite import tpu_sc as plsc"),
    "mosaic_gpu": ("pallasite.mosaic_gpu", "from pallasite import mosaic_gpu as plgpu"),
    "fuser": ("pallasite.fuser", "from pallasite import fuser"),
    "triton": ("pallasite.triton", "from pallasite import triton as pltriton"),
    "errors": ("pallasite.errors", "from pallasite import errors"),
}
# Headings of the first page, by the module that defines a name; the first that fits.
SUBJECTS = {
    "pallasite.calls": "Calls",
    "pallasite.language.specs": "Grids and blocks",
    "pallasite.language.memory_spaces": "Memory",
    "pallasite.language": "Inside a kernel",
    "jax": "Inside a kernel",
    "pallasite.sharding": "Several devices",
    "pallasite.autodiff": "Looking at kernels",
    "pallasite.tools": "Looking at kernels",
    "pallasite.primitive": "Looking at kernels",
    "pallasite.tune": "Tuning",
    "pallasite": "The package",
}
LISTS = ("Args", "Attributes", "Raises")
SECTIONS = (*LISTS, "Returns", "Example", "End")
Definition = ast.FunctionDef | ast.ClassDef


@dataclasses.dataclass(frozen=True)
class Name:
    """A public name: what it is, and the text that defines it."""

    name: str
    value: Any
    definition: Definition | None

    @property
    def home(self) -> str:
        value = self.value
        if isinstance(value, types.UnionType):  # where its members are
            value = value.__args__[0]
        return getattr(value, "__module__", None) or ""


def tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text())


def definition(value: Any) -> Definition | None:
    """The `def` or `class` of a value of ours; the last, after its overloads."""
    home = getattr(value, "__module__", "") or ""
    if not home.startswith("pallasite") or not hasattr(value, "__qualname__"):
        return None
    for statement in reversed(tree(importlib.import_module(home)).body):
        if isinstance(statement, Definition) and statement.name == value.__name__:
            return statement
    return None


def exported(module: ModuleType) -> Iterator[str]:
    """The names that a module defines or imports as themselves, in order."""
    for statement in tree(module).body:
        match statement:
            case ast.ImportFrom(names=aliases):
                names = [a.asname for a in aliases if a.asname == a.name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=targets):
                names = [t.id for t in targets if isinstance(t, ast.Name)]
            case _:
                names = []
        yield from (name for name in names if name and not name.startswith("_"))


def public(module: ModuleType) -> list[Name]:
    found = {name: getattr(module, name) for name in exported(module)}
    return [
        Name(name, value, definition(value))
        for name, value in found.items()
        if not isinstance(value, ModuleType)
    ]


def parameters(function: ast.FunctionDef, *, bound: bool = False) -> list[str]:
    """The parameters of a function, each as written."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    without = len(plain) - len(arguments.defaults)
    defaults = [*[None] * without, *arguments.defaults]
    written = list(map(parameter, plain, defaults))
    if arguments.posonlyargs:
        written.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        written.append("*" + parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        written.append("*")
    written += map(parameter, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        written.append("**" + parameter(arguments.kwarg, None))
    shown = written[1:] if bound else written
    return [each for each in shown if not each.startswith("_")]


def parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(argument)
    if default is None:
        return text
    value = ast.unparse(default)
    value = "..." if value.startswith("_") else value  # a marker of "not given"
    return text + (" = " if argument.annotation else "=") + value


def fields(value: type, class_: ast.ClassDef) -> list[str] | None:
    """What makes an object: parameters of `__init__`, or fields of a dataclass."""
    for statement in class_.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return parameters(statement, bound=True)
    if not dataclasses.is_dataclass(value):
        return None
    annotated = [field(s) for s in class_.body if isinstance(s, ast.AnnAssign)]
    return [each for each in annotated if not each.startswith("_")]


def field(written: ast.AnnAssign) -> str:
    """A field as a parameter, without what `dataclasses.field` says of it besides."""
    text = f"{ast.unparse(written.target)}: {ast.unparse(written.annotation)}"
    match written.value:
        case None:
            return text
        case ast.Call(func=function, keywords=words) if "field" in ast.unparse(
            function
        ):
            given = [w.value for w in words if w.arg == "default"]
            made = any(w.arg == "default_factory" for w in words)
            value = ast.unparse(given[0]) if given else "..." if made else None
        case default:
            value = ast.unparse(default)
    if value is None:
        return text
    return f"{text} = {'...' if value.startswith('_') else value}"


def signature(name: str, written: list[str]) -> list[str]:
    """A block of code, one parameter a line if one line is too short for all."""
    line = f"{name}({', '.join(written)})"
    if len(line) > 80:
        line = "\n".join([f"{name}(", *(f"    {each}," for each in written), ")"])
    return ["```text", line, "```"]


def markdown(doc: str) -> list[str]:
    """A docstring, whose sections become lists and code."""
    lines: list[str] = []
    for title, body in sections(doc):
        if title == "Example":
            lines += ["```pycon", *body, "```", ""]
        elif title in LISTS:
            lines += [f"**{title}**", "", *map(bullet, body), ""]
        else:
            lines += [*([f"**{title}**", ""] if title else []), *body, ""]
    return lines


def sections(doc: str) -> Iterator[tuple[str, list[str]]]:
    """The text before the first section, with no title, and the sections."""
    title, body = "", []
    for line in [*doc.split("\n"), "End:"]:
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            yield title, textwrap.dedent("\n".join(body)).strip("\n").split("\n")
            title, body = line.rstrip(":"), []
        else:
            body.append(line)


def bullet(line: str) -> str:
    """A line of a section: what starts at its left edge is an item of a list."""
    if line.startswith(" ") or not line:
        return "  " + line.strip() if line else line
    name, colon, rest = line.partition(": ")
    return f"- `{name}`: {rest}" if colon and "`" not in name else f"- {line}"


def methods(class_: ast.ClassDef) -> Iterator[str]:
    for statement in class_.body:
        if not isinstance(statement, ast.FunctionDef):
            continue
        if statement.name.startswith("_") or not ast.get_docstring(statement):
            continue
        decorators = {ast.unparse(d) for d in statement.decorator_list}
        is_value = decorators & {"property", "functools.cached_property"}
        bound = "staticmethod" not in decorators
        listed = ", ".join(parameters(statement, bound=bound))
        written = "" if is_value else f"({listed})"
        summary = (ast.get_docstring(statement) or "").split("\n\n")[0]
        yield f"- `{statement.name}{written}`: {' '.join(summary.split())}"


def members(class_: type) -> Iterator[str]:
    for member in getattr(class_, "__members__", {}):
        yield f"`{member}`"


def entry(item: Name, level: int) -> list[str]:
    lines = [f"{'#' * level} {item.name}", ""]
    if item.definition is None and not made_by_code(item):
        return [*lines, *(called(item) or [other(item), ""])]
    doc = textwrap.dedent(inspect.getdoc(item.value) or "").strip()
    assert doc, f"{item.name} has no docstring"
    if item.definition is None:
        named = list(inspect.signature(item.value).parameters)
        return [*lines, *signature(item.name, named), "", *markdown(doc)]
    aliased = item.definition.name != item.name
    if aliased:
        return [*lines, f"Another name of `{item.definition.name}`.", ""]
    if isinstance(item.definition, ast.ClassDef):
        written = fields(item.value, item.definition)
        if written is not None:
            lines += [*signature(item.name, written), ""]
        lines += markdown(doc)
        if names := list(members(item.value)):
            lines += [", ".join(names) + ".", ""]
        if listed := list(methods(item.definition)):
            lines += [*listed, ""]
        return lines
    written = parameters(item.definition)
    return [*lines, *signature(item.name, written), "", *markdown(doc)]


def made_by_code(item: Name) -> bool:
    """A function of ours that another function made, as the atomic ones are."""
    return inspect.isfunction(item.value) and item.home.startswith("pallasite")


def called(item: Name) -> list[str] | None:
    """A value of ours that is called like a function, as `plgpu.SMEM` is."""
    class_ = definition(type(item.value))
    if isinstance(item.value, enum.Enum) or not isinstance(class_, ast.ClassDef):
        return None
    for statement in class_.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__call__":
            written = parameters(statement, bound=True)
            doc = ast.get_docstring(class_) or ""
            more = ast.get_docstring(statement)
            lines = [*signature(item.name, written), "", *markdown(doc)]
            lines += markdown(more) if more else []
            listed = list(methods(class_))
            return [*lines, *listed, ""] if listed else lines
    return None


def other(item: Name) -> str:
    """A name that is JAX's, or a value."""
    if item.home.startswith("jax") and callable(item.value):
        return f"JAX's own: `jax.experimental.pallas.{item.name}` is the same."
    if isinstance(item.value, enum.Enum):
        return f"`{type(item.value).__name__}.{item.value.name}`."
    return f"`{item.value!r}`."


def in_reading_order(items: list[Name]) -> Iterator[Name]:
    """Of each file, operations before their configurations."""
    for _, group in itertools.groupby(items, lambda item: item.home):
        yield from sorted(group, key=lambda item: item.name.endswith("Config"))


def subject(item: Name) -> str:
    return next(title for home, title in SUBJECTS.items() if item.home.startswith(home))


def page(name: str) -> str:
    """The text of one page."""
    module_name, usage = PAGES[name]
    module = importlib.import_module(module_name)
    items = list(in_reading_order(public(module)))
    lines = [f"# {module_name}", "", inspect.getdoc(module) or "", ""]
    lines += ["```py", usage, "```", ""]
    if name != "pallasite":
        for item in items:
            lines += entry(item, 2)
    else:
        for title in dict.fromkeys(SUBJECTS.values()):
            lines += [f"## {title}", ""]
            for item in items:
                if subject(item) == title:
                    lines += entry(item, 3)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(page(name))
