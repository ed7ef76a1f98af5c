"""The first pass: brings a kernel into canonical form.

Kernel in, Kernel out, bit-for-bit equivalent except that folded transcendental
functions are the op table's own. Folds constants, applies exact identities, merges
views, resolves known branches and loops, and performs CSE and dead-code elimination.
"""

from collections.abc import Callable, Sequence

from pallasite.ir.build import Builder
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
from pallasite.ir.types import INDEX
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


def known_carries(op: Op, b: Rewriter) -> Sequence[Value] | None:
    """A loop without what it carries unchanged, and with its counters by its index.

    A counter is an integer to which each iteration adds the same: as many times as the
    index has been moved on. Integers wrap around, so it is that in any case.
    """
    loop = Loop.of(op)
    counts = [_count(loop, n, b) for n in range(len(loop.inits))]
    kept = [n for n, count in enumerate(counts) if count is None]
    if len(kept) == len(counts):
        return None
    inner, after = Builder(op.loc), list(loop.results)
    inside = dict[Value, Value]()
    for n, count in enumerate(counts):
        if count is not None:
            inside[loop.carried[n]] = count(inner, loop.index)
    body = Block(
        (loop.index, *_picked(loop.carried, kept)),
        loop.body.ops,
        _picked(loop.yields, kept),
    )
    body = substitute(body, inside)
    new = loop.with_(
        inits=_picked(loop.inits, kept),
        body=Block(body.params, (*inner.ops, *body.ops), body.yields),
        results=_picked(loop.results, kept),
    )
    b.ops.append(new.to_op())
    end = _end(loop, b)
    for n, count in enumerate(counts):
        if count is not None:
            after[n] = count(b, end)
    return after


def _count(loop: Loop, n: int, b: Rewriter) -> Callable[[Builder, Value], Value] | None:
    """A carried value as a function of the index, if it is unchanged or a counter."""
    start, param = loop.inits[n], loop.carried[n]
    if param.is_ref:
        return None
    if loop.yields[n] is param:
        return lambda b, index: start
    add = b.producer(loop.yields[n], "add")
    if param.tile.shape or not param.tile.dtype.is_integer or add is None:
        return None
    first, stride = constant_of(b, loop.first), constant_of(b, loop.step)
    bits, wide = param.tile.dtype.bits, INDEX.dtype.bits
    if param not in add.operands or bits < wide or stride is None or stride <= 0:
        return None
    # Distances from the first index may wrap around, as 32-bit counters do.
    if (stride > 1 or bits > wide) and (first is None or first < 0):
        return None
    x, y = add.operands
    step = y if x is param else x
    by = constant_of(b, step)
    own = {*loop.body.params, *(v for each in loop.body.ops for v in each.results)}
    if by is None and step in own:
        return None
    begin = constant_of(b, start)
    same = start is loop.first or (begin is not None and begin == first)

    def at(b: Builder, index: Value) -> Value:
        if same and by == stride and param.type == index.type:
            return index
        past = index if first == 0 else b.sub(index, loop.first)
        past = past if stride == 1 else b.div(past, loop.step)
        past = b.cast(past, param.tile.dtype)
        return b.add(start, b.mul(past, step if by is None else b.like(by, past)))

    return at


def _end(loop: Loop, b: Rewriter) -> Value:
    """The index after a loop: that of the first iteration that does not run."""
    last = b.max(loop.first, loop.limit)
    if constant_of(b, loop.step) == 1:
        return last
    length, one = b.sub(last, loop.first), b.like(1, last)
    rounds = b.div(b.max(b.sub(length, one), b.like(0, last)), loop.step)
    any_ = b.cast(b.op("gt", length, b.like(0, last)), last.tile.dtype)
    return b.add(loop.first, b.mul(b.add(rounds, any_), loop.step))


def _picked(values: Sequence[Value], kept: Sequence[int]) -> tuple[Value, ...]:
    return tuple(values[n] for n in kept)


PATTERNS: tuple[Pattern, ...] = (
    *algebra.PATTERNS,
    *views.PATTERNS,
    ("cond", known_branch),
    ("for", known_loop),
    ("for", known_carries),
)
