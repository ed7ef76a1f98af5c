"""pipeline: the grid as nested loops, and each window as a view of main memory.

A window whose block lies inside the array is pointer and strides; nothing is copied.
A block that hangs over the edge is copied to the arena before the body and, if it is an
output, its part inside the array is copied back after it. `sharing.py` says which
programs may run at once; the others run one by one, in grid order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pallasite.backends.cpu import scalars
from pallasite.backends.cpu.llvm import FALSE, TRUE, Function, Val, integer
from pallasite.backends.cpu.sharing import each_program
from pallasite.backends.cpu.tiles import Buffer, Ref, Root
from pallasite.backends.cpu.uses import flattened_refs, written_refs
from pallasite.ir.nodes import Block, BlockDim, Op, Window
from pallasite.passes.affine import Forms

if TYPE_CHECKING:
    from pallasite.backends.cpu.emit import Emitter


@dataclass(frozen=True)
class Extent:
    """One dimension of a block in its array: from `start`, `size` elements, of which
    those from `low` up to `high` (counted in the block) are in the array."""

    start: Val
    size: int
    low: Val
    high: Val
    squeezed: bool = False

    def is_inside(self, f: Function) -> Val:
        """Is the whole block inside along this dimension?"""
        known = (self.low.constant, self.high.constant)
        if None not in known:
            return TRUE if known == (0, self.size) else FALSE
        starts = self.low.constant == 0
        low = TRUE if starts else f.compare("icmp eq", self.low, integer(0))
        return f.both(low, f.compare("icmp eq", self.high, integer(self.size)))


def emit_pipeline(e: "Emitter", op: Op) -> None:
    windows: Sequence[Window] = op.attrs["windows"]
    *maps, body = op.regions
    arrays = [e.ref(v) for v in op.operands[len(op.operands) - len(windows) :]]
    copied = _always_copied(op, windows, body)
    sizes = iter(op.operands)
    grid = [e.index(next(sizes)) if n is None else integer(n) for n in op.attrs["grid"]]
    plans = [
        _plan(e, op, *each) for each in zip(arrays, windows, maps, copied, strict=True)
    ]
    with each_program(e, op, grid) as counters:
        ids = [e.f.convert("trunc", counter, "i32") for counter in counters]
        opened = [open_window(e, plan, ids) for plan in plans]
        e.ahead.bind(e, op, opened)
        with e.block(body, [*ids, *(view.ref for view in opened)]):
            pass
        for view in opened:
            if view.plan.window.mode == "out":
                view.copy_back(e)


def _always_copied(op: Op, windows: Sequence[Window], body: Block) -> list[bool]:
    """Which windows must be copies: inputs that are written, views that regroup."""
    block_refs = body.params[len(op.attrs["grid"]) :]
    written, flattened = written_refs(body), flattened_refs(body)
    return [
        (window.mode == "in" and ref in written) or ref in flattened
        for ref, window in zip(block_refs, windows, strict=True)
    ]


@dataclass(frozen=True)
class Plan:
    """What is known about a window before the grid runs."""

    array: Ref
    window: Window
    index_map: Block
    fits: list[bool]  # per dimension: no block of the grid hangs over the edge
    always_copied: bool
    room: Buffer | None  # arena memory for copies of the block, if there may be any


def _plan(
    e: "Emitter",
    op: Op,
    array: Ref,
    window: Window,
    index_map: Block,
    always_copied: bool,
) -> Plan:
    ranges = _index_ranges(index_map, op.attrs["grid"], window)
    fits = [
        _always_fits(dim, n, *bounds)
        for dim, n, bounds in zip(window.dims, array.shape, ranges, strict=True)
    ]
    room = None
    if always_copied or not all(fits):
        room = e.temporary(window.block_shape, array.dtype)
    return Plan(array, window, index_map, fits, always_copied, room)


def _index_ranges(
    index_map: Block, grid: Sequence[int | None], window: Window
) -> Iterator[tuple[float, float]]:
    """Per dimension, the least and the greatest index over the grid, if known."""
    forms = Forms(index_map.params)
    forms.add_ops(index_map.ops)
    pending = iter(index_map.yields)
    for dim in window.dims:
        affine = forms.of(next(pending)).affine
        if dim.kind == "bounded":
            next(pending)
        yield (-inf, inf) if affine is None else affine.range(grid)


def _always_fits(dim: BlockDim, n: int, first: float, last: float) -> bool:
    if dim.kind == "squeezed" or not dim.size:
        return n > 0 or not dim.size
    if dim.kind == "blocked":
        # A number that is no block's is clamped to the last one, whole or not.
        return n > 0 and (n % dim.size == 0 or last < n // dim.size)
    inside = dim.padding[0] <= first and last + dim.size <= n + dim.padding[0]
    return dim.kind == "element" and inside


@dataclass(frozen=True)
class OpenWindow:
    """A window at one step: what the body sees, and where it came from."""

    ref: Ref
    plan: Plan
    extents: list[Extent]
    is_view: Val

    def copy_back(self, e: "Emitter") -> None:
        """Store the part of a copied block that lies in the array."""
        array, room = self.plan.array, self.plan.room
        if room is None or 0 in array.shape:
            return
        f, dtype, extents = e.f, array.dtype, self.extents
        with f.when(f.negate(self.is_view)):
            counts = [f.greatest(f.sub(x.high, x.low), integer(0)) for x in extents]
            with f.nest(counts) as steps:
                inside = [f.add(x.low, i) for x, i in zip(extents, steps, strict=True)]
                places = [
                    f.add(x.start, i) for x, i in zip(extents, inside, strict=True)
                ]
                source = room.address(f, dtype, _kept(extents, inside))
                target = array.buffer.address(f, dtype, places)
                f.store(f.load(scalars.memory(dtype), source), target)


def open_window(e: "Emitter", plan: Plan, ids: Sequence[Val]) -> OpenWindow:
    """Place the block for one program; copies it if it is not wholly in the array."""
    f, array, window, room = e.f, plan.array, plan.window, plan.room
    with e.block(plan.index_map, ids) as yields:
        numbers = iter([f.convert("sext", _register(y), "i64") for y in yields])
        extents = [
            _extent(f, dim, n, fits, numbers)
            for dim, n, fits in zip(window.dims, array.shape, plan.fits, strict=True)
        ]
    is_view = FALSE if plan.always_copied else TRUE
    if room is not None:
        for extent in extents:
            is_view = f.both(is_view, extent.is_inside(f))
    buffer = _choose(f, array, extents, room, is_view)
    if room is not None:
        if plan.always_copied and window.mode == "in":
            buffer = Buffer(buffer.pointer, buffer.strides, Root("copied block"))
        with f.when(f.negate(is_view)):
            _copy_in(f, array, window, extents, room)
    ref = Ref(window.block_shape, array.dtype, buffer)
    return OpenWindow(ref, plan, extents, is_view)


def _register(meaning: object) -> Val:
    assert isinstance(meaning, Val)
    return meaning


def _extent(
    f: Function, dim: BlockDim, n: int, fits: bool, numbers: Iterator[Val]
) -> Extent:
    """Where a block lies along one dimension, from what the index map yields.

    What `fits` promises is clamped all the same: safety does not hang on a proof.
    """
    zero, size = integer(0), integer(dim.size)
    index = next(numbers)
    if dim.kind == "squeezed":
        start = f.clamp(index, zero, integer(max(n - 1, 0)))
        return Extent(start, 1, zero, integer(min(n, 1)), squeezed=True)
    if dim.kind == "blocked":
        blocks = n // max(dim.size, 1) if fits else -(-n // dim.size)
        number = f.clamp(index, zero, integer(max(blocks - 1, 0)))
        start = f.mul(number, size)
        high = size if fits else f.least(size, f.sub(integer(n), start))
        return Extent(start, dim.size, zero, high)
    low_padding, high_padding = dim.padding
    last = integer(max(n + low_padding + high_padding - 1, 0))
    start = f.sub(f.clamp(index, zero, last), integer(low_padding))
    if fits:
        start = f.clamp(start, zero, integer(n - dim.size))
        return Extent(start, dim.size, zero, size)
    end = f.sub(integer(n), start)
    if dim.kind == "bounded":
        end = f.least(end, next(numbers))
    low = f.clamp(f.sub(zero, start), zero, size)
    return Extent(start, dim.size, low, f.clamp(end, zero, size))


def _choose(
    f: Function, array: Ref, extents: list[Extent], room: Buffer | None, is_view: Val
) -> Buffer:
    """The block's memory: part of the array, or the room it was copied to."""
    strides = array.buffer.strides
    offset = f.inner([extent.start for extent in extents], strides)
    pointer = f.element(array.buffer.pointer, scalars.memory(array.dtype), offset)
    strides = _kept(extents, strides)
    if room is not None:
        pointer = f.select(is_view, pointer, room.pointer)
        both = zip(strides, room.strides, strict=True)
        strides = [f.select(is_view, there, here) for there, here in both]
    return Buffer(pointer, tuple(strides), array.root)


