"""Lets each iteration add to memory what a loop would carry as a sum.

The reverse of a loop accumulates the cotangent of what its iterations capture and
passes on the sum: scaled or cast, it is added to a cotangent in memory after the loop.
As all of that is linear, every iteration may add its share there itself. Then the loop
carries nothing, and its iterations can be grid steps (`backward_stages.py`). Where a
branch gives the share, or zero, only that branch adds.
"""

from collections.abc import Sequence

from pallasite.autodiff.op_derivative import is_pure
from pallasite.ir.nodes import Access, Block, Op, Value, walk
from pallasite.ir.rewrite import clone, substitute, users_of
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.memory import VIEWS

# Ops that are linear in their first operand, and those linear in either.
FIRST = ("cast", "neg", "transpose", "reshape", "broadcast_in_dim", "div")
EITHER = ("mul",)


def sink_sums(body: Block, op: Op) -> tuple[Block, Op] | None:
    """The loop without results, in its program; None if a result is more than a sum.

    Args:
        body: the code of a program.
        op: a `for` among its ops.
    """
    loop = Loop.of(op)
    shares = _shares(body, loop)
    after = body.ops[body.ops.index(op) + 1 :]
    zeros = {o.result for o in body.ops if _is_zero(o)}
    chain = _chain(after, loop.results, zeros) if shares is not None else None
    if shares is None or chain is None:
        return None
    needed = _needed(after, chain)
    if not all(is_pure(o) or o.name in VIEWS for o in needed):
        return None
    sunk = clone(Block((), tuple(chain)), dict(zip(loop.results, shares, strict=True)))
    early = [o for o in after if o in needed]
    region = Block((loop.index,), _added(loop, sunk, zeros))
    new = loop.with_(inits=(), results=(), body=region).to_op()
    moved = {*chain, *early, op}
    ops: list[Op] = []
    for old in body.ops:
        if old is op:
            ops += [*early, new]
        elif old not in moved:
            ops.append(old)
    return Block(body.params, tuple(ops), body.yields), new


def _added(loop: Loop, sunk: Block, zeros: set[Value]) -> tuple[Op, ...]:
    """The code of an iteration that adds its share; in a branch, if that gives it."""
    ops = loop.body.ops
    users = users_of(Block((), (*ops, *sunk.ops)))
    zeros = zeros | {op.result for op in ops if _is_zero(op)}
    totals = {op for op in ops if set(op.results) & {*loop.yields}}
    used = {v for op in sunk.ops for v in op.operands}
    for n, op in enumerate(ops):
        if op.name != "cond" or len(op.regions) != 2 or used.isdisjoint(op.results):
            continue
        later = {v for each in ops[n + 1 :] for v in each.results}
        adds = {*sunk.ops, *totals}
        if used & later or not all(adds.issuperset(users[v]) for v in op.results):
            continue
        for idle, active in (op.regions, op.regions[::-1]):
            if not idle.ops and zeros.issuperset(idle.yields):
                share = dict(zip(op.results, active.yields, strict=True))
                inner = (*active.ops, *substitute(sunk, share).ops)
                taken = Block((), inner)
                regions = [Block() if r is idle else taken for r in op.regions]
                new = op.with_(results=(), regions=tuple(regions))
                rest = (o for o in ops[n + 1 :] if o not in totals)
                return (*ops[:n], new, *rest)
    return (*ops, *sunk.ops)


def _shares(body: Block, loop: Loop) -> list[Value] | None:
    """What each iteration adds, if all carried values are sums from zero."""
    made = {v: op for op in loop.body.ops for v in op.results}
    users = users_of(loop.body)
    outside = {v: op for op in body.ops for v in op.results}
    shares: list[Value] = []
    for carry, init, total in zip(loop.carried, loop.inits, loop.yields, strict=True):
        add, start = made.get(total), outside.get(init)
        if add is None or add.name != "add" or carry not in add.operands:
            return None
        if len(users[carry]) != 1 or users.get(total):
            return None
        if start is None or not _is_zero(start):
            return None
        x, y = add.operands
        shares.append(y if x is carry else x)
    return shares


def _chain(
    after: Sequence[Op], results: Sequence[Value], zeros: set[Value]
) -> list[Op] | None:
    """The ops that pass on the sums; None if one of them is not linear."""
    sums, found = set(results), list[Op]()
    for op in after:
        if not any(v in sums for inner in walk(Block((), (op,))) for v in _used(inner)):
            continue
        if op.name == "atomic_rmw":
            access = Access.of(op)
            others = [v for v in op.operands if v is not access.value]
            if op.attrs["kind"] != "add" or any(v in sums for v in others):
                return None
        elif not _is_linear(op, sums, zeros):
            return None
        else:
            sums.update(op.results)
        found.append(op)
    return found


def _used(op: Op) -> list[Value]:
    return [*op.operands, *(v for region in op.regions for v in region.yields)]


def _is_zero(op: Op) -> bool:
    return op.name == "constant" and op.attrs["value"] == 0


def _is_linear(op: Op, sums: set[Value], zeros: set[Value]) -> bool:
    places = [n for n, v in enumerate(op.operands) if v in sums]
    if op.name == "select_n":  # a mask: past an edge, cotangents are zero
        pred, *cases = op.operands
        return pred not in sums and all(v in sums or v in zeros for v in cases)
    if op.name in FIRST:
        return places == [0]
    if op.name == "reduce":
        return op.attrs["kind"] == "sum"
    if op.name == "add":
        return len(places) == 2
    return op.name in EITHER and len(places) == 1


def _needed(after: Sequence[Op], chain: Sequence[Op]) -> list[Op]:
    """What the chain uses that comes after the loop, without the chain itself."""
    made = {v: op for op in after for v in op.results}
    mine, found = set(chain), list[Op]()
    pending = [v for op in chain for v in op.operands]
    while pending:
        op = made.get(pending.pop())
        if op is not None and op not in mine and op not in found:
            found.append(op)
            pending += op.operands
    return found
