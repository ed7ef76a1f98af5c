"""Prints every public name and argument of upstream's modules, and what it does here.

    PYTHONPATH=. python -m tests.language.upstream_names [--refused] [--write]

"works", or "refuses" with what to do instead; "lacks" names arguments. `--refused`:
only those that do not work. `--write` puts the refused names into docs/compat.md.
"""

import argparse
import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import pallasite as pl
from pallasite import fuser, missing, triton
from pallasite import mosaic_gpu as plgpu
from pallasite import tpu as pltpu
from pallasite import tpu_sc as plsc

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
MARKS = "<!-- refused names: begin -->\n", "<!-- refused names: end -->\n"
MODULES: dict[str, tuple[str, Any]] = {
    "pl": ("pallas", pl),
    "plgpu": ("pallas.mosaic_gpu", plgpu),
    "pltpu": ("pallas.tpu", pltpu),
    "plsc": ("pallas.tpu_sc", plsc),
    "fuser": ("pallas.fuser", fuser),
    "triton": ("pallas.triton", triton),
}
INTERNAL = {"typing", "annotations", "tpu", "triton", "mosaic_gpu", "tpu_sc"}


def upstreams(module: str) -> dict[str, Any]:
    """The public names of one of upstream's modules; None where it cannot be imported,
    as that of GPU kernels without GPU packages."""
    try:
        found = vars(importlib.import_module(f"jax.experimental.{module}"))
    except ImportError:
        return dict.fromkeys(names_in_source(module))
    return {
        name: value
        for name, value in found.items()
        if name[0] != "_" and name not in INTERNAL and not isinstance(value, ModuleType)
    }


def names_in_source(module: str) -> list[str]:
    """The public names of a module, from its text."""
    path = Path(jax.__file__).parent / "experimental" / f"{module.replace('.', '/')}.py"
    found: list[str] = []
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.ImportFrom):
            found += [alias.asname for alias in node.names if alias.asname]
        elif isinstance(node, ast.Assign):
            found += [t.id for t in node.targets if isinstance(t, ast.Name)]
    return sorted({name for name in found if not name.startswith("_")} - INTERNAL)


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return {}


def lacking(theirs: Any, ours: Any) -> list[str]:
    """The arguments by name that upstream's function has and ours has not."""
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    mine = parameters(ours)
    if not mine or any(p.kind in kinds for p in mine.values()):
        return []
    named = (n for n, p in parameters(theirs).items() if p.kind not in kinds)
    return [n for n in named if n not in mine and n[0] != "_"]


def rows() -> Iterator[tuple[str, str, str]]:
    """Name, what it does, and why."""
    for short, (module, ours) in MODULES.items():
        for name, theirs in sorted(upstreams(module).items()):
            here = getattr(ours, name, None)
            if isinstance(here, missing.Missing):
                reason = missing.REFUSED[ours.__name__][name]
                yield f"{short}.{name}", "refuses", reason
            elif not hasattr(ours, name):
                yield f"{short}.{name}", "absent", ""
            else:
                without = ", ".join(lacking(theirs, here))
                word = "lacks" if without else "works"
                yield f"{short}.{name}", word, without


def table() -> str:
    """The refused names, grouped by what to do instead: the part of docs/compat.md."""
    lines = ["| refused | instead |", "| --- | --- |"]
    for short, (_, ours) in MODULES.items():
        by_hint: dict[str, list[str]] = {}
        for name, hint in missing.REFUSED.get(ours.__name__, {}).items():
            by_hint.setdefault(hint, []).append(f"`{name}`")
        for hint, names in by_hint.items():
            lines.append(f"| `{short}`: {', '.join(sorted(names))} | {hint} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    counts: dict[str, int] = {}
    for name, word, why in rows():
        counts[word] = counts.get(word, 0) + 1
        if word != "works" or not options.refused:
            print(f"{name:45} {word:8} {why}".rstrip())
    print(", ".join(f"{word}: {count}" for word, count in counts.items()))
    if options.write:
        before, rest = PAGE.read_text().split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + after)


if __name__ == "__main__":
    main()
