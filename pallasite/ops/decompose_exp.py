"""Decompositions of exponentials, logarithms, hyperbolic functions, powers and roots.

The basic ones (exp, exp2, log) use only bit fields and polynomials; the others use
those three, so a backend that has them natively keeps its speed.
"""

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Value
from pallasite.ops import polynomials as fits
from pallasite.ops.decompose_basic import integer_power
from pallasite.ops.formula import (
    INF,
    NAN,
    Expr,
    Lower,
    bits,
    fast_two_sum,
    fitted,
    float_formula,
    format_of,
    mantissa_and_exponent,
    power_of_two,
    scale_near_one,
    split_constant,
    to_int,
    two_product,
    two_sum,
    where,
    with_sign_of,
)

LN2 = 0.6931471805599453094
LOG2_E = 1.4426950408889634074
_LN2_DIGITS = "0.693147180559945309417232121458176568075500134360255254"
_LOG2_E_DIGITS = "1.442695040888963407359924681001892137426645954152985934"
# exp overflows above the first and is below half the smallest float under the second.
_EXP_RANGE = {"f32": (89.0, -104.0), "f64": (710.0, -746.0)}
# expm1 rounds to -1 under this.
_EXPM1_LOW = {"f32": -25.0, "f64": -45.0}


def _ln2_parts(x: Expr) -> list[float]:
    """log(2) in two parts; the first times any exponent is exact."""
    exponent_bits = format_of(x).exponent
    kept = format_of(x).mantissa + 1 - exponent_bits
    return split_constant(_LN2_DIGITS, kept, x.dtype, 2)


def _whole_and_rest(x: Expr) -> tuple[Expr, Expr]:
    """Integer n (as float) and r with x = n log(2) + r, |r| <= log(2)/2."""
    high, low = _ln2_parts(x)
    n = (x * LOG2_E + 0.5).floor()
    return n, (x - n * high) - n * low


def _expm1_small(r: Expr) -> Expr:
    """exp(r) - 1 for |r| <= log(2)/2."""
    return r + r * r * fitted(r, fits.EXP_TAIL)


@float_formula
def exp(x: Expr) -> Expr:
    high, low = _EXP_RANGE[x.dtype.name]
    n, r = _whole_and_rest(x.max(low).min(high))
    return scale_near_one(_expm1_small(r) + 1.0, to_int(n))


def _within_exponents(x: Expr) -> Expr:
    """x, clamped to where 2**x is infinity or zero anyway."""
    layout = format_of(x)
    return x.max(-2.0 - layout.bias - layout.mantissa).min(layout.bias + 2.0)


@float_formula
def exp2(x: Expr) -> Expr:
    x = _within_exponents(x)
    n = (x + 0.5).floor()
    return scale_near_one(_expm1_small((x - n) * LN2) + 1.0, to_int(n))


@float_formula
def exp_by_exp2(x: Expr) -> Expr:
    high, low = _EXP_RANGE[x.dtype.name]
    n, r = _whole_and_rest(x.max(low).min(high))
    return scale_near_one((r * LOG2_E).op("exp2"), to_int(n))


@float_formula
def exp2_by_exp(x: Expr) -> Expr:
    x = _within_exponents(x)
    n = (x + 0.5).floor()
    return scale_near_one(((x - n) * LN2).op("exp"), to_int(n))


@float_formula
def expm1(x: Expr) -> Expr:
    """2**n (exp(r) - 1) + (2**n - 1), with half of 2**n so that it cannot overflow."""
    high, _ = _EXP_RANGE[x.dtype.name]
    n, r = _whole_and_rest(x.max(_EXPM1_LOW[x.dtype.name]).min(high))
    half_power = power_of_two(to_int(n) - 1, x.dtype)
    result = (_expm1_small(r) * half_power + (half_power - 0.5)) * 2.0
    return where(x.eq(0.0), x, result)


def _log1p_small(f: Expr) -> Expr:
    """log(1 + f) for 1 + f within [sqrt(1/2), sqrt(2)), without the leading term f."""
    if f.dtype.name == "f32":  # more terms, but no division
        square = f * f
        return square * f * fitted(f, fits.LOG_TAIL) - square * 0.5
    s = f / (f + 2.0)
    z = s * s
    return s * (z * fitted(z, fits.ATANH_TAIL) - f)


