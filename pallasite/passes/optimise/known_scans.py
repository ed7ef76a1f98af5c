"""known_scans: running sums and maxima that are written out become scans.

`lax.associative_scan` has no primitive: it is traced to about a dozen strided slices,
pads and concatenates per scan. Others add shifted copies, by one element, two, four.
In: such code, where each element of a tile is the sum (the maximum, minimum or product)
of a range of elements of another tile (`analysis/folded_ranges.py` has the proof). Out:
one `scan`, where these ranges are all elements up to its own, or from its own on. Sums
are taken in another order.
"""

from pallasite.ir.nodes import Kernel, Value, walk
from pallasite.ir.rewrite import dead_code, map_ops
from pallasite.passes.analysis.folded_ranges import KINDS, Ranges, ranges_in


def known_scans(kernel: Kernel) -> Kernel:
    """Replace each such tile by a scan."""
    before = kernel
    while (found := _found(kernel)) is not None:
        value, ranges, back = found
        attrs = dict(kind=KINDS[ranges.kind], axis=ranges.dim, reverse=back)
        make = lambda op, b, v=value, x=ranges.base, a=attrs: (
            [b.op("scan", x, **a)] if op.results == (v,) else None
        )
        kernel = map_ops(kernel, make)
    return kernel if kernel is before else dead_code(kernel)


def _found(kernel: Kernel) -> tuple[Value, Ranges, bool] | None:
    """The first tile that is a scan of another."""
    if not any(op.name == "slice" for op in walk(kernel.body)):
        return None
    made = {v: op for op in walk(kernel.body) for v in op.results}
    blocks = [kernel.body]
    blocks += [region for op in walk(kernel.body) for region in op.regions]
    for block in blocks:
        for value, ranges in ranges_in(block, made).items():
            if ranges.kind in KINDS:
                for back in (False, True):
                    if ranges.is_whole(back):
                        return value, ranges, back
    return None
