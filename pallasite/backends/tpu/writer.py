"""MLIR text: types, literals, and a writer of one function's lines.

`Writer` assigns value names, keeps constants at the top of the function (each once)
and indents regions. The emitter (`emit.py`) decides what is written.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from pallasite.ir.nodes import Loc
from pallasite.ir.types import F32, I32, DType, TileType

# Element types that Mosaic has, by their MLIR names; integers are signless there.
ELEMENTS = {
    "bool": "i1",
    **{f"{sign}{bits}": f"i{bits}" for sign in "iu" for bits in (2, 4, 8, 16, 32)},
    "bf16": "bf16",
    "f32": "f32",
    "f8e4m3fn": "f8E4M3FN",
    "f8e5m2": "f8E5M2",
    "f8e4m3b11fnuz": "f8E4M3B11FNUZ",
    "f4e2m1fn": "f4E2M1FN",
}
SPACES = {
    "any": "any",
    "hbm": "hbm",
    "host": "host",
    "block": "vmem",
    "vmem": "vmem",
    "smem": "smem",
    "cmem": "cmem",
    "vmem_shared": "vmem_shared",
    "sem": "semaphore_mem",
    "dma_sem": "semaphore_mem",
    "barrier_sem": "semaphore_mem",
}
SEMAPHORES = {
    "sem": "!tpu.semaphore",
    "dma_sem": "!tpu.dma_semaphore",
    "barrier_sem": "!tpu.semaphore",
}


def vector(shape: Sequence[int], element: str) -> str:
    """The type of a tile: a vector, or the bare element at rank 0."""
    return f"vector<{_shaped(shape, element)}>" if shape else element


def word_dtype(dtype: DType) -> DType:
    """The 32-bit type that represents every value of `dtype`."""
    if dtype.is_float:
        return F32
    return I32 if dtype.bits < 32 else dtype


def held_dtype(dtype: DType) -> DType:
    """What holds a scalar of `dtype`: a bit, or a 32-bit register."""
    return dtype if dtype.is_bool else word_dtype(dtype)


def element_text(dtype: DType) -> str:
    return ELEMENTS[dtype.name]


def tile_text(tile: TileType) -> str:
    dtype = tile.dtype if tile.shape else held_dtype(tile.dtype)
    return vector(tile.shape, element_text(dtype))


def memref(shape: Sequence[int], element: str, space: str) -> str:
    return f"memref<{_shaped(shape, element)}, #tpu.memory_space<{space}>>"


def _shaped(shape: Sequence[int], element: str) -> str:
    return "x".join([*map(str, shape), element])


def literal(value: float | int | bool, dtype: DType) -> str:
    """A number as an MLIR attribute (bits in hexadecimal where it has no decimals)."""
    if dtype.is_bool:
        return "true" if value else "false"
    if not dtype.is_float:
        # Unsigned values past the signed range wrap: MLIR integers are signless here.
        wrapped = int(value) % (1 << dtype.bits)
        half = 1 << (dtype.bits - 1)
        return str(wrapped - (1 << dtype.bits) if wrapped >= half else wrapped)
    value = float(value)
    if not math.isfinite(value):
        raw = np.array(value).astype(dtype.np).tobytes()[::-1].hex()
        return f"0x{raw.upper()}"
    text = repr(value)
    mantissa, _, exponent = text.partition("e")
    mantissa = mantissa if "." in mantissa else mantissa + ".0"
    return f"{mantissa}e{exponent}" if exponent else mantissa


def array(kind: str, values: Sequence[int]) -> str:
    """A dense array attribute: `array<i64: 8, 128>`."""
    return (
        f"array<{kind}: {', '.join(map(str, values))}>" if values else f"array<{kind}>"
    )


class Writer:
    """The lines of one function."""

    def __init__(self, with_locations: bool = False):
        self.with_locations = with_locations
        self.loc: Loc | None = None
        self.lines: list[str] = []
        self.prologue: list[str] = []
        self._constants: dict[tuple[str, str], str] = {}
        self._depth = 2
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        return f"%{self._count - 1}"

    def line(self, text: str) -> None:
        self.lines.append("  " * self._depth + text + self._location())

    def value(self, text: str) -> str:
        """Emit an op with one result; returns its name."""
        name = self.fresh()
        self.line(f"{name} = {text}")
        return name

    def values(self, count: int, text: str) -> tuple[str, ...]:
        """Open an op with `count` results and regions; returns the results' names.

        A location would have to come after the regions; these ops have none.
        """
        if not count:
            self._open(text)
            return ()
        name = self.fresh()
        self._open(f"{name}{f':{count}' if count > 1 else ''} = {text}")
        if count == 1:
            return (name,)
        return tuple(f"{name}#{i}" for i in range(count))

    def _open(self, text: str) -> None:
        self.lines.append("  " * self._depth + text)
        self._depth += 1

    def next_region(self, text: str) -> None:
        """Close one region of an op and open the next: `} else {`."""
        self.lines.append("  " * (self._depth - 1) + text)

    def close(self, text: str = "}") -> None:
        self._depth -= 1
        self.lines.append("  " * self._depth + text)

    def constant(self, value: str, type_text: str) -> str:
        """A constant, emitted once at the top of the function."""
        key = (value, type_text)
        if key not in self._constants:
            name = f"%c{len(self._constants)}"
            self._constants[key] = name
            typed = "" if type_text == "i1" else f" : {type_text}"
            self.prologue.append(f"    {name} = arith.constant {value}{typed}")
        return self._constants[key]

    def number(self, value: float | int | bool, tile: TileType) -> str:
        """A tile filled with one number."""
        text = literal(value, tile.dtype if tile.shape else held_dtype(tile.dtype))
        return self.constant(f"dense<{text}>" if tile.shape else text, tile_text(tile))

    def index(self, value: int) -> str:
        return self.constant(str(value), "index")

    def i32(self, value: int) -> str:
        return self.constant(str(value), "i32")

    @contextlib.contextmanager
    def at(self, loc: Loc | None) -> Iterator[None]:
        """Ops emitted in this block come from `loc`."""
        before, self.loc = self.loc, loc or self.loc
        yield
        self.loc = before

    def _location(self) -> str:
        if not self.with_locations or self.loc is None:
            return ""
        file = self.loc.file.replace("\\", "\\\\").replace('"', '\\"')
        return f' loc("{file}":{self.loc.line}:1)'
