"""Copies and signals to other devices and cores.

Devices are named by their logical ids, as in the IR. Waits are the same as for local
copies: each semaphore counts on the core that waits for it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pallasite.backends.tpu.memory import Memory
from pallasite.backends.tpu.views import View
from pallasite.errors import SpecError
from pallasite.ir.nodes import Kernel, Op, walk


def check_collective_id(kernel: Kernel, params: Mapping[str, Any]) -> None:
    """A barrier semaphore needs an id by which all devices find the same one; without
    an id, libtpu itself makes each such kernel wait for the others."""
    barriers = [op for op in walk(kernel.body) if op.name == "barrier_semaphore"]
    has_id = params.get("collective_id") is not None
    facts = [("kernel", kernel.name)]
    if barriers and not has_id:
        raise SpecError(
            "a kernel that uses the barrier semaphore needs a collective_id",
            facts,
            barriers[0].loc or kernel.loc,
            "compiler_params=pltpu.CompilerParams(collective_id=0), with a different "
            "number for each kernel that synchronises differently",
        )
    if params.get("allow_collective_id_without_custom_barrier"):
        return
    if has_id and not barriers:
        raise SpecError(
            "collective_id identifies a kernel's barrier semaphore, which this kernel "
            "does not use",
            [*facts, ("collective_id", params["collective_id"])],
            kernel.loc,
            "remove it: all devices then wait for each other at the start",
        )


class Remote(Memory):
    """Emits a kernel's communication with other devices and cores."""

    def emit_remote_copy_start(self, op: Op) -> None:
        source, target, sent, received = (self.view(v) for v in op.operands[:4])
        views = (source, replace(target, fill=None), sent, received)
        texts = [" : ".join(self.as_memref(view)) for view in views]
        priority = op.attrs.get("priority") or 0
        attrs = f" {{priority = {priority} : i32}}" if priority else ""
        self.out.line(
            f"tpu.enqueue_dma source({texts[0]}) target({texts[1]})"
            f" source_semaphore({texts[2]}) target_semaphore({texts[3]})"
            f" device_id({self.name(op.operands[4])}){attrs}"
        )

    def emit_sem_signal_device(self, op: Op) -> None:
        device, *core = (self.name(v) for v in op.operands[2:])
        place = f"device_id {device}" + "".join(f" core_id {c}" for c in core)
        self._signal(op, place)

    def emit_sem_signal_core(self, op: Op) -> None:
        self._signal(op, f"core_id {self.name(op.operands[2])}")

    def _signal(self, op: Op, place: str) -> None:
        name, type_text = self.as_memref(self.view(op.operands[0]))
        amount = self.name(op.operands[1])
        self.out.line(f"tpu.sem_signal {name}, {amount} {place} : {type_text}")

    def emit_barrier_semaphore(self, op: Op) -> None:
        ref = op.result.ref
        name = self.out.value(f"tpu.sem_barrier : {View.whole('', ref).type}")
        self.views[op.result] = View.whole(name, ref)

    def emit_device_number(self, op: Op) -> str:
        return self.out.value("tpu.device_id : i32")


RULES = {
    "remote_copy_start": Remote.emit_remote_copy_start,
    "sem_signal_device": Remote.emit_sem_signal_device,
    "sem_signal_core": Remote.emit_sem_signal_core,
    "barrier_semaphore": Remote.emit_barrier_semaphore,
    "device_number": Remote.emit_device_number,
}
