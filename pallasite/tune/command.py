"""`pallasite tune`: tunes a function named on the command line, or lists what is known.

Its arguments and implementation, used by `__main__.py`.
"""

import argparse
import sys
from pathlib import Path

from pallasite.errors import PallasError
from pallasite.tools.command import USAGE, add_source, check_writable, operands_of
from pallasite.tools.sources import function_of, split
from pallasite.tune import table as tables

EXAMPLES = """examples:
  pallasite tune gated_linear_unit --args 'bf16[4096,8192], bf16[4096,8192]'
  pallasite tune kernels.py::matmul --args 'f32[512,512], f32[512,512]' --target v5e
  pallasite tune            list what was tuned

exit status: 0; 2 if the command is wrong; 130 if it was interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_source(parser, nargs="?")
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
        return _forget(options.source)
    if options.source is None:
        return _list()
    try:
        return _tune(options)
    except PallasError as error:
        print(f"pallasite tune: {error}", file=sys.stderr)
        return USAGE


def _tune(options: argparse.Namespace) -> int:
    from pallasite.tune.autotune import autotune

    function, operands = function_of(options.source, operands_of(options))
    if options.output:
        check_writable(Path(options.output), "--output FILE.json")
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
    name = function and split(function)[1]
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
