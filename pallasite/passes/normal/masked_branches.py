"""masked_branches: a mask in one of two branches that are the same otherwise.

In: `lax.cond(crosses, lambda: jnp.where(mask, s, fill), lambda: s)`, as authors skip a
mask for blocks that need none. Out: the masked branch, always. Backends for which a
mask is expensive branch themselves, or split the loop (`optimise/unmasked_steps.py`).

Proof: where the other branch runs, each mask lets every element through, and without it
both compute the same; at which steps that is, is enumerated (`masked_code.py`). The
branches write nothing.
"""

from collections.abc import Sequence

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import inline, substitute, writes
from pallasite.ir.roles import Cond, Loop, Pipeline
from pallasite.passes.analysis.step_table import MOST_ENTRIES, StepTable
from pallasite.passes.facts_walk import FactsWalk
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.masked_code import is_same


def masked_branches(kernel: Kernel) -> Kernel:
    """Always mask where a branch only leaves out a mask that lets all through."""
    if not any(map(_is_candidate, walk(kernel.body))):
        return kernel
    body = _Walk(kernel).block(kernel.body)
    return kernel if body is kernel.body else canonicalize(kernel.with_(body=body))


def _is_candidate(op: Op) -> bool:
    """Whether an op is a branch that computes tiles, of which one has a mask."""
    if op.name != "cond" or len(op.regions) != 2 or not op.results:
        return False
    inner = [each for region in op.regions for each in walk(region)]
    return any(each.name == "select_n" for each in inner) and not any(
        map(writes, inner)
    )


class _Walk(FactsWalk):
    def __init__(self, kernel: Kernel):
        super().__init__()
        self.kernel = kernel
        self.axes: list[tuple[Value, int | None]] = []  # of the grid and loops around

    def regions(self, op: Op) -> Sequence[Block]:
        axes = list[tuple[Value, int | None]]()
        if op.name == "pipeline":
            whole = Pipeline.of(op)
            axes = list(zip(whole.ids, whole.grid, strict=True))
        elif op.name == "for" and self.facts.of(Loop.of(op).index).low >= 0:
            index = Loop.of(op).index
            axes = [(index, self.facts.of(index).high + 1)]
        self.axes += axes
        found = super().regions(op)
        del self.axes[len(self.axes) - len(axes) :]
        return found

    def block(self, block: Block) -> Block:
        block = super().block(block)
        b, replaced = Builder(), dict[Value, Value]()
        for op in block.ops:
            masked = self.masked(op) if _is_candidate(op) else None
            if masked is None:
                b.ops.append(op)
            else:
                replaced |= zip(op.results, inline(b, masked, ()), strict=True)
        if not replaced:
            return block
        return substitute(Block(block.params, tuple(b.ops), block.yields), replaced)

    def masked(self, op: Op) -> Block | None:
        """The branch that computes what both do."""
        branches = Cond.of(op).branches
        ids, sizes = zip(*self.axes, strict=True) if self.axes else ((), ())
        sizes = [n if n and n <= MOST_ENTRIES else None for n in sizes]
        for plain, masked in (branches, branches[::-1]):
            table = StepTable(ids, sizes)
            table.add_ops(self.kernel.body.ops)
            which = table.of(op.operands[0])
            if which is None:
                return None
            inside = np.clip(which, 0, 1) == branches.index(plain)
            code = (self.kernel, self.facts, self.producers, plain, masked)
            if is_same(*code, (), table, inside):
                return masked
        return None
