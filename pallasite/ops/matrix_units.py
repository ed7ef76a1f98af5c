"""Instructions to one matrix unit, for authors who schedule a TPU's units themselves.

A right operand is pushed to a staging register, left operands are multiplied by it, and
the accumulated result is popped. The state of a unit is scratch of the kernel, and an
instruction's region expresses in plain ops what it does to that scratch: the evaluator
runs the region. `passes/lower/matrix_units.py` replaces the instruction with its
region, or removes the region if the chip has the instruction.
"""

from pallasite.ir.opdef import Attrs, Effect, OpDef, TypeRuleError, Unit, register
from pallasite.ir.types import Type
from pallasite.ops.effects import check_region

INSTRUCTIONS = ("clear", "push", "multiply", "pop")


def _matrix_unit(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    if attrs["instruction"] not in INSTRUCTIONS:
        raise TypeRuleError(f"{attrs['instruction']!r} is not one of {INSTRUCTIONS}")
    results = () if attrs["type"] is None else (attrs["type"],)
    for body in attrs.get("regions", ()):
        check_region(body, types, results)
    return results


register(
    OpDef(
        "matrix_unit",
        _matrix_unit,
        # `place`: the staging register of a push, otherwise the address of the
        # accumulator. `load`: the staging register from which a matmul first takes its
        # right operand.
        attrs=("instruction", "unit", "place", "load", "transpose", "type"),
        unit=Unit.MATRIX,
        effect=Effect.WRITE,
        regions=None,
        doc="an instruction of one matrix unit; its region, if any, defines its "
        "effect on the scratch that represents the unit",
    )
)
