"""A mask of pairs known at trace time, in a kernel's blocks.

Each block of pairs has a code: no pair allowed, all allowed, or the number of the tile
that says which are. Blocks with the same pattern share a tile.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, SpecError

EMPTY, FULL = 0, 1  # block codes, and the numbers of their tiles


class Frozen:
    """A boolean matrix that compares by value, as a static part of jitted calls."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.array.flags.writeable = False
        self.identity = (array.shape, np.packbits(array).tobytes())

    @staticmethod
    def of(given: Any) -> "Frozen":
        if isinstance(given, Frozen):
            return given
        if not jaxcompat.is_concrete(given):
            raise KernelTypeError(
                "attention mask: allowed is a traced value",
                [("allowed", f"{given.dtype}{list(given.shape)}")],
                fix="pass a numpy array, created outside jit",
            )
        array = np.asarray(given)
        if array.ndim != 2 or array.dtype != bool:
            raise SpecError(
                "attention mask: allowed is not a boolean matrix",
                [("is", f"{array.dtype}{list(array.shape)}")],
                fix="pass booleans (blocks of queries, blocks of keys)",
            )
        return Frozen(array.copy())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        rows, columns = self.array.shape
        return f"bool[{rows},{columns}]"


class PairTable(NamedTuple):
    """A mask in blocks.

    Attributes:
        codes: int32 (blocks of queries, blocks of keys).
        tiles: int8 (codes, queries per block, keys per block), 1 where a pair is
            allowed; None if there are only empty and full blocks.
    """

    codes: np.ndarray
    tiles: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class _Side:
    """A kernel's blocks along one side, in units that divide its and the mask's."""

    size: int
    block: int
    unit: int

    @staticmethod
    def of(size: int, block: int, mask_block: int) -> "_Side":
        return _Side(size, block, math.gcd(block, mask_block))

    @property
    def blocks(self) -> int:
        return max(-(-self.size // self.block), 1)

    def places(self, mask_block: int, have: int) -> np.ndarray:
        """The position of every unit in the mask.

        Units past the end repeat the last one, so that a block there may still be
        full: whatever is past the end is masked or not stored anyway.
        """
        units = np.arange(self.blocks * self.block // self.unit) * self.unit
        last = min(max(self.size - 1, 0) // mask_block, max(have - 1, 0))
        return np.minimum(units // mask_block, last)


def pair_table(
    allowed: np.ndarray,
    mask_blocks: tuple[int, int],
    sizes: tuple[int, int],
    blocks: tuple[int, int],
) -> PairTable:
    """The mask `allowed`, whose elements cover `mask_blocks` pairs, in `blocks`."""
    q, k = (_Side.of(*each) for each in zip(sizes, blocks, mask_blocks, strict=True))
    codes = np.zeros((q.blocks, k.blocks), np.int32)
    if not allowed.size:
        return PairTable(codes, None)
    rows, columns = (
        side.places(block, have)
        for side, block, have in zip((q, k), mask_blocks, allowed.shape, strict=True)
    )
    numbers: dict[bytes, int] = {}
    tiles = []
    for i, strip in enumerate(rows.reshape(q.blocks, -1)):
        units = allowed[strip][:, columns].reshape(len(strip), k.blocks, -1)
        some, every = units.any(axis=(0, 2)), units.all(axis=(0, 2))
        codes[i] = np.where(every, FULL, EMPTY)
        for j in np.flatnonzero(some & ~every):
            tile = np.ascontiguousarray(units[:, j])
            number = numbers.setdefault(tile.tobytes(), len(numbers) + 2)
            codes[i, j] = number
            if len(tiles) < len(numbers):
                tiles.append(tile.repeat(q.unit, axis=0).repeat(k.unit, axis=1))
    if not tiles:
        return PairTable(codes, None)
    whole = np.zeros((2, q.block, k.block), bool)
    whole[FULL] = True
    return PairTable(codes, np.concatenate([whole, np.stack(tiles)]).astype(np.int8))
