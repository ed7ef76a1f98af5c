"""A rewriting walk in program order that tracks facts about a kernel's integers.

Base class for passes that ask about the ranges of grid indices and loop counters: each
says what replaces an op once its regions are rewritten.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.rewrite import with_ops, with_regions
from pallasite.passes.analysis.intervals import Facts


class FactsWalk:
    """`facts` and `producers` cover everything before the current point."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.producers: dict[Value, Op] = {}

    def block(self, block: Block) -> Block:
        """The rewritten block; the very same object if nothing changed."""
        return with_ops(block, [new for op in block.ops for new in self._op(op)])

    def _op(self, op: Op) -> Sequence[Op]:
        self.facts.note_regions(op)
        new = self.rewritten(with_regions(op, self.regions(op)))
        for each in new:
            self.facts.note_op(each)
            self.producers.update(dict.fromkeys(each.results, each))
        return new

    def regions(self, op: Op) -> Sequence[Block]:
        """The regions of an op, rewritten."""
        return [self.block(region) for region in op.regions]

    def rewritten(self, op: Op) -> Sequence[Op]:
        """What replaces an op whose regions are already rewritten."""
        return (op,)
