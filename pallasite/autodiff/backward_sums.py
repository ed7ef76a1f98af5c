"""Lowers sums of cotangents to plain ops: a block is zeroed at its first step, then
added to in place; with only one step and addends to disjoint parts, be they those of
the iterations of a loop, these are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite.autodiff.joined_addends import joined_addends, step_part
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Gather, Op, Value, walk
from pallasite.passes.analysis.boxes import disjoint, elements
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots


@dataclass(frozen=True)
class Sum:
    """A block with addends; it stays the same along the `inner` grid indices."""

    block: Value
    inner: Sequence[Value]


def expand_sums(body: Block, sums: Sequence[Sum]) -> Block:
    """The body with `atomic_rmw` add, as `reverse.py` emits it, in plain ops."""
    start = Builder()
    replaced: set[Op] = set()
    for each in sums:
        addends = _addends(body, each.block)
        if not addends:
            continue
        if len(addends) > 1 and (not each.inner or set(addends) <= set(body.ops)):
            body = joined_addends(body, each.block, addends)
            addends = _addends(body, each.block)
        first = addends[0]
        if not each.inner and _replaces(first, each.block) and first in body.ops:
            replaced.add(first)
        elif not each.inner and (
            _are_parts(addends, each.block, body)
            or _steps_through(addends, each.block, body)
        ):
            replaced.update(addends)
        else:
            _set_zero(start, each)
    used = {v for op in walk(body) for v in op.operands}
    expanded = _Expansion(replaced, used).block(body)
    return Block((), (*start.ops, *expanded.ops))


def _addends(body: Block, block: Value) -> list[Op]:
    """The ops that add to a block or to a view of it, in order."""
    roots = Roots(body)
    return [
        op
        for op in walk(body)
        if op.name == "atomic_rmw" and block in roots.reached(op.operands[:1])
    ]


def _are_parts(addends: Sequence[Op], block: Value, body: Block) -> bool:
    """Whether addends cover every element of the block, and are disjoint."""
    if any(op.operands[0] is not block or op not in body.ops for op in addends):
        return False
    return disjoint(addends) and sum(map(elements, addends)) == block.ref.size


def _steps_through(addends: Sequence[Op], block: Value, body: Block) -> bool:
    """Whether iterations of a loop have one part each, which together are the block."""
    (op, *more) = addends
    return not more and step_part(op, block, body) is not None


def _replaces(op: Op, block: Value) -> bool:
    """Whether an addend covers every element of the block, and so may be stored."""
    if op.operands[0] is not block or op.attrs["mask"]:
        return False
    return covers_whole(block.ref.shape, op.attrs["index"])


def _set_zero(b: Builder, each: Sum) -> None:
    inside = Builder()
    inside.store(each.block, inside.constant(0, each.block.ref.tile))
    if not each.inner:
        b.ops += inside.ops
        return
    zero = b.index(0)
    is_first = [b.op("eq", index, zero) for index in each.inner]
    test = is_first[0]
    for more in is_first[1:]:
        test = b.op("and", test, more)
    b.emit("cond", b.cast(test, zero.tile.dtype), regions=(Block(), inside.block()))


class _Expansion:
    def __init__(self, replaced: set[Op], used: set[Value]):
        self.replaced, self.used = replaced, used

    def block(self, block: Block) -> Block:
        b = Builder()
        for op in block.ops:
            b.loc = op.loc
            if op.name == "atomic_rmw" and self.is_addend(op):
                self.add(b, op)
                continue
            if op.regions:
                op = op.with_(regions=tuple(map(self.block, op.regions)))
            b.ops.append(op)
        return Block(block.params, tuple(b.ops), block.yields)

    def is_addend(self, op: Op) -> bool:
        """Not the program's own atomics, nor those that may hit a place twice."""
        is_sum = op.attrs["kind"] == "add" and op.result not in self.used
        return is_sum and not any(isinstance(e, Gather) for e in op.attrs["index"])

    def add(self, b: Builder, op: Op) -> None:
        access = Access.of(op)
        value = access.value
        assert value is not None
        place = (access.index, access.index_operands, access.mask)
        if op not in self.replaced:
            other = None if access.mask is None else b.like(0, value)
            old = replace(access, value=None, other=other)
            loaded = b.load(old.ref, *place, other)
            value = b.add(loaded, value)
        b.store(access.ref, value, *place)
