"""The JAX primitives of the kernel language, and the functions authors call.

Plain reads and writes (`ref[...]`, `ref[...] = x`) are JAX's own ref primitives. This
file has the others: program ids, masked and atomic access, async copies, semaphores,
prints. Primitives are staged into the kernel's jaxpr; `importer.py` imports them.
"""

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import jax.ref
import numpy as np
from jax.interpreters import mlir

from pallasite import config, jaxcompat
from pallasite.errors import KernelTypeError
from pallasite.language.device_ids import DeviceIdType, first_given, place_of
from pallasite.language.memory_spaces import (
    MemoryRef,
    MemorySpace,
    SemaphoreType,
    SharedSpace,
    as_memory_ref,
    is_semaphore_space,
    of_whom,
)
from pallasite.language.trace import innermost_grid, negative_size, user_location

ds = jax.ds
dslice = jax.ds
Slice: Any = type(jax.ds(0, 1))

_INT32 = jax.core.ShapedArray((), np.dtype("int32"))


def kernel_primitive(name: str, multiple_results: bool = False) -> jaxcompat.Primitive:
    """A primitive that is only meaningful inside a kernel."""
    primitive = jaxcompat.Primitive(f"pallasite_{name}")
    primitive.multiple_results = multiple_results

    def refuse(*args: Any, **params: Any) -> Any:
        raise _outside(name)

    primitive.def_impl(refuse)
    mlir.register_lowering(primitive, refuse)
    return primitive


def _outside(name: str) -> KernelTypeError:
    return KernelTypeError(
        f"pl.{name} can only be used inside a kernel",
        at=user_location(),
        fix="call it in a function passed to pl.pallas_call or pl.kernel",
    )


# --- a program's position in the grid ---

program_id_p = kernel_primitive("program_id")
num_programs_p = kernel_primitive("num_programs")
program_id_p.def_abstract_eval(lambda *, axis: _INT32)
num_programs_p.def_abstract_eval(lambda *, axis: _INT32)


def program_id(axis: int) -> jax.Array:
    """This program's index along a grid axis (int32)."""
    axis = _axis(axis, "program_id")
    _known_size(axis, "program_id")
    return program_id_p.bind(axis=axis)


def num_programs(axis: int) -> int | jax.Array:
    """The grid's size along an axis: an int if known at trace time, else an int32."""
    axis = _axis(axis, "num_programs")
    size = _known_size(axis, "num_programs")
    return num_programs_p.bind(axis=axis) if size is None else size


def _known_size(axis: int, asked: str) -> int | None:
    """The innermost grid's size along an axis, if it is known at trace time."""
    grid = innermost_grid()
    if grid is None:  # raised here, as a jaxpr that never runs would hide it
        raise _outside(asked)
    return grid.size(axis, asked)


def _axis(axis: Any, name: str) -> int:
    try:
        return int(axis.__index__())
    except (AttributeError, TypeError):
        raise KernelTypeError(
            f"pl.{name} takes a grid axis as an int, got {axis!r}",
            at=user_location(),
            fix="pass a Python int: 0 is the first axis",
        ) from None


# --- access with masks, and atomics: operands are the view's parts, flattened ---


def _view(ref: Any, idx: Any) -> Any:
    if isinstance(ref, SelectedRef):
        ref.refuse()
    if not jaxcompat.is_ref(ref):
        got = "None" if ref is None else f"a value of shape {np.shape(ref)}"
        raise KernelTypeError(
            f"expected a ref, got {got}",
            at=user_location(),
            fix="pass the ref itself (x_ref), not a value read from it (x_ref[...])",
        )
    return ref if idx is None else ref.at[idx]


def _masked_view(ref: Any, idx: Any) -> Any:
    """The view for a masked access, whose slices may end past the ref.

    JAX rejects those if it knows where they start, so the start is hidden from it.
    """
    try:
        return _view(ref, idx)
    except ValueError as error:
        if "Out of bound slice" not in str(error):
            raise
        entries = idx if isinstance(idx, tuple) else (idx,)
        return ref.at[tuple(map(_with_traced_start, entries))]


