"""known_comparisons: folds integer comparisons that value ranges decide.

`pl.when(j >= 0)`, or `pl.when(4 * step + 1 == 0)` in a step that was merged from
several, is decided by the ranges of grid indices: the comparison becomes a constant,
and `canonicalize` removes the branch. So is `j * 128 + jnp.arange(128) < n` where the
last part ends inside. An access whose mask is always true has none; unless its start
might be out of range, since the start of an unmasked access is clamped.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import Access, Gather, Kernel, Op, Value
from pallasite.ir.opdef import table
from pallasite.passes.analysis.outcomes import known_outcome
from pallasite.passes.facts_walk import FactsWalk
from pallasite.passes.normal.canonicalize import canonicalize


def known_comparisons(kernel: Kernel) -> Kernel:
    """Replace comparisons that are always true or always false."""
    body = _Walk().block(kernel.body)
    return kernel if body is kernel.body else canonicalize(kernel.with_(body=body))


class _Walk(FactsWalk):
    def rewritten(self, op: Op) -> Sequence[Op]:
        if op.attrs.get("mask") and table()[op.name].indexed:
            return (self._unmasked(op),)
        outcome = known_outcome(op, self.facts)
        if outcome is None:
            return (op,)
        b = Builder(op.loc)
        b.like(outcome, op.result)
        (constant,) = b.ops
        return (constant.with_(results=op.results),)

    def _unmasked(self, op: Op) -> Op:
        access = Access.of(op)
        if access.mask is None or not self._is_true(access.mask):
            return op
        for (entry, start), n in zip(
            access.split_index(), access.ref.ref.shape, strict=True
        ):
            last = n - getattr(entry, "extent", 1)
            inside = start is None or self.facts.of(start).within(0, last)
            if not inside and not isinstance(entry, Gather):
                return op
        attrs = {**op.attrs, "mask": False}
        attrs |= {"other": False} if "other" in attrs else {}
        bare = replace(access, mask=None, other=None)
        return op.with_(operands=access_operands(bare), attrs=attrs)

    def _is_true(self, mask: Value) -> bool:
        op = self.producers.get(mask)
        if op is not None and op.name == "broadcast_in_dim":
            return self._is_true(op.operands[0])
        if op is not None and op.name == "and":
            return all(map(self._is_true, op.operands))
        return op is not None and op.name == "constant" and bool(op.attrs["value"])
