"""debug_print: programs write records into a log, which the host reads and formats.

The log is an array of 32-bit words, initially zero: the number of words written, then
the records. A record is the number of its print, from 1, the number of its program in
grid order, and the values' elements, one or two words each. A record that does not fit
is counted and lost. The host prints the records program by program, in grid order, as
everywhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from pallasite.backends.triton.core import FLOAT_BITS
from pallasite.backends.triton.four_bits import FourBits
from pallasite.backends.triton.text import Val
from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.ir.types import DType, TileType

WORDS = 1 << 18  # of a log
HEAD = 2  # words of a record before its values


@dataclass(frozen=True)
class Site:
    """One print of the kernel."""

    format: str
    types: tuple[TileType, ...]

    @property
    def words(self) -> int:
        return HEAD + sum(t.size * _words(t.dtype) for t in self.types)


def _words(dtype: DType) -> int:
    return 2 if dtype.bits == 64 else 1


def print_ops(kernel: Kernel) -> list[Op]:
    return [op for op in walk(kernel.body) if op.name == "debug_print"]


def sites_of(kernel: Kernel) -> tuple[Site, ...]:
    return tuple(
        Site(op.attrs["format"], tuple(v.tile for v in op.operands))
        for op in print_ops(kernel)
    )


# --- on the device ---


class Prints(FourBits):
    """Emits debug_print; `log` is the pointer to the log, `program_number` the one
    that the record names."""

    log: Val
    program_number: Val
    print_numbers: dict[Op, int]

    def emit_debug_print(self, op: Op) -> None:
        number = 1 + self.print_numbers[op]  # 0 marks what was not written
        site = Site(op.attrs["format"], tuple(v.tile for v in op.operands))
        size = self.const(site.words, "i32")
        first = self.atomic("add", self.log, size, self.const(True, "i1"))
        # Compared this way around, a full log does not make the sum wrap.
        room = self.const(WORDS - 1 - site.words, "i32")
        fits = self.compare("ule", first, room)
        start = self.apply("arith.addi", first, self.const(1, "i32"))
        for place, word in enumerate((self.const(number, "i32"), self.program_number)):
            self.store_word(self.plus(start, place), word, fits)
        place = HEAD
        for value in op.operands:
            place = self.store_words(start, place, value, fits)

    def store_word(self, place: Any, word: Val, fits: Val) -> None:
        kind = self.log.elem
        text = f"tt.addptr {self.log}, {place} : {kind}, i32"
        pointer = self.let(text, (), kind)
        self.out.line(f"tt.store {pointer}, {word}, {fits} : {kind}")

    def store_words(self, start: Val, place: int, value: Value, fits: Val) -> int:
        """Store the elements of a value, row-major; returns the place after them."""
        tile = value.tile
        for word in self.words_of(self.env[value], tile.dtype):
            first = self.apply("arith.addi", start, self.const(place, "i32"))
            if not word.shape:
                self.store_word(first, word, fits)
            else:
                self.store_tile(first, word, tile, fits)
            place += tile.size
        return place

    def store_tile(self, first: Val, word: Val, tile: TileType, fits: Val) -> None:
        numbers = self.spread(first, word.shape)
        for axis in range(len(word.shape)):
            step = self.along(word.shape, axis)
            step = self.scaled("arith.muli", step, prod(tile.shape[axis + 1 :]))
            step = self.spread(step, word.shape)
            numbers = self.apply("arith.addi", numbers, step)
        base = self.spread(self.log, word.shape)
        text = f"tt.addptr {base}, {numbers} : {base.type}, {numbers.type}"
        pointers = self.let(text, word.shape, self.log.elem)
        mask = self.both(self.padding_mask(tile.shape, range(len(tile.shape))), fits)
        assert mask is not None
        mask = self.spread(mask, word.shape)
        self.out.line(f"tt.store {pointers}, {word}, {mask} : {pointers.type}")

    def words_of(self, x: Val, dtype: DType) -> list[Val]:
        """The bits of each element as one word, or as lower and upper half."""
        if x.elem in FLOAT_BITS:
            x = self.bits(x, f"i{FLOAT_BITS[x.elem]}")
        if dtype.bits < 64:
            return [self.convert("arith.extui", x, "i32")]
        high = self.apply("arith.shrui", x, self.like(32, x))
        return [self.convert("arith.trunci", half, "i32") for half in (x, high)]


RULES = {"debug_print": Prints.emit_debug_print}


# --- on the host ---


def reader(sites: Sequence[Site]) -> Any:
    """The function that prints a log."""
    return partial(print_log, tuple(sites))


def print_log(sites: Sequence[Site], log: np.ndarray) -> None:
    words = np.asarray(log).view(np.uint32)
    written, place = int(words[0]), 1
    records: list[tuple[int, str]] = []
    while place - 1 < written:
        number = int(words[place]) if place < len(words) else 0
        if not number:
            break  # there was no room
        site = sites[number - 1]
        text = site.format.rstrip("\n").format(*_values(site, words[place + HEAD :]))
        records.append((int(words[place + 1]), text))
        place += site.words
    for _, text in sorted(records, key=lambda record: record[0]):
        print(text, flush=True)
    if place - 1 < written:
        lost = 4 * (written - (place - 1))
        print(f"pl.debug_print: {lost} bytes were dropped; print less", flush=True)


def _values(site: Site, words: np.ndarray) -> list[Any]:
    values, place = [], 0
    for tile in site.types:
        parts = []
        for _ in range(_words(tile.dtype)):
            parts.append(words[place : place + tile.size])
            place += tile.size
        values.append(_decoded(parts, tile))
    return values


def _decoded(parts: Sequence[np.ndarray], tile: TileType) -> Any:
    dtype = tile.dtype
    if len(parts) == 2:
        bits = parts[0].astype(np.uint64) | parts[1].astype(np.uint64) << 32
    else:
        bits = parts[0].astype(f"uint{8 * dtype.np.itemsize}")
    if dtype.bits == 4:
        return bits.view(np.int8).astype(dtype.np).reshape(tile.shape)[()]
    return bits.view(dtype.np).reshape(tile.shape)[()]
