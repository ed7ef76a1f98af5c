"""The reverse of a `for` loop: its iterations in reverse order, each recomputed.

An iteration is recomputed from its carried values. The forward loop keeps those that
its reverse needs on a stack; a loop that only accumulates needs none, and its reverse
may run the iterations in any order.
"""

from collections.abc import Sequence
from typing import Protocol

from pallasite.autodiff.reverse_activity import Activity
from pallasite.autodiff.reverse_rules import cotangent_type
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import clone, dead_code, substitute, used_values
from pallasite.ir.roles import Loop
from pallasite.passes.normal.canonicalize import canonicalize

Cotangents = dict[Value, Value]


class Reverse(Protocol):
    """What the reverse of a loop needs from the enclosing reverse (`reverse.py`)."""

    activity: Activity

    def again(self, ops: Sequence[Op]) -> tuple[Op, ...]: ...
    def add(self, b: Builder, ct: Cotangents, value: Value, more: Value) -> None: ...
    def backward(self, b: Builder, ops: Sequence[Op], ct: Cotangents) -> None: ...
    def check_memory(self, region: Block) -> None: ...
    def most_steps(self, op: Op) -> int: ...


class ReverseLoop:
    """The reverse of one `for`."""

    def __init__(self, outer: "Reverse", b: Builder, op: Op, ct: Cotangents):
        self.outer, self.b, self.op, self.ct = outer, b, op, ct
        self.loop = Loop.of(op)
        self.body = self.loop.body
        self.index, self.params = self.loop.index, self.loop.carried
        self.inner = Builder(op.loc)

    def emit(self) -> None:
        activity = self.outer.activity
        varied = [n for n, p in enumerate(self.params) if p in activity.varied]
        given = [_like(self.params[n]) for n in varied]
        found: Cotangents = {}
        for n, param in zip(varied, given, strict=True):
            self.outer.add(self.inner, found, self.body.yields[n], param)
        self.inner.ops += self.outer.again(self.body.ops)
        self.outer.backward(self.inner, self.body.ops, found)
        yields = [self.cotangent(found, self.params[n]) for n in varied]
        captured = [v for v in activity.captured(self.body) if v in found]
        sums = [_like(v) for v in captured]
        for total, value in zip(sums, captured, strict=True):
            yields.append(self.inner.add(total, found[value]))
        block = Block((*given, *sums), tuple(self.inner.ops), tuple(yields))
        inits = [self.result_cotangent(n) for n in varied]
        inits += [
            self.ct.get(v) or self.b.constant(0, cotangent_type(v)) for v in captured
        ]
        results = self.emit_loop(live(block), inits)
        for value, total in zip(captured, results[len(varied) :], strict=True):
            self.ct[value] = total
        # After the sums, which would hide them: a captured value may be the initial
        # one.
        for n, cotangent in zip(varied, results, strict=False):
            self.outer.add(self.b, self.ct, self.loop.inits[n], cotangent)

    def cotangent(self, found: Cotangents, value: Value) -> Value:
        # The same value may stand for a captured one: its share is taken once.
        return found.pop(value, None) or self.inner.constant(0, cotangent_type(value))

    def result_cotangent(self, n: int) -> Value:
        result = self.op.results[n]
        return self.ct.pop(result, None) or self.b.constant(0, cotangent_type(result))

    def emit_loop(self, block: Block, inits: list[Value]) -> Sequence[Value]:
        needed = [n for n, p in enumerate(self.params) if p in used_values(block)]
        if not needed and self.is_free(block):
            region = Block((self.index, *block.params), block.ops, block.yields)
            self.outer.check_memory(region)
            regions = (clone(region),)
            return self.b.emit("for", *self.loop.bounds, *inits, regions=regions)
        stacks = self.keep(needed)
        count = self.count()
        counter = Value(T.INDEX, "back")
        head = Builder(self.op.loc)
        one = head.index(1)
        position = head.sub(head.sub(count, one), counter)
        first, step = self.loop.first, self.loop.step
        offset = head.mul(head.cast(position, first.tile.dtype), step)
        known = {self.index: head.add(first, offset)}
        for n, stack in stacks.items():
            known[self.params[n]] = _at(head, stack, position)
        block = substitute(block, known)
        region = Block((counter, *block.params), (*head.ops, *block.ops), block.yields)
        self.outer.check_memory(region)
        bounds = (self.b.index(0), count, self.b.index(1))
        return self.b.emit("for", *bounds, *inits, regions=(clone(region),))

    def is_free(self, block: Block) -> bool:
        """Whether iterations may run in any order: they only accumulate."""
        varied = sum(p in self.outer.activity.varied for p in self.params)
        pairs = [*zip(block.params, block.yields, strict=True)]
        stores = any(op.name == "store" for op in walk(block))
        return all(p is y for p, y in pairs[:varied]) and not stores

    def count(self) -> Value:
        """The trip count of the loop."""
        first, limit, step = self.loop.bounds
        b = self.b
        one = b.like(1, first)
        steps = b.add(b.div(b.sub(b.sub(limit, first), one), step), one)
        steps = b.select(b.op("lt", first, limit), steps, b.like(0, steps))
        return b.cast(steps, T.I32)

    def keep(self, needed: list[int]) -> dict[int, Value]:
        """Make the forward loop keep these carried values, one entry per iteration."""
        if not needed:
            return {}
        depth = self.outer.most_steps(self.op)
        # The op there may lack effects of this one, and so be a different object.
        place = next(
            i for i, op in enumerate(self.b.ops) if op.results == self.op.results
        )
        there = self.b.ops[place]
        before, head = Builder(self.op.loc), Builder(self.op.loc)
        first, step = self.loop.first, self.loop.step
        position = head.div(head.sub(self.index, first), step)
        stacks = {}
        for n in needed:
            tile = self.params[n].tile
            type_ = T.RefType((depth, *tile.shape), tile.dtype, "vmem")
            stacks[n] = before.op("alloc", type=type_)
            index = (At(None), *(Span(0, size) for size in tile.shape))
            head.store(stacks[n], self.params[n], index, [position])
        forward = Block(
            self.body.params,
            (*head.ops, *Loop.of(there).body.ops),
            self.body.yields,
        )
        kept = Loop.of(there).with_(body=forward).to_op()
        self.b.ops[place : place + 1] = [*before.ops, kept]
        return stacks


def _at(b: Builder, stack: Value, position: Value) -> Value:
    index = (At(None), *(Span(0, size) for size in stack.ref.shape[1:]))
    return b.load(stack, index, [position])


def _like(value: Value) -> Value:
    return Value(cotangent_type(value), f"d_{value.name}" if value.name else "")


def live(block: Block) -> Block:
    """The block simplified, with dead code removed.

    A cotangent that ops undo step by step (a reshape and its reverse) is itself again.
    """
    return canonicalize(dead_code(Kernel("reverse", (), block, 0))).body
