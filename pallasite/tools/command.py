"""The commands `pallasite check`, `explain`, `explore`, `profile` and `prove`.

A command runs in a child process: whatever ends that process (a compiler's abort, a
signal) is reported like any other result, with its own exit status.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

OK, REFUSED, USAGE, ENDED, NOT_COMPILED = 0, 1, 2, 3, 4

STATUS = """exit status:
  0  every kernel compiles for every target
  1  some kernel does not; its report says why, and at which line
  2  the command is wrong: no such file, function or target, no kernel in it, a
     file that raises an error, or one that cannot be written
  3  the compiling process was killed by a signal
"""
# `explain` and `explore` need no compiler of the target; `check` does.
COMPILED = """  4  nothing was refused, but a target has no compiler on this computer
     (libtpu for a TPU, NVRTC for a GPU's backend cuda, the GPU itself for triton)
"""
CHECK = f"""examples:
  pallasite check train.py --target tpu:v5e,tpu:v6e
  pallasite check kernels.py::matmul --args 'bf16[4096,4096], bf16[4096,4096]'
  pallasite check kernels.py::matmul --args 'f32[512,512]' --json --dump texts/

{STATUS}{COMPILED}"""
EXPLAIN = f"""examples:
  pallasite explain train.py
  pallasite explain kernels.py::softmax --args 'f32[8192,2048]'
  pallasite explain kernels.py::softmax --args 'f32[8192,2048]' --target tpu:v6e

{STATUS}"""
EXPLORE = f"""examples:
  pallasite explore train.py
  pallasite explore kernels.py::softmax --args 'f32[8192,2048]' -o softmax.html
  pallasite explore kernels.py::softmax --args 'f32[8192,2048]' --target cpu,tpu:v6e
  pallasite explore kernels.py::softmax --args 'f32[8192,2048]' --serve

{STATUS}"""
PROVE = """examples:
  pallasite prove train.py
  pallasite prove kernels.py::softmax --args 'f32[8192,2048]'
  pallasite prove kernels.py::softmax --args 'f32[8192,2048]' --claims bounds,races

exit status:
  0  no claim is refuted
  1  some claim is; the report has a counterexample and the line
  2  the command is wrong: no such file, function or claim, no kernel in it, or a
     file that raises an error
"""
PROFILE = """examples:
  pallasite profile kernels.py::softmax --args 'f32[8192,2048]'
  pallasite profile train.py::step --args 'f32[8,128]' --runs 5 --trace trace.json

exit status: 0; 2 if the command is wrong, or this device cannot be recorded
"""
PORT = 8765


def add_parsers(commands: Any) -> None:
    """Add the commands to the subparsers of `pallasite`."""
    check = _parser(
        commands,
        "check",
        CHECK,
        "compile kernels ahead of time, for chips that need not be present",
    )
    check.set_defaults(target="tpu:v5e,tpu:v6e")
    check.add_argument(
        "--dump", metavar="DIR", help="write the text of every stage to this directory"
    )
    check.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="time limit in seconds per TPU kernel",
    )
    explain = _parser(
        commands,
        "explain",
        EXPLAIN,
        "show which backend runs each kernel, its cost, and what limits it",
    )
    explore = _parser(
        commands,
        "explore",
        EXPLORE,
        "write an HTML page that shows kernels at every stage of compilation",
    )
    explore.add_argument(
        "-o", "--output", metavar="PAGE", help="default: FILE with the suffix .html"
    )
    explore.add_argument(
        "--serve",
        nargs="?",
        const=PORT,
        type=int,
        metavar="PORT",
        help=f"show the page at http://localhost:{PORT}, regenerated on reload",
    )
    for parser in (explain, explore):
        parser.add_argument(
            "--no-measure",
            action="store_true",
            help="run nothing, and get no compiler estimates",
        )
    _add_profile(commands)
    _add_prove(commands)


def _add_profile(commands: Any) -> None:
    timed = _parser(
        commands,
        "profile",
        PROFILE,
        "run a function and show which of its kernels take the time",
        targets=False,
    )
    timed.add_argument("--runs", type=int, help="default: for half a second")
    timed.add_argument(
        "--trace", metavar="FILE", help="also write a trace for Perfetto to this file"
    )


def _add_prove(commands: Any) -> None:
    prove = _parser(
        commands,
        "prove",
        PROVE,
        "prove or refute claims about kernels, for all inputs",
        targets=False,
    )
    prove.add_argument(
        "--claims", default="", help="bounds, coverage, ...; default: all of them"
    )
    prove.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="REF=LOW:HIGH",
        help="integers in an operand, by the name of the kernel's parameter, such as "
        "table_ref=0:64; may be given several times",
    )


def _parser(
    commands: Any, name: str, epilog: str, text: str, targets: bool = True
) -> Any:
    parser = commands.add_parser(
        name,
        help=text,
        description=text.capitalize() + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source(parser)
    if targets:
        parser.add_argument(
            "--target", help="cpu, tpu:v6e, gpu:h200, ...; comma-separated"
        )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    return parser


def add_source(parser: Any, nargs: Any = None) -> None:
    """Add the arguments that name a function and its operands, alike everywhere."""
    parser.add_argument(
        "source",
        nargs=nargs,
        metavar="FILE[::FUNCTION]",
        help="a script, a function in a file or module, or an operation of "
        "pallasite.kernels by its name",
    )
    parser.add_argument(
        "operands", nargs="*", help="the same as --args, one argument each"
    )
    parser.add_argument(
        "--args", default="", help="operands of FUNCTION: 'f32[8,128], i32[4]'"
    )


def operands_of(options: argparse.Namespace) -> str:
    return ", ".join(filter(None, [options.args, *options.operands]))


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the given command; return its exit status.

    Args:
        options: the parsed arguments.
        arguments: the arguments as written.
    """
    if options.in_child:
        return _here(options)
    command = [sys.executable, "-m", "pallasite", *arguments, "--in-child"]
    if getattr(options, "serve", None) is not None:
        from pallasite.tools.explorer.serve import serve

        return serve(command, options.serve)
    status = subprocess.run(command, check=False).returncode
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    text = f"the process that compiled {options.source} was killed by {name}"
    if options.json:
        print(json.dumps({"ok": False, "error": text, "kernels": []}))
    print(f"pallasite {options.command}: {text}", file=sys.stderr)
    return ENDED


def _here(options: argparse.Namespace) -> int:
    from pallasite.errors import PallasError

    line = _Line()
    try:
        if options.command == "explore":
            return _explore(options, line)
        if options.command == "profile":
            return _profile(options, line)
        report = _report(options, line)
    except (PallasError, OSError) as error:  # or a file that cannot be written
        line.clear()
        if options.json:
            print(json.dumps({"ok": False, "error": str(error), "kernels": []}))
        print(f"pallasite {options.command}: {error}", file=sys.stderr)
        return USAGE
    line.clear()
    print(json.dumps(report.as_json(), indent=1) if options.json else report)
    if report.refused:
        return REFUSED
    return OK if report.ok else NOT_COMPILED


def _report(options: argparse.Namespace, line: "_Line") -> Any:
    from pallasite.tools.aot import Aot
    from pallasite.tools.sources import trace_of
    from pallasite.tools.timing import explain_sites

    if options.command == "prove":
        return _proof(options, line)
    targets = [t for t in (options.target or "").split(",") if t]
    _known(targets)
    line.show(f"reading {options.source}")
    trace = trace_of(options.source, operands_of(options))
    if options.command == "explain":
        wanted = False if options.no_measure else None
        return explain_sites(trace, targets, wanted)
    dump = Path(options.dump) if options.dump else None
    return Aot(trace).compile(
        *targets, dump=dump, timeout=options.timeout, progress=line.show
    )


def _proof(options: argparse.Namespace, line: "_Line") -> Any:
    from pallasite.proofs.kernels import prove_source

    line.show(f"reading {options.source}")
    claims = tuple(c.strip() for c in options.claims.split(",") if c.strip())
    assume = dict(map(_range_of, options.assume))
    return prove_source(options.source, operands_of(options), claims, assume)


def _range_of(text: str) -> tuple[str | int, range]:
    """`REF=LOW:HIGH`, or `REF=LOW:HIGH:STEP`."""
    from pallasite.errors import SpecError

    name, _, numbers = text.partition("=")
    try:
        return int(name) if name.isdigit() else name, range(
            *(int(n) for n in numbers.split(":", 2))
        )
    except (TypeError, ValueError):
        raise SpecError(
            f"--assume takes REF=LOW:HIGH, not {text!r}",
            fix="--assume table_ref=0:64 for numbers from 0 to 63",
        ) from None


def _explore(options: argparse.Namespace, line: "_Line") -> int:
    from pallasite.language.trace import jaxprs_kept
    from pallasite.target import named
    from pallasite.tools.explorer.page import page_of
    from pallasite.tools.sources import trace_of
    from pallasite.tools.timing import this_computer
    from pallasite.tools.traces import traced_for

    targets = [t for t in (options.target or "").split(",") if t]
    _known(targets)
    file = options.source.partition("::")[0]
    path = Path(options.output or Path(Path(file).name).with_suffix(".html"))
    check_writable(path, "-o PAGE.html")
    line.show(f"reading {options.source}")
    with jaxprs_kept() as jaxprs:
        trace = trace_of(options.source, operands_of(options))
        # A page has one list of kernels: those of the first target.
        first = named(targets[0]) if targets else this_computer()
        sites = traced_for(first, trace)
    measure = False if options.no_measure else None
    page = page_of(options.source, sites, targets, jaxprs, measure, line.show)
    line.clear()
    path.write_text(page.html, encoding="utf-8")
    data = {"ok": page.ok, "page": str(path), "bytes": path.stat().st_size}
    print(json.dumps(data) if options.json else f"{path}: {data['bytes']:,} bytes")
    return OK if page.ok else REFUSED


def _profile(options: argparse.Namespace, line: "_Line") -> int:
    from pallasite.tools.profile import profile
    from pallasite.tools.sources import function_of

    if options.trace:
        check_writable(Path(options.trace), "--trace FILE.json")
    line.show(f"reading {options.source}")
    function, operands = function_of(options.source, operands_of(options))
    line.show("running it")
    found = profile(function, options.runs)(*operands)
    line.clear()
    if options.trace:
        found.save(options.trace)
    print(json.dumps(found.as_json()) if options.json else found)
    return OK


def check_writable(path: Path, option: str) -> None:
    """Reject a place that no file can have before anything is run."""
    from pallasite.errors import SpecError

    if path.is_dir() or not path.absolute().parent.is_dir():
        kind = "a directory" if path.is_dir() else "in a directory that does not exist"
        raise SpecError(
            "no file can be written there",
            [("path", f"{path} is {kind}")],
            fix=f"{option}, a file in an existing directory",
        )


def _known(targets: list[str]) -> None:
    """Reject an unknown name before anything is run."""
    from pallasite.target import named

    for target in targets:
        named(target)


class _Line:
    """A status line on the terminal; nothing if the output is not a terminal."""

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
