"""What is known about a kernel on a target, as a dataclass that prints well.

`explain.py` and `check.py` fill in the same `KernelReport`. It holds only data; `str`
gives text, `_repr_html_` a table for notebooks, `as_json` plain data.
"""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pallasite.backends.base import Resource
from pallasite.passes.analysis.grid import Axis
from pallasite.passes.analysis.work import Traffic, Work, short
from pallasite.tools.pass_notes import PassNote, shape_text, sizes
from pallasite.tools.roofline import Roofline


@dataclass(frozen=True)
class Estimate:
    """What a chip's own compiler reports about a kernel it compiled.

    Attributes:
        cycles: its static estimate of a call.
        seconds: the cycles at the chip's clock rate, but not less than the bound.
        busy: the fraction of the seconds for which each unit is busy.
        spills: spills and reloads of vector registers in the code.
        vmem: bytes of vector memory, including the compiler's own.
    """

    cycles: int | None
    seconds: float | None
    busy: Mapping[str, float]
    spills: int | None = None
    vmem: int | None = None


@dataclass(frozen=True)
class KernelReport:
    """One kernel call on one target.

    Attributes:
        name: the kernel's name.
        at: the author's line of the call or the kernel.
        inside: the control flow around the call, outermost first.
        times: how often one run of the function makes the call; None: data-dependent.
        target: what it is compiled for.
        backend: what runs it; "interpret" is the emulation, "xla" XLA's own operations.
        why: why that backend.
        error: why it does not compile; empty if it does.
        compiled: whether the target's compiler accepted it; False: that compiler is not
            available here; None: it was not asked to.
        axes: the grid axes: parallel or sequential, and why.
        work: of one call: operations, and how often each block is copied.
        bound: a lower bound on the target's time.
        measured: seconds on this computer; None: not measured.
        estimate: the compiler's numbers, for a TPU.
        resources: on-chip memory and registers, used and available.
        passes: what the passes did to the kernel.
        hints: what would make it faster, most useful first.
        note: further remarks, such as why numbers are missing.
        fused: what `pl.fuse` moved into the kernel, and why not more.
        config: the configuration of a function that can be tuned, and where it is from.
        split: for one of the kernels that a call is run as: of which, and why.
    """

    name: str
    at: str
    target: str
    backend: str
    why: str = ""
    inside: tuple[str, ...] = ()
    times: int | None = 1
    error: str = ""
    compiled: bool | None = None
    axes: tuple[Axis, ...] = ()
    work: Work | None = None
    bound: Roofline | None = None
    measured: float | None = None
    estimate: Estimate | None = None
    resources: tuple[Resource, ...] = ()
    passes: tuple[PassNote, ...] = ()
    hints: tuple[str, ...] = ()
    note: str = ""
    fused: tuple[str, ...] = ()
    split: str = ""
    config: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.compiled is not False

    @property
    def intensity(self) -> float | None:
        """Operations per byte that must be moved."""
        if self.work is None or not self.work.distinct_bytes:
            return None
        return (self.work.flops + self.work.transcendentals) / self.work.distinct_bytes

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        """Headings, each with its lines of text."""
        yield "target", [self.target]
        why = f": {self.why}" if self.why else ""
        yield "backend", [self.backend + why]
        if self.config:
            yield "config", [self.config]
        if self.split:
            yield "split", [self.split]
        if self.fused:
            yield "fused", list(self.fused)
        if self.error:
            yield "error", self.error.splitlines()
        if self.axes:
            yield "grid", [sizes([a.size for a in self.axes]), *self._axis_lines()]
        if self.work is not None:
            yield "blocks", [_traffic(row) for row in self.work.traffic]
            yield "work", [self._work_line(self.work)]
        if self.bound is not None:
            yield "bound", [self._bound_line(self.bound)]
        yield from self._times()
        if self.resources:
            yield "on chip", [_resource(r) for r in self.resources]
        if self.passes:
            yield "passes", list(map(str, self.passes))
        if self.hints:
            yield "hints", list(self.hints)
        if self.note:
            yield "note", [self.note]

    def _times(self) -> Iterator[tuple[str, list[str]]]:
        if self.measured is not None:
            share = ""
            if self.bound is not None and self.measured:
                share = f"; the bound is {percent(self.bound.seconds / self.measured)}"
            yield "measured", [duration(self.measured) + share]
        found = self.estimate
        if found is not None and found.cycles is not None:
            time = f", {duration(found.seconds)}" if found.seconds is not None else ""
            yield "estimate", [f"{found.cycles:,} cycles{time}"]
        if found is not None and found.busy:
            yield (
                "busy",
                [", ".join(f"{k} {percent(v)}" for k, v in found.busy.items())],
            )
        if found is not None and found.spills is not None:
            yield "spills", [f"{found.spills} vector registers"]

    def _axis_lines(self) -> Iterator[str]:
        kinds = {True: "parallel", False: "sequential"}
        for number, axis in enumerate(self.axes):
            kind = kinds[axis.parallel]
            yield f"i{number}  {kind:<10}  {axis.reason}"

    def _work_line(self, work: Work) -> str:
        parts = [f"{short(work.flops)}flop"]
        if work.products:
            by = ", ".join(
                f"{short(n)}{d.replace(':', ' ')}" for d, n in work.products.items()
            )
            parts[0] += f" (matmuls {by})"
        if work.transcendentals:
            parts.append(f"{short(work.transcendentals).strip()} transcendentals")
        moved = f"{short(work.bytes)}B moved"
        if work.distinct_bytes != work.bytes:
            moved += f", {short(work.distinct_bytes)}B at least"
        parts.append(moved)
        if self.intensity is not None:
            parts.append(f"{self.intensity:.3g} flop per byte")
        if not work.exact:
            parts.append("some of it is data-dependent")
        return "; ".join(parts)

    def _bound_line(self, bound: Roofline) -> str:
        if not bound.seconds:
            return "none: no arithmetic is known, and caches may hold the operands"
        others = [
            f"{name} {duration(seconds)}"
            for name, seconds in bound.units.items()
            if name != bound.limit and seconds
        ]
        text = f"{duration(bound.seconds)} by {bound.limit}"
        return f"{text} ({', '.join(others)})" if others else text

    @property
    def title(self) -> str:
        around = f", in {' in '.join(reversed(self.inside))}" if self.inside else ""
        often = "" if self.times == 1 else ", unknown times"
        if self.times not in (None, 1):
            often = f", {self.times} times"
        at = f"  {self.at}" if self.at else ""
        return f"{self.name}{at}{around}{often}"

    def __str__(self) -> str:
        lines = [self.title]
        for heading, texts in self.rows():
            for n, text in enumerate(texts):
                lines.append(f"  {heading if n == 0 else '':<9} {text}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = [
            f"<tr><th style='text-align:left;vertical-align:top'>{html.escape(h)}</th>"
            f"<td style='text-align:left'>{'<br>'.join(map(html.escape, texts))}</td>"
            "</tr>"
            for h, texts in self.rows()
        ]
        title = html.escape(self.title)
        return f"<table><caption>{title}</caption>{''.join(cells)}</table>"

    def as_json(self) -> dict[str, Any]:
        """Plain data that `json.dumps` accepts."""
        data = plain(self)
        data["ok"] = self.ok
        if self.work is not None:
            more = {"flops": self.work.flops, "bytes": self.work.bytes}
            data["work"] |= {**more, "distinct_bytes": self.work.distinct_bytes}
        if self.bound is not None:
            data["bound"] |= {"seconds": self.bound.seconds, "limit": self.bound.limit}
        return data


