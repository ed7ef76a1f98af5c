"""cut_steps: splits steps of running maxima and sums into more, narrower ones.

In: a kernel whose last axis steps along a dimension in blocks, and updates running
maxima and sums with each block, as an online softmax or a sum of matmuls does. Out: the
same steps with blocks of fewer elements, so that what is loaded fits on chip several
times, and what is computed of a block (scores and their exponentials) fits the
registers next to the sums. `loop_over_k.py` is for dimensions without steps;
`widen_steps.py` is the other way round.

The proof is that of `widen_steps.py`: a step's block only contributes to maxima and to
sums, so its parts may contribute one after another. Results differ by the rounding of
sums, which therefore must not have less precision than a matmul's. Maxima must start
finite: a part all of whose elements are masked by minus infinity would be divided by
its own maximum otherwise, where the block was not.
"""

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Value
from pallasite.passes.analysis.guards import Guard
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, Place
from pallasite.passes.normal.affine_numbers import affine_numbers
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
    found = dims_of_steps(kernel)
    dim = walked(found)
    if dim is None or (place is not None and place not in dim.windows):
        raise CannotReblock("no axis steps along this dimension of its blocks")
    if dim.size % size:
        raise CannotReblock(f"{dim.size} elements are not a multiple of {size}")
    # Positions of the parts are affine in the number of the new step.
    return affine_numbers(_CutSteps(found, dim, dim.size // size).kernel())


class _CutSteps(Divided):
    """Splits each step of the last axis into several."""

    def __init__(self, found: LoopDims, dim: LoopDim, parts: int):
        self.proof = RunningSteps(found, dim, cut=True)
        if not all(state.is_finite for state in self.proof.proved.maxima):
            raise CannotReblock("a maximum may start as minus infinity")
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
