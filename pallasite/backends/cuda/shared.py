"""Swizzled shared memory, and loads from it.

Swizzled memory is accessed by the copy engine and by tensor cores: its last two
dimensions are rows of 32, 64 or 128 bytes; a wider tile consists of several consecutive
*panels* of such rows. The 16-byte chunks of a row are permuted: the chunk index is
XORed with the row index, so that a column is spread over different banks. A ref to it
is a `Ring` (for copies and matmuls) and a `View` (for loads and stores); `address`
computes where each element is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

from pallasite.backends.cuda.core import Tile
from pallasite.backends.cuda.layouts import Digit, Lane
from pallasite.backends.cuda.meetings import COPIES, NOTHING, Meetings
from pallasite.backends.cuda.memory import (
    Memory,
    Number,
    Place,
    Term,
    multiple_of,
    plus,
    text_of,
    times,
)
from pallasite.ir.nodes import Access, At, Block, Gather, Op, Span, Value, walk
from pallasite.ir.types import DType, RefType
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import VIEWS, Roots

ROW_BYTES = 128
ROWS = 8  # whose chunks are swizzled together


@dataclass(frozen=True)
class Ring:
    """Swizzled shared memory: a slot of a ring, a part of one, or the whole."""

    address: str
    shape: tuple[int, ...]
    dtype: DType
    rows: int  # of a panel, of which this may be a part
    swizzle: int = ROW_BYTES  # bytes of a row
    steps: tuple[int, ...] = ()  # bytes, along the dimensions before the last two
    has_whole_rows: bool = True  # starts at the first of the rows swizzled together
    has_whole_panels: bool = True  # or is inside one

    @property
    def bytes(self) -> int:
        return swizzled_bytes(self.shape, self.dtype, self.swizzle)

    @property
    def held_columns(self) -> int:
        """Columns, including those that fill the last panel."""
        return -(-self.shape[-1] // self.panel_columns) * self.panel_columns

    @property
    def panel_columns(self) -> int:
        return self.swizzle // self.dtype.bytes

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.swizzle


def swizzled_bytes(shape: Sequence[int], dtype: DType, swizzle: int = ROW_BYTES) -> int:
    """Bytes of shared memory, where rows are whole rows of panels."""
    row = -(-shape[-1] * dtype.bytes // swizzle) * swizzle
    return prod(shape[:-1]) * row


class Shared(Memory):
    """Emits views of swizzled memory, and synchronisation of warps."""

    def __init__(self) -> None:
        super().__init__()
        self.rings: dict[Value, Ring] = {}
        self.users: Mapping[Value, Sequence[Op]] = {}  # of values of the program
        self.in_role = False
        self.rows_beside = False  # of matmuls; see `accumulator`
        self.meetings = Meetings(Roots(Block()))
        self.accessed = NOTHING

    # --- swizzled memory ---

    def alloc_ring(self, op: Op, swizzle: int = ROW_BYTES) -> None:
        ref = op.result.ref
        is_part = self.is_authored and ref.shape[-1] * ref.dtype.bytes % swizzle != 0
        if ref.rank < 2 or ref.shape[-2] % ROWS or is_part:
            self.refuse(
                op,
                f"shared memory with a swizzle of {swizzle} bytes needs rows of a "
                f"multiple of that size, and a multiple of {ROWS} rows",
                "use another shape or swizzle",
            )
        steps = [
            swizzled_bytes(ref.shape[dim:], ref.dtype, swizzle)
            for dim in range(1, ref.rank - 1)
        ]
        name = self.out.fresh("ring")
        ring = Ring(
            name, ref.shape, ref.dtype, ref.shape[-2], swizzle, steps=tuple(steps)
        )
        offset = self.reserve(ring.bytes, ROWS * ROW_BYTES)
        self.out.line(f"const u32 {ring.address} = shared_address(shared) + {offset};")
        self.rings[op.result] = ring
        pointer = f"(({self.memory_type(ref.dtype, op)}*)(shared + {offset}))"
        self.views[op.result] = self.array(ref, pointer, op.result)

    def part_of_ring(self, op: Op, ring: Ring) -> Ring | None:
        """The ring for a subview: of rows, or of a single one; None: of neither."""
        access, at = Access.of(op), ring.address
        entries = access.split_index()
        if not is_part_of_ring([entry for entry, _ in entries]):
            return None
        shape, rows, panels = [], ring.has_whole_rows, ring.has_whole_panels
        steps = [
            step
            for (entry, _), step in zip(entries, ring.steps, strict=False)
            if isinstance(entry, Span)
        ]
        for dim, (entry, operand) in enumerate(entries):
            assert not isinstance(entry, Gather)
            size = ring.shape[dim]
            start = self.start(entry, operand, size, clamp=self.is_authored)
            if isinstance(entry, Span):
                shape.append(entry.size)
            if dim < len(entries) - 2:
                start = times(start, ring.steps[dim])
            elif dim == len(entries) - 2:
                rows = rows and multiple_of(start) % ROWS == 0
                start = times(start, ring.swizzle)
            else:
                panels = panels and _fits_panels(start, shape[-1], ring.panel_columns)
                start = self.columns_in_ring(ring, start)
            at = at if start == 0 else f"{at} + {text_of(start)}"
        return replace(
            ring,
            address=at,
            shape=tuple(shape),
            steps=tuple(steps),
            has_whole_rows=rows,
            has_whole_panels=panels,
        )

    def columns_in_ring(self, ring: Ring, start: Number) -> Number:
        """Bytes from a ring's start to one of its columns."""
        each, width = ring.panel_columns, ring.dtype.bytes
        if isinstance(start, int):
            return start // each * ring.panel_bytes + start % each * width
        panels = times(Term(f"({start.text}) / {each}"), ring.panel_bytes)
        if start.multiple % each == 0:
            return panels
        return plus(panels, times(Term(f"({start.text}) % {each}"), width))

    def address(self, place: Place, i: str) -> tuple[str, str]:
        ring = self.rings.get(place.view.memory) if place.view.memory else None
        if ring is None:
            return super().address(place, i)
        _, test = super().address(place, i)
        at = [text_of(start) for start in place.view.starts]
        parts = self.in_parts(place, ring, i)
        for spot in place.spots:
            dim, text = spot.dim, self.spot_text(place, spot, i)
            step = "" if dim.step == 1 else f" * {dim.step}"
            at[dim.axis] = f"{at[dim.axis]} + ({text}){step}"
        *slots, row, column = at
        numbers = f"{ring.swizzle}, {ring.dtype.bytes}, {ring.rows}"
        inside = parts or f"swizzled<{numbers}>({row}, {column})"
        slot = "0"
        for number, size in zip(slots, ring.shape, strict=False):
            slot = f"({slot}) * {size} + ({number})" if slot != "0" else number
        whole = ring.shape[-2] * ring.held_columns
        return (f"({slot}) * {whole} + {inside}" if slots else inside), test

    def in_parts(self, place: Place, ring: Ring, i: str) -> str | None:
        """The offset of an element in a slot, where each thread swizzles once.

        The thread's and the register's parts of a column have no bits in common, nor
        have their parts of a row. So the swizzle is the XOR of the thread's part, which
        is computed once, and of the register's, which is a compile-time constant.
        """
        spread, starts = place.spread, place.view.starts
        spots = {spot.dim.axis: spot for spot in place.spots}
        down, across = (spots.get(len(starts) - n) for n in (2, 1))
        if spread is None or down is None or across is None:
            return None
        row, column = down.along, across.along
        if isinstance(row, Tile) or isinstance(column, Tile):
            return None
        first, columns = starts[-1], ring.panel_columns
        plain = all(
            s.dim.step * s.stride == 1 and s.first == 0 and not s.nearest
            for s in (down, across)
        )
        if not plain or multiple_of(first) % columns:
            return None
        lanes = _bits([p for p in spread.lanes if p.dim == column])
        digits = _bits([p for p in spread.digits if p.dim == column])
        if lanes is None or digits is None or lanes & digits or lanes >= columns:
            return None
        below = [p for p in spread.digits if p.dim == row and p.count > 1]
        below = [p for p in below if p.stride % ROWS]  # rows swizzled together
        own_rows = _bits([p for p in spread.lanes if p.dim == row])
        rows = _bits(below)
        if below and (own_rows is None or rows is None or own_rows & rows):
            return None
        if below and multiple_of(starts[-2]) % ROWS:
            return None
        numbers = f"{ring.swizzle}, {ring.dtype.bytes}"
        own_row = f"{text_of(starts[-2])} + {self.base(spread, row)}"
        own = self.integer_variable(
            f"swizzled_part<{numbers}>({own_row}, {self.base(spread, column)})"
        )
        at = f"{text_of(first)} + {spread.digit_text(column, i)}"
        down_text = f"({own_row}) + ({spread.digit_text(row, i)})"
        panel = f"({at}) / {columns} * {columns * ring.rows}"
        within = f"({at}) % {columns} ^ {own}"
        if below:
            part = f"swizzled_part<{numbers}>({spread.digit_text(row, i)}, 0)"
            within = f"(({at}) % {columns} ^ {part}) ^ {own}"
        return f"({down_text}) * {columns} + {panel} + ({within})"

    def integer_variable(self, text: str) -> str:
        name = self.out.fresh("y")
        self.out.line(f"const int {name} = {text};")
        return name

    def based(self, place: Place, op: Op, const: bool) -> str:
        if place.view.memory in self.rings:
            return place.view.pointer
        return super().based(place, op, const)

    # --- views that change what an element is ---

    def emit_reshape_view(self, op: Op) -> None:
        """Of swizzled memory: rows in several dimensions, for the copy engine."""
        ring, shape = self.rings.get(op.operands[0]), op.attrs["shape"]
        if ring is not None and len(ring.shape) == 2 and shape[-1] == ring.shape[-1]:
            rows = (prod(shape[n:-1]) for n in range(1, len(shape) - 1))
            steps = tuple(n * ring.swizzle for n in rows)
            self.rings[op.result] = replace(ring, shape=tuple(shape), steps=steps)
            return
        self.expect_rows_in_order(op)
        super().emit_reshape_view(op)

    def emit_bitcast_view(self, op: Op) -> None:
        self.expect_rows_in_order(op)
        view, dtype = self.views[op.operands[0]], op.result.ref.dtype
        if dtype.bits != view.dtype.bits:
            self.refuse(op, "the dtypes differ in width", "bitcast the loaded value")
        pointer, fill = f"(({self.type(dtype, op)}*){view.pointer})", view.fill
        if fill is not None:
            fill = np.array(fill, view.dtype.np).view(dtype.np).item()
        self.views[op.result] = replace(view, pointer=pointer, dtype=dtype, fill=fill)

    def expect_rows_in_order(self, op: Op) -> None:
        if self.views[op.operands[0]].memory in self.rings:
            self.refuse(op, "a view of swizzled memory", "change the loaded value")

    # --- the order of accesses ---

    def meet_before(self, op: Op) -> None:
        """Synchronise the warps of the role before an op, if necessary."""
        if not self.is_authored or not self.in_role:
            return
        needs_fence = self.meetings.needs_fence(op, self.accessed)
        needed, after = self.meetings.before(op, self.accessed)
        if needs_fence:
            self.out.line("stores_before_copies();")
        if needed or needs_fence:
            self.sync()
        self.accessed = after

    def enter_loop(self, *blocks: Block) -> None:
        if self.is_authored and self.in_role:
            self.accessed = self.meetings.in_loop(blocks, self.accessed)

    def emit_load(self, op: Op) -> None:
        self.meet_before(op)
        if self.rows_beside and op.result.tile.dtype.bits == 8:
            place = self.place(op, Access.of(op), self.spread(op.result, op))
            if Access.of(op).mask is None and self.has_pairs_of_bytes(place):
                self.load_pairs_of_bytes(op, place)
                return
        if self.load_words_of_pairs(op):
            return
        super().emit_load(op)

    def has_pairs_of_bytes(self, place: Place) -> bool:
        """Whether a thread's bytes are pairs in a ring, of registers two apart."""
        spread, memory = place.spread, place.view.memory
        if spread is None or memory not in self.rings or len(spread.digits) < 2:
            return False
        last, (pair, inner) = len(spread.shape) - 1, spread.digits[-2:]
        others = [p for p in (*spread.lanes, *spread.digits[:-2]) if p.dim == last]
        spot = place.spots[-1]
        return (
            pair == Digit(2, last, 1)
            and (inner.count, inner.dim) == (2, 1 - last)
            and all(p.stride % 2 == 0 for p in others if p.count > 1)
            and multiple_of(place.view.starts[-1]) % 2 == 0
            and (spot.along, spot.stride, spot.first) == (last, 1, 0)
            and (spot.dim.axis, spot.dim.step) == (memory.ref.rank - 1, 1)
            and not any((spot.nearest, place.tests, *map(spread.has_padding, (0, 1))))
        )

    def load_pairs_of_bytes(self, op: Op, place: Place) -> None:
        """Two bytes at once; pairs of elements are made from their words."""
        result, words = self.load_by_twos(op, place, "i / 2 * 4 + i % 2", 2)
        self.env[op.result] = replace(result, words=words)

    def load_by_twos(
        self, op: Op, place: Place, first: str, apart: int
    ) -> tuple[Tile, str]:
        """Load bytes in words of two; returns the tile, and the array of those words.

        `first`: the register of the first byte of word i; the other is `apart` from it.
        """
        result = self.declare(op.result.tile.dtype, place.spread, op, "x")
        words, count = self.out.fresh("w"), result.registers // 2
        pointer = self.based(place, op, const=True)
        offset, _ = self.address(place, "k")
        self.out.line(f"u32 {words}[{count}];")
        kind = self.type(result.dtype, op)
        self.out.line(
            f"EACH({count}) {{ const int k = {first}; "
            f"{words}[i] = *(const u16*)({pointer} + ({offset})); "
            f"{result.name}[k] = ({kind}){words}[i]; "
            f"{result.name}[k + {apart}] = ({kind})({words}[i] >> 8); }}"
        )
        return result, words

    def load_words_of_pairs(self, op: Op) -> bool:
        """Load bytes that become floats as words of two; False if not in pairs.

        Left operands of matmuls in registers are such. Unpacking and repacking a pair
        takes three instructions on top of the four that convert it. Loading 4 bytes and
        exchanging 2 with a neighbour was slower than two loads on an H200.
        """
        access, spread = Access.of(op), self.spread(op.result, op)
        if access.mask is not None or not self.becomes_floats(op.result):
            return False
        if spread is None or self.views[access.ref].memory not in self.rings:
            return False
        place = self.place(op, access, spread)
        if place.tests or self.vector(place, masked=False) != 2:
            return False
        result, words = self.load_by_twos(op, place, "i * 2", 1)
        self.env[op.result] = replace(result, pairs=words)
        return True

    def becomes_floats(self, value: Value) -> bool:
        """Whether a tile of i8 is only converted to floats."""
        users = self.users.get(value, ())
        casts = [u for u in users if u.name == "cast" and u.result.tile.dtype.is_float]
        return value.tile.dtype.name == "i8" and len(casts) == len(users) > 0


