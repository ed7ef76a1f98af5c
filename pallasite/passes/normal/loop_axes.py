"""loop_axes: programs that loop over blocks of their results become more programs.

In: a body that is one loop, without values carried from one iteration to the next, over
blocks of whole results: a persistent kernel (`for t in range(first, tiles, programs)`),
a kernel without a grid that walks through its arrays, or copies of a loop, one for each
row of a block (`rolled_copies.py`). Out: the iterations as the
last axis of the grid, and each block as a window (`narrow_windows.py`). Programs run in
lexicographic order, so the iterations are the same ones in the same order; where the
number of iterations differs between programs, a guard skips those that are not there.

A loop stays if it does not pick the block of every result that it writes: as steps of a
grid its iterations would gain nothing. Those that only merge into results by atomics,
or store where memory says, do gain where steps run at once; the caller knows (`also`).
"""

from collections.abc import Callable

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Value, walk
from pallasite.ir.rewrite import inline, used_values, users_of, writes
from pallasite.ir.roles import Loop, Pipeline
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import moving_axes
from pallasite.passes.analysis.commuting import is_merge
from pallasite.passes.analysis.grid import find_pipeline, with_pipeline
from pallasite.passes.analysis.intervals import HIGHEST, LOWEST, Facts
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.normal.again import Again
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.narrow_windows import narrow_windows
from pallasite.passes.normal.rolled_copies import rolled_copies


def loop_axes(
    kernel: Kernel, also: Callable[[Kernel], bool] = lambda _: False
) -> Kernel:
    """The kernel with loops over blocks of results as axes of its grid.

    `also`: whether to keep other axes, given the kernel with the last of them.
    """
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return kernel
    made, picks = kernel, True
    while (made := _with_one_loop_fewer(made)) is not None:
        picks = picks and moves_results(made)
        if picks or also(made):
            kernel, picks = made, True
    return kernel


def _with_one_loop_fewer(kernel: Kernel) -> Kernel | None:
    whole = Pipeline.of(find_pipeline(kernel))
    loop = only_loop(kernel, whole)
    if loop is None:
        rolled = rolled_copies(kernel, whole)
        if rolled is None:
            return None
        kernel, whole = rolled, Pipeline.of(find_pipeline(rolled))
        loop = only_loop(kernel, whole)
    if loop is None or not all(map(_is_dead, _carried(loop))):
        return None
    made = with_axis(kernel, whole, loop).to_op()
    return narrow_windows(canonicalize(with_pipeline(kernel, made)))


def only_merges(kernel: Kernel) -> bool:
    """Whether atomics that nobody reads are all that writes, of blocks that move."""
    whole, users = Pipeline.of(find_pipeline(kernel)), users_of(kernel.body)
    written = [op for op in walk(whole.body) if not op.regions and writes(op)]
    last = len(whole.grid) - 1
    moves = any(last in moving_axes(each) for each in whole.maps)
    return moves and bool(written) and all(is_merge(op, users) for op in written)


def only_loop(kernel: Kernel, whole: Pipeline) -> Loop | None:
    """The loop that does all the work of a body, if nobody needs its results."""
    effects = [op for op in whole.body.ops if writes(op)]
    if len(effects) != 1 or effects[0].name != "for":
        return None
    loop = Loop.of(effects[0])
    rest = whole.body.ops[whole.body.ops.index(loop.op) + 1 :]
    later = {v for op in rest for v in used_values(Block((), (op,)))}
    if later & {*loop.results}:
        return None
    roots = Roots(kernel)
    again = Again(whole.body.ops, roots, whole.body)
    needed = [*used_values(loop.body), *loop.bounds, *loop.inits]
    outside = [v for v in needed if v in again.made]
    if not all(map(again.can, outside)) or not all(map(again.is_scalar, loop.bounds)):
        return None
    return loop if _steps(kernel, whole, loop) is not None else None


def _steps(kernel: Kernel, whole: Pipeline, loop: Loop) -> int | None:
    """The largest trip count of a loop in any program; None if not known."""
    ops = (*kernel.body.ops[: kernel.body.ops.index(whole.op)], *whole.body.ops)
    table = StepTable(whole.ids, whole.grid)
    table.add_ops(ops)
    known = [t.astype(np.int64) for v in loop.bounds if (t := table.of(v)) is not None]
    if len(known) == len(loop.bounds) and known[2].min() > 0:
        first, limit, step = known
        trips = -((first - limit) // step)
        within = bool(np.all(first + trips * step <= HIGHEST))
        return max(int(trips.max()), 0) if within else None
    facts = Facts()
    facts.note_grid(whole.ids, whole.grid)
    for op in ops:
        facts.note_op(op)
    bounded = facts.of(loop.limit).high < HIGHEST and facts.of(loop.first).low > LOWEST
    return facts.most_steps(loop) if bounded and not facts.may_overshoot(loop) else None


def _carried(loop: Loop) -> list[tuple[Loop, int]]:
    return [(loop, n) for n in range(len(loop.inits))]


def _is_dead(place: tuple[Loop, int]) -> bool:
    """Whether a carried value is the same in each iteration, or nobody looks at it."""
    loop, n = place
    param = loop.carried[n]
    if loop.yields[n] is param:
        return True
    body = Block((), loop.body.ops)
    rest = [v for m, v in enumerate(loop.yields) if m != n]
    return param not in [*used_values(body), *rest]


def with_axis(kernel: Kernel, whole: Pipeline, loop: Loop) -> Pipeline:
    """The pipeline with the iterations of a loop as its last axis."""
    axis = Value(INDEX, f"i{len(whole.grid)}")
    b = Builder(loop.op.loc)
    at = whole.body.ops.index(loop.op)
    b.ops += whole.body.ops[:at]
    index = b.add(loop.first, b.mul(axis, loop.step))
    around = (*kernel.body.ops, *whole.body.ops)
    constants = {op.result for op in around if op.name == "constant"}
    if constants.issuperset(loop.bounds):
        inline(b, loop.body, (index, *loop.inits))
    else:
        inside = Builder(loop.op.loc)
        inline(inside, loop.body, (index, *loop.inits))
        which = b.cast(b.lt(index, loop.limit), INDEX.dtype)
        b.emit("cond", which, regions=(Block(), inside.block()))
    maps = []
    for old in whole.maps:
        ids = tuple(Value(INDEX, v.name) for v in (*old.params, axis))
        m = Builder(loop.op.loc)
        maps.append(m.block(ids, inline(m, old, ids[:-1])))
    body = b.block((*whole.ids, axis, *whole.blocks))
    return whole.with_(
        grid=(*whole.grid, _steps(kernel, whole, loop)),
        semantics=(*whole.semantics, "arbitrary"),
        maps=tuple(maps),
        body=body,
    )


def moves_results(kernel: Kernel) -> bool:
    """Whether the last axis picks the block of every result that is written."""
    whole = Pipeline.of(find_pipeline(kernel))
    last = len(whole.grid) - 1
    stored = {op.operands[0] for op in walk(whole.body) if op.name == "store"}
    shown = [each for each in whole.shown if each.block in stored]
    scratch = {op.result for op in kernel.body.ops if op.name == "alloc"}
    if not shown or len(shown) < len(stored - scratch):
        return False
    return all(last in moving_axes(each.index_map) for each in shown)
