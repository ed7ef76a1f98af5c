"""What a kernel must look like before it is emitted.

`is_native` says which ops stay as they are, `plain_copies` turns async copies into
plain ones.
"""

from collections.abc import Sequence

from pallasite.ir.levels import with_level
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops
from pallasite.ir.types import I32, RefType

# Ops that handle 4-bit numbers in a byte as they are; the rest compute in 32 bits.
_KEEPS_FOUR_BITS = {"load", "store", "cast", "constant", "dot", "select_n"}
_KEEPS_FOUR_BITS |= {"broadcast_in_dim", "reshape", "transpose", "slice", "debug_print"}


def is_native(native: frozenset[str], op: Op) -> bool:
    """Whether `emit.py` has an op natively with these operands."""
    integers = op.operands and not op.operands[0].type.dtype.is_float
    if op.name == "pow" and integers:
        return False
    if op.name == "integer_pow" and integers and op.attrs["y"] < 0:
        return False
    if op.name == "scan" and op.attrs["kind"] == "logsumexp":
        return False
    if _has_four_bits(op) and not op.regions and op.name not in _KEEPS_FOUR_BITS:
        return False
    return op.name in native


def _has_four_bits(op: Op) -> bool:
    tiles = (v.tile.dtype for v in (*op.operands, *op.results) if not v.is_ref)
    return any(dtype.bits == 4 for dtype in tiles)


def plain_copies(kernel: Kernel) -> Kernel:
    """Make copies complete where they start, and semaphores plain counters.

    A program is one thread of control here: what it waits for has already happened.
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
