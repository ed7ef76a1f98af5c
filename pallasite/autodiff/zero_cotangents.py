"""Removes zero cotangents from backward code.

Residuals of a forward kernel (`residuals.py`) are for cotangents of all its results;
often some have none, such as attention's unused log-sum-exp. Zeros in their place would
be read and, worse, multiplied: 0 / 0 is NaN in a row whose sum is zero. `without`
removes what a reverse computes from such a cotangent, in which it is linear.
"""

from collections.abc import Container

from pallasite.ir.nodes import Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program

# Zero if one of these operands is (None: any), whatever the others are.
ZERO_BY = {"mul": None, "dot": None, "div": (0,)} | {
    name: (0,)
    for name in ("neg", "cast", "reshape", "broadcast_in_dim", "transpose", "reduce")
}


def without(program: Program, seeds: Container[Value]) -> Program:
    """The program for zero cotangents in some refs.

    Args:
        program: a stage of a reverse.
        seeds: refs of cotangents, which it only reads.
    """
    roots, zeros = Roots(program.body), set[Value]()

    def rewrite(op: Op, b: Rewriter) -> Value | None:
        if len(op.results) != 1 or op.regions:
            return None
        if op.name == "load" and roots.of(op.operands[0]) in seeds:
            is_zero = True
        else:
            is_zero = _is_zero(op, zeros)
        if is_zero:
            zero = b.constant(0, op.result.tile)
            zeros.add(zero)
            return zero
        if op.name in ("add", "sub") and op.operands[1] in zeros:
            return op.operands[0]
        if op.name == "add" and op.operands[0] in zeros:
            return op.operands[1]
        if op.name == "sub" and op.operands[0] in zeros:
            return b.op("neg", op.operands[1])
        return None

    return program.with_body(map_ops(program.body, rewrite)).simplified()


def _is_zero(op: Op, zeros: Container[Value]) -> bool:
    if op.name not in ZERO_BY or op.attrs.get("kind", "sum") != "sum":
        return False
    which = ZERO_BY[op.name]
    operands = op.operands if which is None else [op.operands[n] for n in which]
    return any(v in zeros for v in operands)