def _log_at_edges(x: Expr, result: Expr) -> Expr:
    """Logarithms of zero, negative numbers, infinity and NaN."""
    result = where(x < INF, result, x)
    return where(x > 0.0, result, where(x.eq(0.0), -INF, where(x < 0.0, NAN, x)))


@float_formula
def log(x: Expr) -> Expr:
    high, low = _ln2_parts(x)
    m, e = mantissa_and_exponent(x)
    f = m - 1.0
    return _log_at_edges(x, e * high + (f + (_log1p_small(f) + e * low)))


@float_formula
def log_by_log2(x: Expr) -> Expr:
    return x.op("log2") * LN2


@float_formula
def log2(x: Expr) -> Expr:
    """The exponent is split off so that powers of two give integers."""
    m, e = mantissa_and_exponent(x)
    return _log_at_edges(x, e + m.op("log") * LOG2_E)


@float_formula
def log1p(x: Expr) -> Expr:
    """log of the rounded 1 + x, corrected for the rounding error.

    The last bit is dropped too: compilers that simplify (x + 1) - 1 to x, as XLA does,
    would see no error.
    """
    rounded = (bits(x + 1.0) & -2).bitcast(x.dtype)
    lost = x - (rounded - 1.0)
    result = rounded.op("log") + lost / rounded
    # Zeros keep their sign; infinity and -1 have no meaningful correction.
    keep = x.eq(0.0) | x.eq(INF)
    return where(keep, x, where(x.eq(-1.0), -INF, result))


@float_formula
def logistic(x: Expr) -> Expr:
    return 1.0 / ((-x).op("exp") + 1.0)


@float_formula
def sinh(x: Expr) -> Expr:
    size, square = abs(x), x * x
    small = x + x * square * fitted(square, fits.SINH_TAIL)
    root, inverse = _exp_halves(size)
    large = root * (root * 0.5) - inverse * (inverse * 0.5)
    return where(size < 1.0, small, with_sign_of(large, x))


@float_formula
def cosh(x: Expr) -> Expr:
    root, inverse = _exp_halves(abs(x))
    return root * (root * 0.5) + inverse * (inverse * 0.5)


def _exp_halves(x: Expr) -> tuple[Expr, Expr]:
    """exp(x/2) and exp(-x/2): their squares have the same range as sinh and cosh."""
    root = (x * 0.5).op("exp")
    return root, 1.0 / root


@float_formula
def tanh(x: Expr) -> Expr:
    size, square = abs(x), x * x
    small = size + size * square * fitted(square, fits.TANH_TAIL)
    large = 1.0 - 2.0 / ((size * 2.0).op("exp") + 1.0)
    return with_sign_of(where(size < 0.55, small, large), x)


