"""unroll_rounds: unrolls loops with matmuls, and loops of a few operations.

In: a loop that multiplies and does something with the product, such as one over the
keys of attention; or one that moves or computes a row in each iteration. Out: the same
iterations in the same order, several per iteration. A TPU does not start an iteration
before the previous one has ended; in straight-line code it overlaps the matmuls of one
iteration with the vector code of another, and waits for the addresses of several rows
at once.
"""

from collections.abc import Callable, Sequence
from functools import partial

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, inline, map_ops
from pallasite.ir.roles import Loop

MOST_ROUNDS = 8  # iterations merged into one


def unroll_rounds(
    kernel: Kernel, size: Callable[[Block], float], most: float, whole: float
) -> Kernel:
    """Unroll loops with matmuls in them.

    Args:
        kernel: what to rewrite.
        size: measures the amount of code in a block.
        most: limit for the unrolled body.
        whole: limit where no loop is left: its branches may then be known.
    """
    return map_ops(kernel, partial(_unrolled, size, (most, whole), _multiplies))


def unroll_short(kernel: Kernel, size: Callable[[Block], float], most: float) -> Kernel:
    """Unroll loops without matmuls and without memory of their own."""
    return map_ops(kernel, partial(_unrolled, size, (most, most), _is_plain))


def _multiplies(names: set[str]) -> bool:
    return "dot" in names


def _is_plain(names: set[str]) -> bool:
    return not names & {"dot", "alloc", "copy_start", "copy_wait"}


def _unrolled(
    size: Callable[[Block], float],
    limits: tuple[float, float],
    asked: Callable[[set[str]], bool],
    op: Op,
    b: Rewriter,
) -> Sequence[Value] | None:
    if op.name != "for":
        return None
    loop = Loop.of(op)
    inside = {inner.name for inner in walk(loop.body)}
    if not asked(inside) or inside & {"for", "while", "pipeline"}:
        return None
    rounds = loop.rounds(b.producers)
    factor = _factor(rounds, size(loop.body), *limits)
    if factor == 1:
        return None
    if factor == len(rounds):
        carried: Sequence[Value] = loop.inits
        for number in rounds:
            index = b.like(number, loop.first)
            carried = inline(b, loop.body, [index, *carried])
        return carried
    step = b.like(rounds.step * factor, loop.step)
    body = _several(loop, rounds.step, factor)
    return b.emit("for", loop.first, loop.limit, step, *loop.inits, regions=(body,))


def _factor(rounds: range, size: float, most: float, whole: float) -> int:
    fits = (
        n
        for n in range(2, min(len(rounds), MOST_ROUNDS) + 1)
        if len(rounds) % n == 0 and n * size <= (whole if n == len(rounds) else most)
    )
    return max(fits, default=1)


def _several(loop: Loop, step: int, factor: int) -> Block:
    b = Builder(loop.op.loc)
    params = [Value(p.type, p.name) for p in loop.body.params]
    index, carried = params[0], params[1:]
    for number in range(factor):
        here = b.add(index, b.like(number * step, index)) if number else index
        carried = inline(b, loop.body, [here, *carried])
    return b.block(params, carried)
