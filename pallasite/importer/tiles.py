"""Import rules for ops on whole tiles: shape, cast, reduction, dot, sort, gather."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.importer.importer import Importer, tile_type
from pallasite.ir import types as T
from pallasite.ir.nodes import Value
from pallasite.ir.rule_table import RuleTable

RULES = RuleTable()


@RULES.rule(
    "copy",
    "pvary",
    "pbroadcast",
    "reduced_vary_cast",
    "copy_p",
    params="axes axis_name",
)
def _identity(im: Importer, eqn: Any, x: Value) -> Value:
    return x


@RULES.rule("optimization_barrier", params="")
def _identities(im: Importer, eqn: Any, *xs: Value) -> Sequence[Value]:
    return xs


@RULES.rule("convert_element_type", params="new_dtype")
def _convert(im: Importer, eqn: Any, x: Value) -> Value:
    return im.builder.cast(x, tile_type(eqn.outvars[0].aval, im.where).dtype)


@RULES.rule("bitcast_convert_type", params="new_dtype")
def _bitcast(im: Importer, eqn: Any, x: Value) -> Value:
    dtype = tile_type(eqn.outvars[0].aval, im.where).dtype
    return x if dtype == x.tile.dtype else im.builder.op("bitcast", x, dtype=dtype)


@RULES.rule("select_n", params="")
def _select_n(im: Importer, eqn: Any, which: Value, *cases: Value) -> Value:
    shape = eqn.outvars[0].aval.shape
    cases = tuple(im.builder.broadcast(c, shape) for c in cases)
    return im.builder.op("select_n", which, *cases)


@RULES.rule("clamp", params="")
def _clamp(im: Importer, eqn: Any, low: Value, x: Value, high: Value) -> Value:
    return im.builder.op("clamp", low, x, high)


@RULES.rule("add_any", params="")
def _add_any(im: Importer, eqn: Any, x: Value, y: Value) -> Value:
    return im.builder.op("add", x, y)


@RULES.rule("broadcast_in_dim", params="shape broadcast_dimensions")
def _broadcast_in_dim(im: Importer, eqn: Any, x: Value, *dynamic: Value) -> Value:
    p = eqn.params
    return im.builder.broadcast(x, p["shape"], p["broadcast_dimensions"])


@RULES.rule("broadcast_to", params="shape")
def _broadcast_to(im: Importer, eqn: Any, x: Value) -> Value:
    return im.builder.broadcast(x, eqn.outvars[0].aval.shape)


@RULES.rule("reshape", "squeeze", "expand_dims", params="new_sizes dimensions")
def _reshape(im: Importer, eqn: Any, x: Value, *dynamic: Value) -> Value:
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        x = im.builder.op("transpose", x, perm=tuple(eqn.params["dimensions"]))
    return reshape(im, x, tile_type(eqn.outvars[0].aval).shape)


def reshape(im: Importer, x: Value, shape: Sequence[int]) -> Value:
    if x.tile.shape == tuple(shape):
        return x
    return im.builder.op("reshape", x, shape=tuple(shape))


@RULES.rule("transpose", params="permutation")
def _transpose(im: Importer, eqn: Any, x: Value) -> Value:
    perm = tuple(eqn.params["permutation"])
    if perm == tuple(range(len(perm))):
        return x
    return im.builder.op("transpose", x, perm=perm)


@RULES.rule("iota", params="dtype shape dimension")
def _iota(im: Importer, eqn: Any, *dynamic: Value) -> Value:
    type_ = tile_type(eqn.outvars[0].aval, im.where)
    return im.builder.op("iota", type=type_, dim=eqn.params["dimension"])


@RULES.rule("empty", params="shape dtype")
def _empty(im: Importer, eqn: Any) -> Value:
    """Any numbers will do: zeros, which are the same in every run."""
    return im.builder.constant(0, tile_type(eqn.outvars[0].aval, im.where))


@RULES.rule("dce_sink", params="prevent_mlir_dce")
def _dce_sink(im: Importer, eqn: Any, x: Value) -> None:
    """Keeps a value from being removed as unused, which changes no result."""


@RULES.rule("concatenate", params="dimension")
def _concatenate(im: Importer, eqn: Any, *parts: Value) -> Value:
    return im.builder.op("concatenate", *parts, axis=eqn.params["dimension"])


@RULES.rule("slice", params="start_indices limit_indices strides")
def _slice(im: Importer, eqn: Any, x: Value) -> Value:
    p = eqn.params
    strides = p["strides"] or (1,) * x.tile.rank
    # JAX's own rules give numpy integers.
    bounds = (p["start_indices"], p["limit_indices"], strides)
    return take_slice(im, x, *(tuple(map(int, each)) for each in bounds))


def take_slice(
    im: Importer,
    x: Value,
    starts: Sequence[int],
    limits: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Value:
    strides = (1,) * x.tile.rank if strides is None else strides
    # JAX's own rules give numpy integers, as for pad.
    starts, limits, strides = (tuple(map(int, s)) for s in (starts, limits, strides))
    return im.builder.op("slice", x, starts=starts, limits=limits, strides=strides)


@RULES.rule("split", params="sizes axis")
def _split(im: Importer, eqn: Any, x: Value) -> list[Value]:
    axis, parts, first = eqn.params["axis"], [], 0
    for size in eqn.params["sizes"]:
        starts, limits = [0] * x.tile.rank, list(x.tile.shape)
        starts[axis], limits[axis] = first, first + size
        parts.append(take_slice(im, x, starts, limits))
        first += size
    return parts


@RULES.rule("unstack", params="axis")
def _unstack(im: Importer, eqn: Any, x: Value) -> list[Value]:
    axis = eqn.params["axis"]
    parts = []
    for n in range(x.tile.shape[axis]):
        starts, limits = [0] * x.tile.rank, list(x.tile.shape)
        starts[axis], limits[axis] = n, n + 1
        part = take_slice(im, x, starts, limits)
        parts.append(reshape(im, part, np.delete(x.tile.shape, axis).tolist()))
    return parts


@RULES.rule("stack", params="axis")
def _stack(im: Importer, eqn: Any, *parts: Value) -> Value:
    axis = eqn.params["axis"]
    shape = list(parts[0].tile.shape)
    shape.insert(axis, 1)
    widened = [reshape(im, p, shape) for p in parts]
    return im.builder.op("concatenate", *widened, axis=axis)


@RULES.rule("tile", params="reps")
def _tile(im: Importer, eqn: Any, x: Value) -> Value:
    reps = eqn.params["reps"]
    (result,) = im.splice(lambda v: _tile_by_broadcast(v, reps), [x])
    return result


def _tile_by_broadcast(x: Any, reps: Sequence[int]) -> Any:
    shape = [1] * (len(reps) - x.ndim) + list(x.shape)
    x = x.reshape([n for s in shape for n in (1, s)])
    wide = [n for r, s in zip(reps, shape, strict=True) for n in (r, s)]
    total = [r * s for r, s in zip(reps, shape, strict=True)]
    return jnp.broadcast_to(x, wide).reshape(total)


@RULES.rule("pad", params="padding_config")
def _pad(im: Importer, eqn: Any, x: Value, value: Value) -> Value:
    config = eqn.params["padding_config"]
    # JAX's own rules give numpy integers.
    low, high, interior = (tuple(int(row[n]) for row in config) for n in range(3))
    return im.builder.op("pad", x, value, low=low, high=high, interior=interior)


@RULES.rule("rev", params="dimensions")
def _rev(im: Importer, eqn: Any, x: Value) -> Value:
    return im.builder.op("rev", x, axes=tuple(eqn.params["dimensions"]))


# --- reductions, scans, dot ---


def _with_identity(im: Importer, x: Value) -> Value:
    """f8e8m0fnu has neither zero nor infinity, with which reductions begin."""
    return im.builder.cast(x, T.F32) if x.tile.dtype.name == "f8e8m0fnu" else x


def _reduction(kind: str):
    def reduction(im: Importer, eqn: Any, x: Value) -> Value:
        axes = tuple(eqn.params["axes"])
        if not axes:
            return x
        total = im.builder.op("reduce", _with_identity(im, x), kind=kind, axes=axes)
        return im.builder.cast(total, x.tile.dtype)

    return reduction


for _kind in ("sum", "prod", "max", "min", "and", "or", "xor"):
    RULES.rule(f"reduce_{_kind}", params="axes")(_reduction(_kind))


@RULES.rule("argmax", "argmin", params="axes index_dtype")
def _arg_reduce(im: Importer, eqn: Any, x: Value) -> Value:
    (axis,) = eqn.params["axes"]
    dtype = T.dtype_of(eqn.params["index_dtype"])
    kind = eqn.primitive.name.removeprefix("arg")
    x = _with_identity(im, x)
    return im.builder.op("arg_reduce", x, kind=kind, axis=axis, dtype=dtype)


def _scan(kind: str):
    def scan(im: Importer, eqn: Any, x: Value) -> Value:
        axis, reverse = eqn.params["axis"], bool(eqn.params["reverse"])
        wide = _with_identity(im, x)
        sums = im.builder.op("scan", wide, kind=kind, axis=axis, reverse=reverse)
        return im.builder.cast(sums, x.tile.dtype)

    return scan


for _kind in ("sum", "prod", "max", "min", "logsumexp"):
    RULES.rule(f"cum{_kind}", params="axis reverse")(_scan(_kind))


@RULES.rule("dot_general", params="dimension_numbers precision preferred_element_type")
def _dot_general(im: Importer, eqn: Any, lhs: Value, rhs: Value) -> Value:
    contract, batch = eqn.params["dimension_numbers"]
    result = tile_type(eqn.outvars[0].aval, im.where)
    return im.builder.op(
        "dot",
        lhs,
        rhs,
        contract=tuple(map(tuple, contract)),
        batch=tuple(map(tuple, batch)),
        dtype=result.dtype,
        precision=_precision(eqn.params.get("precision")),
    )


def _precision(precision: Any) -> str | None:
    if precision is None:
        return None
    if isinstance(precision, jax.lax.DotAlgorithm):  # a tuple, too
        return _algorithm_name(precision)
    if isinstance(precision, tuple):
        precision = max(precision, key=lambda p: getattr(p, "value", 0) or 0)
    name = getattr(precision, "name", str(precision))
    return None if name == "DEFAULT" else name.lower()


def _algorithm_name(algorithm: Any) -> str:
    """Of a `DotAlgorithm`, as JAX names its presets."""
    parts = ("lhs_precision_type", "rhs_precision_type", "accumulation_type")
    kinds = [_short(getattr(algorithm, part)) for part in parts]
    count = algorithm.num_primitive_operations
    return "_".join(kinds) + (f"_x{count}" if count > 1 else "")


def _short(kind: Any) -> str:
    """bf16 for bfloat16; what numpy does not have (tf32) is named already."""
    try:
        return np.dtype(kind).name.replace("bfloat", "bf").replace("float", "f")
    except TypeError:
        return str(getattr(kind, "name", kind)).lower()


# --- data-dependent selection on values ---


@RULES.rule("dynamic_slice", params="slice_sizes")
def _dynamic_slice(im: Importer, eqn: Any, x: Value, *starts: Value) -> Value:
    sizes = tuple(eqn.params["slice_sizes"])
    return im.builder.op("dynamic_slice", x, *starts[: x.tile.rank], sizes=sizes)


@RULES.rule("dynamic_update_slice", params="")
def _dynamic_update(im: Importer, eqn: Any, x: Value, u: Value, *starts: Value):
    return im.builder.op("dynamic_update_slice", x, u, *starts)


@RULES.rule("sort", params="dimension num_keys is_stable")
def _sort(im: Importer, eqn: Any, *operands: Value) -> Sequence[Value]:
    p = eqn.params
    return im.builder.emit(
        "sort",
        *operands,
        axis=p["dimension"],
        num_keys=p["num_keys"],
        stable=bool(p["is_stable"]),
    )


@RULES.rule("top_k", params="k axis is_stable")
def _top_k(im: Importer, eqn: Any, x: Value) -> list[Value]:
    """Stable in any case: of equal elements the first."""
    axis = eqn.params.get("axis", -1) % x.tile.rank
    return _largest(im, eqn, x, axis)


@RULES.rule("approx_top_k", params="k reduction_dimension is_max_k aggregate_to_topk")
def _approx_top_k(im: Importer, eqn: Any, x: Value) -> list[Value]:
    """The exact result is a valid approximation."""
    p = eqn.params
    axis = p["reduction_dimension"] % x.tile.rank
    if not p["aggregate_to_topk"]:
        raise im.unsupported(
            eqn, "aggregate_to_topk=False has a chip-dependent result size"
        )
    if p["is_max_k"]:
        return _largest(im, eqn, x, axis)
    values, places = _largest(im, eqn, im.builder.neg(x), axis)
    return [im.builder.neg(values), places]


def _largest(im: Importer, eqn: Any, x: Value, axis: int) -> list[Value]:
    values, places = im.builder.emit("top_k", x, axis=axis, k=eqn.params["k"])
    return [values, im.builder.cast(places, tile_type(eqn.outvars[1].aval).dtype)]


@RULES.rule("gather", params="dimension_numbers slice_sizes mode fill_value")
def _gather(im: Importer, eqn: Any, x: Value, indices: Value) -> Value:
    p = eqn.params
    result = tile_type(eqn.outvars[0].aval, im.where)
    fill = p.get("fill_value")
    return im.builder.op(
        "gather",
        x,
        indices,
        dimension_numbers=_dimension_numbers(p["dimension_numbers"], _GATHER_FIELDS),
        slice_sizes=tuple(p["slice_sizes"]),
        mode=mode_name(p["mode"]),
        fill_value=_fill_value(fill, result.dtype),
        type=result,
    )


def _fill_value(fill: Any, dtype: T.DType) -> Any:
    """What out-of-range reads give in fill mode: NaN, or the type's extreme."""
    if fill is not None:
        return np.asarray(fill).item()
    if dtype.is_float:
        return float("nan")
    if dtype.is_bool:
        return True
    if dtype.is_signed_int:
        return -(2 ** (dtype.bits - 1))
    return 2**dtype.bits - 1


