"""Copies that complete where they start, for backends whose programs never wait.

In: a kernel with async copies and semaphores. Out: the same kernel with loads and
stores, and counters in scalar memory. Copies with a GPU's barriers, or none, and a
GPU's semaphores stay as they are.
"""

from collections.abc import Sequence

from pallasite.ir.levels import with_level
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops
from pallasite.ir.types import I32, RefType

OF_GPUS = ("mbarrier", "gpu_sem")  # what others of their threads signal


def plain_copies(kernel: Kernel) -> Kernel:
    """Make copies complete where they start, and semaphores plain counters.

    A program is one thread of control here: what it waits for has already happened.
    """
    return with_level(dead_code(map_ops(kernel, _without_waiting)))


def _without_waiting(op: Op, builder: Rewriter) -> Sequence[Value] | None:
    if op.name in ("copy_start", "copy_wait"):
        source, target, *done = op.operands
        if not done or done[0].ref.space == "mbarrier":
            return None
        if op.name == "copy_start":
            builder.store(target, builder.load(source))
        return ()
    if op.name == "alloc" and _counts(op.result.ref):
        counter = builder.op("alloc", type=_counter(op.result.ref))
        builder.store(counter, builder.constant(0, counter.ref.tile))
        return (counter,)
    if op.name == "subview" and _counts(op.result.ref):
        return builder.emit(op.name, *op.operands, **op.attrs)
    if op.name[:4] == "sem_" and op.operands[0].ref.space in OF_GPUS:
        return None
    if op.name in ("sem_signal", "sem_wait"):
        ref, amount = op.operands
        change = "add" if op.name == "sem_signal" else "sub"
        builder.store(ref, builder.op(change, builder.load(ref), amount))
        return ()
    return (builder.load(op.operands[0]),) if op.name == "sem_read" else None


def _counts(ref: RefType) -> bool:
    return ref.is_semaphore and ref.space not in OF_GPUS


def _counter(ref: RefType) -> RefType:
    return RefType(ref.shape, I32, "smem")
