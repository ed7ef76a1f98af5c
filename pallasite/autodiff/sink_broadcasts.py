"""Repeats broadcasts inside the loops that use them.

The reverse of a loop carries the cotangent of what the loop captures, one addend per
iteration. Of a row that was broadcast before the loop, that would be a tile, summed up
after the loop; if the loop broadcasts, it is a row.
"""

from pallasite.autodiff.reverse_activity import is_float
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import (
    clone,
    producers_of,
    substitute,
    used_values,
    with_regions,
)
from pallasite.ir.roles import Loop


def sink_broadcasts(body: Block) -> Block:
    """The code with broadcast floats that loops capture broadcast in the loops."""
    return _block(body, producers_of(body))


def _block(block: Block, made: dict[Value, Op]) -> Block:
    ops = []
    for op in block.ops:
        op = with_regions(op, [_block(region, made) for region in op.regions])
        ops.append(_sunk(Loop.of(op), made) if op.name == "for" else op)
    return Block(block.params, tuple(ops), block.yields)


def _sunk(loop: Loop, made: dict[Value, Op]) -> Op:
    inside = {v for op in walk(loop.body) for v in op.results}
    used = [v for v in dict.fromkeys(used_values(loop.body)) if v not in inside]
    wide = [made[v] for v in used if v in made and _is_wide(made[v])]
    if not wide:
        return loop.op
    copies = clone(Block((), tuple(wide)))
    pairs = zip(wide, copies.ops, strict=True)
    body = substitute(loop.body, {old.result: new.result for old, new in pairs})
    body = Block(body.params, (*copies.ops, *body.ops), body.yields)
    return loop.with_(body=body).to_op()


def _is_wide(op: Op) -> bool:
    if op.name != "broadcast_in_dim" or not is_float(op.result):
        return False
    return op.operands[0].tile.size < op.result.tile.size
