"""Loads and stores: views (`backends/strided_views.py`) as C++ expressions.

Every access skips padding and what is out of range, so nothing out of bounds is
touched. Vectors of up to 16 bytes move at once where every term of the address is known
to be a multiple of their length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from pallasite.backends import strided_views
from pallasite.backends.cuda.core import VECTOR_BYTES, Tile
from pallasite.backends.cuda.layouts import Spread
from pallasite.backends.cuda.streams import AHEAD, ONCE
from pallasite.backends.cuda.text import c_type, number
from pallasite.backends.cuda.tiles import Tiles
from pallasite.backends.strided_views import Dim, Edge, StridedViews, dims_of
from pallasite.ir.nodes import Access, At, Gather, Op, Span, Value
from pallasite.ir.types import RefType
from pallasite.passes.analysis.intervals import HIGHEST
from pallasite.passes.analysis.masks import Positions, Sum


@dataclass(frozen=True)
class Term:
    """An integer of the emitted code, and a known divisor."""

    text: str
    multiple: int = 1


Number = int | Term


def text_of(x: Number) -> str:
    return str(x) if isinstance(x, int) else x.text


def multiple_of(x: Number) -> int:
    return abs(x) if isinstance(x, int) else x.multiple


def plus(x: Number, y: Number) -> Number:
    if isinstance(x, int) and isinstance(y, int):
        return x + y
    if x == 0:
        return y
    if y == 0:
        return x
    divisor = gcd(multiple_of(x), multiple_of(y))
    return Term(f"{text_of(x)} + {text_of(y)}", divisor)


def nearest(text: str, size: int) -> str:
    """A position clamped to a dimension of a size."""
    return f"min(max({text}, 0), {size - 1})"


def times(x: Number, factor: int, wide: bool = False) -> Number:
    if isinstance(x, int):
        return x * factor
    if factor == 0:
        return 0
    cast = "(i64)" if wide else ""
    if factor == 1 and not wide:
        return x
    return Term(f"{cast}({x.text}) * {factor}", x.multiple * factor)


@dataclass(frozen=True)
class View(strided_views.View[Term]):
    """A ref in the emitted code; its pointer is an expression."""

    starts: tuple[Number, ...] = ()  # its first element along the array's dimensions


@dataclass(frozen=True)
class Spot:
    """Positions along one dimension of a view."""

    dim: Dim
    along: int | Tile  # an axis of the accessed tile, or positions from an index array
    stride: int = 1
    first: Number = 0
    nearest: bool = False  # past the edge, read the nearest element


@dataclass(frozen=True)
class Place:
    """The target of an access, as expressions of a register number."""

    view: View
    spread: Spread | None
    spots: tuple[Spot, ...]
    tests: tuple[str, ...]  # with `{n}` for the position at spot n


class Memory(Tiles, StridedViews[View, Term]):
    """Emits views, loads and stores."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[Value, View] = {}
        self.fenced: set[Value] = set()  # memory that is written and read again

    def array(self, ref: RefType, pointer: str, memory: Value | None) -> View:
        """A whole array, row-major."""
        return View(
            pointer,
            ref.dtype,
            offset=0,
            dims=dims_of(ref),
            wide=ref.size >= 1 << 31,
            memory=memory,
            starts=(0,) * ref.rank,
        )

    # --- numbers ---

    def whole_number(self, value: Value) -> Number:
        fact = self.facts.of(value)
        if fact.number is not None:
            return fact.number
        name, dtype = self.env[value].name, value.tile.dtype
        low, high = -(1 << 31), (1 << 31) - 1
        if dtype.bits == 64 and dtype.is_signed_int:
            name = f"(int)min(max({name}, (i64){low}), (i64){high})"
        elif dtype.bits == 64 or dtype.name == "u32":
            name = f"(int)min({name}, ({c_type(dtype)}){high})"
        return Term(name, max(fact.multiple, 1))

    def plus(self, x: Number, y: Number, wide: bool = False) -> Number:
        return plus(x, y)  # C++ widens the narrower one

    def times(self, x: Number, factor: int, wide: bool = False) -> Number:
        return times(x, factor, wide)

    def at_most(self, x: Number, limit: int) -> Number:
        if isinstance(x, int):
            return min(x, limit)
        return Term(f"min({x.text}, {limit})")

    def stepped(self, view: View, dim: Dim, start: Number, multiple: int) -> View:
        starts = list(view.starts)
        starts[dim.axis] = plus(starts[dim.axis], times(start, dim.step))
        view = super().stepped(view, dim, start, multiple)
        return replace(view, starts=tuple(starts))

    # --- where an access goes ---

    def start(
        self, entry: At | Span, operand: Value | None, size: int, clamp: bool
    ) -> Number:
        if operand is None:
            assert entry.start is not None
            return entry.start
        last = size - (entry.extent if isinstance(entry, Span) else 1)
        start, fact = self.whole_number(operand), self.facts.of(operand)
        if isinstance(start, int):
            return min(max(start, 0), last) if clamp else start
        text, multiple = start.text, start.multiple
        if not clamp:  # far outside is as good as just outside, and cannot wrap around
            past = fact.high + size - last > HIGHEST
            return Term(f"min({text}, {size})") if past else start
        if fact.low < 0:
            text = f"max({text}, 0)"
        if fact.high > last:
            text, multiple = f"min({text}, {last})", gcd(multiple, last)
        return Term(text, multiple)

    def place(self, op: Op, access: Access, spread: Spread | None) -> Place:
        view = self.views[access.ref]
        clamp, reads = access.mask is None, op.name == "load"
        entries = access.split_index()
        axis = next(
            (len(v.tile.shape) for e, v in entries if isinstance(e, Gather) and v), 0
        )
        positions = Positions(self.facts, self.producers, access.mask)
        spots: list[Spot] = []
        tests: list[str] = []
        for dim, (entry, operand) in zip(view.dims, entries, strict=True):
            if isinstance(entry, Gather):
                assert operand is not None
                if not operand.tile.dtype.is_signed_int or operand.tile.dtype.bits > 32:
                    self.refuse(op, f"an index of dtype {operand.tile.dtype}")
                wanted = self.index_spread(spread, operand)
                index = self.get(operand, wanted, op)
                spots.append(Spot(dim, index, nearest=reads))
                if not reads:
                    tests.append(f"(u32){{{len(spots) - 1}}} < {dim.size}u")
                continue
            first = self.start(entry, operand, dim.size, clamp)
            spot, steps, step = None, Sum(), 1
            if isinstance(entry, Span):
                spot, step = Spot(dim, axis, entry.stride), entry.stride
                steps = positions.along(axis, entry.size)
                axis += 1
            if not clamp and operand is not None:
                fact = positions.range(positions.of(operand).plus(steps, step))
                is_inside = fact.within(0, dim.size - 1)
                if reads and not is_inside:  # element by element
                    if spot is None:
                        first = Term(nearest(text_of(first), dim.size))
                    else:
                        spot, first = replace(spot, first=first, nearest=True), 0
                elif not is_inside:
                    at = f" + {{{len(spots)}}}" if spot is not None else ""
                    tests.append(f"(u32)({text_of(first)}{at}) < {dim.size}u")
            view = self.shifted(view, dim, first)
            if spot is not None:
                spots.append(spot)
        tests += [self.inside_edge(key, edge, spots) for key, edge in view.edges]
        if any(dim.size == 0 for dim in view.dims):
            tests.append("false")  # there is no nearest element
        return Place(view, spread, tuple(spots), tuple(tests))

    def index_spread(self, spread: Spread | None, index: Value) -> Spread | None:
        if spread is None or not index.tile.shape:
            return None
        gone = range(len(index.tile.shape), len(spread.shape))
        return spread.without(list(gone))

    def inside_edge(self, key: int, edge: Edge, spots: Sequence[Spot]) -> str:
        """A test that an access stays inside the array along one of its dimensions."""
        terms = [] if edge.start == 0 else [text_of(edge.start)]
        for number_, spot in enumerate(spots):
            if spot.dim.edge == key:
                each = spot.dim.edge_step
                step = f" * {each}" if each > 1 else ""
                terms.append(f"{{{number_}}}{step}")
        position = " + ".join(terms) or "0"
        test = f"{position} < {text_of(edge.stop)}"
        return f"{position} >= 0 && {test}" if edge.below else test

    def spot_text(self, place: Place, spot: Spot, i: str) -> str:
        """The position of an element along a dimension of the view."""
        axis, size = spot.along, spot.dim.size
        if isinstance(axis, Tile):
            kept = None
            if axis.spread is not None and place.spread is not None:
                gone = range(len(axis.spread.shape), len(place.spread.shape))
                kept = place.spread.register_without(list(gone), i)
            at = axis.held(kept or i)
        else:
            assert place.spread is not None
            at = self.coordinate(place.spread, axis, i)
            at = at if spot.stride == 1 else f"({at}) * {spot.stride}"
            at = at if spot.first == 0 else f"{text_of(spot.first)} + {at}"
        return nearest(at, size) if spot.nearest else at

    def vector(self, place: Place, masked: bool) -> int:
        """How many consecutive elements move at once."""
        spread, view = place.spread, place.view
        most = VECTOR_BYTES // view.dtype.bytes
        if spread is None or masked or not spread.digits or not place.spots:
            return 1
        moving = [spot for spot in place.spots if spot.dim.size > 1]
        fastest = (moving or place.spots)[-1]
        dim, axis, stride = fastest.dim, fastest.along, fastest.stride
        wide = [d for d, size in enumerate(spread.shape) if size > 1]
        last = wide[-1] if wide else len(spread.shape) - 1
        inner = spread.digits[-1]
        contiguous = axis == last == inner.dim and inner.stride == stride == 1
        if not contiguous or dim.stride != 1:
            return 1
        known = gcd(most, inner.count, multiple_of(view.offset))
        known = gcd(known, spread.lane_multiple(last))
        known = gcd(known, *(d.stride for d in spread.digits[:-1] if d.dim == last))
        for other in place.spots:
            if isinstance(other.along, Tile):
                return 1
            if other is fastest or other.dim.size == 1:
                continue
            known = gcd(known, other.dim.stride * other.stride)
        if spread.has_padding(last):
            known = gcd(known, spread.shape[last])
        for key, edge in view.edges:
            if dim.edge == key:
                known = gcd(known, multiple_of(edge.start), multiple_of(edge.stop))
        return known & -known

    def address(self, place: Place, i: str) -> tuple[str, str]:
        """The pointer to an element, and the test that it may be accessed."""
        view = place.view
        spots = [self.spot_text(place, spot, i) for spot in place.spots]
        terms = []
        for spot, text in zip(place.spots, spots, strict=True):
            dim = spot.dim
            if text != "0" and dim.stride:
                cast = "(i64)" if view.wide else ""
                step = f" * {dim.stride}" if dim.stride != 1 or view.wide else ""
                terms.append(f"{cast}({text}){step}")
        tests = [test.format(*(f"({t})" for t in spots)) for test in place.tests]
        if place.spread is not None:
            dims = range(len(place.spread.shape))
            tests.insert(0, self.inside(place.spread, dims, i))
        offset = " + ".join(terms)
        return offset, " && ".join(t for t in tests if t)

    def based(self, place: Place, op: Op, const: bool) -> str:
        """A variable that points to the first element of a view."""
        view = place.view
        name = self.out.fresh("p")
        kind = self.type(view.dtype, op)
        offset = "" if view.offset == 0 else f" + ({text_of(view.offset)})"
        qualifier = "const " if const else ""
        self.out.line(f"{qualifier}{kind}* {name} = {view.pointer}{offset};")
        return name

    # --- accesses ---

    def emit_load(self, op: Op) -> None:
        access, tile = Access.of(op), op.result.tile
        spread = self.spread(op.result, op)
        place = self.place(op, access, spread)
        mask = None if access.mask is None else self.get(access.mask, spread, op)
        other = None if access.other is None else self.get(access.other, spread, op)
        result = self.declare(tile.dtype, spread, op, "x")
        if op.attrs.get(AHEAD):
            self.prefetch(op, place.view)
        pointer = self.based(place, op, const=True)
        count = self.vector(place, mask is not None)
        self.env[op.result] = result
        if count > 1:
            get = "get_once" if op.attrs.get(ONCE) else "get"
            self.load_vectors(place, pointer, result, count, get)
            return
        outside = self.outside(place.view)

        def element(i: str) -> str:
            offset, test = self.address(place, i)
            there = f"{pointer}[{offset or 0}]"
            spare = outside
            if mask is not None:
                test = " && ".join(t for t in (test, mask.held(i)) if t)
                if other is not None:
                    filled = place.view.edges and place.view.fill is not None
                    spare = other.held(i)
                    spare = (
                        f"({mask.held(i)} ? {outside} : {spare})" if filled else spare
                    )
            return f"{test} ? {there} : {spare}" if test else there

        self.put(result, element)

    def prefetch(self, op: Op, view: View) -> None:
        """Prefetch the block of a later program into the cache.

        Program n loads the n-th block of the array. The last may extend past its end
        and is then left out.
        """
        assert view.memory is not None
        elements, later = op.result.tile.size, self.out.fresh("later")
        whole_blocks = view.memory.ref.size // elements
        self.out.line(f"const i64 {later} = (i64)blockIdx.x + {op.attrs[AHEAD]};")
        where = f"{view.pointer} + {later} * {elements}"
        self.out.line(
            f"if (thread == 0 && {later} < {whole_blocks}) "
            f"prefetch({where}, {elements * view.dtype.bytes});"
        )

    def load_vectors(
        self, place: Place, pointer: str, result: Tile, count: int, get: str
    ) -> None:
        """Load several elements at once, or none where they are out of range."""
        words = 2 if result.is_packed else 1
        offset, test = self.address(place, f"i * {count}")
        source = f"{pointer} + {offset}" if offset else pointer
        to = f"{result.name} + i * {count // words}"
        move = f"{get}<{count * place.view.dtype.bytes}>({to}, {source});"
        if test:
            spare = self.outside(place.view)
            spare = f"(u32){spare} | (u32){spare} << 16" if words == 2 else spare
            loop = f'_Pragma("unroll") for (int k = 0; k < {count // words}; ++k)'
            target = f"{result.name}[i * {count // words} + k]"
            move = f"if ({test}) {move} else {loop} {target} = {spare};"
        self.out.line(f"EACH({result.registers // count}) {{ {move} }}")

    def outside(self, view: View) -> str:
        """What is read past the edge of the array, as it is held."""
        fill = view.fill if view.edges else None
        if not fill:
            return f"({c_type(view.dtype)})0"
        text = number(fill, view.dtype)
        return f"to_{view.dtype}({text})" if self.is_narrow(view.dtype) else text

    def emit_store(self, op: Op) -> None:
        access = Access.of(op)
        assert access.value is not None
        value = self.whole(access.value, op)
        spread = value.spread
        if spread is None and access.value.tile.shape:
            value = self.materialised(value, access.value, op)
            spread = value.spread
        place = self.place(op, access, spread)
        mask = None if access.mask is None else self.get(access.mask, spread, op)
        pointer = self.based(place, op, const=False)
        count = self.vector(place, mask is not None) if not value.is_computed else 1
        i = "0" if spread is None else "i" if count == 1 else f"i * {count}"
        offset, test = self.address(place, i)
        if count > 1:
            first = f"{value.name} + i * {count // (2 if value.is_packed else 1)}"
            to = f"{pointer} + {offset}" if offset else pointer
            put = "put_once" if op.attrs.get(ONCE) else "get"
            move = f"{put}<{count * place.view.dtype.bytes}>({to}, {first});"
        else:
            move = f"{pointer}[{offset or 0}] = {value.held(i)};"
        tests = [t for t in (test, mask.held(i) if mask else "") if t]
        statement = f"if ({' && '.join(tests)}) {move}" if tests else move
        if spread is not None:
            statement = f"EACH({spread.registers // count}) {{ {statement} }}"
        only = self.is_first_copy(spread)
        is_fenced = place.view.memory in self.fenced
        if is_fenced:
            self.sync()
        self.out.line(f"if ({only}) {statement}" if only else statement)
        if is_fenced:
            self.sync()

    def materialised(self, tile: Tile, value: Value, op: Op) -> Tile:
        """A uniform tile as one with registers."""
        result = self.declare(tile.dtype, self.default_spread(value), op)
        self.copy(result, tile)
        return result

    def default_spread(self, value: Value) -> Spread:
        raise AssertionError(value)  # emit.py knows the number of threads


RULES = {
    **strided_views.RULES,
    "load": Memory.emit_load,
    "store": Memory.emit_store,
}
