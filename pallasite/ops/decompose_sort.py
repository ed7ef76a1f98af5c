"""Sorting by a bitonic network: compare and exchange at constant distances.

Floats are compared as integers of the same order; the position is the last key, which
makes the order total and the sort stable. The few largest elements are found one by
one, without sorting the rest.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import I32, I64, INDEX, DType
from pallasite.ops.decompose_tile import (
    filled,
    lengthened,
    next_power_of_two,
    positions,
    take_range,
)
from pallasite.ops.formula import (
    FORMATS,
    NAN,
    Expr,
    Format,
    bits,
    float_formula,
    format_of,
    formula,
    where,
)
from pallasite.ops.neutral import neutral


def sort(
    b: Builder, *operands: Value, axis: int, num_keys: int, stable: bool
) -> tuple[Value, ...]:
    """Ascending by the first `num_keys` operands, NaN last."""
    n = operands[0].tile.shape[axis]
    size = next_power_of_two(n)
    padded = [lengthened(b, x, axis, size) for x in operands]
    place = positions(b, padded[0], axis)
    keys = [_sort_key(b, x) for x in padded[:num_keys]]
    if size > n:  # padding sorts last
        keys.insert(0, b.cast(b.ge(place, b.like(n, place)), I32))
    network = _Network(b, axis, size, place)
    rows = network.run([*keys, place, *padded], len(keys) + 1)
    return tuple(take_range(b, x, axis, 0, n) for x in rows[len(keys) + 1 :])


class _Network:
    def __init__(self, b: Builder, axis: int, size: int, place: Value):
        self.b, self.axis, self.size, self.place = b, axis, size, place

    def run(self, rows: list[Value], num_keys: int) -> list[Value]:
        run = 2
        while run <= self.size:
            distance = run // 2
            while distance:
                rows = self.step(rows, num_keys, run, distance)
                distance //= 2
            run *= 2
        return rows

    def step(
        self, rows: list[Value], num_keys: int, run: int, distance: int
    ) -> list[Value]:
        """Order each pair `distance` apart; ascending in every other run."""
        b = self.b
        apart = {"axis": self.axis, "distance": distance}
        partners = [b.op("exchange", x, **apart) for x in rows]
        is_less = self.less(partners[:num_keys], rows[:num_keys])
        # The lower of an ascending pair takes the smaller, and so on: keys differ.
        wants_smaller = b.eq(self.clear(distance), self.clear(run))
        swap = b.eq(is_less, wants_smaller)
        return [b.select(swap, y, x) for x, y in zip(rows, partners, strict=True)]

    def clear(self, bit: int) -> Value:
        """Where a bit of the position is clear."""
        b, place = self.b, self.place
        return b.eq(b.and_(place, b.like(bit, place)), b.like(0, place))

    def less(self, left: Sequence[Value], right: Sequence[Value]) -> Value:
        """Lexicographic."""
        b = self.b
        result = b.lt(left[-1], right[-1])
        for x, y in zip(left[-2::-1], right[-2::-1], strict=True):
            result = b.or_(b.lt(x, y), b.and_(b.eq(x, y), result))
        return result


def _sort_key(b: Builder, x: Value) -> Value:
    if x.tile.dtype.is_bool:
        return b.cast(x, I32)
    return _float_key(b, x) if x.tile.dtype.is_float else x


@float_formula
def _float_key(x: Expr) -> Expr:
    """An integer in the order of floats: zeros are equal, NaN is above all."""
    x = where(x.eq(x), where(x.eq(0.0), 0.0, x), NAN)
    return _reverse_negative(bits(x), format_of(x))


# --- the largest ---


def top_k(b: Builder, x: Value, *, axis: int, k: int) -> tuple[Value, ...]:
    """By integers in the order of the elements, which are then converted back."""
    own = x.tile.dtype
    if own not in (I32, I64):
        keys, places = b.emit("top_k", _ordered(b, x), axis=axis, k=k)
        return _from_ordered(b, keys, own), places
    bits_of_place = next_power_of_two(x.tile.shape[axis]).bit_length() - 1
    steps = bits_of_place * (bits_of_place + 1) // 2
    # Finding one costs about as much as a step of the network.
    return (_one_by_one if k <= steps else _first_sorted)(b, x, axis, k)


def _first_sorted(b: Builder, x: Value, axis: int, k: int) -> tuple[Value, ...]:
    operands = b.not_(x), positions(b, x, axis)
    rows = b.emit("sort", *operands, axis=axis, num_keys=1, stable=True)
    falling, places = (take_range(b, v, axis, 0, k) for v in rows)
    return b.not_(falling), places


def _one_by_one(b: Builder, x: Value, axis: int, k: int) -> tuple[Value, ...]:
    """Find the maximum and its first position; strike it out; repeat.

    A struck element becomes the minimum of the type. Elements that had this value from
    the start differ by position: struck ones have none, that is, the row's length.
    """
    n, shape = x.tile.shape[axis], x.tile.shape
    none = filled(b, x, axis, k, 0)
    results = none, b.like(0, positions(b, none, axis))
    round_, state = Value(INDEX, "round"), [x, positions(b, x, axis), *results]
    rest, place, keys, places = params = [Value(v.type) for v in state]
    inside = Builder(b.loc)

    def spread(v: Value, shape: Sequence[int]) -> Value:
        dims = [d for d in range(len(shape)) if d != axis]
        return inside.broadcast(v, shape, dims)

    best = inside.reduce(rest, kind="max", axes=(axis,))
    hit = inside.eq(rest, spread(best, shape))
    where_hit = inside.select(hit, place, inside.like(n, place))
    first = inside.reduce(where_hit, kind="min", axes=(axis,))
    struck = inside.eq(place, spread(first, shape))
    least = inside.like(neutral("max", x.tile.dtype), rest)
    column = positions(inside, keys, axis)
    now = inside.eq(column, inside.broadcast(inside.cast(round_, I32), keys.tile.shape))
    yields = (
        inside.select(struck, least, rest),
        inside.select(struck, inside.like(n, place), place),
        inside.select(now, spread(best, keys.tile.shape), keys),
        inside.select(now, spread(first, keys.tile.shape), places),
    )
    body = inside.block([round_, *params], yields)
    limits = [b.index(v) for v in (0, k, 1)]
    return b.emit("for", *limits, *state, regions=(body,))[2:]


def _ordered(b: Builder, x: Value) -> Value:
    """A signed integer of 32 or 64 bits in the order of the elements."""
    dtype = x.tile.dtype
    if dtype.is_float:
        return _total_order(b, x)
    if dtype.is_bool or dtype.bits < 32:
        return b.cast(x, I32)
    return _flip_sign(b, b.bitcast(x, dtype=I32 if dtype.bits == 32 else I64))


def _from_ordered(b: Builder, keys: Value, dtype: DType) -> Value:
    """The inverse of `_ordered`."""
    if dtype.is_float:
        return b.cast(_float_of_order(b, keys), dtype)
    if dtype.is_bool or dtype.bits < 32:
        return b.cast(keys, dtype)
    return b.bitcast(_flip_sign(b, keys), dtype=dtype)


@float_formula
def _total_order(x: Expr) -> Expr:
    """Negative floats are in the reverse order of their bits."""
    return _reverse_negative(bits(x), format_of(x))


@formula
def _float_of_order(key: Expr) -> Expr:
    dtype, layout = next((d, v) for d, v in FORMATS.items() if v.integer == key.dtype)
    return _reverse_negative(key, layout).bitcast(dtype)


def _reverse_negative(pattern: Expr, layout: Format) -> Expr:
    return where(pattern < 0, pattern ^ ~layout.sign_mask, pattern)


def _flip_sign(b: Builder, x: Value) -> Value:
    return b.xor(x, b.like(-1 << (x.tile.dtype.bits - 1), x))
