"""Random accesses to memory: loads, stores, masks, views, atomics, copies.

Starts and index tiles also point outside: what happens then is defined. What is not
defined (reading an edge, or what is masked off with no `other`) never gets used, and
elements are not written twice by one access unless the order does not matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pallasite.ir import types as T
from pallasite.ir.nodes import At, Gather, Index, Span, Value, full_index
from pallasite.ops.effects import index_result_shape
from tests.fuzz.shapes import index_tile, permutation
from tests.fuzz.writer import BITS, EXACT, MAX_SIZE, ROUGH, Memory, Writer

EXTREMES = (2**31 - 1, -(2**31), 2**30, -(2**30))


def memory_op(w: Writer) -> None:
    """Add one step that touches memory (and some memory, if there is none)."""
    if not readable(w) or not writable(w):
        allocate(w)
    w.world.pick(STEPS)(w)


def readable(w: Writer) -> list[Memory]:
    return [m for m in w.memories[::-1] if m.solid]


def writable(w: Writer) -> list[Memory]:
    return [m for m in w.memories[::-1] if m.writable]


# --- where ---


@dataclass(frozen=True)
class Place:
    """A random index into a ref."""

    index: Index
    operands: tuple[Value, ...]
    shape: tuple[int, ...]
    distinct: bool  # no element is picked twice

    @property
    def reads_distinct(self) -> bool:
        """Nor read twice: a gathered index out of range is clamped when it reads."""
        return self.distinct and not any(isinstance(e, Gather) for e in self.index)


def place(w: Writer, ref: T.RefType, distinct: bool = False) -> Place:
    """An index; with `distinct`, one that picks no element twice."""
    entries: list[Any] = []
    operands: list[Value] = []
    gathers = _gather_shape(w, ref, distinct)
    repeats, left = False, MAX_SIZE
    for n in ref.shape:
        kinds = ["all", "at", "span", "start", "start at"]
        kind = w.world.pick([*kinds, "gather", "gather"] if gathers else kinds)
        if kind == "gather":
            if distinct:
                operands.append(_distinct_tile(w, gathers))
                gathers = None  # equal numbers along two dimensions may meet
            else:
                counts = any(gathers) and w.world.chance(30)
                tile = (
                    _counted_tile(w, gathers) if counts else index_tile(w, gathers, n)
                )
                operands.append(tile)
                repeats = True
            entries.append(Gather())
            continue
        entry, start = _run(w, n, kind)
        entries.append(entry)
        operands += [] if start is None else [start]
    types = tuple(v.type for v in operands)
    shape = index_result_shape(ref, tuple(entries), types)
    size = 1
    for n in shape:
        size *= n
    if size > 4 * left:
        return Place(full_index(ref.shape), (), ref.shape, True)
    return Place(tuple(entries), tuple(operands), shape, not repeats)


def _gather_shape(w: Writer, ref: T.RefType, distinct: bool) -> tuple[int, ...] | None:
    if not ref.rank or not w.world.chance(35):
        return None
    return w.world.shape(ranks=(1,) if distinct else (1, 1, 2, 0))


def _distinct_tile(w: Writer, shape: tuple[int, ...]) -> Value:
    """Multiples of a number, from some start: some in range, some not."""
    line = w.emit("iota", type=T.TileType(shape, T.I32), dim=0)
    factor = w.number(w.world.pick((1, 2, -1, 3)), T.I32, shape)
    start = w.fit(w.small_integer(-2, 5), shape)
    return w.emit("add", w.emit("mul", line, factor), start)


def _counted_tile(w: Writer, shape: tuple[int, ...]) -> Value:
    """Consecutive numbers along one dimension, from some start."""
    dim = w.world.integer(0, len(shape) - 1)
    line = w.emit("iota", type=T.TileType(shape, T.I32), dim=dim)
    return w.emit("add", line, w.fit(w.small_integer(-2, 5), shape))


def _run(w: Writer, n: int, kind: str) -> tuple[At | Span, Value | None]:
    world = w.world
    if kind == "all" or not n:
        return Span(0, n), None
    if kind == "at":
        return At(world.integer(0, n - 1)), None
    if kind == "start at":
        return At(None), start_in(w, n)
    stride = world.pick((1, 1, 2, 3))
    size = world.integer(1, (n - 1) // stride + 1)
    extent = (size - 1) * stride + 1
    if kind == "span":
        return Span(world.integer(0, n - extent), size, stride), None
    return Span(None, size, stride), start_in(w, n)


def start_in(w: Writer, n: int) -> Value:
    """A start around 0..n, at times far outside."""
    if w.world.chance(8):
        return w.number(w.world.pick(EXTREMES), T.I32)
    dtypes = [d for d in (T.I8, T.U8, T.U32, T.I64) if d in w.world.dtypes]
    if dtypes and w.world.chance(15):
        dtype = w.world.pick(dtypes)
        value = w.small_integer(-2 if dtype.is_signed_int else 0, n + 2, dtype)
        return value
    return w.scalar() if w.world.chance(40) else w.small_integer(-3, n + 2)


# --- loads and stores ---


def load(w: Writer) -> None:
    memory = w.world.pick(readable(w))
    where = place(w, memory.type)
    mask = w.bool_tile(where.shape) if w.world.chance(30) else None
    other = None
    if mask is not None and w.world.chance(70):
        other = w.operand(memory.type.dtype, where.shape)
    loaded = _load(w, memory, where, mask, other)
    if mask is not None and other is None:  # what is masked off is unspecified
        _hide(w, loaded)
        instead = w.constant(memory.type.dtype, where.shape)
        w.emit("select_n", mask, instead, loaded, most=EXACT)


def _load(w: Writer, memory: Memory, where: Place, mask: Any, other: Any) -> Value:
    extra = [v for v in (mask, other) if v is not None]
    attrs = dict(index=where.index, mask=mask is not None, other=other is not None)
    operands = (memory.ref, *where.operands, *extra)
    loaded = w.emit("load", *operands, most=memory.level, **attrs)
    if not memory.writable and not memory.shared and mask is None:
        w.world.unknown.add(loaded)
    return loaded


def _hide(w: Writer, value: Value) -> None:
    """Keep later code from using a value."""
    w.tiles.remove(value)
    w.own.remove(value)


def load_all(w: Writer, memory: Memory) -> Value:
    where = Place(full_index(memory.type.shape), (), memory.type.shape, True)
    return _load(w, memory, where, None, None)


def store(w: Writer) -> None:
    memory = w.world.pick(writable(w))
    where = place(w, memory.type, distinct=True)
    mask = w.bool_tile(where.shape) if w.world.chance(30) else None
    value = w.operand(memory.type.dtype, where.shape)
    extra = [] if mask is None else [mask]
    attrs = dict(index=where.index, mask=mask is not None)
    w.emit_all("store", memory.ref, value, *where.operands, *extra, **attrs)


def store_all(w: Writer, ref: Value, value: Value) -> None:
    w.world.used.add(value)
    w.b.store(ref, value)


def store_one_number(w: Writer) -> None:
    """Elements may repeat where all get the same."""
    memory = w.world.pick(writable(w))
    where = place(w, memory.type)
    value = w.constant(memory.type.dtype, where.shape)
    attrs = dict(index=where.index, mask=False)
    w.emit_all("store", memory.ref, value, *where.operands, **attrs)


# --- products ---


def add_product(w: Writer, memory: Memory | None = None) -> None:
    """Store the sum of a product and of what memory holds there, or of a tile.

    Nothing else uses the product or the sum, so that a backend may add in place.
    """
    if memory is None:
        fits = [m for m in writable(w) if m.type.rank and not m.type.dtype.is_bool]
        memory = w.world.pick(fits) if fits else allocate(w, T.F32)
    where = _box(w, memory.type)
    if not where.shape or memory.type.dtype.is_bool:
        return
    dtype, product = memory.type.dtype, _product(w, memory.type.dtype, where.shape)
    if memory.solid and w.world.chance(70):
        attrs = dict(index=where.index, mask=False, other=False)
        addend = w.b.op("load", memory.ref, *where.operands, **attrs)
    else:
        addend = w.operand(dtype, where.shape)
    if w.world.chance(20):
        factors = w.operand(dtype, where.shape[:1])
        dims = dict(shape=where.shape, dims=(0,))
        w.world.used.add(factors)
        addend = w.b.mul(addend, w.b.op("broadcast_in_dim", factors, **dims))
    w.world.used.update((addend, *where.operands))
    terms = (addend, product) if w.world.chance(50) else (product, addend)
    attrs = dict(index=where.index, mask=False)
    w.b.emit("store", memory.ref, w.b.add(*terms), *where.operands, **attrs)


def _box(w: Writer, ref: T.RefType) -> Place:
    """All of a ref, or a part of it that starts and strides describe."""
    if w.world.chance(60):
        return Place(full_index(ref.shape), (), ref.shape, True)
    kinds = ("all", "span", "start", "at", "start at")
    runs = [_run(w, n, w.world.pick(kinds)) for n in ref.shape]
    index, starts = tuple(r for r, _ in runs), tuple(s for _, s in runs if s)
    shape = index_result_shape(ref, index, tuple(v.type for v in starts))
    return Place(index, starts, shape, True)


def _product(w: Writer, dtype: T.DType, shape: tuple[int, ...]) -> Value:
    """A dot of this type and shape; its operands have the depth first or last."""
    narrow = [d for d in w.world.dtypes if _may_sum_to(d, dtype)]
    kind = w.world.pick([dtype, dtype, *narrow])
    depth = w.world.pick((3, 1, 2, 5, 8))
    batch, rest = shape[:-2], shape[-2:]
    sides = (rest[:1], rest[1:])
    if len(rest) == 1 and w.world.chance(50):
        sides = sides[::-1]
    operands, along = [], []
    for side in sides:
        transposed = w.world.chance(40)
        dims = (depth, *side) if transposed else (*side, depth)
        operands.append(w.operand(kind, (*batch, *dims)))
        along.append((len(batch) + (0 if transposed else len(side)),))
    w.world.used.update(operands)
    both = tuple(range(len(batch)))
    attrs = dict(contract=tuple(along), batch=(both, both), precision=None)
    return w.b.op("dot", *operands, dtype=dtype, **attrs)


def _may_sum_to(dtype: T.DType, result: T.DType) -> bool:
    if result.is_float:
        return dtype.is_float and dtype.bits < result.bits <= 32
    return result == T.I32 and dtype.is_signed_int and dtype.bits < 32


# --- atomics ---


def atomic(w: Writer) -> None:
    memory = _atomic_memory(w)
    dtype = memory.type.dtype
    kinds = ["add", "max", "min", "and", "or", "xor", "xchg"]
    kind = w.world.pick(kinds[:3] if dtype.is_float else kinds)
    ordered = kind == "xchg" or dtype.is_float
    where = place(w, memory.type, distinct=ordered)
    value = w.operand(dtype, where.shape)
    mask = w.bool_tile(where.shape) if w.world.chance(30) else None
    extra = [] if mask is None else [mask]
    attrs = dict(kind=kind, index=where.index, mask=mask is not None)
    operands = (memory.ref, value, *where.operands, *extra)
    old = w.emit("atomic_rmw", *operands, most=memory.level, **attrs)
    if mask is not None or not where.reads_distinct:  # unspecified
        _hide(w, old)


def _atomic_memory(w: Writer) -> Memory:
    """Whole memory: an atomic reads what it changes."""
    fits = [m for m in writable(w) if m.solid and not m.type.dtype.is_bool]
    return w.world.pick(fits) if fits else allocate(w, T.I32)


def compare_and_swap(w: Writer) -> None:
    fits = [m for m in writable(w) if m.solid and m.type.dtype.is_integer]
    memory = w.world.pick(fits) if fits else allocate(w, T.I32)
    where = place(w, memory.type, distinct=True)
    compare, value = (w.operand(memory.type.dtype, where.shape) for _ in range(2))
    if w.world.chance(50):
        compare = _load(w, memory, where, None, None)
    operands = (memory.ref, compare, value, *where.operands)
    old = w.emit("atomic_cas", *operands, index=where.index)
    if not where.reads_distinct:
        _hide(w, old)


# --- more memory, and other views of it ---


def allocate(w: Writer, dtype: T.DType | None = None) -> Memory:
    """Scratch, filled before anybody reads it."""
    dtype = dtype or w.world.dtype()
    space = w.world.pick(("vmem", "smem"))
    type_ = T.RefType(w.world.shape(ranks=(2, 1, 3, 0)), dtype, space)
    ref = w.b.op("alloc", type=type_)
    store_all(w, ref, w.operand(dtype, type_.shape))
    memory = Memory(ref, ROUGH if dtype.is_float else BITS, writable=True)
    w.memories.append(memory)
    return memory


def subview(w: Writer) -> None:
    memory = w.world.pick(w.memories[::-1])
    entries, operands = [], []
    for n in memory.type.shape:
        kind = w.world.pick(("all", "span", "at", "start", "start at"))
        entry, start = _run(w, n, kind)
        entries.append(entry)
        operands += [] if start is None else [start]
    w.world.used.update(operands)
    ref = w.b.subview(memory.ref, tuple(entries), operands)
    w.memories.append(memory.moved(ref))


def reshape_view(w: Writer) -> None:
    memory = w.world.pick(w.memories[::-1])
    rest = memory.type.size
    factors = [n for n in range(1, rest + 1) if rest % n == 0] or [0]
    first = w.world.pick(factors)
    shape = (rest,) if w.world.chance(30) else (first, rest // first if first else 0)
    ref = w.b.op("reshape_view", memory.ref, shape=shape)
    w.memories.append(memory.moved(ref))


def transpose_view(w: Writer) -> None:
    memory = w.world.pick(w.memories[::-1])
    perm = permutation(w, memory.type.rank)
    ref = w.b.op("transpose_view", memory.ref, perm=perm)
    w.memories.append(memory.moved(ref))


def bitcast_view(w: Writer) -> None:
    """Integers as other integers; floats as integers where nobody may write."""
    fits = [m for m in w.memories[::-1] if not m.type.dtype.is_bool]
    fits = [m for m in fits if m.type.rank >= 2 and m.level == BITS]
    fits = [m for m in fits if m.type.dtype.is_integer or not m.writable]
    if not fits:
        return
    memory = w.world.pick(fits)
    rows, bits = memory.type.shape[-2], memory.type.dtype.bits
    targets = [d for d in w.world.dtypes if d.is_integer]
    targets = [d for d in targets if rows * bits % d.bits == 0]
    if targets:
        ref = w.b.op("bitcast_view", memory.ref, dtype=w.world.pick(targets))
        w.memories.append(replace(memory, ref=ref))


# --- copies and semaphores ---


def copy(w: Writer) -> None:
    """Start a copy between two parts of memory of one shape, and wait for it."""
    target = w.world.pick(writable(w))
    dtype, shape = target.type.dtype, target.type.shape
    fits = [m for m in readable(w) if m.type.dtype == dtype]
    fits = [m for m in fits if m.type.rank == len(shape)]
    fits = [m for m in fits if _may_copy(m, target)]
    if not fits:
        return
    source = w.world.pick(fits)
    shape = tuple(map(min, source.type.shape, shape))
    parts = [_corner(w, m, shape) for m in (source, target)]
    semaphore = w.b.op("alloc", type=T.RefType((), T.I32, "dma_sem"))
    w.b.emit("copy_start", *parts, semaphore, priority=0)
    w.b.emit("copy_wait", *parts, semaphore)


def _may_copy(source: Memory, target: Memory) -> bool:
    """A copy onto itself has no meaning: nobody may write the source."""
    return not source.writable and not source.shared and source.level >= target.level


def _corner(w: Writer, memory: Memory, shape: Sequence[int]) -> Value:
    if memory.type.shape == tuple(shape):
        return memory.ref
    entries, starts = [], []
    for n, size in zip(memory.type.shape, shape, strict=True):
        if w.world.chance(40):
            entries.append(Span(None, size))
            starts.append(start_in(w, n))
        else:
            entries.append(Span(w.world.integer(0, n - size), size))
    w.world.used.update(starts)
    return w.b.subview(memory.ref, tuple(entries), starts)


def count_semaphore(w: Writer) -> None:
    semaphore = w.b.op("alloc", type=T.RefType((), T.I32, "sem"))
    w.b.emit("sem_signal", semaphore, w.number(w.world.integer(2, 5), T.I32))
    w.b.emit("sem_wait", semaphore, w.number(w.world.integer(0, 2), T.I32))
    left = w.b.op("sem_read", semaphore)
    w.add(left)
    w.b.emit("sem_wait", semaphore, left)


STEPS: tuple[Callable[[Writer], Any], ...] = (
    load,
    load,
    load,
    store,
    store,
    store_one_number,
    add_product,
    atomic,
    atomic,
    compare_and_swap,
    allocate,
    subview,
    subview,
    reshape_view,
    transpose_view,
    bitcast_view,
    copy,
    count_semaphore,
)
