"""What an author could change to make a kernel faster.

Each rule examines the facts of a compiled kernel and yields a hint with the fraction of
the time it may save; the two largest are reported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Dot, Pipeline
from pallasite.passes.analysis.grid import Axis
from pallasite.passes.analysis.work import Work, short
from pallasite.target import Chip, Gpu, Host, Machine, Tpu
from pallasite.tools.pass_notes import shape_text
from pallasite.tools.report import duration, percent
from pallasite.tools.roofline import Roofline

MOST = 2
LEAST_GAIN = 0.1
FIRST = 1.0  # a gain that no other hint has: what it says may make the others void
MANY_SPILLS = 64


@dataclass(frozen=True)
class Facts:
    """What hints are derived from."""

    platform: str
    chip: Chip | Host
    peak: Machine
    axes: tuple[Axis, ...]
    work: Work  # as the author wrote it
    bound: Roofline
    scheduled: Kernel | None = None  # after the backend's passes
    scheduled_work: Work | None = None  # where there is still one grid
    warnings: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()  # faster ways to run it that were refused, and why
    spills: int | None = None
    shared: bool = False  # the backend itself splits the work among cores
    tuned: bool = False  # a tuner has measured other blocks for these shapes
    why_small: str = ""  # why the backend keeps the author's steps, if it does

    @property
    def programs(self) -> int:
        """How many programs can run at once."""
        written = prod(axis.size or 1 for axis in self.axes if axis.parallel)
        if not isinstance(self.chip, Gpu) or self.pipeline is None:
            return max(written, 1)
        return max(prod(n or 1 for n in self.pipeline.grid), 1)

    @property
    def pipeline(self) -> Pipeline | None:
        if self.scheduled is None:
            return None
        found = [op for op in self.scheduled.body.ops if op.name == "pipeline"]
        return Pipeline.of(found[0]) if len(found) == 1 else None


Hint = tuple[float, str]


def hints(facts: Facts) -> tuple[str, ...]:
    """The most useful hints, best first."""
    rules = [each for each in RULES if not (facts.tuned and each in BLOCKS)]
    found = [hint for rule in rules for hint in rule(facts)]
    useful = [hint for hint in found if hint[0] >= LEAST_GAIN]
    best = sorted(useful, key=lambda hint: -hint[0])[:MOST]
    return tuple(text for _, text in best)


def lost_paths(facts: Facts) -> Iterator[Hint]:
    """Backends that would have been tried first."""
    for text in facts.lost:
        yield FIRST, " ".join(text.split())


def refused_tiles(facts: Facts) -> Iterator[Hint]:
    """What the backend has warned about."""
    for text in facts.warnings:
        yield 0.5, " ".join(text.split())


def idle_cores(facts: Facts) -> Iterator[Hint]:
    machine, programs = Machine.usual(facts.chip), facts.programs
    cores = machine.cores
    if facts.shared or programs >= cores:
        return
    least = machine.launch if isinstance(facts.chip, Gpu) else machine.part
    if facts.bound.seconds * cores / programs < least:
        return
    unit = "threads" if facts.platform == "cpu" else "cores"
    many = f"{programs} program{'s' * (programs != 1)} can run concurrently on"
    gain = FIRST if programs == 1 else 1 - programs / cores
    for number, axis in enumerate(facts.axes):
        if not axis.parallel and axis.size != 1:
            yield (
                gain,
                f"{many} {cores} {unit}, because i{number} is sequential "
                f"({axis.reason}): let each step write its own block of partial "
                "results, and sum them after the call",
            )
            return
    yield gain, f"{many} {cores} {unit}: split the result into more blocks"


def copied_again(facts: Facts) -> Iterator[Hint]:
    """Blocks copied repeatedly, if that takes longer than everything else."""
    work = facts.scheduled_work
    if work is None or facts.platform != "tpu":
        return
    copying = facts.peak.copying(work.bytes)
    rest = max(facts.bound.seconds, 1e-12)
    worst = max(work.traffic, key=lambda row: row.bytes - row.distinct, default=None)
    if worst is None or copying <= rest or worst.bytes <= worst.distinct:
        return
    still = [a for a in range(max(worst.axes, default=0)) if a not in worst.axes]
    change = "a larger block of the other operands"
    if still:
        change = f"larger blocks along i{still[-1]}, or a grid with i{still[-1]} last"
    times = worst.bytes / max(worst.distinct, 1)
    yield (
        1 - rest / copying,
        f"{worst.array} is copied {times:.3g} times ({short(worst.bytes)}B), and "
        f"copying takes {duration(copying)}: {change}, copies it less often",
    )


def small_steps(facts: Facts) -> Iterator[Hint]:
    pipeline, machine = facts.pipeline, Machine.usual(facts.chip)
    if pipeline is None or not machine.step:
        return
    steps = prod(n or 1 for n in pipeline.grid)
    overhead = machine.starting(steps)
    each = machine.step * machine.cores
    if steps < 2 or overhead < 1e-6:
        return
    work = facts.bound.seconds / steps
    each_does = f"work for {duration(work)}" if work >= 1e-10 else "hardly any work"
    yield (
        overhead / (overhead + facts.bound.seconds),
        f"the grid has {steps:,} steps with {each_does} each, and starting one takes "
        f"{duration(each)}: larger blocks make fewer steps"
        + (
            f"; the backend cannot merge them: {facts.why_small}"
            if facts.why_small
            else ""
        ),
    )


def wide_products(facts: Facts) -> Iterator[Hint]:
    wide_kinds = [n for n in facts.work.products if n.partition(":")[0] == "f32"]
    computes = facts.bound.limit in ("matrix", "vector", "arithmetic")
    if not computes or not wide_kinds:
        return
    slowest = min(wide_kinds, key=facts.peak.kind_rate)
    narrow, wide = (facts.peak.multiplying_all({kind: 1}) for kind in ("bf16", slowest))
    if narrow < wide:
        yield (
            1 - narrow / wide,
            f"matmul operands are {facts.peak.name_of(slowest)}: in bf16, with "
            f"preferred_element_type=jnp.float32, they take 1/{wide / narrow:.3g} of "
            "the time",
        )


def half_empty_units(facts: Facts) -> Iterator[Hint]:
    """Matmuls narrower than a TPU's matrix unit."""
    if not isinstance(facts.chip, Tpu) or facts.scheduled is None:
        return
    side = facts.chip.mxu_size
    for op in walk(facts.scheduled.body):
        if op.name != "dot":
            continue
        dot = Dot.of(op)
        columns = prod(dot.rhs.sizes(dot.rhs.free))
        filled = min(columns, side) / side * min(dot.depth, side) / side
        if filled < 1 and facts.bound.limit == "matrix":
            shape = f"k={dot.depth}, n={columns}"
            yield (
                1 - filled,
                f"a matmul with {shape} fills {percent(filled)} of a matrix unit of "
                f"{side} x {side}: use larger blocks along these dimensions, if the "
                "arrays allow it",
            )
            return


def over_the_edge(facts: Facts) -> Iterator[Hint]:
    if facts.bound.limit == "memory":
        return  # what is dropped is not copied
    for row in facts.work.traffic:
        if row.mode == "out" and row.exact and row.inside < 1:
            yield (
                1 - row.inside,
                f"blocks of {row.array} {shape_text(row.block)} extend past the edge "
                f"of the array: {percent(1 - row.inside)} of what is computed is "
                "dropped; a block size closer to a divisor wastes less",
            )


def spilled(facts: Facts) -> Iterator[Hint]:
    if facts.spills is not None and facts.spills > MANY_SPILLS:
        yield (
            0.15,
            f"{facts.spills} vector registers are spilled to memory: use smaller "
            "tiles in the body (a loop over parts of the block)",
        )


RULES: Sequence[Callable[[Facts], Iterator[Hint]]] = (
    lost_paths,
    refused_tiles,
    idle_cores,
    copied_again,
    small_steps,
    wide_products,
    half_empty_units,
    over_the_edge,
    spilled,
)
# Rules that advise other blocks, of which a tuner knows more.
BLOCKS = (copied_again, small_steps, half_empty_units, over_the_edge)
