"""Gives each block of a cotangent that computed indices choose a program of its own.

Steps whose index says to which block they add (tiles of rows by their expert, blocks of
a sparse matrix by their column) could only run in sequence, and the sums of all blocks
are more than a program can hold. As an axis of the grid, blocks run in parallel: each
program goes through all steps, and takes part in those that choose its block. That asks
for every index once per block, which pays off where both are few; sums are in registers
and in the order of the steps.
"""

from dataclasses import replace
from math import prod

from pallasite.autodiff.backward_windows import IndexCode, block_count, only
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Value, walk
from pallasite.ir.roles import number_of
from pallasite.ir.types import INDEX
from pallasite.passes.lower.per_program import Program

MOST_STEPS = 1 << 12  # that a program goes through
MOST_TESTS = 1 << 20  # in all programs: some ten microseconds


def owned_blocks(program: Program, ref: Value) -> Program | None:
    """The program that adds to one cotangent, with its blocks as another axis.

    None if not exactly one dimension's block is chosen by a computed index, or if there
    are too many steps or blocks.
    """
    program = only(program, [ref])
    body, top = program.body, set(program.body.ops)
    uses = [op for op in walk(body) if ref in op.operands]
    if len(uses) != 1 or uses[0].name != "block_view" or uses[0] not in top:
        return None
    (view,) = uses
    adds = [op for op in walk(body) if view.result in op.operands]
    if any(op.name != "atomic_rmw" or op not in top for op in adds):
        return None
    code, chosen, own = IndexCode(body), list[int](), set[int]()
    for d, (dim, n) in enumerate(
        zip(view.attrs["window"].dims, ref.ref.shape, strict=True)
    ):
        index, count = view.operands[1 + d], block_count(dim, n)
        axes = code.digits(index, program.sizes)
        if axes and prod(program.sizes[a] for a in axes) == count and not own & {*axes}:
            own.update(axes)
        elif count is None or code.key(index) is None:
            return None
        elif count > 1 or number_of(code.made, index) != 0:
            chosen.append(d)
    if len(chosen) != 1:
        return None
    (d,) = chosen
    count = block_count(view.attrs["window"].dims[d], ref.ref.shape[d]) or 0
    steps = prod(n for a, n in enumerate(program.sizes) if a not in own)
    tests = count * prod(program.sizes)
    if count < 2 or not 1 < steps <= MOST_STEPS or tests > MOST_TESTS:
        return None
    mine = Value(INDEX, "block")
    b = Builder(view.loc)
    known: dict[Value, Value] = {v: v for v in body.params}
    index = b.as_index(code.emit(b, view.operands[1 + d], known))
    index = b.clamp(b.index(0), index, b.index(count - 1))
    here = b.cast(b.eq(index, mine), INDEX.dtype)
    places = list(view.operands)
    places[1 + d] = mine
    inside = tuple(
        op.with_(operands=tuple(places)) if op is view else op for op in body.ops
    )
    b.emit("cond", here, regions=(Block(), Block((), inside)))
    new = Block((*body.params, mine), tuple(b.ops))
    return replace(program, body=new, sizes=(*program.sizes, count)).simplified()
