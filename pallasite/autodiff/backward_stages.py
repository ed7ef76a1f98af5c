"""Splits a reversed program into stages that each visit memory in their own order.

A program that accumulated along a sequential grid axis has a reverse whose loop over
that axis only adds to cotangents: its steps can come in any order, so they become
steps of a grid, which can then be ordered such that each block of a cotangent is
visited once (`backward_windows.py`). What such a loop needs of the code before it
is computed again if that is cheap, and saved to memory by a first stage if not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pallasite.autodiff.per_program import Program, producers_of
from pallasite.autodiff.reverse_activity import defined, used_values
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, BlockDim, Op, Value, Window, walk
from pallasite.ir.rewrite import clone, substitute
from pallasite.ir.roles import Loop
from pallasite.ir.types import RefType


@dataclass(frozen=True)
class Stages:
    """Programs in the order in which they run; `saved` refs go between them."""

    programs: tuple[Program, ...]
    saved: tuple[Value, ...] = ()


def split(program: Program) -> Stages:
    """Take out every loop that can be a grid, recursively."""
    program = program.simplified()
    for op in program.body.ops:
        if _can_be_grid(op, program.body):
            main, loop, saved = _cut(program, op)
            first, rest = split(main), split(loop)
            programs = (*first.programs, *rest.programs)
            return Stages(programs, (*saved, *first.saved, *rest.saved))
    is_needed = any(op.name in ("atomic_rmw", "store") for op in walk(program.body))
    return Stages((program,) if is_needed else ())


def _can_be_grid(op: Op, body: Block) -> bool:
    """A loop of known length that carries nothing and adds to blocks it moves over."""
    if op.name != "for" or op.results or trip_count(op, body) is None:
        return False
    loop = Loop.of(op)
    views = {v.result for v in walk(loop.body) if _moves_with(v, loop.index)}
    adds = (o for o in loop.body.ops if o.name == "atomic_rmw")
    return any(o.operands[0] in views for o in adds)


def _moves_with(op: Op, index: Value) -> bool:
    return op.name == "block_view" and index in op.operands[1:]


def trip_count(op: Op, body: Block) -> int | None:
    """The number of steps of a loop from 0 by 1, if it is known."""
    made = producers_of(body)
    numbers = []
    for value in Loop.of(op).bounds:
        producer = made.get(value)
        if producer is None or producer.name != "constant":
            return None
        numbers.append(producer.attrs["value"])
    return numbers[1] if numbers[0] == 0 and numbers[2] == 1 else None


def _cut(program: Program, loop: Op) -> tuple[Program, Program, list[Value]]:
    body = program.body
    count = trip_count(loop, body)
    assert count is not None
    region = Loop.of(loop).body
    before = body.ops[: body.ops.index(loop)]
    slicer = _Slice(before)
    needed = _captured(region)
    costly = [v for v in needed if not v.is_ref and not slicer.is_cheap([v])]
    saved = [_saved_ref(v, program.sizes) for v in costly]

    main = Builder()
    main.ops += [op for op in body.ops if op is not loop]
    reload = Builder()
    loaded: dict[Value, Value] = {}
    for value, ref in zip(costly, saved, strict=True):
        main.store(_block(main, ref, body.params, value, "out"), value)
        loaded[value] = reload.load(_block(reload, ref, body.params, value, "in"))
    cheap = slicer.closure([v for v in needed if v not in costly])
    ops = (*cheap, *reload.ops, *region.ops)
    moved = Block((*body.params, Loop.of(loop).index), ops)
    moved = clone(substitute(moved, loaded))
    sizes = (*program.sizes, count)
    main_program = program.with_body(Block(body.params, tuple(main.ops)))
    return main_program, replace(program, body=moved, sizes=sizes), saved


def _captured(region: Block) -> list[Value]:
    inside = defined(region)
    return [v for v in dict.fromkeys(used_values(region)) if v not in inside]


class _Slice:
    """What of a list of ops some values need."""

    def __init__(self, ops: Sequence[Op]):
        self.ops = ops
        self.made = {v: op for op in ops for v in op.results}
        self.stored = {op.operands[0] for op in _all(ops) if op.name == "store"}

    def closure(self, values: Iterable[Value]) -> tuple[Op, ...]:
        pending, found = list(values), set[Op]()
        while pending:
            op = self.made.get(pending.pop())
            if op is not None and op not in found:
                found.add(op)
                pending += op.operands
                pending += [v for region in op.regions for v in used_values(region)]
        return tuple(op for op in self.ops if op in found)

    def is_cheap(self, values: Iterable[Value]) -> bool:
        """No loops, branches, products or memory that changes."""
        return not any(
            (op.regions and op.name != "custom")
            or op.name in ("alloc", "dot")
            or (op.name == "load" and op.operands[0] in self.stored)
            for op in self.closure(values)
        )


def _all(ops: Sequence[Op]) -> Iterable[Op]:
    return walk(Block((), tuple(ops)))


def _saved_ref(value: Value, sizes: Sequence[int]) -> Value:
    tile = value.tile
    return Value(RefType((*sizes, *tile.shape), tile.dtype, "any"), "saved")


def _block(
    b: Builder, ref: Value, ids: Sequence[Value], value: Value, mode: str
) -> Value:
    """The part of a saved ref that belongs to one program."""
    lead = [BlockDim(1, "squeezed")] * len(ids)
    rest = [BlockDim(n) for n in value.tile.shape]
    zeros = [b.index(0) for _ in rest]
    window = Window((*lead, *rest), mode)
    return b.op("block_view", ref, *ids, *zeros, window=window)
