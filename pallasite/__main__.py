"""Command line: `pallasite run`, `check`, `explain`, `prove`, `tune` and others.

Also as `python -m pallasite ...`.
"""

import argparse
import glob
import importlib.metadata
import os
import platform
import runpy
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `pallasite` command; the exit status."""
    from pallasite.errors import one_of
    from pallasite.tools import command as judge
    from pallasite.tune import command as tuner

    if argv is None:
        _quiet_libtpu()
    parser = argparse.ArgumentParser(prog="pallasite", description=__doc__)
    parser.add_argument("--version", action="version", version=f"pallasite {_own()}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="run a script with Pallasite in place of jax.experimental.pallas"
    )
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)
    commands.add_parser(
        "doctor",
        help="print versions and the available backends, or why one is not available",
    )
    cache = commands.add_parser(
        "cache", help="show the on-disk cache of compiled kernels and configurations"
    )
    cache.add_argument(
        "--clear",
        action="store_true",
        help="delete all of it, and what was tuned",
    )
    tune = commands.add_parser("tune", help="autotune: find fast kernel configurations")
    tuner.add_arguments(tune)
    judge.add_parsers(commands)
    commands.add_parser(
        "bench",
        help="measure pallasite.kernels beside XLA, and cuDNN, torch and Tokamax where "
        "they are here; from a clone",
        add_help=False,  # benchmarks/bench.py has its own
    )
    given = sys.argv[1:] if argv is None else argv
    if given and not given[0].startswith("-") and given[0] not in commands.choices:
        parser.error(f"no command {given[0]!r}: {one_of(given[0], commands.choices)}")
    if given[:1] == ["bench"]:
        return _bench(given[1:])
    options, rest = parser.parse_known_args(given)
    _take(rest, options, commands.choices[options.command])
    if options.command in ("check", "explain", "explore", "profile", "prove"):
        if options.in_child:
            _install()  # kernels written for upstream are checked, too
        return judge.run(options, given)
    if options.command == "run":
        return _run(options.script, options.args)
    if options.command == "tune":
        return tuner.run(options)
    if options.command == "cache":
        return _cache(options.clear)
    return _doctor()


def _take(rest: list[str], options: Any, parser: argparse.ArgumentParser) -> None:
    """Operands after an option are operands; anything else is an error."""
    from pallasite.errors import one_of

    unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        known = [name for name in parser._option_string_actions if name != "--in-child"]
        parser.error(f"no option {unknown[0]}: {one_of(unknown[0], known)}")
    if rest and not hasattr(options, "operands"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.operands += rest


def _quiet_libtpu() -> None:
    """Keep libtpu, which JAX asks for TPUs, from printing that it has found none."""
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return
    from pallasite.runtime.aot import NO_TPU

    for name, value in NO_TPU.items():
        os.environ.setdefault(name, value)


def _bench(arguments: list[str]) -> int:
    """Benchmarks are part of the source, not of what is installed from it."""
    script = Path(__file__).parents[1] / "benchmarks" / "bench.py"
    if not script.exists():
        fix = "clone the repository, `pip install -e .` there, and run it again"
        print(
            f"pallasite bench: {script} does not exist\n  fix  {fix}", file=sys.stderr
        )
        return 2
    return runpy.run_path(str(script))["main"](arguments)


def _cache(clear: bool) -> int:
    """The location and size of the cache of compiled code; clears it if asked."""
    from pallasite import config
    from pallasite.runtime import cache
    from pallasite.tune import table

    place = cache.folder()
    if place is None:
        print("the cache is disabled")
        return 0
    found = cache.entries()
    size = sum(entry.size for entry in found) / 2**20
    limit = config.get("cache_bytes") / 2**20
    print(f"{'folder':<8} {place}")
    print(f"{'holds':<8} {len(found)} kernels, {size:.1f} of at most {limit:.0f} MiB")
    print(f"{'':<8} {len(table.user_table().entries)} tuned configurations")
    if clear:
        kernels, configurations = cache.clear(), table.forget()
        text = f"{kernels} kernels, {configurations} tuned configurations"
        print(f"{'removed':<8} {text}")
    return 0


def _run(script: str, args: list[str]) -> int:
    if not os.path.exists(script):
        print(f"pallasite run: no such file: {script}", file=sys.stderr)
        return 2
    _install()
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
    return 0


def _install() -> None:
    from pallasite.install import install

    install()


def _own() -> str:
    from pallasite import __version__

    return __version__


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _doctor() -> int:
    """Versions, then one line per backend: usable, or why not."""
    from pallasite import __version__

    rows = [("pallasite", __version__), ("python", platform.python_version())]
    packages = ("jax", "jaxlib", "numpy", "ml_dtypes", "llvmlite", "libtpu")
    rows += [(p, _version(p) or "not installed") for p in packages]
    for name, value in rows:
        print(f"{name:<12} {value}")
    import jax

    devices = ", ".join(f"{d.platform}:{d.id}" for d in jax.devices())
    print(f"{'devices':<12} {devices}")
    print()
    for name, state in backend_states():
        print(f"{name:<12} {state}")
    print()
    for where, chosen in default_choices():
        print(f"{'on ' + where:<12} {chosen}")
    return 0


def backend_states() -> list[tuple[str, str]]:
    """Each backend and whether it can be used here."""
    from pallasite.backends import base

    present = _present_platforms()
    states = [("interpret", "ready: the emulation and checked mode run anywhere")]
    return states + [(name, _state(name, present)) for name in base.names()]


def default_choices() -> list[tuple[str, str]]:
    """Each platform and the default backends there."""
    from pallasite import config
    from pallasite.backends import base

    named = config.get("backend")
    rows = []
    for where, names in base.DEFAULTS.items():
        chosen = ", else ".join((*names, "the emulation"))
        if named == "interpret":
            chosen = "the emulation (PALLASITE_BACKEND)"
        elif named and where in base.get(named).platforms:
            chosen = f"{named} (PALLASITE_BACKEND)"
        rows.append((where, chosen))
    return rows


def _present_platforms() -> set[str]:
    """Platforms with a device here, named as backends name them ("cuda", not "gpu")."""
    import jax

    from pallasite.backends import base

    found = set()
    for where in base.DEFAULTS:
        try:
            found |= {where} if jax.devices(where) else set()
        except RuntimeError:
            continue
    return found


def usable_backends() -> list[str]:
    """Native backends that can run kernels on a device present here."""
    return [name for name, state in backend_states()[1:] if state.startswith("ready")]


def _state(name: str, present: set[str]) -> str:
    from pallasite.backends import base
    from pallasite.errors import SpecError

    try:
        backend = base.get(name)
    except (ImportError, AttributeError, SpecError) as error:
        return f"not available: {error}"
    here = bool(present & set(backend.platforms))
    wanted, lacking = " or ".join(backend.platforms), backend.missing(here)
    if here and lacking:
        return f"not available: {lacking}"
    if here:
        return f"ready: {backend.version()}"
    if lacking:
        return f"generates text only; no {wanted} device, and {lacking}"
    return f"compiles ahead of time; no {wanted} device to run on"


if __name__ == "__main__":
    sys.exit(main())
