"""Shared memory and barriers of the rings through which roles pass tiles."""

from pallasite.backends.cuda.products import SWIZZLE, Plan, Ring
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ir.types import I32, Layout, RefType


class RingMemory:
    """Shared memory and barriers of all rings."""

    def __init__(self, plan: Plan):
        b = Builder()
        self.buffers: dict[Ring, tuple[Value, ...]] = {}
        self.full: dict[Ring, Value] = {}
        self.empty: dict[Ring, Value] = {}
        for ring in plan.rings:
            types = [_slots(ring, n) for n in range(len(ring.tiles))]
            self.buffers[ring] = tuple(alloc(b, t, "ring") for t in types)
        for ring in plan.rings:
            warps = 4 * plan.warpgroups
            self.full[ring] = alloc(b, _barriers(ring.stages, 1), "full")
            self.empty[ring] = alloc(b, _barriers(ring.stages, warps), "empty")
        self.ops = b.ops


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
