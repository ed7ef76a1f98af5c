"""Elementwise ops on one element, or on a vector of them: the same rules serve both.

`RULES` maps an op name to a function of registers; `element` runs it and rounds. XLA's
semantics are kept: integers never trap, shifts past the width are defined, NaN
propagates through max and min. Elementary functions come from `functions.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.values import lane_type
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.backends.cpu.ops import functions, special
from pallasite.ir.types import BOOL, DType


@dataclass(frozen=True)
class Site:
    """Where an element is computed: the code so far, its type, the op's attributes."""

    f: Function
    dtypes: tuple[DType, ...]  # of the operands
    result: DType
    attrs: Mapping[str, Any]

    @property
    def dtype(self) -> DType:
        """Of the operands, or of the first where they differ."""
        return self.dtypes[0]

    @property
    def type(self) -> str:
        return scalars.register(self.dtype)

    def number(self, value: float) -> Val:
        return scalars.constant(value, self.dtype)

    def test(self, predicate: str, a: Val, b: Val) -> Val:
        """Compare; `predicate` is one of eq ne lt le gt ge."""
        if self.dtype.is_float:
            ordered = "u" if predicate == "ne" else "o"
            return self.f.compare(f"fcmp {ordered}{predicate}", a, b)
        if predicate in ("eq", "ne"):
            return self.f.compare(f"icmp {predicate}", a, b)
        sign = "s" if self.dtype.is_signed_int else "u"
        return self.f.compare(f"icmp {sign}{predicate}", a, b)


Rule = Callable[..., Val]


def element(
    f: Function,
    name: str,
    attrs: Mapping[str, Any],
    dtypes: tuple[DType, ...],
    result: DType,
    values: list[Val],
) -> Val:
    """One element of an elementwise op. `dtypes` are those of `values`."""
    value = RULES[name](Site(f, dtypes, result, attrs), *values)
    if scalars.is_narrow(result) and name not in EXACT:
        return scalars.rounded(f, result, value)
    return value


def combine(f: Function, name: str, dtype: DType, a: Val, b: Val) -> Val:
    """A binary op without attributes, for reductions, scans and atomics."""
    return element(f, name, {}, (dtype, dtype), dtype, [a, b])


def _either(on_float: Rule, on_integer: Rule) -> Rule:
    def rule(at: Site, *values: Val) -> Val:
        return (on_float if at.dtype.is_float else on_integer)(at, *values)

    return rule


def _signed(on_signed: Rule, on_unsigned: Rule) -> Rule:
    def rule(at: Site, *values: Val) -> Val:
        return (on_signed if at.dtype.is_signed_int else on_unsigned)(at, *values)

    return rule


def _binary(instruction: str) -> Rule:
    return lambda at, a, b: at.f.binary(instruction, a, b)


def _intrinsic(name: str) -> Rule:
    return lambda at, *values: at.f.intrinsic(name, *values)


def _test(predicate: str) -> Rule:
    return lambda at, a, b: at.test(predicate, a, b)


# --- integer division ---


def _divide(at: Site, x: Val, y: Val) -> Val:
    """x/0 is -1, MIN/-1 is MIN."""
    by_zero, safe = _safe_divisor(at, x, y)
    name = "sdiv" if at.dtype.is_signed_int else "udiv"
    quotient = at.f.binary(name, x, safe)
    return at.f.select(by_zero, integer(-1, at.type), quotient)


def _remainder(at: Site, x: Val, y: Val) -> Val:
    """x rem 0 is x, MIN rem -1 is 0."""
    by_zero, safe = _safe_divisor(at, x, y)
    name = "srem" if at.dtype.is_signed_int else "urem"
    return at.f.select(by_zero, x, at.f.binary(name, x, safe))


