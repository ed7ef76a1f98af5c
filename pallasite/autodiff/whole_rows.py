"""Lets programs see whole rows where steps of a grid go through them part by part.

Statistics over one axis of the grid, results over another or in a second turn: the
reverse of such loops reads each row once per loop, and may need a kernel for each. A
kernel that is shown whole rows does all of it at once. In: a kernel with sequential
axes. Out: one without them, as authors write it whose rows are blocks, if the rows fit
a program and `whole_loops.py` proves that their parts may be computed together.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.autodiff.backward_windows import build, place
from pallasite.autodiff.per_program import Program, kernel_of, main_refs
from pallasite.errors import NoBackwardKernel
from pallasite.ir.nodes import Access, BlockDim, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops, substitute
from pallasite.ir.roles import Loop, Pipeline
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.normal.whole_loops import LARGEST, whole_loops


def whole_rows(
    kernel: Kernel, program: Program, largest: float = LARGEST
) -> Kernel | None:
    """The kernel over whole rows; None if it is not one over parts of rows.

    Args:
        kernel: in normal form.
        program: the same, with its sequential axes as loops.
        largest: elements of a tile that a program can hold.
    """
    if not any(op.name == "for" for op in program.body.ops):
        return None
    shown = _shown_whole(program)
    if shown is None:
        return None
    whole = whole_loops(kernel_of(shown, main_refs(shown.body), ()), largest)
    body = Pipeline.of(find_pipeline(whole)).body
    if any(op.name == "for" for op in walk(body)):
        return None
    return _with_windows(kernel, program.with_body(body).simplified())


def _with_windows(kernel: Kernel, program: Program) -> Kernel | None:
    """The program as a kernel with the same operands and results."""
    placed = [place(program, ref) for ref in kernel.outputs]
    if not all(all(p.kept) and p.own == placed[0].own for p in placed):
        return None
    order = range(len(program.sizes))
    try:
        built = build(program, kernel.name, placed, order)
    except NoBackwardKernel:
        return None
    renamed = dict(zip(built.kernel.outputs, built.results, strict=True))
    return kernel.with_(body=substitute(built.kernel.body, renamed))


def _shown_whole(program: Program) -> Program | None:
    """The program with parts of whole rows instead of blocks that follow a loop."""
    indices = {Loop.of(o).index for o in program.body.ops if o.name == "for"}
    shown: dict[Value, tuple[Value, int]] = {}  # a loop's index, elements of its parts
    others = False

    def rewrite(op: Op, b: Rewriter) -> Sequence[Value] | None:
        nonlocal others
        if op.name == "block_view" and op.operands[-1] in indices:
            (ref, *numbers, index), window = op.operands, op.attrs["window"]
            *dims, last = window.dims
            n = ref.ref.shape[-1]
            if last.kind != "blocked" or n % max(last.size, 1):
                return None
            window = replace(window, dims=(*dims, BlockDim(n)))
            whole = b.op("block_view", ref, *numbers, b.index(0), window=window)
            shown[whole] = index, last.size
            return [whole]
        if not any(v in shown for v in op.operands):
            return None
        access = Access.of(op) if op.name in ("load", "store") else None
        index, size = shown[op.operands[0]]
        if access is None or access.mask or access.index[-1] != Span(0, size):
            others = True
            return None
        entries = (*access.index[:-1], Span(None, size))
        starts = (*access.index_operands, b.mul(index, b.index(size)))
        if access.value is None:
            return [b.load(access.ref, entries, starts)]
        b.store(access.ref, access.value, entries, starts)
        return []

    body = map_ops(program.body, rewrite)
    return None if others or not shown else program.with_body(body)
