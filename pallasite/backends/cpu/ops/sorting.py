"""sort: a bitonic network over one row at a time, its keys as integers.

Besides the keys the network moves only positions: they are the last key, which makes
the order total and the sort stable, and at the end they tell where the operands'
elements come from. Steps between the lanes of a vector run in registers, several in a
row; the others exchange two vectors in memory.
"""

from collections.abc import Callable, Sequence

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm import scalars, vector_loops
from pallasite.backends.cpu.llvm.values import Lanes, vector
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.backends.cpu.tiles.tiles import Tile
from pallasite.ir.nodes import Op
from pallasite.ir.types import I32, I64, DType


def emit_sort(e: Emitter, op: Op) -> None:
    f, axis = e.f, op.attrs["axis"]
    operands = [e.stored(e.tile(v)) for v in op.operands]
    results = [Tile(v.tile.shape, v.tile.dtype, e.lasting(v)) for v in op.results]
    shape = operands[0].shape
    keys = operands[: op.attrs["num_keys"]]
    network = Network(e, [key_dtype(x.dtype) for x in keys], shape[axis])
    with f.nest([n for d, n in enumerate(shape) if d != axis]) as others:
        along = lambda place: [*others[:axis], place, *others[axis:]]

        def keys_at(lanes: Val) -> list[Val]:
            return [as_key(f, x.dtype, x.at(f, along(lanes))) for x in keys]

        def leave(lanes: Val) -> None:
            place = f.convert("sext", network.load(lanes)[-1], "i64")
            for x, result in zip(operands, results, strict=True):
                assert result.buffer is not None
                value = x.at(f, along(place))
                address = result.buffer.address(f, x.dtype, along(lanes))
                scalars.store(f, x.dtype, value, address)

        network.sort(keys_at)
        vector_loops.along_lanes(f, shape[axis], leave)
    for value, result in zip(op.results, results, strict=True):
        e.define(value, result)


def key_dtype(dtype: DType) -> DType:
    return I64 if dtype.bits == 64 else I32


def as_key(f: Function, dtype: DType, value: Val) -> Val:
    """A signed integer in sort order: zeros are equal, NaN is above all."""
    wide = key_dtype(dtype)
    type, greatest = scalars.register(wide), (1 << (wide.bits - 1)) - 1
    if not dtype.is_float:
        if dtype.is_bool or dtype.bits < 32:
            return scalars.cast(f, value, dtype, wide)
        lowest = integer(-greatest - 1, type)
        return value if dtype.is_signed_int else f.binary("xor", value, lowest)
    zero, is_nan = scalars.zero(dtype), f.compare("fcmp uno", value, value)
    value = f.select(f.compare("fcmp oeq", value, zero), zero, value)
    bits = f.convert("bitcast", value, type)
    reversed_ = f.binary("xor", bits, integer(greatest, type))
    negative = f.compare("icmp slt", bits, integer(0, type))
    key = f.select(negative, reversed_, bits)
    return f.select(is_nan, integer(greatest, type), key)


