# pyright: basic
"""The meaning of each elementwise op on numpy arrays, where numpy's own differs.

XLA's semantics are kept: integer division never traps, shifts past the width are
defined, maximum and minimum propagate NaN. `elementwise.py` lists these in its rows.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np

from pallasite.ops.polynomials import LGAMMA_HEAD

Array = Any


def in_f64(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Compute in double precision and round once to the operand's type."""

    def rounded(x: Array, *rest: Array) -> Array:
        wide = [np.asarray(v).astype(np.float64) for v in (x, *rest)]
        with np.errstate(all="ignore"):
            return np.asarray(fn(*wide)).astype(np.asarray(x).dtype)

    return rounded


def per_element(fn: Callable[[float], float]) -> Callable[[Array], Array]:
    return np.vectorize(fn, otypes=[np.float64])


def _erf_inv(x: float) -> float:
    size = abs(x)
    if size > 1 or math.isnan(x):
        return math.nan
    if size == 1 or size == 0:
        return math.copysign(math.inf, x) if size else x
    half_root_pi = math.sqrt(math.pi) / 2
    y = size * half_root_pi
    if size > 1e-3:
        y = -NormalDist().inv_cdf((1 - size) / 2) / math.sqrt(2)
    for _ in range(2):  # Newton, on the function without cancellation
        error = math.erf(y) - size if size < 0.5 else (1 - size) - math.erfc(y)
        y -= error * half_root_pi * math.exp(y * y)
    return math.copysign(y, x)


def _lgamma(x: float) -> float:
    if 0.75 < x < 2.5:  # Python's is inaccurate around the zeros at 1 and 2
        d = x - 1 if x < 1.5 else x - 2
        near_two = 0.0
        for c in reversed(LGAMMA_HEAD["f64"]):
            near_two = near_two * d + c
        return d * near_two - (math.log1p(d) if x < 1.5 else 0.0)
    try:
        return math.lgamma(x)
    except (OverflowError, ValueError):  # too large, or a pole
        return math.inf


erf = per_element(math.erf)
erfc = per_element(math.erfc)
erf_inv = per_element(_erf_inv)
lgamma = per_element(_lgamma)


def is_float(x: Array) -> bool:
    return np.asarray(x).dtype.kind not in "iub" and "int" not in str(x.dtype)


def div(x: Array, y: Array) -> Array:
    """Floats as IEEE; integers truncate, x/0 is -1 (all bits), MIN/-1 is MIN."""
    if is_float(x):
        return np.divide(x, y)
    with np.errstate(all="ignore"):
        quotient = _truncated(x, y)
        return np.where(y == 0, np.invert(np.zeros_like(x)), quotient).astype(x.dtype)


def rem(x: Array, y: Array) -> Array:
    """The sign of the dividend; x rem 0 is x for integers."""
    if is_float(x):
        return np.fmod(x, y)
    with np.errstate(all="ignore"):
        remainder = x - _truncated(x, y) * y
        return np.where(y == 0, x, remainder).astype(x.dtype)


def _truncated(x: Array, y: Array) -> Array:
    """Integer division towards zero where y is not 0."""
    safe = np.where(y == 0, np.ones_like(y), y)
    down = np.floor_divide(x, safe)
    upwards = (down * safe != x) & ((x < 0) != (safe < 0))
    return down + upwards.astype(x.dtype)


def pow_(x: Array, y: Array) -> Array:
    if is_float(x):
        return np.power(x, y.astype(x.dtype))
    result = np.ones_like(x)
    base, exponent = x.copy(), y.copy()
    while np.any(exponent > 0):
        result = np.where(exponent & 1, result * base, result).astype(x.dtype)
        base = (base * base).astype(x.dtype)
        exponent = exponent >> 1
    # A negative exponent of an integer: 1/x, truncated.
    reciprocal = np.where(x == 1, 1, np.where(x == -1, np.where(y & 1, -1, 1), 0))
    return np.where(y < 0, reciprocal.astype(x.dtype), result)


