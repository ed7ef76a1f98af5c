"""Which rows of a ref a loop overwrites, and whether it reads one before that.

`sweep(loop, ref, known, rows)` has all iterations as the rows of a table: integers
computed from the index and from known numbers are columns. Each access has a time, its
iteration and then its place in the code, and each row the time at which it is first
overwritten, so a read is of an old row if its own time is earlier. Substitution down a
column (`x[i]` from `x[i - 1]`), its way back, and buffers that take turns (`buf[i % 2]`
is filled for the next iteration) read nothing old. Used by `carried.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallasite.ir.nodes import Access, Block, Gather, Index, Op, Span, Value, full_index
from pallasite.ir.rewrite import used_values
from pallasite.ir.roles import Cond, Loop
from pallasite.ir.types import TileType
from pallasite.passes.analysis.affine import fold_columns
from pallasite.passes.analysis.memory import VIEWS

MOST_TIMES = 1 << 16  # iterations, times the size of a slice
Column = np.ndarray | int | bool
Rows = tuple[np.ndarray, np.ndarray]  # numbers, and which of them count


def rows_at(
    index: Index,
    operands: Sequence[Value],
    shape: Sequence[int],
    known: Mapping[Value, Column],
) -> tuple[Any, int] | None:
    """The first row that an index selects, and how many; None if that is not known."""
    if not shape or not index or isinstance(index[0], Gather):
        return None
    entry, size = index[0], index[0].size if isinstance(index[0], Span) else 1
    start = known.get(operands[0]) if entry.start is None else entry.start
    stride = entry.stride if isinstance(entry, Span) else 1
    if start is None or stride != 1:
        return None
    return np.clip(start, 0, max(shape[0] - size, 0)), size


def rows_seen(op: Op, known: Mapping[Value, Column]) -> tuple[Any, int] | None:
    """Which rows a view shows whole, as `buf.at[slot]`; None if it does not."""
    if op.name != "subview":
        return None
    index, shape = op.attrs["index"], op.operands[0].ref.shape
    place = rows_at(index, op.operands[1:], shape, known)
    return place if place is not None and is_whole_rows(index, shape) else None


def is_whole_rows(index: Index, shape: Sequence[int]) -> bool:
    """Whether an index selects all that its rows have."""
    return index[1:] == full_index(tuple(shape[1:]))


def sweep(
    loop: Loop,
    ref: Value,
    known: Mapping[Value, Column],
    rows: np.ndarray,
    views: Mapping[Value, tuple[Column, int]],
) -> np.ndarray | None:
    """The rows overwritten after a loop; None if it may read others before.

    Args:
        loop: whose bounds are known, if anything is to be found.
        ref: the memory.
        known: integers outside the loop.
        rows: for each row, whether it is overwritten before the loop.
        views: of rows of the ref, from outside the loop.
    """
    bounds = [known.get(v) for v in loop.bounds]
    if any(not isinstance(n, int) for n in bounds) or not bounds[2]:
        return None
    counts = np.arange(*(int(n) for n in bounds if isinstance(n, int)))
    if not 0 < len(counts) <= MOST_TIMES:
        return None
    columns: dict[Value, Column] = {**known, loop.index: counts}
    walker = _Sweep(ref, columns, len(counts), views)
    if not walker.follow(loop.body, np.ones(len(counts), bool)):
        return None
    return walker.outcome(rows)


@dataclass(eq=False)
class _Times:
    """Accesses at one place of the code: of some rows, in some iterations."""

    first: np.ndarray
    size: int
    runs: np.ndarray
    place: int
    is_store: bool


class _Sweep:
    def __init__(
        self,
        ref: Value,
        known: dict[Value, Column],
        trips: int,
        views: Mapping[Value, tuple[Column, int]],
    ) -> None:
        self.known, self.trips, self.shape = known, trips, ref.ref.shape
        # The ref and its views: their first row and how many, or all of them.
        self.views: dict[Value, tuple[Column, int] | None] = {ref: None, **views}
        self.found = list[_Times]()

    def follow(self, block: Block, runs: np.ndarray) -> bool:
        """Note the accesses of some code; False if they are not understood."""
        return all(self.step(op, runs) for op in block.ops)

    def step(self, op: Op, runs: np.ndarray) -> bool:
        refs = [v for v in op.operands if v in self.views]
        if op.name == "cond" and not refs:
            return self.branches(op, runs)
        if op.regions:
            return not any(v in self.views for v in used_values(Block((), (op,))))
        if refs:
            return self.access(op, runs)
        self.compute(op)
        return True

    def branches(self, op: Op, runs: np.ndarray) -> bool:
        cond = Cond.of(op)
        which = self.known.get(cond.which)
        if which is None:  # whatever may be stored is not known to be
            kept = len(self.found)
            is_known = all(self.follow(r, runs) for r in op.regions)
            self.found[kept:] = [f for f in self.found[kept:] if not f.is_store]
            return is_known
        number = np.clip(np.asarray(which).astype(np.int64), 0, len(op.regions) - 1)
        return all(
            self.follow(r, runs & (number == n)) for n, r in enumerate(op.regions)
        )

    def compute(self, op: Op) -> None:
        if len(op.results) != 1 or not isinstance(op.result.type, TileType):
            return
        if op.name == "constant":
            value = op.attrs["value"]
            if isinstance(value, int) and not op.result.tile.shape:
                self.known[op.result] = value
            return
        columns = [self.known.get(v) for v in op.operands]
        made = fold_columns(op, columns)
        if made is not None:
            self.known[op.result] = made

    def access(self, op: Op, runs: np.ndarray) -> bool:
        if op.name in ("load", "store"):
            access = Access.of(op)
            if access.value in self.views:
                return False
            is_store = op.name == "store"
            return self.note(access.ref, access.index, access.index_operands, runs,
                is_store, access.mask is not None)  # fmt: skip
        if op.name in VIEWS:
            return self.view(op)
        if op.name == "copy_start":
            source, target, *semaphores = op.operands
            reads = source not in self.views or self.note_all(source, runs, False)
            return reads and all(
                v not in self.views or self.note_all(v, runs, True)
                for v in (target, *semaphores)
            )
        if op.name == "copy_wait":
            waits = [v for v in op.operands[2:] if v in self.views]
            return all(self.note_all(v, runs, False) for v in waits)
        return False

    def view(self, op: Op) -> bool:
        place = rows_seen(op, self.known)
        if self.views[op.operands[0]] is not None or place is None:
            return False
        self.views[op.result] = place
        return True

    def note(
        self,
        ref: Value,
        index: Index,
        operands: Sequence[Value],
        runs: np.ndarray,
        is_store: bool,
        masked: bool,
    ) -> bool:
        if self.views[ref] is not None:  # of a view: all of its rows, or some
            covers = not masked and index == full_index(ref.ref.shape)
            return (is_store and not covers) or self.note_all(ref, runs, is_store)
        place = rows_at(index, operands, self.shape, self.known)
        if is_store and (
            masked or place is None or not is_whole_rows(index, self.shape)
        ):
            return True
        if place is None:
            place = 0, self.shape[0]
        self.add(place, runs, is_store)
        return True

    def note_all(self, ref: Value, runs: np.ndarray, is_store: bool) -> bool:
        self.add(self.views[ref] or (0, self.shape[0]), runs, is_store)
        return True

    def add(self, place: tuple[Column, int], runs: np.ndarray, is_store: bool) -> None:
        first = np.broadcast_to(np.asarray(place[0], np.int64), (self.trips,))
        place_in_code = len(self.found)
        self.found.append(_Times(first, place[1], runs, place_in_code, is_store))

    def outcome(self, rows: np.ndarray) -> np.ndarray | None:
        places = len(self.found) + 1
        if self.trips * max((f.size for f in self.found), default=1) > MOST_TIMES:
            return None
        never = self.trips * places
        written = np.where(rows, -1, never)
        for each in self.found:
            if each.is_store:
                at, time = _expanded(each, places)
                np.minimum.at(written, at, time)
        for each in self.found:
            if not each.is_store:
                at, time = _expanded(each, places)
                if (written[at] >= time).any():
                    return None
        return written < never


def _expanded(each: _Times, places: int) -> Rows:
    """Every row of the accesses, and when it is accessed."""
    counts = np.flatnonzero(each.runs)
    rows = each.first[counts][:, None] + np.arange(each.size)
    time = np.broadcast_to((counts * places + each.place)[:, None], rows.shape)
    return rows.ravel(), time.ravel()
