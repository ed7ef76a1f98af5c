"""In which order, and on which core, programs run where a machine may choose.

Programs along axes that the author calls parallel may run in any order, and cores
divide the first such axis among them.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.ir.nodes import Op
from pallasite.ir.roles import Pipeline

Ids = list[Any]


def _parallel(op: Op) -> list[int]:
    axes = enumerate(Pipeline.of(op).semantics)
    return [axis for axis, word in axes if word == "parallel"]


def placed_programs(
    programs: list[Ids], op: Op, sizes: Sequence[int], machine: Any
) -> list[Ids]:
    """Programs in the order in which the machine runs them: core after core."""
    if machine.seed is not None:
        shuffle = random.Random(machine.seed).shuffle
        for axis in _parallel(op):
            order = [np.int32(n) for n in range(sizes[axis])]
            shuffle(order)
            programs = [
                [order[n] if a == axis else n for a, n in enumerate(ids)]
                for ids in programs
            ]
    if machine.cores == 1:
        return programs
    return sorted(programs, key=lambda ids: core_of(op, ids, sizes, machine.cores))


def core_of(op: Op, ids: Ids, sizes: Sequence[int], cores: int) -> int:
    """The core that runs a program: each has consecutive places of the first parallel
    axis."""
    axes = _parallel(op)
    return int(ids[axes[0]]) * cores // sizes[axes[0]] if axes else 0
