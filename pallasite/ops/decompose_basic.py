"""Decompositions of arithmetic, rounding and bit ops into simpler ones.

All are exact. `decompose.py` collects them by op name.
"""

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Value
from pallasite.ir.types import F32, I32, TileType
from pallasite.ops.formula import (
    FORMATS,
    INF,
    NAN,
    NARROW_FORMATS,
    Expr,
    NotApplicable,
    Scope,
    bits,
    float_formula,
    format_of,
    formula,
    power_of_two,
    split,
    where,
    with_sign_of,
)


@formula
def square(x: Expr) -> Expr:
    return x * x


@formula
def integer_pow(x: Expr, *, y: int) -> Expr:
    """Repeated squaring; a negative power is one division at the end."""
    result: Expr | None = None
    power, n = x, abs(y)
    while n:
        if n & 1:
            result = power if result is None else result * power
        n >>= 1
        if n:
            power = power * power
    result = x.lift(1) if result is None else result
    return 1 / result if y < 0 else result


def stop_gradient(b: Builder, x: Value) -> Value:
    return x


def clamp(b: Builder, low: Value, x: Value, high: Value) -> Value:
    shape = x.tile.shape
    return b.min(b.max(x, b.broadcast(low, shape)), b.broadcast(high, shape))


@formula
def sign(x: Expr) -> Expr:
    """NaN and both zeros are unchanged."""
    if x.dtype.kind == "uint":
        return x.min(1)
    return where(x > 0, 1, where(x < 0, -1, x))


@float_formula
def is_finite(x: Expr) -> Expr:
    return abs(x) < INF


@float_formula
def floor(x: Expr) -> Expr:
    layout = format_of(x)
    whole = x.cast(layout.integer).cast(x.dtype)
    down = where(whole > x, whole - 1.0, whole)
    # Numbers this large have no fraction; NaN takes this branch too.
    return where(abs(x) < 2.0**layout.mantissa, with_sign_of_zero(down, x), x)


def with_sign_of_zero(result: Expr, x: Expr) -> Expr:
    return where(result.eq(0.0), with_sign_of(result, x), result)


@formula
def ceil(x: Expr) -> Expr:
    return -(-x).floor()


@float_formula
def round_(x: Expr, *, rounding_method: int) -> Expr:
    """0: halves away from zero; 1: halves to even."""
    size = abs(x)
    down = size.floor()
    fraction = size - down
    if rounding_method == 0:
        up = fraction >= 0.5
    else:
        half = down * 0.5
        up = (fraction > 0.5) | (fraction.eq(0.5) & half.ne(half.floor()))
    return with_sign_of(where(up, down + 1.0, down), x)


@formula
def nextafter(x: Expr, y: Expr) -> Expr:
    layout = {**FORMATS, **NARROW_FORMATS}.get(x.dtype)
    if layout is None:
        raise NotApplicable(f"supports f16, bf16, f32 and f64 only, not {x.dtype}")
    pattern, zero = x.bitcast(layout.integer), 0.0
    # A float's bits, as an integer, count its distance from zero.
    outwards = (x < y).op("eq", x > zero)
    step = where(outwards, pattern + 1, pattern - 1)
    tiny = (y.bitcast(layout.integer) & layout.sign_mask) | 1
    result = where(x.eq(zero), tiny, step).bitcast(x.dtype)
    result = where(x.eq(y), y, result)
    return where(x.eq(x) & y.eq(y), result, NAN)


@formula
def reduce_precision(x: Expr, *, exponent_bits: int, mantissa_bits: int) -> Expr:
    """Rounds the bits of f16 itself: its subnormal numbers are normal in f32."""
    own, layouts = x.dtype, {**FORMATS, **NARROW_FORMATS}
    if not own.is_float:
        raise NotApplicable(f"supports float types only, not {own}")
    if own not in layouts:
        x = x.cast(F32)
    layout = layouts[x.dtype]
    pattern = x.bitcast(layout.integer)
    magnitude = pattern & ~layout.sign_mask
    dropped = layout.mantissa - mantissa_bits
    if dropped > 0:  # round to nearest, ties to even
        last = (magnitude >> dropped) & 1
        magnitude = (magnitude + last + ((1 << (dropped - 1)) - 1)) & -(1 << dropped)
    if exponent_bits < layout.exponent:
        bias = (1 << (exponent_bits - 1)) - 1
        infinity = ((1 << layout.exponent) - 1) << layout.mantissa
        too_large = (bias + 1 + layout.bias) << layout.mantissa
        smallest = (1 - bias + layout.bias) << layout.mantissa
        magnitude = where(magnitude >= too_large, infinity, magnitude)
        magnitude = where(magnitude < smallest, 0, magnitude)
    result = (magnitude | (pattern & layout.sign_mask)).bitcast(x.dtype)
    return where(x.eq(x), result, x).cast(own)


