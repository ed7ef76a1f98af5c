"""How much vector memory a kernel needs; rejected early if no chip has that much.

XLA gives a kernel only part of a core's vector memory by default; `limit_for` raises
the limit if windows, scratch and tiles need more.
"""

from collections.abc import Iterator

from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.backends.tpu.windows import memref_shape, operand_name
from pallasite.errors import ChipMemoryError
from pallasite.ir.nodes import Kernel, Op, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.schedule.tpu_blocks import for_tpu
from pallasite.target import TPUS, Tpu

COPIES = 3  # of the largest tile, which the compiler may keep in addition
MOST = 0.95  # of a core's vector memory, for one kernel
SPARE = 1.25  # margin for what the compiler adds


def check_vmem(kernel: Kernel, chip: Tpu | None, limit: int | None = None) -> Kernel:
    """Reject a kernel whose windows and scratch exceed a core's vector memory.

    Args:
        kernel: what to check; it is not changed.
        chip: None: any in the table may run it.
        limit: the bytes that the author allows it, if fewer.

    Raises:
        ChipMemoryError: names each window with its bytes.
    """
    chips = TPUS.values() if chip is None else (chip,)
    most = max(chips, key=lambda each: each.vmem.bytes)
    parts = list(_named(kernel, most))
    needed, available = sum(size for _, size in parts), most.vmem.bytes
    room, fix = "vector memory", "use smaller blocks"
    where = f"the VMEM of a core of {most.name}"
    where += "" if chip else ", the largest of all TPUs"
    if limit is not None and limit < available:
        available, room = limit, "vector memory (vmem_limit_bytes)"
        where, fix = "vmem_limit_bytes", f"{fix}, or a larger limit"
    if needed <= available:
        return kernel
    largest = sorted(parts, key=lambda part: -part[1])[:6]
    raise ChipMemoryError(
        f"the blocks of a program do not fit in {where}",
        [
            ("kernel", kernel.name),
            ("needed", f"{needed} bytes"),
            ("available", f"{available} bytes of {room}"),
            *((name, f"{size} bytes") for name, size in largest),
        ],
        kernel.loc,
        fix,
    )


def limit_for(kernel: Kernel, chip: Tpu | None) -> int | None:
    """The limit to request from XLA; None: its default is enough."""
    chips = TPUS.values() if chip is None else (chip,)
    allowed = min(each.scoped_vmem for each in chips)
    most = max(_named_bytes(kernel, each) + _tiles(kernel, each) for each in chips)
    needed = int(SPARE * most)
    if needed <= allowed:
        return None
    return min(needed, int(MOST * max(each.vmem.bytes for each in chips)))


def taken(kernel: Kernel, chip: Tpu | None) -> tuple[int, int]:
    """Bytes of windows and scratch, and what a kernel is given."""
    limit = limit_for(kernel, chip)
    chips = TPUS.values() if chip is None else (chip,)
    given = min(each.scoped_vmem for each in chips) if limit is None else limit
    return max(_named_bytes(kernel, each) for each in chips), given


def cut_if_large(kernel: Kernel) -> Kernel:
    """Smaller blocks if some chip has no room for the author's.

    For calls that are compiled before the chip is known.
    """
    room = lambda chip: (chip.scoped_vmem, -chip.vmem.bytes)
    smallest = min(TPUS.values(), key=room)
    if _named_bytes(kernel, smallest) <= smallest.scoped_vmem:
        return kernel
    return for_tpu(kernel, smallest)


def _named_bytes(kernel: Kernel, chip: Tpu) -> int:
    return sum(size for _, size in _named(kernel, chip))


def _named(kernel: Kernel, chip: Tpu) -> Iterator[tuple[str, int]]:
    """What the author declares, with its bytes: windows and scratch."""
    op = main_pipeline(kernel)
    if op is not None:
        pipeline = Pipeline.of(op)
        for shown, moves in zip(pipeline.shown, analyze(kernel).windows, strict=True):
            if shown.window.space not in ("block", "vmem"):
                continue
            moving = any(pipeline.grid[axis] != 1 for axis in moves.axes)
            buffers = shown.window.buffers or (2 if moving else 1)
            bits = shown.array.ref.dtype.bits
            size = chip.tile_bytes(memref_shape(shown.window), bits)
            yield operand_name(kernel, shown.array), buffers * size
    for alloc in walk(kernel.body):
        if alloc.name == "alloc" and alloc.result.ref.space in ("vmem", "block"):
            ref = alloc.result.ref
            yield f"scratch {ref}", chip.tile_bytes(ref.shape, ref.dtype.bits)


def _tiles(kernel: Kernel, chip: Tpu) -> int:
    """What the compiler may need for intermediate tiles."""

    def sizes(op: Op) -> list[int]:
        tiles = [v.tile for v in op.results if not v.is_ref]
        return [chip.tile_bytes(t.shape, t.dtype.bits) for t in tiles]

    ops = list(walk(kernel.body))
    largest = max((max(sizes(op), default=0) for op in ops), default=0)
    carried = max((sum(sizes(op)) for op in ops if op.name == "for"), default=0)
    return COPIES * (largest + carried)
