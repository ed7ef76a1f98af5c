"""What happens to a kernel before it is emitted, and how large a launch should be.

`schedule` turns async copies into plain ones, the grid into programs and loops, refs
into values. `stages_and_warps` picks the two numbers Triton's compiler wants.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pallasite.backends.triton.text import physical
from pallasite.ir.nodes import Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops
from pallasite.passes.canonicalize import canonicalize
from pallasite.passes.promote import promote

SHARED_BYTES = 200 << 10  # what a pipelined loop may take of an SM's shared memory
LARGE_TILE = 128 * 128  # elements of a product from which 8 warps pay


def schedule(kernel: Kernel, native: frozenset[str]) -> Kernel:
    """A kernel of programs, loops and values that `emit.py` can spell."""
    kernel = canonicalize(plain_copies(kernel))
    return canonicalize(promote(kernel))


def plain_copies(kernel: Kernel) -> Kernel:
    """Copies done at once where they start; their semaphores disappear."""

    def rewrite(op: Op, builder: Rewriter) -> Sequence[Value] | None:
        if op.name == "copy_start":
            source, target = op.operands[:2]
            builder.store(target, builder.load(source))
            return ()
        return () if op.name == "copy_wait" else None

    return dead_code(map_ops(kernel, rewrite))


def stages_and_warps(kernel: Kernel, params: Mapping[str, Any]) -> tuple[int, int]:
    """Depth of Triton's software pipeline, and warps per program."""
    dots = [op for op in walk(kernel.body) if op.name == "dot"]
    warps = params.get("num_warps") or _warps(kernel, dots)
    stages = params.get("num_stages") or _stages(dots)
    return int(stages), int(warps)


def _warps(kernel: Kernel, dots: Sequence[Op]) -> int:
    if any(_elements(op.result) >= LARGE_TILE for op in dots):
        return 8
    largest = max(
        (_elements(v) for op in walk(kernel.body) for v in op.results if not v.is_ref),
        default=1,
    )
    return 8 if largest >= 1 << 14 else 4


def _stages(dots: Sequence[Op]) -> int:
    """As many buffers of the largest product's operands as fit, at most three."""
    if not dots:
        return 1
    size = max(sum(_bytes(v) for v in op.operands) for op in dots)
    return max(1, min(3, SHARED_BYTES // max(size, 1)))


def _elements(value: Value) -> int:
    count = 1
    for n in physical(value.tile.shape):
        count *= n
    return count


def _bytes(value: Value) -> int:
    return _elements(value) * value.tile.dtype.bytes
