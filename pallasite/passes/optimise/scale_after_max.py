"""Moves multiplication by a positive constant after a maximum or minimum.

`max(c * x)` becomes `c * max(x)`: rounding is monotonic, so both are the same number,
also for NaN and infinities. A scaled softmax is left with `c * x - m` per element,
which chips with a fused multiply-add compute in one instruction.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, producers_of


def scale_after_max(kernel: Kernel) -> Kernel:
    """Multiply after every maximum or minimum of products that allows it."""
    makers = producers_of(kernel.body)

    def rewrite(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "reduce" or op.attrs["kind"] not in ("max", "min"):
            return None
        found = _product(op.operands[0], makers)
        if found is None:
            return None
        x, factor = found
        most = b.op("reduce", x, **op.attrs)
        return [b.mul(most, b.like(factor, most))]

    new = map_ops(kernel, rewrite)
    return new if new is kernel else dead_code(new)


def _product(value: Value, makers: Mapping[Value, Op]) -> tuple[Value, float] | None:
    """The tile and the positive constant that a tile is the product of."""
    op = makers.get(value)
    if op is None or op.name != "mul" or not value.tile.dtype.is_float:
        return None
    for x, y in (op.operands, op.operands[::-1]):
        maker = makers.get(y)
        if maker is not None and maker.name == "constant":
            factor = maker.attrs["value"]
            return (x, factor) if isfinite(factor) and factor > 0 else None
    return None
