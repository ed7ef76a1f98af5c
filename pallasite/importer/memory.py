"""Import rules for refs: indexing, masks, atomics, copies, semaphores, allocation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, RefIndexError
from pallasite.importer import matrix_units
from pallasite.importer.importer import Importer, tile_type
from pallasite.ir import types as T
from pallasite.ir.nodes import At, Gather, Index, Span, Value, full_index
from pallasite.ir.rule_table import RuleTable
from pallasite.language.refs import ds
from pallasite.language.trace import non_integer_index

RULES = RuleTable()

# --- views and indices ---


class Picked:
    """The result of a chain of view transforms: a ref and one index into it."""

    def __init__(self, ref: Value, index: Index, operands: list[Value], front: int):
        self.ref, self.index, self.operands = ref, index, operands
        # Where JAX puts the gathered dimensions; the IR puts them first.
        self.gather_position = front

    def gather_rank(self) -> int:
        ranks = [
            v.tile.rank
            for e, v in zip(_dynamic(self.index), self.operands, strict=True)
            if isinstance(e, Gather)
        ]
        return ranks[0] if ranks else 0

    def to_jax(self, im: Importer, value: Value) -> Value:
        """Move gathered dimensions from the front to where JAX has them."""
        return _swapped(im, value, self.gather_rank(), self.gather_position)

    def from_jax(self, im: Importer, value: Value) -> Value:
        """Move gathered dimensions from where JAX has them to the front."""
        return _swapped(im, value, self.gather_position, self.gather_rank())


def _swapped(im: Importer, value: Value, first: int, second: int) -> Value:
    """The value with its `first` leading dimensions after the `second` next ones."""
    if not first or not second:
        return value
    order = list(range(value.tile.rank))
    both = first + second
    moved = order[first:both] + order[:first] + order[both:]
    return im.builder.op("transpose", value, perm=tuple(moved))


def _dynamic(index: Index) -> list[At | Span | Gather]:
    return [e for e in index if isinstance(e, Gather) or e.start is None]


def pick(
    im: Importer, ref: Value, transforms: Sequence[Any], masked: bool = False
) -> Picked:
    """Follow view transforms; the last indexer becomes the access's own index."""
    _expect_data(im, ref)
    transforms = [t for t in transforms if type(t).__name__ not in _NEUTRAL]
    last = transforms[-1] if transforms else None
    if type(last).__name__ == "NDIndexer":
        ref = view(im, ref, transforms[:-1])
        if masked and _overhangs(last, ref.ref.shape):
            return Picked(ref, *_element_index(im, ref, last), 0)
        index, operands, front = _index(im, ref, last)
        return Picked(ref, index, operands, front)
    ref = view(im, ref, transforms)
    return Picked(ref, full_index(ref.ref.shape), [], 0)


_NEUTRAL = ("MemorySpaceCastTransform",)


def _expect_data(im: Importer, ref: Value) -> None:
    if not ref.is_ref:
        raise KernelTypeError(
            "expected a ref, got a value",
            [("kernel", im.kernel_name), ("value", ref.type)],
            im.where,
            fix="pass the ref itself (x_ref), not a value read from it (x_ref[...])",
        )
    if ref.ref.space == "mbarrier":
        raise KernelTypeError(
            "a barrier cannot be read or written like memory",
            [("kernel", im.kernel_name), ("barrier", ref.type)],
            im.where,
            "plgpu.barrier_arrive, plgpu.barrier_wait",
        )
    if ref.ref.is_semaphore:
        raise KernelTypeError(
            "a semaphore cannot be read or written like memory",
            [("kernel", im.kernel_name), ("semaphore", ref.type)],
            im.where,
            "pl.semaphore_read, pl.semaphore_signal, pl.semaphore_wait",
        )


