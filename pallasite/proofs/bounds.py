"""Bounds: every index stays inside its ref, and every block inside its array.

The language defines what happens otherwise (docs/semantics.md: starts are clamped,
stores element by element are dropped), so memory is safe either way; an index that
leaves the ref is refuted because it is a mistake. Indices with tables are decided step
by step; all others by their ranges, and by what the mask implies.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pallasite.ir.nodes import Access, At, BlockDim, Gather, Op, Span, Value
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.masks import Positions
from pallasite.proofs.assume import Given
from pallasite.proofs.places import Names, first_step
from pallasite.proofs.replay import Replay
from pallasite.proofs.tables import MOST_ENTRIES, Table
from pallasite.proofs.touches import Shows, Use, Walk, extent_of
from pallasite.proofs.verdicts import PROVED, REFUTED, UNKNOWN, Claim, worst

_DATA = (
    "depends on values read from memory or carried by a loop, and no range of it is "
    "known"
)


def bounds(walk: Walk, replay: Replay, given: Given) -> Claim:
    """Whether all accesses and windows of a kernel stay inside."""
    judge = _Judge(walk, replay, given)
    found = [c for use in walk.uses for c in judge.access(use)]
    found += [c for shows in walk.shows for c in judge.window(shows)]
    return worst(
        "bounds",
        found,
        f"{_counted(len(walk.uses), 'access', 'es')} and "
        f"{_counted(len(walk.shows), 'window')} stay inside",
    )


def _counted(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural if n != 1 else ''}"


class _Judge:
    def __init__(self, walk: Walk, replay: Replay, given: Given):
        self.walk, self.replay, self.tables = walk, replay, walk.tables
        self.names = Names(walk.kernel)
        self.facts = Facts(given.loaded)
        self.facts.note_block(walk.kernel.body)

    # --- accesses ---

    def access(self, use: Use) -> Iterator[Claim]:
        if not use.place.active.any():
            return
        access = Access.of(use.op)
        mask = None if access.mask is None else self.tables.of(access.mask)
        axis = self._rank_of_gathers(access)
        rank = axis + sum(isinstance(e, Span) for e in access.index)
        pairs = zip(access.split_index(), access.ref.ref.shape, strict=True)
        for d, ((entry, operand), n) in enumerate(pairs):
            if operand is not None:
                yield self._index(use, access, d, entry, operand, n, mask, axis, rank)
            elif not isinstance(entry, Gather) and access.mask is not None:
                yield self._fixed(use, access, d, entry, n, mask, axis, rank)
            axis += isinstance(entry, Span)

    def _rank_of_gathers(self, access: Access) -> int:
        pairs = access.split_index()
        ranks = (
            v.tile.rank for e, v in pairs if isinstance(e, Gather) and v is not None
        )
        return next(ranks, 0)

    def _fixed(
        self,
        use: Use,
        access: Access,
        d: int,
        entry: At | Span,
        n: int,
        mask: Table | None,
        axis: int,
        rank: int,
    ) -> Claim:
        """A static range with a mask may be larger than the ref."""
        start = entry.start or 0
        if start >= 0 and start + extent_of(entry) <= n:
            return Claim("bounds", PROVED, "")
        return self._judged(
            use, access, d, entry, None, self.tables.scalar(start), n, mask, axis, rank
        )

    def _index(
        self,
        use: Use,
        access: Access,
        d: int,
        entry: At | Span | Gather,
        operand: Value,
        n: int,
        mask: Table | None,
        axis: int,
        rank: int,
    ) -> Claim:
        found = self.tables.of(operand)
        if found is not None:
            found = found.astype(np.int64)
        return self._judged(use, access, d, entry, operand, found, n, mask, axis, rank)

    def _judged(
        self,
        use: Use,
        access: Access,
        d: int,
        entry: At | Span | Gather,
        operand: Value | None,
        start: Table | None,
        n: int,
        mask: Table | None,
        axis: int,
        rank: int,
    ) -> Claim:
        """One entry of an index, of which the first position is known or not."""
        if self._in_range(access, d, entry, operand, n):
            return Claim("bounds", PROVED, "")
        what = f"index {d} of {self.names.ref(access.ref)}"
        line = str(use.op.loc or "")
        if start is None:
            return Claim("bounds", UNKNOWN, f"{what} {_DATA}", line)
        masked = access.mask is not None
        positions = self._positions(start, entry, axis, rank, masked)
        last = n - 1 if masked or isinstance(entry, Gather) else n - _extent(entry)
        bad: Table | None = (positions < 0) | (positions > last)
        if not bad.any():
            return Claim("bounds", PROVED, "")
        if masked:
            if mask is None:
                why = (
                    f"{what} may leave it: its mask depends on values read from memory"
                )
                return Claim("bounds", UNKNOWN, why, line)
            bad = _both(bad, self.tables.with_tile(mask, rank))
            if bad is None:
                return Claim(
                    "bounds", UNKNOWN, f"{what} has too many steps to try", line
                )
        at = first_step(bad, use.place)
        if at is None:
            return Claim("bounds", PROVED, "")
        if not use.place.sure:
            why = f"{what} leaves it if its code runs: {use.place.why}"
            return Claim("bounds", UNKNOWN, why, use.place.line or line)
        shape = np.broadcast_shapes(positions.shape, bad.shape)
        full = [
            i if s > 1 else 0
            for i, s in zip(at, _padded(positions.shape, shape), strict=True)
        ]
        value = int(positions[tuple(full)])
        return self._refuted(use, what, value, entry, n, at, line)

    def _positions(
        self,
        start: Table,
        entry: At | Span | Gather,
        axis: int,
        rank: int,
        masked: bool,
    ) -> Table:
        if isinstance(entry, Gather) or (masked and isinstance(entry, Span)):
            start = self.tables.with_tile(start, rank)
        if masked and isinstance(entry, At):
            start = self.tables.with_tile(start, rank)
        if not (masked and isinstance(entry, Span)):
            return start
        shape = [1] * (self.tables.rank + rank)
        shape[self.tables.rank + axis] = entry.size
        return start + (np.arange(entry.size) * entry.stride).reshape(shape)

    def _refuted(
        self,
        use: Use,
        what: str,
        value: int,
        entry: At | Span | Gather,
        n: int,
        at: Sequence[int],
        line: str,
    ) -> Claim:
        end = f":{value + _extent(entry)}" if isinstance(entry, Span) else ""
        text = f"{value}{end}, of {n} elements"
        step = self.names.step(use.op, at)
        example = self.replay.example("bounds", step, f"the index is {text}")
        return Claim("bounds", REFUTED, f"{what} leaves it", line, example)

    def _in_range(
        self,
        access: Access,
        d: int,
        entry: At | Span | Gather,
        operand: Value | None,
        n: int,
    ) -> bool:
        """Whether the range of an index, where its mask is on, fits."""
        positions = Positions(self.facts, self.tables.makers, access.mask)
        if operand is None:
            return False
        if access.mask is None:
            fact = self.facts.of(operand)
            return fact.within(0, n - _extent(entry))
        axis = self._rank_of_gathers(access)
        place = positions.of(operand)
        if isinstance(entry, Span):
            axis += sum(isinstance(e, Span) for e in access.index[:d])
            place = place.plus(positions.along(axis, entry.size), entry.stride)
        return positions.range(place).within(0, n - 1)

    # --- windows ---

    def window(self, shows: Shows) -> Iterator[Claim]:
        array, window, index_map, _ = shows.pipeline.shown[shows.number]
        pending = iter(index_map.yields)
        line = str(
            next(
                (o.loc for o in reversed(index_map.ops) if o.loc), shows.pipeline.op.loc
            )
            or ""
        )
        for d, (dim, n) in enumerate(zip(window.dims, array.ref.shape, strict=True)):
            index = next(pending)
            length = next(pending) if dim.kind == "bounded" else None
            yield self._block(shows, array, d, dim, n, index, line)
            if length is not None and not self.facts.of(length).within(0, dim.size):
                table = self.tables.of(length)
                if table is None or np.any((table < 0) | (table > dim.size)):
                    name = self.names.ref(array)
                    why = f"the length of a block of {name} may exceed {dim.size}"
                    yield Claim("bounds", UNKNOWN, why, line)

    def _block(
        self,
        shows: Shows,
        array: Value,
        d: int,
        dim: BlockDim,
        n: int,
        index: Value,
        line: str,
    ) -> Claim:
        last, what = last_number(dim, n), f"the index map of {self.names.ref(array)}"
        if self.facts.of(index).within(0, last):
            return Claim("bounds", PROVED, "")
        found = self.tables.of(index)
        if found is None:
            return Claim("bounds", UNKNOWN, f"dimension {d} of {what} {_DATA}", line)
        at = first_step((found < 0) | (found > last), shows.place)
        if at is None:
            return Claim("bounds", PROVED, "")
        if not shows.place.sure or dim.kind == "bounded":
            why = f"dimension {d} of {what} may leave the array: {shows.place.why}"
            return Claim("bounds", UNKNOWN, why, line)
        at_map = [i if s > 1 else 0 for i, s in zip(at, found.shape, strict=True)]
        kind = "block" if dim.kind == "blocked" else "element"
        text = (
            f"dimension {d} is {kind} {int(found[tuple(at_map)])}; the last is {last}"
        )
        inside: Op | None = (
            shows.pipeline.body.ops[0] if shows.pipeline.body.ops else None
        )
        example = self.replay.example("bounds", self.names.step(inside, at), text)
        return Claim("bounds", REFUTED, f"{what} leaves the array", line, example)


def _extent(entry: At | Span | Gather) -> int:
    return 1 if isinstance(entry, Gather) else extent_of(entry)


def _padded(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    return [*shape, *[1] * (len(like) - len(shape))]


def _both(one: Table, other: Table) -> Table | None:
    shape = np.broadcast_shapes(one.shape, other.shape)
    return None if np.prod(shape, dtype=np.int64) > 4 * MOST_ENTRIES else one & other
