"""Matrix-unit instructions (`ops/matrix_units.py`): expanded, or kept.

In: a kernel with `matrix_unit` ops, each with a region. Out: the same kernel with each
op replaced by its region, or with bare instructions and without the scratch that stood
for the contents of the units.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, inline, map_ops


def write_out(kernel: Kernel) -> Kernel:
    """For a chip without such instructions: scratch, matmuls and sums."""
    return map_ops(kernel, _written_out)


def _written_out(op: Op, b: Rewriter) -> Sequence[Value] | None:
    if op.name != "matrix_unit":
        return None
    return inline(b, op.regions[0], op.operands)


def keep_instructions(kernel: Kernel) -> Kernel:
    """For a chip that has them: units start empty and keep what is written to them."""
    state = {
        value
        for op in walk(kernel.body)
        if op.name == "matrix_unit"
        for inner in walk(op.regions[0])
        for value in inner.operands
        if value.is_ref
    }

    def bare(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name == "alloc" and op.result in state:
            return op.results
        if op.name != "matrix_unit":
            return None
        if op.attrs["instruction"] != "clear":
            b.ops.append(op.with_(regions=()))
        return op.results

    return map_ops(kernel, bare) if state else kernel
