"""flat_indices: gathers and scatters along several axes, of windows, or of many.

In: any kernel. Out: those that `ops/decompose_gather.py` rejects, or makes many ops of,
are done on a flat tile; the others are left to it. Indices become positions in the flat
tile; one outside is clamped, or -1. A gather is then one of elements of a vector, which
Triton has. In a scatter all updates are compared with all positions, some updates at a
time: that needs no memory, and where updates meet, the result does not depend on
chance. Where that is many comparisons, updates are compared with each other instead,
some of each row at a time, and the last of those that meet does in memory what all of
them do: in the block that the result is stored to, or in scratch.

A gather from a tile that is loaded loads the elements that it picks instead, if the
tile is larger than shared memory should hold, or than what is read around the elements.
(Other tiles are loaded whole, in long accesses.)
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Gather, Kernel, Op, Span, Value
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import Rewriter, dead_code, is_elementwise, map_ops, users_of
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import DTYPES, I32, INDEX, RefType, TileType
from pallasite.ops.decompose_gather import (
    REDUCTIONS,
    Slices,
    index_numbers,
    left_alone,
    read_slices,
    updated_slices,
)
from pallasite.ops.decompose_tile import positions, take_range
from pallasite.ops.formula import NotApplicable
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import Roots, constant_inputs
from pallasite.target.chip import power_of_two

ELEMENTS = "triton.elements"  # a gather that `tiles.py` has
AT_ONCE = 1 << 14  # elements of the tile in which updates are compared with positions
MOST_COMPARED = 1 << 26  # in all: about a millisecond
FEW_COMPARED = 1 << 18  # beyond, memory is faster
MEETING = 1 << 12  # updates compared with each other
MOST_SCRATCH = 1 << 26  # bytes, of all programs
MOST_GATHERED = 1 << 16  # bytes; the smallest GPU has 99 KiB of shared memory
SECTOR = 32  # bytes that memory reads at least
# Ops of a decomposition: one that takes every row apart is slow to compile (256 rows of
# 64 on an H200: 22 s against 0.2 s).
MOST_OPS = 100
_ONE_BY_ONE = ((), (0,), (0,), (), ())  # dimension numbers


def flat_indices(kernel: Kernel) -> Kernel:
    """The kernel without gathers and scatters that have no short decomposition."""
    constant = _Constant(Roots(kernel), constant_inputs(kernel))
    stored = frozenset(_stored(kernel))
    programs = prod(n or 1 for n in Pipeline.of(find_pipeline(kernel)).grid)
    most = MOST_SCRATCH // max(programs, 1)
    rewrite = partial(_flattened, constant=constant, stored=stored, most=most)
    new = map_ops(kernel, rewrite)
    return new if new is kernel else dead_code(new)


def _stored(kernel: Kernel) -> Iterator[Value]:
    """What long scatters make only for a store to all of a block."""
    for value, users in users_of(kernel.body).items():
        if len(users) != 1 or users[0].name != "store" or value.is_ref:
            continue
        access = Access.of(users[0])
        shape = access.ref.ref.shape
        is_whole = covers_whole(shape, access.index) and shape == value.tile.shape
        if access.value is value and is_whole and access.mask is None:
            yield value


def _flattened(
    op: Op, b: Rewriter, constant: "_Constant", stored: frozenset[Value], most: int
) -> Sequence[Value] | Value | None:
    """`most`: bytes that a program may have as scratch."""
    if op.name == "store":
        made = b.producer(op.operands[1], "scatter")
        if made is None or made.result not in stored or not _is_in_memory(made):
            return None
        _updated(b, made, op.operands[0], constant)
        return ()
    if op.name not in ("gather", "scatter"):
        return None
    if not all(v.tile.size for v in (*op.operands, *op.results)):
        return None
    count = _decomposition_size(op)
    if count is not None and count <= MOST_OPS:
        return None
    if op.name == "scatter":
        x, is_long = op.operands[0].tile, _is_in_memory(op)
        if is_long and op.result in stored:
            return None  # the store does it
        if not is_long or x.size * x.dtype.bytes > most:
            return _scatter(b, op)
        scratch = b.op("alloc", type=RefType(x.shape, x.dtype))
        _updated(b, op, scratch, constant)
        return b.load(scratch)
    held = held_bytes(op)
    if held > min(MOST_GATHERED, op.result.tile.size * SECTOR):
        picked = _picked(b, op, constant)
        if picked is not None:
            return picked
    if held > MOST_GATHERED and count is not None:
        return None
    return _gather(b, op)


def _decomposition_size(op: Op) -> int | None:
    """How many ops `ops/decompose_gather.py` makes of one; None if it rejects it."""
    lower = table()[op.name].lower
    assert lower is not None
    b = Builder()
    try:
        lower(b, *op.operands, **op.own_attrs)
    except NotApplicable:
        return None
    return len(b.ops)


def held_bytes(gather: Op) -> int:
    """Shared memory for what is picked from, in whole powers of two."""
    x = gather.operands[0].tile
    return power_of_two(x.size) * max(x.dtype.bits, 8) // 8


# --- gather ---


def _gather(b: Builder, op: Op) -> Value:
    x, indices = op.operands
    result, attrs = op.result.tile, op.own_attrs
    numbers, sizes = attrs["dimension_numbers"], attrs["slice_sizes"]
    slices = read_slices(x.tile, result, numbers, sizes)
    place, inside = _places(b, slices, indices)
    found = elements(b, b.op("reshape", x, shape=(x.tile.size,)), place)
    if attrs["mode"] != "fill":
        return found
    return b.select(inside, found, b.constant(attrs["fill_value"], result))


class _Constant(NamedTuple):
    """Refs whose elements stay the same."""

    roots: Roots
    refs: frozenset[Value]

    def has(self, ref: Value) -> bool:
        return self.roots.of(ref) in self.refs


def _picked(b: Rewriter, op: Op, constant: _Constant) -> Value | None:
    """A gather from a tile that is loaded, as a load of the elements that it picks.

    Nothing writes to what is loaded, so it may be loaded later, and in part.
    """
    x, indices = op.operands
    load, attrs = b.producer(x), op.own_attrs
    while load is not None and load.name == "cast":
        load = b.producer(load.operands[0])
    if load is None or load.name != "load" or not constant.has(load.operands[0]):
        return None
    access = Access.of(load)
    entries = [e for e in access.index if isinstance(e, At | Span)]
    if access.mask is not None or access.index_operands:
        return None
    if len(entries) < len(access.index):
        return None
    numbers, sizes = attrs["dimension_numbers"], attrs["slice_sizes"]
    slices = read_slices(x.tile, op.result.tile, numbers, sizes)
    inside, along = _Inside(slices), dict[int, Value]()
    for d, step, asked in _steps(b, slices, indices):
        along[d] = b.add(along[d], step) if d in along else step
        inside.add(b, asked)
    zero = b.constant(0, slices.tile.with_dtype(I32))
    spans = iter(along.get(d, zero) for d in range(slices.x.rank))
    where: list[Value] = []
    for entry in entries:
        place, stride = zero, 1
        if isinstance(entry, Span):
            place, stride = next(spans), entry.stride
        place = place if stride == 1 else b.mul(place, b.like(stride, place))
        where.append(b.add(place, b.like(entry.start or 0, place)))
    found = b.load(access.ref, tuple(Gather() for _ in where), where)
    found = b.cast(found, x.tile.dtype)
    if attrs["mode"] != "fill":
        return found
    fill = b.constant(attrs["fill_value"], op.result.tile)
    return b.select(inside.everywhere(b), found, fill)


def elements(b: Builder, x: Value, place: Value) -> Value:
    """The elements of a vector at positions in range."""
    dtype, shape = x.tile.dtype, place.tile.shape
    x = as_bytes(b, x)
    found = b.op(
        "gather",
        x,
        b.op("reshape", place, shape=(*shape, 1)),
        dimension_numbers=_ONE_BY_ONE,
        slice_sizes=(1,),
        mode="clip",
        fill_value=0,
        type=TileType(shape, x.tile.dtype),
        **{ELEMENTS: True},
    )
    return b.cast(found, dtype)


def as_bytes(b: Builder, x: Value) -> Value:
    """4-bit numbers, each in its own byte; others as they are."""
    dtype = x.tile.dtype
    if dtype.bits != 4:
        return x
    return b.cast(x, DTYPES["i8" if dtype.is_signed_int else "u8"])


# --- scatter ---


def _is_in_memory(scatter: Op) -> bool:
    """Whether a scatter is done in memory."""
    x, _, updates = (v.tile for v in scatter.operands)
    is_long = x.size * power_of_two(updates.size) > FEW_COMPARED
    return is_long and x.dtype.bits >= 8 and _has_neutral(scatter)


def _has_neutral(scatter: Op) -> bool:
    dtype = scatter.operands[0].tile.dtype
    is_narrow = dtype.is_float and dtype.bits < 16
    # Not every such type has infinities.
    return not (is_narrow and scatter.attrs["kind"] in ("min", "max"))


def _lines(b: Builder, op: Op, rows: tuple[int, ...] = ()) -> tuple[Value, Value]:
    """The flat positions of a scatter's updates, -1 of those outside, and updates.

    `rows`: sizes of leading dimensions that stay. The order in which updates meet is
    that of the indices.
    """
    x, indices, updates = op.operands
    slices = updated_slices(x.tile, updates.tile, op.attrs["dimension_numbers"])
    place, inside = _places(b, slices, indices)
    if op.attrs["mode"] == "fill":
        place = b.select(inside, place, b.like(-1, place))
    order = (*slices.batch_dims, *slices.offset_dims)
    return _in_line(b, place, order, rows), _in_line(b, updates, order, rows)


def _updated(b: Rewriter, op: Op, ref: Value, constant: "_Constant") -> None:
    """Store to a ref what a scatter makes: what it updates, then updates in rounds."""
    rows = _rows(op)
    place, updates = _lines(b, op, rows)
    count = place.tile.shape[-1]
    most = MEETING // power_of_two(prod(rows))  # pairs of each row
    step = min(power_of_two(count), 1 << max(most.bit_length() - 1, 0) // 2)
    rounds = -(-count // step)
    place, updates = (
        _lengthened(b, v, n, rounds * step) for v, n in ((place, -1), (updates, 0))
    )
    b.store(ref, op.operands[0])
    if rounds == 1:
        _one_round(b, op, ref, place, updates)
        return
    made = b.producers | {v: each for each in b.ops for v in each.results}
    inside, number = Builder(b.loc), Value(INDEX, "round")
    first = inside.mul(number, inside.index(step))
    parts = _Parts(inside, made, constant, first, step)
    _one_round(inside, op, ref, *(parts.of(v, len(rows)) for v in (place, updates)))
    bounds = [b.index(n) for n in (0, rounds, 1)]
    b.emit("for", *bounds, regions=(inside.block([number]),))


def _rows(op: Op) -> tuple[int, ...]:
    """The sizes of leading dimensions of a scatter's updates along which none meet."""
    x, indices, updates = op.operands
    numbers = op.attrs["dimension_numbers"]
    slices = updated_slices(x.tile, updates.tile, numbers)
    rank = len(slices.index_batch)
    is_plain = not slices.offset_dims and slices.index_batch == tuple(range(rank))
    return updates.tile.shape[:rank] if is_plain and indices.tile.size else ()


