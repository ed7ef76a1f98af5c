"""The form of each element type in registers and memory, and conversions.

Narrow floats (bf16, f16, f8, f4) are held in registers as the f32 of equal value,
rounded after every operation; bools are i1 in registers and a byte in memory. Used by
all code that handles elements: `arithmetic.py`, `tiles.py`, `memory.py`.
"""

import struct
from typing import Any, NamedTuple

import numpy as np

from pallasite.backends.cpu.llvm import float8, strided_loads
from pallasite.backends.cpu.llvm.values import lane_type
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.errors import UnsupportedError
from pallasite.ir.types import F32, DType


class Spelling(NamedTuple):
    """The LLVM types of one element type."""

    register: str
    memory: str


SPELLINGS = {
    "bool": Spelling("i1", "i8"),
    **{f"{s}{n}": Spelling(f"i{n}", "i8") for s in "iu" for n in (2, 4)},
    **{f"{s}{n}": Spelling(f"i{n}", f"i{n}") for s in "iu" for n in (8, 16, 32, 64)},
    "bf16": Spelling("float", "i16"),
    "f16": Spelling("float", "half"),
    "f32": Spelling("float", "float"),
    "f64": Spelling("double", "double"),
    **{name: Spelling("float", "i8") for name in float8.FORMATS},
}


def spelling(dtype: DType) -> Spelling:
    try:
        return SPELLINGS[dtype.name]
    except KeyError:
        raise UnsupportedError(
            f"backend 'cpu' does not support element type {dtype}",
            [("has", ", ".join(SPELLINGS))],
            fix="cast to one of these before the call, or use interpret=True",
        ) from None


def register(dtype: DType) -> str:
    return spelling(dtype).register


def memory(dtype: DType) -> str:
    return spelling(dtype).memory


def is_narrow(dtype: DType) -> bool:
    """Whether it is held in registers as a wider float."""
    return dtype.is_float and dtype.bits < 32


def is_part_of_byte(dtype: DType) -> bool:
    """Whether it is narrower than a byte, one per byte (`runtime/ffi.py`)."""
    return dtype.bits < 8


def constant(value: Any, dtype: DType) -> Val:
    """A register constant; floats are written exactly, as the bits of a double."""
    if dtype.is_bool:
        return Val("i1", str(int(bool(value))))
    if dtype.is_integer:
        wrapped = int(value) & ((1 << dtype.bits) - 1)
        if wrapped >> (dtype.bits - 1):
            wrapped -= 1 << dtype.bits
        return integer(wrapped, register(dtype))
    with np.errstate(all="ignore"):
        rounded = float(np.asarray(value).astype(dtype.np).astype(np.float64))
    return floating(rounded, register(dtype))


def floating(value: float, type: str = "double") -> Val:
    """A scalar constant; for a vector type, that of one lane."""
    type = lane_type(type)
    if type == "float":
        with np.errstate(all="ignore"):
            value = float(np.float32(value))
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return Val(type, f"0x{bits:016X}")


def zero(dtype: DType) -> Val:
    return constant(0, dtype)


# --- memory ---


def load(f: Function, dtype: DType, pointer: Val) -> Val:
    near = strided_loads.near(f, pointer)
    raw = (
        strided_loads.load(f, memory(dtype), near)
        if near
        else f.load(memory(dtype), pointer)
    )
    return from_memory(f, dtype, raw)


def store(f: Function, dtype: DType, value: Val, pointer: Val) -> None:
    f.store(to_memory(f, dtype, value), pointer)


def from_memory(f: Function, dtype: DType, raw: Val) -> Val:
    if dtype.is_bool:
        return f.compare("icmp ne", raw, integer(0, "i8"))
    if is_part_of_byte(dtype) and dtype.is_integer:
        return f.convert("trunc", raw, register(dtype))
    if dtype.name == "bf16":
        wide = f.binary("shl", f.convert("zext", raw, "i32"), integer(16, "i32"))
        return f.convert("bitcast", wide, "float")
    if dtype.name == "f16":
        return f.convert("fpext", raw, "float")
    if dtype.name in float8.FORMATS:
        return float8.decode(f, dtype, raw)
    return raw


def to_memory(f: Function, dtype: DType, value: Val) -> Val:
    if dtype.is_bool:
        return f.convert("zext", value, "i8")
    if is_part_of_byte(dtype) and dtype.is_integer:
        return f.convert("sext" if dtype.is_signed_int else "zext", value, "i8")
    if dtype.name == "bf16":
        bits = f.convert("bitcast", value, "i32")
        high = f.binary("lshr", bits, integer(16, "i32"))
        return f.convert("trunc", high, "i16")
    if dtype.name == "f16":
        return f.convert("fptrunc", value, "half")
    if dtype.name in float8.FORMATS:
        return float8.encode(f, dtype, value)
    return value


