"""last_writers: steps that store to places which memory names, all at once.

In: a kernel with sequential axes because a result is stored to at places (blocks, rows,
pages of a cache) whose numbers are read from memory, so that two steps may store to the
same one. Out: a `Program` of three kernels. The second notes in a table, by an atomic
maximum, the last step of each place (the first fills the table). The third is the
kernel itself, with parallel steps that only store where they are the last.

Steps may also load a place before they store to it, if all store the same constant, as
a gradient does with the cotangent that it takes: then the first step of a place alone
loads and stores, and all others find the constant. An index array in a store names many
places in one step, of which the last one counts.

Proof: everything else is independent (`grid.py` says so of the kernel without these
accesses). Each access of a step is to the same elements of its place, so places are
equal or disjoint, and the last store alone is seen afterwards. A step does not store
to places that a mask leaves out, and is not noted there. The numbers of places are
computed from memory that no step writes; they are clamped as the accesses are. An axis
whose steps have places of their own (`own`) need not be in the table, unless the
numbers or the branches around the accesses depend on it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
    Window,
    walk,
)
from pallasite.ir.rewrite import (
    clone,
    dead_code,
    inline,
    producers_of,
    with_regions,
    writes,
)
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.affine import Form, Forms, moving_axes, recoverable
from pallasite.passes.analysis.grid import (
    GridInfo,
    analyze,
    find_pipeline,
    with_pipeline,
)
from pallasite.passes.analysis.memory import (
    MAIN_MEMORY,
    Roots,
    accesses_of,
    read_refs,
)
from pallasite.passes.lower.place_windows import number_limits
from pallasite.passes.schedule.split_axis import Program, Result, Step

MOST_PLACES = 1 << 26  # in a table
FILLED = 1024  # elements that a program fills
Group = tuple[Op, ...]  # accesses to one place, one after another
TABLE = T.RefType((), T.I32, "any")


@dataclass(frozen=True, eq=False)
class Contested:
    """A result that is stored to at places which memory names.

    Attributes:
        groups: its accesses, in order, each a load or store in no loop.
        named: the dimensions of a place that say whose it is.
        counts: how many numbers each dimension has.
        axes: of the grid, whose steps the table orders.
        rest: the constant that others than the first step load, if any load.
        lanes: the shape of the index arrays of an access, if it has any.
    """

    ref: Value
    groups: tuple[Group, ...]
    named: tuple[int, ...]
    counts: tuple[int, ...]
    axes: frozenset[int]
    rest: float | int | bool | None
    lanes: tuple[int, ...] = ()

    @property
    def turns(self) -> int:
        """How many places a step names."""
        return len(self.groups) * prod(self.lanes)

    @property
    def index(self) -> tuple[At | Gather]:
        """That of the table."""
        return (Gather() if self.lanes else At(),)

    @property
    def places(self) -> int:
        return prod(self.counts[d] for d in self.named)


@dataclass(frozen=True)
class LastWriters:
    """The axes whose steps may run at once, and what they then share."""

    axes: tuple[int, ...]
    results: tuple[Contested, ...]


def names_places(kernel: Kernel) -> bool:
    """Whether a kernel stores at places that memory may name: a quick test."""
    body = kernel.body
    made = {v: op for op in walk(body) for v in op.results}

    def is_named(value: Value) -> bool:
        op = made.get(value)
        if op is None or op.regions:
            return False
        return op.name == "load" or any(map(is_named, op.operands))

    for op in walk(body):
        if op.name == "store" and any(map(is_named, Access.of(op).index_operands)):
            return True
        if op.name == "pipeline":
            for each in Pipeline.of(op).shown:
                if each.window.mode == "out" and any(
                    map(is_named, each.index_map.yields)
                ):
                    return True
    return False


def last_writers(kernel: Kernel, info: GridInfo | None = None) -> LastWriters | None:
    """The sequential axes whose steps only contend for places that memory names.

    Args:
        kernel: a kernel with one pipeline, in normal form.
        info: its grid analysis, if at hand.
    """
    if kernel.level != "tile" or not names_places(kernel):
        return None
    info, pipeline = info or analyze(kernel), Pipeline.of(find_pipeline(kernel))
    if not info.sequential or None in pipeline.grid:
        return None
    results = tuple(_Places(kernel, pipeline).contested())
    if not results:
        return None
    gone = {op for each in results for group in each.groups for op in group}
    rest = analyze(without(kernel, gone, {each.ref for each in results}))
    axes = tuple(
        a
        for a in info.sequential
        if rest.axes[a].parallel and pipeline.semantics[a] != "sequential"
    )
    found = LastWriters(axes, results)
    steps = prod(n or 1 for n in pipeline.grid)
    fixed = _fixed(pipeline, axes, results)
    if any(each.window.may_hang_over(each.array.ref.shape) for each in fixed.values()):
        return None
    by_array = {one.groups[0][0].operands[0] for one in results if one.lanes}
    if any(fixed[b].array.ref.shape != b.ref.shape for b in by_array & fixed.keys()):
        return None
    if not axes or any(
        each.places > MOST_PLACES or steps * each.turns >= 1 << 31 for each in results
    ):
        return None
    reads_them = any(_noting(kernel, each) is None for each in results)
    return None if reads_them else found


def at_once(kernel: Kernel, found: LastWriters) -> Program:
    """The kernels that compute the same with parallel steps."""
    steps, number = list[Step](), {ref: n for n, ref in enumerate(kernel.inputs)}
    arrays, noted = len(number), dict[Kernel, Value]()
    tables = dict[Contested, Value]()
    for each in found.results:
        made = _noting(kernel, each)
        assert made is not None
        if made in noted:
            tables[each] = noted[made]
            continue
        table = Value(replace(TABLE, shape=(each.places,)), f"last{len(noted)}")
        steps.append(Step(_filling(each.places), ()))
        operands = [number[ref] for ref in made.inputs[:-1]]
        steps.append(Step(made, (*operands, arrays)))
        number[table], arrays = arrays + 1, arrays + 2
        noted[made] = tables[each] = table
    own = _in_parallel(kernel, found, tables)
    steps.append(Step(own, tuple(number[ref] for ref in own.inputs)))
    results = [Result(arrays + n) for n in range(kernel.num_outputs)]
    return Program(tuple(steps), tuple(results))


# --- what is contested ---


class _Places:
    def __init__(self, kernel: Kernel, pipeline: Pipeline):
        self.kernel, self.pipeline = kernel, pipeline
        self.sizes = [n or 1 for n in pipeline.grid]
        self.forms = Forms(pipeline.ids)
        before = kernel.body.ops[: kernel.body.ops.index(pipeline.op)]
        self.forms.add_ops([op for op in before if op.name != "alloc"])
        self.forms.add_ops(pipeline.body.ops, loads_vary=False)

    def contested(self) -> list[Contested]:
        found = list[Contested]()
        for ref, ops in accesses_of(self.kernel).items():
            ops = [op for op in ops if op.name != "pipeline"]
            stored = any(op.name == "store" for op in ops)
            if ref in self.kernel.outputs and ref.ref.space in MAIN_MEMORY and stored:
                one = self.of(ref, ops)
                found += [] if one is None else [one]
        return found

    def of(self, ref: Value, ops: Sequence[Op]) -> Contested | None:
        refs = {op.operands[0] for op in ops}
        if len(refs) > 1 or any(op.name not in ("load", "store") for op in ops):
            return None
        accesses = [Access.of(op) for op in ops]
        if len({a.index for a in accesses}) > 1:
            return None
        if any(a.other is not None for a in accesses):
            return None
        if any(a.mask is not None and self.mask_of(a) is None for a in accesses):
            return None
        counts = self.counts(accesses[0])
        groups = self.groups({*ops})
        if counts is None or groups is None:
            return None
        rest = None
        if any(op.name == "load" for op in ops):
            rest = self.constant(groups)
            if rest is None:
                return None
        tiles = {_lanes(a) for a in accesses} - {()}
        if len(tiles) > (rest is None):
            return None
        named, axes = self.named(groups, counts)
        if not axes or not named:
            return None
        lanes = next(iter(tiles), ())
        return Contested(ref, tuple(groups), named, counts, axes, rest, lanes)

    def mask_of(self, access: Access) -> Value | None:
        """The mask of a store through an index array, if it is the same for a place."""
        lanes = _lanes(access)
        return _place_mask(access, lanes, producers_of(self.pipeline.body))

    def counts(self, access: Access) -> tuple[int, ...] | None:
        """How many numbers each dimension of a place has; None: places may overlap."""
        counts = list[int]()
        window = _window(self.pipeline, access.ref)
        if window is not None:
            array, shown = window
            if any(d.kind not in ("blocked", "squeezed") for d in shown.dims):
                return None
            counts += [n + 1 for n in number_limits(shown, array.ref.shape)]
        elif access.ref in self.pipeline.body.params:
            return None
        shape = access.ref.ref.shape
        for (entry, start), n in zip(access.split_index(), shape, strict=True):
            if start is not None:
                extent = entry.extent if isinstance(entry, Span) else 1
                if extent > 1 and n > extent:
                    return None
                counts.append(n - extent + 1)
        return tuple(counts)

    def groups(self, ops: set[Op]) -> list[Group] | None:
        """The accesses of each place in turn, and where they are in the code."""
        groups, where = list[list[Op]](), list[tuple[Block, tuple[Value, ...]]]()
        count = 0

        def visit(block: Block, is_loop: bool) -> bool:
            nonlocal count
            for op in block.ops:
                if op in ops:
                    here = block, Access.of(op).index_operands
                    if where and where[-1][0] is block and where[-1][1] == here[1]:
                        groups[-1].append(op)
                    else:
                        groups.append([op])
                        where.append(here)
                    count += 1
                    if is_loop:
                        return False
                inner = is_loop or op.name != "cond"
                if not all(visit(region, inner) for region in op.regions):
                    return False
            return True

        if not visit(self.pipeline.body, False) or count != len(ops):
            return None
        return [tuple(group) for group in groups]

    def constant(self, groups: Sequence[Group]) -> float | int | bool | None:
        """What all stores leave, if a group is loads and then stores of one number."""
        made, numbers = producers_of(self.pipeline.body), set[object]()
        for group in groups:
            names = [op.name for op in group]
            if "store" not in names or "load" in names[names.index("store") :]:
                return None
            for op in group[names.index("store") :]:
                value = made.get(op.operands[1])
                if value is None or value.name != "constant":
                    return None
                numbers.add(repr(value.attrs["value"]))
                found = value.attrs["value"]
        return found if len(numbers) == 1 else None

    def named(
        self, groups: Sequence[Group], counts: Sequence[int]
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        """The dimensions that the table has, and the axes of its steps."""
        forms = [self.numbers(group[0]) for group in groups]
        guards = self.guards({op for group in groups for op in group})
        parts = [
            (each[0].affine if self.is_plain(each, n) else None, 0)
            for each, n in zip(zip(*forms, strict=True), counts, strict=True)
        ]
        every = range(len(self.sizes))
        columns = zip(*forms, strict=True)
        uses = [frozenset[int]().union(*(f.axes for f in each)) for each in columns]
        named = {d for d, (affine, _) in enumerate(parts) if affine is None}
        starts = Access.of(groups[0][0]).index_operands
        first = len(counts) - len(starts)
        named |= {first + n for n, v in enumerate(starts) if v.tile.shape}
        while True:
            own = [p for d, p in enumerate(parts) if d not in named]
            axes = {*every} - recoverable(own, self.sizes)
            axes |= guards.union(*(uses[d] for d in named))
            more = {d for d in range(len(counts)) if uses[d] & axes} - named
            if not more:
                break
            named |= more
        axes = {a for a in axes if self.sizes[a] > 1}
        return tuple(sorted(named)), frozenset(axes)

    def numbers(self, op: Op) -> list[Form]:
        """The forms of the numbers of an access's place."""
        access, found = Access.of(op), list[Form]()
        for each in self.pipeline.shown:
            if each.block is access.ref:
                forms = Forms(each.index_map.params, self.forms.known)
                forms.add_ops(each.index_map.ops, loads_vary=False)
                found += map(forms.of, each.index_map.yields)
        return [*found, *map(self.forms.of, access.index_operands)]

    def is_plain(self, forms: Sequence[Form], count: int) -> bool:
        """Whether a number is the same function of grid indices in all groups."""
        first = forms[0].affine
        if any(f.affine != first or f.spread for f in forms):
            return False
        if first is None or first.const is None:
            return False
        low, high = first.range(self.sizes)
        return low >= 0 and high < count

    def guards(self, ops: set[Op]) -> frozenset[int]:
        """The axes that the tests of branches around accesses depend on."""
        found = set[int]()
        for op in walk(self.pipeline.body):
            inside = (o for region in op.regions for o in walk(region))
            if op.name == "cond" and any(o in ops for o in inside):
                found |= self.forms.of(op.operands[0]).axes
        return frozenset(found)


