"""dot: operands brought to [batch, rows, k] and [batch, k, columns], then multiplied.

Large matmuls go to packed, register-blocked microkernels (`cache_blocks.py`); a plain
loop nest handles those too small for packing to pay off. `fusion.py` has found the sums
that a matmul may accumulate into in place.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from pallasite.backends.cpu.dot.cache_blocks import Blocking, FindPacked, emit_product
from pallasite.backends.cpu.dot.choose_scheme import (
    Groups,
    groups_of,
    is_small,
    scheme_for,
    sizes_of,
)
from pallasite.backends.cpu.dot.fusion import running_dtype
from pallasite.backends.cpu.dot.pack_once import PACKED_ONCE
from pallasite.backends.cpu.dot.packed_boxes import find_packed
from pallasite.backends.cpu.dot.rows_uncounted import counted
from pallasite.backends.cpu.dot.scheme import MemoryLayout, Operand, Sizes, Sums
from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import FALSE, TRUE, Function, Val, integer
from pallasite.backends.cpu.ops import memory
from pallasite.backends.cpu.tiles import tiles
from pallasite.backends.cpu.tiles.tiles import Buffer, Root, Tile
from pallasite.ir.nodes import Op, Value
from pallasite.ir.roles import Dot, DotStore
from pallasite.ir.types import DType

PackedSides = tuple[FindPacked | None, FindPacked | None]  # of rows and columns


def emit_dot(e: Emitter, op: Op) -> None:
    """A dot or dot_add, into its own buffer, which may start with an addend."""
    lhs, rhs, *addend = (e.as_tile(v) for v in op.operands[:3])
    result = op.result.tile
    running = running_dtype(lhs.dtype, rhs.dtype, op.attrs["dtype"])
    buffer = e.place_for(op, running, [lhs, rhs], addend)
    sums = Tile(result.shape, running, buffer)
    if addend:
        start = _start(e, addend[0], op.operands[3:], buffer)
        _accumulate(e, op, lhs, rhs, sums, FALSE, start)
    else:
        _accumulate(e, op, lhs, rhs, sums, TRUE)
    if running == result.dtype:
        e.define_lazy(op, sums)
        return
    element = lambda i: scalars.cast(e.f, sums.at(e.f, i), running, result.dtype)
    cast = tiles.formula(result.shape, result.dtype, element, [sums], pointwise=True)
    e.define_lazy(op, cast)


def emit_dot_store(e: Emitter, op: Op) -> None:
    """A dot accumulated in the ref where the sum is to be stored."""
    stored, sizes = DotStore.of(op), sizes_of(op)
    lhs, rhs = (e.as_tile(side.value) for side in Dot.of(op).sides)
    access = stored.access
    ref = e.ref(access.ref)
    lhs, rhs = (_apart(e, tile, ref.root) for tile in (lhs, rhs))
    e.before_write(ref.root, e.scope.position + 1)
    overwrite = FALSE
    if stored.overwrite is not None:
        which = e.scalar(stored.overwrite)
        overwrite = e.f.compare("icmp sgt", which, integer(0, "i32"))
    addend = None if stored.addend is None else e.as_tile(stored.addend)
    sums = memory.picked(e, ref, access, _result_shape(op))
    box = sums.buffer
    if box and tiles.reshape(e.f, sums, sizes[:3]).buffer is not None:
        start = None
        if addend is not None:
            if not addend.may_overwrite(box):
                addend = Tile(addend.shape, addend.dtype, e.force(addend))
            start = _start(e, addend, stored.scaled, box)
        _accumulate(e, op, lhs, rhs, sums, overwrite, start)
        return
    # The product's rows and columns are not strided in the ref.
    buffer = e.force(sums) if addend is None else e.buffer_for(sums)
    dense = Tile(sums.shape, sums.dtype, buffer)
    _accumulate(e, op, lhs, rhs, dense, overwrite, addend and Start(addend))
    if box is not None:
        e.fill(box, dense)
    else:
        memory.store_each(e, ref, access, dense)


def _result_shape(op: Op) -> tuple[int, ...]:
    """Batch, rows and columns, as a dot's result has them."""
    lhs, rhs = Dot.of(op).sides
    batch = lhs.sizes(lhs.batch)
    return (*batch, *lhs.sizes(lhs.free), *rhs.sizes(rhs.free))


def _apart(e: Emitter, tile: Tile, root: Root) -> Tile:
    """The tile, forced into its own memory if it reads `root`."""
    if root not in tile.reads():
        return tile
    return Tile(tile.shape, tile.dtype, e.force(tile))


