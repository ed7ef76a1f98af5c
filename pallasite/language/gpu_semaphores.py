"""Semaphores of `plgpu` kernels as upstream spells them.

Those of `pl.get_global` are counted by all thread blocks of a call; those in
`scratch_shapes` and of `pl.run_scoped` by the warpgroups of one.
"""

from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax

from pallasite.errors import SpecError
from pallasite.language import refs
from pallasite.language.memory_spaces import as_axes
from pallasite.language.peers import mesh_along
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
    places = mesh_along(as_axes(collective_axes))
    if len(places) == 1:
        refs.semaphore_signal(semaphore, value)
        return
    for place in places:
        refs.semaphore_signal(semaphore, value, device_id=place)
