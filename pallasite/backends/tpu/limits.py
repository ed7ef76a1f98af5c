"""Checks a kernel against a TPU's resource limits before its compiler runs.

`check_limits` rejects scratch of wide elements, more scalar memory than any core has, a
`vmem_limit_bytes` that the chip cannot satisfy, more cores than there are, and grids
with too many steps to count. Blocks: see `vmem.py`.
"""

from collections.abc import Iterator
from math import prod

from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.backends.tpu.windows import operand_name
from pallasite.errors import ChipMemoryError, SpecError, UnsupportedError
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.cost import bytes_of
from pallasite.target import TPUS, Tpu

WIDEST = 32  # bits per element
MOST_STEPS = (1 << 31) - 1  # of a grid: they are counted in 32 bits


def check_limits(kernel: Kernel, chip: Tpu | None, vmem_limit: int | None) -> Kernel:
    """Reject what no core of the chip can provide.

    Args:
        kernel: what to check; it is not changed.
        chip: None: unknown, any in the table may run it.
        vmem_limit: the vector memory that the author allows it, if limited.

    Raises:
        ChipMemoryError: more scalar memory than there is.
        SpecError: a limit that the chip cannot satisfy.
        UnsupportedError: more cores or steps than there are, or scratch of 64-bit
            types.
    """
    _check_scratch(kernel)
    chips = tuple(TPUS.values()) if chip is None else (chip,)
    _check_scalar_memory(kernel, max(chips, key=lambda each: each.smem.bytes))
    if vmem_limit is not None:
        most = max(chips, key=lambda each: each.vmem.bytes)
        _check_limit(kernel, most, vmem_limit)
    _check_cores(kernel, max(chips, key=lambda each: each.cores))
    _check_steps(kernel)
    return kernel


def _check_scratch(kernel: Kernel) -> None:
    for op in walk(kernel.body):
        ref = op.result.ref if op.name == "alloc" else None
        if ref is None or ref.is_semaphore or ref.dtype.bits <= WIDEST:
            continue
        raise UnsupportedError(
            f"backend 'tpu' does not support scratch of {ref.dtype}",
            [("kernel", kernel.name), ("scratch", ref)],
            op.loc or kernel.loc,
            f"use a dtype of at most {WIDEST} bits",
        )


def _check_scalar_memory(kernel: Kernel, chip: Tpu) -> None:
    parts = list(_scalars(kernel))
    needed, available = sum(size for _, size in parts), chip.smem.bytes
    if needed <= available:
        return
    largest = sorted(parts, key=lambda part: -part[1])[:6]
    raise ChipMemoryError(
        f"scalars do not fit in the scalar memory (SMEM) of a core of {chip.name}",
        [
            ("kernel", kernel.name),
            ("needed", f"{needed} bytes"),
            ("available", f"{available} bytes"),
            *((name, f"{size} bytes") for name, size in largest),
        ],
        kernel.loc,
        "keep the table in pl.ANY, and copy the part that a step reads to SMEM",
    )


def _scalars(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """What is in scalar memory at the same time, with its bytes."""
    op = main_pipeline(kernel)
    for shown in Pipeline.of(op).shown if op is not None else ():
        if shown.window.space == "smem" and shown.array.ref.space != "smem":
            size = bytes_of(shown.array.ref.with_shape(shown.window.block_shape))
            yield operand_name(kernel, shown.array), size
    for param in kernel.params:
        if param.ref.space == "smem":
            yield operand_name(kernel, param), bytes_of(param.type)
    for op in walk(kernel.body):
        if op.name == "alloc" and op.result.ref.space == "smem":
            yield f"scratch {op.result.ref}", bytes_of(op.result.type)


def _check_limit(kernel: Kernel, chip: Tpu, limit: int) -> None:
    available = chip.vmem.bytes
    if 0 < limit <= available:
        return
    raise SpecError(
        "vmem_limit_bytes is out of range for the vector memory (VMEM) of a core",
        [
            ("kernel", kernel.name),
            ("vmem_limit_bytes", limit),
            ("available", f"{available} bytes on {chip.name}"),
        ],
        kernel.loc,
        "remove it: a kernel gets what its blocks need",
    )


def _check_cores(kernel: Kernel, chip: Tpu) -> None:
    op = main_pipeline(kernel)
    if op is None:
        return
    pipeline = Pipeline.of(op)
    for axis, (size, kind) in enumerate(
        zip(pipeline.grid, pipeline.semantics, strict=True)
    ):
        if kind == "core_parallel" and size is not None and size > chip.cores:
            raise UnsupportedError(
                "a 'core_parallel' grid axis has more steps than the chip has cores",
                [
                    ("kernel", kernel.name),
                    ("axis", f"{axis}, of {size} steps"),
                    ("cores", f"{chip.cores} on {chip.name}"),
                ],
                op.loc or kernel.loc,
                "make the axis 'parallel': cores then share its steps; for a mesh, "
                "use num_cores=pltpu.get_tpu_info().num_cores",
            )


def _check_steps(kernel: Kernel) -> None:
    op = main_pipeline(kernel)
    grid = Pipeline.of(op).grid if op is not None else ()
    steps = prod(n for n in grid if n is not None)
    if steps >= MOST_STEPS and op is not None:
        raise UnsupportedError(
            "the grid has more steps than a TPU supports",
            [
                ("kernel", kernel.name),
                ("grid", grid),
                ("steps", f"{steps}, at most {MOST_STEPS}"),
            ],
            op.loc or kernel.loc,
            "use larger blocks, or several calls",
        )
