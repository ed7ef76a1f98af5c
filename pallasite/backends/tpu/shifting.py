"""Dynamic starts not aligned to tiles: load the surrounding tiles and rotate.

Mosaic accesses vectors at dynamic offsets only if these are multiples of its tiles. For
others, `aligned` widens a view to whole tiles; the vector is rotated so that the wanted
part comes first. A store rotates the other way and preserves the surroundings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite.backends.tpu.tiles import Tiles
from pallasite.backends.tpu.views import (
    LANES,
    Start,
    View,
    has_few_lanes,
    required_alignment,
)
from pallasite.backends.tpu.writer import tile_text
from pallasite.ir.types import BOOL, I32, TileType


@dataclass(frozen=True)
class Shift:
    """Along `dim`, `size` elements start `offset` elements into what is loaded."""

    dim: int
    offset: str | int
    size: int


@dataclass(frozen=True)
class Slide:
    """A masked access made `by` elements before the requested place.

    Along dimension `dim` of the tile, which has `size` elements; None: of an index.
    """

    dim: int | None
    by: str
    size: int


class Shifting(Tiles):
    """Emits what unaligned accesses need besides a load or store."""

    def first_of(self, start: Start, alignment: int = 1) -> str:
        """A start as one i32, with an assertion of its alignment."""
        if start.dynamic is None:
            return self.out.i32(start.static)
        name = start.dynamic
        if start.static:
            name = self.out.value(
                f"arith.addi {name}, {self.out.i32(start.static)} : i32"
            )
        if alignment > 1:
            name = self.out.value(f"tpu.assume_multiple {name}, {alignment} : i32")
        return name

    def aligned(self, view: View) -> tuple[View, list[Shift]]:
        """A view of whole tiles around `view`, and the position of `view` in it."""
        starts, sizes, shifts = [*view.starts], [*view.sizes], []
        for dim, start in enumerate(view.starts):
            tile = required_alignment(view, dim)
            if has_few_lanes(view, dim):
                starts[dim], sizes[dim], offset = self._more_lanes(view, dim, start)
                shifts.append(Shift(dim, offset, view.sizes[dim]))
                continue
            if start.dynamic is None or start.is_multiple_of(tile):
                continue
            if view.strides[dim] != 1:
                self.refuse(
                    f"the access to dimension {dim} is strided and starts at an "
                    "unaligned index",
                    fix="load every element and slice the value",
                )
            starts[dim], sizes[dim], offset = self._around(view, dim, start, tile)
            shifts.append(Shift(dim, offset, view.sizes[dim]))
        return replace(view, starts=tuple(starts), sizes=tuple(sizes)), shifts

    def _more_lanes(
        self, view: View, dim: int, start: Start
    ) -> tuple[Start, int, str | int]:
        """At least two tiles that contain the wanted lanes, as in `_around`."""
        if start.dynamic is not None:
            return self._around(view, dim, start, LANES, least=2 * LANES)
        total = view.shape[dim]
        first = min(start.static // LANES, (total - 1) // LANES - 1) * LANES
        return Start(first), min(2 * LANES, total - first), start.static - first

    def _around(
        self, view: View, dim: int, start: Start, tile: int, least: int = 0
    ) -> tuple[Start, int, str]:
        """The tiles that contain the wanted elements: start, length, and offset."""
        total, size = view.shape[dim], view.sizes[dim]
        length = max(-(-(size + tile - 1) // tile) * tile, least)
        first = self.first_of(start)
        if total % tile or length >= total:
            return Start(), total, first
        base = self.out.value(f"arith.andi {first}, {self.out.i32(-tile)} : i32")
        last = self.out.i32(total - length)
        base = self.out.value(f"arith.minsi {base}, {last} : i32")
        offset = self.out.value(f"arith.subi {first}, {base} : i32")
        return Start(0, base, tile), length, offset

    def taken_out(self, name: str, tile: TileType, shifts: Sequence[Shift]) -> str:
        """The wanted part of a loaded vector."""
        name, words = self.in_words(name, tile)
        for shift in shifts:
            if isinstance(shift.offset, int):
                name, words = self.along(
                    name, words, shift.dim, shift.offset, shift.size
                )
                continue
            length = words.shape[shift.dim]
            back = self.out.value(
                f"arith.subi {self.out.i32(length)}, {shift.offset} : i32"
            )
            back = self.out.value(f"arith.remsi {back}, {self.out.i32(length)} : i32")
            name = self._rotated(name, words, shift.dim, back)
            name, words = self.along(name, words, shift.dim, 0, shift.size)
        return self.convert(name, words, tile.dtype)

    def put_in(
        self, value: str, tile: TileType, old: str, whole: TileType, shifts: list[Shift]
    ) -> str:
        """A loaded vector with `value` in place of the wanted part."""
        name, words = self.in_words(value, tile)
        around, old_words = self.in_words(old, whole)
        inside: str | None = None
        for shift in shifts:
            name, words = self._lengthened(name, words, shift, old_words)
            name = self._rotated(name, words, shift.dim, self._amount(shift))
        for shift in shifts:
            mask = self._covered(old_words.with_dtype(I32), shift)
            both = old_words.with_dtype(BOOL)
            inside = (
                mask
                if inside is None
                else self.arith("arith.andi", inside, mask, tile=both)
            )
        assert inside is not None
        name = self.select(inside, name, around, old_words, True)
        return self.convert(name, old_words, whole.dtype)

    # --- masked accesses that are partly outside their ref ---

    def slid(self, name: str, tile: TileType, slide: Slide) -> str:
        """What was read, moved to the requested place; the ends are repeated."""
        if slide.dim is None:
            return name
        dim, size = slide.dim, slide.size
        name, words = self.in_words(name, tile)
        first, one = self.along(name, words, dim, 0, 1)
        last, _ = self.along(name, words, dim, size - 1, 1)
        zero = self.out.i32(0)
        back = self.out.value(f"arith.subi {zero}, {slide.by} : i32")
        name = self._rolled(name, words, dim, back)
        places = words.with_dtype(I32)
        place = self._asked_place(places, slide, "arith.addi")
        low = self.out.number(0, places)
        high = self.out.number(size - 1, places)
        before = self.arith("arith.cmpi slt,", place, low, tile=places)
        after = self.arith("arith.cmpi sgt,", place, high, tile=places)
        for mask, end in ((before, first), (after, last)):
            end = self._along_all(end, one, words)
            name = self.select(mask, end, name, words, True)
        return self.convert(name, words, tile.dtype)

    def slid_back(
        self, name: str, mask: str, tile: TileType, slides: Sequence[Slide]
    ) -> tuple[str, str]:
        """A value and a mask, moved to where the access is made."""
        bools = tile.with_dtype(BOOL)
        for slide in slides:
            inside = self._is_inside(bools, slide)
            if slide.dim is not None:
                value, words = self.in_words(name, tile)
                value = self._rolled(value, words, slide.dim, slide.by)
                name = self.convert(value, words, tile.dtype)
                bits, words = self.in_words(mask, bools)
                bits = self._rolled(bits, words, slide.dim, slide.by)
                mask = self.convert(bits, words, BOOL)
            mask = self.arith("arith.andi", mask, inside, tile=bools)
        return name, mask

    def _is_inside(self, bools: TileType, slide: Slide) -> str:
        """Where a moved tile has elements that are inside the ref."""
        if slide.dim is None:
            here = self.out.value(f"arith.cmpi eq, {slide.by}, {self.out.i32(0)} : i32")
            scalar = bools.with_shape(())
            return self.repeat(here, scalar, bools.shape) if bools.shape else here
        words = bools.with_dtype(I32)
        place = self._asked_place(words, slide, "arith.subi")
        size = self.out.number(slide.size, words)
        # Unsigned: positions before the start are large numbers.
        return self.arith("arith.cmpi ult,", place, size, tile=words)

    def _asked_place(self, words: TileType, slide: Slide, combine: str) -> str:
        assert slide.dim is not None
        place = self.counted(words, slide.dim)
        by = self.repeat(slide.by, words.with_shape(()), words.shape)
        return self.arith(combine, place, by, tile=words)

    def _along_all(self, name: str, one: TileType, whole: TileType) -> str:
        return name if one.shape == whole.shape else self.repeat(name, one, whole.shape)

    def _rolled(self, name: str, tile: TileType, dim: int, amount: str) -> str:
        """Element i moves to i + amount; the amount is unrestricted."""
        size = tile.shape[dim]
        if size == 1:
            return name
        count = self.out.i32(size)
        rest = self.out.value(f"arith.remsi {amount}, {count} : i32")
        up = self.out.value(f"arith.addi {rest}, {count} : i32")
        up = self.out.value(f"arith.remsi {up}, {count} : i32")
        return self._rotated(name, tile, dim, up)

    def _lengthened(
        self, name: str, tile: TileType, shift: Shift, whole: TileType
    ) -> tuple[str, TileType]:
        """Zero-extended along a dimension to the loaded length."""
        sizes = list(tile.shape)
        sizes[shift.dim] = whole.shape[shift.dim] - tile.shape[shift.dim]
        rest = tile.with_shape(sizes)
        sizes[shift.dim] = whole.shape[shift.dim]
        if not rest.size:
            return name, tile
        zeros = self.out.number(0, rest)
        joined = self.joined([(name, tile), (zeros, rest)], shift.dim)
        return joined, tile.with_shape(sizes)

    def _covered(self, tile: TileType, shift: Shift) -> str:
        """A mask of the elements that a store covers along one dimension."""
        place = self.counted(tile, shift.dim)
        low = self.repeat(self._amount(shift), tile.with_shape(()), tile.shape)
        past = self.arith("arith.subi", place, low, tile=tile)
        size = self.out.number(shift.size, tile)
        # Unsigned: positions before the start are large numbers.
        return self.arith("arith.cmpi ult,", past, size, tile=tile)

    def _amount(self, shift: Shift) -> str:
        """The offset of a shift, as one i32."""
        offset = shift.offset
        return self.out.i32(offset) if isinstance(offset, int) else offset

    def _rotated(self, name: str, tile: TileType, dim: int, amount: str) -> str:
        """Rotate: element i moves to i + amount, wrapping around."""
        if tile.rank == 1:
            row = tile.with_shape((1, *tile.shape))
            name = self._rotated(self.reshaped(name, tile, row.shape), row, 1, amount)
            return self.reshaped(name, row, tile.shape)
        text = tile_text(tile)
        return self.out.value(
            f"tpu.dynamic_rotate {name} by {amount} dim {dim} : {text}, i32 -> {text}"
        )
