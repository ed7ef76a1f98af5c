"""How the operands of a random Python kernel are cut.

Besides blocks: rows looked up in a table, elements with padding, and slices of bounded
length. What is past the end of an array or of a slice is the fill value, and nothing is
stored to such an operand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import pallasite as pl
from tests.fuzz.choices import Choices, chance, pick
from tests.fuzz.snippets import COLUMNS, ROWS

BLOCK = (ROWS, COLUMNS)
FILL = 0.5
KINDS = ("blocks", "looked up", "elements", "bounded rows", "bounded columns")
Numbers = Callable[[Any, Any], tuple[Any, Any]]  # of a block, from grid indices


@dataclass(frozen=True)
class Shown:
    """How an operand is cut; which part a program sees follows from a block's number.

    Attributes:
        first, step: elements or rows of the table: it sees number * step + first.
        padding: of elements, before and after the array.
    """

    kind: str = "blocks"
    first: int = 0
    step: int = 1
    padding: int = 0

    def spec(self, numbers: Numbers) -> pl.BlockSpec:
        """The spec; an index map is also given the table."""

        def index_map(i: Any, j: Any, *table: Any) -> tuple[Any, Any]:
            p, q = numbers(i, j)
            if self.kind == "looked up":
                return table[0][self.row(p)], q
            if self.kind == "elements":
                return self.row(p), self.row(q)
            if self.kind == "bounded rows":
                return pl.ds(self.row(p), self.length(p, q)), q
            if self.kind == "bounded columns":
                return p, pl.ds(self.row(q), self.length(p, q))
            return p, q

        return pl.BlockSpec(self.block_shape(), index_map, fill=FILL)

    def block_shape(self) -> tuple[Any, Any]:
        if self.kind == "elements":
            padding = self.padding, self.padding
            rows, columns = (pl.Element(n, padding) for n in BLOCK)
            return rows, columns
        if self.kind == "bounded rows":
            return pl.BoundedSlice(ROWS), COLUMNS
        return (ROWS, pl.BoundedSlice(COLUMNS)) if "columns" in self.kind else BLOCK

    def row(self, number: Any) -> Any:
        return number * self.step + self.first

    def length(self, p: Any, q: Any) -> Any:
        return (p + 2 * q + self.first) % (ROWS + 1)

    def part(self, xp: Any, array: Any, number: tuple[int, int], table: Any) -> Any:
        """What a program sees of an operand, for plain Python."""
        p, q = number
        if self.kind == "looked up":
            p = int(table[min(self.row(p), len(table) - 1)])
        pad, counts = self.padding, tuple(BLOCK)
        if self.kind == "elements":
            starts = [self.row(k) for k in (p, q)]
        else:
            pairs = zip((p, q), BLOCK, array.shape, strict=True)
            starts = [min(k, -(-n // size) - 1) * size for k, size, n in pairs]
        if self.kind.startswith("bounded"):
            d = int(self.kind == "bounded columns")
            starts[d], counts = self.row((p, q)[d]), list(BLOCK)
            counts[d] = self.length(p, q)
        most = [n + 2 * pad - 1 for n in array.shape]
        starts = [min(max(s, 0), m) for s, m in zip(starts, most, strict=True)]
        wide = [(pad, pad + size) for size in BLOCK]
        padded = xp.pad(array, wide, constant_values=FILL)
        r, c = starts
        rows, columns = np.ogrid[:ROWS, :COLUMNS]
        there = (rows < counts[0]) & (columns < counts[1])
        return xp.where(there, padded[r : r + ROWS, c : c + COLUMNS], FILL)


def random_operand(choices: Choices) -> Shown:
    if not chance(choices, 40):
        return Shown()
    kind = pick(choices, KINDS[1:])
    first, step = choices.integer(0, 2), choices.integer(0, 4)
    return Shown(kind, first, step, choices.integer(0, 2) * (kind == "elements"))
