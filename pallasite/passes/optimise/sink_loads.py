"""sink_loads: moves loads that are needed only after a reduction below it.

In: a kernel after `promote`. Out: the same kernel, with loads of read-only arrays, and
conversions of what they load, sunk to just before their first use if a reduction is in
between. A tile that is live in registers across a reduction lowers occupancy; the
weights of a norm are such tiles, and the cache has them. (Triton on an H200, layernorm
of rows of 8192: 3.0 TB/s before, 3.7 after.) Operands of matmuls stay, and so do loads
in loops, which are prefetched iterations ahead.
"""

from pallasite.ir.nodes import Access, Block, Kernel, Op
from pallasite.ir.rewrite import uses, with_ops, with_regions
from pallasite.passes.analysis.memory import Roots, constant_inputs

PRODUCTS = ("dot", "transpose")
REDUCTIONS = ("reduce", "arg_reduce", "scan")


def sink_loads(kernel: Kernel) -> Kernel:
    """Sink loads past reductions to their first use."""
    body = _Sinking(kernel).block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


class _Sinking:
    def __init__(self, kernel: Kernel):
        self.roots, self.constant = Roots(kernel), constant_inputs(kernel)

    def block(self, block: Block) -> Block:
        ops = list(map(self.inside, block.ops))
        placed: list[Op] = []  # in reverse order
        for op in reversed(ops):
            use = _first_use(op, placed) if self.can_move(op) else None
            over = placed[use + 1 :] if use is not None else ()
            reduces = any(each.name in REDUCTIONS for each in over)
            if use is not None and reduces and placed[use].name not in PRODUCTS:
                placed.insert(use + 1, op)
            else:
                placed.append(op)
        placed.reverse()
        return with_ops(block, placed)

    def inside(self, op: Op) -> Op:
        if op.name in ("for", "while"):
            return op
        return with_regions(op, [self.block(r) for r in op.regions])

    def can_move(self, op: Op) -> bool:
        if op.name not in ("load", "cast") or not op.result.tile.shape:
            return False
        if op.name == "cast":
            return True
        access = Access.of(op)
        return access.mask is None and self.roots.of(access.ref) in self.constant


def _first_use(op: Op, placed: list[Op]) -> int | None:
    """Position of the first user of an op's result, in a list in reverse order."""
    for n in reversed(range(len(placed))):
        if uses(placed[n], op.result):
            return n
    return None
