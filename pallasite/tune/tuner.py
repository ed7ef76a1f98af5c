"""The tuner: measures a function with candidates for each of its sites.

The whole function is measured, so that the forward and backward kernels of a training
step, and what XLA adds around them, are tuned together. Each site (a tunable kernel at
its shapes) is searched in turn, with the best configurations so far for the others.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import jax
import numpy as np

from pallasite import config as knobs
from pallasite import target as targets
from pallasite.backends import base
from pallasite.errors import CompileError, PerformanceWarning, SpecError, warn
from pallasite.language.arguments import Arguments
from pallasite.language.trace import user_location
from pallasite.placement import chip_for, own_platform
from pallasite.primitive import Call, wants_emulation
from pallasite.runtime import aot
from pallasite.sites import calls_in
from pallasite.target import TPUS, Chip, Host, Tpu
from pallasite.tune import candidates, choices, measure
from pallasite.tune import table as tables
from pallasite.tune.candidates import Candidate
from pallasite.tune.choices import Question
from pallasite.tune.progress import Progress
from pallasite.tune.results import Found, Tuned
from pallasite.tune.search import Outcome, search
from pallasite.tune.table import Config, Entry, Site, Table
from pallasite.tune.workers import Workers

SLOWEST_CLOCK = min(row.clock for row in TPUS.values())  # converts bounds to cycles
NEAR, FINALISTS = 1.1, 4  # within this factor of the best, at most this many remeasured
LAST_ROUNDS, LAST_SECONDS = 21, 10.0
SPREAD = 0.1  # of times from run to run, from which the computer counts as loaded
GAIN = 0.98  # of the default's time: anything above may be noise


@dataclass(frozen=True)
class Options:
    """See `autotune`."""

    limit: float
    workers: int
    tolerance: float | None
    share: float
    again: bool
    keep: bool
    progress: bool | None


class Tuner:
    """One function, tuned with one set of arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        given: Arguments,
        target: str | None,
        options: Options,
    ):
        self.options = options
        self.function, self.at = function, user_location()
        self.given = given
        self.target = target or knobs.get("target")
        with self.for_target():
            self.chip: Chip | Host = chip_for(None)
            self.chip_name = choices.chip_name()
        self.is_here = _is_here(self.chip)
        self.unit = "s" if self.is_here else "cycles"
        if not self.is_here and not isinstance(self.chip, Tpu):
            raise SpecError(
                f"pl.autotune: there is no {self.chip_name} to measure on",
                at=self.at,
                fix="run it on that chip; only TPUs have compiler estimates without "
                "one",
            )
        lacking = "" if self.is_here else aot.missing()
        if lacking:
            raise SpecError(
                f"pl.autotune: there is no {self.chip_name} to measure on, and no "
                "compiler to ask for estimates",
                [("compiler", lacking)],
                self.at,
                f"tune on a {self.chip_name}, or where libtpu is: on Linux on x86_64",
            )
        self.shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.given.arrays
        ]

    def for_target(self):
        return knobs.override(target=self.target)

    def of_arrays(self, *arrays: Any) -> Any:
        """The function of its array arguments."""
        return self.given.call(self.function, *arrays)

    def tune(self) -> Tuned:
        with self.for_target(), choices.recorded() as questions:
            calls = calls_in(lambda *xs: self.of_arrays(*xs), *self.shapes)
        asked = list({q.site: q for q in questions}.values())
        if not asked:
            name = getattr(self.function, "__name__", repr(self.function))
            raise SpecError(
                f"pl.autotune: '{name}' has nothing to tune",
                at=self.at,
                fix="call operations of pallasite.kernels without config=, or declare "
                "your function's values with pl.tunable",
            )
        self.kernels = tuple(sorted(call.kernel.name for call in calls))
        tuned = Tuned(self.function, unit=self.unit)
        how = (self.options.workers, self.options.limit, own_platform())
        with Workers(*how) as workers:
            for question in asked:
                known = None if self.options.again else self._known(question)
                if known is not None:
                    tuned.add(Found(known, question.default, 0, _size(question)))
                    continue
                try:
                    tuned.add(self._site(question, tuned.table, workers))
                except _Interrupted as interrupted:
                    if interrupted.found is not None:
                        tuned.add(interrupted.found)
                    tuned.interrupted = True
                    break
        return tuned

    def _known(self, question: Question) -> Entry | None:
        """What an earlier run of the same search found."""
        for entry in reversed(
            tables.user_table().of(question.site.kernel, self.chip_name)
        ):
            same = (
                entry.site == question.site
                and entry.kernels == self.kernels
                and entry.versions == choices.versions()
                and entry.space == question.space.identity
            )
            if same and entry.complete:
                return entry
        return None

    def _site(self, question: Question, others: Table, workers: Workers) -> Found:
        progress = Progress(
            str(question.site.kernel), self.unit, shown=self.options.progress
        )
        outcome: Outcome | None = None
        try:
            made = self._candidates(question, others, progress)
            outcome = Outcome(made[0], made, self.options.share)
            meter = _Meter(self, outcome, workers, progress)
            search(outcome, question.space, meter, width=max(2, self.options.workers))
            meter.run_off()
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.close()
        if outcome is None or outcome.default.seconds is None:
            if interrupted:
                raise _Interrupted(None)
            assert outcome is not None
            raise CompileError(
                f"pl.autotune: the default configuration of '{question.site.kernel}' "
                "does not run",
                [
                    ("configuration", outcome.default),
                    ("reason", outcome.default.refused),
                ],
                self.at,
            )
        found = self._found(question, outcome)
        if found.noise and self.options.keep:
            warn(_noisy(found), PerformanceWarning)
        elif self.options.keep:
            tables.keep(found.entry)
        if interrupted:
            raise _Interrupted(found)
        return found

    def _candidates(
        self, question: Question, others: Table, progress: Progress
    ) -> list[Candidate]:
        """All candidates of a site, the default first."""
        rest = [c for c in question.space.configs if c != question.default]
        made = []
        for number, config in enumerate([question.default, *rest]):
            progress.say(f"{number} of {len(rest) + 1} scheduled")
            trial = others.with_entry(self._entry(question.site, config))
            with self.for_target():
                candidate = candidates.make(
                    config,
                    trial,
                    self.of_arrays,
                    self.shapes,
                    self._backends_of,
                    self.chip,
                )
            if not self.is_here:
                candidate.bound *= SLOWEST_CLOCK
            made.append(candidate)
        return made

    def _entry(self, site: Site, config: Config, **more: Any) -> Entry:
        return Entry(
            site,
            self.chip_name,
            config,
            kernels=self.kernels,
            versions=choices.versions(),
            **more,
        )

    def _backends_of(self, call: Call) -> Sequence[str]:
        """Backends that may schedule a call for the chip; if none, it is emulated."""
        if wants_emulation(call):
            return ()
        named = call.backend or knobs.get("backend")
        if named or isinstance(self.chip, Tpu):
            return (named or "tpu",)
        return base.defaults(own_platform(), call.kernel)

    def estimate(self, batch: Sequence[Candidate]) -> None:
        """Sums libtpu's estimated cycles over the kernels of each candidate."""
        tpu, jobs, owners = base.get("tpu"), [], []
        for candidate in batch:
            for call in candidate.calls:
                try:
                    options = candidates.options_for(call, self.chip)
                    launch = tpu.launch(base.Compiled(tpu, call.kernel, options))
                    job = aot.Job.of(call.kernel.name, call.kernel, launch)
                except Exception as error:
                    candidate.refused = _short(error)
                    break
                jobs.append(job)
                owners.append(candidate)
        results = aot.compile_all(
            jobs, self.chip_name, cycles=True, timeout=self.options.limit
        )
        for candidate, result in zip(owners, results, strict=True):
            if candidate.refused:
                continue
            if not result.ok or result.estimated is None:
                candidate.refused = result.error or "libtpu has no estimate"
                continue
            # An estimate of the code alone excludes copies; the bound has them.
            cycles = (candidate.seconds or 0) + result.estimated
            candidate.seconds = max(cycles, candidate.bound)

    def _found(self, question: Question, outcome: Outcome) -> Found:
        best, default = outcome.best, outcome.default
        assert best.seconds is not None and default.seconds is not None
        if self.is_here and best.seconds > GAIN * default.seconds:
            best = default
        entry = self._entry(
            question.site,
            best.config,
            seconds=best.seconds,
            default_seconds=default.seconds,
            space=question.space.identity,
            complete=outcome.complete,
            found=time.time(),
        )
        refused = tuple((str(c), c.refused) for c in outcome.refused)
        return Found(
            entry,
            default.config,
            outcome.compiled,
            len(outcome.candidates),
            refused,
            _noise(best, default) if self.is_here else 0.0,
        )


