"""cut_sums: splits steps that accumulate matmuls over their rows into more steps.

In: a kernel whose last axis is sequential and steps over the blocks of a dimension that
matmuls contract, such as a gradient of keys, to which each step adds the contribution
of a block of queries. Out: the same kernel with blocks of fewer rows on a longer axis.
Whatever else is computed along the dimension (scores and their exponentials) is split
too, so a step needs fewer registers; `loop_over_k.py` would recompute it for each
matmul. What programs do at the first and last step stays there.
"""

from collections.abc import Iterator, Mapping, Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import writes
from pallasite.ir.roles import Cond
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, Place
from pallasite.passes.normal.resized_code import CannotReblock, Part
from pallasite.passes.schedule.loop_over_k import why_not_in_rounds
from pallasite.passes.schedule.reblock import Divided, in_pipeline


def cut_sums(kernel: Kernel, place: Place, parts: int) -> Kernel:
    """Steps with 1/`parts` of the rows each, and `parts` times as many.

    Args:
        kernel: what to rewrite.
        place: a window and a dimension of its array.
        parts: divides the block's size.

    Raises:
        CannotReblock: the steps do more than accumulate matmuls over the dimension.
    """
    found, dim = in_pipeline(kernel, place)
    return _CutSums(found, dim, parts).kernel()


class _CutSums(Divided):
    """Splits each step of the last axis into several."""

    def __init__(self, found: LoopDims, dim: LoopDim, parts: int):
        reason = why_not_in_rounds(found, dim)
        pipeline = found.pipeline
        last = len(pipeline.grid) - 1
        steps = pipeline.grid[last] if pipeline.grid else None
        if reason is None and (steps is None or last not in found.info.sequential):
            reason = "the last axis is not sequential"
        if reason is not None or steps is None:
            raise CannotReblock(reason or "")
        super().__init__(found, dim, parts, last, steps * parts)
        if any(each.n % each.block for each in self.moved.values()):
            raise CannotReblock("a block extends past the edge")
        self.index = pipeline.ids[last]
        self.made = {v: op for op in walk(pipeline.body) for v in op.results}
        self.sums = set(self._sums(pipeline.body))
        self._check(pipeline.body.ops)

    # --- what steps do ---

    def _sums(self, block: Block) -> Iterator[Op]:
        """Stores of the old contents plus a matmul that contracts the dimension."""
        for op in walk(block):
            if op.name == "store" and self._adds(Access.of(op)):
                yield op

    def _adds(self, access: Access) -> bool:
        add = self.made.get(access.value) if access.value is not None else None
        if add is None or add.name != "add" or access.mask is not None:
            return False
        for old, share in (add.operands, add.operands[::-1]):
            load = self.made.get(old)
            if load is None or load.name != "load" or not self._is_share(share):
                continue
            before = Access.of(load)
            same = before.ref is access.ref and before.index == access.index
            if same and before.index_operands == access.index_operands:
                return True
        return False

    def _is_share(self, value: Value) -> bool:
        """Whether the parts of a value add up to it."""
        op = self.made.get(value)
        if op is None:
            return False
        if op in self.dim.products:
            return True
        if op.name == "add":
            return all(map(self._is_share, op.operands))
        is_linear = table()[op.name].moves or op.name == "neg"  # without rounding
        return is_linear and self._is_share(op.operands[0])

    def _check(self, ops: Sequence[Op]) -> None:
        refs = {op.operands[0] for op in self.sums}
        guards = [op for op in ops if self._is_sum(op)]
        if not guards:
            raise CannotReblock("no step accumulates a matmul")
        places = [ops.index(op) for op in guards]
        for n, op in enumerate(ops):
            if op in guards:
                self._check_sum(op, refs)
                continue
            between = places[0] < n < places[-1]
            if writes(op) and (between or not self._is_step(op, n < places[0])):
                raise CannotReblock("a step does more than accumulate matmuls")

    def _is_sum(self, op: Op) -> bool:
        return any(inner in self.sums for inner in walk(Block((), (op,))))

    def _check_sum(self, op: Op, refs: set[Value]) -> None:
        """A branch around accumulations may do nothing else."""
        loads = {v for s in self.sums for v in self.made[s.operands[1]].operands}
        for inner in walk(Block((), (op,))):
            other = writes(inner) and inner not in self.sums and inner.name != "cond"
            reads = inner.name == "load" and inner.operands[0] in refs
            if other or (inner.results and inner.name == "cond"):
                raise CannotReblock("a step does more than accumulate matmuls")
            if reads and inner.result not in loads:
                raise CannotReblock("a step reads an accumulator")

    def _is_step(self, op: Op, first: bool) -> bool:
        """Whether a branch tests for the first or the last step."""
        if op.name != "cond" or op.results or len(op.regions) != 2:
            return False
        if any(v in self.dim.members for o in walk(op.regions[1]) for v in o.operands):
            return False
        return not op.regions[0].ops and self._asks(Cond.of(op).which, first)

    def _asks(self, value: Value, first: bool) -> bool:
        op = self.made.get(value)
        if op is None:
            return False
        if op.name == "eq" and self.index in op.operands:
            steps = self.found.pipeline.grid[-1]
            wanted = 0 if first else (steps or 1) - 1
            return any(self._number(v) == wanted for v in op.operands)
        if op.name == "and":
            return any(self._asks(v, first) for v in op.operands)
        return op.name == "cast" and self._asks(op.operands[0], first)

    def _number(self, value: Value) -> int | None:
        op = self.made.get(value)
        return op.attrs["value"] if op is not None and op.name == "constant" else None

    # --- the new body ---

    def code(self, b: Builder, part: Part, step: Value) -> None:
        ops = self.found.pipeline.body.ops
        start = next(n for n, op in enumerate(ops) if self._is_sum(op))
        for n, op in enumerate(ops):
            if self._is_sum(op) or not writes(op):
                part.op(b, op)
                continue
            test = self._asked(b, Cond.of(op).which, part.new, step, n < start)
            regions = tuple(part.block(region) for region in op.regions)
            b.ops.append(op.with_(operands=(test,), regions=regions))

    def _asked(
        self,
        b: Builder,
        value: Value,
        new: Mapping[Value, Value],
        step: Value,
        first: bool,
    ) -> Value:
        """A test for the first or last step, now for its first or last part."""
        op = self.made[value]
        if op.name == "eq" and self._asks(value, first):
            return b.eq(step, b.index(0 if first else self.steps - 1))
        if op.name in ("and", "cast") and self._asks(value, first):
            operands = [
                self._asked(b, v, new, step, first)
                if self._asks(v, first)
                else new.get(v, v)
                for v in op.operands
            ]
            return b.op(op.name, *operands, **op.attrs)
        return new.get(value, value)
