"""Patterns on values: constant folding by the rows' meaning, and exact identities.

Only bit-exact rewrites are here: `x + 0` for integers, but `x + -0.0` for floats.
`canonicalize.py` applies the table; `views.py` has the patterns on refs.
"""

from collections.abc import Callable
from fractions import Fraction
from math import isfinite, prod

import numpy as np

from pallasite.ir.build import Scalar, python_scalar
from pallasite.ir.nodes import Op, Value
from pallasite.ir.opdef import names, table
from pallasite.ir.rewrite import Pattern, Rewriter
from pallasite.ir.text import attr_text
from pallasite.ir.types import DType, TileType

# Wide enough to represent every value of the narrower floats, including signs and NaN.
_HOLDS_NARROWER = ("f32", "f64")


def constant_of(b: Rewriter, value: Value) -> Scalar | None:
    """The constant that fills a value, if known."""
    op = b.producer(value, "constant")
    return None if op is None else op.attrs["value"]


def is_number(b: Rewriter, value: Value, number: Scalar) -> bool:
    """Whether `number` fills a value; for floats, signed zeros are distinct."""
    known = constant_of(b, value)
    if known is None or value.type.dtype.is_float != isinstance(number, float):
        return False
    return known == number and attr_text(known) == attr_text(type(known)(number))


# --- constants ---


def fold_elementwise(op: Op, b: Rewriter) -> Value | None:
    """Fold an elementwise op on constants."""
    row = table()[op.name]
    if row.meaning is None or not op.operands or op.name == "bitcast":
        return None
    values = [constant_of(b, v) for v in op.operands]
    dtypes = [v.type.dtype for v in (*op.operands, *op.results)]
    # The meaning of bit operations works on whole bytes.
    if None in values or any(d.bits < 8 for d in dtypes):
        return None
    result = op.result.tile
    arrays = [np.full((1,), v, d.np) for v, d in zip(values, dtypes[:-1], strict=True)]
    try:
        with np.errstate(all="ignore"):
            folded = np.asarray(row.meaning(*arrays, **op.own_attrs))
    except TypeError:  # numpy lacks the function for some narrow floats
        return None
    if folded.shape != (1,) or folded.dtype != result.dtype.np:
        return None
    return b.constant(python_scalar(folded[0], result.dtype), result)


def fold_rearranged(op: Op, b: Rewriter) -> Value | None:
    """Rearranging equal elements changes only the shape."""
    return _repeated(op, b, op.operands[0])


def fold_joined(op: Op, b: Rewriter) -> Value | None:
    numbers = {attr_text(constant_of(b, v)) for v in op.operands}
    return _repeated(op, b, op.operands[0]) if len(numbers) == 1 else None


def fold_reduce(op: Op, b: Rewriter) -> Value | None:
    """The maximum of one or more equal numbers is that number."""
    (x,) = op.operands
    if op.attrs["kind"] in ("max", "min", "and", "or") and x.type.size:
        return _repeated(op, b, x)
    return None


def reduce_one(op: Op, b: Rewriter) -> Value | None:
    """A reduction along dimensions of size one, and of those that a broadcast adds.

    Transposing a broadcast gives these: each is a pass through shared memory on a GPU.
    """
    (x,), axes, result = op.operands, op.attrs["axes"], op.result.tile
    if axes and all(x.tile.shape[d] == 1 for d in axes):
        return b.op("reshape", x, shape=result.shape)
    wide = b.producer(x, "broadcast_in_dim")
    if wide is None:
        return None
    (source,), dims = wide.operands, tuple(wide.attrs["dims"])
    added = [d for d in range(x.tile.rank) if d not in dims]
    is_same = dims == tuple(sorted(dims)) and source.tile.size == x.tile.size
    if not added or not is_same or not set(added) <= set(axes):
        return None
    rest = tuple(dims.index(d) for d in axes if d in dims)
    return b.op("reduce", source, **{**op.attrs, "axes": rest})


