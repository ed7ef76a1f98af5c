"""Ops on whole tiles: shape, reduction, scan, dot, sort, gather and scatter."""

from collections.abc import Callable
from math import prod
from typing import Any

from pallasite.ir.opdef import Attrs, OpDef, TypeRule, TypeRuleError, Unit, register
from pallasite.ir.types import I32, DType, TileType, Type
from pallasite.ops import decompose_gather, decompose_sort, decompose_tile
from pallasite.ops.elementwise import tiles

REDUCE_KINDS = ("sum", "prod", "max", "min", "and", "or", "xor")
SCAN_KINDS = ("sum", "prod", "max", "min", "logsumexp")


def _constant(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (attrs["type"],)


def _iota(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    result: TileType = attrs["type"]
    if not 0 <= attrs["dim"] < result.rank:
        raise TypeRuleError(f"dimension {attrs['dim']} is not one of {result}")
    return (result,)


def _broadcast(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    shape, dims = attrs["shape"], attrs["dims"]
    if len(dims) != x.rank or list(dims) != sorted(set(dims)):
        raise TypeRuleError(f"dims {dims} must be {x.rank} increasing dimensions")
    for n, d in zip(x.shape, dims, strict=True):
        if not 0 <= d < len(shape) or n not in (1, shape[d]):
            raise TypeRuleError(f"cannot broadcast {x} to {shape} along {dims}")
    return (x.with_shape(shape),)


def _reshape(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    if prod(attrs["shape"]) != x.size:
        raise TypeRuleError(f"cannot reshape {x} to {attrs['shape']}")
    return (x.with_shape(attrs["shape"]),)


def _transpose(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    perm: tuple[int, ...] = attrs["perm"]
    if sorted(perm) != list(range(x.rank)):
        raise TypeRuleError(f"{perm} is not a permutation of {x.rank} dimensions")
    return (x.with_shape([x.shape[d] for d in perm]),)


def _slice(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    starts, limits, strides = attrs["starts"], attrs["limits"], attrs["strides"]
    if not len(starts) == len(limits) == len(strides) == x.rank:
        raise TypeRuleError(f"needs one start, limit and stride per dimension of {x}")
    for n, lo, hi, s in zip(x.shape, starts, limits, strides, strict=True):
        if not (0 <= lo <= hi <= n and s > 0):
            raise TypeRuleError(f"slice {lo}:{hi}:{s} does not fit {n} elements")
    shape = [
        -(-(hi - lo) // s) for lo, hi, s in zip(starts, limits, strides, strict=True)
    ]
    return (x.with_shape(shape),)


def _concatenate(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    parts, first = tiles(types), tiles(types)[0]
    axis: int = attrs["axis"]
    for p in parts[1:]:
        if p.dtype != first.dtype or p.rank != first.rank:
            raise TypeRuleError(f"cannot concatenate {first} and {p}")
        if any(
            a != b
            for d, (a, b) in enumerate(zip(p.shape, first.shape, strict=True))
            if d != axis
        ):
            raise TypeRuleError(f"cannot concatenate {first} and {p} along axis {axis}")
    shape = list(first.shape)
    shape[axis] = sum(p.shape[axis] for p in parts)
    return (first.with_shape(shape),)


def _pad(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    x, value = tiles(types)
    low, high, interior = attrs["low"], attrs["high"], attrs["interior"]
    if value != TileType((), x.dtype) or len(low) != x.rank:
        raise TypeRuleError(f"cannot pad {x} with {value}, low {low}, high {high}")
    shape = [
        max(0, lo + n + hi + max(n - 1, 0) * mid)
        for n, lo, hi, mid in zip(x.shape, low, high, interior, strict=True)
    ]
    return (x.with_shape(shape),)


def _keep(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (tiles(types)[0],)


def _dropped(x: TileType, axes: tuple[int, ...]) -> list[int]:
    if any(not 0 <= a < x.rank for a in axes):
        raise TypeRuleError(f"axes {axes} are not dimensions of {x}")
    return [n for d, n in enumerate(x.shape) if d not in axes]


def _reduce(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    if attrs["kind"] not in REDUCE_KINDS:
        raise TypeRuleError(f"unknown reduction {attrs['kind']!r}")
    return (x.with_shape(_dropped(x, attrs["axes"])),)


def _arg_reduce(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    return (TileType(tuple(_dropped(x, (attrs["axis"],))), attrs["dtype"]),)


def _scan(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    if attrs["kind"] not in SCAN_KINDS:
        raise TypeRuleError(f"unknown scan {attrs['kind']!r}")
    _dropped(x, (attrs["axis"],))
    return (x,)


def _dims(pair: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    left, right = pair
    return left, right


def dot_type(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    lhs, rhs = tiles(types)
    lc, rc = _dims(attrs["contract"])
    lb, rb = _dims(attrs["batch"])
    dtype: DType = attrs["dtype"]
    for left, right in ((lc, rc), (lb, rb)):
        if [lhs.shape[d] for d in left] != [rhs.shape[d] for d in right]:
            raise TypeRuleError(
                f"{lhs} dimensions {left} do not match {rhs} dimensions {right}"
            )
    batch = [lhs.shape[d] for d in lb]
    rows = [n for d, n in enumerate(lhs.shape) if d not in (*lc, *lb)]
    cols = [n for d, n in enumerate(rhs.shape) if d not in (*rc, *rb)]
    return (TileType((*batch, *rows, *cols), dtype),)


def _dynamic_slice(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    x, *starts = tiles(types)
    sizes = attrs["sizes"]
    if len(starts) != x.rank or len(sizes) != x.rank:
        raise TypeRuleError(f"needs one start and one size per dimension of {x}")
    if any(s > n for s, n in zip(sizes, x.shape, strict=True)):
        raise TypeRuleError(f"sizes {sizes} exceed {x}")
    return (x.with_shape(sizes),)


def _dynamic_update_slice(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    x, update, *starts = tiles(types)
    if update.dtype != x.dtype or update.rank != x.rank or len(starts) != x.rank:
        raise TypeRuleError(f"cannot write {update} into {x}")
    return (x,)


def _exchange(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    axis: int = attrs["axis"]
    distance: int = attrs["distance"]
    n = x.shape[axis]
    if n & (n - 1) or distance & (distance - 1) or not 0 < distance < n:
        raise TypeRuleError(f"no elements {distance} apart to exchange among {n}")
    return (x,)


def _sort(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    parts = tiles(types)
    if any(p.shape != parts[0].shape for p in parts):
        raise TypeRuleError("operands of a sort must have the same shape")
    return parts


def _top_k(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    axis, k = attrs["axis"], attrs["k"]
    _dropped(x, (axis,))
    if not 0 <= k <= x.shape[axis]:
        raise TypeRuleError(f"no {k} elements along dimension {axis} of {x}")
    result = x.with_shape([k if d == axis else n for d, n in enumerate(x.shape)])
    return (result, result.with_dtype(I32))


def _typed(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (attrs["type"],)


def _inline_asm(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    results: tuple[TileType, ...] = attrs["types"]
    tiles = [t for t in (*types, *results) if isinstance(t, TileType)]
    if len(tiles) < len(types) + len(results) or len({t.shape for t in tiles}) > 1:
        raise TypeRuleError(
            "operands and results of assembly must be tiles of the same shape"
        )
    return results


_LOWER: dict[str, Callable[..., Any]] = {
    "rev": decompose_tile.rev,
    "exchange": decompose_tile.exchange,
    "pad": decompose_tile.pad,
    "dynamic_slice": decompose_tile.dynamic_slice,
    "dynamic_update_slice": decompose_tile.dynamic_update_slice,
    "reduce": decompose_tile.reduce,
    "scan": decompose_tile.scan,
    "arg_reduce": decompose_tile.arg_reduce,
    "sort": decompose_sort.sort,
    "top_k": decompose_sort.top_k,
    "gather": decompose_gather.gather,
    "scatter": decompose_gather.scatter,
}


def _row(
    name: str, rule: TypeRule, arity: int | None, attrs: tuple[str, ...], **kw: Any
) -> OpDef:
    lower = _LOWER.get(name)
    return register(OpDef(name, rule, arity, attrs=attrs, lower=lower, **kw))


_moves: dict[str, Any] = {"moves": True, "linear": (0,)}

_row("constant", _constant, 0, ("value", "type"), doc="a tile filled with one value")
_row("iota", _iota, 0, ("type", "dim"), doc="each element's position along `dim`")
_row("broadcast_in_dim", _broadcast, 1, ("shape", "dims"), **_moves)
_row("reshape", _reshape, 1, ("shape",), **_moves)
_row("transpose", _transpose, 1, ("perm",), **_moves)
_row("slice", _slice, 1, ("starts", "limits", "strides"), **_moves)
_row("concatenate", _concatenate, None, ("axis",))
_row("pad", _pad, 2, ("low", "high", "interior"), doc="negative low or high crops")
_row("rev", _keep, 1, ("axes",), **_moves)
_row(
    "exchange",
    _exchange,
    1,
    ("axis", "distance"),
    doc="element i moves to i xor `distance`; sizes are powers of two",
    **_moves,
)
_row("reduce", _reduce, 1, ("kind", "axes"), unit=Unit.ALU, max_ulp=4)
_row(
    "arg_reduce",
    _arg_reduce,
    1,
    ("kind", "axis", "dtype"),
    unit=Unit.ALU,
    doc="index of the max or min: the first one on ties, or the first NaN",
)
_row("scan", _scan, 1, ("kind", "axis", "reverse"), unit=Unit.ALU, max_ulp=4)
_row(
    "dot",
    dot_type,
    2,
    ("contract", "batch", "dtype", "precision"),
    unit=Unit.MATRIX,
    linear=(0, 1),
    doc="contract, batch: (lhs dims, rhs dims); result dims: batch, lhs free, rhs free",
)
_row("dynamic_slice", _dynamic_slice, None, ("sizes",), doc="starts are clamped")
_row("dynamic_update_slice", _dynamic_update_slice, None, (), doc="starts are clamped")
_row("sort", _sort, None, ("axis", "num_keys", "stable"), unit=Unit.ALU)
_row(
    "top_k",
    _top_k,
    1,
    ("axis", "k"),
    unit=Unit.ALU,
    doc="the k largest and their indices, lowest index first on ties; floats in total "
    "order: NaN above all numbers (with its sign bit set, below), -0.0 below 0.0",
)
_row(
    "gather",
    _typed,
    2,
    ("dimension_numbers", "slice_sizes", "mode", "fill_value", "type"),
    doc="XLA gather of a value; `dimension_numbers` as in lax.GatherDimensionNumbers",
)
_row(
    "inline_asm",
    _inline_asm,
    None,
    ("asm", "constraints", "pack", "types"),
    unit=Unit.ALU,
    doc="PTX instructions on groups of `pack` elements; on NVIDIA GPUs only",
)
_row(
    "scatter",
    _typed,
    3,
    ("dimension_numbers", "kind", "mode", "type"),
    doc="XLA scatter into a value; kind: set, add, mul, min or max",
)
