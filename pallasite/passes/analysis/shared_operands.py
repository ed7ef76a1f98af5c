"""Which operands are the same for all rows of a kernel's results.

Rows are dimension 0 of the results. An operand is shared if none of the grid axes that
move the results along it moves the operand's blocks. Its cotangent is a sum over the
rows; that of any other operand has rows of its own.
"""

from collections.abc import Mapping

from pallasite.ir.nodes import Kernel, Value
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import analyze, find_pipeline


def shared_operands(kernel: Kernel) -> frozenset[int]:
    """Positions of the operands that certainly are."""
    shown = Pipeline.of(find_pipeline(kernel)).shown
    moves: Mapping[Value, list] = {each.array: [] for each in shown}
    for each, window in zip(shown, analyze(kernel).windows, strict=True):
        moves[each.array].append(window)
    rows = {
        axis
        for ref in kernel.outputs
        for window in moves.get(ref, ())
        for form in window.forms[:1]
        for axis in form.axes
    }
    return frozenset(
        n
        for n, ref in enumerate(kernel.inputs)
        if rows and moves.get(ref) and all(not rows & w.axes for w in moves[ref])
    )