class Start(NamedTuple):
    """What sums are before a matmul is added to them.

    `factors`: the old contents of their memory, each row times its factor.
    """

    tile: Tile
    factors: Tile | None = None


def _start(e: Emitter, addend: Tile, scaled: Sequence[Value], sums: Buffer) -> Start:
    """`scaled`: a tile and factors whose product is the addend, if known."""
    if not scaled:
        return Start(addend)
    tile, factors = (e.as_tile(v) for v in scaled)
    here = (sums.pointer, sums.strides)
    there = tile.buffer and (tile.buffer.pointer, tile.buffer.strides)
    apart = sums.root is None or sums.root not in factors.reads()
    return Start(addend, factors if here == there and apart else None)


def _accumulate(
    e: Emitter,
    op: Op,
    lhs: Tile,
    rhs: Tile,
    sums: Tile,
    overwrite: Val,
    start: Start | None = None,
) -> None:
    """Add the matmul to `sums`, which are first set to `start`, if there is one.

    `overwrite`: their old contents do not count.
    """
    sizes, (left, right) = sizes_of(op), groups_of(op)
    flat = tiles.reshape(e.f, sums, sizes[:3])
    assert flat.buffer is not None
    kind = counted(op, sizes)
    if is_small(kind, _runs_along(rhs, right[1])):
        if start is not None:
            e.fill(flat.buffer, tiles.reshape(e.f, start.tile, sizes[:3]))
        if overwrite != FALSE:
            zero = scalars.zero(flat.dtype)
            with e.f.when(overwrite):
                e.fill(flat.buffer, tiles.splat(flat.shape, flat.dtype, zero))
        a = _canonical(e, lhs, left, in_rows=False)
        b = _canonical(e, rhs, (right[0], right[2], right[1]), in_rows=True)
        _multiply(e.f, a, b, flat, sizes.depth)
        return
    a, b = (
        _operand(e, _canonical(e, tile, groups, in_rows=False))
        for tile, groups in ((lhs, left), (rhs, right))
    )
    packed_once = (
        _finder(e, op.operands[0], left, lhs),
        _finder(e, op.operands[1], right, rhs),
    )
    _, noted = op.attrs.get(PACKED_ONCE, (None, None))
    again = noted is not None
    _blocked(
        e,
        (sizes, kind),
        a,
        b,
        flat.dtype,
        flat.buffer,
        overwrite,
        packed_once,
        start,
        again,
    )


def _finder(e: Emitter, value: Value, groups: Groups, tile: Tile) -> FindPacked:
    return partial(find_packed, e, value, groups, tile)


def _blocked(
    e: Emitter,
    both: tuple[Sizes, Sizes],
    lhs: Operand,
    rhs: Operand,
    dtype: DType,
    buffer: Buffer,
    overwrite: Val,
    packed_once: PackedSides,
    start: Start | None,
    again: bool,
) -> None:
    (batch, row, column), (sizes, kind) = buffer.strides, both
    transposed = _is_transposed(sizes, row, column)
    if start is not None and (transposed or column.constant != 1):
        e.fill(buffer, tiles.reshape(e.f, start.tile, sizes[:3]))
        start = None
    if transposed:
        # Swap columns and rows, so that columns are contiguous in memory.
        sizes, kind = (s._replace(rows=s.columns, columns=s.rows) for s in both)
        lhs, rhs, row, column = rhs, lhs, column, row
        packed_once, again = (None, None), False
    through = None
    if column.constant != 1:
        shape = sizes[:3]
        through = e.temporary(shape, dtype)
        overwrite_here, (batch_here, row_here, _) = TRUE, through.strides
        sums = Sums(dtype, through.pointer, batch_here, row_here)
    else:
        overwrite_here, sums = overwrite, Sums(dtype, buffer.pointer, batch, row)
    layouts = [MemoryLayout.of(o.dtype, o.width, o.depth) for o in (lhs, rhs)]
    types = lhs.dtype, rhs.dtype, dtype
    scheme = scheme_for(*types, sizes, *layouts, again=again, kind=kind)
    allocate = lambda count, kind: e.temporary((count,), kind).pointer
    blocking = Blocking.of(scheme, sizes)
    factors = begin = None
    if start is not None:
        factors = _factors(e, blocking, start)
        addend = tiles.reshape(e.f, start.tile, sizes[:3])
        begin = None if factors else partial(_begin, e, addend, sums)
    emit_product(
        e.f,
        blocking,
        lhs,
        rhs,
        sums,
        overwrite_here,
        allocate,
        packed_once,
        begin,
        factors,
    )
    if through is not None:
        _add_into(
            e,
            Buffer(buffer.pointer, (batch, row, column)),
            through,
            sizes,
            dtype,
            overwrite,
        )


