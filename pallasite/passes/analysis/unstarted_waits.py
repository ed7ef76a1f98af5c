"""Waits that nothing can end are refused when a kernel is traced.

On a TPU such a wait never returns; elsewhere a program is a single thread, and
the wait would only change a count. Waits that come too early, or too often, depend on
what runs: checked mode reports those.
"""

from collections.abc import Mapping

from pallasite.errors import KernelTypeError
from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.passes.analysis.memory import Roots

# Ops that count semaphores up and down: the position of the semaphore.
_SIGNALS = {"copy_start": 2, "sem_signal": 0, "sem_signal_core": 0}
_WAITS = {"copy_wait": 2, "sem_wait": 0}


def refuse_endless_waits(kernel: Kernel) -> None:
    """Refuse a wait for a semaphore of the kernel that nothing in it counts up."""
    roots, ops = Roots(kernel), list(walk(kernel.body))
    own = {op.result for op in ops if op.name == "alloc"}
    zeros = {op.result for op in ops if op.name == "constant" and not op.attrs["value"]}
    counted = {roots.of(ref) for op in ops for ref in _semaphore(op, _SIGNALS)}
    for op in ops:
        for ref in _semaphore(op, _WAITS):
            root = roots.of(ref)
            waits = op.name == "copy_wait" or op.operands[1] not in zeros
            if waits and root in own and root not in counted:
                raise _refusal(kernel, op, root)


def _semaphore(op: Op, positions: Mapping[str, int]) -> tuple[Value, ...]:
    """The semaphore of an op, if it has one: a copy may go without."""
    place = positions.get(op.name)
    return () if place is None else op.operands[place : place + 1]


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
    return KernelTypeError(
        "the kernel waits for a semaphore that it never signals",
        [("kernel", kernel.name), ("semaphore", semaphore)],
        op.loc,
        "pl.semaphore_signal it, or start a copy with it, before the wait",
    )
