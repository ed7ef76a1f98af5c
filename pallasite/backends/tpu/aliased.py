"""Aliased operands and results: merges the blocks of each pair into one block.

Mosaic fetches an operand's block into one buffer and writes a result's block back from
another: a store into one is not visible in the other, and a result's block starts
uninitialised. Where a kernel could tell, its operand's block is copied into the
result's block when that block is entered, and the body uses only the result's.

Kernel in, Kernel out: the meaning stays the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.backends.tpu.windows import is_whole, operand_name
from pallasite.errors import UnsupportedError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, Window, walk
from pallasite.ir.rewrite import clone, inline, substitute
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import BOOL, I32, RefType, TileType
from pallasite.passes.analysis.block_table import all_steps, evaluate_map
from pallasite.passes.analysis.carried import VIEWS, is_overwritten
from pallasite.passes.analysis.grid import WindowMoves, analyze

_MOST_STEPS = 1 << 10  # of grids in which all pairs of blocks are compared


def join_aliased(kernel: Kernel) -> Kernel:
    """The kernel with one block for each aliased pair whose separation could show."""
    for operand, result in kernel.aliases:
        pipeline = main_pipeline(kernel)
        if pipeline is None or _is_called_once(pipeline):
            return kernel  # its blocks are the arrays themselves
        pair = _Pair(kernel, pipeline, kernel.inputs[operand], kernel.outputs[result])
        if pair.shown(pair.output) is not None and pair.can_tell():
            joined = pair.joined()
            ops = (*kernel.body.ops[:-1], joined)
            body = Block(kernel.body.params, ops, kernel.body.yields)
            kernel = kernel.with_(body=body)
    return kernel


def reads_other_blocks(kernel: Kernel, operand: int, result: int) -> bool:
    """Whether an operand is seen in other blocks than the result that aliases it, and
    the result's blocks keep some of their old contents.

    Raises:
        UnsupportedError: the operand would have to show what is stored to the result.
    """
    pipeline = main_pipeline(kernel)
    assert pipeline is not None
    pair = _Pair(kernel, pipeline, kernel.inputs[operand], kernel.outputs[result])
    seen, written = pair.shown(pair.source), pair.shown(pair.output)
    uses = _uses(pair.body, seen.block) if seen else []
    if not uses or seen is None or written is None or _same_blocks(seen, written):
        return False
    pair.check_apart(seen, written, uses)
    return not pair.is_filled(written)


class _Pair:
    """An operand, and the result that aliases it."""

    def __init__(self, kernel: Kernel, op: Op, source: Value, output: Value):
        self.kernel, self.pipeline = kernel, Pipeline.of(op)
        self.source, self.output = source, output
        self.grid, self.ids = self.pipeline.grid, self.pipeline.ids
        self.body = self.pipeline.body

    def shown(self, array: Value) -> Shown | None:
        """The first window of an array."""
        shown = self.pipeline.shown
        return next((each for each in shown if each.array is array), None)

    def can_tell(self) -> bool:
        """Whether two separate blocks could give other results."""
        seen, written = self.shown(self.source), self.shown(self.output)
        assert written is not None
        uses = _uses(self.body, seen.block) if seen else []
        if seen is None and any(self.source in op.operands for op in walk(self.body)):
            return False  # the author's own copies see main memory
        if uses and seen and not _same_blocks(seen, written):
            self.check_apart(seen, written, uses)
            return False
        stored = _uses(self.body, written.block)
        reads_new = bool(uses and stored) and uses[-1] >= stored[0]
        along = [a for a, n in enumerate(self.grid) if n != 1]
        apart = set(along) <= self.moves(written).apart
        filled = self.is_filled(written)
        return reads_new or not filled or (bool(uses) and not apart)

    def is_filled(self, written: Shown) -> bool:
        """Whether each visit of a result's block overwrites all of it."""
        last = max(self.moves(written).axes, default=-1)
        first = {i: 0 for a, i in enumerate(self.ids) if a > last or self.grid[a] == 1}
        return is_overwritten(self.body.ops, written.block, first)

    def moves(self, shown: Shown) -> WindowMoves:
        number = self.pipeline.blocks.index(shown.block)
        return analyze(self.kernel).windows[number]

    # --- one block for both ---

    def joined(self) -> Op:
        seen, written = self.shown(self.source), self.shown(self.output)
        assert written is not None
        shown = {each.block: each for each in self.pipeline.shown}
        block = Value(RefType(*_type(written.block)), self.source.name)
        window = replace(written.window, mode="in")
        entering = Shown(self.source, window, clone(written.index_map), block)
        if seen is None:
            shown[block] = entering
        elif not _uses(self.body, seen.block):
            shown[seen.block] = entering
        else:
            block = seen.block
            fill = self.fill(seen.window, written.window)
            for each in (seen, written):
                filled = replace(each.window, fill=fill)
                shown[each.block] = each._replace(window=filled)
        b = Builder(self.pipeline.op.loc)
        self.copy_entered(b, block, written)
        b.ops += substitute(self.body, {block: written.block}).ops
        blocks = [each.block for each in shown.values()]
        body = b.block((*self.ids, *blocks), self.body.yields)
        return self.pipeline.showing(shown.values(), body).to_op()

    def fill(self, seen: Window, written: Window):
        if None in (seen.fill, written.fill) or seen.fill == written.fill:
            return written.fill if seen.fill is None else seen.fill
        raise self.refused(
            "alias, but have different fill values",
            [("fill", f"{seen.fill} and {written.fill}")],
            "give both BlockSpecs the same fill",
        )

    def copy_entered(self, b: Builder, block: Value, written: Shown) -> None:
        """`result[...] = operand[...]` if the previous step had another block."""
        then = Builder(b.loc)
        then.store(written.block, then.load(block))
        entered = None
        along = {a for a, n in enumerate(self.grid) if n != 1}
        if not along <= self.moves(written).apart:
            entered = self.entered(b, written)
        if entered is None:
            b.ops += then.ops
        else:
            b.emit("cond", b.cast(entered, I32), regions=(Block(), then.block()))

    def entered(self, b: Builder, written: Shown) -> Value:
        """Whether this is the first step, or the previous one had another block."""
        before, borrow = self.step_before(b)
        entered = borrow  # of all axes: there is no previous step
        here = inline(b, written.index_map, self.ids)
        there = inline(b, written.index_map, before)
        for old, new in zip(there, here, strict=True):
            entered = b.or_(entered, b.ne(old, new))
        return entered

    def step_before(self, b: Builder) -> tuple[list[Value], Value]:
        """Count down the last axis, borrow from the left."""
        sizes = [b.index(n) if isinstance(n, int) else n for n in self.pipeline.sizes]
        before: list[Value] = []
        borrow = b.constant(True, TileType((), BOOL))
        for index, size in reversed(list(zip(self.ids, sizes, strict=True))):
            counted = b.sub(index, b.cast(borrow, I32))
            borrow = b.op("lt", counted, b.index(0))
            last = b.sub(size, b.index(1))
            before.append(b.select(borrow, last, counted))
        return before[::-1], borrow

    # --- blocks that differ ---

    def check_apart(self, seen: Shown, written: Shown, uses: Sequence[int]) -> None:
        """Reject a kernel in which a step reads what it or an earlier one wrote."""
        kinds = [d.kind for s in (seen, written) for d in s.window.dims]
        if "bounded" in kinds:
            return
        stored = _uses(self.body, written.block)
        reads_new = bool(stored) and uses[-1] >= stored[0]
        if None in self.grid and stored:
            raise self.refused(
                "alias, but have different blocks",
                [
                    ("rule", "a store to the result must be visible in the operand"),
                    ("but", f"the grid {self.grid} is known only at run time"),
                ],
                "give both the same BlockSpec",
            )
        steps = all_steps(self.grid)
        if steps is None or steps.shape[1] > _MOST_STEPS or not stored:
            return
        meet = np.ones((steps.shape[1],) * 2, bool)  # by writing step, by reading step
        found = [evaluate_map(s.index_map, steps) for s in (written, seen)]
        if None in found:
            return
        for d, (out, into) in enumerate(zip(*found, strict=True)):  # type: ignore[arg-type]
            low, high = _reach(written.window, d, out)
            first, end = _reach(seen.window, d, into)
            meet &= (low[:, None] < end) & (first < high[:, None])
        meet = np.triu(meet, 0 if reads_new else 1)
        if meet.any():
            writes, reads = (tuple(map(int, steps[:, n])) for n in np.argwhere(meet)[0])
            raise self.refused(
                "alias, but have different blocks",
                [
                    ("rule", "a store to the result must be visible in the operand"),
                    ("but", f"program {reads} reads what program {writes} stores"),
                ],
                "give both the same BlockSpec, or read the operand in"
                " memory_space=pl.ANY with pltpu.make_async_copy",
            )

    def refused(self, what: str, facts: Sequence, fix: str) -> UnsupportedError:
        names = [operand_name(self.kernel, r) for r in (self.source, self.output)]
        return UnsupportedError(
            f"backend 'tpu': {names[0]} and {names[1]} {what}",
            [("kernel", self.kernel.name), *facts],
            at=self.pipeline.op.loc or self.kernel.loc,
            fix=fix,
        )