@float_formula
def asinh(x: Expr) -> Expr:
    size = abs(x)
    huge = size > 2.0 ** (format_of(x).mantissa // 2 + 3)
    square = where(huge, x.lift(0.0), x * x)
    root = (square + 1.0).op("sqrt")
    moderate = (size + square / (root + 1.0)).op("log1p")
    result = where(huge, size.op("log") + LN2, moderate)
    return with_sign_of(result, x)


@float_formula
def acosh(x: Expr) -> Expr:
    above = x - 1.0
    huge = x > 2.0 ** (format_of(x).mantissa // 2 + 3)
    near = where(huge, x.lift(0.0), above)
    moderate = (near + (near * (near + 2.0)).op("sqrt")).op("log1p")
    result = where(huge, x.op("log") + LN2, moderate)
    return where(x < 1.0, NAN, result)


@float_formula
def atanh(x: Expr) -> Expr:
    size = abs(x)
    twice = size * 2.0
    result = (twice + twice * size / (1.0 - size)).op("log1p") * 0.5
    result = where(size.eq(1.0), INF, where(size > 1.0, NAN, result))
    return with_sign_of(result, x)


@float_formula
def rsqrt(x: Expr) -> Expr:
    return 1.0 / x.op("sqrt")


@float_formula
def cbrt(x: Expr) -> Expr:
    """A third of the exponent field, then two or three refinements."""
    layout, size = format_of(x), abs(x)
    lift = 3 * ((layout.mantissa + 3) // 3)
    subnormal = size < layout.smallest
    a = where(subnormal, size * 2.0**lift, size)
    # The bits of a number are roughly its logarithm. 0.0333 centres the error.
    offset = int((layout.bias - 0.0333) * 2 / 3 * 2**layout.mantissa)
    t = (to_int(bits(a).cast(x.dtype) * (1 / 3)) + offset).bitcast(x.dtype)
    for _ in range(1 if layout.mantissa == 23 else 2):  # Halley: errors are cubed
        q = a / (t * t)
        t = t * (t + q * 2.0) / (t * 2.0 + q)
    t = t - (t - a / (t * t)) * (1 / 3)  # Newton: squared, with less rounding
    t = where(subnormal, t * 2.0 ** -(lift // 3), t)
    exact = x.eq(0.0) | (size < INF).op("not")
    return where(exact, x, with_sign_of(t, x))


def pow_(b: Builder, x: Value, y: Value) -> Value:
    """An integer power of an integer, else exp2(y log2(x)) with extra bits."""
    if not x.tile.dtype.is_float:
        return integer_power(b, x, y)
    return _float_pow(b, x, b.cast(y, x.tile.dtype))


@float_formula
def _float_pow(x: Expr, y: Expr) -> Expr:
    size = abs(x)
    high, low = _log2_extended(size)
    # log2 of a float other than 1 is large enough for this bound to have no effect.
    bound = 2.0 ** (2 * format_of(x).mantissa)
    power = y.max(-bound).min(bound)
    product, error = two_product(high, power)
    error = error + low * power
    clamped = _within_exponents(product)
    n = (clamped + 0.5).floor()
    rest = (clamped - n) + where(clamped.eq(product), error, 0.0)
    result = scale_near_one(_expm1_small(rest * LN2) + 1.0, to_int(n))
    return _pow_at_edges(x, y, result)


def _log2_extended(x: Expr) -> tuple[Expr, Expr]:
    """log2 of a positive number as a sum of two floats.

    log(m) = 2 atanh(s) with s = (m - 1)/(m + 1); s and the leading term 2s carry a
    correction, the rest of the series is small enough without one.
    """
    m, e = mantissa_and_exponent(x)
    f = m - 1.0
    below, below_low = two_sum(m, m.lift(1.0))
    s = f / below
    back, back_low = two_product(s, below)
    s_low = (((f - back) - back_low) - s * below_low) / below
    z = s * s
    tail = s_low * 2.0 + s * z * fitted(z, fits.ATANH_TAIL)
    log_high, log_low = fast_two_sum(s * 2.0, tail)
    factor, factor_low = split_constant(
        _LOG2_E_DIGITS, format_of(x).mantissa + 1, x.dtype, 2
    )
    high, low = two_product(log_high, x.lift(factor))
    low = low + (log_high * factor_low + log_low * factor)
    high, more = two_sum(e, high)
    return fast_two_sum(high, low + more)


def _pow_at_edges(x: Expr, y: Expr, result: Expr) -> Expr:
    """Signs, zeros, infinities and NaN, as in IEEE's pow."""
    size = abs(x)
    half = y * 0.5
    whole = y.floor().eq(y)
    odd = whole & half.floor().ne(half)
    shrinks = (size < 1.0).op("eq", y > 0.0)  # towards 0 as |y| grows
    extreme = where(shrinks, x.lift(0.0), INF)
    at_edge = size.eq(0.0) | size.eq(INF) | abs(y).eq(INF)
    result = where(at_edge, extreme, result)
    result = where(odd & (bits(x) < 0), -result, result)
    undefined = (x < 0.0) & (whole.op("not")) & (size < INF)
    result = where(undefined | x.ne(x) | y.ne(y), NAN, result)
    is_one = y.eq(0.0) | x.eq(1.0) | (size.eq(1.0) & abs(y).eq(INF))
    return where(is_one, 1.0, result)


SHORTCUTS: dict[str, tuple[tuple[str, Lower], ...]] = {
    "exp": (("exp2", exp_by_exp2),),
    "exp2": (("exp", exp2_by_exp),),
    "log": (("log2", log_by_log2),),
}
