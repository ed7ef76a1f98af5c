"""Values that are old elements of a ref, merged with something: what ops make of them.

`axis_state.py` follows what a step computes from the contents that it found in a ref.
`Old` says for each element of a tile which element of the ref it started from, and how
it was merged since; everything else that depends on a ref is `Tainted`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pallasite.ir.nodes import Access, At, Gather, Index, Op, Value
from pallasite.ir.opdef import table

MERGES = {"add": "sum", **{k: k for k in ("max", "min", "and", "or", "xor")}}
_MOST_ELEMENTS = 1 << 20  # of a tile whose elements are followed one by one
Sources = frozenset[tuple[Value, int]]  # refs, each after a number of updates


@dataclass(frozen=True)
class Relative:
    """How a sum is kept relative to a running maximum, as an online softmax does.

    The sum is `u * exp(rate * (old - new))` for `u` relative to the maximum before.

    Attributes:
        old: the maximum that was loaded.
        new: the maximum of it and something free.
        rate: the factor in the exponent; infinite: the sum is `u` where the maximum
            is the same, and zero elsewhere.
        axes: for each dimension of the sum, that of the maximum, if it has one.
        first: it is no sum, but what belongs to the first of equal maxima.
    """

    old: Value
    new: Value
    rate: float
    axes: tuple[int | None, ...]
    first: bool = False


RELATIVE = "relative"


@dataclass(frozen=True, eq=False)
class Old:
    """A tile whose elements are old elements of a state, merged with something free.

    Attributes:
        ref: the state.
        place: index, operands and mask of the load, if the place is not fixed.
        index: for each element, which element of the ref (or of the place) it holds.
        merge: how it was merged; None: it was only moved.
        version: how many updates of the ref came before the load.
        relative: for a sum that was rescaled.
    """

    ref: Value
    place: tuple[object, ...] | None
    index: np.ndarray
    merge: str | None
    version: int
    relative: Relative | None = None

    @property
    def sources(self) -> Sources:
        return frozenset({(self.ref, self.version)})

    def alike(self, other: "Old") -> bool:
        """Whether both hold the same old elements."""
        mine = (self.ref, self.place, self.version)
        same = mine == (other.ref, other.place, other.version)
        same &= self.relative == other.relative
        return same and np.array_equal(self.index, other.index)

    def merged(self, kind: str) -> "Old | None":
        return replace(self, merge=kind) if self.merge in (None, kind) else None


@dataclass(frozen=True)
class Tainted:
    """Computed from states in some other way: from which, after how many updates."""

    sources: Sources


Abstract = Old | Tainted
# --- how ops act on them ---


def gathers(index: Index) -> bool:
    return any(isinstance(entry, Gather) for entry in index)


def place_of(access: Access) -> tuple[object, ...] | None:
    """What identifies a place that is known only at run time."""
    if not access.index_operands and access.mask is None:
        return None
    return (access.index, access.index_operands, access.mask)


def numbers(shape: Sequence[int]) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(tuple(shape))


def elements(shape: Sequence[int], index: Index) -> np.ndarray:
    """Which elements a fixed index selects, by number."""
    picks: list[int | slice] = []
    for entry in index:
        assert not isinstance(entry, Gather) and entry.start is not None
        if isinstance(entry, At):
            picks.append(entry.start)
        else:
            stop = entry.start + entry.extent
            picks.append(slice(entry.start, stop, entry.stride))
    return numbers(shape)[tuple(picks)]


def computed(op: Op, known: Sequence[Abstract | None]) -> Abstract | None:
    """The result of an op as old elements merged with something; None: otherwise."""
    row = table()[op.name]
    if len(op.results) != 1:
        return None
    first = known[0]
    if op.name in _MOVES and isinstance(first, Old) and not any(known[1:]):
        if op.result.tile.size > _MOST_ELEMENTS or first.relative:
            return None
        return replace(first, index=_MOVES[op.name](first.index, op))
    if op.name == "select_n" and first is None:
        return joined(known[1:])
    if op.name == "cast" and isinstance(first, Old):
        before, after = op.operands[0].tile.dtype, op.result.tile.dtype
        both = (before.is_float, before.is_integer)
        return first if both == (after.is_float, after.is_integer) else None
    if not row.elementwise or len(known) != 2:
        return None
    if op.name == "sub" and isinstance(first, Old) and known[1] is None:
        return first.merged("sum")
    olds = [k for k in known if k is not None]
    if op.name in MERGES and len(olds) == 1 and isinstance(olds[0], Old):
        return olds[0].merged(MERGES[op.name])
    return None


def joined(cases: Iterable[Abstract | None]) -> Abstract | None:
    """One of several values: the same old elements, merged in the same way or not."""
    found: Old | None = None
    for case in cases:
        if not isinstance(case, Old):
            return None
        if found is None:
            found = case
        elif not found.alike(case):
            return None
        elif case.merge is not None:
            found = found.merged(case.merge)
            if found is None:
                return None
    return found


def kept(before: Abstract | None, after: Abstract | None) -> Abstract | None:
    """What a loop carries, given what it starts an iteration with and ends it with."""
    if before is None and after is None:
        return None
    same = joined((before, after))
    if same is not None:
        return same
    both = (k.sources for k in (before, after) if k is not None)
    return Tainted(Sources().union(*both))


def same_value(x: Abstract | None, y: Abstract | None) -> bool:
    if isinstance(x, Old) and isinstance(y, Old):
        return x.merge == y.merge and x.alike(y)
    return x == y


def _broadcast(index: np.ndarray, op: Op) -> np.ndarray:
    shape, dims = op.attrs["shape"], op.attrs["dims"]
    sizes = [1] * len(shape)
    for n, dim in zip(index.shape, dims, strict=True):
        sizes[dim] = n
    return np.broadcast_to(index.reshape(sizes), shape)


def _sliced(index: np.ndarray, op: Op) -> np.ndarray:
    attrs = op.attrs
    bounds = zip(attrs["starts"], attrs["limits"], attrs["strides"], strict=True)
    return index[tuple(slice(*each) for each in bounds)]


_MOVES = {
    "reshape": lambda index, op: index.reshape(op.attrs["shape"]),
    "broadcast_in_dim": _broadcast,
    "slice": _sliced,
    "transpose": lambda index, op: index.transpose(op.attrs["perm"]),
}
