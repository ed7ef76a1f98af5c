"""A kernel that adds up tiles which overlap: the cotangent of blocks with a halo.

Tiles start a fixed step apart along some dimensions. A program has one step of each
of them, and adds up what the tiles around have there: those that start here, and of
earlier ones the part that reaches this far. Nothing is written twice.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Index, Kernel, Span, Value, Window

Steps = tuple[int | None, ...]


@lru_cache(maxsize=64)
def sum_of_overlaps(
    tiles: tuple[int, ...], dtype: str, steps: Steps, shape: tuple[int, ...]
) -> Kernel:
    """The kernel: tiles in, an array out.

    Args:
        tiles: shape of all tiles: their number along each dimension that has a step,
            in order, then the shape of one.
        dtype: of tiles and sums.
        steps: per dimension of the array how far apart tiles start; None: a tile has
            all of it.
        shape: of the array.
    """
    kind = T.DTYPES[dtype]
    values = Value(T.RefType(tiles, kind, "any"), "values")
    sums = Value(T.RefType(shape, kind, "any"), "sums")
    block_shape = tuple(s or n for s, n in zip(steps, shape, strict=True))
    grid = tuple(-(-n // s) for s, n in zip(steps, shape, strict=True) if s)
    ids = [Value(T.INDEX) for _ in grid]
    block = Value(T.RefType(block_shape, kind), "sum")
    b = Builder()
    _add_up(b, values, block, ids, steps)
    window = Window(tuple(map(BlockDim, block_shape)), "out")
    outer = Builder()
    regions = (_index_map(steps), Block((*ids, block), tuple(b.ops)))
    parallel = ("parallel",) * len(grid)
    outer.emit(
        "pipeline",
        sums,
        regions=regions,
        grid=grid,
        windows=(window,),
        semantics=parallel,
    )
    body = Block((), tuple(outer.ops))
    return Kernel("sum_of_overlaps", (values, sums), body, 1)


def _index_map(steps: Steps) -> Block:
    ids = [Value(T.INDEX) for step in steps if step]
    b, pending = Builder(), iter(ids)
    yields = [next(pending) if step else b.index(0) for step in steps]
    return b.block(ids, yields)


def _add_up(
    b: Builder, values: Value, block: Value, ids: Sequence[Value], steps: Steps
) -> None:
    """Store to a block what all tiles that reach it have there."""
    counts = values.ref.shape[: len(ids)]
    tile = values.ref.shape[len(ids) :]
    pieces = [
        range(-(-t // s)) for s, t in zip(steps, tile, strict=True) if s is not None
    ]
    for before in product(*pieces):  # how many steps before this one a tile starts
        number, inside = list[Value](), b.constant(True, T.scalar(T.BOOL))
        for index, count, back in zip(ids, counts, before, strict=True):
            at = b.sub(index, b.index(back)) if back else index
            number.append(at)
            inside = b.and_(inside, b.ge(at, b.index(0)))
            inside = b.and_(inside, b.lt(at, b.index(count)))
        there, here = _spans(block, tile, steps, before)
        found = Builder()
        piece = found.load(values, (*[At()] * len(ids), *there), number)
        without = Builder()
        if any(before):
            piece = found.add(found.load(block, here), piece)
        else:
            without.store(block, without.constant(0, block.ref.tile))
            if piece.tile.shape != block.ref.shape:  # tiles that do not meet
                found.store(block, found.constant(0, block.ref.tile))
        found.store(block, piece, here)
        regions = [x.block() for x in (without, found)]
        b.emit("cond", b.cast(inside, T.I32), regions=regions)


def _spans(
    block: Value, tile: Sequence[int], steps: Steps, before: Sequence[int]
) -> tuple[Index, Index]:
    """Where a tile has what a block needs of it, and where that is in the block."""
    there, here, pending = list[Span](), list[Span](), iter(before)
    for size, t, step in zip(block.ref.shape, tile, steps, strict=True):
        first = next(pending) * step if step else 0
        count = min(size, t - first)
        there.append(Span(first, count))
        here.append(Span(0, count))
    return tuple(there), tuple(here)
