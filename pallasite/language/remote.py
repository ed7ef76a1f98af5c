"""Communication with other devices and cores: remote copies and barriers."""

import enum
from typing import Any

import jax
import numpy as np

from pallasite.errors import UnsupportedError
from pallasite.language.device_ids import DeviceIdType, place_of
from pallasite.language.helpers import when
from pallasite.language.memory_spaces import MemoryRef
from pallasite.language.refs import (
    AsyncCopyDescriptor,
    allocate,
    flatten_views,
    remote_copy_p,
    semaphore_signal,
    semaphore_wait,
)
from pallasite.language.trace import user_location


class DeviceBarrier(enum.Enum):
    """The space of `get_barrier_semaphore`'s semaphore; authors allocate nothing in
    it."""

    ONE = "device_barrier"


class RemoteCopyDescriptor(AsyncCopyDescriptor):
    """A copy to another device.

    `wait_send()` waits until the source has been read, `wait_recv()` until a copy from
    another device to the same destination here has arrived, `wait()` for both.
    """

    def __init__(
        self, src_ref: Any, dst_ref: Any, send_sem: Any, recv_sem: Any, device: Any
    ):
        super().__init__(src_ref, dst_ref, recv_sem)
        self.send_sem, self.device = send_sem, device

    def start(self, priority: int = 0, *, add: bool = False) -> None:
        """Start sending."""
        if add:
            raise UnsupportedError(
                "a remote copy that adds is not supported",
                at=user_location(),
                fix="copy to a buffer there, and add on that device",
            )
        views = (self.src_ref, self.dst_ref, self.send_sem, self.sem)
        flat, tree = flatten_views(*views)
        remote_copy_p.bind(self.device, *flat, tree=tree, priority=priority)

    def wait(self) -> None:
        self.wait_send()
        self.wait_recv()

    def wait_send(self) -> None:
        AsyncCopyDescriptor(self.src_ref, self.src_ref, self.send_sem).wait()

    def wait_recv(self) -> None:
        AsyncCopyDescriptor(self.dst_ref, self.dst_ref, self.sem).wait()

    wait_read, wait_write = wait_send, wait_recv


def make_async_remote_copy(
    src_ref: Any,
    dst_ref: Any,
    send_sem: Any,
    recv_sem: Any,
    device_id: Any,
    device_id_type: DeviceIdType | None = None,
) -> RemoteCopyDescriptor:
    """Describe a copy to another device; `.start()` starts it.

    Args:
        src_ref: what to send.
        dst_ref: the destination: the other device's memory, named as this device's own.
        send_sem: signalled here when `src_ref` has been read.
        recv_sem: signalled there when `dst_ref` has been written.
        device_id: coordinates along the axes of the enclosing `shard_map`'s mesh, or a
            dict of those that differ from this device's, or a number (LOGICAL).
        device_id_type: the kind of `device_id`; default: MESH.
    """
    place = place_of(device_id, device_id_type)
    if place.core is not None or place.device is None:
        raise UnsupportedError(
            "a copy into the memory of another core is not supported",
            [("device_id", repr(device_id))],
            user_location(),
            "copy to main memory, signal the other core, and let it copy from there",
        )
    return RemoteCopyDescriptor(src_ref, dst_ref, send_sem, recv_sem, place.device)


def async_remote_copy(
    src_ref: Any,
    dst_ref: Any,
    send_sem: Any,
    recv_sem: Any,
    device_id: Any,
    device_id_type: DeviceIdType | None = None,
) -> RemoteCopyDescriptor:
    """Start a copy to another device; wait on the result."""
    descriptor = make_async_remote_copy(
        src_ref, dst_ref, send_sem, recv_sem, device_id, device_id_type
    )
    descriptor.start()
    return descriptor


def get_barrier_semaphore(tag: Any = None) -> Any:
    """The semaphore that devices may signal before others have started the kernel.

    A kernel that uses it must wait, before its first copy or signal to another device,
    until that device has signalled. In a kernel that does not, all devices wait for
    each other at the start. `CompilerParams(collective_id=...)` says which kernels
    share a semaphore.
    """
    if tag is not None:
        raise UnsupportedError(
            "get_barrier_semaphore(tag=...) is not supported",
            [("tag", repr(tag))],
            user_location(),
            "pltpu.CompilerParams(collective_id=...) identifies the kernel's semaphore",
        )
    # JAX learns of a ref inside a kernel only from its own primitives.
    return allocate(MemoryRef((), np.int32, DeviceBarrier.ONE))


def core_barrier(sem: Any, *, core_axis_name: str) -> None:
    """Wait until every core along an axis of the mesh has arrived."""
    cores = jax.lax.axis_size(core_axis_name)
    here = jax.lax.axis_index(core_axis_name)
    for core in range(cores if cores > 1 else 0):

        @when(here != core)
        def _(core: int = core) -> None:
            semaphore_signal(sem, 1, core_index=core)

    if cores > 1:
        semaphore_wait(sem, cores - 1)
