"""split_accesses: tiles used in parts are loaded in parts, joined ones stored in parts.

In: `load`, elementwise ops, `slice`; and `concatenate`, elementwise ops, `store`, as
in rotary embeddings of two halves. Out: a load per slice and a store per part. On a GPU
the elements of a tile are spread over threads, so a slice or a concatenation of tiles
moves them between threads; an access at another offset is free. A matmul by a load is
divided like it, as that of a cell's gates is.

Proof: an elementwise op commutes with slices and concatenations. A load is split where
it stands, so nothing is stored between its parts; the parts of a store are disjoint and
cover what the store did. A part of a product is that of the rows and columns that it
has; a product along a concatenation is the sum of those along its parts, in another
order. Tiles that are padded with zeros beside each other, and added, are concatenated:
only minus zero stays what it is. Rows that take turns (`jnp.stack`, then a reshape) are
stored some rows apart. The last element of a running sum, which blocks carry
to the next, is the sum, in another order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from pallasite.ir.build import part_start
from pallasite.ir.nodes import Access, Gather, Index, Kernel, Op, Span, Value
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import Rewriter, dead_code, is_elementwise, map_ops, users_of
from pallasite.ir.roles import Dot
from pallasite.ir.types import F32

MOST_PARTS = 4  # of one tile, if they may be shorter than a transaction
MOST_LONG_PARTS = 16  # with rows of so many bytes, as stencils have, or along products
LONG_BYTES = 64
LONG_ROW = 64  # of parts of products
LEAST_DEPTH = 16  # of a matmul
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
            value, box = op.operands[0], _box(op)
            return self.parts.get((value, box)) or _last_of_scans(b, value, box)
        if op.name == "store":
            return _stored_in_parts(op, b)
        if len(op.results) != 1 or op.result.is_ref:
            return None
        boxes = self.boxes(op.result)
        if boxes and self.parts_of.may_add(op.result, boxes):
            return self.in_boxes(op, b, boxes)
        if op.name == "dot":
            return _along_parts(op, b)
        filled = _filled(op, b) if op.name == "add" else None
        if filled is not None or not is_elementwise(op):
            return filled
        return self.joined(op, b) or _stacked(op, b)

    # --- slices move up ---

    def boxes(self, value: Value) -> list[Box]:
        """The parts that a value is used in, if it is used in no other way."""
        uses = self.users.get(value, [])
        plain = all(u.name == "slice" and set(u.attrs["strides"]) == {1} for u in uses)
        found = list(dict.fromkeys(map(_box, uses))) if uses and plain else []
        least = LONG_BYTES / value.tile.dtype.bytes
        is_long = all(_together(box.shape, value.tile.shape) >= least for box in found)
        return (
            found if len(found) <= (MOST_LONG_PARTS if is_long else MOST_PARTS) else []
        )

    def in_boxes(self, op: Op, b: Rewriter, boxes: Sequence[Box]) -> Value | None:
        parts = list[Value]()
        for box in boxes:
            if op.name == "load":
                made = _loaded(op, b, box)
            elif op.name == "dot":
                apart = _are_apart(op.result.tile.shape, boxes)
                made = _product(op, b, box) if apart else None
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


def _together(part: Sequence[int], whole: Sequence[int]) -> int:
    """Elements of a part that are side by side in a tile."""
    count = 1
    for n, m in zip(reversed(part), reversed(whole), strict=True):
        count *= n
        if n != m:
            break
    return count


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
    same = _part_of_equals(b, value, box)
    if same is not None:
        return same
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


def _part_of_equals(b: Rewriter, value: Value, box: Box) -> Value | None:
    """A part of a tile along dimensions whose elements are all equal."""
    op = b.producer(value)
    if op is not None and op.name == "constant":
        return b.constant(op.attrs["value"], value.tile.with_shape(box.shape))
    if op is None or op.name != "broadcast_in_dim":
        return None
    (x,), dims = op.operands, op.attrs["dims"]
    pairs = zip(x.tile.shape, dims, strict=True)
    if any(n not in (1, box.shape[d]) for n, d in pairs):
        return None
    return b.broadcast(x, box.shape, dims)


def _are_apart(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether parts of a tile are long, and none has an element of another."""

    def meet(one: Box, two: Box) -> bool:
        bounds = zip(*one, *two, strict=True)
        return all(max(a, c) < min(b, d) for a, b, c, d in bounds)

    sides = [pair for box in boxes for pair in zip(box.shape, shape, strict=True)]
    is_long = all(part == n or part >= LONG_ROW for part, n in sides)
    return is_long and not any(meet(a, b) for a, b in combinations(boxes, 2))


def _product(op: Op, b: Rewriter, box: Box) -> Value | None:
    """A part of a matmul's result, if only loads have to be divided for it."""
    dot, sides = Dot.of(op), list[Value]()
    for side in dot.sides:
        rank = op.result.tile.rank
        first = len(side.batch) if side is dot.lhs else rank - len(side.free)
        places = {d: n for n, d in enumerate(side.batch)}
        places |= {d: first + n for n, d in enumerate(side.free)}
        part = {d: (box.starts[p], box.limits[p]) for d, p in places.items()}
        made = _along(b, side.value, part)
        if made is None:
            return None
        sides.append(made)
    return b.op("dot", *sides, **op.attrs)


