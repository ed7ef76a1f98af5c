"""The first pass: brings a kernel into canonical form.

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
from pallasite.ir.roles import Cond, Loop
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
    cond = Cond.of(op)
    number = constant_of(b, cond.which)
    if number is None and len(cond.branches) > 1:
        return None
    return inline(b, cond.branch(int(number or 0)), ())


def known_loop(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """A for loop that runs not at all or once."""
    loop = Loop.of(op)
    first, limit, step = (constant_of(b, v) for v in loop.bounds)
    if first is None or limit is None or step is None or step <= 0:
        return None
    if first >= limit:
        return loop.inits
    if first + step >= limit:
        return inline(b, loop.body, (loop.first, *loop.inits))
    return None


PATTERNS: tuple[Pattern, ...] = (
    *algebra.PATTERNS,
    *views.PATTERNS,
    ("cond", known_branch),
    ("for", known_loop),
)
