"""Ops that make or rearrange tiles: constant, iota, broadcast, reshape, slices, pad.

Most only describe where an element comes from and cost nothing. A concatenation
(concatenate, pad) is stored part by part, in its destination if it is only stored; one
that a single loop computes with is not stored: each element is found in its part.
"""

from collections.abc import Iterator, Sequence

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import TRUE, Function, Val, integer
from pallasite.backends.cpu.ops.elementwise import emit_elementwise
from pallasite.backends.cpu.tiles import reinterpret, tiles
from pallasite.backends.cpu.tiles.lifetimes import pads_rows
from pallasite.backends.cpu.tiles.tiles import Buffer, Indices, Tile
from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import I64


def emit_constant(e: Emitter, op: Op) -> None:
    type = op.result.tile
    value = scalars.constant(op.attrs["value"], type.dtype)
    e.define_lazy(op, tiles.splat(type.shape, type.dtype, value))


def emit_iota(e: Emitter, op: Op) -> None:
    type, dim = op.result.tile, op.attrs["dim"]
    element = lambda indices: scalars.cast(e.f, indices[dim], I64, type.dtype)
    e.define(op.result, tiles.formula(type.shape, type.dtype, element, free=True))


def emit_broadcast_in_dim(e: Emitter, op: Op) -> None:
    operand, type = op.operands[0], op.result.tile
    if not operand.tile.rank:
        value = e.scalar(operand)
        e.define_lazy(op, tiles.splat(type.shape, type.dtype, value))
        return
    tile = e.tile(operand)
    if type.size > operand.tile.size:
        tile = e.stored(tile)
    e.define(op.result, tiles.broadcast(e.f, tile, type.shape, op.attrs["dims"]))


def emit_reshape(e: Emitter, op: Op) -> None:
    tile = e.as_tile(op.operands[0])
    e.define_lazy(op, tiles.reshape(e.f, tile, op.result.tile.shape))


def emit_transpose(e: Emitter, op: Op) -> None:
    """A view; a formula over memory is first evaluated in its own order."""
    tile, perm = e.as_tile(op.operands[0]), op.attrs["perm"]
    if tiles.moves_lanes(tile.shape, perm) and tile.comes_from_memory:
        tile = e.stored(tile)
    e.define_lazy(op, tiles.transpose(e.f, tile, perm))


def emit_slice(e: Emitter, op: Op) -> None:
    tile = e.as_tile(op.operands[0])
    starts = [integer(n) for n in op.attrs["starts"]]
    shape, steps = op.result.tile.shape, op.attrs["strides"]
    e.define_lazy(op, tiles.cut(e.f, tile, shape, starts, steps))


def emit_rev(e: Emitter, op: Op) -> None:
    tile, axes = e.as_tile(op.operands[0]), op.attrs["axes"]
    ends = [integer(max(n - 1, 0) * (d in axes)) for d, n in enumerate(tile.shape)]
    steps = [-1 if d in axes else 1 for d in range(len(tile.shape))]
    e.define_lazy(op, tiles.cut(e.f, tile, tile.shape, ends, steps))


def emit_dynamic_slice(e: Emitter, op: Op) -> None:
    operand, *starts = op.operands
    tile, shape = e.as_tile(operand), op.result.tile.shape
    clamped = clamped_starts(e, tile.shape, shape, starts)
    e.define_lazy(op, tiles.cut(e.f, tile, shape, clamped, [1] * len(shape)))


def clamped_starts(
    e: Emitter, shape: tuple[int, ...], sizes: tuple[int, ...], starts: list[Value]
) -> list[Val]:
    """Starts clamped so that the slice is in range, as in lax.dynamic_slice."""
    zero = integer(0)
    return [
        e.f.clamp(e.index(start), zero, integer(n - size))
        for start, n, size in zip(starts, shape, sizes, strict=True)
    ]


# --- ops that join parts ---


def emit_concatenate(e: Emitter, op: Op) -> None:
    type, axis = op.result.tile, op.attrs["axis"]
    parts, first = list[tuple[list[int], Tile]](), 0
    for operand in op.operands:
        part = e.tile(operand)
        parts.append(([first if d == axis else 0 for d in range(type.rank)], part))
        first += part.shape[axis]
    if e.plan.memory.get(op.result) == "found":
        stored = [(start, e.stored(part)) for start, part in parts]
        e.define_lazy(op, _one_of(e.f, stored, type.shape))
        return
    e.define(op.result, tiles.joined(type.shape, type.dtype, parts))


def emit_pad(e: Emitter, op: Op) -> None:
    operand, padding = op.operands
    type, tile, value = op.result.tile, e.as_tile(operand), e.scalar(padding)
    if not type.rank:
        e.define(op.result, e.scalar(operand))
        return
    first, counts, starts, steps = _inside(op, tile.shape)
    part = tiles.cut(e.f, tile, counts, [integer(n) for n in first], [1] * type.rank)
    memory = e.plan.memory.get(op.result)
    if (memory == "found" or (pads_rows(op) and memory != "moved")) and 0 not in counts:
        e.define_lazy(op, _padded(e.f, part, type.shape, starts, value))
        return
    if steps == [1] * type.rank:
        border = [
            (start, tiles.splat(sizes, type.dtype, value))
            for start, sizes in _border(type.shape, starts, counts)
        ]
        whole = tiles.joined(type.shape, type.dtype, [*border, (starts, part)])
        e.define(op.result, whole)
        return
    buffer = e.result_buffer(op)
    e.fill(buffer, tiles.splat(type.shape, type.dtype, value))
    whole = Tile(type.shape, type.dtype, buffer)
    where = [integer(n) for n in starts]
    target = tiles.cut(e.f, whole, counts, where, steps).buffer
    assert target is not None
    e.fill(target, part)
    e.define(op.result, whole)


