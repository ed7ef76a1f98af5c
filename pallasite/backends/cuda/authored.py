"""one_role: an author's kernel of a single warpgroup becomes one of roles, too.

In: a kernel of the explicit level without roles. Out: the same with its program as the
only role, so that the emitter knows of one kind of explicit kernel.
"""

from pallasite.ir.nodes import Block, Kernel, Op, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline

WARPGROUP_OPS = {"barrier_wait", "copy_start", "wgmma", "bulk_wait", "set_registers"}


def one_role(kernel: Kernel) -> Kernel:
    """The program of one warpgroup as a role; memory is allocated before it."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    names = {op.name for op in walk(pipeline.body)}
    if "roles" in names or not names & WARPGROUP_OPS:
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
