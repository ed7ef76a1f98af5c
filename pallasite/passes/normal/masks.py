"""masks: one spelling for scales around masks and for negated conditions.

In: scores that are scaled before or after masked ones are replaced, divided by a power
of two or multiplied by its inverse, and chosen by a condition or by its negation. Out:
scaled by a product, then masked, by a condition that is not negated.

All of it is exact. An op on the elements of a select is the select of the op on its
cases. Multiplying by the inverse of a power of two rounds like the division if the
inverse is a normal number. Integers are either less or not less (floats may be NaN).

Not here, because results could differ: adding a mask of 0 and -inf instead of selecting
(NaN and +inf), finite and infinite masks, other divisors, the inverse of a sum.
"""

from math import frexp, isfinite

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, apply_patterns
from pallasite.passes.normal.algebra import constant_of
from pallasite.passes.normal.canonicalize import canonicalize

_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
# The largest exponents of powers of two whose inverses are normal numbers.
_EXPONENTS = {"f32": 126, "bf16": 126, "f64": 1022, "f16": 14}


def masks(kernel: Kernel) -> Kernel:
    """Bring scales and conditions of masks into one form."""
    new = apply_patterns(kernel, PATTERNS)
    return kernel if new is kernel else canonicalize(new)


def scaled_select(op: Op, b: Rewriter) -> Value | None:
    """Scale the cases of a select of which one is a constant."""
    for chosen, factor in (op.operands, op.operands[::-1]):
        select = b.producer(chosen, "select_n")
        number = constant_of(b, factor)
        if select is None or number is None or not op.result.tile.dtype.is_float:
            continue
        which, *cases = select.operands
        known = [constant_of(b, case) for case in cases]
        if len(cases) != 2 or (known[0] is None) == (known[1] is None):
            continue
        new = [b.mul(case, factor) for case in cases]
        return b.op("select_n", which, *new)
    return None


def inverse_power(op: Op, b: Rewriter) -> Value | None:
    """Multiply instead of dividing by a power of two."""
    x, y = op.operands
    number, most = constant_of(b, y), _EXPONENTS.get(x.tile.dtype.name)
    if number is None or most is None or not number or not isfinite(number):
        return None
    fraction, exponent = frexp(number)
    if abs(fraction) != 0.5 or abs(exponent - 1) > most:
        return None
    return b.mul(x, b.like(1 / number, x))


def negated_choice(op: Op, b: Rewriter) -> Value | None:
    """Choose by the condition itself, with the cases exchanged."""
    which, *cases = op.operands
    negation = b.producer(which, "not")
    if negation is None or not which.tile.dtype.is_bool or len(cases) != 2:
        return None
    return b.op("select_n", negation.operands[0], *cases[::-1])


def negated_comparison(op: Op, b: Rewriter) -> Value | None:
    """Compare integers the other way instead of negating the result."""
    inner = b.producer(op.operands[0])
    if inner is None or inner.name not in _OPPOSITE:
        return None
    x, y = inner.operands
    ordered = not x.type.dtype.is_float or inner.name in ("eq", "ne")
    return b.op(_OPPOSITE[inner.name], x, y) if ordered else None


PATTERNS = (
    ("mul", scaled_select),
    ("div", inverse_power),
    ("select_n", negated_choice),
    ("not", negated_comparison),
)