def _lanes(access: Access) -> tuple[int, ...]:
    """The shape of an access's index arrays."""
    return next((v.tile.shape for v in access.index_operands if v.tile.shape), ())


def _place_mask(
    access: Access, lanes: tuple[int, ...], made: Mapping[Value, Op]
) -> Value | None:
    """What a mask repeats for all elements of a place; None if they differ."""
    mask = access.mask
    assert mask is not None
    if mask.tile.shape == lanes:
        return mask
    op = made.get(mask)
    if op is None or op.name != "broadcast_in_dim" or not lanes:
        return None
    sizes = zip(op.operands[0].tile.shape, op.attrs["dims"], strict=True)
    is_same = all(n == 1 or d < len(lanes) for n, d in sizes)
    return op.operands[0] if is_same else None


def _window(pipeline: Pipeline, block: Value) -> tuple[Value, Window] | None:
    for each in pipeline.shown:
        if each.block is block:
            return each.array, each.window
    return None


def _fixed(
    pipeline: Pipeline, axes: Sequence[int], results: Sequence[Contested]
) -> dict[Value, Shown]:
    """The windows that steps along some axes share, by their blocks."""
    refs = {op.operands[0] for each in results for group in each.groups for op in group}
    return {
        each.block: each
        for each in pipeline.shown
        if each.block in refs and not moving_axes(each.index_map).issuperset(axes)
    }


