"""counters: numbers that a loop counts in are computed from its index.

In: loops that carry an integer to which each step adds a fixed number, such as an
offset that the author keeps (`canonicalize` knows only those that equal the index).
Out: the same loops, where it is computed from the index, so that it is known which step
an access belongs to.
"""

from collections.abc import Mapping, Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops, substitute
from pallasite.ir.roles import Loop


def counters(kernel: Kernel) -> Kernel:
    """Derive what can be from the indices of all loops."""
    return map_ops(kernel, _rewrite)


def _rewrite(op: Op, builder: Rewriter) -> Sequence[Value] | None:
    if op.name != "for":
        return None
    loop = Loop.of(op)
    made = {v: inner for inner in loop.body.ops for v in inner.results}
    inside = {*loop.body.params, *made}
    steps = {
        n: step
        for n in range(len(loop.inits))
        if (step := _step(loop, n, made, inside)) is not None
    }
    if not steps:
        return None
    b = Builder(op.loc)
    number = b.div(b.sub(loop.index, loop.first), loop.step)
    new = {
        loop.carried[n]: b.add(loop.inits[n], b.mul(number, step))
        for n, step in steps.items()
    }
    body = substitute(Block((), loop.body.ops, loop.body.yields), new)
    block = Block(loop.body.params, (*b.ops, *body.ops), body.yields)
    builder.ops.append(loop.with_(body=block).to_op())
    return op.results


def _step(
    loop: Loop, n: int, made: Mapping[Value, Op], inside: set[Value]
) -> Value | None:
    """What each step adds to a carried integer; None: it is no counter."""
    param, used = loop.carried[n], made.get(loop.yields[n])
    if param.type != loop.index.type or used is None or used.name != "add":
        return None
    uses = any(param in op.operands for op in loop.body.ops if op is not used)
    if param not in used.operands or not uses:
        return None  # no counter, or nothing but its own next step uses it
    x, y = used.operands
    step = y if x is param else x
    return None if step in inside else step
