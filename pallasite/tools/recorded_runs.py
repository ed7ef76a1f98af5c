"""Runs a function while recording its kernels, for `pl.profile`.

On a CPU the kernels' own code records (`backends/cpu/call/recording.py`), on a GPU
JAX's profiler (`device_events.py`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from pallasite.backends.cpu.call import recording
from pallasite.errors import PallasError, UnsupportedError
from pallasite.language.arguments import Arguments
from pallasite.placement import own_platform
from pallasite.primitive import choose, recorded
from pallasite.sites import Site
from pallasite.target import GPU_PLATFORMS
from pallasite.tools.analysis import analyse
from pallasite.tools.device_events import device_events
from pallasite.tools.measure import made_up
from pallasite.tools.report import KernelReport
from pallasite.tools.time_profile import KernelTime, Profile, Span, covered
from pallasite.tools.timing import this_computer

BATCH_SECONDS = 0.5
MOST_RUNS = 20

Runs = list[tuple[float, float]]


@dataclass
class _Recorded:
    """What was recorded of one kernel."""

    sites: list[Site]
    calls: list[Span] = field(default_factory=list)
    parts: list[Span] = field(default_factory=list)


def run_recorded(
    function: Callable[..., Any],
    given: Arguments,
    sites: Sequence[Site],
    count: int | None,
) -> Profile:
    """Compile a function, run it, and report where the time went.

    Args:
        function: what to run.
        given: its arguments; for arrays, shapes are enough.
        sites: the kernel calls in it.
        count: how many runs; None: as many as fit in half a second.
    """
    platform = _platform()
    with recorded() as calls:
        # A new function object, as JAX caches what it has lowered.
        compiled = jax.jit(given.of_arrays(function)).lower(*given.arrays).compile()
    known = [site.call for site in sites]
    # A call that XLA has split across devices is another kernel.
    sites = [*sites, *(Site(call) for call in calls if call not in known)]
    kernels, unseen = _by_key(sites, platform)
    runner = _Runner(compiled, _operands(given.arrays), count)
    if platform == "cpu":
        spans, runs, note = _on_cpu(runner, kernels)
    else:
        spans, runs, note = _on_device(runner, kernels)
    notes = [note, *(f"not recorded: {text}" for text in unseen)]
    name = getattr(function, "__name__", type(function).__name__)
    return _profile(name, kernels, spans, runs, "; ".join(filter(None, notes)))


def _platform() -> str:
    platform = own_platform()
    if platform not in ("cpu", *GPU_PLATFORMS):
        raise UnsupportedError(
            f"pl.profile does not support {platform}",
            fix="use pl.explain for its compiler's estimate, jax.profiler.trace for a "
            "trace",
        )
    return platform


def _by_key(
    sites: Sequence[Site], platform: str
) -> tuple[dict[int | str, _Recorded], list[str]]:
    """Kernels by their identifier in a recording, and those without one."""
    found: dict[int | str, _Recorded] = {}
    unseen: list[str] = []
    for site in sites:
        name = site.call.kernel.name
        try:
            chosen = choose(site.call, platform)
        except PallasError as error:
            unseen.append(f"{name} ({error.what})")
            continue
        launch = chosen.launch
        key = launch and (launch.handler or launch.symbol)
        if not key:
            by_xla = chosen.arrays is not None
            unseen.append(f"{name} ({'fused by XLA' if by_xla else 'emulated'})")
            continue
        found.setdefault(key, _Recorded([])).sites.append(site)
    return found, list(dict.fromkeys(unseen))


def _operands(arrays: Sequence[Any]) -> list[Any]:
    rng = np.random.default_rng(0)

    def array(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.lax.full(x.shape, 0, x.dtype)
            return jax.numpy.asarray(made_up(x.shape, x.dtype, rng))
        return x

    return [array(x) for x in arrays]


class _Runner:
    """Runs a compiled function, timed by the clock that machine code uses."""

    def __init__(self, compiled: Any, operands: list[Any], count: int | None):
        self._compiled, self._operands = compiled, operands
        jax.block_until_ready(compiled(*operands))
        once = self._once()
        seconds = once[1] - once[0]
        fitting = int(BATCH_SECONDS / max(seconds, 1e-9))
        self._count = count or min(max(fitting, 1), MOST_RUNS)

    def _once(self) -> tuple[float, float]:
        begin = time.monotonic_ns()
        jax.block_until_ready(self._compiled(*self._operands))
        return begin / 1e9, time.monotonic_ns() / 1e9

    def __call__(self) -> Runs:
        return [self._once() for _ in range(self._count)]


def _on_cpu(
    runner: Callable[[], Runs], kernels: dict[int | str, _Recorded]
) -> tuple[list[Span], Runs, str]:
    with recording.recorded() as found:
        runs = runner()
    start = runs[0][0]
    threads = {t: f"thread {n}" for n, t in enumerate(_in_order(found))}
    spans = []
    for each in found:
        kernel = kernels.get(each.handler)
        if kernel is None:  # another thread of this process runs it
            continue
        whole = each.last == recording.WHOLE_CALL
        span = Span(
            kernel.sites[0].call.kernel.name,
            threads[each.thread],
            each.begin / 1e9 - start,
            each.end / 1e9 - start,
            None if whole else (each.first, each.last),
        )
        (kernel.calls if whole else kernel.parts).append(span)
        spans.append(span)
    lost = f"{found.lost} spans were dropped; use fewer runs=" if found.lost else ""
    return spans, [(a - start, b - start) for a, b in runs], lost


def _in_order(spans: Sequence[recording.Span]) -> list[int]:
    """Threads in the order in which they started work."""
    ordered = sorted(spans, key=lambda span: span.begin)
    return list(dict.fromkeys(span.thread for span in ordered))


def _on_device(
    runner: Callable[[], Runs], kernels: dict[int | str, _Recorded]
) -> tuple[list[Span], Runs, str]:
    runs: Runs = []
    symbols = {str(key): kernel for key, kernel in kernels.items()}
    spans = []
    for span in device_events(lambda: runs.extend(runner())):
        symbol = next((s for s in symbols if _is_called(span.name, s)), None)
        span = replace(span, kernel=symbol is not None)
        if symbol is not None:
            symbols[symbol].calls.append(span)
        spans.append(span)
    start = runs[0][0]
    note = "" if spans else "the device's profiler recorded nothing"
    return spans, [(a - start, b - start) for a, b in runs], note


def _is_called(name: str, symbol: str) -> bool:
    """Whether a name in a trace is the kernel's; XLA may have appended a number."""
    rest = name.removeprefix(symbol)
    return name.startswith(symbol) and not rest.strip("_0123456789.")


