"""Decompositions: how an op is computed from others where a backend lacks it.

`LOWER` maps a row of `elementwise.py` to the function that is its `lower`:
`(Builder, *values, **attrs) -> Value`. Applying `lower` repeatedly ends in ops that
need no decomposition. `SHORTCUTS` are alternatives that rely on one op which a backend
may have; `passes/lower/legalize.py` prefers them where it does.
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
    round_,
    sign,
    square,
    stop_gradient,
)
from pallasite.ops.decompose_bits import between_widths
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
    pow_,
    rsqrt,
    sinh,
    tanh,
)
from pallasite.ops.decompose_special import erf, erf_inv, erfc, lgamma
from pallasite.ops.decompose_trig import acos, asin, atan, atan2, cos, sin, tan
from pallasite.ops.formula import Lower

# op -> (an op it can be computed from, how)
SHORTCUTS: dict[str, tuple[tuple[str, Lower], ...]] = {
    **decompose_exp.SHORTCUTS,
    "bitcast": (("bitcast", between_widths),),
}

# op -> how it is computed from others
LOWER: dict[str, Lower] = {
    "acos": acos,
    "acosh": acosh,
    "asin": asin,
    "asinh": asinh,
    "atan": atan,
    "atan2": atan2,
    "atanh": atanh,
    "cbrt": cbrt,
    "ceil": ceil,
    "clamp": clamp,
    "clz": clz,
    "cos": cos,
    "cosh": cosh,
    "erf": erf,
    "erf_inv": erf_inv,
    "erfc": erfc,
    "exp": exp,
    "exp2": exp2,
    "expm1": expm1,
    "floor": floor,
    "integer_pow": integer_pow,
    "is_finite": is_finite,
    "lgamma": lgamma,
    "log": log,
    "log1p": log1p,
    "log2": log2,
    "logistic": logistic,
    "nextafter": nextafter,
    "population_count": population_count,
    "pow": pow_,
    "reduce_precision": reduce_precision,
    "rem": rem,
    "round": round_,
    "rsqrt": rsqrt,
    "sign": sign,
    "sin": sin,
    "sinh": sinh,
    "square": square,
    "stop_gradient": stop_gradient,
    "tan": tan,
    "tanh": tanh,
}
