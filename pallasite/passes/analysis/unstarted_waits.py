"""Waits that nothing can end are refused when a kernel is traced.

On a TPU such a wait never returns; elsewhere a program is one thread of control, and
the wait would only change a count. Waits that come too early, or too often, depend on
what runs: checked mode reports those.
"""

from pallasite.errors import KernelTypeError
from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.passes.analysis.carried import VIEWS

_ENDS = {"copy_start": 2, "copy_wait": 2, "sem_signal": 0, "sem_wait": 0}


def refuse_endless_waits(kernel: Kernel) -> None:
    """Refuse a wait for a semaphore of the kernel that nothing in it counts up."""
    roots: dict[Value, Value] = {}
    numbers: dict[Value, int] = {}
    counted: set[Value] = set()
    waits: list[tuple[Op, Value]] = []
    for op in walk(kernel.body):
        if op.name == "constant":
            numbers[op.result] = op.attrs["value"]
        elif op.name == "alloc" and op.result.ref.is_semaphore:
            roots[op.result] = op.result
        elif op.name in VIEWS and op.operands[0] in roots:
            roots[op.result] = roots[op.operands[0]]
        elif op.name in _ENDS:
            semaphores = op.operands[_ENDS[op.name] :][:1]
            for root in (roots[s] for s in semaphores if s in roots):
                if op.name in ("copy_start", "sem_signal"):
                    counted.add(root)
                elif op.name == "copy_wait" or numbers.get(op.operands[1]) != 0:
                    waits.append((op, root))
    for op, root in waits:
        if root not in counted:
            raise _refusal(kernel, op, root)


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
