"""What the loops of dot are made of: operands, schemes of packing, cuts for the caches.

A `Scheme` says how operands are packed into panels and how two panels are multiplied:
`VectorScheme` here with vector registers, `amx.py` with tiles, `grouped.py` with
groups of k. `cache_blocks.py` has the loops around them, `microkernel.py` and
`packing.py` the code inside.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from pallasite.backends.cpu.dot.microkernel import (
    Micro,
    block_shape,
    has_fused,
    microkernel,
)
from pallasite.backends.cpu.dot.packing import Packing, direction, packer
from pallasite.backends.cpu.llvm.writer import TRUE, Function, Val, integer
from pallasite.ir.types import DType
from pallasite.target import Host, host

STREAMS = 16  # rows of memory that are read side by side
WAYS = 8  # lines in a set of the nearest cache, at least


def panel_bytes() -> int:
    """Of a panel that stays in the nearest cache, beside what streams past it."""
    return host().l1_bytes * 2 // 3


def in_place_bytes() -> int:
    """Of columns that are multiplied from where they are."""
    return host().l2_bytes // 2


class Operand(NamedTuple):
    """A strided view [batch, width, depth]: rows of lhs, or columns of rhs."""

    dtype: DType
    pointer: Val
    batch: Val
    width: Val
    depth: Val


class Sums(NamedTuple):
    """Where products are added up; neighbouring columns are neighbours in memory."""

    dtype: DType
    pointer: Val
    batch: Val
    row: Val


class Sizes(NamedTuple):
    batch: int
    rows: int
    columns: int
    depth: int


class Scheme(ABC):
    """A way to pack operands into panels and to multiply two of them.

    What is set here holds unless a scheme says otherwise.
    """

    row_dtype: DType  # of packed elements
    column_dtype: DType
    rows: int  # of a panel
    columns: int
    # A panel of rows stays near and columns stream past it: the next sums are then
    # neighbours in memory, often in the same page.
    rows_stay: bool = True
    ahead_below: int = 1 << 20  # width of the other side: then pack ahead
    streams: bool = False  # see `VectorScheme`
    can_scale: bool = False  # multiply sums by a factor per row before it adds to them

    def apart(self, is_rows: bool) -> int:
        """Elements from one row or column to the next, if they are not packed; or 0."""
        return 0

    @property
    def depth_step(self) -> int:
        """Packed depths are multiples of it."""
        return 1

    def form(self, is_rows: bool) -> str:
        """A name of how elements are packed, beyond what a layout says."""
        return type(self).__name__

    def begin(self, f: Function) -> None:  # noqa: B027 (most need nothing)
        """What comes before the first product."""

    def end(self, f: Function) -> None:  # noqa: B027
        """What comes after the last."""

    @abstractmethod
    def pack(
        self, f: Function, operand: Operand, place: "PanelPlace", is_rows: bool
    ) -> None:
        """Pack panels of rows or columns."""

    @abstractmethod
    def multiply(self, f: Function, call: "PanelProduct") -> None:
        """Multiply a panel of rows with one of columns."""


class MemoryLayout(NamedTuple):
    """How rows or columns lie in memory before they are packed.

    Elements from row to row if each row's neighbours are neighbours along k, and from
    one k to the next if they are neighbours in the same k; 0 for all that is different
    or not known.
    """

    rows_apart: int = 0
    depths_apart: int = 0

    @staticmethod
    def of(dtype: DType, width: Val, depth: Val) -> "MemoryLayout":
        along = direction(dtype, dtype, width, depth)
        return MemoryLayout(
            (width.constant or 0) if along == "depth" else 0,
            (depth.constant or 0) if along == "width" else 0,
        )

    def pitch_of_rows(self, rows: int, dtype: DType) -> int:
        """From row to row, if panels of so many are read as fast from where they are.

        Else 0. A panel stays near while columns stream past it; nothing is gained by
        moving it unless its rows lie so that all fall into one set of a cache.
        """
        fine = rows <= WAYS or self.rows_apart * dtype.bytes % 4096 != 0
        return self.rows_apart if fine else 0

    def pitch_of_columns(
        self, rows: int, sizes: Sizes, dtype: DType, lanes: int
    ) -> int:
        """From one k to the next, if columns are read as fast from where they are.

        Else 0. Each panel of so many rows reads them again: unless there is only one,
        they must be near, and what is left over after whole vectors must be one load.
        """
        once = sizes.rows <= rows
        rest = sizes.columns % lanes
        fine = once or (self.is_near(sizes, dtype) and (rest & (rest - 1)) == 0)
        return self.depths_apart if fine and self.depths_apart >= sizes.columns else 0

    def is_near(self, sizes: Sizes, dtype: DType) -> bool:
        """Do columns, with the gaps, fit the nearest cache?

        Or the next one, if they do not all fall into a few sets of it.
        """
        step = self.depths_apart * dtype.bytes
        most = in_place_bytes() if step % 4096 else panel_bytes()
        return step * sizes.depth <= most


UNKNOWN_LAYOUT = MemoryLayout()


class PanelPlace(NamedTuple):
    """Where panels come from and go to."""

    source: Val
    target: Val
    panels: Val
    valid: int  # rows of each panel that exist
    depth: Val
    room: Val  # steps of k that there are from panel to panel


class PanelProduct(NamedTuple):
    """One call of a microkernel."""

    rows: Val
    columns: Val
    sums: Val
    stride: Val
    depth: Val
    fresh: Val
    valid_rows: int
    valid_columns: int
    factors: Val | None  # the address of one per row, which sums are multiplied by

    def emit(self, f: Function, name: str) -> None:
        """Call a function made by `product_function`."""
        operands = self.rows, self.columns, self.sums
        more = () if self.factors is None else (self.factors,)
        f.call_defined(name, *operands, self.depth, self.stride, self.fresh, *more)


@dataclass(frozen=True)
class VectorScheme(Scheme):
    """Multiply-adds of vector registers, in the type of the sums."""

    host: Host
    row_dtype: DType
    column_dtype: DType
    rows: int
    columns: int
    lanes: int
    # Elements from row to row, and from one k to the next of columns, where they are
    # multiplied from where they lie and not packed at all.
    row_pitch: int = 0
    column_pitch: int = 0
    # Columns come from far away: a few k at a time, in runs as long as there are.
    streams: bool = False
    can_scale: bool = True

    @staticmethod
    def of(
        host: Host, dtype: DType, sizes: Sizes, lhs: MemoryLayout, rhs: MemoryLayout
    ) -> "VectorScheme":
        rows, columns, lanes = block_shape(host, dtype, sizes.rows, sizes.columns)
        row_pitch = lhs.pitch_of_rows(rows, dtype)
        column_pitch = rhs.pitch_of_columns(rows, sizes, dtype, lanes)
        streams = column_pitch != 0 and not rhs.is_near(sizes, dtype)
        pitches = row_pitch, column_pitch
        return VectorScheme(
            host, dtype, dtype, rows, columns, lanes, *pitches, streams=streams
        )

    def apart(self, is_rows: bool) -> int:
        return self.row_pitch if is_rows else int(self.column_pitch != 0)

    def pack(
        self, f: Function, operand: Operand, place: PanelPlace, is_rows: bool
    ) -> None:
        target = self.row_dtype
        along = direction(operand.dtype, target, operand.width, operand.depth)
        width = self.rows if is_rows else self.columns
        packing = Packing(operand.dtype, target, self.lanes, width, place.valid, along)
        f.call_defined(
            packer(f.module, packing),
            place.source,
            operand.width,
            operand.depth,
            place.target,
            place.panels,
            place.depth,
            place.room,
        )

    def multiply(self, f: Function, call: PanelProduct) -> None:
        micro = Micro(
            self.row_dtype,
            self.lanes,
            call.valid_rows,
            call.valid_columns,
            self.row_pitch or 1,
            1 if self.row_pitch else self.rows,
            self.column_pitch or self.columns,
            self.column_pitch != 0,
            has_fused(self.host),
            call.factors is not None,
        )
        call.emit(f, microkernel(f.module, micro))


@dataclass(frozen=True)
class Blocks:
    """How far one dimension is cut for the caches, in whole panels."""

    total: int
    panel: int
    block: int

    @staticmethod
    def of(total: int, panel: int, most: int) -> "Blocks":
        """Even blocks of at most `most` elements (at least one panel)."""
        panels = -(-total // panel)
        blocks = -(-panels // max(1, most // panel))
        return Blocks(total, panel, -(-panels // blocks) * panel)

    @property
    def count(self) -> int:
        return -(-self.total // self.block)

    @property
    def rest(self) -> int:
        """Width of the last panel if it is not a whole one."""
        return self.total % self.panel

    def extent(self, f: Function, start: Val) -> Val:
        return f.least(integer(self.block), f.sub(integer(self.total), start))

    def full_panels(self, f: Function, start: Val) -> Val:
        extent = self.extent(f, start)
        if extent.constant is not None:
            return integer(extent.constant // self.panel)
        return f.binary("udiv", extent, integer(self.panel))

    def is_last(self, f: Function, number: Val) -> Val:
        if self.count == 1:
            return TRUE
        return f.compare("icmp eq", number, integer(self.count - 1))


def depth_blocks(scheme: Scheme, sizes: Sizes) -> Blocks:
    """Cuts of k, so that a panel of the side that stays fits the nearest cache."""
    if scheme.rows_stay:
        step_bytes = scheme.rows * scheme.row_dtype.bytes
    else:
        step_bytes = scheme.columns * scheme.column_dtype.bytes
    deepest = STREAMS if scheme.streams else panel_bytes() // step_bytes
    step = max(scheme.depth_step, 4)
    return Blocks.of(sizes.depth, step, max(step, deepest))
