"""Which dimensions inside a program's blocks are one dimension of its work.

`loop_dims(kernel)` follows every dimension of every block, scratch ref and tile through
the body of the kernel's pipeline. Dimensions that can only be split together are one
`LoopDim`, for example the rows of a matmul's left operand, of its result and of the
output. It is *free* if each position along it is computed from the same position of
everything else that has it: then programs can be split along it, or merged.
`partition.py` answers the same question for whole blocks, between devices; this one is
for parts of a block, and `passes/schedule/reblock.py` uses it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pallasite.errors import InternalError
from pallasite.ir.nodes import Access, At, Block, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import TILE, Effect, table
from pallasite.ir.rewrite import is_elementwise
from pallasite.ir.roles import Dot, Loop, Pipeline, Shown, While
from pallasite.passes.analysis.grid import GridInfo, analyze, find_pipeline
from pallasite.passes.analysis.memory import Roots, written_refs

MERGED = "a reshape mixes it with others"
Place = tuple[int, int]  # the number of a window, a dimension of its array
_Node = tuple[Value, int]  # a ref or tile, one of its dimensions

# Ops with effects that may run once per part of a block.
_REPEATABLE = {"store", "alloc", "for", "while", "cond", "custom", "pipeline", "delay"}


@dataclass(frozen=True, eq=False)
class LoopDim:
    """Dimensions of refs and tiles that can only be split together.

    Where a reshape merges dimensions, the first of them and the merged one are split
    together, too: an element of one is `per(value)` elements of the other.
    """

    size: int
    members: Mapping[Value, int]  # each ref and tile with it, and its dimension there
    windows: tuple[Place, ...]
    whole: str | None  # why no part of it can be computed alone, if so
    products: tuple[Op, ...]  # the dots that contract it
    spans: frozenset[Op]  # loads of a span along it from a ref that is not split
    is_twice: bool = False  # whether it is two dimensions of one ref or tile
    reduces: tuple[Op, ...] = ()  # those along it
    besides: str | None = None  # why it is whole, other than that it is reduced
    is_merged: bool = False  # it is only whole because a reshape merges it with others
    scans: tuple[Op, ...] = ()  # those along it
    held: str | None = None  # why it is whole, other than that these reduce or scan it

    def per(self, value: Value) -> int:
        """Elements of a tile for each position along the dimension."""
        return value.type.shape[self.members[value]] // self.size

    @property
    def most_per(self) -> int:
        return max(map(self.per, self.members))


class LoopDims:
    """What `loop_dims` found."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.refused = _refusal(kernel, self.pipeline)
        self._roots = Roots(self.pipeline.body)
        every = () if self.refused else tuple(_Joined(self).dims())
        self.dims = tuple(dim for dim in every if dim.windows)
        # No window shows these; loads take spans along them from larger refs.
        self.inner = tuple(dim for dim in every if not dim.windows)

    @cached_property
    def info(self) -> GridInfo:
        return analyze(self.kernel)

    @cached_property
    def written(self) -> frozenset[Value]:
        """Blocks and windowless arrays that programs may write."""
        body, pipeline = self.pipeline.body, self.pipeline
        refs = {self._roots.of(r) for op in walk(body) for r in written_refs(op)}
        outputs = {s.block for s in pipeline.shown if s.window.mode == "out"}
        kept = {*pipeline.blocks, *self.kernel.params}
        return frozenset((refs & kept) | outputs)

    def at(self, place: Place) -> LoopDim | None:
        """The dimension that a window shows at this place."""
        return next((d for d in self.dims if place in d.windows), None)

    def why_not_free(self, dim: LoopDim) -> str | None:
        """Why a dimension cannot be split between programs; None if it can."""
        if dim.whole is not None and not dim.is_merged:
            return dim.whole
        if dim.products:
            return "a matmul contracts it"
        for ref in self.written:
            if ref not in dim.members:
                return f"{ref.name or 'an output'} is written and has no such dimension"
        return self._why_not_aliased(dim)

    def _why_not_aliased(self, dim: LoopDim) -> str | None:
        """An operand and an output that alias must be split alike."""
        shown = {each.array: each for each in self.pipeline.shown}
        for i, o in self.kernel.aliases:
            pair = self.kernel.inputs[i], self.kernel.outputs[o]
            found = [shown.get(array) for array in pair]
            source, target = found
            if source is None and pair[0] not in self._used:
                continue
            if source is None or target is None:
                if any(each and each.block in dim.members for each in found):
                    return f"{pair[0].name or 'an operand'} aliases a result"
                continue
            places = {dim.members.get(each.block) for each in (source, target)}
            if len(places) > 1 or source.window.dims != target.window.dims:
                return f"{pair[0].name or 'an operand'} aliases a result"
        return None

    @cached_property
    def _used(self) -> set[Value]:
        return {v for op in walk(self.pipeline.body) for v in op.operands}

    def is_outside(self, ref: Value) -> bool:
        """Whether a ref is a whole array, without a window."""
        return self._roots.of(ref) in self.kernel.params