_SCATTER_KINDS = {
    "scatter": "set",
    "scatter-add": "add",
    "scatter-sub": "add",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
    "scatter_add": "add",
    "scatter_sub": "add",
    "scatter_mul": "mul",
    "scatter_min": "min",
    "scatter_max": "max",
}


@RULES.rule(*_SCATTER_KINDS, params="dimension_numbers mode update_jaxpr")
def _scatter(im: Importer, eqn: Any, x: Value, indices: Value, updates: Value) -> Value:
    p = eqn.params
    if eqn.primitive.name == "scatter" and not _takes_updates(p["update_jaxpr"]):
        raise im.unsupported(eqn, "its update is a function of the old values")
    if eqn.primitive.name in ("scatter-sub", "scatter_sub"):
        updates = im.builder.neg(updates)
    return im.builder.op(
        "scatter",
        x,
        indices,
        updates,
        dimension_numbers=_dimension_numbers(p["dimension_numbers"], _SCATTER_FIELDS),
        kind=_SCATTER_KINDS[eqn.primitive.name],
        mode=mode_name(p["mode"]),
        type=x.tile,
    )


def _takes_updates(function: Any) -> bool:
    """Whether a scatter puts its updates in, without asking what was there."""
    if function is None:
        return True
    jaxpr, _ = jaxcompat.opened(function)
    return jaxpr.outvars[0] is jaxpr.invars[1]


