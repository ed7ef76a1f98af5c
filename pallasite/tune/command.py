"""`pallasite tune`: tunes a function named on the command line, or lists what is known.

Its arguments and implementation, used by `__main__.py`.
"""

import argparse
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pallasite.errors import PallasError, SpecError
from pallasite.tune import table as tables

EXAMPLES = """examples:
  pallasite tune gated_linear_unit 'bf16[4096,8192]' 'bf16[4096,8192]'
  pallasite tune my_kernels.py:matmul 'f32[1024,1024]' 'f32[1024,1024]' --target v5e
  pallasite tune            list what was tuned"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "function",
        nargs="?",
        help="an operation of pallasite.kernels, FILE.py:NAME or MODULE:NAME",
    )
    parser.add_argument(
        "operands", nargs="*", help="dtype and shape of each argument: 'bf16[8,128]'"
    )
    parser.add_argument("--target", help="the chip; default: the one JAX uses")
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        help="time limit in seconds per kernel (default: 60)",
    )
    parser.add_argument("--workers", type=int, help="number of compiling processes")
    parser.add_argument(
        "--again", action="store_true", help="search again even if a result is stored"
    )
    parser.add_argument(
        "--forget",
        action="store_true",
        help="remove what is stored, of FUNCTION or of everything, and tune nothing",
    )
    parser.add_argument("--output", help="also write the results to this file")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    if options.forget:
        return _forget(options.function)
    if options.function is None:
        return _list()
    try:
        return _tune(options)
    except PallasError as error:
        print(f"pallasite tune: {error}", file=sys.stderr)
        return 1


def _tune(options: argparse.Namespace) -> int:
    from pallasite.tune.autotune import autotune

    function = _function(options.function)
    operands = [_operand(text) for text in options.operands]
    try:
        inspect.signature(function).bind(*operands)
    except TypeError as error:
        raise SpecError(
            f"'{options.function}' does not accept these operands",
            [("operands", len(operands)), ("error", error)],
            fix="pass one per argument; to fix other arguments, tune a function of "
            "your own: FILE.py:NAME",
        ) from None
    if options.output and not Path(options.output).absolute().parent.is_dir():
        raise SpecError(
            "there is no folder for the results",  # said before the search, not after
            [("--output", options.output)],
            fix="create it first",
        )
    found = autotune(
        function,
        target=options.target,
        limit=options.limit,
        workers=options.workers,
        again=options.again,
    )(*operands)
    print(found)
    if options.output:
        found.save(options.output)
    if found.interrupted:
        print("interrupted: the results so far are kept", file=sys.stderr)
        return 130
    return 0


def _forget(function: str | None) -> int:
    name = function and function.rpartition(":")[2]
    count = tables.forget(name)
    what = f" of {name}" if name else ""
    print(f"removed {count} configurations{what} from {tables.user_path()}")
    if name and not count:
        known = sorted({e.site.kernel for e in tables.user_table().entries})
        print(f"stored are those of: {', '.join(known) or 'nothing'}", file=sys.stderr)
        return 1
    return 0


def _list() -> int:
    path = tables.user_path()
    entries = tables.user_table().entries
    print(f"{path or 'nothing is stored on disk'}: {len(entries)} configurations")
    for entry in entries:
        values = ", ".join(f"{name}={value}" for name, value in entry.config.items())
        print(f"{entry.chip}  {entry.site}\n    {values}")
    return 0


def _function(name: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    if not place:
        place, attribute = "pallasite.kernels", name
    if place.endswith(".py"):
        if not Path(place).exists():
            raise SpecError(
                f"no such file: {place}", fix="FILE.py:FUNCTION, or MODULE:FUNCTION"
            )
        sys.path.insert(0, str(Path(place).resolve().parent))
        found = runpy.run_path(place)
    else:
        try:
            found = importlib.import_module(place).__dict__
        except ImportError as error:
            raise SpecError(
                f"no such module: {place}",
                [("error", error)],
                fix="MODULE:FUNCTION, with a module that Python can import here",
            ) from None
    if not callable(found.get(attribute)):
        raise SpecError(
            f"{place} has no function {attribute!r}",
            fix="name it FILE.py:NAME or MODULE:NAME",
        )
    return found[attribute]


def _operand(text: str) -> Any:
    """ "bf16[8,128]" as a `jax.ShapeDtypeStruct`."""
    import jax

    from pallasite.ir.types import DTYPES

    parts = re.fullmatch(r"(\w+)\[([\d, ]*)\]", text)
    dtype = DTYPES.get(parts[1]) if parts else None
    if parts is None or dtype is None:
        raise SpecError(
            f"{text!r} is not a dtype with a shape",
            fix="write it as 'bf16[8,128]'; dtypes are " + ", ".join(DTYPES),
        )
    sizes = tuple(int(n) for n in parts[2].split(",") if n.strip())
    return jax.ShapeDtypeStruct(sizes, dtype.np)