def view(
    im: Importer, ref: Value, transforms: Sequence[Any], places: Sequence[Value] = ()
) -> Value:
    """Apply view transforms one by one.

    `places`: of slices whose size is a value of the kernel, see this element only (one
    place for each of them, in order).
    """
    b, pending = im.builder, iter(places)
    for t in transforms:
        kind = type(t).__name__
        if kind == "NDIndexer":
            index, operands, _ = _index(im, ref, t, pending)
            if index != full_index(ref.ref.shape):
                ref = b.subview(ref, index, operands)
        elif kind == "ReshapeTransform":
            ref = b.op("reshape_view", ref, shape=tuple(t.shape))
        elif kind == "TransposeTransform":
            ref = b.op("transpose_view", ref, perm=tuple(t.permutation))
        elif kind == "BitcastTransform":
            ref = b.op("bitcast_view", ref, dtype=T.dtype_of(t.dtype))
        elif kind not in _NEUTRAL:
            raise KernelTypeError(
                f"ref views of kind {kind} are not supported",
                [("kernel", im.kernel_name), ("ref", ref.type)],
                im.where,
            )
    return ref


def _index(
    im: Importer, ref: Value, indexer: Any, places: Iterator[Value] | None = None
) -> tuple[Index, list[Value], int]:
    entries: list[At | Span | Gather] = []
    operands: list[Value] = []
    for d, entry in enumerate(indexer.indices):
        size = ref.ref.shape[d]
        if _is_slice(entry):
            is_open = _static(entry.size) is None
            place = next(places, None) if places and is_open else None
            if place is not None:
                operands.append(_element(im, entry, place))
                entries.append(Span(None, 1))
                continue
            entries.append(_span(im, ref, d, size, entry, operands))
        else:
            entries.append(_point(im, ref, d, size, entry, operands))
    # A random key is indexed as one element and stored as several words.
    entries += [Span(0, n) for n in ref.ref.shape[len(entries) :]]
    gathers = [d for d, e in enumerate(entries) if isinstance(e, Gather)]
    contiguous = (
        gathers == list(range(gathers[0], gathers[-1] + 1)) if gathers else True
    )
    front = 0
    if gathers and contiguous:
        front = sum(isinstance(e, Span) for e in entries[: gathers[0]])
    return tuple(entries), operands, front


def _is_slice(entry: Any) -> bool:
    return hasattr(entry, "size") and hasattr(entry, "stride")


def _element(im: Importer, entry: Any, place: Value) -> Value:
    """Where an element of a slice is in the ref."""
    b, first, stride = im.builder, _static(entry.start), _static(entry.stride)
    start = im.value(entry.start) if first is None else b.index(first)
    step = place if stride == 1 else b.mul(place, b.index(stride or 1))
    return b.add(b.cast(start, T.I32), step)


def _overhangs(indexer: Any, shape: Sequence[int]) -> bool:
    """Is a slice wider than the ref, or known to end outside it?"""
    for entry, n in zip(indexer.indices, shape, strict=True):
        if _is_slice(entry):
            count, stride = _static(entry.size), _static(entry.stride)
            if count and stride and count > 0:
                first = _static(entry.start) or 0
                if first < 0 or first + (count - 1) * stride + 1 > n:
                    return True
    return False


def _element_index(im: Importer, ref: Value, indexer: Any) -> tuple[Index, list[Value]]:
    """The index of a masked access that hangs over the ref, element by element.

    Blocks rounded up to a power of two are read this way: masked-off elements may be
    outside.
    """
    b, entries, operands = im.builder, [], []
    slices = [e for e in indexer.indices if _is_slice(e)]
    shape = tuple(_static(e.size) or 0 for e in slices)
    for d, entry in enumerate(indexer.indices):
        if not _is_slice(entry):
            point = _point(im, ref, d, ref.ref.shape[d], entry, operands)
            if isinstance(point, Gather):
                raise _outside(im, ref, d, indexer, ref.ref.shape[d])
            entries.append(point)
            continue
        dim = sum(map(_is_slice, indexer.indices[:d]))
        _expect_integer(im, ref, d, entry.start)
        places = b.op("iota", type=T.TileType(shape, T.I32), dim=dim)
        stride = _static(entry.stride) or 1
        places = b.mul(places, b.like(stride, places))
        first = _static(entry.start)
        start = b.index(first) if first is not None else im.value(entry.start)
        start = _near(im, start, stride * shape[dim], ref.ref.shape[d])
        entries.append(Gather())
        operands.append(b.add(b.broadcast(start, shape), places))
    return tuple(entries), operands


