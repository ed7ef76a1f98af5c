"""Ops on refs: load, store, atomics, views, scratch, copies, semaphores.

A load without mask or gather is a view of the memory and copies nothing until that
memory is about to change. No index, however wrong, leaves the ref: starts are clamped;
gathered and masked elements are clamped when read and dropped when written.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm import atomics, scalars, vector_loops
from pallasite.backends.cpu.llvm.values import Lanes
from pallasite.backends.cpu.llvm.writer import TRUE, Function, Val, integer
from pallasite.backends.cpu.ops import arithmetic
from pallasite.backends.cpu.tiles import reinterpret, tiles
from pallasite.backends.cpu.tiles.tiles import Buffer, Indices, Ref, Root, Tile
from pallasite.ir.nodes import Access, At, Gather, Op, Span, Value
from pallasite.ir.types import RefType

# The position of an element in the ref, and whether the access may touch it.
Place = Callable[[Indices], tuple[list[Val], Val]]


def _is_plain(access: Access) -> bool:
    """Whether the access selects a box, without mask or gather."""
    gathers = any(isinstance(entry, Gather) for entry in access.index)
    return access.mask is None and not gathers


def _start(e: Emitter, entry: At | Span, operand: Value | None, n: int) -> Val:
    """Where a box starts along one dimension, clamped to fit."""
    if operand is None:
        return integer(entry.start or 0)
    extent = entry.extent if isinstance(entry, Span) else 1
    return e.f.clamp(e.index(operand), integer(0), integer(max(n - extent, 0)))


def box(e: Emitter, ref: Ref, access: Access) -> Buffer:
    """The part of a ref's memory that a plain access selects."""
    assert ref.buffer is not None, "whose elements are reached one by one"
    starts, strides = [], []
    entries = access.split_index()
    for (entry, operand), n, stride in zip(
        entries, ref.shape, ref.buffer.strides, strict=True
    ):
        assert not isinstance(entry, Gather)
        starts.append(_start(e, entry, operand, n))
        if isinstance(entry, Span):
            strides.append(e.f.mul(stride, integer(entry.stride)))
    offset = e.f.inner(starts, ref.buffer.strides)
    pointer = e.f.element(ref.buffer.pointer, scalars.memory(ref.dtype), offset)
    return replace(ref.buffer, pointer=pointer, strides=tuple(strides))


def picked(e: Emitter, ref: Ref, access: Access, shape: Sequence[int]) -> Tile:
    """What a plain access selects: a view of memory, where a view can express it."""
    if ref.buffer is not None:
        return Tile(tuple(shape), ref.dtype, box(e, ref, access))
    if 0 in ref.shape:
        return tiles.splat(shape, ref.dtype, scalars.zero(ref.dtype))
    place = places(e, ref, access)
    element = lambda indices: ref.read(e.f, place(indices)[0])
    return tiles.formula(shape, ref.dtype, element, [ref.tile])


def places(e: Emitter, ref: Ref, access: Access, keeps_lanes: bool = False) -> Place:
    """Element-by-element addressing, for all but boxes of plain memory.

    Places outside become the nearest inside. `keeps_lanes`: consecutive lanes do not,
    so that they stay consecutive; whoever accesses them leaves out those outside.
    """
    f = e.f
    entries = access.split_index()
    masked = access.mask is not None
    rank = _gathered_rank(access)
    starts = {
        d: (_masked_start if masked else _start)(e, entry, operand, n)
        for d, ((entry, operand), n) in enumerate(zip(entries, ref.shape, strict=True))
        if not isinstance(entry, Gather)
    }

    def place(indices: Indices) -> tuple[list[Val], Val]:
        spans = iter(indices[rank:])
        coordinates, inside = [], TRUE
        for d, ((entry, operand), n) in enumerate(zip(entries, ref.shape, strict=True)):
            if isinstance(entry, Gather):
                assert operand is not None
                picked = e.element(operand)(indices[:rank])
                where = scalars.index(f, picked, operand.tile.dtype)
            elif isinstance(entry, Span):
                where = f.add(starts[d], f.mul(next(spans), integer(entry.stride)))
            else:
                where = starts[d]
            if isinstance(entry, Gather) or (masked and operand is not None):
                inside = f.both(inside, f.compare("icmp ult", where, integer(n)))
                if not (keeps_lanes and isinstance(where, Lanes)):
                    where = f.clamp(where, integer(0), integer(n - 1))
            coordinates.append(where)
        return coordinates, inside

    return place


