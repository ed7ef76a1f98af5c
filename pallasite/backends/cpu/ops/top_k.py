"""top_k: a row is read once, maintaining a list of the largest elements so far.

Most elements are no larger than the last of the list, and one comparison skips a vector
of them. A larger one is inserted and shifts those after it: about k * log(n / k)
insertions for random rows. A sample of the row is processed before the rest, so that an
ascending row does not insert every element. For large k all are sorted.
"""

from collections.abc import Callable, Sequence
from math import isqrt

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm import scalars, vector_loops
from pallasite.backends.cpu.llvm.values import Lanes
from pallasite.backends.cpu.llvm.writer import TRUE, Val, integer
from pallasite.backends.cpu.ops import sorting
from pallasite.backends.cpu.tiles import tiles
from pallasite.backends.cpu.tiles.tiles import Buffer, Tile
from pallasite.ir.nodes import Op
from pallasite.ir.types import I32, I64, DType

# A longer list, or one of more than 1 / PART of a row, costs more than sorting.
MOST, PART = 256, 16


def has_top_k(op: Op) -> bool:
    """Whether the op is native; other types are decomposed."""
    return op.operands[0].tile.dtype in (I32, I64)


def emit_top_k(e: Emitter, op: Op) -> None:
    f, axis, k = e.f, op.attrs["axis"], op.attrs["k"]
    tile = e.tile(op.operands[0])
    n = tile.shape[axis]
    results = [Tile(v.tile.shape, v.tile.dtype, e.lasting(v)) for v in op.results]
    by_list = 0 < k <= min(MOST, n // PART)
    best = _Largest(e, tile.dtype, k) if by_list else _Sorted(e, tile.dtype, n)
    with f.nest([n for d, n in enumerate(tile.shape) if d != axis]) as others:
        along = lambda place: [*others[:axis], place, *others[axis:]]
        best.look_through(lambda place: tile.at(f, along(place)), n)

        def leave(lanes: Val) -> None:
            for result, value in zip(results, best.found(lanes), strict=True):
                assert result.buffer is not None
                address = result.buffer.address(f, result.dtype, along(lanes))
                scalars.store(f, result.dtype, value, address)

        vector_loops.along_lanes(f, k, leave)
    for value, result in zip(op.results, results, strict=True):
        e.define(value, result)


class _Sorted:
    """All elements in descending order: their complements sorted."""

    def __init__(self, e: Emitter, dtype: DType, n: int):
        self.f, self.network = e.f, sorting.Network(e, [dtype], n)
        self.ones = integer(-1, scalars.register(dtype))

    def look_through(self, at: Callable[[Val], Val], n: int) -> None:
        self.network.sort(lambda lanes: [self.f.binary("xor", at(lanes), self.ones)])

    def found(self, lanes: Val) -> list[Val]:
        key, place = self.network.load(lanes)
        return [self.f.binary("xor", key, self.ones), place]


class _Largest:
    """The list, in descending order: elements and positions, in full vectors."""

    def __init__(self, e: Emitter, dtype: DType, k: int):
        self.e, self.dtype, self.k, self.count = e, dtype, k, vector_loops.width()
        self.vectors = -(-k // self.count)
        self.keys, self.places = self._list_of(dtype), self._list_of(I32)
        self.least = integer(-1 << (dtype.bits - 1), scalars.register(dtype))

    def _list_of(self, dtype: DType) -> Buffer:
        """Memory of a list, with one vector of padding before it."""
        size = (self.vectors + 1) * self.count
        memory, type = self.e.temporary((size,), dtype), scalars.memory(dtype)
        first = self.e.f.element(memory.pointer, type, integer(self.count))
        return Buffer(first, (integer(1),))

    def look_through(self, at: Callable[[Val], Val], n: int) -> None:
        """Make it the list of a row; `at` gives the elements at a position."""
        f, count = self.e.f, self.count
        self._clear()
        start = min(n, self.vectors * count)
        with f.loop(integer(start)) as loop:
            self._insert(at(loop.index), loop.index)
        full, rest = divmod(n - start, count)
        if full:
            with f.loop(integer(full)) as loop:
                number = self._sample_first(loop.index, full)
                first = f.add(integer(start), f.mul(number, integer(count)))
                self._insert_larger(at(Lanes(first, count)), first)
        if rest:
            start += full * count
            with vector_loops.last_lanes(f, start, rest) as lanes:
                x = f.splat(at(lanes), lanes.count)
                x = x if f.mask is None else f.select(f.mask, x, self.least)
            self._insert_larger(x, integer(start))

    def _sample_first(self, step: Val, vectors: int) -> Val:
        """The vector to process next: the first of each group, then the others.

        For an ascending row, only the sample and the groups of the largest are
        inserted.
        """
        f, size = self.e.f, isqrt(vectors * self.count // (self.k + self.count))
        if size < 2:
            return step
        groups = integer(vectors // size)
        others = f.sub(step, groups)
        left_out = f.add(f.binary("udiv", others, integer(size - 1)), integer(1))
        number = f.add(others, f.least(left_out, groups))
        sampled = f.compare("icmp slt", step, groups)
        return f.select(sampled, f.mul(step, integer(size)), number)

    def _clear(self) -> None:
        """Positions after all others, so that even the least element precedes them."""
        bits, size = self.dtype.bits, self.vectors * self.count
        greatest = integer((1 << (bits - 1)) - 1, scalars.register(self.dtype))
        start = [(self.keys, self.dtype, self.least, greatest)]
        start += [(self.places, I32, integer(2**31 - 1, "i32"), integer(-1, "i32"))]
        for buffer, dtype, empty, above in start:
            self.e.fill(buffer, tiles.splat((size,), dtype, empty))
            lanes = [Lanes(integer(-self.count), self.count)]
            address = buffer.address(self.e.f, dtype, lanes)
            scalars.store(self.e.f, dtype, above, address)

    def _insert_larger(self, x: Val, first: Val) -> None:
        """Insert the elements of a vector that precede the list's last."""
        f, count = self.e.f, x.count
        if not count:
            self._insert(x, first)
            return
        bits, before = self._larger(x, first), f.block
        head, inside, done = f.labels("look", "put", "seen")
        f.branch(head)
        f.label(head)
        (phi,) = f.open_phis([bits.type])
        left = phi[0]
        some = f.compare("icmp ne", left, integer(0, bits.type))
        f.branch_if(some, inside, done)
        f.label(inside)
        lane = f.convert("zext", f.intrinsic("cttz", left, TRUE), "i64")
        key = f.pure(scalars.register(self.dtype), f"extractelement {x}, {lane}")
        self._insert(key, f.add(first, lane))
        others = f.binary("and", left, f.binary("sub", left, integer(1, bits.type)))
        left = f.binary("and", others, self._larger(x, first))
        f.close_phi(phi, [(bits, before), (left, f.block)])
        f.branch(head)
        f.label(done)

    def _larger(self, x: Val, first: Val) -> Val:
        """The lanes that precede the last of the list, as bits.

        Equal ones do if the last is from a later vector. If it is from this vector, its
        lane has already been inserted.
        """
        f, count = self.e.f, x.count
        key, place = self.found(integer(self.k - 1))
        vector_end = f.add(first, integer(count - 1))
        is_later = f.compare("icmp sgt", f.convert("sext", place, "i64"), vector_end)
        larger, equal_too = (
            f.pure(
                f"i{count}", f"bitcast {f.compare(f'icmp {test}', x, key)} to i{count}"
            )
            for test in ("sgt", "sge")
        )
        return f.select(is_later, equal_too, larger)

    def _insert(self, key: Val, place: Val) -> None:
        """Insert one element; those after it are shifted, starting at the end."""
        f, count = self.e.f, integer(self.count)
        place = f.convert("trunc", place, "i32")
        with f.loop(integer(self.vectors)) as loop:
            number = f.sub(integer(self.vectors - 1), loop.index)
            first = f.mul(number, count)
            starts = first, f.sub(first, count)
            here, above = (self.found(Lanes(n, self.count)) for n in starts)
            # Loads across the boundary of two vectors would have to wait for the stores
            # of the previous insertion.
            before = [
                vector_loops.shifted(f, x, 1, last, down=False)
                for x, last in zip(here, above, strict=True)
            ]
            stays = self._is_before(here, key, place)
            follows = self._is_before(before, key, place)
            lists = ((self.keys, self.dtype, key), (self.places, I32, place))
            for (buffer, dtype, new), old, moved in zip(
                lists, here, before, strict=True
            ):
                value = f.select(stays, old, f.select(follows, new, moved))
                address = buffer.address(f, dtype, [Lanes(first, self.count)])
                scalars.store(f, dtype, value, address)

    def found(self, lanes: Val) -> list[Val]:
        """Elements and their positions, at some places of the list."""
        f, lists = self.e.f, ((self.keys, self.dtype), (self.places, I32))
        return [scalars.load(f, d, x.address(f, d, [lanes])) for x, d in lists]

    def _is_before(self, listed: Sequence[Val], key: Val, place: Val) -> Val:
        """Whether those of the list precede an element."""
        f, (keys, places) = self.e.f, listed
        first = f.compare("icmp slt", places, place)
        equal = f.binary("and", f.compare("icmp eq", keys, key), first)
        return f.binary("or", f.compare("icmp sgt", keys, key), equal)


RULES = {"top_k": emit_top_k}
