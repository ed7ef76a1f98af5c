"""Numbers as emitted CUDA computes with them: types that wrap, sums, quotients.

An integer is a linear form of symbols (`linear.py`); what C++ makes of two is again
one, as far as it stays inside its type. What is not linear becomes a symbol, with
what is known of it as facts; the same of the same numbers is the same symbol.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.backends.cuda.linear import (
    ALWAYS,
    NEVER,
    Condition,
    Linear,
    Path,
    Symbol,
    constant,
    greatest,
    symbol,
)

RANGES = {
    "bool": (0, 1),
    "char": (-128, 127),
    "i8": (-128, 127),
    "u8": (0, 255),
    "i16": (-(2**15), 2**15 - 1),
    "short": (-(2**15), 2**15 - 1),
    "u16": (0, 2**16 - 1),
    "int": (-(2**31), 2**31 - 1),
    "u32": (0, 2**32 - 1),
    "i64": (-(2**63), 2**63 - 1),
    "u64": (0, 2**64 - 1),
}
SAME = {"bf16": "u16", "f16": "u16", "f8e4m3fn": "u8", "f8e5m2": "u8", "long": "i64"}
BYTES = {"bool": 1, "char": 1, "i8": 1, "u8": 1, "i16": 2, "short": 2, "u16": 2}
BYTES |= {"int": 4, "u32": 4, "i64": 8, "u64": 8, "float": 4, "double": 8}
BYTES |= {"uint4": 16, "uint2": 8, "void": 1}


class Real:
    """A floating-point number, or anything else without an address."""


REAL = Real()


@dataclass(frozen=True)
class Integer:
    """Of unsigned types, `form` may differ from the number by a multiple of 2^bits."""

    form: Linear
    kind: str = "int"


@dataclass(frozen=True)
class Pointer:
    memory: str  # a parameter, "shared", or an array in registers
    offset: Linear  # in bytes
    kind: str  # of what it points to


@dataclass(frozen=True)
class Descriptor:
    """Of an operand of a matmul."""

    at: Linear
    apart: Linear
    swizzle: int


def plain_type(kind: str) -> str:
    return SAME.get(kind, kind)


def _limit(fact: Linear, x: Linear, n: int) -> Linear | None:
    """If a fact says x <= n * form + rest: the form and rest // n."""
    above = fact + x  # fact >= 0, so x is at most this
    if any(s in above.terms for s in x.terms) or any(
        count % n for count in above.terms.values()
    ):
        return None
    form = {s: count // n for s, count in above.terms.items()}
    return Linear(form, above.constant // n)


def bit_of(condition: Condition) -> Linear:
    """1 where a condition holds, otherwise 0."""
    made = symbol(0, 1)
    (s,) = made.terms
    s.implies += [(1, 1, condition), (0, 0, condition.negated)]
    if condition.kind == "least":
        # As sums: where the bit is 1 (0), the form is at least 0 (at most -1).
        (form,) = condition.parts
        low, high = Path().range(form)
        facts = [
            form + (made - 1) * min(low, 0),
            form * -1 - 1 + made * max(high + 1, 0),
        ]
        for symbol_of_fact in (s, *form.terms):
            symbol_of_fact.facts += facts
    return made


def common_type(a: str, b: str) -> str:
    """The type in which C++ computes with two."""
    for kind in ("u64", "i64", "u32"):
        if kind in (a, b):
            return kind
    return "int"


def compared(operator: str, a: Linear, b: Linear) -> Condition:
    if operator in ("==", "!="):
        return Condition("zero" if operator == "==" else "other", (a - b,))
    if operator in (">", ">="):
        a, b = b, a
    return Condition("least", (b - a - (operator in ("<", ">")),))


class Numbers:
    """What was computed from what, so that equal numbers are one symbol."""

    def __init__(self) -> None:
        self._seen: dict[tuple, Any] = {}
        # Numbers that may have left their type, as what they were computed from.
        self._wrapped: dict[Symbol, Integer] = {}

    def as_integer(self, value: Any) -> Integer:
        if isinstance(value, Integer):
            return value
        if isinstance(value, Condition):
            if value in (ALWAYS, NEVER):
                return Integer(constant(int(value is ALWAYS)))
            return Integer(self.kept(("bit", id(value)), value, lambda: bit_of(value)))
        return self.any_of("int")

    def condition(self, value: Any) -> Condition:
        if isinstance(value, Condition):
            return value
        if isinstance(value, Integer):
            return Condition("other", (value.form,))
        return Condition("any")

    def plain(self, value: Integer, path: Path) -> Linear:
        """The number itself: inside its type's range."""
        low, high = path.range(value.form)
        least, most = RANGES[value.kind]
        if least <= low and high <= most:
            return value.form

        def make() -> Linear:
            made = symbol(least, most)
            self._wrapped.update(dict.fromkeys(made.terms, value))
            low, high = Path().range(value.form)
            middle = 2 ** (8 * BYTES[value.kind] - 1)
            if least == 0 and -middle <= low and high < middle:
                # A signed number as an unsigned one: itself, unless it is negative.
                (s,) = made.terms
                equal = Condition("zero", (made - value.form,))
                s.implies.append((0, middle - 1, equal))
            return made

        return self.once(("any", value.kind, value.form.key), make)

    def cast(self, kind: str, value: Any, path: Path) -> Any:
        kind = plain_type(kind)
        if kind.endswith("*"):
            if isinstance(value, Pointer):
                return replace(value, kind=plain_type(kind.removesuffix("*")))
            return value
        if kind == "bool":
            return self.condition(value)
        if kind not in RANGES:
            return REAL
        if isinstance(value, Descriptor):
            return value
        value = value if not isinstance(value, Condition) else self.as_integer(value)
        if not isinstance(value, Integer):
            return self.any_of(kind)
        if BYTES[kind] > BYTES[value.kind]:
            value = Integer(self.plain(value, path), kind)
        value = Integer(value.form, kind)
        if kind.startswith("u"):
            return value
        return Integer(self.plain(value, path), kind)

    def any_of(self, kind: str) -> Any:
        if kind == "bool":
            return Condition("any")
        return Integer(symbol(*RANGES[kind]), kind) if kind in RANGES else REAL

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """One symbol for what is computed from the same numbers."""
        if key not in self._seen:
            self._seen[key] = (make(), key)
        return self._seen[key][0]

    def kept(self, key: tuple, owner: Any, make: Callable[[], Any]) -> Any:
        """As `once`, for keys that hold the identity of `owner`."""
        if key not in self._seen:
            self._seen[key] = (make(), owner)
        return self._seen[key][0]

    def computed(
        self, operator: str, a: Integer, b: Integer, kind: str, path: Path
    ) -> Linear:
        if operator == "+":
            return a.form + b.form
        if operator == "-":
            return a.form - b.form
        if operator == "*" and (a.form.number is None) != (b.form.number is None):
            if a.form.number is not None:
                a, b = b, a
            # Powers of two above half of the range are negative numbers.
            return a.form * b.form.number
        x, y = self.plain(a, path), self.plain(b, path)
        if operator == "*":
            return self._product(x, y, path)
        n = y.number
        if operator in "^|" and 0 in (n, x.number):
            return x + y
        if operator == "<<" and n is not None and 0 <= n < 64:
            return x * (1 << n)
        if operator == ">>" and n is not None and 0 <= n < 64:
            return self.divided(x, 1 << n, path)[0]
        if operator in ("/", "%") and n is not None and n > 0 and path.range(x)[0] >= 0:
            return self.divided(x, n, path)[operator == "%"]
        return self._bounded(operator, x, y, kind, path)

    def _bounded(
        self, operator: str, x: Linear, y: Linear, kind: str, path: Path
    ) -> Linear:
        """What is known only by ranges."""
        if operator in "^|":
            for one, other in ((x, y), (y, x)):
                step = math.gcd(other.constant, *other.terms.values())
                step &= -step  # the low bits that are zero in one of them
                if step > 1 and path.range(one)[0] >= 0:
                    high, low_bits = self.divided(one, step, path)
                    rest = self.divided(other, step, path)[0]
                    return (
                        self._bounded(operator, high, rest, kind, path) * step
                        + low_bits
                    )
        (a, b), (c, d) = path.range(x), path.range(y)
        low, high = RANGES[kind]
        if a >= 0 and c >= 0:
            if operator == "&":
                n = y.number
                if n is not None and n & (n + 1) == 0:
                    return self.divided(x, n + 1, path)[1]
                low, high = 0, min(b, d)
            elif operator in ("|", "^"):
                low, high = 0, (1 << max(b.bit_length(), d.bit_length())) - 1
            elif operator == "/" and c > 0:
                low, high = a // d, b // c
            elif operator == "%" and c > 0:
                low, high = 0, min(b, d - 1)
            elif operator == ">>":
                low, high = 0, b
        elif operator == "/" and c > 0:
            most = max(abs(a), abs(b)) // c
            low, high = -most, most
        elif operator == "%" and c > 0:
            low, high = max(-(d - 1), min(a, 0)), min(d - 1, max(b, 0))
        elif operator == ">>":
            low, high = min(a, -1), max(b, 0)
        elif operator == "&" and c >= 0:
            low, high = 0, d
        key = (operator, x.key, y.key, low, high)
        return self.once(key, lambda: symbol(low, high))

    def _product(self, x: Linear, y: Linear, path: Path) -> Linear:
        (a, b), (c, d) = path.range(x), path.range(y)
        ends = (a * c, a * d, b * c, b * d)
        key = ("*", x.key, y.key, min(ends), max(ends))
        return self.once(key, lambda: symbol(min(ends), max(ends)))

    def divided(self, x: Linear, n: int, path: Path) -> tuple[Linear, Linear]:
        """The quotient, rounded down, and the remainder."""
        whole = Linear({s: c // n for s, c in x.terms.items() if c // n})
        whole = whole + x.constant // n
        rest = x - whole * n
        low, high = self._range_by_facts(rest, path, n)
        if low // n == high // n:
            return whole + low // n, rest - low // n * n
        quotient, remainder = self._quotient(rest, n, low // n, high // n, path)
        found = whole + quotient
        least, most = self._range_by_facts(x, path, n)
        if len(whole.terms) and (least // n, most // n) != path.range(found):
            # Facts say more of the sum than of its parts.
            return self._quotient(x, n, least // n, most // n, path)
        return found, remainder

    def _quotient(
        self, x: Linear, n: int, low: int, high: int, path: Path
    ) -> tuple[Linear, Linear]:
        # Where x is at most a multiple of n and a rest, the quotient is at most that
        # multiple and the whole part of the rest.
        limits = [limit for fact in path.facts if (limit := _limit(fact, x, n))]
        limit_keys = tuple(limit.key for limit in limits)

        def make() -> tuple[Linear, Linear]:
            quotient, remainder = symbol(low, high), symbol(0, n - 1)
            equal = x - quotient * n - remainder
            facts = [equal, equal * -1, *(limit - quotient for limit in limits)]
            for s in (*quotient.terms, *remainder.terms):
                s.facts += facts
            return quotient, remainder

        return self.once(("divided", x.key, n, low, high, limit_keys), make)

    def _range_by_facts(self, x: Linear, path: Path, n: int) -> tuple[int, int]:
        """`path.range`, or a narrower one if that changes quotients."""
        low, high = path.range(x)
        if len(x.terms) < 2 or low // n == high // n:
            return low, high
        key = ("range", x.key, tuple(map(id, path.facts)))

        def find() -> tuple[int, int]:
            most, least = greatest(x, path), greatest(x * -1, path)
            if -math.inf in (most, least):  # never reached
                return low, high
            above = high if most is None else min(high, math.floor(most + 0.1))
            below = low if least is None else max(low, -math.floor(least + 0.1))
            return (below, above) if below <= above else (low, high)

        return self.kept(key, path, find)

    def extreme(self, x: Linear, y: Linear, sign: int, path: Path) -> Linear:
        """The smaller (sign 1) or the larger (-1) of two."""
        x, y = x * sign, y * sign
        (a, b), (c, d) = path.range(x), path.range(y)
        if b <= c or d <= a:
            return (x if b <= c else y) * sign

        def make() -> Linear:
            (a, b), (c, d) = Path().range(x), Path().range(y)
            made = symbol(min(a, c), min(b, d))
            (s,) = made.terms
            s.facts += [x - made, y - made]
            return made

        return self.once(("least", x.key, y.key), make) * sign

    def unwrapped(self, form: Linear, path: Path) -> Linear:
        """With what numbers were computed from, where those are inside their type."""
        for s, n in form.terms.items():
            if s in self._wrapped:
                whole = self.unwrapped(self._wrapped[s].form, path)
                low, high = path.range(whole)
                least, most = RANGES[self._wrapped[s].kind]
                if least <= low and high <= most:
                    form = form + (whole - Linear({s: 1})) * n
        return form
