"""equal_factors: a dot with a matrix of equal numbers is a sum.

In: `dot(jnp.ones((8, k)), x)`, a sum as one writes it for matrix units, or its
derivative, where zeros were padded to what is summed. Out: `x` summed once along k, and
broadcast; zeros are not summed.

Proof: every element of the result is the sum of the same products. The number is a
power of two, so that `c * x[0] + c * x[1]` and `c * (x[0] + x[1])` are rounded alike,
short of overflow; the order of a dot's sum is free. Adding zero changes no sum (but the
sign of a zero).
"""

from math import frexp

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, apply_patterns
from pallasite.ir.roles import Dot
from pallasite.passes.normal.canonicalize import canonicalize


def equal_factors(kernel: Kernel) -> Kernel:
    """Sums instead of dots with constants."""
    patterns = (("dot", _summed), ("reduce", _without_padding))
    new = apply_patterns(kernel, patterns)
    return kernel if new is kernel else canonicalize(new)


def _summed(op: Op, b: Rewriter) -> Value | None:
    dot, result = Dot.of(op), op.result.tile
    if result.dtype.is_float and result.dtype.bits < 32:
        return None  # its sums are rounded once
    for side, other in (dot.sides, dot.sides[::-1]):
        constant = b.producer(side.value, "constant")
        if constant is None or side.batch or not other.value.tile.size:
            continue
        number = constant.attrs["value"]
        if abs(frexp(number)[0]) != 0.5:
            continue
        x = b.cast(other.value, result.dtype)
        total = b.op("reduce", x, kind="sum", axes=tuple(sorted(other.contract)))
        total = b.mul(total, b.like(number, total))
        first = len(side.free) if other is dot.rhs else 0
        dims = tuple(range(first, first + len(other.free)))
        return b.broadcast(total, result.shape, dims)
    return None


def _without_padding(op: Op, b: Rewriter) -> Value | None:
    if op.attrs["kind"] != "sum" or len(op.operands) != 1:
        return None
    (whole,) = op.operands
    cast = b.producer(whole, "cast")
    pad = b.producer(whole if cast is None else cast.operands[0], "pad")
    if pad is None:
        return None
    x, value = pad.operands
    number = b.producer(value, "constant")
    sides = [pad.attrs[side] for side in ("low", "high")]
    padded = {d for side in sides for d, n in enumerate(side) if n}
    padded |= {d for d, n in enumerate(pad.attrs["interior"]) if n}
    cut = any(n < 0 for side in sides for n in side)
    is_zero = number is not None and number.attrs["value"] == 0
    if cut or not is_zero or not padded <= set(op.attrs["axes"]):
        return None
    return b.op("reduce", b.cast(x, whole.tile.dtype), **op.attrs)
