"""Sorting: a bitonic network over integers that hold the keys and the position.

Keys become signed integers in their order. The position is the last key, which makes
the order total and the sort stable; it shares a word with the key before it if both
fit. Operands that are keys are made from these words again at the end; of floats, which
lose the sign of zeros and NaN in them, the signs are kept next to the position. Other
operands move along.

An element's partner is the exclusive or of the element and its pair. A reduction over
a dimension of size two gives that, and Triton does it by shuffles. A gather would go
through shared memory in each step, in code that takes seconds to compile; even one at
the end, by positions, is thousands of shuffles for rows of 4096.
"""

from collections.abc import Sequence

import numpy as np

from pallasite.backends.triton.core import FLOAT_BITS
from pallasite.backends.triton.text import Val
from pallasite.backends.triton.tiles import Tiles
from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import DType


def emit_sort(e: Tiles, op: Op) -> None:
    axis, num_keys = op.attrs["axis"], op.attrs["num_keys"]
    dtypes = [v.tile.dtype for v in op.operands]
    operands = [e.env[v] for v in op.operands]
    shape, logical = operands[0].shape, op.operands[0].tile.shape
    keys = [
        _ordered(e, x, d) for x, d in zip(operands[:num_keys], dtypes, strict=False)
    ]
    # Padding has the largest keys and the last positions.
    keys = [e.without_padding(x, logical, [axis], _largest(x)) for x in keys]
    words = _Words(e, keys, operands[:num_keys], axis)
    moved = [x for x in op.operands[num_keys:] if not _is_position(e, x, axis)]
    carried = [_bits(e, e.env[v]) for v in moved]
    network = _Network(e, shape, axis, words.count)
    made = network.sorted([*words.values, *carried])
    words.values = made[: words.count]
    place = words.place()
    for n, (value, dtype) in enumerate(zip(op.results, dtypes, strict=True)):
        if n < num_keys:
            e.env[value] = words.operand(n, dtype, operands[n].elem)
        elif op.operands[n] in moved:
            x = made[words.count + moved.index(op.operands[n])]
            e.env[value] = _from_bits(e, x, operands[n].elem)
        else:
            e.env[value] = e.convert("arith.extsi", place, operands[n].elem)


def _is_position(e: Tiles, x: Value, axis: int) -> bool:
    """Whether an operand is the position along the axis, as in `argsort`."""
    made = e.producers.get(x)
    if made is None or made.name != "iota" or made.attrs["dim"] != axis:
        return False
    return x.tile.dtype.name in ("i32", "i64")


# --- words ---


class _Words:
    """The keys in their order, then the position with a sign for each float key."""

    def __init__(self, e: Tiles, keys: list[Val], operands: Sequence[Val], axis: int):
        self.e, shape = e, keys[0].shape
        floats = [n for n, x in enumerate(operands) if x.elem in FLOAT_BITS]
        self.signs = {n: bit for bit, n in enumerate(floats)}
        place = e.spread(e.along(shape, axis), shape)
        low = e.scaled("arith.shli", place, len(floats))
        for n, bit in self.signs.items():
            pattern = _bits(e, operands[n])
            negative = e.compare("slt", pattern, e.like(0, pattern))
            sign = e.convert("arith.extui", negative, "i32")
            low = e.apply("arith.ori", low, e.scaled("arith.shli", sign, bit))
        self.low_bits = (shape[axis] - 1).bit_length() + len(floats)
        self.widths = [_width(x) for x in keys]
        wide = [w for w in (32, 64) if self.widths[-1] + self.low_bits <= w]
        self.is_packed = bool(wide)
        if self.is_packed:
            word = e.convert("arith.extsi", keys[-1], f"i{wide[0]}")
            word = e.scaled("arith.shli", word, self.low_bits)
            low = e.convert("arith.extui", low, word.elem)
            self.values = [*keys[:-1], e.apply("arith.ori", word, low)]
        else:
            self.values = [*keys, low]
        self.count = len(self.values)

    def low(self) -> Val:
        e, word = self.e, self.values[-1]
        if not self.is_packed:
            return word
        low = e.scaled("arith.andi", word, (1 << self.low_bits) - 1)
        return e.convert("arith.trunci", low, "i32")

    def place(self) -> Val:
        return self.e.scaled("arith.shrui", self.low(), len(self.signs))

    def operand(self, number: int, dtype: DType, elem: str) -> Val:
        """What a key was made from."""
        e, key = self.e, self.values[number]
        if self.is_packed and number == self.count - 1:
            key = e.scaled("arith.shrsi", key, self.low_bits)
            key = e.convert("arith.trunci", key, f"i{self.widths[number]}")
        if dtype.is_bool:
            return e.compare("ne", key, e.like(0, key))
        if not dtype.is_float:
            return key if dtype.is_signed_int else _sign_flipped(e, key)
        negative = e.compare("slt", key, e.like(0, key))
        largest = e.like(_largest(key), key)
        x = e.select(negative, e.apply("arith.xori", key, largest), key)
        sign = e.scaled("arith.shrui", self.low(), self.signs[number])
        sign = e.scaled("arith.andi", sign, 1)
        resize = "arith.extui" if _width(key) > 32 else "arith.trunci"
        sign = e.convert(resize, sign, key.elem)
        sign = e.scaled("arith.shli", sign, _width(key) - 1)
        return _from_bits(e, e.apply("arith.ori", x, sign), elem)


