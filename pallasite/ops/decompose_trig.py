"""Decompositions of sine, cosine, tangent and their inverses.

f32 arguments of any size are reduced exactly; f64 ones up to 2**45, above which the
result is NaN rather than a wrong number.
"""

from itertools import pairwise

from pallasite.ir.types import F32, I32
from pallasite.ops import polynomials as fits
from pallasite.ops.formula import (
    INF,
    NAN,
    Expr,
    bits,
    fitted,
    float_formula,
    format_of,
    is_negative,
    split_constant,
    to_int,
    two_product,
    two_sum,
    where,
    with_sign_of,
)

PI = 3.14159265358979323846
_HALF_PI_DIGITS = "1.57079632679489661923132169163975144209858469968755291048747"
_TWO_OVER_PI = 0.63661977236758134308
F64_LIMIT = 2.0**45  # above this, the quarter turns of f64 arguments are off by one
# 2/pi in words of 32 bits, the first being its integer part.
_TWO_OVER_PI_WORDS = (
    0x00000000,
    0xA2F9836E,
    0x4E441529,
    0xFC2757D1,
    0xF534DDC0,
    0xDB629599,
    0x3C439041,
    0xFE5163AB,
)


@float_formula
def sin(x: Expr) -> Expr:
    quarters, r = _reduce(x)
    # Range reduction loses the sign of zero and some bits of subnormal numbers.
    return where(abs(x) < format_of(x).smallest, x, _wave(quarters, r))


@float_formula
def cos(x: Expr) -> Expr:
    quarters, r = _reduce(x)
    return _wave(quarters + 1, r)


@float_formula
def tan(x: Expr) -> Expr:
    return x.op("sin") / x.op("cos")


def _wave(quarters: Expr, r: Expr) -> Expr:
    """sin(quarters pi/2 + r), |r| <= pi/4."""
    z = r * r
    sine = r + r * z * fitted(z, fits.SIN_TAIL)
    cosine = z * z * fitted(z, fits.COS_TAIL) - z * 0.5 + 1.0
    result = where((quarters & 1).ne(0), cosine, sine)
    return where((quarters & 2).ne(0), -result, result)


def _reduce(x: Expr) -> tuple[Expr, Expr]:
    """Integer q and r with x = q pi/2 + r, |r| <= pi/4; q is correct modulo 4."""
    if x.dtype != F32:
        return _reduce_f64(x)
    quarters, r = _reduce_small_f32(x)
    far_quarters, far_r = _reduce_large_f32(x)
    near = abs(x) < 1024.0
    r = where(near, r, where(abs(x) < INF, far_r, NAN))
    return where(near, quarters, far_quarters), r


def _reduce_small_f32(x: Expr) -> tuple[Expr, Expr]:
    """Below 1024: q has 10 bits, products with 14-bit parts of pi/2 are exact."""
    n = (x * _TWO_OVER_PI + 0.5).floor()
    r = x
    for part in split_constant(_HALF_PI_DIGITS, 14, F32, 4):
        r = r - n * part
    return to_int(n), r


def _reduce_f64(x: Expr) -> tuple[Expr, Expr]:
    n = (x * _TWO_OVER_PI + 0.5).floor()
    first, second, third = split_constant(_HALF_PI_DIGITS, 53, x.dtype, 3)
    product, low = two_product(n, x.lift(first))
    product_2, low_2 = two_product(n, x.lift(second))
    r, error = two_sum(x - product, -low)
    r, error_2 = two_sum(r, -product_2)
    r = r + (((error + error_2) - low_2) - n * third)
    return to_int(n), where(abs(x) < F64_LIMIT, r, NAN)


def _reduce_large_f32(x: Expr) -> tuple[Expr, Expr]:
    """Multiply the 24 bits of x by the 96 bits of 2/pi that matter, in integers.

    With x = m 2**e, bits of 2/pi above place e - 1 add multiples of 4 quarter turns.
    The product m * window, modulo 2**96, is then (x 2/pi) 2**94 modulo 4 turns' worth:
    2 bits of quarter, and the fraction. Only its upper 64 bits are kept.
    """
    layout = format_of(x)
    pattern = bits(x)
    m = (pattern & ((1 << layout.mantissa) - 1)) | (1 << layout.mantissa)
    exponent = ((pattern >> layout.mantissa) & 255) - (layout.bias + layout.mantissa)
    top, middle, bottom = _window(exponent + 30)

    upper, lower = _product_64(m, middle)
    below, _ = _product_64(m, bottom)
    fraction_low = lower + below
    carry = _less_unsigned(fraction_low, lower)
    fraction = m * top + upper + where(carry, m.lift(1), 0)

    quarters = (fraction + (1 << 29)).shift_logical(30)
    fraction = fraction - (quarters << 30)
    # As sign and magnitude, so that no cancellation follows.
    negative = fraction < 0
    borrow = where(fraction_low.eq(0), fraction.lift(1), 0)
    fraction = where(negative, ~fraction + borrow, fraction)
    fraction_low = where(negative, -fraction_low, fraction_low)
    size = fraction.cast(F32) * 2.0**-30
    size = size + fraction_low.shift_logical(1).cast(F32) * 2.0**-61
    r = size * (PI / 2)
    flip = negative.op("ne", pattern < 0)
    return where(pattern < 0, -quarters, quarters), where(flip, -r, r)


