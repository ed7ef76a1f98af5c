"""order: constants, iotas and loads stand right before their first use.

Constants and iotas may stand anywhere before it, and a load may be later than it was
written if nothing in between writes its memory: scratch is no part of another ref. A
reshape of one of these stands with it. A product stands after guarded stores that it is
not needed for, such as that of the start of a sum. Where an author, JAX or another pass
put them is then no longer visible. Other ops stay in the author's order.
"""

from collections.abc import Mapping, Sequence

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import used_values, with_ops, with_regions, writes
from pallasite.passes.analysis.memory import Roots


def order(kernel: Kernel) -> Kernel:
    """Move constants, iotas and loads within their blocks."""
    if kernel.level != TILE:
        return kernel
    body = _Ordering(kernel).ordered(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


class _Ordering:
    def __init__(self, kernel: Kernel):
        self.roots = Roots(kernel)
        ops = (op for op in walk(kernel.body) if op.name == "alloc")
        self.scratch = {ref for op in ops for ref in op.results}

    def ordered(self, block: Block) -> Block:
        waiting: dict[Value, Op] = {}
        ops: list[Op] = []

        def place(values: Sequence[Value]) -> None:
            for value in values:
                op = waiting.pop(value, None)
                if op is not None:
                    place(op.operands)
                    ops.append(op)

        for op in block.ops:
            is_view = op.name == "reshape" and op.operands[0] in waiting
            if is_view or op.name in ("constant", "iota", "load", "dot"):
                waiting[op.result] = op
                continue
            if writes(op):
                place(self.changed_by(op, waiting))
            if not _is_guard(op):
                place([v for v, made in waiting.items() if made.name == "dot"])
            place([*op.operands, *(v for r in op.regions for v in used_values(r))])
            ops.append(with_regions(op, [self.ordered(r) for r in op.regions]))
        place([*block.yields, *waiting])
        return with_ops(block, ops)

    def changed_by(self, op: Op, waiting: Mapping[Value, Op]) -> list[Value]:
        """What loads read that an op may write, or do more to than store."""
        touched = self.roots.touched(op)
        found = []
        for value, load in waiting.items():
            if load.name != "load":
                continue
            root = self.roots.of(load.operands[0])
            refs = () if touched is None else touched[1]
            apart = all(ref is not root and {ref, root} & self.scratch for ref in refs)
            if touched is None or not apart:
                found.append(value)
        return found


def _is_guard(op: Op) -> bool:
    """Whether an op is a guarded store, or one without a guard, or its condition."""
    if op.regions or not op.results:
        return op.name in ("cond", "store") and not op.results
    return not any(v.is_ref or v.type.shape for v in op.results)
