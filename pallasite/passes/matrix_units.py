"""Instructions to matrix units (`ops/matrix_units.py`): written out, or kept.

In: a kernel with `matrix_unit` ops, each with a region. Out: the same with what the
regions say in their places, or with bare instructions and without the scratch that
stood for what the units hold.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, inline, map_ops


def write_out(kernel: Kernel) -> Kernel:
    """For a chip without such instructions: scratch, products and sums."""
    return map_ops(kernel, _written_out)


def _written_out(op: Op, b: Rewriter) -> Sequence[Value] | None:
    if op.name != "matrix_unit":
        return None
    return inline(b, op.regions[0], op.operands)


def keep_instructions(kernel: Kernel) -> Kernel:
    """For a chip that has them: units are empty when a kernel begins, and hold what
    they are given."""
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
