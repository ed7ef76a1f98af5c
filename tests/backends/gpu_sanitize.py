"""Kernels on a GPU under NVIDIA's compute-sanitizer, in several processes.

    python -m tests.backends.gpu_sanitize                     # memcheck
    python -m tests.backends.gpu_sanitize "attention grid" softmax
    python -m tests.backends.gpu_sanitize --tool racecheck    # or synccheck, initcheck

`memcheck` sees the zoo through both backends and the checks of `gpu_check.py`; the
other tools see what `cuda` emits, because Triton's code is not ours. Every array is an
allocation of its own, so that a step past its end is seen. A process that dies is
started again after the kernel it died of; all take what is left from one list. Parts
of names choose some of it. Exit code 1: something was reported.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
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


def run_all(names: Iterable[str]) -> None:
    """Run what arrives, one name per line; say when each starts and how it ends."""
    from pallasite.errors import ResourceError, UnsupportedError

    for name in map(str.strip, names):
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
    seconds: dict[str, float] = field(default_factory=dict)  # of each subject


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
    command: Sequence[str], left: deque[str], end: float, found: Findings
) -> None:
    """Run what is `left`, which others take from, too, until the time is over."""
    while left and time.monotonic() < end:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
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
        with process, suppress(BrokenPipeError):
            started = follow(process, left, end, found)
        stop.cancel()
        if not started:
            break


def follow(
    process: "subprocess.Popen[str]", left: deque[str], end: float, found: Findings
) -> bool:
    """Feed one process and count what it prints; whether it started anything."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    def feed() -> str:
        """The name it is given next, "" if there is none."""
        with suppress(IndexError):
            name = left.popleft()
            with suppress(BrokenPipeError):  # it died: the loop below ends, too
                stdin.write(name + "\n")
                stdin.flush()
            return name
        with suppress(BrokenPipeError):
            stdin.close()
        return ""

    given, current, began, printed = feed(), "", 0.0, []
    for line in stdout:
        printed.append(line)
        if line.startswith(STARTED):
            current, began = line.removeprefix(STARTED).strip(), time.monotonic()
        elif line.startswith(ENDED):
            how = line.removeprefix(ENDED).strip()
            found.ends[how.split(":")[0]] += 1
            found.seconds[current] = time.monotonic() - began
            if how.startswith("failed"):
                found.unlike.append(f"{current} {how}")
            current, given = f"after {current}", feed()
        elif is_report(line):
            found.reports.append(f"{current or 'start'}: {line.strip('= ').strip()}")
    if given and given != current:  # it never got to this one
        left.append(given)
        if not current and time.monotonic() < end:
            found.unlike.append("no start: " + "".join(printed)[-300:].strip())
    elif given and time.monotonic() < end:
        found.unlike.append(f"{current} died")
        found.ends["died"] += 1
    elif given:  # it was ended because the time is over, and did not die of this
        left.append(given)
    return bool(current)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tools = ("memcheck", "racecheck", "synccheck", "initcheck")
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--tool", choices=tools, default=tools[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=600)
    default = os.environ.get("SANITIZER") or shutil.which("compute-sanitizer")
    text = "compute-sanitizer, by default $SANITIZER or the one on the path"
    parser.add_argument("--sanitizer", default=default, help=text)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run_all(sys.stdin)
        return 0
    if options.sanitizer is None:
        parser.error("compute-sanitizer is not here: name it with --sanitizer")

    how = ["--tool", options.tool, "--print-limit", "20", "--report-api-errors=no"]
    if options.tool == "synccheck":  # barriers of all programs at once
        how += ["--num-cuda-barriers", "65536"]
    own = [sys.executable, "-W", "ignore", "-m", "tests.backends.gpu_sanitize"]
    command = [options.sanitizer, *how, *own, "--run"]
    parts = options.names or [""]
    all_names = subjects(options.tool)
    left = deque(name for name in all_names if any(part in name for part in parts))
    found, end = Findings(), time.monotonic() + options.seconds
    threads = [
        threading.Thread(target=supervise, args=(command, left, end, found))
        for _ in range(min(options.processes, len(left)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.ends["not reached"] = len(left)
    counts = ", ".join(f"{n} {how}" for how, n in found.ends.items() if n)
    print(f"{options.tool}: {counts}; {len(found.reports)} reports")
    for line in [*found.reports, *found.unlike]:
        print(f"  {line}")
    if left:
        print("not reached:", ", ".join(sorted(left)))
    slowest = sorted(found.seconds, key=found.seconds.__getitem__, reverse=True)[:5]
    for name in slowest:
        print(f"{found.seconds[name]:6.1f} s {name}")
    return 1 if found.reports else 0


if __name__ == "__main__":
    sys.exit(main())
