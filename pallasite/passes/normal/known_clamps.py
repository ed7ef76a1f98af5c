"""known_clamps: a clamp, minimum or maximum that never changes its operand is dropped.

In: indices that are clamped although the ranges of grid indices and loop counters show
that they are inside. Out: the indices.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import substitute
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.facts_walk import FactsWalk
from pallasite.passes.normal.canonicalize import canonicalize

_NAMES = ("clamp", "min", "max")


def known_clamps(kernel: Kernel) -> Kernel:
    """Replace scalar integer clamps by the operand that they always are."""
    if not any(op.name in _NAMES for op in walk(kernel.body)):
        return kernel
    found = _Walk()
    found.block(kernel.body)
    if not found.same:
        return kernel
    body = substitute(kernel.body, found.resolved())
    return canonicalize(kernel.with_(body=body))


class _Walk(FactsWalk):
    def __init__(self) -> None:
        super().__init__()
        self.same: dict[Value, Value] = {}

    def regions(self, op: Op) -> Sequence[Block]:
        for region in op.regions:
            self.block(region)
        return op.regions

    def rewritten(self, op: Op) -> Sequence[Op]:
        if op.name in _NAMES and not op.result.type.shape:
            operand = always(op, self.facts)
            if operand is not None:
                self.same[op.result] = operand
        return (op,)

    def resolved(self) -> dict[Value, Value]:
        def last(value: Value) -> Value:
            while value in self.same:
                value = self.same[value]
            return value

        return {old: last(new) for old, new in self.same.items()}


def always(op: Op, facts: Facts) -> Value | None:
    """The operand that a clamp, minimum or maximum always is; None if that varies."""
    if op.result.type.dtype.is_float:
        return None
    if op.name == "clamp":
        low, value, high = op.operands
        inside = facts.of(value).within(facts.of(low).high, facts.of(high).low)
        return value if inside else None
    x, y = op.operands
    lower, upper = (x, y) if op.name == "min" else (y, x)
    if facts.of(lower).high <= facts.of(upper).low:
        return x
    return y if facts.of(upper).high <= facts.of(lower).low else None
