"""Element types, tile types and ref types of the Kernel IR.

Every value is a tile (an array held in registers; a scalar is a rank-0 tile) or a ref
(a typed window onto memory in a named space). Read `nodes.py` next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import ml_dtypes as ml_dtypes  # registers its type names with numpy
import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type: its IR name, width, kind and numpy equivalent."""

    name: str
    bits: int
    kind: str  # "bool", "int", "uint" or "float"
    numpy_name: str

    @cached_property
    def np(self) -> np.dtype:
        return np.dtype(self.numpy_name)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_signed_int(self) -> bool:
        return self.kind == "int"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_bool(self) -> bool:
        return self.kind == "bool"

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and largest value of an integer type; bools are 0 and 1."""
        assert not self.is_float, self
        if self.is_bool:
            return 0, 1
        sign = int(self.is_signed_int)
        return -sign << (self.bits - 1), (1 << (self.bits - sign)) - 1

    @property
    def bytes(self) -> int:
        """Bytes per element in main memory (sub-byte types take one each)."""
        return max(1, self.bits // 8)

    def __str__(self) -> str:
        return self.name


def _row(name: str, bits: int, kind: str, numpy_name: str) -> DType:
    return DType(name, bits, kind, numpy_name)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _row("bool", 8, "bool", "bool"),
        _row("i2", 2, "int", "int2"),
        _row("u2", 2, "uint", "uint2"),
        _row("i4", 4, "int", "int4"),
        _row("u4", 4, "uint", "uint4"),
        _row("i8", 8, "int", "int8"),
        _row("u8", 8, "uint", "uint8"),
        _row("i16", 16, "int", "int16"),
        _row("u16", 16, "uint", "uint16"),
        _row("i32", 32, "int", "int32"),
        _row("u32", 32, "uint", "uint32"),
        _row("i64", 64, "int", "int64"),
        _row("u64", 64, "uint", "uint64"),
        _row("f4e2m1fn", 4, "float", "float4_e2m1fn"),
        _row("f8e3m4", 8, "float", "float8_e3m4"),
        _row("f8e4m3", 8, "float", "float8_e4m3"),
        _row("f8e4m3fn", 8, "float", "float8_e4m3fn"),
        _row("f8e4m3b11fnuz", 8, "float", "float8_e4m3b11fnuz"),
        _row("f8e4m3fnuz", 8, "float", "float8_e4m3fnuz"),
        _row("f8e5m2", 8, "float", "float8_e5m2"),
        _row("f8e5m2fnuz", 8, "float", "float8_e5m2fnuz"),
        _row("f8e8m0fnu", 8, "float", "float8_e8m0fnu"),
        _row("bf16", 16, "float", "bfloat16"),
        _row("f16", 16, "float", "float16"),
        _row("f32", 32, "float", "float32"),
        _row("f64", 64, "float", "float64"),
    )
}
_BY_NUMPY = {d.np: d for d in DTYPES.values()}

BOOL, I8, I32, I64, U8, U32 = (
    DTYPES[n] for n in ("bool", "i8", "i32", "i64", "u8", "u32")
)
BF16, F16, F32, F64 = (DTYPES[n] for n in ("bf16", "f16", "f32", "f64"))

FLOATS = tuple(d for d in DTYPES.values() if d.is_float)
INTS = tuple(d for d in DTYPES.values() if d.is_integer)
SIGNED = tuple(d for d in DTYPES.values() if d.is_float or d.is_signed_int)
NUMBERS = FLOATS + INTS
BITS = (*INTS, BOOL)
ALL = (*NUMBERS, BOOL)


def dtype_of(numpy_dtype: object) -> DType | None:
    """The IR dtype of a numpy dtype, or None if the IR has none."""
    try:
        return _BY_NUMPY.get(np.dtype(numpy_dtype))  # type: ignore[arg-type]
    except TypeError:
        return None


@dataclass(frozen=True)
class Layout:
    """How elements are placed in the registers of lanes, or in memory: `@swizzle(128)`.

    Exists only at the explicit level; the backend defines which kinds there are and
    what they mean. To the evaluator, a value is the same in every layout.
    """

    kind: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        numbers = f"({', '.join(map(str, self.numbers))})" if self.numbers else ""
        return f"@{self.kind}{numbers}"


def size_text(n: Any) -> str:
    """A size: a number, or a symbol (`b`, `2*b + 1`) that an export leaves open.

    Symbols are objects of JAX's that compute like ints, stand for 1 or more, and raise
    where a comparison has no one answer.
    """
    return f"{n:d}" if isinstance(n, (int, np.integer)) else str(n)


@dataclass(frozen=True)
class TileType:
    """An immutable array value. `shape == ()` is a scalar."""

    shape: tuple[int, ...]
    dtype: DType
    layout: Layout | None = None  # None: the backend chooses

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def with_shape(self, shape: Sequence[int]) -> "TileType":
        return TileType(tuple(shape), self.dtype, self.layout)

    def with_dtype(self, dtype: DType) -> "TileType":
        return TileType(self.shape, dtype, self.layout)

    def __str__(self) -> str:
        layout = "" if self.layout is None else f" {self.layout}"
        if not self.shape:
            return self.dtype.name + layout
        return f"{self.dtype}[{','.join(map(size_text, self.shape))}]{layout}"


# Memory spaces. `any` is main memory as a whole; `block` is wherever a backend puts the
# window of a pipeline (VMEM, shared memory, registers, or a view of main memory).
SPACES = (
    "any",  # main memory, wherever the array lives
    "hbm",
    "host",
    "block",
    "vmem",
    "smem",
    "cmem",
    "vmem_shared",
    "gmem",
    "tmem",
    "regs",
    "sem",  # counting semaphores
    "dma_sem",  # semaphores that async copies signal
    "barrier_sem",  # semaphores shared between devices
    "gpu_sem",  # counting semaphores of thread blocks, in a GPU's memory
    "mbarrier",  # barriers in a GPU's shared memory; count arrivals and bytes
)


@dataclass(frozen=True)
class RefType:
    """A mutable window onto memory."""

    shape: tuple[int, ...]
    dtype: DType
    space: str = "block"
    layout: Layout | None = None  # None: the backend chooses

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def tile(self) -> TileType:
        """The type of a load of the whole ref; its layout is not the ref's."""
        return TileType(self.shape, self.dtype)

    @property
    def is_semaphore(self) -> bool:
        return self.space in ("sem", "dma_sem", "barrier_sem", "gpu_sem", "mbarrier")

    def with_shape(self, shape: Sequence[int]) -> "RefType":
        return RefType(tuple(shape), self.dtype, self.space, self.layout)

    def __str__(self) -> str:
        layout = "" if self.layout is None else f" {self.layout}"
        return f"ref<{self.tile} {self.space}{layout}>"


Type = TileType | RefType


def scalar(dtype: DType) -> TileType:
    return TileType((), dtype)


INDEX = scalar(I32)  # loop counters, program ids and block indices
