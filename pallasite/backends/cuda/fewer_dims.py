"""fewer_dims: arrays of many dimensions are seen with fewer, because TMA copies five.

In: a kernel after `promote`, in which blocks of an array have one element along its
first dimensions (batches of a `vmap` of a `vmap`). Out: the same kernel on the array
with those dimensions merged, two at a time, until five are left; the index of a block
along both is `first * size + second`. An array is contiguous, so its memory is the
same either way.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops, substitute, users_of
from pallasite.ir.types import RefType

MOST_DIMS = 5


def fewer_dims(kernel: Kernel) -> Kernel:
    """Merge the first dimensions of arrays that have more than five."""
    users, new = users_of(kernel.body), dict[Value, Value]()
    for param in kernel.params:
        ref = param.type
        if not isinstance(ref, RefType) or ref.rank <= MOST_DIMS:
            continue
        merged = 1 + ref.rank - MOST_DIMS
        if all(_is_one_along(op, merged) for op in users[param]):
            shape = (prod(ref.shape[:merged]), *ref.shape[merged:])
            new[param] = Value(ref.with_shape(shape), param.name)
    if not new:
        return kernel
    merge = _Merge({v: old.ref for old, v in new.items()})
    params = tuple(new.get(v, v) for v in kernel.params)
    body = substitute(kernel.body, new)
    return map_ops(kernel.with_(params=params, body=body), merge.rewrite)


def _is_one_along(op: Op, dims: int) -> bool:
    """Whether an op shows one element along the first dimensions of an array."""
    if op.name != "block_view":
        return False
    return all(d.kind == "squeezed" for d in op.attrs["window"].dims[:dims])


class _Merge:
    """Rewrites the views of arrays whose first dimensions are merged."""

    def __init__(self, before: dict[Value, RefType]):
        self.before = before

    def rewrite(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "block_view" or op.operands[0] not in self.before:
            return None
        ref, *indices = op.operands
        shape = self.before[ref].shape
        merged = 1 + len(shape) - ref.ref.rank
        number = indices[0]
        for index, n in zip(indices[1:merged], shape[1:merged], strict=True):
            number = b.add(b.mul(number, b.index(n)), index) if n > 1 else number
        window = op.attrs["window"]
        window = replace(window, dims=window.dims[merged - 1 :])
        attrs = {**op.attrs, "window": window}
        return (b.op("block_view", ref, number, *indices[merged:], **attrs),)
