"""split_accesses: tiles used in parts are loaded in parts, joined ones stored in parts.

In: `load`, elementwise ops, `slice`; and `concatenate`, elementwise ops, `store`, as
in rotary embeddings of two halves. Out: a load per slice and a store per part. On a GPU
the elements of a tile are spread over threads, so a slice or a concatenation of tiles
moves them between threads; an access at another offset is free.

Proof: an elementwise op commutes with slices and concatenations. A load is split where
it stands, so nothing is stored between its parts; the parts of a store are disjoint and
cover what the store did.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pallasite.ir.nodes import Access, Kernel, Op, Span, Value
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import (
    Rewriter,
    dead_code,
    is_elementwise,
    map_ops,
    users_of,
)

MOST_PARTS = 4  # of one tile, if they may be shorter than a transaction
MOST_LONG_PARTS = 16  # with rows of this many elements, as stencils have
LONG_ROW = 64
MOST_IN_ALL = 32  # of one tile, as parts of parts: halves of halves are never done


class Box(NamedTuple):
    """A part of a tile: first elements and ends, per dimension."""

    starts: tuple[int, ...]
    limits: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.starts, self.limits, strict=True))


def split_accesses(kernel: Kernel) -> Kernel:
    """Slices at loads, concatenations at stores, as far as they can be moved."""
    if kernel.level != TILE:
        return kernel  # its author chose who has which elements
    parts_of = _Parts({}, Counter())
    while True:
        new = dead_code(map_ops(kernel, _Split(kernel, parts_of).rewritten))
        if new is kernel:
            return kernel
        kernel = new


class _Parts(NamedTuple):
    """Which tile each part is from, and how many parts there are of each."""

    whole: dict[Value, Value]
    count: Counter[Value]

    def may_add(self, value: Value, boxes: Sequence[Box]) -> bool:
        whole = self.whole.get(value, value)
        return self.count[whole] + len(boxes) <= MOST_IN_ALL

    def add(self, value: Value, parts: Sequence[Value]) -> None:
        whole = self.whole.get(value, value)
        self.count[whole] += len(parts) - (whole is not value)
        self.whole.update(dict.fromkeys(parts, whole))


class _Split:
    def __init__(self, kernel: Kernel, parts_of: _Parts):
        self.parts_of = parts_of
        self.users = users_of(kernel.body)
        self.parts: dict[tuple[Value, Box], Value] = {}

    def rewritten(self, op: Op, b: Rewriter) -> Sequence[Value] | Value | None:
        if op.name == "slice":
            return self.parts.get((op.operands[0], _box(op)))
        if op.name == "store":
            return _stored_in_parts(op, b)
        if len(op.results) != 1 or op.result.is_ref:
            return None
        boxes = self.boxes(op.result)
        if boxes and self.parts_of.may_add(op.result, boxes):
            return self.in_boxes(op, b, boxes)
        return self.joined(op, b) if is_elementwise(op) else None

    # --- slices move up ---

    def boxes(self, value: Value) -> list[Box]:
        """The parts that a value is used in, if it is used in no other way."""
        uses = self.users.get(value, [])
        plain = all(u.name == "slice" and set(u.attrs["strides"]) == {1} for u in uses)
        found = list(dict.fromkeys(map(_box, uses))) if uses and plain else []
        is_long = all(box.shape and box.shape[-1] >= LONG_ROW for box in found)
        return (
            found if len(found) <= (MOST_LONG_PARTS if is_long else MOST_PARTS) else []
        )

    def in_boxes(self, op: Op, b: Rewriter, boxes: Sequence[Box]) -> Value | None:
        parts = list[Value]()
        for box in boxes:
            if op.name == "load":
                made = _loaded(op, b, box)
            elif is_elementwise(op):
                operands = [_part(b, v, box) for v in op.operands]
                made = b.op(op.name, *operands, **op.attrs)
            else:
                made = None
            if made is None:
                b.ops.clear()
                return None
            self.parts[op.result, box] = made
            parts.append(made)
        self.parts_of.add(op.result, parts)
        # The op itself stays until its slices are gone.
        b.ops.append(op)
        return op.result

    # --- concatenations move down ---

    def joined(self, op: Op, b: Rewriter) -> Value | None:
        """An elementwise op of a concatenation, as a concatenation of its parts."""
        shape = op.result.tile.shape
        for value in op.operands:
            join = b.producer(value, "concatenate")
            if join is None or len(self.users.get(value, ())) != 1:
                continue
            if len(join.operands) > MOST_PARTS or value.tile.shape != shape:
                continue
            boxes = _boxes_of(join)
            pieces = [
                b.op(op.name, *(_part(b, v, box) for v in op.operands), **op.attrs)
                for box in boxes
            ]
            return b.op("concatenate", *pieces, axis=join.attrs["axis"])
        return None


def _box(op: Op) -> Box:
    return Box(tuple(op.attrs["starts"]), tuple(op.attrs["limits"]))


def _boxes_of(join: Op) -> list[Box]:
    """The parts of a concatenation."""
    shape, axis = join.result.tile.shape, join.attrs["axis"]
    boxes, at = list[Box](), 0
    for piece in join.operands:
        end = at + piece.tile.shape[axis]
        starts, limits = [0] * len(shape), list(shape)
        starts[axis], limits[axis] = at, end
        boxes.append(Box(tuple(starts), tuple(limits)))
        at = end
    return boxes


def _part(b: Rewriter, value: Value, box: Box) -> Value:
    """A part of an operand; scalars that hold for all elements stay."""
    if not value.tile.shape:
        return value
    join = b.producer(value, "concatenate")
    if join is not None:
        for piece, own in zip(join.operands, _boxes_of(join), strict=True):
            if own == box:
                return piece
    return b.op(
        "slice",
        value,
        starts=box.starts,
        limits=box.limits,
        strides=(1,) * len(box.starts),
    )


def _spans(op: Op) -> list[Span] | None:
    """The spans that an unmasked access selects, if each has a fixed start."""
    access = Access.of(op)
    if access.mask is not None or access.index_operands:
        return None
    spans = [e for e in access.index if isinstance(e, Span)]
    fixed = all(span.start is not None and span.stride == 1 for span in spans)
    return spans if fixed else None


def _within(op: Op, box: Box) -> tuple[object, ...]:
    """The index of an access, narrowed to a part of the tile."""
    pairs = iter(zip(box.starts, box.limits, strict=True))

    def narrowed(entry: object) -> object:
        if not isinstance(entry, Span):
            return entry
        start, limit = next(pairs)
        return Span((entry.start or 0) + start, limit - start)

    return tuple(map(narrowed, op.attrs["index"]))


def _loaded(op: Op, b: Rewriter, box: Box) -> Value | None:
    if _spans(op) is None:
        return None
    attrs = {**op.attrs, "index": _within(op, box)}
    (made,) = b.emit("load", *op.operands, **attrs)
    return made


def _stored_in_parts(op: Op, b: Rewriter) -> Sequence[Value] | None:
    ref, value = op.operands[:2]
    join = b.producer(value, "concatenate")
    if join is None or _spans(op) is None or len(join.operands) > MOST_PARTS:
        return None
    for piece, box in zip(join.operands, _boxes_of(join), strict=True):
        if piece.tile.size:
            b.emit("store", ref, piece, **{**op.attrs, "index": _within(op, box)})
    return ()
