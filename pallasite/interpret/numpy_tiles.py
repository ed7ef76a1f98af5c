"""Ops on whole tiles in numpy, as XLA defines them.

`run(op, operands)` gives an op's results. Reductions, scans and products of the small
float types are accumulated in float32 and rounded once. `numpy_gather.py` has gather
and scatter.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.errors import no_assembly
from pallasite.interpret import numpy_gather
from pallasite.interpret.numbers import run_rule
from pallasite.ir.nodes import Op
from pallasite.ir.roles import Dot
from pallasite.ir.rule_table import RuleTable
from pallasite.ir.types import DType
from pallasite.ops import meaning
from pallasite.ops.neutral import neutral
from pallasite.ops.scaled import unpacked_array

Array = Any
RULES = RuleTable()


def run(op: Op, operands: Sequence[Array]) -> Sequence[Array]:
    """The results of a tile op."""
    return run_rule(RULES, op, operands)


# --- shape ---


@RULES.rule("constant")
def _constant(op: Op) -> Array:
    type_ = op.attrs["type"]
    if not type_.shape:
        return np.array(op.attrs["value"]).astype(type_.dtype.np)[()]
    return np.full(type_.shape, op.attrs["value"], type_.dtype.np)


@RULES.rule("iota")
def _iota(op: Op) -> Array:
    type_, dim = op.attrs["type"], op.attrs["dim"]
    line = np.arange(type_.shape[dim]).astype(type_.dtype.np)
    line = line.reshape([-1 if d == dim else 1 for d in range(type_.rank)])
    return np.broadcast_to(line, type_.shape)


@RULES.rule("broadcast_in_dim")
def _broadcast(op: Op, x: Array) -> Array:
    shape, dims = op.attrs["shape"], op.attrs["dims"]
    if not np.ndim(x):
        return np.full(shape, x, x.dtype)  # quicker than a broadcast view
    if x.shape != shape:
        aligned = [1] * len(shape)
        for d, n in zip(dims, x.shape, strict=True):
            aligned[d] = n
        x = x.reshape(aligned)
    return np.broadcast_to(x, shape)


@RULES.rule("reshape")
def _reshape(op: Op, x: Array) -> Array:
    return np.reshape(x, op.attrs["shape"])


@RULES.rule("transpose")
def _transpose(op: Op, x: Array) -> Array:
    return np.transpose(x, op.attrs["perm"])


@RULES.rule("slice")
def _slice(op: Op, x: Array) -> Array:
    a = op.attrs
    parts = zip(a["starts"], a["limits"], a["strides"], strict=True)
    return x[tuple(slice(*part) for part in parts)]


@RULES.rule("concatenate")
def _concatenate(op: Op, *parts: Array) -> Array:
    return np.concatenate(parts, op.attrs["axis"])


@RULES.rule("pad")
def _pad(op: Op, x: Array, value: Array) -> Array:
    """Interior padding first; a negative low or high then crops."""
    low, high, interior = (op.attrs[k] for k in ("low", "high", "interior"))
    spread = [n + max(n - 1, 0) * mid for n, mid in zip(x.shape, interior, strict=True)]
    sizes = [max(0, lo + n + hi) for n, lo, hi in zip(spread, low, high, strict=True)]
    inner = np.full(spread, value, x.dtype)
    inner[tuple(slice(None, None, mid + 1) for mid in interior)] = x
    out = np.full(sizes, value, x.dtype)
    source, target = [], []
    for n, size, lo in zip(spread, sizes, low, strict=True):
        first, last = max(0, -lo), min(n, size - lo)
        source.append(slice(first, max(first, last)))
        target.append(slice(first + lo, max(first, last) + lo))
    if all(s.stop > s.start for s in source):
        out[tuple(target)] = inner[tuple(source)]
    return out


@RULES.rule("rev")
def _rev(op: Op, x: Array) -> Array:
    return np.flip(x, op.attrs["axes"])


@RULES.rule("exchange")
def _exchange(op: Op, x: Array) -> Array:
    axis = op.attrs["axis"]
    return np.take(x, np.arange(x.shape[axis]) ^ op.attrs["distance"], axis)


@RULES.rule("bitcast")
def _bitcast(op: Op, x: Array) -> Array:
    return bitcast(np.asarray(x), op.operands[0].tile.dtype, op.attrs["dtype"])


def bitcast(x: np.ndarray, old: DType, new: DType) -> Array:
    """The same bits as another type; low bits come first along the last dimension."""
    if old.bits == new.bits:
        return meaning.bitcast(x, dtype=new)
    if old.bits < 8 or new.bits < 8:
        return _bitcast_small(x, old, new)
    x = np.require(x, requirements="C")  # ascontiguousarray makes scalars 1-d
    if old.bits > new.bits:
        return x[..., None].view(new.np)
    return x.view(new.np)[..., 0]


def _bitcast_small(x: np.ndarray, old: DType, new: DType) -> Array:
    """Types of less than a byte: numpy keeps one per byte, the bits are packed."""
    bits = _unpack_bits(x, old)
    if old.bits < new.bits:
        bits = bits.reshape(*bits.shape[:-2], new.bits)
    elif old.bits > new.bits:
        bits = bits.reshape(*bits.shape[:-1], old.bits // new.bits, new.bits)
    width = 8 * new.np.itemsize
    padded = np.zeros((*bits.shape[:-1], width), np.uint8)
    padded[..., : new.bits] = bits
    packed = np.packbits(padded, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(new.np)[..., 0]


def _unpack_bits(x: np.ndarray, dtype: DType) -> np.ndarray:
    raw = np.require(x, requirements="C")[..., None].view(np.uint8)
    return np.unpackbits(raw, axis=-1, bitorder="little")[..., : dtype.bits]


# --- reductions and scans ---


def _wide(x: Array) -> Array:
    """Where sums of this type are accumulated: small types are widened."""
    kind = np.dtype(x.dtype).kind
    if kind == "f" and x.dtype.itemsize >= 4:
        return x
    if kind in "iub":
        return x
    return x.astype(np.int64 if "int" in x.dtype.name else np.float32)


def _narrow(value: Array, dtype: np.dtype) -> Array:
    return value if value.dtype == dtype else value.astype(dtype)


_ACCUMULATE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "logsumexp": np.logaddexp,
}


@RULES.rule("reduce")
def _reduce(op: Op, x: Array) -> Array:
    kind, axes = op.attrs["kind"], tuple(op.attrs["axes"])
    wide = _wide(x)
    options: dict[str, Any] = {"axis": axes}
    if kind in ("sum", "prod"):
        options["dtype"] = wide.dtype
    elif kind in ("max", "min") and not x.size:
        options["initial"] = neutral(kind, op.operands[0].tile.dtype)
    return _narrow(_ACCUMULATE[kind].reduce(wide, **options), x.dtype)


@RULES.rule("arg_reduce")
def _arg_reduce(op: Op, x: Array) -> Array:
    """numpy too takes the first of equals, and the first NaN if there is one."""
    fn = np.argmax if op.attrs["kind"] == "max" else np.argmin
    return fn(_wide(x), op.attrs["axis"]).astype(op.attrs["dtype"].np)


@RULES.rule("scan")
def _scan(op: Op, x: Array) -> Array:
    kind, axis = op.attrs["kind"], op.attrs["axis"]
    wide = _wide(x)
    if op.attrs["reverse"]:
        wide = np.flip(wide, axis)
    out = _ACCUMULATE[kind].accumulate(wide, axis, dtype=wide.dtype)
    if op.attrs["reverse"]:
        out = np.flip(out, axis)
    return _narrow(out, x.dtype)


# --- dot and sort ---


@RULES.rule("scaled")
def _scaled(op: Op, values: Array, scales: Array) -> Array:
    by = unpacked_array(np.asarray(scales).astype(np.float32))
    factors = np.repeat(by, values.shape[1] // by.shape[1], axis=1)
    product = np.asarray(values).astype(np.float32) * factors
    return product.astype(op.attrs["dtype"].np)


@RULES.rule("dot")
def _dot(op: Op, lhs: Array, rhs: Array) -> Array:
    dtype: DType = op.attrs["dtype"]
    lhs, rhs = (np.asarray(x).astype(_dot_type(x, dtype)) for x in (lhs, rhs))
    one, other = Dot.of(op).sides
    left, rows = _as_matrix(lhs, one.batch, one.contract, last=True)
    right, cols = _as_matrix(rhs, other.batch, other.contract, last=False)
    batch = tuple(lhs.shape[d] for d in one.batch)
    product = np.matmul(left, right).reshape((*batch, *rows, *cols))
    return _narrow(product, dtype.np)


def _dot_type(x: Array, result: DType) -> np.dtype:
    """Small floats accumulate in f32; bytes in f64, which is exact and fast."""
    if result.is_float:
        return np.dtype(np.float64 if result.bits == 64 else np.float32)
    if result.bits == 32 and x.dtype.itemsize == 1:
        return np.dtype(np.float64)
    return result.np


def _as_matrix(x: np.ndarray, batch: Any, contract: Any, last: bool):
    """Batch dimensions first, contracted ones last or second; the rest's shape."""
    rest = [d for d in range(x.ndim) if d not in (*batch, *contract)]
    order = [*batch, *rest, *contract] if last else [*batch, *contract, *rest]
    shape = [x.shape[d] for d in rest]
    sizes = [x.shape[d] for d in contract]
    m, k = int(np.prod(shape, dtype=int)), int(np.prod(sizes, dtype=int))
    matrix = [m, k] if last else [k, m]
    return x.transpose(order).reshape([x.shape[d] for d in batch] + matrix), shape


