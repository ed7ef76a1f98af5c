"""Integers and bools at every step of a grid, by enumeration.

`StepTable(ids, grid)` takes the ops of a body or an index map. Each scalar that is
plain arithmetic on grid indices becomes an array with a dimension per axis, of size 1
where the axis does not matter, so that a table is as large as what it depends on.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import INDEX, TileType
from pallasite.passes.analysis.block_table import exact_meaning

MOST_ENTRIES = 1 << 18  # of one table


class StepTable:
    """Tables of the scalars that depend on grid indices alone."""

    def __init__(
        self,
        ids: Sequence[Value],
        grid: Sequence[int | None],
        known: Mapping[Value, np.ndarray] | None = None,
    ):
        self.known: dict[Value, np.ndarray] = dict(known or {})
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
