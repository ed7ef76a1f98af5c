"""scratch_parts: scratch that is only used in disjoint parts is a scratch per part.

In: one scratch for several states, such as the maxima and sums of rows in `stats[0]`
and `stats[1]`, or the sums of two heads in the halves of `acc`. Out: a scratch for
each, as other authors write it. What all of it is overwritten with is stored in slices.

Proof: every load is of one part, and every store of one part or of all of them, at
indices that are constant along a dimension; the parts do not overlap. So what a load
gives depends on the stores to its own part only, in the order in which they were. What
no load reads is not kept.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pallasite.ir.nodes import Access, At, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, users_of

MOST_PARTS = 16  # a store to all of them becomes as many

Part = tuple[int, int]  # first element and end


def scratch_parts(kernel: Kernel) -> Kernel:
    """Split scratch along one dimension after another."""
    if kernel.level != TILE:
        return kernel  # its author decided what is where
    while True:
        split = _found(kernel)
        if not split:
            return kernel
        kernel = dead_code(map_ops(kernel, _Split(split).rewritten))


class _Parts(NamedTuple):
    dim: int
    parts: tuple[Part, ...]  # that are loaded


def _found(kernel: Kernel) -> dict[Value, _Parts]:
    """How scratch is split, by its ref."""
    found: dict[Value, _Parts] = {}
    users = users_of(kernel.body)
    for op in walk(kernel.body):
        if op.name == "alloc" and not op.result.ref.is_semaphore:
            ref = op.result
            plans = (_along(ref, users.get(ref, ()), d) for d in range(ref.ref.rank))
            plan = next(filter(None, plans), None)
            if plan is not None:
                found[ref] = plan
    return found


def _along(ref: Value, uses: Sequence[Op], dim: int) -> _Parts | None:
    whole = (0, ref.ref.shape[dim])
    loaded, stored = set[Part](), set[Part]()
    for op in uses:
        part = _part_of(op, ref, dim)
        if part is None or (part == whole and not _is_sliceable(op)):
            return None
        (loaded if op.name == "load" else stored).add(part)
    parts = sorted(loaded | stored - {whole})
    apart = all(a[1] <= b[0] for a, b in pairwise(parts))
    if not apart or not 2 <= len(loaded) <= MOST_PARTS:
        return None
    return _Parts(dim, tuple(sorted(loaded)))


def _part_of(op: Op, ref: Value, dim: int) -> Part | None:
    """What a use selects along a dimension, if that is constant."""
    if op.name not in ("load", "store") or op.operands[0] is not ref:
        return None
    entry = op.attrs["index"][dim]
    if isinstance(entry, Gather) or entry.start is None:
        return None
    size = 1 if isinstance(entry, At) else entry.size
    if isinstance(entry, Span) and entry.stride != 1:
        return None
    part = entry.start, entry.start + size
    return part if 0 <= part[0] < part[1] <= ref.ref.shape[dim] else None


def _is_sliceable(op: Op) -> bool:
    """Whether it is a store of a tile that has a dimension for each of the ref's."""
    is_plain = all(isinstance(e, Span) for e in op.attrs["index"])
    return op.name == "store" and is_plain and Access.of(op).mask is None


class _Split:
    def __init__(self, plans: dict[Value, _Parts]):
        self.plans = plans
        self.made: dict[Value, tuple[_Parts, dict[Part, Value]]] = {}

    def rewritten(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name == "alloc" and op.result in self.plans:
            ref, plan = op.result, self.plans[op.result]
            new = {part: _allocated(b, ref, plan.dim, part) for part in plan.parts}
            first = new[plan.parts[0]]
            self.made[first] = plan, new
            return [first]
        if op.name not in ("load", "store") or op.operands[0] not in self.made:
            return None
        plan, new = self.made[op.operands[0]]
        entry = op.attrs["index"][plan.dim]
        start = entry.start
        part = start, start + (1 if isinstance(entry, At) else entry.size)
        inside = [p for p in plan.parts if part[0] <= p[0] and p[1] <= part[1]]
        results: list[Value] = []
        for each in inside:
            index = list(op.attrs["index"])
            size = each[1] - each[0]
            index[plan.dim] = At(0) if isinstance(entry, At) else Span(0, size)
            rest = list(op.operands[1:])
            if op.name == "store" and each != part:
                rest[0] = _slice(b, rest[0], plan.dim, each)
            attrs = {**op.attrs, "index": tuple(index)}
            results += b.emit(op.name, new[each], *rest, **attrs)
        return results


def _allocated(b: Rewriter, ref: Value, dim: int, part: Part) -> Value:
    shape = list(ref.ref.shape)
    shape[dim] = part[1] - part[0]
    return b.op("alloc", type=ref.ref.with_shape(tuple(shape)), names=[ref.name])


def _slice(b: Rewriter, value: Value, dim: int, part: Part) -> Value:
    starts, limits = [0] * value.tile.rank, list(value.tile.shape)
    starts[dim], limits[dim] = part
    ones = (1,) * value.tile.rank
    return b.op(
        "slice", value, starts=tuple(starts), limits=tuple(limits), strides=ones
    )
