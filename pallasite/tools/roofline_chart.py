"""The data of roofline charts, which `pl.roofline` and the explorer draw.

Operations per second over operations per byte, both on logarithmic scales. A chip's
memory is a slope, its units are levels; a kernel is a point at the rate it reaches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import Any

from pallasite.errors import SpecError
from pallasite.passes.analysis.work import short
from pallasite.target import Machine, named
from pallasite.tools.report import KernelReport

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
    """One kernel on one chip; `kind` says what its rate comes from."""

    kernel: str
    chip: str
    intensity: float
    rate: float
    kind: str


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
    types: dict[str, set[str]] = {}
    for report in reports:
        found = _point(report)
        if found is None:
            left_out.append(report.name)
            continue
        points.append(found)
        assert report.work is not None
        types.setdefault(report.target, set()).update(report.work.products)
    if not points:
        given = ", ".join(left_out) or "none"
        raise SpecError(
            "no kernel to plot: they have no floating-point operations, or no time",
            [("given", given)],
            fix="pass reports of pl.explain(f)(*args) or pl.profile(f)(*args)",
        )
    ceilings = [c for chip, used in types.items() for c in _ceilings(chip, used)]
    return Chart(tuple(ceilings), tuple(points), tuple(dict.fromkeys(left_out)))


def _point(report: KernelReport) -> Point | None:
    if report.work is None or not report.intensity:
        return None
    done = report.work.flops + report.work.transcendentals
    estimate = report.estimate and report.estimate.seconds
    bound = report.bound and report.bound.seconds
    times = ((report.measured, MEASURED), (estimate, ESTIMATED), (bound, BOUND))
    for seconds, kind in times:
        if seconds:
            rate = done / seconds
            return Point(report.name, report.target, report.intensity, rate, kind)
    return None


def _ceilings(chip: str, types: set[str]) -> list[Ceiling]:
    peak = Machine.peak(named(chip).chip)
    levels = {dtype: peak.product_rate(dtype) for dtype in sorted(types)}
    if peak.vector not in levels.values():
        levels["vector"] = peak.vector
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
