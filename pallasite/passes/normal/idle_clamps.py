"""idle_clamps: index maps without the clamps that a guard makes idle.

In: maps that keep a window still in steps that ignore it, `jnp.minimum(j, last)` or
`jnp.where(runs, j, 0)`, beside a `pl.when` around every use of the block. Out: the map
of the steps that do use it. Proof: a minimum, maximum, clamp or choice is replaced by
one of its operands if both are equal at every step that reaches a use, by enumeration;
in the other steps nobody looks at the block, and its memory is not written. Where it
pays to keep windows still, `optimise/idle_windows.py` derives the clamp again.
"""

from collections.abc import Sequence

import numpy as np

from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import substitute
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.memory import constant_inputs
from pallasite.passes.analysis.step_table import StepTable, reached
from pallasite.passes.lower.place_windows import number_limits
from pallasite.passes.normal.canonicalize import canonicalize

# Ops whose result is one of their operands, and which operands those are.
_CHOICES = {
    "min": slice(0, 2),
    "max": slice(0, 2),
    "clamp": slice(0, 3),
    "select_n": slice(1, None),
}


def idle_clamps(kernel: Kernel) -> Kernel:
    """The kernel with index maps that say where a block is when it is used."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return kernel
    whole = Pipeline.of(grids[0])
    chosen = (op.name in _CHOICES for each in whole.maps for op in each.ops)
    if not any(chosen):
        return kernel
    constant, used = constant_inputs(kernel), _used(whole)
    maps = [
        _simpler(each, whole, used[each.block])
        if each.array in constant and each.block in used
        else each.index_map
        for each in whole.shown
    ]
    if all(new is old for new, old in zip(maps, whole.maps, strict=True)):
        return kernel
    new = whole.with_(maps=tuple(maps)).to_op()
    return canonicalize(with_pipeline(kernel, new))


def _used(whole: Pipeline) -> dict[Value, np.ndarray]:
    """The steps that may use each block."""
    table = StepTable(whole.ids, whole.grid)
    table.add_ops(whole.body.ops)
    used: dict[Value, np.ndarray] = {}
    for op, active in reached(whole.body, table):
        for ref in op.operands:
            if ref.is_ref:
                used[ref] = used[ref] | active if ref in used else active
    return used


def _simpler(shown: Shown, whole: Pipeline, used: np.ndarray) -> Block:
    """An index map without choices that are the same at all steps that matter."""
    index_map = shown.index_map
    table = StepTable(index_map.params, whole.grid)
    table.add_ops(index_map.ops)
    same: dict[Value, Value] = {}
    for op in index_map.ops:
        if op.name in _CHOICES:
            chosen = _always(op, op.operands[_CHOICES[op.name]], table, used)
            if chosen is not None:
                same[op.result] = same.get(chosen, chosen)
    if not same:
        return index_map
    new = substitute(index_map, same)
    table.add_ops(new.ops)
    limits = number_limits(shown.window, shown.array.ref.shape)
    pairs = zip(index_map.yields, new.yields, limits, strict=True)
    # An index out of range would be clamped again.
    fits = all(a is b or _is_within(table.of(b), last) for a, b, last in pairs)
    return new if fits else index_map


def _is_within(numbers: np.ndarray | None, last: int) -> bool:
    return numbers is not None and bool(np.all((numbers >= 0) & (numbers <= last)))


def _always(
    op: Op, operands: Sequence[Value], table: StepTable, used: np.ndarray
) -> Value | None:
    """The operand that an op chooses at every step that matters."""
    result = table.of(op.result)
    if result is None:
        return None
    for value in operands:
        seen = table.of(value)
        assert seen is not None
        new, old, matters = np.broadcast_arrays(seen, result, used)
        if np.array_equal(new[matters], old[matters]):
            return value
    return None
