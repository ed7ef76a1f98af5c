"""known_comparisons: comparisons of integers whose outcome their ranges decide.

`pl.when(j >= 0)`, or `pl.when(4 * step + 1 == 0)` in a step that was gathered from
several, asks what is known of grid indices: it becomes a constant, and `canonicalize`
takes the branch away.
"""

from collections.abc import Callable

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import with_regions
from pallasite.ir.roles import Loop, Pipeline
from pallasite.passes.analysis.intervals import Fact, Facts
from pallasite.passes.place_windows import note_grid


def known_comparisons(kernel: Kernel) -> Kernel:
    """Replace comparisons that are always true or never."""
    body = _Walk().block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


def _lt(x: Fact, y: Fact) -> bool | None:
    if x.high < y.low:
        return True
    return False if x.low >= y.high else None


def _eq(x: Fact, y: Fact) -> bool | None:
    if x.high < y.low or y.high < x.low:
        return False
    return True if x.number is not None and x.number == y.number else None


def _not(outcome: bool | None) -> bool | None:
    return None if outcome is None else not outcome


_OUTCOMES: dict[str, Callable[[Fact, Fact], bool | None]] = {
    "lt": _lt,
    "gt": lambda x, y: _lt(y, x),
    "ge": lambda x, y: _not(_lt(x, y)),
    "le": lambda x, y: _not(_lt(y, x)),
    "eq": _eq,
    "ne": lambda x, y: _not(_eq(x, y)),
}


class _Walk:
    """Walks a kernel with what is known of its integers so far."""

    def __init__(self) -> None:
        self.facts = Facts()

    def block(self, block: Block) -> Block:
        ops = [self.op(op) for op in block.ops]
        if all(new is old for new, old in zip(ops, block.ops, strict=True)):
            return block
        return Block(block.params, tuple(ops), block.yields)

    def op(self, op: Op) -> Op:
        if op.name == "pipeline":
            pipeline = Pipeline.of(op)
            for ids in (pipeline.ids, *(each.params for each in pipeline.maps)):
                note_grid(self.facts, ids, pipeline.grid)
        elif op.name == "for":
            self.facts.note_counter(Loop.of(op))
        op = with_regions(op, [self.block(region) for region in op.regions])
        outcome = self.outcome(op)
        if outcome is not None:
            b = Builder(op.loc)
            b.like(outcome, op.result)
            (constant,) = b.ops
            op = constant.with_(results=op.results)
        self.facts.note_op(op)
        return op

    def outcome(self, op: Op) -> bool | None:
        rule = _OUTCOMES.get(op.name)
        if rule is None or any(map(_is_float, op.operands)):
            return None
        return rule(*map(self.facts.of, op.operands))


def _is_float(value: Value) -> bool:
    return value.type.dtype.is_float
