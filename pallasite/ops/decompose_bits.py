"""Bitcasts between element widths, from shifts and bitcasts of one width.

An element of the wider type is a row of narrower ones, lowest bits first.
"""

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import DTYPES, DType
from pallasite.ops.formula import NotApplicable


def between_widths(b: Builder, x: Value, *, dtype: DType) -> Value:
    before = x.tile.dtype
    if before.bits == dtype.bits or before.is_bool or dtype.is_bool:
        raise NotApplicable("supports only two widths, and no bools")
    if before.bits > dtype.bits:
        count = before.bits // dtype.bits
        words = _reinterpreted(b, x, _unsigned(before))
        shape = (*words.tile.shape, count)
        words = b.broadcast(words, shape, range(len(shape) - 1))
        parts = b.op("shift_right_logical", words, _shifts(b, words, dtype.bits))
        return _reinterpreted(b, b.cast(parts, _unsigned(dtype)), dtype)
    parts = b.cast(_reinterpreted(b, x, _unsigned(before)), _unsigned(dtype))
    parts = b.op("shift_left", parts, _shifts(b, parts, before.bits))
    words = b.op("reduce", parts, kind="or", axes=(parts.tile.rank - 1,))
    return _reinterpreted(b, words, dtype)


def _unsigned(dtype: DType) -> DType:
    return DTYPES[f"u{dtype.bits}"]


def _shifts(b: Builder, parts: Value, bits: int) -> Value:
    """How far from the lowest bits each part of a row is."""
    number = b.op("iota", type=parts.tile, dim=parts.tile.rank - 1)
    return b.mul(number, b.like(bits, number))


def _reinterpreted(b: Builder, x: Value, dtype: DType) -> Value:
    if x.tile.dtype.is_integer and dtype.is_integer:
        return b.cast(x, dtype)  # keeps the bits
    return x if x.tile.dtype == dtype else b.op("bitcast", x, dtype=dtype)
