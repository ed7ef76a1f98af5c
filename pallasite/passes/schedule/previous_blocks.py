"""previous_blocks: what a step keeps of its operands for the next one is loaded again.

In: scratch that holds a part of the previous step's block, such as the last rows before
a causal convolution: it is set at the first step, loaded, and at the end overwritten by
elements of an operand. Out: a second window on that operand, one step behind, and no
scratch, so that the steps can run at the same time.

Proof: at the first step the load gives what was set there. At others it gives what the
step before stored, because steps of the last axis follow one another and nothing else
writes the scratch; and that is the same function of the operand's block one step
before, as nothing writes the operand. Elements are only moved and converted, so doing
that twice costs little.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import clone, dead_code, inline, substitute, users_of
from pallasite.ir.roles import Cond, Pipeline, Shown
from pallasite.passes.analysis.carried import accesses_all
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import Roots, constant_inputs

MOVES = ("slice", "cast", "reshape", "broadcast_in_dim", "transpose")


@dataclass(frozen=True, eq=False)
class _Kept:
    """Scratch that hands a part of an operand on to the next step.

    Attributes:
        start: the guard of the first step that sets it.
        loads: its loads.
        store: what the next step loads.
        moves: the ops that make that of a load of an operand, that load first.
    """

    start: Op
    loads: tuple[Op, ...]
    store: Op
    moves: tuple[Op, ...]


def previous_blocks(kernel: Kernel) -> Kernel:
    """Windows one step behind instead of scratch that keeps parts of blocks."""
    if kernel.level != "tile" or not any(op.name == "alloc" for op in kernel.body.ops):
        return kernel
    if sum(op.name == "pipeline" for op in walk(kernel.body)) != 1:
        return kernel
    for op in kernel.body.ops:
        found = _Search(kernel).kept(op.result) if op.name == "alloc" else None
        if found is not None:
            return previous_blocks(_Search(kernel).without(found))
    return kernel


class _Search:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.body = self.pipeline.body
        self.made = {v: op for op in self.body.ops for v in op.results}
        self.users = users_of(kernel.body)
        self.roots, self.constant = Roots(kernel), constant_inputs(kernel)
        grid = self.pipeline.grid
        long = [a for a, n in enumerate(grid) if n != 1]
        self.axis = long[-1] if long else None

    # --- what is kept ---

    def kept(self, ref: Value) -> _Kept | None:
        """How scratch is used, if it only keeps a part of an operand."""
        users, ops = self.users[ref], self.body.ops
        if self.axis is None or not users:
            return None
        starts = [op for op in ops if op.name == "cond" and self.starts(op, ref)]
        loads = tuple(op for op in ops if op.name == "load" and op in users)
        stores = [op for op in ops if op.name == "store" and op in users]
        if len(starts) != 1 or len(stores) != 1 or not loads:
            return None
        (start,), (store,) = starts, stores
        if len(users) != 2 + len(loads):
            return None
        if not all(accesses_all(op) for op in (*loads, store)):
            return None
        places = [ops.index(op) for op in (start, *loads, store)]
        if places[0] != min(places) or places[-1] != max(places):
            return None
        moves = tuple(self.moves(store.operands[1]))[::-1]
        if not moves or moves[0].name != "load":
            return None
        return _Kept(start, loads, store, moves)

    def starts(self, op: Op, ref: Value) -> bool:
        """Whether a guard of the first step sets the scratch to a number."""
        if op.results or len(op.regions) != 2 or op.regions[0].ops:
            return False
        *before, last = op.regions[1].ops or (op,)
        plain = last.name == "store" and last.operands[0] is ref and accesses_all(last)
        constants = [b for b in before if b.name == "constant"]
        if not plain or len(constants) != len(before) or len(self.users[ref]) < 2:
            return False
        outside = self.made.get(last.operands[1])
        known = {b.result for b in constants}
        if outside is not None and outside.name == "constant":
            known.add(outside.result)
        return last.operands[1] in known and self.is_first(Cond.of(op).which)

    def is_first(self, value: Value) -> bool:
        op = self.made.get(value)
        if op is not None and op.name == "cast":
            op = self.made.get(op.operands[0])
        if op is None or op.name != "eq" or self.axis is None:
            return False
        numbers = [self.made.get(v) for v in op.operands]
        zero = any(
            n and n.name == "constant" and n.attrs["value"] == 0 for n in numbers
        )
        return zero and self.pipeline.ids[self.axis] in op.operands

    def moves(self, value: Value) -> Iterator[Op]:
        """The ops from a value back to the load of an operand; else nothing at last."""
        while True:
            op = self.made.get(value)
            if op is not None and op.name == "slice":
                op = self.of_piece(op)
            if op is None:
                return
            if op.name == "load":
                access = Access.of(op)
                fixed = not access.index_operands and access.mask is None
                shown = access.ref in self.pipeline.blocks
                if fixed and shown and self.roots.of(access.ref) in self.constant:
                    yield op
                return
            if op.name not in MOVES:
                return
            yield op
            value = op.operands[0]

    def of_piece(self, op: Op) -> Op | None:
        """A slice of a concatenation as one of a piece of it, if it is."""
        joined = self.made.get(op.operands[0])
        if joined is None or joined.name != "concatenate":
            return op
        axis, end = joined.attrs["axis"], 0
        starts, limits = (list(op.attrs[name]) for name in ("starts", "limits"))
        for piece in joined.operands:
            first, end = end, end + piece.tile.shape[axis]
            if first <= starts[axis] and limits[axis] <= end:
                starts[axis] -= first
                limits[axis] -= first
                attrs = {**op.attrs, "starts": tuple(starts), "limits": tuple(limits)}
                return op.with_(operands=(piece,), attrs=attrs)
        return None

    # --- without it ---

    def without(self, kept: _Kept) -> Kernel:
        old = self.pipeline
        block = kept.moves[0].operands[0]
        (shown,) = (each for each in old.shown if each.block is block)
        behind = self.behind(shown)
        b = Builder(kept.store.loc)
        assert self.axis is not None
        test = b.eq(old.ids[self.axis], b.index(0))
        start = clone(kept.start.regions[1], {}).ops
        *constants, first = start
        b.ops += constants
        moved = clone(Block((), kept.moves), {block: behind.block})
        b.ops += moved.ops
        before = b.select(test, first.operands[1], moved.ops[-1].result)
        ops: list[Op] = []
        for op in self.body.ops:
            if op is kept.start:
                ops += b.ops
            elif op in kept.loads:
                continue
            elif op is not kept.store:
                ops.append(op)
        replaced = {load.result: before for load in kept.loads}
        body = substitute(Block((), tuple(ops)), replaced)
        windows = [*old.shown]
        windows.insert(old.shown.index(shown) + 1, behind)
        params = (*old.ids, *(each.block for each in windows))
        op = old.showing(windows, Block(params, body.ops)).to_op()
        scratch = kept.store.operands[0]
        outer = [
            op if each is old.op else each
            for each in self.kernel.body.ops
            if scratch not in each.results
        ]
        new = replace(self.kernel.body, ops=tuple(outer))
        return dead_code(self.kernel.with_(body=new))

    def behind(self, shown: Shown) -> Shown:
        """The window at the step before; at the first step, any."""
        ids = [Value(v.type, v.name) for v in self.pipeline.ids]
        b = Builder(self.pipeline.op.loc)
        assert self.axis is not None
        at = list(ids)
        at[self.axis] = b.max(b.sub(ids[self.axis], b.index(1)), b.index(0))
        index_map = b.block(ids, inline(b, shown.index_map, at))
        block = Value(shown.block.type, f"{shown.block.name or 'block'}_before")
        return shown._replace(index_map=index_map, block=block)
