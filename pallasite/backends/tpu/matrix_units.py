"""Matrix units that the author schedules.

From generation 7 on, a unit accumulates in its own memory, and its instructions are
emitted unchanged. Earlier units return results at once: for them the instructions are
expanded to scratch and dots.
"""

from math import prod

from pallasite.backends.tpu.core import Core
from pallasite.backends.tpu.writer import tile_text
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Kernel, Op, walk
from pallasite.ir.types import TileType
from pallasite.passes.lower.matrix_units import keep_instructions, write_out
from pallasite.target import Tpu

FIRST_GENERATION = 7  # whose units have such instructions
FACTORS = ("bf16", "f32", "f8e4m3fn", "f8e5m2")


def schedule_units(kernel: Kernel, chip: Tpu | None) -> Kernel:
    """The instructions that the chip has, or their expansion.

    Raises:
        UnsupportedError: the chip has the instructions, but not for these operands.
    """
    if chip is None or chip.generation < FIRST_GENERATION:
        return write_out(kernel)
    for op in walk(kernel.body):
        if op.name == "matrix_unit":
            _check(kernel, op, chip)
    return keep_instructions(kernel)


def _check(kernel: Kernel, op: Op, chip: Tpu) -> None:
    size, instruction = chip.mxu_size, op.attrs["instruction"]
    why = None
    if op.attrs["unit"] >= chip.mxus:
        why = f"the chip has {chip.mxus} matrix units, numbered from 0"
    elif instruction in ("push", "multiply"):
        why = _unfit(op.operands[0].tile, instruction == "push", chip)
    elif instruction == "pop" and op.attrs["type"].shape[1] != size:
        why = f"accumulators have {size} columns"
    if why is None:
        return
    raise UnsupportedError(
        f"a matrix unit of {chip.name} does not support this {instruction}",
        [
            ("kernel", kernel.name),
            ("why", why),
            ("unit", op.attrs["unit"]),
            ("operand", op.operands[0].tile if op.operands else op.attrs["type"]),
        ],
        op.loc or kernel.loc,
        f"use a right operand of {size} x {size} and a left operand of {size} "
        f"columns, of {', '.join(FACTORS)}; or jnp.dot, which has no such limits",
    )


def _unfit(tile: TileType, is_right: bool, chip: Tpu) -> str | None:
    """Why a unit does not support an operand."""
    size, dtype = chip.mxu_size, tile.dtype
    if dtype.name not in FACTORS:
        return f"it supports {', '.join(FACTORS)}, not {dtype}"
    rows = chip.sublanes_of(dtype.bits)
    if is_right and tile.shape != (size, size):
        return f"a right operand must be {size} x {size}"
    if tile.shape[1] != size or tile.shape[0] % rows or not prod(tile.shape):
        return f"a left operand must have {size} columns and a multiple of {rows} rows"
    return None


def emit_matrix_unit(self: Core, op: Op) -> str | None:
    a = op.attrs
    unit = f"mxu_index = {a['unit']} : i32"
    if a["instruction"] == "pop":
        text = f"tpu.matmul_pop {a['place']} {{{unit}}} : {tile_text(op.result.tile)}"
        return self.out.value(text)
    factor = op.operands[0]
    name, type_text = self.name(factor), tile_text(self.tile_type(factor))
    if a["instruction"] == "push":
        attrs = [unit, f"staging_register = {a['place']} : i32"]
        attrs += ["transpose = true"] * a["transpose"]
        line = f"tpu.matmul_push_rhs {name}"
    else:
        load = a["load"]
        attrs = [] if load is None else [f"load_staged_rhs = {load} : i32"]
        attrs += [unit]
        line = f"tpu.matmul_acc_lhs {a['place']}, {name}"
    self.out.line(f"{line} {{{', '.join(attrs)}}} : {type_text}")
    return None


RULES = {"matrix_unit": emit_matrix_unit}
