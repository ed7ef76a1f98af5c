"""Passes for an author's kernels of the explicit level.

`one_role`: a kernel of a single warpgroup becomes one of roles, so that the emitter
knows of one kind of explicit kernel. Such kernels are for one generation of chips; on
another they are refused here. `share_core`: two programs may run on a multiprocessor at
a time where the registers that the author asks for leave room for one only.
"""

from dataclasses import replace

from pallasite.backends.cuda.layouts import WARPGROUP
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.live_tiles import LiveTiles
from pallasite.target import Gpu

HOPPER = "sm_90"
WARPGROUP_OPS = {"barrier_wait", "copy_start", "wgmma", "bulk_wait", "set_registers"}
WARPGROUP_OPS |= {"cluster_barrier", "tensor_mma", "warps"}
# The first generation of chips that has an op, where others do not.
ONLY_ON = {"wgmma": "sm_90", "tensor_mma": "sm_100"}
PROGRAMS = 2  # that share a multiprocessor
FEWEST_REGISTERS = 24  # of a thread
OTHER_REGISTERS = 32  # of a thread that multiplies, besides its tiles
# Of shared memory, besides what is allocated: by the chip, and where arrays are
# described to the copy engine.
OTHER_BYTES, ALIGNMENT = 3072, 1024


def one_role(kernel: Kernel, chip: Gpu) -> Kernel:
    """The program of one warpgroup as a role; memory is allocated before it."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    names = {op.name: op for op in walk(pipeline.body)}
    explicit = [names[name] for name in sorted(WARPGROUP_OPS & names.keys())]
    needed = next((ONLY_ON[name] for name in ONLY_ON if name in names), HOPPER)
    if explicit and chip.arch != needed:
        op = next((names[n] for n in ONLY_ON if n in names), explicit[0])
        raise UnsupportedError(
            f"backend 'cuda' has {op.name} on {needed}, the chip is {chip.arch}",
            [("kernel", kernel.name)],
            op.loc or kernel.loc,
            f"run it on a GPU of {needed}, or with interpret=pl.Checked()",
        )
    if "roles" in names or not explicit:
        return kernel
    body = pipeline.body
    memory = [op for op in body.ops if op.name == "alloc"]
    rest = Block((), tuple(op for op in body.ops if op.name != "alloc"))
    notes = {"cuda.names": ("wg",), "cuda.warpgroups": (1,)}
    role = Op("roles", attrs=notes, regions=(rest,), loc=pipeline.op.loc)
    block = Block(body.params, (*memory, role))
    made = pipeline.with_(body=block).to_op()
    ops = tuple(made if op is pipeline.op else op for op in kernel.body.ops)
    return kernel.with_(body=Block(kernel.body.params, ops, kernel.body.yields))


def share_core(kernel: Kernel, chip: Gpu) -> Kernel:
    """Let two programs share a multiprocessor if one warpgroup of each multiplies.

    A single one leaves the tensor cores idle while it does the rest. How many registers
    a warpgroup gets changes no result, so the copying ones get the fewest there are and
    the multiplying one the rest of its program's half.
    """
    pipeline = Pipeline.of(find_pipeline(kernel))
    roles = [op for op in pipeline.body.ops if op.name == "roles"]
    if not roles or "cuda.registers" in roles[0].attrs:
        return kernel
    wanted = [
        {op.attrs["more"] for op in walk(region) if op.name == "set_registers"}
        for region in roles[0].regions
    ]
    if sorted(map(list, wanted)) != [[False]] * (len(wanted) - 1) + [[True]]:
        return kernel
    all_roles = chip.registers // (PROGRAMS * WARPGROUP)
    registers = all_roles - FEWEST_REGISTERS * (len(wanted) - 1)
    tiles = LiveTiles(kernel).peak_words() // WARPGROUP
    if tiles + OTHER_REGISTERS > registers or not _fits_twice(pipeline.body, chip):
        return kernel

    def change(op: Op, b: Rewriter) -> tuple[Value, ...] | None:
        if op.name == "set_registers":
            most = registers if op.attrs["more"] else FEWEST_REGISTERS
            count = min(op.attrs["count"], most)
            b.ops.append(replace(op, attrs={**op.attrs, "count": count}))
            return ()
        if op.name == "roles":
            b.ops.append(replace(op, attrs={**op.attrs, "cuda.per_core": PROGRAMS}))
            return ()
        return None

    return map_ops(kernel, change)


def _fits_twice(body: Block, chip: Gpu) -> bool:
    """Whether shared memory suffices for two programs."""
    memory = [op.result.ref for op in body.ops if op.name == "alloc"]
    sizes = [ref.size * ref.dtype.bytes for ref in memory]
    needed = OTHER_BYTES + sum(-(-n // ALIGNMENT) * ALIGNMENT for n in sizes)
    return PROGRAMS * needed <= chip.shared.bytes
