"""exact_factors: f32 factors of dots that hold narrower numbers have their type.

In: exact dots of f32 whose operands were widened before (`q.astype(f32) @ ...`), or are
masks or one-hot rows as numbers. Out: dots of what these were widened from, which GPUs
multiply on tensor cores. Where only one operand is exact in bf16, that one is bf16, and
the other stays f32: it is the sum of three bf16 numbers, each of which can be
multiplied there.

Proof: products of two numbers of bf16, or of f16, are exact in f32, and a dot sums
products in f32, in any order. This is for chips that multiply f32 exactly if asked to;
a TPU rounds the operands anyway.
"""

import numpy as np

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.types import BF16, F16, F32, DType
from pallasite.passes.normal.canonicalize import canonicalize

EXACT = (None, "default", "highest", "ieee")  # precisions that round no operand
MOVES = ("reshape", "broadcast_in_dim", "transpose")
_SMALL_FLOATS = ("f8e4m3fn", "f8e5m2")
_FURTHEST = 8  # ops between a widening and the dot


def exact_factors(kernel: Kernel) -> Kernel:
    """Dots of what their operands were widened from."""
    new = map_ops(kernel, _with_narrow_factors)
    return kernel if new is kernel else canonicalize(new)


def _with_narrow_factors(op: Op, b: Rewriter) -> Value | None:
    if op.name != "dot" or op.attrs["precision"] not in EXACT:
        return None
    types = {v.type.dtype for v in op.operands}
    if op.result.type.dtype != F32 or F32 not in types or types - {F32, BF16, F16}:
        return None
    for dtype in (BF16, F16):
        both = [_narrow(b, v, dtype) for v in op.operands]
        found = [v for v in both if v is not None]
        if len(found) == 2:
            return b.op("dot", *found, **op.attrs)
        if len(found) == 1 and dtype is BF16:
            one = tuple(v or w for v, w in zip(both, op.operands, strict=True))
            if one != op.operands and F32 in {v.type.dtype for v in one}:
                return b.op("dot", *one, **op.attrs)
    return None


def _narrow(b: Rewriter, value: Value, dtype: DType, ops: int = 0) -> Value | None:
    """A tile as numbers of another type, if these are the same ones."""
    if value.type.dtype == dtype:
        return value
    op = b.producer(value)
    if op is None or ops > _FURTHEST:
        return None
    if op.name == "constant" and _holds(dtype, op.attrs["value"]):
        return b.constant(op.attrs["value"], value.tile.with_dtype(dtype))
    if op.name == "cast" and _fits(op.operands[0].type.dtype, dtype):
        return b.cast(op.operands[0], dtype)
    first = int(op.name == "select_n")
    if op.name in MOVES or first:
        found = [_narrow(b, v, dtype, ops + 1) for v in op.operands[first:]]
        known = [v for v in found if v is not None]
        if len(known) == len(found):
            return b.op(op.name, *op.operands[:first], *known, **op.attrs)
    return None


def is_bytes(dtype: DType) -> bool:
    """Whether a type has whole numbers only, of at most eight bits."""
    return dtype.bits <= 8 and not dtype.is_float


def _fits(source: DType, dtype: DType) -> bool:
    """Whether a type has all numbers of another."""
    return is_bytes(source) or source == dtype or source.name in _SMALL_FLOATS


def _holds(dtype: DType, number: float) -> bool:
    return float(np.asarray(number).astype(dtype.np)) == number
