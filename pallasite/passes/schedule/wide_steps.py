"""wide_steps: steps that reduce short parts of rows are merged into fewer, wider ones.

In: a kernel without matmuls whose last axis goes along the rows that it reduces, in
blocks: sums, maxima, and sums relative to them, kept in memory from step to step. Out:
the same code with wider blocks, in fewer steps, if not in one. A step reads its block's
rows in pieces, which a core's prefetcher does not follow from one to the next, and
reads and writes the state; whole rows are read in memory order.

`widen_steps.py` has the proof. A sum alone takes a block of any width, since its terms
are never stored; what is computed relative to a maximum is read twice, and must stay in
the cache meanwhile: in whole rows, which `row_strips.py` takes a few at a time, or in a
block that fits.
"""

from functools import partial

from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.opdef import table
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.widen_steps import (
    RunningSteps,
    dims_of_steps,
    largest_divisor,
    walked,
    wider_grid,
)


def wide_steps(kernel: Kernel, most_bytes: int) -> Kernel:
    """Merge steps of the last axis; what is read twice has at most `most_bytes`."""
    if any(op.name == "dot" for op in walk(kernel.body)):
        return kernel
    try:
        found = dims_of_steps(kernel)
        dim = walked(found)
        if dim is None or dim.products:
            return kernel
        factor = partial(_factor, most_bytes=most_bytes)
        return canonicalize(wider_grid(RunningSteps(found, dim), factor))
    except CannotReblock:
        return kernel


def _factor(steps: RunningSteps, most_bytes: int) -> int:
    """How many steps become one."""
    proved, dim, made = steps.proved, steps.dim, steps.made
    if steps.guard is not None:
        raise CannotReblock("some steps are skipped")
    if not proved.maxima:
        return steps.steps
    ops = [(v, op) for v in dim.members if (op := made.get(v)) and op.operands]
    tiles = [v.tile for v, op in ops if table()[op.name].elementwise]
    rows = [t.shape[-1] * t.dtype.bytes for t in tiles]
    if max(rows, default=1) * steps.steps <= most_bytes:
        return steps.steps
    sizes = [t.size * t.dtype.bytes for t in tiles]
    return largest_divisor(steps.steps, most_bytes // max(sizes, default=1))
