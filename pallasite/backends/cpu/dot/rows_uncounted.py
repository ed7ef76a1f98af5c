"""rows_uncounted: notes that how a matmul is computed may not follow from its rows.

The schemes of `choose_scheme.py` add up in different orders: inner products in lanes
along k, tiles and groups in theirs, vectors one k after another. With this note the
choice is that for many rows, so a row's bits are the same among any number of others.
Where programs have a row of each result, as a sequence of attention, what they multiply
has no dimension of rows, and the choice is free.
"""

from collections.abc import Sequence

from pallasite.backends.cpu.dot.scheme import Sizes
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Pipeline

UNCOUNTED = "cpu.rows_uncounted"
MANY_ROWS = 64  # for which every scheme is made


def rows_uncounted(kernel: Kernel) -> Kernel:
    """Note it on every dot that may have a dimension of rows."""
    pipelines = [Pipeline.of(op) for op in kernel.body.ops if op.name == "pipeline"]
    shown = [s.window for p in pipelines for s in p.shown if s.window.mode == "out"]
    if shown and all(w.dims and w.dims[0].kind == "squeezed" for w in shown):
        return kernel

    def note(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "dot":
            return None
        return list(b.emit(op.name, *op.operands, **{**op.attrs, UNCOUNTED: True}))

    return map_ops(kernel, note)


def counted(op: Op, sizes: Sizes) -> Sizes:
    """The sizes that decide how a dot is computed."""
    return sizes._replace(rows=MANY_ROWS) if op.attrs.get(UNCOUNTED) else sizes
