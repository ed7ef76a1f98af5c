"""Reblocking: the same kernel with smaller or larger blocks.

`cut` divides the programs of a kernel along one dimension of their blocks; `grow` joins
neighbouring ones. Both act on a dimension of the work (`analysis/loop_dims.py`): every
window, scratch ref and tile that has it gets a new size, and everything else stays. The
author's blocks are a statement about meaning, not about a chip: `choose_blocks.py` says
which sizes a chip wants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    Block,
    BlockDim,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    walk,
)
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import dead_code, inline
from pallasite.ir.roles import Shown
from pallasite.ir.types import I32, INDEX, TileType, Type
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.loop_dims import LoopDim, LoopDims, Place, loop_dims
from pallasite.passes.place_windows import number_facts, unclamped


class CannotReblock(Exception):
    """Blocks of this size would not mean the same; it says why."""


def cut(kernel: Kernel, place: Place, parts: int) -> Kernel:
    """Programs with the `parts`-th of the blocks along a dimension, and more of them.

    Args:
        kernel: what to rewrite.
        place: a window and a dimension of its array.
        parts: divides the block's size.

    Raises:
        CannotReblock: the body needs all of the dimension, or a part would be outside.
    """
    found, dim = in_pipeline(kernel, place)
    return _Cut(found, dim, parts).kernel()


def grow(kernel: Kernel, place: Place, factor: int) -> Kernel:
    """Programs with `factor` times the blocks along a dimension, and fewer of them.

    Args:
        kernel: what to rewrite.
        place: a window and a dimension of its array.
        factor: how many neighbours become one program.

    Raises:
        CannotReblock: neighbours are not parts of one larger program.
    """
    found, dim = in_pipeline(kernel, place)
    return _Grow(found, dim, factor).kernel()


def may_cut(found: LoopDims, dim: LoopDim, parts: int) -> bool:
    """Whether `cut` would divide a dimension into so many parts."""
    try:
        _Cut(found, dim, parts)
    except CannotReblock:
        return False
    return True


def in_pipeline(kernel: Kernel, place: Place) -> tuple[LoopDims, LoopDim]:
    found = loop_dims(kernel)
    if found is None:
        raise CannotReblock("its body is not one grid")
    if found.refused:
        raise CannotReblock(found.refused)
    dim = found.at(place)
    if dim is None:
        raise CannotReblock("no block has this dimension")
    return found, dim


class _Moved(NamedTuple):
    """A window that shows a dimension: where, and how its index map does."""

    number: int
    array_dim: int
    shown: Shown
    n: int  # of the array
    block: int  # size of a block
    position: int  # in what the index map yields

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return last_number(self.shown.window.dims[self.array_dim], self.n) + 1

    def count_of(self, size: int) -> int:
        return last_number(BlockDim(size), self.n) + 1

    @property
    def number_value(self) -> Value:
        window, shape = self.shown.window, self.shown.array.ref.shape
        return unclamped(self.shown.index_map, window, shape)[self.position]

    def follows(self, axis: int, steps: int) -> bool:
        """Whether the block number is the index along an axis, and never clamped."""
        is_index = self.number_value is self.shown.index_map.params[axis]
        return is_index and steps <= self.count

    def resized(self, size: int) -> tuple[BlockDim, ...]:
        dims = list(self.shown.window.dims)
        dims[self.array_dim] = BlockDim(size)
        return tuple(dims)


def _moved(found: LoopDims, dim: LoopDim) -> list[_Moved]:
    moved = []
    for number, array_dim in dim.windows:
        shown = found.pipeline.shown[number]
        kinds = [d.kind for d in shown.window.dims[:array_dim]]
        position = array_dim + kinds.count("bounded")
        n = shown.array.ref.shape[array_dim]
        moved.append(_Moved(number, array_dim, shown, n, dim.size, position))
    return moved


def axis_of(found: LoopDims, dim: LoopDim) -> int | None:
    """The parallel axis whose index is the block number of all that is written."""
    moved = _moved(found, dim)
    written = [m for m in moved if m.shown.block in found.written]
    for axis, steps in enumerate(found.pipeline.grid):
        if steps is None or not found.info.axes[axis].parallel or not written:
            continue
        if all(m.follows(axis, steps) for m in written):
            return axis
    return None


class _Cut:
    """One dimension, divided.

    Where a parallel axis numbers the blocks that are written, it numbers the parts
    instead. Otherwise a new axis comes first: all programs run for the first part, then
    all for the second; nothing is handed on from one part to another.
    """

    def __init__(self, found: LoopDims, dim: LoopDim, parts: int):
        self.found, self.dim, self.parts = found, dim, parts
        reason = found.why_not_free(dim)
        if reason is not None:
            raise CannotReblock(reason)
        if parts < 1 or dim.size % parts:
            raise CannotReblock(f"{dim.size} elements are not {parts} equal parts")
        self.size = dim.size // parts
        self.axis = axis_of(found, dim)
        self.moved = {m.number: m for m in _moved(found, dim)}
        self.steps = self._steps()
        for each in self.moved.values():
            self._check_inside(each)

    def _steps(self) -> int:
        """How many steps number the parts; those that are all outside are left out."""
        if self.axis is None:
            return self.parts
        old = self.found.pipeline.grid[self.axis]
        assert old is not None
        written = (m for m in self.moved.values() if self._is_written(m))
        return min(old * self.parts, max(m.count_of(self.size) for m in written))

    def _is_written(self, each: _Moved) -> bool:
        return each.shown.block in self.found.written

    def _follows(self, each: _Moved) -> bool:
        if self.axis is None:
            return False
        steps = self.found.pipeline.grid[self.axis]
        assert steps is not None
        return each.follows(self.axis, steps)

    def _check_inside(self, each: _Moved) -> None:
        """A part that is all outside the array has no number of its own.

        To read one is to read unspecified values, unless there is a fill value.
        """
        count = each.count_of(self.size)
        inside = self.steps <= count if self._follows(each) else False
        inside |= not self._follows(each) and each.count * self.parts == count
        readable = not self._is_written(each) and each.shown.window.fill is None
        if not inside and not readable:
            name = each.shown.array.name or f"window {each.number}"
            raise CannotReblock(f"a part of the last block would be outside {name}")

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
            replace(w, dims=self.moved[n].resized(self.size)) if n in self.moved else w
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
        """New ids and, of those, the old ones; last of the new: the part's number."""
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
            yields[each.position] = ids[self.axis]
        elif each is not None:
            block = yields[each.position]
            if not self._in_range(each):
                block = b.clamp(b.index(0), block, b.index(each.count - 1))
            first = b.mul(block, b.index(self.parts))
            yields[each.position] = b.add(first, part)
        return b.block(ids, yields)

    def _in_range(self, each: _Moved) -> bool:
        window, shape = each.shown.window, each.shown.array.ref.shape
        facts = number_facts(
            each.shown.index_map, window, shape, self.found.pipeline.grid
        )
        return facts[each.position].within(0, each.count - 1)

    def _body(self, scratch: Mapping[Value, Value]) -> Block:
        body, b = self.found.pipeline.body, Builder(self.found.pipeline.op.loc)
        ids = self.found.pipeline.ids
        (*new, part), old = self._ids(b, ids)
        resized = Part(self.dim, self.size, b.mul(part, b.index(self.size)))
        resized.new |= {**scratch, **dict(zip(ids, old, strict=True))}
        blocks = resized.define(self.found.pipeline.blocks)
        for op in body.ops:
            resized.op(b, op)
        return b.block((*new, *blocks))


