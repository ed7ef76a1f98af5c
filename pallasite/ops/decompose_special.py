"""Decompositions of the error functions and the logarithm of the gamma function."""

from pallasite.ir.types import F32
from pallasite.ops import polynomials as fits
from pallasite.ops.formula import (
    INF,
    NAN,
    Expr,
    fitted,
    float_formula,
    two_product,
    where,
    with_sign_of,
)

_HALF_ROOT_PI = 0.88622692545275801365
_HALF_LOG_2PI = 0.91893853320467274178
_PI = 3.14159265358979323846
# erfc of more than this rounds to zero.
_ERFC_END = {"f32": 10.4, "f64": 27.5}


@float_formula
def erf(x: Expr) -> Expr:
    size, square = abs(x), x * x
    small = x + x * fitted(square, fits.ERF_HEAD)
    if x.dtype == F32:
        tail = fitted(size.min(4.0), fits.LOG_ERFC).op("exp")
    else:
        tail = _erfc_positive(size)
    return where(size < 0.875, small, with_sign_of(1.0 - tail, x))


@float_formula
def erfc(x: Expr) -> Expr:
    tail = _erfc_positive(abs(x))
    return where(x < 0.0, 2.0 - tail, tail)


def _erfc_positive(x: Expr) -> Expr:
    """exp(-x^2) times a smooth function, which maps all x >= 0 to [-1, 1)."""
    x = x.min(_ERFC_END[x.dtype.name])
    square, lost = two_product(x, x)
    bell = (-square).op("exp")
    bell = bell - bell * lost
    smooth = fitted((x - 3.0) / (x + 3.0), fits.ERFCX)
    return bell * smooth / (x * 2.0 + 1.0)


@float_formula
def erf_inv(x: Expr) -> Expr:
    size = abs(x)
    w = -((1.0 - size) * (size + 1.0)).op("log")
    head = fitted(w - 2.5, fits.ERF_INV_HEAD)
    tail = fitted(w.max(5.0).op("sqrt") - 3.0, fits.ERF_INV_TAIL)
    result = size * where(w < 5.0, head, tail)
    if x.dtype != F32:
        result = _improved_erf_inv(size, result)
    result = where(size.eq(1.0), INF, where(size > 1.0, NAN, result))
    return with_sign_of(result, x)


def _improved_erf_inv(x: Expr, y: Expr) -> Expr:
    """One Halley step; 1 - x is exact where erfc is the better function to compare."""
    error = where(x < 0.5, y.op("erf") - x, (1.0 - x) - y.op("erfc"))
    step = error * _HALF_ROOT_PI * (y * y).op("exp")
    return y - step / (y * step + 1.0)


@float_formula
def lgamma(x: Expr) -> Expr:
    """Directly from 1/2 up, below by reflection."""
    low = x < 0.5
    positive = _lgamma_from_half(where(low, 1.0 - x, x))
    nearest = (x + 0.5).floor()
    sine = abs(((x - nearest) * _PI).op("sin"))
    reflected = (_PI / sine).op("log") - positive
    result = where(low, reflected, positive)
    pole = low & sine.eq(0.0)
    return where(pole | abs(x).eq(INF), INF, result)


def _lgamma_from_half(x: Expr) -> Expr:
    """log(product) + lgamma(x - k) with x - k near 2, up to 7.5; Stirling above.

    lgamma(2 + d) is d times a polynomial, so the zeros at 1 and 2 are exact.
    """
    first, moderate = x < 1.5, x < 7.5
    d, product = x - 2.0, x.lift(1.0)
    for k in range(1, 6):
        more = x >= k + 1.5
        product = where(more, product * (x - float(k)), product)
        d = where(more, x - float(k + 2), d)
    d = where(first, x - 1.0, d)
    logarithm = where(first, x, where(moderate, product, x)).op("log")
    near_two = d * fitted(d, fits.LGAMMA_HEAD)
    inverse = 1.0 / x
    stirling = (x - 0.5) * (logarithm - 1.0) + (
        (_HALF_LOG_2PI - 0.5) + inverse * fitted(inverse * inverse, fits.STIRLING_TAIL)
    )
    small = where(first, near_two - logarithm, near_two + logarithm)
    return where(moderate, small, stirling)