def _profile(
    name: str,
    kernels: dict[int | str, _Recorded],
    spans: list[Span],
    runs: Runs,
    note: str,
) -> Profile:
    rows = [_row(kernel, len(runs)) for kernel in kernels.values() if kernel.calls]
    rows.sort(key=lambda row: -row.seconds)
    calls = [(s.begin, s.end) for kernel in kernels.values() for s in kernel.calls]
    seconds = sum(end - begin for begin, end in runs) / len(runs)
    other = max(seconds - covered(calls) / len(runs), 0.0)
    return Profile(
        name,
        this_computer().name,
        seconds,
        tuple(runs),
        tuple(rows),
        other,
        tuple(sorted(spans, key=lambda span: (span.begin, -span.end))),
        note,
    )


def _row(kernel: _Recorded, runs: int) -> KernelTime:
    total = sum(span.seconds for span in kernel.calls)
    worked = sum(span.seconds for span in kernel.parts)
    each = total / len(kernel.calls)
    return KernelTime(
        _report(kernel.sites, each),
        len(kernel.calls) / runs,
        total / runs,
        min(span.seconds for span in kernel.calls),
        worked / total if kernel.parts and total else None,
    )


def _report(sites: Sequence[Site], seconds: float) -> KernelReport:
    """The report of a kernel, with the measured time of a call."""
    found = analyse(sites[0], this_computer()).with_report(measured=seconds)
    places = list(dict.fromkeys(str(s.call.kernel.loc or "") for s in sites))
    return replace(found.with_hints().report, at=", ".join(filter(None, places)))
