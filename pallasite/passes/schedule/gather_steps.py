"""gather_steps: several steps of a grid axis in one, with larger windows.

In: a kernel whose last axis counts steps that depend on each other, such as those of a
running softmax. Out: a grid that is shorter by a factor, windows that show as many
blocks at once, and a body that does one step after another, each with its part of the
windows. What a step means, and the order of steps, stay as they are; the grid's own
work is done less often, and the compiler can begin a step before the one before it has
ended. `merge_k_steps.py` is for steps that only add up: those become one.

`gather_programs` does the same with programs along a parallel axis, each with scratch
of its own: for blocks that cannot grow (`reblock.py`), such as those of other heads.
They run side by side, op by op, and share the branches that all of them take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import clone, inline, is_pure
from pallasite.ir.roles import Pipeline, Shown, number_of
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.grid import analyze, find_pipeline
from pallasite.passes.analysis.memory import Roots, written_refs
from pallasite.passes.normal.resized_code import CannotReblock


def gather_steps(kernel: Kernel, factor: int) -> Kernel:
    """Programs that each do `factor` steps along the last axis.

    Raises:
        CannotReblock: a window does not move block by block along it.
    """
    return _gathered_along(kernel, -1, factor, {})


def gather_programs(kernel: Kernel, axis: int, factor: int) -> Kernel:
    """Programs that each do the work of `factor` neighbours along a parallel axis.

    Raises:
        CannotReblock: they are not independent, or a window does not move block by
            block along the axis.
    """
    info = analyze(kernel)
    if not info.axes[axis].parallel or any(axis in c.axes for c in info.carries):
        raise CannotReblock("programs along it depend on each other")
    copies: dict[Value, tuple[Value, ...]] = {
        op.result: tuple(Value(op.result.type, op.result.name) for _ in range(factor))
        for op in kernel.body.ops
        if op.name == "alloc"
    }
    inside = Pipeline.of(find_pipeline(kernel)).op
    used = {v for op in kernel.body.ops if op is not inside for v in op.operands}
    if used & copies.keys():
        raise CannotReblock("scratch is used outside the grid")
    return _gathered_along(kernel, axis, factor, copies)


def _gathered_along(
    kernel: Kernel, axis: int, factor: int, scratch: Mapping[Value, Sequence[Value]]
) -> Kernel:
    """`scratch`: what each of the gathered programs has in place of a ref."""
    if kernel.aliases:  # a step may read what the one before it wrote
        raise CannotReblock("operands alias results")
    if kernel.level != TILE:
        raise CannotReblock("it has explicit copies, semaphores or roles")
    pipeline = Pipeline.of(find_pipeline(kernel))
    steps = pipeline.grid[axis] if pipeline.grid else None
    if steps is None or steps % factor:
        raise CannotReblock(f"{steps} steps are not a multiple of {factor}")
    moved = [_moved(shown, axis, pipeline.grid) for shown in pipeline.shown]
    new = _gathered(pipeline, axis, moved, factor, scratch)
    ops: list[Op] = []
    for op in kernel.body.ops:
        if op is pipeline.op:
            ops.append(new)
        elif op.name == "alloc" and op.result in scratch:
            ops += [op.with_(results=(ref,)) for ref in scratch[op.result]]
        else:
            ops.append(op)
    return kernel.with_(body=replace(kernel.body, ops=tuple(ops)))


@dataclass(frozen=True)
class _Moved:
    """A window whose block number along one dimension is the index along the axis.

    Or what is left of the axis after it: `last` is then the first step's block.
    """

    array_dim: int
    dim: BlockDim
    place: int  # of the block's dimension; where it would be if it is squeezed
    axis: int
    last: int | None = None

    def window(self, shown: Shown, factor: int) -> Shown:
        dims = list(shown.window.dims)
        dims[self.array_dim] = BlockDim(self.dim.size * factor)
        shape = list(shown.block.ref.shape)
        if self.dim.kind == "squeezed":
            shape.insert(self.place, factor)
        else:
            shape[self.place] *= factor
        block = Value(shown.block.ref.with_shape(tuple(shape)), shown.block.name)
        window = replace(shown.window, dims=tuple(dims))
        index_map = shown.index_map
        if self.last is not None:
            index_map = self.falling(index_map, (self.last + 1) // factor - 1)
        return shown._replace(window=window, index_map=index_map, block=block)

    def falling(self, old: Block, last: int) -> Block:
        """An index map with other block numbers along this dimension."""
        b, yields = Builder(), list(old.yields)
        yields[self.array_dim] = b.sub(b.index(last), old.params[self.axis])
        return replace(old, ops=(*old.ops, *b.ops), yields=tuple(yields))

    def view(self, b: Builder, block: Value, number: int, factor: int) -> Value:
        """The part of a block that one of its steps sees."""
        number = number if self.last is None else factor - 1 - number
        index: list[At | Span] = [Span(0, n) for n in block.ref.shape]
        if self.dim.kind == "squeezed":
            index[self.place] = At(number)
        else:
            size = self.dim.size
            index[self.place] = Span(number * size, size)
        return b.subview(block, tuple(index))


@dataclass(frozen=True)
class _Shifted:
    """A window that starts `by` elements further with each program, and may overlap.

    All of them are inside the array, and so is the window that covers several.
    """

    array_dim: int
    size: int  # of a block
    place: int
    axis: int
    by: int

    def window(self, shown: Shown, factor: int) -> Shown:
        more = (factor - 1) * self.by
        dims = list(shown.window.dims)
        dims[self.array_dim] = BlockDim(self.size + more, "element")
        shape = list(shown.block.ref.shape)
        shape[self.place] += more
        old, b = shown.index_map, Builder()
        ids = [Value(v.type, v.name) for v in old.params]
        first = list(ids)
        first[self.axis] = b.mul(ids[self.axis], b.index(factor))
        return shown._replace(
            window=replace(shown.window, dims=tuple(dims)),
            index_map=b.block(ids, inline(b, old, first)),
            block=Value(shown.block.ref.with_shape(tuple(shape)), shown.block.name),
        )

    def view(self, b: Builder, block: Value, number: int, factor: int) -> Value:
        index: list[At | Span] = [Span(0, n) for n in block.ref.shape]
        index[self.place] = Span(number * self.by, self.size)
        return b.subview(block, tuple(index))


@dataclass(frozen=True)
class _Near:
    """A window that shows a block near the index along the axis, such as the next one.

    Its number rises by one or stays from program to program, so that those of several
    programs are next to each other. The new window starts anywhere.
    """

    array_dim: int
    size: int  # of a block
    place: int
    axis: int
    blocks: int  # that there are

    def window(self, shown: Shown, factor: int) -> Shown:
        dims = list(shown.window.dims)
        dims[self.array_dim] = BlockDim(self.size * factor, "element")
        shape = list(shown.block.ref.shape)
        shape[self.place] *= factor
        old, b = shown.index_map, Builder()
        ids = [Value(v.type, v.name) for v in old.params]
        numbers = self.numbers(b, shown, self._first(b, ids, factor), old.yields)
        first = self.first(b, numbers[self.array_dim], factor)
        numbers[self.array_dim] = b.mul(first, b.index(self.size))
        return shown._replace(
            window=replace(shown.window, dims=tuple(dims)),
            index_map=b.block(ids, numbers),
            block=Value(shown.block.ref.with_shape(tuple(shape)), shown.block.name),
        )

    def _first(self, b: Builder, ids: Sequence[Value], factor: int) -> list[Value]:
        """The indices of the first of the gathered programs."""
        first = list(ids)
        first[self.axis] = b.mul(ids[self.axis], b.index(factor))
        return first

    def numbers(
        self, b: Builder, shown: Shown, ids: Sequence[Value], yields: Sequence[Value]
    ) -> list[Value]:
        """What the author's map gives for a program."""
        given = dict(zip(shown.index_map.params, ids, strict=True))
        copy = clone(Block((), shown.index_map.ops, tuple(yields)), given)
        b.ops += copy.ops
        return list(copy.yields)

    def first(self, b: Builder, number: Value, factor: int) -> Value:
        """The first block of a new window, which is inside the array."""
        return b.clamp(b.index(0), number, b.index(self.blocks - factor))

    def part(
        self,
        b: Builder,
        shown: Shown,
        block: Value,
        ids: Sequence[Value],
        first_ids: Sequence[Value],
        factor: int,
    ) -> Value:
        """What a program sees of the new block."""
        own = [shown.index_map.yields[self.array_dim]]
        (number,) = self.numbers(b, shown, ids, own)
        (start,) = self.numbers(b, shown, first_ids, own)
        number = b.clamp(b.index(0), number, b.index(self.blocks - 1))
        offset = b.sub(number, self.first(b, start, factor))
        index: list[At | Span] = [Span(0, n) for n in block.ref.shape]
        index[self.place] = Span(None, self.size)
        return b.subview(block, tuple(index), [b.mul(offset, b.index(self.size))])


