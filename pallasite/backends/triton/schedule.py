"""What a kernel must be before it is emitted, and how large a launch should be.

`plain_copies` turns async copies into plain ones. `stages_and_warps` picks the two
numbers Triton's compiler wants.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pallasite.backends.triton.text import physical
from pallasite.ir.levels import with_level
from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops
from pallasite.ir.types import I32, RefType
from pallasite.passes.gpu_blocks import SHARED_SHARE, STAGES
from pallasite.target import Gpu

LARGE_TILE = 128 * 128  # elements of a product from which 8 warps pay


def is_native(native: frozenset[str], op: Op) -> bool:
    """Whether `emit.py` has an op natively with these operands."""
    integers = op.operands and not op.operands[0].type.dtype.is_float
    if op.name == "pow" and integers:
        return False
    if op.name == "integer_pow" and integers and op.attrs["y"] < 0:
        return False
    if op.name == "scan" and op.attrs["kind"] == "logsumexp":
        return False
    return op.name in native


def plain_copies(kernel: Kernel) -> Kernel:
    """Copies done at once where they start, semaphores as plain counters.

    A program is one thread of control here: what it waits for has happened before.
    """
    return with_level(dead_code(map_ops(kernel, _without_waiting)))


def _without_waiting(op: Op, builder: Rewriter) -> Sequence[Value] | None:
    if op.name == "copy_start":
        source, target = op.operands[:2]
        builder.store(target, builder.load(source))
        return ()
    if op.name == "copy_wait":
        return ()
    if op.name == "alloc" and op.result.ref.is_semaphore:
        counter = builder.op("alloc", type=_counter(op.result.ref))
        builder.store(counter, builder.constant(0, counter.ref.tile))
        return (counter,)
    if op.name == "subview" and op.result.ref.is_semaphore:
        return builder.emit(op.name, *op.operands, **op.attrs)
    if op.name in ("sem_signal", "sem_wait"):
        ref, amount = op.operands
        change = "add" if op.name == "sem_signal" else "sub"
        builder.store(ref, builder.op(change, builder.load(ref), amount))
        return ()
    return (builder.load(op.operands[0]),) if op.name == "sem_read" else None


def _counter(ref: RefType) -> RefType:
    return RefType(ref.shape, I32, "smem")


def stages_and_warps(
    kernel: Kernel, params: Mapping[str, Any], chip: Gpu
) -> tuple[int, int]:
    """Depth of Triton's software pipeline, and warps per program."""
    dots = [op for op in walk(kernel.body) if op.name == "dot"]
    warps = params.get("num_warps") or _warps(kernel, dots)
    stages = params.get("num_stages") or _stages(dots, chip)
    return int(stages), int(warps)


def _warps(kernel: Kernel, dots: Sequence[Op]) -> int:
    if any(_elements(op.result) >= LARGE_TILE for op in dots):
        return 8
    largest = max(
        (_elements(v) for op in walk(kernel.body) for v in op.results if not v.is_ref),
        default=1,
    )
    return 8 if largest >= 1 << 14 else 4


def _stages(dots: Sequence[Op], chip: Gpu) -> int:
    """As many buffers of the largest product's operands as fit, up to a few."""
    if not dots:
        return 1
    size = max(sum(_bytes(v) for v in op.operands) for op in dots)
    available = int(SHARED_SHARE * chip.shared.bytes)
    return max(1, min(STAGES, available // max(size, 1)))


def _elements(value: Value) -> int:
    count = 1
    for n in physical(value.tile.shape):
        count *= n
    return count


def _bytes(value: Value) -> int:
    return _elements(value) * value.tile.dtype.bytes
