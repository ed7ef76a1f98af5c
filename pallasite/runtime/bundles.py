"""What libtpu's dumps say about a compiled kernel: busy units, spills, vector memory.

libtpu writes two files per kernel (`aot.py` sets the flags): a table of how many units
of each kind are busy, one row per cycle, and the regions of the code with their loops
and branches. All numbers are static: a bundle of instructions takes one cycle, and no
time is spent waiting for copies.

A grid is a loop with one iteration per step and two more, which fill and drain the
pipeline and skip the body. Code that is a small part of a loop and under a branch
(first step, last step) is assumed to be skipped.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

UTILISATION = "pre-delay_hlo-static-per-bundle-utilization"
CODE = "post-bundle-packing-post-ra"
LABELS = f"({CODE}|{UTILISATION})"  # of the compiler passes to dump

_REGION = re.compile(r"^\s*\$region(\d+): #\{.*?\}(?: parent=(\d+))?(?: // (\w+))?")
_RANGE = re.compile(r"// region range: \[(\d+), (\d+)\)")
_LOOP = re.compile(r"^\s*loop: (.*)$")
_BRANCH = re.compile(r"= sbr\.\w+ .*target bundleno = (\d+) .*region = (\d+)")
_MEMORY = re.compile(r"#allocation\w+ \[.*?space=(\w+), size = (0x[0-9a-f]+|\d+)")
_FILL_PASSES = 2  # extra iterations of a pipelined loop
_UNKNOWN = -1  # a trip count known only at run time, counted as one


@dataclass(frozen=True)
class Bundles:
    """One kernel's code.

    Attributes:
        cycles: all bundles, times the trip counts of their loops; copies cost nothing.
        busy: cycles for which the units of each kind are busy, divided by their number:
            "MATMUL", "VALU", "EUP", "XLU", "VLOAD", "VSTORE" and so on.
        spills: vector registers that the code writes to memory.
        fills: vector registers that it reads back.
        vmem: bytes of vector memory.
        exact: whether all trip counts are known; others count as one.
    """

    cycles: int
    busy: Mapping[str, float]
    spills: int
    fills: int
    vmem: int
    exact: bool = True


def read(folder: Path | str, op: str) -> Bundles | None:
    """The code of an op by the start of its name; None if nothing was dumped."""
    place = Path(folder)
    tables = sorted(place.glob(f"*-{op}*-{UTILISATION}.txt"))
    codes = sorted(place.glob(f"*-{op}*-{CODE}.txt"))
    if not tables or not codes:
        return None
    return parse(tables[-1].read_text(), codes[-1].read_text(errors="replace"))


def parse(table: str, code: str) -> Bundles:
    """Parses the two texts."""
    names, units, rows = _table(table)
    regions, memory = _regions(code)
    root = _spans(regions, len(rows))
    sums = [
        list(accumulate((row[n] for row in rows), initial=0)) for n in range(len(names))
    ]

    def column(n: int) -> Callable[[int, int], int]:
        return lambda low, high: sums[n][high] - sums[n][low]

    busy = {
        name: root.total(column(n)) / max(units[n], 1) for n, name in enumerate(names)
    }
    totals = {name: sums[n][-1] for n, name in enumerate(names)}
    return Bundles(
        root.total(lambda low, high: high - low),
        busy,
        totals.get("VSTORE:SPILL", 0),
        totals.get("VLOAD:FILL", 0),
        memory,
        root.is_counted(),
    )


def _table(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    """The units' names, their numbers, and how many are busy in each cycle."""
    lines = text.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    units = [int(n) for n in lines[2].split()]
    return names, units, [[int(n) for n in line.split()] for line in lines[4:] if line]


@dataclass
class _Region:
    parent: int | None
    kind: str
    low: int = 0
    high: int = 0
    branch: tuple[int, int] | None = None  # to this bundle, in this region
    loop: str = ""


def _regions(text: str) -> tuple[dict[int, _Region], int]:
    found: dict[int, _Region] = {}
    memory, loops, current = 0, [], None
    for line in text.splitlines():
        if match := _REGION.match(line):
            parent = int(match[2]) if match[2] else None
            current = found[int(match[1])] = _Region(parent, match[3] or "")
            if current.kind == "loop_body" and loops:
                current.loop = loops.pop()
        elif match := _LOOP.match(line):
            loops.append(match[1])
        elif current is None:
            continue
        elif match := _RANGE.search(line):
            if not current.high:
                current.low, current.high = int(match[1]), int(match[2])
        elif match := _MEMORY.search(line):
            memory += int(match[2], 0) if match[1] == "vmem" else 0
        elif match := _BRANCH.search(line):
            current.branch = int(match[1]), int(match[2])
    return found, memory


@dataclass
class _Span:
    """Bundles from `low` to `high`: a loop, or what a branch skips."""

    low: int
    high: int
    passes: int | None = None  # trip count of a loop; None: a branch
    inner: list["_Span"] = field(default_factory=list)

    def total(self, of: Callable[[int, int], int], skip_body: bool = False) -> int:
        """Sums a quantity over the bundles that run, as often as each runs."""
        total = of(self.low, self.high)
        for span in self.inner:
            total -= of(span.low, span.high)
            if span.passes is not None:
                passes = 1 if span.passes == _UNKNOWN else span.passes
                has_body = any(s.fills_most_of(span) for s in span.inner)
                fill = _FILL_PASSES if has_body and passes > _FILL_PASSES else 0
                total += span.total(of) * (passes - fill)
                total += span.total(of, skip_body=True) * fill
            elif span.fills_most_of(self) and not skip_body:
                total += span.total(of)
        return total

    def is_counted(self) -> bool:
        """Whether the trip counts of all loops inside are known."""
        return self.passes != _UNKNOWN and all(s.is_counted() for s in self.inner)

    def fills_most_of(self, outer: "_Span") -> bool:
        is_branch = self.passes is None
        return is_branch and 2 * (self.high - self.low) > outer.high - outer.low


def _spans(regions: Mapping[int, _Region], size: int) -> _Span:
    """Backward branches make loops; forward branches may skip code."""
    root = _Span(0, size)
    stack = [root]
    for span in sorted(_found(regions), key=lambda s: (s.low, -s.high)):
        while len(stack) > 1 and not (
            stack[-1].low <= span.low and span.high <= stack[-1].high
        ):
            stack.pop()
        stack[-1].inner.append(span)
        stack.append(span)
    return root


def _found(regions: Mapping[int, _Region]) -> Iterator[_Span]:
    for region in regions.values():
        if region.branch is None:
            continue
        to, number = region.branch
        target = regions.get(number)
        if to < region.high and target is not None and target.kind == "loop_body":
            yield _Span(to, region.high, _passes(target.loop))
        elif to > region.high:
            yield _Span(region.high, to)


def _passes(text: str) -> int:
    """A loop's trip count."""
    numbers = {k: int(v) for k, v in re.findall(r"(\w+)=(-?\d+)(?=,|$)", text)}
    parts: Sequence[int | None] = [numbers.get(k) for k in ("start", "step", "limit")]
    if None in parts or not numbers["step"]:
        return _UNKNOWN
    span = numbers["limit"] - numbers["start"]
    return max(0, -(-span // numbers["step"]))
