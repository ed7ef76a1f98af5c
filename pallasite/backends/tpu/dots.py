"""Matmuls that the matrix unit does not take directly, built from ones it does.

It contracts one dimension, takes one batch dimension and one other on each side, and
multiplies floats and, after v4, signed bytes. Dimensions are merged. Other integers are
split into bytes, which bfloat16 represents exactly, as float32 does sums of up to 256
of their products; these are combined modulo the width of the result.

Kernel in, Kernel out.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Dot, DotSide
from pallasite.ir.types import BF16, F32, I32, DType
from pallasite.target import Tpu

DEPTH = 256  # products of two bytes whose sum float32 represents exactly


def plain_dots(kernel: Kernel, chip: Tpu | None = None) -> Kernel:
    """The kernel with dots of matrices, or of batches of matrices, only."""
    has_bytes = chip is None or chip.generation > 4
    return map_ops(kernel, partial(_rewritten, has_bytes=has_bytes))


def _rewritten(op: Op, b: Rewriter, has_bytes: bool) -> Value | None:
    if op.name != "dot":
        return None
    dot = Dot.of(op)
    sides = dot.sides
    merged = any(
        len(s.free) > 1 or len(s.contract) != 1 or len(s.batch) > 1 for s in sides
    )
    left, right = (s.value.tile.dtype for s in sides)
    bytes_ = not _multiplies(left, right, has_bytes)
    if not (merged or bytes_) or not op.result.tile.size or not dot.depth:
        return None
    lhs, rhs = (_matrix(b, side) for side in sides) if merged else op.operands
    attrs = dict(op.own_attrs)
    if merged:
        batched = bool(dot.lhs.batch)
        attrs["contract"] = ((1 + batched,),) * 2
        attrs["batch"] = ((0,),) * 2 if batched else ((), ())
    result = _of_bytes(b, lhs, rhs, attrs) if bytes_ else b.op("dot", lhs, rhs, **attrs)
    return b.op("reshape", result, shape=op.result.tile.shape)


def _multiplies(left: DType, right: DType, has_bytes: bool) -> bool:
    """Whether the matrix unit multiplies these types."""
    if left.is_float and right.is_float:
        return True
    return has_bytes and left == right and left.is_signed_int and left.bits <= 8


def _matrix(b: Builder, side: DotSide) -> Value:
    """An operand as (batches of) rows along the contracted dimension."""
    x, perm = side.value, (*side.batch, *side.free, *side.contract)
    if list(perm) != sorted(perm):
        x = b.op("transpose", x, perm=perm)
    sizes = [prod(side.sizes(dims)) for dims in (side.free, side.contract)]
    if side.batch:
        sizes.insert(0, prod(side.sizes(side.batch)))
    return b.op("reshape", x, shape=tuple(sizes))


def _of_bytes(b: Builder, lhs: Value, rhs: Value, attrs: dict) -> Value:
    """The integer matmul, modulo 2^32."""
    dims: list[int] = [each[0] for each in attrs["contract"]]
    depth = lhs.tile.shape[dims[0]]
    total: Value | None = None
    for start in range(0, depth, DEPTH):
        size = min(DEPTH, depth - start)
        parts = [
            _bytes(b, _along(b, x, dim, start, size))
            for x, dim in zip((lhs, rhs), dims, strict=True)
        ]
        for place, left in enumerate(parts[0]):
            for other, right in enumerate(parts[1]):
                if place + other > 3:
                    continue
                floats = {**attrs, "dtype": F32}
                part = b.cast(b.op("dot", left, right, **floats), I32)
                shift = b.like(8 * (place + other), part)
                part = b.op("shift_left", part, shift) if place + other else part
                total = part if total is None else b.add(total, part)
    assert total is not None
    return b.cast(total, attrs["dtype"])


def _bytes(b: Builder, x: Value) -> list[Value]:
    """The bytes of integers, lowest first, as bfloat16; the highest is signed."""
    dtype = x.tile.dtype
    count = max(dtype.bits // 8, 1)
    words = b.cast(x, I32)
    parts = []
    for place in range(count):
        signed = place == count - 1 and dtype.kind != "uint"
        part = words
        if place:
            part = b.op("shift_right_arithmetic", words, b.like(8 * place, words))
        if not signed:
            part = b.and_(part, b.like(0xFF, part))
        parts.append(b.cast(b.cast(part, F32), BF16))
    return parts


def _along(b: Builder, x: Value, dim: int, start: int, size: int) -> Value:
    shape: Sequence[int] = x.tile.shape
    if size == shape[dim]:
        return x
    starts = [start if d == dim else 0 for d in range(len(shape))]
    limits = [start + size if d == dim else n for d, n in enumerate(shape)]
    ones = (1,) * len(shape)
    return b.op("slice", x, starts=tuple(starts), limits=tuple(limits), strides=ones)