def _one_round(b: Builder, op: Op, ref: Value, place: Value, update: Value) -> None:
    """The last of the updates of a row that meet does what all of them do."""
    x, kind, d = op.operands[0], op.attrs["kind"], place.tile.rank - 1
    pairs, before = (*place.tile.shape, place.tile.shape[d]), tuple(range(d))
    each, other = (*before, d), (*before, d + 1)
    meets = b.eq(b.broadcast(place, pairs, each), b.broadcast(place, pairs, other))
    number = b.op("iota", type=TileType(pairs, I32), dim=d + 1)
    number = b.select(meets, number, b.like(-1, number))
    last = b.op("reduce", number, kind="max", axes=(d + 1,))
    mine = b.and_(b.eq(last, positions(b, last, d)), b.ge(place, b.like(0, place)))
    where, rest = list[Value](), b.max(place, b.like(0, place))
    for n in reversed(ref.ref.shape):
        where.insert(0, b.op("rem", rest, b.like(n, rest)))
        rest = b.op("div", rest, b.like(n, rest))
    index = tuple(Gather() for _ in where)
    if kind != "set":
        every = b.broadcast(update, pairs, other)
        none = b.constant(left_alone(kind, x), every.tile)
        every = b.select(meets, every, none)
        name = REDUCTIONS.get(kind, kind)
        update = b.op("reduce", every, kind=name, axes=(d + 1,))
        update = b.op(kind, b.load(ref, index, where), update)
    b.store(ref, update, index, where, mine)


