"""Whether masked code and code without a mask compute the same where one of them runs.

The mask lets every element through there: a comparison of scalars implies it
(`analysis/whole_masks.py`), and that this holds is enumerated. Without such masks both
are one code.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import common_subexpressions, inline, substitute
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.analysis.whole_masks import WholeMasks


def is_same(
    kernel: Kernel,
    facts: Facts,
    makers: Mapping[Value, Op],
    plain: Block,
    masked: Block,
    args: Sequence[Value],
    table: StepTable,
    inside: np.ndarray,
) -> bool:
    """Whether two blocks yield the same at some steps.

    Args:
        kernel: whose ops are in the table.
        facts: about its integers.
        makers: the op that defines each value outside the blocks.
        plain: without masks that always hold there.
        masked: the other block.
        args: values of the parameters of both.
        table: of the scalars outside the blocks.
        inside: the steps, as a table of bools.
    """
    b = Builder(kernel.loc)
    ours, theirs = inline(b, plain, args), inline(b, masked, args)
    facts.note_block(Block((), tuple(b.ops)))
    table.add_ops(b.ops)
    made = {**makers, **{v: op for op in b.ops for v in op.results}}
    masks, chosen = WholeMasks(facts, made, {}), dict[Value, Value]()
    for op in b.ops:
        if op.name != "select_n":
            continue
        known, ops = len(masks.tests), len(masks.b.ops)
        case = masks.case(op, chosen)
        table.add_ops(masks.b.ops[ops:])
        tests = [table.of(test) for test in masks.tests[known:]]
        if case and all(t is not None and (t | ~inside).all() for t in tests):
            chosen |= case
    constants = (op for op in makers.values() if op.name == "constant")
    both = Block((), (*constants, *b.ops), (*ours, *theirs))
    shared = common_subexpressions(kernel.with_(body=substitute(both, chosen)))
    yields = shared.body.yields
    return yields[: len(ours)] == yields[len(ours) :]