def _near(im: Importer, start: Value, extent: int, size: int) -> Value:
    """A start as i32; one far outside is just outside, so that no sum wraps around."""
    fact, (lowest, highest) = im.facts.of(start), start.tile.dtype.limits
    b = im.builder
    if not fact.within(-extent, size):
        low, high = max(-extent, lowest), min(size, highest)
        start = b.clamp(b.like(low, start), start, b.like(high, start))
    return b.cast(start, T.I32)


def _span(
    im: Importer, ref: Value, d: int, size: int, entry: Any, operands: list[Value]
) -> Span:
    count, stride = _static(entry.size), _static(entry.stride)
    if count is None or stride is None:
        raise KernelTypeError(
            "a slice of a ref needs a static size",
            [("kernel", im.kernel_name), ("ref", ref.type), ("dimension", d)],
            im.where,
            "use pl.ds(start, size) with an int size, and mask the rest",
        )
    _expect_integer(im, ref, d, entry.start)
    start = _static(entry.start)
    if start is None:
        operands.append(im.value(entry.start))
        span = Span(None, count, stride)
    else:
        span = Span(start, count, stride)
    if start is None and span.extent > size:
        raise RefIndexError(
            f"a slice of {span.extent} elements is longer than dimension {d} of the "
            f"ref, which has {size}",
            [("kernel", im.kernel_name), ("ref", f"{ref.name or 'ref'}: {ref.type}")],
            im.where,
            f"use at most {size} elements, or pad the array",
        )
    first = start or 0
    if first < 0 or count < 0 or first + span.extent > size:
        raise _outside(im, ref, d, f"{first}:{first + span.extent}", size)
    return span


def _point(
    im: Importer, ref: Value, d: int, size: int, entry: Any, operands: list[Value]
) -> At | Gather:
    _expect_integer(im, ref, d, entry)
    static = _static(entry)
    if static is not None:
        position = static + size if static < 0 else static
        if not 0 <= position < size:
            raise _outside(im, ref, d, static, size)
        return At(position)
    value = im.value(entry)
    if value.tile.rank:
        operands.append(_counted_from_the_end(im, value, size))
        return Gather()
    operands.append(value)
    return At(None)


def _counted_from_the_end(im: Importer, index: Value, size: int) -> Value:
    """An index array whose negative elements count from the end, as in jnp.

    Here, where index arrays enter the IR, so that no backend need know; what is then
    still outside, each backend clamps or masks.
    """
    if im.facts.of(index).low >= 0:
        return index
    b = im.builder
    if index.tile.dtype.bits < 32:  # the sum may not fit
        index = b.cast(index, T.I32)
    is_negative = b.lt(index, b.like(0, index))
    return b.select(is_negative, b.add(index, b.like(size, index)), index)


def _expect_integer(im: Importer, ref: Value, d: int, entry: Any) -> None:
    facts = [("kernel", im.kernel_name), ("ref", ref.type), ("dimension", d)]
    if refused := non_integer_index(entry, facts, im.where):
        raise refused


def _static(entry: Any) -> int | None:
    """A Python int if the index part is known now."""
    if isinstance(entry, (int, np.integer)):
        return int(entry)
    if hasattr(entry, "val") and np.ndim(entry.val) == 0:
        return int(entry.val)
    return None


def _outside(im: Importer, ref: Value, d: int, index: Any, size: int) -> RefIndexError:
    return RefIndexError(
        f"index {index} is out of bounds for dimension {d} of the ref, which has "
        f"{size} elements",
        [("kernel", im.kernel_name), ("ref", f"{ref.name or 'ref'}: {ref.type}")],
        im.where,
        f"valid indices are {-size} to {size - 1}",
    )


# --- plain access: JAX's own primitives ---