@RULES.rule("sort")
def _sort(op: Op, *operands: Array) -> Sequence[Array]:
    """Ascending by the first `num_keys` operands, NaN last, always stable."""
    axis = op.attrs["axis"]
    keys = [_sort_key(x) for x in operands[: op.attrs["num_keys"]]]
    order = np.lexsort(keys[::-1], axis)
    return [np.take_along_axis(x, order, axis) for x in operands]


def _sort_key(x: Array) -> Array:
    return x.astype(np.uint8) if x.dtype == np.bool_ else _wide(x)


@RULES.rule("top_k")
def _top_k(op: Op, x: Array) -> Sequence[Array]:
    axis, k = op.attrs["axis"], op.attrs["k"]
    order = np.argsort(~_in_total_order(x), axis, kind="stable")
    places = np.take(order, range(k), axis)
    return [np.take_along_axis(x, places, axis), places.astype(np.int32)]


def _in_total_order(x: Array) -> Array:
    """Integers or bools in the order of the elements: floats by their bits."""
    wide = x if x.dtype == np.bool_ else _wide(x)
    if wide.dtype.kind != "f":
        return wide
    bits = wide.view(np.dtype(f"i{wide.dtype.itemsize}"))
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


# --- data-dependent selection ---


def _clamped(starts: Sequence[Array], shape: Any, sizes: Any) -> tuple[slice, ...]:
    slices = []
    for start, n, size in zip(starts, shape, sizes, strict=True):
        first = min(max(int(start), 0), n - size)
        slices.append(slice(first, first + size))
    return tuple(slices)


@RULES.rule("dynamic_slice")
def _dynamic_slice(op: Op, x: Array, *starts: Array) -> Array:
    return x[_clamped(starts, x.shape, op.attrs["sizes"])]


@RULES.rule("dynamic_update_slice")
def _dynamic_update_slice(op: Op, x: Array, update: Array, *starts: Array) -> Array:
    out = np.array(x)
    out[_clamped(starts, x.shape, update.shape)] = update
    return out


@RULES.rule("gather")
def _gather(op: Op, x: Array, indices: Array) -> Array:
    a = op.attrs
    return numpy_gather.gather(
        x,
        np.asarray(indices),
        a["dimension_numbers"],
        a["slice_sizes"],
        a["fill_value"] if a["mode"] == "fill" else None,
    )


@RULES.rule("scatter")
def _scatter(op: Op, x: Array, indices: Array, updates: Array) -> Array:
    a = op.attrs
    return numpy_gather.scatter(
        x,
        np.asarray(indices),
        np.asarray(updates),
        a["dimension_numbers"],
        a["kind"],
        drop=a["mode"] == "fill",
    )


@RULES.rule("inline_asm")
def _inline_asm(op: Op, *operands: Array) -> Array:
    raise no_assembly(op)
