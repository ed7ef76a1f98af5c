"""Which device a kernel runs on: queried in the kernel, not passed to it.

`lax.axis_index` of a device mesh is an operand of the call. A TPU's core knows its
device's number; an operand would have to be copied to scalar memory before the kernel
can address a neighbour. A GPU's kernel that has the addresses of other devices has its
device's number with them. The number is the one that copies and signals use, so this is
for kernels that have some: others take the operand.

Kernel in, Kernel out.
"""

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops

MESH_AXIS = "devices.mesh_axis"  # of a load of `lax.axis_index`: see its import
REMOTE = ("remote_copy_start", "sem_signal_device", "barrier_semaphore", "peer_device")


def talks_to_devices(block: Block) -> bool:
    """Whether all devices have to run the code at the same time."""
    return any(op.name in REMOTE for op in walk(block))


def ask_for_device_numbers(kernel: Kernel) -> Kernel:
    """The kernel with `device_number` in place of mesh positions passed as operands."""
    return map_ops(kernel, _asked) if talks_to_devices(kernel.body) else kernel


def _asked(op: Op, b: Rewriter) -> Value | None:
    if op.name != "load" or MESH_AXIS not in op.attrs:
        return None
    count, inner, size = op.attrs[MESH_AXIS]
    number = b.op("device_number", count=count)
    if inner > 1:
        number = b.op("div", number, b.index(inner))
    if inner * size < count:
        number = b.op("rem", number, b.index(size))
    return number