def _factors(e: Emitter, blocking: Blocking, start: Start) -> Val | None:
    """The address of the rows' factors, if the microkernel is to apply them."""
    once = blocking.sizes.batch == blocking.depth.count == 1
    if start.factors is None or not blocking.scheme.can_scale or not once:
        return None
    column = e.stored(tiles.reshape(e.f, start.factors, [blocking.sizes.rows])).buffer
    if column is None or column.strides[0].constant != 1:
        return None
    return column.pointer


def _begin(
    e: Emitter,
    addend: Tile,
    sums: Sums,
    batch: Val,
    row: Val,
    column: Val,
    place: Val,
    size: tuple[int, int],
) -> None:
    """Set a block of sums to the addend, right before the matmul is added to it."""
    part = tiles.cut(e.f, addend, (1, *size), (batch, row, column), (1, 1, 1))
    e.fill(Buffer(place, (sums.batch, sums.row, integer(1))), part)


def _add_into(
    e: Emitter,
    target: Buffer,
    source: Buffer,
    sizes: Sizes,
    dtype: DType,
    overwrite: Val,
) -> None:
    f = e.f
    with f.nest(sizes[:3]) as indices:
        value = scalars.load(f, dtype, source.address(f, dtype, indices))
        place = target.address(f, dtype, indices)
        if overwrite != TRUE:
            plus = "fadd" if dtype.is_float else "add"
            total = f.binary(plus, scalars.load(f, dtype, place), value)
            value = f.select(overwrite, value, total)
        scalars.store(f, dtype, value, place)


def _is_transposed(sizes: Sizes, row: Val, column: Val) -> bool:
    """Whether rows, not columns, are contiguous in memory."""
    return row.constant == 1 and (column.constant != 1 or sizes.columns == 1)


def _runs_along(tile: Tile, dims: Sequence[int]) -> bool:
    """Whether the last of these dimensions is contiguous, now or once stored."""
    if not dims:
        return False
    if tile.buffer is None:
        return dims[-1] == len(tile.shape) - 1
    return tile.buffer.strides[dims[-1]].constant == 1


def _operand(e: Emitter, tile: Tile) -> Operand:
    buffer = tile.buffer or e.force(tile)
    return Operand(tile.dtype, buffer.pointer, *buffer.strides)


def _canonical(e: Emitter, tile: Tile, groups: Groups, in_rows: bool) -> Tile:
    """The tile with three dimensions, one per group, ready to be read many times.

    `in_rows`: the last dimension must be the contiguous one.
    """
    order = [d for group in groups for d in group]
    transposed = tiles.transpose(e.f, tile, order)
    shape = [prod(tile.shape[d] for d in group) for group in groups]
    if not in_rows and tile.buffer is None and not tile.is_free:
        # It is computed fastest in its own order; packing transposes it.
        transposed = tiles.transpose(e.f, e.stored(tile), order)
    buffer = transposed.buffer
    if buffer is not None and order:
        strides = tiles.reshape_strides(e.f, transposed.shape, buffer.strides, shape)
        if strides is not None and (not in_rows or strides[-1].constant == 1):
            return tiles.reshape(e.f, transposed, shape)
    if not transposed.is_free:
        transposed = Tile(transposed.shape, transposed.dtype, e.force(transposed))
    return tiles.reshape(e.f, transposed, shape)


def _multiply(f: Function, a: Tile, b: Tile, sums: Tile, depth: int) -> None:
    """Accumulates in memory, one multiplication after the other."""
    batch, rows, columns = sums.shape
    assert sums.buffer is not None
    with f.nest([batch, rows, depth]) as (i, row, k):
        left = scalars.cast(f, a.at(f, [i, row, k]), a.dtype, sums.dtype)
        with f.nest([columns]) as (column,):
            right = scalars.cast(f, b.at(f, [i, k, column]), b.dtype, sums.dtype)
            address = sums.buffer.address(f, sums.dtype, [i, row, column])
            total = _fused(f, sums.dtype, left, right, f.load(left.type, address))
            f.store(total, address)


def _fused(f: Function, dtype: DType, a: Val, b: Val, c: Val) -> Val:
    if dtype.is_float:
        return f.binary("fadd contract", f.binary("fmul contract", a, b), c)
    return f.binary("add", f.binary("mul", a, b), c)


RULES = {"dot": emit_dot, "dot_add": emit_dot, "dot_store": emit_dot_store}
