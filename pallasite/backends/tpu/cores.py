"""Chips with two TensorCores: which grid axes are divided between them.

Mosaic gives each core a part of one parallel axis, whichever divides best. Each core
has its own vector memory, from which a block is written back whole: so the blocks of
results must differ along the axis, not just the parts that programs write.
"""

from dataclasses import replace

from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import PARALLEL, analyze
from pallasite.target import Tpu


def share_between_cores(kernel: Kernel, chip: Tpu | None) -> Kernel:
    """The kernel with axes of independent programs marked parallel."""
    op = main_pipeline(kernel)
    if op is None or chip is None or chip.cores == 1 or _has_semaphores(kernel):
        return kernel
    pipeline, info = Pipeline.of(op), analyze(kernel)
    if any(said in PARALLEL for said in pipeline.semantics):
        return kernel  # the author's choice
    apart = {a for a in info.parallel if (pipeline.grid[a] or 1) > 1}
    for window in info.windows:
        apart &= window.apart if window.written else apart
    if not apart:
        return kernel
    said = enumerate(pipeline.semantics)
    semantics = tuple("parallel" if a in apart else name for a, name in said)
    ops = (*kernel.body.ops[:-1], pipeline.with_(semantics=semantics).to_op())
    return kernel.with_(body=replace(kernel.body, ops=ops))


def _has_semaphores(kernel: Kernel) -> bool:
    """Has its own copies and signals, on which cores would have to agree."""
    refs = (v for op in walk(kernel.body) for v in op.operands if v.is_ref)
    return any(ref.ref.is_semaphore for ref in refs)
