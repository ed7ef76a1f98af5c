"""Which device, and which of its cores, a `device_id` names.

Devices are those of the enclosing `shard_map`'s mesh, numbered in mesh order with the
last axis fastest: XLA's logical ids.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError
from pallasite.language.trace import user_location


class DeviceIdType(enum.Enum):
    """How a `device_id` names a device: by mesh coordinates, or by its number."""

    MESH = "mesh"
    LOGICAL = "logical"


@dataclass(frozen=True)
class Place:
    """The numbers of a device and a core; None means this one."""

    device: Any = None
    core: Any = None


def place_of(device_id: Any, kind: DeviceIdType | None) -> Place:
    """What a `device_id` names.

    Args:
        device_id: coordinates along all mesh axes (one number for a mesh of one axis);
            or a dict from axis names to coordinates, where an omitted axis keeps this
            device's coordinate and an axis of a mesh of cores selects a core; or the
            device's number (LOGICAL).
        kind: MESH by default.
    """
    if kind is DeviceIdType.LOGICAL:
        if isinstance(device_id, (tuple, list, dict)):
            raise _refusal("a LOGICAL device_id must be one number", device_id)
        return Place(_number(device_id))
    if isinstance(device_id, Mapping):
        return _by_name(device_id)
    coordinates = device_id if isinstance(device_id, (tuple, list)) else (device_id,)
    sizes = _mesh_sizes(device_id)
    if len(coordinates) != len(sizes):
        raise _refusal(
            f"a device_id of {len(coordinates)} coordinates for a mesh of "
            f"{len(sizes)} axes",
            device_id,
            "one coordinate per axis, or a dict of those that differ",
        )
    return Place(_ravelled(coordinates, sizes.values()))


def first_given(*choices: Any) -> Any:
    return next((c for c in choices if c is not None), None)


def _by_name(device_id: Mapping[Any, Any]) -> Place:
    mesh = jaxcompat.device_mesh()
    device_axes: dict[str, int] = {} if mesh is None else dict(mesh.shape)
    found: dict[str, Any] = {}
    cores: list[Any] = []
    for key, number in device_id.items():
        names: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
        if not set(names) <= set(device_axes):
            if len(names) != 1:
                raise _refusal(f"{names} are not axes of the device mesh", device_id)
            cores.append(_core(names[0], number, device_id))
            continue
        inner = 1
        for name in reversed(names):
            size = device_axes[name]
            part = number if len(names) == 1 else number // inner % size
            found[name], inner = part, inner * size
    if len(cores) > 1:
        raise _refusal("a device_id with two core axes", device_id)
    core = cores[0] if cores else None
    if not found:
        return Place(None, core)
    sizes = _mesh_sizes(device_id)
    coordinates = [
        found[name] if name in found else jax.lax.axis_index(name) for name in sizes
    ]
    return Place(_ravelled(coordinates, sizes.values()), core)


def _core(name: Any, number: Any, device_id: Any) -> Any:
    try:
        jax.lax.axis_size(name)
    except NameError:
        raise _refusal(
            f"there is no mesh axis {name!r}", device_id, "name an axis of the mesh"
        ) from None
    return _number(number)


def _mesh_sizes(device_id: Any) -> dict[str, int]:
    """Names and sizes of the device mesh's axes, which must all be manual."""
    mesh = jaxcompat.device_mesh()
    if mesh is None:
        raise _refusal(
            "a device_id by mesh coordinates needs a mesh of devices",
            device_id,
            "call the kernel inside jax.shard_map",
        )
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    if automatic:
        raise _refusal(
            "a kernel that communicates with other devices must be called where every "
            "mesh axis is manual",
            device_id,
            f"add {', '.join(sorted(automatic))} to axis_names of jax.shard_map",
        )
    return dict(mesh.shape)


def _ravelled(coordinates: Sequence[Any], sizes: Any) -> jax.Array:
    number: Any = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        number = number * size + coordinate
    return _number(number)


def _number(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def _refusal(what: str, device_id: Any, fix: str = "") -> KernelTypeError:
    mesh = jaxcompat.device_mesh()
    facts = [
        ("device_id", repr(device_id)),
        ("mesh", None if mesh is None else dict(mesh.shape)),
    ]
    return KernelTypeError(what, facts, user_location(), fix)