def _load(im: Importer, picked: Picked, mask=None, other=None) -> Value:
    if picked.ref.ref.space == "regs":
        return _sums(im, picked)
    loaded = im.builder.load(picked.ref, picked.index, picked.operands, mask, other)
    return picked.to_jax(im, loaded)


def _sums(im: Importer, picked: Picked) -> Value:
    """What an accumulator holds when no product is in flight."""
    if picked.index != full_index(picked.ref.ref.shape):
        raise KernelTypeError(
            "an accumulator can only be read as a whole",
            [("kernel", im.kernel_name), ("accumulator", picked.ref.type)],
            im.where,
            "read acc_ref[...], then slice the value",
        )
    return im.builder.op("wgmma_wait", im.builder.load(picked.ref), pending=0)


def _store(im: Importer, picked: Picked, value: Value, mask=None) -> None:
    value = picked.from_jax(im, value)
    im.builder.store(picked.ref, value, picked.index, picked.operands, mask)


def _transforms(eqn: Any, first: int) -> Any:
    return jax.tree.unflatten(eqn.params["tree"], eqn.invars[first:])


@RULES.rule("get", params="tree")
def _get(im: Importer, eqn: Any, ref: Value, *rest: Value) -> Value:
    return _load(im, pick(im, ref, _transforms(eqn, 1)))


@RULES.rule("swap", params="tree")
def _swap(im: Importer, eqn: Any, ref: Value, value: Value, *rest: Value) -> Value:
    picked = pick(im, ref, _transforms(eqn, 2))
    old = _load(im, picked) if eqn.outvars[0] in im.used else value
    _store(im, picked, value)
    return old


@RULES.rule("addupdate", params="tree")
def _addupdate(im: Importer, eqn: Any, ref: Value, value: Value, *rest: Value) -> None:
    picked = pick(im, ref, _transforms(eqn, 2))
    _store(im, picked, im.builder.add(_load(im, picked), value))


# --- ours: masks, atomics ---


def _parts(im: Importer, eqn: Any, values: int, ref: Value):
    """The access, its mask and its other, in the IR's dimension order."""
    transforms, mask, other = _transforms(eqn, 1 + values)
    picked = pick(im, ref, transforms, masked=mask is not None)
    front = [
        None if v is None else picked.from_jax(im, im.value(v)) for v in (mask, other)
    ]
    return picked, front[0], front[1]


@RULES.rule("pallasite_load")
def _masked_load(im: Importer, eqn: Any, ref: Value, *rest: Value) -> Value:
    picked, mask, other = _parts(im, eqn, 0, ref)
    return _load(im, picked, mask, other)


@RULES.rule("pallasite_swap")
def _masked_swap(im: Importer, eqn: Any, ref: Value, value: Value, *rest: Value):
    picked, mask, _ = _parts(im, eqn, 1, ref)
    old = value
    if eqn.outvars[0] in im.used:
        old = _load(im, picked, mask, picked.from_jax(im, value) if mask else None)
    _store(im, picked, value, mask)
    return old


@RULES.rule("pallasite_atomic_rmw")
def _atomic_rmw(
    im: Importer, eqn: Any, ref: Value, value: Value, *rest: Value
) -> Value:
    picked, mask, _ = _parts(im, eqn, 1, ref)
    value = picked.from_jax(im, value)
    extra = [] if mask is None else [mask]
    old = im.builder.op(
        "atomic_rmw",
        picked.ref,
        value,
        *picked.operands,
        *extra,
        kind=eqn.params["kind"],
        index=picked.index,
        mask=mask is not None,
    )
    return picked.to_jax(im, old)


@RULES.rule("pallasite_atomic_cas")
def _atomic_cas(im: Importer, eqn: Any, ref: Value, cmp: Value, val: Value, *rest):
    picked, _, _ = _parts(im, eqn, 2, ref)
    cmp, val = picked.from_jax(im, cmp), picked.from_jax(im, val)
    operands = (picked.ref, cmp, val, *picked.operands)
    old = im.builder.op("atomic_cas", *operands, index=picked.index)
    return picked.to_jax(im, old)


