"""8-bit floats: bytes in memory, f32 in registers.

Reading looks the value up in a table of 256; writing rounds the f32 to nearest even and
packs sign, exponent and fraction, with each format's own overflow and NaN. `scalars.py`
calls this for the formats in `FORMATS`.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.ir.types import DType


class Format(NamedTuple):
    """Layout of one 8-bit float. `negative_zero`: else that byte is the only NaN."""

    mantissa: int
    bias: int
    negative_zero: bool
    infinity: int | None  # the byte of infinity, None where overflow gives NaN


FORMATS = {
    "f8e3m4": Format(4, 3, True, 0x70),
    "f8e4m3": Format(3, 7, True, 0x78),
    "f8e4m3fn": Format(3, 7, True, None),
    "f8e4m3b11fnuz": Format(3, 11, False, None),
    "f8e4m3fnuz": Format(3, 8, False, None),
    "f8e5m2": Format(2, 15, True, 0x7C),
    "f8e5m2fnuz": Format(2, 16, False, None),
}


def decode(f: Function, dtype: DType, byte: Val) -> Val:
    """The f32 a byte stands for."""
    values = np.arange(256, dtype=np.uint8).view(dtype.np).astype(np.float32)
    bits = ", ".join(f"i32 {int(word)}" for word in values.view(np.int32))
    table = f.module.constant(f"values_of_{dtype}", f"[256 x i32] [{bits}]")
    place = f.element(table, "i32", f.convert("zext", byte, "i64"))
    return f.convert("bitcast", f.load("i32", place), "float")


def encode(f: Function, dtype: DType, value: Val) -> Val:
    """The byte nearest to an f32."""
    form = FORMATS[dtype.name]
    word = lambda number: integer(number, "i32")
    bits = f.convert("bitcast", value, "i32")
    size = f.binary("and", bits, word(0x7FFFFFFF))
    code = f.select(
        f.compare("icmp ult", size, word((128 - form.bias) << 23)),
        _subnormal(f, form, size),
        _normal(f, form, size),
    )
    # Codes grow with the value, so what is too large has passed the largest code.
    largest = word(int(np.array(ml_dtypes.finfo(dtype.np).max).view(np.uint8)))
    nan = word(0x80 if not form.negative_zero else 0x7F)
    beyond = nan if form.infinity is None else word(form.infinity)
    code = f.select(f.compare("icmp sgt", code, largest), beyond, code)
    code = f.select(f.compare("icmp ugt", size, word(0x7F800000)), nan, code)
    sign = f.binary("and", f.binary("lshr", bits, word(24)), word(0x80))
    if not form.negative_zero:  # the byte of -0 is NaN
        unsigned = f.compare("icmp eq", code, word(0))
        sign = f.select(unsigned, word(0), sign)
    return f.convert("trunc", f.binary("or", code, sign), "i8")


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
