"""exact_blocks: blocks that are wider than their arrays get the size of these.

In: rows padded to a power of two, as Triton wants them: a block of 2048 elements that
hangs over the end of rows of 1408, with masks. Out: a block of 1408; the masks are true
then, and `known_comparisons` drops them. Proof: `reblock.trimmed`.

For CPUs, whose loops may have any length: nothing past the end is computed, and the
block is in the array, where one that hangs over is a copy.

Kernel in, Kernel out.
"""

from collections.abc import Iterator

from pallasite.ir.nodes import Kernel
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.loop_dims import Place
from pallasite.passes.normal.known_comparisons import known_comparisons
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.reblock import trimmed


def exact_blocks(kernel: Kernel) -> Kernel:
    """The kernel with narrower blocks, where some are wider than their arrays."""
    new, before = _trimmed(kernel), kernel
    while new is not before:
        new, before = _trimmed(new), new
    return kernel if new is kernel else known_comparisons(new)


def _trimmed(kernel: Kernel) -> Kernel:
    """The kernel with one narrower dimension, or itself."""
    for place in _wide(kernel):
        try:
            return trimmed(kernel, place)
        except CannotReblock:
            continue
    return kernel


def _wide(kernel: Kernel) -> Iterator[Place]:
    """Dimensions of windows that have more elements than their arrays."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    for number, shown in enumerate(Pipeline.of(grids[0]).shown if grids else ()):
        sizes = zip(shown.window.dims, shown.array.ref.shape, strict=True)
        for d, (dim, n) in enumerate(sizes):
            if dim.kind == "blocked" and dim.size > n > 0:
                yield number, d