def _safe_divisor(at: Site, x: Val, y: Val) -> tuple[Val, Val]:
    f = at.f
    by_zero = unsafe = at.test("eq", y, integer(0, at.type))
    if at.dtype.is_signed_int:
        lowest = integer(-(1 << (at.dtype.bits - 1)), at.type)
        by_minus_one = at.test("eq", y, integer(-1, at.type))
        overflow = f.binary("and", at.test("eq", x, lowest), by_minus_one)
        unsafe = f.binary("or", by_zero, overflow)
    return by_zero, f.select(unsafe, integer(1, at.type), y)


# --- powers ---


def _integer_pow(at: Site, x: Val) -> Val:
    exponent, multiply = at.attrs["y"], "fmul" if at.dtype.is_float else "mul"
    result, base, n = None, x, abs(exponent)
    while n:
        if n & 1:
            result = base if result is None else at.f.binary(multiply, result, base)
        n >>= 1
        base = at.f.binary(multiply, base, base) if n else base
    result = at.number(1) if result is None else result
    return RULES["div"](at, at.number(1), result) if exponent < 0 else result


def _power(at: Site, x: Val, y: Val) -> Val:
    base, exponent = at.dtypes
    if not base.is_float:
        return _power_of_integers(at, x, y)
    y = scalars.cast(at.f, y, exponent, base)
    return functions.evaluate(at.f, "pow", base, [x, y], element)


def _power_of_integers(at: Site, x: Val, y: Val) -> Val:
    """Square and multiply over the exponent's bits; x**-n is 1/x**n, truncated."""
    f, count = at.f, integer(int(lane_type(y.type)[1:]))
    one, x, y = f.alike(at.number(1), x, y)
    with f.loop(count, [one, x, y]) as loop:
        _, product, base, left = loop
        odd = f.convert("trunc", left, "i1")
        product = f.select(odd, f.binary("mul", product, base), product)
        base = f.binary("mul", base, base)
        loop.carries = [product, base, f.binary("lshr", left, integer(1, y.type))]
    power = loop.carries[0]
    if not at.dtype.is_signed_int:
        return power
    odd = f.convert("trunc", y, "i1")
    minus = integer(-1, at.type)
    alternating = f.select(odd, minus, one)
    inverse = f.select(at.test("eq", x, minus), alternating, at.number(0))
    inverse = f.select(at.test("eq", x, one), one, inverse)
    negative = f.compare("icmp slt", y, integer(0, y.type))
    return f.select(negative, inverse, power)


# --- sign, extremes, rounding ---


def _sign_of_float(at: Site, x: Val) -> Val:
    one = at.f.intrinsic("copysign", at.number(1), x)
    # Zeros and NaN are their own sign: the comparison is false for both.
    ordered = at.f.compare("fcmp one", x, at.number(0))
    return at.f.select(ordered, one, x)


def _sign_of_integer(at: Site, x: Val) -> Val:
    nonzero = at.f.convert("zext", at.test("ne", x, at.number(0)), at.type)
    negative = at.test("lt", x, at.number(0))
    return at.f.select(negative, integer(-1, at.type), nonzero)


def _extreme(name: str) -> Rule:
    on_bool = {"max": "or", "min": "and"}[name]

    def rule(at: Site, a: Val, b: Val) -> Val:
        if at.dtype.is_bool:
            return at.f.binary(on_bool, a, b)
        if at.dtype.is_float:
            return at.f.intrinsic(f"{name}imum", a, b)
        return at.f.intrinsic(f"{'s' if at.dtype.is_signed_int else 'u'}{name}", a, b)

    return rule


def _clamp(at: Site, low: Val, x: Val, high: Val) -> Val:
    return RULES["min"](at, RULES["max"](at, x, low), high)


def _round(at: Site, x: Val) -> Val:
    to_even = int(at.attrs["rounding_method"]) == 1
    return at.f.intrinsic("roundeven" if to_even else "round", x)


def _is_finite(at: Site, x: Val) -> Val:
    size = at.f.intrinsic("fabs", x)
    return at.f.compare("fcmp olt", size, scalars.floating(float("inf"), at.type))


# --- bits ---


