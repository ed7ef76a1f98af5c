"""A long hunt with random kernels: `make fuzz SECONDS=3600 SEED=1`.

    python -m tests.fuzz.hunt --seconds 3600 --seed 1 --engine cpu,tpu --family grids
    python -m tests.fuzz.hunt --engine cpu --family grids --kernel 1000041
    python -m tests.fuzz.hunt --engine gpu --kernels 2000  # by the default backends

Kernels have numbers: a seed's first kernel is `seed * 1_000_000`. Every family is drawn
in turn, and each batch goes to all engines (`engines.py`). A kernel that an engine gets
wrong is made as simple as it gets and written to a file; a process that dies has found
one, too. Exit code 1: something was found.
"""

import argparse
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  sets the environment, before jax is imported
from tests.fuzz.choices import Stream, simplest
from tests.fuzz.engines import ENGINES, REFUSALS, present
from tests.fuzz.fusions import check_fusion
from tests.fuzz.generate import BYTES, FAMILIES, random_kernel
from tests.fuzz.placement import placed_kernel
from tests.fuzz.running import check, emulated
from tests.fuzz.test_frontend import check_python
from tests.fuzz.test_gradients import check_gradient

Target = Callable[[Connection], None]

BATCH = 8
# Functions of Python, each with the engines that it knows.
OWN_CHECKS: dict[str, tuple[Callable[[Stream, str], str | None], tuple[str, ...]]] = {
    "python": (check_python, ("cpu", "emulation", "triton", "tpu", "cuda", "gpu")),
    "fusion": (check_fusion, ("cpu", "emulation", "gpu")),
    "gradient": (check_gradient, ("cpu", "emulation", "gpu")),
}
EACH_FAMILY = (*FAMILIES, "edges", "placement", *OWN_CHECKS)
PER_SEED = 1_000_000  # kernels
REDUCING_S = 40.0  # at most, for one kernel
REDUCED = 6  # kernels of one engine; those after them are written as they are
STUCK_S = 300.0  # then a process is ended, and its kernel is a finding
LATE_S = 5.0  # what may go on after the time is over


@dataclass(frozen=True)
class Job:
    """Kernels for one engine. Every fourth kernel number has 64-bit types, too."""

    engine: str
    family: str
    numbers: tuple[int, ...]
    reducing_s: float = 0.0  # for each kernel that is wrong


@dataclass
class Outcome:
    job: Job
    refused: list[str] = field(default_factory=list)  # the reasons
    found: dict[int, str] = field(default_factory=dict)  # by kernel number
    ways: list[str] = field(default_factory=list)  # those of kernels that were right


# --- one batch, in a process of its own ---


def stream_of(number: int) -> bytes:
    return random.Random(number).randbytes(BYTES)


def verdict(job: Job, number: int, stream: bytes) -> tuple[str, Any]:
    """`("refused", reason)`, `("wrong", what)`, or `("right", which way it ran)`."""
    case: Any = None
    try:
        if job.family in OWN_CHECKS:
            check_own, _ = OWN_CHECKS[job.family]
            return "right", check_own(Stream(stream), job.engine)
        case = _case(job, number, stream)
        return "right", ENGINES[job.engine](case, number)
    except REFUSALS as error:
        return "refused", error.what
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        text = what if case is None or repr(case) in what else f"{what}\n{case!r}"
        return "wrong", f"{text}\n{traceback.format_exc(limit=-4)}"


def _case(job: Job, number: int, stream: bytes):
    for_tpu = job.engine == "tpu"
    if job.family == "placement":
        return placed_kernel(Stream(stream), for_tpu)
    wide = number % 4 == 3
    return random_kernel(Stream(stream), job.family, wide, for_tpu)


def run_job(job: Job) -> Outcome:
    outcome = Outcome(job)
    is_ir = job.family not in OWN_CHECKS
    if job.engine == "emulation" and is_ir and _all_emulated(job):
        return outcome
    for number in job.numbers:
        stream = stream_of(number)
        kind, what = verdict(job, number, stream)
        if kind == "right":
            outcome.ways += [] if what is None else [what]
        elif kind == "refused":
            outcome.refused.append(what)
        else:
            outcome.found[number] = _simplest(job, number, stream) or what
    return outcome


