"""integer_dots: large matmuls of integers that have no matrix instruction.

In: any kernel. Out: such a matmul is a sum of matmuls of bytes, which have one. An
operand is written in signed digits of 8 bits, and the matmul of two digits is shifted
to where it counts; what the result's type does not hold is left out. This is exact, as
integers wrap around. Small ones stay: `dots.py` multiplies and sums them.
"""

from functools import reduce
from math import prod

from pallasite.backends.triton.dots import MOST_MULTIPLIED
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Dot
from pallasite.ir.types import I8, I32, I64, DType
from pallasite.target.chip import power_of_two

DEEPEST = 1 << 12  # sums of so many products of digits fit an i32, level by level


def integer_dots(kernel: Kernel) -> Kernel:
    """The kernel without large integer matmuls that Triton lacks."""
    return map_ops(kernel, _in_digits)


def _in_digits(op: Op, b: Rewriter) -> Value | None:
    if op.name != "dot" or not _is_missing(op):
        return None
    result: DType = op.attrs["dtype"]
    left, right = (_digits(b, v, result) for v in op.operands)
    attrs = {**op.own_attrs, "dtype": I32, "precision": None}
    total: Value | None = None
    for level in range(-(-result.bits // 8)):
        parts = [
            b.op("dot", x, right[level - n], **attrs)
            for n, x in enumerate(left)
            if 0 <= level - n < len(right)
        ]
        if not parts:
            continue
        part = b.cast(reduce(b.add, parts), result)
        if level:
            part = b.op("shift_left", part, b.like(8 * level, part))
        total = part if total is None else b.add(total, part)
    return total


def _is_missing(op: Op) -> bool:
    kinds = [v.tile.dtype for v in op.operands]
    result: DType = op.attrs["dtype"]
    if not result.is_integer or any(d.is_float for d in kinds) or result.bits < 8:
        return False
    dot = Dot.of(op)
    if result == I32 and all(d == I8 or d.bits == 4 for d in kinds):
        return False
    if result.bits == 64 and dot.depth > DEEPEST:
        return False
    left, right = dot.sides
    sizes = [prod(left.sizes(dims)) for dims in (left.batch, left.free)]
    sizes += [dot.depth, prod(right.sizes(right.free))]
    return prod(map(power_of_two, sizes)) > MOST_MULTIPLIED


def _digits(b: Builder, x: Value, result: DType) -> list[Value]:
    """Tiles of i8, lowest digit first, as many as matter in the result."""
    dtype = x.tile.dtype
    is_digit = dtype == I8 or dtype.is_bool or dtype.bits < 8
    count = 1 if is_digit else dtype.bits // 8 + 1  # the last one is a carry
    count = min(count, -(-result.bits // 8))
    wide = I32 if result.bits <= 32 else I64
    rest, found = b.cast(x, wide), []
    for _ in range(count):
        found.append(b.cast(rest, I8))
        rest = b.sub(rest, b.cast(found[-1], wide))
        rest = b.op("shift_right_arithmetic", rest, b.like(8, rest))
    return found
