"""Where the warps of an author's role must synchronise.

The warps of a warpgroup run independently, but a role's semantics are that all of them
have finished one op before any starts the next. So they synchronise between two
accesses to the same shared memory of which one is a write, unless something else
synchronises them there. The accesses since the last synchronisation are a set
(`Accessed`), tracked through branches and loops.

The copy engine and the tensor cores see what threads have stored only after a fence.
Authors place it (`commit_smem`); where one did not, the copy or matmul is preceded by
it. So the set also has what was stored since the last fence.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Block, Op, Value
from pallasite.ops.gpu import is_group_load
from pallasite.passes.analysis.memory import Roots

Accessed = frozenset[tuple[str, Value]]  # "read", "written", "unfenced"; the memory
NOTHING: Accessed = frozenset()
COPIES = ("copy_start", "cluster_copy")
MEETS = ("fence_async", "bulk_wait", "load_wait")  # these synchronise all warps
ENGINES = (*COPIES, "wgmma", "tensor_mma")  # these read after a fence


def is_engines(op: Op) -> bool:
    """Whether an op is a copy by the copy engine."""
    return op.name in COPIES and not is_group_load(op)


def synchronised(accessed: Accessed) -> Accessed:
    """What is left of the accesses once all warps have met."""
    return frozenset((how, memory) for how, memory in accessed if how == "unfenced")


class Meetings:
    """The accesses of a kernel's ops to its shared memory."""

    def __init__(self, roots: Roots):
        self.roots = roots

    def before(self, op: Op, accessed: Accessed) -> tuple[bool, Accessed]:
        """Whether warps synchronise before an op, and the accesses pending after it."""
        if op.name in MEETS:
            is_fence = op.name == "fence_async"
            return False, NOTHING if is_fence else synchronised(accessed)
        if self.needs_fence(op, accessed):
            accessed = NOTHING
        reads, writes = self.accesses(op)
        needed = any(("written", memory) in accessed for memory in reads) or any(
            (how, memory) in accessed
            for memory in writes
            for how in ("read", "written")
        )
        accessed = synchronised(accessed) if needed else accessed
        if op.name in COPIES or op.name == "tensor_mma":  # their waits cover these
            return needed, accessed
        found = {("read", m) for m in reads} | {("written", m) for m in writes}
        if op.name == "store":
            found |= {("unfenced", m) for m in writes}
        return needed, accessed | found

    def needs_fence(self, op: Op, accessed: Accessed) -> bool:
        """Whether an op reads what threads stored since the last fence."""
        reads = self.accesses(op)[0] if op.name in ENGINES else []
        return any(("unfenced", memory) in accessed for memory in reads)

    def accesses(self, op: Op) -> tuple[list[Value], list[Value]]:
        """The shared memory that an op reads and writes."""
        if op.name in ("load", "wgmma"):
            return self.shared(op.operands), []
        if op.name == "store":
            return [], self.shared(op.operands[:1])
        if op.name == "tensor_mma":
            return self.shared(op.operands[1:]), self.shared(op.operands[:1])
        if op.name in COPIES:
            return self.shared(op.operands[:1]), self.shared(op.operands[1:2])
        return [], []

    def shared(self, values: Sequence[Value]) -> list[Value]:
        roots = [self.roots.of(v) for v in values if v.is_ref]
        return [root for root in roots if root.ref.space in ("smem", "tmem")]

    def after(self, block: Block, accessed: Accessed) -> Accessed:
        """The accesses pending at the end of a block."""
        for op in block.ops:
            if op.name == "cond":
                ends = [self.after(region, accessed) for region in op.regions]
                accessed = NOTHING.union(*ends)
            elif op.regions:
                accessed = self.in_loop(op.regions, accessed)
            else:
                _, accessed = self.before(op, accessed)
        return accessed

    def in_loop(self, regions: Sequence[Block], accessed: Accessed) -> Accessed:
        """The accesses that may be pending at the start of an iteration."""
        while True:
            end = accessed
            for region in regions:
                end = self.after(region, end)
            if end <= accessed:
                return accessed
            accessed |= end
