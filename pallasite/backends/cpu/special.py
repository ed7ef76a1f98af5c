"""Elementwise functions that are more than one instruction or library call.

Each takes the function under construction, the operand type and registers, and gives a
register; `arithmetic.py` names them in its table.
"""

from collections.abc import Sequence

from pallasite.backends.cpu import scalars
from pallasite.backends.cpu.llvm import Function, Val, integer
from pallasite.ir.types import F32, F64, DType


def logistic(f: Function, dtype: DType, x: Val) -> Val:
    one = scalars.floating(1.0, x.type)
    negated = f.pure(x.type, f"fneg {x}")
    suffix = "f" if x.type == "float" else ""
    power = f.call(f"exp{suffix}", x.type, negated, pure=True)
    return f.binary("fdiv", one, f.binary("fadd", one, power))


def nextafter(f: Function, dtype: DType, x: Val, y: Val) -> Val:
    """The neighbour of x towards y, on the bits: denormals would flush otherwise."""
    n = dtype.bits
    type = f"i{n}"
    number = lambda value: integer(value, type)
    sign_bit, size_bits = number(-(1 << (n - 1))), number((1 << (n - 1)) - 1)
    x_bits, y_bits = (scalars.to_bits(f, dtype, v) for v in (x, y))
    x_size, y_size = (f.binary("and", bits, size_bits) for bits in (x_bits, y_bits))
    x_sign, y_sign = (f.binary("and", bits, sign_bit) for bits in (x_bits, y_bits))
    signs_differ = f.compare("icmp ne", x_sign, y_sign)
    shrinks = f.binary("or", signs_differ, f.compare("icmp ugt", x_size, y_size))
    moved = f.binary("add", x_bits, f.select(shrinks, number(-1), number(1)))
    from_zero = f.compare("icmp eq", x_size, number(0))
    moved = f.select(from_zero, f.binary("or", y_sign, number(1)), moved)
    both_zero = f.compare("icmp eq", f.binary("or", x_size, y_size), number(0))
    stays = f.binary("or", both_zero, f.compare("icmp eq", x_bits, y_bits))
    result = scalars.from_bits(f, dtype, f.select(stays, y_bits, moved))
    is_nan = f.compare("fcmp uno", x, y)
    return f.select(is_nan, f.binary("fadd", x, y), result)


def reduce_precision(
    f: Function, dtype: DType, x: Val, *, exponent_bits: int, mantissa_bits: int
) -> Val:
    """Round to fewer mantissa bits, then overflow to infinity and flush to zero."""
    wide = F64 if x.type == "double" else F32
    mantissa, bias = (52, 1023) if wide == F64 else (23, 127)
    n = wide.bits
    number = lambda value: integer(value, f"i{n}")
    bits = f.convert("bitcast", x, f"i{n}")
    sign = f.binary("and", bits, number(-(1 << (n - 1))))
    size = f.binary("and", bits, number((1 << (n - 1)) - 1))
    drop = mantissa - mantissa_bits
    if drop > 0:
        odd = f.binary("and", f.binary("lshr", size, number(drop)), number(1))
        half = number((1 << (drop - 1)) - 1)
        size = f.binary("add", f.binary("add", size, half), odd)
        size = f.binary("and", size, number(-(1 << drop)))
    new_bias = (1 << (exponent_bits - 1)) - 1
    top = min(bias + new_bias, 2 * bias)
    kept = min(mantissa_bits, mantissa)
    fraction = ((1 << kept) - 1) << (mantissa - kept)
    largest = number((top << mantissa) | fraction)
    infinity = number((2 * bias + 1) << mantissa)
    smallest = number(max(bias + 1 - new_bias, 1) << mantissa)
    size = f.select(f.compare("icmp ugt", size, largest), infinity, size)
    size = f.select(f.compare("icmp ult", size, smallest), number(0), size)
    result = f.convert("bitcast", f.binary("or", sign, size), x.type)
    is_nan = f.compare("fcmp uno", x, x)
    return f.select(is_nan, x, result)


# Giles, "Approximating the erfinv function", GPU Computing Gems 2011: the single
# precision coefficients, as a start for the iteration.
_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def erf_inv(f: Function, dtype: DType, x: Val) -> Val:
    """An approximate start and steps of Halley's iteration, in double precision."""
    number = scalars.floating
    wide = f.convert("fpext", x, "double")
    size = f.intrinsic("fabs", wide)
    rest = f.binary("fsub", number(1.0), size)
    product = f.binary("fmul", rest, f.binary("fadd", number(1.0), size))
    w = f.pure("double", f"fneg {f.call('log', 'double', product, pure=True)}")
    central = f.compare("fcmp olt", w, number(5.0))
    near = _polynomial(f, f.binary("fsub", w, number(2.5)), _CENTRE)
    far = _polynomial(f, f.binary("fsub", f.intrinsic("sqrt", w), number(3.0)), _TAIL)
    extreme = f.compare("fcmp ogt", w, number(16.0))
    far = f.select(extreme, _asymptotic_erf_inv(f, w), far)
    guess = f.binary("fmul", f.select(central, near, far), size)
    for _ in range(3):
        guess = _halley(f, guess, size, rest)
    infinite = f.compare("fcmp oeq", size, number(1.0))
    guess = f.select(infinite, number(float("inf")), guess)
    result = f.intrinsic("copysign", guess, wide)
    return f.convert("fptrunc", result, x.type)


def _asymptotic_erf_inv(f: Function, w: Val) -> Val:
    """From erfc(x) ~ exp(-x^2) / (x sqrt(pi)): x^2 is about w - log(w)/2 - 1/2."""
    half = scalars.floating(0.5)
    logarithm = f.call("log", "double", w, pure=True)
    square = f.binary(
        "fsub", f.binary("fsub", w, half), f.binary("fmul", logarithm, half)
    )
    return f.intrinsic("sqrt", square)


def _halley(f: Function, guess: Val, size: Val, rest: Val) -> Val:
    number = scalars.floating
    erf = f.call("erf", "double", guess, pure=True)
    erfc = f.call("erfc", "double", guess, pure=True)
    # Near one, 1 - x is exact while erf has lost its digits.
    close = f.compare("fcmp olt", rest, number(0.5))
    error = f.select(close, f.binary("fsub", rest, erfc), f.binary("fsub", erf, size))
    square = f.binary("fmul", guess, guess)
    decay = f.call("exp", "double", f.pure("double", f"fneg {square}"), pure=True)
    slope = f.binary("fmul", decay, number(1.1283791670955126))  # 2 / sqrt(pi)
    step = f.binary("fdiv", error, slope)
    damp = f.binary("fadd", number(1.0), f.binary("fmul", guess, step))
    return f.binary("fsub", guess, f.binary("fdiv", step, damp))


def _polynomial(f: Function, x: Val, coefficients: Sequence[float]) -> Val:
    """Horner's scheme, highest power first."""
    first, *rest = coefficients
    total = scalars.floating(first)
    for c in rest:
        total = f.binary("fadd", f.binary("fmul", total, x), scalars.floating(c))
    return total
