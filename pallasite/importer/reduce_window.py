"""Import rules for pooling, convolutions, and reductions by a given function.

No backend has an op for these. Each becomes slices, dots and the combining function
itself, written here as a JAX function and imported in place of the primitive.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite import jaxcompat
from pallasite.importer.importer import Importer
from pallasite.ir.nodes import Value
from pallasite.ir.rule_table import RuleTable
from pallasite.ops.neutral import neutral

RULES = RuleTable()
_WINDOW = "window_dimensions window_strides padding base_dilation window_dilation"

# What combines two tuples of arrays of one shape into one.
Combine = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def _combine_by(params: Any) -> Combine:
    """The function of scalars that JAX keeps as a jaxpr, for whole arrays."""
    jaxpr, consts = jaxcompat.opened(params["jaxpr"])
    consts = [*consts, *params.get("consts", ())]

    def combine(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
        fn = functools.partial(jax.core.eval_jaxpr, jaxpr, consts)
        for _ in range(left[0].ndim):
            fn = jax.vmap(fn)
        return fn(*left, *right)

    return combine


# --- reductions ---


@RULES.rule("reduce", params="jaxpr consts dimensions computation")
def _reduce(im: Importer, eqn: Any, *operands: Value) -> list[Value]:
    combine = _combine_by(eqn.params)
    axes = tuple(eqn.params["dimensions"])

    def fold(*args: Any) -> Sequence[Any]:
        arrays, initial = args[: len(args) // 2], args[len(args) // 2 :]
        rows = [_rows(x, axes) for x in arrays]
        start = [jnp.broadcast_to(i, rows[0].shape[1:]) for i in initial]
        return combine(start, _fold_pairs(combine, rows)) if len(rows[0]) else start

    return im.splice(fold, operands)


def _rows(x: Any, axes: Sequence[int]) -> Any:
    """The reduced dimensions as one in front, in their order."""
    kept = [d for d in range(x.ndim) if d not in axes]
    shape = [math.prod(x.shape[d] for d in axes), *(x.shape[d] for d in kept)]
    return jnp.transpose(x, (*sorted(axes), *kept)).reshape(shape)


def _fold_pairs(combine: Combine, rows: Sequence[Any]) -> Sequence[Any]:
    """Neighbours together until one row is left: XLA asks for associativity only."""
    while (size := rows[0].shape[0]) > 1:
        even = size // 2 * 2
        left, right = ([r[n:even:2] for r in rows] for n in (0, 1))
        paired = combine(left, right)
        if even < size:
            ends = zip(paired, rows, strict=True)
            paired = [jnp.concatenate([p, r[even:]]) for p, r in ends]
        rows = paired
    return [r[0] for r in rows]


# --- windows ---


@RULES.rule(
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    params=_WINDOW,
)
def _reduce_window_known(im: Importer, eqn: Any, x: Value) -> list[Value]:
    kind = eqn.primitive.name.removeprefix("reduce_window_")
    function = {"sum": lax.add, "max": lax.max, "min": lax.min}[kind]

    def combine(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
        return [function(left[0], right[0])]

    def windows(v: Any) -> Sequence[Any]:
        start = np.asarray(neutral(kind, x.tile.dtype), v.dtype)
        return _over_windows(combine, [v], [start], eqn.params)

    return im.splice(windows, [x])


@RULES.rule(
    "reduce_window",
    params="jaxpr consts " + _WINDOW,
)
def _reduce_window(im: Importer, eqn: Any, *operands: Value) -> list[Value]:
    combine = _combine_by(eqn.params)

    def windows(*args: Any) -> Sequence[Any]:
        arrays, initial = args[: len(args) // 2], args[len(args) // 2 :]
        return _over_windows(combine, arrays, initial, eqn.params)

    return im.splice(windows, operands)


def _over_windows(
    combine: Combine, arrays: Sequence[Any], initial: Sequence[Any], params: Any
) -> Sequence[Any]:
    """One dimension after another: what associates over a box does over its sides."""
    config = [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(
            params["padding"], params["base_dilation"], strict=True
        )
    ]
    arrays = [lax.pad(x, i, config) for x, i in zip(arrays, initial, strict=True)]
    sides = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["window_dilation"],
        strict=True,
    )
    for dim, (width, stride, dilation) in enumerate(sides):
        at = [
            [_taps(x, dim, n * dilation, width, stride, dilation) for x in arrays]
            for n in range(width)
        ]
        arrays = at[0]
        for more in at[1:]:
            arrays = combine(arrays, more)
    return arrays


def _taps(x: Any, dim: int, start: int, width: int, stride: int, dilation: int) -> Any:
    """What each window along `dim` has at its element `start`."""
    count = max(0, (x.shape[dim] - (width - 1) * dilation - 1) // stride + 1)
    limit = start + (count - 1) * stride + 1 if count else start
    return lax.slice_in_dim(x, start, limit, stride, dim)


# --- convolutions ---


@RULES.rule(
    "conv_general_dilated",
    params="window_strides padding lhs_dilation rhs_dilation dimension_numbers "
    "feature_group_count batch_group_count precision preferred_element_type",
)
def _convolution(im: Importer, eqn: Any, lhs: Value, rhs: Value) -> list[Value]:
    result = eqn.outvars[0].aval.dtype
    return im.splice(lambda x, w: _convolve(x, w, result, eqn.params), [lhs, rhs])


def _convolve(x: Any, w: Any, dtype: Any, p: Any) -> Any:
    """The sum over the kernel's elements of one dot over the channels each."""
    numbers, groups = p["dimension_numbers"], p["feature_group_count"]
    batches = p["batch_group_count"]
    padding = [(0, 0, 0), (0, 0, 0)]
    for (low, high), dilation in zip(p["padding"], p["lhs_dilation"], strict=True):
        padding.append((low, high, dilation - 1))
    x = lax.pad(jnp.transpose(x, numbers.lhs_spec), x.dtype.type(0), padding)
    w = jnp.transpose(w, numbers.rhs_spec)
    if batches > 1:  # XLA allows groups of one kind only: they become those of channels
        x = jnp.moveaxis(x.reshape(batches, -1, *x.shape[1:]), 0, 1)
        x, groups = x.reshape(x.shape[0], -1, *x.shape[3:]), batches
    x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    w = w.reshape(groups, -1, *w.shape[1:])
    window = w.shape[3:]
    total: Any = None
    for offset in itertools.product(*map(range, window)):
        taps = x
        for n, at in enumerate(offset):
            dilation = p["rhs_dilation"][n]
            stride = p["window_strides"][n]
            taps = _taps(taps, n + 3, at * dilation, window[n], stride, dilation)
        part = jnp.einsum(
            "ngc...,goc->ngo...",
            taps,
            w[(slice(None),) * 3 + offset],
            precision=p["precision"],
            preferred_element_type=_sum_dtype(dtype),
        )
        total = part if total is None else total + part
    total = total.reshape(total.shape[0], -1, *total.shape[3:]).astype(dtype)
    return jnp.transpose(total, np.argsort(numbers.out_spec).tolist())


