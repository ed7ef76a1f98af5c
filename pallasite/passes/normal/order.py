"""order: constants, iotas and loads stand right before their first use.

Constants and iotas may stand anywhere before it, and a load may be later than it was
written if nothing in between writes memory. Where an author, JAX or another pass put
them is then no longer visible. Other ops stay in the author's order.
"""

from collections.abc import Sequence
from operator import is_

from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import used_values, with_regions, writes


def order(kernel: Kernel) -> Kernel:
    """Move constants, iotas and loads within their blocks."""
    if kernel.level != TILE:
        return kernel
    body = _ordered(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


def _ordered(block: Block) -> Block:
    waiting: dict[Value, Op] = {}
    ops: list[Op] = []

    def place(values: Sequence[Value]) -> None:
        for value in values:
            op = waiting.pop(value, None)
            if op is not None:
                place(op.operands)
                ops.append(op)

    for op in block.ops:
        if op.name in ("constant", "iota", "load"):
            waiting[op.result] = op
            continue
        if writes(op):
            place([v for v, made in waiting.items() if made.name == "load"])
        place([*op.operands, *(v for r in op.regions for v in used_values(r))])
        ops.append(with_regions(op, [_ordered(region) for region in op.regions]))
    place([*block.yields, *waiting])
    if len(ops) == len(block.ops) and all(map(is_, ops, block.ops)):
        return block
    return Block(block.params, tuple(ops), block.yields)
