"""The first pass: one simple form for each thing a kernel says.

Kernel in, Kernel out, same meaning bit for bit except that folded transcendental
functions are the op table's own. Folds constants, applies exact identities, merges
views, decides known branches and loops, shares equal code and drops dead code.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import (
    Pattern,
    Rewriter,
    apply_patterns,
    common_subexpressions,
    dead_code,
    inline,
)
from pallasite.passes import algebra, views
from pallasite.passes.algebra import constant_of


def canonicalize(kernel: Kernel) -> Kernel:
    """Patterns, sharing and dead code removal, until nothing changes."""
    while True:
        new = dead_code(common_subexpressions(apply_patterns(kernel, PATTERNS)))
        if new is kernel:
            return kernel
        kernel = new


def known_branch(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """A cond whose branch number is known, or which has one branch only."""
    number = constant_of(b, op.operands[0])
    if number is None and len(op.regions) > 1:
        return None
    chosen = min(max(int(number or 0), 0), len(op.regions) - 1)
    return inline(b, op.regions[chosen], ())


def known_loop(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """A for loop that runs not at all or once."""
    first, limit, step = (constant_of(b, v) for v in op.operands[:3])
    if first is None or limit is None or step is None or step <= 0:
        return None
    carries = op.operands[3:]
    if first >= limit:
        return carries
    if first + step >= limit:
        return inline(b, op.regions[0], (op.operands[0], *carries))
    return None


PATTERNS: tuple[Pattern, ...] = (
    *algebra.PATTERNS,
    *views.PATTERNS,
    ("cond", known_branch),
    ("for", known_loop),
)