class Network:
    """Lists in memory, padded to a power of two: keys, with positions as the last."""

    def __init__(self, e: Emitter, dtypes: Sequence[DType], n: int):
        self.f, self.n, self.count = e.f, n, vector_loops.width()
        self.size = max(self.count, 1 << max(n - 1, 0).bit_length())
        self.dtypes = [*dtypes, I32]
        self.lists = [e.temporary((self.size,), dtype) for dtype in self.dtypes]

    def load(self, lanes: Val) -> list[Val]:
        pairs = zip(self.lists, self.dtypes, strict=True)
        return [
            scalars.load(self.f, d, x.address(self.f, d, [lanes])) for x, d in pairs
        ]

    def store(self, lanes: Val, values: Sequence[Val]) -> None:
        for x, dtype, value in zip(self.lists, self.dtypes, values, strict=True):
            scalars.store(self.f, dtype, value, x.address(self.f, dtype, [lanes]))

    def _store_last(self) -> None:
        """Past the row's end, keys that sort last: ties are broken by position."""
        f, full = self.f, self.n // self.count
        with f.loop(integer(self.size // self.count - full)) as loop:
            first = f.mul(f.add(integer(full), loop.index), integer(self.count))
            last = [(1 << (d.bits - 1)) - 1 for d in self.dtypes]
            types = [scalars.register(d) for d in self.dtypes]
            values = [integer(n, t) for n, t in zip(last, types, strict=True)]
            self.store(Lanes(first, self.count), values)

    def sort(self, keys_at: Callable[[Val], Sequence[Val]]) -> None:
        """Fill the lists with a row's keys and sort them."""

        def enter(lanes: Val) -> None:
            place = self.f.convert("trunc", lanes, "i32")
            self.store(lanes, [*keys_at(lanes), place])

        self._store_last()
        vector_loops.along_lanes(self.f, self.n, enter)
        self._run()

    def _run(self) -> None:
        """Sort runs of 2, 4, 8, ... elements, every other one in descending order."""
        f, bits = self.f, (self.count - 1).bit_length()
        short = [1 << n for n in range(1, bits + 1)]
        self._within_vectors([(integer(run), run // 2) for run in short])
        stages = (self.size // self.count - 1).bit_length()
        with f.loop(integer(stages)) as stage:
            run = f.binary("shl", integer(2 * self.count), stage.index)
            with f.loop(f.add(stage.index, integer(1))) as step:
                half = f.binary("lshr", run, integer(1))
                self._between_vectors(run, f.binary("lshr", half, step.index))
            self._within_vectors([(run, self.count // 2)])

    def _between_vectors(self, run: Val, distance: Val) -> None:
        f = self.f
        with f.loop(integer(self.size // self.count // 2)) as loop:
            half = f.mul(loop.index, integer(self.count))
            inside = f.binary("and", half, f.sub(distance, integer(1)))
            first = f.sub(f.mul(half, integer(2)), inside)
            places = [Lanes(n, self.count) for n in (first, f.add(first, distance))]
            low, high = (self.load(lanes) for lanes in places)
            swap = f.binary("xor", self._less(high, low), self._falls(first, run))
            for lanes, x, y in ((places[0], low, high), (places[1], high, low)):
                pairs = zip(x, y, strict=True)
                self.store(lanes, [f.select(swap, b, a) for a, b in pairs])

    def _within_vectors(self, merges: Sequence[tuple[Val, int]]) -> None:
        """For each run, the steps of `distance` and its halves, one after another."""
        f = self.f
        with f.loop(integer(self.size // self.count)) as loop:
            first = f.mul(loop.index, integer(self.count))
            lanes = Lanes(first, self.count)
            values = self.load(lanes)
            for run, distance in merges:
                falls = self._falls(first, run)
                while distance:
                    values = self._step(values, distance, falls)
                    distance //= 2
            self.store(lanes, values)

    def _step(self, values: list[Val], distance: int, falls: Val) -> list[Val]:
        f = self.f
        partners = [vector_loops.exchanged(f, x, distance) for x in values]
        is_upper = [bool(n & distance) for n in range(self.count)]
        takes_larger = f.binary("xor", falls, _lanes(is_upper))
        swap = f.binary("xor", self._less(partners, values), takes_larger)
        pairs = zip(values, partners, strict=True)
        return [f.select(swap, y, x) for x, y in pairs]

    def _falls(self, first: Val, run: Val) -> Val:
        """The lanes of runs that are sorted in descending order."""
        f, constant = self.f, run.constant
        if constant is not None and constant < self.count:
            return _lanes([bool(n & constant) for n in range(self.count)])
        bit = f.binary("and", first, run)
        return f.splat(f.compare("icmp ne", bit, integer(0)), self.count)

    def _less(self, left: Sequence[Val], right: Sequence[Val]) -> Val:
        """Lexicographic."""
        f = self.f
        result = f.compare("icmp slt", left[-1], right[-1])
        for x, y in zip(left[-2::-1], right[-2::-1], strict=True):
            less, equal = f.compare("icmp slt", x, y), f.compare("icmp eq", x, y)
            result = f.binary("or", less, f.binary("and", equal, result))
        return result


def _lanes(on: Sequence[bool]) -> Val:
    listed = ", ".join(f"i1 {'true' if x else 'false'}" for x in on)
    return Val(vector("i1", len(on)), f"<{listed}>")


RULES = {"sort": emit_sort}
