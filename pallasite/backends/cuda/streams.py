"""streams: what no cache holds until it is used again goes past the caches.

In: a kernel after `promote`. Out: the same, with a note on loads and stores of arrays
that are larger than the GPU's cache, if programs access each block once. Then what
many programs read (the weights of a norm) stays near the multiprocessors, and what is
written does not displace what is still to be read.
"""

from collections.abc import Iterator, Set
from dataclasses import replace
from math import prod

from pallasite.ir.nodes import Block, Kernel, Op, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import accesses_of
from pallasite.target import Gpu

ONCE = "cuda.once"


def streams(kernel: Kernel, chip: Gpu) -> Kernel:
    """Note accesses that are the only ones to what they access."""
    found = set(_found(kernel, chip))
    return kernel.with_(body=_noted(kernel.body, found)) if found else kernel


def _noted(block: Block, found: Set[Op]) -> Block:
    ops = []
    for op in block.ops:
        attrs = {**op.attrs, ONCE: True} if op in found else op.attrs
        regions = tuple(_noted(region, found) for region in op.regions)
        ops.append(op.with_(attrs=attrs, regions=regions))
    return replace(block, ops=tuple(ops))


def _found(kernel: Kernel, chip: Gpu) -> Iterator[Op]:
    pipeline = Pipeline.of(find_pipeline(kernel))
    sizes = [n for n in pipeline.sizes if isinstance(n, int)]
    if len(sizes) < len(pipeline.sizes) or pipeline.windows:
        return
    repeated = ("for", "while", "roles")
    often = {
        op
        for outer in walk(pipeline.body)
        if outer.name in repeated
        for region in outer.regions
        for op in walk(region)
    }
    for array, ops in accesses_of(kernel).items():
        op = ops[0]
        if len(ops) > 1 or op.name not in ("load", "store") or op in often:
            continue
        tile = (op.result if op.name == "load" else op.operands[1]).tile
        ref = array.ref
        # Blocks that hang over the edge make it a little more than once.
        is_once = prod(sizes) * tile.size < 2 * ref.size
        if is_once and ref.size * ref.dtype.bits > 8 * chip.cache.bytes:
            yield op
