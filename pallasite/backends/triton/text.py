"""TTIR as text: types, constants, and the writer, which numbers and shares values.

A `Val` is a value of the emitted code: its name, its physical shape (every dimension a
power of two, as Triton requires) and its MLIR element type. Nothing here depends on IR
ops.
"""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pallasite.ir.types import DType

FLOATS_OF_8_BITS = ("f8E4M3FN", "f8E5M2", "f8E4M3FNUZ", "f8E5M2FNUZ")
# MLIR's names of the element types that Triton has.
ELEMENTS = {
    "bool": "i1",
    "u8": "i8",
    "u16": "i16",
    "u32": "i32",
    "u64": "i64",
    "i4": "i8",
    "u4": "i8",
    **{n.lower(): n for n in FLOATS_OF_8_BITS},
    **{n: n for n in ("i8", "i16", "i32", "i64", "bf16", "f16", "f32", "f64")},
}


def element(dtype: DType) -> str | None:
    """How a value of `dtype` is spelled in registers; None if Triton lacks it.

    A 4-bit number is held in 8 bits, extended.
    """
    return ELEMENTS.get(dtype.name)


def memory_element(dtype: DType) -> str | None:
    """The same in main memory: a bool takes a byte, two 4-bit numbers share one."""
    return "i8" if dtype.is_bool else ELEMENTS.get(dtype.name)


@dataclass(frozen=True)
class Val:
    """A value of the emitted code."""

    name: str
    shape: tuple[int, ...]
    elem: str

    @property
    def type(self) -> str:
        return type_text(self.shape, self.elem)

    def __str__(self) -> str:
        return self.name


def type_text(shape: Sequence[int], elem: str) -> str:
    if not shape:
        return elem
    return f"tensor<{'x'.join(map(str, shape))}x{elem}>"


_WIDTHS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_NUMPY = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}
_MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}
_INFINITY = {
    "f16": 0x7C00,
    "bf16": 0x7F80,
    "f32": 0x7F800000,
    "f64": 0x7FF0000000000000,
}


def number_text(value: float | int | bool, elem: str) -> str:
    """A number as an exact MLIR literal."""
    if elem == "i1":
        return "true" if value else "false"
    if elem.startswith("i"):
        bits = int(elem[1:])
        value = int(value) & ((1 << bits) - 1)
        return str(value - (1 << bits) if value >> (bits - 1) else value)
    value = float(np.asarray(value).astype(_NUMPY[elem]))
    if math.isfinite(value):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    bits = _INFINITY[elem]
    if math.isnan(value):
        bits |= 1 << _MANTISSA[elem] - 1
    if np.signbit(value):
        bits |= 1 << _WIDTHS[elem] - 1
    return f"0x{bits:0{_WIDTHS[elem] // 4}X}"


# Ops that no transpose is moved above.
_ROOTS = ("tt.load", "tt.gather", "tt.dot", "tt.make_range", "arith.constant")


class Writer:
    """Collects lines; equal pure expressions in scope share one value."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.count = 0
        self.scopes: list[dict[str, str]] = [{}]
        self.written_out: dict[str, int] = {}  # lines if nothing were shared
        self.origin = ""  # trailing comment: the source line they come from

    def fresh(self) -> str:
        self.count += 1
        return f"%{self.count - 1}"

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text + self.origin)

    def let(self, expression: str, shared: bool = True) -> str:
        """The name of a pure expression's value; `shared` False for impure ones."""
        if shared:
            for scope in self.scopes:
                if expression in scope:
                    return scope[expression]
        name = self.fresh()
        self.line(f"{name} = {expression}")
        if shared:
            self.scopes[-1][expression] = name
        if not expression.startswith(_ROOTS):
            used = re.findall(r"%\d+", expression)
            size = 1 + sum(self.written_out.get(each, 1) for each in used)
            self.written_out[name] = min(size, sys.maxsize)
        return name

    @contextmanager
    def region(self) -> Iterator[None]:
        """Indent, and on leaving forget what was computed inside."""
        self.depth += 1
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.depth -= 1
