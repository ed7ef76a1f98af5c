"""Elementwise ops: one row each (arithmetic, math, comparison, select, cast).

Reading order: `exp` below is a row; `meaning.py` defines those that differ from numpy,
`decompose.py` computes them from others; a backend lists those it has natively.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from pallasite.ir.opdef import Attrs, OpDef, TypeRuleError, Unit, register
from pallasite.ir.types import (
    ALL,
    BITS,
    BOOL,
    FLOATS,
    INTS,
    NUMBERS,
    SIGNED,
    DType,
    TileType,
    Type,
)
from pallasite.ops import decompose
from pallasite.ops import meaning as m


def tiles(types: tuple[Type, ...]) -> tuple[TileType, ...]:
    for t in types:
        if not isinstance(t, TileType):
            raise TypeRuleError(f"takes tiles, got {t}")
    return types  # type: ignore[return-value]


def _same(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    first, *rest = tiles(types)
    for other in rest:
        if other != first:
            raise TypeRuleError(f"operands differ: {first} and {other}")
    return (first,)


def _first(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    return (tiles(types)[0],)


def _compare(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    _same(types, attrs)
    return (TileType(types[0].shape, BOOL),)


def _cast(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    return (x.with_dtype(attrs["dtype"]),)


def _bitcast(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    (x,) = tiles(types)
    dtype: DType = attrs["dtype"]
    old, new = x.dtype.bits, dtype.bits
    if old == new:
        return (x.with_dtype(dtype),)
    if old > new and old % new == 0:
        return (TileType((*x.shape, old // new), dtype),)
    if new % old == 0 and x.shape and x.shape[-1] == new // old:
        return (TileType(x.shape[:-1], dtype),)
    raise TypeRuleError(f"cannot reinterpret {x} as {dtype}")


def _select(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    which, *cases = tiles(types)
    if len(cases) < 1:
        raise TypeRuleError("needs at least one case")
    (result,) = _same(tuple(cases), attrs)
    if which.shape not in ((), result.shape):
        raise TypeRuleError(f"selector {which} does not fit cases {result}")
    if not (which.dtype.is_bool or which.dtype.name == "i32"):
        raise TypeRuleError(f"selector must be bool or i32, got {which}")
    return (result,)


def _clamp(types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...]:
    low, x, high = tiles(types)
    for bound in (low, high):
        if bound.dtype != x.dtype or bound.shape not in ((), x.shape):
            raise TypeRuleError(f"bound {bound} does not fit {x}")
    return (x,)


def _row(
    name: str,
    arity: int | None,
    meaning: Callable[..., Any],
    *,
    jax: str | None = None,
    dtypes: tuple[DType, ...] = NUMBERS,
    rule: Callable[..., tuple[Type, ...]] = _same,
    unit: Unit = Unit.ALU,
    domain: tuple[float, float] | None = (-100.0, 100.0),
    max_ulp: float = 0,
    attrs: tuple[str, ...] = (),
    lower: Callable[..., Any] | None = None,
    linear: tuple[int, ...] = (),
    doc: str = "",
) -> OpDef:
    return register(
        OpDef(
            name,
            rule,
            arity,
            jax=name if jax is None else jax or None,
            attrs=attrs,
            dtypes=dtypes,
            meaning=meaning,
            lower=lower or decompose.LOWER.get(name),
            unit=unit,
            elementwise=True,
            domain=domain,
            max_ulp=max_ulp,
            linear=linear,
            doc=doc,
        )
    )


def _special(
    name: str, meaning: Callable[..., Any], max_ulp: float, **kw: Any
) -> OpDef:
    """A transcendental function of one float; numpy's own f32 versions err by ulps."""
    kw = {"dtypes": FLOATS, "unit": Unit.SPECIAL, **kw}
    return _row(name, 1, m.in_f64(meaning), max_ulp=max_ulp, **kw)


# --- arithmetic ---
_row("add", 2, np.add, dtypes=NUMBERS)
_row("sub", 2, np.subtract)
_row("mul", 2, np.multiply, linear=(0, 1))
_row("div", 2, m.div, max_ulp=1, linear=(0,))
_row("rem", 2, m.rem, max_ulp=1)
_row("neg", 1, np.negative, linear=(0,))
_row("abs", 1, np.abs, dtypes=SIGNED)
_row("sign", 1, m.sign)
_row("max", 2, np.maximum, dtypes=ALL, doc="NaN if either is NaN")
_row("min", 2, np.minimum, dtypes=ALL, doc="NaN if either is NaN")
_row(
    "clamp",
    3,
    m.clamp,
    rule=_clamp,
    doc="min(max(x, low), high); scalar bounds broadcast",
)
_row("floor", 1, np.floor, dtypes=FLOATS)
_row("ceil", 1, np.ceil, dtypes=FLOATS)
_row("round", 1, m.round_, dtypes=FLOATS, attrs=("rounding_method",))
_row("is_finite", 1, np.isfinite, dtypes=FLOATS, rule=_compare)
_row("nextafter", 2, m.nextafter, dtypes=FLOATS)
_row(
    "reduce_precision",
    1,
    m.reduce_precision,
    dtypes=FLOATS,
    attrs=("exponent_bits", "mantissa_bits"),
)

