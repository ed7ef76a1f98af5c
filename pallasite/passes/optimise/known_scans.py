"""known_scans: running sums and maxima that are written out become scans.

`lax.associative_scan` has no primitive: it is traced to about a dozen strided slices,
pads and concatenates per scan. In: such code, where each element of a tile is the sum
(the maximum, minimum or product) of a range of elements of another tile. Out: one
`scan`, where these ranges are all elements up to its own. Sums are taken in another
order.

Proof: the range of each element is followed through the code. A slice picks ranges, a
concatenation joins them, padding with zeros adds elements without one, and adding these
gives the other operand. An operation on two elements gives the union of their ranges if
these are adjoining, or overlap and the operation is a maximum or minimum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import dead_code, map_ops
from pallasite.ir.roles import number_of

_KINDS = {"add": "sum", "max": "max", "min": "min", "mul": "prod"}
_IDEMPOTENT = ("max", "min")
LEAST = 4  # elements of a scan


def known_scans(kernel: Kernel) -> Kernel:
    """Replace each such tile by a scan."""
    before = kernel
    while (found := _found(kernel)) is not None:
        value, scan = found
        make = lambda op, b, v=value, s=scan: (
            [b.op("scan", s.base, kind=_KINDS[s.kind], axis=s.dim, reverse=False)]
            if op.results == (v,)
            else None
        )
        kernel = map_ops(kernel, make)
    return kernel if kernel is before else dead_code(kernel)


@dataclass(frozen=True, eq=False)
class _Ranges:
    """Each element along a dimension as what an operation makes of a range."""

    base: Value
    dim: int
    low: np.ndarray
    high: np.ndarray  # as `low`: the element is zero
    kind: str = ""  # the operation; none so far

    def picked(self, pick: Callable[[np.ndarray], np.ndarray]) -> "_Ranges":
        return replace(self, low=pick(self.low), high=pick(self.high))

    @property
    def is_scan(self) -> bool:
        n = self.base.tile.shape[self.dim]
        whole = self.kind and n >= LEAST and len(self.low) == n
        ends = np.arange(1, len(self.low) + 1)
        return bool(whole and not self.low.any() and np.array_equal(self.high, ends))


def _found(kernel: Kernel) -> tuple[Value, _Ranges] | None:
    """The first tile that is a scan of another."""
    if not any(op.name == "slice" for op in walk(kernel.body)):
        return None
    made = {v: op for op in walk(kernel.body) for v in op.results}
    blocks = [kernel.body]
    blocks += [region for op in walk(kernel.body) for region in op.regions]
    for block in blocks:
        found = _in_block(block, made)
        if found is not None:
            return found
    return None


def _in_block(block: Block, made: Mapping[Value, Op]) -> tuple[Value, _Ranges] | None:
    known: dict[Value, _Ranges] = {}
    for op in block.ops:
        if len(op.results) != 1 or op.result.is_ref or not op.result.tile.rank:
            continue
        found = _RULES.get(op.name, _nothing)(op, known, made)
        if found is not None and found.is_scan:
            return op.result, found
        if found is not None:
            known[op.result] = found
    return None


_Rule = Callable[[Op, Mapping[Value, _Ranges], Mapping[Value, Op]], _Ranges | None]


def _nothing(op: Op, known: Mapping[Value, _Ranges], made: Mapping[Value, Op]) -> None:
    return None


def _slice(
    op: Op, known: Mapping[Value, _Ranges], made: Mapping[Value, Op]
) -> _Ranges | None:
    (x,) = op.operands
    parts = [
        slice(*each)
        for each in zip(
            *(op.attrs[name] for name in ("starts", "limits", "strides")), strict=True
        )
    ]
    cut = [
        d
        for d, (part, n) in enumerate(zip(parts, x.tile.shape, strict=True))
        if part != slice(0, n, 1)
    ]
    if len(cut) != 1:
        return None
    (dim,) = cut
    ranges = known.get(x)
    if ranges is None:
        numbers = np.arange(x.tile.shape[dim])
        ranges = _Ranges(x, dim, numbers, numbers + 1)
    return ranges.picked(lambda a: a[parts[dim]]) if ranges.dim == dim else None


def _concatenate(
    op: Op, known: Mapping[Value, _Ranges], made: Mapping[Value, Op]
) -> _Ranges | None:
    parts = [known.get(v) for v in op.operands]
    first = _same([p for p in parts if p is not None])
    if first is None or None in parts or op.attrs["axis"] != first.dim:
        return None
    low = np.concatenate([p.low for p in parts if p is not None])
    high = np.concatenate([p.high for p in parts if p is not None])
    return replace(first, low=low, high=high)


def _pad(
    op: Op, known: Mapping[Value, _Ranges], made: Mapping[Value, Op]
) -> _Ranges | None:
    x, filling = op.operands
    ranges = known.get(x)
    if ranges is None or number_of(made, filling) != 0:
        return None
    low, high, interior = (op.attrs[name] for name in ("low", "high", "interior"))
    others = [d for d in range(x.tile.rank) if d != ranges.dim]
    d = ranges.dim
    if any((low[o], high[o], interior[o]) != (0, 0, 0) for o in others):
        return None
    if low[d] < 0 or high[d] < 0:
        return None
    places = low[d] + np.arange(len(ranges.low)) * (interior[d] + 1)
    n = op.result.tile.shape[d]

    def spread(a: np.ndarray) -> np.ndarray:
        wide = np.full(n, -1)
        wide[places] = a
        return wide

    return ranges.picked(spread)


def _binary(
    op: Op, known: Mapping[Value, _Ranges], made: Mapping[Value, Op]
) -> _Ranges | None:
    x, y = (known.get(v) for v in op.operands)
    if x is None or y is None:
        return None
    first = _same([x, y])
    if first is None:
        return None
    no_x, no_y = x.low == x.high, y.low == y.high
    apart = no_x | no_y
    if apart.any() and op.name != "add":
        return None
    low = np.where(no_x, y.low, np.where(no_y, x.low, np.minimum(x.low, y.low)))
    high = np.where(no_x, y.high, np.where(no_y, x.high, np.maximum(x.high, y.high)))
    if apart.all():
        return replace(first, low=low, high=high)
    if first.kind not in ("", op.name):
        return None
    touch = (x.high == y.low) | (y.high == x.low)
    if op.name in _IDEMPOTENT:
        touch |= (x.high >= y.low) & (y.high >= x.low)
    if not (touch | apart).all():
        return None
    return replace(first, low=low, high=high, kind=op.name)


def _same(parts: list[_Ranges]) -> _Ranges | None:
    """One with the operation of all, if they are of the same elements."""
    if not parts:
        return None
    first = parts[0]
    kinds = {p.kind for p in parts} - {""}
    if len(kinds) > 1 or any((p.base, p.dim) != (first.base, first.dim) for p in parts):
        return None
    return replace(first, kind=next(iter(kinds), ""))


_RULES: Mapping[str, _Rule] = {
    "slice": _slice,
    "concatenate": _concatenate,
    "pad": _pad,
    **dict.fromkeys(_KINDS, _binary),
}
