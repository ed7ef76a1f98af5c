"""Checks kernels without the chip, for `pl.aot(f, *args).compile("tpu:v6e")`.

Every kernel of a function goes through the passes and the backend of each target; for a
TPU, libtpu then compiles the result in a separate process. The report says whether each
kernel compiles, or why not; what it uses; and what limits it (`report.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pallasite import config
from pallasite.backends import base
from pallasite.backends.base import Resource
from pallasite.runtime import aot as libtpu
from pallasite.sites import Site, in_parts
from pallasite.target import Machine, Named, Tpu
from pallasite.tools.analysis import Analysis, analyse
from pallasite.tools.measure import is_here, refusal
from pallasite.tools.report import Estimate, KernelReport
from pallasite.tools.tpu_words import in_words

TIMEOUT = 600.0  # seconds for libtpu, per kernel
# libtpu's names of units, and our names.
UNITS = {
    "MATMUL": "matrix",
    "VALU": "vector",
    "EUP": "special",
    "XLU": "across lanes",
    "VLOAD": "load",
    "VSTORE": "store",
}

Progress = Callable[[str], None]


def compile_sites(
    sites: Sequence[Site],
    target: Named,
    folder: Path | None = None,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> list[KernelReport]:
    """Compiles calls for one target and reports on each.

    Args:
        sites: the calls.
        target: what to compile for.
        folder: where to write the text of every stage and libtpu's dumps.
        timeout: seconds for libtpu to compile one kernel.
        progress: called with a line of text at each event.
    """
    tell, found = progress or (lambda text: None), []
    whole = [native(site, target) for site in sites]
    sites = [p for s in whole for p in in_parts(s, target.platform, target.chip)]
    with config.override(dump=str(folder or config.get("dump"))):
        for number, site in enumerate(sites, 1):
            name = site.call.kernel.name
            tell(f"{target.name}: {number} of {len(sites)}, {name}")
            found.append(analyse(site, target))
        found = [_compiled(each) for each in found]
        if isinstance(target.chip, Tpu):
            found = estimated(found, folder, timeout, tell)
    return [each.report for each in found]


def _compiled(found: Analysis) -> Analysis:
    """Says of a report whether a compiler has accepted the text of the last stage."""
    if found.compiled is None:
        return found  # refused, or left to the emulation
    lacking = found.compiled.backend.missing(has_device=False)
    if not lacking:
        return found.with_report(compiled=True)
    if not isinstance(found.target.chip, Tpu) and is_here(found.target):
        error = refusal(found.site.call)
        return found.with_report(compiled=not error, error=error)
    text = f"not compiled, only the text for the compiler was generated: {lacking}"
    return found.with_report(compiled=False, note=text)


def native(site: Site, target: Named) -> Site:
    """The call without a request for emulation or another platform's backend."""
    call = replace(site.call, interpret=False)
    backend = None if call.backend == "interpret" else call.backend
    if backend is not None and target.platform not in base.get(backend).platforms:
        backend = None
    return replace(site, call=replace(call, backend=backend))


def estimated(
    found: Sequence[Analysis],
    folder: Path | None = None,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> list[Analysis]:
    """Adds libtpu's results for one TPU to the kernels' reports."""
    lacking = libtpu.missing()
    if lacking:
        note = f"no estimate: {lacking}"
        return [
            each if each.report.note else each.with_report(note=note) for each in found
        ]
    jobs = {
        n: libtpu.Job.of(each.report.name, each.compiled.imported, each.launch)
        for n, each in enumerate(found)
        if each.compiled is not None and each.launch is not None
    }
    if not jobs:
        return list(found)
    target, done = found[0].target, 0

    def tell(result: libtpu.Compiled) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            state = "compiled" if result.ok else "refused"
            progress(f"{target.name}: {done} of {len(jobs)}, {result.name} {state}")

    if progress is not None:
        progress(f"{target.name}: starting libtpu")
    assert isinstance(target.chip, Tpu)
    keep = None if folder is None else folder / "libtpu"
    results = libtpu.compile_all(
        list(jobs.values()),
        target.chip.name,
        cycles=True,
        timeout=timeout,
        units=True,
        keep=keep,
        progress=tell,
    )
    new = list(found)
    for n, result in zip(jobs, results, strict=True):
        new[n] = _with_result(found[n], target.chip, result)
    return new


def _with_result(found: Analysis, chip: Tpu, result: libtpu.Compiled) -> Analysis:
    if not result.ok:
        error = in_words(result.error, found.site.call.kernel)
        return found.with_report(error=str(error), compiled=None, hints=())
    estimate = _estimate(found, chip, result)
    spills = estimate.spills
    if found.facts is not None:
        found = replace(found, facts=replace(found.facts, spills=spills))
    resources = _with_vmem(found.report, estimate.vmem)
    note = ""
    if result.cycles is None and result.bundles is None:
        note = "libtpu compiled it, but has no estimate of its time"
    elif result.cycles is None:
        note = (
            "libtpu has no estimate for it; cycles are those of its instructions, "
            "without copies"
        )
    found = found.with_report(estimate=estimate, resources=resources, note=note)
    return found.with_hints()


def _estimate(found: Analysis, chip: Tpu, result: libtpu.Compiled) -> Estimate:
    code, bound, facts = result.bundles, found.report.bound, found.facts
    estimated = result.estimated
    if estimated is None:
        return Estimate(None, None, {})
    # libtpu's estimate lets any number of copies overlap each other.
    least = bound.seconds if bound is not None else 0.0
    seconds = max(estimated / chip.clock, least)
    busy: dict[str, float] = {}
    if not seconds:  # an empty grid
        return Estimate(estimated, seconds, busy)
    if code is not None:
        cycles = seconds * chip.clock
        busy = {
            UNITS[k]: min(v / cycles, 1.0) for k, v in code.busy.items() if k in UNITS
        }
    work = facts.scheduled_work or facts.work if facts is not None else None
    if work is not None:
        busy["copies"] = min(Machine.peak(chip).copying(work.bytes) / seconds, 1.0)
    spills, vmem = (code.spills, code.vmem) if code is not None else (None, None)
    return Estimate(estimated, seconds, busy, spills, vmem)


def _with_vmem(report: KernelReport, vmem: int | None) -> tuple[Resource, ...]:
    """The report's resources, with the VMEM use the compiler gives, if it does."""
    if vmem is None:
        return report.resources
    return tuple(
        replace(used, used=vmem) if used.name == "VMEM" else used
        for used in report.resources
    )