def _masked_start(e: Emitter, entry: At | Span, operand: Value | None, n: int) -> Val:
    """Where a masked box starts, clamped to just past either end."""
    if operand is None:
        return integer(entry.start or 0)
    extent = entry.extent if isinstance(entry, Span) else 1
    return e.f.clamp(e.index(operand), integer(-extent), integer(n))


def emit_load(e: Emitter, op: Op) -> None:
    access, type = Access.of(op), op.result.tile
    ref = e.ref(access.ref)
    if _is_plain(access):
        e.define_lazy(op, picked(e, ref, access, type.shape))
        return
    nothing = scalars.zero(type.dtype)
    if 0 in ref.shape:
        e.define_lazy(op, tiles.splat(type.shape, type.dtype, nothing))
        return
    _settle_indices(e, access)
    place = places(e, ref, access, keeps_lanes=ref.buffer is not None)
    mask = e.element(access.mask) if access.mask is not None else None
    other = e.element(access.other) if access.other is not None else lambda _: nothing

    def element(indices: Indices) -> Val:
        value = _read_nearest(e.f, ref, *place(indices))
        return (
            value if mask is None else e.f.select(mask(indices), value, other(indices))
        )

    operands = [ref.tile, *e.tiles_of(op.operands[1:])]
    e.define_lazy(op, tiles.formula(type.shape, type.dtype, element, operands))


def _read_nearest(f: Function, ref: Ref, where: list[Val], inside: Val) -> Val:
    """The elements at `where`; consecutive lanes may be beyond the ref's ends.

    The first and the last element take the place of what is beyond them. A gather of
    clamped places would read each lane by itself.
    """
    along = next((d for d, i in enumerate(where) if isinstance(i, Lanes)), None)
    if along is None or not inside.count:  # not `inside`: others are clamped
        return ref.read(f, where)
    index, n = where[along], ref.shape[along]
    with f.where(f.compare("icmp ult", index, integer(n))):
        value = ref.read(f, where)
    for side, end in (("slt", integer(0)), ("sgt", integer(n - 1))):
        nearest = ref.read(f, [*where[:along], end, *where[along + 1 :]])
        beyond = f.compare(f"icmp {side}", index, end)
        value = f.select(beyond, nearest, value)
    return value


def _settle_indices(e: Emitter, access: Access) -> None:
    """Index tiles are read once per element of the spans: store them first.

    Not tiles of an outer block: their copy would not be found again.
    """
    for tile in e.tiles_of(access.index_operands):
        if tile.scope == e.scope.number:
            e.stored(tile)


def emit_store(e: Emitter, op: Op) -> None:
    access = Access.of(op)
    ref, value = e.ref(access.ref), access.value
    assert value is not None
    e.before_write(ref.root, e.scope.position + 1)
    if _is_plain(access) and ref.buffer is not None:
        store_tile(e, box(e, ref, access), e.as_tile(value))
        return
    _settle(e, op, ref.root)
    store_each(e, ref, access, e.as_tile(value))


def store_each(e: Emitter, ref: Ref, access: Access, tile: Tile) -> None:
    """Store a tile that does not read the ref's memory, a vector at a time.

    The elements of a slice are distinct, so that their order does not matter.
    """
    if 0 in ref.shape:
        return
    place = places(e, ref, access, keeps_lanes=ref.buffer is not None)
    rank = len(tile.shape) if ref.buffer is None else _gathered_rank(access)

    def body(indices: Indices) -> None:
        where, touched = place(indices)
        touched = _allowed(e, access, indices, touched)
        number = tile.at(e.f, indices)
        with e.f.where(touched):
            ref.write(e.f, where, number)

    with e.f.nest(tile.shape[:rank]) as outer:
        inner = tile.shape[rank:]
        vector_loops.each(e.f, inner, lambda indices: body([*outer, *indices]))


def _gathered_rank(access: Access) -> int:
    """How many dimensions of the tile are those of index arrays, the first ones."""
    entries = access.split_index()
    return next((v.tile.rank for c, v in entries if v and isinstance(c, Gather)), 0)


def store_tile(e: Emitter, target: Buffer, tile: Tile) -> None:
    """Store a tile, through a copy if it would read elements already overwritten."""
    if not tile.may_overwrite(target):
        tile = Tile(tile.shape, tile.dtype, e.force(tile))
    e.fill(target, tile)


def _settle(e: Emitter, op: Op, root: Root) -> None:
    """Evaluate operands that read the memory about to change, or are concatenations."""
    _settle_indices(e, Access.of(op))
    for tile in e.tiles_of(op.operands[1:]):
        if root in tile.reads() or tile.parts:
            e.force(tile)


