"""Candidates: a function with one configuration each, up to the backend's schedule.

Tracing and the passes take a fraction of the time of compiling, and reveal a lot:
configurations that do not fit, those that a backend turns into the same program, and a
static estimate of each one's time. The estimate is only for ranking; `bound` is a lower
bound on the time, where the chip's rates are known.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

import jax

from pallasite.backends import base
from pallasite.errors import (
    ChipMemoryError,
    CompileError,
    PallasError,
    UnsupportedError,
)
from pallasite.ir.nodes import Block, Kernel, walk
from pallasite.ir.roles import Dot, Pipeline, Roles
from pallasite.passes.analysis.cost import cost
from pallasite.passes.analysis.work import Work, count
from pallasite.primitive import Call
from pallasite.sites import sites_of_jaxpr
from pallasite.target import Chip, Gpu, Host, Machine
from pallasite.tools.roofline import roofline
from pallasite.tune import choices
from pallasite.tune.table import Config, Table

SMALL = 0.1  # fraction of the other units' time that is not hidden
OVERLAPPED = 2  # units of a GPU busy at a time, in kernels without roles


@dataclass
class Candidate:
    """A function under one configuration.

    Attributes:
        config: the configuration tried.
        table: selects it for the function's kernels.
        refused: why it was rejected; "" if it was not.
        calls: the kernel calls of the function.
        identity: equal for candidates that are the same program.
        kernels: those kernels as scheduled by their backend.
        seconds: the measured time; None until then.
        spread: of the last measurements, relative (`measure.spread`).
    """

    config: Config
    table: Table
    refused: str = ""
    calls: tuple[Call, ...] = ()
    identity: Any = None
    kernels: tuple[Kernel, ...] = ()
    estimate: float = inf
    bound: float = 0.0
    seconds: float | None = None
    spread: float = 0.0
    run: Callable[[], Any] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.config.items())


def make(
    config: Config,
    table: Table,
    function: Callable[..., Any],
    args: Sequence[Any],
    backends: Callable[[Call], Sequence[str]],
    chip: Chip | Host,
) -> Candidate:
    """Traces and schedules one candidate; a failure is noted in `refused`.

    Args:
        config: the values to try.
        table: those values, for `pl.configs`.
        function, args: what is tuned.
        backends: gives the backends of a call, of which the first to accept it is
            used; none: it is emulated.
        chip: what to schedule for.
    """
    candidate = Candidate(config, table)
    try:
        with choices.configs(table), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fresh = lambda *xs: function(*xs)
            traced = jax.make_jaxpr(fresh)(*args)
        candidate.calls = tuple(site.call for site in sites_of_jaxpr(traced))
        around = str(traced)
        scheduled = [_scheduled(call, backends(call), chip) for call in candidate.calls]
    except Exception as error:  # the user's function may raise anything
        candidate.refused = _first_line(error)
        return candidate
    candidate.kernels = tuple(scheduled)
    candidate.identity = (around, *(kernel.text for kernel in scheduled))
    model = Model(chip)
    candidate.estimate = sum(map(model.estimate, scheduled))
    candidate.bound = sum(map(model.bound, scheduled))
    return candidate


def _scheduled(call: Call, backends: Sequence[str], chip: Chip | Host) -> Kernel:
    options = options_for(call, chip)
    refusals: list[Exception] = []
    for name in backends:
        try:
            return base.Compiled(base.get(name), call.kernel, options).scheduled
        except (UnsupportedError, ChipMemoryError, CompileError) as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    return call.kernel


def options_for(call: Call, chip: Chip | Host) -> base.Options:
    """The options of a call on a chip."""
    return replace(call.options, chip=chip if isinstance(chip, Chip) else None)


def _first_line(error: BaseException) -> str:
    if isinstance(error, PallasError):
        facts = ", ".join(f"{name} {value}" for name, value in error.facts)
        return f"{error.what} ({facts})" if facts else error.what
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@dataclass(frozen=True)
class Model:
    """The time of a kernel on a chip, modelled from its scheduled form."""

    chip: Chip | Host

    def estimate(self, kernel: Kernel) -> float:
        """Seconds, for comparing schedules of the same kernel; 0 if not known."""
        if isinstance(self.chip, Gpu):
            return _on_gpu(kernel, self.chip)
        machine = Machine.usual(self.chip)
        total, steps = cost(kernel), _programs(kernel)
        if isinstance(self.chip, Host):
            work = (total.flops, total.transcendentals, total.bytes_accessed)
            return machine.kernel(*work, steps, self.chip.threads)
        computed = machine.multiplying(total.flops, _types(kernel))
        moved = machine.copying(total.bytes_accessed)
        hidden = SMALL * min(computed, moved)
        return max(computed, moved) + hidden + machine.starting(steps)

    def bound(self, kernel: Kernel) -> float:
        """A lower bound on the time of any run, in seconds.

        A CPU's rates are not known well enough to rule anything out.
        """
        if isinstance(self.chip, Host):
            return 0.0
        machine = Machine.peak(self.chip)
        if isinstance(self.chip, Gpu):
            return roofline(_counted(kernel, True), machine).seconds
        moved = machine.copying(cost(kernel).bytes_accessed)
        return max(machine.multiplying(_products(kernel), machine.fastest), moved)


def _products(kernel: Kernel) -> float:
    """Operations of matmuls outside loops and branches."""
    found = 0.0
    for op in kernel.body.ops:
        if op.name != "pipeline" or None in Pipeline.of(op).grid:
            continue
        pipeline = Pipeline.of(op)
        dots = [Dot.of(o) for o in pipeline.body.ops if o.name == "dot"]
        flops = sum(2 * dot.op.result.tile.size * dot.depth for dot in dots)
        found += prod(n or 0 for n in pipeline.grid) * flops
    return found


def _types(kernel: Kernel) -> set[str]:
    dots = [Dot.of(op) for op in walk(kernel.body) if op.name == "dot"]
    return {side.value.tile.dtype.name for dot in dots for side in dot.sides}


def _programs(kernel: Kernel) -> int:
    grids = [Pipeline.of(op).grid for op in kernel.body.ops if op.name == "pipeline"]
    return sum(prod(n or 1 for n in grid) for grid in grids)


def _on_gpu(kernel: Kernel, chip: Gpu) -> float:
    """Seconds, counting all work, including what masks may skip.

    Zero means unknown, because operand values decide most of the work.
    """
    least, most = (_busy(kernel, chip, _counted(kernel, x)) for x in (True, False))
    return most if least > most / 2 else 0.0


# The bound and the estimate both need the least work.
_counted = functools.lru_cache(maxsize=16)(count)


def _busy(kernel: Kernel, chip: Gpu, work: Work) -> float:
    """Seconds that some work takes.

    Each warpgroup keeps at most one unit of an SM busy, so a single one alternates
    between matmuls and other arithmetic.
    """
    peak = Machine.peak(chip)
    matrix = peak.multiplying_all(work.products)
    # The rate of vectors counts a fused multiply-add as two.
    lanes = peak.computing(2 * (work.arithmetic + work.other), work.transcendentals)
    turns = (matrix + lanes) / _multiplying(kernel)
    read = peak.reading_cache(work.bytes)
    at_work = min(1.0, max(_programs(kernel), 1) / chip.cores)
    computed = [seconds / at_work for seconds in (matrix, lanes, turns)]
    units = [*computed, read, peak.copying(work.distinct_bytes)]
    return max(units) + SMALL * (sum(units) - max(units))


def _multiplying(kernel: Kernel) -> int:
    """How many warpgroups per SM run matmuls, in a kernel with roles."""
    for op in walk(kernel.body):
        if op.name == "roles":
            both = zip(Roles.of(op).warpgroups, op.regions, strict=True)
            found = sum(n for n, role in both if _has_products(role))
            return max(found, 1) * op.attrs.get("cuda.per_core", 1)
    return OVERLAPPED


def _has_products(role: Block) -> bool:
    return any(op.name in ("wgmma", "tensor_mma") for op in walk(role))
