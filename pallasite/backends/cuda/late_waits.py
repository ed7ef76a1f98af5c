"""late_waits: moves a wait for copies out to where their memory is next written.

In: a kernel after `one_role`. Out: the same kernel, except that an iteration that ends
by waiting until the copy engine has read what it copies to main memory waits in the
next iteration instead, before the first access to that memory. Authors wait right after
a copy, when the wait is longest; an iteration later it has long completed. There is a
wait after the loop too.

Only waits for reads move: their only other purpose is that memory. It must belong to
one role; other roles could rely on a barrier at which this one arrives after its wait.

At the end of a role there is no need to wait until the copied data is in main memory:
nothing in the program looks at it any more, and the end of the launch makes it visible.
Only shared memory must stay allocated until it has been read.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, is_pure, map_ops, with_regions
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import Roots

# Ops that commit groups of copies, or wait for them.
GROUPS = ("bulk_commit", "bulk_wait")


def late_waits(kernel: Kernel) -> Kernel:
    """Move waits for copies out from the ends of iterations into the next ones."""
    roots = Roots(kernel)
    program = find_pipeline(kernel).regions[-1]
    number = _last_effect(program)
    ends_program = None if number is None else program.ops[number]

    def rewrite(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "roles":
            return None
        used = [_shared(region, roots) for region in op.regions]
        made = [
            _Role(roots, own.difference(*used[:n], *used[n + 1 :])).block(region)
            for n, (region, own) in enumerate(zip(op.regions, used, strict=True))
        ]
        if op is ends_program:
            made = list(map(_ending, made))
        b.ops.append(with_regions(op, made))
        return ()

    return map_ops(kernel, rewrite)


def _shared(block: Block, roots: Roots) -> set[Value]:
    """The shared memory that code uses."""
    refs = (v for op in walk(block) for v in op.operands if v.is_ref)
    return {root for root in map(roots.of, refs) if root.ref.space == "smem"}


def _last_effect(block: Block) -> int | None:
    """The position of the last op that does more than compute."""
    numbers = reversed(range(len(block.ops)))
    return next((n for n in numbers if not is_pure(block.ops[n])), None)


def _ending(role: Block) -> Block:
    """A role whose last wait for copies out only waits for reads of shared memory."""
    number = _last_effect(role)
    if number is None or role.ops[number].name != "bulk_wait":
        return role
    last = role.ops[number]
    wait = replace(last, attrs={**last.attrs, "read": True})
    return replace(role, ops=(*role.ops[:number], wait, *role.ops[number + 1 :]))


class _Role:
    """Rewrites the code of a role that has some shared memory to itself."""

    def __init__(self, roots: Roots, own: set[Value]):
        self.roots, self.own = roots, own

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        for op in block.ops:
            regions = [self.block(region) for region in op.regions]
            made, wait = with_regions(op, regions), None
            if op.name == "for":
                made, wait = self.loop(made)
            ops += [made] if wait is None else [made, wait]
        if all(old is new for old, new in zip(block.ops, ops, strict=False)):
            return block
        return replace(block, ops=tuple(ops))

    def loop(self, op: Op) -> tuple[Op, Op | None]:
        """A loop, and its wait, if the next iteration is to wait."""
        (body,) = op.regions
        number = _last_effect(body)
        if number is None:
            return op, None
        wait = body.ops[number]
        if wait.name != "bulk_wait" or not wait.attrs["read"]:
            return op, None
        copied = self.copied(body)
        if not copied <= self.own:
            return op, None
        before = body.ops[:number]
        first = next((n for n, o in enumerate(before) if self.touches(o, copied)), 0)
        if all(map(is_pure, before[:first])):
            return op, None  # nothing would overlap
        ops = (*before[:first], wait, *before[first:], *body.ops[number + 1 :])
        return with_regions(op, [replace(body, ops=ops)]), wait

    def copied(self, body: Block) -> set[Value]:
        """The shared memory that is copied out."""
        copies = [op.operands[0] for op in walk(body) if op.name == "copy_start"]
        return {m for m in map(self.roots.of, copies) if m.ref.space == "smem"}

    def touches(self, op: Op, memory: set[Value]) -> bool:
        """Whether an op uses some memory, or commits groups of copies."""
        inner = [op, *(o for region in op.regions for o in walk(region))]
        return any(
            o.name in GROUPS
            or any(v.is_ref and self.roots.of(v) in memory for v in o.operands)
            for o in inner
        )
