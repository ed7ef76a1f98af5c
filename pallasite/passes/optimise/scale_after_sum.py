"""Scales accumulated matmuls once after the loop instead of scaling their operands.

In: a kernel after `promote`. A loop that accumulates `dot(c * x, y)` from zero, or
`c * dot(x, y)`, accumulates `dot(x, y)` instead, and its result is multiplied by c. The
gradient of attention is such a sum, because scores are scaled; this saves each
iteration one multiplication per score. Only where x is rounded to a type with the
exponent range of f32 (bf16, or not rounded at all), so that the range of magnitudes is
the same. Rounding errors are relative and stay as large as they were.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, producers_of, users_of
from pallasite.ir.roles import Loop, number_of
from pallasite.ir.types import BF16, F32

WIDE = (F32, BF16)  # types with the same exponent range
LEAST, MOST = 2.0**-16, 2.0**16  # factors that use up little of it


def scale_after_sum(kernel: Kernel) -> Kernel:
    """Multiply accumulated matmuls after the loops that compute them."""
    find = _Scaled(kernel)

    def rewrite(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "for":
            return None
        loop = Loop.of(op)
        places = range(len(loop.inits))
        found = {n: s for n in places if (s := find.in_sum(loop, n)) is not None}
        if not found:
            return None
        plain = {scaled.value: scaled.x for scaled in found.values()}
        region = map_ops(
            loop.body,
            lambda op, _: [plain[op.result]] if set(op.results) & set(plain) else None,
        )
        results = list(b.emit("for", *op.operands, regions=(region,)))
        for n, scaled in found.items():
            results[n] = b.mul(results[n], b.like(scaled.factor, results[n]))
        return results

    new = map_ops(kernel, rewrite)
    return new if new is kernel else dead_code(new)


class _Product(NamedTuple):
    """A tile that is another tile times a number."""

    value: Value
    x: Value
    factor: float


class _Scaled:
    """Scaled operands of the matmuls that loops accumulate."""

    def __init__(self, kernel: Kernel):
        self.makers = producers_of(kernel.body)
        self.users = users_of(kernel.body)

    def in_sum(self, loop: Loop, place: int) -> _Product | None:
        """Find one in what a loop adds to one of its carried values."""
        carried, total = loop.carried[place], loop.yields[place]
        add = self.makers.get(total)
        if add is None or add.name != "add" or carried not in add.operands:
            return None
        if number_of(self.makers, loop.inits[place]) != 0:
            return None
        x, y = add.operands
        added = y if x is carried else x
        if not all(map(self.is_used_once, (carried, total, added))):
            return None
        dot, whole = self.makers.get(added), self.in_tile(added)
        if whole is not None and dot is not None and dot.name == "mul":
            product = self.makers.get(whole.x)
            is_dot = product is not None and product.name == "dot"
            return whole if is_dot and self.is_used_once(whole.x) else None
        if dot is None or dot.name != "dot" or dot.attrs["dtype"] != F32:
            return None
        found = (self.in_tile(side) for side in dot.operands)
        return next((each for each in found if each is not None), None)

    def in_tile(self, value: Value) -> _Product | None:
        """Find the product behind a tile, in wide types: rounded, or masked."""
        op = self.makers.get(value)
        wide = value.tile.dtype in WIDE
        if op is None or not wide or not self.is_used_once(value):
            return None
        if op.name == "cast":
            return self.in_tile(op.operands[0])
        if op.name == "select_n":
            cases = [v for v in op.operands[1:] if number_of(self.makers, v) != 0]
            return self.in_tile(cases[0]) if len(cases) == 1 else None
        if op.name != "mul":
            return None
        for x, y in (op.operands, op.operands[::-1]):
            factor = number_of(self.makers, y)
            if factor is not None and LEAST <= abs(factor) <= MOST:
                return _Product(value, x, factor)
        return None

    def is_used_once(self, value: Value) -> bool:
        return len(self.users[value]) == 1
