"""merge_k_steps: merges steps that only accumulate matmuls into fewer, deeper ones.

In: a kernel whose last axis runs along k: each step multiplies a block of rows by a
block of columns and adds the result to the same accumulators; branches at the first and
the last step initialise and finish them. Or loops whose iterations do so with the next
part of rows and columns. Out: the same code with blocks that are several times as deep,
in fewer steps. Accumulators are then read and written once where the author's depth
would do so several times. Code that does anything else is left unchanged.

`widen_steps.py` has the proof and the rewrite; sums of matmuls are the steps without
maxima, which are worth merging on every chip.
"""

import sys
from functools import partial

from pallasite.ir.nodes import Kernel, Op, walk
from pallasite.ir.opdef import table
from pallasite.ir.roles import Loop
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.loop_over_k import adds_up
from pallasite.passes.schedule.widen_steps import (
    RunningLoop,
    RunningSteps,
    dims_of_steps,
    largest_divisor,
    walked,
    wider_grid,
    wider_loop,
)


def merge_k_steps(kernel: Kernel, deepest: int, most_bytes: int) -> Kernel:
    """Merge steps of the last axis.

    No block becomes deeper than `deepest`, no computed tile larger than `most_bytes`.
    """
    if not any(op.name == "dot" for op in walk(kernel.body)):
        return kernel
    try:
        found = dims_of_steps(kernel)
        dim = walked(found)
        if dim is None or not dim.products:
            return kernel
        factor = partial(_factor, deepest=deepest, most_bytes=most_bytes)
        return canonicalize(wider_grid(RunningSteps(found, dim), factor))
    except CannotReblock:
        return kernel


def merge_k_rounds(kernel: Kernel, most_bytes: int) -> Kernel:
    """Merge iterations of loops, however deep they become.

    Matmuls are blocked for the caches, whatever their depth.
    """
    number = sum(map(_multiplies, walk(kernel.body)))
    for n in reversed(range(number)):  # one that is merged completely disappears
        kernel = _with_merged_loop(kernel, n, most_bytes)
    return kernel


def _multiplies(op: Op) -> bool:
    return op.name == "for" and any(o.name == "dot" for o in op.regions[0].ops)


def _with_merged_loop(kernel: Kernel, number: int, most_bytes: int) -> Kernel:
    """The kernel with one of its loops changed; by its number."""
    factor = partial(_factor, deepest=sys.maxsize, most_bytes=most_bytes)
    try:
        found = dims_of_steps(kernel)
        loops = [op for op in walk(found.kernel.body) if _multiplies(op)]
        running = RunningLoop(found, Loop.of(loops[number]))
        return canonicalize(wider_loop(running, factor))
    except CannotReblock:
        return kernel


def _factor(steps: RunningSteps | RunningLoop, deepest: int, most_bytes: int) -> int:
    """How many steps become one.

    Raises:
        CannotReblock: they do something else besides adding matmuls.
    """
    proved, dim, made = steps.proved, steps.dim, steps.made
    parts = [made[each.part] for each in proved.sums]
    if proved.maxima or not all(op.name == "dot" and adds_up(op) for op in parts):
        raise CannotReblock("steps do more than accumulate matmuls")
    if isinstance(steps, RunningSteps) and steps.guard is not None:
        raise CannotReblock("some steps are skipped")
    # What is computed is stored before the matmul; constants are not.
    ops = [op for v in dim.members if (op := made.get(v)) and op.operands]
    if any(op.name == "dot" for op in ops):
        raise CannotReblock("a matmul's result is as deep as the steps")
    computed = [op.result.tile for op in ops if table()[op.name].elementwise]
    limits = [most_bytes // max(t.size * t.dtype.bytes, 1) for t in computed]
    return largest_divisor(steps.steps, min(steps.steps, deepest // dim.size, *limits))
