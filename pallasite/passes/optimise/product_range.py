"""product_range: a loop that adds products of a mask goes through the rows it has.

In: a loop, under a test of data, that only adds products of the parts of a mask with
other tiles, as where rows are multiplied by who belongs where. Blocks may have been
divided since the author wrote the test, and a program has rows of a few slots: most
parts of the mask are empty. Out: the same loop from the first part with anything in it
to the last; a loop before it computes the mask alone, element by element, and what it
finds is reduced once, after it.

Proof: the product of a mask without any element is zero, so that adding it changes
nothing (a sum of negative zeros may become zero). An infinity or NaN in what it would
have multiplied does not become NaN: docs/semantics.md says so, under "Edges".
"""

from collections.abc import Mapping

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import inline, producers_of, with_ops, with_regions
from pallasite.ir.roles import Dot, Loop, Pipeline, number_of
from pallasite.ir.types import INDEX, TileType
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.memory import constant_inputs
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.guard_range import code_of

LEAST_PARTS = 4  # of a mask that is worth a loop of its own
MOST_ELEMENTS = 1 << 13  # of a part
KEEP_ZEROS = ("cast", "transpose", "reshape")


def product_range(kernel: Kernel) -> Kernel:
    """Narrow loops over the parts of masks, where tests of data guard them."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if len(grids) != 1:
        return kernel
    pipeline, made = Pipeline.of(grids[0]), producers_of(kernel.body)
    body = _Ranges(made, constant_inputs(kernel)).block(pipeline.body, False)
    if body is pipeline.body:
        return kernel
    return canonicalize(with_pipeline(kernel, pipeline.with_(body=body).to_op()))


def asks_elements(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a number depends on a tile."""
    op = made.get(value)
    if op is None or op.name == "load":
        return False
    tiles = any(not v.is_ref and v.tile.rank for v in op.operands)
    return tiles or any(asks_elements(v, made) for v in op.operands if not v.is_ref)


class _Ranges:
    def __init__(self, made: Mapping[Value, Op], given: frozenset[Value]):
        self.made, self.given = made, given

    def block(self, block: Block, guarded: bool) -> Block:
        ops = list[Op]()
        for op in block.ops:
            found = self.narrowed(op) if guarded and op.name == "for" else None
            if found is None:
                inside = op.name == "cond" and asks_elements(op.operands[0], self.made)
                regions = [self.block(r, guarded or inside) for r in op.regions]
                found = [with_regions(op, regions)]
            ops += found
        return with_ops(block, ops)

    def narrowed(self, op: Op) -> list[Op] | None:
        """The loop from the first part of its mask to the last, after finding these."""
        loop, mask = Loop.of(op), self.mask(Loop.of(op))
        first, limit, step = (number_of(self.made, v) for v in loop.bounds)
        if mask is None or first is None or limit is None or not step:
            return None
        few = len(range(first, limit, step)) < LEAST_PARTS
        test = None if few or step < 0 else code_of(mask, loop, self.made, self.given)
        if test is None or mask.tile.size > MOST_ELEMENTS:
            return None
        b, inner, shape = Builder(op.loc), Builder(op.loc), mask.tile.shape
        tile = TileType(shape, INDEX.dtype)
        index, low, high = Value(INDEX, "part"), Value(tile, "low"), Value(tile, "high")
        code = Block((loop.index,), tuple(test), (mask,))
        (here,) = inline(inner, code, (index,))
        after = inner.add(index, inner.index(step))
        low_now = inner.select(here, inner.broadcast(index, shape, ()), low)
        low_now = inner.min(low, low_now)
        high_now = inner.select(here, inner.broadcast(after, shape, ()), high)
        region = inner.block((index, low, high), (low_now, inner.max(high, high_now)))
        ends = b.constant(limit, tile), b.constant(first, tile)
        lows, highs = b.emit("for", *loop.bounds, *ends, regions=(region,))
        axes = tuple(range(len(shape)))
        start = b.op("reduce", lows, kind="min", axes=axes)
        end = b.op("reduce", highs, kind="max", axes=axes)
        new = [b.clamp(loop.first, v, loop.limit) for v in (start, end)]
        return [*b.ops, loop.with_(first=new[0], limit=new[1]).to_op()]

    def mask(self, loop: Loop) -> Value | None:
        """The mask whose products are all that a loop adds to what it carries."""
        masks = set[Value | None]()
        for before, after in zip(loop.carried, loop.body.yields, strict=True):
            while after is not before:
                op = self.made.get(after)
                if op is None or op.name != "add" or op not in loop.body.ops:
                    return None
                terms = [self.masks_of(v) for v in op.operands]
                if not any(terms):
                    return None
                after = op.operands[1 if terms[0] else 0]
                masks |= terms[0] or terms[1]
        (mask, *others) = masks or {None}
        return None if others else mask

    def masks_of(self, value: Value) -> set[Value | None]:
        """The mask of a product, if a value is one."""
        op = self.made.get(value)
        if op is None or op.name != "dot":
            return set()
        for side in Dot.of(op).sides:
            found = side.value
            while (op := self.made.get(found)) is not None and op.name in KEEP_ZEROS:
                found = op.operands[0]
                if found.tile.dtype.is_bool:
                    return {found}
        return set()