def _along(
    b: Rewriter, value: Value, part: Mapping[int, tuple[int, int]]
) -> Value | None:
    """A load between first elements and ends of dimensions; any tile, if that is all
    of it."""
    whole = [(0, n) for n in value.tile.shape]
    bounds = [part.get(d, each) for d, each in enumerate(whole)]
    if bounds == whole:
        return value
    starts, limits = zip(*bounds, strict=True)
    loaded = b.producer(value, "load") is not None
    return _part(b, value, Box(starts, limits)) if loaded else None


def _along_parts(op: Op, b: Rewriter) -> Value | None:
    """A matmul along a concatenation, as the sum of those along its parts."""
    sides = Dot.of(op).sides
    for side, other in (sides, sides[::-1]):
        join = b.producer(side.value, "concatenate")
        if join is None or join.attrs["axis"] not in side.contract:
            continue
        d = join.attrs["axis"]
        along = other.contract[side.contract.index(d)]
        boxes, wide = _boxes_of(join), op.result.tile.dtype.bits >= F32.bits
        long = all(box.shape[d] >= LEAST_DEPTH for box in boxes)
        if len(boxes) > MOST_LONG_PARTS or not wide or not long:
            continue
        total: Value | None = None
        for piece, box in zip(join.operands, boxes, strict=True):
            part = _along(b, other.value, {along: (box.starts[d], box.limits[d])})
            if part is None:
                return None
            pair = (piece, part) if side is sides[0] else (part, piece)
            share = b.op("dot", *pair, **op.attrs)
            total = share if total is None else b.add(total, share)
        return total
    return None


def _last_of_scans(b: Rewriter, value: Value, box: Box) -> Value | None:
    """A part that is the last element along scans, by reductions in their place."""
    known: dict[Value, Value | None] = {}

    def last(value: Value) -> Value | None:
        if value not in known:
            op = b.producer(value)
            known[value] = None if op is None else made(op)
        return known[value]

    def made(op: Op) -> Value | None:
        if op.name == "scan":
            return _last_of(b, op, box)
        if not is_elementwise(op):
            return None
        found = [last(v) for v in op.operands]
        if not any(v is not None for v in found):
            return None
        pairs = zip(found, op.operands, strict=True)
        parts = [_part(b, v, box) if new is None else new for new, v in pairs]
        return b.op(op.name, *parts, **op.attrs)

    return last(value)


def _last_of(b: Rewriter, scan: Op, box: Box) -> Value | None:
    (x,), axis, kind = scan.operands, scan.attrs["axis"], scan.attrs["kind"]
    starts, limits = [0] * x.tile.rank, list(x.tile.shape)
    if scan.attrs["reverse"]:
        limits[axis] = 1
    else:
        starts[axis] = limits[axis] - 1
    if box != Box(tuple(starts), tuple(limits)):
        return None
    total = b.op("reduce", x, kind=kind, axes=(axis,))
    kept = [d for d in range(x.tile.rank) if d != axis]
    return b.broadcast(total, box.shape, kept)


class _Piece(NamedTuple):
    """A tile between zeros, or all of them, along an axis of another."""

    axis: int
    start: int
    value: Value

    @property
    def end(self) -> int:
        return self.start + self.value.tile.shape[self.axis]


def _filled(op: Op, b: Rewriter) -> Value | None:
    """A sum of tiles that are padded with zeros beside each other, as joined tiles."""
    pieces = _pieces(b, op)
    if not pieces or len(pieces) < 2:
        return None
    pieces = sorted(pieces, key=lambda piece: piece.start)
    axis = pieces[0].axis
    ends = [0, *(piece.end for piece in pieces)]
    starts = [*(piece.start for piece in pieces), op.result.tile.shape[axis]]
    if ends != starts or any(piece.axis != axis for piece in pieces):
        return None
    return b.op("concatenate", *(piece.value for piece in pieces), axis=axis)


def _pieces(b: Rewriter, op: Op | None) -> list[_Piece] | None:
    if op is not None and op.name == "add":
        one, two = (_pieces(b, b.producer(v)) for v in op.operands)
        return None if one is None or two is None else one + two
    if op is None or op.name != "pad":
        return None
    zero, attrs = b.producer(op.operands[1], "constant"), op.attrs
    around = zip(attrs["low"], attrs["high"], strict=True)
    axes = [d for d, each in enumerate(around) if any(each)]
    plain = not any(attrs["interior"]) and min((*attrs["low"], *attrs["high"])) >= 0
    if zero is None or zero.attrs["value"] != 0 or len(axes) != 1 or not plain:
        return None
    return [_Piece(axes[0], attrs["low"][axes[0]], op.operands[0])]


