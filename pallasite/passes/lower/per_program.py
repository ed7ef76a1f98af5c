"""A kernel as one program per parallel grid index, in a form that can be transformed.

`Program` is the output of `passes/lower/promote.py` for a kernel: grid indices as
parameters, windows as `block_view`s of the kernel's refs, sequential axes as loops,
scratch and read-back results as values. It is a Kernel whose pipeline has no windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite.errors import NoBackwardKernel
from pallasite.ir.build import Builder
from pallasite.ir.levels import with_level
from pallasite.ir.nodes import Block, Kernel, Loc, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops, substitute
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.lower.promote import promote
from pallasite.passes.optimise.unused import drop_unused


@dataclass(frozen=True)
class Program:
    """Code over grid indices (the parameters of `body`) and refs in main memory."""

    name: str
    body: Block
    sizes: tuple[int, ...]
    loc: Loc | None = None

    def with_body(self, body: Block) -> "Program":
        return replace(self, body=body)

    def simplified(self) -> "Program":
        """Canonical, with dead code removed."""
        refs = main_refs(self.body)
        kernel = drop_unused(kernel_of(self, refs, ()))
        return self.with_body(Pipeline.of(find_pipeline(kernel)).body)


def kernel_of(
    program: Program, inputs: Sequence[Value], outputs: Sequence[Value]
) -> Kernel:
    """The program as a kernel without windows."""
    builder = Builder()
    builder.emit(
        "pipeline",
        regions=(program.body,),
        grid=program.sizes,
        windows=(),
        semantics=("parallel",) * len(program.sizes),
    )
    params = (*inputs, *outputs)
    return Kernel(program.name, params, builder.block(), len(outputs))


def program_of(kernel: Kernel) -> Program:
    """Decompose a kernel.

    Raises:
        NoBackwardKernel: it is not a single pipeline, or not one over fixed blocks.
    """
    if sum(op.name == "pipeline" for op in kernel.body.ops) != 1:
        raise NoBackwardKernel("the kernel is not one pipeline", at=kernel.loc)
    promoted = promote(without_copies(kernel), in_parts=True)
    pipeline = Pipeline.of(find_pipeline(promoted))
    place = promoted.body.ops.index(pipeline.op)
    after = promoted.body.ops[place + 1 :]
    if after:
        raise NoBackwardKernel(f"{after[0].name} after the grid", at=after[0].loc)
    body = pipeline.body
    # What precedes the grid (its dynamic sizes) is the same for every program.
    body = Block(body.params, (*promoted.body.ops[:place], *body.ops))
    # A result that aliases an operand is that operand.
    same = {kernel.outputs[o]: kernel.inputs[i] for i, o in kernel.aliases}
    body = substitute(body, same)
    sizes = tuple(n for n in pipeline.sizes if isinstance(n, int))
    assert len(sizes) == len(pipeline.grid)  # axes of other sizes became loops
    if 0 in sizes:
        raise NoBackwardKernel("the grid is empty", at=kernel.loc)
    if any(0 in p.ref.shape for p in kernel.params):
        raise NoBackwardKernel("an array is empty", at=kernel.loc)
    for op in walk(body):
        dims = op.attrs["window"].dims if op.name == "block_view" else ()
        if any(dim.kind == "bounded" for dim in dims):
            # Two operands each; what follows has one per dimension.
            raise NoBackwardKernel("blocks of varying size", at=op.loc)
    return Program(kernel.name, body, sizes, kernel.loc)


def without_copies(kernel: Kernel) -> Kernel:
    """Async copies as loads and stores: a copy may take place when it is started."""

    def rewrite(op: Op, builder: Rewriter) -> list[Value] | None:
        refs = list(op.operands)
        if op.name == "copy_start" and len(refs) <= 3:
            builder.store(refs[1], builder.load(refs[0]))
            return []
        waits = op.name == "copy_wait" and len(refs) <= 3
        return [] if waits or op.name in ("sem_signal", "sem_wait") else None

    return with_level(map_ops(kernel, rewrite))


def main_refs(body: Block) -> list[Value]:
    """The refs in main memory that a program uses, in order."""
    inside = {v for op in walk(body) for v in op.results}
    inside |= {p for op in walk(body) for r in op.regions for p in r.params}
    used = (v for op in walk(body) for v in op.operands if v.is_ref)
    return [v for v in dict.fromkeys(used) if v not in inside]
