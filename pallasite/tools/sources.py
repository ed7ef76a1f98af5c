"""Kernels in a file: `FILE::FUNCTION` with operands, or all that a script lowers."""

import contextlib
import inspect
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pallasite.configured import kept
from pallasite.errors import PallasError, SpecError
from pallasite.ir.nodes import Loc
from pallasite.ir.types import DTYPES
from pallasite.primitive import recorded
from pallasite.sites import Site
from pallasite.tools.traces import Trace, kernels_of

_ARRAY = re.compile(r"\s*(\w+)\[([\d,\s]*)\]\s*")


def trace_of(source: str, operands: str = "") -> Trace:
    """Makes the kernel calls that a source names; a script's are made only once.

    Args:
        source: "FILE::FUNCTION", or "FILE" for a script, which is run.
        operands: of the function, such as "f32[8,128], i32[4]".

    Raises:
        SpecError: no such file, function or kernel, or the operands do not match.
    """
    name, _, function = source.partition("::")
    path = Path(name)
    if not path.is_file():
        raise SpecError(f"no such file: {name}", fix="FILE.py or FILE.py::FUNCTION")
    if function:
        found, *arguments = _function(path, function, operands)
        return partial(_traced, path, found, *arguments)
    with recorded() as calls, kept(), contextlib.suppress(SystemExit):  # as scripts end
        _run(path, "__main__")
    if not calls:
        raise SpecError(
            f"{name} calls no kernel", fix="name a function in it: FILE.py::FUNCTION"
        )
    sites = [Site(call) for call in calls]
    return lambda: sites


def _traced(path: Path, function: Callable[..., Any], *arguments: Any) -> list[Site]:
    with _blamed(path):
        return kernels_of(function, *arguments)


@contextlib.contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Reports an exception from the user's code with its line instead of the whole
    traceback; our own errors already have a line."""
    try:
        yield
    except PallasError:
        raise
    except SyntaxError as error:
        at = Loc(str(error.filename or path), error.lineno or 0)
        fix = f"`python {path}` shows where"
        raise SpecError(f"{path} is not Python: {error.msg}", at=at, fix=fix) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if os.path.abspath(f.filename) == str(path.resolve())]
        last = own[-1] if own else None
        at = last and Loc(last.filename, last.lineno or 0, last.name.strip("<>"))
        first = (str(error).splitlines() or [""])[0]
        raise SpecError(
            f"{path} raises {type(error).__name__}: {first}",
            at=at,
            fix="the error is in this file: make it run with these operands",
        ) from error


def _run(path: Path, name: str) -> dict[str, Any]:
    """What a file defines. Its output goes to stderr, like messages."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    own, sys.argv = sys.argv, [str(path)]  # the command's options are not the script's
    try:
        with contextlib.redirect_stdout(sys.stderr), _blamed(path):
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
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function, *arguments
    try:
        signature.bind(*arguments)
    except TypeError as error:
        text = f"{name}{signature} does not accept {len(arguments)} operands: {error}"
        raise SpecError(
            text,
            [("given", operands or "none")],
            fix="--args 'f32[8,128], i32[4]': an element type and a shape for each "
            "operand; other arguments need defaults",
        ) from error
    return function, *arguments


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
                f"cannot parse operands from {text[position:].strip()!r}",
                [("element types", ", ".join(DTYPES))],
                fix="write 'f32[8,128], i32[4]'; a scalar is 'f32[]'",
            )
        shape = tuple(int(n) for n in match[2].split(",") if n.strip())
        found.append(jax.ShapeDtypeStruct(shape, DTYPES[match[1]].np))
        position = match.end()
        if text[position : position + 1] in (",", ";"):
            position += 1
    return found
