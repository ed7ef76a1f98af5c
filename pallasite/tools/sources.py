"""Kernels of a file: `FILE::FUNCTION` with operands, or all that a script lowers."""

import contextlib
import inspect
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pallasite.errors import SpecError
from pallasite.ir.types import DTYPES
from pallasite.primitive import Site, recorded
from pallasite.tools.explain import kernels_of

_ARRAY = re.compile(r"\s*(\w+)\[([\d,\s]*)\]\s*")


def sites_of(source: str, operands: str = "") -> list[Site]:
    """The kernel calls that a source names.

    Args:
        source: "FILE::FUNCTION", or "FILE" for a script, which is run.
        operands: of the function, as "f32[8,128], i32[4]".

    Raises:
        SpecError: there is no such file, function or kernel, or operands do not fit.
    """
    name, _, function = source.partition("::")
    path = Path(name)
    if not path.is_file():
        raise SpecError(f"no such file: {name}", fix="FILE.py or FILE.py::FUNCTION")
    if function:
        return kernels_of(*_function(path, function, operands))
    with recorded() as calls, contextlib.suppress(SystemExit):  # as scripts end
        _run(path, "__main__")
    if not calls:
        raise SpecError(
            f"{name} calls no kernel", fix="name a function in it: FILE.py::FUNCTION"
        )
    return [Site(call) for call in calls]


def _run(path: Path, name: str) -> dict[str, Any]:
    """What a file defines. What it prints goes where messages do."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    own, sys.argv = sys.argv, [str(path)]  # the command's options are not the script's
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return runpy.run_path(str(path), run_name=name)
    finally:
        sys.argv = own


def _function(
    path: Path, name: str, operands: str
) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
    found = _run(path, path.stem)
    if not callable(found.get(name)):
        known = [n for n, x in found.items() if inspect.isfunction(x) and n[0] != "_"]
        raise SpecError(
            f"{path} has no function {name!r}", fix=f"one of {', '.join(known)}"
        )
    function = found[name]
    arguments = arrays(operands)
    needed = _required(function)
    if len(arguments) < len(needed):
        missing = ", ".join(needed[len(arguments) :])
        raise SpecError(
            f"{name} needs operands: {missing}",
            [("given", operands or "none")],
            fix="--args 'f32[8,128], i32[4]': an element type and a shape each",
        )
    return function, *arguments


def _required(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        p.name
        for p in parameters
        if p.kind in kinds and p.default is inspect.Parameter.empty
    ]


def arrays(text: str) -> list[jax.ShapeDtypeStruct]:
    """The arrays that a text like "f32[8,128], i32[4]" describes.

    Raises:
        SpecError: the text cannot be read.
    """
    found, position = [], 0
    while position < len(text.rstrip()):
        match = _ARRAY.match(text, position)
        if match is None or match[1] not in DTYPES:
            raise SpecError(
                f"operands cannot be read from {text[position:].strip()!r}",
                [("element types", ", ".join(DTYPES))],
                fix="write 'f32[8,128], i32[4]'; a scalar is 'f32[]'",
            )
        shape = tuple(int(n) for n in match[2].split(",") if n.strip())
        found.append(jax.ShapeDtypeStruct(shape, DTYPES[match[1]].np))
        position = match.end()
        if text[position : position + 1] in (",", ";"):
            position += 1
    return found
