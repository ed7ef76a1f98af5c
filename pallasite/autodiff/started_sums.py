"""Writes what iterations start or set as sums that their loop only adds to.

`acc = where(k == 0, x, acc + x)`, or the same by a branch, is `acc + x` of a loop that
starts at zero: what `acc` was before does not matter. Then the loop only accumulates,
its reverse needs no order, and a loop around it that handed on `acc` hands on nothing.

The same goes for a value that the first iteration sets to a number before it is read,
under tests that do not depend on the iteration: the loop starts with that number where
they hold. Proof: what the value was is used only where they do not.

A value that is zero before the loop and that at most one iteration sets, `where(k == n,
x, acc)`, is the sum of `where(k == n, x, 0)`: the diagonal of a matrix that the loop
goes through, the score of a label.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder, Scalar
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import producers_of, substitute, users_of, with_regions
from pallasite.ir.roles import Cond, Loop, number_of
from pallasite.passes.lower.per_program import Program


def started_sums(program: Program) -> Program:
    """The program with such sums started before their loops."""
    body = _Walk(program.body).block(program.body)
    return program if body is program.body else program.with_body(body).simplified()


_Path = tuple[tuple[Op, int], ...]  # the ops around a use, each with its region


@dataclass(frozen=True)
class _Reset:
    """An op of the first iteration that sets a value to a number.

    Attributes:
        op: has the number as a result, or what the value was.
        number: the number.
        path: the branches that the op is in.
    """

    op: Op
    number: Scalar
    path: _Path

    def start(self, b: Builder, init: Value) -> Value:
        """What the loop starts with instead of an initial value."""
        start = b.constant(self.number, init.tile)
        for op, place in reversed(self.path):
            ends = [Block((), (), (init,)) for _ in op.regions]
            ends[place] = Block((), (), (start,))
            (start,) = b.emit("cond", op.operands[0], regions=tuple(ends))
        return start


def _uses(block: Block, value: Value, path: _Path = ()) -> Iterator[_Path]:
    """The places where a value is used: by the last op of a path."""
    for op in block.ops:
        yield from ((*path, (op, n)) for n, v in enumerate(op.operands) if v is value)
        for n, region in enumerate(op.regions):
            yield from _uses(region, value, (*path, (op, n)))
    yield from (path for v in block.yields if v is value)


def _is_elsewhere(path: _Path, other: _Path) -> bool:
    """Whether a use is in another branch than those that a path goes through."""
    pairs = zip(path, other, strict=False)
    return any(a is b and m != n for (a, m), (b, n) in pairs)


class _Walk:
    def __init__(self, body: Block):
        self.made = producers_of(body)
        self.users = users_of(body)

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        for op in block.ops:
            op = with_regions(op, [self.block(region) for region in op.regions])
            ops += self.loop(Loop.of(op)) if op.name == "for" else [op]
        if tuple(ops) == block.ops:
            return block
        return Block(block.params, tuple(ops), block.yields)

    def loop(self, loop: Loop) -> list[Op]:
        loop = self.without_unread(loop)
        if not self.runs(loop):
            return [loop.op]
        b = Builder(loop.op.loc)
        inits, ops, yields = list(loop.inits), list(loop.body.ops), list(loop.yields)
        for n, carry in enumerate(loop.carried):
            reset = self.reset(loop, carry)
            if reset is not None:
                inits[n] = reset.start(b, inits[n])
                body = Block(loop.body.params, tuple(ops), tuple(yields))
                body = substitute(body, {reset.op.result: carry})
                self.made |= {v: op for op in b.ops for v in op.results}
                new = loop.with_(inits=tuple(inits), body=body).to_op()
                return [*b.ops, *self.loop(Loop.of(new))]
            total = Builder(loop.op.loc)
            share = self.share(loop, carry, yields[n])
            if share is None and number_of(self.made, inits[n]) == 0:
                share = self.set_once(loop, carry, yields[n], total)
            if share is None:
                continue
            inits[n] = b.constant(0, carry.tile)
            yields[n] = total.add(carry, share)
            ops += total.ops
        if tuple(yields) == loop.yields:
            return [loop.op]
        body = Block(loop.body.params, tuple(ops), tuple(yields))
        return [*b.ops, loop.with_(inits=tuple(inits), body=body).to_op()]

    def reset(self, loop: Loop, carry: Value) -> "_Reset | None":
        """Where the first iteration sets a carried value before it is read."""
        inside = {v for op in walk(loop.body) for v in op.results} | {loop.index}
        uses = list(_uses(loop.body, carry))
        for path in filter(None, uses):
            op, _ = path[-1]
            cases = op.operands[1:] if op.name == "select_n" else ()
            if op.name == "cond" and len(op.results) == 1:
                cases = tuple(region.yields[0] for region in op.regions)
            if len(cases) != 2 or cases[0] is not carry:
                continue
            number, outer = number_of(self.made, cases[1]), path[:-1]
            known = all(
                o.name == "cond" and o.operands[0] not in inside for o, _ in outer
            )
            if number is None or not known or not self.is_first(loop, op.operands[0]):
                continue
            others = [other for other in uses if other is not path]
            if all(_is_elsewhere(other, outer) for other in others):
                return _Reset(op, number, outer)
        return None

    def without_unread(self, loop: Loop) -> Loop:
        """The loop without carried values that neither it nor code after it reads."""
        users = users_of(loop.body)
        kept = [
            n
            for n, (carry, result) in enumerate(
                zip(loop.carried, loop.results, strict=True)
            )
            if users.get(carry) or carry in loop.yields or self.users.get(result)
        ]
        if len(kept) == len(loop.carried):
            return loop
        params = (loop.index, *(loop.carried[n] for n in kept))
        yields = tuple(loop.yields[n] for n in kept)
        new = loop.with_(
            inits=tuple(loop.inits[n] for n in kept),
            results=tuple(loop.results[n] for n in kept),
            body=Block(params, loop.body.ops, yields),
        )
        return Loop.of(new.to_op())

    def runs(self, loop: Loop) -> bool:
        """Whether the loop surely has a first iteration."""
        first, limit = (number_of(self.made, v) for v in (loop.first, loop.limit))
        return first is not None and limit is not None and first < limit

    def share(self, loop: Loop, carry: Value, total: Value) -> Value | None:
        """What each iteration adds to a sum that the first one starts."""
        op = self.made.get(total)
        if op is None or len(op.results) != 1:
            return None
        if op.name == "select_n" and len(op.operands) == 3:
            test, later, first = op.operands
        elif op.name == "cond":
            cond = Cond.of(op)
            if len(cond.branches) != 2:
                return None
            test, ((later,), (first,)) = cond.which, [b.yields for b in cond.branches]
        else:
            return None
        add = self.made.get(later)
        if add is None or add.name != "add" or not self.is_first(loop, test):
            return None
        if {*add.operands} != {carry, first} or self.users[carry] != [add]:
            return None
        # A share that the branch computes is not there for later iterations.
        mine = {v for o in loop.body.ops for v in o.results}
        return first if first in mine else None

    def set_once(
        self, loop: Loop, carry: Value, total: Value, b: Builder
    ) -> Value | None:
        """What one iteration sets a carried value to, and zero in the others."""
        op = self.made.get(total)
        if (
            op is None
            or len(op.results) != 1
            or len(op.operands) + len(op.regions) != 3
        ):
            return None
        cases = op.operands[1:] if op.name == "select_n" else ()
        cases = tuple(r.yields[0] for r in op.regions) if op.name == "cond" else cases
        uses = [v for o in walk(loop.body) for v in o.operands]
        uses += [v for o in walk(loop.body) for r in o.regions for v in r.yields]
        is_once = cases[:1] == (carry,) and self.is_once(loop, op.operands[0])
        if not is_once or uses.count(carry) != 1 or carry in loop.yields:
            return None
        zero = b.constant(0, carry.tile)
        if op.name == "select_n":
            return b.op("select_n", op.operands[0], zero, op.operands[2])
        kept = replace(op.regions[0], yields=(zero,))
        share = Value(carry.tile)
        b.ops.append(op.with_(regions=(kept, op.regions[1]), results=(share,)))
        return share

    def is_first(self, loop: Loop, test: Value) -> bool:
        """Whether a condition holds in the first iteration alone."""
        first = number_of(self.made, loop.first)
        return first in (number_of(self.made, v) for v in self.equal(loop, test))

    def is_once(self, loop: Loop, test: Value) -> bool:
        """Whether a condition holds in one iteration at most."""
        inside = {v for o in walk(loop.body) for v in o.results}
        return any(v not in inside for v in self.equal(loop, test))

    def equal(self, loop: Loop, test: Value) -> list[Value]:
        """What the index of a loop is equal to where a condition holds, if it says."""
        op = self.made.get(test)
        while op is not None and op.name in ("cast", "broadcast_in_dim"):
            op = self.made.get(op.operands[0])
        if op is None or op.name != "eq" or loop.index not in op.operands:
            return []
        return [v for v in op.operands if v is not loop.index]
