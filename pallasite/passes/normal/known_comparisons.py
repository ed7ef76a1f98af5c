"""known_comparisons: folds integer comparisons that value ranges decide.

`pl.when(j >= 0)`, or `pl.when(4 * step + 1 == 0)` in a step that was merged from
several, is decided by the ranges of grid indices: the comparison becomes a constant,
and `canonicalize` removes the branch.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op
from pallasite.passes.analysis.outcomes import known_outcome
from pallasite.passes.facts_walk import FactsWalk


def known_comparisons(kernel: Kernel) -> Kernel:
    """Replace comparisons that are always true or always false."""
    body = _Walk().block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


class _Walk(FactsWalk):
    def rewritten(self, op: Op) -> Sequence[Op]:
        outcome = known_outcome(op, self.facts)
        if outcome is None:
            return (op,)
        b = Builder(op.loc)
        b.like(outcome, op.result)
        (constant,) = b.ops
        return (constant.with_(results=op.results),)