def loop_dims(kernel: Kernel) -> LoopDims | None:
    """The dimensions of a kernel's work; None if its body is not one pipeline."""
    try:
        return LoopDims(kernel)
    except InternalError:
        return None


def _refusal(kernel: Kernel, pipeline: Pipeline) -> str | None:
    """Why nothing in this kernel can be split, if so."""
    if kernel.level != TILE:
        return "it has explicit copies, semaphores or roles"
    before = [op for op in kernel.body.ops if op is not pipeline.op]
    for op in before:
        if op.name not in ("alloc", "constant", "load"):
            return f"'{op.name}' runs outside its grid"
    if _has_two_windows_on_what_is_written(kernel, pipeline):
        return "an array that is written has two windows"
    for op in walk(pipeline.body):
        if table()[op.name].effect is Effect.WRITE and op.name not in _REPEATABLE:
            return f"'{op.name}' would run several times"
    return None


def _has_two_windows_on_what_is_written(kernel: Kernel, pipeline: Pipeline) -> bool:
    windows: dict[Value, list[Shown]] = defaultdict(list)
    for each in pipeline.shown:
        windows[each.array].append(each)
    several = [shown for shown in windows.values() if len(shown) > 1]
    if not several:
        return False
    aliased = {kernel.inputs[i] for i, _ in kernel.aliases}
    written = Roots(pipeline.body).all_written(pipeline.body)
    return any(
        each.window.mode != "in" or each.array in aliased or each.block in written
        for shown in several
        for each in shown
    )


