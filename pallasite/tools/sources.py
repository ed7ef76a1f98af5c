"""Kernels in a file: `FILE.py::FUNCTION` with operands, or all of a script."""

import contextlib
import difflib
import importlib
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
from pallasite.errors import PallasError, SpecError, one_of
from pallasite.ir.nodes import Loc
from pallasite.ir.types import DTYPES
from pallasite.primitive import recorded
from pallasite.sites import Site
from pallasite.tools.traces import Trace, kernels_of

OPERATIONS = "pallasite.kernels"
_ARRAY = re.compile(r"\s*(\w+)\[([\d,\s]*)\]\s*")


def trace_of(source: str, operands: str = "") -> Trace:
    """Makes the kernel calls that a source names; a script's are made only once.

    Args:
        source: as for `function_of`, or "FILE.py" for a script, which is run.
        operands: of the function, such as "f32[8,128], i32[4]".

    Raises:
        SpecError: no such file, function or kernel, or the operands do not match.
    """
    place, function = split(source)
    if function:
        found, arguments = function_of(source, operands)
        return partial(_traced, found, *arguments)
    path = _file(place)
    with recorded() as calls, kept(), contextlib.suppress(SystemExit):  # as scripts end
        _run(path, "__main__")
    if not calls:
        raise SpecError(
            f"{place} calls no kernel", fix="name a function in it: FILE.py::FUNCTION"
        )
    sites = [Site(call) for call in calls]
    return lambda: sites


def split(source: str) -> tuple[str, str]:
    """The file or module that a source names, and the function in it, if any.

    A name alone is an operation of `pallasite.kernels`; one colon does for two.
    """
    place, colons, function = source.partition("::")
    if not colons and ":" in source:
        place, _, function = source.rpartition(":")
    if not function and place.isidentifier() and not Path(place).is_file():
        return OPERATIONS, place
    return place, function


def function_of(
    source: str, operands: str = ""
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The function that a source names, and its operands.

    Args:
        source: "FILE.py::FUNCTION", "MODULE::FUNCTION", or an operation of
            `pallasite.kernels`.
        operands: such as "f32[8,128], i32[4]".

    Raises:
        SpecError: no such file, module or function, or the operands do not match.
    """
    place, name = split(source)
    if not name:
        raise SpecError(f"{source} names no function", fix="FILE.py::FUNCTION")
    if place.endswith(".py") or Path(place).is_file():
        path = _file(place)
        found = _run(path, path.stem)
    else:
        found = _module(place)
    if not callable(found.get(name)):
        known = [n for n, x in found.items() if inspect.isroutine(x) and n[0] != "_"]
        raise SpecError(f"{place} has no function {name!r}", fix=one_of(name, known))
    function, arguments = found[name], arrays(operands)
    _check_operands(function, name, arguments, operands)
    return function, arguments


def _file(place: str) -> Path:
    path = Path(place)
    if not path.is_file():
        near = (
            [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        )
        fix = "FILE.py or FILE.py::FUNCTION"
        meant = difflib.get_close_matches(str(path), near, 1)
        raise SpecError(
            f"no such file: {place}",
            fix=f"did you mean {meant[0]!r}? {fix}" if meant else fix,
        )
    return path


def _module(place: str) -> dict[str, Any]:
    try:
        return importlib.import_module(place).__dict__
    except ImportError as error:
        raise SpecError(
            f"no such module: {place}",
            [("error", error)],
            fix="MODULE::FUNCTION, with a module that Python can import here",
        ) from None


def _traced(function: Callable[..., Any], *arguments: Any) -> list[Site]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    path = Path(code.co_filename if code is not None else "")
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


def _check_operands(
    function: Callable[..., Any], name: str, arguments: list[Any], operands: str
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
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


def _meant(text: str) -> str:
    """A dtype by another name, such as float32 for f32."""
    name = re.match(r"\s*(\w*)", text)[1]  # pyright: ignore[reportOptionalSubscript]
    if name in DTYPES:
        return ""  # the shape is what cannot be read
    by_name = {d.np.name: own for own, d in DTYPES.items() if d.np is not None}
    near = difflib.get_close_matches(name, [*DTYPES, *by_name], 1)
    return f"did you mean {by_name.get(near[0], near[0])!r}? " if near else ""


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
                fix=f"{_meant(text[position:])}write 'f32[8,128], i32[4]'; a scalar is "
                "'f32[]'",
            )
        shape = tuple(int(n) for n in match[2].split(",") if n.strip())
        found.append(jax.ShapeDtypeStruct(shape, DTYPES[match[1]].np))
        position = match.end()
        if text[position : position + 1] in (",", ";"):
            position += 1
    return found
