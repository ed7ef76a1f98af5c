"""Sorting: a bitonic network over integers that hold the keys and the position.

Keys become signed integers in their order. The position is the last key, which makes
the order total and the sort stable; it shares a word with the key before it if both
fit. The network moves only these words: at its end, the positions say where the
elements of each operand come from.

An element's partner is the exclusive or of the element and its pair. A reduction over
the axis of a reshaped tile gives that, and Triton does it by shuffles; a gather would
go through shared memory in each step, in code that takes seconds to compile.
"""

from collections.abc import Sequence

from pallasite.backends.triton.core import FLOAT_BITS
from pallasite.backends.triton.text import Val
from pallasite.backends.triton.tiles import Tiles
from pallasite.ir.nodes import Op
from pallasite.ir.types import DType


def emit_sort(e: Tiles, op: Op) -> None:
    axis, num_keys = op.attrs["axis"], op.attrs["num_keys"]
    operands = [e.env[v] for v in op.operands]
    shape, n = operands[0].shape, op.operands[0].tile.shape[axis]
    place = e.spread(e.along(shape, axis), shape)
    keys = [
        _ordered(e, x, v.tile.dtype)
        for x, v in zip(operands[:num_keys], op.operands, strict=False)
    ]
    if shape[axis] > n:  # padding has the largest keys and the last positions
        keys = [_padded_last(e, x, op.operands[0].tile.shape, axis) for x in keys]
    bits = (shape[axis] - 1).bit_length()
    words, is_packed = _with_place(e, keys, place, bits)
    words = _network(e, words, axis)
    place = words[-1]
    if is_packed:
        place = e.apply("arith.andi", place, e.like((1 << bits) - 1, place))
        place = e.convert("arith.trunci", place, "i32")
    for value, x in zip(op.results, operands, strict=True):
        e.env[value] = _picked(e, x, place, axis)


# --- words ---


def _ordered(e: Tiles, x: Val, dtype: DType) -> Val:
    """A signed integer in the order of the elements: zeros equal, NaN above all."""
    if dtype.is_float:
        if FLOAT_BITS[x.elem] == 8:
            x = e.to_float(x, "f32")
        zero = e.compare("oeq", x, e.like(0.0, x))
        x = e.select(zero, e.like(0.0, x), x)
        x = e.select(e.compare("uno", x, x), e.like(float("nan"), x), x)
        pattern = _bitcast(e, x, f"i{FLOAT_BITS[x.elem]}")
        sign = e.like((1 << FLOAT_BITS[x.elem] - 1) - 1, pattern)
        reverse = e.apply("arith.xori", pattern, sign)
        negative = e.compare("slt", pattern, e.like(0, pattern))
        return e.select(negative, reverse, pattern)
    if dtype.is_bool:
        return e.convert("arith.extui", x, "i8")
    if dtype.is_signed_int:
        return x
    return e.apply("arith.xori", x, e.like(-1 << (dtype.bits - 1), x))


def _padded_last(e: Tiles, x: Val, logical: Sequence[int], axis: int) -> Val:
    largest = (1 << (_width(x) - 1)) - 1
    return e.without_padding(x, logical, [axis], largest)


def _with_place(
    e: Tiles, keys: Sequence[Val], place: Val, bits: int
) -> tuple[list[Val], bool]:
    """The keys and the position, in one word with the last key if both fit."""
    *first, last = keys
    width = next((w for w in (32, 64) if _width(last) + bits <= w), None)
    if width is None:
        return [*keys, place], False
    word = e.convert("arith.extsi", last, f"i{width}")
    word = e.apply("arith.shli", word, e.like(bits, word))
    low = e.convert("arith.extui", place, f"i{width}")
    return [*first, e.apply("arith.ori", word, low)], True


def _width(x: Val) -> int:
    return int(x.elem[1:])


def _picked(e: Tiles, x: Val, place: Val, axis: int) -> Val:
    if FLOAT_BITS.get(x.elem, 16) == 8:
        return _bitcast(e, e.gather(_bitcast(e, x, "i8"), place, axis), x.elem)
    return e.gather(x, place, axis)


def _bitcast(e: Tiles, x: Val, elem: str) -> Val:
    to = Val("", x.shape, elem).type
    return e.let(f"tt.bitcast {x} : {x.type} -> {to}", x.shape, elem)


# --- the network ---


def _network(e: Tiles, words: list[Val], axis: int) -> list[Val]:
    flat = words[0].shape
    run = 2
    while run <= flat[axis]:
        distance = run // 2
        while distance:
            words = _step(e, words, flat, axis, run, distance)
            distance //= 2
        run *= 2
    return [e.reshape(x, flat) for x in words]


def _step(
    e: Tiles, words: list[Val], flat: Sequence[int], axis: int, run: int, distance: int
) -> list[Val]:
    """Order each pair `distance` apart; ascending in every other run.

    Without dimensions of size one: XLA moves ops that add or drop them through all
    that comes before, and writes what is shared there once for each use.
    """
    before = (*flat[:axis], flat[axis] // (2 * distance))
    after = (distance, *flat[axis + 1 :])
    before, after = (tuple(n for n in part if n > 1) for part in (before, after))
    shape, pair = (*before, 2, *after), len(before)
    group = pair - 1
    words = [e.reshape(x, shape) for x in words]
    partners = [_partner(e, x, pair) for x in words]
    # The lower of an ascending pair takes the smaller, and so on: words differ.
    side = e.spread(e.along(shape, pair), shape)
    if run < flat[axis]:
        falling = e.scaled("arith.divui", e.positions(shape[group]), run // (2 * distance))
        falling = e.apply("arith.andi", falling, e.like(1, falling))
        for d in range(len(shape)):
            if d != group:
                falling = e.expand(falling, d)
        falling = e.spread(falling, shape)
    else:
        falling = e.like(0, side)
    wants_smaller = e.compare("eq", falling, side)
    if len(words) == 1:
        (x,), (y,) = words, partners
        low, high = e.apply("arith.minsi", x, y), e.apply("arith.maxsi", x, y)
        return [e.select(wants_smaller, low, high)]
    swap = e.compare("eq", _less(e, partners, words), wants_smaller)
    return [e.select(swap, y, x) for x, y in zip(words, partners, strict=True)]


def _partner(e: Tiles, x: Val, axis: int) -> Val:
    (both,) = e.fold(
        "tt.reduce", [x], axis, lambda a, b: [e.apply("arith.xori", a[0], b[0])]
    )
    return e.apply("arith.xori", x, e.spread(e.expand(both, axis), x.shape))


def _less(e: Tiles, left: Sequence[Val], right: Sequence[Val]) -> Val:
    """Lexicographic."""
    result = e.compare("slt", left[-1], right[-1])
    for x, y in zip(left[-2::-1], right[-2::-1], strict=True):
        ties = e.apply("arith.andi", e.compare("eq", x, y), result)
        result = e.apply("arith.ori", e.compare("slt", x, y), ties)
    return result


RULES = {"sort": emit_sort}
