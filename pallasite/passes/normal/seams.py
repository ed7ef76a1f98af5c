"""seams: what a mask drops from a joined tile is not in it.

In: a select between a number and a concatenation, by the position along which it is
joined, so that whole pieces at one end are dropped (a `roll` whose wrapped part a mask
replaces). Out: the other pieces, padded with the number. The wrapped part is neither
loaded nor, in the reverse, added up.

Proof: at each position the select gives the number where a dropped piece was, and that
is where the padding is; elsewhere the element of the concatenation.
"""

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, apply_patterns
from pallasite.passes.normal.algebra import constant_of
from pallasite.passes.normal.canonicalize import canonicalize


def seams(kernel: Kernel) -> Kernel:
    """Pad pieces of a concatenation instead of masking others."""
    new = apply_patterns(kernel, (("select_n", padded_pieces),))
    return kernel if new is kernel else canonicalize(new)


def padded_pieces(op: Op, b: Rewriter) -> Value | None:
    """The pieces that a mask keeps, padded."""
    which, *cases = op.operands
    if len(cases) != 2 or not which.tile.shape:
        return None
    for truth in (False, True):
        join = b.producer(cases[truth], "concatenate")
        number = constant_of(b, cases[not truth])
        found = _positions(which, truth, b)
        if join is None or number is None or found is None:
            continue
        d, first, end = found
        if join.attrs["axis"] == d and 0 <= first < end <= op.result.tile.shape[d]:
            return _padded(join, first, end, number, b)
    return None


def _padded(
    join: Op, first: int, end: int, number: object, b: Rewriter
) -> Value | None:
    d, at, kept = join.attrs["axis"], 0, list[Value]()
    for piece in join.operands:
        after = at + piece.tile.shape[d]
        if at >= first and after <= end:
            kept.append(piece)
        elif at < end and after > first:
            return None  # a part of a piece
        at = after
    if not kept or len(kept) == len(join.operands):
        return None
    rest = kept[0] if len(kept) == 1 else b.op("concatenate", *kept, axis=d)
    sides = [[0] * rest.tile.rank for _ in range(3)]
    sides[0][d], sides[1][d] = first, at - end
    low, high, interior = map(tuple, sides)
    fill = b.constant(number, rest.tile.with_shape(()))  # type: ignore[arg-type]
    return b.op("pad", rest, fill, low=low, high=high, interior=interior)


def _positions(which: Value, truth: bool, b: Rewriter) -> tuple[int, int, int] | None:
    """The dimension, the first and the end of the positions where a mask is `truth`."""
    op = b.producer(which)
    if op is None or op.name not in ("lt", "le", "gt", "ge"):
        return None
    x, y = op.operands
    name = op.name
    if b.producer(x, "iota") is None:
        x, y, name = y, x, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[name]
    iota, number = b.producer(x, "iota"), constant_of(b, y)
    if iota is None or not isinstance(number, int):
        return None
    d = iota.attrs["dim"]
    n = which.tile.shape[d]
    if n - 1 > iota.result.tile.dtype.limits[1]:
        return None  # numbers of few bits begin again
    # Where `position < limit`, or not.
    limit = number + (name in ("le", "gt"))
    below = (name in ("lt", "le")) == truth
    return (d, 0, limit) if below else (d, limit, n)
