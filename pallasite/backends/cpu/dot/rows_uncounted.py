"""rows_uncounted: notes that how a matmul is computed may not follow from its rows.

The schemes of `choose_scheme.py` add up in different orders: inner products in lanes
along k, tiles and groups in theirs, vectors one k after another. With this note the
choice is that for many rows, so a row's bits are the same among any number of others.
"""

from collections.abc import Sequence

from pallasite.backends.cpu.dot.scheme import Sizes
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops

UNCOUNTED = "cpu.rows_uncounted"
MANY_ROWS = 64  # for which every scheme is made


def rows_uncounted(kernel: Kernel) -> Kernel:
    """Note it on every dot."""

    def note(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "dot":
            return None
        return list(b.emit(op.name, *op.operands, **op.attrs, **{UNCOUNTED: True}))

    return map_ops(kernel, note)


def counted(op: Op, sizes: Sizes) -> Sizes:
    """The sizes that decide how a dot is computed."""
    return sizes._replace(rows=MANY_ROWS) if op.attrs.get(UNCOUNTED) else sizes
