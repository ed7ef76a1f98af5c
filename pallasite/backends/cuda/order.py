"""In which order programs run, and how many of them a block of threads runs.

Programs that share operands run near each other, so that the L2 cache serves them:
of two axes, `TOGETHER` programs along the first take each step along the second. Where
loops are of different length in different programs, the longest run first, and blocks
of threads take turns there and back: the one that got the longest program of a round
gets the shortest of the next, so that all have about as much to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Op, Value, walk
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import I32
from pallasite.passes.analysis.affine import fold_scalar

TOGETHER = 16


@dataclass(frozen=True)
class Order:
    """The grid, and the axes along which work grows."""

    grid: tuple[int, ...]
    growing: frozenset[int] = frozenset()
    is_equal: bool = True  # all programs take as long

    def rounds(self, b: Builder, block: Value, blocks: int) -> Value:
        """How many programs a block of threads runs."""
        whole, rest = divmod(prod(self.grid), blocks)
        if not rest:
            return b.index(whole)
        place = self._place(b, block, blocks, whole % 2 == 1)
        more = b.cast(b.lt(place, b.index(rest)), I32)
        return b.add(b.index(whole), more)

    def program(self, b: Builder, turn: Value, block: Value, blocks: int) -> Value:
        """The number of the program that a block runs at its turn."""
        first = b.mul(turn, b.index(blocks))
        if self.is_equal:
            return b.add(first, block)
        is_back = b.eq(b.and_(turn, b.index(1)), b.index(1))
        there, back = (self._place(b, block, blocks, way) for way in (False, True))
        return b.add(first, b.select(is_back, back, there))

    def _place(self, b: Builder, block: Value, blocks: int, is_back: bool) -> Value:
        if not is_back or self.is_equal:
            return block
        return b.sub(b.index(blocks - 1), block)

    @staticmethod
    def of(pipeline: Pipeline) -> "Order":
        grid = tuple(n for n in pipeline.grid if n is not None)
        made = {v: op for op in walk(pipeline.body) for v in op.results}
        loops = [Loop.of(op) for op in walk(pipeline.body) if op.name == "for"]
        growing, moving = set[int](), set[int]()
        for axis in range(len(grid)):
            for loop in loops:
                low, high = (
                    _length(loop, made, pipeline, axis, at)
                    for at in (0, grid[axis] - 1)
                )
                if low is not None and high is not None and low != high:
                    moving.add(axis)
                    if low < high:
                        growing.add(axis)
        return Order(grid, frozenset(growing), not moving)

    def decoded(self, b: Builder, number: Value) -> list[Value]:
        """Grid indices of a program by its number."""
        ids = self._digits(b, number)
        for axis in self.growing:
            ids[axis] = b.sub(b.index(self.grid[axis] - 1), ids[axis])
        return ids

    def _digits(self, b: Builder, number: Value) -> list[Value]:
        grid = self.grid
        if len(grid) == 2 and grid[0] > 1 and grid[1] > 1:
            rows, columns = grid
            # In order of length all rows go together: turns there and back are as
            # long only if the lengths fall from the first program to the last.
            together = min(TOGETHER, rows) if self.is_equal else rows
            size = b.index(together * columns)
            group, rest = b.div(number, size), b.rem(number, size)
            first = b.mul(group, b.index(together))
            height = b.index(together)
            if rows % together:
                height = b.min(b.sub(b.index(rows), first), height)
            return [b.add(first, b.rem(rest, height)), b.div(rest, height)]
        ids: list[Value] = []
        for axis, size in enumerate(grid):
            inner = prod(grid[axis + 1 :])
            value = number if inner == 1 else b.div(number, b.index(inner))
            ids.append(b.rem(value, b.index(size)) if axis else value)
        return ids


def _length(
    loop: Loop, made: Mapping[Value, Op], pipeline: Pipeline, axis: int, at: int
) -> int | None:
    """How many steps a loop has in the program at a place along an axis."""
    known = {v: at if n == axis else 0 for n, v in enumerate(pipeline.ids)}

    def number(value: Value) -> int | bool | None:
        if value in known:
            return known[value]
        op = made.get(value)
        if op is None or value.type.shape:
            return None
        if op.name == "constant":
            return op.attrs["value"]
        return fold_scalar(op, [number(v) for v in op.operands])

    first, limit = number(loop.first), number(loop.limit)
    if not isinstance(first, int) or not isinstance(limit, int):
        return None
    return limit - first