_GATHER_FIELDS = (
    "offset_dims",
    "collapsed_slice_dims",
    "start_index_map",
    "operand_batching_dims",
    "start_indices_batching_dims",
)
_SCATTER_FIELDS = (
    "update_window_dims",
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)


def _dimension_numbers(numbers: Any, fields: Sequence[str]) -> tuple[Any, ...]:
    return tuple(tuple(getattr(numbers, f)) for f in fields)


def mode_name(mode: Any) -> str:
    """'clip', 'fill' or 'promise' (promised in bounds; treated as clip)."""
    name = getattr(mode, "name", str(mode)).lower()
    if "fill" in name or "drop" in name:
        return "fill"
    return "promise" if "promise" in name else "clip"


# --- primitives that are short for others ---


@RULES.rule("one_minus_square", params="")
def _one_minus_square(im: Importer, eqn: Any, x: Value) -> Value:
    return im.builder.sub(im.builder.like(1, x), im.builder.mul(x, x))


@RULES.rule("le_to", "lt_to", params="")
def _total_order(im: Importer, eqn: Any, x: Value, y: Value) -> Value:
    """Comparison in the total order of floats: -NaN < -inf < ... < inf < NaN."""
    compare = jnp.less_equal if eqn.primitive.name == "le_to" else jnp.less
    if not x.tile.dtype.is_float:
        return im.builder.op(eqn.primitive.name.removesuffix("_to"), x, y)
    word = {16: jnp.int16, 32: jnp.int32, 64: jnp.int64}[x.tile.dtype.bits]

    def key(v: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(v, word)
        return jnp.where(bits < 0, bits ^ np.iinfo(word).max, bits)

    (result,) = im.splice(lambda a, b: compare(key(a), key(b)), [x, y])
    return result


@RULES.rule("mulhi", params="")
def _mulhi(im: Importer, eqn: Any, x: Value, y: Value) -> list[Value]:
    """The upper half of the whole product, from the products of half words."""
    signed, bits = x.tile.dtype.is_signed_int, x.tile.dtype.bits
    word = np.dtype(f"uint{bits}")
    half, low = word.type(bits // 2), word.type(2 ** (bits // 2) - 1)

    def upper(a: Any, b: Any) -> Any:
        u, v = a.astype(word), b.astype(word)
        u0, u1, v0, v1 = u & low, u >> half, v & low, v >> half
        middle = u1 * v0 + ((u0 * v0) >> half)
        other = u0 * v1 + (middle & low)
        result = u1 * v1 + (middle >> half) + (other >> half)
        if signed:  # a negative word stands for itself less 2**bits
            result = result - jnp.where(a < 0, v, 0) - jnp.where(b < 0, u, 0)
        return result.astype(a.dtype)

    return im.splice(upper, [x, y])


@RULES.rule("polynomial", params="")
def _polynomial(im: Importer, eqn: Any, x: Value, *coefficients: Value) -> Value:
    """Horner's rule, from the highest coefficient down."""
    shape, b = tile_type(eqn.outvars[0].aval).shape, im.builder
    if jaxcompat.polynomial_lowest_first(eqn.primitive):
        coefficients = coefficients[::-1]
    x, result, *rest = (b.broadcast(v, shape) for v in (x, *coefficients))
    for c in rest:
        result = b.add(b.mul(result, x), c)
    return result


@RULES.rule("platform_index", params="platforms")
def _platform_index(im: Importer, eqn: Any) -> Value:
    return im.builder.index(0)


@RULES.rule("pallasite_elementwise_inline_asm")
def _inline_asm(im: Importer, eqn: Any, *values: Value) -> Sequence[Value]:
    p = eqn.params
    types = tuple(tile_type(v.aval, im.where) for v in eqn.outvars)
    return im.builder.emit(
        "inline_asm",
        *values,
        asm=p["asm"],
        constraints=p["constraints"],
        pack=p["pack"],
        types=types,
    )