def fold_iota(op: Op, b: Rewriter) -> Value | None:
    type_: TileType = op.attrs["type"]
    return b.constant(0, type_) if type_.shape[op.attrs["dim"]] == 1 else None


def _repeated(op: Op, b: Rewriter, source: Value) -> Value | None:
    number = constant_of(b, source)
    return None if number is None else b.constant(number, op.result.tile)


# --- identities ---


def _either_side(keep: Callable[[Op, Rewriter, Value, Value], Value | None]):
    """For commutative ops: try the constant on both sides."""

    def identity(op: Op, b: Rewriter) -> Value | None:
        x, y = op.operands
        kept = keep(op, b, x, y)
        return kept if kept is not None else keep(op, b, y, x)

    identity.__name__ = keep.__name__.lstrip("_")
    return identity


def _add(op: Op, b: Rewriter, x: Value, y: Value) -> Value | None:
    return x if is_number(b, y, -0.0 if op.result.tile.dtype.is_float else 0) else None


def constant_second(op: Op, b: Rewriter) -> Value | None:
    """The constant operand of a commutative op is its second one."""
    x, y = op.operands
    if constant_of(b, x) is None or constant_of(b, y) is not None:
        return None
    return b.op(op.name, y, x, **op.attrs)


def _joined_parts(op: Op, b: Rewriter, x: Value, y: Value) -> Value | None:
    """Fold `i / 2 * 128 + i % 2 * 64` to `i * 64`, also with a tile added in between.

    Positions in a block that was split are such sums: of block index and part index.
    """
    if op.result.tile.dtype.is_float:
        return None
    joined = _joined(b, x, y)
    if joined is not None:
        return joined
    scalar, inner = _broadcast_scalar(b, x), b.producer(y, "add")
    if scalar is None or inner is None:
        return None
    for tile, other in (inner.operands, inner.operands[::-1]):
        more = _broadcast_scalar(b, other)
        sum_ = None if more is None else _joined(b, scalar, more)
        sum_ = _joined(b, more, scalar) if more is not None and sum_ is None else sum_
        if sum_ is not None:
            return b.add(tile, b.broadcast(sum_, tile.tile.shape))
    return None


def _joined(b: Rewriter, x: Value, y: Value) -> Value | None:
    """The sum of a multiple of a quotient and one of its remainder, if it is a single
    multiple."""
    (quotient, by_quotient), (rest, by_rest) = _factors(b, x), _factors(b, y)
    div, rem = b.producer(quotient, "div"), b.producer(rest, "rem")
    if div is None or rem is None or div.operands[0] is not rem.operands[0]:
        return None
    number = constant_of(b, div.operands[1])
    same = number == constant_of(b, rem.operands[1])
    if not number or not same or by_quotient != by_rest * int(number):
        return None
    whole = div.operands[0]
    return whole if by_rest == 1 else b.mul(whole, b.like(by_rest, whole))


def _factors(b: Rewriter, value: Value) -> tuple[Value, int]:
    """A value as a multiple of another."""
    op = b.producer(value, "mul")
    for x, y in (op.operands, op.operands[::-1]) if op is not None else ():
        number = constant_of(b, y)
        if number is not None:
            return x, int(number)
    return value, 1


def _broadcast_scalar(b: Rewriter, value: Value) -> Value | None:
    op = b.producer(value, "broadcast_in_dim")
    return None if op is None or op.operands[0].tile.shape else op.operands[0]


def _mul(op: Op, b: Rewriter, x: Value, y: Value) -> Value | None:
    if op.result.tile.dtype.is_float:
        return x if is_number(b, y, 1.0) else None
    return x if is_number(b, y, 1) else y if is_number(b, y, 0) else None


def sub(op: Op, b: Rewriter) -> Value | None:
    x, y = op.operands
    if x.tile.dtype.is_float:
        return x if is_number(b, y, 0.0) else None
    return b.like(0, x) if x is y else x if is_number(b, y, 0) else None