class _Joined:
    """Unites dimensions op by op (union-find), and notes what keeps one whole."""

    def __init__(self, found: LoopDims):
        self.found = found
        self.parent: dict[_Node, _Node] = {}
        self.held: list[tuple[_Node, str]] = []
        self.reduces: list[tuple[_Node, Op]] = []
        self.scans: list[tuple[_Node, Op]] = []
        self.products: list[tuple[_Node, Op]] = []
        self.spans: list[tuple[_Node, Op]] = []
        self.block(found.pipeline.body)

    # --- results ---

    def dims(self) -> Iterator[LoopDim]:
        members: dict[_Node, list[_Node]] = defaultdict(list)
        for node in self.nodes():
            members[self.root(node)].append(node)
        places = self.places()  # which may hold some, too
        held = {self.root(node): reason for node, reason in reversed(self.held)}
        reduces, scans = self.by_root(self.reduces), self.by_root(self.scans)
        along = {root: _runs_along(ops[0]) for root, ops in scans.items()}
        besides = {**along, **held}
        along = {root: _runs_along(ops[0]) for root, ops in reduces.items()}
        whole = {**along, **besides}
        products = self.by_root(self.products)
        spans: dict[_Node, set[Op]] = defaultdict(set)
        for node, op in self.spans:
            spans[self.root(node)].add(op)
        for root, nodes in members.items():
            windows = tuple(places[node] for node in nodes if node in places)
            sizes = {node: node[0].type.shape[node[1]] for node in nodes}
            size = min(sizes.values())
            if size < 1 or not (windows or spans[root]):
                continue
            reason = whole.get(root)
            is_twice = len(dict(nodes)) < len(nodes)
            if is_twice:
                reason = reason or "two dimensions of one tile depend on it"
            is_merged = any(n != size for n in sizes.values())
            beside = besides.get(root)
            if is_merged and size == 1:
                beside = beside or MERGED
            is_only_merged = is_merged and reason is None and beside is None
            if is_merged:
                reason = reason or MERGED
            yield LoopDim(
                size,
                dict(nodes),
                windows,
                reason,
                tuple(products[root]),
                frozenset(spans[root]),
                is_twice,
                tuple(reduces[root]),
                beside,
                is_only_merged,
                tuple(scans[root]),
                held.get(root),
            )

    def by_root(self, found: Iterable[tuple[_Node, Op]]) -> dict[_Node, list[Op]]:
        ops: dict[_Node, list[Op]] = defaultdict(list)
        for node, op in found:
            ops[self.root(node)].append(op)
        return ops

    def nodes(self) -> Iterator[_Node]:
        """Every dimension of every ref and tile, once."""
        body = self.found.pipeline.body
        allocated = [
            op.result for op in self.found.kernel.body.ops if op.name == "alloc"
        ]
        values = [*allocated, *body.params]
        for op in walk(body):
            values += op.results
            values += [p for region in op.regions for p in region.params]
        return ((v, d) for v in values for d in range(len(v.type.shape)))

    def places(self) -> dict[_Node, Place]:
        """Where the windows of the pipeline show each dimension of their blocks."""
        found: dict[_Node, Place] = {}
        for number, each in enumerate(self.found.pipeline.shown):
            kept = [d for d, b in enumerate(each.window.dims) if b.kind != "squeezed"]
            for dim, array_dim in enumerate(kept):
                found[each.block, dim] = (number, array_dim)
                kind = each.window.dims[array_dim].kind
                if kind != "blocked":
                    self.hold((each.block, dim), f"a window indexes it by {kind}")
        return found

    # --- uniting ---

    def root(self, node: _Node) -> _Node:
        path = []
        while (up := self.parent.get(node)) is not None:
            path.append(node)
            node = up
        for each in path:
            self.parent[each] = node
        return node

    def join(self, a: _Node, b: _Node) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self.parent[a] = b

    def hold(self, node: _Node, reason: str) -> None:
        self.held.append((node, reason))

    def hold_all(self, value: Value, reason: str) -> None:
        for d in range(len(value.type.shape)):
            self.hold((value, d), reason)

    def alike(self, a: Value, b: Value) -> None:
        """Unite all dimensions of two values of one shape; a scalar has none."""
        if a.type.shape == b.type.shape:
            for d in range(len(a.type.shape)):
                self.join((a, d), (b, d))
        elif a.type.shape and b.type.shape:
            for value in (a, b):
                self.hold_all(value, "its elements change in width")

    # --- ops ---

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        for region in op.regions:
            self.block(region)
        rule = _RULES.get(op.name)
        if rule is not None:
            rule(self, op)
        elif is_elementwise(op):
            for value in op.operands:
                self.alike(value, op.result)
        else:
            self.keep_whole(op)

    def keep_whole(self, op: Op) -> None:
        for value in (*op.operands, *op.results):
            self.hold_all(value, f"'{op.name}' needs all of it")

    def nothing(self, op: Op) -> None:
        """Adds no constraint: its users determine its dimensions."""

    def broadcast(self, op: Op) -> None:
        (x,) = op.operands
        for d, to in enumerate(op.attrs["dims"]):
            if x.tile.shape[d] == op.result.tile.shape[to]:
                self.join((x, d), (op.result, to))
            else:
                self.hold((x, d), "a broadcast repeats its one element")

    def reshape(self, op: Op) -> None:
        x, y = op.operands[0], op.results[0]
        for value in (x, y):
            for d, n in enumerate(value.type.shape):
                if n == 1:
                    self.hold((value, d), "a reshape may drop its one element")
        for before, after in _groups(x.type.shape, y.type.shape):
            first = [(x, before[0]), (y, after[0])] if before and after else []
            if len(before) == 1 or len(after) == 1:
                self.join(*first)
                first = []
            inner = [(x, d) for d in before[1:]] + [(y, d) for d in after[1:]]
            for node in (*first, *inner):
                self.hold(node, MERGED)

    def transpose(self, op: Op) -> None:
        for to, d in enumerate(op.attrs["perm"]):
            self.join((op.operands[0], d), (op.results[0], to))

    def slice_(self, op: Op) -> None:
        (x,), y = op.operands, op.result
        parts = zip(
            *(op.attrs[k] for k in ("starts", "limits", "strides")), strict=True
        )
        for d, (part, n) in enumerate(zip(parts, x.tile.shape, strict=True)):
            self.join_if(part == (0, n, 1), (x, d), (y, d), op)

    def join_if(self, whole: bool, x: _Node, y: _Node, op: Op) -> None:
        if whole:
            self.join(x, y)
            return
        for node in (x, y):
            self.hold(node, f"'{op.name}' selects a part of it")

    def concatenate(self, op: Op) -> None:
        for x in op.operands:
            for d in range(x.tile.rank):
                self.join_if(d != op.attrs["axis"], (x, d), (op.result, d), op)

    def pad(self, op: Op) -> None:
        x, _ = op.operands
        sides = zip(*(op.attrs[k] for k in ("low", "high", "interior")), strict=True)
        for d, side in enumerate(sides):
            self.join_if(side == (0, 0, 0), (x, d), (op.result, d), op)

    def dynamic_slice(self, op: Op) -> None:
        x, y = op.operands[0], op.result
        for d, (n, size) in enumerate(zip(x.tile.shape, y.tile.shape, strict=True)):
            self.join_if(n == size, (x, d), (y, d), op)

    def dynamic_update_slice(self, op: Op) -> None:
        x, update = op.operands[:2]
        self.alike(x, op.result)
        sizes = zip(x.tile.shape, update.tile.shape, strict=True)
        for d, (n, size) in enumerate(sizes):
            self.join_if(n == size, (x, d), (update, d), op)

    def reduce(self, op: Op) -> None:
        """Reductions, and ops that work along one dimension and keep the others."""
        (x, *_), attrs = op.operands, op.attrs
        axes = attrs["axes"] if "axes" in attrs else (attrs["axis"],)
        kept = [d for d in range(x.tile.rank) if d not in axes]
        for d in axes:
            if op.name in ("reduce", "arg_reduce"):
                self.reduces.append(((x, d), op))
            elif op.name == "scan":
                self.scans.append(((x, d), op))
                self.join((x, d), (op.result, d))
            else:
                self.hold((x, d), _runs_along(op))
        for y in op.results:
            same_rank = y.tile.rank == x.tile.rank
            for to, d in enumerate(kept):
                self.join((x, d), (y, d if same_rank else to))
            if same_rank and op.name != "scan":
                for d in axes:
                    self.hold((y, d), _runs_along(op))
        for other in op.operands[1:]:
            self.alike(x, other)

    def gather(self, op: Op) -> None:
        """Rows with indices of their own are apart; so are elements of a gather."""
        x, indices = op.operands[:2]
        is_read = op.name == "gather"
        tile = op.result if is_read else op.operands[2]
        offsets, _, _, batch, index_batch = op.attrs["dimension_numbers"]
        places = [d for d in range(tile.tile.rank) if d not in offsets]
        apart = dict(zip(index_batch, batch, strict=True))
        for k, place in enumerate(places):
            if k in apart:
                self.join((x, apart[k]), (tile, place))
            if k in apart or is_read:
                self.join((indices, k), (tile, place))
        if not is_read:
            self.alike(x, op.result)
        whole = [(x, d) for d in range(x.tile.rank) if d not in batch]
        whole += [(tile, d) for d in offsets]
        if not is_read:
            whole += [(tile, p) for k, p in enumerate(places) if k not in apart]
            whole += [(indices, k) for k in range(len(places)) if k not in apart]
        whole.append((indices, indices.tile.rank - 1))
        for node in whole:
            self.hold(node, f"'{op.name}' needs all of it")

    def dot(self, op: Op) -> None:
        parts, y = Dot.of(op), op.result
        lhs, rhs = parts.sides
        for to, (left, right) in enumerate(zip(lhs.batch, rhs.batch, strict=True)):
            self.join((lhs.value, left), (y, to))
            self.join((rhs.value, right), (y, to))
        free = [(side.value, d) for side in (lhs, rhs) for d in side.free]
        for to, node in enumerate(free, len(lhs.batch)):
            self.join(node, (y, to))
        for left, right in zip(lhs.contract, rhs.contract, strict=True):
            self.join((lhs.value, left), (rhs.value, right))
            self.products.append(((lhs.value, left), op))

    # --- memory ---

    def load(self, op: Op) -> None:
        access = Access.of(op)
        for tile in (access.mask, access.other):
            if tile is not None:
                self.alike(tile, op.result)
        outside = self.found.is_outside(access.ref)
        for d, entry, to in self.picked(access, op.result):
            if _is_whole(entry, access.ref.ref.shape[d], access.mask) and not outside:
                self.join((access.ref, d), (op.result, to))
            else:
                self.hold((access.ref, d), "a load selects a part of it")
                self.spans.append(((op.result, to), op))

    def store(self, op: Op) -> None:
        access = Access.of(op)
        value = access.value
        assert value is not None
        if access.mask is not None:
            self.alike(access.mask, value)
        for d, entry, to in self.picked(
            access, value, "a store writes it to arbitrary positions"
        ):
            whole = _is_whole(entry, access.ref.ref.shape[d], access.mask)
            self.join_if(whole, (access.ref, d), (value, to), op)

    def picked(
        self, access: Access, tile: Value, gathered: str | None = None
    ) -> Iterator[tuple[int, Span, int]]:
        """The spans of an access: ref dimension, entry, dimension of the tile.

        `gathered`: why a tile of indices cannot be split, if so.
        """
        parts = access.split_index()
        tiles = [v for e, v in parts if isinstance(e, Gather) and v is not None]
        for index in tiles:
            for d in range(index.tile.rank):
                self.join((index, d), (tile, d))
                if gathered is not None:
                    self.hold((tile, d), gathered)
        to = tiles[0].tile.rank if tiles else 0
        for d, (entry, _) in enumerate(parts):
            if isinstance(entry, Span):
                yield d, entry, to
                to += 1
            else:
                self.hold((access.ref, d), "a single element of it is selected")

    def subview(self, op: Op) -> None:
        ref, to = op.operands[0], 0
        for d, entry in enumerate(op.attrs["index"]):
            if isinstance(entry, At):
                self.hold((ref, d), "a single element of it is selected")
                continue
            whole = _is_whole(entry, ref.ref.shape[d])
            self.join_if(whole, (ref, d), (op.result, to), op)
            to += 1

    def bitcast_view(self, op: Op) -> None:
        ref, view = op.operands[0], op.result
        for d, (n, m) in enumerate(zip(ref.ref.shape, view.ref.shape, strict=True)):
            self.join_if(n == m, (ref, d), (view, d), op)

    # --- control ---

    def for_(self, op: Op) -> None:
        loop = Loop.of(op)
        groups = (loop.inits, loop.carried, loop.yields, loop.results)
        self.handed_on(*groups)

    def while_(self, op: Op) -> None:
        loop = While.of(op)
        params = loop.condition.params, loop.body.params
        self.handed_on(loop.inits, *params, loop.body.yields, op.results)

    def cond(self, op: Op) -> None:
        self.handed_on(op.results, *(branch.yields for branch in op.regions))

    def custom(self, op: Op) -> None:
        (body,) = op.regions
        self.handed_on(op.operands, body.params)
        self.handed_on(op.results, body.yields)

    def handed_on(self, *groups: Sequence[Value]) -> None:
        for first, *others in zip(*groups, strict=True):
            for other in others:
                self.alike(first, other)

    def pipeline(self, op: Op) -> None:
        inner = Pipeline.of(op)
        for value in (*inner.arrays, *inner.blocks):
            self.hold_all(value, "a pipeline inside the body iterates over it")


