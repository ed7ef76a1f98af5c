"""The building blocks of dot's loops: operands, packing schemes, cache blocks.

A `Scheme` defines how operands are packed into panels and how two panels are
multiplied: `VectorScheme` here with vector registers, `amx.py` with tiles, `grouped.py`
with groups of k. `cache_blocks.py` has the loops around them, `microkernel.py` and
`packing.py` the code inside.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from pallasite.backends.cpu.dot.microkernel import (
    Micro,
    block_shape,
    has_fused,
    high_shape,
    microkernel,
)
from pallasite.backends.cpu.dot.packing import Packing, direction, packer
from pallasite.backends.cpu.llvm.writer import TRUE, Function, Val, integer
from pallasite.ir.types import DType
from pallasite.target import Host, host

STREAMS = 16  # rows of memory that are read concurrently
WAYS = 8  # minimum associativity of the L1 cache


def panel_bytes() -> int:
    """Size of a panel that stays in L1 while the other operand streams past it."""
    return host().l1_bytes * 2 // 3


def in_place_bytes() -> int:
    """Size of columns that may be multiplied in place, without packing."""
    return host().l2_bytes // 2


class Operand(NamedTuple):
    """A strided view [batch, width, depth]: rows of lhs, or columns of rhs."""

    dtype: DType
    pointer: Val
    batch: Val
    width: Val
    depth: Val


class Sums(NamedTuple):
    """Where matmuls are accumulated; columns are contiguous in memory."""

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

    The attributes set here are defaults.
    """

    row_dtype: DType  # of packed elements
    column_dtype: DType
    rows: int  # of a panel
    columns: int
    # A panel of rows stays in L1 and columns stream past it: the next sums are then
    # adjacent in memory, often in the same page.
    rows_stay: bool = True
    pack_once_below: int = 1 << 20  # other side's width below which to pack once
    streams: bool = False  # see `VectorScheme`
    can_scale: bool = False  # can scale sums by a factor per row first

    def apart(self, is_rows: bool) -> int:
        """Stride between rows or columns that are multiplied in place; 0: packed."""
        return 0

    @property
    def depth_step(self) -> int:
        """Packed depths are multiples of it."""
        return 1

    def form(self, is_rows: bool) -> str:
        """Identifies the order of packed elements, beyond what `PackedLayout` says."""
        return type(self).__name__

    def begin(self, f: Function) -> None:  # noqa: B027 (most need nothing)
        """Code before the first matmul."""

    def end(self, f: Function) -> None:  # noqa: B027
        """Code after the last."""

    @abstractmethod
    def pack(
        self, f: Function, operand: Operand, place: "PanelPlace", is_rows: bool
    ) -> None:
        """Pack panels of rows or columns."""

    @abstractmethod
    def multiply(self, f: Function, call: "PanelProduct") -> None:
        """Multiply a panel of rows with one of columns."""


class MemoryLayout(NamedTuple):
    """Layout of rows or columns in memory before they are packed.

    `rows_apart` is the row stride if rows are contiguous along k, `depths_apart` the
    stride of k if each k is contiguous across rows; 0 otherwise, or if unknown.
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
        """The row stride if panels of `rows` are read as fast in place, else 0.

        A panel stays in L1 while columns stream past it; packing it gains nothing
        unless all its rows map to one set of a cache.
        """
        in_place = rows <= WAYS or self.rows_apart * dtype.bytes % 4096 != 0
        return self.rows_apart if in_place else 0

    def pitch_of_columns(
        self, rows: int, sizes: Sizes, dtype: DType, lanes: int
    ) -> int:
        """The stride of k if columns are read as fast in place, else 0.

        Each panel of `rows` rows reads them again: unless there is only one panel, they
        must be in a near cache, and the remainder after whole vectors must be one load.
        """
        once = sizes.rows <= rows
        rest = sizes.columns % lanes
        one_load = (rest & (rest - 1)) == 0
        in_place = once or (self.is_near(sizes, dtype) and one_load)
        wide = self.depths_apart >= sizes.columns
        return self.depths_apart if in_place and wide else 0

    def is_near(self, sizes: Sizes, dtype: DType) -> bool:
        """Whether columns, with the gaps between them, fit the L1 cache.

        Or the L2 cache, if they do not all map to a few of its sets.
        """
        step = self.depths_apart * dtype.bytes
        most = in_place_bytes() if step % 4096 else panel_bytes()
        return step * sizes.depth <= most


UNKNOWN_LAYOUT = MemoryLayout()


class PanelPlace(NamedTuple):
    """Source and destination of panels."""

    source: Val
    target: Val
    panels: Val
    valid: int  # rows of each panel that exist
    depth: Val
    panel_depth: Val  # steps of k from the start of one panel to the next


class PanelProduct(NamedTuple):
    """One call of a microkernel."""

    rows: Val
    columns: Val
    sums: Val
    stride: Val
    depth: Val
    overwrite: Val  # store the sums instead of adding to them
    valid_rows: int
    valid_columns: int
    factors: Val | None  # address of one factor per row, by which sums are scaled

    def emit(self, f: Function, name: str) -> None:
        """Call a function made by `product_function`."""
        operands = self.rows, self.columns, self.sums
        more = () if self.factors is None else (self.factors,)
        f.call_defined(name, *operands, self.depth, self.stride, self.overwrite, *more)


@dataclass(frozen=True)
class VectorScheme(Scheme):
    """Multiply-adds of vector registers, in the type of the sums."""

    host: Host
    row_dtype: DType
    column_dtype: DType
    rows: int
    columns: int
    lanes: int
    # Strides of rows, and of k in columns, if they are multiplied in place; 0: packed.
    row_pitch: int = 0
    column_pitch: int = 0
    # Columns exceed the cache: a few k at a time, in runs as long as possible.
    streams: bool = False
    can_scale: bool = True

    @staticmethod
    def of(
        host: Host,
        dtype: DType,
        sizes: Sizes,
        lhs: MemoryLayout,
        rhs: MemoryLayout,
        again: bool,
    ) -> "VectorScheme":
        """`again`: other matmuls read the same columns."""
        shape = block_shape(host, dtype, sizes.rows, sizes.columns)
        is_near = rhs.is_near(sizes, dtype)
        if (
            shape[0] < sizes.rows
            and not is_near
            and (not again or rhs.depths_apart * dtype.bytes % 4096)
        ):
            # All rows at once: packing columns costs more than a better shape saves,
            # unless they are whole pages apart and other programs read them again.
            shape = high_shape(host, dtype, sizes.rows, sizes.columns) or shape
        rows, columns, lanes = shape
        row_pitch = lhs.pitch_of_rows(rows, dtype)
        column_pitch = rhs.pitch_of_columns(rows, sizes, dtype, lanes)
        streams = column_pitch != 0 and not is_near
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
            place.panel_depth,
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
    """Cache blocks of one dimension, in whole panels."""

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
        """Width of the last panel if it is partial, else 0."""
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
    """Blocks of k, so that a panel of the stationary side fits the L1 cache."""
    if scheme.rows_stay:
        step_bytes = scheme.rows * scheme.row_dtype.bytes
    else:
        step_bytes = scheme.columns * scheme.column_dtype.bytes
    deepest = STREAMS if scheme.streams else panel_bytes() // step_bytes
    step = max(scheme.depth_step, 4)
    return Blocks.of(sizes.depth, step, max(step, deepest))