class _Parts:
    """Parts of tiles along a dimension, computed from parts of what is loaded.

    A slice of a tile that is spread over threads goes through shared memory.
    """

    def __init__(
        self,
        b: Builder,
        made: Mapping[Value, Op],
        constant: "_Constant",
        first: Value,
        size: int,
    ):
        self.b, self.made, self.constant = b, made, constant
        self.first, self.size = first, size

    def of(self, value: Value, d: int) -> Value:
        b, op, shape = self.b, self.made.get(value), list(value.tile.shape)
        shape[d] = self.size
        if op is None:
            return self.slice(value, d)
        if op.name == "load" and self.is_plain(op):
            return self.load(op, d)
        if op.name == "constant":
            return b.constant(op.attrs["value"], value.tile.with_shape(tuple(shape)))
        if op.name == "iota" and op.attrs["dim"] != d:
            type_ = value.tile.with_shape(tuple(shape))
            return b.op("iota", dim=op.attrs["dim"], type=type_)
        if op.name == "broadcast_in_dim":
            (x,), dims = op.operands, op.attrs["dims"]
            if d in dims and x.tile.shape[dims.index(d)] != 1:
                x = self.of(x, dims.index(d))
            return b.broadcast(x, shape, dims)
        if op.name == "reshape":
            (x,) = op.operands
            if x.tile.shape[: d + 1] == value.tile.shape[: d + 1]:
                return b.op("reshape", self.of(x, d), shape=tuple(shape))
        if is_elementwise(op):
            operands = [self.of(v, d) if v.tile.shape else v for v in op.operands]
            return b.op(op.name, *operands, **op.attrs)
        return self.slice(value, d)

    def is_plain(self, load: Op) -> bool:
        access = Access.of(load)
        spans = all(isinstance(e, Span) and e.stride == 1 for e in access.index)
        plain = spans and access.mask is None and not access.index_operands
        return plain and self.constant.has(access.ref)

    def load(self, op: Op, d: int) -> Value:
        index, b = list(op.attrs["index"]), self.b
        start = b.add(self.first, b.index(index[d].start))
        index[d] = Span(None, self.size)
        return b.load(op.operands[0], tuple(index), [start])

    def slice(self, value: Value, d: int) -> Value:
        b = self.b
        starts = [self.first if n == d else b.index(0) for n in range(value.tile.rank)]
        sizes = list(value.tile.shape)
        sizes[d] = self.size
        return b.op("dynamic_slice", value, *starts, sizes=tuple(sizes))


