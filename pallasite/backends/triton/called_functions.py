"""Which functions of libdevice a kernel calls, because inline they would be too long.

Triton expands a function of libdevice once for each element that a thread holds: `sin`
of a tile with 64 elements per thread is 8,000 instructions, which LLVM and ptxas take a
second for. A kernel with many uses has one function per kind of use, on whole tiles,
which is not inlined. Few uses stay inline and are optimised with the code around them.
"""

from collections import Counter
from math import prod
from typing import Any, NamedTuple

from pallasite.backends.triton.launch import WARPS
from pallasite.backends.triton.text import physical
from pallasite.ir.nodes import Kernel, Op, walk
from pallasite.ir.types import TileType
from pallasite.passes.analysis.grid import find_pipeline

INLINE_LINES = 25_000  # of one kind in a kernel: about three seconds
FEW = 2  # uses that are always inline: a function saves at most half of them
# Instructions of a function per element, as NVRTC compiles it for f32.
LINES = {
    "sin": 126,
    "cos": 127,
    "tan": 128,
    "asin": 36,
    "acos": 40,
    "atan": 33,
    "atan2": 59,
    "sinh": 39,
    "cosh": 26,
    "tanh": 26,
    "asinh": 62,
    "acosh": 64,
    "atanh": 58,
    "erf": 28,
    "erfc": 73,
    "erf_inv": 46,
    "lgamma": 323,
    "cbrt": 19,
    "exp": 19,
    "expm1": 42,
    "log": 42,
    "log1p": 48,
    "log2": 45,
    "logistic": 27,
    "pow": 130,
}
DOUBLE = 2  # times as many for f64


class Kind(NamedTuple):
    """What two uses must share to call the same function."""

    name: str
    attrs: tuple[tuple[str, Any], ...]
    operands: tuple[TileType, ...]
    is_rough: bool


def kind_of(op: Op, is_rough: bool) -> Kind | None:
    if op.name not in LINES or not op.operands[0].tile.dtype.is_float:
        return None
    types = tuple(v.tile for v in op.operands)
    return Kind(op.name, tuple(op.own_attrs.items()), types, is_rough)


def called_kinds(kernel: Kernel, is_rough: Any) -> frozenset[Kind]:
    """The kinds that a scheduled kernel uses too often to inline them.

    `is_rough` tells whether the result of an op may be approximate.
    """
    kinds = (kind_of(op, is_rough(op)) for op in walk(kernel.body) if op.name in LINES)
    uses = Counter(kind for kind in kinds if kind is not None)
    if not uses:
        return frozenset()
    threads = 32 * find_pipeline(kernel).attrs.get(WARPS, 4)
    return frozenset(
        kind
        for kind, n in uses.items()
        if n > FEW and n * _lines(kind, threads) > INLINE_LINES
    )


def _lines(kind: Kind, threads: int) -> int:
    tile = kind.operands[0]
    held = max(1, prod(physical(tile.shape)) // threads)
    return held * LINES[kind.name] * (DOUBLE if tile.dtype.bits == 64 else 1)
