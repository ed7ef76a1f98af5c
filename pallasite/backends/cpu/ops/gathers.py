"""gather and scatter of values, with XLA's dimension numbers.

A gather is a formula: each element finds its place in the operand. A scatter copies the
operand and then updates one element after another. Starts are clamped so that a slice
is in range; with mode "fill", slices out of range are filled, or dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import TRUE, Val, integer
from pallasite.backends.cpu.ops import arithmetic
from pallasite.backends.cpu.tiles import tiles
from pallasite.backends.cpu.tiles.tiles import Indices, Tile
from pallasite.ir.nodes import Op, Value

# The position of an element in the operand, and whether its slice was in range.
Place = Callable[[Indices], tuple[list[Val], Val]]


@dataclass(frozen=True)
class Slices:
    """Slices of an operand, one per index vector."""

    shape: tuple[int, ...]  # of the operand
    sizes: tuple[int, ...]  # of a slice, per operand dimension
    window_dims: tuple[int, ...]  # of the other tile: positions inside a slice
    left_out: tuple[int, ...]  # operand dimensions that `window_dims` does not show
    index_map: tuple[int, ...]
    operand_batch: tuple[int, ...]
    index_batch: tuple[int, ...]

    def places(self, e: Emitter, indices: Value) -> Place:
        f = e.f
        vectors = e.stored(e.as_tile(indices))
        rows = [d for d in range(len(self.shape)) if d not in self.left_out]

        def place(position: Indices) -> tuple[list[Val], Val]:
            batch = [i for d, i in enumerate(position) if d not in self.window_dims]
            where, inside = [integer(0) for _ in self.shape], TRUE
            for k, d in enumerate(self.index_map):
                picked = vectors.at(f, [*batch, integer(k)])
                start = scalars.index(f, picked, indices.tile.dtype)
                last = integer(max(self.shape[d] - self.sizes[d], 0))
                where[d] = f.clamp(start, integer(0), last)
                inside = f.both(inside, f.compare("icmp eq", start, where[d]))
            for d, b in zip(self.operand_batch, self.index_batch, strict=True):
                where[d] = batch[b]
            for d, w in zip(rows, self.window_dims, strict=True):
                where[d] = f.add(where[d], position[w])
            return where, inside

        return place


def emit_gather(e: Emitter, op: Op) -> None:
    operand, indices = op.operands
    type, attrs = op.result.tile, op.attrs
    fill = scalars.constant(attrs["fill_value"] or 0, type.dtype)
    if not operand.tile.size:
        value = fill if attrs["mode"] == "fill" else scalars.zero(type.dtype)
        e.define_lazy(op, tiles.splat(type.shape, type.dtype, value))
        return
    offset_dims, collapsed, *rest = attrs["dimension_numbers"]
    slices = Slices(
        operand.tile.shape,
        attrs["slice_sizes"],
        offset_dims,
        (*collapsed, *rest[1]),
        *rest,
    )
    tile = e.stored(e.as_tile(operand))
    place = slices.places(e, indices)

    def element(position: Indices) -> Val:
        where, inside = place(position)
        value = tile.at(e.f, where)
        return e.f.select(inside, value, fill) if attrs["mode"] == "fill" else value

    operands = [tile, *e.tiles_of([indices])]
    e.define_lazy(op, tiles.formula(type.shape, type.dtype, element, operands))


def emit_scatter(e: Emitter, op: Op) -> None:
    operand, indices, updates = op.operands
    type, attrs = op.result.tile, op.attrs
    buffer = e.result_buffer(op)
    e.fill(buffer, e.as_tile(operand))
    if type.size:
        window_dims, inserted, *rest = attrs["dimension_numbers"]
        left_out = (*inserted, *rest[1])
        sizes = _slice_sizes(operand, updates, window_dims, left_out)
        slices = Slices(type.shape, sizes, window_dims, left_out, *rest)
        place, new = slices.places(e, indices), e.element(updates)
        with e.f.nest(updates.tile.shape) as position:
            where, inside = place(position)
            value = new(position)
            with e.f.when(inside if attrs["mode"] == "fill" else TRUE):
                address = buffer.address(e.f, type.dtype, where)
                if attrs["kind"] != "set":
                    old = scalars.load(e.f, type.dtype, address)
                    value = arithmetic.combine(
                        e.f, attrs["kind"], type.dtype, old, value
                    )
                scalars.store(e.f, type.dtype, value, address)
    whole = Tile(type.shape, type.dtype, buffer)
    e.define(op.result, whole if type.rank else whole.at(e.f, ()))


def _slice_sizes(
    operand: Value, updates: Value, window_dims: Sequence[int], left_out: Sequence[int]
) -> tuple[int, ...]:
    shown = iter(updates.tile.shape[d] for d in window_dims)
    return tuple(1 if d in left_out else next(shown) for d in range(operand.tile.rank))


RULES = {"gather": emit_gather, "scatter": emit_scatter}
