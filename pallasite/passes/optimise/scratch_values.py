"""scratch_values: scratch that every step overwrites before reading becomes values.

In: a kernel that accumulates in scratch across steps. Where the grid has one step along
that axis, or merging leaves one, nothing is carried from an earlier step, and the
branches that start and finish sums are already decided (`known_comparisons`). Out: the
same kernel without that scratch; stored values are forwarded to loads. A backend may
then accumulate directly in the final destination, or finish sums strip by strip.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import substitute, users_of
from pallasite.passes.analysis.carried import accesses_all


def scratch_values(kernel: Kernel) -> Kernel:
    """Replace scratch that is used only in the body of one pipeline."""
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
    """Whether all uses are whole loads and stores in the body itself, a store first."""
    here = [op for op in body.ops if ref in op.operands]
    return (
        bool(here)
        and len(here) == len(users)
        and here[0].name == "store"
        and all(map(accesses_all, here))
    )


def _forwarded(body: Block, refs: set[Value]) -> Block:
    """The body with loads of these refs replaced by the value last stored."""
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
