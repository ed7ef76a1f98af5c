"""Reblocking: the same kernel with smaller or larger blocks.

`cut` splits the programs of a kernel along one dimension of their blocks; `grow` merges
neighbouring ones. Both act on a dimension of the work (`analysis/loop_dims.py`): every
window, scratch ref and tile that has it is resized, and everything else stays. The
author's blocks define semantics, not a mapping to a chip: `choose_blocks.py` chooses
sizes for a chip, `resized_code.py` emits the code of a program.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, BlockDim, Kernel, Op, Value, walk
from pallasite.ir.rewrite import dead_code, inline, producers_of, replace_ops
from pallasite.ir.roles import Shown
from pallasite.ir.types import INDEX
from pallasite.ops.neutral import neutral
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.loop_dims import (
    MERGED,
    LoopDim,
    LoopDims,
    Place,
    loop_dims,
)
from pallasite.passes.analysis.past_ends import PastEnd
from pallasite.passes.lower.place_windows import number_facts, unclamped
from pallasite.passes.normal.resized_code import (
    CannotReblock,
    Joined,
    Part,
    Resized,
    merged_quotient,
)
from pallasite.passes.schedule.widen_steps import (
    RunningSteps,
    Wider,
    dims_of_steps,
    walked,
)

Quotient = Callable[[Op, int], Sequence[Op]]  # of a division, and its new divisor

NO_AXIS = "no parallel axis numbers its blocks"


def cut(kernel: Kernel, place: Place, parts: int) -> Kernel:
    """Programs with 1/`parts` of the blocks along a dimension, and more programs.

    Args:
        kernel: what to rewrite.
        place: a window and a dimension of its array.
        parts: divides the block's size.

    Raises:
        CannotReblock: the body needs the whole dimension, or a part would be past the
            end.
    """
    found, dim = in_pipeline(kernel, place)
    return _Cut(found, dim, parts).kernel()


def grow(
    kernel: Kernel,
    place: Place,
    factor: int,
    selects: bool = False,
    fills: bool = False,
) -> Kernel:
    """Programs with `factor` times the blocks along a dimension, and fewer programs.

    Args:
        kernel: what to rewrite.
        place: a window and a dimension of its array.
        factor: how many neighbours become one program.
        selects: whether programs may be merged of which only some take a branch; the
            branch then runs for all of them, and each element that it stores is
            selected.
        fills: whether they may be merged if the branch only updates maxima and adds to
            sums; what it adds for the others is made minus infinity or zero.

    Raises:
        CannotReblock: neighbours are not parts of one larger program.
    """
    found, dim = in_pipeline(kernel, place)
    try:
        return _Grow(found, dim, factor, selects).kernel()
    except CannotReblock:
        if not fills or not any(op.name == "cond" for op in found.pipeline.body.ops):
            raise
    found = dims_of_steps(kernel)
    dim = found.at(place)
    if dim is None:
        raise CannotReblock("no block has this dimension")
    return _GrowSteps(found, dim, factor).kernel()


def grow_whole(kernel: Kernel, place: Place) -> Kernel:
    """All programs along a dimension merged into one, with a block of its exact size:
    nothing past the ends of the arrays is left. Arguments and errors as for `grow`."""
    found, dim = in_pipeline(kernel, place)
    most = max(each.n for each in _moved(found, dim))
    return _Grow(found, dim, -(-most // dim.size), False, most).kernel()


def padded(kernel: Kernel, place: Place, size: int) -> Kernel:
    """The same with blocks of more elements than their arrays have.

    For a dimension that is whole in each block. Each position is computed from the same
    position of everything else, but for reductions and matmuls: their operands are
    neutral past the array. What is stored there is dropped.

    Raises:
        CannotReblock: it is not whole in each block, or used in another way.
    """
    found, dim = in_pipeline(kernel, place)
    moved = _moved(found, dim)
    if dim.besides is not None or dim.is_twice or dim.spans or dim.most_per > 1:
        raise CannotReblock(dim.besides or "parts of it are loaded, or it is merged")
    if any(each.n != dim.size for each in moved):
        raise CannotReblock("a block does not have all of an array's dimension")
    return _with_size(found, dim, _Padded(dim, size))


def trimmed(kernel: Kernel, place: Place) -> Kernel:
    """The same with blocks of no more elements than their arrays have.

    For a dimension of which each window has one block. Each position is computed from
    the same position of everything else; what reductions find past the array, and what
    is stored elsewhere from there, must be known to change nothing.

    Raises:
        CannotReblock: it may change something, or the dimension is used in another way.
    """
    found, dim = in_pipeline(kernel, place)
    sizes = {each.n for each in _moved(found, dim)}
    is_plain = dim.most_per == 1 and not (dim.is_twice or dim.is_merged or dim.spans)
    if dim.besides is not None or not is_plain or dim.products:
        raise CannotReblock(dim.besides or "it is contracted, or not plain")
    if len(sizes) > 1 or max(sizes) >= dim.size:
        raise CannotReblock("no block has more elements than all arrays have")
    body = found.pipeline.body
    past = PastEnd(dim, max(sizes), {v: op for op in walk(body) for v in op.results})
    if any(past.bound(op) is None for op in dim.reduces):
        raise CannotReblock("what is past the end may change a reduction")
    for op in walk(body):
        if op.name in ("store", "atomic_rmw", "atomic_cas"):
            access = Access.of(op)
            moves = access.value in dim.members or op.name != "store"
            if moves and access.ref not in dim.members and not past.is_off(access.mask):
                raise CannotReblock("what is past the end may be stored elsewhere")
    return _with_size(found, dim, _Trimmed(dim, past))


class _Trimmed(Resized):
    """Code of blocks without what is past the end of their arrays."""

    def __init__(self, dim: LoopDim, past: PastEnd):
        super().__init__(dim, past.end)
        self.past = past

    def op(self, b: Builder, op: Op) -> None:
        super().op(b, op)
        bound = self.past.bound(op) if op in self.dim.reduces else None
        if bound is not None and not self.past.is_neutral(op):
            new = self.new.get(op.result, op.result)
            kind = op.attrs["kind"]
            self.new[op.result] = b.op(kind, new, b.like(bound, new))


def _with_size(found: LoopDims, dim: LoopDim, code: Resized) -> Kernel:
    """The kernel with blocks of another size that have all of the dimension."""
    numbers = {each.number: each for each in _moved(found, dim)}

    def pipeline(scratch: Mapping[Value, Value]) -> Op:
        old = found.pipeline
        code.new |= scratch
        windows = tuple(
            replace(w, dims=numbers[n].resized(code.size)) if n in numbers else w
            for n, w in enumerate(old.windows)
        )
        return old.with_(windows=windows, body=code.block(old.body)).to_op()

    return _rebuilt(found, dim, code.size, pipeline)


class _Padded(Resized):
    """Code in which what is past the end is neutral where it is reduced."""

    def op(self, b: Builder, op: Op) -> None:
        old = dict(self.new)
        if op in self.dim.reduces or op in self.dim.products:
            kind = op.attrs.get("kind", "sum")
            for value in op.operands:
                if value in self.dim.members:
                    self.new[value] = self._masked(b, value, kind)
        super().op(b, op)
        self.new |= {v: old[v] for v in op.operands if v in old}

    def _masked(self, b: Builder, value: Value, kind: str) -> Value:
        new, d = self.new[value], self.dim.members[value]
        line = b.op("iota", type=new.tile.with_dtype(INDEX.dtype), dim=d)
        inside = b.op("lt", line, b.like(self.dim.size, line))
        return b.select(inside, new, b.like(neutral(kind, new.tile.dtype), new))


def may_cut(found: LoopDims, dim: LoopDim, parts: int) -> bool:
    """Whether `cut` can split a dimension into this many parts."""
    try:
        _Cut(found, dim, parts)
    except CannotReblock:
        return False
    return True


def in_pipeline(kernel: Kernel, place: Place) -> tuple[LoopDims, LoopDim]:
    found = loop_dims(kernel)
    if found is None:
        raise CannotReblock("its body is not a single grid")
    if found.refused:
        raise CannotReblock(found.refused)
    dim = found.at(place)
    if dim is None:
        raise CannotReblock("no block has this dimension")
    return found, dim


class _Moved(NamedTuple):
    """A window that shows a dimension: where, and how its index map addresses it."""

    number: int
    array_dim: int
    shown: Shown
    n: int  # size of the array
    per: int  # its elements for each position along the dimension
    position: int  # among the index map's yields

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return last_number(self.shown.window.dims[self.array_dim], self.n) + 1

    def count_of(self, size: int) -> int:
        return last_number(BlockDim(size * self.per), self.n) + 1

    @property
    def number_value(self) -> Value:
        window, shape = self.shown.window, self.shown.array.ref.shape
        return unclamped(self.shown.index_map, window, shape)[self.position]

    def follows(self, axis: int, steps: int) -> bool:
        """Whether the block index is the index along an axis, and never clamped."""
        is_index = self.number_value is self.shown.index_map.params[axis]
        return is_index and steps <= self.count

    def resized(self, size: int) -> tuple[BlockDim, ...]:
        dims = list(self.shown.window.dims)
        dims[self.array_dim] = BlockDim(size * self.per)
        return tuple(dims)


def _moved(found: LoopDims, dim: LoopDim) -> list[_Moved]:
    moved = []
    for number, array_dim in dim.windows:
        shown = found.pipeline.shown[number]
        kinds = [d.kind for d in shown.window.dims[:array_dim]]
        position = array_dim + kinds.count("bounded")
        n = shown.array.ref.shape[array_dim]
        per = dim.per(shown.block)
        moved.append(_Moved(number, array_dim, shown, n, per, position))
    return moved


def axis_of(found: LoopDims, dim: LoopDim) -> int | None:
    """The parallel axis whose index is the block index of every output."""
    moved = _moved(found, dim)
    written = [m for m in moved if m.shown.block in found.written]
    for axis, steps in enumerate(found.pipeline.grid):
        if steps is None or not found.info.axes[axis].parallel or not written:
            continue
        # An axis with one step is parallel even where scratch is carried along it.
        if steps == 1 and any(axis in carry.axes for carry in found.info.carries):
            continue
        if all(m.follows(axis, steps) for m in written):
            return axis
    return None


class Divided:
    """A kernel with one dimension split.

    An axis indexes the parts instead of the blocks; if there is none (None), a new
    leading axis does. Windows and positions follow; `code` emits the body.

    Args:
        found: the kernel.
        dim: what to split.
        parts: into how many.
        axis: the one whose index becomes that of a part.
        steps: how many steps it then has.
    """

    def __init__(
        self, found: LoopDims, dim: LoopDim, parts: int, axis: int | None, steps: int
    ):
        self.found, self.dim, self.parts = found, dim, parts
        if parts < 1 or dim.size % parts:
            raise CannotReblock(
                f"{dim.size} elements cannot be divided into {parts} equal parts"
            )
        self.size = dim.size // parts
        self.axis, self.steps = axis, steps
        self.moved = {m.number: m for m in _moved(found, dim)}
        self.padded = set[int]()  # windows whose last parts are entirely past the edge
        for each in self.moved.values():
            self._check_inside(each)

    def code(self, b: Builder, part: Part, step: Value) -> None:
        """The body of one part; `step`: the new index along the axis, or the part."""
        for op in self.found.pipeline.body.ops:
            part.op(b, op)

    def _is_written(self, each: _Moved) -> bool:
        return each.shown.block in self.found.written

    def _follows(self, each: _Moved) -> bool:
        if self.axis is None:
            return False
        steps = self.found.pipeline.grid[self.axis]
        assert steps is not None
        return each.follows(self.axis, steps)

    def _check_inside(self, each: _Moved) -> None:
        """A part that lies entirely past the edge has no index of its own.

        Reading one gives undefined values, unless there is a fill value: then parts
        have a first element, which may be in the array's padding, instead of an index.
        """
        count = each.count_of(self.size)
        inside = self.steps <= count if self._follows(each) else False
        inside |= not self._follows(each) and each.count * self.parts == count
        is_read, fill = not self._is_written(each), each.shown.window.fill
        if not inside and is_read and fill is not None and self._follows(each):
            self.padded.add(each.number)
        elif not inside and not (is_read and fill is None):
            name = each.shown.array.name or f"window {each.number}"
            raise CannotReblock(
                f"a part of the last block would be past the end of {name}"
            )

    def kernel(self) -> Kernel:
        if self.parts == 1:
            return self.found.kernel
        return _rebuilt(self.found, self.dim, self.size, self._pipeline)

    def _pipeline(self, scratch: Mapping[Value, Value]) -> Op:
        pipeline, axis = self.found.pipeline, self.axis
        grid, semantics = list(pipeline.grid), list(pipeline.semantics)
        if axis is None:
            grid, semantics = [self.parts, *grid], ["parallel", *semantics]
        else:
            grid[axis] = self.steps
        windows = [
            replace(w, dims=self._dims(self.moved[n])) if n in self.moved else w
            for n, w in enumerate(pipeline.windows)
        ]
        return pipeline.with_(
            grid=tuple(grid),
            semantics=tuple(semantics),
            windows=tuple(windows),
            maps=tuple(self._map(n, s) for n, s in enumerate(pipeline.shown)),
            body=self._body(scratch),
        ).to_op()

    def _ids(self, b: Builder, ids: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """New ids (the last is the part's), and the old ones computed from them."""
        fresh = [Value(INDEX, i.name) for i in ids]
        if self.axis is None:
            part = Value(INDEX, "part")
            return [part, *fresh, part], fresh
        step, parts = fresh[self.axis], b.index(self.parts)
        old = [*fresh]
        old[self.axis] = b.div(step, parts)
        return [*fresh, b.rem(step, parts)], old

    def _map(self, number: int, shown: Shown) -> Block:
        b = Builder()
        (*ids, part), old = self._ids(b, shown.index_map.params)
        yields = list(inline(b, shown.index_map, old))
        each = self.moved.get(number)
        if each is not None and self._follows(each):
            assert self.axis is not None
            index = ids[self.axis]
            if number in self.padded:
                index = b.mul(index, b.index(self.size * each.per))
            yields[each.position] = index
        elif each is not None:
            block = yields[each.position]
            if not self._in_range(each):
                block = b.clamp(b.index(0), block, b.index(each.count - 1))
            first = b.mul(block, b.index(self.parts))
            yields[each.position] = b.add(first, part)
        return b.block(ids, yields)

    def _dims(self, each: _Moved) -> tuple[BlockDim, ...]:
        dims = list(each.resized(self.size))
        if each.number in self.padded:
            size = self.size * each.per
            after = self.steps * size - each.n
            dims[each.array_dim] = BlockDim(size, "element", (0, after))
        return tuple(dims)

    def _in_range(self, each: _Moved) -> bool:
        window, shape = each.shown.window, each.shown.array.ref.shape
        facts = number_facts(
            each.shown.index_map, window, shape, self.found.pipeline.grid
        )
        return facts[each.position].within(0, each.count - 1)

    def _body(self, scratch: Mapping[Value, Value]) -> Block:
        b = Builder(self.found.pipeline.op.loc)
        ids = self.found.pipeline.ids
        (*new, part), old = self._ids(b, ids)
        resized = Part(self.dim, self.size, b.mul(part, b.index(self.size)))
        resized.new |= {**scratch, **dict(zip(ids, old, strict=True))}
        blocks = resized.define(self.found.pipeline.blocks)
        self.code(b, resized, part if self.axis is None else new[self.axis])
        return b.block((*new, *blocks))


class _Cut(Divided):
    """Programs split along a dimension.

    Where a parallel axis indexes the blocks that are written, it indexes the parts
    instead. Otherwise a new leading axis does: all programs run for the first part,
    then all for the second; no state is carried from one part to another.
    """

    def __init__(self, found: LoopDims, dim: LoopDim, parts: int):
        reason = found.why_not_free(dim)
        if reason is not None:
            raise CannotReblock(reason)
        axis = axis_of(found, dim)
        steps = parts if axis is None else _steps(found, dim, parts, axis)
        super().__init__(found, dim, parts, axis, steps)


def _steps(found: LoopDims, dim: LoopDim, parts: int, axis: int) -> int:
    """How many steps index the parts, without parts entirely past the edge."""
    old, size = found.pipeline.grid[axis], dim.size // max(parts, 1)
    assert old is not None
    written = (m for m in _moved(found, dim) if m.shown.block in found.written)
    return min(old * parts, max(m.count_of(max(size, 1)) for m in written))


class _Grow:
    """Merges neighbours along the axis that indexes the blocks of one dimension."""

    def __init__(
        self,
        found: LoopDims,
        dim: LoopDim,
        factor: int,
        selects: bool,
        size: int | None = None,  # of the block of a single program, at most
    ):
        self.found, self.dim, self.factor = found, dim, factor
        self.selects = selects
        reason = found.why_not_free(dim)
        if reason is not None:
            raise CannotReblock(reason)
        axis = axis_of(found, dim)
        if axis is None:
            raise CannotReblock(NO_AXIS)
        if dim.is_merged:
            raise CannotReblock(MERGED)
        if dim.spans:
            raise CannotReblock("a load selects a part of an array without a window")
        self.axis, self.size = axis, size or dim.size * factor
        steps = found.pipeline.grid[axis]
        assert steps is not None
        self.steps = -(-steps // factor)
        if size is not None and self.steps > 1:
            raise CannotReblock("its axis has more steps than the array has blocks")
        self.moved = {m.number: m for m in _moved(found, dim)}
        for number, shown in enumerate(found.pipeline.shown):
            self._check_window(number, shown, steps)

    def _check_window(self, number: int, shown: Shown, steps: int) -> None:
        each = self.moved.get(number)
        name = shown.array.name or f"window {number}"
        index = shown.index_map.params[self.axis]
        others = list(shown.index_map.yields)
        if each is not None:
            del others[each.position]
        if _depends(self._with_quotients(shown.index_map), others, index):
            raise CannotReblock(f"{name} moves along the same axis in another way")
        if each is None:
            return
        if not each.follows(self.axis, steps):
            raise CannotReblock(f"{name} does not follow the axis block by block")
        last, written = self.steps * self.size, shown.block in self.found.written
        if written and steps * self.dim.size < min(last, each.n):
            raise CannotReblock(f"{name} has elements that no program writes")

    def kernel(self) -> Kernel:
        if self.size == self.dim.size:
            return self.found.kernel
        return _rebuilt(self.found, self.dim, self.size, self._pipeline)

    def _pipeline(self, scratch: Mapping[Value, Value]) -> Op:
        pipeline = self.found.pipeline
        grid = list(pipeline.grid)
        grid[self.axis] = self.steps
        windows = [
            replace(w, dims=self.moved[n].resized(self.size)) if n in self.moved else w
            for n, w in enumerate(pipeline.windows)
        ]
        maps = [self._with_quotients(m, self._quotient) for m in pipeline.maps]
        for number, each in self.moved.items():
            old = maps[number]
            yields = list(old.yields)
            yields[each.position] = old.params[self.axis]
            maps[number] = replace(old, yields=tuple(yields))
        grown = self.code()
        grown.new |= scratch
        return pipeline.with_(
            grid=tuple(grid),
            windows=tuple(windows),
            maps=tuple(maps),
            body=grown.block(pipeline.body),
        ).to_op()

    def _with_quotients(self, index_map: Block, make: Quotient | None = None) -> Block:
        """A map with what is the same for all that are merged: computed by `make` from
        the new index, or by nothing."""
        index, made = index_map.params[self.axis], producers_of(index_map)

        def replaced(op: Op) -> Sequence[Op] | None:
            divisor = merged_quotient(made, op, index, self.factor)
            if divisor is None:
                return None
            return () if make is None else make(op, divisor)

        return replace_ops(index_map, replaced)

    @staticmethod
    def _quotient(op: Op, divisor: int) -> Sequence[Op]:
        b = Builder(op.loc)
        number = b.index(divisor)
        return (*b.ops, op.with_(operands=(op.operands[0], number)))

    def code(self) -> Joined:
        index = self.found.pipeline.ids[self.axis]
        return Joined(self.dim, self.size, index, self.selects)


class _GrowSteps(_Grow):
    """Merges neighbours of which only some take the branch of a step.

    It runs if any of them takes it. A maximum does not change with minus infinity, nor
    a sum with a product of zero; what scales the sum, a power of how much the maximum
    changed, is one then, if the maximum was finite. A maximum that starts as minus
    infinity is finite after the first step, or the sums are NaN; so all must take that.
    """

    def __init__(self, found: LoopDims, dim: LoopDim, factor: int):
        super().__init__(found, dim, factor, selects=False)
        steps = walked(found)
        if steps is None or steps is dim:
            raise CannotReblock("no axis steps along a dimension of its blocks")
        proof = RunningSteps(found, steps, cut=True)
        if proof.guard is None:
            raise CannotReblock("no branch skips steps")
        finite = all(state.is_finite for state in proof.proved.maxima)
        if not finite and not proof.all_take_the_first:
            raise CannotReblock("a maximum may be minus infinity before the first step")
        self.made, self.guard = proof.made, proof.guard
        index = found.pipeline.ids[self.axis]
        parts = tuple(p for p in self.guard.parts if proof.depends(p, [index]))
        self.fills = proof.proved.fills_along(dim, parts)

    def code(self) -> Joined:
        ids = self.found.pipeline.ids
        code = Wider(self.dim, self.size, ids[self.axis], self.made, ids)
        code.guard, code.fills = self.guard, self.fills
        return code


def _depends(block: Block, results: Sequence[Value], value: Value) -> bool:
    """Whether anything a block computes may depend on one of its values."""
    needed = set(results)
    for op in reversed(block.ops):
        if needed.intersection(op.results):
            inside = (inner for region in op.regions for inner in walk(region))
            needed.update(op.operands, *(inner.operands for inner in inside))
            needed.update(v for region in op.regions for v in region.yields)
    return value in needed


def _rebuilt(
    found: LoopDims,
    dim: LoopDim,
    size: int,
    make_pipeline: Callable[[Mapping[Value, Value]], Op],
) -> Kernel:
    """The kernel with resized scratch and the pipeline built for it."""
    outside, resized = Builder(), Resized(dim, size)
    for op in found.kernel.body.ops:
        if op is found.pipeline.op:
            outside.ops.append(make_pipeline(resized.new))
        else:
            resized.op(outside, op)
    return dead_code(found.kernel.with_(body=outside.block()))
