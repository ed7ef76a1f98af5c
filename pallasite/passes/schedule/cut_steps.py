"""cut_steps: splits steps of running maxima and sums into more, narrower ones.

In: a kernel whose last axis steps along a dimension in blocks, and updates running
maxima and sums with each block, as an online softmax or a sum of matmuls does. Out: the
same steps with blocks of fewer elements, so that what is loaded fits on chip several
times, and what is computed of a block (scores and their exponentials) fits the
registers next to the sums. `loop_over_k.py` is for dimensions without steps;
`widen_steps.py` is the other way round.

The proof is that of `widen_steps.py`: a step's block only contributes to maxima and to
sums, so its parts may contribute one after another. Results differ by the rounding of
sums, which therefore must not have less precision than a matmul's.

A part may have only elements that are masked by minus infinity, where its block has
others. Its maximum must be finite then, or sums become NaN; so a maximum starts as the
lowest finite number where it could start lower (`_from_finite`). Nobody sees that: the
first element above it replaces it, and what was scaled by it is zero times a factor of
one instead of zero. Until then the sums are what they started as, where those of the
block are NaN if all of it is masked. This holds for sums that start as zero, or for
elements above the lowest number, and if no other code reads the maximum.
"""

from ml_dtypes import finfo

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.passes.analysis.guards import Guard
from pallasite.passes.analysis.loop_dims import Place
from pallasite.passes.normal.affine_numbers import affine_numbers
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock, Part
from pallasite.passes.schedule.loop_over_k import adds_up
from pallasite.passes.schedule.reblock import Divided
from pallasite.passes.schedule.widen_steps import RunningSteps, dims_of_steps, walked


def cut_steps(kernel: Kernel, size: int, place: Place | None = None) -> Kernel:
    """Steps of blocks of `size` elements, which divides that of the blocks.

    Args:
        kernel: what to rewrite.
        size: of the new blocks.
        place: a window and a dimension of its array, if only steps along this dimension
            are to be cut.

    Raises:
        CannotReblock: the steps do more than update maxima and sums.
    """
    proof = _proved(kernel, size, place)
    if not all(state.is_finite for state in proof.proved.maxima):
        proof = _proved(_from_finite(proof), size, place)
    # Positions of the parts are affine in the number of the new step.
    return affine_numbers(_CutSteps(proof, proof.dim.size // size).kernel())


def _proved(kernel: Kernel, size: int, place: Place | None) -> RunningSteps:
    found = dims_of_steps(kernel)
    dim = walked(found)
    if dim is None or (place is not None and place not in dim.windows):
        raise CannotReblock("no axis steps along this dimension of its blocks")
    if dim.size % size:
        raise CannotReblock(f"{dim.size} elements are not a multiple of {size}")
    return RunningSteps(found, dim, cut=True)


def _from_finite(proof: RunningSteps) -> Kernel:
    """The kernel with maxima that start as finite numbers."""
    low = {s.new for s in proof.proved.maxima if not s.is_finite}
    stores = (op for op in proof.code if op.name == "store")
    stored = {op.operands[0] for op in stores if op.operands[1] in low}
    starts = list[Op]()
    for guard, number in proof.ends.values():
        for op in walk(guard.taken):
            if op.operands and op.operands[0] in stored and number:
                raise CannotReblock("the last step reads a maximum")
            if op.name == "store" and op.operands[0] in stored:
                starts.append(op)
    if not stored.issubset(op.operands[0] for op in starts):
        raise CannotReblock("a maximum starts in another way")
    if stored.intersection(proof.pipeline.blocks):
        raise CannotReblock("a maximum that may start as minus infinity is a result")
    made = {op.operands[:2] for op in starts}

    def rewrite(op: Op, b: Rewriter) -> tuple[()] | None:
        if op.name != "store" or op.operands[:2] not in made:
            return None
        ref, value, *rest = op.operands
        lowest = b.like(float(finfo(value.tile.dtype.np).min), value)
        b.ops.append(op.with_(operands=(ref, b.op("max", value, lowest), *rest)))
        return ()

    return canonicalize(map_ops(proof.found.kernel, rewrite))


class _CutSteps(Divided):
    """Splits each step of the last axis into several."""

    def __init__(self, proof: RunningSteps, parts: int):
        self.proof, found, dim = proof, proof.found, proof.dim
        if not all(map(adds_up, dim.products)):
            raise CannotReblock("its accumulator has less precision than a matmul's")
        last = len(found.pipeline.grid) - 1
        super().__init__(found, dim, parts, last, self.proof.steps * parts)

    def code(self, b: Builder, part: Part, step: Value) -> None:
        for op in self.found.pipeline.body.ops:
            if op not in self.proof.ends:
                part.op(b, op)
                continue
            b.loc = op.loc
            guard, number = self.proof.ends[op]
            end = b.eq(step, b.index(0 if number == 0 else self.steps - 1))
            test = self._asked(b, guard, end, part)
            regions = Block((), ()), part.block(guard.taken)
            b.emit("cond", b.cast(test, step.tile.dtype), regions=regions)

    def _asked(self, b: Builder, guard: Guard, end: Value, part: Part) -> Value:
        """What the branch of the first or the last step asks for, with `end` for it."""
        test = end
        for each in guard.parts:
            if not self.proof.depends(each, [self.proof.step]):
                new = part.new.get(each.value, each.value)
                test = b.and_(test, new if each.truth else b.not_(new))
        return test
