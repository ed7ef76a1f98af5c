"""Products that a loop sums while it carries something else, as a stage of their own.

The reverse of a recurrent layer goes back through the steps of time, one after another,
and adds a product of a state and a cotangent to the cotangent of the weights in each.
Only the cotangent of the state has to wait for the step before. So the loop saves the
factors of these products, and a program with an axis for the steps multiplies them: its
programs divide the weights, and go through all steps with one accumulator.

In: a program with a loop of known length, some of whose carried values are sums from
zero of one matmul per iteration, that are added to memory after it. Out: the program
without these sums, the one that adds them, and the arrays between.

Proof: an addition to memory is linear, so every step may add its product itself; the
factors are those that the loop computes. Sums are taken in another order.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pallasite.autodiff.backward_stages import (
    Slice,
    Stages,
    save_block,
    saved_ref,
    trip_count,
)
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Op, Value
from pallasite.ir.rewrite import clone, users_of
from pallasite.ir.roles import Loop
from pallasite.ir.types import INDEX
from pallasite.passes.lower.per_program import Program


class _Sum(NamedTuple):
    """A carried sum: which one, the matmul of an iteration, where the sum is added."""

    number: int
    dot: Op
    add: Op


def loop_products(stages: Stages) -> Stages | None:
    """The stages with products of their loops apart; None if there are none."""
    programs, saved = list[Program](), [*stages.saved]
    for stage in stages.programs:
        found = _apart(stage)
        programs += [stage] if found is None else found.programs
        saved += [] if found is None else found.saved
    if len(programs) == len(stages.programs):
        return None
    return Stages(tuple(programs), tuple(saved))


def _apart(program: Program) -> Stages | None:
    for op in program.body.ops:
        count = trip_count(op, program.body) if op.name == "for" else None
        sums = _sums(program.body, Loop.of(op)) if count else []
        if count and sums:
            return _Apart(program, Loop.of(op), count, sums).stages()
    return None


def _sums(body: Block, loop: Loop) -> list[_Sum]:
    inside = {v: op for op in loop.body.ops for v in op.results}
    before = {v: op for op in body.ops for v in op.results}
    inner, outer = users_of(loop.body), users_of(body)
    found = list[_Sum]()
    for n, (carry, total) in enumerate(zip(loop.carried, loop.yields, strict=True)):
        add, start = inside.get(total), before.get(loop.inits[n])
        if add is None or add.name != "add" or carry not in add.operands:
            continue
        (share,) = [v for v in add.operands if v is not carry] or [carry]
        dot, last = inside.get(share), outer[loop.results[n]]
        is_sum = inner[carry] == [add] and inner[share] == [add] and not inner[total]
        if start is None or start.name != "constant" or start.attrs["value"] != 0:
            continue
        if not is_sum or len(last) != 1:
            continue
        if dot is None or dot.name != "dot" or last[0].name != "atomic_rmw":
            continue
        access = Access.of(last[0])
        is_added = access.value is loop.results[n] and access.mask is None
        if is_added and last[0].attrs["kind"] == "add" and last[0] in body.ops:
            found.append(_Sum(n, dot, last[0]))
    return found


class _Apart:
    def __init__(self, program: Program, loop: Loop, count: int, sums: Sequence[_Sum]):
        self.program, self.loop, self.sums = program, loop, sums
        self.sizes = (*program.sizes, count)
        factors = dict.fromkeys(v for each in sums for v in each.dot.operands)
        self.refs = {v: saved_ref(v, self.sizes) for v in factors}

    def stages(self) -> Stages:
        return Stages((self.main(), self.products()), tuple(self.refs.values()))

    def main(self) -> Program:
        """The program without the sums, which saves the factors."""
        loop, body = self.loop, self.program.body
        numbers, b = {each.number for each in self.sums}, Builder(loop.op.loc)
        totals = {loop.yields[n] for n in numbers}
        b.ops += [op for op in loop.body.ops if totals.isdisjoint(op.results)]
        ids = (*body.params, loop.index)
        for value, ref in self.refs.items():
            b.store(save_block(b, ref, ids, value, "out"), value)
        kept = [n for n in range(len(loop.carried)) if n not in numbers]
        inner = Block(
            (loop.index, *(loop.carried[n] for n in kept)),
            tuple(b.ops),
            tuple(loop.yields[n] for n in kept),
        )
        new = loop.with_(
            inits=tuple(loop.inits[n] for n in kept),
            results=tuple(loop.results[n] for n in kept),
            body=inner,
        ).to_op()
        adds = {each.add for each in self.sums}
        ops = (new if op is loop.op else op for op in body.ops if op not in adds)
        return self.program.with_body(Block(body.params, tuple(ops))).simplified()

    def products(self) -> Program:
        """The program of all steps that multiplies and adds."""
        body, b = self.program.body, Builder(self.loop.op.loc)
        step = Value(INDEX, "step")
        ids = (*body.params, step)
        loaded = {
            value: b.load(save_block(b, ref, ids, value, "in"))
            for value, ref in self.refs.items()
        }
        for each in self.sums:
            others = [v for v in each.add.operands if v not in self.loop.results]
            b.ops += Slice(body.ops).closure(others)
            operands = (loaded[v] for v in each.dot.operands)
            product = b.op("dot", *operands, **each.dot.attrs)
            old = Access.of(each.add).value
            places = [product if v is old else v for v in each.add.operands]
            b.ops.append(each.add.with_(operands=tuple(places)))
        made = clone(Block(ids, tuple(b.ops)))
        return replace(self.program, body=made, sizes=self.sizes).simplified()
