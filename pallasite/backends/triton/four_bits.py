"""Loads and stores of 4-bit integers, two of which share a byte of memory.

The first of a pair is in the lower half, as XLA packs them. In registers each has its
own byte. Rows that start at an even position are moved as whole bytes; others are read
a byte per element and never written: the other half could be another thread's.
"""

from dataclasses import replace

from pallasite.backends.triton.atomics import Atomics
from pallasite.backends.triton.memory import Place
from pallasite.backends.triton.text import Val, type_text
from pallasite.ir.nodes import Access, Op, Span
from pallasite.ir.types import DType


class FourBits(Atomics):
    """Emits loads and stores of any width."""

    def emit_any_load(self, op: Op) -> None:
        dtype = op.result.tile.dtype
        if dtype.bits != 4:
            self.emit_load(op)
            return
        self.layout(op.result.tile, op)
        access = Access.of(op)
        place = self.place(op, access, op.result.tile.shape)
        user = None if access.mask is None else self.env[access.mask]
        mask = self.both(place.mask, user)
        if mask is None and self.is_whole_bytes(access, place):
            self.env[op.result] = self.load_pairs(place, dtype)
            return
        result = self.load_each(place, mask, dtype)
        other = None if access.other is None else self.env[access.other]
        fill = place.view.fill if place.view.edges else None
        if fill is not None and place.mask is not None:
            result = self.select(place.mask, result, self.like(fill, result))
        if other is not None:
            outside = user if fill is not None else mask
            assert outside is not None
            result = self.select(outside, result, self.spread(other, result.shape))
        self.env[op.result] = result

    def emit_any_store(self, op: Op) -> None:
        access = Access.of(op)
        assert access.value is not None
        if access.value.tile.dtype.bits != 4:
            self.emit_store(op)
            return
        place = self.place(op, access, access.value.tile.shape)
        masked = place.mask is not None or access.mask is not None
        if masked or not self.is_whole_bytes(access, place):
            self.refuse(
                op,
                "two 4-bit elements share a byte, and one of them may belong to "
                "another thread",
                "store whole rows of an even length, in blocks that divide the array",
            )
        with self.between_fences(place.view):
            self.store_pairs(place, self.env[access.value])

    def is_whole_bytes(self, access: Access, place: Place) -> bool:
        """Whether all elements come in pairs that share a byte."""
        *before, last = access.index
        rows = zip(before, place.view.dims, strict=False)
        return (
            place.view.is_even
            and all(isinstance(entry, Span) or dim.size for entry, dim in rows)
            and all(dim.stride % 2 == 0 for dim, _ in place.spots[:-1])
            and isinstance(last, Span)
            and last.stride == place.view.dims[-1].stride == 1
            and last.size % 2 == 0
        )

    def bytes_of(self, place: Place) -> tuple[Val, tuple[int, ...]]:
        """Pointers to the bytes of an access, and their shape: rows half as long."""
        shape = (*place.shape[:-1], place.shape[-1] // 2)
        offset = place.view.offset
        if isinstance(offset, int):
            half = offset // 2
        else:
            half = self.apply("arith.shrui", offset, self.like(1, offset))
        spots = [
            (replace(dim, stride=dim.stride // 2), spot)
            for dim, spot in place.spots[:-1]
        ]
        spots.append((place.spots[-1][0], self.along(shape, len(shape) - 1)))
        view = replace(place.view, offset=half)
        return self.pointers(view, spots, shape), shape

    def load_pairs(self, place: Place, dtype: DType) -> Val:
        pointers, shape = self.bytes_of(place)
        both = self.let(f"tt.load {pointers} : {pointers.type}", shape, "i8", False)
        name = "arith.shrsi" if dtype.is_signed_int else "arith.shrui"
        high = self.apply(name, both, self.like(4, both))
        low = self.four_bits(both, dtype)
        pair = (*shape, 2)
        text = f"tt.join {low}, {high} : {low.type} -> {type_text(pair, 'i8')}"
        return self.reshape(self.let(text, pair, "i8"), place.shape)

    def store_pairs(self, place: Place, value: Val) -> None:
        pointers, shape = self.bytes_of(place)
        pairs = self.reshape(value, (*shape, 2))
        low, high = (Val(self.out.fresh(), shape, "i8") for _ in range(2))
        self.out.line(f"{low}, {high} = tt.split {pairs} : {pairs.type} -> {low.type}")
        low = self.apply("arith.andi", low, self.like(15, low))
        high = self.apply("arith.shli", high, self.like(4, high))
        both = self.apply("arith.ori", low, high)
        self.out.line(f"tt.store {pointers}, {both} : {pointers.type}")

    def load_each(self, place: Place, mask: Val | None, dtype: DType) -> Val:
        """The byte of every element, and the half of it."""
        shape, numbers = place.shape, self.numbers(place)
        byte = self.apply("arith.shrui", numbers, self.like(1, numbers))
        pointers = self.elements_at(place.view.pointer, byte)
        operands = ""
        if mask is not None:
            mask = self.spread(mask, shape)
            operands = f", {mask}, {self.const(0, 'i8', shape)}"
        text = f"tt.load {pointers}{operands} : {pointers.type}"
        both = self.let(text, shape, "i8", shared=False)
        odd = self.apply("arith.andi", numbers, self.like(1, numbers))
        shift = self.convert("arith.trunci", self.scaled("arith.muli", odd, 4), "i8")
        return self.four_bits(self.apply("arith.shrui", both, shift), dtype)


RULES = {"load": FourBits.emit_any_load, "store": FourBits.emit_any_store}
