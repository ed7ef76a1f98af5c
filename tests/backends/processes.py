"""Subjects run by name in several processes, which may die of one.

A command is started for each process; it reads names from its standard input and calls
`run_each`. All processes take what is left from one list, and one that died is started
again. One that prints nothing for long is killed, and its subject is tried once more.
`gpu_sanitize.py` and `gpu_compile.py` are such commands.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

# Lines of the processes to the one that started them.
STARTED, ENDED = "@started ", "@ended "


# --- one process ---


def run_each(names: Iterable[str], run: Callable[[str], str]) -> None:
    """Run what arrives, one name per line; say when each starts and how it ends.

    `run` returns how, in a word.
    """
    from pallasite.errors import ResourceError, UnsupportedError

    for name in map(str.strip, names):
        print(STARTED + name, flush=True)
        try:
            how = run(name)
        except (UnsupportedError, ResourceError):
            how = "refused"
        except Exception as error:
            how = f"failed: {type(error).__name__}: {str(error)[:200]}"
        print(ENDED + how.replace("\n", " "), flush=True)
        if (
            "CUDA_ERROR" in how or "RESOURCE_EXHAUSTED" in how
        ):  # nothing runs after that
            sys.exit(1)


# --- all processes ---


@dataclass
class Findings:
    ends: Counter[str] = field(default_factory=Counter)  # "ran", "refused", ...
    reports: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)  # what failed or died
    seconds: dict[str, float] = field(default_factory=dict)  # of each subject
    not_reached: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)  # what a process was killed at

    def tell(self, title: str) -> None:
        """Print it: counts, what is unlike, and the slowest subjects."""
        ends = {**self.ends, "not reached": len(self.not_reached)}
        counts = ", ".join(f"{n} {how}" for how, n in ends.items() if n)
        print(f"{title}: {counts}; {len(self.reports)} reports")
        for line in [*self.reports, *self.unlike]:
            print(f"  {line}")
        if self.not_reached:
            print("not reached:", ", ".join(self.not_reached))
        slowest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        for name in slowest[:5]:
            print(f"{self.seconds[name]:6.1f} s {name}")


def run_in_processes(
    command: Sequence[str],
    names: Iterable[str],
    seconds: float,
    processes: int,
    environment: Mapping[str, str],
    is_report: Callable[[str], bool] = lambda line: False,
    apart: float = 0,
    patience: float = math.inf,
) -> Findings:
    """What came of `names`; `is_report` picks lines of the output that are kept.

    Processes start `apart` seconds after one another; one that prints nothing for
    `patience` seconds is killed.
    """
    left, found = deque(names), Findings()
    how = (left, time.monotonic() + seconds, patience, found, environment, is_report)
    threads = [
        threading.Thread(target=supervise, args=(command, *how))
        for _ in range(min(processes, len(left)))
    ]
    for thread in threads:
        thread.start()
        time.sleep(apart)
    for thread in threads:
        thread.join()
    found.not_reached = sorted(left)
    return found


def supervise(
    command: Sequence[str],
    left: deque[str],
    end: float,
    patience: float,
    found: Findings,
    environment: Mapping[str, str],
    is_report: Callable[[str], bool],
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
            env={**os.environ, **environment},
            start_new_session=True,
        )
        watch = Watch(process, end, patience)
        with process, suppress(BrokenPipeError):
            started = follow(process, left, watch, found, is_report)
        watch.stop()
        if not started:
            break


class Watch:
    """Kills a process at `end`, or when nothing was heard of it for `patience`."""

    def __init__(self, process: "subprocess.Popen[str]", end: float, patience: float):
        self.process, self.end, self.patience = process, end, patience
        self.silent = False
        self.timer: threading.Timer | None = None
        self.heard()

    def heard(self) -> None:
        self.stop()
        seconds = max(min(self.end - time.monotonic(), self.patience), 0.1)
        self.timer = threading.Timer(seconds, self.kill)
        self.timer.start()

    def kill(self) -> None:
        self.silent = time.monotonic() < self.end
        # The process, and those that it started.
        os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        if self.timer:
            self.timer.cancel()


def follow(
    process: "subprocess.Popen[str]",
    left: deque[str],
    watch: Watch,
    found: Findings,
    is_report: Callable[[str], bool],
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
        watch.heard()
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
    over = time.monotonic() >= watch.end
    if given and watch.silent and given not in found.silent:
        found.silent.add(given)
        left.append(given)
        return True
    if given and given != current:  # it never got to this one
        left.append(given)
        if not current and not over:
            found.unlike.append("no start: " + "".join(printed)[-300:].strip())
    elif given and not over:
        how = "silent" if watch.silent else "died"
        found.unlike.append(f"{current} {how}")
        found.ends[how] += 1
    elif given:  # it was ended because the time is over, and did not die of this
        found.unlike.append(
            f"{current} not finished in {time.monotonic() - began:.0f} s"
        )
        left.append(given)
    return bool(current)
