"""bf16_pieces: a dot of f32 with exact bf16 numbers is three dots of bf16.

In: `dot` of an f32 tile and a bf16 one, as `exact_factors.py` leaves them. Out: dots of
the bf16 tile with three others that sum to the f32 one. Tensor cores multiply these,
and they have no exact f32.

Proof: f32 has 24 significant bits and bf16 has 8, so three pieces, each the first bits
of what the one before left, are all of it (for numbers below 2**-110, but for less than
the smallest normal number). Products of bf16 are exact in f32, and a dot sums products
in f32, in any order. Of infinity nothing is left, of NaN NaN. Where the bf16 side may
be infinite, too, its products with the smaller pieces are not added to one that is not
finite, as they may have the other sign; so the first piece is rounded, which keeps NaN.
"""

from collections.abc import Mapping

from pallasite.backends.triton.dots import FEW_PRODUCTS, SMALLEST
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops, users_of
from pallasite.ir.roles import Dot
from pallasite.ir.types import BF16, F32, I32
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.exact_factors import EXACT, MOVES, is_bytes

PIECES = 3


def bf16_pieces(kernel: Kernel) -> Kernel:
    """Dots of bf16 instead of those with one f32 operand."""
    users = users_of(kernel.body)

    def rewrite(op: Op, b: Rewriter) -> Value | None:
        if op.name == "add":
            return _onto_sum(op, b, users)
        if op.name != "dot" or not _is_mixed(op) or _is_summed(op, b, users):
            return None
        *small, main = _products(op, b)
        if _is_of_bytes(op, b):
            return _sum(b, [*small, main])
        is_finite = b.op("is_finite", main)
        return b.select(is_finite, b.add(_sum(b, small), main), main)

    new = map_ops(kernel, rewrite)
    return kernel if new is kernel else canonicalize(new)


def _onto_sum(op: Op, b: Rewriter, users: Mapping[Value, list[Op]]) -> Value | None:
    """The pieces' products are added one by one, so that each has the same tile."""
    for value, other in (op.operands, op.operands[::-1]):
        dot = b.producer(value, "dot")
        if dot is not None and _is_mixed(dot) and _is_summed(dot, b, users):
            return _sum(b, [other, *_products(dot, b)])
    return None


def _is_summed(dot: Op, b: Rewriter, users: Mapping[Value, list[Op]]) -> bool:
    only = users[dot.result]
    return len(only) == 1 and only[0].name == "add" and _is_of_bytes(dot, b)


def _is_mixed(op: Op) -> bool:
    types = {v.type.dtype for v in op.operands}
    if types != {F32, BF16} or op.attrs["precision"] not in EXACT:
        return False
    dot = Dot.of(op)
    rows, columns = (side.value.tile.size // dot.depth for side in dot.sides)
    many = rows * columns * dot.depth > FEW_PRODUCTS
    return many or min(rows, columns, dot.depth) >= SMALLEST


def _is_of_bytes(dot: Op, b: Rewriter) -> bool:
    """Whether the bf16 side was bools or bytes, which are finite."""
    value = next(v for v in dot.operands if v.type.dtype == BF16)
    op = b.producer(value)
    while op is not None and op.name in MOVES:
        op = b.producer(op.operands[0])
    return op is not None and op.name == "cast" and is_bytes(op.operands[0].type.dtype)


def _products(op: Op, b: Rewriter) -> list[Value]:
    """With each piece, the smallest first."""
    of_bytes = _is_of_bytes(op, b)
    sides = (
        _pieces(b, x, of_bytes) if x.type.dtype == F32 else [x] * PIECES
        for x in op.operands
    )
    pairs = zip(*sides, strict=True)
    return [b.op("dot", *pair, **op.attrs) for pair in pairs][::-1]


def _pieces(b: Rewriter, x: Value, of_bytes: bool) -> list[Value]:
    """Tiles of bf16 that sum to an f32 one, the largest first."""
    first = _first_bits(b, x) if of_bytes else b.cast(b.cast(x, BF16), F32)
    is_all = b.eq(x, first) if of_bytes else b.not_(b.op("is_finite", first))
    left = b.select(is_all, b.like(0, x), b.sub(x, first))
    second = _first_bits(b, left)
    return [b.cast(piece, BF16) for piece in (first, second, b.sub(left, second))]


def _first_bits(b: Rewriter, x: Value) -> Value:
    """The numbers without the bits that bf16 does not have."""
    bits = b.op("bitcast", x, dtype=I32)
    kept = b.op("and", bits, b.like(-1 << 16, bits))
    return b.op("bitcast", kept, dtype=F32)


def _sum(b: Rewriter, values: list[Value]) -> Value:
    total, *rest = values
    for value in rest:
        total = b.add(total, value)
    return total
