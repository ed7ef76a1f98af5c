"""index_arrays: what arrays of integers count, and where they are alike.

`jnp.arange(n)`, also moved, broadcast and shifted by scalars, counts up along one
dimension. `consecutive_indices.py` makes slices of accesses at such places,
`optimise/one_hots.py` sums at computed places of comparisons with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Op, Value
from pallasite.ir.rewrite import is_elementwise
from pallasite.passes.facts_walk import FactsWalk


@dataclass(frozen=True)
class Count:
    """An index array: `start` plus the position along dimension `dim` (None: alike).

    `starts` are scalars to add up; no element is known to be less than `low`.
    """

    dim: int | None
    starts: tuple[Value, ...] = ()
    offset: int = 0
    low: float = -inf


class IndexArrays(FactsWalk):
    """A walk that knows what index arrays count."""

    def count(self, value: Value) -> Count | None:
        fact = self.facts.of(value)
        if fact.number is not None:
            return Count(None, (), fact.number)
        if not value.tile.rank:
            return Count(None, (value,))
        op = self.producers.get(value)
        if op is None:
            return None
        if op.name == "iota":
            return Count(op.attrs["dim"])
        if op.name == "cast":
            source = op.operands[0].tile.dtype
            is_exact = source.is_integer and not self.facts.may_wrap(op)
            return self.count(op.operands[0]) if is_exact else None
        if op.name == "broadcast_in_dim":
            return self._broadcast(op)
        if op.name == "reshape":
            return self._reshaped(op)
        if op.name == "add" and not self.facts.may_wrap(op):
            return _sum(*map(self.count, op.operands))
        same = self._chosen(op)
        return None if same is None else self.count(same)

    def _chosen(self, op: Op) -> Value | None:
        """The operand that a remainder, or the choice of another index, leaves as it
        is."""
        if op.name == "rem":
            x, most = op.operands[0], self.facts.of(op.operands[1]).number
            inside = most is not None and self.facts.of(x).within(0, most - 1)
            return x if inside else None
        which = self.facts.of(op.operands[0]).number if op.name == "select_n" else None
        return None if which is None else op.operands[1 + int(which)]

    def _broadcast(self, op: Op) -> Count | None:
        (operand,), shape = op.operands, op.result.tile.shape
        count = self.count(operand)
        if count is None or count.dim is None:
            return count
        dim = op.attrs["dims"][count.dim]
        is_alike = operand.tile.shape[count.dim] == shape[dim]
        return replace(count, dim=dim) if is_alike else None

    def _reshaped(self, op: Op) -> Count | None:
        """Only with dimensions of size 1 added or removed."""
        old, new = op.operands[0].tile.shape, op.result.tile.shape
        wide, now = ([d for d, n in enumerate(s) if n > 1] for s in (old, new))
        count = self.count(op.operands[0])
        if [old[d] for d in wide] != [new[d] for d in now] or count is None:
            return None
        if count.dim not in wide:
            return replace(count, dim=None)
        return replace(count, dim=now[wide.index(count.dim)])

    def number(self, value: Value) -> float | None:
        """The number that all elements are known to be."""
        op = self.producers.get(value)
        if op is not None and op.name == "constant":
            return op.attrs["value"]
        return None if value.tile.dtype.is_float else self.facts.of(value).number

    def is_alike(self, value: Value, dim: int) -> bool:
        """Whether the elements of an array are the same along a dimension."""
        if value.tile.shape[dim] == 1 or self.number(value) is not None:
            return True
        op = self.producers.get(value)
        if op is None:
            return False
        if op.name == "iota":
            return op.attrs["dim"] != dim
        if op.name == "broadcast_in_dim":
            (source,), dims = op.operands, op.attrs["dims"]
            return dim not in dims or self.is_alike(source, dims.index(dim))
        tiles = [v for v in op.operands if v.tile.rank] if is_elementwise(op) else []
        return bool(tiles) and all(self.is_alike(v, dim) for v in tiles)


def _sum(x: Count | None, y: Count | None) -> Count | None:
    if x is None or y is None or (x.dim is not None and y.dim is not None):
        return None
    dim = y.dim if x.dim is None else x.dim
    return Count(dim, x.starts + y.starts, x.offset + y.offset)


def first_along(b: Builder, value: Value, shape: Sequence[int]) -> Value:
    """The first element along the last dimensions; `shape` are the others."""
    rank = value.tile.rank
    ones = (1,) * (rank - len(shape))
    window = {"starts": (0,) * rank, "limits": (*shape, *ones), "strides": (1,) * rank}
    first = b.op("slice", value, **window)
    return b.op("reshape", first, shape=tuple(shape))
