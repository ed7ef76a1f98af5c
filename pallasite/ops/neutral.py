"""The neutral element of each kind of reduction and scan."""

from pallasite.ir.types import DType
from pallasite.ops.formula import INF


def neutral(kind: str, dtype: DType) -> int | float:
    """The neutral element: the initial value of a reduction of a tile.

    Bools are 0 and 1. An integer with all bits set is -1, unsigned or not.
    """
    if kind in ("sum", "or", "xor"):
        return 0
    if kind == "prod":
        return 1
    if kind == "and":
        return 1 if dtype.is_bool else -1
    least = kind in ("max", "logsumexp")
    if dtype.is_float:
        return -INF if least else INF
    low, high = dtype.limits
    return low if least else high