# --- the kernels ---


def changed(block: Block, change: Callable[[Op, Builder], bool]) -> Block:
    """The block with some ops as `change` emits them; it says which."""
    b = Builder()
    for op in block.ops:
        b.loc = op.loc
        if not change(op, b):
            b.ops.append(with_regions(op, [changed(r, change) for r in op.regions]))
    return replace(block, ops=tuple(b.ops))


def without(kernel: Kernel, gone: Collection[Op], refs: Collection[Value]) -> Kernel:
    """The kernel without some ops, and the windows on some results, for analysis."""

    def change(op: Op, b: Builder) -> bool:
        if op in gone and op.results:
            tile = op.result.tile
            b.ops.append(
                Op("constant", (), op.results, {"value": 0, "type": tile}, (), op.loc)
            )
        return op in gone

    pipeline, same = Pipeline.of(find_pipeline(kernel)), kernel.aliased_results
    kept = [e for e in pipeline.shown if same.get(e.array, e.array) not in refs]
    body = changed(pipeline.body, change)
    params = (*pipeline.ids, *(each.block for each in kept))
    new = pipeline.showing(kept, replace(body, params=params))
    return with_pipeline(kernel, new.to_op())


def on_array(b: Builder, pipeline: Pipeline, op: Op, shown: Shown | None) -> Op:
    """An access to a window's block as one to its array, at the same elements."""
    if shown is None:
        return op
    access, index, starts = Access.of(op), list[At | Span](), list[Value]()
    numbers = inline(b, clone(shown.index_map), pipeline.ids)
    entries = iter(access.split_index())
    limits = number_limits(shown.window, shown.array.ref.shape)
    for dim, number, last in zip(shown.window.dims, numbers, limits, strict=True):
        number = b.clamp(b.index(0), number, b.index(last))
        if dim.kind == "squeezed":
            index.append(At())
            starts.append(number)
            continue
        entry, start = next(entries)
        assert not isinstance(entry, Gather)
        extent = 1 if isinstance(entry, At) else entry.extent
        if start is None:
            start = b.index(entry.start or 0)
        start = b.clamp(b.index(0), b.as_index(start), b.index(dim.size - extent))
        index.append(replace(entry, start=None))
        starts.append(b.add(b.mul(number, b.index(dim.size)), start))
    new = replace(access, ref=shown.array, index=tuple(index))
    operands = access_operands(replace(new, index_operands=tuple(starts)))
    return op.with_(operands=operands, attrs={**op.attrs, "index": tuple(index)})


