"""Elementwise functions that are more than one instruction or library call.

Each takes the function under construction, the operand type and registers, and returns
a register; `arithmetic.py` lists them in its table.
"""

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.ir.types import F32, F64, DType


def nextafter(f: Function, dtype: DType, x: Val, y: Val) -> Val:
    """The neighbour of x towards y, on the bits: denormals would flush otherwise."""
    n = dtype.bits
    type = f"i{n}"
    number = lambda value: integer(value, type)
    sign_bit, size_bits = number(-(1 << (n - 1))), number((1 << (n - 1)) - 1)
    x_bits, y_bits = (scalars.to_bits(f, dtype, v) for v in (x, y))
    x_size, y_size = (f.binary("and", bits, size_bits) for bits in (x_bits, y_bits))
    x_sign, y_sign = (f.binary("and", bits, sign_bit) for bits in (x_bits, y_bits))
    signs_differ = f.compare("icmp ne", x_sign, y_sign)
    shrinks = f.binary("or", signs_differ, f.compare("icmp ugt", x_size, y_size))
    moved = f.binary("add", x_bits, f.select(shrinks, number(-1), number(1)))
    from_zero = f.compare("icmp eq", x_size, number(0))
    moved = f.select(from_zero, f.binary("or", y_sign, number(1)), moved)
    both_zero = f.compare("icmp eq", f.binary("or", x_size, y_size), number(0))
    stays = f.binary("or", both_zero, f.compare("icmp eq", x_bits, y_bits))
    result = scalars.from_bits(f, dtype, f.select(stays, y_bits, moved))
    is_nan = f.compare("fcmp uno", x, y)
    return f.select(is_nan, f.binary("fadd", x, y), result)


def reduce_precision(
    f: Function, dtype: DType, x: Val, *, exponent_bits: int, mantissa_bits: int
) -> Val:
    """Round to fewer mantissa bits, then overflow to infinity and flush to zero."""
    wide = F64 if dtype == F64 else F32
    mantissa, bias = (52, 1023) if wide == F64 else (23, 127)
    n = wide.bits
    number = lambda value: integer(value, f"i{n}")
    bits = f.convert("bitcast", x, f"i{n}")
    sign = f.binary("and", bits, number(-(1 << (n - 1))))
    size = f.binary("and", bits, number((1 << (n - 1)) - 1))
    drop = mantissa - mantissa_bits
    if drop > 0:
        odd = f.binary("and", f.binary("lshr", size, number(drop)), number(1))
        half = number((1 << (drop - 1)) - 1)
        size = f.binary("add", f.binary("add", size, half), odd)
        size = f.binary("and", size, number(-(1 << drop)))
    new_bias = (1 << (exponent_bits - 1)) - 1
    top = min(bias + new_bias, 2 * bias)
    kept = min(mantissa_bits, mantissa)
    fraction = ((1 << kept) - 1) << (mantissa - kept)
    largest = number((top << mantissa) | fraction)
    infinity = number((2 * bias + 1) << mantissa)
    smallest = number(max(bias + 1 - new_bias, 1) << mantissa)
    size = f.select(f.compare("icmp ugt", size, largest), infinity, size)
    size = f.select(f.compare("icmp ult", size, smallest), number(0), size)
    result = f.convert("bitcast", f.binary("or", sign, size), x.type)
    is_nan = f.compare("fcmp uno", x, x)
    return f.select(is_nan, x, result)
