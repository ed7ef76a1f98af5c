"""Whether every block of a result is certain to be shown to a program, and stored.

Unfused, what follows a kernel is computed everywhere, even where the kernel leaves its
result undefined: `jnp.where(rows < length, call(x), 0)`. Fused into the kernel's
stores, it must not miss a block.
"""

from collections.abc import Mapping
from math import prod

import numpy as np

from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.roles import Pipeline, Shown, number_of
from pallasite.passes.analysis.block_table import blocks_shown, last_number
from pallasite.passes.analysis.guards import Part, guard_of


def shows_every_block(pipeline: Pipeline, shown: Shown) -> bool:
    """Whether a window is known to show each block of its array at some step."""
    dims, shape = shown.window.dims, shown.array.ref.shape
    if any(dim.kind not in ("blocked", "squeezed") for dim in dims):
        return False
    last = [last_number(dim, n) for dim, n in zip(dims, shape, strict=True)]
    blocks = None
    if shape:
        blocks = blocks_shown(shown.index_map, shown.window, shape, pipeline.grid)
    if blocks is None:
        return _follows_axes(pipeline, shown, last)
    return np.unique(blocks, axis=1).shape[1] == prod(n + 1 for n in last)


def _follows_axes(pipeline: Pipeline, shown: Shown, last: list[int]) -> bool:
    """Whether each dimension with several blocks has an axis that indexes them."""
    params, followed = shown.index_map.params, set()
    for index, number in zip(shown.index_map.yields, last, strict=True):
        if number == 0:
            continue
        axis = params.index(index) if index in params else -1
        size = pipeline.grid[axis] if axis >= 0 else None
        if size is None or size <= number or axis in followed:
            return False
        followed.add(axis)
    return None not in pipeline.grid and 0 not in pipeline.grid


def is_surely_stored(pipeline: Pipeline, block: Value, staying: set[int]) -> bool:
    """Whether a block is known to be stored at a step of each program that shows it.

    Args:
        pipeline: the programs.
        block: a result's block, in the body.
        staying: axes along which it stays the same block.
    """
    stores = _Stores(pipeline, block, staying)
    return stores.in_block(pipeline.body, {})


class _Stores:
    def __init__(self, pipeline: Pipeline, block: Value, staying: set[int]):
        self.pipeline, self.block, self.staying = pipeline, block, staying
        ops = list(walk(pipeline.body))
        self.producers: dict[Value, Op] = {r: op for op in ops for r in op.results}

    def in_block(self, code: Block, at: Mapping[int, int]) -> bool:
        """Whether code stores the block, at the step `at` of the axes named there."""
        for op in code.ops:
            if op.name == "store" and op.operands[0] is self.block:
                return True
            if op.name == "cond" and all(self.in_block(b, at) for b in op.regions):
                return True
            guard = guard_of(op, self.producers)
            then = None if guard is None else self.step(guard.parts, at)
            if guard and then is not None and self.in_block(guard.taken, then):
                return True
        return False

    def step(
        self, parts: tuple[Part, ...], at: Mapping[int, int]
    ) -> dict[int, int] | None:
        """The step, along axes where the block stays, at which all conditions hold."""
        found = dict(at)
        for part in parts:
            op = self.producers.get(part.value)
            if not part.truth or op is None or op.name != "eq":
                return None
            ids = [v for v in op.operands if v in self.pipeline.ids]
            numbers = [
                number_of(self.producers, v) for v in op.operands if v not in ids
            ]
            if len(ids) != 1 or numbers[0] is None:
                return None
            axis, number = self.pipeline.ids.index(ids[0]), numbers[0]
            size = self.pipeline.grid[axis]
            is_step = size is not None and 0 <= number < size
            if not is_step or axis not in self.staying:
                return None
            if found.setdefault(axis, number) != number:
                return None
        return found