# --- allocation ---


@RULES.rule("empty_ref", params="ty memory_space pin")
def _empty_ref(im: Importer, eqn: Any) -> Value:
    im.freed.discard(eqn.outvars[0])  # a body is imported once per warpgroup
    type_ = _ref_type(im, eqn.outvars[0].aval)
    if type_.space == "device_barrier":
        return im.builder.op("barrier_semaphore")
    if im.threads is not None and type_.space in ("smem", "mbarrier", "tmem"):
        own = getattr(eqn.outvars[0].aval.memory_space, "is_own", False)
        return im.threads.allocate(im, eqn.outvars[0], type_, own)
    if type_.space == "vmem_shared":
        raise KernelTypeError(
            "memory shared by subcores cannot be allocated inside the kernel",
            [("kernel", im.kernel_name), ("memory", type_)],
            im.where,
            "scratch_shapes=[pltpu.VMEM_SHARED(...)] of the kernel",
        )
    ref = im.builder.op("alloc", type=type_)
    if hasattr(eqn.outvars[0].aval.memory_space, "mxu_id"):  # where a unit adds up
        matrix_units.clear(im, [ref])
    if type_.space == "regs":  # an accumulator
        im.builder.store(ref, im.builder.constant(0, type_.tile))
    return ref


@RULES.rule("new_ref", "ref", params="memory_space kind pin")
def _new_ref(im: Importer, eqn: Any, init: Value) -> Value:
    ref = allocate(im, eqn.outvars[0].aval)  # each warpgroup's own
    im.builder.store(ref, init)
    return ref


def allocate(im: Importer, aval: Any) -> Value:
    return im.builder.op("alloc", type=_ref_type(im, aval))


def _ref_type(im: Importer, aval: Any) -> T.RefType:
    space: Any = getattr(aval, "memory_space", None)
    name = getattr(space, "value", None) or "vmem"
    layout = None
    if hasattr(space, "arrivals"):  # of barriers
        if im.threads is None:
            raise outside_warpgroups(im, "plgpu.Barrier")
        blocks = im.threads.blocks_along(im, space.collective_axes)
        orders = (1,) if space.orders_tensor_core else ()
        layout = T.Layout("arrivals", (space.arrivals * blocks, *orders))
    elif hasattr(space, "swizzle"):  # of shared memory
        layout = T.Layout("swizzle", (space.swizzle,))
    tile = tile_type(aval.inner_aval, im.where)
    return T.RefType(tile.shape, tile.dtype, name, layout)


def outside_warpgroups(im: Importer, what: str) -> KernelTypeError:
    """The error where a kernel without warpgroups uses what only they have."""
    return KernelTypeError(
        f"{what} is only supported in plgpu.kernel",
        [("kernel", im.kernel_name)],
        im.where,
        "plgpu.kernel(body, out_shape=..., scratch_shapes=...) instead of pallas_call",
    )


@RULES.rule("freeze")
def _freeze(im: Importer, eqn: Any, ref: Value) -> Value:
    if ref.ref.space == "regs":
        return _sums(im, Picked(ref, full_index(ref.ref.shape), [], 0))
    return im.builder.load(ref)


@RULES.rule("free_ref")
def _free_ref(im: Importer, eqn: Any, ref: Value) -> None:
    im.freed.add(eqn.invars[0])


# --- copies and semaphores ---


def _views(
    im: Importer, eqn: Any, first: int = 0, places: Sequence[Value] = ()
) -> list[Value]:
    parts = jax.tree.unflatten(eqn.params["tree"], eqn.invars[first:])
    return [view(im, im.value(ref), transforms, places) for ref, transforms in parts]


@RULES.rule("pallasite_copy")
def _copy(im: Importer, eqn: Any, *flat: Value) -> None:
    if _copy_rows(im, eqn):
        return
    _copy_elements(im, eqn, _dynamic_counts(im, eqn), ())


