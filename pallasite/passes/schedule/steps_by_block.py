"""steps_by_block: steps sorted by the block of a result that they see.

In: a kernel with sequential axes because steps may see the same block of a result,
whose number is any function of grid indices and of memory that no step writes: rows are
added to the block of their segment, whose numbers are in a table. Out: a `Program` that
sorts the steps by the number of their block, and a kernel whose programs are the
blocks: each goes through the steps of its own, in their order. A block that no step
sees keeps what it has.

Proof: without what they do to such blocks, the steps are independent (`grid.py` says so
of the kernel without these accesses), so what a step sees and leaves depends only on
earlier steps of its block. The sort is stable: these come in their order, and results
are those of the kernel as written, bit for bit, whatever the steps compute. Block
numbers are clamped as windows are before they are sorted. Scratch may hand something on
within a run of steps that see the same block, which stay together, if each run's first
step overwrites it (`run_starts.py`). A row of a whole result that each step names is a
block (`_with_rows`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from pallasite.ir import types as T
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    walk,
)
from pallasite.ir.rewrite import clone, dead_code, inline
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.affine import moving_axes
from pallasite.passes.analysis.grid import (
    GridInfo,
    analyze,
    find_pipeline,
    with_pipeline,
)
from pallasite.passes.analysis.index_code import IndexCode, Key
from pallasite.passes.analysis.memory import VIEWS, constant_inputs
from pallasite.passes.analysis.run_starts import run_starts
from pallasite.passes.lower.place_windows import number_limits
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.schedule.last_writers import changed, on_array, without
from pallasite.passes.schedule.split_axis import Order, Program, Result, Step

MOST_STEPS = 1 << 24  # that are sorted


@dataclass(frozen=True, eq=False)
class ByBlock:
    """What `steps_by_block` found.

    Attributes:
        kernel: in normal form.
        axes: those whose steps are sorted, and whose indices choose blocks.
        own: the other axes, which programs have.
        shown: windows on blocks that steps share.
        named: of the first of them, the dimensions whose block numbers are sorted by.
        counts: how many numbers each of these has.
    """

    kernel: Kernel
    axes: tuple[int, ...]
    own: tuple[int, ...]
    shown: tuple[Shown, ...]
    named: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline.of(find_pipeline(self.kernel))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(n or 1 for n in self.pipeline.grid)

    @cached_property
    def code(self) -> IndexCode:
        return IndexCode(self.shown[0].index_map)

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """Those of the programs' axes that choose blocks, too."""
        used = _axes_of(self.shown[0].index_map, self.named[0])
        return tuple(a for a in self.own if a in used)

    @property
    def sorted_axes(self) -> tuple[int, ...]:
        return tuple(sorted((*self.shared, *self.axes)))

    @property
    def steps(self) -> int:
        return prod(self.sizes[a] for a in self.sorted_axes)

    @property
    def blocks(self) -> int:
        """How many there are for each index along `shared`."""
        return prod(self.counts)

    @property
    def numbers(self) -> int:
        return self.blocks * prod(self.sizes[a] for a in self.shared)

    @property
    def typical(self) -> int:
        """How many steps a block has, if all have as many."""
        return -(-self.steps // self.numbers)


def steps_by_block(kernel: Kernel, info: GridInfo | None = None) -> ByBlock | None:
    """The steps of sequential axes that share nothing but blocks which they name.

    Args:
        kernel: a kernel with one pipeline, in normal form.
        info: its grid analysis, if at hand.
    """
    if kernel.level != "tile" or None in Pipeline.of(find_pipeline(kernel)).grid:
        return None
    made = _with_rows(kernel)
    info = info if made is kernel and info is not None else analyze(made)
    kernel, pipeline = made, Pipeline.of(find_pipeline(made))
    axes = tuple(a for a in info.sequential if info.axes[a].size != 1)
    if not axes:
        return None
    if any(pipeline.semantics[a] == "sequential" for a in axes):
        return None
    found = _shared_blocks(kernel, pipeline, info, axes)
    if found is None or not _is_apart(kernel, pipeline, found, axes):
        return None
    fits = 1 < found.steps <= MOST_STEPS and 1 < found.numbers <= MOST_STEPS
    return found if fits else None


def by_block(found: ByBlock) -> tuple[Program, Kernel]:
    """The program, and its kernel with the steps of a typical block, for estimates."""
    kernel = found.kernel
    place = {ref: n for n, ref in enumerate(kernel.inputs)}
    number, tables = _number(found)
    sizes = tuple(found.sizes[a] for a in found.sorted_axes)
    operands = tuple(place[ref] for ref in tables)
    order = Order(number, sizes, found.numbers, operands)
    count = len(kernel.inputs)
    step = Step(_of_blocks(found, None), tuple(range(count + order.outputs)))
    first = count + order.outputs
    results = tuple(Result(first + n) for n in range(kernel.num_outputs))
    return Program((order, step), results), _of_blocks(found, found.typical)


# --- rows as blocks ---


def _with_rows(kernel: Kernel) -> Kernel:
    """The kernel with rows of whole results, one for each step, as blocks."""
    pipeline, given = Pipeline.of(find_pipeline(kernel)), constant_inputs(kernel)
    code, rows = IndexCode(pipeline.body), dict[Value, list[Op]]()
    for op in walk(pipeline.body):
        for ref in op.operands:
            if ref.is_ref:
                rows.setdefault(ref, []).append(op)
    made, blocks = list[Shown](), dict[Value, Shown]()
    for each in pipeline.shown:
        row = _row(each, rows.get(each.block, ()), code, given)
        if row is not None:
            blocks[each.block] = each = _shown_row(pipeline, each, row, code)
        made.append(each)
    if not blocks:
        return kernel

    def change(op: Op, b: Builder) -> bool:
        each = blocks.get(op.operands[0]) if op.operands else None
        if each is None:
            return False
        access = Access.of(op)
        index = tuple(replace(e, start=0) for e in access.index)
        new = replace(access, ref=each.block, index=index, index_operands=())
        attrs = {**op.attrs, "index": index}
        b.ops.append(op.with_(operands=access_operands(new), attrs=attrs))
        return True

    body = changed(pipeline.body, change)
    params = (*pipeline.ids, *(each.block for each in made))
    new = pipeline.showing(made, replace(body, params=params))
    return with_pipeline(kernel, new.to_op())


def _row(
    each: Shown, ops: Sequence[Op], code: IndexCode, given: frozenset[Value]
) -> Sequence[Value | None] | None:
    """The indices of the one row that a step accesses; None along other dimensions."""
    if each.window.mode != "out" or each.window.may_hang_over(each.array.ref.shape):
        return None
    if not ops or any(op.name not in ("load", "store") for op in ops):
        return None
    found, keys = list[Value | None](), set[object]()
    for op in ops:
        entries = Access.of(op).split_index()
        found = [start for _, start in entries]
        for (entry, _), n in zip(entries, each.block.ref.shape, strict=True):
            is_one = entry in (At(None), Span(None, 1))
            if entry != Span(0, n) and not is_one:
                return None
        if any(v is not None and code.key(v) is None for v in found):
            return None
        keys.add(tuple(None if v is None else code.key(v) for v in found))
    dims = iter(found)
    for dim, n in zip(each.window.dims, each.array.ref.shape, strict=True):
        is_named = dim.kind != "squeezed" and next(dims) is not None
        if is_named and dim.size != n:
            return None
    loads = {ref for v in found if v is not None for ref in code.reads(v)}
    return found if len(keys) == 1 and any(found) and loads <= given else None


def _shown_row(
    pipeline: Pipeline, each: Shown, row: Sequence[Value | None], code: IndexCode
) -> Shown:
    b, dims = Builder(pipeline.op.loc), list[BlockDim]()
    ids = tuple(Value(v.type, v.name) for v in pipeline.ids)
    yields = list(inline(b, clone(each.index_map), ids))
    known, starts = dict(zip(pipeline.ids, ids, strict=True)), iter(row)
    for d, dim in enumerate(each.window.dims):
        start = None if dim.kind == "squeezed" else next(starts)
        if start is not None:
            dim, yields[d] = BlockDim(1), code.emit(b, start, known)
        dims.append(dim)
    window = replace(each.window, dims=tuple(dims))
    block = Value(each.block.ref.with_shape(window.block_shape), each.block.name)
    return Shown(each.array, window, b.block(ids, yields), block)


# --- which steps share what ---


def _axes_of(index_map: Block, dims: Sequence[int]) -> frozenset[int]:
    yields = tuple(index_map.yields[d] for d in dims)
    return moving_axes(replace(index_map, yields=yields))


def _shared_blocks(
    kernel: Kernel, pipeline: Pipeline, info: GridInfo, axes: Sequence[int]
) -> ByBlock | None:
    """The windows on blocks that steps share, if all are chosen by the same numbers."""
    same, given = kernel.aliased_results, constant_inputs(kernel)
    moves = zip(pipeline.shown, info.windows, strict=True)
    apart = lambda move: set(axes) <= move.apart
    roots = {
        same.get(each.array, each.array)
        for each, move in moves
        if move.written and not apart(move)
    }
    shown = [e for e in pipeline.shown if same.get(e.array, e.array) in roots]
    if not shown or not roots <= set(kernel.outputs):
        return None
    named, keys = list[tuple[int, ...]](), set[object]()
    for each in shown:
        code, found = IndexCode(each.index_map), list[tuple[Key | None, int]]()
        dims, limits = list[int](), number_limits(each.window, each.array.ref.shape)
        if any(d.kind not in ("blocked", "squeezed") for d in each.window.dims):
            return None
        for d, last in enumerate(limits):
            if _axes_of(each.index_map, [d]) & {*axes}:
                dims.append(d)
                found.append((code.key(each.index_map.yields[d]), last + 1))
        if any(key is None for key, _ in found):
            return None
        loads = (op for op in each.index_map.ops if op.name == "load")
        if any(op.operands[0] not in given for op in loads):
            return None
        named.append(tuple(dims))
        keys.add(tuple(found))
        counts = tuple(n for _, n in found)
    if len(keys) > 1 or not counts:
        return None
    own = tuple(a for a in range(len(pipeline.grid)) if a not in axes)
    return ByBlock(kernel, tuple(axes), own, tuple(shown), tuple(named), counts)


def _is_apart(
    kernel: Kernel, pipeline: Pipeline, found: ByBlock, axes: Sequence[int]
) -> bool:
    """Whether steps share nothing else, and other windows can be accesses to arrays."""
    blocks, gone = {each.block for each in found.shown}, set[Op]()
    arrays = {each.array for each in found.shown}
    moving = {each.block: each for each in _moving(found)}
    for op in walk(pipeline.body):
        used = {*op.operands}
        if used & arrays:
            return False
        if used & blocks:
            if op.name not in ("load", "store", "atomic_rmw"):
                return False
            gone.add(op)
        for each in (moving[v] for v in used & moving.keys()):
            if not _can_be_on_array(op, each):
                return False
    same = kernel.aliased_results
    rest = without(kernel, gone, {same.get(array, array) for array in arrays})
    return _is_parallel(rest, axes) or _is_parallel(_as_starts(rest, found), axes)


def _is_parallel(kernel: Kernel, axes: Sequence[int]) -> bool:
    info = analyze(kernel)
    return all(info.axes[a].parallel for a in axes)


def _as_starts(kernel: Kernel, found: ByBlock) -> Kernel:
    """A kernel as the first steps of runs see it."""
    if len(found.axes) != 1:
        return kernel
    pipeline, axis = Pipeline.of(find_pipeline(kernel)), found.axes[0]
    yields = found.shown[0].index_map.yields
    keys = [found.code.key(yields[d]) for d in found.named[0]]
    numbers = [key for key in keys if key is not None]
    starts = run_starts(pipeline, axis, numbers)

    def change(op: Op, b: Builder) -> bool:
        is_start = len(op.results) == 1 and op.result in starts
        if is_start:
            attrs = {"value": True, "type": op.result.tile}
            b.ops.append(Op("constant", (), op.results, attrs, (), op.loc))
        return is_start

    body = changed(pipeline.body, change)
    return canonicalize(with_pipeline(kernel, pipeline.with_(body=body).to_op()))


def _can_be_on_array(op: Op, each: Shown) -> bool:
    if op.name not in ("load", "store") or each.window.may_hang_over(
        each.array.ref.shape
    ):
        return False
    kinds = {d.kind for d in each.window.dims}
    entries = Access.of(op).index
    return kinds <= {"blocked", "squeezed"} and not any(
        isinstance(entry, Gather) for entry in entries
    )


def _moving(found: ByBlock) -> list[Shown]:
    """Other windows, whose blocks a program does not keep."""
    shared = {each.block for each in found.shown}
    return [
        each
        for each in found.pipeline.shown
        if each.block not in shared and moving_axes(each.index_map) & {*found.axes}
    ]


# --- the kernels ---


def _combined(b: Builder, found: ByBlock, ids: Mapping[int, Value], block: Value):
    """The number of a block among those of all indices along `shared`."""
    total = b.index(0)
    for axis in found.shared:
        total = b.add(b.mul(total, b.index(found.sizes[axis])), ids[axis])
    return b.add(b.mul(total, b.index(found.blocks)), block)


def _number(found: ByBlock) -> tuple[Kernel, tuple[Value, ...]]:
    """The kernel of one step's block, given grid indices, and what it reads besides."""
    b, index_map = Builder(), found.shown[0].index_map
    refs = {a: Value(T.RefType((), T.I32, "any")) for a in found.sorted_axes}
    ids = {a: b.load(ref, ()) for a, ref in refs.items()}
    known = {index_map.params[a]: value for a, value in ids.items()}
    block = b.index(0)
    for d, count in zip(found.named[0], found.counts, strict=True):
        each = b.as_index(found.code.emit(b, index_map.yields[d], known))
        each = b.clamp(b.index(0), each, b.index(count - 1))
        block = b.add(b.mul(block, b.index(count)), each)
    result = Value(T.RefType((), T.I32, "any"))
    b.store(result, _combined(b, found, ids, block), ())
    body = clone(b.block())
    tables = [op.operands[0] for op in walk(body) if op.name == "load"]
    tables = tuple(dict.fromkeys(v for v in tables if v not in refs.values()))
    return Kernel("number", (*refs.values(), *tables, result), body, 1), tables


def _of_blocks(found: ByBlock, typical: int | None) -> Kernel:
    """The kernel whose programs are blocks; `typical`: steps, if not as sorted."""
    kernel, old = found.kernel, found.pipeline
    array = lambda n, name: Value(T.RefType((n,), T.I32, "smem"), name)
    firsts, order = array(found.numbers + 1, "firsts"), array(found.steps, "order")
    ids, block = _ids(found)
    b, inner = Builder(old.op.loc), Builder(old.op.loc)
    if typical is None:
        at = _combined(b, found, ids, block)
        after = b.add(at, b.index(1))
        bounds = [b.load(firsts, (At(),), [v]) for v in (at, after)]
    else:
        bounds = [b.index(0), b.index(typical)]
    place = Value(T.INDEX, "place")
    step = inner.load(order, (At(),), [place])
    all_ids = ids | _digits(inner, found, step)
    shown = [_shown(found, each) for each in old.shown if each not in _moving(found)]
    blocks = {e.block: new.block for e, new in zip(_staying(found), shown, strict=True)}
    known = {old.ids[a]: value for a, value in all_ids.items()} | blocks
    body = clone(Block((), _on_arrays(found).ops), known)
    inner.ops += body.ops
    b.emit("for", *bounds, b.index(1), regions=(inner.block((place,)),))
    params = (*ids.values(), block, *(each.block for each in shown))
    grid = (*(found.sizes[a] for a in found.own), found.blocks)
    said = (*(old.semantics[a] for a in found.own), "parallel")
    new = replace(old, grid=grid, semantics=said)
    new = new.showing(shown, Block(params, tuple(b.ops)))
    made = with_pipeline(kernel, new.to_op())
    params = (*kernel.inputs, firsts, order, *kernel.outputs)
    return dead_code(made.with_(params=params))


def _staying(found: ByBlock) -> list[Shown]:
    moving = _moving(found)
    return [each for each in found.pipeline.shown if each not in moving]


def _ids(found: ByBlock) -> tuple[dict[int, Value], Value]:
    old = found.pipeline.ids
    ids = {a: Value(old[a].type, old[a].name) for a in found.own}
    return ids, Value(T.INDEX, "block")


def _digits(b: Builder, found: ByBlock, step: Value) -> dict[int, Value]:
    """The grid indices of a step along the sequential axes."""
    ids, axes = dict[int, Value](), found.sorted_axes
    for axis in reversed(axes):
        n = b.index(found.sizes[axis])
        is_first = axis == axes[0]
        ids[axis] = step if is_first else b.op("rem", step, n)
        step = step if is_first else b.op("div", step, n)
    return {a: v for a, v in ids.items() if a in found.axes}


def _on_arrays(found: ByBlock) -> Block:
    """The body, whose windows that move from step to step are accesses to arrays."""
    moving = {each.block: each for each in _moving(found)}

    def change(op: Op, b: Builder) -> bool:
        each = moving.get(op.operands[0]) if op.operands else None
        if each is None or op.name in VIEWS:
            return False
        b.ops.append(on_array(b, found.pipeline, op, each))
        return True

    return changed(found.pipeline.body, change)


def _shown(found: ByBlock, each: Shown) -> Shown:
    """A window as the programs of blocks have it."""
    ids, block = _ids(found)
    b = Builder(found.pipeline.op.loc)
    all_ids = [ids.get(a) or b.index(0) for a in range(len(found.sizes))]
    yields = list(inline(b, clone(each.index_map), all_ids))
    for shown, dims in zip(found.shown, found.named, strict=True):
        rest = block
        for d, count in reversed([*zip(dims, found.counts, strict=True)]):
            if shown.block is each.block:
                yields[d] = rest if d == dims[0] else b.op("rem", rest, b.index(count))
                rest = rest if d == dims[0] else b.op("div", rest, b.index(count))
    new = Value(each.block.type, each.block.name)
    index_map = b.block((*ids.values(), block), yields)
    return each._replace(index_map=index_map, block=new)
