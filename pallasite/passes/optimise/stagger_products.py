"""Products ahead of the vector code that uses them, by a round or more.

In: code without branches, with rounds of products that need no others, vector code that
uses them, and products of what it computes: steps of a running softmax, for one. Out:
the same ops in another order. The first products of a round come before the vector code
of the round before it, and those of what that computes after the vector code of the
next one; of short rounds, they are further apart. A compiler that schedules roughly in
the order of the code then has products for its matrix units whatever the vector unit
computes, and does not run so far ahead with the first products that their results fill
its registers.

What depends on each other by values or memory stays in order.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import used_values, with_ops, with_regions
from pallasite.ir.roles import Dot
from pallasite.passes.analysis.memory import Roots

MOST_AT_ONCE = 0.25  # of the first products, before vector code has anything to do
Place = tuple[int, int]  # a slot, and the stage of a round that is done in it


def stagger_products(kernel: Kernel, ahead: int) -> Kernel:
    """Put the stages of rounds beside those of others.

    Args:
        kernel: what to rewrite.
        ahead: multiplications of first products that are between the stages of a round.
    """
    body = _Staggering(Roots(kernel), ahead).block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


class _Staggering:
    def __init__(self, roots: Roots, ahead: int):
        self.roots, self.ahead = roots, ahead

    def block(self, block: Block) -> Block:
        """A block in another order, and those inside its ops."""
        inside = lambda op: with_regions(op, [self.block(r) for r in op.regions])
        ops = tuple(map(inside, block.ops))
        block = with_ops(block, ops)
        if sum(op.name == "dot" for op in ops) < 2:
            return block
        operands = _operands(ops)
        needs = self.needs(ops, operands)
        if needs is None:
            return block
        places = _Places(ops, operands, self.ahead).all()
        if places is None:
            return block
        return replace(block, ops=tuple(_ordered(ops, needs, places)))

    def needs(
        self, ops: Sequence[Op], operands: Sequence[Sequence[int]]
    ) -> list[set[int]] | None:
        """The ops that each comes after, by number; None: not all effects are known."""
        found: list[set[int]] = []
        written: dict[Value, int] = {}  # by the last op that does
        read: dict[Value, set[int]] = {}  # by those since then
        for number, op in enumerate(ops):
            touched = self.roots.touched(op)
            if touched is None:
                return None
            loaded, stored = touched
            before = set(operands[number])
            for root in loaded:
                before |= {written[root]} if root in written else set()
                read.setdefault(root, set()).add(number)
            for root in stored:
                before |= {written[root]} if root in written else set()
                before |= read.pop(root, set())
                written[root] = number
            found.append(before - {number})
        return found


def _operands(ops: Sequence[Op]) -> list[list[int]]:
    """The ops whose results each op, or what is inside it, uses, by number."""
    made = {v: n for n, op in enumerate(ops) for v in op.results}
    return [[made[v] for v in used_values(Block((), (op,))) if v in made] for op in ops]


class _Places:
    """Where the ops of a block go, by the work of the first products before them."""

    def __init__(
        self, ops: Sequence[Op], operands: Sequence[Sequence[int]], ahead: int
    ):
        self.ops, self.operands, self.ahead = ops, operands, ahead
        self.levels, self.leads_on = self._levels(), self._leads_on()

    def _levels(self) -> list[int]:
        """Of how many products in a row each op is computed, itself among them."""
        found: list[int] = []
        for op, operands in zip(self.ops, self.operands, strict=True):
            level = max((found[n] for n in operands), default=0)
            found.append(level + (op.name == "dot"))
        return found

    def _leads_on(self) -> list[bool]:
        """Whether each op is needed for a product."""
        found = [False] * len(self.ops)
        for number in reversed(range(len(self.ops))):
            if found[number] or self.ops[number].name == "dot":
                for n in self.operands[number]:
                    found[n] = True
        return found

    def all(self) -> list[Place] | None:
        """The place of each op; None: there is only one round, or one stage."""
        rounds = list(self.rounds())
        if rounds[-1] < 1 or max(self.levels) < 2:
            return None
        work = self.work(rounds)
        apart = max(1, self.ahead // max(work))
        if sum(work[: apart + 1]) > MOST_AT_ONCE * sum(work):
            return None
        found: list[Place] = []
        for number, level in enumerate(self.levels):
            before = [found[n] for n in self.operands[number] if self.levels[n]]
            stage = 2 * (level - 1) if level else 0
            if self.ops[number].name != "dot" and level and self.leads_on[number]:
                stage += 1
            own = (rounds[number] + stage * apart, stage)
            found.append(max([own, *before]))
        # What no product is needed for comes right before what uses it.
        first: dict[int, Place] = {}
        for number in reversed(range(len(self.ops))):
            if not self.levels[number]:
                found[number] = first.get(number, found[number])
            for n in self.operands[number]:
                first[n] = min(first.get(n, found[number]), found[number])
        return found

    def rounds(self) -> Iterator[int]:
        """The number of each op's round.

        A round begins with a product of no others, and has a product of its results.
        """
        number, is_whole = 0, False
        for op, level in zip(self.ops, self.levels, strict=True):
            if op.name == "dot":
                number += is_whole and level == 1
                is_whole = level > 1
            yield number

    def work(self, rounds: Sequence[int]) -> list[int]:
        """Multiplications of the first products of each round."""
        found = [0] * (rounds[-1] + 1)
        for op, level, number in zip(self.ops, self.levels, rounds, strict=True):
            if op.name == "dot" and level == 1:
                found[number] += op.result.tile.size * Dot.of(op).depth
        return found


def _ordered(
    ops: Sequence[Op], needs: Sequence[set[int]], places: Sequence[Place]
) -> Iterator[Op]:
    """Ops by their places, each after those that it needs."""
    waiting = [len(each) for each in needs]
    users: dict[int, list[int]] = {}
    for number, each in enumerate(needs):
        for n in each:
            users.setdefault(n, []).append(number)
    ready = [(places[n], n) for n, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    while ready:
        _, number = heapq.heappop(ready)
        yield ops[number]
        for n in users.get(number, ()):
            waiting[n] -= 1
            if not waiting[n]:
                heapq.heappush(ready, (places[n], n))
