"""Writes out an axis along which a program does one thing, and then another.

A softmax over a grid goes through its blocks twice: `for t in range(2): for j in ...`,
where a `pl.when(t == 0)` has the statistics and a `pl.when(t == 1)` the results. As one
loop, each reverse of it computes both parts of either. In: a loop of few iterations
over loops, with branches that its index alone decides. Out: its iterations one after
another, each with the code that it runs.
"""

from collections.abc import Iterator

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import inline, producers_of, substitute
from pallasite.ir.roles import Cond, Loop
from pallasite.passes.analysis.affine import fold_scalar
from pallasite.passes.lower.per_program import Program

MOST = 4  # iterations that are written out


def apart(program: Program) -> Program:
    """The program with the phases of loops at its top one after another."""
    made = producers_of(program.body)
    b, after = Builder(program.loc), dict[Value, Value]()
    for op in program.body.ops:
        rounds = Loop.of(op).rounds(made) if op.name == "for" else range(0)
        if not 1 < len(rounds) <= MOST or not _has_phases(Loop.of(op), made, rounds):
            b.ops.append(op)
            continue
        loop = Loop.of(op)
        carried = loop.inits
        for n in rounds:
            carried = inline(b, loop.body, [b.like(n, loop.index), *carried])
        after.update(zip(op.results, carried, strict=True))
    if not after:
        return program
    body = Block(program.body.params, tuple(b.ops), program.body.yields)
    return program.with_body(substitute(body, after)).simplified()


def _has_phases(loop: Loop, made: dict[Value, Op], rounds: range) -> bool:
    """Whether inner loops run one branch in some iterations and another in others."""
    inner = [op for op in loop.body.ops if op.name == "for"]
    tests = {
        Cond.of(op).which
        for each in inner
        for op in walk(Block((), (each,)))
        if op.name == "cond"
    }
    taken = [_known(loop, made, n) for n in rounds]
    return any(
        all(test in known for known in taken)
        and len({known[test] for known in taken}) > 1
        for test in tests
    )


def _known(loop: Loop, made: dict[Value, Op], number: int) -> dict[Value, int | bool]:
    """The scalars that the loop's index alone decides, where it is `number`."""
    known: dict[Value, int | bool] = {loop.index: number}

    def number_of(value: Value) -> int | bool | None:
        op = made.get(value)
        if op is None or op.name != "constant" or op.result.tile.rank:
            return known.get(value)
        return op.attrs["value"]

    for op in _scalars(loop.body):
        found = fold_scalar(op, [number_of(v) for v in op.operands])
        if found is not None:
            known[op.result] = found
    return known


def _scalars(block: Block) -> Iterator[Op]:
    for op in walk(block):
        if len(op.results) == 1 and not op.result.is_ref and not op.result.tile.rank:
            yield op
