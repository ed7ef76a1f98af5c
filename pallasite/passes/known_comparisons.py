"""known_comparisons: folds integer comparisons that value ranges decide.

`pl.when(j >= 0)`, or `pl.when(4 * step + 1 == 0)` in a step that was merged from
several, is decided by the ranges of grid indices: the comparison becomes a constant,
and `canonicalize` removes the branch.
"""

from collections.abc import Callable, Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.passes.analysis.intervals import Fact, Facts
from pallasite.passes.facts_walk import FactsWalk


def known_comparisons(kernel: Kernel) -> Kernel:
    """Replace comparisons that are always true or always false."""
    body = _Walk().block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


def _lt(x: Fact, y: Fact) -> bool | None:
    if x.high < y.low:
        return True
    return False if x.low >= y.high else None


def _eq(x: Fact, y: Fact) -> bool | None:
    if x.high < y.low or y.high < x.low:
        return False
    return True if x.number is not None and x.number == y.number else None


def _not(outcome: bool | None) -> bool | None:
    return None if outcome is None else not outcome


_OUTCOMES: dict[str, Callable[[Fact, Fact], bool | None]] = {
    "lt": _lt,
    "gt": lambda x, y: _lt(y, x),
    "ge": lambda x, y: _not(_lt(x, y)),
    "le": lambda x, y: _not(_lt(y, x)),
    "eq": _eq,
    "ne": lambda x, y: _not(_eq(x, y)),
}


class _Walk(FactsWalk):
    def rewritten(self, op: Op) -> Sequence[Op]:
        outcome = known_outcome(op, self.facts)
        if outcome is None:
            return (op,)
        b = Builder(op.loc)
        b.like(outcome, op.result)
        (constant,) = b.ops
        return (constant.with_(results=op.results),)


def known_outcome(op: Op, facts: Facts) -> bool | None:
    """The result of an integer comparison; None if it varies."""
    rule = _OUTCOMES.get(op.name)
    if rule is None or any(map(_is_float, op.operands)):
        return None
    return rule(*map(facts.of, op.operands))


def _is_float(value: Value) -> bool:
    return value.type.dtype.is_float
