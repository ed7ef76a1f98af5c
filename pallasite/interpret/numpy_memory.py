"""Which elements of a numpy array an access touches, and moving them in and out.

`region_of` turns Picks into a Region: slices where the access is a rectangle, index
arrays where it gathers. The numpy number system reads and writes through it; checked
mode looks at its shadow arrays through it.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pallasite.interpret.numbers import Pick, Picks, picked_shape

Array = Any


class Run:
    """A rectangle of an array, and which part of the picked block it is.

    `index` is what exists of it: slices of the array. `part` is its position in the
    picked block, None where all of the block exists. `full` is the block's shape
    with one entry per array dimension, `shape` without those that are not kept.
    """

    __slots__ = ("full", "index", "part", "shape")

    def __init__(self, index: tuple, part: tuple | None, full: tuple, shape: tuple):
        self.index, self.part, self.full, self.shape = index, part, full, shape

    def take(self, array: np.ndarray, outside: Any) -> Array:
        """A copy of the picked block; what does not exist is `outside`."""
        if self.part is None:
            found = array[self.index]
            return found.copy() if self.full == self.shape else _dropped(found, self)
        block = np.full(self.full, outside, array.dtype)
        block[self.part] = array[self.index]
        return block.reshape(self.shape)

    def put(self, array: np.ndarray, value: Array, mask: Array | None) -> None:
        target = _view(array, self.index)
        value = self.existing(value)
        if mask is None:
            target[...] = value
        else:
            np.copyto(target, value, where=self.existing(mask))

    def existing(self, value: Array) -> Array:
        """The part of a picked block that exists, with one entry per dimension."""
        if self.part is None and np.ndim(value) == 0:
            return value
        if np.shape(value) != self.shape:
            value = np.broadcast_to(value, self.shape)
        value = np.reshape(value, self.full)  # it may be a plain number
        return value if self.part is None else value[self.part]

    def outside(self) -> np.ndarray | None:
        """Which elements of the picked block do not exist; None if all do."""
        if self.part is None:
            return None
        missing = np.ones(self.full, bool)
        missing[self.part] = False
        return missing.reshape(self.shape)

    def elements(self, mask: Array | None = None) -> "Elements":
        return Elements(self.index, None if mask is None else self.existing(mask))


class Gathered:
    """Elements an index array names. `valid` is None where all of them exist."""

    __slots__ = ("positions", "shape", "valid")

    def __init__(self, positions: tuple, valid: np.ndarray | None, shape: tuple):
        self.positions, self.valid, self.shape = positions, valid, shape

    def take(self, array: np.ndarray, outside: Any) -> Array:
        if 0 in array.shape:
            return np.full(self.shape, outside, array.dtype)
        return array[self.positions]

    def put(self, array: np.ndarray, value: Array, mask: Array | None) -> None:
        where = self.chosen(mask)
        if where is None:
            array[self.positions] = value
        else:
            value = np.broadcast_to(value, self.shape)[where]
            array[tuple(p[where] for p in self.positions)] = value

    def chosen(self, mask: Array | None) -> Array | None:
        """Which picked elements an access with this mask touches; None: all."""
        if mask is None or self.valid is None:
            return self.valid if mask is None else np.broadcast_to(mask, self.shape)
        return self.valid & mask

    def outside(self) -> np.ndarray | None:
        return None if self.valid is None else ~self.valid

    def elements(self, mask: Array | None = None) -> "Elements":
        where = self.chosen(mask)
        if where is None:
            return Elements(self.positions)
        return Elements(tuple(p[where] for p in self.positions))


Region = Run | Gathered


class Elements:
    """A set of array elements: `array[index]`, of those the ones in `where`."""

    def __init__(self, index: tuple, where: np.ndarray | None = None):
        self.index, self.where = index, where

    def of(self, array: np.ndarray) -> np.ndarray:
        found = array[self.index]
        return found if self.where is None else found[self.where]

    def set(self, array: np.ndarray, value: Any) -> None:
        if self.where is None:
            array[self.index] = value
        else:
            _view(array, self.index)[self.where] = value

    @cached_property
    def is_dense(self) -> bool:
        """Whether it is a rectangle without holes."""
        return self.where is None and all(
            isinstance(i, slice) and i.step in (None, 1) for i in self.index
        )

    @cached_property
    def box(self) -> tuple[tuple[int, int], ...]:
        """First and past-last position along each dimension."""
        return tuple([_reach(i) for i in self.index])

    def position(self, shape: Sequence[int], n: int) -> tuple[int, ...]:
        """The position of the n-th of `of(array)` in an array of this shape."""
        ids = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        flat = np.ravel(self.of(ids))[n]
        return tuple(int(i) for i in np.unravel_index(flat, shape))

    def mask(self, shape: Sequence[int]) -> np.ndarray:
        marked = np.zeros(shape, bool)
        self.set(marked, True)
        return marked


def _view(array: np.ndarray, index: tuple) -> np.ndarray:
    return array[index] if index else array  # array[()] of rank 0 is a scalar


def _reach(i: Any) -> tuple[int, int]:
    if isinstance(i, slice):
        return i.start, i.stop
    if not np.size(i):
        return 0, 0
    return int(np.min(i)), int(np.max(i)) + 1


def _dropped(found: np.ndarray, run: Run) -> Array:
    """A copy without the dimensions that are not kept; a scalar where none is."""
    return found.reshape(-1)[0] if run.shape == () else found.copy().reshape(run.shape)


def region_of(picks: Picks, shape: Sequence[int]) -> Region:
    """The elements of an array of `shape` that an access picks."""
    for p in picks:
        if p.gather is not None or (p.clip is not None and _leaves(p)):
            return elements_of(picks, shape)
    index, part, full, kept, whole = [], [], [], [], True
    for p, n in zip(picks, shape, strict=True):
        start, size, stride = int(p.start), p.size, p.stride
        low = 0 if p.low is None else max(0, int(p.low))
        high = n if p.high is None else min(n, int(p.high))
        full.append(size)
        if p.kept:
            kept.append(size)
        stop = start + (size - 1) * stride + 1 if size else start
        if start >= low and stop <= high:
            index.append(slice(start, stop, stride))
            part.append(slice(0, size))
            continue
        whole = False
        first = min(size, max(0, -(-(low - start) // stride)))
        last = max(first, min(size, -(-(high - start) // stride)))
        begin = start + first * stride
        end = begin + (last - first - 1) * stride + 1 if last > first else begin
        if last == first:
            begin = end = 0
        index.append(slice(begin, end, stride))
        part.append(slice(first, last))
    return Run(tuple(index), None if whole else tuple(part), tuple(full), tuple(kept))


def _leaves(p: Pick) -> bool:
    """Does a run leave the range its positions are clipped to?"""
    assert p.clip is not None
    first, start = p.clip[0], int(p.start)
    return p.size > 0 and not first <= start <= p.clip[1] - p.extent


def elements_of(picks: Picks, shape: Sequence[int]) -> Gathered:
    """The same elements one by one: positions that do not exist are clamped."""
    result = picked_shape(picks)
    rank = len(result)
    gathered = next((np.ndim(p.gather) for p in picks if p.gather is not None), 0)
    axis = gathered
    positions, valid = [], None
    for p, n in zip(picks, shape, strict=True):
        position = _positions_along(p, axis, gathered, rank)
        axis += p.gather is None and p.kept
        if p.clip is not None:
            position = np.clip(position, p.clip[0], p.clip[1] - 1)
        low = 0 if p.low is None else max(0, int(p.low))
        high = n if p.high is None else min(n, int(p.high))
        inside = (position >= low) & (position < high)
        if not inside.all():
            position = np.clip(position, low, max(high - 1, 0))
            valid = inside if valid is None else valid & inside
        positions.append(np.broadcast_to(position, result))
    valid = None if valid is None else np.broadcast_to(valid, result)
    return Gathered(tuple(positions), valid, result)


def _positions_along(p: Pick, axis: int, gathered: int, rank: int) -> np.ndarray:
    if p.gather is not None:
        position = np.asarray(p.gather).astype(np.int64)
        return position.reshape(position.shape + (1,) * (rank - gathered))
    if not p.kept:
        return np.asarray(int(p.start), np.int64)
    position = int(p.start) + np.arange(p.size, dtype=np.int64) * p.stride
    return position.reshape((-1,) + (1,) * (rank - axis - 1))