# --- powers and roots ---
_row("square", 1, m.square)
_row("integer_pow", 1, m.integer_pow, attrs=("y",), domain=(-8.0, 8.0), max_ulp=8)
_row(
    "pow",
    2,
    m.pow_,
    unit=Unit.SPECIAL,
    domain=(0.01, 8.0),
    max_ulp=16,
    rule=_first,
)
_special("sqrt", np.sqrt, 1, domain=(0.0, 1e6))
_special("rsqrt", m.rsqrt, 2, domain=(1e-3, 1e6))
_special("cbrt", np.cbrt, 4)

# --- exponentials and logarithms ---
_special("exp", np.exp, 3, domain=(-80.0, 80.0))
_special("exp2", np.exp2, 3, domain=(-120.0, 120.0))
_special("expm1", np.expm1, 4, domain=(-10.0, 10.0))
_special("log", np.log, 3, domain=(1e-6, 1e6))
_special("log1p", np.log1p, 4, domain=(-0.9, 1e3))
_special("log2", np.log2, 4, domain=(1e-6, 1e6))
_special("logistic", m.logistic, 4, domain=(-30.0, 30.0))

# --- trigonometry ---
_special("sin", np.sin, 4, domain=(-50.0, 50.0))
_special("cos", np.cos, 4, domain=(-50.0, 50.0))
_special("tan", np.tan, 8, domain=(-1.5, 1.5))
_special("asin", np.arcsin, 4, domain=(-1.0, 1.0))
_special("acos", np.arccos, 4, domain=(-1.0, 1.0))
_special("atan", np.arctan, 4)
_row(
    "atan2", 2, m.in_f64(np.arctan2), dtypes=FLOATS, unit=Unit.SPECIAL, max_ulp=4
)  # fmt: skip
_special("sinh", np.sinh, 8, domain=(-8.0, 8.0))
_special("cosh", np.cosh, 8, domain=(-8.0, 8.0))
_special("tanh", np.tanh, 5, domain=(-9.0, 9.0))
_special("asinh", np.arcsinh, 8)
_special("acosh", np.arccosh, 8, domain=(1.0, 1e3))
_special("atanh", np.arctanh, 8, domain=(-0.99, 0.99))

# --- error and gamma functions ---
_special("erf", m.erf, 6, domain=(-4.0, 4.0))
_special("erfc", m.erfc, 16, domain=(-4.0, 4.0))
_special("erf_inv", m.erf_inv, 16, domain=(-0.99, 0.99))
_special("lgamma", m.lgamma, 64, domain=(0.5, 20.0))

# --- bits ---
_row("and", 2, np.bitwise_and, dtypes=BITS)
_row("or", 2, np.bitwise_or, dtypes=BITS)
_row("xor", 2, np.bitwise_xor, dtypes=BITS)
_row("not", 1, m.not_, dtypes=BITS)
_row("shift_left", 2, m.shift_left, dtypes=INTS)
_row("shift_right_logical", 2, m.shift_right_logical, dtypes=INTS)
_row("shift_right_arithmetic", 2, m.shift_right_arithmetic, dtypes=INTS)
_row("population_count", 1, m.population_count, dtypes=INTS)
_row("clz", 1, m.clz, dtypes=INTS, doc="leading zero bits")

# --- comparison ---
for _name, _fn in {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}.items():
    _row(_name, 2, _fn, dtypes=ALL, rule=_compare)

# --- selection and conversion ---
_row("select_n", None, m.select_n, dtypes=ALL, rule=_select, domain=None)
_row("stop_gradient", 1, m.stop_gradient, dtypes=ALL, doc="the operand, held constant")
_row(
    "cast",
    1,
    m.cast,
    dtypes=ALL,
    rule=_cast,
    attrs=("dtype",),
    jax="",
    linear=(0,),  # but for rounding
)
_row(
    "bitcast",
    1,
    m.bitcast,
    dtypes=ALL,
    rule=_bitcast,
    attrs=("dtype",),
    jax="",
    doc="the same bits as another type; a new width adds or drops the last dimension",
)
