"""Ops on whole tiles for the emulation: one line of `lax` each."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.errors import no_assembly
from pallasite.ir.nodes import Op
from pallasite.ir.roles import Dot
from pallasite.ir.rule_table import RuleTable
from pallasite.ir.types import DType
from pallasite.ops.scaled import unpacked_array

Array = Any
RULES = RuleTable()


@RULES.rule("constant")
def _constant(op: Op) -> Array:
    type_ = op.attrs["type"]
    return jnp.full(type_.shape, op.attrs["value"], type_.dtype.np)


@RULES.rule("iota")
def _iota(op: Op) -> Array:
    type_ = op.attrs["type"]
    return lax.broadcasted_iota(type_.dtype.np, type_.shape, op.attrs["dim"])


@RULES.rule("broadcast_in_dim")
def _broadcast(op: Op, x: Array) -> Array:
    return lax.broadcast_in_dim(x, op.attrs["shape"], op.attrs["dims"])


@RULES.rule("reshape")
def _reshape(op: Op, x: Array) -> Array:
    return lax.reshape(x, op.attrs["shape"])


@RULES.rule("transpose")
def _transpose(op: Op, x: Array) -> Array:
    return lax.transpose(x, op.attrs["perm"])


@RULES.rule("bitcast")
def _bitcast(op: Op, x: Array) -> Array:
    return lax.bitcast_convert_type(x, op.attrs["dtype"].np)


@RULES.rule("slice")
def _slice(op: Op, x: Array) -> Array:
    return lax.slice(x, op.attrs["starts"], op.attrs["limits"], op.attrs["strides"])


@RULES.rule("concatenate")
def _concatenate(op: Op, *parts: Array) -> Array:
    return lax.concatenate(parts, op.attrs["axis"])


@RULES.rule("pad")
def _pad(op: Op, x: Array, value: Array) -> Array:
    """Crops by a slice: not all of XLA's passes handle negative padding."""
    edges = list(zip(op.attrs["low"], op.attrs["high"], strict=True))
    grown = [(max(low, 0), max(high, 0)) for low, high in edges]
    interior = op.attrs["interior"]
    x = lax.pad(x, value, [(*e, i) for e, i in zip(grown, interior, strict=True)])
    if edges == grown:
        return x
    starts = [min(max(-low, 0), n) for (low, _), n in zip(edges, x.shape, strict=True)]
    ends = [n - max(-high, 0) for (_, high), n in zip(edges, x.shape, strict=True)]
    return lax.slice(x, starts, list(map(max, starts, ends)))


@RULES.rule("rev")
def _rev(op: Op, x: Array) -> Array:
    return lax.rev(x, op.attrs["axes"])


@RULES.rule("exchange")
def _exchange(op: Op, x: Array) -> Array:
    axis, distance = op.attrs["axis"], op.attrs["distance"]
    pairs = (*x.shape[:axis], -1, 2, distance, *x.shape[axis + 1 :])
    return lax.rev(x.reshape(pairs), (axis + 1,)).reshape(x.shape)


_REDUCE = {
    "sum": lax.reduce_sum,
    "prod": lax.reduce_prod,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
    "xor": lax.reduce_xor,
}


@RULES.rule("reduce")
def _reduce(op: Op, x: Array) -> Array:
    return _REDUCE[op.attrs["kind"]](x, op.attrs["axes"])


@RULES.rule("arg_reduce")
def _arg_reduce(op: Op, x: Array) -> Array:
    fn = lax.argmax if op.attrs["kind"] == "max" else lax.argmin
    x = x.astype(jnp.int32) if _is_part_of_byte(op.operands[0].tile.dtype) else x
    return fn(x, op.attrs["axis"], op.attrs["dtype"].np)


_SCAN = {
    "sum": lax.cumsum,
    "prod": lax.cumprod,
    "max": lax.cummax,
    "min": lax.cummin,
    "logsumexp": lax.cumlogsumexp,
}


@RULES.rule("scan")
def _scan(op: Op, x: Array) -> Array:
    a = op.attrs
    return _SCAN[a["kind"]](x, axis=a["axis"], reverse=a["reverse"])


