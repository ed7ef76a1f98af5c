"""Pairs of spellings: do both become the same kernel, and where not, what keeps them
apart?

    python -m tests.forms.pairs --count 200 --target gpu:h200 --target cpu
    python -m tests.forms.pairs --count 50 --base attention --json pairs.json

For each pair and target the first of these that holds is counted:

* text: the same normal text, names aside (the kernel after the passes that every
  backend shares);
* schedule: the same text after the backend's own passes;
* work: the same backend, and the scheduled kernels compute and move the same, up to 5%,
  on as many of the chip's cores;
* time: other kernels, which take the same time, up to 5%, by the model of the machine;
* neither: with the choices that alone make another text of the first spelling, and how
  many times as long as the faster one the slower one takes.
"""

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf, prod
from pathlib import Path
from typing import Any

from pallasite import config
from pallasite.backends import base
from pallasite.backends.cpu.call.parallel_units import UNITS
from pallasite.errors import PallasError
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.analysis.work import count
from pallasite.passes.run import run
from pallasite.primitive import Call, parts_of, planned
from pallasite.sites import calls_in
from pallasite.target import Chip, Named, named
from pallasite.target.machine import ROUND_BYTES, Machine
from tests.forms.form import SIZES, Size
from tests.forms.spellings import BASES, Spelling, pairs

WITHIN = 1.05
KINDS = ("text", "schedule", "work", "time", "neither")


def nameless(text: str) -> str:
    """A kernel's text with its values numbered in order and without its name."""
    numbers: dict[str, str] = {}
    number = lambda m: numbers.setdefault(m[0], f"%{len(numbers)}")
    text = re.sub(r"^kernel @[\w.]+", "kernel", text)
    return re.sub(r"%\w+", number, text)


def call_of(spelling: Spelling, size: Size) -> Call:
    function, operands = spelling.function(size), spelling.problem.structs(size)
    (call,) = calls_in(function, *operands)
    return call


def normal_text(call: Call) -> str:
    return nameless(run(call.kernel).text)


