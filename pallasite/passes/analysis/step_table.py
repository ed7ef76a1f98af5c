"""Integers and bools at every step of a grid, by enumeration.

`StepTable(ids, grid)` takes the ops of a body or an index map. Each scalar that is
plain arithmetic on grid indices becomes an array with a dimension per axis, of size 1
where the axis does not matter, so that a table is as large as what it depends on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX, TileType
from pallasite.passes.analysis.block_table import exact_meaning
from pallasite.passes.analysis.guards import guard_of

MOST_ENTRIES = 1 << 18  # of one table


class StepTable:
    """Tables of the scalars that depend on grid indices alone."""

    def __init__(self, ids: Sequence[Value], grid: Sequence[int | None]):
        self.known: dict[Value, np.ndarray] = {}
        self.rank = len(grid)
        for axis, (value, n) in enumerate(zip(ids, grid, strict=True)):
            if n is not None and 0 < n <= MOST_ENTRIES:
                shape = [n if a == axis else 1 for a in range(self.rank)]
                self.known[value] = np.arange(n, dtype=INDEX.dtype.np).reshape(shape)

    def add_ops(self, ops: Iterable[Op]) -> None:
        """Process ops in order, and those of the regions inside them."""
        for op in ops:
            if op.name == "constant":
                self._add_constant(op)
            elif not op.regions:
                self._add(op)
            for region in op.regions:
                self.add_ops(region.ops)

    def of(self, value: Value) -> np.ndarray | None:
        return self.known.get(value)

    def depends_on(self, value: Value) -> frozenset[int] | None:
        """The axes along which a value may differ; None if it has no table."""
        table = self.known.get(value)
        if table is None:
            return None
        return frozenset(a for a, n in enumerate(table.shape) if n > 1)

    def _add_constant(self, op: Op) -> None:
        tile: TileType = op.attrs["type"]
        if not tile.shape and not tile.dtype.is_float:
            shape = (1,) * self.rank
            self.known[op.result] = np.full(shape, op.attrs["value"], tile.dtype.np)

    def _add(self, op: Op) -> None:
        meaning = exact_meaning(op)
        if meaning is None or not op.operands or len(op.results) != 1:
            return
        if not all(v in self.known for v in op.operands):
            return
        tables = [self.known[v] for v in op.operands]
        shape = np.broadcast_shapes(*(t.shape for t in tables))
        if np.prod(shape) <= MOST_ENTRIES:
            with np.errstate(all="ignore"):
                made = meaning(*(np.broadcast_to(t, shape) for t in tables))
            self.known[op.result] = np.asarray(made)


def ranges_of_steps(whole: Pipeline) -> dict[Value, tuple[int, int]]:
    """The extremes of integers and bools that a body computes of grid indices alone."""
    table = StepTable(whole.ids, whole.grid)
    table.add_ops(whole.body.ops)
    found = [(v, t) for v, t in table.known.items() if t.size and t.dtype.kind in "iub"]
    return {v: (int(t.min()), int(t.max())) for v, t in found}


def reached(
    block: Block, table: StepTable, active: np.ndarray | None = None
) -> Iterator[tuple[Op, np.ndarray]]:
    """Every op of a body, with the steps at which it may run, as a table of bools.

    Conditions whose tables are not known count as true.
    """
    if active is None:
        active = np.ones((1,) * table.rank, bool)
    inside = {v: op for op in block.ops for v in op.results}
    for op in block.ops:
        yield op, active
        for number, region in enumerate(op.regions):
            taken = _taken(op, number, inside, table)
            yield from reached(region, table, active & taken)


def _taken(
    op: Op, number: int, inside: Mapping[Value, Op], table: StepTable
) -> np.ndarray:
    """The steps at which an op may run one of its regions."""
    everywhere = np.ones((1,) * table.rank, bool)
    if op.name != "cond":
        return everywhere
    which = table.of(op.operands[0])
    if which is not None:
        return np.clip(which, 0, len(op.regions) - 1) == number
    guard = guard_of(op, inside)
    if guard is None or guard.taken is not op.regions[number]:
        return everywhere
    for part in guard.parts:
        test = table.of(part.value)
        everywhere = everywhere if test is None else everywhere & (test == part.truth)
    return everywhere
