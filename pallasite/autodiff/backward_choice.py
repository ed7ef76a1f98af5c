"""Estimates which way of computing the cotangents is fastest on a chip.

Kernels that divide the work among more programs may do some of it twice. Whether that
pays off depends on how many programs run concurrently and on the chip's compute and
memory rates; `estimate` gives a kernel's rough duration, which is enough to compare two
ways of doing the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops, substitute
from pallasite.ir.roles import Loop, Pipeline, Shown
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.cost import cost
from pallasite.passes.analysis.grid import find_pipeline, with_pipeline
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import VIEWS
from pallasite.passes.normal.loop_steps import loop_steps
from pallasite.passes.optimise.split_accesses import split_accesses
from pallasite.passes.schedule.gpu_blocks import may_fit, seconds_of_products
from pallasite.target import Machine

MOST_STEPS = 1 << 16  # of a loop with a computed trip count, for an estimate
ALONE = 1.5  # on its core, a program waits for each of its products


@dataclass(frozen=True)
class Estimate:
    """The cost of some kernels, run one after another."""

    programs: tuple[int, ...]  # per kernel: how many may run concurrently
    flops: int
    bytes: int
    seconds: float
    spilling: float = 0.0  # seconds of kernels that do not fit, as if they did

    def __str__(self) -> str:
        programs = " + ".join(map(str, self.programs))
        time = "does not fit" if self.seconds == inf else _time(self.seconds)
        numbers = f"{_short(self.flops)}flop, {_short(self.bytes)}B, {time}"
        return f"{programs} programs, {numbers}"


def estimate(kernels: Sequence[Kernel], machine: Machine) -> Estimate:
    """How long a machine takes for the kernels, one after another."""
    programs, flops, moved, seconds, spilling = [], 0, 0, 0.0, 0.0
    for kernel in kernels:
        pipeline = Pipeline.of(find_pipeline(kernel))
        pairs = zip(pipeline.grid, pipeline.semantics, strict=True)
        count = prod(n or 1 for n, kind in pairs if kind == "parallel")
        total = cost(_as_placed(with_most_steps(kernel), machine))
        work = (total.flops, total.transcendentals, total.bytes_accessed)
        steps = prod(n or 1 for n in pipeline.grid)
        slow = machine.sums_in_memory if _adds_to_parts(pipeline) else 1.0
        own = slow * machine.kernel(*work, steps, count)
        if machine.gpu is not None:
            kernel = split_accesses(kernel)
        if machine.gpu is not None and count < machine.cores and has_products(kernel):
            products = seconds_of_products(loop_steps(kernel), machine.gpu)
            gain = 1.0 if products[1] == inf else products[0] / products[1]
            least = slow * machine.kernel(*work, steps, machine.cores)
            own = ALONE * max(own / gain, least)
        own += machine.launch
        fits = machine.gpu is None or may_fit(kernel, machine.gpu)
        if machine.must_fit and _blocks(pipeline) > (machine.on_chip or inf):
            fits = False
        seconds += own if fits else inf
        spilling += 0.0 if fits else own
        programs.append(count)
        flops += total.flops + total.transcendentals
        moved += total.bytes_accessed
    return Estimate(tuple(programs), flops, moved, seconds, spilling)


def has_products(kernel: Kernel) -> bool:
    return any(op.name == "dot" for op in walk(kernel.body))


def sum_of(parts: Sequence[Estimate]) -> Estimate:
    """Of kernels that run one after another."""
    return Estimate(
        tuple(n for each in parts for n in each.programs),
        sum(each.flops for each in parts),
        sum(each.bytes for each in parts),
        sum(each.seconds for each in parts),
        sum(each.spilling for each in parts),
    )


def _adds_to_parts(pipeline: Pipeline) -> bool:
    """Whether steps write parts of blocks or scratch: these cannot be in registers."""
    stores = (Access.of(op) for op in walk(pipeline.body) if op.name == "store")
    return any(not covers_whole(s.ref.ref.shape, s.index) for s in stores)


def _blocks(pipeline: Pipeline) -> int:
    """The bytes of the blocks that one step is shown, and of its scratch."""
    refs = [block.ref for block in pipeline.blocks] * 2  # the next step's too
    refs += [op.result.ref for op in walk(pipeline.body) if op.name == "alloc"]
    return sum(ref.size * ref.dtype.bytes for ref in refs)


def with_most_steps(kernel: Kernel) -> Kernel:
    """Loops whose trip count depends on grid indices, at their maximum."""
    facts = Facts()
    facts.note_block(kernel.body)

    def rewrite(op: Op, b: Rewriter) -> list[Value] | None:
        if op.name != "for" or b.producer(op.operands[1], "constant") is not None:
            return None
        loop = Loop.of(op)
        steps = facts.most_steps(loop)
        if steps is None or steps > MOST_STEPS:
            return None
        bounds = [b.like(n, loop.first) for n in (0, steps, 1)]
        return list(b.emit("for", *bounds, *loop.inits, regions=op.regions))

    return map_ops(kernel, rewrite)


def _as_placed(kernel: Kernel, machine: Machine) -> Kernel:
    """Move blocks that exceed on-chip memory to main memory."""
    if machine.on_chip is None or machine.must_fit:
        return kernel
    pipeline = Pipeline.of(find_pipeline(kernel))
    moved: dict[Value, Value] = {}
    shown: list[Shown] = []
    for each in pipeline.shown:
        ref = each.block.ref
        if ref.size * ref.dtype.bytes > machine.on_chip // 2:
            window = replace(each.window, space="any")
            block = Value(replace(ref, space="any"), each.block.name)
            moved[each.block] = block
            each = each._replace(window=window, block=block)
        shown.append(each)
    if not moved:
        return kernel

    def retype(op: Op, b: Rewriter) -> list[Value] | None:
        if op.name not in VIEWS:
            return None
        return list(b.emit(op.name, *op.operands, **op.attrs))

    body = map_ops(substitute(pipeline.body, moved), retype)
    body = Block((*pipeline.ids, *(each.block for each in shown)), body.ops)
    return with_pipeline(kernel, pipeline.showing(shown, body).to_op())


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000 or unit == "T":
            break
        number /= 1000
    return f"{number:.3g} {unit}"


def _time(seconds: float) -> str:
    micro = seconds * 1e6
    return f"{micro:.3g} us" if micro < 1000 else f"{micro / 1000:.3g} ms"
