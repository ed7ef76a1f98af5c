"""Steps and lines in the author's terms."""

from collections.abc import Sequence

import numpy as np

from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.memory import Roots
from pallasite.proofs.tables import Place, Table

_LETTERS = "ijklmnopqrstuvwxyz"


class Names:
    """What the author calls refs and steps."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.roots = kernel, Roots(kernel)
        self.around = dict(_paths(kernel.body, ()))

    def ref(self, value: Value) -> str:
        step: Value | None = value
        while step is not None and not step.name:
            step = self.roots.parent.get(step)
        return step.name if step is not None else "a ref"

    def step(self, op: Op | None, at: Sequence[int]) -> str:
        """The grids' indices and loops' rounds around an op (None: a kernel's end)."""
        words, dim = list[str](), 0
        for outer in self.around.get(op, ()) if op is not None else ():
            if outer.name == "pipeline":
                rank = len(Pipeline.of(outer).grid)
                ids = at[dim : dim + rank]
                words += _program(ids, "inner step" if dim else "program")
                dim += rank
            elif outer.name == "for":
                words.append(f"round {at[dim]} of the loop")
                dim += 1
        return ", ".join(words)


def _program(ids: Sequence[int], what: str) -> list[str]:
    names = _LETTERS[: len(ids)]
    if not ids:
        return []
    if len(ids) == 1:
        return [f"{what} {names} = {ids[0]}"]
    return [f"{what} ({', '.join(names)}) = ({', '.join(map(str, ids))})"]


def _paths(block: Block, path: tuple[Op, ...]):
    for op in block.ops:
        yield op, path
        for region in op.regions:
            inner = (*path, op)
            if op.name in ("pipeline", "for"):
                yield from _paths(region, inner)
            else:
                yield from _paths(region, path)


def first_step(where: Table, place: Place) -> tuple[int, ...] | None:
    """The first active step at which a table holds (its tile dimensions last)."""
    rank = place.active.ndim
    active = place.active.reshape(place.active.shape + (1,) * (where.ndim - rank))
    both = where & active
    if not both.any():
        return None
    flat = int(np.argmax(both.ravel()))
    return tuple(int(i) for i in np.unravel_index(flat, both.shape))
