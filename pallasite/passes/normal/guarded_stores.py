"""guarded_stores: what all elements of a store's mask have in common is a guard.

In: a store with a mask of which a part is one number for all elements, such as
`(columns < n) & (row < rows)`. Out: a branch that stores with the rest of the mask, and
that has all that is computed and loaded for the store alone, as an author writes it
with `pl.when`. Analyses of steps know such branches; `program_order.py` leaves out
programs that they skip.

Proof: where the number is false, the mask lets no element through; where it is true, it
leaves no element out, there and in what is computed for the store. Loads stay behind
the stores before them.

Kernel in, Kernel out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import (
    dead_code,
    producers_of,
    substitute,
    used_values,
    with_regions,
    writes,
)
from pallasite.ir.types import BOOL, I32, TileType
from pallasite.passes.normal.canonicalize import canonicalize

Parts = tuple[tuple[Value, ...], tuple[Value, ...]]


def guarded_stores(kernel: Kernel) -> Kernel:
    """The kernel with branches around stores whose masks have a common part."""
    stores = [op for op in walk(kernel.body) if op.name == "store" and op.attrs["mask"]]
    if kernel.level != TILE or not stores:
        return kernel
    made = producers_of(kernel.body)
    if not any(_parts(Access.of(op).mask, made)[0] for op in stores):
        return kernel
    body = _guarded(kernel.body, made)
    return canonicalize(dead_code(kernel.with_(body=body)))


def _guarded(block: Block, made: Mapping[Value, Op]) -> Block:
    ops = [
        with_regions(op, [_guarded(r, made) for r in op.regions]) for op in block.ops
    ]
    done = list[Op]()
    for n, op in enumerate(ops):
        common, rest = _parts_of(op, made)
        if not common:
            done.append(op)
            continue
        later = used_values(Block((), tuple(ops[n + 1 :]), block.yields))
        own = _only_for(op, done, {*later})
        done = [each for each in done if each not in own]
        done += _branch(op, common, rest, own)
    return replace(block, ops=tuple(done))


def _parts_of(op: Op, made: Mapping[Value, Op]) -> Parts:
    is_masked = op.name == "store" and op.attrs["mask"]
    return _parts(Access.of(op).mask, made) if is_masked else ((), ())


def _parts(mask: Value | None, made: Mapping[Value, Op]) -> Parts:
    """The parts of a mask that are one number, and those that are not."""
    assert mask is not None
    op = made.get(mask)
    if op is not None and op.name == "and":
        (p, q), (r, s) = (_parts(each, made) for each in op.operands)
        return p + r, q + s
    is_one = op is not None and op.name == "broadcast_in_dim"
    if op is not None and is_one and not op.operands[0].tile.shape:
        return (op.operands[0],), ()
    return (), (mask,)


def _only_for(store: Op, before: Sequence[Op], later: set[Value]) -> list[Op]:
    """What is computed and loaded for a store alone, right before it."""
    needed, own, is_next = {*store.operands}, list[Op](), True
    for op in reversed(before):
        writing = writes(op)
        is_next = is_next and not writing
        used = used_values(Block((), (op,)))
        is_own = bool(needed.intersection(op.results)) and not later & {*op.results}
        if is_own and not writing and (is_next or not _reads(op)):
            own.append(op)
            needed |= {*used}
        else:
            later |= {*used}
    return own[::-1]


def _reads(op: Op) -> bool:
    return any(v.is_ref for v in used_values(Block((), (op,))))


def _branch(
    op: Op, common: Sequence[Value], rest: Sequence[Value], own: Sequence[Op]
) -> list[Op]:
    b, inner = Builder(op.loc), Builder(op.loc)
    outside = _needed(common, own)
    b.ops += outside
    guard = common[0]
    for each in common[1:]:
        guard = b.op("and", guard, each)
    inner.ops += [each for each in own if each not in outside]
    access = Access.of(op)
    assert access.mask is not None
    mask = rest[0] if rest else inner.constant(True, access.mask.tile)
    for each in rest[1:]:
        mask = inner.op("and", mask, each)
    inner.ops.append(op.with_(operands=access_operands(replace(access, mask=mask))))
    true = Builder(op.loc)
    always = true.constant(True, TileType((), BOOL))
    code = substitute(inner.block(), dict.fromkeys(common, always))
    code = replace(code, ops=(*true.ops, *code.ops))
    b.emit("cond", b.cast(guard, I32), regions=(Block(), code))
    return b.ops


def _needed(values: Sequence[Value], ops: Sequence[Op]) -> list[Op]:
    """Those of the ops that compute some values."""
    wanted, found = {*values}, list[Op]()
    for op in reversed(ops):
        if wanted.intersection(op.results):
            wanted |= {*used_values(Block((), (op,)))}
            found.append(op)
    return found[::-1]
