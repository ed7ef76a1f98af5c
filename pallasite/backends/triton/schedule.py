"""What a kernel must look like before it is emitted.

`check_types` rejects element types that a chip does not convert, `is_native` says which
ops stay as they are.
"""

from pallasite.backends.triton.flat_indices import ELEMENTS
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Kernel, Op, walk
from pallasite.ir.text import print_op
from pallasite.target import Gpu

# Ops that handle 4-bit numbers in a byte as they are; the rest compute in 32 bits.
_KEEPS_FOUR_BITS = {"load", "store", "cast", "constant", "dot", "select_n"}
_KEEPS_FOUR_BITS |= {"broadcast_in_dim", "reshape", "transpose", "slice", "debug_print"}


FIRST_E4M3 = 89  # sm_89; on chips before it, XLA ends the process
AMD_FLOATS = ("f8e4m3fnuz", "f8e5m2fnuz")


def check_types(kernel: Kernel, chip: Gpu) -> Kernel:
    """The kernel, if the chip converts all types that it computes with.

    Raises:
        UnsupportedError: it does not.
    """
    if chip.is_amd:
        return kernel
    lacks = {name: "only AMD's GPUs convert it" for name in AMD_FLOATS}
    if int(chip.arch.removeprefix("sm_")) < FIRST_E4M3:
        lacks["f8e4m3fn"] = f"sm_{FIRST_E4M3} is the first to convert f8e4m3fn"
    for op in walk(kernel.body):
        tiles = [v.type for v in (*op.results, *op.operands) if not v.is_ref]
        found = next((t for t in tiles if t.dtype.name in lacks), None)
        if found is not None:
            raise UnsupportedError(
                f"backend 'triton' does not support {found} on {chip.name}",
                [
                    ("op", print_op(op, regions=False)),
                    ("why", lacks[found.dtype.name]),
                    ("chip", f"{chip.name}, {chip.arch}"),
                ],
                op.loc or kernel.loc,
                "use float8_e5m2, or run the kernel with interpret=True",
            )
    return kernel


def is_native(native: frozenset[str], op: Op) -> bool:
    """Whether `emit.py` has an op natively with these operands."""
    integers = op.operands and not op.operands[0].type.dtype.is_float
    if op.name == "pow" and integers:
        return False
    if op.name == "integer_pow" and integers and op.attrs["y"] < 0:
        return False
    if op.name == "bitcast" and op.result.tile.shape != op.operands[0].tile.shape:
        return False
    if op.name == "gather" and ELEMENTS not in op.attrs:
        return False
    if op.name == "scan" and op.attrs["kind"] == "logsumexp":
        return False
    if _has_four_bits(op) and not op.regions and op.name not in _KEEPS_FOUR_BITS:
        return False
    return op.name in native


def _has_four_bits(op: Op) -> bool:
    tiles = (v.tile.dtype for v in (*op.operands, *op.results) if not v.is_ref)
    return any(dtype.bits == 4 for dtype in tiles)
