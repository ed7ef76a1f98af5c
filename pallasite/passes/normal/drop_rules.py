"""Removes what only derivatives need: they are taken before any pass."""

from collections.abc import Sequence

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, inline, map_ops


def drop_rules(kernel: Kernel) -> Kernel:
    """`stop_gradient` becomes its operand, a function with a custom rule its code."""
    return map_ops(kernel, _plain)


def _plain(op: Op, b: Rewriter) -> Sequence[Value] | None:
    if op.name == "stop_gradient":
        return op.operands
    if op.name == "custom":
        return inline(b, op.regions[0], op.operands)
    return None
