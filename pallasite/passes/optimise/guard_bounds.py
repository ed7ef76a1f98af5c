"""Turns guards into loop bounds: a loop runs only the iterations that do something.

Where everything in an iteration of a `for` is guarded (`pl.when(j * bk < (i + 1) *
bq)`) by comparisons that `analysis/guards.py` can solve, their solutions become the
bounds of the loop, and the body no longer tests them. Loop-invariant conditions decide
whether the loop runs at all. In: any kernel, best after `hoist`, which peels the code
of the first and the last iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import inline, is_removable, substitute
from pallasite.ir.roles import Loop
from pallasite.ir.types import I32
from pallasite.passes.analysis.guards import (
    Bounds,
    Guard,
    Part,
    Solver,
    greatest,
    guard_of,
    least,
)
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import constant_inputs, root_among
from pallasite.passes.facts_walk import FactsWalk
from pallasite.passes.normal.canonicalize import canonicalize


def guard_bounds(kernel: Kernel) -> Kernel:
    """Tighten the bounds of every loop whose whole body is guarded."""
    body = _Walk(kernel).block(kernel.body)
    if body is kernel.body:
        return kernel
    return canonicalize(kernel.with_(body=body))  # drops guards


class _Walk(FactsWalk):
    def __init__(self, kernel: Kernel):
        super().__init__()
        self.readable = constant_inputs(kernel)

    def rewritten(self, op: Op) -> Sequence[Op]:
        return self.loop(Loop.of(op)) if op.name == "for" else (op,)

    def loop(self, loop: Loop) -> list[Op]:
        guards = guards_of(loop, self.producers)
        step = self.facts.of(loop.step).number
        if not guards or step is None or step < 1:
            return [loop.op]
        solver = self.solver(loop)
        solved = [_solve(guard, solver, lows=step == 1) for guard in guards]
        bounds = solver.hull([each.bounds for each in solved])
        if not bounds:
            return [loop.op]
        b = Builder(loop.op.loc, watch=self.facts.note_op)
        b.ops += solver.ops
        loop = _within(loop, bounds, self.facts, b)
        if len(guards) == 1:
            loop = _without(loop, solved[0])
        return [*b.ops, loop.to_op()]

    def solver(self, loop: Loop) -> Solver:
        inside = {v: op for op in loop.body.ops for v in op.results}
        params = set(loop.body.params)

        def is_stable(op: Op) -> bool:
            root = op.name == "load" and root_among(self.producers, op.operands[0])
            return root in self.readable

        return Solver(
            loop.index,
            loop.first,
            inside,
            lambda value: value not in params,
            is_stable,
            self.facts,
        )


@dataclass(frozen=True)
class _Solved:
    """A guard: the bounds that some of its terms amount to, and the remaining terms."""

    guard: Guard
    bounds: Bounds
    rest: tuple[Part, ...]


def guards_of(loop: Loop, producers: dict[Value, Op]) -> list[Guard]:
    """The guards without which an iteration has no effect; none if it always has."""
    found = {
        op: guard
        for op in loop.body.ops
        if (guard := guard_of(op, producers)) is not None
    }
    idle: dict[Value, tuple[Op, Value]] = {
        value: (op, kept)
        for op, guard in found.items()
        for value, kept in zip(op.results, guard.idle.yields, strict=True)
    }
    active = {op for op in loop.body.ops if not is_removable(op)}
    for value, carried in zip(loop.yields, loop.carried, strict=True):
        while value in idle:
            op, value = idle[value]
            active.add(op)
        if value is not carried:
            return []
    if not all(op in found for op in active):
        return []
    return [found[op] for op in loop.body.ops if op in active]


def _solve(guard: Guard, solver: Solver, lows: bool) -> _Solved:
    bounds, rest = Bounds(), []
    for part in guard.parts:
        found = solver.solve(part, guard.op.loc)
        if found is None or (found.lows and not lows):
            rest.append(part)
        else:
            bounds &= found
    return _Solved(guard, bounds, tuple(rest))


def _within(loop: Loop, bounds: Bounds, facts: Facts, b: Builder) -> Loop:
    first = greatest((loop.first, *bounds.lows), facts, b)
    limit = least((loop.limit, *bounds.highs), facts, b)
    if bounds.needed:
        limit = b.select(_all(bounds.needed, b), limit, first)
    return loop.with_(first=first, limit=limit)


def _without(loop: Loop, solved: _Solved) -> Loop:
    """The loop with its guard replaced by bounds."""
    b, guard = Builder(loop.op.loc), solved.guard
    mapping: dict[Value, Value] = {}
    for op in loop.body.ops:
        b.loc = op.loc
        if op is not guard.op:
            b.ops.append(op)
        elif solved.rest:
            which = b.cast(_all([_asked(p, b) for p in solved.rest], b), I32)
            regions = (guard.idle, guard.taken)
            b.ops.append(op.with_(operands=(which,), regions=regions))
        else:
            mapping = dict(zip(op.results, inline(b, guard.taken, ()), strict=True))
    body = Block(loop.body.params, tuple(b.ops), loop.body.yields)
    return loop.with_(body=substitute(body, mapping))


def _all(tests: Sequence[Value], b: Builder) -> Value:
    result = tests[0]
    for test in tests[1:]:
        result = b.and_(result, test)
    return result


def _asked(part: Part, b: Builder) -> Value:
    return part.value if part.truth else b.not_(part.value)
