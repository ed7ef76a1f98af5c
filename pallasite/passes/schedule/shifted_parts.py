"""shifted_parts: blocks whose elements depend on their neighbours, computed in parts.

In: a program that makes a large block from shifted copies of others: slices,
concatenations and padding, or loads of several parts of one block, as stencils, rolls
and convolutions along time are written, and as their derivatives are. Smaller windows
cannot split it, because a part needs elements of the next. Out: more programs, each of
which makes a part of the block and loads what that part needs, where it lies: at the
part's own position, or some elements beside it. The first of them also makes what is
stored besides, if that is small.

Proof: every element of the result is a function of its position. A slice adds a number
to a position along a dimension; a concatenation chooses by it, and subtracts, as
padding does. So an op on whole tiles is the same op on the elements at the positions of
a part. What a choice drops is loaded from the nearest element that there is. Operands
that nothing writes are the same at any time, and each part of a result is stored by one
program.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import inline, is_elementwise, producers_of
from pallasite.ir.roles import Pipeline, Shown, number_of
from pallasite.passes.analysis.grid import analyze, find_pipeline, with_pipeline
from pallasite.passes.analysis.memory import Roots, constant_inputs

LARGE = 1 << 13  # elements of a block that is too large for one program
PART = 1 << 12  # elements of a part
WIDEST = 256  # elements of a row of a part, if it can have as many rows
BESIDE = 1 << 14  # elements of other tiles, which one of the programs stores whole


class _Whole(Exception):
    """Something needs whole tiles."""


@dataclass(frozen=True)
class _At:
    """The position of a part along one dimension of a tile.

    Attributes:
        axis: the dimension of the part that runs along it; None: it is one element.
        start: where the part starts, besides that axis' own start.
        inside: whether all of it is surely inside the tile.
    """

    axis: int | None
    start: int
    inside: bool = True


@dataclass(frozen=True)
class _Along:
    """The position of a part along one dimension of a ref.

    Attributes:
        dim: the dimension of the loaded tile; None: an element is loaded.
        at: where the part is, from `base` on.
        base: where the loaded tile starts, if that is known at run time only.
    """

    dim: int | None
    at: _At
    base: Value | None


def shifted_parts(kernel: Kernel) -> Kernel:
    """Programs for parts of blocks, where those are large and shifted."""
    names = {op.name for op in walk(kernel.body)}
    if kernel.level != "tile" or not names & {"concatenate", "pad", "slice", "load"}:
        return kernel
    if sum(op.name == "pipeline" for op in walk(kernel.body)) != 1:
        return kernel
    try:
        return _Parts(kernel).kernel()
    except _Whole:
        return kernel


class _Parts:
    def __init__(self, kernel: Kernel):
        self.old = kernel
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        body = self.pipeline.body
        self.made = {v: op for op in body.ops for v in op.results}
        self.roots, self.constant = Roots(kernel), constant_inputs(kernel)
        stores = [op for op in body.ops if op.name == "store"]
        if not stores or analyze(kernel).sequential:
            raise _Whole
        self.shape = max((op.operands[1].tile.shape for op in stores), key=prod)
        self.stores = [op for op in stores if op.operands[1].tile.shape == self.shape]
        self.beside = [op for op in stores if op not in self.stores]
        if prod(self.shape) < LARGE or not self.is_shifted():
            raise _Whole
        if any(op.operands[1].tile.size > BESIDE for op in self.beside):
            raise _Whole
        self.dim_of: dict[int, int] = {}
        if len({op.operands[0] for op in stores}) != len(stores):
            raise _Whole
        for op in body.ops:
            pure = table()[op.name].effect is Effect.PURE
            if op.regions or not (pure or op.name in ("load", "store")):
                raise _Whole
        for op in self.stores:
            self.check_store(Access.of(op))
        self.part = self.sizes()
        self.counts = [-(-n // k) for n, k in zip(self.shape, self.part, strict=True)]
        self.axes = [d for d, count in enumerate(self.counts) if count > 1]
        if not self.axes or None in self.pipeline.grid:
            raise _Whole
        self.joined: dict[int, int] = {}
        for op in self.stores:
            self.check_edges(op.operands[0])
        self.known: dict[tuple[Value, tuple[_At, ...]], Value] = {}

    def is_shifted(self) -> bool:
        """Whether most of a tile is moved by less than its size.

        Halves that change places are stored apart (`split_accesses.py`).
        """
        if any(
            op.name in ("concatenate", "pad")
            and any(2 * x.tile.size > op.result.tile.size for x in op.operands)
            for op in self.made.values()
        ):
            return True
        starts: dict[Value, set[tuple[int, ...]]] = {}
        for op in self.made.values():
            found = _starts(op)
            if found is not None and op.result.tile.shape == self.shape:
                starts.setdefault(op.operands[0], set()).add(found)
        return any(
            0
            < max(abs(a - b) / n for a, b, n in zip(*pair, self.shape, strict=True))
            < 1
            for each in starts.values()
            for pair in combinations(each, 2)
        )

    def check_store(self, access: Access) -> None:
        """All of a block is stored."""
        found = [each for each in self.pipeline.shown if each.block is access.ref]
        if not found or access.mask is not None or access.ref.ref.shape != self.shape:
            raise _Whole
        (shown,) = found
        whole = tuple(Span(0, n) for n in self.shape)
        if shown.window.mode != "out" or access.index != whole:
            raise _Whole
        for dim in shown.window.dims:
            if dim.kind not in ("blocked", "squeezed") or any(dim.padding):
                raise _Whole

    def check_edges(self, block: Value) -> None:
        """No part of a block at the edge of the array is past the end.

        Parts of one block are counted up to there; those of a grid axis that chooses
        the block become one axis with it (`joined`: its size, by axis).
        """
        (shown,) = (each for each in self.pipeline.shown if each.block is block)
        kept = [n for n, dim in enumerate(shown.window.dims) if dim.kind == "blocked"]
        yields, ids = shown.index_map.yields, shown.index_map.params
        made = producers_of(shown.index_map)
        for d in self.axes:
            n, size = shown.array.ref.shape[kept[d]], self.shape[d]
            if n % size == 0:
                continue
            index, ends = yields[kept[d]], -(-n // self.part[d])
            if n < size and number_of(made, index) == 0 and len(self.stores) == 1:
                self.counts[d] = ends
                continue
            if index not in ids:
                raise _Whole
            axis = ids.index(index)
            if self.pipeline.grid[axis] != -(-n // size):
                raise _Whole
            if self.joined.setdefault(axis, ends) != ends or len(self.stores) > 1:
                raise _Whole
            self.dim_of[axis] = d

    def sizes(self) -> tuple[int, ...]:
        """The shape of a part: powers of two, the last dimension first, and last."""
        found = [1] * len(self.shape)
        last = len(found) - 1
        for d in (last, *reversed(range(last)), last):
            widest = WIDEST if prod(found) == 1 and last else PART
            found[d] = 1
            most = min(widest, PART // prod(found))
            powers = (1 << p for p in range(13))
            found[d] = max(k for k in powers if k <= most and self.shape[d] % k == 0)
        return tuple(found)

    # --- the kernel ---

    def kernel(self) -> Kernel:
        old = self.pipeline
        if self.beside and self.joined:
            raise _Whole
        b = Builder(old.op.loc)
        ids, self.mapping, self.parts = self.new_ids(b)
        self.starts = {
            d: b.mul(self.parts[d], b.index(self.part[d])) for d in self.axes
        }
        written = {op.operands[0] for op in self.stores}
        shown = [
            self.window(each) if each.block in written else self.same(each)
            for each in old.shown
        ]
        blocks = {s.block: n.block for s, n in zip(old.shown, shown, strict=True)}
        self.mapping |= blocks
        here = tuple(_At(d, 0) for d in range(len(self.shape)))
        for op in self.stores:
            b.loc = op.loc
            b.store(blocks[op.operands[0]], self.value(b, op.operands[1], here))
        if self.beside:
            self.store_beside(b, list(self.parts.values()))
        body = Block((*ids, *(n.block for n in shown)), tuple(b.ops))
        more = [self.counts[d] for d in self.own_axes()]
        new = replace(
            old,
            grid=(*(self.joined.get(a, n) for a, n in enumerate(old.grid)), *more),
            semantics=(*old.semantics, *("parallel" for _ in more)),
        )
        return with_pipeline(self.old, new.showing(shown, body).to_op())

    def own_axes(self) -> list[int]:
        """The dimensions whose parts have a grid axis of their own."""
        return [d for d in self.axes if d not in self.dim_of.values()]

    def new_ids(
        self, b: Builder
    ) -> tuple[list[Value], dict[Value, Value], dict[int, Value]]:
        """Grid indices, the old ones as functions of them, and the parts' numbers."""
        ids = [Value(v.type, v.name) for v in self.pipeline.ids]
        known: dict[Value, Value] = {}
        parts: dict[int, Value] = {}
        for axis, (old, new) in enumerate(zip(self.pipeline.ids, ids, strict=True)):
            known[old] = new
            if axis in self.joined:
                d = self.dim_of[axis]
                count = b.index(self.counts[d])
                known[old], parts[d] = b.div(new, count), b.op("rem", new, count)
        for d in self.own_axes():
            parts[d] = Value(T.INDEX, "part")
            ids.append(parts[d])
        return ids, known, {d: parts[d] for d in self.axes}

    def store_beside(self, b: Builder, parts: Sequence[Value]) -> None:
        """Smaller tiles are stored whole, by the first part."""
        is_first = b.op("eq", parts[0], b.index(0))
        for part in parts[1:]:
            is_first = b.op("and", is_first, b.op("eq", part, b.index(0)))
        inner = Builder(b.loc)
        self.starts = {}
        for op in self.beside:
            self.shape = self.part = op.operands[1].tile.shape
            self.known = {}
            here = tuple(_At(d, 0) for d in range(len(self.shape)))
            inner.loc, access = op.loc, Access.of(op)
            if access.mask is not None or access.index_operands:
                raise _Whole
            value = self.value(inner, op.operands[1], here)
            inner.store(self.mapping[access.ref], value, access.index)
        b.emit(
            "cond", b.cast(is_first, T.INDEX.dtype), regions=(Block(), inner.block())
        )

    def same(self, shown: Shown) -> Shown:
        """A window that stays for all parts."""
        return self.mapped(shown, lambda b, places, parts: places)

    def window(self, shown: Shown) -> Shown:
        """A window on a part of the result."""
        dims = list(shown.window.dims)
        kept = [n for n, dim in enumerate(dims) if dim.kind == "blocked"]
        for d in self.axes:
            dims[kept[d]] = replace(dims[kept[d]], size=self.part[d])

        def places(b: Builder, old: Sequence[Value], parts: Mapping[int, Value]):
            new = list(old)
            for d in self.axes:
                first = b.mul(new[kept[d]], b.index(self.counts[d]))
                new[kept[d]] = b.add(first, parts[d])
            return new

        window = replace(shown.window, dims=tuple(dims))
        block = Value(shown.block.ref.with_shape(self.part), shown.block.name)
        return self.mapped(shown, places)._replace(window=window, block=block)

    def mapped(self, shown: Shown, places: Callable[..., Sequence[Value]]) -> Shown:
        b = Builder(self.pipeline.op.loc)
        ids, known, parts = self.new_ids(b)
        old = [known[v] for v in self.pipeline.ids]
        yields = places(b, inline(b, shown.index_map, old), parts)
        block = Value(shown.block.type, shown.block.name)
        index_map = b.block(ids, yields)
        return shown._replace(index_map=index_map, block=block)

    # --- the elements of a part ---

    def tile_shape(self, places: Sequence[_At]) -> tuple[int, ...]:
        return tuple(1 if p.axis is None else self.part[p.axis] for p in places)

    def value(self, b: Builder, value: Value, places: tuple[_At, ...]) -> Value:
        """The elements of a tile at some positions."""
        op = self.made.get(value)
        if op is None:
            return self.mapping.get(value, value)  # a scalar from outside
        found = self.known.get((value, places))
        if found is None:
            b.loc = op.loc
            found = self.known[value, places] = self.computed(b, op, places)
        return found

    def computed(self, b: Builder, op: Op, places: tuple[_At, ...]) -> Value:
        shape = self.tile_shape(places)
        if op.name == "constant":
            return b.constant(op.attrs["value"], op.result.tile.with_shape(shape))
        if op.name == "load":
            return self.load(b, op, places)
        if op.name == "iota":
            tile = op.result.tile.with_shape(shape)
            number = self.position(b, places[op.attrs["dim"]], op.attrs["dim"], shape)
            return b.cast(number, tile.dtype)
        if op.name == "slice":
            if set(op.attrs["strides"]) - {1}:
                raise _Whole
            moved = zip(places, op.attrs["starts"], strict=True)
            at = tuple(replace(p, start=p.start + n) for p, n in moved)
            return self.value(b, op.operands[0], at)
        if op.name == "concatenate":
            return self.chosen(b, op, places)
        if op.name == "pad":
            return self.padded(b, op, places)
        if op.name == "broadcast_in_dim":
            return self.broadcast(b, op, places)
        if not is_elementwise(op):
            raise _Whole
        new = [self.value(b, v, places if v.tile.shape else ()) for v in op.operands]
        return b.op(op.name, *new, **op.attrs)

    def first(self, b: Builder, at: _At, base: Value | None = None) -> Value:
        """Where along a dimension of a tile a part starts."""
        first = b.index(at.start)
        if at.axis in self.starts:
            first = b.add(self.starts[at.axis], first)
        return first if base is None else b.add(base, first)

    def position(
        self,
        b: Builder,
        at: _At,
        d: int,
        shape: Sequence[int],
        base: Value | None = None,
    ) -> Value:
        """Where along a dimension of a tile the elements are."""
        tile = T.TileType(tuple(shape), T.I32)
        first = b.broadcast(b.cast(self.first(b, at, base), T.I32), shape, ())
        if at.axis is None:
            return first
        return b.add(b.op("iota", dim=d, type=tile), first)

    def chosen(self, b: Builder, op: Op, places: tuple[_At, ...]) -> Value:
        axis = op.attrs["axis"]
        at, end, found = places[axis], 0, None
        extent = 1 if at.axis is None else self.shape[at.axis]
        for piece in op.operands:
            first, end = end, end + piece.tile.shape[axis]
            # Where the parts are that have elements of the piece.
            last = at.start + extent
            if end <= at.start or last <= first or first == end:
                continue
            inside = at.inside and first <= at.start and last <= end
            moved = _At(at.axis, at.start - first, inside)
            part = self.piece(b, piece, places, axis, moved)
            if found is None:
                found = part
                continue
            where = self.position(b, at, axis, part.tile.shape)
            found = b.select(b.op("ge", where, b.like(first, where)), part, found)
        if found is None:
            raise _Whole
        return found

    def padded(self, b: Builder, op: Op, places: tuple[_At, ...]) -> Value:
        x, fill = op.operands
        if set(op.attrs["interior"]) - {0}:
            raise _Whole
        shape, moved, tests = self.tile_shape(places), list(places), list[Value]()
        other = b.broadcast(self.value(b, fill, ()), shape, ())
        for d, (at, low) in enumerate(zip(places, op.attrs["low"], strict=True)):
            n = x.tile.shape[d]
            end = low + n
            last = at.start + (1 if at.axis is None else self.shape[at.axis])
            if last <= low or end <= at.start:
                return other
            inside = at.inside and low <= at.start and last <= end
            moved[d] = _At(at.axis, at.start - low, inside)
            if n == 1:  # what is beside it is padding
                moved[d] = _At(None, 0)
            where = self.position(b, at, d, shape)
            if at.start < low:
                tests.append(b.op("ge", where, b.like(low, where)))
            if last > end:
                tests.append(b.op("lt", where, b.like(end, where)))
        found = self.value(b, x, tuple(moved))
        if found.tile.shape != shape:
            found = b.broadcast(found, shape, range(len(shape)))
        for test in tests:
            found = b.select(test, found, other)
        return found

    def piece(
        self, b: Builder, value: Value, places: tuple[_At, ...], axis: int, at: _At
    ) -> Value:
        if value.tile.shape[axis] == 1 and at.axis is not None:
            # One row for all: what is beside it is dropped.
            one = self.value(b, value, _with(places, axis, _At(None, 0)))
            return b.broadcast(one, self.tile_shape(places), range(len(places)))
        return self.value(b, value, _with(places, axis, at))

    def broadcast(self, b: Builder, op: Op, places: tuple[_At, ...]) -> Value:
        (x,), dims = op.operands, op.attrs["dims"]
        inner = tuple(
            places[d] if n == op.attrs["shape"][d] else _At(None, 0)
            for n, d in zip(x.tile.shape, dims, strict=True)
        )
        return b.broadcast(self.value(b, x, inner), self.tile_shape(places), dims)

    def load(self, b: Builder, op: Op, places: tuple[_At, ...]) -> Value:
        access = Access.of(op)
        if self.roots.of(access.ref) not in self.constant or access.mask is not None:
            raise _Whole
        ref = self.mapping.get(access.ref, access.ref)
        where = self.where(b, access, places)
        if all(each.at.inside for each in where):
            return self.plain(b, ref, where)
        shape = self.tile_shape(places)
        # Indices out of range load the nearest element.
        tiles = [
            self.position(b, each.at, each.dim or 0, shape, each.base) for each in where
        ]
        return b.load(ref, tuple(Gather() for _ in tiles), tiles)

    def where(self, b: Builder, access: Access, places: Sequence[_At]) -> list[_Along]:
        """The positions of a part in what is loaded."""
        rest, operands = iter(enumerate(places)), iter(access.index_operands)
        found: list[_Along] = []
        for n, entry in zip(access.ref.ref.shape, access.index, strict=True):
            if isinstance(entry, Gather) or getattr(entry, "stride", 1) != 1:
                raise _Whole
            size = entry.size if isinstance(entry, Span) else 1
            base = None
            if entry.start is None:
                start = b.as_index(self.value(b, next(operands), ()))
                base = b.clamp(b.index(0), start, b.index(n - size))
            dim, at = next(rest) if isinstance(entry, Span) else (None, _At(None, 0))
            at = replace(at, start=at.start + (entry.start or 0))
            found.append(_Along(dim, at, base))
        return found

    def plain(self, b: Builder, ref: Value, where: Sequence[_Along]) -> Value:
        index: list[At | Span] = []
        starts: list[Value] = []
        for each in where:
            at = each.at
            fixed = each.base is None and at.axis not in self.starts
            first = at.start if fixed else None
            starts += [] if fixed else [self.first(b, at, each.base)]
            size = 1 if at.axis is None else self.part[at.axis]
            index.append(At(first) if each.dim is None else Span(first, size))
        return b.load(ref, tuple(index), starts)


def _starts(op: Op) -> tuple[int, ...] | None:
    """Where a part of a tile or block begins, per dimension of the part."""
    if op.name == "slice":
        return op.attrs["starts"]
    if op.name != "load":
        return None
    spans = [entry for entry in op.attrs["index"] if isinstance(entry, Span)]
    found = tuple(span.start for span in spans if span.start is not None)
    return found if len(found) == op.result.tile.rank else None


def _with(places: tuple[_At, ...], axis: int, at: _At) -> tuple[_At, ...]:
    return (*places[:axis], at, *places[axis + 1 :])
