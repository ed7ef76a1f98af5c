"""Divides the reverse of a recurrence: states, their cotangents, and all else at once.

A program that hands a state from step to step (chunks of a linear attention, of a state
space model) has a reverse of two loops: one keeps every state on a stack, the other
hands on the state's cotangent from the last step to the first. Only these two chains
need an order. So a stage writes the states, a stage writes their cotangents, and in a
third every step is a program, which reads both. The chains are a small part of the
work, and blocks of the state can be divided among programs.

Proof: a step of the second loop reads what it is handed, the stack, and memory that the
program does not write, and all that it does to other memory is to add to it.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.autodiff.backward_stages import Stages, save_block, saved_ref, trip_count
from pallasite.autodiff.backward_windows import only, without_effects
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, clone, map_ops, producers_of
from pallasite.ir.roles import Loop, number_of
from pallasite.ir.types import INDEX, TileType
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots, read_refs
from pallasite.passes.lower.per_program import Program, main_refs

EFFECTS = ("atomic_rmw", "store")


def states_apart(program: Program) -> Stages | None:
    """The three stages; None if no loop hands on a state beside products.

    Its last loop of this kind is divided; what it reads of the stacks of others is in
    memory.
    """
    ops = program.body.ops
    loop = next((op for op in reversed(ops) if _is_chain(op)), None)
    count = None if loop is None else trip_count(loop, program.body)
    if loop is None or count is None:
        return None
    kept = _Stacks(program).in_memory()
    if kept is None:
        return None
    program, stacks = kept
    (loop,) = (op for op in program.body.ops if op.results == loop.results)
    return _Divided(program, Loop.of(loop), count, stacks).stages()


def _is_chain(op: Op) -> bool:
    """Whether a loop hands on tiles, and has products that only add to memory."""
    if op.name != "for" or not any(v.tile.rank for v in op.results):
        return False
    loop = Loop.of(op)
    effects = [o for o in walk(loop.body) if o.name in EFFECTS]
    adds = all(o.name == "atomic_rmw" and o.attrs["kind"] == "add" for o in effects)
    chain = _needed(loop.body, loop.yields)
    products = [o for o in walk(loop.body) if o.name == "dot"]
    return bool(effects) and adds and any(o not in chain for o in products)


def _needed(body: Block, values: tuple[Value, ...]) -> set[Op]:
    made, pending, found = producers_of(body), list(values), set[Op]()
    while pending:
        op = made.get(pending.pop())
        if op is not None and op not in found:
            found |= {op, *(o for region in op.regions for o in walk(region))}
            pending += [v for o in walk(Block((), (op,))) for v in o.operands]
            pending += [v for region in op.regions for v in region.yields]
    return found


class _Stacks:
    """Stacks of a program: an entry for each iteration, each all of a tile."""

    def __init__(self, program: Program):
        self.program = program
        allocs = [op.result for op in program.body.ops if op.name == "alloc"]
        self.refs = {
            stack: saved_ref(_entry(stack), (*program.sizes, stack.ref.shape[0]))
            for stack in allocs
            if stack.ref.rank
        }

    def in_memory(self) -> tuple[Program, list[Value]] | None:
        """The program with its stacks in main memory; None if it has other scratch."""
        ops = list(walk(self.program.body))
        allocs = [op.result for op in ops if op.name == "alloc"]
        roots = Roots(self.program.body)
        written = {*roots.written(self.program.body)}.difference(allocs)
        reads = (op for op in ops if op.name not in EFFECTS)
        if any(roots.of(ref) in written for op in reads for ref in read_refs(op)):
            return None
        uses = [op for op in ops if op.name != "alloc" and {*op.operands} & {*allocs}]
        if not {*allocs} <= {*self.refs} or not all(map(self.is_entry, uses)):
            return None
        body = map_ops(self.program.body, self.rewritten)
        return self.program.with_body(body), list(self.refs.values())

    def is_entry(self, op: Op) -> bool:
        if op.name not in ("load", "store"):
            return False
        access = Access.of(op)
        (first, *rest), shape = access.index, access.ref.ref.shape
        whole = covers_whole(shape[1:], tuple(rest)) and access.mask is None
        return first == At(None) and whole

    def rewritten(self, op: Op, b: Rewriter) -> list[Value] | None:
        if op.name not in ("load", "store") or op.operands[0] not in self.refs:
            return None
        access = Access.of(op)
        ref, ids = self.refs[access.ref], self.program.body.params
        tile = _entry(access.ref)
        mode = "in" if op.name == "load" else "out"
        block = save_block(b, ref, (*ids, *access.index_operands), tile, mode)
        if op.name == "load":
            return [b.load(block)]
        assert access.value is not None
        b.store(block, access.value)
        return []


def _entry(stack: Value) -> Value:
    """What an entry of a stack is like."""
    return Value(TileType(stack.ref.shape[1:], stack.ref.dtype))


class _Divided:
    def __init__(
        self, program: Program, loop: Loop, count: int, stacks: Sequence[Value]
    ):
        self.program, self.loop, self.count, self.stacks = program, loop, count, stacks
        self.sizes = (*program.sizes, count)
        # The reverse goes through the steps from the last to the first.
        made = producers_of(program.body)
        self.steps = [
            op.result
            for op in loop.body.ops
            if op.name == "sub"
            and op.operands[1] is loop.index
            and number_of(made, op.operands[0]) == count - 1
        ]
        self.states = {v: saved_ref(v, self.sizes) for v in loop.carried}

    def stages(self) -> Stages:
        rest = self.rest()
        read = main_refs(rest.body)
        self.states = {v: ref for v, ref in self.states.items() if ref in read}
        firsts = [only(self.program, self.stacks)] if self.stacks else []
        saved = (*self.stacks, *self.states.values())
        return Stages((*firsts, self.chain(), rest), saved)

    def chain(self) -> Program:
        """The loop, which only writes what it is handed; and what follows it."""
        b, old = Builder(self.loop.op.loc), self.program.body
        ids, body = old.params, without_effects(self.loop.body)
        step = self.position(b, self.loop.index)
        for value, ref in self.states.items():
            b.store(save_block(b, ref, (*ids, step), value, "out"), value)
        body = Block(body.params, (*b.ops, *body.ops), body.yields)
        loop = self.loop.with_(body=body).to_op()
        ops = (loop if op is self.loop.op else op for op in old.ops)
        made = self.program.with_body(Block(ids, tuple(ops)))
        written = Roots(made.body).written(made.body)
        return only(made, [ref for ref in written if ref not in self.stacks])

    def rest(self) -> Program:
        """An iteration of the loop, as a step of the grid."""
        b, step, old = Builder(self.loop.op.loc), Value(INDEX), self.program.body
        ids, before = (*old.params, step), old.ops[: old.ops.index(self.loop.op)]
        b.ops += without_effects(Block((), before)).ops
        new = dict.fromkeys(self.steps, step)
        new[self.loop.index] = self.position(b, step)
        for value, ref in self.states.items():
            new[value] = b.load(save_block(b, ref, ids, value, "in"))
        ops = (op for op in self.loop.body.ops if not {*op.results} & {*self.steps})
        b.ops += clone(Block((), tuple(ops)), new).ops
        body = Block(ids, tuple(b.ops))
        return replace(self.program, body=body, sizes=self.sizes).simplified()

    def position(self, b: Builder, index: Value) -> Value:
        """The step of an iteration, or the iteration of a step."""
        return b.sub(b.index(self.count - 1), index) if self.steps else index
