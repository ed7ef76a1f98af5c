"""Arrays cut into cells along the edges of what is touched, and which touches hit them.

Every touch is a union of cells, so what holds of a cell holds of each of its elements:
a grid of 64 x 64 blocks has 4096 cells, however large the blocks are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pallasite.ir.nodes import Value
from pallasite.proofs.tables import Table
from pallasite.proofs.touches import Part, Touch

_MOST = 1 << 22  # entries of one array of indices


class TooManyError(Exception):
    """There are too many steps or cells to try them all."""


@dataclass(frozen=True)
class Hits:
    """Cells that a touch hits along some dimensions, at the steps of a table.

    `cells` has a table per dimension; `valid` says which of their entries count.
    """

    dims: tuple[int, ...]
    cells: tuple[Table, ...]
    valid: Table


class Cells:
    """The cells of one array, for the given touches."""

    def __init__(self, root: Value, touches: Sequence[Touch], rank: int):
        self.shape, self.rank = root.ref.shape, rank
        self.edges = [
            _edges(n, [t for touch in touches for t in _ends(touch, d)])
            for d, n in enumerate(self.shape)
        ]
        self.counts = tuple(len(edges) - 1 for edges in self.edges)
        if prod(self.counts) > _MOST:
            raise TooManyError

    def first_element(self, cell: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(e[c]) for e, c in zip(self.edges, cell, strict=True))

    def hits(self, touch: Touch) -> Hits:
        """All dimensions of a touch together. Steps come first, then offsets."""
        return self._together(touch, tuple(range(len(self.shape))), touch.place.active)

    def groups(self, touch: Touch) -> Iterator[Hits]:
        """Groups of dimensions that move independently of each other.

        The touch hits the product of what the groups hit.
        """
        if touch.parts is None:
            yield self.hits(touch)
            return
        active = touch.place.active
        groups: list[tuple[set[int], frozenset[int]]] = [(set(), _axes(active))]
        for d, part in enumerate(touch.parts):
            dims, axes = {d}, _axes(part.start)
            for group in [g for g in groups if g[1] & axes]:
                groups.remove(group)
                dims, axes = dims | group[0], axes | group[1]
            groups.append((dims, axes))
        moves, ever = _axes(active), np.asarray(active.any(keepdims=True))
        for dims, axes in groups:
            own = active if moves & axes else ever
            if dims:
                yield self._together(touch, tuple(sorted(dims)), own)

    def _together(self, touch: Touch, dims: tuple[int, ...], active: Table) -> Hits:
        if touch.points is not None:
            return self._points(touch, dims, active)
        assert touch.parts is not None
        tables, offsets = list[tuple[Table, Table]](), len(dims)
        shape = active.shape
        for number, d in enumerate(dims):
            cells, valid = self._range(touch.parts[d], d)
            # Offsets of each dimension in a dimension of their own.
            k = cells.shape[-1]
            own = [1] * offsets
            own[number] = k
            cells = cells.reshape(*cells.shape[:-1], *own)
            valid = valid.reshape(*valid.shape[:-1], *own)
            shape = np.broadcast_shapes(shape, cells.shape[: self.rank])
            tables.append((cells, valid))
        full = (*shape, *(c.shape[self.rank + n] for n, (c, _) in enumerate(tables)))
        if prod(full) > _MOST:
            raise TooManyError
        valid = np.broadcast_to(active.reshape(active.shape + (1,) * offsets), full)
        for _, own_valid in tables:
            valid = valid & own_valid
        return Hits(dims, tuple(np.broadcast_to(c, full) for c, _ in tables), valid)

    def _range(self, part: Part, d: int) -> tuple[Table, Table]:
        edges, n = self.edges[d], self.shape[d]
        if part.stride == 1:
            low = np.searchsorted(edges, np.clip(part.start, 0, n))
            high = np.searchsorted(edges, np.clip(part.start + part.size, 0, n))
            most = int((high - low).max(initial=0))
            if low.size * most > _MOST:
                raise TooManyError
            cells = low[..., None] + np.arange(most)
            valid = cells < high[..., None]
        else:
            places = part.start[..., None] + np.arange(part.size) * part.stride
            valid = (places >= 0) & (places < n)
            cells = np.searchsorted(edges, np.clip(places, 0, n))
        return np.minimum(cells, max(self.counts[d] - 1, 0)), valid

    def _points(self, touch: Touch, dims: tuple[int, ...], active: Table) -> Hits:
        assert touch.points is not None and touch.on is not None
        rank = touch.on.ndim - self.rank
        active = active.reshape(active.shape + (1,) * rank)
        tables = (*touch.points, touch.on, active)
        shape = np.broadcast_shapes(*(t.shape for t in tables))
        if prod(shape) > _MOST:
            raise TooManyError
        valid = np.broadcast_to(touch.on & active, shape)
        cells = list[Table]()
        for d in dims:
            places = touch.points[d]
            valid = valid & (places >= 0) & (places < self.shape[d])
            found = np.searchsorted(self.edges[d], np.clip(places, 0, self.shape[d]))
            found = np.minimum(found, max(self.counts[d] - 1, 0))
            cells.append(np.broadcast_to(found, shape))
        return Hits(dims, tuple(cells), valid)


def _axes(table: Table) -> frozenset[int]:
    return frozenset(d for d, n in enumerate(table.shape) if n > 1)


def _ends(touch: Touch, d: int) -> Iterator[np.ndarray]:
    """Where what a touch selects along a dimension begins and ends."""
    if touch.parts is not None:
        part = touch.parts[d]
        if part.stride == 1:
            yield from (part.start.ravel(), part.start.ravel() + part.size)
            return
        if part.start.size * part.size > _MOST:
            raise TooManyError
        places = part.start.ravel()[:, None] + np.arange(part.size) * part.stride
        yield from (places.ravel(), places.ravel() + 1)
    elif touch.points is not None:
        places = np.unique(touch.points[d])
        yield from (places, places + 1)


def _edges(n: int, ends: Sequence[np.ndarray]) -> np.ndarray:
    found = np.unique(np.concatenate([*ends, np.array([0, n])]))
    return found[(found >= 0) & (found <= n)]
