"""One HTML page about some kernel calls: source, stages, grid and report.

`page_of(sites, targets)` collects plain data and embeds it, with the style and the
script next to this file, in one self-contained file.
"""

import html
import json
import linecache
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pallasite.backends import base
from pallasite.errors import PallasError, SpecError
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import print_kernel
from pallasite.passes.analysis.work import count_by_line
from pallasite.passes.run import run
from pallasite.runtime.aot import OP
from pallasite.runtime.bundles import CODE
from pallasite.sites import Site
from pallasite.target import Chip, Named, Tpu, named
from pallasite.tools.analysis import Analysis, analyse
from pallasite.tools.check import estimated, native
from pallasite.tools.explorer.grid_steps import grids_of
from pallasite.tools.explorer.linked_text import At, LinkedText, linked
from pallasite.tools.explorer.roofline_svg import roofline_svg
from pallasite.tools.report import KernelReport
from pallasite.tools.roofline_chart import chart_of
from pallasite.tools.timing import explain_site, is_here, this_computer

AROUND = 30  # lines of a long file shown before and after linked lines
LONG = 1500

Progress = Callable[[str], None]
Jaxprs = Sequence[tuple[Kernel, Any]]


@dataclass(frozen=True)
class Page:
    """A page, and whether all kernels on it compile."""

    html: str
    ok: bool


def page_of(
    title: str,
    sites: Sequence[Site],
    targets: Sequence[str] = (),
    jaxprs: Jaxprs = (),
    measure: bool | None = None,
    progress: Progress | None = None,
) -> Page:
    """The page about some calls.

    Args:
        title: what is shown.
        sites: kernel calls.
        targets: target names; none: this computer.
        jaxprs: the jaxprs that kernels were imported from, where known.
        measure: see `pl.explain`.
        progress: called with a line of text at each event.

    Raises:
        SpecError: a target is not known.
    """
    tell = progress or (lambda text: None)
    chips = [named(each) for each in targets] or [this_computer()]
    table = _Locations()
    views = []
    for chip in chips:
        for number, site in enumerate(sites, 1):
            name = site.call.kernel.name
            tell(f"{chip.name}: {number} of {len(sites)}, {name}")
            views.append(_view(native(site, chip), chip, jaxprs, measure, table))
    data = {
        "title": title,
        "views": views,
        "sources": [_source(file, table.lines_of(file)) for file in table.files],
        "places": table.places,
    }
    return Page(_filled(title, data), all(view["ok"] for view in views))


class _Locations:
    """Source lines by number."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._numbers: dict[At, int] = {}

    def number(self, at: At) -> int:
        if at[0] not in self.files:
            self.files.append(at[0])
        return self._numbers.setdefault(at, len(self._numbers))

    def lines_of(self, file: str) -> list[int]:
        return [line for name, line in self._numbers if name == file]

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each number, the number of its file and the line."""
        return [(self.files.index(file), line) for file, line in self._numbers]


def _view(
    site: Site, chip: Named, jaxprs: Jaxprs, measure: bool | None, table: _Locations
) -> dict[str, Any]:
    """One call on one target."""
    found, code = _explained(site, chip, measure)
    report = found.report
    compiled = None if found.compiled is None else _with_lines(found.compiled, chip)
    texts = [("jaxpr", text) for text in _jaxpr_of(site.call.kernel, jaxprs)]
    texts += _texts(site.call.kernel, compiled)
    texts += [("llo", text) for text in code]
    stages = [_stage(linked(name, text), table) for name, text in texts]
    kernel = run(site.call.kernel)
    costs = {
        table.number(at): [w.flops, w.transcendentals, w.other, w.accessed, w.moved]
        for at, w in count_by_line(kernel).items()
    }
    return {
        "kernel": report.name,
        "ok": report.ok,
        "title": report.title,
        "target": chip.name,
        "report": [[heading, list(texts)] for heading, texts in report.rows()],
        "stages": stages,
        "no_jaxpr": not any(name == "jaxpr" for name, _ in texts),
        "costs": costs,
        "exact": report.work.exact if report.work is not None else True,
        "grids": grids_of(kernel, compiled, chip.platform),
        "roofline": _roofline(report),
    }


