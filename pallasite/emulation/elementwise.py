"""Elementwise ops for the emulation: the JAX function for each.

A function takes the op's operands, and its attributes by name.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite.ir.types import DType

Array = Any


def _cast(x: Array, dtype: DType) -> Array:
    return lax.convert_element_type(x, dtype.np)


def _round(x: Array, rounding_method: int) -> Array:
    return lax.round(x, lax.RoundingMethod(rounding_method))


def _population_count(x: Array) -> Array:
    bits = jnp.iinfo(x.dtype).bits
    if bits < 8:
        # XLA on CPU also counts the sign extension in the rest of the byte.
        x = lax.convert_element_type(x, jnp.uint8) & jnp.uint8((1 << bits) - 1)
    return lax.population_count(x)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "max": lax.max,
    "min": lax.min,
    "clamp": lax.clamp,
    "floor": lax.floor,
    "ceil": lax.ceil,
    "round": _round,
    "is_finite": lax.is_finite,
    "nextafter": lax.nextafter,
    "reduce_precision": lax.reduce_precision,
    "square": lax.square,
    "integer_pow": lax.integer_pow,
    "pow": lax.pow,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "cbrt": lax.cbrt,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "log": lax.log,
    "log1p": lax.log1p,
    "log2": jnp.log2,
    "logistic": lax.logistic,
    "sin": lax.sin,
    "cos": lax.cos,
    "tan": lax.tan,
    "asin": lax.asin,
    "acos": lax.acos,
    "atan": lax.atan,
    "atan2": lax.atan2,
    "sinh": lax.sinh,
    "cosh": lax.cosh,
    "tanh": lax.tanh,
    "asinh": lax.asinh,
    "acosh": lax.acosh,
    "atanh": lax.atanh,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erf_inv": lax.erf_inv,
    "lgamma": lax.lgamma,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
    "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "population_count": _population_count,
    "clz": lax.clz,
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "select_n": lax.select_n,
    "stop_gradient": lax.stop_gradient,
    "cast": _cast,
}
