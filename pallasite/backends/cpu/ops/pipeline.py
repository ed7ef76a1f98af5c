"""pipeline: the grid as nested loops, and each window as a view of main memory.

A window whose block is inside the array is pointer and strides; nothing is copied. A
block that extends past the edge is copied to the arena before the body and, if the body
writes it, its part inside the array is copied back afterwards. `parallel_units.py` says
which programs may run concurrently; the others run sequentially, in grid order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm import scalars, vector_loops
from pallasite.backends.cpu.llvm.writer import FALSE, TRUE, Function, Val, integer
from pallasite.backends.cpu.ops.programs import each_program, grid_sizes
from pallasite.backends.cpu.tiles.lifetimes import flattened_refs, window_refs
from pallasite.backends.cpu.tiles.tiles import (
    PREFETCH_DISTANCE,
    Buffer,
    Indices,
    Ref,
    Root,
    Through,
)
from pallasite.ir.nodes import Block, BlockDim, Op, Window, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.affine import Form, Forms
from pallasite.passes.analysis.carried import is_overwritten
from pallasite.passes.analysis.intervals import Fact
from pallasite.passes.lower.place_windows import number_facts, unclamped
from pallasite.target import host

# Bytes read while a block arrives from main memory.
NEAR_ENOUGH = 8 << 10


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
        """Whether the whole block is inside along this dimension."""
        known = (self.low.constant, self.high.constant)
        if None not in known:
            return TRUE if known == (0, self.size) else FALSE
        starts = self.low.constant == 0
        low = TRUE if starts else f.compare("icmp eq", self.low, integer(0))
        return f.both(low, f.compare("icmp eq", self.high, integer(self.size)))


def emit_pipeline(e: Emitter, op: Op) -> None:
    body, grid = Pipeline.of(op).body, grid_sizes(e, op)
    plans = _plans(e, op)
    with each_program(e, op, grid) as counters:
        ids = [e.f.convert("trunc", counter, "i32") for counter in counters]
        opened: list[OpenWindow] = []
        for plan in plans:
            twin = None if plan.twin is None else opened[plan.twin]
            opened.append(twin or _ahead(e, open_window(e, plan, ids), ids, grid))
        with e.block(body, [*ids, *(view.ref for view in opened)]):
            pass
        for plan, view in zip(plans, opened, strict=True):
            if plan.written:
                view.copy_back(e)


@dataclass(frozen=True)
class WindowPlan:
    """What is known about a window before the grid runs.

    A block that may extend past the edge is copied to the buffer `copy` and back,
    unless other code of the same program accesses the same memory: then its elements
    are accessed one by one, or windows that always show the same block share a copy
    (the `twin` is the first of them).
    """

    array: Ref
    window: Window
    index_map: Block
    forms: list[Form]  # what the index map yields, before clamping
    fits: list[bool]  # per dimension: no block of the grid extends past the edge
    written: bool
    regrouped: bool = False  # some view needs it contiguous
    twin: int | None = None
    one_by_one: bool = False
    overwritten: bool = False  # the body stores all of the block before it reads it
    copy: Buffer | None = None  # arena memory for copies of the block

    @property
    def may_be_copied(self) -> bool:
        return not all(self.fits) or self.always_copied

    @property
    def always_copied(self) -> bool:
        return self.regrouped or self.array.buffer is None


def _plans(e: Emitter, op: Op) -> list[WindowPlan]:
    pipeline = Pipeline.of(op)
    regrouped = flattened_refs(pipeline.body)
    plans: list[WindowPlan] = []
    for (_, written), (array, window, index_map, block) in zip(
        window_refs(op), pipeline.shown, strict=True
    ):
        ref = e.ref(array)
        forms = _forms(index_map, window, ref.shape)
        facts = _index_facts(index_map, pipeline.grid, window, ref.shape)
        fits = [
            _always_fits(dim, n, fact.low, fact.high)
            for dim, n, fact in zip(window.dims, ref.shape, facts, strict=True)
        ]
        plans.append(
            WindowPlan(ref, window, index_map, forms, fits, written, block in regrouped)
        )
    seen_elsewhere = _direct_roots(e, op)
    return [_placed(e, plans, n, pipeline, seen_elsewhere) for n in range(len(plans))]


def _direct_roots(e: Emitter, op: Op) -> set[Root]:
    """Memory that the body accesses without a window."""
    body = Pipeline.of(op).body
    inside = {v for inner in walk(body) for v in inner.results} | {*body.params}
    for inner in walk(body):
        inside |= {v for r in inner.regions for v in r.params}
    used = {v for inner in walk(body) for v in inner.operands if v.is_ref}
    return {e.ref(v).root for v in used - inside}


def _placed(
    e: Emitter,
    plans: Sequence[WindowPlan],
    number: int,
    pipeline: Pipeline,
    seen_elsewhere: set[Root],
) -> WindowPlan:
    """Decide how the block is accessed if it is not a plain view."""
    plan = plans[number]
    root = plan.array.root
    group = [n for n, other in enumerate(plans) if other.array.root is root]
    shared = len(group) > 1 or root in seen_elsewhere
    changes = root.mutable and (
        root in seen_elsewhere or any(plans[n].written for n in group)
    )
    alone = root not in seen_elsewhere
    together = alone and _move_together(e, [plans[n] for n in group])
    if shared and changes and together:
        # They share one copy, which must serve all of them.
        plan = replace(plan, regrouped=any(plans[n].regrouped for n in group))
    if not plan.may_be_copied:
        return plan
    if plan.written and plan.window.fill is not None:
        # Writes past the edge are dropped, and the fill value is read there again.
        return replace(plan, one_by_one=True)
    if not shared or not changes:
        copy = e.temporary(plan.window.block_shape, plan.array.dtype)
        overwritten = plan.written and _is_overwritten(pipeline, number)
        return replace(plan, copy=copy, overwritten=overwritten)
    if together:
        first = group[0]
        if number != first:
            return replace(plan, twin=first)
        copy = e.temporary(plan.window.block_shape, plan.array.dtype)
        return replace(plan, copy=copy)
    return replace(plan, one_by_one=True)


def _is_overwritten(pipeline: Pipeline, number: int) -> bool:
    """Whether every step stores all of a window's block before it reads it."""
    block = pipeline.shown[number].block
    return is_overwritten(pipeline.body.ops, block, {})