def div(op: Op, b: Rewriter) -> Value | None:
    x, y = op.operands
    return x if is_number(b, y, 1.0 if x.tile.dtype.is_float else 1) else None


def chosen_quotient(op: Op, b: Rewriter) -> Value | None:
    """A quotient of chosen constants is one of at most four, if these are exact.

    Derivatives of maxima have these: a share of one, or of a half where both are equal.
    """
    found = [_cases(b, v) for v in op.operands]
    if None in found or not op.result.tile.dtype.is_float:
        return None
    (first, tops), (second, bottoms) = (f for f in found if f is not None)
    dtype = op.result.tile.dtype
    quotients = [[_exact_quotient(x, y, dtype) for x in tops] for y in bottoms]
    if any(q is None for row in quotients for q in row):
        return None

    def choose(which: Value | None, cases: list[Value]) -> Value:
        return cases[0] if which is None else b.op("select_n", which, *cases)

    make = lambda q: b.constant(q, op.result.tile)
    return choose(second, [choose(first, [*map(make, row)]) for row in quotients])


def _cases(b: Rewriter, value: Value) -> tuple[Value | None, list[Scalar]] | None:
    """Constants, and what chooses among them."""
    op = b.producer(value, "select_n")
    which, *cases = op.operands if op is not None else (None, value)
    numbers = [n for v in cases if (n := constant_of(b, v)) is not None]
    return (which, numbers) if len(numbers) == len(cases) else None


def _exact_quotient(x: Scalar, y: Scalar, dtype: DType) -> Scalar | None:
    """`x / y`, if a type has that number."""
    if not y or not all(map(isfinite, (x, y))):
        return None
    found = python_scalar(np.divide(*np.array([x, y], dtype.np)), dtype)
    if not isfinite(found) or Fraction(found) * Fraction(y) != Fraction(x):
        return None
    return found


def _and(op: Op, b: Rewriter, x: Value, y: Value) -> Value | None:
    if x is y or is_number(b, y, _all_ones(y.tile.dtype)):
        return x
    return y if is_number(b, y, 0) else None


def _or(op: Op, b: Rewriter, x: Value, y: Value) -> Value | None:
    if x is y or is_number(b, y, 0):
        return x
    return y if is_number(b, y, _all_ones(y.tile.dtype)) else None


def _xor(op: Op, b: Rewriter, x: Value, y: Value) -> Value | None:
    return x if is_number(b, y, 0) else None


def _all_ones(dtype: DType) -> int:
    if dtype.is_bool:
        return 1
    return -1 if dtype.is_signed_int else (1 << dtype.bits) - 1


def shift(op: Op, b: Rewriter) -> Value | None:
    x, y = op.operands
    return x if is_number(b, y, 0) else None


def same_operands(op: Op, b: Rewriter) -> Value | None:
    x, y = op.operands
    return x if x is y else None


def least_or_most(op: Op, b: Rewriter) -> Value | None:
    """A maximum with minus infinity, as JAX's softmax starts it; NaN stays NaN."""
    x, y = op.operands
    number = float("-inf" if op.name == "max" else "inf")
    if is_number(b, y, number):
        return x
    return y if is_number(b, x, number) else None


def undone(op: Op, b: Rewriter) -> Value | None:
    """`neg(neg(x))`, `not(not(x))`."""
    inner = b.producer(op.operands[0], op.name)
    return inner.operands[0] if inner else None


def integer_pow(op: Op, b: Rewriter) -> Value | None:
    return op.operands[0] if op.attrs["y"] == 1 else None


def select(op: Op, b: Rewriter) -> Value | None:
    which, *cases = op.operands
    if all(case is cases[0] for case in cases):
        return cases[0]
    number = constant_of(b, which)
    if number is not None:
        return cases[min(max(int(number), 0), len(cases) - 1)]
    chosen = [_chosen_before(b, which, n, case) for n, case in enumerate(cases)]
    return None if chosen == cases else b.op("select_n", which, *chosen)


