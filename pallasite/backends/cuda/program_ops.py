"""Questions about ops of a program that `products.py` and the roles ask."""

from collections.abc import Iterator, Sequence

from pallasite.ir.nodes import At, Block, Op, Span
from pallasite.ir.opdef import Unit, table


def is_of_rows(op: Op) -> bool:
    """Whether an op merges all dimensions but the last into the rows of a matrix."""
    if op.name != "reshape" or op.operands[0].is_ref:
        return False
    x, y = op.operands[0].tile.shape, op.result.tile.shape
    return len(x) > len(y) == 2 and x[-1] == y[-1]


def is_box(index: Sequence) -> bool:
    if not all(isinstance(e, (At, Span)) for e in index):
        return False
    if any(isinstance(e, Span) and e.stride != 1 for e in index):
        return False
    return isinstance(index[-1], Span)


def homes(block: Block) -> Iterator[tuple[int, Block]]:
    """The block that each op is in, by the op's identity."""
    for op in block.ops:
        yield id(op), block
        for region in op.regions:
            yield from homes(region)


def is_slow(op: Op) -> bool:
    """Whether an op computes a tile of exponentials or the like."""
    is_special = table()[op.name].unit is Unit.SPECIAL
    return is_special and bool(op.result.tile.shape)
