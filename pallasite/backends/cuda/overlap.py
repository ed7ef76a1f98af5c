"""overlap: software-pipelines matmuls that end a loop iteration into the next one.

In: a kernel after `promote`. Out: the same kernel, in which a matmul that depends on
another one of the same iteration (the second of a chain) and is only added to a carried
value is *delayed*: the loop carries the addend and the computed operand, and the next
iteration issues the matmul next to the first one of its own chain. An iteration then
has two independent matmuls, and what is computed between them overlaps with the delayed
one. The first iteration is peeled into a prologue without it; the last matmul is the
epilogue.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, clone, inline, map_ops, users_of
from pallasite.ir.roles import Loop
from pallasite.ir.types import I32
from pallasite.passes.analysis.intervals import Facts


def overlap(kernel: Kernel) -> Kernel:
    """Delay the last matmuls of chains in all innermost loops."""
    facts = Facts()
    facts.note_block(kernel.body)
    users = users_of(kernel.body)

    def rewrite(op: Op, builder: Rewriter) -> Sequence[Value] | None:
        if op.name != "for" or any(inner.regions for inner in op.regions[0].ops):
            return None
        chains = _chains(Loop.of(op), users)
        return _Delayed(Loop.of(op), chains, facts).emit(builder) if chains else None

    return map_ops(kernel, rewrite)


@dataclass(frozen=True, eq=False)
class Chain:
    """A matmul to delay: `add` of `addend` and `dot`, yielded at `place`."""

    dot: Op
    add: Op
    addend: Value
    place: int
    loading: Block  # loop index -> the matmul's right operand

    @property
    def computed(self) -> Value:
        return self.dot.operands[0]


def _chains(loop: Loop, users: dict[Value, list[Op]]) -> list[Chain]:
    here = {v: op for op in loop.body.ops for v in op.results}
    found = []
    for dot in loop.body.ops:
        if dot.name != "dot" or not uses_product(dot.operands[0], here):
            continue
        adds = users[dot.result]
        if len(adds) != 1 or adds[0].name != "add" or here.get(adds[0].result) is None:
            continue
        (add,) = adds
        x, y = add.operands
        addend = y if x is dot.result else x
        loading = _loading(dot.operands[1], here, loop)
        if loading is not None and _is_shared(loading, dot, users):
            continue
        is_yield = add.result in loop.yields and len(users[add.result]) == 1
        if addend is dot.result or loading is None or not is_yield:
            continue
        place = loop.yields.index(add.result)
        found.append(Chain(dot, add, addend, place, loading))
    return found


def uses_product(value: Value, here: dict[Value, Op]) -> bool:
    """Whether a value is computed from a matmul of the same iteration."""
    pending, seen = [value], set[Value]()
    while pending:
        op = here.get(pending.pop())
        if op is None or op.results[0] in seen:
            continue
        if op.name == "dot":
            return True
        seen.update(op.results)
        pending += op.operands
    return False


def _loading(value: Value, here: dict[Value, Op], loop: Loop) -> Block | None:
    """The ops that load an operand, if they depend only on the iteration number."""
    needed: list[Op] = []
    pending, seen = [value], set[Value]()
    while pending:
        each = pending.pop()
        if each in loop.carried:
            return None
        op = here.get(each)
        if op is None or each in seen:
            continue
        if op.name == "dot" or op.regions:
            return None
        seen.update(op.results)
        needed.append(op)
        pending += op.operands
    if not any(op.name == "load" for op in needed):
        return None
    ops = tuple(op for op in loop.body.ops if op in needed)
    return Block((loop.index,), ops, (value,))


def _is_shared(loading: Block, dot: Op, users: dict[Value, list[Op]]) -> bool:
    """Whether an iteration loads a matmul's right operand for other matmuls too.

    Then it is already available, and a delayed matmul would load it again.
    """
    mine = {*loading.ops, dot}
    tiles = (op.result for op in loading.ops if op.name in ("load", "transpose"))
    return any(user not in mine for tile in tiles for user in users[tile])


class _Delayed:
    """A loop being pipelined."""

    def __init__(self, loop: Loop, chains: Sequence[Chain], facts: Facts):
        self.loop, self.chains = loop, chains
        self.late = {c.place: c for c in chains}
        first, limit = facts.of(loop.first), facts.of(loop.limit)
        self.runs = first.high < limit.low  # at least once
        gone = {id(op) for c in chains for op in (c.dot, c.add)}
        ops = tuple(op for op in loop.body.ops if id(op) not in gone)
        yields = [
            self.late[n].addend if n in self.late else value
            for n, value in enumerate(loop.yields)
        ]
        yields += [c.computed for c in chains]
        self.step = Block(loop.body.params, ops, tuple(yields))

    def emit(self, b: Builder) -> Sequence[Value]:
        if self.runs:
            return self.unrolled(b)
        inside = Builder(self.loop.op.loc)
        results = self.unrolled(inside)
        some = b.cast(b.lt(self.loop.first, self.loop.limit), I32)
        none = Block((), (), self.loop.inits)
        return b.emit("cond", some, regions=(none, inside.block((), results)))

    def unrolled(self, b: Builder) -> Sequence[Value]:
        loop, count = self.loop, len(self.loop.inits)
        before = inline(b, self.step, (loop.first, *loop.inits))
        results = b.emit(
            "for",
            b.add(loop.first, loop.step),
            loop.limit,
            loop.step,
            *before,
            loop.first,
            regions=(self.body(),),
        )
        state, operands, last = results[:count], results[count:-1], results[-1]
        made = list(state)
        for chain, computed in zip(self.chains, operands, strict=True):
            made[chain.place] = self.product(b, chain, state, computed, last)
        return made

    def product(
        self,
        b: Builder,
        chain: Chain,
        state: Sequence[Value],
        computed: Value,
        number: Value,
    ) -> Value:
        """The matmul that a given iteration left to do."""
        (right,) = inline(b, chain.loading, (number,))
        product = b.op("dot", computed, right, **chain.dot.attrs)
        return b.op("add", state[chain.place], product)

    def body(self) -> Block:
        """An iteration: its own code with the delayed matmuls of the previous one."""
        loop, count = self.loop, len(self.loop.inits)
        index = Value(loop.index.type, loop.index.name)
        carried = [Value(v.type, v.name) for v in self.step.yields]
        number = Value(loop.index.type, "before")
        made = {n: Value(carried[n].type) for n in self.late}
        values = [made.get(n, carried[n]) for n in range(count)]
        own = clone(
            Block((), self.step.ops, self.step.yields),
            dict(zip(loop.body.params, (index, *values), strict=True)),
        )
        ops = list(own.ops)
        place = self.place_for(ops, set(made.values()))
        b = Builder(loop.op.loc)
        for chain, computed in zip(self.chains, carried[count:], strict=True):
            result = self.product(b, chain, carried[:count], computed, number)
            b.ops[-1] = b.ops[-1].with_(results=(made[chain.place],))
            assert result is not None
        ops[place:place] = b.ops
        return Block((index, *carried, number), tuple(ops), (*own.yields, index))

    def place_for(self, ops: Sequence[Op], needed: set[Value]) -> int:
        """After the iteration's own first matmuls, before uses of the delayed ones."""
        first = next(
            (n for n, op in enumerate(ops) if needed & set(op.operands)), len(ops)
        )
        products = [n for n, op in enumerate(ops[:first]) if op.name == "dot"]
        return products[-1] + 1 if products else first
