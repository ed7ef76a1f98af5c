"""Copies the parts of large arrays in main memory that a kernel loads.

A TPU loads only from its vector memory. A load of part of an array in main memory
becomes a copy of that part to scratch, and a load from there. Copies move whole tiles:
lanes are copied all, and rows of narrow elements, of which a tile packs several into
one, with the tiles around them. A tile that is cut off by the end of the array is a
window of its own. Blocks of which no core has room for one, and of which a program
loads parts, are in main memory, too. Small arrays have windows already (`resident.py`).

Kernel in, Kernel out: the meaning stays the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from pallasite.backends.tpu.gathers import slice_by_slice
from pallasite.backends.tpu.schedule import MAIN_MEMORY, main_pipeline
from pallasite.backends.tpu.views import SUBLANES
from pallasite.ir.build import Builder
from pallasite.ir.levels import with_level
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
from pallasite.ir.rewrite import Rewriter, inline, map_ops
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import I32, RefType
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.target import TPUS, Tpu

ROOM = 0.9  # of on-chip memory, for the blocks of a program


def fetch_slices(kernel: Kernel, chip: Tpu | None) -> Kernel:
    """The kernel with a copy for each part of main memory that it loads."""
    op = main_pipeline(kernel)
    if op is None:
        return kernel
    chips = TPUS.values() if chip is None else (chip,)
    most = int(ROOM * max(each.vmem.bytes for each in chips))
    unwindowed = _without_large_windows(kernel, Pipeline.of(op), most)
    by_row = map_ops(unwindowed, _slices)
    ends = _Ends(by_row)
    new = map_ops(ends.kernel, ends.fetched)
    return with_level(new) if ends.copies else kernel


def _is_load(op: Op) -> bool:
    return op.name == "load" and op.operands[0].ref.space in MAIN_MEMORY


def _slices(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """Loads through index arrays: one slice after another."""
    return slice_by_slice(op, b) if _is_load(op) else None


# --- windows that do not fit ---


def _without_large_windows(kernel: Kernel, pipeline: Pipeline, most: int) -> Kernel:
    large: list[Shown] = []
    taken = sum(map(_bytes, pipeline.shown))
    for shown in sorted(pipeline.shown, key=_bytes, reverse=True):
        if taken > most and _is_loaded_in_parts(shown, pipeline.body):
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
    body = b.block((*ids, *blocks), ())
    return with_pipeline(kernel, pipeline.showing(shown, body).to_op())


def _bytes(shown: Shown) -> int:
    """Of a window, whose next block arrives while one is used."""
    block = prod(shown.window.block_shape) * shown.array.ref.dtype.bits // 8
    return 2 * block if shown.window.space in ("block", "vmem") else 0


def _is_loaded_in_parts(shown: Shown, body: Block) -> bool:
    """Whether a block is read only, by loads of parts that can be copied."""
    window, ref = shown.window, shown.array.ref
    plain = all(d.kind in ("blocked", "squeezed") for d in window.dims)
    size = prod(window.block_shape) * ref.dtype.bits // 8
    if window.mode != "in" or window.fill is not None or not plain:
        return False
    inner = zip(window.dims[-2:], ref.shape[-2:], strict=True)
    uses = [op for op in walk(body) if shown.block in op.operands]
    return all(d.size == n for d, n in inner) and all(
        op.name == "load" and _smaller(op, size) for op in uses
    )


def _smaller(op: Op, size: int) -> bool:
    tile = op.result.tile
    return 2 * tile.size * tile.dtype.bits // 8 < size


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
        elif dim.size == n:
            index.append(Span(0, n))
        else:
            index.append(Span(None, dim.size))
            operands.append(b.mul(number, b.index(dim.size)))
    return b.subview(shown.array, tuple(index), operands)


# --- loads ---


class _Ends:
    """Makes copies of loads; has windows onto the last rows of some arrays."""

    def __init__(self, kernel: Kernel):
        self.copies = 0
        self.blocks: dict[Value, Value] = {}
        pipeline = Pipeline.of(_main(kernel))
        loaded = [op.operands[0] for op in walk(pipeline.body) if _is_load(op)]
        arrays = [v for v in dict.fromkeys(loaded) if v in kernel.inputs and _is_cut(v)]
        shown = [*pipeline.shown, *(_end(pipeline, array) for array in arrays)]
        self.blocks = {s.array: s.block for s in shown[len(pipeline.shown) :]}
        self.kernel = kernel
        if arrays:
            params = (*pipeline.ids, *(s.block for s in shown))
            body = replace(pipeline.body, params=params)
            self.kernel = with_pipeline(kernel, pipeline.showing(shown, body).to_op())

    def fetched(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if not _is_load(op):
            return None
        access = Access.of(op)
        if access.ref.ref.rank < 2 or any(isinstance(e, Gather) for e in access.index):
            return None
        parts = [
            self._dim(b, access, d, *e) for d, e in enumerate(access.split_index())
        ]
        if any(part is None for part in parts):
            return None
        self.copies += 1
        picked = [part for part in parts if part is not None]
        entries, starts = [p[0] for p in picked], [p[1] for p in picked]
        held = _copied(b, access.ref, entries, [v for v in starts if v is not None])
        index = tuple(p[2] for p in picked)
        operands = [p[3] for p in picked if p[3] is not None]
        found = b.load(held, index, operands, access.mask, access.other)
        return [self._at_end(b, access, found)]

    def _dim(
        self, b: Builder, access: Access, d: int, entry: At | Span, start: Value | None
    ) -> "_Dim | None":
        """What is copied along a dimension, and what is loaded of that."""
        ref = access.ref.ref
        n, tile = ref.shape[d], _rows_of_tile(ref)
        is_point = isinstance(entry, At)
        extent, first = 1 if is_point else entry.extent, entry.start
        here = entry if is_point else Span(0, entry.size, entry.stride)
        if d == ref.rank - 1 or extent == n:
            return Span(0, n), None, entry, start
        if d < ref.rank - 2 or tile == 1:
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
        inside = b.index(first) if start is None else _inside(b, start, n - extent)
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
        inside = start if start is not None else b.index(entry.start)
        inside = _inside(b, inside, ref.shape[row] - 1)
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


def _rows_of_tile(ref: RefType) -> int:
    """Rows that are copied together: one, unless a tile packs several into one."""
    bits = max(ref.dtype.bits, 8)
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


def _inside(b: Builder, start: Value, last: int) -> Value:
    return b.clamp(b.index(0), b.cast(start, I32), b.index(last))


def _copied(
    b: Builder, array: Value, index: Sequence[Span], starts: Sequence[Value]
) -> Value:
    """Scratch with a part of an array in it."""
    shape = tuple(entry.size for entry in index)
    held = b.op("alloc", type=RefType(shape, array.ref.dtype, "vmem"))
    arrived = b.op("alloc", type=RefType((), I32, "dma_sem"))
    part = b.subview(array, tuple(index), starts)
    b.emit("copy_start", part, held, arrived, priority=0)
    b.emit("copy_wait", part, held, arrived)
    return held
