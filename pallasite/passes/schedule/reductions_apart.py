"""reductions_apart: what depends on a reduction of whole arrays, as another kernel.

In: a program that reduces a large tile, or multiplies matrices, and goes on with large
tiles that depend on the result: `x * rsqrt(sum(x**2))` of a whole array, or a chain of
products. Out: a kernel of the first such result, and one of the rest, which loads it.
`plan_parts.py` asks for this where a kernel leaves cores idle however its blocks are
divided: each of both may be divided by what it alone computes.

The proof is that of `products_apart.py`, which makes the kernels.
"""

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.passes.schedule.products_apart import Cut, Cuts

REDUCING = {"reduce", "arg_reduce", "dot"}
LARGE = 1 << 16  # elements of a tile
LESS = 8  # times as many elements as the result has
MOVES = {"store", "reshape", "transpose", "broadcast_in_dim"}


def first_reduction(kernel: Kernel) -> Cut | None:
    """The kernel cut at the first result that large tiles depend on; None if none."""
    pipelines = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != TILE or kernel.aliases or len(pipelines) != 1:
        return None
    at = Cuts(kernel)
    if at.found is None or at.found.refused:
        return None
    for op in at.pipeline.body.ops:
        if op.name not in REDUCING or not _is_large(op, LESS * op.result.tile.size):
            continue
        needed = at.needed(op.result)
        if needed is None or not _goes_on(at, op.result, needed):
            continue
        axes = at.axes_of(needed)
        if any(at.pipeline.grid[a] is None for a in axes):
            continue
        place = at.place(op.result, axes)
        return Cut(
            at.first(op.result, needed, axes, place), *at.second(op.result, place)
        )
    return None


def _is_large(op: Op, least: int) -> bool:
    tiles = [v.tile.size for v in op.operands if not v.is_ref]
    return max(tiles, default=0) >= max(LARGE, least)


def _goes_on(at: Cuts, value: Value, needed: list[Op]) -> bool:
    """Whether large tiles are computed from it.

    Stored in another shape it is what the first kernel has, which would be cut again.
    """
    depends = {value}
    for op in at.pipeline.body.ops:
        if op in needed:
            continue
        inside = list(walk(Block((), (op,))))
        if not any(v in depends for each in inside for v in each.operands):
            continue
        results = [v for each in inside for v in each.results if not v.is_ref]
        depends.update(results)
        if op.name in MOVES and all(v.tile.size == value.tile.size for v in results):
            continue
        if any(v.tile.size >= LARGE for v in results) or _is_large(op, LARGE):
            return True
    return False