def integer_pow(x: Array, *, y: int) -> Array:
    """Repeated multiplication; a negative power is one division at the end."""
    result, base, n = None, x, abs(y)
    while n:
        if n & 1:
            result = base if result is None else (result * base).astype(x.dtype)
        n >>= 1
        if n:
            base = (base * base).astype(x.dtype)
    result = np.ones_like(x) if result is None else result
    return div(np.ones_like(x), result) if y < 0 else result


def square(x: Array) -> Array:
    return x * x


def rsqrt(x: Array) -> Array:
    return 1 / np.sqrt(x)


def sign(x: Array) -> Array:
    return np.sign(x).astype(x.dtype)


def round_(x: Array, *, rounding_method: int) -> Array:
    if rounding_method == 1:
        return np.rint(x)
    away = np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)
    # x + 0.5 may itself round up just below one half, and above 2**mantissa.
    exact = np.abs(x) == np.floor(np.abs(x))
    below = np.abs(x) < 0.5
    zero = np.copysign(np.zeros_like(x), x)
    return np.where(exact, x, np.where(below, zero, away)).astype(x.dtype)


def _width(x: Array) -> int:
    return ml_dtypes.iinfo(x.dtype).bits


def _whole(x: Array) -> Array:
    """The same numbers in whole bytes."""
    if _width(x) >= 8:
        return x
    return x.astype(np.int8 if ml_dtypes.iinfo(x.dtype).min < 0 else np.uint8)


def _wrapped(x: Array, dtype: Any) -> Array:
    return (
        x.astype(np.int64).astype(dtype) if x.dtype.itemsize == 1 else x.astype(dtype)
    )


def _pattern(x: Array) -> Array:
    """The bits of integers, as unsigned ones of whole bytes."""
    whole = _whole(x)
    bits = whole.view(np.dtype(f"uint{8 * whole.dtype.itemsize}"))
    return bits if _width(x) >= 8 else bits & np.uint8((1 << _width(x)) - 1)


def _signed(x: Array) -> Array:
    """The bits of integers, as signed ones of whole bytes."""
    pattern = _pattern(x)
    signed = pattern.view(np.dtype(f"int{8 * pattern.dtype.itemsize}"))
    if _width(x) >= 8:
        return signed
    top = np.int8(1 << (_width(x) - 1))
    return (signed ^ top) - top


def _shift(fill: Callable[[Array], Array], shift: Callable[[Array, Array], Array]):
    def shifted(x: Array, y: Array) -> Array:
        amount = _whole(y)
        inside = (amount >= 0) & (amount < _width(x))
        amount = np.where(inside, amount, 0).astype(np.uint8)
        return _wrapped(np.where(inside, shift(x, amount), fill(x)), x.dtype)

    return shifted


def _logical(x: Array, amount: Array) -> Array:
    pattern = _pattern(x)
    return pattern >> amount.astype(pattern.dtype)


def _arithmetic(x: Array, amount: Array) -> Array:
    signed = _signed(x)
    return signed >> amount.astype(signed.dtype)


def _left(x: Array, amount: Array) -> Array:
    pattern = _pattern(x)
    return pattern << amount.astype(pattern.dtype)


def _nothing(x: Array) -> Array:
    return np.zeros_like(_pattern(x))


shift_left = _shift(_nothing, _left)
shift_right_logical = _shift(_nothing, _logical)
shift_right_arithmetic = _shift(
    lambda x: _arithmetic(x, np.full(x.shape, _width(x) - 1, np.uint8)), _arithmetic
)


def not_(x: Array) -> Array:
    return np.logical_not(x) if x.dtype == np.bool_ else np.invert(x)


def population_count(x: Array) -> Array:
    return _wrapped(np.bitwise_count(_pattern(x)), x.dtype)


