"""From a program that adds to cotangents to a kernel with a grid and windows.

Each cotangent gets its own window. Grid axes that choose its block come first, the
others are innermost and sequential: the block is zeroed at the first of their steps and
added to in place. Dimensions whose block is not chosen by one grid index alone (two
programs may share it, or a loop moves over it) are shown whole.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from pallasite.autodiff.backward_sums import Sum, expand_sums
from pallasite.autodiff.step_order import Reaching, Sorting
from pallasite.errors import NoBackwardKernel
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    At,
    Block,
    BlockDim,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import Rewriter, map_ops, replace_ops
from pallasite.ir.roles import Pipeline, number_of
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.index_code import IndexCode, Key
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program, main_refs
from pallasite.passes.optimise.unused import drop_unused


@dataclass(frozen=True)
class Placement:
    """How one result of a program is divided over its grid."""

    ref: Value
    kept: tuple[bool, ...]  # dimensions divided into blocks by grid indices
    own: frozenset[int]  # those grid axes: other steps access other blocks
    changes: bool = False  # it has an initial value other than zero
    start: tuple[int, ...] = ()  # where in an array it is, if it is a part of one


# Sequential axes split into parallel parts, each with its own sums: how many parts.
Parts = dict[int, int]


def place(program: Program, ref: Value) -> Placement:
    """Find which dimensions of a result are divided into blocks by the grid."""
    code = IndexCode(program.body)
    uses = [op for op in walk(program.body) if ref in op.operands]
    views = [op for op in uses if op.name == "block_view"]
    rank = ref.ref.rank
    if len(views) < len(uses) or not views:
        return Placement(ref, (False,) * rank, frozenset())
    kept, own = [], set[int]()
    for d in range(rank):
        dims = {op.attrs["window"].dims[d] for op in views}
        keys = {code.key(op.operands[1 + d]) for op in views}
        axes = code.digits(views[0].operands[1 + d], program.sizes)
        dim = views[0].attrs["window"].dims[d]
        blocks = block_count(dim, ref.ref.shape[d])
        alone = len(dims) == len(keys) == 1 and blocks is not None
        count = prod(program.sizes[a] for a in axes)
        by_axes = bool(axes) and not own & set(axes) and count == blocks
        single = blocks == 1 and number_of(code.made, views[0].operands[1 + d]) == 0
        kept.append(alone and (by_axes or single))
        if kept[-1] and by_axes:
            own.update(axes)
    return Placement(ref, tuple(kept), frozenset(own))


def apart(
    program: Program, placements: Sequence[Placement]
) -> tuple[Program, list[Placement], dict[Value, Value]]:
    """The program with a result per place for those that are added to in several.

    The cotangent of `x` in `x @ x.T` gets sums at the rows and at the columns of the
    program's block: the grid divides neither of them with the other, but each alone.

    Returns:
        The program, the placements of its results, and the result that each of the new
        ones is a part of.
    """
    placed, same = list[Placement](), dict[Value, Value]()
    for each in placements:
        found = None if all(each.kept) else _by_place(program, each.ref)
        if found is None:
            placed.append(each)
            continue
        program, parts = found
        placed += parts
        same |= {part.ref: each.ref for part in parts}
    return program, placed, same


def _by_place(program: Program, ref: Value) -> tuple[Program, list[Placement]] | None:
    """A result for each block that a program adds to, if the grid divides them all.

    Blocks from a fixed one on (keys and values that follow queries in one array) divide
    the part of the array that they are; the rest of it gets nothing from them.
    """
    code, parts = IndexCode(program.body), dict[Key, tuple[Value, tuple[int, ...]]]()
    views, shown = dict[Op, tuple[Value, tuple[int, ...]]](), set[Value]()
    for op in walk(program.body):
        if ref in op.operands:
            keys = tuple(map(code.key, op.operands[1:]))
            if op.name != "block_view" or None in keys:
                return None
            key = (op.attrs["window"].dims, keys)
            views[op] = parts.setdefault(key, _part_shown(program, code, op))
            shown.add(op.result)
        elif not shown.isdisjoint(op.operands) and not _adds(op):
            return None
    if len(parts) < 2 and all(part.ref == ref.ref for part, _ in parts.values()):
        return None

    def rewrite(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op not in views:
            return None
        part, first = views[op]
        pairs = zip(op.operands[1:], first, strict=True)
        indices = [b.sub(v, b.like(n, v)) if n else v for v, n in pairs]
        b.ops.append(op.with_(operands=(part, *indices)))
        return op.results

    new = program.with_body(map_ops(program.body, rewrite))
    placed = list[Placement]()
    for op, (part, first) in views.items():
        dims = zip(op.attrs["window"].dims, first, strict=True)
        start = tuple(n * (dim.size if dim.kind == "blocked" else 1) for dim, n in dims)
        if all(part is not each.ref for each in placed):
            placed.append(replace(place(new, part), start=start))
    return (new, placed) if all(all(each.kept) for each in placed) else None


def _part_shown(
    program: Program, code: IndexCode, view: Op
) -> tuple[Value, tuple[int, ...]]:
    """The part of an array that views show blocks of, and its first block."""
    ref, shape, first = view.operands[0], list[int](), list[int]()
    dims = zip(view.operands[1:], view.attrs["window"].dims, ref.ref.shape, strict=True)
    for index, dim, n in dims:
        form, size = code.forms.of(index), dim.size if dim.kind == "blocked" else 1
        steps = prod(program.sizes[a] for a in form.axes)
        affine = form.affine if form.axes and block_count(dim, n) is not None else None
        number = affine.const if affine is not None else None
        is_part = number is not None and 0 <= number <= n // size - steps
        first.append(number if number is not None and is_part else 0)
        shape.append(steps * size if is_part else n)
    return Value(ref.ref.with_shape(tuple(shape)), ref.name), tuple(first)


def _adds(op: Op) -> bool:
    return op.name == "atomic_rmw" and op.attrs["kind"] == "add"


def block_count(dim: BlockDim, n: int) -> int | None:
    """How many blocks n elements have along a dimension, if that is known."""
    if dim.kind == "squeezed":
        return n
    return -(-n // dim.size) if dim.kind == "blocked" and dim.size else None


def index_count(dim: BlockDim, n: int) -> int | None:
    """How many indices a dimension has, if that is known; others are clamped."""
    return n + sum(dim.padding) if dim.kind == "element" else block_count(dim, n)


@dataclass(frozen=True)
class Built:
    """A kernel and the refs of the program that its operands stand for."""

    kernel: Kernel
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    parts: tuple[int, ...]  # per result: number of partial sums; 1: it is whole
    own: tuple[frozenset[int], ...]  # per result: the axes that choose its block
    order: tuple[int, ...]  # the program's grid axes with several steps, slowest first
    changing: tuple[Value, ...] = ()  # results initialised by the last operands
    steps: Sorting | Reaching | None = None  # makes operands before the kernel runs
    typical: Kernel | None = None  # the kernel to estimate, if loops depend on data
    whole: Kernel | None = None  # without parts, which are for programs, not for XLA
    starts: tuple[tuple[int, ...], ...] = ()  # per result: where in its array it is

    def taking(self, refs: Collection[Value]) -> tuple[int, ...]:
        """The operands that are among some refs."""
        return tuple(n for n, ref in enumerate(self.operands) if ref in refs)


def build(
    program: Program,
    name: str,
    results: Sequence[Placement],
    order: Sequence[int],
    parts: Parts | None = None,
) -> Built:
    """The kernel that computes some of a program's results.

    Args:
        program: its code; results that are not listed are left out.
        name: of the kernel.
        results: with their placements.
        order: the grid axes, slowest first.
        parts: axes that come first among the sequential ones; each becomes parallel, or
            two axes, of which that of the parts is.
    """
    return _Build(program, name, results, order, parts or {}).run()


class _Build:
    def __init__(
        self,
        program: Program,
        name: str,
        results: Sequence[Placement],
        order: Sequence[int],
        parts: Parts,
    ):
        self.program, self.name, self.parts = program, name, parts
        self.placed = {p.ref: p for p in results}
        self.order = list(order)
        self.code = IndexCode(program.body)
        self.main = set(main_refs(program.body))
        self.windows: dict[Key, int] = {}
        self.window_attrs: list[Window] = []
        self.arrays: list[Value] = []
        self.maps: list[Block] = []
        self.blocks: list[Value] = []
        self.mapping: dict[Value, Value] = {}
        self.result_refs = {p.ref: self.result_ref(p) for p in results}

    # --- the grid ---

    def parts_of(self, placement: Placement) -> Parts:
        """Those over which a result is summed."""
        return {a: n for a, n in self.parts.items() if a not in placement.own}

    def result_ref(self, placement: Placement) -> Value:
        ref = placement.ref.ref
        counts = self.parts_of(placement).values()
        return Value(ref.with_shape((*counts, *ref.shape)), placement.ref.name)

    def grid(self) -> list[int]:
        sizes = []
        for axis in self.order:
            n = self.program.sizes[axis]
            if self.is_cut(axis):
                sizes += [self.parts[axis], n // self.parts[axis]]
            else:
                sizes.append(n)
        return sizes

    def is_cut(self, axis: int) -> bool:
        """Whether an axis is two axes of the kernel: parts, and steps of a part."""
        size = self.program.sizes[axis]
        return size > self.parts.get(axis, size)

    def semantics(self) -> list[str]:
        shared = frozenset[int].intersection(*(p.own for p in self.placed.values()))
        found = []
        for axis in self.order:
            is_parallel = axis in shared or axis in self.parts
            found.append("parallel" if is_parallel else "sequential")
            if self.is_cut(axis):
                found.append("sequential")
        return found

    def new_ids(
        self, b: Builder
    ) -> tuple[list[Value], dict[Value, Value], dict[int, Value]]:
        """Grid indices of the kernel, those of the program, and the parts' numbers"""
        ids: list[Value] = []
        known: dict[Value, Value] = {}
        parts: dict[int, Value] = {}
        for axis in self.order:
            old = self.program.body.params[axis]
            ids.append(Value(T.INDEX, old.name or f"i{axis}"))
            if axis in self.parts:
                parts[axis] = ids[-1]
            if not self.is_cut(axis):
                known[old] = ids[-1]
                continue
            ids.append(Value(T.INDEX, "step"))
            length = b.index(self.program.sizes[axis] // self.parts[axis])
            known[old] = b.add(b.mul(ids[-2], length), ids[-1])
        return ids, known, parts

    # --- windows ---

    def window(
        self, ref: Value, window: Window, indices: Sequence[Value | None]
    ) -> Value:
        """The block ref of a window; `indices` None: that dimension is shown whole."""
        keys = tuple(None if i is None else self.code.key(i) for i in indices)
        key = (ref, window, keys)
        if key not in self.windows:
            self.windows[key] = len(self.blocks)
            self.add_window(ref, window, indices)
        return self.blocks[self.windows[key]]

    def add_window(
        self, ref: Value, window: Window, indices: Sequence[Value | None]
    ) -> None:
        b = Builder()
        ids, known, parts = self.new_ids(b)
        yields = [
            b.index(0) if i is None else self.code.emit(b, i, known) for i in indices
        ]
        array = self.result_refs.get(ref, ref)
        if ref in self.placed:
            mine = [parts[axis] for axis in self.parts_of(self.placed[ref])]
            dims = [BlockDim(1, "squeezed")] * len(mine)
            window = replace(window, dims=(*dims, *window.dims))
            yields = [*mine, *yields]
        type_ = T.RefType(window.block_shape, array.ref.dtype, window.space)
        self.arrays.append(array)
        self.window_attrs.append(window)
        self.maps.append(b.block(ids, yields))
        self.blocks.append(Value(type_, array.name))

    def open_view(self, b: Builder, op: Op) -> Value:
        """What stands for a `block_view`: a window, or a part of a larger one."""
        ref, window = op.operands[0], op.attrs["window"]
        if ref in self.placed:
            kept = self.placed[ref].kept
        else:
            kept = [self.code.key(i) is not None for i in op.operands[1:]]
        dims, indices, entries, starts = [], [], [], []
        pairs = zip(window.dims, ref.ref.shape, op.operands[1:], kept, strict=True)
        for dim, n, index, is_kept in pairs:
            if is_kept:
                dims.append(dim)
                indices.append(index)
                if dim.kind != "squeezed":
                    entries.append(Span(0, dim.size))
                continue
            dims.append(_whole(dim, n))
            indices.append(None)
            index = self.mapping.get(index, index)
            if dim.kind == "squeezed":
                entries.append(At(None))
            else:
                entries.append(Span(None, dim.size))
                if dim.kind == "blocked":
                    index = b.mul(index, b.index(dim.size))
            starts.append(index)
        block = self.window(ref, replace(window, dims=tuple(dims)), indices)
        if all(kept):
            return block
        return b.subview(block, tuple(entries), starts)

    def scratch_view(self, b: Builder, op: Op) -> Value:
        """A block of scratch, as an inner pipeline shows it."""
        ref, window = op.operands[0], op.attrs["window"]
        entries, starts = [], []
        pairs = zip(window.dims, ref.ref.shape, op.operands[1:], strict=True)
        for dim, n, index in pairs:
            index = self.new(index)
            if dim.kind == "squeezed":
                entries.append(At(None))
            elif dim.kind == "blocked" and n % max(dim.size, 1) == 0:
                entries.append(Span(None, dim.size))
                index = b.mul(index, b.index(dim.size))
            else:
                raise NoBackwardKernel(
                    "blocks that extend past the end of scratch", at=op.loc
                )
            starts.append(index)
        return b.subview(self.new(ref), tuple(entries), starts)

    def whole_result(self, ref: Value) -> Value:
        dims = tuple(BlockDim(n) for n in ref.ref.shape)
        return self.window(ref, Window(dims, "out"), [None] * len(dims))

    # --- the body ---

    def run(self) -> Built:
        start = Builder()
        ids, known, _ = self.new_ids(start)
        self.mapping |= known
        for ref in self.placed:
            uses = [op for op in walk(self.program.body) if ref in op.operands]
            if any(op.name != "block_view" for op in uses):
                self.mapping[ref] = self.whole_result(ref)
        code = self.block(self.program.body)
        sums = [
            Sum(block, self.inner_ids(self.placed[ref], ids))
            for ref, placement in self.placed.items()
            for block in self.blocks_of(ref)
            if not placement.changes
        ]
        body = expand_sums(Block((), code.ops), sums)
        ops = (*start.ops, *body.ops)
        return self.finish(Block((*ids, *self.blocks), ops))

    def block(self, block: Block) -> Block:
        b = Builder()
        for op in block.ops:
            b.loc = op.loc
            if op.name == "block_view":
                is_main = op.operands[0] in self.main
                opened = self.open_view(b, op) if is_main else self.scratch_view(b, op)
                self.mapping[op.result] = opened
                continue
            op = op.with_(operands=tuple(map(self.new, op.operands)))
            if op.regions:
                op = op.with_(regions=tuple(map(self.block, op.regions)))
            b.ops.append(op)
        return Block(block.params, tuple(b.ops), tuple(map(self.new, block.yields)))

    def new(self, value: Value) -> Value:
        return self.mapping.get(value, value)

    def blocks_of(self, ref: Value) -> list[Value]:
        pairs = zip(self.blocks, self.arrays, strict=True)
        return [block for block, array in pairs if array is self.result_refs[ref]]

    def inner_ids(self, placement: Placement, ids: Sequence[Value]) -> list[Value]:
        """The grid indices along which a result's block stays the same."""
        found, pending = [], iter(ids)
        for axis in self.order:
            index = next(pending)
            if self.is_cut(axis):
                index = next(pending)
            alone = axis in self.parts and not self.is_cut(axis)
            if axis not in placement.own and not alone:
                found.append(index)
        return found

    def finish(self, body: Block) -> Built:
        refs = [r for r in main_refs(self.program.body) if r not in self.placed]
        results = tuple(self.result_refs.values())
        outside = Builder(self.program.loc)
        outside.emit(
            "pipeline",
            *self.arrays,
            regions=(*self.maps, body),
            grid=tuple(self.grid()),
            windows=tuple(self.window_attrs),
            semantics=tuple(self.semantics()),
        )
        kernel = Kernel(
            self.name,
            (*refs, *results),
            outside.block(),
            len(results),
            loc=self.program.loc,
        )
        kernel = without_idle_windows(drop_unused(kernel))
        used = set(main_refs(kernel.body))
        operands = tuple(r for r in refs if r in used)
        changing = tuple(r for r, p in self.placed.items() if p.changes)
        starts = [Value(r.ref, r.name) for r in changing]
        aliases = tuple(
            (len(operands) + n, list(self.placed).index(r))
            for n, r in enumerate(changing)
        )
        params = (*operands, *starts, *results)
        kernel = kernel.with_(params=params, aliases=aliases)
        counts = [prod(self.parts_of(p).values()) for p in self.placed.values()]
        sizes = self.program.sizes
        return Built(
            kernel,
            (*operands, *changing),
            tuple(self.placed),
            tuple(counts),
            tuple(p.own for p in self.placed.values()),
            tuple(a for a in self.order if sizes[a] > 1),
            changing,
            starts=tuple(p.start for p in self.placed.values()),
        )


def _whole(dim: BlockDim, n: int) -> BlockDim:
    """A dimension shown whole, padded for a last block past the edge."""
    if dim.kind == "squeezed":
        return BlockDim(n)
    if dim.kind == "element":
        return replace(dim, size=n + sum(dim.padding) + dim.size - 1)
    return BlockDim(-(-n // dim.size) * dim.size)


def without_idle_windows(kernel: Kernel) -> Kernel:
    """Remove windows that the body does not use."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    used = {v for inner in walk(pipeline.body) for v in inner.operands}
    new = pipeline.showing(each for each in pipeline.shown if each.block in used)
    ops = tuple(new.to_op() if o is pipeline.op else o for o in kernel.body.ops)
    return kernel.with_(body=Block((), ops))


def only(program: Program, results: Sequence[Value]) -> Program:
    """The program without its effects on other results."""
    return _only(program, frozenset(results))


@lru_cache(maxsize=64)
def _only(program: Program, results: frozenset[Value]) -> Program:
    others = set(main_refs(program.body)) - results
    return program.with_body(without_effects(program.body, others)).simplified()


def without_effects(block: Block, refs: Collection[Value] | None = None) -> Block:
    """The code without its effects on some refs; None: on any."""
    roots = Roots(block)

    def without(op: Op) -> Sequence[Op] | None:
        writes = op.name in ("atomic_rmw", "store")
        is_gone = writes and (refs is None or roots.of(op.operands[0]) in refs)
        return () if is_gone else None

    return replace_ops(block, without)
