"""Refs in other places: another thread block of the cluster, another device.

Every thread block of a cluster has the same shared memory, and every device of a mesh
the same arrays, so that a ref and the place name memory there. A view transform says
which place; `importer/views.py` turns it into a view of the IR.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product as each_of
from typing import Any, cast

import jax
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, SpecError
from pallasite.language.device_ids import DeviceIdType, place_of
from pallasite.language.memory_spaces import as_axes
from pallasite.language.trace import user_location

_Transform: Any = jaxcompat.view_transform()


class _Same(_Transform):
    """A view transform that changes neither shape nor dtype."""

    def transform_type(self, x: Any) -> Any:
        return x


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PeerMemRef(_Same):
    """The same memory on another device; `remote_ref` makes it, with a number."""

    device_id: Any
    device_id_type: Any = field(
        default=DeviceIdType.LOGICAL, metadata=dict(static=True)
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MulticastRef(_Same):
    """The same memory on all devices along axes of the mesh."""

    collective_axes: tuple[Hashable, ...] = field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ClusterRefTransform(_Same):
    """The same memory in another thread block of the cluster."""

    dims: tuple[Hashable, ...] = field(metadata=dict(static=True))
    idxs: tuple[Any, ...]


def _expect(ref: Any, what: str, refused: type | None = None) -> None:
    """Reject what is no ref, and a ref that is in another place already."""
    if not jaxcompat.is_ref(ref):
        raise KernelTypeError(
            f"{what} needs a ref, got a value",
            [("value", repr(ref))],
            user_location(),
            f"plgpu.{what}(x_ref, ...)",
        )
    _, transforms = jaxcompat.ref_and_transforms(ref)
    if refused is not None and any(isinstance(t, refused) for t in transforms):
        raise KernelTypeError(
            f"{what} of a ref that is on {_WHERE[refused]} already",
            at=user_location(),
            fix="begin with the kernel's own ref",
        )


_WHERE = {PeerMemRef: "another device", MulticastRef: "several devices"}


def remote_ref(
    ref: Any, device_id: Any, device_id_type: DeviceIdType | None = None
) -> Any:
    """The memory of another device that corresponds to `ref`, in main memory.

    What is stored there has to be waited for there: signal a semaphore of that device
    (`pl.semaphore_signal(sem, device_id=...)`) after the stores.

    Args:
        ref: an operand or a result of the kernel, or a view of one.
        device_id: coordinates along all axes of the enclosing `shard_map`'s mesh, or a
            dict of those that differ from this device's.
        device_id_type: how `device_id` names the device; MESH by default.
    """
    _expect(ref, "remote_ref", MulticastRef)
    place = place_of(device_id, device_id_type)
    if place.device is None or place.core is not None:
        raise KernelTypeError(
            "remote_ref needs a device of the mesh",
            [("device_id", repr(device_id))],
            user_location(),
            "name an axis of the device mesh; cluster_ref is for thread blocks",
        )
    return jaxcompat.transformed_ref(ref, PeerMemRef(place.device))


def multicast_ref(ref: Any, collective_axes: Hashable | Sequence[Hashable]) -> Any:
    """The memory of all devices along axes of the mesh that corresponds to `ref`, for
    `copy_smem_to_gmem`; this device is one of them."""
    _expect(ref, "multicast_ref", PeerMemRef)
    axes = as_axes(collective_axes)
    mesh_along(axes)
    return jaxcompat.transformed_ref(ref, MulticastRef(axes))


def cluster_ref(ref: Any, block_id: Mapping[Any, Any]) -> Any:
    """The shared memory, or barrier, of another thread block of the cluster.

    What is stored there has to be waited for there: arrive at a barrier of that block
    after the stores.

    Args:
        ref: shared memory or a barrier of this thread block.
        block_id: from axes of the cluster to positions; along the others, the block is
            in the position of this one.
    """
    _expect(ref, "cluster_ref")
    numbers = tuple(jnp.asarray(n, jnp.int32) for n in block_id.values())
    return jaxcompat.transformed_ref(ref, ClusterRefTransform(tuple(block_id), numbers))


def mesh_along(axes: Sequence[Hashable]) -> list[dict[Hashable, int]]:
    """The places along axes of the device mesh, each as a `device_id`."""
    mesh = jaxcompat.device_mesh()
    known: dict[Hashable, int] = {} if mesh is None else dict(mesh.shape)
    others = [name for name in axes if name not in known]
    if others:
        raise SpecError(
            f"{others[0]!r} is not an axis of the device mesh",
            [("collective_axes", tuple(axes)), ("mesh", known or "none")],
            user_location(),
            "call the kernel in jax.shard_map, and name axes of its mesh",
        )
    places = each_of(*(range(known[name]) for name in axes))
    return [dict(zip(axes, place, strict=True)) for place in places]


def each_device(ref: Any) -> list[Any] | None:
    """The refs that a multicast ref stands for; None: it is another ref."""
    root, transforms = jaxcompat.ref_and_transforms(ref)
    axes = [t.collective_axes for t in transforms if isinstance(t, MulticastRef)]
    if not axes:
        return None
    rest = [t for t in transforms if not isinstance(t, MulticastRef)]
    found = functools.reduce(jaxcompat.transformed_ref, rest, root)
    return [remote_ref(found, place) for place in mesh_along(axes[0])]


def multimem_store(
    source: Any, ref: Any, collective_axes: Hashable | Sequence[Hashable]
) -> None:
    """Store a value to the same place on all devices along axes of the mesh."""
    for there in each_device(multicast_ref(ref, collective_axes)) or ():
        there[...] = source


def multimem_load_reduce(
    ref: Any, *, collective_axes: Hashable | Sequence[Hashable], reduction_op: str
) -> jax.Array:
    """The same place on all devices along axes of the mesh, reduced.

    In the order of the devices, and sums of floats below 32 bits in float32, so that
    every device gets the same.

    Args:
        ref: what to read, in main memory.
        collective_axes: axes of the mesh.
        reduction_op: "add" (all dtypes), "min" or "max" (not for float32), "and", "or"
            or "xor" (integers).
    """
    dtype = jnp.dtype(ref.dtype)
    _check_reduction(reduction_op, dtype)
    small = reduction_op == "add" and jnp.issubdtype(dtype, jnp.floating)
    small = small and dtype.itemsize < 4
    parts = [x[...] for x in each_device(multicast_ref(ref, collective_axes)) or ()]
    if small:
        parts = [x.astype(jnp.float32) for x in parts]
    found = functools.reduce(_REDUCTIONS[reduction_op], parts)
    return cast(jax.Array, found.astype(dtype))


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def _check_reduction(name: str, dtype: Any) -> None:
    of_floats = jnp.issubdtype(dtype, jnp.floating)
    if name not in _REDUCTIONS:
        problem = f"there is no reduction {name!r}"
    elif name in ("and", "or", "xor") and of_floats:
        problem = f"{name!r} is for integers, not {dtype}"
    elif name in ("min", "max") and dtype == jnp.float32:
        problem = f"no chip has {name!r} of float32 over devices"
    else:
        return
    raise SpecError(
        f"multimem_load_reduce: {problem}",
        [("reduction_op", name), ("ref", str(dtype))],
        user_location(),
        f"one of {', '.join(_REDUCTIONS)}; load from remote_ref to reduce otherwise",
    )