@RULES.rule(
    "ragged_dot_general",
    params="ragged_dot_dimension_numbers precision preferred_element_type",
)
def _ragged_dot(
    im: Importer, eqn: Any, lhs: Value, rhs: Value, sizes: Value
) -> list[Value]:
    """`lax.ragged_dot`: each group of rows times a matrix of its own."""
    p = eqn.params
    numbers = p["ragged_dot_dimension_numbers"]
    dims = numbers.dot_dimension_numbers
    plain = tuple(tuple(map(tuple, d)) for d in dims) == (((1,), (1,)), ((), ()))
    ragged = tuple(numbers.lhs_ragged_dimensions) == (0,)
    if not (plain and ragged and tuple(numbers.rhs_group_dimensions) == (0,)):
        raise im.unsupported(
            eqn, "only the dimension numbers of lax.ragged_dot are supported"
        )
    dtype = eqn.outvars[0].aval.dtype

    def groups(x: Any, w: Any, sizes: Any) -> Any:
        row = lax.broadcasted_iota(sizes.dtype, (x.shape[0], 1), 0)
        ends = jnp.cumsum(sizes)
        total = jnp.zeros((x.shape[0], w.shape[2]), _sum_dtype(dtype))
        for n in range(w.shape[0]):
            inside = (row >= ends[n] - sizes[n]) & (row < ends[n])
            total += jnp.dot(
                jnp.where(inside, x, 0),
                w[n],
                precision=p["precision"],
                preferred_element_type=total.dtype,
            )
        return total.astype(dtype)

    return im.splice(groups, [lhs, rhs, sizes])


def _sum_dtype(dtype: Any) -> Any:
    """Sums of narrow floats are rounded once, at the end."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.promote_types(dtype, jnp.float32) if floating else dtype
