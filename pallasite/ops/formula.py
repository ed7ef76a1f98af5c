"""Formula notation for decompositions: `x * y + 1.0` emits ops.

`@formula` turns a function on `Expr`s into the `(Builder, *values, **attrs) -> Value`
form of an op row; `@float_formula` also computes narrow floats in f32. The rest are
the building blocks of floating-point code: bit fields, exact sums and products.
Products that must be exact are computed from split operands, so the results are the
same whether or not a compiler fuses multiply-adds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from typing import Any

import numpy as np

from pallasite.ir.build import Builder, python_scalar
from pallasite.ir.nodes import Value
from pallasite.ir.types import DTYPES, F32, F64, I32, I64, DType

Number = bool | int | float
Lower = Callable[..., Value]


class NotApplicable(Exception):
    """A decomposition does not cover these types or attributes; says why."""


class Scope:
    """The builder of one decomposition, and the constants made so far."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self._constants: dict[tuple[str, Any], Value] = {}

    def constant(self, number: Number, like: Value) -> Value:
        rounded = python_scalar(number, like.tile.dtype)
        key = (repr(rounded), like.tile)  # repr: 0.0 and -0.0 are different constants
        if key not in self._constants:
            self._constants[key] = self.builder.constant(rounded, like.tile)
        return self._constants[key]


class Expr:
    """A value whose operators emit ops; numbers become constants."""

    __slots__ = ("scope", "value")

    def __init__(self, scope: Scope, value: Value):
        self.scope, self.value = scope, value

    @property
    def dtype(self) -> DType:
        return self.value.tile.dtype

    def lift(self, operand: "Expr | Number") -> "Expr":
        """`operand` as an Expr: a number becomes a constant of this type."""
        if isinstance(operand, Expr):
            return operand
        return Expr(self.scope, self.scope.constant(operand, self.value))

    def op(self, name: str, *others: "Expr | Number", **attrs: Any) -> "Expr":
        operands = [self.value, *(self.lift(o).value for o in others)]
        return Expr(self.scope, self.scope.builder.op(name, *operands, **attrs))

    def cast(self, dtype: DType) -> "Expr":
        return Expr(self.scope, self.scope.builder.cast(self.value, dtype))

    def bitcast(self, dtype: DType) -> "Expr":
        return self if self.dtype == dtype else self.op("bitcast", dtype=dtype)

    def __add__(self, other: "Expr | Number") -> "Expr":
        return self.op("add", other)

    def __radd__(self, other: Number) -> "Expr":
        return self.op("add", other)

    def __sub__(self, other: "Expr | Number") -> "Expr":
        return self.op("sub", other)

    def __rsub__(self, other: Number) -> "Expr":
        return self.lift(other).op("sub", self)

    def __mul__(self, other: "Expr | Number") -> "Expr":
        return self.op("mul", other)

    def __rmul__(self, other: Number) -> "Expr":
        return self.op("mul", other)

    def __truediv__(self, other: "Expr | Number") -> "Expr":
        return self.op("div", other)

    def __rtruediv__(self, other: Number) -> "Expr":
        return self.lift(other).op("div", self)

    def __neg__(self) -> "Expr":
        return self.op("neg")

    def __abs__(self) -> "Expr":
        return self.op("abs")

    def __and__(self, other: "Expr | Number") -> "Expr":
        return self.op("and", other)

    def __or__(self, other: "Expr | Number") -> "Expr":
        return self.op("or", other)

    def __xor__(self, other: "Expr | Number") -> "Expr":
        return self.op("xor", other)

    def __invert__(self) -> "Expr":
        return self.op("not")

    def __lshift__(self, other: "Expr | Number") -> "Expr":
        return self.op("shift_left", other)

    def __rshift__(self, other: "Expr | Number") -> "Expr":
        """Shifts in copies of the sign bit; see `shift_logical`."""
        return self.op("shift_right_arithmetic", other)

    def shift_logical(self, other: "Expr | Number") -> "Expr":
        return self.op("shift_right_logical", other)

    def __lt__(self, other: "Expr | Number") -> "Expr":
        return self.op("lt", other)

    def __le__(self, other: "Expr | Number") -> "Expr":
        return self.op("le", other)

    def __gt__(self, other: "Expr | Number") -> "Expr":
        return self.op("gt", other)

    def __ge__(self, other: "Expr | Number") -> "Expr":
        return self.op("ge", other)

    def eq(self, other: "Expr | Number") -> "Expr":
        return self.op("eq", other)

    def ne(self, other: "Expr | Number") -> "Expr":
        return self.op("ne", other)

    def min(self, other: "Expr | Number") -> "Expr":
        return self.op("min", other)

    def max(self, other: "Expr | Number") -> "Expr":
        return self.op("max", other)

    def floor(self) -> "Expr":
        return self.op("floor")


def where(which: Expr, on_true: Expr | Number, on_false: Expr | Number) -> Expr:
    """`on_true` where `which`; at least one of the two is an Expr."""
    typed = on_true if isinstance(on_true, Expr) else on_false
    assert isinstance(typed, Expr)
    return which.op("select_n", typed.lift(on_false), typed.lift(on_true))


def formula(fn: Callable[..., Expr]) -> Lower:
    """The `lower` of a row from a function on Exprs, types unchanged."""

    @wraps(fn)
    def lower(b: Builder, *values: Value, **attrs: Any) -> Value:
        scope = Scope(b)
        return fn(*(Expr(scope, v) for v in values), **attrs).value

    return lower


