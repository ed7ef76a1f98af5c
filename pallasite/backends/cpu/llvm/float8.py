"""Floats of 8 and 4 bits: bytes in memory, f32 in registers.

Reading moves the bits to where an f32 has them; writing rounds the f32 to nearest even
and packs sign, exponent and fraction, with each format's own overflow and NaN.
f8e8m0fnu has only an exponent. `scalars.py` calls this for the formats in `FORMATS`.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.ir.types import DType

NAN = 0x7FC00000  # as an f32


class Format(NamedTuple):
    """Layout of one narrow float. Without `negative_zero`, that byte is the only
    NaN."""

    mantissa: int
    bias: int
    negative_zero: bool
    infinity: int | None  # the result of overflow; None: NaN
    bits: int = 8

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def nan(self) -> int:
        """Without its sign. f4e2m1fn has none, and XLA makes it -0."""
        has_own = self.negative_zero and self.bits == 8
        return self.sign - 1 if has_own else self.sign


FORMATS = {
    "f8e3m4": Format(4, 3, True, 0x70),
    "f8e4m3": Format(3, 7, True, 0x78),
    "f8e4m3fn": Format(3, 7, True, None),
    "f8e4m3b11fnuz": Format(3, 11, False, None),
    "f8e4m3fnuz": Format(3, 8, False, None),
    "f8e5m2": Format(2, 15, True, 0x7C),
    "f8e5m2fnuz": Format(2, 16, False, None),
    "f8e8m0fnu": Format(0, 127, False, None),
    "f4e2m1fn": Format(1, 1, True, 0x7, bits=4),
}


def decode(f: Function, dtype: DType, byte: Val) -> Val:
    """The f32 that a byte encodes, by arithmetic: lanes would read a table in turn."""
    word = lambda number: integer(number, "i32")
    code = f.convert("zext", byte, "i32")
    if dtype.name == "f8e8m0fnu":
        bits = f.binary("shl", code, word(23))
        bits = f.select(f.compare("icmp eq", code, word(0)), word(1 << 22), bits)
        bits = f.select(f.compare("icmp eq", code, word(0xFF)), word(NAN), bits)
        return f.convert("bitcast", bits, "float")
    form = FORMATS[dtype.name]
    size = f.binary("and", code, word(form.sign - 1))
    sign = f.binary("and", code, word(form.sign))
    bits = _magnitude(f, form, size)
    bits = f.binary("or", bits, f.binary("shl", sign, word(32 - form.bits)))
    if not form.negative_zero:
        is_nan = f.compare("icmp eq", code, word(form.nan))
        bits = f.select(is_nan, word(NAN - (1 << 31)), bits)
    value = f.convert("bitcast", bits, "float")
    f.encoded[dtype.name, value.text] = byte
    return value


def _magnitude(f: Function, form: Format, size: Val) -> Val:
    """The bits of the f32 that a code without its sign encodes."""
    word = lambda number: integer(number, "i32")
    shifted = f.binary("shl", size, word(23 - form.mantissa))
    normal = f.binary("add", shifted, word((127 - form.bias) << 23))
    # Subnormal numbers are multiples of the smallest one, 2**(1 - bias - mantissa).
    exponent = word((127 + 1 - form.bias - form.mantissa) << 23)
    unit = f.convert("bitcast", exponent, "float")
    small = f.binary("fmul", f.convert("uitofp", size, "float"), unit)
    is_small = f.compare("icmp ult", size, word(1 << form.mantissa))
    bits = f.select(is_small, f.convert("bitcast", small, "i32"), normal)
    if not form.negative_zero or form.bits < 8:
        return bits
    largest = form.nan - 1 if form.infinity is None else form.infinity
    bits = f.select(f.compare("icmp ugt", size, word(largest)), word(NAN), bits)
    if form.infinity is None:
        return bits
    is_infinite = f.compare("icmp eq", size, word(largest))
    return f.select(is_infinite, word(0x7F800000), bits)


def encode(f: Function, dtype: DType, value: Val) -> Val:
    """The byte nearest to an f32; of one that was just decoded, its own."""
    if (known := f.encoded.get((dtype.name, value.text))) is not None:
        return known
    if dtype.name == "f8e8m0fnu":
        return _power_of_two(f, value)
    form = FORMATS[dtype.name]
    word = lambda number: integer(number, "i32")
    bits = f.convert("bitcast", value, "i32")
    size = f.binary("and", bits, word(0x7FFFFFFF))
    code = f.select(
        f.compare("icmp ult", size, word((128 - form.bias) << 23)),
        _subnormal(f, form, size),
        _normal(f, form, size),
    )
    # Codes grow with the value, so a value that is too large exceeds the largest code.
    largest = word(int(np.array(ml_dtypes.finfo(dtype.np).max).view(np.uint8)))
    nan = word(form.nan)
    beyond = nan if form.infinity is None else word(form.infinity)
    code = f.select(f.compare("icmp sgt", code, largest), beyond, code)
    code = f.select(f.compare("icmp ugt", size, word(0x7F800000)), nan, code)
    sign = f.binary("lshr", bits, word(32 - form.bits))
    sign = f.binary("and", sign, word(form.sign))
    if not form.negative_zero:  # the byte of -0 is NaN
        unsigned = f.compare("icmp eq", code, word(0))
        sign = f.select(unsigned, word(0), sign)
    return f.convert("trunc", f.binary("or", code, sign), "i8")


def _power_of_two(f: Function, value: Val) -> Val:
    """The exponent of an f32, rounding half up; zero and negative numbers give NaN."""
    word = lambda number: integer(number, "i32")
    bits = f.convert("bitcast", value, "i32")
    rounded = f.binary("lshr", f.binary("add", bits, word(0x400000)), word(23))
    # Below the smallest normal number there is one power of two, 2**-127; values in
    # between round up, as in XLA.
    above = f.compare("icmp ugt", bits, word(0x400000))
    small = f.select(above, word(1), word(0))
    is_small = f.compare("icmp ult", bits, word(0x800000))
    code = f.select(is_small, small, rounded)
    # As signed integers, negative numbers come before zero.
    positive = f.compare("icmp sgt", bits, word(0))
    finite = f.compare("icmp ult", bits, word(0x7F800000))
    good = f.binary("and", positive, finite)
    return f.convert("trunc", f.select(good, code, word(0xFF)), "i8")


def _normal(f: Function, form: Format, size: Val) -> Val:
    """Round the fraction by adding just under half of its last kept bit."""
    drop = 23 - form.mantissa
    word = lambda number: integer(number, "i32")
    odd = f.binary("and", f.binary("lshr", size, word(drop)), word(1))
    half = f.binary("add", odd, word((1 << (drop - 1)) - 1))
    kept = f.binary("lshr", f.binary("add", size, half), word(drop))
    return f.binary("sub", kept, word((127 - form.bias) << form.mantissa))


def _subnormal(f: Function, form: Format, size: Val) -> Val:
    """Multiples of the smallest number: adding 2**23 of them leaves the count."""
    unit = (127 + 1 - form.bias - form.mantissa + 23) << 23
    magic = f.convert("bitcast", integer(unit, "i32"), "float")
    total = f.binary("fadd", f.convert("bitcast", size, "float"), magic)
    return f.binary("sub", f.convert("bitcast", total, "i32"), integer(unit, "i32"))