def _ordered(e: Tiles, x: Val, dtype: DType) -> Val:
    """A signed integer in the order of the elements: zeros equal, NaN above all."""
    if dtype.is_float:
        pattern = _bits(e, x)
        x = e.to_float(x, "f32") if dtype.bits == 8 else x  # compares them, too
        zero = e.compare("oeq", x, e.like(0.0, x))
        pattern = e.select(zero, e.like(0, pattern), pattern)
        pattern = e.select(
            e.compare("ord", x, x), pattern, e.like(_nan(dtype), pattern)
        )
        reverse = e.scaled("arith.xori", pattern, _largest(pattern))
        negative = e.compare("slt", pattern, e.like(0, pattern))
        return e.select(negative, reverse, pattern)
    if dtype.is_bool:
        return e.convert("arith.extui", x, "i8")
    return x if dtype.is_signed_int else _sign_flipped(e, x)


def _nan(dtype: DType) -> int:
    """The bits of a positive NaN."""
    pattern = int(np.array(np.nan, dtype.np).view(f"u{dtype.bits // 8}"))
    return pattern & ~(1 << (dtype.bits - 1))


def _sign_flipped(e: Tiles, x: Val) -> Val:
    return e.scaled("arith.xori", x, -1 << (_width(x) - 1))


def _largest(x: Val) -> int:
    return (1 << (_width(x) - 1)) - 1


def _width(x: Val) -> int:
    return int(x.elem[1:])


def _bits(e: Tiles, x: Val) -> Val:
    """The bits of an element as a signed integer."""
    if x.elem == "i1":
        return e.convert("arith.extui", x, "i8")
    return _bitcast(e, x, f"i{FLOAT_BITS[x.elem]}") if x.elem in FLOAT_BITS else x


def _from_bits(e: Tiles, x: Val, elem: str) -> Val:
    if elem == "i1":
        return e.compare("ne", x, e.like(0, x))
    return _bitcast(e, x, elem)


def _bitcast(e: Tiles, x: Val, elem: str) -> Val:
    if x.elem == elem:
        return x
    to = Val("", x.shape, elem).type
    return e.let(f"tt.bitcast {x} : {x.type} -> {to}", x.shape, elem)


# --- the network ---