def _scatter(b: Builder, op: Op) -> Value | None:
    x, dtype, kind = op.operands[0], op.operands[0].tile.dtype, op.attrs["kind"]
    compared = x.tile.size * power_of_two(op.operands[2].tile.size)
    if compared > MOST_COMPARED or not _has_neutral(op):
        return None
    place, updates = _lines(b, op)
    flat = b.op("reshape", x, shape=(x.tile.size,))
    flat, updates = as_bytes(b, flat), as_bytes(b, updates)
    if kind == "set":
        new = _replaced(b, flat, place, updates)
    else:
        new = _compared(b, flat, place, updates, kind, left_alone(kind, flat))
    return b.op("reshape", b.cast(new, dtype), shape=x.tile.shape)


def _in_line(
    b: Builder, tile: Value, order: Sequence[int], rows: tuple[int, ...]
) -> Value:
    if [*order] != sorted(order):
        tile = b.op("transpose", tile, perm=tuple(order))
    shape = (*rows, tile.tile.size // prod(rows))
    return tile if tile.tile.shape == shape else b.op("reshape", tile, shape=shape)


def _replaced(b: Builder, x: Value, place: Value, updates: Value) -> Value:
    """Each element becomes the last update that has its position."""
    number = positions(b, place, 0)
    none = b.constant(-1, x.tile.with_dtype(I32))
    last = _compared(b, none, place, number, "max", -1)
    found = elements(b, updates, b.max(last, b.like(0, last)))
    return b.select(b.ge(last, b.like(0, last)), found, x)


def _compared(
    b: Builder,
    x: Value,
    place: Value,
    updates: Value,
    kind: str,
    no_update: int | float,
) -> Value:
    """`x` combined with the updates that have the positions of its elements.

    `no_update` changes no element. As many updates at a time as a tile may have.
    """
    size, count = x.tile.size, place.tile.size
    step = min(power_of_two(count), max(1, AT_ONCE // power_of_two(size)))
    rounds = -(-count // step)
    pairs = (step, size)

    def one_round(b: Builder, x: Value, place: Value, updates: Value) -> Value:
        where = b.broadcast(place, pairs, (0,))
        hit = b.eq(b.op("iota", type=where.tile, dim=1), where)
        update = b.broadcast(updates, pairs, (0,))
        update = b.select(hit, update, b.like(no_update, update))
        name = REDUCTIONS.get(kind, kind)
        return b.op(kind, x, b.op("reduce", update, kind=name, axes=(0,)))

    place, updates = (_lengthened(b, v, n, rounds * step) for v, n in
                      ((place, -1), (updates, 0)))  # fmt: skip
    if rounds == 1:
        return one_round(b, x, place, updates)
    inside, number, carried = Builder(b.loc), Value(INDEX, "round"), Value(x.type)
    first = inside.mul(number, inside.index(step))
    parts = [
        inside.op("dynamic_slice", v, first, sizes=(step,)) for v in (place, updates)
    ]
    new = one_round(inside, carried, *parts)
    body = inside.block([number, carried], [new])
    bounds = [b.index(n) for n in (0, rounds, 1)]
    (x,) = b.emit("for", *bounds, x, regions=(body,))
    return x


def _lengthened(b: Builder, x: Value, value: int, count: int) -> Value:
    """More elements along the last dimension."""
    more, none = count - x.tile.shape[-1], (0,) * x.tile.rank
    if not more:
        return x
    end = b.constant(value, TileType((), x.tile.dtype))
    return b.op("pad", x, end, low=none, high=(*none[1:], more), interior=none)


# --- positions ---


def _places(b: Builder, slices: Slices, indices: Value) -> tuple[Value, Value]:
    """Where each element of the slices is in a flat x, and whether its slice is in x.

    A slice that is not is moved to the nearest place.
    """
    strides = [prod(slices.x.shape[d + 1 :]) for d in range(slices.x.rank)]
    place = b.constant(0, slices.tile.with_dtype(I32))
    inside = _Inside(slices)
    for d, step, asked in _steps(b, slices, indices):
        place = b.add(place, b.mul(step, b.like(strides[d], step)))
        inside.add(b, asked)
    return place, inside.everywhere(b)


class _Inside:
    """Whether the slices that elements belong to are inside x."""

    def __init__(self, slices: Slices):
        self.slices, self.found = slices, None

    def add(self, b: Builder, asked: tuple[Value, Value] | None) -> None:
        if asked is not None:
            valid = b.eq(*asked)
            self.found = valid if self.found is None else b.and_(self.found, valid)

    def everywhere(self, b: Builder) -> Value:
        tile = self.slices.tile
        if self.found is None:
            return b.constant(True, tile.with_dtype(DTYPES["bool"]))
        return b.broadcast(self.found, tile.shape, self.slices.batch_dims)


def _steps(
    b: Builder, slices: Slices, indices: Value
) -> Iterator[tuple[int, Value, tuple[Value, Value] | None]]:
    """What is added to the elements' positions along dimensions of x.

    With it, for starts of slices, what was asked for and the nearest that is inside.
    """
    shape, batch = slices.tile.shape, slices.batch_dims
    tile = slices.tile.with_dtype(I32)
    for k, d in enumerate(slices.index_map):
        column = take_range(b, indices, indices.tile.rank - 1, k, k + 1)
        column = b.op("reshape", column, shape=indices.tile.shape[:-1])
        start = index_numbers(b, column, slices.x.shape[d])
        last = b.like(slices.x.shape[d] - slices.sizes[d], start)
        near = b.min(b.max(start, b.like(0, start)), last)
        yield d, b.broadcast(near, shape, batch), (start, near)
    for d, k in zip(slices.operand_batch, slices.index_batch, strict=True):
        yield d, b.op("iota", type=tile, dim=batch[k]), None
    for d, along in zip(slices.window, slices.offset_dims, strict=True):
        yield d, b.op("iota", type=tile, dim=along), None