def _move_together(e: Emitter, plans: Sequence[WindowPlan]) -> bool:
    """Whether the windows, all of one memory, show the same block at every step."""
    first = plans[0]
    arrays = {plan.array for plan in plans}
    if len(arrays) > 1 and not arrays <= e.whole_arrays:
        return False  # parts of an array may start at different places
    known = all(
        f.affine is not None and f.affine.const is not None for f in first.forms
    )
    return known and all(
        plan.window.dims == first.window.dims
        and plan.forms == first.forms
        and plan.window.fill is None
        for plan in plans
    )


def _forms(index_map: Block, window: Window, shape: Sequence[int]) -> list[Form]:
    forms = Forms(index_map.params)
    forms.add_ops(index_map.ops)
    return [forms.of(value) for value in unclamped(index_map, window, shape)]


def _index_facts(
    index_map: Block,
    grid: Sequence[int | None],
    window: Window,
    shape: Sequence[int],
) -> Iterator[Fact]:
    """Per dimension, the range of its index over the grid."""
    pending = iter(number_facts(index_map, window, shape, grid))
    for dim in window.dims:
        yield next(pending)
        if dim.kind == "bounded":
            next(pending)


def _always_fits(dim: BlockDim, n: int, first: int, last: int) -> bool:
    if dim.kind == "squeezed" or not dim.size:
        return n > 0 or not dim.size
    if dim.kind == "blocked":
        return n > 0 and (n % dim.size == 0 or last < n // dim.size)
    inside = dim.padding[0] <= first and last + dim.size <= n + dim.padding[0]
    return dim.kind == "element" and inside


@dataclass(frozen=True)
class OpenWindow:
    """A window at one step: what the body sees, and where it came from."""

    ref: Ref
    plan: WindowPlan
    extents: list[Extent]
    is_view: Val

    def copy_back(self, e: Emitter) -> None:
        """Store the part of a copied block that is in the array."""
        plan, copy = self.plan, self.plan.copy
        if copy is None:
            return
        block = Ref(self.ref.shape, plan.array.dtype, copy)
        with e.f.when(e.f.negate(self.is_view)):
            _move(e.f, self.extents, plan.array, block, into=plan.array)


def open_window(e: Emitter, plan: WindowPlan, ids: Sequence[Val]) -> OpenWindow:
    """Place the block for one program; copies it if not entirely inside the array."""
    f, array, window, copy = e.f, plan.array, plan.window, plan.copy
    with e.block(plan.index_map, ids) as yields:
        numbers = iter([f.convert("sext", _register(y), "i64") for y in yields])
        extents = [
            _extent(f, dim, n, fits, numbers)
            for dim, n, fits in zip(window.dims, array.shape, plan.fits, strict=True)
        ]
    if plan.one_by_one:
        return OpenWindow(_edge_ref(f, plan, extents), plan, extents, TRUE)
    is_view = FALSE if plan.always_copied else TRUE
    if copy is not None:
        for extent in extents:
            is_view = f.both(is_view, extent.is_inside(f))
    buffer = _choose(f, array, extents, copy, is_view)
    if copy is not None:
        with f.when(f.negate(is_view)):
            _copy_in(f, plan, extents, copy)
    ref = Ref(window.block_shape, array.dtype, buffer)
    return OpenWindow(ref, plan, extents, is_view)


def _ahead(
    e: Emitter, view: OpenWindow, ids: Sequence[Val], grid: Sequence[Val]
) -> OpenWindow:
    """The window, with what to prefetch while its block is read.

    Nothing if it always shows one block, which stays in a cache; what follows it in
    memory if it moves in order. If data determine its position, as for an embedding's
    rows, a block of a later program; a large one is read in order for long enough.
    """
    f, plan, buffer = e.f, view.plan, view.ref.buffer
    if buffer is None or buffer.ahead is None or plan.copy is not None:
        return view
    size = prod(plan.window.block_shape) * plan.array.dtype.bytes
    ahead: Val | None = buffer.ahead
    again = any(n.constant != 1 for n in grid)
    moves = any(form.axes for form in plan.forms)
    if again and not moves and size <= host().l2_bytes // 4:
        ahead = None
    elif 0 < size < PREFETCH_DISTANCE and _reads(plan.index_map):
        later = _later(f, ids, grid, -(-NEAR_ENOUGH // size))
        there = open_window(e, plan, later).ref.buffer
        assert there is not None
        ends = [f.convert("ptrtoint", b.pointer, "i64") for b in (there, buffer)]
        ahead = f.sub(*ends)
    source = replace(buffer, ahead=ahead)
    return replace(view, ref=replace(view.ref, source=source))


def _reads(index_map: Block) -> bool:
    return any(op.name == "load" for op in index_map.ops)


def _later(
    f: Function, ids: Sequence[Val], grid: Sequence[Val], steps: int
) -> list[Val]:
    """The position some steps later: along the last axis, then the one before."""
    if not ids:
        return []
    *outer, last = [f.convert("sext", i, "i64") for i in ids]
    *sizes, count = grid
    moved = f.add(last, integer(steps))
    over = f.compare("icmp sge", moved, count)
    moved = f.least(
        f.select(over, f.sub(moved, count), moved), f.sub(count, integer(1))
    )
    if outer:
        following = f.least(f.add(outer[-1], integer(1)), f.sub(sizes[-1], integer(1)))
        outer[-1] = f.select(over, following, outer[-1])
    return [f.convert("trunc", i, "i32") for i in (*outer, moved)]


def _edge_ref(f: Function, plan: WindowPlan, extents: list[Extent]) -> Ref:
    """A block accessed through its array, element by element."""
    array, window = plan.array, plan.window

    def place(indices: Indices) -> tuple[list[Val], Val]:
        pending = iter(indices)
        steps = [integer(0) if x.squeezed else next(pending) for x in extents]
        return _in_array(f, array, extents, steps)

    def read(indices: Indices) -> Val:
        where, valid = place(indices)
        outside = scalars.constant(window.fill or 0, array.dtype)
        return f.select(valid, array.read(f, where), outside)

    def write(indices: Indices, value: Val) -> None:
        where, valid = place(indices)
        with f.when(valid):
            array.write(f, where, value)

    through = Through(array.root, read, write)
    return Ref(window.block_shape, array.dtype, through)


def _register(meaning: object) -> Val:
    assert isinstance(meaning, Val)
    return meaning


def _extent(
    f: Function, dim: BlockDim, n: int, fits: bool, numbers: Iterator[Val]
) -> Extent:
    """The position of a block along one dimension, from what the index map yields.

    That is a valid block index: `place_windows` has clamped it.
    """
    zero, size = integer(0), integer(dim.size)
    index = next(numbers)
    if dim.kind == "squeezed":
        return Extent(index, 1, zero, integer(min(n, 1)), squeezed=True)
    if dim.kind == "blocked":
        start = f.mul(index, size)
        high = size if fits else f.least(size, f.sub(integer(n), start))
        return Extent(start, dim.size, zero, high)
    start = f.sub(index, integer(dim.padding[0]))
    if fits:
        return Extent(start, dim.size, zero, size)
    end = f.sub(integer(n), start)
    if dim.kind == "bounded":
        end = f.least(end, next(numbers))
    low = f.clamp(f.sub(zero, start), zero, size)
    return Extent(start, dim.size, low, f.clamp(end, zero, size))


def _choose(
    f: Function, array: Ref, extents: list[Extent], copy: Buffer | None, is_view: Val
) -> Buffer:
    """The block's memory: part of the array, or the copy."""
    if array.buffer is None:
        assert copy is not None, "always copied, as it has no address"
        return Buffer(copy.pointer, copy.strides, array.root)
    strides = array.buffer.strides
    offset = f.inner([extent.start for extent in extents], strides)
    pointer = f.element(array.buffer.pointer, scalars.memory(array.dtype), offset)
    strides = _kept(extents, strides)
    if copy is not None:
        pointer = f.select(is_view, pointer, copy.pointer)
        both = zip(strides, copy.strides, strict=True)
        strides = [f.select(is_view, there, here) for there, here in both]
    return replace(array.buffer, pointer=pointer, strides=tuple(strides))


def _copy_in(
    f: Function, plan: WindowPlan, extents: list[Extent], copy: Buffer
) -> None:
    """Copy a block; elements past the array's edge become the fill value, or zero."""
    dtype, shape = plan.array.dtype, plan.window.block_shape
    if plan.overwritten:
        return
    if not all(plan.fits):
        outside = scalars.constant(plan.window.fill or 0, dtype)

        def fill(indices: Indices) -> None:
            scalars.store(f, dtype, outside, copy.address(f, dtype, indices))

        vector_loops.each(f, shape, fill)
    block = Ref(shape, dtype, copy)
    _move(f, extents, plan.array, block, into=block)


def _move(
    f: Function, extents: list[Extent], array: Ref, block: Ref, into: Ref
) -> None:
    """Copy the part of a block that is in the array, from one to the other.

    As integers: no float register changes a NaN on the way.
    """
    if 0 in array.shape:
        return
    counts = [f.greatest(f.sub(x.high, x.low), integer(0)) for x in extents]
    source = block if into is array else array

    def move(steps: Sequence[Val]) -> None:
        inside = [f.add(x.low, i) for x, i in zip(extents, steps, strict=True)]
        places = [f.add(x.start, i) for x, i in zip(extents, inside, strict=True)]
        where = {array: places, block: _kept(extents, inside)}
        into.write_bits(f, where[into], source.read_bits(f, where[source]))

    if not _has_rows(array, extents):
        with f.nest(counts) as steps:
            move(steps)
        return
    with f.nest(counts[:-1]) as outer:
        vector_loops.along_some_lanes(
            f, counts[-1], extents[-1].size, lambda lanes: move([*outer, lanes])
        )


def _has_rows(array: Ref, extents: list[Extent]) -> bool:
    """Whether the last dimension of blocks is contiguous in the array."""
    if array.buffer is None or not extents or scalars.is_part_of_byte(array.dtype):
        return False
    return extents[-1].size > 1 and array.buffer.strides[-1].constant == 1


def _in_array(
    f: Function, array: Ref, extents: list[Extent], steps: Sequence[Val]
) -> tuple[list[Val], Val]:
    """A block element's position in the array, clamped, and whether it was inside.

    By its first dimensions, if only those are given.
    """
    valid, clamped = TRUE, []
    for extent, step, n in zip(extents, steps, array.shape, strict=False):
        valid = f.both(valid, _is_between(f, extent, step))
        where = f.add(extent.start, step)
        clamped.append(f.clamp(where, integer(0), integer(n - 1)))
    return clamped, valid


def _is_between(f: Function, extent: Extent, step: Val) -> Val:
    low = TRUE if extent.low.constant == 0 else f.compare("icmp sge", step, extent.low)
    return f.both(low, f.compare("icmp slt", step, extent.high))


def _kept(extents: list[Extent], values: Sequence[Val]) -> list[Val]:
    """The values of the dimensions that the block has."""
    return [v for extent, v in zip(extents, values, strict=True) if not extent.squeezed]


RULES = {"pipeline": emit_pipeline}
