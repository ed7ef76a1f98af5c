"""Loops around the microkernels: cache blocks, packing, register blocks, edges.

`emit_product` writes sums[batch, row, column] (or adds to them) for strided operands of
any layout. A `Scheme` says how operands are packed and multiplied: `VectorScheme` with
vector registers, `dot_amx.py` with tiles. `dot.py` comes before, `microkernel.py` and
`packing.py` after.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from pallasite.backends.cpu import dot_vectors as vec
from pallasite.backends.cpu import scalars
from pallasite.backends.cpu.llvm import FALSE, TRUE, Function, Val, integer
from pallasite.backends.cpu.microkernel import (
    Micro,
    block_shape,
    has_fused,
    microkernel,
)
from pallasite.backends.cpu.packing import Packing, direction, packer
from pallasite.ir.types import DType
from pallasite.target import Host

# Bytes of packed operands in a block, which stay in L2.
ROWS_BYTES, COLUMNS_BYTES = 512 << 10, 1 << 20


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


class Scheme(Protocol):
    """A way to pack operands into panels and to multiply two of them."""

    @property
    def rows(self) -> int: ...  # of a panel

    @property
    def columns(self) -> int: ...

    @property
    def depth_step(self) -> int: ...  # packed depths are multiples of it

    @property
    def row_dtype(self) -> DType: ...  # of packed elements

    @property
    def column_dtype(self) -> DType: ...

    @property
    def row_pitch(self) -> int: ...  # elements from row to row, 0: width times depth

    @property
    def panel_bytes(self) -> int: ...  # of a panel that stays in the nearest cache

    @property
    def rows_stay(self) -> bool: ...  # it is one of rows, and columns stream past it

    def begin(self, f: Function) -> None: ...

    def end(self, f: Function) -> None: ...

    def pack(
        self,
        f: Function,
        operand: Operand,
        place: "PanelPlace",
        is_rows: bool,
    ) -> None: ...

    def multiply(self, f: Function, call: "PanelProduct") -> None: ...


class PanelPlace(NamedTuple):
    """Where panels come from and go to."""

    source: Val
    target: Val
    panels: Val
    valid: int  # rows of each panel that exist
    depth: Val


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


@dataclass(frozen=True)
class VectorScheme:
    """Multiply-adds of vector registers, in the type of the sums."""

    host: Host
    row_dtype: DType
    column_dtype: DType
    rows: int
    columns: int
    lanes: int
    depth_step: int = 1
    panel_bytes: int = 32 << 10
    row_pitch: int = 0
    rows_stay: bool = False

    @staticmethod
    def of(host: Host, dtype: DType, sizes: Sizes, lhs: Operand) -> "VectorScheme":
        rows, columns, lanes = block_shape(host, dtype, sizes.rows, sizes.columns)
        scheme = VectorScheme(host, dtype, dtype, rows, columns, lanes)
        if direction(lhs.dtype, dtype, lhs.width, lhs.depth) != "depth":
            return scheme
        # Rows are read along k as they are; one vector more keeps them in other sets
        # of the cache.
        return replace(scheme, row_pitch=_depth_blocks(scheme, sizes).block + lanes)

    def begin(self, f: Function) -> None:
        pass

    def end(self, f: Function) -> None:
        pass

    def pack(
        self, f: Function, operand: Operand, place: PanelPlace, is_rows: bool
    ) -> None:
        target = self.row_dtype
        along = direction(operand.dtype, target, operand.width, operand.depth)
        width = self.rows if is_rows else self.columns
        pitch = self.row_pitch if is_rows else 0
        packing = Packing(
            operand.dtype, target, self.lanes, width, place.valid, along, pitch
        )
        call_defined(
            f,
            packer(f.module, packing),
            place.source,
            operand.width,
            operand.depth,
            place.target,
            place.panels,
            place.depth,
        )

    def multiply(self, f: Function, call: PanelProduct) -> None:
        micro = Micro(
            self.row_dtype,
            self.lanes,
            call.valid_rows,
            call.valid_columns,
            self.row_pitch or 1,
            1 if self.row_pitch else self.rows,
            self.columns,
            has_fused(self.host),
        )
        call_defined(
            f,
            microkernel(f.module, micro),
            call.rows,
            call.columns,
            call.sums,
            call.depth,
            call.stride,
            call.fresh,
        )


def call_defined(f: Function, name: str, *args: Val) -> None:
    """Call a function of the same module, which needs no declaration."""
    f.line(f"call void @{name}({', '.join(map(str, args))})")


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


def _depth_blocks(scheme: Scheme, sizes: Sizes) -> Blocks:
    deepest = scheme.panel_bytes // (scheme.columns * scheme.column_dtype.bytes)
    step = max(scheme.depth_step, 4)
    return Blocks.of(sizes.depth, step, max(step, deepest))


@dataclass(frozen=True)
class Plan:
    """Cache blocks of one product."""

    scheme: Scheme
    sizes: Sizes
    depth: Blocks
    rows: Blocks
    columns: Blocks

    @staticmethod
    def of(scheme: Scheme, sizes: Sizes) -> "Plan":
        row_bytes = scheme.row_dtype.bytes
        column_bytes = scheme.column_dtype.bytes
        depth = _depth_blocks(scheme, sizes)
        most_rows = ROWS_BYTES // (row_bytes * depth.block)
        most_columns = COLUMNS_BYTES // (column_bytes * depth.block)
        return Plan(
            scheme,
            sizes,
            depth,
            Blocks.of(sizes.rows, scheme.rows, most_rows),
            Blocks.of(sizes.columns, scheme.columns, most_columns),
        )

    @property
    def row_room(self) -> int:
        """Packed elements of rows, and a vector that stores may run over."""
        pitch = self.scheme.row_pitch or self.depth.block
        return self.rows.block * pitch + 64

    @property
    def column_room(self) -> int:
        return self.columns.block * self.depth.block + 64


def emit_product(
    f: Function,
    plan: Plan,
    lhs: Operand,
    rhs: Operand,
    sums: Sums,
    fresh: Val,
    room: Callable[[int, DType], Val],
) -> None:
    """Write the loops. `fresh`: what sums hold does not count. `room`: memory."""
    packed_rows = room(plan.row_room, plan.scheme.row_dtype)
    packed_columns = room(plan.column_room, plan.scheme.column_dtype)
    product = _Product(f, plan, lhs, rhs, sums, fresh, packed_rows, packed_columns)
    plan.scheme.begin(f)
    with f.nest([plan.sizes.batch, plan.depth.count, plan.columns.count]) as (n, k, j):
        product.column_block(n, k, j)
    plan.scheme.end(f)


class _Product(NamedTuple):
    f: Function
    plan: Plan
    lhs: Operand
    rhs: Operand
    sums: Sums
    fresh: Val
    packed_rows: Val
    packed_columns: Val

    def column_block(self, batch: Val, k_block: Val, number: Val) -> None:
        f, plan = self.f, self.plan
        k = f.mul(k_block, integer(plan.depth.block))
        depth = plan.depth.extent(f, k)
        column = f.mul(number, integer(plan.columns.block))
        self.pack(False, batch, column, k, number, depth)
        with f.nest([plan.rows.count]) as (row_number,):
            row = f.mul(row_number, integer(plan.rows.block))
            self.pack(True, batch, row, k, row_number, depth)
            self.register_blocks(
                batch, (row_number, row), (number, column), depth, k_block
            )

    def pack(
        self, is_rows: bool, batch: Val, start: Val, k: Val, number: Val, depth: Val
    ) -> None:
        """Pack one cache block of an operand."""
        f, scheme = self.f, self.plan.scheme
        operand = self.lhs if is_rows else self.rhs
        blocks = self.plan.rows if is_rows else self.plan.columns
        target = self.packed_rows if is_rows else self.packed_columns
        packed = scheme.row_dtype if is_rows else scheme.column_dtype
        pitch = scheme.row_pitch if is_rows else 0
        element = scalars.memory(operand.dtype)
        strides = [operand.batch, operand.width, operand.depth]
        where = f.inner([batch, start, k], strides)
        source = vec.offset(f, operand.pointer, element, where)
        full = blocks.full_panels(f, start)
        if full.constant != 0:
            place = PanelPlace(source, target, full, blocks.panel, depth)
            scheme.pack(f, operand, place, is_rows)
        if blocks.rest:
            with f.when(blocks.is_last(f, number)):
                width = f.mul(full, integer(blocks.panel))
                rest = vec.offset(f, source, element, f.mul(width, operand.width))
                there = self.panel(target, packed, blocks, full, depth, pitch)
                place = PanelPlace(rest, there, integer(1), blocks.rest, depth)
                scheme.pack(f, operand, place, is_rows)

    def panel(
        self,
        base: Val,
        dtype: DType,
        blocks: Blocks,
        number: Val,
        depth: Val,
        pitch: int,
    ) -> Val:
        """Where a packed panel begins."""
        f, step = self.f, self.plan.scheme.depth_step
        if pitch:
            depth = integer(pitch)
        elif step > 1:
            if depth.constant is not None:
                depth = integer(-(-depth.constant // step) * step)
            else:
                up = f.add(depth, integer(step - 1))
                depth = f.sub(up, f.binary("urem", up, integer(step)))
        size = f.mul(integer(blocks.panel), depth)
        return vec.offset(f, base, scalars.memory(dtype), f.mul(number, size))

    def register_blocks(
        self,
        batch: Val,
        rows: tuple[Val, Val],
        columns: tuple[Val, Val],
        depth: Val,
        k_block: Val,
    ) -> None:
        f, plan = self.f, self.plan
        fresh = self.fresh
        if plan.depth.count > 1 and fresh != FALSE:
            fresh = f.both(fresh, f.compare("icmp eq", k_block, integer(0)))
        (row_number, row), (column_number, column) = rows, columns
        start = f.inner([batch, row], [self.sums.batch, self.sums.row])
        start = f.add(start, column)
        sums = vec.offset(f, self.sums.pointer, scalars.memory(self.sums.dtype), start)

        def one(i: Val, j: Val, valid_rows: int, valid_columns: int) -> None:
            self.panel_product(sums, i, j, valid_rows, valid_columns, depth, fresh)

        def each_row(body: Callable[[Val, int], None]) -> None:
            _each_panel(f, plan.rows, row_number, row, body)

        def each_column(body: Callable[[Val, int], None]) -> None:
            _each_panel(f, plan.columns, column_number, column, body)

        if plan.scheme.rows_stay:
            each_row(lambda i, m: each_column(lambda j, n: one(i, j, m, n)))
        else:
            each_column(lambda j, n: each_row(lambda i, m: one(i, j, m, n)))

    def panel_product(
        self,
        sums: Val,
        i: Val,
        j: Val,
        valid_rows: int,
        valid_columns: int,
        depth: Val,
        fresh: Val,
    ) -> None:
        f, plan = self.f, self.plan
        scheme = plan.scheme
        row = f.mul(i, integer(plan.rows.panel))
        column = f.mul(j, integer(plan.columns.panel))
        where = f.add(f.mul(row, self.sums.row), column)
        scheme.multiply(
            f,
            PanelProduct(
                self.panel(
                    self.packed_rows,
                    scheme.row_dtype,
                    plan.rows,
                    i,
                    depth,
                    scheme.row_pitch,
                ),
                self.panel(
                    self.packed_columns, scheme.column_dtype, plan.columns, j, depth, 0
                ),
                vec.offset(f, sums, scalars.memory(self.sums.dtype), where),
                self.sums.row,
                depth,
                fresh,
                valid_rows,
                valid_columns,
            ),
        )


def _each_panel(
    f: Function,
    blocks: Blocks,
    number: Val,
    start: Val,
    body: Callable[[Val, int], None],
) -> None:
    """Run `body` with the number of each panel of a cache block, and its width."""
    full = blocks.full_panels(f, start)
    if full.constant != 0:
        with f.nest([full]) as (panel,):
            body(panel, blocks.panel)
    if blocks.rest:
        with f.when(blocks.is_last(f, number)):
            body(blocks.full_panels(f, start), blocks.rest)