def _place(b: Builder, pipeline: Pipeline, one: Contested, op: Op) -> Value:
    """The number of an access's place, among those that are named."""
    access, numbers = Access.of(op), list[Value]()
    for each in pipeline.shown:
        if each.block is access.ref:
            numbers += inline(b, clone(each.index_map), pipeline.ids)
    numbers += access.index_operands
    total = None
    for d in one.named:
        n, number = one.counts[d], b.broadcast(b.as_index(numbers[d]), one.lanes)
        number = b.op("clamp", b.like(0, number), number, b.like(n - 1, number))
        scaled = total and b.add(b.mul(total, b.like(n, total)), number)
        total = scaled or number
    assert total is not None
    return total


def _inside(
    b: Builder, one: Contested, op: Op, made: Mapping[Value, Op]
) -> Value | None:
    """Which places of an index array are places: a store drops others."""
    access, inside = Access.of(op), None
    if access.mask is not None:
        inside = _place_mask(access, one.lanes, made)
        assert inside is not None
        if inside.tile.shape != one.lanes:
            dims = made[access.mask].attrs["dims"]
            sizes = zip(inside.tile.shape, dims, strict=True)
            kept = [(n, d) for n, d in sizes if d < len(one.lanes)]
            inside = b.op("reshape", inside, shape=tuple(n for n, _ in kept))
            inside = b.broadcast(inside, one.lanes, [d for _, d in kept])
    for entry, start in access.split_index():
        if isinstance(entry, Gather):
            assert start is not None
            at = access.index_operands.index(start) - len(access.index_operands)
            start = b.as_index(start)
            low, high = (b.like(k, start) for k in (0, one.counts[at] - 1))
            both = b.op("and", b.ge(start, low), b.op("le", start, high))
            inside = both if inside is None else b.op("and", inside, both)
    return inside