def _copy_in(
    f: Function, array: Ref, window: Window, extents: list[Extent], room: Buffer
) -> None:
    """Copy a block; what lies outside the array becomes the fill value, or zero."""
    dtype = array.dtype
    outside = scalars.constant(window.fill or 0, dtype)
    with f.nest([extent.size for extent in extents]) as steps:
        value = outside
        if 0 not in array.shape:
            valid, clamped = TRUE, []
            for extent, step, n in zip(extents, steps, array.shape, strict=True):
                valid = f.both(valid, _is_between(f, extent, step))
                where = f.add(extent.start, step)
                clamped.append(f.clamp(where, integer(0), integer(n - 1)))
            address = array.buffer.address(f, dtype, clamped)
            value = f.select(valid, scalars.load(f, dtype, address), outside)
        target = room.address(f, dtype, _kept(extents, steps))
        scalars.store(f, dtype, value, target)


def _is_between(f: Function, extent: Extent, step: Val) -> Val:
    low = TRUE if extent.low.constant == 0 else f.compare("icmp sge", step, extent.low)
    return f.both(low, f.compare("icmp slt", step, extent.high))


def _kept(extents: list[Extent], values: Sequence[Val]) -> list[Val]:
    """Those of the values that belong to dimensions the block has."""
    return [v for extent, v in zip(extents, values, strict=True) if not extent.squeezed]


RULES = {"pipeline": emit_pipeline}