def _within(b: Rewriter, op: Op, box: Box) -> tuple[Index, list[Value]] | None:
    """The index of an access and its operands, narrowed to a part of the tile; None
    where that is not a number of elements further."""
    access = Access.of(op)
    if access.mask is not None or any(isinstance(e, Gather) for e in access.index):
        return None
    pairs, shape = zip(box.starts, box.limits, strict=True), access.ref.ref.shape
    index, starts = list[Any](), list[Value]()
    for n, (entry, given) in zip(shape, access.split_index(), strict=True):
        if isinstance(entry, Span):
            start, limit = next(pairs)
            if limit - start != entry.size:
                size, apart = limit - start, entry.stride
                if entry.start is not None:
                    entry = Span(entry.start + apart * start, size, apart)
                else:
                    given = part_start(b, entry, given, n, b.index(start), False)
                    entry = Span(None, size, apart)
        index.append(entry)
        starts += [] if given is None else [given]
    return tuple(index), starts


def _loaded(op: Op, b: Rewriter, box: Box) -> Value | None:
    place = _within(b, op, box)
    if place is None:
        return None
    index, starts = place
    (made,) = b.emit("load", op.operands[0], *starts, **{**op.attrs, "index": index})
    return made


class _Stack(NamedTuple):
    """Tiles whose elements take turns along an axis of another."""

    axis: int
    values: tuple[Value, ...]


def _stack(b: Rewriter, value: Value) -> _Stack | None:
    """A concatenation along a dimension of size one, which is merged with the one
    before it, of rows; neighbours in a row are put together in registers."""
    fold = b.producer(value, "reshape")
    join = None if fold is None else b.producer(fold.operands[0], "concatenate")
    if join is None or not 1 < len(join.operands) <= MOST_PARTS:
        return None
    axis, shape = join.attrs["axis"], join.operands[0].tile.shape
    merged = (*shape[: axis - 1], shape[axis - 1] * len(join.operands))
    if not axis or (*merged, *shape[axis + 1 :]) != value.tile.shape:
        return None
    long = prod(shape[axis:]) * value.tile.dtype.bytes >= LONG_BYTES
    if not long or any(v.tile.shape[axis] != 1 for v in join.operands):
        return None
    values = (_without_dim(b, v, axis) for v in join.operands)
    return _Stack(axis - 1, tuple(values))


def _without_dim(b: Rewriter, value: Value, axis: int) -> Value:
    """A tile without a dimension of size one, as it was before that was added."""
    shape = value.tile.shape
    op, kept = b.producer(value), [d for d in range(len(shape)) if d != axis]
    flat = tuple(shape[d] for d in kept)
    if op is not None and op.name in ("broadcast_in_dim", "reshape"):
        is_same = op.name == "reshape" or [*op.attrs["dims"]] == kept
        if is_same and op.operands[0].tile.shape == flat:
            return op.operands[0]
    return b.reshape(value, shape=flat)


def _stacked(op: Op, b: Rewriter) -> Value | None:
    """An elementwise op of a stack, as a stack."""
    stacks = [_stack(b, v) if v.tile.shape else None for v in op.operands]
    found = next((each for each in stacks if each is not None), None)
    if found is None:
        return None
    axis, shape = found.axis, found.values[0].tile.shape
    unit = (*shape[: axis + 1], 1, *shape[axis + 1 :])
    made = list[Value]()
    for n in range(len(found.values)):
        parts = list[Value]()
        for value, stack in zip(op.operands, stacks, strict=True):
            same = b.producer(value, "constant") if value.tile.shape else None
            if stack is not None and stack.axis == axis:
                value = stack.values[n]
            elif same is not None:
                value = b.constant(same.attrs["value"], value.tile.with_shape(shape))
            elif value.tile.shape:
                return None
            parts.append(value)
        made.append(b.reshape(b.op(op.name, *parts, **op.attrs), shape=unit))
    joined = b.op("concatenate", *made, axis=axis + 1)
    return b.reshape(joined, shape=op.result.tile.shape)


def _stored_in_turns(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """Stores of the tiles of a stack, some elements apart."""
    access, value = Access.of(op), op.operands[1]
    stack = None if access.mask is not None else _stack(b, value)
    spans = [(n, e) for n, e in enumerate(access.index) if isinstance(e, Span)]
    if stack is None or len(spans) != value.tile.rank:
        return None
    place, entry = spans[stack.axis]
    if entry.start is None:
        return None
    index = list(access.index)
    count, apart = len(stack.values), entry.stride
    for n, value in enumerate(stack.values):
        size = entry.size // count
        index[place] = Span(entry.start + n * apart, size, count * apart)
        b.store(access.ref, value, tuple(index), access.index_operands)
    return ()


def _stored_in_parts(op: Op, b: Rewriter) -> Sequence[Value] | None:
    ref, value = op.operands[:2]
    join = b.producer(value, "concatenate")
    if join is None or len(join.operands) > MOST_PARTS:
        return _stored_in_turns(op, b)
    boxes = _boxes_of(join)
    for piece, box in zip(join.operands, boxes, strict=True):
        place = _within(b, op, box)
        if place is None:
            b.ops.clear()
            return None
        index, starts = place
        if piece.tile.size:
            b.emit("store", ref, piece, *starts, **{**op.attrs, "index": index})
    return ()
