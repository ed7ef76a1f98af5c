"""one_role: an author's kernel of a single warpgroup becomes one of roles, too.

In: a kernel of the explicit level without roles. Out: the same with its program as the
only role, so that the emitter knows of one kind of explicit kernel. Such kernels are
for one generation of chips; on another they are refused here.
"""

from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Kernel, Op, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.target import Gpu

HOPPER = "sm_90"
WARPGROUP_OPS = {"barrier_wait", "copy_start", "wgmma", "bulk_wait", "set_registers"}


def one_role(kernel: Kernel, chip: Gpu) -> Kernel:
    """The program of one warpgroup as a role; memory is allocated before it."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    names = {op.name: op for op in walk(pipeline.body)}
    explicit = [names[name] for name in sorted(WARPGROUP_OPS & names.keys())]
    if explicit and chip.arch != HOPPER:
        raise UnsupportedError(
            f"backend 'cuda' has {explicit[0].name} on {HOPPER}, "
            f"the chip is {chip.arch}",
            [("kernel", kernel.name)],
            explicit[0].loc or kernel.loc,
            "run it on a Hopper GPU, or with interpret=pl.Checked()",
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
