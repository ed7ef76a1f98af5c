"""What follows from a dot's types alone: sizes, roles of dimensions, the scheme.

`dot.py` uses it to decide how to multiply, `pack_once.py` to decide what to pack once.
"""

from math import prod

from pallasite import target
from pallasite.backends.cpu.dot import amx, grouped, inner_products
from pallasite.backends.cpu.dot.scheme import (
    UNKNOWN_LAYOUT,
    MemoryLayout,
    Scheme,
    Sizes,
    VectorScheme,
)
from pallasite.ir.nodes import Op
from pallasite.ir.roles import Dot
from pallasite.ir.types import DType

SMALL = 4096  # multiplications below which packing does not pay off


Groups = tuple[tuple[int, ...], ...]  # dimensions by role


def groups_of(op: Op) -> list[Groups]:
    """Dimensions of lhs and rhs by role: batch, rows or columns, contracted."""
    return [(side.batch, side.free, side.contract) for side in Dot.of(op).sides]


def sizes_of(op: Op) -> Sizes:
    lhs, rhs = Dot.of(op).sides
    return Sizes(
        prod(lhs.sizes(lhs.batch)),
        prod(lhs.sizes(lhs.free)),
        prod(rhs.sizes(rhs.free)),
        prod(rhs.sizes(rhs.contract)),
    )


def scheme_for(
    lhs: DType,
    rhs: DType,
    sums: DType,
    sizes: Sizes,
    rows: MemoryLayout = UNKNOWN_LAYOUT,
    columns: MemoryLayout = UNKNOWN_LAYOUT,
    again: bool = True,
    kind: Sizes | None = None,
) -> Scheme:
    """The best scheme on this CPU for operands of these types and memory layouts.

    Args:
        again: whether other matmuls read the same columns.
        kind: the sizes that decide which kind of scheme it is (`rows_uncounted.py`).
    """
    host, kind = target.host(), kind or sizes
    inner = inner_products.scheme_for(host, lhs, rhs, sums, kind, rows, columns)
    if inner is not None:
        return inner
    for special in (amx.scheme_for, grouped.scheme_for):
        scheme = special(host, lhs, rhs, sums, kind)
        if scheme is not None:
            return scheme
    # An operand of another type must be converted, so it is packed.
    rows, columns = (
        layout if dtype == sums else UNKNOWN_LAYOUT
        for dtype, layout in ((lhs, rows), (rhs, columns))
    )
    return VectorScheme.of(host, sums, sizes, rows, columns, again)


def is_small(sizes: Sizes, in_rows: bool) -> bool:
    """Whether the plain loop is faster. `in_rows`: columns of rhs are contiguous."""
    if prod(sizes) == 0 or prod(sizes[1:]) < SMALL:
        return True
    return in_rows and sizes.depth < 3 and sizes.columns > 1
