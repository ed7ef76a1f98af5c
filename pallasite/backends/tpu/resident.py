"""Keeps small arrays in main memory on the chip, where a kernel uses them directly.

A TPU loads and stores only its vector memory, and its copies move whole tiles. An array
elsewhere that a kernel loads, stores, or moves blocks over that are not aligned to
tiles (`emit_pipeline`), is given a window of the whole array, if it is small: it is
copied in before the first program and back after the last one.

Kernel in, Kernel out: the meaning stays the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from pallasite.backends.tpu.schedule import MAIN_MEMORY, main_pipeline
from pallasite.backends.tpu.windows import fits
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, BlockDim, Kernel, Op, Value, Window, full_index
from pallasite.ir.rewrite import with_regions
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import RefType
from pallasite.passes.analysis.carried import VIEWS
from pallasite.passes.analysis.memory import is_access

MOST_BYTES = 2 << 20  # of an array that is kept on the chip


def keep_on_chip(kernel: Kernel) -> Kernel:
    """The kernel with windows for the small arrays that it uses directly."""
    op = main_pipeline(kernel)
    if op is None:
        return kernel
    pipeline = Pipeline.of(op)
    arrays = [p for p in kernel.params if _is_outside(p, pipeline)]
    uses = {array: _Uses(array) for array in arrays}
    for array in uses.values():
        array.look(pipeline.body)
    for operand, result in kernel.aliases:  # aliased: both windows, or none
        pair = [uses.get(kernel.inputs[operand]), uses.get(kernel.outputs[result])]
        found = [each for each in pair if each is not None and each.is_used]
        for each in found:
            each.directly = any(other.directly for other in found)
    wanted = [each for each in uses.values() if each.wants_window]
    if not wanted:
        return kernel
    new = _with_windows(kernel, pipeline, wanted)
    body = Block(kernel.body.params, (*kernel.body.ops[:-1], new), kernel.body.yields)
    return kernel.with_(body=body)


def _is_outside(param: Value, pipeline: Pipeline) -> bool:
    ref = param.ref
    if ref.space not in MAIN_MEMORY or ref.is_semaphore or not ref.shape:
        return False
    size = prod(ref.shape) * ref.dtype.bytes
    return param not in pipeline.arrays and 0 < size <= MOST_BYTES


@dataclass
class _Uses:
    """How a kernel uses an array in main memory."""

    array: Value
    directly: bool = False
    is_used: bool = False
    shape: list[int] = field(default_factory=list[int])
    fills: set[float | int | bool | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.shape = [*self.array.ref.shape]
        self.views = {self.array}

    @property
    def wants_window(self) -> bool:
        return self.directly and len(self.fills) < 2

    def look(self, block: Block) -> None:
        for op in block.ops:
            self.is_used |= self.array in op.operands
            if op.operands and op.operands[0] in self.views and op.name in VIEWS:
                self.views.add(op.result)
            if is_access(op) and op.operands[0] in self.views:
                self.directly = True
            if op.name == "pipeline":
                for shown in Pipeline.of(op).shown:
                    self.look_through(shown)
            for region in op.regions:
                self.look(region)

    def look_through(self, shown: Shown) -> None:
        """A window of an inner pipeline: whether its blocks miss tiles or the edge."""
        if shown.array not in self.views:
            return
        window, ref = shown.window, shown.array.ref
        over = [
            d for d, (dim, n) in enumerate(zip(window.dims, ref.shape, strict=True))
            if dim.kind == "blocked" and n % dim.size
        ]  # fmt: skip
        if over and shown.array is not self.array:
            return  # part of the array: past its end is not past the array's
        for d in over:
            size = window.dims[d].size
            self.shape[d] = max(self.shape[d], -(-ref.shape[d] // size) * size)
        if over and window.mode == "in":
            self.fills.add(window.fill)
        self.directly |= bool(over) or not fits(ref, window)


def _with_windows(kernel: Kernel, pipeline: Pipeline, wanted: list[_Uses]) -> Op:
    shown, whole, padded = [*pipeline.shown], {}, {}
    b = Builder(pipeline.op.loc)
    for each in wanted:
        array, ref = each.array, each.array.ref
        mode = "out" if array in kernel.outputs else "in"
        fill = next(iter(each.fills), None)
        dims = tuple(map(BlockDim, each.shape))
        window = Window(dims, mode, fill=fill, buffers=1)
        block = Value(RefType(tuple(each.shape), ref.dtype, "block"), array.name)
        shown.append(Shown(array, window, _origin(pipeline, ref.rank), block))
        padded[array] = whole[array] = block
        if block.ref.shape != ref.shape:
            whole[array] = b.subview(block, full_index(ref.shape))
    body = pipeline.body
    ops = [*b.ops, *_Moved(whole, padded).ops(body.ops)]
    params = (*pipeline.ids, *(s.block for s in shown))
    new = pipeline.showing(shown, Block(params, tuple(ops), body.yields))
    if any(each.array in kernel.outputs for each in wanted):
        new = new.with_(semantics=("arbitrary",) * len(new.semantics))
    return new.to_op()


def _origin(pipeline: Pipeline, rank: int) -> Block:
    b = Builder(pipeline.op.loc)
    params = tuple(Value(i.type, i.name) for i in pipeline.ids)
    return b.block(params, [b.index(0)] * rank)


class _Moved:
    """Code with blocks in place of arrays; inner pipelines see the padding too."""

    def __init__(self, whole: dict[Value, Value], padded: dict[Value, Value]):
        self.whole, self.padded = dict(whole), padded

    def ops(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        return tuple(map(self.op, ops))

    def op(self, op: Op) -> Op:
        seen = self.whole
        if op.name == "pipeline":
            seen = {**self.whole, **self.padded}
        if any(v in seen for v in op.operands):
            op = op.with_(operands=tuple(seen.get(v, v) for v in op.operands))
            if op.name in VIEWS:
                ref = replace(op.result.ref, space=op.operands[0].ref.space)
                view = Value(ref, op.result.name)
                self.whole[op.result] = view
                op = op.with_(results=(view,))
        regions = [replace(r, ops=self.ops(r.ops)) for r in op.regions]
        return with_regions(op, regions)
