"""Pairs of thread blocks that multiply together: programs that share right operands.

Two programs next to each other along an axis of the grid multiply their own rows by the
same columns, so that each thread block copies half of the right operands, and the
tensor cores of both read all of them. Proof: neither the addresses of right operands
nor whether and how often anything is multiplied depends on the position along the axis.
"""

from collections.abc import Iterator

from pallasite.backends.cuda.products import Plan, Product
from pallasite.backends.cuda.rings import Ring
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.roles import Loop, Pipeline

PAIR = 2
WIDEST_ROW = 128  # bytes of a panel, of which a half has whole ones


def pair_axis(plan: Plan, pipeline: Pipeline) -> int | None:
    """The axis along which programs make pairs; None: they multiply alone."""
    if not plan.set.has_tensor_memory or plan.set.held_rows(plan.rows) > plan.set.rows:
        return None
    if any(product.is_scaled for product in plan.products):
        return None  # both need the scales of all columns
    if any(ring.loaded for ring in plan.rings) or not _halves(plan):
        return None
    for axis, size in enumerate(pipeline.grid):
        if size is not None and size % PAIR == 0:
            depending = _depending(plan.program, pipeline.ids[axis])
            if not any(v in depending for v in _shared_by_pairs(plan)):
                return axis
    return None


def halve(plan: Plan) -> None:
    """Give each thread block of a pair half of the right operands."""
    for ring, number, dim in _halves(plan) or ():
        ring.halves[number] = dim


def _halves(plan: Plan) -> list[tuple[Ring, int, int]] | None:
    """The right operands and the dimension of their columns; None: not all can be
    halved, or what is copied has to be padded."""
    sides = {id(p.lhs.load): p for p in plan.products if p.lhs.load is not None}
    found = dict[tuple[int, int], tuple[Ring, int, int]]()
    for product in plan.products:
        load, dim = product.rhs.load, 1 - product.rhs.contract
        assert load is not None
        group = plan.group_of[id(load)]
        number = group.loads.index(load)
        tile = load.result.tile
        if id(load) in sides or tile.rank != 2 or not _can_halve(product, dim):
            return None
        key = id(group.ring), number
        if found.setdefault(key, (group.ring, number, dim))[2] != dim:
            return None
    lefts = {
        (id(g.ring), n)
        for g in plan.groups
        for n, load in enumerate(g.loads)
        if id(load) in sides
    }
    padded = any(ring.bytes != ring.tile_bytes for ring in plan.rings)
    return None if padded or lefts & found.keys() else list(found.values())


def _can_halve(product: Product, dim: int) -> bool:
    """Whether instructions take half of the columns from each thread block."""
    tile = product.rhs.value.tile
    columns = product.result.tile.shape[1]
    half = tile.shape[dim] // PAIR * tile.dtype.bytes
    return columns % (16 * PAIR) == 0 and (dim == 0 or half % WIDEST_ROW == 0)


def _shared_by_pairs(plan: Plan) -> Iterator[Value]:
    """What has to be the same in both programs of a pair."""
    for product in plan.products:
        assert product.rhs.load is not None
        yield from product.rhs.load.operands
    for op in walk(plan.program):
        if any(plan.uses(op, group) for group in plan.groups):
            if op.name == "for":
                yield from Loop.of(op).bounds
            elif op.name in ("cond", "while"):
                yield op.operands[0]


def _depending(program: Block, value: Value) -> set[Value]:
    """The values that depend on one."""
    found, before = {value}, 0
    ops = list(walk(program))
    while len(found) > before:
        before = len(found)
        for op in ops:
            found |= _results_depending(op, found)
    return found


def _results_depending(op: Op, found: set[Value]) -> set[Value]:
    if op.name == "for":
        loop = Loop.of(op)
        made = {loop.index} if found.intersection(loop.bounds) else set[Value]()
        parts = zip(loop.inits, loop.yields, loop.carried, loop.results, strict=True)
        for start, end, carried, result in parts:
            if start in found or end in found or loop.index in made:
                made |= {carried, result}
        return made
    inputs = [*op.operands, *(v for r in op.regions for v in r.yields)]
    if not any(v in found for v in inputs):
        return set()
    return {*op.results, *(v for r in op.regions for v in r.params)}