@dataclass(frozen=True)
class Scheduled:
    """What a target's backend makes of one kernel."""

    backend: str
    kernel: Kernel | None  # None: no backend takes it
    refusals: tuple[str, ...]
    target: Named

    @staticmethod
    def of(call: Call, target: Named) -> "Scheduled":
        refusals = []
        for name in base.defaults(target.platform, call.kernel):
            options = replace(call.options, chip=target.chip)
            compiled = base.Compiled(base.get(name), call.kernel, options)
            try:
                compiled[list(compiled)[1]]  # the first text that it emits
                return Scheduled(name, compiled.scheduled, tuple(refusals), target)
            except (PallasError, ImportError) as error:
                refusals.append(f"{name}: {getattr(error, 'what', error)}")
        return Scheduled("interpret", None, tuple(refusals), target)

    @property
    def text(self) -> str:
        return self.kernel.text if self.kernel is not None else ""

    def is_like(self, other: "Scheduled") -> bool:
        """The same backend, and the same work up to a few percent."""
        if self.backend != other.backend or self.kernel is None or other.kernel is None:
            return False
        a, b = count(self.kernel), count(other.kernel)
        numbers = (
            (a.flops, b.flops),
            (a.transcendentals, b.transcendentals),
            (a.bytes, b.bytes),
        )
        same = all(max(n) <= WITHIN * min(n) for n in numbers)
        return same and self.used == other.used

    @property
    def used(self) -> int:
        """How many of the chip's cores have a program."""
        return min(self.programs, self._machine.cores)

    @property
    def programs(self) -> int:
        """How many may run at once."""
        if self.kernel is None:
            return 1
        (grid,) = (op for op in self.kernel.body.ops if op.name == "pipeline")
        if UNITS in grid.attrs:  # a CPU's threads have noted theirs
            return prod(Pipeline.of(grid).grid[a] or 1 for a in grid.attrs[UNITS])
        axes = analyze(self.kernel).axes
        return prod(axis.size or 1 for axis in axes if axis.parallel)

    @property
    def seconds(self) -> float:
        """Estimated time: of the unit that is busy the longest, and to start steps.

        Bytes that a chip with caches copies again come from there; few programs wait
        for memory most of the time.
        """
        if self.kernel is None:
            return inf
        work, machine = count(self.kernel), self._machine
        products = machine.multiplying_all(work.products)
        others = machine.computing(work.arithmetic, work.transcendentals)
        moved = work.bytes if machine.must_fit else work.distinct_bytes
        memory = max(machine.copying(moved), machine.reading_cache(work.bytes))
        turns = -(-self.programs // machine.cores)
        idle = turns * machine.cores / max(self.programs, 1)
        waiting = max(min(self.programs, machine.at_once), 1)
        memory = max(memory, machine.latency * work.bytes / ROUND_BYTES / waiting)
        if machine.one_unit:
            return idle * (products + others + memory)
        return max(idle * max(products, others), memory) + self._starting

    @property
    def _starting(self) -> float:
        """Seconds to start the steps of grids, and the matmuls in them."""
        assert self.kernel is not None
        grids = [op for op in self.kernel.body.ops if op.name == "pipeline"]
        counts = [prod(n or 1 for n in Pipeline.of(op).grid) for op in grids]
        dots = (sum(o.name == "dot" for o in walk(op.regions[-1])) for op in grids)
        each = zip(counts, dots, strict=True)
        return self._machine.starting(sum(counts), sum(n * m for n, m in each))

    @property
    def _machine(self) -> Machine:
        return Machine.usual(self.target.chip)


def schedules_of(call: Call, target: Named) -> list[Scheduled]:
    """What a call runs as: one kernel, or several that its plan says."""
    platform = "cuda" if target.platform == "gpu" else target.platform
    chip = target.chip if isinstance(target.chip, Chip) else None
    program = planned(call, platform, chip=chip).program
    calls = [call] if program is None else parts_of(call, program)
    return [Scheduled.of(each, target) for each in calls]


def outcome(pair: Sequence[Spelling], target: Named, size: Size) -> tuple[str, str]:
    """The kind of agreement on a target, and the cause where there is none."""
    with warnings.catch_warnings(), config.override(target=target.name):
        warnings.simplefilter("ignore")
        calls = [call_of(spelling, size) for spelling in pair]
        texts = [normal_text(call) for call in calls]
        if texts[0] == texts[1]:
            return "text", ""
        first, second = (schedules_of(call, target) for call in calls)
        if len(first) == len(second):
            both = list(zip(first, second, strict=True))
            alike = [a.is_like(b) for a, b in both]
            if all(alike) and all(
                nameless(a.text) == nameless(b.text) for a, b in both
            ):
                return "schedule", ""
            if all(alike):
                return "work", ""
        ratio = slower(first, second)
        if ratio <= WITHIN:
            return "time", ""
        why = cause(pair, first, second, texts[0], size)
        return "neither", f"{ratio:.2f}x; {why}"


def slower(first: Sequence[Scheduled], second: Sequence[Scheduled]) -> float:
    """How many times as long as the faster one the slower one takes."""
    launch = Machine.usual(first[0].target.chip).launch
    times = [sum(each.seconds + launch for each in parts) for parts in (first, second)]
    return max(times) / min(times) if min(times) < inf else inf


def cause(
    pair: Sequence[Spelling],
    a: Sequence[Scheduled],
    b: Sequence[Scheduled],
    text: str,
    size: Size,
) -> str:
    """The choices that alone change the first spelling's text, and what refused."""
    first, second = pair
    alone = []
    for name in first.base.axes:
        if getattr(first.style, name) == getattr(second.style, name):
            continue
        style = replace(first.style, **{name: getattr(second.style, name)})
        if not first.base.fits(first.what, style):
            alone.append(f"({name})")
        elif normal_text(call_of(replace(first, style=style), size)) != text:
            alone.append(f"{name}={getattr(style, name)}")
    said = sorted({why for each in (*a, *b) for why in each.refusals})
    names = ["+".join(each.backend for each in parts) for parts in (a, b)]
    cores = ["+".join(str(each.used) for each in parts) for parts in (a, b)]
    backends = "/".join(dict.fromkeys(names))
    return "; ".join([f"{backends} on {'/'.join(cores)}", ", ".join(alone), *said])


def report(count: int, seed: int, bases: Sequence[str], targets: Sequence[str], size):
    """Outcomes by target: counts, and the pairs that agree in nothing."""
    found: dict[str, Any] = {}
    for name in targets:
        counts: Counter[str] = Counter()
        apart: list[dict[str, str]] = []
        axes: Counter[str] = Counter()
        for pair in islice(pairs(seed, bases), count):
            try:
                kind, why = outcome(pair, named(name), size)
            except Exception as error:
                kind, why = "error", f"{type(error).__name__}: {error}"[:300]
            counts[f"{pair[0].base.name}: {kind}"] += 1
            counts[kind] += 1
            if kind in ("neither", "error"):
                apart.append({"a": str(pair[0]), "b": str(pair[1]), "why": why})
                axes.update(re.findall(r"(\w+)=", why))
        found[name] = {
            "counts": {k: counts[k] for k in sorted(counts)},
            "choices that alone change the text": dict(axes.most_common()),
            "apart": apart,
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", action="append", choices=list(BASES))
    parser.add_argument("--target", action="append", help="cpu, gpu:h200, tpu:v6e, ...")
    parser.add_argument("--size", choices=list(SIZES), default="model")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    targets = asked.target or ["cpu", "gpu:h200", "tpu:v6e"]
    found = report(
        asked.count, asked.seed, asked.base or (), targets, SIZES[asked.size]
    )
    for name, each in found.items():
        print(f"--- {name}: {asked.count} pairs, seed {asked.seed}")
        print(json.dumps({k: v for k, v in each.items() if k != "apart"}, indent=1))
        for row in each["apart"]:
            print(f"  {row['a']}\n  {row['b']}\n    {row['why'][:400]}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
