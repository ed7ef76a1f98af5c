"""known_integers: simplifies scalar integers by their ranges and factors.

`pl.cdiv((i + 1) * 128, 128)` is `i + 1`. `jnp` rounds quotients towards minus infinity,
which takes a dozen ops that cannot be solved for `i`. Where facts show that the
remainder is zero, the correction is dropped and the division cancels the
multiplication; where they show that nothing is negative, only the correction is.
`jnp.minimum(part * 8 + step, 63)` is its first operand where neither index can exceed
seven.
"""

from collections.abc import Mapping
from typing import Any

from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops, producers_of
from pallasite.ir.types import TileType
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.normal.algebra import constant_of
from pallasite.passes.normal.known_clamps import always


def known_integers(body: Block, facts: Facts) -> Block:
    """Fold integers with only one possible value, extremes and quotients of products.

    Args:
        body: code.
        facts: about its integers.
    """
    wraps = {op.result for op in walk(body) if _is_integer(op) and facts.may_wrap(op)}
    exact = {op.result for op in walk(body) if _is_integer(op) and _is_exact(op, facts)}
    made = producers_of(body)
    never = {
        op.result
        for op in walk(body)
        if _is_integer(op) and _never_rounds(op, made, facts)
    }
    extremes = {
        op.result: operand
        for op in walk(body)
        if op.name in ("min", "max")
        and _is_integer(op)
        and (operand := always(op, facts)) is not None
    }

    def rewrite(op: Op, b: Rewriter) -> Value | None:
        if not _is_integer(op) or op.name == "constant":
            return None
        number = facts.of(op.result).number
        if number is not None and not op.operands[0].is_ref:
            return b.like(number, op.result)
        if op.result in never:
            return b.constant(False, op.result.tile)
        if op.result in extremes:
            return extremes[op.result]
        if op.result not in exact:
            return None
        x, by = op.operands
        return _quotient(b, x, constant_of(b, by), wraps)

    return map_ops(body, rewrite)


def _is_integer(op: Op) -> bool:
    """Whether an op computes one scalar that is not a float."""
    if len(op.results) != 1 or op.regions:
        return False
    type = op.result.type
    return isinstance(type, TileType) and not type.shape and not type.dtype.is_float


def _is_exact(op: Op, facts: Facts) -> bool:
    if op.name != "div":
        return False
    x, by = map(facts.of, op.operands)
    return bool(by.number) and x.multiple % by.number == 0


def _never_rounds(op: Op, made: Mapping[Value, Op], facts: Facts) -> bool:
    """Whether an op asks for quotients to be rounded down that are not negative.

    `jnp` asks whether the signs of a number and its divisor differ and something
    remains; of zero, whose sign differs too, nothing does.
    """
    if op.name != "and":
        return False
    asked: dict[str, Value] = {}
    for each in map(made.get, op.operands):
        inner = made.get(each.operands[0]) if each and each.name == "ne" else None
        if each is None or inner is None:
            return False
        if facts.of(each.operands[1]).number == {"sign": 1, "rem": 0}.get(inner.name):
            asked[inner.name] = inner.operands[0]
    same = len(asked) == 2 and asked["sign"] is asked["rem"]
    return same and facts.of(asked["sign"]).low >= 0


def _quotient(b: Rewriter, x: Value, by: Any, wraps: set[Value]) -> Value | None:
    """A value divided by a number that divides one of its factors."""
    op = b.producer(x)
    if op is None or not by or x in wraps:
        return None
    if op.name == "neg":
        inner = _quotient(b, op.operands[0], by, wraps)
        return None if inner is None else b.neg(inner)
    if op.name == "mul":
        for value, other in (op.operands, op.operands[::-1]):
            factor = constant_of(b, other)
            if factor is not None and factor % by == 0:
                return value if factor == by else b.mul(value, b.like(factor // by, x))
    return None
