"""Tiles of other programs: a value as the programs before or after compute it.

`piece` computes a part of a tile as program `i - k` does. `extended` computes a tile
that begins elsewhere: it continues with the tiles of the programs beside it, which
works where its rows are computed one by one from blocks that adjoin, and gives zero
where there is no program.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, BlockDim, Op, Span, Value
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import is_elementwise, used_values
from pallasite.ir.roles import Dot, number_of
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.lower.per_program import Program

Ranges = tuple[tuple[int, int], ...]
COSTLY = ("dot", "reduce", "scan", "sort", "custom")  # not computed for a few elements


class NotMoved(Exception):
    """A tile cannot be computed elsewhere."""


class Along(NamedTuple):
    """Where a tile begins along one dimension of a result, and how large it is.

    Attributes:
        dim: the dimension of the result.
        tile_dim: the tile's dimension, if it has one.
        axis: the grid axis along which tiles adjoin; None: there are no others.
        step: how far apart they are; how many elements the tile is to have.
        size: how many elements a program's own tile has.
        first: which of these is the first.
    """

    dim: int
    tile_dim: int | None
    axis: int | None
    step: int
    size: int
    first: int

    @property
    def stays(self) -> bool:
        return self.axis is None and self.first == 0 and self.size == self.step


class MovedTiles:
    """Computes values of a program as other programs do.

    Args:
        builder: of the code that takes them.
        program: that computes them.
        made: who produces its values.
        sizes: the grid of the code that takes them.
        numbers: of the program's integers.
        wraps: axes along which the program before the first one is the last.
    """

    def __init__(
        self,
        builder: Builder,
        program: Program,
        made: Mapping[Value, Op],
        sizes: Sequence[int],
        numbers: StepTable,
        wraps: Collection[int] = (),
    ):
        self.wraps = wraps
        self.builder, self.program, self.made = builder, program, made
        self.sizes, self.numbers = tuple(sizes), numbers
        self.axes = {value: axis for axis, value in enumerate(program.body.params)}
        self.written = Roots(program.body).written(program.body)
        self.roots = Roots(program.body)
        self.known: dict[object, Value] = {}
        self.depends: dict[Value, frozenset[int]] = {}
        self.reaches: dict[int, tuple[int, int]] = {}

    # --- as another program computes it ---

    def there(self, shifts: Mapping[int, int]) -> list[Value]:
        """Whether program `i - k` is there, along each axis where it may not be."""
        b, tests = self.builder, list[Value]()
        for axis, k in shifts.items():
            index = self.program.body.params[axis]
            if axis in self.wraps:
                continue
            if k > 0:
                tests.append(b.op("ge", index, b.index(k)))
            if self.sizes[axis] - 1 - k > self.program.sizes[axis] - 1:
                last = self.program.sizes[axis] + k
                tests.append(b.op("lt", index, b.index(last)))
        for axis, n in enumerate(self.sizes):
            if axis not in shifts and n > self.program.sizes[axis]:
                index = self.program.body.params[axis]
                tests.append(b.op("lt", index, b.index(self.program.sizes[axis])))
        return tests

    def piece(self, value: Value, shifts: Mapping[int, int], part: Ranges) -> Value:
        """Some elements of a tile of program `i - k`; that of the nearest, if none."""
        moving = {axis: k for axis, k in shifts.items() if k}
        for axis, n in enumerate(self.sizes):
            if n > self.program.sizes[axis]:
                moving.setdefault(axis, 0)
        return self._piece(value, tuple(sorted(moving.items())), part)

    def _piece(
        self, value: Value, shifts: tuple[tuple[int, int], ...], part: Ranges
    ) -> Value:
        whole = value.is_ref or part == tuple((0, n) for n in value.tile.shape)
        moves = self.axes_of(value) & {axis for axis, _ in shifts}
        if whole and not moves:
            return value
        key = value, shifts, part
        if key not in self.known:
            self.known[key] = self._made_piece(value, shifts, part, whole)
        return self.known[key]

    def _made_piece(
        self,
        value: Value,
        shifts: tuple[tuple[int, int], ...],
        part: Ranges,
        whole: bool,
    ) -> Value:
        b = self.builder
        if value in self.axes:
            axis = self.axes[value]
            k, count = dict(shifts)[axis], self.program.sizes[axis]
            if axis in self.wraps:
                return b.op("rem", b.add(value, b.index(-k % count)), b.index(count))
            other = b.sub(value, b.index(k))
            return b.clamp(b.index(0), other, b.index(count - 1))
        op = self.op_of(value)
        if whole:
            return self._copy(op, shifts)
        shape = tuple(b - a for a, b in part)
        if op.name == "constant":
            return b.constant(op.attrs["value"], value.tile.with_shape(shape))
        if op.name == "load":
            return self._part_of_load(op, shifts, part)
        if op.name == "broadcast_in_dim":
            (x,), dims = op.operands, op.attrs["dims"]
            inner = tuple(
                part[d] if n == op.attrs["shape"][d] else (0, n)
                for n, d in zip(x.tile.shape, dims, strict=True)
            )
            return b.broadcast(self._piece(x, shifts, inner), shape, dims)
        if is_elementwise(op):
            operands = [
                self._piece(v, shifts, part if v.tile.shape else ())
                for v in op.operands
            ]
            return b.op(op.name, *operands, **op.attrs)
        if op.name in COSTLY:
            raise NotMoved
        whole_range = tuple((0, n) for n in value.tile.shape)
        found = self._piece(value, shifts, whole_range)
        starts, limits = tuple(a for a, _ in part), tuple(z for _, z in part)
        ones = (1,) * len(starts)
        return b.op("slice", found, starts=starts, limits=limits, strides=ones)

    def op_of(self, value: Value) -> Op:
        """The op that makes a value, if it may be repeated."""
        op = self.made.get(value)
        if op is None or op.regions or len(op.results) != 1:
            raise NotMoved
        reads = op.name == "load" and self.roots.of(op.operands[0]) not in self.written
        if not (reads or table()[op.name].effect is Effect.PURE):
            raise NotMoved
        return op

    def _copy(self, op: Op, shifts: tuple[tuple[int, int], ...]) -> Value:
        operands = [self._piece(v, shifts, _all(v)) for v in op.operands]
        return self.builder.op(op.name, *operands, **op.attrs)

    def _part_of_load(
        self, op: Op, shifts: tuple[tuple[int, int], ...], part: Ranges
    ) -> Value:
        access = Access.of(op)
        spans = [n for n, e in enumerate(access.index) if isinstance(e, Span)]
        fixed = not access.index_operands and access.mask is None
        if not fixed or len(spans) != len(part):
            raise NotMoved
        index = list(access.index)
        for n, (low, high) in zip(spans, part, strict=True):
            entry = index[n]
            assert isinstance(entry, Span) and entry.start is not None
            if entry.stride != 1:
                raise NotMoved
            index[n] = Span(entry.start + low, high - low)
        ref = self._piece(op.operands[0], shifts, ())
        return self.builder.load(ref, tuple(index))

    def axes_of(self, value: Value) -> frozenset[int]:
        """The grid axes on which a value may depend."""
        if value in self.axes:
            return frozenset([self.axes[value]])
        if value not in self.depends:
            op = self.made.get(value)
            found = frozenset[int]()
            if op is not None:
                inside = [v for region in op.regions for v in used_values(region)]
                found = found.union(*map(self.axes_of, (*op.operands, *inside)))
            self.depends[value] = found
        return self.depends[value]

    # --- continued by those beside it ---

    def reach(self, places: Sequence[Sequence[Along]]) -> None:
        """Note all places at which tiles will begin: they share what they load."""
        for along in (a for place in places for a in place):
            if not along.stays:
                low, high = self.reaches.get(along.dim, (along.first, along.first))
                found = min(low, along.first), max(high, along.first)
                self.reaches[along.dim] = found

    def extended(self, value: Value, places: Sequence[Along]) -> Value:
        """A tile that begins elsewhere, and is zero where there is no program."""
        moving = tuple(a for a in places if a.dim in self.reaches)
        return self._extended(value, moving)

    def _extended(self, value: Value, moving: tuple[Along, ...]) -> Value:
        key = value, moving
        if key not in self.known:
            self.known[key] = self._made_extended(value, moving)
        return self.known[key]

    def _made_extended(self, value: Value, moving: tuple[Along, ...]) -> Value:
        op = self.op_of(value)
        if op.name == "load":
            return self._load(op, moving)
        if op.name == "dot":
            return self._rows_of_product(op, moving)
        if op.name == "reshape":
            return self._reshaped(op, moving)
        moves = [not self.is_fixed(v, moving) for v in op.operands]
        linear = (
            op.name in ("cast", "neg")
            or (op.name in ("add", "sub") and all(moves))
            or (op.name == "mul" and any(moves))
            or (op.name == "div" and moves == [True, False])
            or (op.name == "select_n" and not moves[0] and self._selects(op, moves))
            or (op.name == "pad" and self._is_apart(op, moving))
            or (op.name == "slice" and self._is_apart(op, moving))
            or (op.name == "concatenate" and all(moves) and self._is_apart(op, moving))
        )
        if not linear:
            raise NotMoved
        operands = [
            self._extended(v, moving) if m else self._resized(v, moving)
            for v, m in zip(op.operands, moves, strict=True)
        ]
        attrs = dict(op.attrs)
        if op.name == "slice":
            limits = list(attrs["limits"])
            for a in moving:
                if a.tile_dim is not None:
                    limits[a.tile_dim] = a.step
            attrs["limits"] = tuple(limits)
        return self.builder.op(op.name, *operands, **attrs)

    def _shape(self, value: Value, moving: Sequence[Along]) -> tuple[int, ...]:
        """The shape that a tile has elsewhere."""
        return tuple(
            prod(a.step for a in moving if a.tile_dim == d)
            if any(a.tile_dim == d for a in moving)
            else n
            for d, n in enumerate(value.tile.shape)
        )

    def _resized(self, value: Value, moving: Sequence[Along]) -> Value:
        """A value that is the same for all elements along what moves."""
        shape = self._shape(value, moving)
        if shape == value.tile.shape:
            return value
        op, b = self.op_of(value), self.builder
        if op.name == "constant":
            return b.constant(op.attrs["value"], value.tile.with_shape(shape))
        if op.name == "iota":
            return b.op("iota", dim=op.attrs["dim"], type=value.tile.with_shape(shape))
        if op.name == "broadcast_in_dim":
            return b.broadcast(op.operands[0], shape, op.attrs["dims"])
        operands = [self._resized(v, moving) for v in op.operands]
        return b.op(op.name, *operands, **op.attrs)

    def _reshaped(self, op: Op, moving: tuple[Along, ...]) -> Value:
        """Dimensions that are one before or after move together."""
        (x,) = op.operands
        inner = [a for a in moving if a.tile_dim is None]
        for old, new in _paired_dims(x.tile.shape, op.result.tile.shape):
            found = [a for d in new for a in moving if a.tile_dim == d]
            if not found:
                continue
            if len(found) != max(len(old), len(new)) or min(len(old), len(new)) > 1:
                raise NotMoved
            dims = old * len(found) if len(old) == 1 else old
            pairs = zip(found, dims, strict=True)
            inner += [a._replace(tile_dim=d) for a, d in pairs]
        if len(inner) < len(moving):
            raise NotMoved
        shape = self._shape(op.result, moving)
        return self.builder.op("reshape", self._extended(x, tuple(inner)), shape=shape)

    def _rows_of_product(self, op: Op, moving: tuple[Along, ...]) -> Value:
        """Rows of a matmul are those of its first operand, times the same matrix."""
        left, right = Dot.of(op).sides
        rows, dims = left.free, [a.tile_dim for a in moving]
        same = self.is_same(right.value, moving)
        if left.batch or not same or not all(d is None or d < len(rows) for d in dims):
            raise NotMoved
        inner = tuple(
            a if d is None else a._replace(tile_dim=rows[d])
            for a, d in zip(moving, dims, strict=True)
        )
        x = self._extended(left.value, inner)
        return self.builder.op("dot", x, right.value, **op.attrs)

    def _selects(self, op: Op, moves: Sequence[bool]) -> bool:
        """Whether a choice is of zero where what moves is."""
        pairs = zip(op.operands[1:], moves[1:], strict=True)
        return all(m or number_of(self.made, v) == 0 for v, m in pairs)

    def _is_apart(self, op: Op, moving: Sequence[Along]) -> bool:
        """Whether elements are moved along other dimensions than those that move, and
        there is zero beside them."""
        dims = [a.tile_dim for a in moving if a.tile_dim is not None]
        if op.name == "concatenate":
            return op.attrs["axis"] not in dims
        old, new = op.operands[0].tile.shape, op.result.tile.shape
        if op.name == "pad" and number_of(self.made, op.operands[1]) != 0:
            return False
        names = ("strides", "starts") if op.name == "slice" else ("low", "interior")
        plain = [
            all(op.attrs[name][d] <= (name == "strides") for name in names)
            for d in dims
        ]
        return all(plain) and all(old[d] == new[d] for d in dims)

    def _load(self, op: Op, moving: tuple[Along, ...]) -> Value:
        """A tile of a larger block; past the edges of the array it is zero."""
        view = self.made.get(op.operands[0])
        whole = covers_whole(op.operands[0].ref.shape, op.attrs["index"])
        if view is None or not whole or Access.of(op).mask is not None:
            raise NotMoved
        tiled = [a.tile_dim for a in moving if a.tile_dim is not None]
        if len(set(tiled)) < len(tiled):
            raise NotMoved
        key = view.result, frozenset(a.dim for a in moving)
        places = {a.dim: self._place(view, a) for a in moving}
        if key not in self.known:
            self.known[key] = self._larger_view(view, moving, places)
        shape = iter(op.result.tile.shape)
        index: list[At | Span] = []
        chosen = {places[a.dim]: a for a in moving}
        for d, dim in enumerate(view.attrs["window"].dims):
            n = 1 if dim.kind == "squeezed" else next(shape)
            a = chosen.get(d)
            first = 0 if a is None else a.first - self.reaches[a.dim][0]
            if dim.kind != "squeezed":
                index.append(Span(first, n if a is None else a.step))
            elif a is not None:
                index.append(At(first))
        return self.builder.load(self.known[key], tuple(index))

    def _place(self, view: Op, along: Along) -> int:
        """Which dimension of an array a view moves over."""
        dims, indices = view.attrs["window"].dims, view.operands[1:]
        if along.tile_dim is not None:
            kept = [d for d, dim in enumerate(dims) if dim.kind != "squeezed"]
            return kept[along.tile_dim]
        index = self.program.body.params[along.axis or 0]
        found = [d for d, v in enumerate(indices) if v is index]
        if len(found) != 1 or dims[found[0]].kind != "squeezed":
            raise NotMoved
        return found[0]

    def _larger_view(
        self, view: Op, moving: Sequence[Along], places: Mapping[int, int]
    ) -> Value:
        if view.name != "block_view" or view.operands[0] in self.written:
            raise NotMoved
        array, *indices = view.operands
        window, b = view.attrs["window"], self.builder
        if window.fill is not None and window.fill != 0:
            raise NotMoved
        dims = list(window.dims)
        axes = {a.axis for a in moving}
        others = [v for d, v in enumerate(indices) if d not in places.values()]
        if any(self.axes_of(v) & axes for v in others):
            raise NotMoved
        for a in moving:
            d = places[a.dim]
            n, blocks = array.ref.shape[d], 1
            adjoin = dims[d] in (BlockDim(a.size), BlockDim(1, "squeezed"))
            if a.axis is None:
                start, whole = b.index(0), a.size
                adjoin &= number_of(self.made, indices[d]) == 0
            else:
                index = self.program.body.params[a.axis]
                start, blocks = b.mul(index, b.index(a.step)), self.sizes[a.axis]
                whole = self.program.sizes[a.axis] * a.step
                adjoin &= indices[d] is index and a.size == a.step
            if not adjoin or not whole - a.size < n <= whole:
                raise NotMoved
            if n < whole and window.fill is None:
                raise NotMoved
            low, high = self.reaches[a.dim]
            before, after = max(0, -low), max(0, a.step * blocks + high - n)
            dims[d] = BlockDim(a.step + high - low, "element", (before, after))
            indices[d] = b.add(start, b.index(low + before))
        larger = replace(window, dims=tuple(dims), fill=0)
        return b.op("block_view", array, *indices, window=larger)

    def is_fixed(self, value: Value, moving: Sequence[Along]) -> bool:
        """Whether a value is the same for all elements along what moves."""
        if not value.is_ref and value in self.axes:
            return not any(a.axis == self.axes[value] for a in moving)
        op = self.made.get(value)
        if op is None or not self.is_same(value, moving):
            return False
        if not value.tile.shape:
            return True
        if op.name == "constant":
            return True
        if op.name == "iota":
            return all(a.tile_dim != op.attrs["dim"] for a in moving)
        if op.name == "broadcast_in_dim":
            (source,), dims = op.operands, op.attrs["dims"]
            return all(
                a.tile_dim not in dims or source.tile.shape[dims.index(a.tile_dim)] == 1
                for a in moving
            )
        return is_elementwise(op) and all(self.is_fixed(v, moving) for v in op.operands)

    def is_same(self, value: Value, moving: Sequence[Along]) -> bool:
        """Whether all programs along what moves compute the same value."""
        if self.axes_of(value) & {a.axis for a in moving}:
            return False
        pending, seen = [value], set[Value]()
        while pending:
            op = self.made.get(pending.pop())
            if op is None or op.results[0] in seen:
                continue
            seen.add(op.results[0])
            if op.regions or self.roots_written(op):
                return False
            pending += op.operands
        return True

    def roots_written(self, op: Op) -> bool:
        """Whether an op reads memory that the program writes."""
        return op.name == "load" and self.roots.of(op.operands[0]) in self.written


def _paired_dims(
    old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The dimensions of two shapes in the shortest runs that have as many elements."""
    pending = [d for d, n in enumerate(new) if n != 1]
    first: list[int] = []
    second: list[int] = []
    sizes = [1, 1]
    for d in [d for d, n in enumerate(old) if n != 1]:
        first.append(d)
        sizes[0] *= old[d]
        while pending and sizes[1] < sizes[0]:
            second.append(pending.pop(0))
            sizes[1] *= new[second[-1]]
        if sizes[0] == sizes[1]:
            yield first, second
            first, second, sizes = [], [], [1, 1]


def _all(value: Value) -> Ranges:
    return () if value.is_ref else tuple((0, n) for n in value.tile.shape)