def _not(at: Site, x: Val) -> Val:
    return at.f.binary("xor", x, integer(1 if at.dtype == BOOL else -1, at.type))


def _shift(instruction: str) -> Rule:
    def rule(at: Site, x: Val, y: Val) -> Val:
        f, bits = at.f, at.dtype.bits
        inside = f.compare("icmp ult", y, integer(bits, at.type))
        if instruction == "ashr":  # past the width, only the sign is left
            return f.binary("ashr", x, f.select(inside, y, integer(bits - 1, at.type)))
        shifted = f.binary(instruction, x, f.select(inside, y, at.number(0)))
        return f.select(inside, shifted, at.number(0))

    return rule


def _clz(at: Site, x: Val) -> Val:
    return at.f.intrinsic("ctlz", x, Val("i1", "0"))


def _select_n(at: Site, which: Val, *cases: Val) -> Val:
    f = at.f
    if at.dtype.is_bool:
        return cases[0] if len(cases) == 1 else f.select(which, cases[1], cases[0])
    # The selector is clamped: anything not below n is case n or a later one.
    result = cases[0]
    for n, case in enumerate(cases[1:], 1):
        reached = f.compare("icmp sge", which, integer(n, which.type))
        result = f.select(reached, case, result)
    return result


def _bitcast(at: Site, x: Val) -> Val:
    return scalars.from_bits(at.f, at.result, scalars.to_bits(at.f, at.dtype, x))


def _function(name: str) -> Rule:
    """An elementary function; `functions.FUNCTIONS` says how it is emitted."""
    return lambda at, *values: functions.evaluate(
        at.f, name, at.dtype, list(values), element
    )


def _special(function: Callable[..., Val]) -> Rule:
    return lambda at, *values: function(at.f, at.dtype, *values, **at.attrs)


RULES: dict[str, Rule] = {
    "add": _either(_binary("fadd"), _binary("add")),
    "sub": _either(_binary("fsub"), _binary("sub")),
    "mul": _either(_binary("fmul"), _binary("mul")),
    "div": _either(_binary("fdiv"), _divide),
    "rem": _either(_binary("frem"), _remainder),
    "neg": _either(
        lambda at, x: at.f.fneg(x),
        lambda at, x: at.f.binary("sub", integer(0, x.type), x),
    ),
    "abs": _either(
        _intrinsic("fabs"),
        lambda at, x: at.f.intrinsic("abs", x, Val("i1", "0")),
    ),
    "sign": _either(
        _sign_of_float,
        _signed(_sign_of_integer, lambda at, x: RULES["min"](at, x, at.number(1))),
    ),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "clamp": _clamp,
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "round": _round,
    "is_finite": _is_finite,
    "nextafter": _special(special.nextafter),
    "square": lambda at, x: RULES["mul"](at, x, x),
    "integer_pow": _integer_pow,
    **{name: _function(name) for name in functions.FUNCTIONS},
    "pow": _power,
    "sqrt": _intrinsic("sqrt"),
    "rsqrt": lambda at, x: at.f.binary("fdiv", at.number(1), at.f.intrinsic("sqrt", x)),
    "and": _binary("and"),
    "or": _binary("or"),
    "xor": _binary("xor"),
    "not": _not,
    "shift_left": _shift("shl"),
    "shift_right_logical": _shift("lshr"),
    "shift_right_arithmetic": _shift("ashr"),
    "population_count": _intrinsic("ctpop"),
    "clz": _clz,
    **{name: _test(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "select_n": _select_n,
    "cast": lambda at, x: scalars.cast(at.f, x, at.dtype, at.result),
    "bitcast": _bitcast,
}

NATIVE = frozenset(RULES)

# Ops whose result already is a value of the result type, or not a float.
EXACT = frozenset(
    [
        *("cast", "bitcast", "select_n"),
        *("neg", "abs", "sign", "max", "min", "clamp", "floor", "ceil", "round"),
        *("nextafter", "is_finite", "eq", "ne", "lt", "le", "gt", "ge"),
    ]
)
