"""Shared memory and barriers of the rings through which roles pass tiles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, Op, Span, Value
from pallasite.ir.types import I32, Layout, RefType, TileType
from pallasite.passes.schedule.gpu_blocks import SHORT_TILE, whole

SWIZZLE = 128  # bytes of a row of a panel in shared memory
K_BYTES = 32  # of each operand's row per instruction


@dataclass(eq=False)
class Ring:
    """A ring buffer in shared memory for tiles of the same arrays and shapes."""

    arrays: tuple[Value, ...]
    tiles: tuple[TileType, ...]
    is_shared: bool  # by all loads of these arrays and shapes
    lines: frozenset[int] = frozenset()  # tiles laid out as in main memory
    loaded: frozenset[int] = frozenset()  # tiles that threads load: lines and boxes
    lefts: frozenset[int] = frozenset()  # tiles whose rows are a matmul's
    deeps: frozenset[int] = frozenset()  # tiles whose rows a matmul contracts
    wides: frozenset[int] = frozenset()  # tiles whose columns are a matmul's rows
    stages: int = 1
    unit: int = SHORT_TILE  # rows that an instruction reads
    # Tiles of which each of two thread blocks has half, and along which dimension.
    halves: dict[int, int] = field(default_factory=dict[int, int])

    def own(self, number: int) -> tuple[int, ...]:
        """The shape of this thread block's part of a tile."""
        half = self.halves.get(number)
        shape = self.tiles[number].shape
        return tuple(n // 2 if dim == half else n for dim, n in enumerate(shape))

    def held(self, number: int) -> tuple[int, ...]:
        """The shape of a tile's memory: an instruction reads whole blocks of rows."""
        *rows, columns = self.own(number)
        if number in self.lefts:
            return (whole(prod(rows), self.unit), columns)
        if number in self.wides:
            columns = whole(columns, self.unit)
        return (
            (self.depth(number), columns) if number in self.deeps else (*rows, columns)
        )

    def depth(self, number: int) -> int:
        """Rows that are contracted, with those of zeros after them."""
        *rows, _ = self.tiles[number].shape
        return whole(prod(rows), K_BYTES // self.tiles[number].dtype.bytes)

    @property
    def bytes(self) -> int:
        """Size of one stage; the rows of swizzled tiles are whole rows of panels."""
        total = 0
        for n, tile in enumerate(self.tiles):
            size = prod(self.held(n))
            row = size if n in self.lines else self.own(n)[-1]
            panels = -(-row * tile.dtype.bytes // SWIZZLE)
            total += size // row * panels * SWIZZLE
        return total

    @property
    def tile_bytes(self) -> int:
        return sum(prod(self.own(n)) * t.dtype.bytes for n, t in enumerate(self.tiles))


@dataclass(eq=False)
class Group:
    """Loads that are copied together into a ring, under one pair of barriers."""

    loads: list[Op]
    block: Block
    ring: Ring

    def is_loaded(self, load: Op) -> bool:
        """Whether threads load it from the ring."""
        return self.loads.index(load) in self.ring.loaded


class RingMemory:
    """Shared memory and barriers of all rings."""

    def __init__(self, rings: Sequence[Ring], arrivals: Callable[[Ring], int]):
        """`arrivals`: how many tell that a slot of a ring is free."""
        b = Builder()
        self.buffers: dict[Ring, tuple[Value, ...]] = {}
        self.full: dict[Ring, Value] = {}
        self.empty: dict[Ring, Value] = {}
        for ring in rings:
            types = [_slots(ring, n) for n in range(len(ring.tiles))]
            self.buffers[ring] = tuple(alloc(b, t, "ring") for t in types)
        for ring in rings:
            self.full[ring] = alloc(b, _barriers(ring.stages, 1), "full")
            self.empty[ring] = alloc(b, _barriers(ring.stages, arrivals(ring)), "empty")
        self.ops = b.ops

    def zeros_after_rows(self, b: Builder) -> None:
        """What matmuls contract beside the rows of a tile, which no copy changes."""
        before = len(b.ops)
        for ring in self.buffers:
            for number in ring.deeps:
                tile, ref = ring.tiles[number], self.buffers[ring][number]
                first, columns = prod(tile.shape[:-1]), tile.shape[-1]
                rows = Span(first, ring.depth(number) - first)
                zeros = TileType((rows.size, columns), tile.dtype)
                for slot in range(ring.stages if rows.size else 0):
                    place = b.subview(ref, (At(slot), rows, Span(0, columns)))
                    b.store(place, b.constant(0, zeros))
        if len(b.ops) > before:
            b.emit("fence_async")


def alloc(b: Builder, type: RefType, name: str) -> Value:
    (ref,) = b.emit("alloc", type=type, names=[name])
    return ref


def _slots(ring: Ring, number: int) -> RefType:
    tile = ring.tiles[number]
    layout = None if number in ring.lines else Layout("swizzle", (SWIZZLE,))
    return RefType((ring.stages, *ring.held(number)), tile.dtype, "smem", layout)


def _barriers(stages: int, arrivals: int) -> RefType:
    return RefType((stages,), I32, "mbarrier", Layout("arrivals", (arrivals,)))


SCALAR = RefType((), I32, "regs")