def _padded(
    f: Function, part: Tile, shape: Sequence[int], starts: Sequence[int], value: Val
) -> Tile:
    """Elements of a part where it has them, elsewhere the padding value."""

    def element(indices: Indices) -> Val:
        inside, found = _found(f, part, starts, shape, indices)
        return f.select(inside, found, value)

    return tiles.formula(shape, part.dtype, element, [part])


def _one_of(
    f: Function, parts: Sequence[tuple[Sequence[int], Tile]], shape: Sequence[int]
) -> Tile:
    """A concatenation, each element of which is found when it is used."""
    *others, (last_start, last) = parts

    def element(indices: Indices) -> Val:
        _, value = _found(f, last, last_start, shape, indices)
        for start, part in others:
            inside, found = _found(f, part, start, shape, indices)
            value = f.select(inside, found, value)
        return value

    return tiles.formula(shape, last.dtype, element, [part for _, part in parts])


def _found(
    f: Function,
    part: Tile,
    starts: Sequence[int],
    shape: Sequence[int],
    indices: Indices,
) -> tuple[Val, Val]:
    """Whether a part of a shape has the elements at some indices, and those it has."""
    inside, places = TRUE, []
    for index, start, n, new in zip(indices, starts, part.shape, shape, strict=True):
        place = f.sub(index, integer(start))
        if n < new:
            narrow = f.convert("trunc", place, "i32")
            here = f.compare("icmp ult", narrow, integer(n, "i32"))
            inside = here if inside == TRUE else f.binary("and", inside, here)
            if not place.count:
                place = f.clamp(place, integer(0), integer(n - 1))
        places.append(place)
    outer = f.mask
    if inside.count:
        f.mask = inside if outer is None else f.binary("and", outer, inside)
    value = part.at(f, places)
    f.mask = outer
    return inside, value


def _border(
    shape: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Boxes that cover all but an inner one: before and after it, in each dimension.

    Earlier dimensions are already within the inner box's bounds.
    """
    for d, (n, start, count) in enumerate(zip(shape, starts, counts, strict=True)):
        end = min(start, n) + count
        for first, size in ((0, min(start, n)), (end, n - end)):
            place = [*starts[:d], first, *[0] * (len(shape) - d - 1)]
            yield place, [*counts[:d], size, *shape[d + 1 :]]


def _inside(op: Op, shape: tuple[int, ...]):
    """Per dimension: the first element kept, how many, destination, and stride."""
    first, counts, starts, steps = [], [], [], []
    for n, new, low, mid in zip(
        shape,
        op.result.tile.shape,
        op.attrs["low"],
        op.attrs["interior"],
        strict=True,
    ):
        step = mid + 1
        skipped = max(0, -(low // step)) if low < 0 else 0
        start = low + skipped * step
        fitting = -(-(new - start) // step) if new > start else 0
        first.append(skipped)
        counts.append(max(0, min(n - skipped, fitting)))
        starts.append(start)
        steps.append(step)
    return first, counts, starts, steps


def emit_dynamic_update_slice(e: Emitter, op: Op) -> None:
    operand, update, *starts = op.operands
    type = op.result.tile
    if not type.rank:
        e.define(op.result, e.scalar(update))
        return
    buffer = e.result_buffer(op)
    e.fill(buffer, e.tile(operand))
    clamped = clamped_starts(e, type.shape, update.tile.shape, starts)
    whole = Tile(type.shape, type.dtype, buffer)
    steps = [1] * type.rank
    target = tiles.cut(e.f, whole, update.tile.shape, clamped, steps).buffer
    assert target is not None
    e.fill(target, e.tile(update))
    e.define(op.result, whole)


def emit_bitcast(e: Emitter, op: Op) -> None:
    """The same bits; where the width changes, through memory."""
    operand, type = op.operands[0], op.result.tile
    old, new = operand.tile.dtype, type.dtype
    if old.bits == new.bits:
        emit_elementwise(e, op)
        return
    if min(old.bits, new.bits) < 8:
        tile = e.stored(e.as_tile(operand))
        part = reinterpret.last_parts(e.f, tile, new)
        e.define_lazy(op, tiles.formula(type.shape, new, part, [tile]))
        return
    bytes_of = e.temporary(operand.tile.shape, old, e.last_use(op.result))
    e.fill(bytes_of, e.as_tile(operand))
    buffer = Buffer(bytes_of.pointer, tiles.row_major(type.shape))
    e.define_lazy(op, Tile(type.shape, new, buffer))


RULES = {
    "constant": emit_constant,
    "iota": emit_iota,
    "broadcast_in_dim": emit_broadcast_in_dim,
    "reshape": emit_reshape,
    "transpose": emit_transpose,
    "slice": emit_slice,
    "rev": emit_rev,
    "dynamic_slice": emit_dynamic_slice,
    "concatenate": emit_concatenate,
    "pad": emit_pad,
    "dynamic_update_slice": emit_dynamic_update_slice,
    "bitcast": emit_bitcast,
}
