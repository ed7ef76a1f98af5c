"""Which values of a program depend on the operands whose cotangents are wanted.

`Activity` walks the code of one program (after `passes/lower/promote.py`) to a
fixpoint. Refs count by their root: a view depends on what its memory depends on.
"""

from collections.abc import Iterable, Sequence

from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import used_values
from pallasite.ir.roles import Cond, Loop, While
from pallasite.ir.types import TileType
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import VIEWS, Roots, read_refs, written_refs


class Activity:
    """What depends on `wanted`, where each ref comes from, what is written."""

    def __init__(
        self, block: Block, wanted: Iterable[Value], constants: Iterable[Value] = ()
    ):
        self.constants = frozenset(constants)
        self.root = Roots(block).of
        self.view_ops: dict[Value, Op] = {}
        self.varied: set[Value] = set(wanted)  # values, and roots of refs
        for op in walk(block):
            if op.name in VIEWS:
                self.view_ops[op.result] = op
        ops = list(walk(block))
        self.written = {self.root(ref) for op in ops for ref in written_refs(op)}
        self.loaded = {self.root(ref) for op in ops for ref in read_refs(op)}
        before = -1
        while before != len(self.varied):
            before = len(self.varied)
            self.block(block)

    def depends(self, value: Value) -> bool:
        """Whether a value, or the memory of a ref, has a cotangent."""
        return (self.root(value) if value.is_ref else value) in self.varied

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        for region in op.regions:
            self.block(region)
        if op.name == "for":
            loop = Loop.of(op)
            self.loop(loop.inits, loop.carried, loop.body, op)
        elif op.name == "while":
            loop = While.of(op)
            self.loop(loop.inits, loop.body.params, loop.body, op)
            self.join(loop.condition.params, loop.body.params)
        elif op.name == "cond":
            for branch in Cond.of(op).branches:
                self.join(op.results, branch.yields)
        elif not op.regions:
            for ref in written_refs(op):
                if any(map(self.depends, op.operands)) and ref.ref.dtype.is_float:
                    self.varied.add(self.root(ref))
        is_one = not op.regions or op.name == "custom"
        if is_one and any(map(self.depends, op.operands)):
            floats = (r for r in op.results if not r.is_ref and is_float(r))
            self.varied.update(r for r in floats if r not in self.constants)

    def loop(
        self, inits: Sequence[Value], params: Sequence[Value], body: Block, op: Op
    ) -> None:
        self.join(params, inits)
        self.join(params, body.yields)
        self.join(op.results, params)

    def join(self, targets: Sequence[Value], sources: Sequence[Value]) -> None:
        for target, source in zip(targets, sources, strict=True):
            is_new = is_float(target) and target not in self.constants
            if self.depends(source) and is_new:
                self.varied.add(target)

    def captured(self, *regions: Block) -> list[Value]:
        """Values with cotangents that regions capture."""
        inside = {v for region in regions for v in defined(region)}
        used = [v for region in regions for v in used_values(region)]
        return [
            v
            for v in dict.fromkeys(used)
            if v not in inside and not v.is_ref and v in self.varied
        ]


def is_float(value: Value) -> bool:
    return isinstance(value.type, TileType) and value.type.dtype.is_float


def defined(block: Block) -> set[Value]:
    """Every value that a block and its regions define."""
    found = set(block.params)
    for op in walk(block):
        found.update(op.results)
        found.update(p for region in op.regions for p in region.params)
    return found


def facts_of(block: Block, sizes: Sequence[int | None]) -> Facts:
    """Facts about the integers of a program, whose parameters are grid indices."""
    facts = Facts()
    facts.note_grid(block.params, sizes)
    facts.note_block(block)
    return facts
