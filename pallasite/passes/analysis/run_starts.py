"""run_starts: what is true wherever a run of steps with the same number starts.

`run_starts(pipeline, axis, numbers)` finds the bools of its body that hold at the first
step along an axis, and at each step of which one of some numbers is another than at the
step before it. Authors compare entries of a table: `(t == 0) | (s[t - 1] != s[t])`.

Proof: a number that depends on the axis through one part of it alone, such as the load
in `min(s[t], n)`, changes only if that part does; `ne` of this part at a step and at
the one before it says so. Which step an index is, is read off its table (`StepTable`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallasite.ir.nodes import Block, Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.index_code import IndexCode, Key
from pallasite.passes.analysis.step_table import StepTable

_HOLE = ("hole",)


def run_starts(
    pipeline: Pipeline, axis: int, numbers: Sequence[Key]
) -> frozenset[Value]:
    """The bools of a body that hold wherever a run starts.

    Args:
        pipeline: whose body it is.
        axis: the axis along which steps follow each other.
        numbers: of `IndexCode`; a run ends where one of them changes.
    """
    body, size = pipeline.body, pipeline.grid[axis]
    table = StepTable(pipeline.ids, pipeline.grid)
    table.add_ops(body.ops)
    if size is None or table.of(pipeline.ids[axis]) is None:
        return frozenset()
    finder = _Finder(body, table, axis, size)
    bools = [
        value
        for op in walk(body)
        for value in op.results
        if not value.is_ref and value.tile.dtype.is_bool and not value.tile.shape
    ]
    return frozenset(
        value
        for value in bools
        if all(finder.surely(value, number).all() for number in numbers)
    )


class _Finder:
    def __init__(self, body: Block, table: StepTable, axis: int, size: int):
        self.code, self.table, self.axis = IndexCode(body), table, axis
        self.steps, self.never = np.arange(size), np.zeros(size, bool)
        ops = [op for op in walk(body) if len(op.results) == 1]
        values = (*body.params, *(op.result for op in ops))
        scalars = [v for v in values if not v.is_ref and not v.tile.shape]
        self.values = {self.code.key(v): v for v in reversed(scalars)}

    def surely(self, value: Value, number: Key) -> np.ndarray:
        """At which steps a bool holds if they are first, or the number changed."""
        known = self.along(value)
        op = self.code.made.get(value)
        if known is not None:
            return known.astype(bool)
        if op is None or op.name not in ("or", "and", "ne"):
            return self.never
        if op.name == "ne":
            parts = self.parts(number)
            return self.changes(op.operands, parts)
        x, y = (self.surely(v, number) for v in op.operands)
        return x | y if op.name == "or" else x & y

    def along(self, value: Value) -> np.ndarray | None:
        """A scalar's table along the axis, if it depends on no other."""
        table, along = self.table.of(value), self.table.depends_on(value)
        if table is None or along is None or along - {self.axis}:
            return None
        return np.broadcast_to(table.ravel(), self.steps.shape)

    def parts(self, number: Key) -> list[Key]:
        """Parts of a number, each of which it depends on the axis through alone."""
        found = dict.fromkeys(_subkeys(number))
        return [
            part for part in found
            if self.is_along(part) and not self.is_along(_replaced(number, part, _HOLE))
        ]  # fmt: skip

    def is_along(self, key: Key) -> bool:
        return ("id", self.axis) in _subkeys(key)

    def changes(self, pair: Sequence[Value], parts: Sequence[Key]) -> np.ndarray:
        """Where two values are a part at a step and at the one before it."""
        keys = [self.code.key(v) for v in pair]
        for part in parts:
            for now, before in (keys, keys[::-1]):
                if now == part and before is not None:
                    return self.is_step_before(part, before)
        return self.never

    def is_step_before(self, part: Key, key: Key) -> np.ndarray:
        """Where a key is a part at the step before, from another index."""
        at = list[Any]()
        if not _matched(part, key, ("id", self.axis), at) or len({*at}) != 1:
            return self.never
        value = self.values.get(at[0])
        index = None if value is None else self.along(value)
        return self.never if index is None else index == self.steps - 1


def _subkeys(key: Any) -> Iterator[Any]:
    if isinstance(key, tuple):
        yield key
        for each in key:
            yield from _subkeys(each)


def _replaced(key: Any, part: Any, by: Any) -> Any:
    if key == part:
        return by
    if isinstance(key, tuple):
        return tuple(_replaced(each, part, by) for each in key)
    return key


def _matched(pattern: Any, key: Any, hole: Any, found: list[Any]) -> bool:
    """Whether a key is a pattern with something in place of a hole, collected."""
    if pattern == hole:
        found.append(key)
        return True
    if not isinstance(pattern, tuple) or not isinstance(key, tuple):
        return pattern == key
    return len(pattern) == len(key) and all(
        _matched(p, k, hole, found) for p, k in zip(pattern, key, strict=True)
    )
