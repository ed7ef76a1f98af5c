"""unaliased: results in memory of their own, where they need nothing of an operand's.

In: a kernel with results that alias operands. Out: the kernel without those aliases
that make no difference. XLA copies an aliased operand before the call if it has to keep
it, as it keeps the arguments of a program that are not donated to it; a result of its
own takes the same memory, and no copy.

Proof: operand and result are blocks that move together. Each is shown in one step; the
step reads the operand's before it touches the result's, which it then overwrites before
it reads it. So nothing reads through one what was written through the other. There are
as many steps as blocks, so nothing of the operand is left in the result.
"""

from collections.abc import Collection
from math import prod

from pallasite.errors import InternalError
from pallasite.ir.nodes import Block, Kernel, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.carried import is_overwritten
from pallasite.passes.analysis.grid import analyze, find_pipeline
from pallasite.passes.analysis.memory import VIEWS


def unaliased(kernel: Kernel, operands: Collection[int]) -> Kernel:
    """The kernel without aliases of these operands, as far as they make no difference.

    Args:
        kernel: as imported, or later.
        operands: those that XLA would copy.
    """
    asked = [pair for pair in kernel.aliases if pair[0] in operands]
    if not asked or kernel.level != TILE or kernel.symbols:
        return kernel
    try:
        pipeline = Pipeline.of(find_pipeline(kernel))
    except InternalError:
        return kernel
    needless = {pair for pair in asked if _is_needless(kernel, pipeline, *pair)}
    if not needless:
        return kernel
    kept = tuple(pair for pair in kernel.aliases if pair not in needless)
    return kernel.with_(aliases=kept)


def _is_needless(kernel: Kernel, pipeline: Pipeline, source: int, target: int) -> bool:
    operand, result = kernel.inputs[source], kernel.outputs[target]
    number, *others = [n for n, v in enumerate(pipeline.arrays) if v is result] or [-1]
    reading = [n for n, v in enumerate(pipeline.arrays) if v is operand]
    if number < 0 or others or _is_used(kernel, pipeline, {operand, result}):
        return False
    windows, moves = pipeline.windows, analyze(kernel).windows
    block = pipeline.blocks[number]
    if any(moves[n].written for n in reading):
        return False
    return (
        _shows_each_once(pipeline, number, moves[number].apart)
        and all(f.affine and f.affine.const is not None for f in moves[number].forms)
        and all(windows[n].dims == windows[number].dims for n in reading)
        and all(moves[n].forms == moves[number].forms for n in reading)
        and is_overwritten(pipeline.body.ops, block, {})
        and all(_is_before(pipeline.body, pipeline.blocks[n], block) for n in reading)
    )


def _is_used(kernel: Kernel, pipeline: Pipeline, refs: set[Value]) -> bool:
    """Whether anything but the windows uses these arrays."""
    ops = (op for op in walk(kernel.body) if op is not pipeline.op)
    return any(not refs.isdisjoint(op.operands) for op in ops)


def _shows_each_once(pipeline: Pipeline, number: int, apart: frozenset[int]) -> bool:
    """Whether a window shows each block of its array in exactly one step."""
    grid, window = pipeline.grid, pipeline.windows[number]
    shape = pipeline.arrays[number].ref.shape
    sizes = [n for n in grid if n is not None]
    if len(sizes) < len(grid) or any(
        n > 1 and axis not in apart for axis, n in enumerate(sizes)
    ):
        return False
    if any(d.kind not in ("blocked", "squeezed") for d in window.dims):
        return False
    pairs = zip(window.dims, shape, strict=True)
    counts = [n if d.kind == "squeezed" else -(-n // max(d.size, 1)) for d, n in pairs]
    return prod(sizes) == prod(counts)


def _is_before(body: Block, first: Value, second: Value) -> bool:
    """Whether all ops that use one block, or views of it, are before those that use
    another."""
    last, begin = -1, len(body.ops)
    views = {first}
    for number, op in enumerate(body.ops):
        inside = list(walk(Block((), (op,))))
        for each in inside:
            if each.name in VIEWS and not views.isdisjoint(each.operands):
                views.update(each.results)
        used = {v for each in inside for v in each.operands}
        if not views.isdisjoint(used):
            last = number
        if second in used:
            begin = min(begin, number)
    return last < begin
