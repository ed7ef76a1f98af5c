"""The data of roofline charts, which `pl.roofline` and the explorer draw.

Operations per second over operations per byte, both on logarithmic scales. A chip's
memory is a slope, its units are levels; a kernel is a point at the rate it reaches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import Any

from pallasite.errors import SpecError
from pallasite.passes.analysis.work import Work, short
from pallasite.target import Machine, named
from pallasite.tools.report import KernelReport
from pallasite.tools.roofline import Roofline

LEAST_DECADES = 3
MEASURED, ESTIMATED, BOUND = "measured", "estimated", "bound"


@dataclass(frozen=True)
class Ceiling:
    """A peak rate of a chip: a level, or with `slope`, bytes per second."""

    chip: str
    name: str
    rate: float
    slope: bool = False

    @property
    def label(self) -> str:
        unit = "B/s" if self.slope else "flop/s"
        return f"{self.name} {short(self.rate)}{unit}"


@dataclass(frozen=True)
class Point:
    """One kernel on one chip; `kind` says what its rate comes from.

    Operations are those of the unit that the kernel keeps busy the longest, at the rate
    at which that unit runs. Bytes are those that the memory can have moved meanwhile,
    if they are fewer than the kernel touches (`cached`): caches held the others.
    """

    kernel: str
    chip: str
    intensity: float
    rate: float
    kind: str
    cached: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn; `left_out` lists kernels without floating-point operations."""

    ceilings: tuple[Ceiling, ...]
    points: tuple[Point, ...]
    left_out: tuple[str, ...] = ()

    @property
    def chips(self) -> list[str]:
        return list(dict.fromkeys(c.chip for c in self.ceilings))

    def roof(self, chip: str) -> tuple[float, float]:
        """The rate of a chip's memory and its highest level."""
        own = [c for c in self.ceilings if c.chip == chip]
        levels = [c.rate for c in own if not c.slope]
        return next((c.rate for c in own if c.slope), inf), max(levels)

    def ridge(self, chip: str) -> float:
        """Where the slope meets the highest level."""
        memory, level = self.roof(chip)
        return level / memory

    @property
    def limits(self) -> tuple[float, float, float, float]:
        """The limits of both axes, in whole decades."""
        # Past the ridge, so that the level is visible.
        ridges = [5 * r for r in map(self.ridge, self.chips) if r]
        across = [p.intensity for p in self.points] + ridges
        levels = [c.rate for c in self.ceilings if not c.slope]
        up = [p.rate for p in self.points] + levels
        low, high = _decades(across)
        return low, high, *_decades(up)


def _decades(values: Sequence[float]) -> tuple[float, float]:
    low = 10.0 ** floor(log10(min(values)) - 0.15)
    high = 10.0 ** ceil(log10(max(values)) + 0.15)
    return min(low, high / 10**LEAST_DECADES), high


def chart_of(reports: Iterable[KernelReport]) -> Chart:
    """The chart of some kernels, on all chips covered by the reports.

    Raises:
        SpecError: none of them has a rate.
    """
    points: list[Point] = []
    left_out: list[str] = []
    drawn: dict[str, list[KernelReport]] = {}
    for report in reports:
        found = _point(report)
        if found is None:
            left_out.append(report.name)
            continue
        points.append(found)
        drawn.setdefault(report.target, []).append(report)
    if not points:
        given = ", ".join(left_out) or "none"
        raise SpecError(
            "no kernel to plot: they have no floating-point operations, or no time",
            [("given", given)],
            fix="pass reports of pl.explain(f)(*args) or pl.profile(f)(*args)",
        )
    ceilings = [c for chip, used in drawn.items() for c in _ceilings(chip, used)]
    return Chart(tuple(ceilings), tuple(points), tuple(dict.fromkeys(left_out)))


def _point(report: KernelReport) -> Point | None:
    if report.work is None or report.bound is None:
        return None
    peak = Machine.peak(named(report.target).chip)
    done = _operations(report.work, report.bound, peak)
    if not done or not report.work.distinct_bytes:
        return None
    estimate = report.estimate and report.estimate.seconds
    times = (
        (report.measured, MEASURED),
        (estimate, ESTIMATED),
        (report.bound.seconds, BOUND),
    )
    for seconds, kind in times:
        if seconds:
            rate, intensity = done / seconds, done / report.work.distinct_bytes
            least = rate / peak.bytes
            cached = least > intensity * (1 + 1e-9)
            place = max(intensity, least)
            return Point(report.name, report.target, place, rate, kind, cached)
    return None


def _operations(work: Work, bound: Roofline, peak: Machine) -> float:
    """Those that the unit busy the longest needs its time for, without others'.

    Fewer than the kernel's where a part of its blocks is outside the arrays.
    """
    unit = _busiest(bound)
    seconds = bound.units[unit]
    if unit == "special":
        return seconds * peak.special
    if unit == "vector":
        return seconds * peak.vector
    total, flops = peak.multiplying_all(work.products), sum(work.products.values())
    if unit == "arithmetic":  # of a CPU, which has one unit for all
        total += peak.computing(work.arithmetic, work.transcendentals)
        flops += work.arithmetic + work.transcendentals
    return flops * seconds / total if total else 0.0


def _busiest(bound: Roofline) -> str:
    """The unit that computes the longest."""
    units = {name: time for name, time in bound.units.items() if name != "memory"}
    return max(units, key=lambda name: units[name])


def _ceilings(chip: str, kernels: Sequence[KernelReport]) -> list[Ceiling]:
    peak = Machine.peak(named(chip).chip)
    works = [each.work for each in kernels if each.work is not None]
    kinds = sorted({kind for work in works for kind in work.products})
    levels = {peak.name_of(kind): peak.kind_rate(kind) for kind in kinds}
    if peak.vector not in levels.values():
        levels["vector"] = peak.vector
    units = [_busiest(each.bound) for each in kernels if each.bound is not None]
    if "special" in units:
        levels["special"] = peak.special
    found = [Ceiling(chip, name, rate) for name, rate in levels.items()]
    if peak.bytes != inf:
        found.append(Ceiling(chip, "memory", peak.bytes, slope=True))
    return found


def reports_in(given: Iterable[Any]) -> list[KernelReport]:
    """The kernel reports in reports, profiles and lists of these."""
    found: list[KernelReport] = []
    for each in given:
        if isinstance(each, KernelReport):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += reports_in(each)
        elif hasattr(each, "report"):  # a profile, or a kernel of one
            found += reports_in([each.report])
        elif hasattr(each, "kernels"):
            found += reports_in(each.kernels)
        else:
            raise SpecError(
                f"pl.roofline needs reports, not {type(each).__name__}",
                fix="pl.roofline(pl.explain(f)(x)), or of pl.profile(f)(x)",
            )
    return found
