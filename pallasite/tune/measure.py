"""Interleaved timing, and comparison of results with the default's. Every candidate
runs in every round, so that other load on the computer affects all of them. Concurrent
tuners take turns (`alone`): they compile concurrently, but measure one at a time. On a
GPU, only its busy time counts: launching a short kernel takes longer than running it,
and costs the same for all candidates."""

import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallasite.tools.device_events import device_events
from pallasite.tools.time_profile import covered
from pallasite.tune.locks import exclusive

Timer = Callable[[Callable[[], Any]], float]

ROUNDS = 7
VISIT_SECONDS = 0.01  # least time a candidate runs per round
HOPELESS = 1.5  # times the best time: measured no further


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keeps this user's other tuners from running candidates in the meantime."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    with exclusive(Path(tempfile.gettempdir()) / f"pallasite-tune-{user}.lock"):
        yield


def wall(
    run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds that a function takes, by a clock."""
    started = clock()
    run()
    return clock() - started


def on_device(run: Callable[[], Any]) -> float:
    """Seconds for which the device is busy while a function runs (JAX's profiler)."""
    took: list[float] = []
    spans = device_events(lambda: took.append(wall(run)))
    return covered([(span.begin, span.end) for span in spans]) or took[0]


@functools.cache
def timer() -> Timer:
    """The timer for the device JAX uses."""
    if jax.default_backend() != "gpu":
        return wall
    try:
        # The profiler may be in use, or lack a library for recording kernels.
        spans = device_events(lambda: _repeated(lambda: jax.numpy.ones(8) + 1, 1))
    except RuntimeError:
        return wall
    return on_device if spans else wall


def interleaved(
    runs: Sequence[Callable[[], Any]],
    timed: Timer | None = None,
    rounds: int = ROUNDS,
) -> list[float]:
    """Seconds per call of each function: the least of all rounds."""
    return [min(times) for times in timings(runs, timed, rounds)]


def timings(
    runs: Sequence[Callable[[], Any]],
    timed: Timer | None = None,
    rounds: int = ROUNDS,
) -> list[list[float]]:
    """Seconds per call of each function, round by round."""
    timed = timed or timer()
    best = [float("inf")] * len(runs)
    repeats = [1] * len(runs)
    found: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for n, run in enumerate(runs):
            if number > 1 and best[n] > HOPELESS * min(best):
                continue
            took = timed(lambda run=run, n=n: _repeated(run, repeats[n]))
            found[n].append(took / repeats[n])
            best[n] = min(best[n], found[n][-1])
            repeats[n] = max(1, min(1000, int(VISIT_SECONDS / max(best[n], 1e-9))))
    return found


def spread(times: Sequence[float]) -> float:
    """How much longer than the least time the middle one is, relative to it.

    The first round is left out: a single call may wake a clock or a thread.
    """
    kept = times[1:]
    if len(kept) < 2 or min(kept) <= 0:
        return 0.0
    return statistics.median(kept) / min(kept) - 1


def _repeated(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        result = run()
    jax.block_until_ready(result)


def difference(found: Any, expected: Any, tolerance: float) -> str:
    """How results differ from those expected; "" if they agree.

    Args:
        found, expected: pytrees of arrays.
        tolerance: allowed root mean square of the difference, relative to that of the
            expected values; single elements may differ by sixteen times as much,
            relative to the largest. Integers must be equal.
    """
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for number, (a, b) in enumerate(pairs):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {number} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        if not jax.numpy.issubdtype(a.dtype, np.inexact):
            if (a != b).any():
                return f"result {number} differs in {(a != b).sum()} elements"
            continue
        wide = np.result_type(a.dtype, np.float64) if a.dtype.kind in "fc" else float
        a, b = a.astype(wide), b.astype(wide)
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return f"result {number} has different infinities or NaNs"
        a, b = a[finite], b[finite]
        if not a.size:
            continue
        error = np.abs(a - b)
        mean, largest = np.sqrt(np.mean(error**2)), error.max()
        scale = np.sqrt(np.mean(np.abs(b) ** 2))
        if not mean <= tolerance * scale:
            return (
                f"result {number} has a root-mean-square error of {mean:.2g}, where "
                f"values are {scale:.2g}"
            )
        if not largest <= 16 * tolerance * np.abs(b).max():
            return f"an element of result {number} is off by {largest:.2g}"
    return ""


def tolerance_of(dtypes: Iterable[Any]) -> float:
    """The tolerance that rounding in the coarsest of these dtypes requires."""
    floats = [d for d in dtypes if jax.numpy.issubdtype(d, np.floating)]
    coarsest = max((float(jax.numpy.finfo(d).eps) for d in floats), default=0.0)
    return 4 * coarsest + 1e-5
