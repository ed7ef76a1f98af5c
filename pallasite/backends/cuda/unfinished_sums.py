"""Deferred cross-thread reductions: which tiles may hold partial sums.

Summing a row over the threads that share it takes a few shuffles. A loop that only adds
up such sums, and scales them by numbers on which these threads agree, can carry each
thread's partial sum instead, and reduce over the threads once, after the loop.
`partial_sums` finds the tiles for which this holds.
"""

from collections.abc import Mapping

from pallasite.backends.cuda.layouts import WARP, Lane, Spread
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import users_of
from pallasite.ir.roles import Loop


def partial_sums(
    body: Block, spreads: Mapping[Value, Spread]
) -> dict[Value, tuple[Lane, ...]]:
    """The tiles whose elements are still to be summed, and over which lanes."""
    loops = [Loop.of(op) for op in walk(body) if op.name == "for"]
    users = users_of(body)
    refused: set[Value] = set()
    while True:
        found = _spread_out(body, spreads, loops, refused)
        wrong = {v for v in found if not _stays(v, found, users, loops)}
        if not wrong:
            return found
        refused |= wrong


def _spread_out(
    body: Block,
    spreads: Mapping[Value, Spread],
    loops: list[Loop],
    refused: set[Value],
) -> dict[Value, tuple[Lane, ...]]:
    found: dict[Value, tuple[Lane, ...]] = {}
    while True:
        before = len(found)
        for op in walk(body):
            lanes = _lanes(op, spreads, found)
            if lanes and op.result not in refused:
                found.setdefault(op.result, lanes)
        for loop in loops:
            for n, value in enumerate(loop.yields):
                group = (loop.carried[n], loop.results[n])
                if value in found and not refused & set(group):
                    for each in group:
                        found.setdefault(each, found[value])
        if len(found) == before:
            return found


def _lanes(
    op: Op, spreads: Mapping[Value, Spread], found: Mapping[Value, tuple[Lane, ...]]
) -> tuple[Lane, ...]:
    if len(op.results) != 1 or op.result not in spreads:
        return ()
    if op.name == "reduce":
        return _reduced(op, spreads)
    parts = [found[v] for v in op.operands if v in found]
    if op.name == "broadcast_in_dim" or op.name == "reshape":
        same_size = op.operands[0].type.size == op.result.type.size
        return parts[0] if parts and same_size else ()
    if op.name == "add" and parts:
        return parts[0] if len(set(parts)) == 1 else ()
    return parts[0] if op.name == "mul" and len(parts) == 1 else ()


def _reduced(op: Op, spreads: Mapping[Value, Spread]) -> tuple[Lane, ...]:
    """The lanes of a warp over which a sum of 32-bit floats is still to be reduced."""
    x = op.operands[0]
    if op.attrs["kind"] != "sum" or x.tile.dtype.name != "f32" or x not in spreads:
        return ()
    if spreads[x].without(op.attrs["axes"]) != spreads[op.result]:
        return ()
    lanes = [p for p in spreads[x].lanes if p.dim in op.attrs["axes"] and p.count > 1]
    plain = all(p.unit * p.count <= WARP and not p.count & (p.count - 1) for p in lanes)
    return tuple(lanes) if plain else ()


def _stays(
    value: Value,
    found: Mapping[Value, tuple[Lane, ...]],
    users: Mapping[Value, list[Op]],
    loops: list[Loop],
) -> bool:
    """Whether being partial pays off: a loop carries it, or a sum it is added to."""
    for loop in loops:
        if value in loop.carried:
            inside = [u for u in users.get(value, ()) if u is not loop.op]
            return all(u.results and u.results[0] in found for u in inside)
        if value in loop.results:
            return loop.carried[loop.results.index(value)] in found
    return any(
        (u.name == "for" and _is_carried(value, u, found))
        or (u.name != "for" and len(u.results) == 1 and u.results[0] in found)
        for u in users.get(value, ())
    )


def _is_carried(value: Value, op: Op, found: Mapping[Value, tuple[Lane, ...]]) -> bool:
    loop = Loop.of(op)
    given = [*zip(loop.carried, loop.inits, strict=True)]
    given += zip(loop.carried, loop.yields, strict=True)
    return any(v is value and param in found for param, v in given)