def followed_dim(shown: Shown, axis: int) -> int | None:
    """The dimension along which a window moves with the index along an axis.

    None: it does not, or in another way than by a block or none from step to step.
    """
    step = shown.index_map.params[axis % len(shown.index_map.params)]
    yields = shown.index_map.yields
    follows = lambda v: (
        v is step or _is_near(shown, v, step) or _falls_from(shown, v, step) is not None
    )
    places = [n for n, v in enumerate(yields) if follows(v)]
    return places[0] if len(places) == 1 else None


def _falls_from(shown: Shown, value: Value, step: Value) -> int | None:
    """The number that a value is a step below; None: it is something else."""
    made = {v: op for op in shown.index_map.ops for v in op.results}
    op = made.get(value)
    if op is None or op.name != "sub" or op.operands[1] is not step:
        return None
    return number_of(made, op.operands[0])


FARTHEST = 1 << 16  # blocks from the index along the axis


def _is_near(shown: Shown, value: Value, step: Value) -> bool:
    """Whether a number is the step's plus a constant, between limits."""
    made = {v: op for op in shown.index_map.ops for v in op.results}

    while value is not step:
        op = made.get(value)
        if op is None or op.name not in ("add", "sub", "max", "min"):
            return False
        x, y = op.operands
        if number_of(made, x) is not None and op.name != "sub":
            x, y = y, x
        by = number_of(made, y)
        if by is None or abs(by) > FARTHEST:
            return False
        value = x
    return True


