"""Turns slices that move with a loop into blocks chosen by its index.

A kernel that is shown all keys and loads `keys[j * 64 : (j + 1) * 64]` in a loop reads
the same as one whose grid brings it block `j`. As blocks, cotangents of what it reads
can be distributed over a grid (`backward_windows.py`).
"""

from dataclasses import dataclass, replace

from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import Access, Block, BlockDim, Op, Span, Value, walk
from pallasite.ir.roles import Loop
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program


def step_blocks(program: Program) -> Program:
    """Load slices that advance with a loop from blocks of their own."""
    walker = _Walk(program.body)
    return program.with_body(walker.block(program.body, None))


@dataclass(frozen=True)
class _Steps:
    """A loop, and how integers in it depend on its index."""

    index: Value
    forms: Forms

    def is_multiple(self, value: Value, factor: int) -> bool:
        form = self.forms.of(value)
        return form.affine == Affine((factor,), 0) and not form.spread


class _Walk:
    def __init__(self, body: Block):
        self.body = body
        self.written = set(Roots(body).written(body))
        self.views = {o.result: o for o in walk(body) if o.name == "block_view"}

    def block(self, block: Block, loop: _Steps | None) -> Block:
        b = Builder()
        for op in block.ops:
            b.loc = op.loc
            if op.name == "load" and loop is not None:
                op = self.load(b, op, loop)
            elif op.name == "for":
                inner = Loop.of(op)
                body = self.block(inner.body, self.steps(inner))
                op = inner.with_(body=body).to_op()
            elif op.regions:
                regions = tuple(self.block(region, loop) for region in op.regions)
                op = op.with_(regions=regions)
            b.ops.append(op)
        return Block(block.params, tuple(b.ops), block.yields)

    def steps(self, loop: Loop) -> _Steps | None:
        if loop.index.type != INDEX:
            return None
        forms = Forms([loop.index])
        forms.add_ops(op for op in self.body.ops if not op.regions)
        forms.add_ops(loop.body.ops)
        return _Steps(loop.index, forms)

    def load(self, b: Builder, op: Op, loop: _Steps) -> Op:
        """The load, from a block if one of its dimensions advances with the loop."""
        access, view = Access.of(op), self.views.get(op.operands[0])
        if view is None or view.operands[0] in self.written:
            return op
        window, shape = view.attrs["window"], view.operands[0].ref.shape
        shown = [d for d, dim in enumerate(window.dims) if dim.kind != "squeezed"]
        for place, (entry, start) in enumerate(access.split_index()):
            if not isinstance(entry, Span) or start is None or entry.stride != 1:
                continue
            dim = shown[place]
            is_whole = window.dims[dim] == BlockDim(shape[dim])
            divides = shape[dim] % entry.size == 0
            if is_whole and divides and loop.is_multiple(start, entry.size):
                dims, numbers = list(window.dims), list(view.operands[1:])
                dims[dim], numbers[dim] = BlockDim(entry.size), loop.index
                window = replace(window, dims=tuple(dims))
                source = view.operands[0]
                block = b.op("block_view", source, *numbers, window=window)
                return _at_start(op, access, place, block)
        return op


def _at_start(op: Op, access: Access, place: int, block: Value) -> Op:
    """The load of a whole dimension of a block, in place of a slice of the array."""
    pairs = access.split_index()
    entry = pairs[place][0]
    assert isinstance(entry, Span)
    pairs[place] = (Span(0, entry.size), None)
    index = tuple(each for each, _ in pairs)
    starts = tuple(start for _, start in pairs if start is not None)
    new = replace(access, ref=block, index=index, index_operands=starts)
    attrs = {**op.attrs, "index": index}
    return op.with_(operands=access_operands(new), attrs=attrs)
