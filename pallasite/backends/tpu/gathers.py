"""Lowers gathers and scatters to loops that move one slice at a time.

The chip accesses vector memory at one address per instruction. Indexed elements are
moved in a loop over the index array: index arrays, values and results are kept in
scratch memory, where a loop can address single slices. Updates are made in order, so
repeated indices mean what they mean elsewhere.

Kernel in, Kernel out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    Gather,
    Index,
    Kernel,
    Op,
    Span,
    Value,
)
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.types import BOOL, I32, INDEX, RefType, TileType
from pallasite.ops.decompose_gather import gather as by_selection
from pallasite.ops.formula import NotApplicable

COMBINE = {"add": "add", "mul": "mul", "min": "min", "max": "max"}


def loop_over_gathers(kernel: Kernel) -> Kernel:
    """The kernel without index arrays on refs, and without scatters of values."""
    return map_ops(kernel, _rewritten)


def slice_by_slice(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """An access through index arrays as a loop; None: it has none."""
    access = Access.of(op)
    if not any(isinstance(entry, Gather) for entry in access.index):
        return None
    return _Accesses(b, op, _by_rows(b, access)).emit()


def _by_rows(b: Rewriter, access: Access) -> Access:
    """Of index arrays of which the last counts all elements of a row: one per row.

    `ref[ids[:, None], arange(width)]` are rows, each moved at once.
    """
    entries = access.split_index()
    arrays = [v for e, v in entries if isinstance(e, Gather) and v is not None]
    last = arrays[-1]
    if len(arrays) < max(len(entries), 2) or last.tile.rank < 2:
        return access
    width, counted = last.tile.shape[-1], b.producer(last, "iota")
    along = last.tile.rank - 1
    if counted is None or counted.attrs["dim"] != along:
        return access
    rows = [_without_columns(b, v) for v in arrays[:-1]]
    if width != access.ref.ref.shape[-1] or None in rows:
        return access
    index = (*access.index[:-1], Span(0, width))
    operands = tuple(v for v in rows if v is not None)
    return replace(access, index=index, index_operands=operands)


def _without_columns(b: Rewriter, numbers: Value) -> Value | None:
    """Numbers that are the same along the last dimension, without it."""
    made, shape = b.producer(numbers, "broadcast_in_dim"), numbers.tile.shape
    if made is None:
        return None
    source, dims = made.operands[0], made.attrs["dims"]
    if len(shape) - 1 in dims and source.tile.shape[-1] != 1:
        return None
    kept = [
        n for d, n in zip(dims, source.tile.shape, strict=True) if d < len(shape) - 1
    ]
    source = b.op("reshape", source, shape=tuple(kept))
    inner = tuple(d for d in dims if d < len(shape) - 1)
    return b.op("broadcast_in_dim", source, shape=shape[:-1], dims=inner)


def _rewritten(op: Op, b: Rewriter) -> Sequence[Value] | None:
    if op.name in ("load", "store", "atomic_rmw", "atomic_cas"):
        return slice_by_slice(op, b)
    if op.name == "gather" and not _is_selection(op):
        return [_Slices(b, op).gathered(op)]
    if op.name == "scatter":
        return [_Slices(b, op).scattered(op)]
    return None


def _is_selection(op: Op) -> bool:
    """Whether comparing all candidates with all indices is cheaper."""
    candidates, count = op.operands[0].tile, prod(op.operands[1].tile.shape[:-1])
    try:
        by_selection(Builder(), *op.operands, **op.own_attrs)
    except NotApplicable:
        return False
    axis = op.attrs["dimension_numbers"][2][0]
    return candidates.shape[axis] <= count


class _Scratch:
    """A tile in memory: with at least two dimensions, and bools as words."""

    def __init__(self, b: Builder, tile: TileType, value: Value | None = None):
        self.tile, self.lead = tile, max(2 - tile.rank, 0)
        self.words = tile.with_dtype(I32) if tile.dtype == BOOL else tile
        shape = (1,) * self.lead + tile.shape
        self.ref = b.op("alloc", type=RefType(shape, self.words.dtype, "vmem"))
        if value is not None:
            whole = b.cast(value, self.words.dtype)
            b.store(self.ref, b.op("reshape", whole, shape=shape))

    def whole(self, b: Builder) -> Value:
        value = b.op("reshape", b.load(self.ref), shape=self.tile.shape)
        return b.cast(value, self.tile.dtype)

    def load(self, b: Builder, index: Index, operands: Sequence[Value]) -> Value:
        found = b.load(self.ref, (At(0),) * self.lead + tuple(index), operands)
        return b.cast(found, self.tile.dtype)

    def store(
        self, b: Builder, value: Value, index: Index, operands: Sequence[Value]
    ) -> None:
        value = b.cast(value, self.words.dtype)
        b.store(self.ref, value, (At(0),) * self.lead + tuple(index), operands)

    def at(self, b: Builder, place: Sequence[Value]) -> Value:
        """The slice at a position along the first dimensions."""
        return self.load(b, self._slice(place), place)

    def put(self, b: Builder, place: Sequence[Value], value: Value) -> None:
        self.store(b, value, self._slice(place), place)

    def _slice(self, place: Sequence[Value]) -> Index:
        rest = self.tile.shape[len(place) :]
        return (*(At() for _ in place), *(Span(0, n) for n in rest))


def _loop(
    b: Builder, shape: Sequence[int], body: Callable[[Builder, list[Value]], None]
) -> None:
    """Run code at each position of a shape, in row-major order."""
    counter, inner = Value(INDEX), Builder(b.loc)
    place: list[Value] = []
    step = prod(shape)
    for n in shape:
        step //= n
        number = inner.div(counter, inner.index(step)) if step > 1 else counter
        wraps = step * n < prod(shape)
        place.append(inner.rem(number, inner.index(n)) if wraps else number)
    body(inner, place)
    region = inner.block((counter,), ())
    bounds = (b.index(0), b.index(prod(shape)), b.index(1))
    b.emit("for", *bounds, regions=(region,))


def _clamped(b: Builder, number: Value, last: int) -> Value:
    return b.clamp(b.index(0), number, b.index(last))


def _is_within(b: Builder, number: Value, last: int) -> Value:
    at_least = b.ge(number, b.index(0))
    return b.and_(at_least, b.le(number, b.index(last)))


class _Accesses:
    """A load, store or atomic of a ref through index arrays."""

    def __init__(self, b: Builder, op: Op, access: Access):
        self.b, self.op, self.access = b, op, access
        self.entries = access.split_index()
        arrays = [v for e, v in self.entries if isinstance(e, Gather) and v is not None]
        self.shape = arrays[0].tile.shape
        self.places = [
            _Scratch(b, v.tile.with_dtype(I32), b.as_index(v)) for v in arrays
        ]
        spans = [e.size for e, _ in self.entries if isinstance(e, Span)]
        self.slice_shape = tuple(spans)

    def emit(self) -> Sequence[Value]:
        b, access = self.b, self.access
        kept = [
            None if value is None else _Scratch(b, value.tile, value)
            for value in (access.value, access.compare, access.mask, access.other)
        ]
        results = [_Scratch(b, r.tile) for r in self.op.results]
        if prod(self.shape) and prod(self.slice_shape):
            _loop(b, self.shape, lambda c, place: self._step(c, place, kept, results))
        return [result.whole(b) for result in results]

    def _step(
        self,
        b: Builder,
        place: list[Value],
        kept: Sequence[_Scratch | None],
        results: Sequence[_Scratch],
    ) -> None:
        value, compare, mask, other = (
            None if each is None else each.at(b, place) for each in kept
        )
        index, operands, inside = self._slice(b, place)
        ref, name = self.access.ref, self.op.name
        if name == "load":
            found = b.load(ref, index, operands, mask, other)
            results[0].put(b, place, found)
            return
        assert value is not None
        if name == "atomic_cas":
            then = Builder(b.loc)
            old = then.op("atomic_cas", ref, compare, value, *operands, index=index)  # type: ignore[arg-type]
            results[0].put(then, place, old)
            inside = b.cast(inside, I32)
            b.emit("cond", inside, regions=(Block(), then.block()))
            return
        chosen = b.broadcast(inside, self.slice_shape)
        mask = chosen if mask is None else b.and_(chosen, mask)
        if name == "store":
            b.store(ref, value, index, operands, mask)
            return
        kind = self.op.attrs["kind"]
        attrs = {"kind": kind, "index": index, "mask": True}
        old = b.op("atomic_rmw", ref, value, *operands, mask, **attrs)
        results[0].put(b, place, old)

    def _slice(
        self, b: Builder, place: list[Value]
    ) -> tuple[Index, list[Value], Value]:
        """One slice of the ref: its index, and whether it is inside."""
        index: list[At | Span] = []
        operands: list[Value] = []
        inside = b.constant(True, TileType((), BOOL))
        places = iter(self.places)
        sizes = self.access.ref.ref.shape
        for (entry, operand), n in zip(self.entries, sizes, strict=True):
            if isinstance(entry, Gather):
                number = next(places).at(b, place)
                inside = b.and_(inside, _is_within(b, number, n - 1))
                operands.append(_clamped(b, number, n - 1))
                index.append(At())
                continue
            index.append(entry)
            if operand is None:
                continue
            if self.access.mask is None:  # adding a mask would change the meaning
                extent = entry.extent if isinstance(entry, Span) else 1
                operand = _clamped(b, b.as_index(operand), n - extent)
            operands.append(operand)
        return tuple(index), operands, inside


class _Slices:
    """XLA's gather and scatter of a value, slice by slice."""

    def __init__(self, b: Builder, op: Op):
        self.b = b
        x, indices = op.operands[:2]
        numbers = op.attrs["dimension_numbers"]
        self.window_dims, dropped, self.index_map, self.batch, self.index_batch = (
            numbers
        )
        self.x = _Scratch(b, x.tile, x)
        self.indices = _Scratch(b, indices.tile.with_dtype(I32), b.as_index(indices))
        self.places = indices.tile.shape[:-1]
        self.window = [
            d for d in range(x.tile.rank) if d not in (*dropped, *self.batch)
        ]

    def gathered(self, op: Op) -> Value:
        b, result, sizes = self.b, op.result.tile, op.attrs["slice_sizes"]
        order = self._order(result.rank)
        made = _Scratch(b, result.with_shape([result.shape[d] for d in order]))

        def step(c: Builder, place: list[Value]) -> None:
            index, operands, inside = self._slice(c, place, sizes)
            found = self.x.load(c, index, operands)
            if op.attrs["mode"] == "fill":
                blank = c.like(op.attrs["fill_value"], found)
                found = c.select(c.broadcast(inside, found.tile.shape), found, blank)
            made.put(c, place, found)

        if result.size:
            _loop(b, self.places, step)
        back = tuple(order.index(d) for d in range(result.rank))
        return _transposed(b, made.whole(b), back)

    def scattered(self, op: Op) -> Value:
        b, updates, kind = self.b, op.operands[2], op.attrs["kind"]
        moved = _transposed(b, updates, self._order(updates.tile.rank))
        given = _Scratch(b, moved.tile, moved)
        sizes = [1] * self.x.tile.rank
        for d, k in zip(self.window, self.window_dims, strict=True):
            sizes[d] = updates.tile.shape[k]

        def step(c: Builder, place: list[Value]) -> None:
            index, operands, inside = self._slice(c, place, sizes)
            old, new = self.x.load(c, index, operands), given.at(c, place)
            if kind != "set":
                new = c.op(COMBINE[kind], old, new)
            if op.attrs["mode"] == "fill":
                new = c.select(c.broadcast(inside, new.tile.shape), new, old)
            self.x.store(c, new, index, operands)

        if updates.tile.size and self.x.tile.size:
            _loop(b, self.places, step)
        return self.x.whole(b)

    def _order(self, rank: int) -> tuple[int, ...]:
        """Dimensions of the result or the updates: indexed ones, then the slice's."""
        places = [d for d in range(rank) if d not in self.window_dims]
        return (*places, *self.window_dims)

    def _slice(
        self, b: Builder, place: list[Value], sizes: Sequence[int]
    ) -> tuple[Index, list[Value], Value]:
        starts: dict[int, Value] = {}
        inside = b.constant(True, TileType((), BOOL))
        for k, d in enumerate(self.index_map):
            at = (*(At() for _ in place), At(k))
            number = self.indices.load(b, at, place)
            last = self.x.tile.shape[d] - sizes[d]
            inside = b.and_(inside, _is_within(b, number, last))
            starts[d] = _clamped(b, number, last)
        for d, k in zip(self.batch, self.index_batch, strict=True):
            starts[d] = place[k]
        index: list[At | Span] = []
        operands: list[Value] = []
        for d, size in enumerate(sizes):
            first = None if d in starts else 0
            index.append(Span(first, size) if d in self.window else At(first))
            operands += [starts[d]] if d in starts else []
        return tuple(index), operands, inside


def _transposed(b: Builder, value: Value, perm: Sequence[int]) -> Value:
    if list(perm) == sorted(perm):
        return value
    return b.op("transpose", value, perm=tuple(perm))
