"""Elementwise ops on tiles: a formula of the operands' elements, evaluated lazily.

An op of reshaped tiles is a reshape of the op, because whoever stores that can go
through the elements in the first shape, without division of indices.

`arithmetic.py` defines one element, `called_functions.py` decides whether it is inlined
or called.
"""

from functools import partial

from pallasite.backends.cpu.emitter import Emitter
from pallasite.backends.cpu.llvm.writer import Val
from pallasite.backends.cpu.ops import arithmetic, called_functions
from pallasite.backends.cpu.tiles.tiles import Indices, Tile, formula, reshape
from pallasite.ir.nodes import Op, Value


def emit_elementwise(e: Emitter, op: Op) -> None:
    known = e.known.tile(e.f.module, op)
    if known is not None:
        e.define(op.result, known)
        return
    result = op.result.tile
    dtypes = tuple(v.tile.dtype for v in op.operands)
    shape, sources = _before_reshapes(e, op)
    attrs = op.own_attrs
    elements = {
        v: partial(sources[v].at, e.f) if v in sources else e.element(v)
        for v in op.operands
    }

    def element(indices: Indices) -> Val:
        # One evaluation per operand, however often it occurs: x * x of x * x of ...
        known = {v: at(indices) for v, at in elements.items()}
        values = [known[v] for v in op.operands]
        return called_functions.element(
            e.f, op.name, attrs, dtypes, result.dtype, values
        )

    operands = list(sources.values()) or e.tiles_of(list(elements))
    tile = formula(shape, result.dtype, element, operands, pointwise=True)
    e.define_lazy(op, reshape(e.f, tile, result.shape) if sources else tile)


def _before_reshapes(e: Emitter, op: Op) -> tuple[tuple[int, ...], dict[Value, Tile]]:
    """The shape that all operands had before they were reshaped, and these tiles.

    The op's own shape and no tiles, unless all others are equal everywhere.
    """
    own = op.result.tile.shape, dict[Value, Tile]()
    found = dict[Value, Tile]()
    for value in op.operands:
        for tile in e.tiles_of([value]):
            if tile.is_uniform:
                continue
            inner = tile.before_reshape
            if inner is None:
                return own
            found[value] = inner
    shapes = {tile.shape for tile in found.values()}
    return (shapes.pop(), found) if len(shapes) == 1 else own


RULES = dict.fromkeys(arithmetic.NATIVE, emit_elementwise)
