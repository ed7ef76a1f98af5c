"""Bitcasts to elements of another width.

`packed_rows` serves `bitcast_view`: as on TPU, the second-last dimension absorbs the
change of width, with the first of several rows in the lowest bits. `last_parts` serves
`bitcast` of types narrower than a byte, where the last dimension does.
"""

from collections.abc import Callable

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.backends.cpu.tiles.tiles import Indices, Ref, Through, Tile
from pallasite.ir.types import DType


def packed_rows(f: Function, ref: Ref, dtype: DType) -> Through:
    """The elements of a ref as `dtype`."""
    if ref.dtype.bits < dtype.bits:
        return _joined(f, ref, dtype)
    return _split(f, ref, dtype)


def _row(indices: Indices, row: Val) -> list[Val]:
    return [*indices[:-2], row, indices[-1]]


def _joined(f: Function, ref: Ref, dtype: DType) -> Through:
    """Several rows of the ref become one."""
    width, count = f"i{dtype.bits}", dtype.bits // ref.dtype.bits
    shift = lambda n: integer(n * ref.dtype.bits, width)

    def parts(indices: Indices) -> list[list[Val]]:
        first = f.mul(indices[-2], integer(count))
        return [_row(indices, f.add(first, integer(n))) for n in range(count)]

    def read(indices: Indices) -> Val:
        word = integer(0, width)
        for n, part in enumerate(parts(indices)):
            bits = ref.read_bits(f, part)
            bits = f.convert("zext", bits, width)
            word = f.binary("or", word, f.binary("shl", bits, shift(n)))
        return scalars.from_bits(f, dtype, word)

    def write(indices: Indices, value: Val) -> None:
        word = scalars.to_bits(f, dtype, value)
        for n, part in enumerate(parts(indices)):
            bits = f.binary("lshr", word, shift(n))
            bits = f.convert("trunc", bits, f"i{ref.dtype.bits}")
            ref.write_bits(f, part, bits)

    return Through(ref.root, read, write)


def _split(f: Function, ref: Ref, dtype: DType) -> Through:
    """One row of the ref becomes several, or one if the widths are equal."""
    width, count = f"i{ref.dtype.bits}", ref.dtype.bits // dtype.bits

    def place(indices: Indices) -> tuple[list[Val], Val]:
        """The element's word, and its shift within the word."""
        if count == 1:
            return list(indices), integer(0, width)
        row = f.binary("udiv", indices[-2], integer(count))
        within = f.binary("urem", indices[-2], integer(count))
        shift = f.mul(within, integer(dtype.bits))
        return _row(indices, row), f.convert("trunc", shift, width)

    def read(indices: Indices) -> Val:
        where, shift = place(indices)
        word = ref.read_bits(f, where)
        bits = f.binary("lshr", word, shift)
        bits = f.convert("trunc", bits, f"i{dtype.bits}")
        return scalars.from_bits(f, dtype, bits)

    def write(indices: Indices, value: Val) -> None:
        where, shift = place(indices)
        bits = f.convert("zext", scalars.to_bits(f, dtype, value), width)
        if count > 1:
            word = ref.read_bits(f, where)
            mask = f.binary("shl", integer((1 << dtype.bits) - 1, width), shift)
            rest = f.binary("and", word, f.binary("xor", mask, integer(-1, width)))
            bits = f.binary("or", rest, f.binary("shl", bits, shift))
        ref.write_bits(f, where, bits)

    return Through(ref.root, read, write)


def last_parts(f: Function, tile: Tile, dtype: DType) -> Callable[[Indices], Val]:
    """The elements of a tile as `dtype`: adds or removes a last dimension of parts."""
    old = tile.dtype
    wide = f"i{max(old.bits, dtype.bits)}"
    bits_at = lambda indices: scalars.to_bits(f, old, tile.at(f, indices))

    def split(indices: Indices) -> Val:
        *outer, part = indices
        shift = f.convert("trunc", f.mul(part, integer(dtype.bits)), wide)
        bits = f.binary("lshr", bits_at(outer), shift)
        return scalars.from_bits(f, dtype, f.convert("trunc", bits, f"i{dtype.bits}"))

    def joined(indices: Indices) -> Val:
        word = integer(0, wide)
        for n in range(dtype.bits // old.bits):
            bits = f.convert("zext", bits_at([*indices, integer(n)]), wide)
            bits = f.binary("shl", bits, integer(n * old.bits, wide))
            word = f.binary("or", word, bits)
        return scalars.from_bits(f, dtype, word)

    return split if old.bits > dtype.bits else joined
