"""program_order: programs that run at the same time read blocks in common.

In: a grid with two neighbouring parallel axes, along each of which other operands move.
Out: the same grid in groups: as many steps of the first axis as make the blocks of one
round of programs (one per core) the fewest bytes, then all of the second axis, then the
next group. The order among parallel axes is free; what is read from main memory is not.
"""

from collections.abc import Sequence
from math import prod, sqrt

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import inline
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.grid import GridInfo, analyze, find_pipeline

GAIN = 1.25  # fewer bytes, or the order stays


def order_programs(kernel: Kernel, cores: int) -> Kernel:
    """Group the programs of a kernel whose body is one pipeline."""
    op = find_pipeline(kernel)
    pipeline, info = Pipeline.of(op), analyze(kernel)
    for axis in range(len(pipeline.grid) - 1):
        group = _group(pipeline, info, axis, cores)
        if group > 1:
            new = _grouped(pipeline, axis, group)
            ops = tuple(new if each is op else each for each in kernel.body.ops)
            return kernel.with_(body=Block((), ops))
    return kernel


def _group(pipeline: Pipeline, info: GridInfo, axis: int, cores: int) -> int:
    """How many steps of an axis to group before the next one; 1: none."""
    first, second = pipeline.grid[axis : axis + 2]
    parallel = {axis, axis + 1} <= set(info.parallel)
    if first is None or second is None or not parallel or min(first, second) < 2:
        return 1
    inner = [n for a in info.parallel if a > axis + 1 and (n := pipeline.grid[a])]
    at_once = cores // max(prod(inner), 1)  # of these two axes
    if first * second <= at_once:
        return 1
    own = [_bytes_along(pipeline, info, a, {axis, axis + 1}) for a in (axis, axis + 1)]
    if not all(own):
        return 1

    def read(rows: float) -> float:
        return rows * own[0] + min(at_once / rows, second) * own[1]

    wanted = sqrt(at_once * own[1] / own[0])
    sizes = [n for n in range(2, first + 1) if first % n == 0]
    best = min(sizes, key=lambda n: abs(n - wanted), default=1)
    plain = at_once / min(second, at_once)
    return best if GAIN * read(best) < read(plain) else 1


def _bytes_along(pipeline: Pipeline, info: GridInfo, axis: int, both: set[int]) -> int:
    """Bytes of the blocks that are read and move along one axis of two."""
    total = 0
    for shown, moves in zip(pipeline.shown, info.windows, strict=True):
        if shown.window.mode == "in" and moves.axes & both == {axis}:
            total += shown.block.ref.size * shown.block.ref.dtype.bytes
    return total


def _grouped(pipeline: Pipeline, axis: int, group: int) -> Op:
    grid, semantics = list(pipeline.grid), list(pipeline.semantics)
    steps = grid[axis]
    assert steps is not None
    grid[axis] = steps // group
    grid.insert(axis + 2, group)
    semantics.insert(axis + 2, semantics[axis])

    def regrouped(block: Block, refs: Sequence[Value] = ()) -> Block:
        """An index map or, with its blocks, the body."""
        b = Builder()
        ids = [Value(INDEX, i.name) for i in pipeline.ids]
        within = Value(INDEX, f"{ids[axis].name or 'i'}_in_group")
        old, new = [*ids], [Value(r.type, r.name) for r in refs]
        old[axis] = b.add(b.mul(ids[axis], b.index(group)), within)
        yields = inline(b, block, [*old, *new])
        ids.insert(axis + 2, within)
        return b.block((*ids, *new), yields)

    return pipeline.with_(
        grid=tuple(grid),
        semantics=tuple(semantics),
        maps=tuple(map(regrouped, pipeline.maps)),
        body=regrouped(pipeline.body, pipeline.blocks),
    ).to_op()