def _bits(parts: Sequence[Lane | Digit]) -> int | None:
    """The bits that a sum of digits may have; None: adding them may carry."""
    found = 0
    for part in parts:
        bits = ((1 << (part.count - 1).bit_length()) - 1) * part.stride
        if found & bits or part.stride & (part.stride - 1):
            return None
        found |= bits
    return found


def is_part_of_ring(entries: Sequence[At | Span | Gather]) -> bool:
    """Whether an index selects rows of swizzled memory, or one row of one slot."""
    *slots, row, column = entries if len(entries) > 1 else (Span(0, 1), *entries)
    if not all(isinstance(entry, (At, Span)) for entry in entries):
        return False
    one_row = isinstance(row, At) and all(isinstance(entry, At) for entry in slots)
    steps = [entry.stride for entry in entries if isinstance(entry, Span)]
    is_dense = all(step == 1 for step in steps)
    return isinstance(column, Span) and (isinstance(row, Span) or one_row) and is_dense


def copied_otherwise(body: Block, roots: Roots) -> set[Value]:
    """Memory that copies access in parts other than rows of whole panels.

    Such memory is not swizzled unless the author says so.
    """
    facts, broken = Facts(), set[Value]()
    facts.note_block(body)
    for op in walk(body):
        if op.name in VIEWS and (op.operands[0] in broken or not _keeps(op, facts)):
            broken.add(op.result)
    return {
        roots.of(ref)
        for op in walk(body)
        if op.name in COPIES
        for ref in op.operands[:2]
        if ref in broken
    }


