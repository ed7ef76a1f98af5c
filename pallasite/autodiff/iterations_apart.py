"""Makes what iterations between two offsets add to rows that memory names two steps.

A row of a sparse matrix adds, for each of its entries, to the row of the dense operand
that the entry's column names. How many entries a row has is data, so the loop cannot be
an axis of the grid. But the row that an iteration adds to is a function of its index
alone. So all iterations of one index add to a row of an array between, which
`owned_rows.py` divides among programs, and a second program, with an axis for the rows
of the array, adds these to the rows that memory names (`sorted_steps.py`).

Proof: the index reaches the name only as a place in arrays, which clamp it as the array
between does; addition is taken apart, but in the same order for each row and each name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pallasite.ir import types as T
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Op,
    Value,
    Window,
    full_index,
    walk,
)
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import clone, producers_of, replace_ops
from pallasite.ir.roles import Loop, number_of
from pallasite.passes.analysis.memory import VIEWS
from pallasite.passes.lower.per_program import Program

MOST_BYTES = 1 << 30  # of the array between


def iterations_apart(program: Program) -> tuple[Program, Program, Value] | None:
    """The program that adds to an array between, what adds that up, and the array.

    None if no loop adds to rows that memory names so.
    """
    made = producers_of(program.body)
    for loop in walk(program.body):
        if loop.name != "for" or None not in [
            number_of(made, v) for v in loop.operands[:3]
        ]:
            continue
        for add in Loop.of(loop).body.ops:
            view = made.get(add.operands[0]) if add.name == "atomic_rmw" else None
            if view is None or view.name != "block_view":
                continue
            apart = _Apart(program, Loop.of(loop), add, view, made)
            if apart.is_possible():
                return apart.run()
    return None


class _Apart:
    def __init__(
        self, program: Program, loop: Loop, add: Op, view: Op, made: Mapping[Value, Op]
    ):
        self.program, self.loop, self.add, self.view = program, loop, add, view
        self.made = made
        self.code = list(self.closure(view.operands[1:]))

    def closure(self, values: Iterable[Value]) -> Iterable[Op]:
        """What computes some values, in order."""
        needed, pending = set[Op](), list(values)
        while pending:
            op = self.made.get(pending.pop())
            if op is not None and op not in needed:
                needed.add(op)
                pending += op.operands
        return (op for op in walk(self.program.body) if op in needed)

    def is_possible(self) -> bool:
        access = Access.of(self.add)
        assert access.value is not None
        whole = access.index == full_index(access.ref.ref.shape)
        if self.add.attrs["kind"] != "add" or access.mask is not None or not whole:
            return False
        if self.loop.index.type != T.INDEX or number_of(self.made, self.loop.step) != 1:
            return False
        self.count = self.places()
        row = access.value.tile
        size = (self.count or 0) * row.size * row.dtype.bytes
        return self.count is not None and size <= MOST_BYTES

    def places(self) -> int | None:
        """The size of the arrays that the name is read from, by the index alone."""
        counts, inside = set[int](), {v for op in self.code for v in op.results}
        for op in self.code:
            uses = self.loop.index in op.operands
            if op.name == "load" and not op.result.tile.shape:
                (entry, index), *rest = Access.of(op).split_index() or [(None, None)]
                is_place = isinstance(entry, At) and index is self.loop.index
                if uses and (not is_place or rest or Access.of(op).mask is not None):
                    return None
                if uses:
                    counts.add(op.operands[0].ref.shape[0])
            elif (
                op.regions
                or uses
                or (op.name not in VIEWS and table()[op.name].effect is not Effect.PURE)
            ):
                return None
            free = (v for v in op.operands if v not in inside and not v.is_ref)
            if any(v is not self.loop.index for v in free):
                return None
        return counts.pop() if len(counts) == 1 else None

    def run(self) -> tuple[Program, Program, Value]:
        value = Access.of(self.add).value
        assert value is not None and self.count is not None
        shape, ref = value.tile.shape, self.view.operands[0]
        kind = T.RefType((self.count, *shape), ref.ref.dtype, "any")
        between = Value(kind, f"rows_{ref.name}")
        entries = (At(), *full_index(shape))
        new = Access(between, entries, (self.loop.index,), value)
        attrs = {"kind": "add", "index": entries, "mask": False}
        b = Builder(self.add.loc)
        b.emit("atomic_rmw", *access_operands(new), **attrs)
        added = lambda op: b.ops if op is self.add else None
        body = replace_ops(self.program.body, added)
        first = self.program.with_body(body)
        return first.simplified(), self.second(between, shape), between

    def second(self, between: Value, shape: tuple[int, ...]) -> Program:
        """Adds the rows of the array between to those that memory names."""
        row, b = Value(T.INDEX, "row"), Builder(self.add.loc)
        zeros = [b.index(0) for _ in shape]
        dims = (BlockDim(1, "squeezed"), *map(BlockDim, shape))
        shown = b.op("block_view", between, row, *zeros, window=Window(dims, "in"))
        value = b.load(shown)
        copy = clone(
            Block((), (*self.code, self.view), self.view.results),
            {self.loop.index: row},
        )
        b.ops += copy.ops
        (view,) = copy.yields
        new = Access(view, full_index(shape), (), value)
        b.emit("atomic_rmw", *access_operands(new), **self.add.attrs)
        body = Block((row,), tuple(b.ops))
        return replace(
            self.program, body=body, sizes=(between.ref.shape[0],)
        ).simplified()
