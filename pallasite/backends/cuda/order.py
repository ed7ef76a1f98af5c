"""The order in which programs run, and how many of them a thread block runs.

Programs that share operands run near each other, so that the L2 cache serves them: of
two axes, `TOGETHER` programs along the first take each step along the second. Where
trip counts differ between programs, work is balanced over thread blocks in one of two
ways. *Pairs*: the longest program along the last axis with the shortest, then the next
ones, so that all pairs take equally long; programs that share operands stay near each
other. *There and back*: all programs in order of length; the thread block that got the
longest program of a round gets the shortest of the next. This divides a short grid more
evenly, but makes less use of the L2 cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Op, Value, walk
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import I32
from pallasite.passes.analysis.affine import fold_scalar

TOGETHER = 16
START = 2  # cost of a program beyond its loop iterations, in iterations
UNEVEN = 1.06  # tolerated imbalance between thread blocks for the sake of the L2 cache


@dataclass(frozen=True)
class Order:
    """The grid, and the axes along which work grows."""

    grid: tuple[int, ...]
    growing: frozenset[int] = frozenset()
    is_equal: bool = True  # all programs take equally long
    in_pairs: bool = False  # along the last axis

    def rounds(self, b: Builder, block: Value, blocks: int) -> Value:
        """How many programs a thread block runs."""
        if self.in_pairs:
            pairs, single = divmod(prod(self.grid), 2)
            whole, rest = divmod(pairs, blocks)
            more = b.cast(b.lt(block, b.index(rest)), I32)
            count = b.mul(b.add(b.index(whole), more), b.index(2))
            last = b.cast(b.eq(block, b.index(rest)), I32)
            return b.add(count, last) if single else count
        whole, rest = divmod(prod(self.grid), blocks)
        if not rest:
            return b.index(whole)
        place = self._place(b, block, blocks, whole % 2 == 1)
        more = b.cast(b.lt(place, b.index(rest)), I32)
        return b.add(b.index(whole), more)

    def program(self, b: Builder, turn: Value, block: Value, blocks: int) -> Value:
        """The number of the program that a thread block runs in a given turn."""
        if self.in_pairs:
            two = b.index(2)
            pair = b.add(b.mul(b.div(turn, two), b.index(blocks)), block)
            return b.add(b.mul(pair, two), b.rem(turn, two))
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
    def of(pipeline: Pipeline, blocks: int) -> "Order":
        """The order of a grid's programs on a number of thread blocks."""
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
        in_pairs = False
        if moving == {len(grid) - 1}:
            last = len(grid) - 1
            steps = [
                [_length(loop, made, pipeline, last, at) for loop in loops]
                for at in range(grid[last])
            ]
            work = [START + sum(max(n or 0, 0) for n in each) for each in steps]
            in_pairs = _are_even_in_pairs(sorted(work), prod(grid[:-1]), blocks)
        return Order(grid, frozenset(growing), not moving, in_pairs)

    def decoded(self, b: Builder, number: Value) -> list[Value]:
        """Grid indices of a program by its number."""
        if self.in_pairs:
            *ids, place = _row_major(b, self.grid, number)
            from_start = b.div(place, b.index(2))
            from_end = b.sub(b.index(self.grid[-1] - 1), from_start)
            is_first = b.eq(b.rem(place, b.index(2)), b.index(0))
            longest, shortest = from_start, from_end
            if len(self.grid) - 1 in self.growing:
                longest, shortest = shortest, longest
            return [*ids, b.select(is_first, longest, shortest)]
        ids = self._digits(b, number)
        for axis in self.growing:
            ids[axis] = b.sub(b.index(self.grid[axis] - 1), ids[axis])
        return ids

    def _digits(self, b: Builder, number: Value) -> list[Value]:
        grid = self.grid
        if len(grid) == 2 and grid[0] > 1 and grid[1] > 1:
            rows, columns = grid
            # In order of length, all rows are taken together: turns there and back
            # balance only if lengths decrease from the first program to the last.
            together = min(TOGETHER, rows) if self.is_equal else rows
            size = b.index(together * columns)
            group, rest = b.div(number, size), b.rem(number, size)
            first = b.mul(group, b.index(together))
            height = b.index(together)
            if rows % together:
                height = b.min(b.sub(b.index(rows), first), height)
            return [b.add(first, b.rem(rest, height)), b.div(rest, height)]
        return _row_major(b, grid, number)


def _row_major(b: Builder, grid: Sequence[int], number: Value) -> list[Value]:
    ids: list[Value] = []
    for axis, size in enumerate(grid):
        inner = prod(grid[axis + 1 :])
        value = number if inner == 1 else b.div(number, b.index(inner))
        ids.append(b.rem(value, b.index(size)) if axis else value)
    return ids


def _are_even_in_pairs(work: Sequence[int], times: int, blocks: int) -> bool:
    """Whether pairs take about as long as there and back.

    Args:
        work: of the programs along the last axis, in ascending order.
        times: how often these programs occur.
        blocks: number of thread blocks.
    """
    rising, falling = np.array(work), np.array(work[::-1])
    paired = np.stack([falling, rising], 1).reshape(-1)[: len(work)]
    pairs = np.tile(paired, times)
    pairs = np.append(pairs, np.zeros(-len(pairs) % (2 * blocks), int))
    in_pairs = pairs.reshape(-1, blocks, 2).sum((0, 2)).max()
    rounds = np.repeat(falling, times)
    rounds = np.append(rounds, np.zeros(-len(rounds) % blocks, int))
    rounds = rounds.reshape(-1, blocks)
    rounds[1::2] = rounds[1::2, ::-1]
    return len(rounds) > 1 and bool(in_pairs <= UNEVEN * rounds.sum(0).max())


def _length(
    loop: Loop, made: Mapping[Value, Op], pipeline: Pipeline, axis: int, at: int
) -> int | None:
    """The trip count of a loop in the program at a position along an axis."""
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