class _Network:
    """A loop over the lengths of sorted runs; in its body, one step per distance.

    Distances that a run does not have are skipped. Written out, the network would be
    six times as long for rows of 4096, and take as much longer to compile.

    The axis is a hypercube, one dimension of size two per bit of the position, so that
    all steps work on one shape and no data is moved between them. There are no
    dimensions of size one: XLA moves ops that add or drop them up through all that
    comes before, and writes what is shared there once for each use.
    """

    def __init__(self, e: Tiles, shape: Sequence[int], axis: int, num_keys: int):
        self.e, self.given, self.n = e, tuple(shape), shape[axis]
        self.num_keys = num_keys
        self.bits = self.n.bit_length() - 1
        before = [n for n in shape[:axis] if n > 1]
        after = [n for n in shape[axis + 1 :] if n > 1]
        self.first = len(before)  # the dimension of the highest bit
        self.shape = (*before, *[2] * self.bits, *after)

    def sorted(self, words: list[Val]) -> list[Val]:
        if self.n == 1:
            return words
        e = self.e
        words = [e.reshape(x, self.shape) for x in words]
        first, limit = (e.const(n, "i32") for n in (1, self.bits + 1))
        counter, name = Val(e.out.fresh(), (), "i32"), e.out.fresh()
        carried = [Val(e.out.fresh(), x.shape, x.elem) for x in words]
        pairs = ", ".join(f"{x} = {y}" for x, y in zip(carried, words, strict=True))
        types = ", ".join(x.type for x in words)
        head = f"{_several(name, words)} = scf.for {counter} = {first} to {limit}"
        e.out.line(f"{head} step {first} iter_args({pairs}) -> ({types}) : i32 {{")
        with e.out.region():
            rises = self.rises(counter)
            for bit in reversed(range(self.bits)):
                carried = self.guarded_step(carried, rises, counter, bit)
            e.out.line(f"scf.yield {', '.join(map(str, carried))} : {types}")
        e.out.line("}")
        return [e.reshape(x, self.given) for x in _results(name, words)]

    def rises(self, bit: Val) -> Val:
        """Where runs of length `1 << bit` are to be ascending: every other one."""
        e = self.e
        place = e.positions(self.n)
        odd = e.apply("arith.shrui", place, e.spread(bit, place.shape))
        odd = e.apply("arith.andi", odd, e.like(1, odd))
        odd = e.reshape(odd, [2] * self.bits)
        for d in range(self.first):
            odd = e.expand(odd, d)
        while len(odd.shape) < len(self.shape):
            odd = e.expand(odd, len(odd.shape))
        odd = e.spread(odd, self.shape)
        return e.compare("eq", odd, e.like(0, odd))

    def guarded_step(
        self, words: list[Val], rises: Val, counter: Val, bit: int
    ) -> list[Val]:
        e = self.e
        if bit == 0:
            return self.step(words, rises, bit)
        name, types = e.out.fresh(), ", ".join(x.type for x in words)
        within = e.compare("sgt", counter, e.const(bit, "i32"))
        e.out.line(f"{_several(name, words)} = scf.if {within} -> ({types}) {{")
        with e.out.region():
            ordered = self.step(words, rises, bit)
            e.out.line(f"scf.yield {', '.join(map(str, ordered))} : {types}")
        e.out.line("} else {")
        with e.out.region():
            e.out.line(f"scf.yield {', '.join(map(str, words))} : {types}")
        e.out.line("}")
        return _results(name, words)

    def step(self, words: list[Val], rises: Val, bit: int) -> list[Val]:
        """Order each pair whose positions differ in one bit."""
        e, axis = self.e, self.first + self.bits - 1 - bit
        partners = [_partner(e, x, axis) for x in words]
        side = e.spread(e.along(self.shape, axis), self.shape)
        lower = e.compare("eq", side, e.like(0, side))
        # The lower of an ascending pair takes the smaller, and so on: words differ.
        wants_smaller = e.compare("eq", lower, rises)
        if len(words) == 1:
            (x,), (y,) = words, partners
            low, high = e.apply("arith.minsi", x, y), e.apply("arith.maxsi", x, y)
            return [e.select(wants_smaller, low, high)]
        less = _less(e, partners[: self.num_keys], words[: self.num_keys])
        swap = e.compare("eq", less, wants_smaller)
        return [e.select(swap, y, x) for x, y in zip(words, partners, strict=True)]


def _several(name: str, values: Sequence[Val]) -> str:
    """The left-hand side of an op with as many results."""
    return f"{name}:{len(values)}" if len(values) > 1 else name


def _results(name: str, like: Sequence[Val]) -> list[Val]:
    if len(like) == 1:
        return [Val(name, like[0].shape, like[0].elem)]
    return [Val(f"{name}#{n}", x.shape, x.elem) for n, x in enumerate(like)]


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