def _explained(
    site: Site, chip: Named, measure: bool | None
) -> tuple[Analysis, list[str]]:
    """The analysis of a call; for a TPU also the code that its compiler generates."""
    if not isinstance(chip.chip, Tpu) or measure is not None or is_here(chip):
        return explain_site(site, chip, measure), []
    with tempfile.TemporaryDirectory() as folder:
        found = analyse(site, chip)
        try:
            (found,) = estimated([found], Path(folder))
        except PallasError as error:  # what needs no libtpu is still shown
            return found.with_report(note=error.what), []
        # XLA's own ops around the call are dumped as well.
        codes = sorted(Path(folder).rglob(f"*-{OP}*-{CODE}.txt"))
        return found, [codes[-1].read_text(errors="replace")] if codes else []


def _with_lines(compiled: base.Compiled, chip: Named) -> base.Compiled:
    """The same, with source lines in every text."""
    options = replace(compiled.options, debug=True, lines=True)
    if isinstance(chip.chip, Chip):
        options = replace(options, chip=chip.chip)
    return base.Compiled(compiled.backend, compiled.imported, options)


def _jaxpr_of(kernel: Kernel, jaxprs: Jaxprs) -> list[str]:
    found = [jaxpr for known, jaxpr in jaxprs if known is kernel or known == kernel]
    return [j.pretty_print(source_info=True, name_stack=False) for j in found[:1]]


def _texts(kernel: Kernel, compiled: base.Compiled | None) -> list[tuple[str, str]]:
    """Names and texts, without passes that changed nothing."""
    texts = [("import", print_kernel(kernel, locs=True))]
    if compiled is None:
        return texts
    stages, failed = _made(compiled)
    for step in compiled.steps:
        text = print_kernel(step.kernel, locs=True)
        if text != texts[-1][1]:
            earlier = sum(name.split(".")[0] == step.name for name, _ in texts)
            texts.append((f"{step.name}.{earlier + 1}" if earlier else step.name, text))
    texts += [each for each in stages if each[1] != texts[-1][1]]
    return texts + failed


def _made(
    compiled: base.Compiled,
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The backend's texts, or its error where one cannot be generated."""
    found = []
    for name in compiled:
        try:
            made = compiled[name]
        except (PallasError, ImportError) as error:
            return found, [(name, f"not generated: {error}")]
        if isinstance(made, str):
            found.append((name, str(made)))
    return found, []


def _stage(text: LinkedText, table: _Locations) -> dict[str, Any]:
    """Origins as run lengths: the number of lines, and the number of the place."""
    runs: list[list[int]] = []
    for _, at in text.lines:
        number = -1 if at is None else table.number(at)
        if runs and runs[-1][1] == number:
            runs[-1][0] += 1
        else:
            runs.append([1, number])
    lines = "\n".join(line for line, _ in text.lines)
    return {"name": text.name, "text": lines, "runs": runs, "note": text.note}


def _source(file: str, used: Iterable[int]) -> dict[str, Any]:
    """A file's lines; of a long file only those around linked lines."""
    path = Path(file)
    lines = [line.rstrip("\n") for line in linecache.getlines(str(path))]
    first, last = 1, len(lines)
    if len(lines) > LONG:
        used = list(used)
        first = max(min(used) - AROUND, 1)
        last = min(max(used) + AROUND, len(lines))
    return {
        "file": file,
        "name": os.path.basename(file),
        "first": first,
        "lines": lines[first - 1 : last],
    }


def _roofline(report: KernelReport) -> str:
    try:
        return roofline_svg(chart_of([report]))
    except SpecError:
        return ""


def _filled(title: str, data: Any) -> str:
    """The page with its parts; `<` is escaped so that data cannot end the script."""
    place = resources.files("pallasite.tools.explorer")
    read = lambda name: (place / name).read_text(encoding="utf-8")
    page = read("page.html").replace("@TITLE@", html.escape(title))
    parts = {
        "@STYLE@": read("page.css"),
        "@SCRIPT@": read("page.js"),
        "@DATA@": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    for name, text in parts.items():
        page = page.replace(name, text, 1)
    return page
