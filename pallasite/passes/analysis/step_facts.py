"""What is known of a step's integers at the first, middle and last steps of an axis."""

from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.intervals import Fact, Facts, exactly
from pallasite.passes.analysis.outcomes import known_outcome

FIRST, MIDDLE, LAST = "first", "middle", "last"


def facts_of_steps(kernel: Kernel, axis: int) -> dict[object, Facts]:
    """Facts at the first, middle and last steps of an axis of several steps; and before
    the last step of each inner axis, by ("early", axis)."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    n = pipeline.grid[axis]
    assert n is not None and n > 1
    found: dict[object, Facts] = {
        FIRST: _facts_at(kernel, pipeline, axis, exactly(0)),
        LAST: _facts_at(kernel, pipeline, axis, exactly(n - 1)),
    }
    if n > 2:
        found[MIDDLE] = _facts_at(kernel, pipeline, axis, Fact(1, n - 2))
    for inner in range(axis + 1, len(pipeline.grid)):
        size = pipeline.grid[inner]
        high = None if size is None else size - 2
        if high is None or high >= 0:
            fact = Fact(0) if high is None else Fact(0, high)
            found["early", inner] = _facts_at(kernel, pipeline, inner, fact)
    return found


def _facts_at(kernel: Kernel, pipeline: Pipeline, axis: int, fact: Fact) -> Facts:
    facts = Facts()
    for op in kernel.body.ops:
        if op is pipeline.op:
            break
        facts.note_op(op)
    facts.note_grid(pipeline.ids, pipeline.grid)
    facts.note(pipeline.ids[axis], fact)
    for op in walk(pipeline.body):
        facts.note_regions(op)
        outcome = known_outcome(op, facts)
        if outcome is not None:
            facts.note(op.result, exactly(int(outcome)))
        elif op.name == "not" and op.result.tile.dtype.is_bool:
            number = facts.of(op.operands[0]).number
            if number is not None:
                facts.note(op.result, exactly(1 - number))
        else:
            facts.note_op(op)
    return facts