def _window(place: Expr) -> list[Expr]:
    """Three words of 2/pi from bit `place` (0 to 134) on."""
    word, shift = place >> 5, place & 31
    at = [word.eq(k) for k in range(4)]
    words: list[Expr] = []
    for offset in range(4):
        picked = place.lift(_TWO_OVER_PI_WORDS[4 + offset])
        for k in range(4):
            picked = where(at[k], _TWO_OVER_PI_WORDS[k + offset], picked)
        words.append(picked)
    back = 31 - shift
    return [
        (high << shift) | low.shift_logical(1).shift_logical(back)
        for high, low in pairwise(words)
    ]


def _product_64(m: Expr, word: Expr) -> tuple[Expr, Expr]:
    """The upper and lower 32 bits of m (24 bits) times a word, all unsigned."""
    assert m.dtype == I32
    m_high, m_low = m.shift_logical(16), m & 0xFFFF
    w_high, w_low = word.shift_logical(16), word & 0xFFFF
    first = m_low * w_high + (m_low * w_low).shift_logical(16)
    second = m_high * w_low + (first & 0xFFFF)
    upper = m_high * w_high + first.shift_logical(16) + second.shift_logical(16)
    return upper, m * word


def _less_unsigned(x: Expr, y: Expr) -> Expr:
    return (x ^ -(1 << 31)) < (y ^ -(1 << 31))


@float_formula
def atan(x: Expr) -> Expr:
    size = abs(x)
    result = _atan_ratio(where(size > 1.0, x.lift(1.0), size), size.max(1.0))
    high, low = _constant_parts(x, 1.0)
    result = where(size > 1.0, high - (result - low), result)
    return with_sign_of(result, x)


@float_formula
def atan2(y: Expr, x: Expr) -> Expr:
    rise, run = abs(y), abs(x)
    top, bottom = rise.min(run), rise.max(run)
    # Keep their sum and their ratio in range.
    layout = format_of(x)
    huge = bottom > 2.0 ** (layout.bias - 1)
    shrink = where(huge, x.lift(0.25), 1.0)
    equal = top.eq(bottom)  # also two infinities
    result = _atan_ratio(
        where(equal, x.lift(1.0), top * shrink),
        where(equal, x.lift(1.0), bottom * shrink),
    )
    result = where(bottom.eq(0.0), 0.0, result)
    result = where((bottom < INF) | equal, result, 0.0)
    high, low = _constant_parts(x, 1.0)
    result = where(rise > run, high - (result - low), result)
    high, low = _constant_parts(x, 2.0)
    result = where(is_negative(x), high - (result - low), result)
    result = with_sign_of(result, y)
    return where(x.ne(x) | y.ne(y), NAN, result)


def _constant_parts(x: Expr, quarters: float) -> tuple[float, float]:
    """Quarter turns: the rounded number and its error."""
    kept = format_of(x).mantissa + 1
    high, low = split_constant(_HALF_PI_DIGITS, kept, x.dtype, 2)
    return quarters * high, quarters * low


def _atan_ratio(top: Expr, bottom: Expr) -> Expr:
    """atan(top/bottom) for 0 <= top <= bottom, one division.

    Above tan(pi/8) it is pi/4 + atan((top - bottom)/(top + bottom)).
    """
    upper = top > bottom * 0.41421356237309503
    t = where(upper, top - bottom, top) / where(upper, top + bottom, bottom)
    z = t * t
    result = t + t * z * fitted(z, fits.ATAN_TAIL)
    high, low = _constant_parts(top, 0.5)
    return where(upper, (result + low) + high, result)


def _asin_small(x: Expr) -> Expr:
    z = x * x
    return x + x * z * fitted(z, fits.ASIN_TAIL)


def _asin_pieces(x: Expr) -> tuple[Expr, Expr, Expr]:
    """|x| <= 1/2?, and asin of |x| there, of sqrt((1 - |x|)/2) elsewhere."""
    size = abs(x)
    small = size <= 0.5
    complement = ((1.0 - size) * 0.5).op("sqrt")
    return small, size, _asin_small(where(small, size, complement))


@float_formula
def asin(x: Expr) -> Expr:
    small, _, angle = _asin_pieces(x)
    high, low = _constant_parts(x, 1.0)
    return with_sign_of(where(small, angle, high - (angle * 2.0 - low)), x)


@float_formula
def acos(x: Expr) -> Expr:
    small, _, angle = _asin_pieces(x)
    high, low = _constant_parts(x, 1.0)
    middle = high - (with_sign_of(angle, x) - low)
    outer = where(x < 0.0, 2.0 * high - (angle * 2.0 - 2.0 * low), angle * 2.0)
    return where(small, middle, outer)
