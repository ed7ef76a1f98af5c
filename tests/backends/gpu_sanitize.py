"""Kernels on a GPU under NVIDIA's compute-sanitizer, in several processes.

    python -m tests.backends.gpu_sanitize                     # memcheck
    python -m tests.backends.gpu_sanitize --tool racecheck    # or synccheck, initcheck

`memcheck` sees the zoo through both backends and the checks of `gpu_check.py`; the
other tools see what `cuda` emits, because Triton's code is not ours. Every array is an
allocation of its own, so that a step past its end is seen. A process that dies is
started again after the kernel it died of. Exit code 1: something was reported.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

# Lines of the processes to the one that started them.
STARTED, ENDED = "@started ", "@ended "
BACKENDS = {"memcheck": ("cuda", "triton")}  # other tools: `cuda`
# Of the checks, those that are quick under a sanitizer; they run many shapes each.
CHECKS = (
    "add",
    "softmax",
    "layernorm",
    "gelu",
    "product small",
    "product nk",
    "product km",
    "product odd",
    "product i8",
    "attention grid 64x64",
    "attention grid causal 64x64",
    "attention loop 64",
)
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


# --- one process, under the sanitizer ---


def subjects(tool: str) -> list[str]:
    """Names of all that runs: of the zoo with a backend, and of checks."""
    from tests.zoo import all_cases

    backends = BACKENDS.get(tool, ("cuda",))
    zoo = [f"zoo {c.name} {b}" for c in all_cases() for b in backends]
    return [*(f"check {name}" for name in CHECKS), *zoo]


def run(subject: str) -> None:
    import jax

    from tests.backends.cuda import gpu_check
    from tests.zoo import all_cases
    from tests.zoo.test_zoo import arguments

    kind, name = subject.split(" ", 1)
    if kind == "check":
        gpu_check.CHECKS[name]()
        return
    name, backend = name.split()
    (case,) = (c for c in all_cases() if c.name == name)
    out = case.run(*arguments(case, 0), interpret=False, backend=backend)
    jax.block_until_ready(out)


def run_all(names: Sequence[str]) -> None:
    from pallasite.errors import ResourceError, UnsupportedError

    for name in names:
        print(STARTED + name, flush=True)
        try:
            run(name)
            how = "ran"
        except (UnsupportedError, ResourceError):
            how = "refused"
        except Exception as error:
            how = f"failed: {type(error).__name__}: {str(error)[:200]}"
        print(ENDED + how.replace("\n", " "), flush=True)
        if "CUDA_ERROR" in how:  # nothing runs in a process after that
            sys.exit(1)


# --- all processes ---


@dataclass
class Findings:
    ends: Counter[str] = field(default_factory=Counter)  # "ran", "refused", ...
    reports: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)  # what failed or died


def read(
    lines: Sequence[str], names: Sequence[str], found: Findings, is_late: bool
) -> list[str]:
    """Count what a process printed; the subjects that are left of `names`.

    One that was ended because the time is over did not die of what it ran.
    """
    current, left = "start", list(names)
    for line in lines:
        if line.startswith(STARTED):
            current = line.removeprefix(STARTED).strip()
            left.remove(current)
        elif line.startswith(ENDED):
            how = line.removeprefix(ENDED).strip()
            found.ends[how.split(":")[0]] += 1
            if how.startswith("failed"):
                found.unlike.append(f"{current} {how}")
            current = f"after {current}"
        elif is_report(line):
            found.reports.append(f"{current}: {line.strip('= ').strip()}")
    if not current.startswith(("after ", "start")) and not is_late:
        found.unlike.append(f"{current} died")
        found.ends["died"] += 1
    return left


def is_report(line: str) -> bool:
    """Whether a line of the sanitizer starts a report; indented ones continue one."""
    if not line.startswith("========= ") or line.startswith("=========  "):
        return False
    quiet = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY: 0 ")
    # A process that died is counted as such, by the subject it died of.
    about = (*quiet, "Target application", "Error: process", "Saved host backtrace")
    text = line.removeprefix("========= ").strip()
    return bool(text) and not text.startswith(about)


def supervise(
    command: Callable[[Sequence[str]], Sequence[str]],
    names: Sequence[str],
    end: float,
    found: Findings,
) -> None:
    """Run `names` in one process after another until the time is over."""
    left = list(names)
    while left and time.monotonic() < end:
        before = len(left)
        process = subprocess.Popen(
            command(left),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        # The sanitizer's own process, and the one that it watches.
        kill = partial(os.killpg, process.pid, signal.SIGKILL)
        stop = threading.Timer(max(end - time.monotonic(), 0.1), kill)
        stop.start()
        with process:
            lines = list(process.stdout or ())
        stop.cancel()
        left = read(lines, left, found, time.monotonic() >= end)
        if len(left) == before:
            found.unlike.append("no start: " + "".join(lines)[-300:])
            break
    found.ends["not reached"] += len(left)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tools = ("memcheck", "racecheck", "synccheck", "initcheck")
    parser.add_argument("--tool", choices=tools, default=tools[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=600)
    default = os.environ.get("SANITIZER") or shutil.which("compute-sanitizer")
    text = "compute-sanitizer, by default $SANITIZER or the one on the path"
    parser.add_argument("--sanitizer", default=default, help=text)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run_all(options.run)
        return 0
    if options.sanitizer is None:
        parser.error("compute-sanitizer is not here: name it with --sanitizer")

    def command(names: Sequence[str]) -> list[str]:
        how = ["--tool", options.tool, "--print-limit", "20", "--report-api-errors=no"]
        if options.tool == "synccheck":  # barriers of all programs at once
            how += ["--num-cuda-barriers", "65536"]
        own = [sys.executable, "-W", "ignore", "-m", "tests.backends.gpu_sanitize"]
        return [options.sanitizer, *how, *own, "--run", *names]

    found, names = Findings(), subjects(options.tool)
    end, count = time.monotonic() + options.seconds, options.processes
    shares = [names[n::count] for n in range(min(count, len(names)))]
    threads = [
        threading.Thread(target=supervise, args=(command, share, end, found))
        for share in shares
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = ", ".join(f"{n} {how}" for how, n in found.ends.items() if n)
    print(f"{options.tool}: {counts}; {len(found.reports)} reports")
    for line in [*found.reports, *found.unlike]:
        print(f"  {line}")
    return 1 if found.reports else 0


if __name__ == "__main__":
    sys.exit(main())