def _with_traced_start(entry: Any) -> Any:
    is_slice = hasattr(entry, "size") and hasattr(entry, "stride")
    if is_slice and isinstance(entry.start, int):
        start = jax.lax.add(np.int32(entry.start), np.int32(0))
        return ds(start, entry.size, entry.stride)
    return entry


def picked(ref_aval: Any, transforms: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a view."""
    shape, dtype = tuple(ref_aval.shape), ref_aval.dtype
    for t in transforms:
        shape, dtype = transformed(t, shape, dtype)
    return shape, dtype


def transformed(t: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """Shape and dtype after one view transform (JAX's classes, matched by name)."""
    kind = type(t).__name__
    if kind == "NDIndexer":
        return tuple(t.get_indexer_shape()), dtype
    if kind == "ReshapeTransform":
        return tuple(t.shape), dtype
    if kind == "TransposeTransform":
        return tuple(shape[d] for d in t.permutation), dtype
    if kind == "BitcastTransform":
        new = np.dtype(t.dtype)
        if new.itemsize != np.dtype(dtype).itemsize:
            rows = shape[-2] * np.dtype(dtype).itemsize // new.itemsize
            shape = (*shape[:-2], rows, shape[-1])
        return shape, new
    raise KernelTypeError(f"ref views of kind {kind} are not supported")


def _access_primitive(name: str, num_values: int, writes: bool) -> jaxcompat.Primitive:
    """A primitive on (ref, values..., flattened (transforms, mask, other))."""
    primitive = kernel_primitive(name)

    def abstract(ref: Any, *flat: Any, tree: Any, **params: Any) -> Any:
        transforms, _, other = jax.tree.unflatten(tree, flat[num_values:])
        shape, dtype = picked(ref, transforms)
        for value in (*flat[:num_values], other):
            if value is not None and (value.shape, value.dtype) != (shape, dtype):
                raise KernelTypeError(
                    "the value does not match the accessed elements",
                    [
                        ("value", value.str_short()),
                        ("picked", f"{np.dtype(dtype).name}{list(shape)}"),
                        ("ref", f"{np.dtype(ref.dtype).name}{list(ref.shape)}"),
                    ],
                    user_location(),
                    "broadcast or cast the value first",
                )
        effects = {jaxcompat.ref_effect(0)}
        if writes:
            effects.add(jaxcompat.ref_effect(0, writes=True))
        return jax.core.ShapedArray(shape, dtype), effects

    primitive.def_effectful_abstract_eval(abstract)
    return primitive


masked_load_p = _access_primitive("load", 0, writes=False)
masked_swap_p = _access_primitive("swap", 1, writes=True)
atomic_rmw_p = _access_primitive("atomic_rmw", 1, writes=True)
atomic_cas_p = _access_primitive("atomic_cas", 2, writes=True)


def _bind_access(primitive, ref, idx, values=(), mask=None, other=None, **params):
    view = _view(ref, idx) if mask is None else _masked_view(ref, idx)
    root, transforms = jaxcompat.ref_and_transforms(view)
    shape, dtype = picked(jaxcompat.aval_of(root), transforms)
    for size in shape:
        if size < 0:
            raise negative_size(
                size, [("ref", jaxcompat.aval_of(root))], user_location()
            )
    values = [jnp.asarray(v, dtype) for v in values]
    values = [jnp.broadcast_to(v, shape) if v.shape == () else v for v in values]
    if mask is not None:
        mask = _fit(_on_or_off(mask), shape, "mask", "it masks")
    if other is not None:
        other = _fit(jnp.asarray(other, dtype), shape, "other", "it replaces")
    flat, tree = jax.tree.flatten((transforms, mask, other))
    return primitive.bind(root, *values, *flat, tree=tree, **params)


def _on_or_off(mask: Any) -> Any:
    """A mask as bools. Nonzero integers are true, as for `jnp.where`."""
    mask = jnp.asarray(mask)
    if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise KernelTypeError(
            "mask= must be bool: True where an element is accessed",
            [("mask", f"{mask.dtype.name}{list(mask.shape)}")],
            user_location(),
            "compare first, as in mask=(positions < size)",
        )
    return mask.astype(bool)


def _fit(value: Any, shape: tuple[int, ...], name: str, role: str) -> Any:
    if value.shape == shape:
        return value
    try:
        return jnp.broadcast_to(value, shape)
    except ValueError:
        raise KernelTypeError(
            f"{name}= does not match the shape of the elements {role}",
            [(name, value.shape), ("elements", shape)],
            user_location(),
            fix="pass the shape of the elements, or one that broadcasts to it",
        ) from None


def load(
    ref: Any,
    idx: Any = None,
    *,
    mask: Any = None,
    other: Any = None,
    cache_modifier: str | None = None,
    eviction_policy: str | None = None,
    volatile: bool = False,
) -> jax.Array:
    """Read elements of a ref; where `mask` is false, nothing is read.

    Args:
        ref: the ref, or a view of it.
        idx: as in `ref[idx]`; None reads the whole ref.
        mask: bool array of the indexed shape.
        other: value of masked-off elements (default: unspecified); only with `mask`.
        cache_modifier, eviction_policy, volatile: accepted for compatibility.

    Returns:
        The indexed elements.
    """
    del cache_modifier, eviction_policy, volatile
    if mask is None:
        if other is not None:
            raise KernelTypeError(
                "other= is the value of masked-off elements, but there is no mask=",
                at=user_location(),
                fix="pass mask=, True where an element is read, or remove other=",
            )
        view = _view(ref, idx)
        return view[...]
    return _bind_access(masked_load_p, ref, idx, mask=mask, other=other)


def store(
    ref: Any,
    idx: Any = None,
    val: Any = None,
    *,
    mask: Any = None,
    eviction_policy: str | None = None,
) -> None:
    """Write elements of a ref; where `mask` is false, nothing is written.

    `pl.store(ref, idx, value)` and `pl.store(view, value)` are both accepted.
    """
    del eviction_policy
    if val is None:
        idx, val = None, idx
    if val is None:
        raise KernelTypeError(
            "pl.store needs a value to store",
            at=user_location(),
            fix="pl.store(ref, index, value)",
        )
    _bind_access(masked_swap_p, ref, idx, (val,), mask)


def swap(
    ref: Any,
    idx: Any,
    val: Any,
    *,
    mask: Any = None,
    eviction_policy: str | None = None,
    _function_name: str = "swap",
) -> jax.Array:
    """Write elements and return their old values; where a mask is off, return `val`."""
    del eviction_policy, _function_name
    return _bind_access(masked_swap_p, ref, idx, (val,), mask)


def _atomic(kind: str, doc: str):
    def atomic(x_ref_or_view: Any, idx: Any, val: Any, *, mask: Any = None):
        return _bind_access(atomic_rmw_p, x_ref_or_view, idx, (val,), mask, kind=kind)

    atomic.__name__ = atomic.__qualname__ = f"atomic_{kind}"
    atomic.__doc__ = f"Atomically {doc}, and return what was there before."
    return atomic


atomic_add = _atomic("add", "add to elements of a ref")
atomic_max = _atomic("max", "take the maximum with elements of a ref")
atomic_min = _atomic("min", "take the minimum with elements of a ref")
atomic_and = _atomic("and", "and with elements of a ref")
atomic_or = _atomic("or", "or with elements of a ref")
atomic_xor = _atomic("xor", "exclusive-or with elements of a ref")
atomic_xchg = _atomic("xchg", "replace elements of a ref")


def atomic_cas(ref: Any, cmp: Any, val: Any, idx: Any = None) -> jax.Array:
    """Atomically replace elements equal to `cmp`; return the old values."""
    return _bind_access(atomic_cas_p, ref, idx, (cmp, val))


# --- promises and debugging ---

multiple_of_p = kernel_primitive("multiple_of")
multiple_of_p.def_abstract_eval(lambda x, *, multiple: x)
debug_print_p = kernel_primitive("debug_print", multiple_results=True)
debug_check_p = kernel_primitive("debug_check", multiple_results=True)
delay_p = kernel_primitive("delay", multiple_results=True)
for _p in (debug_print_p, debug_check_p, delay_p):
    _p.def_effectful_abstract_eval(
        lambda *avals, **params: ([], {jaxcompat.debug_effect()})
    )


def multiple_of(x: Any, values: int | Sequence[int]) -> jax.Array:
    """Promise that `x` is a multiple of `values`; the result is `x`.

    Backends may use the promise for alignment. If it is broken, checked mode reports
    it; elsewhere behaviour is unspecified.
    """
    values = (values,) if isinstance(values, (int, np.integer)) else tuple(values)
    multiple = int(np.lcm.reduce(values))
    if multiple <= 0 or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
        raise KernelTypeError(
            f"pl.multiple_of takes integers and positive factors, got {x!r}, {values}",
            at=user_location(),
            fix="pl.multiple_of(start, 8)",
        )
    if isinstance(x, (int, np.integer)):
        if x % multiple:
            raise KernelTypeError(
                f"{x} is not a multiple of {multiple}",
                at=user_location(),
                fix="use a start that is, or remove pl.multiple_of",
            )
        return x  # type: ignore[return-value]
    return multiple_of_p.bind(x, multiple=multiple)


def debug_print(fmt: str, *args: Any) -> None:
    """Print from inside a kernel: `pl.debug_print("i {} x {}", i, x)`.

    Each program prints its own line. Values may be scalars, tiles or refs.
    """
    if not isinstance(fmt, str):
        raise KernelTypeError(
            f"pl.debug_print takes a format string, got {fmt!r}",
            at=user_location(),
            fix='pl.debug_print("x = {}", x)',
        )
    template, fields = positional_fields(fmt)
    if fields and set(fields) != set(range(len(args))):
        raise KernelTypeError(
            f"the fields of the format do not match {len(args)} values",
            [("format", repr(fmt)), ("fields", ", ".join(map(str, fields)))],
            user_location(),
            "use one {} per value, or {:.3f} and the like",
        )
    if not fields:
        template, fields = template + " {!s}" * len(args), list(range(len(args)))
    values = [x[...] if jaxcompat.is_ref(x) else jnp.asarray(x) for x in args]
    shown = [values[f] for f in fields if isinstance(f, int)]
    debug_print_p.bind(*shown, format=template)


def positional_fields(fmt: str) -> tuple[str, list[int | str]]:
    """The format with its fields in order, and which value each field shows.

    A field without a format shows its value as `print` would: numpy's scalars would
    otherwise format like the nearest Python float (4.199999809265137).
    """
    template, unnamed = "", 0
    fields: list[int | str] = []
    for text, name, spec, conversion in string.Formatter().parse(fmt):
        template += text.replace("{", "{{").replace("}", "}}")
        if name is None:
            continue
        if not name:
            fields.append(unnamed)
            unnamed += 1
        else:
            fields.append(int(name) if name.isdigit() else name)
        conversion = conversion or ("" if spec else "s")
        shown = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        template += "{" + shown + "}"
    return template, fields


def debug_check(condition: Any, message: str) -> None:
    """Fail the call with `message` if `condition` is false in any program."""
    if config.get("debug_checks"):
        debug_check_p.bind(jnp.asarray(condition, bool), message=message)


def delay(nanos: Any) -> None:
    """Wait at least `nanos` nanoseconds on hardware with a clock; else do nothing."""
    delay_p.bind(jnp.asarray(nanos, jnp.int32))


# --- async copies and semaphores: operands are flattened views ---

copy_p = kernel_primitive("copy", multiple_results=True)
sem_signal_p = kernel_primitive("semaphore_signal", multiple_results=True)
sem_signal_core_p = kernel_primitive("semaphore_signal_core", multiple_results=True)
remote_copy_p = kernel_primitive("remote_copy", multiple_results=True)
sem_signal_device_p = kernel_primitive("semaphore_signal_device", multiple_results=True)
sem_wait_p = kernel_primitive("semaphore_wait", multiple_results=True)
sem_read_p = kernel_primitive("semaphore_read")


def ref_effects(args: tuple[Any, ...]) -> set[Any]:
    """The effects of a primitive that may read and write the refs in its operands."""
    refs = [n for n, a in enumerate(args) if isinstance(a, jax.ref.AbstractRef)]
    reads = {jaxcompat.ref_effect(n) for n in refs}
    return reads | {jaxcompat.ref_effect(n, writes=True) for n in refs}


copy_p.def_effectful_abstract_eval(lambda *a, **_: ([], ref_effects(a)))
sem_signal_p.def_effectful_abstract_eval(lambda *a, **_: ([], ref_effects(a)))
sem_signal_core_p.def_effectful_abstract_eval(lambda *a, **_: ([], ref_effects(a)))
remote_copy_p.def_effectful_abstract_eval(lambda *a, **_: ([], ref_effects(a)))
sem_signal_device_p.def_effectful_abstract_eval(lambda *a, **_: ([], ref_effects(a)))
sem_wait_p.def_effectful_abstract_eval(lambda *a, **_: ([], ref_effects(a)))
sem_read_p.def_effectful_abstract_eval(lambda *a, **_: (_INT32, ref_effects(a)))


def flatten_views(*views: Any) -> tuple[list[Any], Any]:
    """Views as flat primitive operands, and the tree that rebuilds them."""
    for v in views:
        _view(v, None)
    parts = [jaxcompat.ref_and_transforms(v) for v in views]
    return jax.tree.flatten(parts)


def _picks_rows(ref: Any) -> bool:
    """Whether a view's last index begins with an array or ref of row indices."""
    _, transforms = jaxcompat.ref_and_transforms(ref)
    last: Any = transforms[-1] if transforms else None
    if not getattr(last, "indices", ()) or isinstance(last.indices[0], Slice):
        return False
    return bool(last.int_indexer_shape)


class SelectedRef:
    """One of several refs, selected by index: source or destination of a copy."""

    def __init__(self, index: Any, refs: Sequence[Any]):
        self.index, self.refs = jnp.asarray(index, jnp.int32), tuple(refs)

    def refuse(self, *_: Any) -> NoReturn:
        raise KernelTypeError(
            "a ref of pl.select_ref can only be the source or destination of a copy",
            [("refs", [jaxcompat.aval_of(r).str_short() for r in self.refs])],
            user_location(),
            "pltpu.async_copy(pl.select_ref(i, a_ref, b_ref.at[0]), c_ref, sem): "
            "slice the refs before they are selected",
        )

    __getitem__ = __setitem__ = refuse
    at = property(refuse)


def select_ref(idx: Any, *refs: Any) -> SelectedRef:
    """Selects one of several refs by index, for a copy from or to it.

    An index out of range selects the nearest ref.
    """
    if len(refs) < 2:
        raise KernelTypeError(
            f"pl.select_ref takes at least two refs, got {len(refs)}",
            at=user_location(),
            fix="pl.select_ref(i, a_ref, b_ref)",
        )
    for ref in refs:
        _view(ref, None)
    return SelectedRef(idx, refs)


class AsyncCopyDescriptor:
    """A copy between two refs: `start()` it, then `wait()` for it.

    A semaphore for reading alone (`src_sem`) is signalled when the copy has also
    written: what waits for the earlier of the two may wait for the later.
    """

    def __init__(self, src_ref: Any, dst_ref: Any, sem: Any, src_sem: Any = None):
        for what, ref in (("source", src_ref), ("destination", dst_ref)):
            if not jaxcompat.is_ref(ref) and not isinstance(ref, SelectedRef):
                raise KernelTypeError(
                    f"the {what} of a copy must be a ref, got {ref!r}",
                    at=user_location(),
                    fix="pass the ref, or a view of it: x_ref.at[...]",
                )
        if (sem is None) == (src_sem is None):
            raise KernelTypeError(
                "a copy within a device has one semaphore, "
                + ("got none" if sem is None else "got both sem and src_sem"),
                at=user_location(),
                fix="pass sem=; who waits for it waits for the read, too",
            )
        self.src_ref, self.dst_ref = src_ref, dst_ref
        self.sem = src_sem if sem is None else sem

    def _bind(self, action: str) -> None:
        for side in ("src_ref", "dst_ref"):
            selected = getattr(self, side)
            if isinstance(selected, SelectedRef):
                one = [self._with(side, ref, action) for ref in selected.refs]
                jax.lax.switch(selected.index, one)
                return
        flat, tree = flatten_views(self.src_ref, self.dst_ref, self.sem)
        copy_p.bind(*flat, tree=tree, action=action)

    def _with(self, side: str, ref: Any, action: str) -> Callable[[], None]:
        ends = {"src_ref": self.src_ref, "dst_ref": self.dst_ref, side: ref}
        return lambda: AsyncCopyDescriptor(**ends, sem=self.sem)._bind(action)

    def start(self, priority: int = 0, *, add: bool = False) -> None:
        """Start the copy; with `add`, add the source to the destination."""
        del priority
        if not add or _picks_rows(self.dst_ref):
            self._bind("add" if add else "start")
            return
        total = self.src_ref[...] + self.dst_ref[...]
        staged = _empty_ref(MemoryRef(total, MemorySpace.VMEM))
        staged[...] = total
        AsyncCopyDescriptor(staged, self.dst_ref, self.sem).start()

    def wait(self) -> None:
        self._bind("wait")

    wait_send = wait_recv = wait_read = wait_write = wait


def make_async_copy(
    src_ref: Any, dst_ref: Any, sem: Any = None, *, src_sem: Any = None
) -> AsyncCopyDescriptor:
    """Describe a copy from ref to ref; `.start()` starts it.

    Args:
        src_ref, dst_ref: the ends.
        sem: signalled when `dst_ref` is written.
        src_sem: instead of `sem`, for code that waits only for the read.
    """
    return AsyncCopyDescriptor(src_ref, dst_ref, sem, src_sem)


def async_copy(
    src_ref: Any,
    dst_ref: Any,
    sem: Any = None,
    *,
    src_sem: Any = None,
    priority: int = 0,
    add: bool = False,
) -> AsyncCopyDescriptor:
    """Start a copy; call `.wait()` on the result."""
    descriptor = make_async_copy(src_ref, dst_ref, sem, src_sem=src_sem)
    descriptor.start(priority, add=add)
    return descriptor


def sync_copy(src_ref: Any, dst_ref: Any, *, add: bool = False) -> None:
    """Copy from ref to ref (or pytrees of refs) and wait for completion."""

    def copy_each(sem: Any) -> None:
        sources, tree = jax.tree.flatten(src_ref, is_leaf=jaxcompat.is_ref)
        targets = tree.flatten_up_to(dst_ref)
        for source, target in zip(sources, targets, strict=True):
            async_copy(source, target, sem, add=add).wait()

    run_scoped(copy_each, SemaphoreType.DMA)


def semaphore_signal(
    sem_or_view: Any,
    inc: Any = 1,
    *,
    device_id: Any = None,
    device_id_type: DeviceIdType | None = None,
    core_index: Any = None,
) -> None:
    """Add to a semaphore: this core's, another core's, or another device's.

    Args:
        sem_or_view: the semaphore, named as this core's own.
        inc: how much to add.
        device_id: the target device, as in `make_async_remote_copy`; default: this one.
        device_id_type: the kind of `device_id`.
        core_index: the target core in the mesh of cores; default: this one.
    """
    flat, tree = flatten_views(sem_or_view)
    inc = jnp.asarray(inc, jnp.int32)
    device = None
    if device_id is not None:
        place = place_of(device_id, device_id_type)
        device, core_index = place.device, first_given(place.core, core_index)
    core = None if core_index is None else jnp.asarray(core_index, jnp.int32)
    if device is not None:
        cores = () if core is None else (core,)
        sem_signal_device_p.bind(inc, device, *cores, *flat, tree=tree)
    elif core is not None:
        sem_signal_core_p.bind(inc, core, *flat, tree=tree)
    else:
        sem_signal_p.bind(inc, *flat, tree=tree)


def semaphore_wait(sem_or_view: Any, value: Any = 1, *, decrement: bool = True) -> None:
    """Wait until a semaphore is at least `value`, then subtract it.

    Args:
        sem_or_view: a semaphore of this core.
        value: the count to wait for.
        decrement: False leaves the semaphore unchanged.
    """
    flat, tree = flatten_views(sem_or_view)
    amount = jnp.asarray(value, jnp.int32)
    sem_wait_p.bind(amount, *flat, tree=tree, decrement=bool(decrement))


def semaphore_read(sem_or_view: Any) -> jax.Array:
    """The count of a semaphore."""
    flat, tree = flatten_views(sem_or_view)
    return sem_read_p.bind(*flat, tree=tree)


# --- memory inside a kernel ---


def run_scoped(f: Any, *types: Any, collective_axes: Any = (), **kw_types: Any) -> Any:
    """Call `f` with newly allocated refs that live until it returns.

    Args:
        f: takes one ref per entry of `types` (pytrees allowed).
        types: `pltpu.VMEM(shape, dtype)`, `SemaphoreType.DMA`, or shape and dtype.
        collective_axes: with the name of the axis of warpgroups, all of them get the
            same memory; without it, in a `plgpu.kernel`, each gets its own.
        kw_types: like `types`, passed by keyword.

    Returns:
        What `f` returns.
    """
    leaves, tree = jax.tree.flatten((types, kw_types), is_leaf=_is_memory)
    refs = [allocate(leaf, collective_axes) for leaf in leaves]
    if config.get("poison_buffers"):
        for ref in refs:
            _poison(ref)
    args, kwargs = jax.tree.unflatten(tree, refs)
    result = f(*args, **kwargs)
    if any(jaxcompat.is_ref(leaf) for leaf in jax.tree.leaves(result)):
        raise KernelTypeError(
            "run_scoped cannot return a ref: its lifetime ends with it",
            at=user_location(),
            fix="return its value, ref[...]",
        )
    for ref in refs:
        jax.ref.free_ref(ref)
    return result


_POISONED = ("vmem", "smem", "any", "hbm")


def _poison(ref: Any) -> None:
    """NaNs, where memory is for floats."""
    is_data = getattr(jaxcompat.memory_space_of(ref), "value", None) in _POISONED
    if is_data and jnp.issubdtype(ref.dtype, jnp.floating):
        ref[...] = jnp.full(ref.shape, jnp.nan, ref.dtype)


def with_scoped(*types: Any, **kw_types: Any) -> Callable[..., Callable[..., Any]]:
    """`run_scoped` as a decorator: the refs follow the caller's arguments."""

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            body = functools.partial(f, *args, **kwargs)
            return run_scoped(body, *types, **kw_types)

        return call

    return decorate


def _is_memory(x: Any) -> bool:
    return as_memory_ref(x) is not None


def allocate(spec: Any, collective_axes: Any = ()) -> Any:
    return _empty_ref(of_whom(_expect_memory(spec), collective_axes))


def _expect_memory(spec: Any) -> MemoryRef:
    memory = as_memory_ref(spec)
    if memory is None:
        raise KernelTypeError(
            f"cannot allocate {spec!r}",
            at=user_location(),
            fix="pltpu.VMEM((128, 128), jnp.float32) or pltpu.SemaphoreType.DMA",
        )
    return memory


def _empty_ref(memory: MemoryRef) -> Any:
    shape = jax.ShapeDtypeStruct(memory.shape, memory.dtype)
    try:
        return jax.ref.empty_ref(shape, memory_space=memory.memory_space)
    except NotImplementedError:  # JAX has no such memory outside traced code
        raise _outside("run_scoped") from None


def get_global(what: Any) -> Any:
    """A zero-initialised allocation shared by all programs of a call.

    Only semaphores are supported. Each use allocates its own: pass it on to code that
    uses the same one.
    """
    memory = _expect_memory(what)
    if not is_semaphore_space(memory.memory_space):
        raise KernelTypeError(
            "get_global allocates semaphores only",
            [("got", f"{memory.dtype}{list(memory.shape)}")],
            user_location(),
            "pl.get_global(plgpu.SemaphoreType.REGULAR); memory that programs share is "
            "an output",
        )
    space = SharedSpace(memory.memory_space, None)
    return _empty_ref(MemoryRef(memory.shape, memory.dtype, space))