def _allowed(e: Emitter, access: Access, indices: Indices, inside: Val) -> Val:
    if access.mask is None:
        return inside
    return e.f.both(e.element(access.mask)(indices), inside)


def emit_atomic(e: Emitter, op: Op) -> None:
    """Read, combine, write, per element; atomically if threads may interfere."""
    access, type = Access.of(op), op.result.tile
    ref = e.ref(access.ref)
    e.before_write(ref.root, e.scope.position + 1)
    is_used = e.last_use(op.result) >= 0
    result = e.result_buffer(op) if type.rank and is_used else None
    if 0 in ref.shape:
        nothing = scalars.zero(type.dtype)
        e.define_lazy(op, tiles.splat(type.shape, type.dtype, nothing))
        return
    _settle(e, op, ref.root)
    # Only this thread writes a ref accessed by elements: see `parallel_units.py`.
    is_shared = ref.root in e.shared_roots and ref.buffer is not None
    if type.rank and not (
        is_used or is_shared or access.mask or op.name == "atomic_cas"
    ):
        _update_slices(e, op, ref, access)
        return
    place = places(e, ref, access)
    with e.f.nest(type.shape) as indices:
        where, touched = place(indices)
        touched = _allowed(e, access, indices, touched)
        update = lambda old, i=indices: _updated(e, op, access, old, i)
        if is_shared:
            assert ref.buffer is not None
            address = ref.buffer.address(e.f, ref.dtype, where)
            old = atomics.update(e.f, ref.dtype, address, touched, update)
        else:
            old = ref.read(e.f, where)
            new, wanted = update(old)
            with e.f.when(e.f.both(touched, wanted)):
                ref.write(e.f, where, new)
        if result is not None:
            there = result.address(e.f, type.dtype, indices)
            scalars.store(e.f, type.dtype, old, there)
    if is_used:
        e.define(op.result, Tile(type.shape, type.dtype, result) if result else old)


def _update_slices(e: Emitter, op: Op, ref: Ref, access: Access) -> None:
    """Update one slice per gathered index, in order.

    The elements of a slice are distinct, so that it is updated a vector at a time.
    """
    place, shape = places(e, ref, access), op.result.tile.shape
    rank = _gathered_rank(access)
    with e.f.nest(shape[:rank]) as outer:
        _, touched = place([*outer, *[integer(0)] * (len(shape) - rank)])

        def update(inner: Indices) -> None:
            where, _ = place([*outer, *inner])
            old = ref.tile.at(e.f, where)
            new, _ = _updated(e, op, access, old, [*outer, *inner])
            if ref.buffer is None:
                ref.write(e.f, where, new)
                return
            address = ref.buffer.address(e.f, ref.dtype, where)
            scalars.store(e.f, ref.dtype, new, address)

        with e.f.when(touched):
            if ref.buffer is None:
                with e.f.nest(shape[rank:]) as inner:
                    update(inner)
            else:
                vector_loops.each(e.f, shape[rank:], update)


def _updated(
    e: Emitter, op: Op, access: Access, old: Val, indices: Indices
) -> tuple[Val, Val]:
    """What an atomic stores, and whether it does."""
    assert access.value is not None
    value, dtype = e.element(access.value)(indices), access.value.tile.dtype
    if op.name == "atomic_cas":
        assert access.compare is not None
        expected = e.element(access.compare)(indices)
        old_bits, bits = (scalars.to_bits(e.f, dtype, v) for v in (old, expected))
        return value, e.f.compare("icmp eq", old_bits, bits)
    if op.attrs["kind"] == "xchg":
        return value, TRUE
    return arithmetic.combine(e.f, op.attrs["kind"], dtype, old, value), TRUE


# --- views and scratch ---


def emit_subview(e: Emitter, op: Op) -> None:
    access = Access.of(op)
    ref, shape = e.ref(access.ref), op.result.ref.shape
    if ref.buffer is not None:
        e.define(op.result, Ref(shape, ref.dtype, box(e, ref, access)))
        return
    place = places(e, ref, access)
    e.define(op.result, ref.moved(e.f, shape, lambda indices: place(indices)[0]))


def emit_transpose_view(e: Emitter, op: Op) -> None:
    ref, perm, shape = e.ref(op.operands[0]), op.attrs["perm"], op.result.ref.shape
    if ref.buffer is None:
        order = [perm.index(d) for d in range(len(perm))]
        permute = lambda indices: [indices[d] for d in order]
        e.define(op.result, ref.moved(e.f, shape, permute))
        return
    strides = tuple(ref.buffer.strides[d] for d in perm)
    buffer = Buffer(ref.buffer.pointer, strides, ref.root)
    e.define(op.result, Ref(shape, ref.dtype, buffer))


