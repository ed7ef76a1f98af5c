"""Views of refs and indices into them: JAX's view transforms become IR."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, RefIndexError
from pallasite.importer.importer import Importer
from pallasite.ir import types as T
from pallasite.ir.nodes import At, Gather, Index, Span, Value, full_index
from pallasite.language.trace import negative_size, non_integer_index
from pallasite.passes.analysis.memory import MAIN_MEMORY


class Picked:
    """The result of a chain of view transforms: a ref and one index into it."""

    def __init__(
        self,
        ref: Value,
        index: Index,
        operands: list[Value],
        front: int,
        repeated: tuple[int, ...] | None = None,
    ):
        self.ref, self.index, self.operands = ref, index, operands
        # Where JAX puts the gathered dimensions; the IR puts them first.
        self.gather_position = front
        # The shape with the repetitions of slices of stride 0, which the IR reads once.
        self.repeated = repeated

    def gather_rank(self) -> int:
        ranks = [
            v.tile.rank
            for e, v in zip(_dynamic(self.index), self.operands, strict=True)
            if isinstance(e, Gather)
        ]
        return ranks[0] if ranks else 0

    def to_jax(self, im: Importer, value: Value) -> Value:
        """What JAX has for what was read: gathered dimensions where JAX puts them, and
        slices of stride 0 repeated."""
        value = _swapped(im, value, self.gather_rank(), self.gather_position)
        if self.repeated is None:
            return value
        return im.builder.broadcast(value, self.repeated, range(value.tile.rank))

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
    im: Importer,
    ref: Value,
    transforms: Sequence[Any],
    masked: bool = False,
    writes: bool = False,
) -> Picked:
    """Follow view transforms; the last indexer becomes the access's own index."""
    expect_data(im, ref)
    transforms = [t for t in transforms if type(t).__name__ not in _NEUTRAL]
    while len(transforms) > 1 and _is_whole(transforms[-1]):  # as in ref.at[i][...]
        transforms.pop()
    last: Any = transforms[-1] if transforms else None
    if type(last).__name__ != "NDIndexer":
        ref = view(im, ref, transforms)
        return Picked(ref, full_index(ref.ref.shape), [], 0)
    ref = view(im, ref, transforms[:-1])
    repeats = _repeats(last)
    if repeats and writes:
        raise _one_place(
            im, ref, "cannot be written", "write one: ref[pl.ds(start, 1)] = value"
        )
    if masked and (repeats or _overhangs(last, ref.ref.shape)):
        return Picked(ref, *_element_index(im, ref, last), 0)
    index, operands, front = _index(im, ref, last)
    shape = tuple(last.get_indexer_shape()) if repeats else None
    return Picked(ref, index, operands, front, shape)


def _is_whole(transform: Any) -> bool:
    """Whether a view transform selects everything, in order."""
    if type(transform).__name__ != "NDIndexer":
        return False
    return all(
        is_slice(e) and (static(e.start), static(e.size), static(e.stride)) == (0, n, 1)
        for e, n in zip(transform.indices, transform.shape, strict=True)
    )


def _repeats(indexer: Any) -> bool:
    """Whether a slice has stride 0: one place, several times."""
    slices = [e for e in indexer.indices if is_slice(e)]
    return any(static(e.stride) == 0 and (static(e.size) or 2) > 1 for e in slices)


def _one_place(im: Importer, ref: Value, what: str, fix: str) -> RefIndexError:
    return RefIndexError(
        f"a slice of stride 0 {what}: all its elements are in one place",
        [("kernel", im.kernel_name), ("ref", f"{ref.name or 'ref'}: {ref.type}")],
        im.where,
        fix,
    )


_NEUTRAL = ("MemorySpaceCastTransform",)


def expect_data(im: Importer, ref: Value) -> None:
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
    # What is at another place has the same shape: the order makes no difference.
    for t in sorted(transforms, key=lambda t: type(t).__name__ not in _PLACES):
        kind = type(t).__name__
        if kind in _PLACES:
            ref = _PLACES[kind](im, ref, t)
        elif kind == "NDIndexer":
            if _repeats(t):
                raise _one_place(
                    im,
                    ref,
                    "is not a view",
                    "read it, ref[pl.ds(start, size, stride=0)], then index the value",
                )
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


def _on_device(im: Importer, ref: Value, transform: Any) -> Value:
    if ref.ref.space not in MAIN_MEMORY:
        raise KernelTypeError(
            "other devices reach main memory (GMEM) only",
            [("kernel", im.kernel_name), ("ref", f"{ref.name or 'ref'}: {ref.type}")],
            im.where,
            "copy it to an array in main memory; signal a semaphore with device_id=",
        )
    return im.builder.op("peer_device", ref, im.value(transform.device_id))


def _in_block(im: Importer, ref: Value, transform: Any) -> Value:
    if im.threads is None or ref.ref.space not in ("smem", "mbarrier"):
        raise KernelTypeError(
            "blocks of a cluster reach each other's shared memory and barriers only",
            [("kernel", im.kernel_name), ("ref", f"{ref.name or 'ref'}: {ref.type}")],
            im.where,
            "plgpu.SMEM or plgpu.Barrier in scratch_shapes of plgpu.kernel; main "
            "memory is that of all blocks",
        )
    names, numbers = transform.dims, transform.idxs
    axes = im.threads.axes_of(im, names)
    pairs = zip(names, numbers, strict=True)
    places = [im.value(n) for name, n in pairs if im.threads.cluster[name] in axes]
    return im.builder.op("peer_block", ref, *places, axes=axes) if axes else ref


