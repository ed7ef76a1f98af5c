"""place_windows: makes every result of an index map a valid block index.

A block index out of range stands for the nearest valid one (docs/semantics.md,
"Blocks"). In: maps as the author wrote them. Out: a `clamp` on each result that is not
known to stay in range over the grid; other maps are left as they are. Backends place
blocks by these indices without checking the array's bounds again; they handle only
blocks that extend past the edge.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Loc, Op, Value, Window
from pallasite.ir.roles import Pipeline, number_of
from pallasite.passes.analysis.block_table import all_steps, evaluate_map, last_number
from pallasite.passes.analysis.intervals import HIGHEST, Fact, Facts
from pallasite.passes.facts_walk import FactsWalk

Grid = Sequence[int | None]


def place_windows(kernel: Kernel) -> Kernel:
    """Clamp results of index maps, in all pipelines, that may be out of range."""
    body = _Placing().block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


class _Placing(FactsWalk):
    def regions(self, op: Op) -> Sequence[Block]:
        if op.name != "pipeline":
            return super().regions(op)
        pipeline, maps = Pipeline.of(op), []
        for array, window, index_map, _ in pipeline.shown:
            shape = array.ref.shape
            found = number_facts(index_map, window, shape, pipeline.grid, self.facts)
            limits = number_limits(window, shape)
            maps.append(_clamped(index_map, found, limits, op.loc))
        return [*maps, self.block(pipeline.body)]


def _clamped(
    index_map: Block, found: Sequence[Fact], limits: Sequence[int], loc: Loc | None
) -> Block:
    if all(map(_names_a_block, found, limits)):
        return index_map
    b = Builder(loc)
    b.ops += index_map.ops
    yields = list(index_map.yields)
    for n, (each, last) in enumerate(zip(found, limits, strict=True)):
        if not _names_a_block(each, last):
            yields[n] = b.clamp(b.index(0), yields[n], b.index(last))
    return b.block(index_map.params, yields)


# --- what is known about the block indices of a window ---


def number_limits(window: Window, shape: Sequence[int]) -> list[int]:
    """The upper bound of each result of an index map; the lower bound is 0."""
    limits = []
    for dim, n in zip(window.dims, shape, strict=True):
        limits.append(last_number(dim, n))
        if dim.kind == "bounded":
            limits.append(dim.size)
    return [min(last, HIGHEST) for last in limits]


def number_facts(
    index_map: Block,
    window: Window,
    shape: Sequence[int],
    grid: Grid,
    facts: Facts | None = None,
) -> list[Fact]:
    """The range of each result of an index map over the grid.

    This is a proof: arithmetic wraps around as it does at run time. `facts` knows the
    values from outside the map.
    """
    facts = facts or Facts()
    facts.note_grid(index_map.params, grid)
    facts.note_block(index_map)
    found = [facts.of(v) for v in index_map.yields]
    steps = all_steps(grid)
    if steps is None or all(map(_names_a_block, found, number_limits(window, shape))):
        return found
    tried = evaluate_map(index_map, steps)
    return found if tried is None else [Fact(int(x.min()), int(x.max())) for x in tried]


def _names_a_block(found: Fact, last: int) -> bool:
    return found.within(0, last)


def unclamped(
    index_map: Block, window: Window, shape: Sequence[int]
) -> tuple[Value, ...]:
    """The results of an index map, before clamps to the valid block indices.

    Such clamps change nothing, since an index out of range stands for the nearest valid
    one anyway; analyses that know this can look at the sum under the clamp.
    """
    made = {v: op for op in index_map.ops for v in op.results}

    def before(value: Value, last: int) -> Value:
        op = made.get(value)
        if op is None or op.name != "clamp":
            return value
        low, inner, high = op.operands
        bounds = number_of(made, low), number_of(made, high)
        return inner if bounds == (0, last) else value

    limits = number_limits(window, shape)
    return tuple(map(before, index_map.yields, limits))
