"""Semaphores of `plgpu` kernels as upstream spells them.

Those of `pl.get_global` are counted by all thread blocks of a call; those in
`scratch_shapes` and of `pl.run_scoped` by the warpgroups of one.
"""

from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import product as each_of
from typing import Any

import jax

from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.language import refs
from pallasite.language.memory_spaces import as_axes
from pallasite.language.trace import user_location

SCOPES = ("sys", "gpu")


def _check_scope(scope: str) -> None:
    if scope not in SCOPES:
        raise SpecError(
            f"memory_scope must be 'sys' or 'gpu', got {scope!r}",
            at=user_location(),
            fix="leave it out",
        )


def semaphore_signal(
    semaphore: Any,
    inc: int | jax.Array = 1,
    *,
    device_id: Any = None,
    memory_scope: str = "sys",
) -> None:
    """Like `pl.semaphore_signal`; what the signal orders is not less with "gpu"."""
    _check_scope(memory_scope)
    refs.semaphore_signal(semaphore, inc, device_id=device_id)


def semaphore_wait(
    semaphore: Any,
    value: int | jax.Array = 1,
    *,
    decrement: bool = True,
    memory_scope: str = "sys",
) -> None:
    """Like `pl.semaphore_wait`."""
    _check_scope(memory_scope)
    refs.semaphore_wait(semaphore, value, decrement=decrement)


@dataclass(frozen=True)
class SemaphoreSignal:
    """One of the signals of `semaphore_signal_parallel`."""

    ref: Any
    _: KW_ONLY
    device_id: Any
    inc: int | jax.Array = 1


def semaphore_signal_parallel(*signals: SemaphoreSignal) -> None:
    """Signal several semaphores, in any order; here in that of the arguments."""
    for each in signals:
        refs.semaphore_signal(each.ref, each.inc, device_id=each.device_id)


def semaphore_signal_multicast(
    semaphore: Any,
    value: int | jax.Array = 1,
    *,
    collective_axes: Hashable | Sequence[Hashable],
) -> None:
    """Signal a semaphore on all devices along axes of the mesh, this one included."""
    names = as_axes(collective_axes)
    mesh = jaxcompat.device_mesh()
    known: dict[Hashable, int] = {} if mesh is None else dict(mesh.shape)
    others = [name for name in names if name not in known]
    if others:
        raise SpecError(
            f"{others[0]!r} is not an axis of the device mesh",
            [("collective_axes", names), ("mesh", known or "none")],
            user_location(),
            "call the kernel in jax.shard_map, and name axes of its mesh",
        )
    if all(size == 1 for size in known.values()):
        refs.semaphore_signal(semaphore, value)
        return
    for place in each_of(*(range(known[name]) for name in names)):
        to = dict(zip(names, place, strict=True))
        refs.semaphore_signal(semaphore, value, device_id=to)