def float_formula(fn: Callable[..., Expr]) -> Lower:
    """As `formula`, for f32 and f64; narrower floats are computed in f32."""

    def widened(*operands: Expr, **attrs: Any) -> Expr:
        own = operands[0].dtype
        if own in FORMATS:
            return fn(*operands, **attrs)
        if not own.is_float:
            raise NotApplicable(f"supports float types only, not {own}")
        wide = [o.cast(F32) if o.dtype == own else o for o in operands]
        result = fn(*wide, **attrs)
        return result.cast(own) if result.dtype == F32 else result

    return formula(wraps(fn)(widened))


# --- the fields of a float ---


@dataclass(frozen=True)
class Format:
    """The layout of a binary float, and the integer type that holds its bits."""

    mantissa: int  # stored bits
    exponent: int
    integer: DType

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def sign_mask(self) -> int:
        return -1 << (self.mantissa + self.exponent)

    @property
    def low_half(self) -> int:
        """The low mantissa bits: without them products of two floats are exact."""
        return (1 << (self.mantissa + 2) // 2) - 1

    @property
    def smallest(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)


FORMATS = {F32: Format(23, 8, I32), F64: Format(52, 11, I64)}
NARROW_FORMATS = {
    DTYPES["f16"]: Format(10, 5, DTYPES["i16"]),
    DTYPES["bf16"]: Format(7, 8, DTYPES["i16"]),
}
INF = float("inf")
NAN = float("nan")


def format_of(x: Expr) -> Format:
    return FORMATS[x.dtype]


def bits(x: Expr) -> Expr:
    """The bits of a float as a signed integer of its width."""
    return x.bitcast(format_of(x).integer)


def to_int(x: Expr) -> Expr:
    """A float that holds an integer, as an integer of its width."""
    return x.cast(format_of(x).integer)


def power_of_two(n: Expr, dtype: DType) -> Expr:
    """2**n, for n in the exponent range of normal numbers."""
    layout = FORMATS[dtype]
    return ((n + layout.bias) << layout.mantissa).bitcast(dtype)


def scale_near_one(x: Expr, n: Expr) -> Expr:
    """x * 2**n for x between 1/2 and 2, with overflow and gradual underflow."""
    half = n >> 1
    scaled = (bits(x) + (half << format_of(x).mantissa)).bitcast(x.dtype)
    return scaled * power_of_two(n - half, x.dtype)


def is_negative(x: Expr) -> Expr:
    """The sign bit: true for -0.0 too."""
    return bits(x) < 0


def with_sign_of(magnitude: Expr, sign: Expr) -> Expr:
    mask = format_of(sign).sign_mask
    return ((bits(magnitude) & ~mask) | (bits(sign) & mask)).bitcast(sign.dtype)


def mantissa_and_exponent(x: Expr) -> tuple[Expr, Expr]:
    """m in [sqrt(1/2), sqrt(2)) and integer e (as float) with x = m * 2**e, x > 0."""
    layout = format_of(x)
    subnormal = x < layout.smallest
    lift = layout.mantissa + 2
    raised = where(subnormal, x * 2.0**lift, x)
    root_half = python_bits(0.5**0.5, x.dtype)
    steps = (bits(raised) - root_half) >> layout.mantissa
    m = (bits(raised) - (steps << layout.mantissa)).bitcast(x.dtype)
    e = steps.cast(x.dtype)
    return m, where(subnormal, e - float(lift), e)


def python_bits(number: float, dtype: DType) -> int:
    return int(np.asarray(number, dtype.np).view(FORMATS[dtype].integer.np))


# --- polynomials and exact arithmetic ---


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule; lowest power first."""
    *rest, last = coefficients
    result = x.lift(last)
    for c in reversed(rest):
        result = result * x + c
    return result


def fitted(x: Expr, table: dict[str, tuple[float, ...]]) -> Expr:
    """The polynomial of `ops/polynomials.py` for the type of `x`."""
    return polynomial(x, table[x.dtype.name])


def two_sum(x: Expr, y: Expr) -> tuple[Expr, Expr]:
    """The rounded sum and its error, exactly."""
    total = x + y
    from_y = total - x
    return total, (x - (total - from_y)) + (y - from_y)


def split(x: Expr) -> tuple[Expr, Expr]:
    """x = high + low, each with half the bits."""
    high = (bits(x) & ~format_of(x).low_half).bitcast(x.dtype)
    return high, x - high


def fast_two_sum(x: Expr, y: Expr) -> tuple[Expr, Expr]:
    """Like `two_sum`, if x is the larger of the two."""
    total = x + y
    return total, y - (total - x)


def two_product(x: Expr, y: Expr) -> tuple[Expr, Expr]:
    """The rounded product and its error (exact away from underflow).

    Each partial product is exact, so fusing one with a sum changes nothing.
    """
    (xh, xl), (yh, yl) = split(x), split(y)
    total, error_1 = fast_two_sum(xh * yh, xh * yl)
    total, error_2 = fast_two_sum(total, xl * yh)
    return fast_two_sum(total, error_1 + error_2 + xl * yl)


def split_constant(
    number: str, kept_bits: int, dtype: DType, parts: int
) -> list[float]:
    """A decimal number as a sum: `kept_bits` bits in each part, the rest in the last.

    An integer of few bits times such a part is exact.
    """
    rest, pieces = Fraction(number), list[float]()
    for _ in range(parts - 1):
        exponent = np.frexp(float(rest))[1]
        unit = Fraction(2) ** int(exponent - kept_bits)
        piece = rest // unit * unit
        pieces.append(float(piece))
        rest -= piece
    pieces.append(float(np.asarray(float(rest), dtype.np)))
    return pieces
