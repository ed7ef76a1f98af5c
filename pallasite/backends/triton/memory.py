"""Loads and stores: views (`backends/strided_views.py`) as pointers and masks.

Every access masks padding and what is past the array's edge, so nothing out of bounds
is touched. Elements with an index out of range are clamped when read, masked when
written.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

from pallasite.backends import strided_views
from pallasite.backends.strided_views import Dim, Edge, StridedViews, dims_of
from pallasite.backends.triton.dots import Dots
from pallasite.backends.triton.launch import AGAIN
from pallasite.backends.triton.text import Val, memory_element, type_text
from pallasite.ir.nodes import Access, At, Gather, Op, Span, Value
from pallasite.ir.types import DType, RefType
from pallasite.passes.analysis.intervals import HIGHEST, LOWEST, Fact
from pallasite.passes.analysis.masks import Positions, Sum
from pallasite.target.chip import physical

FENCE = '"gpu.barrier"() : () -> ()'
VECTOR_BYTES = 16  # the widest access of a thread
Number = int | Val  # an i32 scalar, plain where it is known


@dataclass(frozen=True)
class View(strided_views.View[Val]):
    """A ref in the emitted code; its pointer is a `Val`."""

    multiple: int = VECTOR_BYTES  # what divides the position of the first element

    @property
    def is_even(self) -> bool:
        return self.multiple % 2 == 0


class Memory(Dots, StridedViews[View, Val]):
    """Emits views, loads and stores."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[Value, View] = {}
        self.fenced: set[Value] = set()  # memory that is written and read again
        self.merged: set[Value] = set()  # memory that only atomics access, in any order
        # Elements of loaded and stored rows: those that vectors can access, and others.
        self.in_vectors, self.one_by_one = 0, 0

    def array(
        self, ref: RefType, pointer: Val, memory: Value | None, offset: Number = 0
    ) -> View:
        """A whole array, row-major."""
        wide = ref.size >= 1 << 31
        return View(pointer, ref.dtype, offset, dims_of(ref), wide=wide, memory=memory)

    # --- numbers ---

    def whole_number(self, value: Value) -> Number:
        known = self.facts.of(value).number
        if known is not None:
            return known
        return self.index_value(self.env[value], value.tile.dtype)

    def scalar(self, x: Number, wide: bool = False) -> Val:
        elem = "i64" if wide else "i32"
        if isinstance(x, int):
            return self.const(x, elem)
        return self.convert("arith.extsi", x, elem)

    def plus(self, x: Number, y: Number, wide: bool = False) -> Number:
        if isinstance(x, int) and isinstance(y, int):
            return x + y
        if x == 0:
            return y
        if y == 0:
            return x
        return self.apply("arith.addi", self.scalar(x, wide), self.scalar(y, wide))

    def times(self, x: Number, factor: int, wide: bool = False) -> Number:
        if isinstance(x, int):
            return x * factor
        if factor in (0, 1):
            return x if factor else 0
        return self.apply("arith.muli", self.scalar(x, wide), self.scalar(factor, wide))

    def at_most(self, x: Number, limit: int) -> Number:
        if isinstance(x, int):
            return min(x, limit)
        return self.apply("arith.minsi", x, self.const(limit, "i32"))

    # --- views ---

    def stepped(self, view: View, dim: Dim, start: Number, multiple: int) -> View:
        multiple = gcd(view.multiple, multiple * dim.stride)
        return replace(super().stepped(view, dim, start, multiple), multiple=multiple)

    def emit_bitcast_view(self, op: Op) -> None:
        view = self.views[op.operands[0]]
        dtype: DType = op.attrs["dtype"]
        if dtype.bits != view.dtype.bits:
            self.refuse(op, "the dtypes differ in width", "bitcast the loaded value")
        elem = memory_element(dtype)
        if elem is None:
            self.refuse(op, f"Triton does not support element type {dtype}")
        kind = f"!tt.ptr<{elem}>"
        pointer = view.pointer
        if kind != pointer.elem:
            text = f"tt.bitcast {pointer} : {pointer.elem} -> {kind}"
            pointer = self.let(text, (), kind)
        fill = view.fill
        if fill is not None:
            fill = np.array(fill, view.dtype.np).view(dtype.np).item()
        self.views[op.result] = replace(view, pointer=pointer, dtype=dtype, fill=fill)

    # --- where an access goes ---

    def start(
        self, entry: At | Span, operand: Value | None, size: int, clamp: bool
    ) -> Number:
        """Where an entry starts: in range or, with a mask, not far out of range."""
        if operand is None:
            assert entry.start is not None
            return entry.start
        extent = entry.extent if isinstance(entry, Span) else 1
        # Far out of range is as good as just out of range, and cannot wrap around.
        low, high = (0, size - extent) if clamp else (-extent, size)
        start = self.whole_number(operand)
        fact = self.facts.of(operand)
        if isinstance(start, int):
            return min(max(start, low), high)
        if not clamp:  # positions increase from here
            low, high = LOWEST, (high if fact.high + extent > HIGHEST else fact.high)
        return self.clamped(start, fact, low, high)

    def clamped(self, x: Val, fact: Fact, low: int, high: int) -> Val:
        """`x`, about which `fact` is known, clamped to `low` and `high`."""
        if fact.low < low:
            x = self.apply("arith.maxsi", x, self.like(low, x))
        if fact.high > high:
            x = self.apply("arith.minsi", x, self.like(high, x))
        return x

    def place(self, op: Op, access: Access, result: Sequence[int]) -> "Place":
        """Pointers of an access and the mask of what may be accessed."""
        view = self.views[access.ref]
        masked, reads = access.mask is not None, op.name == "load"
        shape = physical(result)
        entries = access.split_index()
        gathered = next(
            (len(v.tile.shape) for e, v in entries if isinstance(e, Gather) and v), 0
        )
        axis = gathered
        positions = Positions(self.facts, self.producers, access.mask)
        spots: list[tuple[Dim, Val]] = []  # positions along the dims that are tiles
        masks: list[Val | None] = [self.padding_mask(result, range(len(result)))]
        for dim, (entry, operand) in zip(view.dims, entries, strict=True):
            if isinstance(entry, Gather):
                assert operand is not None
                spot = self.index_tile(operand, len(shape))
                sums = positions.of(operand)
                fact = positions.range(sums)
                last = (None, (operand.tile.rank - 1,))
                if dim.stride == 1 and sums.factors.get(last) == 1:
                    self.one_by_one += prod(shape)  # rows whose start is not known
                if reads:
                    spot = self.clamped(spot, fact, 0, dim.size - 1)
                else:
                    masks.append(self.in_range(0, spot, fact, dim.size))
                spots.append((dim, spot))
                continue
            first, spot = self.start(entry, operand, dim.size, not masked), None
            multiple = 1 if operand is None else self.facts.of(operand).multiple
            steps = Sum()
            if isinstance(entry, Span):
                spot, steps = self.along(shape, axis), positions.along(axis, entry.size)
                axis += 1
                if entry.stride != 1:
                    spot = self.scaled("arith.muli", spot, entry.stride)
            if masked and operand is not None:
                stride = entry.stride if isinstance(entry, Span) else 1
                fact = positions.range(positions.of(operand).plus(steps, stride))
                if not reads:
                    masks.append(self.in_range(first, spot, fact, dim.size))
                elif not fact.within(0, dim.size - 1):
                    where = self.moved(first, spot)
                    where = self.clamped(where, fact, 0, dim.size - 1)
                    first, spot = (where, None) if spot is None else (0, where)
            view = self.shifted(view, dim, first, multiple)
            if spot is not None:
                spots.append((dim, spot))
        masks += [self.inside_edge(key, edge, spots) for key, edge in view.edges]
        if any(dim.size == 0 for dim in view.dims):
            masks.append(self.const(False, "i1"))  # there is no nearest element
        pointers = self.pointers(view, spots, shape)
        if not gathered:
            self.count_row_elements(view, spots, shape)
        return Place(pointers, self.both(*masks), shape, view, tuple(spots))

    def count_row_elements(
        self, view: View, spots: Sequence[tuple[Dim, Val]], shape: Sequence[int]
    ) -> None:
        """Of an access by spans."""
        if not spots or spots[-1][0].stride != 1:
            return
        apart = gcd(view.multiple, shape[-1], *(dim.stride for dim, _ in spots[:-1]))
        if apart * view.dtype.bytes % VECTOR_BYTES == 0:
            self.in_vectors += prod(shape)
        else:
            self.one_by_one += prod(shape)

    @property
    def is_better_one_by_one(self) -> bool:
        """Whether threads should access neighbouring elements, not vectors of them.

        Triton gives a thread as many neighbouring elements as the widest access can
        take at once. Where others cannot, each of their elements is an access of its
        own, whose warp touches as many lines as if it were a vector: of shifted reads,
        as stencils have, that takes four times as long.
        """
        size = min((v.dtype.bytes for v in self.views.values()), default=4)
        vectors = self.in_vectors + self.one_by_one * VECTOR_BYTES // size
        elements = (self.in_vectors + self.one_by_one) * 4 // size
        return vectors > 1.5 * elements

    def index_tile(self, operand: Value, rank: int) -> Val:
        """Element indices from an index array, with the rank of the result."""
        index = self.index_value(self.env[operand], operand.tile.dtype)
        while len(index.shape) < rank:
            index = self.expand(index, len(index.shape))
        return index

    def moved(self, first: Number, spot: Val | None) -> Val:
        """Positions counted from `first`; just that number if there are none."""
        position = self.scalar(first)
        if spot is None:
            return position
        return self.apply("arith.addi", self.spread(position, spot.shape), spot)

    def in_range(
        self, first: Number, spot: Val | None, fact: Fact, size: int
    ) -> Val | None:
        """Whether a position, with its known `fact`, is in the ref; None: it is."""
        if fact.within(0, size - 1):
            return None
        position = self.moved(first, spot) if first != 0 or spot is None else spot
        # Negative positions are large as unsigned numbers.
        return self.compare("ult", position, self.like(size, position))

    def inside_edge(
        self, key: int, edge: Edge, spots: Sequence[tuple[Dim, Val]]
    ) -> Val | None:
        """Where an access stays inside the array along one of its dimensions."""
        position: Val | None = None
        for dim, spot in spots:
            if dim.edge == key:
                step = dim.edge_step
                moved = self.scaled("arith.muli", spot, step) if step > 1 else spot
                position = moved if position is None else self.added(position, moved)
        start = self.scalar(edge.start)
        if position is None:
            position = start
        elif edge.start != 0:
            position = self.added(position, self.spread(start, position.shape))
        stop = self.spread(self.scalar(edge.stop), position.shape)
        inside = self.compare("slt", position, stop)
        if edge.below:
            not_before = self.compare("sge", position, self.like(0, position))
            inside = self.apply("arith.andi", inside, not_before)
        return inside

    def added(self, x: Val, y: Val) -> Val:
        pairs = zip(x.shape, y.shape, strict=True)
        shape = tuple(max(a, b) for a, b in pairs)
        return self.apply("arith.addi", self.spread(x, shape), self.spread(y, shape))

    def pointers(
        self, view: View, spots: Sequence[tuple[Dim, Val]], shape: Sequence[int]
    ) -> Val:
        kind = view.pointer.elem
        pointer = view.pointer
        if view.offset != 0:
            offset = self.scalar(view.offset, view.wide)
            text = f"tt.addptr {pointer}, {offset} : {kind}, {offset.type}"
            pointer = self.let(text, (), kind)
        if not shape:
            for dim, spot in spots:  # a scalar gathered by a scalar index
                step = self.scaled("arith.muli", spot, dim.stride)
                text = f"tt.addptr {pointer}, {step} : {kind}, {step.type}"
                pointer = self.let(text, (), kind)
            return pointer
        tile: Val | None = None
        for dim, spot in spots:
            if view.wide:
                spot = self.convert("arith.extsi", spot, "i64")
            if dim.stride != 1:
                spot = self.scaled("arith.muli", spot, dim.stride)
            tile = spot if tile is None else self.added(tile, spot)
        pointer = self.spread(pointer, shape)
        if tile is None:
            return pointer
        tile = self.spread(tile, shape)
        to = type_text(shape, kind)
        text = f"tt.addptr {pointer}, {tile} : {to}, {tile.type}"
        return self.let(text, shape, kind)

    # --- accesses ---

    def emit_load(self, op: Op) -> None:
        access = Access.of(op)
        tile = op.result.tile
        self.layout(tile, op)
        place = self.place(op, access, tile.shape)
        elem = place.view.pointer.elem[len("!tt.ptr<") : -1]
        user = None if access.mask is None else self.env[access.mask]
        other = None if access.other is None else self.env[access.other]
        fill = place.view.fill if place.view.edges else None
        # Past the array's edge reads `fill`, even where the author masks with `other`.
        apart = other is not None and fill is not None
        mask = self.both(place.mask, user)
        text, operands = f"tt.load {place.pointers}", ""
        if mask is not None:
            mask = self.spread(mask, place.shape)
            outside = self.const(fill or 0, elem, place.shape)
            if other is not None and not apart:
                outside = self.to_memory(other)
            operands = f", {mask}, {outside}"
        pointer_type = type_text(place.shape, place.view.pointer.elem)
        # Triton merges equal loads, and then keeps what they load in between.
        again = " {isVolatile = true}" if op.attrs.get(AGAIN) else ""
        loaded = self.let(
            f"{text}{operands}{again} : {pointer_type}",
            place.shape,
            elem,
            shared=False,
        )
        result = self.from_memory(loaded, place.view.dtype)
        if apart and user is not None and other is not None:
            result = self.select(user, result, other)
        self.env[op.result] = result

    def emit_store(self, op: Op) -> None:
        access = Access.of(op)
        assert access.value is not None
        place = self.place(op, access, access.value.tile.shape)
        user = None if access.mask is None else self.env[access.mask]
        value = self.to_memory(self.env[access.value])
        mask = self.both(place.mask, user)
        operands = f"{place.pointers}, {value}"
        if mask is not None:
            operands += f", {self.spread(mask, place.shape)}"
        pointer_type = type_text(place.shape, place.view.pointer.elem)
        with self.between_fences(place.view):
            self.out.line(f"tt.store {operands} : {pointer_type}")

    @contextlib.contextmanager
    def between_fences(self, view: View) -> Iterator[None]:
        """Around a write: barriers between all threads, before and after."""
        needed = view.memory in self.fenced
        if needed:
            self.out.line(FENCE)
        yield
        if needed:
            self.out.line(FENCE)

    def to_memory(self, x: Val) -> Val:
        return self.convert("arith.extui", x, "i8") if x.elem == "i1" else x

    def from_memory(self, x: Val, dtype: DType) -> Val:
        return self.compare("ne", x, self.like(0, x)) if dtype.is_bool else x

    def bits(self, x: Val, elem: str) -> Val:
        """The same bits as another type of equal width."""
        if x.elem == elem:
            return x
        to = type_text(x.shape, elem)
        return self.let(f"tt.bitcast {x} : {x.type} -> {to}", x.shape, elem)

    def retyped(self, pointers: Val, elem: str) -> Val:
        """Pointers to elements of another type."""
        return self.bits(pointers, f"!tt.ptr<{elem}>")

    def numbers(self, place: "Place") -> Val:
        """The number of each element of an access in its array."""
        view, shape = place.view, place.shape
        numbers = self.spread(self.scalar(view.offset, view.wide), shape)
        for dim, spot in place.spots:
            if view.wide:
                spot = self.convert("arith.extsi", spot, "i64")
            step = self.spread(self.scaled("arith.muli", spot, dim.stride), shape)
            numbers = self.apply("arith.addi", numbers, step)
        return numbers

    def elements_at(self, pointer: Val, numbers: Val) -> Val:
        """Pointers to the elements with these numbers, counted from a pointer."""
        base = self.spread(pointer, numbers.shape)
        text = f"tt.addptr {base}, {numbers} : {base.type}, {numbers.type}"
        return self.let(text, numbers.shape, pointer.elem)


RULES = {
    **strided_views.RULES,
    "bitcast_view": Memory.emit_bitcast_view,
    "load": Memory.emit_load,
    "store": Memory.emit_store,
}


@dataclass(frozen=True)
class Place:
    """The target of an access."""

    pointers: Val
    mask: Val | None
    shape: tuple[int, ...]
    view: View
    spots: tuple[tuple[Dim, Val], ...]  # positions along dimensions that are tiles
