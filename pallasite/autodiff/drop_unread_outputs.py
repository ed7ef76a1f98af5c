"""Removes outputs that a kernel only writes and that no caller uses.

A tangent kernel computes the original results alongside their tangents. If it never
reads one back, its stores, its window and the output itself can go, and dead-code
elimination removes what was computed only for it.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import dead_code
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.memory import Roots, read_refs


def without_unread(kernel: Kernel, unwanted: Sequence[Value]) -> Kernel:
    """The kernel without those of its outputs `unwanted` that it does not read."""
    roots = Roots(kernel)
    needed = {roots.of(ref) for op in walk(kernel.body) for ref in _needed(op)}
    aliased = {kernel.outputs[target] for _, target in kernel.aliases}
    gone = {p for p in unwanted if p not in needed and p not in aliased}
    if not gone:
        return kernel
    left = [p for p in kernel.outputs if p not in gone]
    aliases = tuple((i, left.index(kernel.outputs[o])) for i, o in kernel.aliases)
    made = kernel.with_(
        params=(*kernel.inputs, *left),
        num_outputs=len(left),
        aliases=aliases,
        body=_without(kernel.body, roots, gone),
    )
    return dead_code(made)


def _needed(op: Op) -> tuple[Value, ...]:
    """Refs an op depends on: those it reads, and both ends of a copy."""
    if op.name in ("copy_start", "copy_wait"):
        return op.operands
    return read_refs(op)


def _without(block: Block, roots: Roots, gone: set[Value]) -> Block:
    ops = []
    for op in block.ops:
        if op.name == "pipeline":
            op = _fewer_windows(op, roots, gone)
        elif op.operands and op.operands[0].is_ref and roots.of(op.operands[0]) in gone:
            continue  # a store, or a view for one
        regions = tuple(_without(r, roots, gone) for r in op.regions)
        ops.append(op.with_(regions=regions))
    return Block(block.params, tuple(ops), block.yields)


def _fewer_windows(op: Op, roots: Roots, gone: set[Value]) -> Op:
    pipeline = Pipeline.of(op)
    kept = [each for each in pipeline.shown if roots.of(each.array) not in gone]
    return pipeline.showing(kept).to_op()
