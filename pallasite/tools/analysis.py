"""One kernel call on one target: what compiles it, and what is then known about it.

`analyse(site, target)` is the shared analysis; `explain.py` adds measured times,
`check.py` what a TPU's compiler reports.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite import config
from pallasite.backends import base
from pallasite.errors import (
    InternalError,
    PallasError,
    PerformanceWarning,
    UnsupportedError,
)
from pallasite.ir.nodes import Kernel
from pallasite.passes.analysis.grid import Axis, analyze
from pallasite.passes.analysis.work import Work, count
from pallasite.passes.run import run
from pallasite.passes.schedule.tpu_blocks import why_small
from pallasite.primitive import Call, for_platform, on_arrays, wants_emulation
from pallasite.sites import Site
from pallasite.target import Chip, Machine, Named
from pallasite.tools.hints import Facts, hints
from pallasite.tools.pass_notes import notes
from pallasite.tools.report import KernelReport
from pallasite.tools.roofline import Roofline, roofline

EMULATION = "interpret"
EMULATED = (
    "the emulation computes it with XLA's operations, one program after another: "
    "without interpret= (and PALLASITE_INTERPRET) a backend compiles it"
)
XLA = "xla"
ON_ARRAYS = (
    "a derivative's kernel that only maps blocks: XLA computes it on whole arrays, "
    "fused with the operations around it"
)
# Passes that split the work among a chip's cores.
_SHARE = ("share_programs",)


@dataclass(frozen=True)
class Analysis:
    """A report, and the data it was made from."""

    site: Site
    target: Named
    report: KernelReport
    facts: Facts | None = None
    compiled: base.Compiled | None = None
    launch: base.Launch | None = None

    def with_report(self, **changes: object) -> "Analysis":
        return replace(self, report=replace(self.report, **changes))

    def with_hints(self) -> "Analysis":
        """The report with hints from all facts known so far."""
        if self.facts is None or not self.report.ok:
            return self
        return self.with_report(hints=hints(self.facts))


def analyse(site: Site, target: Named) -> Analysis:
    """Analyses a call on a target. Nothing is run."""
    call = site.call
    kernel = run(call.kernel)
    work, bound, peak = bound_of(site, kernel, target)
    axes = _axes(kernel)
    report = KernelReport(
        call.kernel.name,
        str(call.kernel.loc or ""),
        target.name,
        EMULATION,
        inside=site.inside,
        times=site.times,
        axes=axes,
        work=work,
        bound=bound,
        fused=call.fused,
        split=site.split,
        config=call.configured.text if call.configured is not None else "",
    )
    chip = target.chip if isinstance(target.chip, Chip) else None
    if on_arrays(call, target.platform, chip) is not None:
        report = replace(report, backend=XLA, why=ON_ARRAYS)
        return Analysis(site, target, report)
    made, why, said, error, lost = _compile(call, target)
    report = replace(report, why=why, error=error)
    if made is None:
        if not error:
            report = replace(report, hints=(EMULATED,))
        return Analysis(site, target, report)
    compiled, launch = made
    scheduled = _scheduled_work(compiled.scheduled)
    facts = Facts(
        target.platform,
        target.chip,
        peak,
        axes,
        work,
        bound,
        compiled.scheduled,
        scheduled,
        said,
        lost,
        shared=any(s.name in _SHARE and s.changed for s in compiled.steps),
        tuned=call.configured is not None and call.configured.tuned,
        why_small=why_small(compiled.imported) if target.platform == "tpu" else "",
    )
    report = replace(
        report,
        backend=compiled.backend.name,
        passes=notes(compiled.imported, compiled.steps),
        resources=tuple(compiled.backend.resources(compiled)),
    )
    return Analysis(site, target, report, facts, compiled, launch).with_hints()


def bound_of(
    site: Site, kernel: Kernel, target: Named
) -> tuple[Work, Roofline, Machine]:
    """The work of a call, a lower bound on its time, and the machine behind it."""
    peak = Machine.peak(target.chip)
    work, least = count(kernel), count(kernel, least=True)
    return work, roofline(least, peak, _repeated(site, least)), peak


def _repeated(site: Site, work: Work) -> int:
    """Bytes of operands that repeat another operand's array."""
    names = [param.name or "unnamed" for param in site.call.kernel.inputs]
    again = [n for n, first in enumerate(site.sources) if first != n]
    touched = {row.array: row.distinct for row in work.traffic if row.mode == "in"}
    return sum(touched.get(names[n], 0) for n in again if n < len(names))