@dataclass(frozen=True)
class Report:
    """The kernels of a function, one report per call and target."""

    kernels: tuple[KernelReport, ...]

    @property
    def ok(self) -> bool:
        return all(kernel.ok for kernel in self.kernels)

    @property
    def refused(self) -> bool:
        """Whether some kernel was refused, by Pallasite or by the target's compiler."""
        return any(kernel.error for kernel in self.kernels)

    @property
    def compiled(self) -> bool:
        """Whether every kernel was compiled, by the target's own compiler."""
        return all(kernel.compiled for kernel in self.kernels)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.kernels))

    def _repr_html_(self) -> str:
        return "\n".join(kernel._repr_html_() for kernel in self.kernels)

    def as_json(self) -> dict[str, Any]:
        """Plain data that `json.dumps` accepts."""
        kernels = [kernel.as_json() for kernel in self.kernels]
        return {"ok": self.ok, "compiled": self.compiled, "kernels": kernels}


def plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as dicts and lists."""
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: plain(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [plain(each) for each in value]
    return value


def _traffic(row: Traffic) -> str:
    shape = f"{row.dtype}{shape_text(row.block)}"
    if row.mode == "direct":
        return f"{row.array}  {shape}  accessed directly, {short(row.bytes)}B"
    axes = " ".join(f"i{a}" for a in row.axes)
    along = f"moves along {axes}" if axes else "stays"
    often = f"{row.moves} time{'s' * (row.moves != 1)}"
    most = "" if row.exact else "at most "
    text = f"{row.mode:<3} {row.array}  {shape}  {along}, {most}{often}"
    return f"{text}, {short(row.bytes)}B"


def _resource(used: Resource) -> str:
    if not used.available:
        return f"{used.name} {used.used} {used.unit}"
    if used.unit != "bytes":
        return f"{used.name} {used.used} of {used.available} {used.unit}"
    return f"{used.name} {short(used.used)}B of {short(used.available)}B"


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"
