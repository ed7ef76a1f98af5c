"""Coverage: every element of every output is written.

The cells of each output are marked by every store, atomic and copy that certainly
happens. An output that shares its memory with an operand begins with the operand's
elements.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from pallasite.ir.nodes import Value
from pallasite.proofs.cells import Cells, TooManyError
from pallasite.proofs.places import Names
from pallasite.proofs.replay import Replay
from pallasite.proofs.touches import Touch, Walk
from pallasite.proofs.verdicts import PROVED, REFUTED, UNKNOWN, Claim, worst


def coverage(walk: Walk, replay: Replay) -> Claim:
    """Whether a kernel writes every element of its outputs."""
    kernel, names = walk.kernel, Names(walk.kernel)
    given = set(kernel.aliased_results.values())
    found = [
        _output(walk, param, names.ref(param), replay)
        for param in kernel.outputs
        if param not in given and prod(param.ref.shape)
    ]
    n = len(kernel.outputs)
    what = "the output is" if n == 1 else f"all {n} outputs are"
    return worst("coverage", found, f"every element of {what} written")


def _output(walk: Walk, root: Value, name: str, replay: Replay) -> Claim:
    writes = [t for t in walk.touches if t.root is root and t.writes]
    sure = [t for t in writes if t.sure]
    # The parts of a scalar are an empty tuple.
    sure = [t for t in sure if t.parts is not None or t.points is not None]
    unsure = [t for t in writes if t not in sure]
    try:
        cells, written = _written(walk, root, sure)
    except TooManyError:
        why = f"{name} has too many blocks and steps to try them all"
        return Claim("coverage", UNKNOWN, why, _line(writes))
    if written.all():
        return Claim("coverage", PROVED, "")
    element = cells.first_element(np.argwhere(~written)[0])
    if unsure:
        first = unsure[0]
        why = first.why if first.place.sure else first.place.why
        why = why or "its block may pass the edge of another"
        what = f"whether {name}{list(element)} is written is not known"
        return Claim("coverage", UNKNOWN, f"{what}: {why}", _line(unsure))
    example = replay.example("coverage", "", f"{name}{list(element)}")
    what = f"{name} has elements that no program writes"
    return Claim("coverage", REFUTED, what, _line(writes), example)


def _written(
    walk: Walk, root: Value, sure: Sequence[Touch]
) -> tuple[Cells, np.ndarray]:
    cells = Cells(root, sure, walk.tables.rank)
    written = np.zeros(cells.counts, bool)
    for touch in sure:
        factor = np.ones((1,) * len(cells.counts), bool)
        for hits in cells.groups(touch):
            shape = [n if d in hits.dims else 1 for d, n in enumerate(cells.counts)]
            own = np.zeros([cells.counts[d] for d in hits.dims], bool)
            own[tuple(c[hits.valid] for c in hits.cells)] = True
            factor = factor & own.reshape(shape)
        if not cells.counts:  # a scalar
            factor = cells.hits(touch).valid.any()
        written = written | factor
    return cells, np.asarray(written)


def _line(touches: Sequence[Touch]) -> str:
    return next((str(t.op.loc) for t in touches if t.op.loc), "")