def _near(shown: Shown, axis: int, steps: int) -> _Near | None:
    """How a window moves that shows a block near the index along the axis."""
    window, shape = shown.window, shown.array.ref.shape
    array_dim = followed_dim(shown, axis)
    if array_dim is None or window.mode != "in" or window.fill is not None:
        return None
    if any(d.kind not in ("blocked", "squeezed") for d in window.dims):
        return None
    axes = len(shown.index_map.params)
    step = shown.index_map.params[axis % axes]
    if _falls_from(shown, shown.index_map.yields[array_dim], step) is not None:
        return None
    others = [v for n, v in enumerate(shown.index_map.yields) if n != array_dim]
    if _depends(shown, others, step):
        return None
    dim, length = window.dims[array_dim], shape[array_dim]
    if dim.kind != "blocked" or length % dim.size or length // dim.size < steps:
        return None
    squeezed = sum(d.kind == "squeezed" for d in window.dims[:array_dim])
    place = array_dim - squeezed
    return _Near(array_dim, dim.size, place, axis % axes, length // dim.size)


def _shifted(shown: Shown, axis: int, sizes: Sequence[int | None]) -> _Shifted | None:
    """How a window of elements moves whose start is affine in the grid's indices."""
    window, index_map = shown.window, shown.index_map
    axis %= len(index_map.params)
    forms = Forms(index_map.params)
    forms.add_ops(index_map.ops)
    starts = [forms.of(value) for value in index_map.yields]
    moves = [d for d, start in enumerate(starts) if axis in start.axes]
    if len(moves) != 1 or window.mode != "in" or window.fill is not None:
        return None
    (array_dim,) = moves
    dim, start = window.dims[array_dim], starts[array_dim].affine
    if start is None or dim.kind != "element" or any(dim.padding):
        return None
    low, high = start.range(sizes)
    last, by = shown.array.ref.shape[array_dim] - dim.size, start.coeffs[axis]
    if by < 1 or low < 0 or high > last:
        return None
    squeezed = sum(d.kind == "squeezed" for d in window.dims[:array_dim])
    return _Shifted(array_dim, dim.size, array_dim - squeezed, axis, by)


def _depends(shown: Shown, values: Sequence[Value], on: Value) -> bool:
    made = {v: op for op in shown.index_map.ops for v in op.results}
    pending = list(values)
    while pending:
        value = pending.pop()
        if value is on:
            return True
        op = made.get(value)
        pending += op.operands if op is not None else ()
    return False


def _moved(
    shown: Shown, axis: int, sizes: Sequence[int | None]
) -> "_Moved | _Near | _Shifted | None":
    """How a window moves along an axis; None: it does not."""
    steps = sizes[axis]
    assert steps is not None
    axes = len(shown.index_map.params)
    step, yields = shown.index_map.params[axis % axes], shown.index_map.yields
    starts = {n: _falls_from(shown, value, step) for n, value in enumerate(yields)}
    falling = [n for n, start in starts.items() if start == steps - 1]
    places = [n for n, value in enumerate(yields) if value is step] + falling
    uses = sum(v is step for op in walk(shown.index_map) for v in op.operands)
    if not places and not uses:
        return None
    near = _near(shown, axis, steps) or _shifted(shown, axis, sizes) if uses else None
    if near is not None:
        return near
    name = shown.array.name or "a window"
    dims = shown.window.dims
    plain = all(d.kind in ("blocked", "squeezed") for d in dims)
    other_uses = uses > len(falling)
    if other_uses or len(places) != 1 or not plain or shown.window.fill is not None:
        raise CannotReblock(f"{name} does not follow the axis block by block")
    (array_dim,) = places
    dim = dims[array_dim]
    if steps * dim.size > shown.array.ref.shape[array_dim]:
        raise CannotReblock(f"the last block of {name} extends past the edge")
    squeezed = sum(d.kind == "squeezed" for d in dims[:array_dim])
    last = steps - 1 if falling else None
    return _Moved(array_dim, dim, array_dim - squeezed, axis % axes, last)


def _gathered(
    pipeline: Pipeline,
    axis: int,
    moved: list[_Moved | _Near | _Shifted | None],
    factor: int,
    scratch: Mapping[Value, Sequence[Value]],
) -> Op:
    grid, steps = list(pipeline.grid), pipeline.grid[axis]
    assert steps is not None
    grid[axis] = steps // factor
    shown = [
        each if how is None else how.window(each, factor)
        for each, how in zip(pipeline.shown, moved, strict=True)
    ]
    blocks = [each.block for each in shown]
    b = Builder(pipeline.op.loc)
    ids = [Value(i.type, i.name) for i in pipeline.ids]
    first = b.mul(ids[axis], b.index(factor))
    starts = list(ids)
    starts[axis] = first
    copies: list[dict[Value, Value]] = []
    for number in range(factor):
        old = list(ids)
        old[axis] = b.add(first, b.index(number))
        views = [
            how.part(b, each, block, old, starts, factor)
            if isinstance(how, _Near)
            else how.view(b, block, number, factor)
            if how is not None
            else block
            for each, block, how in zip(pipeline.shown, blocks, moved, strict=True)
        ]
        own = {ref: refs[number] for ref, refs in scratch.items()}
        own |= zip(pipeline.body.params, (*old, *views), strict=True)
        copies.append(own)
    if axis == -1:
        for own in copies:
            b.ops += clone(Block((), pipeline.body.ops), own).ops
    else:
        b.ops += _Lockstep(pipeline.body, copies).ops(pipeline.body)
    new = pipeline.with_(grid=tuple(grid))
    return new.showing(shown, b.block((*ids, *blocks))).to_op()


class _Lockstep:
    """Several copies of a body at once; each has its own values for those of the body.

    What is the same for all of them is done once.
    """

    def __init__(self, body: Block, copies: Sequence[dict[Value, Value]]):
        self.copies, self.roots = copies, Roots(body)
        refs = (ref for op in walk(body) for ref in written_refs(op))
        self.written = {self.roots.of(ref) for ref in refs}

    def ops(self, block: Block) -> list[Op]:
        ops: list[Op] = []
        for op in block.ops:
            same = all(map(self.is_same, op.operands))
            if same and self.is_repeatable(op):
                new = self.copied(op, self.copies[0])
                for own in self.copies[1:]:
                    own |= {v: self.copies[0][v] for v in op.results}
                ops.append(new)
            elif same and op.name == "cond" and not op.results:
                which = self.copies[0].get(op.operands[0], op.operands[0])
                regions = tuple(Block((), tuple(self.ops(r))) for r in op.regions)
                ops.append(op.with_(operands=(which,), regions=regions))
            else:
                ops += [self.copied(op, own) for own in self.copies]
        return ops

    def is_same(self, value: Value) -> bool:
        return len({id(own.get(value, value)) for own in self.copies}) == 1

    def is_repeatable(self, op: Op) -> bool:
        """Whether it gives the same each time it is done."""
        if op.name == "load":
            return self.roots.of(op.operands[0]) not in self.written
        return is_pure(op)

    def copied(self, op: Op, own: dict[Value, Value]) -> Op:
        copy = clone(Block((), (op,), op.results), own)
        own |= zip(op.results, copy.yields, strict=True)
        (new,) = copy.ops
        return new
