"""Reports of kernel calls with their times, for `pl.explain`.

On this computer a kernel is run and measured; for a TPU that is not present, its
compiler gives an estimate.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax

from pallasite import config
from pallasite.sites import Site, in_parts
from pallasite.target import Named, Tpu, chip_of_device, measured, named
from pallasite.target.names import of_chip
from pallasite.tools.analysis import Analysis, analyse, bound_of
from pallasite.tools.check import estimated
from pallasite.tools.measure import cannot_measure, is_here, measure
from pallasite.tools.report import Report
from pallasite.tools.traces import Trace, traced_for


def explain_sites(
    trace: Trace, wanted: Sequence[str] | None, measure: bool | None
) -> Report:
    """One report per target and call.

    Args:
        trace: makes the calls.
        wanted: target names; none: this computer.
        measure: see `pl.explain`.
    """
    targets = [named(each) for each in wanted] if wanted else [this_computer()]
    found = [
        explain_site(part, target, measure)
        for target in targets
        for site in traced_for(target, trace)
        for part in in_parts(site, target.platform, target.chip)
    ]
    return Report(tuple(each.report for each in found))


def this_computer() -> Named:
    """The target the knob names, else the device JAX uses."""
    if config.get("target"):
        return named(config.get("target"))
    device = jax.devices()[0]
    chip = chip_of_device(device.device_kind)
    return named("cpu") if chip is None else of_chip(chip)


def explain_site(site: Site, target: Named, wanted: bool | None) -> Analysis:
    """Analyses one call on one target; `wanted`: see `pl.explain`."""
    found = analyse(site, target)
    here = is_here(target)
    if here and wanted is not False:
        return _measured(found)
    if isinstance(target.chip, Tpu) and wanted is None:
        (found,) = estimated([found])
    return found


def _measured(found: Analysis) -> Analysis:
    why_not = cannot_measure(found.site.call)
    if why_not:
        return found.with_report(note=why_not)
    seconds = measure(found.site.call)
    bound = found.report.bound
    if bound is not None and seconds < bound.seconds:
        # Faster than the measured peaks: those were taken while the chip was busy.
        measured.measure_again()
        _, bound, _ = bound_of(found.site, found.site.call.kernel, found.target)
    found = found.with_report(measured=seconds, bound=bound)
    if found.facts is not None and bound is not None:
        found = replace(found, facts=replace(found.facts, bound=bound))
    return found.with_hints()