def _noise(best: Candidate, default: Candidate) -> float:
    """The spread of the times behind a choice, if it is larger than what is gained."""
    assert best.seconds and default.seconds
    spread = max(best.spread, default.spread)
    gain = default.seconds / best.seconds - 1
    return spread if spread > max(SPREAD, gain) else 0.0


def _noisy(found: Found) -> str:
    return (
        f"pl.autotune: times of {found.entry.site} varied by {found.noise:.0%} from "
        "run to run, more than configurations differ: something else keeps this "
        "computer busy. The result is not stored; tune again when it is idle."
    )


class _Meter:
    """Sets `seconds` or `refused` of candidates, batch by batch."""

    def __init__(
        self, tuner: Tuner, outcome: Outcome, workers: Workers, progress: Progress
    ):
        self.tuner, self.outcome = tuner, outcome
        self.workers, self.progress = workers, progress
        self.arrays = _arrays(tuner.given.arrays)
        self.expected: Any = None  # the result of the first candidate that runs
        allowed = tuner.options.tolerance
        if allowed is None:
            params = [p for call in outcome.default.calls for p in call.kernel.params]
            used = [p.ref.dtype.np for p in params if not p.ref.is_semaphore]
            allowed = measure.tolerance_of([*(x.dtype for x in self.arrays), *used])
        self.allowed = allowed

    def __call__(self, batch: Sequence[Candidate]) -> None:
        self.progress.update(self.outcome, "compiling")
        if not self.tuner.is_here:
            self.tuner.estimate(batch)
        elif self.tuner.options.workers:
            self.probe(batch)
        for candidate in batch:
            if not candidate.refused:
                self.progress.update(self.outcome, "checking")
                self.check(candidate)
        running = [c for c in batch if not c.refused]
        if self.tuner.is_here and running:
            self.progress.update(self.outcome, "measuring")
            self.time_all(running)
        for candidate in batch:
            if candidate.refused:
                candidate.seconds = None
        kept = [self.outcome.default, *self.near_best()]
        for candidate in self.outcome.candidates:
            if all(candidate is not each for each in kept):
                candidate.run = None  # frees the compiled program
        self.progress.update(self.outcome)

    def near_best(self) -> list[Candidate]:
        """The few candidates that noise may have kept from being the best."""
        best = self.outcome.best.seconds
        near = [
            c
            for c in self.outcome.candidates
            if best and c.run is not None and c.seconds and c.seconds < NEAR * best
        ]
        return sorted(near, key=lambda c: c.seconds or 0.0)[:FINALISTS]

    def run_off(self) -> None:
        """Measures those near the best once more, interleaved and for longer.

        The best is remeasured with each later batch, so its time is the least of more
        measurements than the others', which favours it.
        """
        default, last = self.outcome.default, self.near_best()
        if len(last) < 2 or not self.tuner.is_here:
            return
        if default.run is not None and all(c is not default for c in last):
            last.append(default)
        at_once = sum(max(c.seconds or 0.0, measure.VISIT_SECONDS) for c in last)
        rounds = min(LAST_ROUNDS, int(LAST_SECONDS / at_once))
        if rounds < 2:
            return
        self.progress.update(self.outcome, "measuring the best ones again")
        with measure.alone():
            runs = [c.run for c in last if c.run is not None]
            rows = measure.timings(runs, rounds=rounds)
        times = [min(row) for row in rows]
        # Candidates not remeasured stay slower, whatever the clock rate is now.
        slower = max(1.0, min(times) / (self.outcome.best.seconds or inf))
        for candidate in self.outcome.candidates:
            if candidate.seconds is not None:
                candidate.seconds *= slower
        for candidate, row in zip(last, rows, strict=True):
            for same in self.outcome.candidates:
                if same is candidate or same.identity == candidate.identity:
                    same.seconds, same.spread = min(row), measure.spread(row)

    def probe(self, batch: Sequence[Candidate]) -> None:
        """Compiles and runs the kernels in other processes."""
        reasons = self.workers.probe(
            [call for candidate in batch for call in candidate.calls],
            lambda left: self.progress.update(self.outcome, f"{left} compiling"),
        )
        for candidate in batch:
            said = [reasons[call] for call in candidate.calls]
            candidate.refused = next(filter(None, said), "")

    def check(self, candidate: Candidate) -> None:
        """Compiles and runs the function, and compares its result."""
        try:
            # A kernel for a TPU that is not present computes the same here.
            with self.tuner.for_target(), choices.configs(candidate.table):
                program = jax.jit(lambda *xs: self.tuner.of_arrays(*xs))
                compiled = program.lower(*self.arrays).compile()
            with measure.alone():
                result = jax.block_until_ready(compiled(*self.arrays))
        except Exception as error:  # XLA's and the function's own
            candidate.refused = _short(error)
            return
        if self.expected is None:
            self.expected = jax.tree.map(np.asarray, result)
        candidate.refused = measure.difference(result, self.expected, self.allowed)
        candidate.run = lambda: compiled(*self.arrays)

    def time_all(self, running: Sequence[Candidate]) -> None:
        """Measures candidates interleaved, together with the best one so far."""
        best = self.outcome.best
        again = [best] if best.run is not None and best not in running else []
        timed = [*running, *again]
        with measure.alone():
            rows = measure.timings([c.run for c in timed if c.run is not None])
        for candidate, row in zip(timed, rows, strict=True):
            candidate.seconds = min(min(row), candidate.seconds or inf)
            candidate.spread = measure.spread(row)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


class _Interrupted(Exception):
    def __init__(self, found: Found | None):
        super().__init__()
        self.found = found


def _size(question: Question) -> int:
    return len(question.space.configs)


def _is_here(chip: Chip | Host) -> bool:
    """Whether JAX has a device with that chip."""
    device = jax.devices()[0]
    if isinstance(chip, Host):
        return device.platform == "cpu"
    return targets.chip_of_device(device.device_kind) == chip


def _arrays(given: Sequence[Any]) -> list[Any]:
    """The arrays to tune with: those given, synthetic ones for bare shapes."""
    made = []
    for number, x in enumerate(given):
        if not isinstance(x, jax.ShapeDtypeStruct):
            made.append(x)
        elif jax.numpy.issubdtype(x.dtype, np.inexact):
            noise = jax.random.normal(jax.random.key(number), x.shape)
            made.append(noise.astype(x.dtype))
        else:
            made.append(jax.numpy.zeros(x.shape, x.dtype))
    return made
