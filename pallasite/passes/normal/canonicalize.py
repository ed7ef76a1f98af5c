"""The first pass: brings a kernel into canonical form.

Kernel in, Kernel out, bit-for-bit equivalent except that folded transcendental
functions are the op table's own. Folds constants, applies exact identities, merges
views, resolves known branches and loops, and performs CSE and dead-code elimination.
"""

from collections.abc import Sequence

from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import (
    Pattern,
    Rewriter,
    apply_patterns,
    common_subexpressions,
    dead_code,
    inline,
    substitute,
)
from pallasite.ir.roles import Cond, Loop
from pallasite.passes.normal import algebra, views
from pallasite.passes.normal.algebra import constant_of


def canonicalize(kernel: Kernel) -> Kernel:
    """Patterns, CSE and dead-code elimination, to a fixed point."""
    while True:
        new = dead_code(common_subexpressions(apply_patterns(kernel, PATTERNS)))
        if new is kernel:
            return kernel
        kernel = new


def known_branch(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """A cond whose branch index is known, or which has only one branch."""
    cond = Cond.of(op)
    number = constant_of(b, cond.which)
    if number is None and len(cond.branches) > 1:
        return None
    return inline(b, cond.branch(int(number or 0)), ())


def known_loop(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """A for loop with trip count zero or one."""
    loop = Loop.of(op)
    first, limit, step = (constant_of(b, v) for v in loop.bounds)
    if first is None or limit is None or step is None or step <= 0:
        return None
    if first >= limit:
        return loop.inits
    if first + step >= limit:
        return inline(b, loop.body, (loop.first, *loop.inits))
    return None


def own_counter(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """A loop-carried number that counts in step with its loop is the loop's index."""
    loop = Loop.of(op)
    if constant_of(b, loop.step) != 1:
        return None
    counters = [_counts_along(loop, n, b) for n in range(len(loop.inits))]
    if not any(counters):
        return None
    kept = [n for n, counts in enumerate(counters) if not counts]
    dropped = [n for n, counts in enumerate(counters) if counts]
    mapping = dict.fromkeys(_picked(loop.carried, dropped), loop.index)
    body = Block(
        (loop.index, *_picked(loop.carried, kept)),
        loop.body.ops,
        _picked(loop.yields, kept),
    )
    new = loop.with_(
        inits=_picked(loop.inits, kept),
        body=substitute(body, mapping),
        results=_picked(loop.results, kept),
    )
    b.ops.append(new.to_op())
    end = b.max(loop.first, loop.limit)
    return [
        end if counts else value
        for value, counts in zip(loop.results, counters, strict=True)
    ]


def _counts_along(loop: Loop, n: int, b: Rewriter) -> bool:
    start, param = loop.inits[n], loop.carried[n]
    number = constant_of(b, start)
    same = number is not None and number == constant_of(b, loop.first)
    if param.type != loop.index.type or not (same or start is loop.first):
        return False
    add = b.producer(loop.yields[n], "add")
    if add is None or param not in add.operands:
        return False
    x, y = add.operands
    return constant_of(b, y if x is param else x) == 1


def _picked(values: Sequence[Value], kept: Sequence[int]) -> tuple[Value, ...]:
    return tuple(values[n] for n in kept)


PATTERNS: tuple[Pattern, ...] = (
    *algebra.PATTERNS,
    *views.PATTERNS,
    ("cond", known_branch),
    ("for", known_loop),
    ("for", own_counter),
)
