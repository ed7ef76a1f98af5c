"""Rejects, at trace time, waits that nothing can end.

On a TPU, and among warpgroups of a GPU, such a wait never returns; elsewhere a program
is a single thread, and the wait would only change a count. Waits that come too early,
or too often, depend on the run: checked mode reports those.
"""

from collections.abc import Mapping

from pallasite.errors import KernelTypeError
from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.passes.analysis.memory import Roots

# Ops that increment and decrement semaphores: the positions of the semaphores. Those
# that act on another device's, or another core's, act on this one's when run there.
_SIGNALS = {
    "copy_start": slice(2, 3),
    "remote_copy_start": slice(2, 4),
    "sem_signal": slice(0, 1),
    "sem_signal_core": slice(0, 1),
    "sem_signal_device": slice(0, 1),
    # Barriers of a GPU.
    "barrier_expect": slice(0, 1),
    "barrier_arrive": slice(0, 1),
    "cluster_arrive": slice(0, 1),
    "cluster_copy": slice(2, 3),
    "async_store": slice(2, 3),
    "tensor_commit": slice(0, 1),
}
_WAITS = {
    "copy_wait": slice(2, 3),
    "sem_wait": slice(0, 1),
    "sem_reach": slice(0, 1),
    "barrier_wait": slice(0, 1),
}


def refuse_endless_waits(kernel: Kernel) -> None:
    """Reject a wait for a semaphore of the kernel that nothing in it increments."""
    roots, ops = Roots(kernel), list(walk(kernel.body))
    own = {op.result for op in ops if op.name == "alloc"}
    zeros = {op.result for op in ops if op.name == "constant" and not op.attrs["value"]}
    counted = {roots.of(ref) for op in ops for ref in _semaphores(op, _SIGNALS)}
    for op in ops:
        for ref in _semaphores(op, _WAITS):
            root = roots.of(ref)
            waits = op.name[:4] != "sem_" or op.operands[1] not in zeros
            if waits and root in own and root not in counted:
                raise _refusal(kernel, op, root)


def _semaphores(op: Op, positions: Mapping[str, slice]) -> tuple[Value, ...]:
    """The semaphores of an op, if it has any: a copy may have none."""
    places = positions.get(op.name)
    return () if places is None else op.operands[places]


def _refusal(kernel: Kernel, op: Op, root: Value) -> KernelTypeError:
    semaphore = f"{root.name or 'semaphore'}: {root.type}"
    if op.name == "copy_wait":
        return KernelTypeError(
            "the kernel waits for a copy that it never starts",
            [
                ("kernel", kernel.name),
                ("destination", op.operands[1].type),
                ("semaphore", semaphore),
            ],
            op.loc,
            "start() it first, with the same semaphore",
        )
    if op.name == "barrier_wait":
        return KernelTypeError(
            "the kernel waits for a barrier that nothing in it arrives at",
            [("kernel", kernel.name), ("barrier", semaphore)],
            op.loc,
            "plgpu.barrier_arrive there, or start a copy that names the barrier",
        )
    return KernelTypeError(
        "the kernel waits for a semaphore that it never signals",
        [("kernel", kernel.name), ("semaphore", semaphore)],
        op.loc,
        "pl.semaphore_signal it, or start a copy with it, before the wait",
    )
