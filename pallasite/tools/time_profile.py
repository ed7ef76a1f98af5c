"""When each kernel of a function ran, as a dataclass that prints well.

`Profile` is the result of `pl.profile`: a table of kernels sorted by time, and the
spans it was made from, which `save` writes as a trace.
"""

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallasite.tools.report import KernelReport, Report, duration, percent, plain

OTHER = "everything else"


@dataclass(frozen=True)
class Span:
    """Something that ran.

    Attributes:
        name: of the kernel, or of whatever else ran on a device.
        where: the thread, or the stream of a device.
        begin: start, in seconds since the first run began.
        end: end, in the same seconds.
        units: for part of a call, its first program and the one past its last, counted
            along the parallel axes; None: a whole call.
        kernel: whether it is one of the function's kernels.
    """

    name: str
    where: str
    begin: float
    end: float
    units: tuple[int, int] | None = None
    kernel: bool = True

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class KernelTime:
    """One kernel in a run.

    Attributes:
        report: its report (`pl.explain`), with one call's time as `measured`.
        calls: calls in one run.
        seconds: total time of its calls in one run.
        least: the shortest call in all runs.
        busy: average number of threads working on a call; None: not known.
    """

    report: KernelReport
    calls: float
    seconds: float
    least: float
    busy: float | None = None

    @property
    def name(self) -> str:
        return self.report.name

    @property
    def of_bound(self) -> float | None:
        """The bound of a call on this chip, as a fraction of the time it took."""
        if self.report.bound is None or not self.report.measured:
            return None
        return self.report.bound.seconds / self.report.measured


@dataclass(frozen=True)
class Profile:
    """Where the time of a function went.

    Attributes:
        name: of the function.
        target: what it ran on.
        seconds: mean time of one run.
        runs: start and end of each run, in seconds since the first began.
        kernels: in order of total time, longest first.
        other: seconds of a run in which no kernel ran.
        spans: everything recorded.
        note: what is missing, and why.
    """

    name: str
    target: str
    seconds: float
    runs: tuple[tuple[float, float], ...]
    kernels: tuple[KernelTime, ...]
    other: float
    spans: tuple[Span, ...]
    note: str = ""

    @property
    def report(self) -> Report:
        """The kernels' reports, with their measured times."""
        return Report(tuple(kernel.report for kernel in self.kernels))

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of the table, its headings first."""
        yield "time", "share", "calls", "per call", "bound", "threads", "kernel"
        for each in self.kernels:
            of_bound, busy = each.of_bound, each.busy
            yield (
                duration(each.seconds),
                self._share(each.seconds),
                f"{each.calls:.3g}",
                duration(each.report.measured or 0.0),
                "" if of_bound is None else percent(of_bound),
                "" if busy is None else f"{busy:.1f}",
                each.report.title,
            )
        yield duration(self.other), self._share(self.other), "", "", "", "", OTHER

    def _share(self, seconds: float) -> str:
        return percent(seconds / self.seconds) if self.seconds else ""

    @property
    def title(self) -> str:
        runs = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        return f"{self.name}  {duration(self.seconds)} (mean of {runs}), {self.target}"

    def __str__(self) -> str:
        table = list(self.rows())
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [self.title]
        for row in table:
            *cells, last = (cell.rjust(n) for cell, n in zip(row, widths, strict=True))
            lines.append("  ".join(["", *cells, last.strip()]))
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])

    def _repr_html_(self) -> str:
        head, *body = (tuple(map(html.escape, row)) for row in self.rows())
        style = "text-align:right"
        cells = [f"<th style='{style}'>{cell}</th>" for cell in head]
        lines = [f"<tr>{''.join(cells)}</tr>"]
        for *numbers, last in body:
            cells = [f"<td style='{style}'>{cell}</td>" for cell in numbers]
            name = f"<td style='text-align:left'>{last}</td>"
            lines.append(f"<tr>{''.join(cells)}{name}</tr>")
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}{''.join(lines)}</table>{note}"

    def as_json(self) -> dict[str, Any]:
        """Plain data that `json.dumps` accepts."""
        data = plain(self)
        for row, kernel in zip(data["kernels"], self.kernels, strict=True):
            row["report"] = kernel.report.as_json()
        return data

    def trace(self) -> dict[str, Any]:
        """Trace events as Perfetto and Chrome read them; times in microseconds."""
        places = list(dict.fromkeys(["runs", *(span.where for span in self.spans)]))
        events = [_named("process_name", 0, f"{self.name} on {self.target}")]
        events += [_named("thread_name", n, place) for n, place in enumerate(places)]
        for number, (begin, end) in enumerate(self.runs):
            events.append(_event(f"run {number}", "run", 0, begin, end))
        for span in self.spans:
            kind = "call" if span.units is None else "programs"
            kind = kind if span.kernel else "other"
            place = places.index(span.where)
            event = _event(span.name, kind, place, span.begin, span.end)
            if span.units is not None:
                first, last = span.units
                event["args"] = {"first program": first, "last program": last - 1}
            events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write a trace (JSON) that https://ui.perfetto.dev opens."""
        Path(path).write_text(json.dumps(self.trace()))


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": thread, "args": {"name": name}}


def _event(
    name: str, kind: str, thread: int, begin: float, end: float
) -> dict[str, Any]:
    times = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "name": name, "cat": kind, "pid": 1, "tid": thread, **times}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The total time covered by at least one span, in seconds."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total
