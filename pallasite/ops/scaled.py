"""Operands of block-scaled matmuls: small numbers, and a scale for some along k.

No author writes these; `backends/cuda/scaled_operands.py` finds them. Scales are packed
as matrix instructions take them: for 128 rows and four scales of each, 512 bytes, of
which row `32 * j + i` has those from `16 * i + 4 * j`.
"""

from collections.abc import Sequence
from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.opdef import Attrs, OpDef, TypeRuleError, Unit, register
from pallasite.ir.types import F32, TileType, Type

ROWS, COLUMNS = 128, 4  # scales that are packed together
PACKED = ROWS * COLUMNS


def unpacked_shape(packed: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of scales: groups of columns, groups of rows, bytes."""
    groups, tall, _ = packed
    return tall * ROWS, groups * COLUMNS


def unpacked(b: Builder, scales: Value) -> Value:
    """Scales as a matrix."""
    groups, tall, _ = shape = scales.tile.shape
    x = b.op("reshape", scales, shape=(groups, tall, ROWS // 4, 4, COLUMNS))
    x = b.op("transpose", x, perm=(1, 3, 2, 0, 4))
    return b.op("reshape", x, shape=unpacked_shape(shape))


def unpacked_array(scales: Any) -> Any:
    """`unpacked`, of a numpy or JAX array."""
    groups, tall, _ = scales.shape
    x = scales.reshape(groups, tall, ROWS // 4, 4, COLUMNS).transpose(1, 3, 2, 0, 4)
    return x.reshape(unpacked_shape(scales.shape))


def factors(b: Builder, scales: Value, k: int) -> Value:
    """A scale in f32 for each of k elements of the rows of a matrix of scales."""
    rows, columns = scales.tile.shape
    each = (rows, columns, k // columns)
    found = b.broadcast(b.cast(scales, F32), each, (0, 1))
    return b.op("reshape", found, shape=(rows, k))


def _type(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    values, scales = types
    if not isinstance(values, TileType) or not isinstance(scales, TileType):
        raise TypeRuleError(f"{values} and {scales} are not tiles")
    if values.rank != 2 or scales.rank != 3 or scales.shape[-1] != PACKED:
        raise TypeRuleError(f"{scales} are not packed scales of {values}")
    rows, columns = unpacked_shape(scales.shape)
    if values.shape[0] != rows or values.shape[1] % columns:
        raise TypeRuleError(f"{scales} do not scale {values}")
    return (values.with_dtype(attrs["dtype"]),)


def _scaled(b: Builder, values: Value, scales: Value, **attrs: Any):
    by = factors(b, unpacked(b, scales), values.tile.shape[1])
    return (b.cast(b.mul(b.cast(values, F32), by), attrs["dtype"]),)


register(
    OpDef(
        "scaled",
        _type,
        attrs=("dtype",),
        lower=_scaled,
        unit=Unit.ALU,
        doc="a matrix times packed scales, each of which is for some elements of a row",
    )
)
