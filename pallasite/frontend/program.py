"""A kernel as one program per parallel grid index, in a form that can be taken apart.

`Program` is what `passes/promote.py` makes of a kernel: grid indices as parameters,
windows as `block_view`s of the kernel's refs, sequential axes as loops, scratch and
read-back results as values. It is a Kernel whose pipeline has no windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite.errors import NoBackwardKernel
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Loc, Op, Value, walk
from pallasite.passes.grid import find_pipeline
from pallasite.passes.promote import promote
from pallasite.passes.unused import drop_unused


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
        """Canonical, without anything that serves nothing."""
        refs = main_refs(self.body)
        kernel = drop_unused(kernel_of(self, refs, ()))
        return self.with_body(find_pipeline(kernel).regions[-1])


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
    """Take a kernel apart.

    Raises:
        NoBackwardKernel: it is no single pipeline, or shares memory.
    """
    if kernel.aliases:
        raise NoBackwardKernel(
            "an operand shares its memory with a result", at=kernel.loc
        )
    if sum(op.name == "pipeline" for op in kernel.body.ops) != 1:
        raise NoBackwardKernel("the kernel is not one pipeline", at=kernel.loc)
    promoted = promote(kernel)
    pipeline = find_pipeline(promoted)
    place = promoted.body.ops.index(pipeline)
    after = promoted.body.ops[place + 1 :]
    if after:
        raise NoBackwardKernel(f"{after[0].name} after the grid", at=after[0].loc)
    body = pipeline.regions[-1]
    # What comes before the grid (its dynamic sizes) is the same for every program.
    ops = (*promoted.body.ops[:place], *body.ops)
    sizes = pipeline.attrs["grid"]
    if 0 in sizes:
        raise NoBackwardKernel("the grid is empty", at=kernel.loc)
    if any(0 in p.ref.shape for p in kernel.params):
        raise NoBackwardKernel("an array is empty", at=kernel.loc)
    return Program(kernel.name, Block(body.params, ops), sizes, kernel.loc)


def main_refs(body: Block) -> list[Value]:
    """The refs in main memory that a program uses, in order."""
    inside = {v for op in walk(body) for v in op.results}
    inside |= {p for op in walk(body) for r in op.regions for p in r.params}
    used = (v for op in walk(body) for v in op.operands if v.is_ref)
    return [v for v in dict.fromkeys(used) if v not in inside]


def producers_of(body: Block) -> dict[Value, Op]:
    return {v: op for op in walk(body) for v in op.results}