def _turn(b: Builder, pipeline: Pipeline, one: Contested, group: int) -> Value:
    """A positive number that is the larger, the more a step's turn counts."""
    total = b.index(0)
    axes = sorted(one.axes)
    for axis in axes:
        size = b.index(pipeline.grid[axis] or 1)
        total = b.add(b.mul(total, size), pipeline.ids[axis])
    total = b.add(b.mul(total, b.index(len(one.groups))), b.index(group))
    if one.rest is not None:
        most = prod(pipeline.grid[a] or 1 for a in axes) * len(one.groups)
        return b.sub(b.index(most), total)
    total = b.broadcast(b.mul(total, b.index(prod(one.lanes))), one.lanes)
    strides = [prod(one.lanes[d + 1 :]) for d in range(len(one.lanes))]
    for d, stride in enumerate(strides):
        lane = b.op("iota", type=T.TileType(one.lanes, T.I32), dim=d)
        total = b.add(total, b.mul(lane, b.like(stride, lane)))
    return b.add(total, b.like(1, total))


def _filling(count: int) -> Kernel:
    """The kernel that fills a table with zeros."""
    block = Value(T.RefType((FILLED,), T.I32, "block"), "block")
    table = Value(replace(TABLE, shape=(count,)), "last")
    i, at = Value(T.INDEX, "i0"), Value(T.INDEX, "i0")
    b, whole = Builder(), Builder()
    b.store(block, b.constant(0, T.TileType((FILLED,), T.I32)))
    whole.emit(
        "pipeline",
        table,
        regions=(Block((at,), (), (at,)), b.block((i, block))),
        grid=(-(-count // FILLED),),
        windows=(Window((BlockDim(FILLED),), "out"),),
        semantics=("parallel",),
    )
    return Kernel("no_steps", (table,), whole.block(), 1)


def _noting(kernel: Kernel, one: Contested) -> Kernel | None:
    """The kernel that notes the step of each place; None: it needs what steps do."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    before, table = (
        Value(replace(TABLE, shape=(one.places,)), name) for name in ("before", "last")
    )
    firsts = {group[0]: n for n, group in enumerate(one.groups)}
    lost, makers = set[Value](), producers_of(pipeline.body)

    def change(op: Op, b: Builder) -> bool:
        if op in firsts:
            place = _place(b, pipeline, one, op)
            turn = _turn(b, pipeline, one, firsts[op])
            inside = _inside(b, one, op, makers)
            access = Access(table, one.index, (place,), turn, None, inside)
            attrs = {"kind": "max", "index": one.index, "mask": inside is not None}
            b.emit("atomic_rmw", *access_operands(access), **attrs)
        if op.regions or not writes(op):
            return False
        lost.update(op.results)
        return True

    body = changed(pipeline.body, change)
    body = dead_code(Kernel("noting", (), body, 0)).body
    used = {v for op in walk(body) for v in op.operands}
    reads = {r for op in walk(body) if op.name != "atomic_rmw" for r in read_refs(op)}
    if lost & used or reads & Roots(kernel).all_written(pipeline.body):
        return None
    shown = [each for each in pipeline.shown if each.block in used]
    body = replace(body, params=(*pipeline.ids, *(each.block for each in shown)))
    grid = tuple(n if a in one.axes else 1 for a, n in enumerate(pipeline.grid))
    new = replace(pipeline, grid=grid, semantics=("parallel",) * len(grid))
    made = dead_code(with_pipeline(kernel, new.showing(shown, body).to_op()))
    needed = {v for op in walk(made.body) for v in op.operands}
    inputs = [ref for ref in kernel.inputs if ref in needed]
    return made.with_(
        name=f"{kernel.name}_order",
        params=(*inputs, before, table),
        num_outputs=1,
        aliases=((len(inputs), 0),),
    )


def _store_some(b: Builder, op: Op, mask: Value, whole: Shown | None) -> None:
    """A store through index arrays to some of their places.

    `whole`: the window that shows the array, if there is one.
    """
    access, starts = Access.of(op), list[Value]()
    assert access.value is not None
    shapes = zip(access.split_index(), access.ref.ref.shape, strict=True)
    for (entry, start), n in shapes:
        if start is not None and not isinstance(entry, Gather):
            extent = entry.extent if isinstance(entry, Span) else 1
            start = b.clamp(b.index(0), b.as_index(start), b.index(n - extent))
        starts += [] if start is None else [start]
    mask = b.broadcast(mask, access.value.tile.shape, range(mask.tile.rank))
    ref = access.ref if whole is None else whole.array
    b.store(ref, access.value, access.index, starts, mask)


def _in_parallel(
    kernel: Kernel, found: LastWriters, tables: Mapping[Contested, Value]
) -> Kernel:
    """The kernel whose steps have parallel axes, and store where they are the last."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    group_of = {
        op: (one, n)
        for one in found.results
        for n, group in enumerate(one.groups)
        for op in group
    }
    chosen = dict[tuple[Contested, int], Value]()
    shown = _fixed(pipeline, found.axes, found.results)

    def change(op: Op, b: Builder) -> bool:
        if op not in group_of:
            return False
        one, n = key = group_of[op]
        if key not in chosen:
            place = _place(b, pipeline, one, op)
            last = b.load(tables[one], one.index, [place])
            is_last = b.op("eq", last, _turn(b, pipeline, one, n))
            chosen[key] = is_last if one.lanes else b.cast(is_last, T.I32)
        if one.lanes:
            _store_some(b, op, chosen[key], shown.get(op.operands[0]))
            return True
        inside = Builder(op.loc)
        made = on_array(inside, pipeline, op, shown.get(op.operands[0]))
        if op.name == "store":
            inside.ops.append(made)
            regions = Block(), inside.block()
        else:
            assert one.rest is not None
            other, loaded = Builder(op.loc), Value(op.result.type, op.result.name)
            rest = other.like(one.rest, op.result)
            inside.ops.append(made.with_(results=(loaded,)))
            regions = other.block((), (rest,)), inside.block((), (loaded,))
        new = Op("cond", (chosen[key],), op.results, {}, regions, op.loc)
        b.ops.append(new)
        return True

    semantics = tuple(
        "parallel" if a in found.axes else said
        for a, said in enumerate(pipeline.semantics)
    )
    body = changed(pipeline.body, change)
    kept = [each for each in pipeline.shown if each.block not in shown]
    body = replace(body, params=(*pipeline.ids, *(each.block for each in kept)))
    new = replace(pipeline, semantics=semantics).showing(kept, body)
    made = with_pipeline(kernel, new.to_op())
    tables_once = tuple(dict.fromkeys(tables.values()))
    return made.with_(params=(*kernel.inputs, *tables_once, *kernel.outputs))