@RULES.rule("scaled")
def _scaled(op: Op, values: Array, scales: Array) -> Array:
    by = unpacked_array(scales.astype(jnp.float32))
    factors = jnp.repeat(by, values.shape[1] // by.shape[1], axis=1)
    return (values.astype(jnp.float32) * factors).astype(op.attrs["dtype"].np)


@RULES.rule("dot")
def _dot(op: Op, lhs: Array, rhs: Array) -> Array:
    a = op.attrs
    # XLA's CPU runtime lacks some matmuls of narrow types, and says so only at run
    # time; widened, they give the same numbers.
    types = [v.tile.dtype for v in op.operands]
    result = a["dtype"].np
    wide = np.dtype(np.int32) if _is_part_of_byte(a["dtype"]) else result
    if a["dtype"].is_float or any(map(_is_part_of_byte, types)):
        lhs, rhs = (
            x.astype(wide) if t.bits < 8 * wide.itemsize else x
            for x, t in zip((lhs, rhs), types, strict=True)
        )
    one, other = Dot.of(op).sides
    product = lax.dot_general(
        lhs,
        rhs,
        ((one.contract, other.contract), (one.batch, other.batch)),
        precision=_precision(a["precision"]),
        preferred_element_type=wide,
    )
    return product.astype(result)


def _is_part_of_byte(dtype: DType) -> bool:
    """Integers for which XLA's CPU runtime has few operations."""
    return dtype.is_integer and dtype.bits < 8


def _precision(name: str | None) -> str | None:
    """A `DotAlgorithmPreset` names instructions that not every platform has: the
    emulation is at least as exact as any of them."""
    return name if name in (None, "default", "high", "highest") else "highest"


@RULES.rule("dynamic_slice")
def _dynamic_slice(op: Op, x: Array, *starts: Array) -> Array:
    # Some releases of XLA merge slices of slices and forget that each is clamped.
    sizes = op.attrs["sizes"]
    starts = tuple(
        clamp_index(start, 0, n - size)
        for start, n, size in zip(starts, x.shape, sizes, strict=True)
    )
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


@RULES.rule("dynamic_update_slice")
def _dynamic_update_slice(op: Op, x: Array, update: Array, *starts: Array) -> Array:
    return update_slice(x, update, starts)


@RULES.rule("sort")
def _sort(op: Op, *operands: Array) -> Any:
    a = op.attrs
    narrow = [_is_part_of_byte(v.tile.dtype) for v in op.operands]
    wide = [
        x.astype(jnp.int32) if n else x for x, n in zip(operands, narrow, strict=True)
    ]
    results = lax.sort(
        wide, dimension=a["axis"], is_stable=a["stable"], num_keys=a["num_keys"]
    )
    return [r.astype(x.dtype) for r, x in zip(results, operands, strict=True)]


@RULES.rule("top_k")
def _top_k(op: Op, x: Array) -> Any:
    wide = x.astype(jnp.int32) if _is_part_of_byte(op.operands[0].tile.dtype) else x
    values, places = lax.top_k(wide, op.attrs["k"], axis=op.attrs["axis"])
    return values.astype(x.dtype), places


_MODES = {"clip": "clip", "fill": "fill", "promise": "clip"}


@RULES.rule("gather")
def _gather(op: Op, x: Array, indices: Array) -> Array:
    a = op.attrs
    numbers = lax.GatherDimensionNumbers(*a["dimension_numbers"])
    mode = _MODES[a["mode"]]
    fill = a["fill_value"] if mode == "fill" else None
    return lax.gather(x, indices, numbers, a["slice_sizes"], mode=mode, fill_value=fill)


_SCATTER = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "mul": lax.scatter_mul,
    "min": lax.scatter_min,
    "max": lax.scatter_max,
}


@RULES.rule("scatter")
def _scatter(op: Op, x: Array, indices: Array, updates: Array) -> Array:
    a = op.attrs
    numbers = lax.ScatterDimensionNumbers(*a["dimension_numbers"])
    return _SCATTER[a["kind"]](x, indices, updates, numbers, mode=_MODES[a["mode"]])


def int32(x: Any) -> Array:
    return jnp.asarray(x, jnp.int32)


def clamp_index(index: Any, low: int, high: int) -> Any:
    """An index, or a tile of indices, clamped to a range, as int32."""
    if isinstance(index, int) and isinstance(high, int):
        return min(max(index, low), high)
    index = index if hasattr(index, "dtype") else int32(index)
    if index.dtype.itemsize >= 4 and index.dtype != jnp.int32:
        # Clamp before the conversion, which wraps around.
        least = 0 if jnp.issubdtype(index.dtype, jnp.unsignedinteger) else low
        index = jnp.clip(index, index.dtype.type(least), jnp.asarray(high, index.dtype))
    return jnp.clip(int32(index), int32(low), int32(high))


def update_slice(array: Array, value: Array, starts: Sequence[Array]) -> Array:
    """dynamic_update_slice; starts are clamped, including negative ones.

    XLA on CPU moves a reshape of the result before the update and then overwrites what
    a shifted slice of `array` in `value` has yet to read (openxla/xla#49176). The
    barrier keeps them apart, and costs nothing: the update stays in place.
    """
    updated = lax.dynamic_update_slice(
        array, value, starts, allow_negative_indices=False
    )
    return lax.optimization_barrier(updated)


@RULES.rule("inline_asm")
def _inline_asm(op: Op, *operands: Array) -> Array:
    raise no_assembly(op)
