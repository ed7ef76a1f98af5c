"""Import rules for refs: accesses, masks, atomics, copies, semaphores, allocation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError
from pallasite.importer import matrix_units
from pallasite.importer.importer import Importer, tile_type
from pallasite.importer.views import Picked, is_slice, pick, static, view
from pallasite.ir import types as T
from pallasite.ir.nodes import Value, full_index
from pallasite.ir.rule_table import RuleTable
from pallasite.language.refs import ds

RULES = RuleTable()

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
    picked = pick(im, ref, _transforms(eqn, 2), writes=True)
    old = _load(im, picked) if eqn.outvars[0] in im.used else value
    _store(im, picked, value)
    return old


@RULES.rule("addupdate", params="tree")
def _addupdate(im: Importer, eqn: Any, ref: Value, value: Value, *rest: Value) -> None:
    picked = pick(im, ref, _transforms(eqn, 2), writes=True)
    _store(im, picked, im.builder.add(_load(im, picked), value))


# --- ours: masks, atomics ---


def _parts(im: Importer, eqn: Any, values: int, ref: Value):
    """The access, its mask and its other, in the IR's dimension order."""
    transforms, mask, other = _transforms(eqn, 1 + values)
    masked, writes = mask is not None, eqn.primitive.name != "pallasite_load"
    picked = pick(im, ref, transforms, masked, writes)
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
    if im.threads is not None and type_.space in ("sem", "barrier_sem"):
        return im.threads.semaphore(im, eqn.outvars[0], type_)
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
    if is_slice(first) or static(first) is not None:
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
        slices = [e for e in indices if is_slice(e)]
        counts.append([e.size for e in slices if static(e.size) is None])
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
            "allocate SemaphoreType.DMA or SemaphoreType.REGULAR; index an array of "
            "them: sems.at[i]",
        )


@RULES.rule("pallasite_semaphore_signal", "pallasite_semaphore_wait")
def _semaphore(im: Importer, eqn: Any, amount: Value, *flat: Value) -> None:
    (semaphore,) = _views(im, eqn, 1)
    _expect_semaphore(im, semaphore)
    name = "sem_" + eqn.primitive.name.rsplit("_", 1)[1]
    keeps = not eqn.params.get("decrement", True)
    if keeps and im.threads is not None:
        name = "sem_reach"
    im.builder.emit(name, semaphore, amount)
    if keeps and im.threads is None:  # nothing else waits for it
        im.builder.emit("sem_signal", semaphore, amount)


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
