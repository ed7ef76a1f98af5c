"""Which functions of libdevice a kernel calls, because inline they would be too long.

A function takes whole tiles: a call for each element would be too long again where a
kernel has hundreds of uses.
"""

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from pallasite.backends.libdevice import LINES, is_called
from pallasite.backends.triton.launch import WARPS
from pallasite.ir.nodes import Kernel, Op, walk
from pallasite.ir.types import TileType
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.target.chip import physical


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


def called_kinds(kernel: Kernel, is_rough: Callable[[Op], bool]) -> frozenset[Kind]:
    """The kinds that a scheduled kernel uses too often to inline them.

    `is_rough` tells whether the result of an op may be approximate.
    """
    kinds = (kind_of(op, is_rough(op)) for op in walk(kernel.body) if op.name in LINES)
    uses = Counter(kind for kind in kinds if kind is not None)
    if not uses:
        return frozenset()
    threads = 32 * find_pipeline(kernel).attrs.get(WARPS, 4)
    held = lambda tile: prod(physical(tile.shape)) // threads
    return frozenset(
        kind
        for kind, n in uses.items()
        if is_called(kind.name, kind.operands[0], held(kind.operands[0]), n)
    )
