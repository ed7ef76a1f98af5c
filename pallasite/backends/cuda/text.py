"""CUDA C++ as text: element types, numbers, and the writer.

Tiles are arrays in registers, indexed only by the counters of unrolled loops, so that
the compiler assigns each element a register. 16- and 8-bit floats are held as bits and
computed in f32. Nothing here depends on IR ops.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from pallasite.ir.types import DType

# How an element is held, in registers and in memory (`functions.py` has the typedefs).
TYPES = {
    **{n: n for n in ("bool", "i8", "u8", "i16", "u16", "u32", "i64", "u64")},
    **{n: n for n in ("bf16", "f16", "f8e4m3fn", "f8e5m2")},
    "i32": "int",
    "f32": "float",
    "f64": "double",
}


def c_type(dtype: DType) -> str | None:
    return TYPES.get(dtype.name)


def memory_type(dtype: DType) -> str | None:
    """The same in memory: scales of matmuls are only copied."""
    return "u8" if dtype.name == "f8e8m0fnu" else c_type(dtype)


def is_narrow(dtype: DType) -> bool:
    """Whether it is a float that is computed in f32."""
    return dtype.is_float and dtype.bits < 32


def number(value: float | int | bool, dtype: DType) -> str:
    """A number as an exact C++ literal, in the type that `dtype` is computed in."""
    if dtype.is_bool:
        return "true" if value else "false"
    if dtype.is_float:
        return _float(value, dtype)
    value = int(value)
    if dtype.bits == 64:
        if value == -(1 << 63):
            return "(-9223372036854775807ll - 1)"
        return f"{value}ull" if dtype.kind == "uint" else _signed(f"{value}ll")
    if value == -(1 << 31):
        return "(-2147483647 - 1)"
    return f"{value}u" if dtype.name == "u32" else _signed(str(value))


def _signed(text: str) -> str:
    """In parentheses where a sign could follow another."""
    return f"({text})" if text.startswith("-") else text


def _float(value: float, dtype: DType) -> str:
    value = float(np.asarray(value).astype(dtype.np))
    wide = dtype.bits == 64
    if math.isfinite(value):
        text = repr(value)
        text = text if "." in text or "e" in text else text + ".0"
        return _signed(text if wide else text + "f")
    if wide:
        bits = np.float64(value).view(np.uint64)
        return f"__longlong_as_double({bits}ll)"
    return f"__uint_as_float({hex(np.float32(value).view(np.uint32))}u)"


_LOOP = re.compile(r"^(\s*)EACH\((\d+)\) ([^\"]*;|\{ [^\"]* \})$")
_COUNTER = re.compile(r"\bi\b")
SHORT = 16  # rounds of a loop
MANY_LOOPS = 200


def with_short_loops_written_out(text: str) -> str:
    """The rounds of short loops one after another, if a text has many of them.

    The compiler's time for each loop grows with the function around it: 2200 loops of
    four rounds take it 16 s, and the statements 2 s.
    """
    lines = text.splitlines()
    loops = [_LOOP.match(line) for line in lines]
    if len(lines) - loops.count(None) < MANY_LOOPS:
        return text
    written = list[str]()
    for line, loop in zip(lines, loops, strict=True):
        if loop is None or int(loop[2]) > SHORT:
            written.append(line)
        else:
            rounds = range(int(loop[2]))
            written += [loop[1] + _COUNTER.sub(str(i), loop[3]) for i in rounds]
    return "\n".join([*written, ""])


class Writer:
    """Collects lines and gives names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.count = 0
        self.origin = ""  # trailing comment: the source line they come from

    def fresh(self, hint: str = "v") -> str:
        self.count += 1
        return f"{hint}{self.count - 1}"

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text + self.origin)

    @contextmanager
    def block(self, head: str = "", tail: str = "}") -> Iterator[None]:
        self.line(f"{head} {{" if head else "{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line(tail)
