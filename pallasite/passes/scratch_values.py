"""scratch_values: scratch that every step overwrites before it reads becomes values.

In: a kernel whose sums wait in scratch for the steps to come. Where a grid has one step
along their axis, or merged steps leave one, nothing comes from an earlier step: the
branches that begin and finish sums are decided (`known_comparisons`). Out: the same
without that scratch; what was stored there is used where it was loaded. A backend may
then compute sums where they are stored in the end, or finish them strip by strip.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, full_index
from pallasite.ir.rewrite import substitute, users_of


def scratch_values(kernel: Kernel) -> Kernel:
    """Replace scratch of the kernel that is used in the body of one pipeline only."""
    users = users_of(kernel.body)
    ops: list[Op] = []
    gone: set[Value] = set()
    for op in kernel.body.ops:
        if op.name == "pipeline":
            body = op.regions[-1]
            found = {v for v in _allocated(kernel.body) if _is_value(body, v, users[v])}
            if found:
                op = op.with_(regions=(*op.regions[:-1], _forwarded(body, found)))
                gone |= found
        ops.append(op)
    if not gone:
        return kernel
    kept = tuple(op for op in ops if not gone & set(op.results))
    return kernel.with_(body=replace(kernel.body, ops=kept))


def _allocated(block: Block) -> list[Value]:
    return [op.result for op in block.ops if op.name == "alloc"]


def _is_value(body: Block, ref: Value, users: Sequence[Op]) -> bool:
    """Do all uses load or store the whole of it, in the body itself, a store first?"""
    here = [op for op in body.ops if ref in op.operands]
    return (
        bool(here)
        and len(here) == len(users)
        and here[0].name == "store"
        and all(_is_whole(op, ref) for op in here)
    )


def _is_whole(op: Op, ref: Value) -> bool:
    if op.name not in ("load", "store"):
        return False
    access = Access.of(op)
    plain = access.ref is ref and access.mask is None
    return plain and access.index == full_index(ref.ref.shape)


def _forwarded(body: Block, refs: set[Value]) -> Block:
    """The body in which loads of these refs are what was stored there last."""
    held: dict[Value, Value] = {}
    loaded: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in body.ops:
        ref = op.operands[0] if op.name in ("load", "store") else None
        if ref not in refs:
            ops.append(op)
        elif op.name == "store":
            held[ref] = loaded.get(op.operands[1], op.operands[1])
        else:
            loaded[op.result] = held[ref]
    return substitute(replace(body, ops=tuple(ops)), loaded)
