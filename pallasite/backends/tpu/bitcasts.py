"""Bitcasts between element widths, by shifts.

The chip only reinterprets elements of equal width. Wider elements are split into
narrower ones along a new last dimension, lowest bits first, and assembled in reverse.
Kernel in, Kernel out.
"""

from functools import reduce

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.types import DTYPES, U32, DType


def bitcasts_of_one_width(kernel: Kernel) -> Kernel:
    """The kernel with bitcasts only between types of the same width."""
    return map_ops(kernel, _rewritten)


def _rewritten(op: Op, b: Rewriter) -> Value | None:
    if op.name != "bitcast":
        return None
    before, after = op.operands[0].tile.dtype, op.attrs["dtype"]
    if before.bits == after.bits or max(before.bits, after.bits) > 32:
        return None
    if before.is_bool or after.is_bool:
        return None
    bits = b.cast(_same_width(b, op.operands[0], _unsigned(before)), U32)
    change = _cut if before.bits > after.bits else _joined
    bits = change(b, bits, min(before.bits, after.bits), max(before.bits, after.bits))
    return _same_width(b, b.cast(bits, _unsigned(after)), after)


def _unsigned(dtype: DType) -> DType:
    return DTYPES[f"u{dtype.bits}"]


def _same_width(b: Builder, x: Value, dtype: DType) -> Value:
    return x if x.tile.dtype == dtype else b.op("bitcast", x, dtype=dtype)


def _cut(b: Builder, words: Value, narrow: int, wide: int) -> Value:
    shape = (*words.tile.shape, 1)
    parts = []
    for place in range(0, wide, narrow):
        part = b.op("shift_right_logical", words, b.like(place, words))
        part = b.and_(part, b.like((1 << narrow) - 1, part))
        parts.append(b.op("reshape", part, shape=shape))
    return b.op("concatenate", *parts, axis=len(shape) - 1)


def _joined(b: Builder, parts: Value, narrow: int, wide: int) -> Value:
    *outer, count = parts.tile.shape
    starts, ones = (0,) * len(outer), (1,) * (len(outer) + 1)
    words = []
    for number in range(count):
        limits = (*outer, number + 1)
        part = b.op(
            "slice", parts, starts=(*starts, number), limits=limits, strides=ones
        )
        part = b.op("reshape", part, shape=tuple(outer))
        words.append(b.op("shift_left", part, b.like(number * narrow, part)))
    return reduce(b.or_, words)
