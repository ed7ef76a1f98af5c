"""Decompositions: how an op is computed from others where a backend lacks it.

A row of `elementwise.py` takes the function of its own name from here as its `lower`:
`(Builder, *values, **attrs) -> Value`. Following `lower` again and again ends in ops
that need no decomposition. `SHORTCUTS` are other ways that lean on one op which a
backend may have; `passes/legalize.py` prefers them where it does.
"""

from pallasite.ops import decompose_exp
from pallasite.ops.decompose_basic import (
    ceil,
    clamp,
    clz,
    floor,
    integer_pow,
    is_finite,
    nextafter,
    population_count,
    reduce_precision,
    rem,
    sign,
    square,
    stop_gradient,
)
from pallasite.ops.decompose_basic import round_ as round
from pallasite.ops.decompose_exp import (
    acosh,
    asinh,
    atanh,
    cbrt,
    cosh,
    exp,
    exp2,
    expm1,
    log,
    log1p,
    log2,
    logistic,
    rsqrt,
    sinh,
    tanh,
)
from pallasite.ops.decompose_exp import pow_ as pow
from pallasite.ops.decompose_special import erf, erf_inv, erfc, lgamma
from pallasite.ops.decompose_trig import acos, asin, atan, atan2, cos, sin, tan
from pallasite.ops.formula import Lower

# op -> (an op it can be computed from, how)
SHORTCUTS: dict[str, tuple[tuple[str, Lower], ...]] = decompose_exp.SHORTCUTS

__all__ = [
    "SHORTCUTS",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "cos",
    "cosh",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "integer_pow",
    "is_finite",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "logistic",
    "nextafter",
    "population_count",
    "pow",
    "reduce_precision",
    "rem",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "square",
    "stop_gradient",
    "tan",
    "tanh",
]
