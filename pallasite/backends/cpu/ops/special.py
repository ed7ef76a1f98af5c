"""Elementwise functions that are more than one instruction or library call.

Each takes the function under construction, the operand type and registers, and returns
a register; `arithmetic.py` lists them in its table.
"""

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.ir.types import DType


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
