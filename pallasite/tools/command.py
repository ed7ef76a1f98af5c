"""The commands `pallasite check` and `pallasite explain`.

A command runs in a child process: what ends that (a compiler's abort, a signal) is
reported like any other result, with an exit status of its own.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

OK, REFUSED, USAGE, ENDED = 0, 1, 2, 3

STATUS = """exit status:
  0  every kernel compiles for every target
  1  some kernel does not; its report says why, and at which line
  2  the command is wrong: no such file, function or target, or no kernel in it
  3  the process that compiled was ended by a signal
"""
CHECK = f"""examples:
  pallasite check train.py --target tpu:v5e,tpu:v6e
  pallasite check kernels.py::matmul --args 'bf16[4096,4096], bf16[4096,4096]'
  pallasite check kernels.py::matmul --args 'f32[512,512]' --json --dump texts/

{STATUS}"""
EXPLAIN = f"""examples:
  pallasite explain train.py
  pallasite explain kernels.py::softmax --args 'f32[8192,2048]'
  pallasite explain kernels.py::softmax --args 'f32[8192,2048]' --target tpu:v6e

{STATUS}"""


def add_parsers(commands: Any) -> None:
    """Add both commands to the subparsers of `pallasite`."""
    check = _parser(
        commands, "check", CHECK, "compile kernels for chips that need not be here"
    )
    check.set_defaults(target="tpu:v5e,tpu:v6e")
    check.add_argument("--dump", metavar="DIR", help="keep the text of every stage")
    check.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for one kernel on a TPU"
    )
    explain = _parser(
        commands, "explain", EXPLAIN, "say what runs kernels, and what limits them"
    )
    explain.add_argument(
        "--no-measure", action="store_true", help="run nothing, ask no compiler"
    )


def _parser(commands: Any, name: str, epilog: str, text: str) -> Any:
    parser = commands.add_parser(
        name,
        help=text,
        description=text.capitalize() + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="FILE[::FUNCTION]")
    parser.add_argument(
        "--target", help="cpu, tpu:v6e, gpu:h200, ...; several with commas"
    )
    parser.add_argument(
        "--args", default="", help="operands of FUNCTION: 'f32[8,128], i32[4]'"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the command that was given; the exit status.

    Args:
        options: what the parser made of them.
        arguments: as they were written.
    """
    if options.in_child:
        return _here(options)
    command = [sys.executable, "-m", "pallasite", *arguments, "--in-child"]
    status = subprocess.run(command, check=False).returncode
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    text = f"the process that compiled {options.source} was ended by {name}"
    if options.json:
        print(json.dumps({"ok": False, "error": text, "kernels": []}))
    print(f"pallasite {options.command}: {text}", file=sys.stderr)
    return ENDED


def _here(options: argparse.Namespace) -> int:
    from pallasite.errors import PallasError

    line = _Line()
    try:
        report = _report(options, line)
    except PallasError as error:
        line.clear()
        if options.json:
            print(json.dumps({"ok": False, "error": str(error), "kernels": []}))
        print(f"pallasite {options.command}: {error}", file=sys.stderr)
        return USAGE
    line.clear()
    print(json.dumps(report.as_json(), indent=1) if options.json else report)
    return OK if report.ok else REFUSED


def _report(options: argparse.Namespace, line: "_Line") -> Any:
    from pallasite.tools.aot import Aot
    from pallasite.tools.sources import sites_of
    from pallasite.tools.timing import explain_sites

    targets = [t for t in (options.target or "").split(",") if t]
    _known(targets)
    line.show(f"reading {options.source}")
    sites = sites_of(options.source, options.args)
    if options.command == "explain":
        wanted = False if options.no_measure else None
        return explain_sites(sites, targets, wanted)
    dump = Path(options.dump) if options.dump else None
    return Aot(tuple(sites)).compile(
        *targets, dump=dump, timeout=options.timeout, progress=line.show
    )


def _known(targets: list[str]) -> None:
    """Refuse a wrong name before anything is run."""
    from pallasite.target import named

    for target in targets:
        named(target)


class _Line:
    """One line on the terminal that says what is going on; none elsewhere."""

    def __init__(self) -> None:
        self._shown = 0
        self._terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self._terminal:
            padding = " " * max(self._shown - len(text), 0)
            print(f"\r{text}{padding}", end="", file=sys.stderr, flush=True)
            self._shown = len(text)

    def clear(self) -> None:
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0