def _all_emulated(job: Job) -> bool:
    """Whether all kernels are right, compiled as one program: that is much quicker."""
    try:
        cases = [_case(job, number, stream_of(number)) for number in job.numbers]
        check(emulated, cases, quick=True)
    except Exception:
        return False
    return True


def _simplest(job: Job, number: int, stream: bytes) -> str | None:
    end = time.monotonic() + job.reducing_s
    least: str | None = None

    def fails(stream: bytes) -> bool:
        nonlocal least
        if time.monotonic() >= end:
            return False
        kind, what = verdict(job, number, stream)
        same = kind == "wrong" and _error_of(what) == error
        if same:
            least = what
        return same

    error = _error_of(verdict(job, number, stream)[1])
    simplest(stream, fails)
    return least


def _error_of(what: str) -> str:
    """The exception's type: a simpler kernel must fail as the first one did."""
    return what.split(":", 1)[0]


def work(jobs: Connection) -> None:
    """What a process does."""
    while (job := jobs.recv()) is not None:
        jobs.send(run_job(job))


def _start(target: Target, jobs: Connection) -> None:
    jobs.send("ready")  # all is imported
    target(jobs)


# --- all of them ---


class Worker:
    """A process that does one job at a time."""

    def __init__(self, target: Target, method: str):
        context: Any = multiprocessing.get_context(method)
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_start, args=(target, other), daemon=True)
        self.process.start()
        other.close()
        self.job: Job | None = None
        self.is_ready = False

    def give(self, job: Job) -> None:
        if not self.is_ready:
            self.is_ready = self.pipe.recv() == "ready"
        self.job, self.since = job, time.monotonic()
        self.pipe.send(job)

    def is_stuck(self) -> bool:
        return self.job is not None and time.monotonic() - self.since > STUCK_S

    def outcome(self) -> Outcome | None:
        """What it sent; None if it died or was stuck."""
        try:
            return None if self.is_stuck() else self.pipe.recv()
        except (EOFError, ConnectionError):
            return None

    def end(self) -> str:
        """End the process; how it ended, if it had before."""
        self.process.join(0 if self.is_stuck() else 60)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        return (
            f"was stuck for {STUCK_S:.0f} s"
            if code is None
            else f"died: exit code {code}"
        )