def _copy_rows(im: Importer, eqn: Any) -> bool:
    """A copy of the rows that an array of numbers, or a ref to one, picks."""
    sides = jax.tree.unflatten(eqn.params["tree"], eqn.invars)
    numbers = [_row_numbers(im, transforms) for _, transforms in sides[:2]]
    if numbers == [None, None]:
        return False
    if None not in numbers:
        raise KernelTypeError(
            "a copy can index rows of its source or its destination, not both",
            [("kernel", im.kernel_name)],
            im.where,
            "gather into local memory first, then scatter from it",
        )
    indexed = "target" if numbers[0] is None else "source"
    rows = numbers[0] if numbers[1] is None else numbers[1]
    views = []
    for (ref, transforms), own in zip(sides, (*numbers, None), strict=True):
        if own is not None:
            *transforms, last = transforms
            transforms.append(_without_rows(last))
        views.append(view(im, im.value(ref), transforms))
    _expect_semaphore(im, views[2])
    action = eqn.params["action"]
    attrs: dict[str, Any] = {"indexed": indexed}
    if action != "wait":
        attrs["add"] = action == "add"
    name = "indexed_copy_wait" if action == "wait" else "indexed_copy_start"
    assert rows is not None
    im.builder.emit(name, *views, rows, **attrs)
    return True


def _row_numbers(im: Importer, transforms: Sequence[Any]) -> Value | None:
    """What picks rows in the last step of a view: an array first in its index."""
    last: Any = transforms[-1] if transforms else None
    if type(last).__name__ != "NDIndexer" or not last.indices:
        return None
    first = last.indices[0]
    if _is_slice(first) or _static(first) is not None:
        return None
    picked = jaxcompat.ref_and_transforms(first)
    ref = im.value(picked[0])
    if ref.is_ref:
        return view(im, ref, picked[1])
    return ref if ref.tile.rank else None


def _without_rows(indexer: Any) -> Any:
    """The same index with all rows."""
    return replace(indexer, indices=(ds(0, indexer.shape[0]), *indexer.indices[1:]))


def _copy_elements(
    im: Importer, eqn: Any, counts: Sequence[Value], places: tuple[Value, ...]
) -> None:
    """A copy, in a loop for each dimension whose size is not known before it runs."""
    if not counts:
        _copy_once(im, eqn, places)
        return
    place = Value(T.INDEX, "place")
    with im.nested() as builder:
        _copy_elements(im, eqn, counts[1:], (*places, place))
        body = builder.block((place,))
    b = im.builder
    count = b.cast(counts[0], T.I32)
    b.emit("for", b.index(0), count, b.index(1), regions=(body,))


def _dynamic_counts(im: Importer, eqn: Any) -> list[Value]:
    """How many elements a copy moves along the dimensions that its slices leave open
    (`pl.ds(start, n)` with a value of the kernel for n)."""
    counts = []
    source, target, _ = jax.tree.unflatten(eqn.params["tree"], eqn.invars)
    for _, transforms in (source, target):
        indices = [e for t in transforms for e in getattr(t, "indices", ())]
        slices = [e for e in indices if _is_slice(e)]
        counts.append([e.size for e in slices if _static(e.size) is None])
    if len(counts[0]) != len(counts[1]):
        raise KernelTypeError(
            "only one side of a copy has a dynamic size",
            [("kernel", im.kernel_name), ("such sizes", tuple(map(len, counts)))],
            im.where,
            "slice source and destination with the same size",
        )
    return [im.value(count) for count in counts[0]]


def _copy_once(im: Importer, eqn: Any, places: Sequence[Value] = ()) -> None:
    source, target, semaphore = _views(im, eqn, places=places)
    _expect_semaphore(im, semaphore)
    _expect_one_type(im, source, target)
    if eqn.params["action"] == "start":
        im.builder.emit("copy_start", source, target, semaphore, priority=0)
    else:
        im.builder.emit("copy_wait", source, target, semaphore)


