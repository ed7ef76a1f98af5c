"""Loops around the microkernels: cache blocks, packing, register blocks, edges.

`emit_product` stores sums[batch, row, column] (or adds to them) for strided operands of
any layout; `emit_packing` packs a whole operand, part by part, for several matmuls. See
`dot.py` before, `scheme.py` after.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pallasite.backends.cpu.dot.scheme import (
    Blocks,
    Operand,
    PanelPlace,
    PanelProduct,
    Scheme,
    Sizes,
    Sums,
    depth_blocks,
)
from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm import vector_ops as vec
from pallasite.backends.cpu.llvm.writer import FALSE, Function, Val, integer
from pallasite.ir.types import DType
from pallasite.target import host

# 1 / share of L2 for a block of packed rows and of columns, which stay there.
ROWS_SHARE, COLUMNS_SHARE = 4, 2
PART_BYTES = 64 << 10  # packed by one thread at a time where several share a box
WRITTEN_OUT = 4  # matmuls of one kind emitted inline; further ones call a function


@dataclass(frozen=True)
class Blocking:
    """Cache blocks of one matmul."""

    scheme: Scheme
    sizes: Sizes
    depth: Blocks
    rows: Blocks
    columns: Blocks

    @staticmethod
    def of(scheme: Scheme, sizes: Sizes) -> "Blocking":
        row_bytes = scheme.row_dtype.bytes
        column_bytes = scheme.column_dtype.bytes
        depth = depth_blocks(scheme, sizes)
        cache = host().l2_bytes
        most_rows = cache // ROWS_SHARE // (row_bytes * depth.block)
        most_columns = cache // COLUMNS_SHARE // (column_bytes * depth.block)
        return Blocking(
            scheme,
            sizes,
            depth,
            Blocks.of(sizes.rows, scheme.rows, most_rows),
            Blocks.of(sizes.columns, scheme.columns, most_columns),
        )

    def layout(self, is_rows: bool) -> "PackedLayout":
        scheme, sizes = self.scheme, self.sizes
        return PackedLayout(
            scheme.form(is_rows),
            is_rows,
            scheme.row_dtype if is_rows else scheme.column_dtype,
            scheme.rows if is_rows else scheme.columns,
            scheme.apart(is_rows),
            scheme.depth_step,
            sizes.batch,
            sizes.rows if is_rows else sizes.columns,
            self.depth,
        )


@dataclass(frozen=True)
class PackedLayout:
    """Layout of a packed operand: regions [batch][block of k], each of panels.

    Matmuls whose layouts are equal can share what was packed.
    """

    form: str
    is_rows: bool
    dtype: DType
    panel: int
    apart: int  # `Scheme.apart`; 0: packed
    step: int  # packed depths are multiples of it
    batch: int
    width: int
    depth: Blocks

    @property
    def regions(self) -> int:
        return self.batch * self.depth.count

    def elements(self, width: int) -> int:
        """Elements for that many rows or columns."""
        panels = -(-width // self.panel)
        return panels * self.panel * self.depth.block

    @property
    def region_bytes(self) -> int:
        return -(-self.elements(self.width) * self.dtype.bytes // 64) * 64

    @property
    def bytes(self) -> int:
        return self.regions * self.region_bytes

    def place(self, f: Function, base: Val, number: Val, depth: Val) -> Val:
        """The offset of a panel from the start of its block of k."""
        if self.apart:
            step = integer(self.apart)
        elif self.step > 1:
            step = _rounded_up(f, depth, self.step)
        else:
            step = depth
        size = f.mul(integer(self.panel), step)
        return vec.offset(f, base, scalars.memory(self.dtype), f.mul(number, size))


def _rounded_up(f: Function, number: Val, step: int) -> Val:
    if number.constant is not None:
        return integer(-(-number.constant // step) * step)
    up = f.add(number, integer(step - 1))
    return f.sub(up, f.binary("urem", up, integer(step)))


# Finds the address of an operand already packed in a layout; None if it is not.
FindPacked = Callable[[PackedLayout], Val | None]


# Stores initial sums: batch, first row and column, address, number of rows and columns.
Begin = Callable[[Val, Val, Val, Val, tuple[int, int]], None]


@dataclass(frozen=True)
class Parts:
    """The parts in which an operand is packed, each of about `PART_BYTES`.

    `widths` splits its width, `depths` each of its blocks of k.
    """

    layout: PackedLayout
    widths: Blocks
    depths: Blocks

    @staticmethod
    def of(layout: PackedLayout, along: str) -> "Parts":
        """`along`: the dimension that is contiguous in memory.

        It is not split, so that memory is read in long runs.
        """
        most, depth = PART_BYTES // layout.dtype.bytes, layout.depth.block
        deepest, widest = depth, layout.width + layout.panel
        if along == "width":
            deepest = most // layout.width
        else:
            widest = most // depth
        return Parts(
            layout,
            Blocks.of(layout.width, layout.panel, widest),
            Blocks.of(depth, layout.step, deepest),
        )

    @property
    def count(self) -> int:
        return self.layout.regions * self.widths.count * self.depths.count


def emit_packing(
    f: Function,
    blocking: Blocking,
    operand: Operand,
    parts: Parts,
    part: Val,
    target: Val,
) -> None:
    """Pack one part of an operand to its place in the buffer at `target`."""
    layout, widths, depths = parts.layout, parts.widths, parts.depths
    side = _Side(f, blocking, operand, layout, widths, target, False)
    rest, k_piece = _split(f, part, depths.count)
    region, number = _split(f, rest, widths.count)
    batch, k_block = _split(f, region, layout.depth.count)
    region_at = f.element(target, "i8", f.mul(region, integer(layout.region_bytes)))
    k = f.mul(k_block, integer(layout.depth.block))
    panel_depth = layout.depth.extent(f, k)
    # The last block of k may be shorter than the others and have fewer parts.
    before = f.least(f.mul(k_piece, integer(depths.block)), panel_depth)
    depth = f.least(integer(depths.block), f.sub(panel_depth, before))
    panel = f.mul(number, integer(widths.block // widths.panel))
    there = layout.place(f, region_at, panel, panel_depth)
    down = f.mul(before, integer(layout.panel))
    there = vec.offset(f, there, scalars.memory(layout.dtype), down)
    side.pack(there, batch, number, f.add(k, before), depth, panel_depth)


def _split(f: Function, number: Val, count: int) -> tuple[Val, Val]:
    """Quotient and remainder."""
    if count == 1:
        return number, integer(0)
    whole, rest = (f.binary(n, number, integer(count)) for n in ("udiv", "urem"))
    return whole, rest


def emit_product(
    f: Function,
    blocking: Blocking,
    lhs: Operand,
    rhs: Operand,
    sums: Sums,
    overwrite: Val,
    allocate: Callable[[int, DType], Val],
    packed_once: tuple[FindPacked | None, FindPacked | None] = (None, None),
    begin: Begin | None = None,
    factors: Val | None = None,
) -> None:
    """Emit the loops.

    Args:
      f: the function to emit into.
      blocking: cache blocks of the matmul.
      lhs: rows.
      rhs: columns.
      sums: where the result goes.
      overwrite: whether to store the result instead of adding it to the sums.
      allocate: gives memory for a number of elements.
      packed_once: finds operands that are already packed.
      begin: emits the initial value of a block of sums, before it is first added to.
      factors: address of one number per row, by which sums are multiplied first; only
        for schemes that `can_scale`, one batch and one block of k.
    """
    sides = []
    rows, columns = (True, lhs, blocking.rows), (False, rhs, blocking.columns)
    for (is_rows, operand, blocks), find in zip(
        (rows, columns), packed_once, strict=True
    ):
        layout = blocking.layout(is_rows)
        packed = find(layout) if find else None
        if packed is not None:
            side = _Side(f, blocking, operand, layout, blocks, packed, True)
        elif layout.apart:
            side = _Side(f, blocking, operand, layout, blocks, operand.pointer, False)
        else:
            pointer = allocate(layout.elements(blocks.block), layout.dtype)
            side = _Side(f, blocking, operand, layout, blocks, pointer, False)
        sides.append(side)
    product = _Product(f, blocking, sides[0], sides[1], sums, overwrite, begin, factors)
    if begin is None:
        kind = product.kind
        if f.module.count(kind) > WRITTEN_OUT:
            product.call(f.module.name_of(kind, "product"))
            return
    product.emit()


class _Side(NamedTuple):
    """One operand: its cache blocks, and the address `target` of its packed form."""

    f: Function
    blocking: Blocking
    operand: Operand
    layout: PackedLayout
    blocks: Blocks
    target: Val
    is_packed_once: bool

    @property
    def kind(self) -> Hashable:
        return self.operand.dtype, self.layout, self.blocks, self.is_packed_once

    @property
    def values(self) -> list[Val]:
        return [*self.operand[1:], self.target]

    def over(self, f: Function, values: Sequence[Val]) -> "_Side":
        *operand, target = values
        moved = Operand(self.operand.dtype, *operand)
        return self._replace(f=f, operand=moved, target=target)

    def packed(self, batch: Val, k_block: Val, k: Val, number: Val, depth: Val) -> Val:
        """The address of a packed cache block; packs it first if necessary."""
        f, layout = self.f, self.layout
        if self.is_packed_once:
            region = f.add(f.mul(batch, integer(layout.depth.count)), k_block)
            offset = f.mul(region, integer(layout.region_bytes))
            base = f.element(self.target, "i8", offset)
            panel = f.mul(number, integer(self.blocks.block // self.blocks.panel))
            return layout.place(f, base, panel, depth)
        if layout.apart:
            return self.source(batch, self.start(number), k)
        self.pack(self.target, batch, number, k, depth, depth)
        return self.target

    def start(self, number: Val) -> Val:
        """The first row or column of a cache block."""
        return self.f.mul(number, integer(self.blocks.block))

    def source(self, batch: Val, start: Val, k: Val) -> Val:
        """The address of an element of the unpacked operand."""
        operand = self.operand
        strides = [operand.batch, operand.width, operand.depth]
        where = self.f.inner([batch, start, k], strides)
        element = scalars.memory(operand.dtype)
        return vec.offset(self.f, operand.pointer, element, where)

    def pack(
        self, target: Val, batch: Val, number: Val, k: Val, depth: Val, panel_depth: Val
    ) -> None:
        """Pack one cache block, or `depth` of the `panel_depth` steps of k of one."""
        f, operand, blocks = self.f, self.operand, self.blocks
        pack, is_rows = self.blocking.scheme.pack, self.layout.is_rows
        start, element = self.start(number), scalars.memory(operand.dtype)
        source = self.source(batch, start, k)
        full = blocks.full_panels(f, start)
        if full.constant != 0:
            place = PanelPlace(source, target, full, blocks.panel, depth, panel_depth)
            pack(f, operand, place, is_rows)
        if blocks.rest:
            with f.when(blocks.is_last(f, number)):
                width = f.mul(full, integer(blocks.panel))
                rest = vec.offset(f, source, element, f.mul(width, operand.width))
                there = self.layout.place(f, target, full, panel_depth)
                one = integer(1)
                place = PanelPlace(rest, there, one, blocks.rest, depth, panel_depth)
                pack(f, operand, place, is_rows)


class _Product(NamedTuple):
    """A matmul being emitted into a function: `f` and what is known there."""

    f: Function
    blocking: Blocking
    rows: _Side
    columns: _Side
    sums: Sums
    overwrite: Val
    begin: Begin | None
    factors: Val | None

    def emit(self) -> None:
        f, blocking = self.f, self.blocking
        sizes, scheme = blocking.sizes, blocking.scheme
        counts = [sizes.batch, blocking.depth.count, blocking.columns.count]
        scheme.begin(f)
        with f.nest(counts) as (n, k, j):
            self.column_block(n, k, j)
        scheme.end(f)

    def call(self, name: str) -> None:
        """Call the function `name`, which has the code of all matmuls of this kind.

        Emitting hundreds of small ones would take a millisecond each, and more in LLVM.
        """
        f = self.f
        variables = [v for v in self.values if not v.is_literal]
        if not f.module.defines(name):
            params = [(v.type, f"x{n}") for n, v in enumerate(variables)]
            shared = Function(f.module, name, params, "void", "internal", "noinline")
            pending = iter(shared.params)
            values = [v if v.is_literal else next(pending) for v in self.values]
            self.over(shared, values).emit()
            shared.line("ret void")
        f.call_defined(name, *variables)

    @property
    def kind(self) -> Hashable:
        """What two matmuls must share to have the same code: all but variables."""
        values = tuple(v if v.is_literal else v.type for v in self.values)
        sides, scaled = (self.rows.kind, self.columns.kind), self.factors is not None
        return self.blocking, sides, self.sums.dtype, scaled, values

    @property
    def values(self) -> list[Val]:
        """The values it uses from the surrounding code."""
        factors = [] if self.factors is None else [self.factors]
        sides = [*self.rows.values, *self.columns.values]
        return [*sides, *self.sums[1:], self.overwrite, *factors]

    def over(self, f: Function, values: Sequence[Val]) -> "_Product":
        """The same with other `values`, in another function."""
        rows, columns, rest = values[:5], values[5:10], values[10:]
        pointer, batch, row, overwrite, *factors = rest
        return self._replace(
            f=f,
            rows=self.rows.over(f, rows),
            columns=self.columns.over(f, columns),
            sums=Sums(self.sums.dtype, pointer, batch, row),
            overwrite=overwrite,
            factors=factors[0] if factors else None,
        )

    def column_block(self, batch: Val, k_block: Val, number: Val) -> None:
        f, blocking = self.f, self.blocking
        k = f.mul(k_block, integer(blocking.depth.block))
        depth = blocking.depth.extent(f, k)
        columns = self.columns.packed(batch, k_block, k, number, depth)
        overwrite = self.overwrite
        if blocking.depth.count > 1 and overwrite != FALSE:
            overwrite = f.both(overwrite, f.compare("icmp eq", k_block, integer(0)))
        with f.nest([blocking.rows.count]) as (row_number,):
            rows = self.rows.packed(batch, k_block, k, row_number, depth)
            self.register_blocks(
                batch, (row_number, rows), (number, columns), k_block, depth, overwrite
            )

    def register_blocks(
        self,
        batch: Val,
        rows: tuple[Val, Val],
        columns: tuple[Val, Val],
        k_block: Val,
        depth: Val,
        overwrite: Val,
    ) -> None:
        """The matmul of two cache blocks, each given by index and packed address."""
        f, blocking = self.f, self.blocking
        (row_number, packed_rows), (column_number, packed_columns) = rows, columns
        row = f.mul(row_number, integer(blocking.rows.block))
        column = f.mul(column_number, integer(blocking.columns.block))
        element = scalars.memory(self.sums.dtype)
        start = f.inner([batch, row], [self.sums.batch, self.sums.row])
        sums = vec.offset(f, self.sums.pointer, element, f.add(start, column))

        def one(i: Val, j: Val, valid_rows: int, valid_columns: int) -> None:
            down = f.mul(i, integer(blocking.rows.panel))
            across = f.mul(j, integer(blocking.columns.panel))
            where = f.add(f.mul(down, self.sums.row), across)
            here = vec.offset(f, sums, element, where)
            if self.begin is not None:
                at = (f.add(row, down), f.add(column, across))
                with f.when(f.compare("icmp eq", k_block, integer(0))):
                    self.begin(batch, *at, here, (valid_rows, valid_columns))
            factors = self.factors
            if factors is not None:
                factors = vec.offset(f, factors, element, f.add(row, down))
            call = PanelProduct(
                self.rows.layout.place(f, packed_rows, i, depth),
                self.columns.layout.place(f, packed_columns, j, depth),
                here,
                self.sums.row,
                depth,
                overwrite,
                valid_rows,
                valid_columns,
                factors,
            )
            blocking.scheme.multiply(f, call)

        def each_row(body: Callable[[Val, int], None]) -> None:
            _each_panel(f, blocking.rows, row_number, row, body)

        def each_column(body: Callable[[Val, int], None]) -> None:
            _each_panel(f, blocking.columns, column_number, column, body)

        if blocking.scheme.rows_stay:
            each_row(lambda i, m: each_column(lambda j, n: one(i, j, m, n)))
        else:
            each_column(lambda j, n: each_row(lambda i, m: one(i, j, m, n)))


def _each_panel(
    f: Function,
    blocks: Blocks,
    number: Val,
    start: Val,
    body: Callable[[Val, int], None],
) -> None:
    """Run `body` with the index of each panel of a cache block, and its width."""
    full = blocks.full_panels(f, start)
    if full.constant != 0:
        with f.nest([full]) as (panel,):
            body(panel, blocks.panel)
    if blocks.rest:
        with f.when(blocks.is_last(f, number)):
            body(blocks.full_panels(f, start), blocks.rest)
