"""Integers and bools at every step of grids and loops, by enumeration.

A *step* is a position in the grids and counted loops around an op: one dimension each,
by nesting depth. The table of a value is an array with those dimensions, of size 1
where the value does not depend on one, and then the dimensions of its tile. So a table
is as large as what its value depends on. It is exact: values read from memory, and
those that a chip may round otherwise, have none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.roles import Cond, Loop, Pipeline
from pallasite.ir.types import INDEX, TileType
from pallasite.passes.analysis.block_table import exact_meaning
from pallasite.passes.analysis.guards import guard_of

MOST_ENTRIES = 1 << 20  # of one table

Table = np.ndarray


@dataclass(frozen=True)
class Place:
    """Where control is: in which dimension nested steps go, and at which steps.

    `active` holds at least the steps at which this code runs, and exactly those if
    `sure`; `why` says what is not known otherwise.
    """

    depth: int
    active: Table
    sure: bool = True
    why: str = ""
    line: str = ""

    def narrowed(self, test: Table) -> "Place":
        return replace(self, active=self.active & test)

    def unsure(self, why: str, op: Op) -> "Place":
        if not self.sure:
            return self
        return replace(self, sure=False, why=why, line=str(op.loc or ""))


def depth_of(block: Block) -> int:
    """How many dimensions of steps a block needs."""
    most = 0
    for op in block.ops:
        own = len(Pipeline.of(op).grid) if op.name == "pipeline" else op.name == "for"
        for region in op.regions:
            most = max(most, own + depth_of(region))
    return most


class Tables:
    """The tables of a kernel's values, filled while it is walked."""

    def __init__(self, body: Block):
        self.rank = depth_of(body)
        self.known: dict[Value, Table] = {}
        self.makers: dict[Value, Op] = {}

    # --- tables ---

    def of(self, value: Value) -> Table | None:
        return self.known.get(value)

    def scalar(self, number: int) -> Table:
        return np.full((1,) * self.rank, number, np.int64)

    def everywhere(self) -> Table:
        return np.ones((1,) * self.rank, bool)

    def counted(self, n: int, dim: int) -> Table:
        shape = [n if d == dim else 1 for d in range(self.rank)]
        return np.arange(n, dtype=np.int64).reshape(shape)

    def with_tile(self, table: Table, rank: int) -> Table:
        """A table whose tile has a number of dimensions: a scalar's get size 1."""
        missing = self.rank + rank - table.ndim
        return table.reshape(table.shape + (1,) * missing)

    def add(self, op: Op) -> None:
        """Make the tables of an op's results, if they follow from its operands'."""
        for result in op.results:
            self.makers[result] = op
        if len(op.results) != 1 or op.regions or op.result.is_ref:
            return
        tile = op.result.tile
        if tile.dtype.is_float and op.name in ("constant", "iota"):
            return
        made = self._made(op, tile)
        if made is not None and made.size <= MOST_ENTRIES:
            self.known[op.result] = made

    def _made(self, op: Op, tile: TileType) -> Table | None:
        if op.name == "constant":
            value = np.asarray(op.attrs["value"])
            return np.full((1,) * (self.rank + tile.rank), value, tile.dtype.np)
        if op.name == "iota":
            shape = [1] * (self.rank + tile.rank)
            n = shape[self.rank + op.attrs["dim"]] = tile.shape[op.attrs["dim"]]
            return np.arange(n, dtype=tile.dtype.np).reshape(shape)
        tables = [self.known.get(v) for v in op.operands]
        if not tables or any(t is None for t in tables):
            return None
        known = [
            self.with_tile(t, v.tile.rank)
            for t, v in zip(tables, op.operands, strict=True)
            if t is not None
        ]
        if op.name in _MOVES:
            return _MOVES[op.name](self, op, known[0], tile)
        meaning = exact_meaning(op)
        if meaning is None:
            return (
                self.known.get(op.operands[0]) if op.name == "assume_multiple" else None
            )
        return self._elementwise(meaning, known, tile)

    def _elementwise(
        self, meaning: Callable[..., Any], tables: list[Table], tile: TileType
    ) -> Table | None:
        tables = [self.with_tile(t, tile.rank) for t in tables]
        shape = np.broadcast_shapes(*(t.shape for t in tables))
        if np.prod(shape, dtype=np.int64) > MOST_ENTRIES:
            return None
        with np.errstate(all="ignore"):
            made = meaning(*(np.broadcast_to(t, shape) for t in tables))
        return np.asarray(made)

    # --- control ---

    def grid(self, pipeline: Pipeline, place: Place) -> Place | None:
        """The body of a pipeline; None: it has no steps."""
        first = place.depth
        for axis, size in enumerate(pipeline.sizes):
            n = size if isinstance(size, int) else self._number(size)
            if n is None:
                place = place.unsure(
                    "the size of its grid is known only at run time", pipeline.op
                )
                continue
            if n == 0:
                return None
            if n > MOST_ENTRIES:
                place = place.unsure("its grid has too many steps", pipeline.op)
                continue
            ids = self.counted(n, first + axis).astype(INDEX.dtype.np)
            for region in (pipeline.body, *pipeline.maps):
                self.known[region.params[axis]] = ids
            place = place.narrowed(np.ones_like(ids, bool))
        return replace(place, depth=first + len(pipeline.grid))

    def _number(self, value: Value) -> int | None:
        table = self.known.get(value)
        return int(table.ravel()[0]) if table is not None and table.size == 1 else None

    def loop(self, loop: Loop, place: Place) -> Place | None:
        """The body of a counted loop; None: it has no steps."""
        inside = replace(place, depth=place.depth + 1)
        bounds = [self.known.get(v) for v in loop.bounds]
        if any(b is None for b in bounds):
            return inside.unsure(
                "how often a loop runs is known only at run time", loop.op
            )
        first, limit, step = (b.astype(np.int64) for b in bounds if b is not None)
        if np.any(step <= 0):
            return inside.unsure("the step of a loop may not be positive", loop.op)
        count = np.maximum(-(-(limit - first) // step), 0)
        most = int(count.max(initial=0))
        if most == 0:
            return None
        shape = np.broadcast_shapes(first.shape, step.shape)
        if most * int(np.prod(shape, dtype=np.int64)) > MOST_ENTRIES:
            return inside.unsure("a loop has too many steps", loop.op)
        number = self.counted(most, place.depth)
        self.known[loop.index] = (first + number * step).astype(
            loop.index.tile.dtype.np
        )
        for n, start in enumerate(loop.inits):
            self._counter(loop, n, start, number)
        return inside.narrowed(number < count)

    def _counter(self, loop: Loop, n: int, start: Value, number: Table) -> None:
        """A carried integer to which each round adds the same constant."""
        param, first = loop.carried[n], self.known.get(start)
        step = _added(loop.body, param, loop.yields[n])
        if first is None or step is None:
            return
        shape = np.broadcast_shapes(first.shape, number.shape)
        if np.prod(shape, dtype=np.int64) <= MOST_ENTRIES:
            with np.errstate(all="ignore"):
                made = first.astype(np.int64) + number * step
            self.known[param] = made.astype(param.tile.dtype.np)

    def branches(self, op: Op, place: Place) -> Iterator[tuple[Block, Place]]:
        """The branches of a cond, and when each runs."""
        which = self.known.get(op.operands[0])
        guard = guard_of(op, self.makers)
        for number, region in enumerate(op.regions):
            if which is not None:
                chosen = np.clip(which, 0, len(op.regions) - 1)
                yield region, place.narrowed(chosen == number)
                continue
            inside = place.unsure("a condition depends on values read from memory", op)
            if guard is not None and guard.taken is region:
                for part in guard.parts:
                    test = self.known.get(part.value)
                    if test is not None and test.ndim == self.rank:
                        inside = inside.narrowed(test == part.truth)
            yield region, inside

    def join(self, op: Op) -> None:
        """The results of a cond, if all branches' are known."""
        cond = Cond.of(op)
        which = self.known.get(cond.which)
        if which is None:
            return
        which = np.clip(which, 0, len(cond.branches) - 1)
        for n, result in enumerate(op.results):
            tables = [self.known.get(b.yields[n]) for b in cond.branches]
            known = [t for t in tables if t is not None]
            if result.is_ref or len(known) < len(tables):
                continue
            rank = result.tile.rank
            made = self._elementwise(
                lambda w, *ts: np.select([w == k for k in range(len(ts))], ts),
                [self.with_tile(t, rank) for t in (which, *known)],
                result.tile,
            )
            if made is not None:
                self.known[result] = made


def _added(body: Block, param: Value, result: Value) -> int | None:
    """The constant that a block adds to a scalar; None if it does something else."""
    if param.is_ref or param.tile.shape or not param.tile.dtype.is_integer:
        return None
    made = {op.results[0]: op for op in body.ops if len(op.results) == 1}
    last = made.get(result)
    if result is param:
        return 0
    if last is None or last.name != "add" or param not in last.operands:
        return None
    x, y = last.operands
    constant = made.get(y if x is param else x)
    if constant is None or constant.name != "constant":
        return None
    return int(constant.attrs["value"])


# --- ops that move elements ---


def _broadcast(t: Tables, op: Op, table: Table, tile: TileType) -> Table:
    shape = [1] * tile.rank
    for axis, dim in enumerate(op.attrs["dims"]):
        shape[dim] = table.shape[t.rank + axis]
    return table.reshape((*table.shape[: t.rank], *shape))


def _full(t: Tables, op: Op, table: Table) -> Table | None:
    """The table with every element of the tile written out."""
    shape = (*table.shape[: t.rank], *op.operands[0].tile.shape)
    if np.prod(shape, dtype=np.int64) > MOST_ENTRIES:
        return None
    return np.broadcast_to(table, shape)


def _reshape(t: Tables, op: Op, table: Table, tile: TileType) -> Table | None:
    full = _full(t, op, table)
    return None if full is None else full.reshape((*table.shape[: t.rank], *tile.shape))


def _transpose(t: Tables, op: Op, table: Table, tile: TileType) -> Table:
    perm = [t.rank + d for d in op.attrs["perm"]]
    return table.transpose((*range(t.rank), *perm))


def _slice(t: Tables, op: Op, table: Table, tile: TileType) -> Table | None:
    full = _full(t, op, table)
    parts = zip(
        op.attrs["starts"], op.attrs["limits"], op.attrs["strides"], strict=True
    )
    chosen = tuple(slice(*part) for part in parts)
    return None if full is None else full[(slice(None),) * t.rank + chosen]


_MOVES: dict[str, Callable[[Tables, Op, Table, TileType], Table | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
}
