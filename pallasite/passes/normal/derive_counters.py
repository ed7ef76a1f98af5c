"""derive_counters: computes derived induction variables from the loop index.

In: loops that carry an integer to which each iteration adds a constant, such as an
offset that the author maintains (`canonicalize` knows only those equal to the index).
Out: the same loops with it computed from the index, so that analyses can tell which
iteration an access belongs to.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops, substitute
from pallasite.ir.roles import Loop
from pallasite.passes.normal.algebra import constant_of


def derive_counters(kernel: Kernel) -> Kernel:
    """Replace the derived induction variables of all loops."""

    def rewrite(op: Op, builder: Rewriter) -> Sequence[Value] | None:
        if op.name != "for":
            return None
        loop = with_counters(Loop.of(op), lambda v: constant_of(builder, v))
        if loop is None:
            return None
        builder.ops.append(loop.to_op())
        return op.results

    return map_ops(kernel, rewrite)


def with_counters(loop: Loop, number: Callable[[Value], Any]) -> Loop | None:
    """The loop with its counters computed from the index; None if it has none.

    Args:
        loop: what to rewrite.
        number: the constant that a value is, if known.
    """
    made = {v: inner for inner in loop.body.ops for v in inner.results}
    steps = {
        n: step
        for n in range(len(loop.inits))
        if (step := _step(loop, n, made)) is not None
    }
    if not steps:
        return None
    b = Builder(loop.op.loc)
    past = loop.index  # how many iterations came before
    if number(loop.first) != 0:
        past = b.sub(past, loop.first)
    if number(loop.step) != 1:
        past = b.div(past, loop.step)
    new = dict[Value, Value]()
    for n, step in steps.items():
        count = loop.carried[n]
        same = past if past.type == count.type else b.cast(past, count.tile.dtype)
        new[count] = b.add(loop.inits[n], b.mul(same, step))
    body = substitute(Block((), loop.body.ops, loop.body.yields), new)
    ops = (*b.ops, *body.ops)
    return loop.with_(body=Block(loop.body.params, ops, body.yields))


def _step(loop: Loop, n: int, made: Mapping[Value, Op]) -> Value | None:
    """What each iteration adds to a carried integer; None if it is no counter."""
    param, used = loop.carried[n], made.get(loop.yields[n])
    if param.is_ref or param.tile.shape or not param.tile.dtype.is_integer:
        return None
    if used is None or used.name != "add" or param not in used.operands:
        return None
    if all(param not in op.operands for op in walk(loop.body) if op is not used):
        return None  # only its own increment uses it
    x, y = used.operands
    step = y if x is param else x
    return None if step in made or step in loop.body.params else step