@RULES.rule("pallasite_remote_copy")
def _remote_copy(im: Importer, eqn: Any, device: Value, *flat: Value) -> None:
    source, target, sent, received = _views(im, eqn, 1)
    _expect_one_type(im, source, target)
    for semaphore in (sent, received):
        _expect_semaphore(im, semaphore)
    priority = eqn.params["priority"]
    operands = (source, target, sent, received, device)
    im.builder.emit("remote_copy_start", *operands, priority=priority)


def _expect_one_type(im: Importer, source: Value, target: Value) -> None:
    if (source.ref.shape, source.ref.dtype) == (target.ref.shape, target.ref.dtype):
        return
    raise KernelTypeError(
        "source and destination of a copy must have the same shape and dtype",
        [
            ("kernel", im.kernel_name),
            ("source", source.type),
            ("destination", target.type),
        ],
        im.where,
        "slice both with .at[...]"
        if source.ref.shape != target.ref.shape
        else "a copy does not convert dtypes: load, .astype and store",
    )


def _expect_semaphore(im: Importer, ref: Value) -> None:
    if not ref.ref.is_semaphore or ref.ref.shape:
        raise KernelTypeError(
            "expected a single semaphore",
            [("kernel", im.kernel_name), ("got", ref.type)],
            im.where,
            "allocate pltpu.SemaphoreType.DMA; index an array of them: sems.at[i]",
        )


@RULES.rule("pallasite_semaphore_signal", "pallasite_semaphore_wait")
def _semaphore(im: Importer, eqn: Any, amount: Value, *flat: Value) -> None:
    (semaphore,) = _views(im, eqn, 1)
    _expect_semaphore(im, semaphore)
    name = "sem_" + eqn.primitive.name.rsplit("_", 1)[1]
    im.builder.emit(name, semaphore, amount)


@RULES.rule("pallasite_semaphore_signal_core")
def _semaphore_signal_core(
    im: Importer, eqn: Any, amount: Value, core: Value, *flat: Value
) -> None:
    (semaphore,) = _views(im, eqn, 2)
    _expect_semaphore(im, semaphore)
    im.builder.emit("sem_signal_core", semaphore, amount, core)


@RULES.rule("pallasite_semaphore_signal_device")
def _semaphore_signal_device(
    im: Importer, eqn: Any, amount: Value, device: Value, *rest: Value
) -> None:
    """Then the core's number, if it is not the same as here, and the semaphore."""
    cores = rest[:1] if not rest[0].is_ref else ()
    (semaphore,) = _views(im, eqn, 2 + len(cores))
    _expect_semaphore(im, semaphore)
    im.builder.emit("sem_signal_device", semaphore, amount, device, *cores)


@RULES.rule("pallasite_subcore_barrier")
def _subcore_barrier(im: Importer, eqn: Any) -> None:
    _expect_subcores(im)
    im.builder.emit("barrier")


@RULES.rule("pallasite_fetch_and_add")
def _fetch_and_add(
    im: Importer, eqn: Any, value: Value, subcore: Value, *flat: Value
) -> Value:
    _expect_subcores(im)
    (ref,) = _views(im, eqn, 2)
    if ref.ref != T.RefType((), T.I32, "smem"):
        raise KernelTypeError(
            "plsc.fetch_and_add needs a single int32 in scalar memory",
            [("kernel", im.kernel_name), ("ref", ref.type)],
            im.where,
            "scratch_shapes=[pltpu.SMEM((1,), jnp.int32)]; index an array of them: "
            "ref.at[i]",
        )
    return im.builder.op("fetch_and_add", ref, value, subcore)


def _expect_subcores(im: Importer) -> None:
    if im.has_subcores:
        return
    raise KernelTypeError(
        "subcore_barrier needs a mesh of vector subcores",
        [("kernel", im.kernel_name)],
        im.where,
        "pl.kernel(..., mesh=plsc.VectorSubcoreMesh(...)); for other meshes use "
        "pltpu.core_barrier",
    )


@RULES.rule("pallasite_semaphore_read")
def _semaphore_read(im: Importer, eqn: Any, *flat: Value) -> Value:
    (semaphore,) = _views(im, eqn)
    _expect_semaphore(im, semaphore)
    return im.builder.op("sem_read", semaphore)