def _on_all(im: Importer, ref: Value, transform: Any) -> Value:
    raise KernelTypeError(
        "a multicast ref is only for copy_smem_to_gmem",
        [("kernel", im.kernel_name), ("ref", f"{ref.name or 'ref'}: {ref.type}")],
        im.where,
        "plgpu.multimem_store(value, ref, axes), plgpu.multimem_load_reduce(ref, ...)",
    )


_PLACES: dict[str, Callable[[Importer, Value, Any], Value]] = {
    "PeerMemRef": _on_device,
    "ClusterRefTransform": _in_block,
    "MulticastRef": _on_all,
}


def _index(
    im: Importer, ref: Value, indexer: Any, places: Iterator[Value] | None = None
) -> tuple[Index, list[Value], int]:
    entries: list[At | Span | Gather] = []
    operands: list[Value] = []
    for d, entry in enumerate(indexer.indices):
        size = ref.ref.shape[d]
        if is_slice(entry):
            is_open = static(entry.size) is None
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


def is_slice(entry: Any) -> bool:
    return hasattr(entry, "size") and hasattr(entry, "stride")


def _element(im: Importer, entry: Any, place: Value) -> Value:
    """Where an element of a slice is in the ref."""
    b, first, stride = im.builder, static(entry.start), static(entry.stride)
    start = im.value(entry.start) if first is None else b.index(first)
    step = place if stride == 1 else b.mul(place, b.index(stride or 1))
    return b.add(b.cast(start, T.I32), step)


def _overhangs(indexer: Any, shape: Sequence[int]) -> bool:
    """Is a slice wider than the ref, or known to end outside it?"""
    for entry, n in zip(indexer.indices, shape, strict=True):
        if is_slice(entry):
            count, stride = static(entry.size), static(entry.stride)
            if count and stride is not None and count > 0:
                first = static(entry.start) or 0
                if first < 0 or first + (count - 1) * stride + 1 > n:
                    return True
    return False


def _element_index(im: Importer, ref: Value, indexer: Any) -> tuple[Index, list[Value]]:
    """The index of a masked access that hangs over the ref, element by element.

    Blocks rounded up to a power of two are read this way: masked-off elements may be
    outside.
    """
    b, entries, operands = im.builder, [], []
    numbered = [(d, e) for d, e in enumerate(indexer.indices) if is_slice(e)]
    shape = tuple(_size_and_stride(im, ref, d, e)[0] for d, e in numbered)
    for d, entry in enumerate(indexer.indices):
        if not is_slice(entry):
            point = _point(im, ref, d, ref.ref.shape[d], entry, operands)
            if isinstance(point, Gather):
                raise _outside(im, ref, d, indexer, ref.ref.shape[d])
            entries.append(point)
            continue
        dim = sum(map(is_slice, indexer.indices[:d]))
        _expect_integer(im, ref, d, entry.start)
        places = b.op("iota", type=T.TileType(shape, T.I32), dim=dim)
        stride = static(entry.stride)
        assert stride is not None
        places = b.mul(places, b.like(stride, places))
        first = static(entry.start)
        start = b.index(first) if first is not None else im.value(entry.start)
        start = _near(im, start, max(stride * shape[dim], 1), ref.ref.shape[d])
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
    count, stride = _size_and_stride(im, ref, d, entry)
    if stride == 0:  # `Picked.to_jax` repeats the element
        count, stride = min(count, 1), 1
    _expect_integer(im, ref, d, entry.start)
    start = static(entry.start)
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
    if first < 0 or first + span.extent > size:
        raise _outside(im, ref, d, f"{first}:{first + span.extent}", size)
    return span


def _size_and_stride(im: Importer, ref: Value, d: int, entry: Any) -> tuple[int, int]:
    facts = [("kernel", im.kernel_name), ("ref", ref.type), ("dimension", d)]
    count, stride = static(entry.size), static(entry.stride)
    if count is None or stride is None:
        raise KernelTypeError(
            "a slice of a ref needs a static size",
            facts,
            im.where,
            "use pl.ds(start, size) with an int size, and mask the rest",
        )
    if count < 0:
        raise negative_size(count, facts, im.where)
    return count, stride


def _point(
    im: Importer, ref: Value, d: int, size: int, entry: Any, operands: list[Value]
) -> At | Gather:
    root, transforms = jaxcompat.ref_and_transforms(entry)
    _expect_integer(im, ref, d, root)
    known = static(entry)
    if known is not None:
        position = known + size if known < 0 else known
        if not 0 <= position < size:
            raise _outside(im, ref, d, known, size)
        return At(position)
    value = im.value(root)
    if value.is_ref:  # it stands for the numbers in it
        value = im.builder.load(view(im, value, transforms))
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
    if jaxcompat.is_symbolic(entry):
        return
    facts = [("kernel", im.kernel_name), ("ref", ref.type), ("dimension", d)]
    if refused := non_integer_index(entry, facts, im.where):
        raise refused


def static(entry: Any) -> int | None:
    """A Python int if the index part is known now."""
    if isinstance(entry, (int, np.integer)):
        return int(entry)
    if hasattr(entry, "val") and np.ndim(entry.val) == 0:
        return int(entry.val)
    return entry if jaxcompat.is_symbolic(entry) else None


def _outside(im: Importer, ref: Value, d: int, index: Any, size: int) -> RefIndexError:
    return RefIndexError(
        f"index {index} is out of bounds for dimension {d} of the ref, which has "
        f"{size} elements",
        [("kernel", im.kernel_name), ("ref", f"{ref.name or 'ref'}: {ref.type}")],
        im.where,
        f"valid indices are {-size} to {size - 1}",
    )