def to_bits(f: Function, dtype: DType, value: Val) -> Val:
    """The memory form as an integer of the same width."""
    if is_part_of_byte(dtype) and dtype.is_integer:
        return value
    raw = to_memory(f, dtype, value)
    how = "trunc" if is_part_of_byte(dtype) else "bitcast"
    return f.convert(how, raw, f"i{dtype.bits}")


def from_bits(f: Function, dtype: DType, bits: Val) -> Val:
    if is_part_of_byte(dtype) and dtype.is_integer:
        return bits
    how = "zext" if is_part_of_byte(dtype) else "bitcast"
    return from_memory(f, dtype, f.convert(how, bits, memory(dtype)))


# --- rounding and conversion ---


def rounded(f: Function, dtype: DType, value: Val) -> Val:
    """The result of f32 arithmetic as a value of `dtype` (nearest even)."""
    if dtype.name == "f16":
        return f.convert("fpext", f.convert("fptrunc", value, "half"), "float")
    if dtype.name in float8.FORMATS:
        return float8.decode(f, dtype, float8.encode(f, dtype, value))
    if dtype.name != "bf16":
        return value
    bits = f.convert("bitcast", value, "i32")
    shifted = f.binary("lshr", bits, integer(16, "i32"))
    odd = f.binary("and", shifted, integer(1, "i32"))
    bias = f.binary("add", odd, integer(0x7FFF, "i32"))
    keep = integer(-0x10000, "i32")
    near = f.binary("and", f.binary("add", bits, bias), keep)
    # Adding could carry a NaN into the sign bit, so NaNs are truncated and made quiet.
    quiet = f.binary("or", f.binary("and", bits, keep), integer(0x400000, "i32"))
    is_nan = f.compare("fcmp uno", value, value)
    return f.convert("bitcast", f.select(is_nan, quiet, near), "float")


def cast(f: Function, value: Val, source: DType, target: DType) -> Val:
    """Convert as XLA does: floats to integers saturate, NaN becomes 0."""
    if source == target:
        return value
    if target.is_bool:
        test = "fcmp une" if source.is_float else "icmp ne"
        return f.compare(test, value, zero(source))
    if target.is_float:
        return _to_float(f, value, source, target)
    if source.is_float and value.count:
        return _saturated(f, value, target)
    if source.is_float:
        sign = "s" if target.is_signed_int else "u"
        # The saturating intrinsics are overloaded on both types.
        name = f"fpto{sign}i.sat.{register(target)}"
        return f.intrinsic(name, value, returns=register(target))
    if source.bits > target.bits and not source.is_bool:
        return f.convert("trunc", value, register(target))
    extend = "sext" if source.is_signed_int else "zext"
    return f.convert(extend, value, register(target))


def _saturated(f: Function, value: Val, target: DType) -> Val:
    """LLVM's saturating conversion, which LLVM itself would scalarise."""
    bits, signed = target.bits, target.is_signed_int
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    first, beyond = (floating(float(bound), value.type) for bound in (low, high))
    above = f.compare("fcmp oge", value, beyond)
    below = f.compare("fcmp olt", value, first)
    # NaN is neither, so it must not be converted either.
    inside = f.binary("and", f.compare("fcmp oge", value, first), f.negate(above))
    safe = f.select(inside, value, floating(0.0, value.type))
    converted = f.convert("fptosi" if signed else "fptoui", safe, register(target))
    if signed:
        converted = f.select(below, constant(low, target), converted)
    return f.select(above, constant(high - 1, target), converted)


def _to_float(f: Function, value: Val, source: DType, target: DType) -> Val:
    wide = register(target)
    if not source.is_float:
        name = "sitofp" if source.is_signed_int else "uitofp"
        return rounded(f, target, f.convert(name, value, wide))
    if source.name == "f64":
        return rounded(f, target, f.convert("fptrunc", value, wide))
    if target.name == "f64":
        return f.convert("fpext", value, wide)
    return value if target == F32 else rounded(f, target, value)


def index(f: Function, value: Val, dtype: DType) -> Val:
    """An integer scalar as i64, so that clamping it to a range is enough."""
    number = value.constant
    if number is not None:
        unsigned = number < 0 and not dtype.is_signed_int
        return integer(min(number + unsigned * 2**dtype.bits, 2**63 - 1))
    if dtype.name == "u64":
        return f.intrinsic("umin", value, integer(2**63 - 1))
    return f.convert("sext" if dtype.is_signed_int else "zext", value, "i64")
