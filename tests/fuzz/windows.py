"""Random windows: how arrays are cut into blocks, and which block a program sees.

Input windows show anything, also blocks that hang over an edge or do not exist.
Output windows of `covering` visit every element of their array, so that no result is
left unspecified.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Value, Window
from tests.fuzz.writer import World, Writer

Ids = Sequence[Value]
# Writes what an index map yields for one dimension; the same wherever it is written.
Emit = Callable[[Builder, Ids], list[Value]]


@dataclass(frozen=True)
class Side:
    """One dimension of an array, how it is cut, and its part of the index map."""

    n: int
    dim: BlockDim
    emit: Emit
    hangs: bool = False

    @property
    def kept(self) -> bool:
        return self.dim.kind != "squeezed"


def shape_of(sides: Sequence[Side]) -> tuple[int, ...]:
    return tuple(side.n for side in sides)


def hangs_over(sides: Sequence[Side]) -> bool:
    """May a block have elements outside the array?"""
    return any(side.hangs and side.kept for side in sides)


def window_of(
    sides: Sequence[Side], mode: str, fill: bool | int | float | None = None
) -> Window:
    return Window(tuple(side.dim for side in sides), mode, fill=fill)


def map_of(sides: Sequence[Side], axes: int) -> Block:
    b, ids = Builder(), tuple(Value(T.INDEX, name) for name in "ijkl"[:axes])
    yields = [value for side in sides for value in side.emit(b, ids)]
    return b.block(ids, yields)


# --- inputs ---


def input_side(world: World, axes: int, prefetch: Value | None, plain: bool) -> Side:
    n = world.pick((4, 1, 3, 6, 8, 5))
    kinds = ("whole", "blocked", "squeezed", "element", "bounded")
    kind = world.pick(kinds[:2] if plain else kinds)
    index = index_emitter(world, axes, prefetch)
    if kind == "whole":
        return whole_side(n)
    if kind == "squeezed":
        return Side(n, BlockDim(1, "squeezed"), index)
    size = world.integer(1, n + 1 if world.chance(15) else n)
    if kind == "blocked":
        return Side(n, BlockDim(size), index, hangs=n % size != 0)
    if kind == "element":
        padding = (world.integer(0, 2), world.integer(0, 2))
        return Side(n, BlockDim(size, "element", padding), index, hangs=True)
    length = world.integer(0, size + 1)
    both: Emit = lambda b, ids: [*index(b, ids), b.index(length)]
    return Side(n, BlockDim(size, "bounded"), both, hangs=True)


def whole_side(n: int) -> Side:
    return Side(n, BlockDim(n), _fixed(0))


def _fixed(number: int) -> Emit:
    return lambda b, ids: [b.index(number)]


def index_emitter(world: World, axes: int, prefetch: Value | None) -> Emit:
    """A number that depends on the grid indices, in or out of range."""
    number = world.integer(-1, 3)
    if not axes:
        return _fixed(number)
    a, c = world.integer(0, axes - 1), world.integer(0, axes - 1)
    kinds = ["id", "id", "reversed", "sum", "scaled", "remainder", "fixed"]
    kind = world.pick([*kinds, "looked up", "looked up"] if prefetch else kinds)
    factor = world.pick((2, 3, -1))

    def emit(b: Builder, ids: Ids) -> list[Value]:
        i = ids[a]
        made = {
            "id": lambda: i,
            "reversed": lambda: b.sub(b.index(number), i),
            "sum": lambda: b.add(i, ids[c]),
            "scaled": lambda: b.add(b.mul(i, b.index(factor)), b.index(number)),
            "remainder": lambda: b.rem(i, b.index(2)),
            "fixed": lambda: b.index(number),
            "looked up": lambda: b.load(prefetch, (At(None),), [i]),
        }
        return [made[kind]()]

    return emit


def inside(w: Writer, sides: Sequence[Side], ids: Ids) -> Value | None:
    """Which elements of the block are in the array; None if all do."""
    b, shape = w.b, tuple(side.dim.size for side in sides if side.kept)
    found, dim = None, -1
    for side in sides:
        dim += side.kept
        if not side.hangs or not side.kept:
            continue
        first, end = _extent(b, side, ids)
        line = b.op("iota", type=T.TileType(shape, T.I32), dim=dim)
        position = b.add(line, b.broadcast(first, shape))
        reach = b.and_(
            b.ge(position, b.like(0, position)), b.lt(position, b.broadcast(end, shape))
        )
        found = reach if found is None else b.and_(found, reach)
    return found


def _extent(b: Builder, side: Side, ids: Ids) -> tuple[Value, Value]:
    """First position of the block, and the end of what exists, in the array."""
    index, *length = side.emit(b, ids)
    n, size = side.n, side.dim.size
    end = b.index(n)
    if side.dim.kind == "blocked":
        blocks = max(1, -(-n // size))
        number = b.clamp(b.index(0), index, b.index(blocks - 1))
        return b.mul(number, b.index(size)), end
    low, high = side.dim.padding
    last = max(n + low + high - 1, 0)
    first = b.sub(b.clamp(b.index(0), index, b.index(last)), b.index(low))
    if length:
        most = b.clamp(b.index(0), length[0], b.index(size))
        end = b.min(end, b.add(first, most))
    return first, end


# --- outputs ---


def covering(
    world: World,
    block: Sequence[int],
    grid: Sequence[int],
    axes: Sequence[int],
    may_hang: bool,
) -> list[Side]:
    """Sides of a window whose blocks, over these axes, are the whole array."""
    groups: list[list[int]] = [[] for _ in block]
    squeezed: list[int] = []
    for a in axes:
        target = -1 if world.for_tpu else world.integer(-1, len(block) - 1)
        (squeezed if target < 0 else groups[target]).append(a)
    sides = [
        whole_side(size)
        if world.for_tpu
        else _covering_side(world, size, grid, group, may_hang)
        for size, group in zip(block, groups, strict=True)
    ]
    if squeezed:
        count = max(1, prod(grid[a] for a in squeezed))
        number = _mixed(world, grid, squeezed)
        side = Side(count, BlockDim(1, "squeezed"), number)
        if world.for_tpu:  # before two others
            ones = [Side(1, BlockDim(1, "squeezed"), _fixed(0))] * (2 - len(sides))
            return [side, *ones, *sides]
        sides.insert(world.integer(0, len(sides)), side)
    return sides


def _covering_side(
    world: World, size: int, grid: Sequence[int], axes: list[int], may_hang: bool
) -> Side:
    count = max(1, prod(grid[a] for a in axes))
    number = _mixed(world, grid, axes) if axes else _fixed(0)
    over = world.integer(0, size - 1) if may_hang and size and world.chance(40) else 0
    if size and world.chance(20):
        return _element_side(world, size, count, number, over)
    return Side(count * size - over, BlockDim(size), number, hangs=over > 0)


def _element_side(world: World, size: int, count: int, number: Emit, over: int) -> Side:
    """Elements instead of block numbers, some before the array where it may hang."""
    low = world.integer(0, min(over, 2))
    padding = (low, world.integer(0, 2))

    def emit(b: Builder, ids: Ids) -> list[Value]:
        return [b.mul(number(b, ids)[0], b.index(size))]

    n = count * size - over
    return Side(n, BlockDim(size, "element", padding), emit, hangs=over > 0)


def _mixed(world: World, grid: Sequence[int], axes: Sequence[int]) -> Emit:
    """The number with these axes as digits, or counted from the other end."""
    backwards = world.chance(30)
    last = prod(grid[a] for a in axes) - 1

    def emit(b: Builder, ids: Ids) -> list[Value]:
        number = ids[axes[0]]
        for a in axes[1:]:
            number = b.add(b.mul(number, b.index(grid[a])), ids[a])
        return [b.sub(b.index(last), number) if backwards else number]

    return emit
