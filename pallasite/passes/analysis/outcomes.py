"""Which comparisons value ranges decide."""

from collections.abc import Callable

from pallasite.ir.nodes import Op, Value
from pallasite.passes.analysis.intervals import Fact, Facts


def known_outcome(op: Op, facts: Facts) -> bool | None:
    """The result of an integer comparison; None if it varies."""
    rule = OUTCOMES.get(op.name)
    if rule is None or any(map(_is_float, op.operands)):
        return None
    return rule(*map(facts.of, op.operands))


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


OUTCOMES: dict[str, Callable[[Fact, Fact], bool | None]] = {
    "lt": _lt,
    "gt": lambda x, y: _lt(y, x),
    "ge": lambda x, y: _not(_lt(x, y)),
    "le": lambda x, y: _not(_lt(y, x)),
    "eq": _eq,
    "ne": lambda x, y: _not(_eq(x, y)),
}


def _is_float(value: Value) -> bool:
    return value.type.dtype.is_float
