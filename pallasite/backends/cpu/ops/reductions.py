"""Reductions and scans: reduce, scan.

Along the last dimension there are several vector accumulators; along other dimensions
each lane is a separate result. Narrow floats are summed in f32.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm import scalars, vector_loops
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.backends.cpu.ops import arithmetic
from pallasite.backends.cpu.tiles import tiles, transpose_copy
from pallasite.backends.cpu.tiles.tiles import Buffer, Indices, Tile
from pallasite.ir.nodes import Op
from pallasite.ir.types import F32, DType
from pallasite.ops.neutral import neutral

_MANY_ROWS = 128  # from here on rows are processed in memory order, not by columns
_SHORT_ROW = 16  # vectors, up to which finishing several rows together pays off
_COMBINE = {"sum": "add", "prod": "mul"}  # the others have the name of their op


def combine(f: Function, kind: str, dtype: DType, a: Val, b: Val) -> Val:
    if kind == "logsumexp":
        return _add_in_log_space(f, dtype, a, b)
    if dtype.is_bool and kind in ("sum", "prod"):
        return f.binary({"sum": "or", "prod": "and"}[kind], a, b)
    if dtype.is_float and kind in _COMBINE:
        # The order of a sum does not matter: lets LLVM use several partial sums.
        return f.binary(f"f{_COMBINE[kind]} reassoc", a, b)
    if dtype.is_float and kind in ("max", "min"):
        # The sign of a zero maximum may depend on the order here.
        return f.intrinsic(f"{kind}imum", a, b, flags="nsz")
    return arithmetic.combine(f, _COMBINE.get(kind, kind), dtype, a, b)


def identity(kind: str, dtype: DType) -> Val:
    """The neutral element."""
    return scalars.constant(neutral(kind, dtype), dtype)


def _add_in_log_space(f: Function, dtype: DType, a: Val, b: Val) -> Val:
    """log(exp(a) + exp(b)) without overflow."""
    high, low = f.intrinsic("maximum", a, b), f.intrinsic("minimum", a, b)
    gap = f.binary("fsub", low, high)
    function = lambda name, x: arithmetic.element(f, name, {}, (dtype,), dtype, [x])
    correction = function("log1p", function("exp", gap))
    # Two equal infinities have no difference; they are the result themselves.
    infinite = f.compare("fcmp oeq", low, high)
    doubled = f.binary("fadd", high, scalars.floating(0.6931471805599453, a.type))
    return f.select(infinite, doubled, f.binary("fadd", high, correction))


def running_dtype(kind: str, dtype: DType) -> DType:
    """The type of the accumulator."""
    return F32 if scalars.is_narrow(dtype) and kind not in ("max", "min") else dtype


def emit_reduce(e: Emitter, op: Op) -> None:
    tile = e.as_tile(op.operands[0])
    along = _lanes_along(tile)
    order = tiles.lanes_last(tile.shape, along)
    with e.straightened(tile, along):
        if order is None:
            _reduce(e, op, tile, list(range(len(tile.shape))))
            return
        transposed = tiles.transpose(e.f, tile, order)
        transposed = replace(
            transposed, scope=tile.scope, last=tile.last, keep=tile.keep
        )
        _reduce(e, op, transposed, order)
    if (
        tile.buffer is None and transposed.buffer is not None
    ):  # it was stored on the way
        tile.source = tiles.transpose(e.f, transposed, _inverse(order)).source


def _lanes_along(tile: Tile) -> int | None:
    """The dimension along which to vectorise, given the layout in memory."""
    last = vector_loops.vector_dim(tile.shape)
    views = [t.buffer for t in tile.pointwise_sources() if t.buffer is not None]
    if last is None or any(view.strides[last].constant == 1 for view in views):
        return last
    others = (transpose_copy.runs_across(tile.shape, view, last) for view in views)
    return next((d for d in others if d is not None), last)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _reduce(e: Emitter, op: Op, tile: Tile, order: list[int]) -> None:
    """`order`: the operand's dimensions in the order of the tile's."""
    kind, gone = op.attrs["kind"], op.attrs["axes"]
    running = running_dtype(kind, tile.dtype)
    axes = tuple(place for place, d in enumerate(order) if d in gone)
    reduction = _Reduction(e, kind, running, tile, axes)
    if not op.result.tile.rank:
        total = reduction.at([])
        e.define(op.result, scalars.cast(e.f, total, running, tile.dtype))
    else:
        kept = [d for d in order if d not in gone]
        shape = tuple(tile.shape[order.index(d)] for d in kept)
        buffer = Buffer(e.result_buffer(op, running).pointer, tiles.row_major(shape))
        reduction.fill(buffer, shape)
        places = [kept.index(d) for d in sorted(kept)]
        result = tiles.transpose(e.f, Tile(shape, running, buffer), places)
        e.define(op.result, _as_dtype(e, result, tile.dtype))
    reduction.finish()


class _Reduction:
    """One reduce op. A tile that other ops also use is stored while it is reduced."""

    def __init__(
        self,
        e: Emitter,
        kind: str,
        running: DType,
        tile: Tile,
        axes: tuple[int, ...],
    ):
        self.e, self.kind, self.running, self.tile = e, kind, running, tile
        self.axes, self.along = axes, vector_loops.vector_dim(tile.shape)
        self.kept = [d for d in range(len(tile.shape)) if d not in axes]
        self.side_by_side = 4 if tile.depth <= 3 else 2
        self.copy = e.buffer_for(tile) if tile.keep and tile.buffer is None else None

    def finish(self) -> None:
        if self.copy is not None:
            self.tile.source = self.copy

    def fill(self, buffer: Buffer, shape: tuple[int, ...]) -> None:
        """Store all results."""
        e, f, running = self.e, self.e.f, self.running

        def body(indices: Indices) -> None:
            address = buffer.address(f, running, indices)
            scalars.store(f, running, self.at(indices), address)

        if self._has_short_rows(shape):
            self._fill_many(buffer, shape)
        elif self.along in self.axes or self.along is None:
            with f.nest(shape) as indices:
                body(indices)
        elif prod(self.tile.shape[d] for d in self.axes) <= _MANY_ROWS:
            vector_loops.each(f, shape, body)
        else:
            start = identity(self.kind, running)
            e.fill(buffer, tiles.splat(shape, running, start))
            vector_loops.each(f, self.tile.shape, lambda i: self._update(buffer, i))

    def _has_short_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether reducing one vector's lanes at a time takes longer than the rest."""
        if self.along is None or self.axes != (self.along,) or 0 in self.tile.shape:
            return False
        full, rest = divmod(self.tile.shape[self.along], vector_loops.width())
        whole = full and not rest and shape[-1] % vector_loops.width() == 0
        return bool(whole) and full <= _SHORT_ROW

    def _fill_many(self, buffer: Buffer, shape: tuple[int, ...]) -> None:
        """Store all results, a vector of them at a time."""
        e, f, running, count = self.e, self.e.f, self.running, vector_loops.width()
        assert self.along is not None
        full = self.tile.shape[self.along] // count
        type = vector_loops.vector(scalars.register(running), count)
        held = F32 if scalars.is_narrow(running) else running  # as in registers
        lanes_memory = e.temporary((count, count), held).pointer
        with f.nest([*shape[:-1], shape[-1] // count]) as (*outer, group):
            first = f.mul(group, integer(count))
            with f.loop(integer(count)) as loop:
                row = [*outer, f.add(first, loop.index)]
                places = dict(zip(self.kept, row, strict=True))
                lanes = self._fold(places).lanes_of(full)
                f.store(lanes, f.element(lanes_memory, type, loop.index))
            rows = [
                f.load(type, f.element(lanes_memory, type, integer(k)))
                for k in range(count)
            ]
            total = vector_loops.reduce_each(f, rows, self._joined)
            total = self._joined(f.splat(identity(self.kind, running), count), total)
            address = buffer.address(
                f, running, [*outer, vector_loops.Lanes(first, count)]
            )
            scalars.store(f, running, total, address)

    def _update(self, buffer: Buffer, indices: Indices) -> None:
        f, running = self.e.f, self.running
        address = buffer.address(f, running, [indices[d] for d in self.kept])
        old = scalars.load(f, running, address)
        scalars.store(f, running, self._joined(old, self._element(indices)), address)

    def at(self, indices: Indices) -> Val:
        """One result, or several if an index has lanes."""
        places = dict(zip(self.kept, indices, strict=True))
        outer = self._outside_lanes()
        if outer:
            lanes = self._over_lanes(outer, places, None)
            return self._fold(places).horizontal(lanes)
        count = max((i.count for i in indices), default=0)
        start = self.e.f.splat(identity(self.kind, self.running), count)
        return self._over(self.axes, places, start)

    def _outside_lanes(self) -> list[int]:
        """The axes around the lanes' if these are reduced once, at the end.

        That is where all rows are whole vectors.
        """
        if self.along not in self.axes or 0 in self.tile.shape:
            return []
        whole = self.tile.shape[self.along] % vector_loops.width() == 0
        return [
            d for d in self.axes if d < self.along and self.tile.shape[d] > 1
        ] * whole

    def _over_lanes(
        self, axes: Sequence[int], places: dict[int, Val], total: Val | None
    ) -> Val:
        """The reduction of each lane."""
        f, width = self.e.f, vector_loops.width()
        if not axes:
            assert self.along is not None
            lanes = self._fold(places).lanes_of(self.tile.shape[self.along] // width)
            return lanes if total is None else self._joined(total, lanes)
        axis, *rest = axes
        start = f.splat(identity(self.kind, self.running), width)
        first = start if total is None else total
        with f.loop(integer(self.tile.shape[axis]), [first]) as loop:
            inner = {**places, axis: loop.index}
            loop.carries = [self._over_lanes(rest, inner, loop.carries[0])]
        return loop.carries[0]

    def _over(self, axes: tuple[int, ...], places: dict[int, Val], total: Val) -> Val:
        f = self.e.f
        if not axes:
            indices = [places[d] for d in range(len(self.tile.shape))]
            return self._joined(total, self._element(indices))
        axis, *rest = axes
        if axis == self.along and 0 not in self.tile.shape:
            return self._joined(total, self._along_lanes(places))
        with f.loop(integer(self.tile.shape[axis]), [total]) as loop:
            inner = {**places, axis: loop.index}
            loop.carries = [self._over(tuple(rest), inner, loop.carries[0])]
        return loop.carries[0]

    def _along_lanes(self, places: dict[int, Val]) -> Val:
        """The reduction along the lanes' dimension; later dimensions have one index."""
        assert self.along is not None
        return self._fold(places).over(self.tile.shape[self.along])

    def _fold(self, places: dict[int, Val]) -> vector_loops.Fold:
        def value(lanes: Val) -> Val:
            at = {**places, self.along: lanes}
            rank = len(self.tile.shape)
            return self._element([at.get(d, integer(0)) for d in range(rank)])

        start = identity(self.kind, self.running)
        return vector_loops.Fold(
            self.e.f, value, self._joined, start, self.side_by_side
        )

    def _element(self, indices: Indices) -> Val:
        f, tile = self.e.f, self.tile
        value = tile.at(f, indices)
        if self.copy is not None:
            address = self.copy.address(f, tile.dtype, indices)
            scalars.store(f, tile.dtype, value, address)
        return scalars.cast(f, value, tile.dtype, self.running)

    def _joined(self, a: Val, b: Val) -> Val:
        return combine(self.e.f, self.kind, self.running, a, b)


def _as_dtype(e: Emitter, tile: Tile, dtype: DType) -> Tile:
    if tile.dtype == dtype:
        return tile
    element = lambda i: scalars.cast(e.f, tile.at(e.f, i), tile.dtype, dtype)
    return tiles.formula(tile.shape, dtype, element, [tile], pointwise=True)


def emit_scan(e: Emitter, op: Op) -> None:
    tile = e.tile(op.operands[0])
    buffer = e.result_buffer(op)
    scan = _Scan(e, op.attrs["kind"], tile, buffer, op.attrs["reverse"])
    axis, along = op.attrs["axis"], vector_loops.vector_dim(tile.shape)
    if 0 not in tile.shape and along == axis:
        scan.along_lanes(axis)
    elif 0 not in tile.shape:
        scan.across_lanes(axis)
    e.define(op.result, Tile(tile.shape, tile.dtype, buffer))


class _Scan:
    """One scan op."""

    def __init__(
        self, e: Emitter, kind: str, tile: Tile, target: Buffer, reverse: bool
    ):
        self.e, self.kind, self.tile, self.target = e, kind, tile, target
        self.reverse, self.running = reverse, running_dtype(kind, tile.dtype)
        self.start = identity(kind, self.running)

    def along_lanes(self, axis: int) -> None:
        """Each vector is scanned in registers, from the previous one's last value."""
        f, shape, count = self.e.f, self.tile.shape, vector_loops.width()
        full, rest = divmod(shape[axis], count)
        with f.nest(shape[:axis]) as outer:
            inner = [integer(0)] * (len(shape) - axis - 1)
            step = lambda lanes, total: self._scan_lanes([*outer, lanes, *inner], total)
            total = self.start
            if rest and self.reverse:
                with vector_loops.last_lanes(f, full * count, rest) as lanes:
                    total = step(lanes, total)
            with f.loop(integer(full), [total]) as loop:
                place = self._place(loop.index, full)
                lanes = vector_loops.Lanes(f.mul(place, integer(count)), count)
                loop.carries = [step(lanes, loop.carries[0])]
            if rest and not self.reverse:
                with vector_loops.last_lanes(f, full * count, rest) as lanes:
                    step(lanes, loop.carries[0])

    def _scan_lanes(self, indices: Indices, total: Val) -> Val:
        """Scan a vector of elements from `total` and store it; gives the last."""
        f, count = self.e.f, max(i.count for i in indices)
        x = f.splat(self._element(indices), count)
        if f.mask is not None:
            x = f.select(f.mask, x, self.start)
        distance = 1
        while distance < count:
            moved = vector_loops.shifted(f, x, distance, self.start, self.reverse)
            x, distance = self._joined(moved, x), 2 * distance
        x = self._joined(total, x)
        self._store(indices, x)
        return f.lane(x, 0 if self.reverse else count - 1)

    def across_lanes(self, axis: int) -> None:
        """Each lane is a separate scan; rows are processed in memory order."""
        e, f, shape = self.e, self.e.f, self.tile.shape
        row, running = shape[axis + 1 :], self.running
        totals = e.temporary(row, running)
        with f.nest(shape[:axis]) as outer:
            e.fill(totals, tiles.splat(row, running, self.start))
            with f.loop(integer(shape[axis])) as loop:
                place = self._place(loop.index, shape[axis])

                def body(inner: Indices) -> None:
                    address = totals.address(f, running, inner)
                    indices = [*outer, place, *inner]
                    old = scalars.load(f, running, address)
                    total = self._joined(old, self._element(indices))
                    scalars.store(f, running, total, address)
                    self._store(indices, total)

                vector_loops.each(f, row, body)

    def _place(self, index: Val, count: int) -> Val:
        return self.e.f.sub(integer(count - 1), index) if self.reverse else index

    def _element(self, indices: Indices) -> Val:
        value = self.tile.at(self.e.f, indices)
        return scalars.cast(self.e.f, value, self.tile.dtype, self.running)

    def _store(self, indices: Indices, total: Val) -> None:
        f, dtype = self.e.f, self.tile.dtype
        address = self.target.address(f, dtype, indices)
        scalars.store(f, dtype, scalars.cast(f, total, self.running, dtype), address)

    def _joined(self, a: Val, b: Val) -> Val:
        return combine(self.e.f, self.kind, self.running, a, b)


RULES = {"reduce": emit_reduce, "scan": emit_scan}
