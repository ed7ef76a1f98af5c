"""Scalar comparisons that imply that a mask lets every element through.

A mask compares positions: `rows >= columns`, `columns < length`. Its elements lie
between a scalar plus a smallest and a largest number, so that one comparison of scalars
says that all of them pass.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Op, Value
from pallasite.ir.opdef import Effect, table
from pallasite.ir.types import TileType, scalar
from pallasite.passes.analysis.guards import OPPOSITE, parts_of
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.outcomes import known_outcome


class _Spread(NamedTuple):
    """A tile whose elements all lie between `base + low` and `base + high`."""

    base: Value | None  # None: 0
    low: int
    high: int


_KNOWN = {"add", "sub", "and", "div"}


def _rounded_down(x: _Spread, mask: int) -> _Spread | None:
    """`x & mask` where that rounds `x` down to a multiple: `mask` = -2**n."""
    if mask >= 0 or -mask & (-mask - 1):
        return None
    return _Spread(x.base, x.low + mask + 1, x.high)


def _quotient(x: _Spread, by: int) -> _Spread | None:
    """`x / by`, for known, non-negative numbers."""
    if x.base is not None or x.low < 0 or by <= 0:
        return None
    return _Spread(None, x.low // by, x.high // by)


class WholeMasks:
    """Collects scalar comparisons that imply that masks let everything through.

    Args:
        facts: about the integers; no arithmetic here may wrap around.
        makers: the op that defines each value.
        own: the same for values of the step, which are not available before it.
    """

    def __init__(self, facts: Facts, makers: dict[Value, Op], own: dict[Value, Op]):
        self.facts, self.makers, self.own = facts, makers, own
        self.b = Builder(watch=facts.note_op)
        self.made: dict[Value, Value] = {}
        self.tests: list[Value] = []

    def result(self, b: Builder) -> Value:
        result = self.tests[0]
        for test in self.tests[1:]:
            result = b.and_(result, test)
        return result

    def case(self, op: Op, chosen: Mapping[Value, Value]) -> dict[Value, Value]:
        """The case that a select takes where its mask is uniform."""
        mask, *cases = op.operands
        if not mask.tile.dtype.is_bool or not mask.tile.shape or len(cases) != 2:
            return {}
        on_false, on_true = cases
        maker = self.makers.get(on_true)
        truth = maker is None or maker.name != "constant"
        tests = [
            self.comparison(part.value, part.truth)
            for part in parts_of(mask, truth, self.makers)
        ]
        found = [test for test in tests if test is not None]
        if len(found) < len(tests):
            return {}
        self.tests += found
        case = on_true if truth else on_false
        return {op.result: chosen.get(case, case)}

    def comparison(self, value: Value, truth: bool) -> Value | None:
        """A scalar test that all elements of a tile of bools are `truth`.

        None: there is none, or no step passes it.
        """
        op = self.makers.get(value)
        if op is None or op.name not in OPPOSITE:
            return None
        kind = op.name if truth else OPPOSITE[op.name]
        if kind in ("eq", "ne") or op.operands[0].tile.dtype.is_float:
            return None
        x, y = (self.spread(v) for v in op.operands)
        if x is None or y is None:
            return None
        type_ = scalar(op.operands[0].tile.dtype)
        if kind in ("lt", "le"):
            left, right = self.end(x, x.high, type_), self.end(y, y.low, type_)
        else:
            left, right = self.end(x, x.low, type_), self.end(y, y.high, type_)
        if left is None or right is None:
            return None
        test = self.b.op(kind, left, right)
        never = known_outcome(self.b.ops[-1], self.facts) is False
        return None if never else test

    def end(self, spread: _Spread, number: int, type_: TileType) -> Value | None:
        low, high = type_.dtype.limits
        if not low <= number <= high:
            return None
        value = self.b.constant(number, type_)
        return value if spread.base is None else self.exact("add", spread.base, value)

    def exact(self, name: str, *operands: Value) -> Value | None:
        result = self.b.op(name, *operands)
        return None if self.facts.may_wrap(self.b.ops[-1]) else result

    def before(self, value: Value) -> Value | None:
        """A scalar of the step, computed before the step."""
        op = self.own.get(value)
        if op is None or value in self.made:
            return self.made.get(value, value)
        if op.regions or table()[op.name].effect is not Effect.PURE:
            return None
        operands = [self.before(v) for v in op.operands]
        known = [v for v in operands if v is not None]
        if len(known) < len(operands):
            return None
        self.made[value] = self.b.op(op.name, *known, **op.attrs)
        return self.made[value]

    def spread(self, value: Value) -> _Spread | None:
        """The known range of the elements of an integer tile."""
        op = self.makers.get(value)
        if not value.tile.shape:
            base = self.before(value)
            return None if base is None else _Spread(base, 0, 0)
        if op is None:
            return None
        if op.name == "constant":
            number = int(op.attrs["value"])
            return _Spread(None, number, number)
        if op.name == "iota":
            return _Spread(None, 0, max(value.tile.shape[op.attrs["dim"]] - 1, 0))
        if op.name in ("broadcast_in_dim", "reshape", "transpose", "slice"):
            return self.spread(op.operands[0])
        if op.name not in _KNOWN or self.facts.may_wrap(op):
            return None
        x, y = (self.spread(v) for v in op.operands)
        if x is None or y is None:
            return None
        if op.name in ("add", "sub"):
            return self.combined(op.name, x, y)
        number = y.low if y.base is None and y.low == y.high else 0
        if op.name == "and":
            return _rounded_down(x, number)
        return _quotient(x, number)

    def combined(self, name: str, x: _Spread, y: _Spread) -> _Spread | None:
        low, high = (y.low, y.high) if name == "add" else (-y.high, -y.low)
        base = x.base
        if y.base is not None:
            if base is None and name == "add":
                base = y.base
            elif base is None:
                base = self.exact("neg", y.base)
            else:
                base = self.exact(name, base, y.base)
            if base is None:
                return None
        return _Spread(base, x.low + low, x.high + high)
