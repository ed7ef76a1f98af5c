"""Splits grid axes of which a digit chooses a cotangent's block into two axes.

Query heads that share keys see key block `head // 4`, so four consecutive programs add
to one block of the keys' cotangent. With the heads as two axes, groups and heads within
a group, that block belongs to one step of the first axis: groups run in parallel, and
devices can share them. Tokens of several sequences see the angles of position `token %
4096`: with sequences and positions as two axes, a position's angles belong to one step
of the second.
"""

from collections.abc import Iterable

import numpy as np

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import map_ops, substitute
from pallasite.passes.analysis.block_table import evaluate_map
from pallasite.passes.analysis.index_code import IndexCode
from pallasite.passes.lower.per_program import Program


def split_axes(program: Program, results: Iterable[Value]) -> Program:
    """Split every axis of which a quotient or remainder chooses blocks of a result."""
    results = set(results)
    axis = 0
    while axis < len(program.sizes):
        group = _group(program, axis, results)
        if group > 1:
            program = _split(program, axis, group)
            axis += 1
        axis += 1
    return program


def _group(program: Program, axis: int, results: set[Value]) -> int:
    """How many steps of an axis have the same quotient, or different remainders, that
    choose a block of a result; 1: none, or not in order."""
    quotients = _Quotients(program, axis)
    for op in walk(program.body):
        if op.name == "block_view" and op.operands[0] in results:
            for index in op.operands[1:]:
                if (group := quotients.digit(index)[0]) > 1:
                    return group
    return 1


class _Quotients:
    """Finds values that are an axis' grid index divided by a number, or what is left
    of it."""

    def __init__(self, program: Program, axis: int):
        self.body, self.axis, self.size = program.body, axis, program.sizes[axis]
        self.code = IndexCode(program.body)

    def digit(self, index: Value) -> tuple[int, bool]:
        """The divisor of the grid index, and whether the value is the remainder.

        The divisor is 1 if it is neither that nor the quotient.
        """
        if self.size < 4 or self.code.key(index) is None or index in self.code.ids:
            return 1, False
        ids = self.body.params
        b = Builder()
        made = self.code.emit(b, index, {v: v for v in ids})
        steps = np.zeros((len(ids), self.size), np.int32)
        steps[self.axis] = np.arange(self.size)
        if not self._depends_on_axis_alone(b.ops, made):
            return 1, False
        found = evaluate_map(b.block(ids, [made]), steps)
        if found is None:
            return 1, False
        numbers, every = found[0], steps[self.axis]
        # The first step with another block ends the first group; the first that starts
        # again ends the first round.
        for group, is_rest in (
            (int(np.argmax(numbers != numbers[0])), False),
            (1 + int(np.argmax(numbers[1:] == numbers[0])), True),
        ):
            if 1 < group < self.size and self.size % group == 0:
                digit = every % group if is_rest else every // group
                if np.array_equal(numbers, digit):
                    return group, is_rest
        return 1, False

    def _depends_on_axis_alone(self, ops: Iterable[Op], made: Value) -> bool:
        used = {v for op in ops for v in op.operands} | {made}
        mine = {v for v in self.code.ids if v in used}
        return mine == {self.body.params[self.axis]}


def _split(program: Program, axis: int, group: int) -> Program:
    """The axis as two: groups, and steps within a group."""
    quotients = _Quotients(program, axis)
    old = program.body.params[axis]
    name = old.name or f"i{axis}"
    outer, inner = Value(T.INDEX, name), Value(T.INDEX, f"{name}_within")

    def by_group(op: Op, builder: Builder) -> list[Value] | None:
        if op.name != "block_view":
            return None
        digits = [quotients.digit(v) for v in op.operands[1:]]
        if all(divisor != group for divisor, _ in digits):
            return None
        pairs = zip(op.operands[1:], digits, strict=True)
        chosen = [
            (inner if is_rest else outer) if divisor == group else v
            for v, (divisor, is_rest) in pairs
        ]
        return list(builder.emit(op.name, op.operands[0], *chosen, **op.attrs))

    body = map_ops(program.body, by_group)
    b = Builder()
    whole = b.add(b.mul(outer, b.index(group)), inner)
    body = substitute(body, {old: whole})
    params, sizes = [*body.params], [*program.sizes]
    params[axis : axis + 1] = [outer, inner]
    sizes[axis : axis + 1] = [program.sizes[axis] // group, group]
    made = Block(tuple(params), (*b.ops, *body.ops), body.yields)
    return Program(program.name, made, tuple(sizes), program.loc)