def _chosen_before(b: Rewriter, which: Value, n: int, case: Value) -> Value:
    """Of a select inside the case `n` of another by the same condition, its case."""
    inner = b.producer(case, "select_n")
    if inner is None:
        return case
    again, *cases = inner.operands
    if again is which:
        return cases[n]
    one, other = _limit(b, which), _limit(b, again)
    if one is None or other is None or one[:2] != other[:2]:
        return case
    return cases[n if one[2] == other[2] else 1 - n]


def _limit(b: Rewriter, which: Value) -> tuple[Value, int, bool] | None:
    """A comparison as: whether an integer is at least a number, or is not."""
    made = b.producer(which)
    if made is None or made.name not in ("ge", "gt", "lt", "le"):
        return None
    x, y = made.operands
    number = constant_of(b, y)
    if number is None or x.tile.dtype.is_float:
        return None
    return x, int(number) + (made.name in ("gt", "le")), made.name in ("ge", "gt")


def cast(op: Op, b: Rewriter) -> Value | None:
    (x,) = op.operands
    middle, new = x.tile.dtype, op.attrs["dtype"]
    if middle == new:
        return x
    inner = b.producer(x, "cast")
    if inner is None:
        return None
    (source,) = inner.operands
    # Hardware more often has a cast between narrow types in two steps than in one.
    common = new == source.tile.dtype or source.tile.dtype.is_bool or new.bits >= 32
    if common and _keeps_numbers(source.tile.dtype, middle):
        return b.cast(source, new)
    return None


def cast_back(op: Op, b: Rewriter) -> Value | None:
    """A tile that is widened, moved and narrowed again was only moved."""
    moved = b.producer(op.operands[0])
    if moved is None or moved.name not in ("reshape", "transpose", "slice"):
        return None
    wide = b.producer(moved.operands[0], "cast")
    if wide is None:
        return None
    (source,), dtype = wide.operands, op.attrs["dtype"]
    if source.tile.dtype != dtype or not _keeps_numbers(dtype, wide.result.tile.dtype):
        return None
    return b.op(moved.name, source, **moved.own_attrs)


def _keeps_numbers(old: DType, new: DType) -> bool:
    """Whether a cast preserves every value, so that a following cast cannot tell.

    Integer to float is left alone: if the next cast is to a narrower integer, the float
    saturates where the integer would wrap.
    """
    if old.is_bool:
        return not new.is_float or new.name in _HOLDS_NARROWER
    if old.is_integer and new.is_integer:
        same_sign = old.kind == new.kind and new.bits >= old.bits
        return same_sign or (new.is_signed_int and new.bits > old.bits)
    if old.is_float and new.is_float:
        return new.name in _HOLDS_NARROWER and new.bits > old.bits
    return False


def not_equal_zero(op: Op, b: Rewriter) -> Value | None:
    """`cast(p) != 0` of a bool is the bool."""
    x, y = op.operands
    inner = b.producer(x, "cast")
    if inner is None or not inner.operands[0].tile.dtype.is_bool:
        return None
    zero = 0.0 if y.tile.dtype.is_float else 0
    return inner.operands[0] if is_number(b, y, zero) else None


# --- shapes ---


def reshape(op: Op, b: Rewriter) -> Value | None:
    """Also on views: `reshape_view` has the same attribute."""
    (x,) = op.operands
    if x.type.shape == op.attrs["shape"]:
        return x
    inner = b.producer(x, op.name)
    return b.op(op.name, inner.operands[0], **op.attrs) if inner else None


def reshaped_broadcast(op: Op, b: Rewriter) -> Value | None:
    """A reshape of copies of one number, or of what has as many elements."""
    inner = b.producer(op.operands[0], "broadcast_in_dim")
    if inner is None:
        return None
    (x,), shape = inner.operands, op.attrs["shape"]
    if not x.type.shape:
        return b.broadcast(x, shape, ())
    return b.reshape(x, shape=shape) if x.type.size == prod(shape) else None