def _axes(kernel: Kernel) -> tuple[Axis, ...]:
    found = [op for op in kernel.body.ops if op.name == "pipeline"]
    return analyze(kernel).axes if len(found) == 1 else ()


def _scheduled_work(kernel: Kernel) -> Work | None:
    found = [op for op in kernel.body.ops if op.name == "pipeline"]
    return count(kernel) if len(found) == 1 else None


Made = tuple[base.Compiled, base.Launch]


def _compile(
    call: Call, target: Named
) -> tuple[Made | None, str, tuple[str, ...], str, tuple[str, ...]]:
    """Compiles a call with the target's backends: the result, why that backend, its
    warnings, why there is no result, and why not an earlier backend."""
    call = for_platform(call, target.platform)
    if wants_emulation(call):
        return None, "the call asks for it", (), "", ()
    order, why = backends_for(call, target)
    refusals: list[tuple[str, Exception]] = []
    for name in order:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                made = _launch(name, call, target)
            except (PallasError, ImportError) as error:
                refusals.append((name, error))
                continue
            except Exception as error:
                # One kernel must not prevent the analysis of the others.
                refusals.append((name, _broken(name, call, error)))
                continue
        texts = [str(w.message) for w in said if w.category is PerformanceWarning]
        lost = tuple(
            f"it runs on {name}, because {earlier} refuses: {_brief(error)}"
            for earlier, error in refusals
        )
        return made, _reason(why, refusals), tuple(texts), "", lost
    error = "\n".join(str(error) for _, error in refusals) or "no backend for it"
    return None, "no native backend supports it", (), error, ()


def _broken(name: str, call: Call, error: Exception) -> InternalError:
    text = f"{type(error).__name__}: {error}"
    return InternalError(
        f"backend {name!r} crashed on the kernel",
        [("kernel", call.kernel.name), ("error", text)],
        call.kernel.loc,
        "this is a bug in Pallasite; please report the kernel",
    )


def _launch(name: str, call: Call, target: Named) -> Made:
    backend = base.get(name)
    chip = target.chip if isinstance(target.chip, Chip) else None
    # With debug, a TPU's compiler names the author's lines.
    debug = call.debug or target.platform == "tpu"
    options = replace(call.options, chip=chip, debug=debug)
    compiled = base.Compiled(backend, call.kernel, options)
    return compiled, backend.launch(compiled)


def backends_for(call: Call, target: Named) -> tuple[Sequence[str], str]:
    """The backends to try, in order, and why those.

    Raises:
        UnsupportedError: the call names one that does not run on the target.
    """
    named = config.get("backend")
    if call.backend is not None:
        if target.platform not in base.get(call.backend).platforms:
            raise UnsupportedError(
                f"backend {call.backend!r} does not compile for {target.name}",
                [("kernel", call.kernel.name)],
                call.kernel.loc,
                "remove backend=, or choose another target",
            )
        return [call.backend], "the call names it"
    if named and target.platform in base.get(named).platforms:
        return [named], "PALLASITE_BACKEND names it"
    return base.defaults(target.platform, call.kernel), "the default"


def _brief(error: Exception) -> str:
    """What is wrong and why, without the fix: that may be what was done."""
    if not isinstance(error, PallasError):
        return str(error)
    why = [str(value) for label, value in error.facts if label == "why"]
    return ": ".join([error.what, *why])


def _reason(why: str, refusals: Sequence[tuple[str, Exception]]) -> str:
    """Why a backend was chosen after others rejected the kernel."""
    said = []
    for name, error in refusals:
        what = error.what if isinstance(error, PallasError) else str(error)
        said.append(f"{name} refuses: {what}")
    return "; ".join([why, *said])