def emit_reshape_view(e: Emitter, op: Op) -> None:
    ref, shape = e.ref(op.operands[0]), op.result.ref.shape
    tile = tiles.reshape(e.f, ref.tile, shape)
    if tile.buffer is not None:
        e.define(op.result, Ref(shape, ref.dtype, tile.buffer))
        return
    regroup = lambda indices: tiles.unravel(e.f, ref.shape, shape, indices)
    e.define(op.result, ref.moved(e.f, shape, regroup))


def emit_bitcast_view(e: Emitter, op: Op) -> None:
    ref, type = e.ref(op.operands[0]), op.result.ref
    same_width = ref.dtype.bits == type.dtype.bits
    source = ref.source
    if not same_width or ref.buffer is None:
        source = reinterpret.packed_rows(e.f, ref, type.dtype)
    e.define(op.result, Ref(type.shape, type.dtype, source))


def emit_alloc(e: Emitter, op: Op) -> None:
    type: RefType = op.result.ref
    memory = e.temporary(type.shape, type.dtype, e.scope.end)
    root = Root(f"alloc {op.result.name}")
    buffer = Buffer(memory.pointer, memory.strides, root)
    if type.is_semaphore:
        zero = scalars.zero(type.dtype)
        e.fill(buffer, tiles.splat(type.shape, type.dtype, zero))
    e.define(op.result, Ref(type.shape, type.dtype, buffer))


# --- copies, semaphores ---


def emit_copy_start(e: Emitter, op: Op) -> None:
    """A copy completes when it is started; its semaphore counts the copies."""
    source, target = (e.ref(v) for v in op.operands[:2])
    e.before_write(target.root, e.scope.position + 1)
    _copy(e, source, target)
    for semaphore in op.operands[2:3]:
        _count(e, e.ref(semaphore), "add", integer(1, "i32"))


def _copy(e: Emitter, source: Ref, target: Ref) -> None:
    if target.buffer is not None:
        store_tile(e, target.buffer, source.tile)
        return
    tile = source.tile
    if source.root is target.root:
        tile = Tile(tile.shape, tile.dtype, e.force(tile))
    with e.f.nest(target.shape) as indices:
        target.write(e.f, indices, tile.at(e.f, indices))


def emit_copy_wait(e: Emitter, op: Op) -> None:
    for semaphore in op.operands[2:3]:
        _count(e, e.ref(semaphore), "sub", integer(1, "i32"))


def emit_sem_signal(e: Emitter, op: Op) -> None:
    _count(e, e.ref(op.operands[0]), "add", e.scalar(op.operands[1]))


def emit_sem_wait(e: Emitter, op: Op) -> None:
    """No other thread could signal meanwhile: only the count changes."""
    _count(e, e.ref(op.operands[0]), "sub", e.scalar(op.operands[1]))


def _count(e: Emitter, ref: Ref, instruction: str, amount: Val) -> None:
    e.before_write(ref.root, e.scope.position + 1)
    amount = e.f.convert("sext", amount, scalars.register(ref.dtype))
    with e.f.nest(ref.shape) as indices:
        old = ref.read(e.f, indices)
        ref.write(e.f, indices, e.f.binary(instruction, old, amount))


def emit_nothing(e: Emitter, op: Op) -> None:
    pass


def emit_sem_read(e: Emitter, op: Op) -> None:
    ref = e.ref(op.operands[0])
    if not ref.shape:
        e.define(op.result, ref.read(e.f, ()))
        return
    buffer = e.result_buffer(op)
    e.fill(buffer, ref.tile)
    e.define(op.result, Tile(ref.shape, op.result.tile.dtype, buffer))


def emit_assume_multiple(e: Emitter, op: Op) -> None:
    tile = e.as_tile(op.operands[0])
    e.define_lazy(op, tiles.reshape(e.f, tile, tile.shape))


RULES = {
    "load": emit_load,
    "store": emit_store,
    "atomic_rmw": emit_atomic,
    "atomic_cas": emit_atomic,
    "subview": emit_subview,
    "transpose_view": emit_transpose_view,
    "reshape_view": emit_reshape_view,
    "bitcast_view": emit_bitcast_view,
    "alloc": emit_alloc,
    "copy_start": emit_copy_start,
    "copy_wait": emit_copy_wait,
    "sem_signal": emit_sem_signal,
    "sem_wait": emit_sem_wait,
    "sem_read": emit_sem_read,
    "delay": emit_nothing,
    "assume_multiple": emit_assume_multiple,
}