def _keeps(op: Op, facts: Facts) -> bool:
    """Whether a view of rows of panels is one, too."""
    if op.name != "subview":
        return False
    access = Access.of(op)
    entries = access.split_index()
    if not entries or not is_part_of_ring([entry for entry, _ in entries]):
        return False
    columns = ROW_BYTES // access.ref.ref.dtype.bytes
    entry, operand = entries[-1]
    assert isinstance(entry, Span)
    start = entry.start if operand is None else facts.of(operand).multiple
    return (start or 0) % columns == 0 and entry.size % columns == 0


def can_swizzle(ref: RefType) -> bool:
    """Whether memory can have rows of 128 bytes."""
    if ref.rank < 2:
        return False
    return not (ref.shape[-2] % ROWS or ref.shape[-1] * ref.dtype.bytes % ROW_BYTES)


def widest_swizzle(ref: RefType) -> int:
    """The widest swizzle that fits the rows of some memory."""
    width = ref.shape[-1] * ref.dtype.bytes
    return next((n for n in (128, 64) if width % n == 0), 32)


def _fits_panels(start: Number, size: int, columns: int) -> bool:
    """Whether columns are whole panels or inside one."""
    apart = gcd(multiple_of(start), columns)
    if isinstance(start, int):
        return start % columns == 0 or start % columns + size <= columns
    return apart == columns or size <= apart


RULES = {
    "reshape_view": Shared.emit_reshape_view,
    "bitcast_view": Shared.emit_bitcast_view,
}