_RULES: dict[str, Callable[[_Joined, Op], None]] = {
    "constant": _Joined.nothing,
    "iota": _Joined.nothing,
    "alloc": _Joined.nothing,
    "delay": _Joined.nothing,
    "assume_multiple": _Joined.nothing,
    "broadcast_in_dim": _Joined.broadcast,
    "reshape": _Joined.reshape,
    "reshape_view": _Joined.reshape,
    "transpose": _Joined.transpose,
    "transpose_view": _Joined.transpose,
    "slice": _Joined.slice_,
    "concatenate": _Joined.concatenate,
    "pad": _Joined.pad,
    "rev": _Joined.reduce,
    "dynamic_slice": _Joined.dynamic_slice,
    "dynamic_update_slice": _Joined.dynamic_update_slice,
    "reduce": _Joined.reduce,
    "arg_reduce": _Joined.reduce,
    "scan": _Joined.reduce,
    "sort": _Joined.reduce,
    "top_k": _Joined.reduce,
    "dot": _Joined.dot,
    "gather": _Joined.gather,
    "scatter": _Joined.gather,
    "load": _Joined.load,
    "store": _Joined.store,
    "subview": _Joined.subview,
    "bitcast_view": _Joined.bitcast_view,
    "for": _Joined.for_,
    "while": _Joined.while_,
    "cond": _Joined.cond,
    "custom": _Joined.custom,
    "pipeline": _Joined.pipeline,
}


def _is_whole(entry: Span | Gather, n: int, mask: Value | None = None) -> bool:
    """Whether an entry selects a whole dimension.

    A start is clamped to fit, except in a masked access.
    """
    if not isinstance(entry, Span) or entry.size != n or entry.stride != 1:
        return False
    return mask is None or entry.start == 0


def _runs_along(op: Op) -> str:
    return f"'{op.name}' runs along it"


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Groups of dimensions of a reshape that map to each other, as small as possible.

    Dimensions of size one are left out.
    """
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    if 0 in before:
        yield left, right
        return
    while left:
        a, b = [left.pop(0)], [right.pop(0)]
        m, n = before[a[0]], after[b[0]]
        while m != n:
            if m < n:
                a.append(left.pop(0))
                m *= before[a[-1]]
            else:
                b.append(right.pop(0))
                n *= after[b[-1]]
        yield a, b
