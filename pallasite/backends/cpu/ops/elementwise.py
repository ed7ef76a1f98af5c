"""Elementwise ops on tiles: a formula of the operands' elements, evaluated lazily.

`arithmetic.py` defines one element, `called_functions.py` decides whether it is inlined
or called.
"""

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm.writer import Val
from pallasite.backends.cpu.ops import arithmetic, called_functions
from pallasite.backends.cpu.tiles.tiles import Indices, formula
from pallasite.ir.nodes import Op


def emit_elementwise(e: Emitter, op: Op) -> None:
    result = op.result.tile
    dtypes = tuple(v.tile.dtype for v in op.operands)
    elements, attrs = {v: e.element(v) for v in op.operands}, op.own_attrs

    def element(indices: Indices) -> Val:
        # One evaluation per operand, however often it occurs: x * x of x * x of ...
        known = {v: at(indices) for v, at in elements.items()}
        values = [known[v] for v in op.operands]
        return called_functions.element(
            e.f, op.name, attrs, dtypes, result.dtype, values
        )

    operands = e.tiles_of(list(elements))
    tile = formula(result.shape, result.dtype, element, operands, pointwise=True)
    e.define_lazy(op, tile)


RULES = dict.fromkeys(arithmetic.NATIVE, emit_elementwise)