class _Grow:
    """Neighbours along the axis that numbers the blocks of one dimension, joined."""

    def __init__(self, found: LoopDims, dim: LoopDim, factor: int):
        self.found, self.dim, self.factor = found, dim, factor
        reason = found.why_not_free(dim)
        if reason is not None:
            raise CannotReblock(reason)
        axis = axis_of(found, dim)
        if axis is None:
            raise CannotReblock("no parallel axis numbers its blocks")
        if dim.spans:
            raise CannotReblock("a load picks a part of an array without a window")
        self.axis, self.size = axis, dim.size * factor
        steps = found.pipeline.grid[axis]
        assert steps is not None
        self.steps = -(-steps // factor)
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
        if _depends(shown.index_map, others, index):
            raise CannotReblock(f"{name} moves along the same axis in another way")
        if each is None:
            return
        if not each.follows(self.axis, steps):
            raise CannotReblock(f"{name} does not follow the axis block by block")
        last, written = self.steps * self.size, shown.block in self.found.written
        if written and steps * self.dim.size < min(last, each.n):
            raise CannotReblock(f"{name} has elements that no program writes")

    def kernel(self) -> Kernel:
        if self.factor == 1:
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
        maps = list(pipeline.maps)
        for number, each in self.moved.items():
            old = maps[number]
            yields = list(old.yields)
            yields[each.position] = old.params[self.axis]
            maps[number] = replace(old, yields=tuple(yields))
        grown = _Growing(self.dim, self.size, pipeline.ids[self.axis])
        grown.new |= scratch
        return pipeline.with_(
            grid=tuple(grid),
            windows=tuple(windows),
            maps=tuple(maps),
            body=grown.block(pipeline.body),
        ).to_op()


def _depends(block: Block, results: Sequence[Value], value: Value) -> bool:
    """Whether some of what a block computes may depend on one of its values."""
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
    """The kernel with scratch of the new size, and the pipeline made for it."""
    outside, resized = Builder(), _Resized(dim, size)
    for op in found.kernel.body.ops:
        if op is found.pipeline.op:
            outside.ops.append(make_pipeline(resized.new))
        else:
            resized.op(outside, op)
    return dead_code(found.kernel.with_(body=outside.block()))


class _Resized:
    """Code in which one dimension has another size."""

    def __init__(self, dim: LoopDim, size: int):
        self.dim, self.size = dim, size
        self.new: dict[Value, Value] = {}

    def type(self, value: Value) -> Type:
        d = self.dim.members.get(value)
        if d is None:
            return value.type
        shape = value.type.shape
        return value.type.with_shape((*shape[:d], self.size, *shape[d + 1 :]))

    def define(self, values: Sequence[Value]) -> tuple[Value, ...]:
        for value in values:
            if value in self.dim.members:
                self.new[value] = Value(self.type(value), value.name)
        return self.mapped(values)

    def mapped(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(self.new.get(v, v) for v in values)

    def used(self, b: Builder, values: Sequence[Value]) -> tuple[Value, ...]:
        """What code in `b` uses for these values."""
        return self.mapped(values)

    def block(self, block: Block) -> Block:
        b, params = Builder(), self.define(block.params)
        for op in block.ops:
            self.op(b, op)
        return b.block(params, self.used(b, block.yields))

    def op(self, b: Builder, op: Op) -> None:
        b.loc = op.loc
        regions = tuple(map(self.block, op.regions))
        operands = self.used(b, op.operands)
        attrs = self.attrs(op)
        results = self.define(op.results)
        changed = op.with_(
            operands=operands, results=results, attrs=attrs, regions=regions
        )
        b.ops.append(changed)

    def attrs(self, op: Op) -> dict[str, object]:
        """The op's attributes, with the new size where they tell the old one."""
        attrs = dict(op.attrs)
        if "type" in attrs:
            attrs["type"] = self.type(op.result)
        if "shape" in attrs:
            attrs["shape"] = self.type(op.result).shape
        d = self.dim.members.get(op.operands[0]) if op.operands else None
        if d is None:
            return attrs
        for key in ("limits", "sizes"):
            if key in attrs:
                attrs[key] = (*attrs[key][:d], self.size, *attrs[key][d + 1 :])
        if "index" in attrs:
            index = list(attrs["index"])
            index[d] = replace(index[d], size=self.size)
            attrs["index"] = tuple(index)
        return attrs


class Part(_Resized):
    """Code of one part: its first position in the author's block is `first`."""

    def __init__(self, dim: LoopDim, size: int, first: Value):
        super().__init__(dim, size)
        self.first = first

    def op(self, b: Builder, op: Op) -> None:
        is_iota = (
            op.name == "iota" and self.dim.members.get(op.result) == op.attrs["dim"]
        )
        if is_iota:
            b.loc = op.loc
            self.new[op.result] = self._positions(b, op)
        elif op in self.dim.spans:
            b.loc = op.loc
            self.new[op.result] = self._part_of_span(b, op)
        else:
            super().op(b, op)

    def _positions(self, b: Builder, op: Op) -> Value:
        type_ = self.type(op.result)
        assert isinstance(type_, TileType)
        line = b.op("iota", type=type_.with_dtype(I32), dim=op.attrs["dim"])
        return b.cast(b.add(line, b.broadcast(self.first, type_.shape)), type_.dtype)

    def _part_of_span(self, b: Builder, op: Op) -> Value:
        """A load of a span of a ref that stays whole: of this part of the span."""
        access, to = Access.of(op), self.dim.members[op.result]
        index, starts = list(access.index), list[Value]()
        parts = access.split_index()
        tile = next((v for e, v in parts if isinstance(e, Gather)), None)
        at = tile.tile.rank if tile is not None else 0
        for d, (entry, start) in enumerate(parts):
            is_span = isinstance(entry, Span)
            if is_span and at == to:
                index[d] = Span(None, self.size, entry.stride)
                last = access.ref.ref.shape[d] - entry.extent
                start = self._start(b, entry, start, last, access.mask)
            at += is_span
            starts += [start] if start is not None else []
        ref, *starts = self.mapped([access.ref, *starts])
        tail = [
            None if v is None else self.new.get(v, v)
            for v in (access.mask, access.other)
        ]
        return b.load(ref, tuple(index), starts, *tail)

    def _start(
        self, b: Builder, span: Span, start: Value | None, last: int, mask: Value | None
    ) -> Value:
        step = self.first
        if span.stride != 1:
            step = b.mul(step, b.index(span.stride))
        if start is None:
            assert span.start is not None
            return b.add(b.index(span.start), step) if span.start else step
        first = b.cast(self.new.get(start, start), I32)
        if mask is None:  # with one, elements are clamped one by one
            first = b.clamp(b.index(0), first, b.index(last))
        return b.add(first, step)


@dataclass(frozen=True)
class _Form:
    """`program * number + position * place + rest`, an i32 of the author's programs.

    `number` is the program's index along the axis, `place` the position in its block;
    `rest` is the same for all of them (None: 0).
    """

    program: int
    position: int
    rest: Value | None = None


class _Growing(_Resized):
    """Code of several of the author's programs at once.

    What the author's programs have as one number each, and depends on their index, is a
    number per position here: `forms` where it is a sum, `numbers` (tiles with just the
    one dimension) where it is something else.
    """

    def __init__(self, dim: LoopDim, size: int, step: Value):
        super().__init__(dim, size)
        self.step = step  # the index along the axis
        self.forms: dict[Value, _Form] = {step: _Form(1, 0)}
        self.numbers: dict[Value, Value] = {}
        self.known: dict[Value, int] = {}  # integer constants

    def op(self, b: Builder, op: Op) -> None:
        b.loc = op.loc
        if op.name == "iota" and self.dim.members.get(op.result) == op.attrs["dim"]:
            self._positions(b, op)
        elif not any(self._varies(v) for v in op.operands):
            self._note_number(op)
            super().op(b, op)
        elif not self._is_form(b, op) and not self._is_number(b, op):
            super().op(b, op)

    def _varies(self, value: Value) -> bool:
        return value in self.forms or value in self.numbers

    def _note_number(self, op: Op) -> None:
        number = None
        if op.name == "constant":
            number = op.attrs["value"]
        elif op.name == "broadcast_in_dim":
            number = self.known.get(op.operands[0])
        if type(number) is int:
            self.known[op.result] = number

    def used(self, b: Builder, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(
            self._tile(b, v) if self._varies(v) else self.new.get(v, v) for v in values
        )

    def _tile(self, b: Builder, value: Value) -> Value:
        """A value that varies, as a tile that has the dimension."""
        d = self.dim.members.get(value)
        if d is None:
            raise CannotReblock("what the programs do depends on their number")
        type_ = self.type(value)
        if value in self.forms:
            return self._written_out(b, self.forms[value], type_.shape, d)
        return b.broadcast(self.numbers[value], type_.shape, (d,))

    def _vector(self, b: Builder, value: Value) -> Value:
        """A scalar as one number per position."""
        if value in self.numbers:
            return self.numbers[value]
        if value in self.forms:
            return self._written_out(b, self.forms[value], (self.size,), 0)
        return b.broadcast(self.new.get(value, value), (self.size,))

    def _written_out(
        self, b: Builder, form: _Form, shape: tuple[int, ...], d: int
    ) -> Value:
        type_, old = TileType(shape, I32), self.dim.size

        def times(x: Value, number: int) -> Value:
            return x if number == 1 else b.mul(x, b.constant(number, type_))

        line = b.op("iota", type=type_, dim=d)
        each = b.constant(old, type_)
        if form.program == form.position * old:  # a position in the array
            first = b.mul(self.step, b.index(self.size))
            place = b.add(b.broadcast(first, shape), line)
            total = times(place, form.position)
        else:
            total = times(b.rem(line, each), form.position)
            if form.program:
                first = b.mul(self.step, b.index(self.size // old))
                program = b.add(b.broadcast(first, shape), b.div(line, each))
                total = b.add(times(program, form.program), total)
        if form.rest is not None:
            total = b.add(total, b.broadcast(form.rest, shape))
        return total

    def _positions(self, b: Builder, op: Op) -> None:
        type_, form = self.type(op.result), _Form(0, 1)
        if op.result.tile.dtype == I32:
            self.forms[op.result] = form
            return
        line = self._written_out(b, form, type_.shape, op.attrs["dim"])
        self.new[op.result] = b.cast(line, type_.dtype)

    # --- sums that depend on the program ---

    def _is_form(self, b: Builder, op: Op) -> bool:
        """Takes in an op whose result is such a sum, too."""
        if len(op.results) != 1 or op.result.is_ref or op.result.tile.dtype != I32:
            return False
        form = None
        if all(v in self.forms or not self._varies(v) for v in op.operands):
            form = self._form(b, op)
        if form is not None:
            self.forms[op.result] = form
        return form is not None

    def _form(self, b: Builder, op: Op) -> _Form | None:
        if op.name == "broadcast_in_dim":
            form = self.forms[op.operands[0]]
            if op.operands[0].tile.rank or form.position:
                return None
            return form
        if op.name in ("add", "sub"):
            return self._sum(b, op)
        if op.name == "mul":
            return self._product(b, op)
        return None

    def _sum(self, b: Builder, op: Op) -> _Form:
        x, y = (
            self.forms.get(v) or _Form(0, 0, self.new.get(v, v)) for v in op.operands
        )
        sign = 1 if op.name == "add" else -1
        rest = x.rest
        if y.rest is not None:
            shape = self.type(op.result).shape
            other = b.broadcast(y.rest, shape)
            rest = b.broadcast(rest, shape) if rest is not None else b.like(0, other)
            rest = b.op(op.name, rest, other)
        return _Form(x.program + sign * y.program, x.position + sign * y.position, rest)

    def _product(self, b: Builder, op: Op) -> _Form | None:
        x, y = op.operands
        if y in self.forms:
            x, y = y, x
        factor = self.known.get(y)
        if factor is None or y in self.forms:
            return None
        form = self.forms[x]
        rest = form.rest
        rest = None if rest is None else b.mul(rest, b.like(factor, rest))
        return _Form(form.program * factor, form.position * factor, rest)

    # --- other numbers that depend on the program ---

    def _is_number(self, b: Builder, op: Op) -> bool:
        """Takes in an op on scalars, or a scalar's broadcast."""
        if len(op.results) != 1 or any(v.is_ref for v in (*op.operands, *op.results)):
            return False
        if op.name == "broadcast_in_dim" and not op.operands[0].tile.rank:
            self.numbers[op.result] = self._vector(b, op.operands[0])
            return True
        if not table()[op.name].elementwise:
            return False
        if op.result.tile.rank:
            return self._with_bounds(b, op)
        vectors = [self._vector(b, v) for v in op.operands]
        self.numbers[op.result] = b.op(op.name, *vectors, **op.attrs)
        return True

    def _with_bounds(self, b: Builder, op: Op) -> bool:
        """An op on tiles some of whose operands are scalars (select_n, clamp)."""
        d = self.dim.members.get(op.result)
        scalars = [v for v in op.operands if not v.tile.rank]
        if d is None or not any(map(self._varies, scalars)):
            return False
        shape = self.type(op.result).shape
        operands = [
            b.broadcast(self._vector(b, v), shape, (d,))
            if not v.tile.rank
            else self.used(b, [v])[0]
            for v in op.operands
        ]
        self.new[op.result] = b.op(op.name, *operands, **op.attrs)
        return True
