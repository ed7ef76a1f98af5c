"""How undefined elements propagate through ops: codes of results from operands.

`elementwise` and `tile_op` mirror the ops of the table on arrays of codes. A result
that does not depend on an undefined element (a select that does not choose it, a false
`and`) is defined.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallasite.interpret import numpy_tiles
from pallasite.ir.nodes import Op
from pallasite.ir.roles import Dot
from pallasite.ir.types import TileType
from pallasite.ops import meaning
from pallasite.ops.scaled import unpacked_array

Array = Any


class Partly:
    """An array with undefined elements: `codes` is 0 where it is defined."""

    __slots__ = ("codes", "value")

    def __init__(self, value: Array, codes: np.ndarray):
        self.value, self.codes = value, codes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype


def partly(value: Array, codes: Array | None) -> Array:
    """The value with its codes; the plain value where all are 0."""
    if codes is None or not codes.any():
        return value
    return Partly(value, np.asarray(codes))


def value_of(x: Array) -> Array:
    return x.value if type(x) is Partly else x


def codes_of(x: Array) -> np.ndarray | None:
    return x.codes if type(x) is Partly else None


def codes_or_zeros(x: Array) -> np.ndarray:
    return x.codes if type(x) is Partly else np.zeros(np.shape(x), np.int32)


def is_float(x: Array) -> bool:
    return meaning.is_float(x)


def merged(operands: Sequence[Array], shape: Sequence[int]) -> np.ndarray | None:
    """Undefined wherever an operand is; operands may be scalars."""
    result = None
    for x in operands:
        if type(x) is Partly:
            result = x.codes if result is None else np.maximum(result, x.codes)
    if result is None or result.shape == tuple(shape):
        return result
    return np.broadcast_to(result, shape)


# --- elementwise ---


def elementwise(name: str, operands: Sequence[Array], value: Array) -> Array | None:
    rule = _ELEMENTWISE.get(name)
    if rule is not None:
        return rule(operands)
    return merged(operands, np.shape(value))


def _select(operands: Sequence[Array]) -> np.ndarray:
    """The codes of the case that was chosen, and of the choice."""
    which, *cases = operands
    chosen = meaning.select_n(value_of(which), *map(codes_or_zeros, cases))
    unsure = codes_of(which)
    return chosen if unsure is None else np.maximum(chosen, unsure)


def _decided_by(deciding: Callable[[Array], Array]):
    """An operand that has the deciding value settles the result by itself."""

    def codes(operands: Sequence[Array]) -> np.ndarray | None:
        x, y = operands
        both = merged(operands, np.shape(value_of(x)))
        settled = np.zeros(np.shape(value_of(x)), bool)
        for v in (x, y):
            settled |= deciding(value_of(v)) & (codes_or_zeros(v) == 0)
        return None if both is None else np.where(settled, 0, both)

    return codes


def _is_all_ones(x: Array) -> Array:
    return x == meaning.not_(np.zeros_like(x))


def _product(operands: Sequence[Array]) -> np.ndarray | None:
    """An integer 0 times anything is 0; a float 0 times NaN is not."""
    if is_float(value_of(operands[0])):
        return merged(operands, np.shape(value_of(operands[0])))
    return _decided_by(lambda x: x == 0)(operands)


_ELEMENTWISE: dict[str, Callable[[Sequence[Array]], Any]] = {
    "select_n": _select,
    "and": _decided_by(lambda x: x == 0),
    "or": _decided_by(_is_all_ones),
    "mul": _product,
}


# --- ops on whole tiles ---


def tile_op(op: Op, operands: Sequence[Array]) -> list[Any]:
    """Codes of each result of a tile op."""
    codes = RULES[op.name](op, *operands)
    return codes if isinstance(codes, list) else [codes]


def _highest(operands: Sequence[Array]) -> np.int32:
    found = [x.codes.max(initial=0) for x in operands if type(x) is Partly]
    return np.int32(max(found, default=0))


def _move(op: Op, *operands: Array) -> list[np.ndarray]:
    """The op only moves elements: the codes move with them."""
    return list(numpy_tiles.run(op, [codes_or_zeros(x) for x in operands]))


def _reduce(op: Op, x: Partly) -> np.ndarray:
    axes, kind = tuple(op.attrs["axes"]), op.attrs["kind"]
    codes = np.maximum.reduce(x.codes, axis=axes, initial=0)
    if kind in ("and", "or"):
        deciding = (x.value == 0) if kind == "and" else _is_all_ones(x.value)
        settled = np.any(deciding & (x.codes == 0), axis=axes)
        codes = np.where(settled, 0, codes)
    return np.asarray(codes)


def _arg_reduce(op: Op, x: Partly) -> np.ndarray:
    return np.asarray(np.max(x.codes, axis=op.attrs["axis"]))


def _scan(op: Op, x: Partly) -> np.ndarray:
    axis, reverse = op.attrs["axis"], op.attrs["reverse"]
    codes = np.flip(x.codes, axis) if reverse else x.codes
    codes = np.maximum.accumulate(codes, axis)
    return np.flip(codes, axis) if reverse else codes


def _dot(op: Op, lhs: Array, rhs: Array) -> np.ndarray:
    """Undefined where the row or the column has an undefined element."""
    one, other = Dot.of(op).sides
    left = _contracted(codes_or_zeros(lhs), one.batch, one.contract)
    right = _contracted(codes_or_zeros(rhs), other.batch, other.contract)
    shared = len(one.batch)
    batch, rows, cols = left.shape[:shared], left.shape[shared:], right.shape[shared:]
    left = left.reshape(*batch, *rows, *(1,) * len(cols))
    right = right.reshape(*batch, *(1,) * len(rows), *cols)
    return np.maximum(left, right)


def _contracted(codes: np.ndarray, batch: Any, contract: Any) -> np.ndarray:
    rest = [d for d in range(codes.ndim) if d not in (*batch, *contract)]
    moved = codes.transpose([*batch, *rest, *contract])
    last = tuple(range(len(batch) + len(rest), codes.ndim))
    return np.maximum.reduce(moved, axis=last, initial=0) if last else moved


def _sort(op: Op, *operands: Array) -> list[np.ndarray]:
    """An undefined key can put anything anywhere along the axis."""
    axis = op.attrs["axis"]
    highest = np.zeros((), np.int32)
    for x in operands:
        if type(x) is Partly:
            highest = np.maximum(highest, x.codes.max(axis=axis, keepdims=True))
    return [np.broadcast_to(highest, np.shape(x)) for x in operands]


def _top_k(op: Op, x: Partly) -> list[np.ndarray]:
    """As for `sort`."""
    highest = x.codes.max(axis=op.attrs["axis"], keepdims=True)
    return [np.broadcast_to(highest, r.tile.shape) for r in op.results]


def _dynamic_slice(op: Op, x: Array, *starts: Array) -> np.ndarray:
    plain = [value_of(s) for s in starts]
    (codes,) = numpy_tiles.run(op, [codes_or_zeros(x), *plain])
    return np.maximum(codes, _highest(starts))


def _dynamic_update_slice(op: Op, x: Array, update: Array, *starts: Array):
    plain = [value_of(s) for s in starts]
    operands = [codes_or_zeros(x), codes_or_zeros(update), *plain]
    (codes,) = numpy_tiles.run(op, operands)
    return np.maximum(codes, _highest(starts))


def _gather(op: Op, x: Array, indices: Array) -> np.ndarray:
    codes_op = op.with_(attrs={**op.attrs, "fill_value": 0})
    (codes,) = numpy_tiles.run(codes_op, [codes_or_zeros(x), value_of(indices)])
    if type(indices) is not Partly:
        return codes
    # The slices that an undefined index vector names.
    offset_dims = op.attrs["dimension_numbers"][0]
    vectors = indices.codes.max(axis=-1)
    batch = iter(vectors.shape)
    shape = [1 if d in offset_dims else next(batch) for d in range(codes.ndim)]
    return np.maximum(codes, vectors.reshape(shape))


def _scatter(op: Op, x: Array, indices: Array, updates: Array) -> np.ndarray:
    kind = "set" if op.attrs["kind"] == "set" else "max"
    codes_op = op.with_(attrs={**op.attrs, "kind": kind})
    operands = [codes_or_zeros(x), value_of(indices), codes_or_zeros(updates)]
    (codes,) = numpy_tiles.run(codes_op, operands)
    return np.maximum(codes, _highest([indices]))


def _scaled(op: Op, values: Array, scales: Array) -> np.ndarray:
    by = unpacked_array(codes_or_zeros(scales))
    factors = np.repeat(by, values.shape[1] // by.shape[1], axis=1)
    return np.maximum(codes_or_zeros(values), factors)


def _bitcast(op: Op, x: Partly) -> np.ndarray:
    old, new = op.operands[0].tile.dtype.bits, op.attrs["dtype"].bits
    if old == new:
        return x.codes
    if old > new:
        return np.broadcast_to(x.codes[..., None], (*x.shape, old // new))
    return x.codes.max(axis=-1)


def bitcast_rows(codes: np.ndarray, before: TileType, after: TileType) -> np.ndarray:
    """Codes of a view whose element width changes along the second-last dimension."""
    old, new = before.dtype.bits, after.dtype.bits
    if old == new:
        return codes
    if old > new:
        return np.repeat(codes, old // new, axis=-2)
    factor = new // old
    rows = before.shape[-2] // factor
    split = codes.reshape(*before.shape[:-2], rows, factor, before.shape[-1])
    return split.max(axis=-2)


_MOVES = ("broadcast_in_dim", "reshape", "transpose", "slice", "concatenate", "pad")
# Of all tile ops with operands.
RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*_MOVES, "rev", "exchange"), _move),
    "reduce": _reduce,
    "arg_reduce": _arg_reduce,
    "scan": _scan,
    "dot": _dot,
    "scaled": _scaled,
    "sort": _sort,
    "top_k": _top_k,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "bitcast": _bitcast,
}