@formula
def population_count(x: Expr) -> Expr:
    """Counts in fields of 2, 4 and 8 bits, then adds the bytes by a multiplication."""
    width = _width(x)

    def repeated(byte: int) -> int:
        return int.from_bytes(bytes([byte]) * (width // 8), "little")

    x = x - (x.shift_logical(1) & repeated(0x55))
    x = (x & repeated(0x33)) + (x.shift_logical(2) & repeated(0x33))
    x = (x + x.shift_logical(4)) & repeated(0x0F)
    return x if width == 8 else (x * repeated(0x01)).shift_logical(width - 8)


@formula
def clz(x: Expr) -> Expr:
    """Set all bits below the leading one, then count the zeros."""
    width, shift = _width(x), 1
    while shift < width:
        x = x | x.shift_logical(shift)
        shift *= 2
    return (~x).op("population_count")


def _width(x: Expr) -> int:
    if x.dtype.bits < 8:
        raise NotApplicable(f"supports integers of 8 bits and more, not {x.dtype}")
    return x.dtype.bits


def rem(b: Builder, x: Value, y: Value) -> Value:
    """The remainder with the sign of x, exact for floats too."""
    return (_float_rem if x.tile.dtype.is_float else _integer_rem)(b, x, y)


@formula
def _integer_rem(x: Expr, y: Expr) -> Expr:
    return x - (x / y) * y


@float_formula
def _float_rem(x: Expr, y: Expr) -> Expr:
    """Long division, some quotient bits per round, as many rounds as a tile needs.

    Each round leaves |rest| <= divisor/2, where divisor = |y| * 2**(round * digits).
    The quotient has few enough bits for its products with both halves of the divisor
    to be exact; so are the differences, and the final remainder.
    """
    layout = format_of(x)
    digits = 10 if layout.mantissa == 23 else 20
    base, whole = abs(y), abs(x)
    # A quotient rounded up must not overflow: start with a quarter, undo it at the end.
    huge = whole >= 2.0 ** (layout.bias - 1)
    size = where(huge, whole * 0.25, whole)
    mantissa, exponent = _normalized(base)
    _, top = _normalized(size)
    distance = (top - exponent).max(0)
    # Division by a constant: a multiply and a shift, exact for distances below 2**12.
    rounds = (distance * (65536 // digits + 1)) >> 16
    rest = _divide_rounds(size, mantissa, exponent, rounds, digits)
    rest = where(rest < 0.0, rest + base, rest)
    rest = where(huge, rest * 4.0, rest)
    for multiple in (base * 2.0, base):
        rest = where(huge & (rest >= multiple), rest - multiple, rest)
    rest = where(base < INF, rest, whole)
    defined = (whole < INF) & base.ne(0.0) & y.eq(y)
    return where(defined, with_sign_of(rest, x), NAN)


def _normalized(size: Expr) -> tuple[Expr, Expr]:
    """m in [1, 2) and integer e with size = m * 2**e; arbitrary for 0 and infinity."""
    layout = format_of(size)
    lift = layout.mantissa + 1
    subnormal = size < layout.smallest
    raised = where(subnormal, size * 2.0**lift, size)
    exponent = (bits(raised) >> layout.mantissa) - layout.bias
    fraction = bits(raised) & ((1 << layout.mantissa) - 1)
    mantissa = (fraction | (layout.bias << layout.mantissa)).bitcast(size.dtype)
    return mantissa, where(subnormal, exponent - lift, exponent)


def _divide_rounds(
    size: Expr, mantissa: Expr, exponent: Expr, rounds: Expr, digits: int
) -> Expr:
    """A loop from the most rounds that any element needs down to 0."""
    outer = size.scope.builder
    most = _largest(outer, rounds.cast(I32).value)
    counter, carried = Value(TileType((), I32)), Value(size.value.type)

    inner = Builder(outer.loc)
    scope = Scope(inner)
    left = inner.cast(inner.sub(most, counter), rounds.dtype)
    left = Expr(scope, inner.broadcast(left, size.value.tile.shape))
    m, e, n, rest = (
        Expr(scope, v) for v in (mantissa.value, exponent.value, rounds.value, carried)
    )
    # An element with fewer rounds repeats its first one, which then changes nothing.
    power = e + n.min(left) * digits
    half = power >> 1
    divisor = m * power_of_two(half, m.dtype) * power_of_two(power - half, m.dtype)
    quotient = rest / divisor
    # Not floor(q + 1/2), which may round up below a half.
    quotient = quotient.op("round", rounding_method=1)
    high, low = split(divisor)
    next_rest = (rest - quotient * high) - quotient * low
    body = Block((counter, carried), tuple(inner.ops), (next_rest.value,))

    limit = outer.add(most, outer.index(1))
    (rest_value,) = outer.emit(
        "for", outer.index(0), limit, outer.index(1), size.value, regions=(body,)
    )
    return Expr(size.scope, rest_value)


def _largest(b: Builder, x: Value) -> Value:
    axes = tuple(range(x.tile.rank))
    return b.op("reduce", x, kind="max", axes=axes) if axes else x


def integer_power(b: Builder, x: Value, y: Value) -> Value:
    """Repeated squaring over the bits of an integer exponent."""
    return _integer_power(b, x, b.cast(y, x.tile.dtype))


@formula
def _integer_power(x: Expr, y: Expr) -> Expr:
    result, power, dtype = x.lift(1), x, x.dtype
    for bit in range(dtype.bits - (dtype.kind == "int")):
        taken = ((y >> bit) & 1).ne(0)
        result = where(taken, result * power, result)
        power = power * power
    if dtype.kind == "uint":
        return result
    # A negative exponent: 1/x, truncated.
    odd = (y & 1).ne(0)
    reciprocal = where(x.eq(1), 1, where(x.eq(-1), where(odd, x, 1), 0))
    return where(y < 0, reciprocal, result)
