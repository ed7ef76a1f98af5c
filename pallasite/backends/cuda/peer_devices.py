"""Memory and semaphores of other devices, through a table of addresses.

A kernel that reaches other devices has one operand, a table: first the number of the
device that the launch's first thread blocks run on, then a row per device, with the
addresses that its arrays have as seen from here, in the order of the kernel's
parameters, and that of its semaphores. So one launch per device runs the kernel, or one
launch of as many thread blocks as all devices have, which then are peers on one chip: a
block's number tells which device it stands for.

What is here has its place in the own row, and what is elsewhere is as far from the
other row's address as it is from the own one's. Semaphores count and are waited for in
the order that all devices see (`.sys`). Copies by the copy engine to other devices take
one of several tensor maps, one per device.
"""

from dataclasses import replace

from pallasite.backends.cuda import hopper
from pallasite.backends.cuda.explicit import MAP_BYTES
from pallasite.backends.cuda.memory import View
from pallasite.backends.cuda.semaphores import Semaphores
from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.ir.types import I32
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.device_numbers import talks_to_devices


class PeerDevices(Semaphores):
    """Emits what reaches other devices."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = 1
        self.arrays: tuple[Value, ...] = ()  # of a row of the table
        self.signalled: set[Value] = set()  # semaphores, by other devices
        self.far: dict[str, tuple[int, str]] = {}  # pointers there: array, device
        self.blocks_of_device = 1

    def note_devices(self, kernel: Kernel, roots: Roots) -> None:
        if not talks_to_devices(kernel.body):
            return
        ops = list(walk(kernel.body))
        counts = [op.attrs["count"] for op in ops if op.name == "device_number"]
        signals = [op for op in ops if op.name == "sem_signal_device"]
        if not counts:
            here = next(op for op in ops if op.name in RULES)
            self.refuse(
                here,
                "the number of devices is not known",
                "name devices by axes of the mesh, and ask for an index along one "
                "(jax.lax.axis_index)",
            )
        self.devices, self.arrays = max(counts), kernel.params
        self.signalled = {roots.of(op.operands[0]) for op in signals}
        for name in hopper.SEMAPHORES:
            text = hopper.SEMAPHORES[name].replace(".gpu.", ".sys.")
            self.instructions[name] = text

    @property
    def has_devices(self) -> bool:
        return bool(self.arrays)

    @property
    def row(self) -> int:
        return len(self.arrays) + 1

    @property
    def program_number(self) -> str:
        if not self.has_devices:
            return "(int)blockIdx.x"
        return f"(int)blockIdx.x % {self.blocks_of_device}"

    def table_lines(self, declared: list[str]) -> list[str]:
        """The start of the kernel, where its parameters become variables."""
        lines = [
            f"const int device = (int)peers[0] + (int)blockIdx.x / "
            f"{self.blocks_of_device};",
            f"const u64* own = peers + 1 + (i64)device * {self.row};",
        ]
        for n, text in enumerate([*declared, "int* semaphores"]):
            text = text.replace(" __restrict__", "")
            kind = text.rsplit(" ", 1)[0]
            lines.append(f"{text} = ({kind})own[{n}];")
        return lines

    def there(self, number: Value) -> tuple[str, str]:
        """Variables with the number of a device, and its row."""
        device, row = self.out.fresh("device"), self.out.fresh("there")
        inside = f"min(max({self.env[number].name}, 0), {self.devices - 1})"
        self.out.line(f"const int {device} = {inside};")
        self.out.line(f"const u64* {row} = peers + 1 + (i64){device} * {self.row};")
        return device, row

    def emit_device_number(self, op: Op) -> None:
        self.env[op.result] = self.let(I32, "device", op, "device")

    def emit_peer_device(self, op: Op) -> None:
        ref, number = op.operands
        view = self.views[ref]
        if view.memory not in self.arrays:
            self.refuse(op, "other devices reach the operands and results only")
        array = self.arrays.index(view.memory)
        device, row = self.there(number)
        pointer = self.out.fresh("far")
        self.out.line(
            f"auto* {pointer} = on_device({view.pointer}, own, {row}, {array});"
        )
        self.far[pointer] = array, device
        self.views[op.result] = replace(view, pointer=pointer)

    def map_place(self, view: View, box: list[int], swizzle: int, rounded: bool) -> str:
        if view.pointer not in self.far:
            return super().map_place(view, box, swizzle, rounded)
        array, device = self.far[view.pointer]
        numbers = [
            self.map_of(
                replace(
                    view, pointer=f"(const char*)peers[{1 + n * self.row + array}]"
                ),
                box,
                swizzle,
                rounded,
            )
            for n in range(self.devices)
        ]
        return f"maps + ({numbers[0]} + {device}) * {MAP_BYTES}"

    # --- semaphores ---

    def alloc_semaphores(self, op: Op, is_shared: bool) -> None:
        """One that other devices signal is in main memory, for each thread block."""
        if is_shared or op.result not in self.signalled:
            super().alloc_semaphores(op, is_shared)
            return
        ref, name = op.result.ref, self.out.fresh("count")
        place = f"{self.semaphores} + {self.program_number} * {ref.size}"
        self.out.line(f"int* {name} = semaphores + {place};")
        self.semaphores += self.blocks_of_device * ref.size
        self.views[op.result] = self.array(ref, name, op.result)

    def emit_signal_device(self, op: Op) -> None:
        semaphore, amount, number, *core = op.operands
        if core:
            self.refuse(op, "thread blocks of other devices are not named")
        self.engine_too()
        self.sync()
        _, row = self.there(number)
        place = self.place_of(semaphore)
        far = f"on_device({place}, own, {row}, {len(self.arrays)})"
        call = f"semaphore_signal({far}, {self.env[amount].name});"
        self.out.line(self.once + call)


RULES = {
    "device_number": PeerDevices.emit_device_number,
    "peer_device": PeerDevices.emit_peer_device,
    "sem_signal_device": PeerDevices.emit_signal_device,
}
