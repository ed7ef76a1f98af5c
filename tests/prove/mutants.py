"""Kernels with a mistake, made of random kernels: `mutant(case, choices)`.

Random kernels have no bugs but indices that leave their refs. Another number, a store
that is missing and axes that are parallel give the other claims something to refute.
"""

from collections.abc import Callable
from dataclasses import replace

from pallasite.errors import PallasError
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX
from pallasite.ir.verify import verify
from tests.fuzz.choices import Choices, pick
from tests.fuzz.generate import Case

Change = Callable[[Op, Choices], list[Op]]


def mutant(case: Case, choices: Choices) -> Case | None:
    """The case with one mistake; None if there is no room, or it may not end."""
    ops = _in_order(case.kernel)
    fits, change = pick(choices, KINDS)
    places = [n for n, op in enumerate(ops) if fits(op)]
    if not places or any(op.name == "while" for op in ops):
        return None
    made = _changed(case.kernel, pick(choices, places), change, choices)
    return None if made is None else replace(case, kernel=made)


def _in_order(kernel: Kernel) -> list[Op]:
    """The ops of a kernel as `map_ops` comes to them."""
    found = list[Op]()
    map_ops(kernel, lambda op, _: found.append(op))
    return found


def _changed(
    kernel: Kernel, place: int, change: Change, choices: Choices
) -> Kernel | None:
    """The kernel with one op changed; None if that makes it illegal."""
    before = iter(range(len(_in_order(kernel))))

    def rewrite(op: Op, builder: Rewriter) -> tuple[Value, ...] | None:
        if next(before) != place:
            return None
        builder.ops += change(op, choices)
        return op.results

    made = map_ops(kernel, rewrite)
    try:
        verify(made)
    except PallasError:
        return None
    return made


def _another_number(op: Op, choices: Choices) -> list[Op]:
    number = op.attrs["value"] + pick(choices, (1, -1, 2, -3, 5))
    return [op.with_(attrs={"value": number})]


def _all_parallel(op: Op, choices: Choices) -> list[Op]:
    pipeline = Pipeline.of(op)
    return [pipeline.with_(semantics=("parallel",) * len(pipeline.grid)).to_op()]


KINDS: tuple[tuple[Callable[[Op], bool], Change], ...] = (
    (lambda op: op.name == "constant" and op.result.type == INDEX, _another_number),
    (lambda op: op.name == "store", lambda op, choices: []),
    (lambda op: op.name == "pipeline", _all_parallel),
)
