"""Copies the parts of large arrays in main memory that a kernel loads and stores.

A TPU loads and stores only its vector memory. A load of part of an array in main memory
becomes a copy of that part to scratch, and a load from there; a store, a copy to
scratch, a store to it, and a copy back. Copies move whole tiles: lanes are copied all,
and rows of narrow elements, of which a tile packs several into one, with the tiles
around them. A tile that the end of an operand cuts off is a window of its own. Blocks
for which no core has room, and of which a program uses parts, are in main memory, too.
Small arrays have windows already (`resident.py`).

Kernel in, Kernel out: the meaning stays the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from pallasite.backends.tpu.gathers import slice_by_slice
from pallasite.backends.tpu.schedule import MAIN_MEMORY, main_pipeline
from pallasite.backends.tpu.views import LANES, SUBLANES
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.levels import with_level
from pallasite.ir.nodes import (
    Access,
    At,
    BlockDim,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import Rewriter, inline, map_ops, producers_of
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import I32, INDEX, RefType, TileType
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.intervals import Facts
from pallasite.target import TPUS, Tpu

ROOM = 0.9  # of on-chip memory, for the blocks of a program
LARGEST = 8 << 20  # bytes of a tile that is copied to be loaded
USES = ("load", "store", "atomic_rmw")
FILLED = 1 << 20  # bytes that are copied at once to an array of one number


def fetch_slices(kernel: Kernel, chip: Tpu | None) -> Kernel:
    """The kernel with a copy for each part of main memory that it uses."""
    op = main_pipeline(kernel)
    if op is None:
        return kernel
    chips = TPUS.values() if chip is None else (chip,)
    most = int(ROOM * max(each.vmem.bytes for each in chips))
    unwindowed = _without_large_windows(kernel, Pipeline.of(op), most)
    by_row = map_ops(unwindowed, _slices)
    ends = _Ends(by_row)
    new = map_ops(ends.kernel, ends.copied)
    return with_level(new) if ends.copies else kernel


def _uses_main_memory(op: Op) -> bool:
    return op.name in USES and op.operands[0].ref.space in MAIN_MEMORY


def _slices(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """Accesses through index arrays: one slice after another."""
    return slice_by_slice(op, b) if _uses_main_memory(op) else None


# --- windows that do not fit ---


def _without_large_windows(kernel: Kernel, pipeline: Pipeline, most: int) -> Kernel:
    large: list[Shown] = []
    taken = sum(map(_bytes, pipeline.shown))
    for shown in sorted(pipeline.shown, key=_bytes, reverse=True):
        if taken > most and _is_used_in_parts(shown, pipeline):
            large.append(shown)
            taken -= _bytes(shown)
    if taken > most or not large:
        return kernel
    b = Builder(pipeline.op.loc)
    ids = tuple(Value(v.type, v.name) for v in pipeline.ids)
    shown = [s for s in pipeline.shown if s not in large]
    blocks = [Value(s.block.type, s.block.name) for s in shown]
    seen = dict(zip((s.block for s in shown), blocks, strict=True))
    parts = {s.block: _part(b, s, ids) for s in large}
    seen |= parts
    inline(b, pipeline.body, [*ids, *(seen[v] for v in pipeline.blocks)])
    body = map_ops(b.block((*ids, *blocks), ()), _view_of_main_memory)
    new = pipeline.showing(shown, body)
    if any(each.window.mode == "out" for each in large):
        new = new.with_(semantics=("arbitrary",) * len(new.semantics))
    return with_pipeline(kernel, new.to_op())


def _view_of_main_memory(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """A view of what was a block, with the type that it has now."""
    if op.name != "subview" or op.operands[0].ref.space == op.result.ref.space:
        return None
    return [b.subview(op.operands[0], op.attrs["index"], op.operands[1:])]


def _bytes(shown: Shown) -> int:
    """Of a window, whose next block arrives while one is used."""
    block = prod(shown.window.block_shape) * shown.array.ref.dtype.bits // 8
    return 2 * block if shown.window.space in ("block", "vmem") else 0


def _is_used_in_parts(shown: Shown, pipeline: Pipeline) -> bool:
    """Whether all that happens to a block are accesses that can be of its array."""
    window, ref, body = shown.window, shown.array.ref, pipeline.body
    sizes = list(zip(window.dims, ref.shape, strict=True))
    made = producers_of(body)
    seen = {shown.block}
    for op in walk(body):
        if op.name == "subview" and op.operands[0] in seen:
            seen.add(op.result)
    uses = [op for op in walk(body) if seen.intersection(op.operands)]
    uses = [op for op in uses if op.name != "subview"]
    if not all(_is_part(op, seen, made) for op in uses):
        return False
    if any(d.kind != "squeezed" and d.size < n for d, n in sizes[-2:]):
        return False
    if all(d.kind in ("blocked", "squeezed") and n % d.size == 0 for d, n in sizes):
        return True  # a fill is of what extends past the edge
    return (
        len(seen) == 1
        and _is_all(shown)
        and all(_is_inside(op, ref, pipeline, made) for op in uses)
    )


def _is_all(shown: Shown) -> bool:
    """Whether a block is its array, and what extends past its end."""
    made = {v: op for op in shown.index_map.ops for v in op.results}
    first = [made.get(v) for v in shown.index_map.yields]
    zero = all(op is not None and op.attrs.get("value") == 0 for op in first)
    pairs = zip(shown.window.dims, shown.array.ref.shape, strict=True)
    return zero and all(
        d.kind in ("blocked", "element") and d.size >= n and not d.padding[0]
        for d, n in pairs
    )


def _is_inside(
    op: Op, ref: RefType, pipeline: Pipeline, made: Mapping[Value, Op]
) -> bool:
    """Whether an access to a block that extends past its array stays in the array."""
    if _is_start(op, made):
        return True
    facts = Facts()
    facts.note_grid(pipeline.ids, pipeline.grid)
    facts.note_block(pipeline.body)
    for (entry, start), n in zip(Access.of(op).split_index(), ref.shape, strict=True):
        if isinstance(entry, Gather):
            return False
        last = n - (1 if isinstance(entry, At) else entry.extent)
        if start is not None and not facts.of(start).within(0, last):
            return False
        if start is None and (entry.start or 0) > last:
            return False
    return True


def _is_part(op: Op, refs: set[Value], made: Mapping[Value, Op]) -> bool:
    """Whether an op accesses one of these refs, and no large part of it as one tile."""
    if op.name not in USES or op.operands[0] not in refs:
        return False
    tile = (op.result if op.results else op.operands[1]).tile
    return tile.size * tile.dtype.bits // 8 <= LARGEST or _is_start(op, made)


def _is_start(op: Op, made: Mapping[Value, Op]) -> bool:
    """Whether a store fills a ref with one number."""
    if op.name != "store" or Access.of(op).mask is not None:
        return False
    value = made.get(op.operands[1])
    sizes = zip(op.operands[1].tile.shape, op.operands[0].ref.shape, strict=False)
    whole = op.operands[1].tile.rank == op.operands[0].ref.rank
    whole &= all(n >= size for n, size in sizes)
    return whole and value is not None and value.name == "constant"


def _part(b: Builder, shown: Shown, ids: Sequence[Value]) -> Value:
    """A block as a part of its array."""
    index: list[At | Span] = []
    operands: list[Value] = []
    numbers = inline(b, shown.index_map, ids)
    for dim, n, number in zip(
        shown.window.dims, shown.array.ref.shape, numbers, strict=True
    ):
        if dim.kind == "squeezed":
            index.append(At())
            operands.append(number)
        elif dim.size >= n:
            index.append(Span(0, n))
        else:
            index.append(Span(None, dim.size))
            operands.append(b.mul(number, b.index(dim.size)))
    return b.subview(shown.array, tuple(index), operands)


# --- loads ---


class _Ends:
    """Makes accesses of copies; has windows onto the last rows of some operands."""

    def __init__(self, kernel: Kernel):
        self.copies = 0
        self.blocks: dict[Value, Value] = {}
        pipeline = Pipeline.of(_main(kernel))
        uses = [op for op in walk(pipeline.body) if _uses_main_memory(op)]
        loaded = dict.fromkeys(op.operands[0] for op in uses)
        written = {op.operands[0] for op in uses if op.name != "load"}
        written |= {kernel.inputs[operand] for operand, _ in kernel.aliases}
        constant = [v for v in loaded if v in kernel.inputs and v not in written]
        arrays = [v for v in constant if _is_cut(v)]
        shown = [*pipeline.shown, *(_end(pipeline, array) for array in arrays)]
        self.blocks = {s.array: s.block for s in shown[len(pipeline.shown) :]}
        self.kernel = kernel
        if arrays:
            params = (*pipeline.ids, *(s.block for s in shown))
            body = replace(pipeline.body, params=params)
            self.kernel = with_pipeline(kernel, pipeline.showing(shown, body).to_op())

    def copied(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        """An access to main memory as one to scratch, between copies."""
        if not _uses_main_memory(op):
            return None
        access = Access.of(op)
        if not access.index:
            return None
        if _is_start(op, b.producers):
            self.copies += 1
            _fill(b, access.ref, op.operands[1])
            return []
        dims = enumerate(access.split_index())
        parts = [self._dim(b, access, d, *each) for d, each in dims]
        picked = [part for part in parts if part is not None]
        if len(picked) < len(parts):
            return None
        self.copies += 1
        starts = [v for _, v, _, _ in picked if v is not None]
        copy = _Copy(b, access.ref, [p[0] for p in picked], starts)
        if not _overwrites(op, access, copy):
            copy.run(inward=True)
        index = tuple(p[2] for p in picked)
        operands = tuple(p[3] for p in picked if p[3] is not None)
        here = replace(access, ref=copy.held, index=index, index_operands=operands)
        attrs = {**op.attrs, "index": index}
        found = b.emit(op.name, *access_operands(here), **attrs)
        if op.name == "load":
            return [self._at_end(b, access, *found)]
        copy.run(inward=False)
        return found

    def _dim(
        self,
        b: Rewriter,
        access: Access,
        d: int,
        entry: At | Span | Gather,
        start: Value | None,
    ) -> "_Dim | None":
        """What is copied along a dimension, and what is loaded of that."""
        if isinstance(entry, Gather):
            return None
        ref = access.ref.ref
        n, tile = ref.shape[d], _rows_of_tile(ref)
        is_point = isinstance(entry, At)
        extent, first = 1 if is_point else entry.extent, entry.start
        here = entry if is_point else Span(0, entry.size, entry.stride)
        if extent == n or (d and d == ref.rank - 1):
            return Span(0, n), None, entry, start
        if d < ref.rank - 2 or tile == 1 or _is_aligned(b, start, extent, tile):
            if start is None:
                return Span(first, extent), None, _from(here, 0), None
            inside = _inside(b, start, n - extent)
            if access.mask is None:
                return Span(None, extent), inside, _from(here, 0), None
            return Span(None, extent), inside, _from(here, None), b.sub(start, inside)
        whole = n // tile * tile
        if whole < tile or access.mask is not None:
            return None
        if n % tile and not (is_point and access.ref in self.blocks):
            return None
        size = min(-(-(extent + tile - 1) // tile) * tile, whole)
        inside = _first(b, entry, start, n - extent)
        number = b.min(b.div(inside, b.index(tile)), b.index((whole - size) // tile))
        base = b.mul(number, b.index(tile))
        return Span(None, size), base, _from(here, None), b.sub(inside, base)

    def _at_end(self, b: Builder, access: Access, found: Value) -> Value:
        """What was loaded, or the row where it is in the tile that the end cuts off."""
        end = self.blocks.get(access.ref)
        if end is None:
            return found
        ref = access.ref.ref
        row = ref.rank - 2
        entry, start = access.split_index()[row]
        whole = ref.shape[row] // _rows_of_tile(ref) * _rows_of_tile(ref)
        assert not isinstance(entry, Gather)
        inside = _first(b, entry, start, ref.shape[row] - 1)
        past = _inside(b, b.sub(inside, b.index(whole)), ref.shape[row] - whole - 1)
        index, operands = [], []
        for d, (other, operand) in enumerate(access.split_index()):
            index.append(At() if d == row else other)
            operands += [past] if d == row else [] if operand is None else [operand]
        last = b.load(end, tuple(index), operands)
        at_end = b.broadcast(b.ge(inside, b.index(whole)), found.tile.shape)
        return b.select(at_end, last, found)


_Dim = tuple[Span, Value | None, At | Span, Value | None]


def _main(kernel: Kernel) -> Op:
    op = main_pipeline(kernel)
    assert op is not None
    return op


def _is_aligned(b: Rewriter, start: Value | None, extent: int, tile: int) -> bool:
    """Whether a part is of whole tiles."""
    made = None if start is None else b.producer(start, "mul")
    if made is None or extent % tile:
        return False
    by = [b.producer(v, "constant") for v in made.operands]
    return any(c is not None and c.attrs["value"] % tile == 0 for c in by)


def _rows_of_tile(ref: RefType) -> int:
    """Rows that are copied together: one, unless a tile packs several into one.

    A vector is copied by whole tiles of its own.
    """
    bits = max(ref.dtype.bits, 8)
    if ref.rank == 1:
        return SUBLANES * LANES * max(32 // bits, 1)
    return 1 if bits >= 32 else SUBLANES * 32 // bits


def _is_cut(array: Value) -> bool:
    ref = array.ref
    return ref.rank == 2 and ref.shape[0] % _rows_of_tile(ref) != 0


def _end(pipeline: Pipeline, array: Value) -> Shown:
    """A window onto the rows of the tile that the end of an array cuts off."""
    ref = array.ref
    rows = _rows_of_tile(ref)
    window = Window((BlockDim(rows), BlockDim(ref.shape[1])), "in", buffers=1)
    b = Builder(pipeline.op.loc)
    ids = tuple(Value(v.type, v.name) for v in pipeline.ids)
    index_map = b.block(ids, [b.index(ref.shape[0] // rows), b.index(0)])
    block = Value(RefType(window.block_shape, ref.dtype, "block"), array.name)
    return Shown(array, window, index_map, block)


def _from(entry: At | Span, start: int | None) -> At | Span:
    return replace(entry, start=start)


def _first(b: Builder, entry: At | Span, start: Value | None, last: int) -> Value:
    """Where an entry of an index starts."""
    return b.index(entry.start or 0) if start is None else _inside(b, start, last)


def _inside(b: Builder, start: Value, last: int) -> Value:
    return b.clamp(b.index(0), b.as_index(start), b.index(last))


def _overwrites(op: Op, access: Access, copy: "_Copy") -> bool:
    """Whether a store leaves nothing of what is copied as it was."""
    if op.name != "store" or access.mask is not None or access.value is None:
        return False
    return access.value.tile.size == prod(copy.shape)


class _Copy:
    """Part of an array in main memory, and scratch for it."""

    def __init__(
        self, b: Builder, array: Value, index: Sequence[Span], starts: Sequence[Value]
    ):
        self.b, self.shape = b, tuple(entry.size for entry in index)
        kind = RefType(self.shape, array.ref.dtype, "vmem")
        self.held = b.op("alloc", type=kind)
        self.arrived = b.op("alloc", type=RefType((), I32, "dma_sem"))
        self.part = b.subview(array, tuple(index), starts)

    def run(self, inward: bool) -> None:
        pair = (self.part, self.held) if inward else (self.held, self.part)
        self.b.emit("copy_start", *pair, self.arrived, priority=0)
        self.b.emit("copy_wait", *pair, self.arrived)


def _fill(b: Rewriter, array: Value, value: Value) -> None:
    """Copy one number to all of an array."""
    ref, number = array.ref, b.producers[value].attrs["value"]
    dim = 0
    n, line = ref.shape[dim], prod(ref.shape) // ref.shape[dim] * ref.dtype.bits // 8
    tile = SUBLANES * LANES * 4 if ref.rank == 1 else SUBLANES * 4
    rows = max(FILLED // line // tile * tile, tile if ref.rank < 3 else 1)
    rows, rest = min(rows, n), n % min(rows, n)
    shape = (*ref.shape[:dim], rows, *ref.shape[dim + 1 :])
    filled = b.constant(number, TileType(shape, ref.dtype))
    whole = [Span(0, size) for size in ref.shape]

    def fill(c: Builder, held: Value, first: Value | int, size: int) -> None:
        index = [*whole]
        static = isinstance(first, int)
        index[dim] = Span(first if static else None, size)
        copy = _Copy(c, array, index, [] if static else [first])
        copy.held = held
        copy.run(inward=False)

    held = b.op("alloc", type=RefType(shape, ref.dtype, "vmem"))
    b.store(held, filled)
    inner, step = Builder(b.loc), Value(INDEX, "part")
    fill(inner, held, inner.mul(step, inner.index(rows)), rows)
    bounds = (b.index(0), b.index(n // rows), b.index(1))
    b.emit("for", *bounds, regions=(inner.block((step,), ()),))
    if rest:
        part = [Span(0, size) for size in shape]
        part[dim] = Span(0, rest)
        fill(b, b.subview(held, tuple(part)), n - rest, rest)