def added_units(op: Op, b: Rewriter) -> Value | None:
    """A reshape that only adds dimensions of size one is a broadcast."""
    (x,), shape = op.operands, op.attrs["shape"]
    dims = _kept_dims(x.type.shape, shape)
    if dims is None or len(shape) <= x.type.rank or not x.type.shape:
        return None
    return b.broadcast(x, shape, dims)


def broadcast_reshaped(op: Op, b: Rewriter) -> Value | None:
    """Broadcast a tile whose dimensions of size one were dropped with them.

    Each of them takes the place of a dimension that the broadcast adds.
    """
    inner = b.producer(op.operands[0], "reshape")
    if inner is None:
        return None
    (x,), dims = inner.operands, op.attrs["dims"]
    kept = _kept_dims(inner.attrs["shape"], x.type.shape)
    if kept is None:
        return None
    places = dict(zip(kept, dims, strict=True))
    last, taken = -1, []
    for d in range(x.type.rank):
        place = places.get(d, last + 1)
        if place <= last or (d not in places and place in dims):
            return None
        taken.append(place)
        last = place
    if last >= len(op.attrs["shape"]):
        return None
    return b.broadcast(x, op.attrs["shape"], taken)


def _kept_dims(small: tuple[int, ...], large: tuple[int, ...]) -> list[int] | None:
    """The dimensions of `large` that are those of `small`, if others have size one."""
    found: list[int] = []
    for d, n in enumerate(large):
        if len(found) < len(small) and n == small[len(found)]:
            found.append(d)
        elif n != 1:
            return None
    return found if len(found) == len(small) else None


def transpose(op: Op, b: Rewriter) -> Value | None:
    """Also on views: `transpose_view` has the same attribute."""
    (x,), perm = op.operands, op.attrs["perm"]
    if perm == tuple(range(len(perm))):
        return x
    inner = b.producer(x, op.name)
    if inner is None:
        return None
    both = tuple(inner.attrs["perm"][d] for d in perm)
    return b.op(op.name, inner.operands[0], perm=both)


def broadcast(op: Op, b: Rewriter) -> Value | None:
    (x,), shape, dims = op.operands, op.attrs["shape"], op.attrs["dims"]
    if x.tile.shape == shape:
        return x
    inner = b.producer(x, "broadcast_in_dim")
    if inner is None:
        return None
    both = tuple(dims[d] for d in inner.attrs["dims"])
    return b.op("broadcast_in_dim", inner.operands[0], shape=shape, dims=both)


def unchanged(op: Op, b: Rewriter) -> Value | None:
    """No-ops: a slice of everything, a reversal or reduction over no axes, ..."""
    x = op.operands[0]
    moved = {
        "slice": lambda a: x.type.shape != op.result.type.shape,
        "dynamic_slice": lambda a: x.type.shape != op.result.type.shape,
        "concatenate": lambda a: len(op.operands) > 1,
        "rev": lambda a: any(x.type.shape[d] > 1 for d in a["axes"]),
        "reduce": lambda a: a["axes"] != (),
        "pad": lambda a: any((*a["low"], *a["high"], *a["interior"])),
    }
    return None if moved[op.name](op.attrs) else x


def without_empty(op: Op, b: Rewriter) -> Value | None:
    """Drop tiles without elements, as `lax.associative_scan` makes them."""
    parts = [x for x in op.operands if x.type.size]
    if not parts or len(parts) == len(op.operands):
        return None
    return b.op("concatenate", *parts, axis=op.attrs["axis"])


def padding_alone(op: Op, b: Rewriter) -> Value | None:
    """Padding a tile without elements gives a tile filled with the padding value."""
    x, filler = op.operands
    if x.type.size or not op.result.type.size:
        return None
    return b.op("broadcast_in_dim", filler, shape=op.result.type.shape, dims=())