def _is_called_once(op: Op) -> bool:
    pipeline = Pipeline.of(op)
    whole = (is_whole(each.window, each.array.ref) for each in pipeline.shown)
    return not pipeline.grid and all(whole)


def _type(block: Value) -> tuple:
    return block.ref.shape, block.ref.dtype, block.ref.space


def _reach(window: Window, d: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The range of elements along a dimension that a block covers."""
    dim = window.dims[d]
    size = 1 if dim.kind == "squeezed" else dim.size
    start = index.astype(np.int64) * size if dim.kind == "blocked" else index
    start = start - dim.padding[0]
    return start, start + size


def _uses(body: Block, ref: Value) -> list[int]:
    """Which ops of a body use a ref or a view of it, also in nested regions."""
    refs, found = {ref}, []
    for number, op in enumerate(body.ops):
        for inner in (op, *(o for r in op.regions for o in walk(r))):
            if refs.isdisjoint(inner.operands):
                continue
            if inner.name in VIEWS:
                refs.add(inner.result)
            elif not found or found[-1] != number:
                found.append(number)
    return found


def _same_blocks(a: Shown, b: Shown) -> bool:
    if a.window.dims != b.window.dims or a.window.space != b.window.space:
        return False
    same = dict(zip(a.index_map.params, b.index_map.params, strict=True))
    pairs = list(zip(a.index_map.ops, b.index_map.ops, strict=False))
    for x, y in pairs:
        operands = tuple(same.get(v, v) for v in x.operands)
        if x.regions or (x.name, x.attrs, operands) != (y.name, y.attrs, y.operands):
            return False
        same |= zip(x.results, y.results, strict=True)
    yields = tuple(same.get(v, v) for v in a.index_map.yields)
    return len(a.index_map.ops) == len(b.index_map.ops) and yields == b.index_map.yields
