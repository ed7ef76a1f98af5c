"""The level of a kernel: `tile`, or `explicit` where the code itself overlaps work.

A kernel at level `tile` has only operations on whole blocks. At level `explicit` it may
also start copies and wait for them, signal semaphores, split into roles that run
concurrently, and give layouts to tiles and refs: what authors of `pltpu` and `plgpu`
code write themselves, and what a backend derives. An op's row names its first level.
"""

from pallasite.ir.nodes import Block, Kernel, walk
from pallasite.ir.opdef import LEVELS, table


def level_of(block: Block) -> str:
    """The first level that has every op of a block."""
    found = {table()[op.name].level for op in walk(block)}
    return max(found, key=LEVELS.index, default=LEVELS[0])


def with_level(kernel: Kernel) -> Kernel:
    """The kernel with its body's level: for passes that add or remove copies."""
    level = level_of(kernel.body)
    return kernel if level == kernel.level else kernel.with_(level=level)
