"""Conversions between element types, and between scalars and vectors.

A scalar narrower than 32 bits is held in a 32-bit register that contains its value (the
scalar unit has no others), so it is rounded or wrapped after each op. Vectors hold
elements of their own type.
"""

from collections.abc import Sequence

from pallasite.backends.tpu.core import Core
from pallasite.backends.tpu.writer import (
    element_text,
    held_dtype,
    tile_text,
    word_dtype,
)
from pallasite.ir.types import BOOL, F32, I32, DType, TileType


class Conversions(Core):
    """Emits conversions."""

    def convert(self, name: str, tile: TileType, dtype: DType) -> str:
        """Convert a value of type `tile` to elements of `dtype`, like `cast`."""
        source = tile.dtype
        if source == dtype:
            return name
        if dtype.is_bool:
            return self._to_bool(name, tile)
        if not tile.shape:
            return self._convert_scalar(name, tile, dtype)
        return self._convert_plain(name, tile, dtype)

    def _convert_scalar(self, name: str, tile: TileType, dtype: DType) -> str:
        """Between 32-bit registers; a narrow result is rounded or wrapped."""
        held, wanted = tile.with_dtype(held_dtype(tile.dtype)), held_dtype(dtype)
        whole = tile.dtype.is_float and dtype.is_integer and dtype.bits < 32
        name = self._convert_plain(name, held, wanted)
        if whole:
            return self._clamped_to(name, held.with_dtype(I32), dtype)
        return self._rounded(name, dtype) if dtype.bits < 32 else name

    def _rounded(self, name: str, dtype: DType) -> str:
        """A 32-bit scalar rounded to a narrow type."""
        if dtype.is_float:
            text = element_text(dtype)
            narrow = self.out.value(f"arith.truncf {name} : f32 to {text}")
            return self.out.value(f"arith.extf {narrow} : {text} to f32")
        if not dtype.is_signed_int:
            mask = self.out.i32((1 << dtype.bits) - 1)
            return self.out.value(f"arith.andi {name}, {mask} : i32")
        shift = self.out.i32(32 - dtype.bits)
        name = self.out.value(f"arith.shli {name}, {shift} : i32")
        return self.out.value(f"arith.shrsi {name}, {shift} : i32")

    def _convert_plain(self, name: str, tile: TileType, dtype: DType) -> str:
        source = tile.dtype
        if source == dtype:
            return name
        if source.is_bool:
            wide = self._spell("arith.extui", name, tile, tile.with_dtype(I32))
            return self._convert_plain(wide, tile.with_dtype(I32), dtype)
        if source.is_float and dtype.is_float:
            return self._float_to_float(name, tile, dtype)
        if source.is_float:
            return self._float_to_integer(name, tile, dtype)
        if dtype.is_float:
            word = word_dtype(source)
            wide = self._convert_plain(name, tile, word)
            op = "arith.uitofp" if word.kind == "uint" else "arith.sitofp"
            wide = self._spell(op, wide, tile.with_dtype(word), tile.with_dtype(F32))
            return self._convert_plain(wide, tile.with_dtype(F32), dtype)
        return self._integer_to_integer(name, tile, dtype)

    def _spell(self, op: str, name: str, source: TileType, target: TileType) -> str:
        types = f"{tile_text(source)} to {tile_text(target)}"
        return self.out.value(f"{op} {name} : {types}")

    def _to_bool(self, name: str, tile: TileType) -> str:
        if tile.shape and tile.dtype.bits < (16 if tile.dtype.is_float else 32):
            name, tile = self.in_words(name, tile)
        zero, text = self.out.number(0, tile), tile_text(tile)
        if not tile.dtype.is_float:
            return self.out.value(f"arith.cmpi ne, {name}, {zero} : {text}")
        # NaN counts as true, hence: not equal to zero.
        same = self.out.value(f"arith.cmpf oeq, {name}, {zero} : {text}")
        return self.flipped(same, tile.with_dtype(BOOL))

    def flipped(self, name: str, tile: TileType) -> str:
        """All bits inverted; for bools, `not`."""
        ones = self.out.number(True if tile.dtype.is_bool else -1, tile)
        return self.out.value(f"arith.xori {name}, {ones} : {tile_text(tile)}")

    def _float_to_float(self, name: str, tile: TileType, dtype: DType) -> str:
        target = tile.with_dtype(dtype)
        if tile.dtype.bits < dtype.bits:
            return self._spell("arith.extf", name, tile, target)
        if tile.dtype.bits > dtype.bits:
            return self._spell("arith.truncf", name, tile, target)
        wide = self._spell("arith.extf", name, tile, tile.with_dtype(F32))
        return self._spell("arith.truncf", wide, tile.with_dtype(F32), target)

    def _float_to_integer(self, name: str, tile: TileType, dtype: DType) -> str:
        wide = tile.with_dtype(F32)
        name = self._convert_plain(name, tile, F32)
        if dtype.name == "u32":
            return self._spell("arith.fptoui", name, wide, tile.with_dtype(dtype))
        whole = tile.with_dtype(I32)
        name = self._spell("arith.fptosi", name, wide, whole)
        if dtype == I32:
            return name
        name = self._clamped_to(name, whole, dtype)
        return self._spell("arith.trunci", name, whole, tile.with_dtype(dtype))

    def _clamped_to(self, name: str, tile: TileType, dtype: DType) -> str:
        """Integers saturated to the range of a narrow type."""
        low, high = (self.out.number(n, tile) for n in integer_range(dtype))
        text = tile_text(tile)
        name = self.out.value(f"arith.maxsi {name}, {low} : {text}")
        return self.out.value(f"arith.minsi {name}, {high} : {text}")

    def _integer_to_integer(self, name: str, tile: TileType, dtype: DType) -> str:
        source, target = tile.dtype, tile.with_dtype(dtype)
        if source.bits == dtype.bits:
            return name  # MLIR integers are signless
        if source.bits > dtype.bits:
            return self._spell("arith.trunci", name, tile, target)
        op = "arith.extsi" if source.is_signed_int else "arith.extui"
        return self._spell(op, name, tile, target)

    def in_words(self, name: str, tile: TileType) -> tuple[str, TileType]:
        """The same value in 32-bit elements, which every Mosaic op takes."""
        dtype = word_dtype(tile.dtype)
        return self.convert(name, tile, dtype), tile.with_dtype(dtype)

    # --- scalars and vectors ---

    def repeat(self, name: str, tile: TileType, shape: Sequence[int]) -> str:
        """Broadcast a scalar, or dimensions of size one, to `shape`."""
        held = tile if tile.shape else tile.with_dtype(held_dtype(tile.dtype))
        spread = held.with_shape(shape)
        types = f"{tile_text(held)} to {tile_text(spread)}"
        name = self.out.value(f"vector.broadcast {name} : {types}")
        return self._convert_plain(name, spread, tile.dtype)

    def from_element(self, name: str, dtype: DType) -> str:
        """A number in its memory form, as a scalar.

        An integer is extended with the opposite signedness and then rounded: MLIR would
        push bitwise ops through the correct extension, back to a width the scalar unit
        lacks.
        """
        held = held_dtype(dtype)
        if held == dtype:
            return name
        op = "arith.extui" if dtype.is_signed_int else "arith.extsi"
        op = "arith.extf" if dtype.is_float else op
        types = f"{element_text(dtype)} to {element_text(held)}"
        name = self.out.value(f"{op} {name} : {types}")
        return name if dtype.is_float else self._rounded(name, dtype)

    def to_element(self, name: str, dtype: DType) -> str:
        """A scalar in its memory form."""
        held = held_dtype(dtype)
        if held == dtype:
            return name
        op = "arith.truncf" if dtype.is_float else "arith.trunci"
        types = f"{element_text(held)} to {element_text(dtype)}"
        return self.out.value(f"{op} {name} : {types}")


def integer_range(dtype: DType) -> tuple[int, int]:
    if dtype.is_signed_int:
        return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1
    return 0, 2**dtype.bits - 1