@dataclass
class Hunt:
    """Gives jobs to processes, counts, and writes what is found to a folder."""

    jobs: Iterator[Job]
    seconds: float
    folder: Path
    processes: int = field(default_factory=lambda: os.cpu_count() or 1)
    target: Target = work
    method: str = "spawn"  # how processes start
    reducing_s: float = REDUCING_S
    # By engine and family; the last two by engine and reason, engine and way.
    tried: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    ways: Counter[tuple[str, str]] = field(default_factory=Counter)
    unfinished: list[Job] = field(default_factory=list)  # when the time was over

    def run(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.again: list[Job] = []  # single kernels, where a batch ended a process
        workers = [Worker(self.target, self.method) for _ in range(self.processes)]
        try:
            while time.monotonic() < self.end + LATE_S:
                for worker in workers:
                    job = None if worker.job else self._next()
                    if job is not None:
                        worker.give(job)
                busy = [w for w in workers if w.job is not None]
                if not busy:
                    return
                ready = wait([w.pipe for w in busy], timeout=1.0)
                for n, worker in enumerate(workers):
                    if worker.is_stuck() or worker.pipe in ready:
                        workers[n] = self._finished(worker)
        finally:
            self.unfinished = [w.job for w in workers if w.job is not None]
            for worker in workers:
                worker.process.kill()

    def _next(self) -> Job | None:
        left = self.end - time.monotonic()
        job = self.again.pop() if self.again else next(self.jobs, None)
        if left < 0 or job is None:
            return None
        found = sum(count for (engine, _), count in self.wrong.items()
                    if engine == job.engine)  # fmt: skip
        reducing_s = min(self.reducing_s, left) if found < REDUCED else 0.0
        return replace(job, reducing_s=reducing_s)

    def _finished(self, worker: Worker) -> Worker:
        """Count what a worker did; the worker to go on with."""
        job, outcome = worker.job, worker.outcome()
        assert job is not None
        if outcome is not None:
            worker.job = None
            self._count(outcome)
            return worker
        how = worker.end()
        first, *others = job.numbers
        if others:
            self.again += [replace(job, numbers=(n,)) for n in job.numbers]
        else:
            self._count(Outcome(job, found={first: f"the process {how}"}))
        return Worker(self.target, self.method)

    def _count(self, outcome: Outcome) -> None:
        job = outcome.job
        key = job.engine, job.family
        self.tried[key] += len(job.numbers)
        self.refused[key] += len(outcome.refused)
        self.wrong[key] += len(outcome.found)
        self.ways.update((job.engine, way) for way in outcome.ways)
        for reason in outcome.refused:
            self.reasons[job.engine, re.sub(r"\d+", "N", reason)] += 1
        for number, what in outcome.found.items():
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{job.engine}-{job.family}-{number}.txt"
            again = f"--engine {job.engine} --family {job.family} --kernel {number}"
            path.write_text(f"python -m tests.fuzz.hunt {again}\n\n{what}\n")
            print(f"{path}: {what.splitlines()[0][:150]}", flush=True)

    # --- the report ---

    def table(self) -> str:
        """Kernels per family and engine: run, refused, wrong."""
        engines = list(dict.fromkeys(engine for engine, _ in self.tried))
        families = list(dict.fromkeys(family for _, family in self.tried))
        texts = [["run/refused/wrong", *engines, "all"]]
        for family in [*families, "all"]:
            chosen = families if family == "all" else [family]
            cells = [self._cell([(e, f) for f in chosen]) for e in engines]
            total = self._cell([(e, f) for e in engines for f in chosen])
            texts.append([family, *cells, total])
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        return "\n".join(
            "  ".join(t.rjust(w) for t, w in zip(r, widths, strict=True)) for r in texts
        )

    def _cell(self, keys: Sequence[tuple[str, str]]) -> str:
        tried, refused, wrong = (
            sum(counter[key] for key in keys)
            for counter in (self.tried, self.refused, self.wrong)
        )
        return f"{tried - refused}/{refused}/{wrong}" if tried else "-"

    def report(self) -> str:
        lines = [self.table(), ""]
        lines += [f"{engine} by {way}: {n}" for (engine, way), n in self.ways.items()]
        for job in self.unfinished:
            lines.append(f"not finished: {job.engine}, {job.family}, {job.numbers}")
        lines.append("refused most often:")
        for (engine, reason), count in self.reasons.most_common(10):
            lines.append(f"  {count:6} {engine}: {reason}")
        return "\n".join(lines)


def all_jobs(
    seed: int, engines: Sequence[str], families: Sequence[str], count: int = PER_SEED
) -> Iterator[Job]:
    """Batch after batch until there are `count` kernels, each for all engines."""
    first = seed * PER_SEED
    for start in range(first, first + count, BATCH):
        family = families[(start - first) // BATCH % len(families)]
        for engine in engines:
            if family not in OWN_CHECKS or engine in OWN_CHECKS[family][1]:
                yield Job(engine, family, tuple(range(start, start + BATCH)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    names = lambda text: tuple(text.split(","))
    parser.add_argument("--engine", type=names, default=present())
    parser.add_argument("--family", type=names, default=EACH_FAMILY)
    parser.add_argument("--kernel", type=int, help="run this one only")
    parser.add_argument("--kernels", type=int, default=PER_SEED, help="at most")
    text = "seconds to make a kernel that is wrong simple"
    parser.add_argument("--reduce", type=float, default=REDUCING_S, help=text)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args(arguments)
    for given, known in ((options.engine, ENGINES), (options.family, EACH_FAMILY)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no {unknown[0]}: there are {', '.join(known)}")
    jobs = all_jobs(options.seed, options.engine, options.family, options.kernels)
    if options.kernel is not None:
        number = (options.kernel,)
        jobs = (Job(e, f, number) for f in options.family for e in options.engine)
    hunt = Hunt(iter(jobs), options.seconds, options.folder, options.jobs)
    hunt.reducing_s = options.reduce
    hunt.run()
    print(hunt.report())
    return 1 if sum(hunt.wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
