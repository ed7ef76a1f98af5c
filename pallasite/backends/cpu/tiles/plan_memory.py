"""plan_memory: notes which tiles get memory, and the lifetime of each value.

In: a kernel as it will be emitted. Out: the same ops, with notes for the emitter:
`cpu.until`, per result the position in the block of its last use; `cpu.memory`, per
result whether it is stored at once ("stored"), by the first reduction ("kept"), only
moved ("moved"), or a concatenation that is not stored ("found"); and, on ops with
regions, `cpu.params_until`. The emitter decides neither again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pallasite.backends.cpu.tiles.lifetimes import Uses, uses_of
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk

UNTIL, MEMORY, PARAMS_UNTIL = "cpu.until", "cpu.memory", "cpu.params_until"


def plan_memory(kernel: Kernel) -> Kernel:
    """The kernel with notes on its values."""
    body, _ = _planned(kernel.body)
    return kernel.with_(body=body)


def _planned(block: Block) -> tuple[Block, tuple[int, ...]]:
    """The block with notes, and the last use of each of its parameters."""
    uses = uses_of(block)
    ops = tuple(_noted(op, uses) for op in block.ops)
    return replace(block, ops=ops), tuple(uses.last[v] for v in block.params)


def _noted(op: Op, uses: Uses) -> Op:
    notes: dict[str, Any] = {}
    if op.results:
        notes[UNTIL] = tuple(uses.last[v] for v in op.results)
    memory = tuple(_memory(v, uses) for v in op.results)
    if any(memory):
        notes[MEMORY] = memory
    planned = [_planned(region) for region in op.regions]
    if any(until for _, until in planned):
        notes[PARAMS_UNTIL] = tuple(until for _, until in planned)
    regions = tuple(block for block, _ in planned)
    return op.with_(attrs={**op.attrs, **notes}, regions=regions)


def _memory(value: Value, uses: Uses) -> str:
    if value in uses.moved:
        return "moved"
    if value in uses.found:
        return "found"
    if value in uses.kept:
        return "kept"
    return "stored" if value in uses.stored else ""


@dataclass(frozen=True)
class MemoryPlan:
    """The notes of a kernel, by value."""

    until: Mapping[Value, int] = field(default_factory=dict[Value, int])
    memory: Mapping[Value, str] = field(default_factory=dict[Value, str])

    @staticmethod
    def of(kernel: Kernel) -> "MemoryPlan":
        until: dict[Value, int] = {}
        memory: dict[Value, str] = {}
        for op in walk(kernel.body):
            until.update(zip(op.results, op.attrs.get(UNTIL, ()), strict=False))
            memory.update(zip(op.results, op.attrs.get(MEMORY, ()), strict=False))
            for region, last in zip(
                op.regions, op.attrs.get(PARAMS_UNTIL, ()), strict=False
            ):
                until.update(zip(region.params, last, strict=True))
        return MemoryPlan(until, memory)