def clz(x: Array) -> Array:
    bits = _width(x)
    value, count = _pattern(x).astype(np.uint64), np.zeros(x.shape, np.int64)
    for _ in range(bits):
        count = np.where(value == 0, count, count + 1)
        value = value >> np.uint64(1)
    return (bits - count).astype(x.dtype)


def stop_gradient(x: Array) -> Array:
    """The identity; only a derivative sees a difference."""
    return x


def clamp(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def select_n(which: Array, *cases: Array) -> Array:
    if which.dtype == np.bool_:
        return np.where(which, cases[1], cases[0])
    which = np.broadcast_to(np.clip(which, 0, len(cases) - 1), cases[0].shape)
    result = cases[0]
    for n, case in enumerate(cases[1:], 1):
        result = np.where(which == n, case, result)
    return result


def logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def nextafter(x: Array, y: Array) -> Array:
    return np.nextafter(x, y)


def reduce_precision(x: Array, *, exponent_bits: int, mantissa_bits: int) -> Array:
    """Round to a float of fewer bits and back (nearest even, overflow to infinity)."""
    if x.dtype.itemsize == 1:
        wide = reduce_precision(
            x.astype(np.float32),
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
        )
        return wide.astype(x.dtype)
    info = ml_dtypes.finfo(x.dtype)
    word = np.dtype(f"uint{8 * x.dtype.itemsize}")
    pattern = x.view(word).astype(np.uint64)
    sign_bit = np.uint64(1 << (info.bits - 1))
    size = pattern & ~sign_bit
    dropped = info.nmant - mantissa_bits
    if dropped > 0:
        odd = (size >> np.uint64(dropped)) & np.uint64(1)
        size = size + odd + np.uint64((1 << (dropped - 1)) - 1)
        size = size >> np.uint64(dropped) << np.uint64(dropped)
    if exponent_bits < info.nexp:
        bias, own_bias = (1 << (exponent_bits - 1)) - 1, (1 << (info.nexp - 1)) - 1
        too_large, infinity = bias + 1 + own_bias, (1 << info.nexp) - 1
        size = np.where(size >= too_large << info.nmant, infinity << info.nmant, size)
        # XLA flushes results below the smallest normal number.
        size = np.where(size < (1 - bias + own_bias) << info.nmant, 0, size)
    result = size.astype(np.uint64) | (pattern & sign_bit)
    result = result.astype(word).view(x.dtype)
    return np.where(x == x, result, x)


def cast(x: Array, *, dtype: Any) -> Array:
    """Convert like XLA: floats to integers saturate, NaN becomes 0."""
    target = dtype.np
    if dtype.is_bool:
        return x != x.dtype.type(0)
    if dtype.is_integer and is_float(x):
        info_bits = dtype.bits
        low = -(2 ** (info_bits - 1)) if dtype.is_signed_int else 0
        high = 2 ** (info_bits - 1) - 1 if dtype.is_signed_int else 2**info_bits - 1
        wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=high, neginf=low)
        inside = (wide > low) & (wide < high)
        whole = np.uint64 if dtype.name == "u64" else np.int64
        safe = np.where(inside, np.trunc(wide), 0).astype(whole)
        low_a, high_a = (np.array(v).astype(target) for v in (low, high))
        return np.where(
            inside, safe.astype(target), np.where(wide <= low, low_a, high_a)
        )
    if dtype.bits < 8 and not is_float(x):
        return x.astype(np.int64).astype(target)
    with np.errstate(all="ignore"):
        return x.astype(target)


def bitcast(x: Array, *, dtype: Any) -> Array:
    """To a type of as many bits; the evaluators have their own for other widths."""
    raw = np.require(x, requirements="C")  # ascontiguousarray makes scalars 1-d
    if dtype.bits >= 8:
        return raw.view(dtype.np)
    return (raw.view(np.uint8) & np.uint8(2**dtype.bits - 1)).view(dtype.np)
