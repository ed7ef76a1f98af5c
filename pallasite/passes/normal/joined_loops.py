"""joined_loops: two loops over adjoining ranges become one.

In: a loop that goes on with what another one carried, from the iteration at which that
ended: first the blocks of keys that need no mask, then those that do. Out: one loop
over both ranges.

Proof: the iterations are the same ones in the same order, if the ranges follow each
other at every step of the grid; this is enumerated. Each computes what it did: the code
of one loop is, in the range of the other, that of the other, once each mask through
which every element passes there is removed (`masked_code.py`). Backends for which a
mask is expensive split the range again (`optimise/unmasked_steps.py`).
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from pallasite.ir.nodes import Block, Kernel, Value, walk
from pallasite.ir.rewrite import users_of, writes
from pallasite.ir.roles import Loop, Pipeline, number_of
from pallasite.passes.analysis.step_table import MOST_ENTRIES, StepTable
from pallasite.passes.facts_walk import FactsWalk
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.masked_code import is_same


def joined_loops(kernel: Kernel) -> Kernel:
    """The kernel with each pair of loops over adjoining ranges as one loop."""
    loops = [op for op in walk(kernel.body) if op.name == "for"]
    grids = [op for op in walk(kernel.body) if op.name == "pipeline"]
    if len(loops) < 2 or len(grids) > 1:
        return kernel
    body = _Walk(kernel, Pipeline.of(grids[0]) if grids else None).block(kernel.body)
    return kernel if body is kernel.body else canonicalize(kernel.with_(body=body))


class _Walk(FactsWalk):
    def __init__(self, kernel: Kernel, whole: Pipeline | None):
        super().__init__()
        self.kernel = kernel
        self.ids = whole.ids if whole is not None else ()
        self.grid = whole.grid if whole is not None else ()
        self.users = users_of(kernel.body)

    def block(self, block: Block) -> Block:
        block = super().block(block)
        while (joined := self.joined(block)) is not None:
            block = joined
        return block

    def joined(self, block: Block) -> Block | None:
        """The block with one loop fewer; None: no two of its loops are one."""
        at = [n for n, op in enumerate(block.ops) if op.name == "for"]
        for before, after in pairwise(at):
            first, second = (Loop.of(block.ops[n]) for n in (before, after))
            if any(map(writes, block.ops[before : after + 1])):
                continue
            body = (
                self.code(first, second) if self.goes_on(first, second, block) else None
            )
            if body is None:
                continue
            whole = second.with_(first=first.first, inits=first.inits, body=body)
            between = block.ops[before + 1 : after]
            ops = (*block.ops[:before], *between, whole.to_op())
            return replace(block, ops=(*ops, *block.ops[after + 1 :]))
        return None

    def goes_on(self, first: Loop, second: Loop, block: Block) -> bool:
        """Whether a loop carries on what another does, which nothing else uses."""
        made = set(first.results)
        if not made or first.results != second.inits:
            return False
        if made.intersection((*second.bounds, *second.yields, *block.yields)):
            return False
        users = (op for v in made for op in self.users.get(v, ()))
        return all(op.results == second.results for op in users)

    def code(self, first: Loop, second: Loop) -> Block | None:
        """What both compute; None: it differs, or there is a gap between them."""
        steps = [number_of(self.producers, each.step) for each in (first, second)]
        if steps != [1, 1]:
            return None
        table = StepTable(self.ids, self.grid)
        table.add_ops(self.kernel.body.ops)
        bounds = [*first.bounds[:2], *second.bounds[:2]]
        found = [t.astype(np.int64) for v in bounds if (t := table.of(v)) is not None]
        if len(found) < len(bounds):
            return None
        start, middle, again, end = found
        follows = (start <= middle) & (middle == again) & (middle <= end) & (start >= 0)
        if not follows.all() or not 0 < end.max() <= MOST_ENTRIES:
            return None
        if self.is_same(first, second, (start, middle)):
            return second.body
        return first.body if self.is_same(second, first, (middle, end)) else None

    def is_same(
        self, plain: Loop, masked: Loop, span: tuple[np.ndarray, np.ndarray]
    ) -> bool:
        """Whether both compute the same in the range of one of them."""
        low, high = (np.expand_dims(each, -1) for each in span)
        most = max(int(high.max()), 1)
        params = [Value(p.type) for p in masked.body.params]
        self.facts.note_grid(params[:1], (most,))
        table = StepTable((*self.ids, params[0]), (*self.grid, most))
        table.add_ops(self.kernel.body.ops)
        numbers = table.known[params[0]]
        inside = (low <= numbers) & (numbers < high)
        code = (self.kernel, self.facts, self.producers, plain.body, masked.body)
        return is_same(*code, params, table, inside)