def cropped(op: Op, b: Rewriter) -> Value | None:
    """Padding by negative numbers, as the derivative of padding has it, is a slice."""
    x = op.operands[0]
    low, high = op.attrs["low"], op.attrs["high"]
    if any(op.attrs["interior"]) or max((*low, *high), default=1) > 0:
        return None
    if min((*low, *high)) == 0 or not op.result.type.size:
        return None
    limits = tuple(n + more for n, more in zip(x.type.shape, high, strict=True))
    starts, strides = tuple(-n for n in low), (1,) * len(low)
    return b.op("slice", x, starts=starts, limits=limits, strides=strides)


def dynamic_slice(op: Op, b: Rewriter) -> Value | None:
    """Known starts, clamped as they would be at run time."""
    x, *starts = op.operands
    known = [constant_of(b, s) for s in starts]
    if None in known:
        return None
    sizes: tuple[int, ...] = op.attrs["sizes"]
    limits = [n - size for n, size in zip(x.type.shape, sizes, strict=True)]
    first = [min(max(int(s or 0), 0), m) for s, m in zip(known, limits, strict=True)]
    last = [s + size for s, size in zip(first, sizes, strict=True)]
    strides = (1,) * len(first)
    return b.op("slice", x, starts=tuple(first), limits=tuple(last), strides=strides)


def replaced_whole(op: Op, b: Rewriter) -> Value | None:
    x, update, *_ = op.operands
    return update if update.type == x.type else None


def without_index(op: Op, b: Rewriter) -> Value | None:
    """A gather or scatter without index components (`x.at[:].add(y)`): one slice."""
    x, indices = (v.tile for v in op.operands[:2])
    if not x.size or indices.shape[-1:] != (0,) or prod(indices.shape[:-1]) != 1:
        return None
    lower = table()[op.name].lower
    assert lower is not None
    return lower(b, *op.operands, **op.own_attrs)


_COMMUTATIVE = ("add", "mul", "and", "or", "xor", "eq", "ne")
_MOVES = sorted(names(lambda row: row.moves))

PATTERNS: tuple[Pattern, ...] = (
    *((name, fold_rearranged) for name in (*_MOVES, "dynamic_slice")),
    *((name, fold_joined) for name in ("concatenate", "pad")),
    ("reduce", fold_reduce),
    ("reduce", reduce_one),
    ("iota", fold_iota),
    ("*", fold_elementwise),
    ("add", _either_side(_add)),
    ("add", _either_side(_joined_parts)),
    ("mul", _either_side(_mul)),
    ("and", _either_side(_and)),
    ("or", _either_side(_or)),
    ("xor", _either_side(_xor)),
    *((name, constant_second) for name in _COMMUTATIVE),
    ("sub", sub),
    ("div", div),
    ("div", chosen_quotient),
    ("neg", undone),
    ("not", undone),
    ("max", same_operands),
    ("min", same_operands),
    ("max", least_or_most),
    ("min", least_or_most),
    ("shift_left", shift),
    ("shift_right_logical", shift),
    ("shift_right_arithmetic", shift),
    ("integer_pow", integer_pow),
    ("select_n", select),
    ("cast", cast),
    ("cast", cast_back),
    ("ne", not_equal_zero),
    ("reshape", reshape),
    ("reshape", reshaped_broadcast),
    ("reshape", added_units),
    ("transpose", transpose),
    ("broadcast_in_dim", broadcast),
    ("broadcast_in_dim", broadcast_reshaped),
    *((n, unchanged) for n in ("slice", "dynamic_slice", "concatenate")),
    *((n, unchanged) for n in ("rev", "reduce", "pad")),
    ("concatenate", without_empty),
    ("pad", padding_alone),
    ("pad", cropped),
    ("dynamic_slice", dynamic_slice),
    ("dynamic_update_slice", replaced_whole),
    *((name, without_index) for name in ("gather", "scatter")),
)
