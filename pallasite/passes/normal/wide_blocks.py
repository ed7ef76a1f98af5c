"""wide_blocks: blocks as wide as the masked accesses of them.

In: a row padded to a power of two, `pl.load(x_ref, pl.ds(0, 1024), mask=lanes < 781)`.
The importer makes index arrays of an access that is wider than its ref. Out: a block of
1024 elements that hangs over the array's edge, in which the access is a slice
(`consecutive_indices.py`).

Proof: along the dimension the window's only block is all of the array, so that what is
past the block is past the array. Loads are masked off there, and what is stored there
is dropped, as by a block that hangs over. No other access of it leaves the array.

Kernel in, Kernel out.
"""

from collections.abc import Mapping
from dataclasses import replace

from pallasite.ir.nodes import Access, BlockDim, Gather, Kernel, Op, Span, Value
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import substitute
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import RefType
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.masks import Positions
from pallasite.passes.normal.index_arrays import IndexArrays

Place = tuple[Value, int]  # a block, and one of its dimensions


def wide_blocks(kernel: Kernel) -> Kernel:
    """The kernel with wider blocks, if masked accesses are wider than theirs."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != TILE or len(grids) != 1:
        return kernel
    extents = _Extents()
    extents.block(kernel.body)
    whole = Pipeline.of(grids[0])
    wanted = {
        (shown.array, dim): size
        for shown in whole.shown
        for dim, size in extents.wanted(shown).items()
    }
    for operand, result in kernel.aliased_results.items():
        # Windows onto one memory stay alike.
        alike = [shown for shown in whole.shown if shown.array in (operand, result)]
        for dim in range(operand.ref.rank):
            sizes = [wanted.pop((shown.array, dim), 0) for shown in alike]
            if sizes and all(sizes):
                both = ((shown.array, dim) for shown in alike)
                wanted |= dict.fromkeys(both, max(sizes))
    if not wanted:
        return kernel
    shown = [_widened(each, wanted) for each in whole.shown]
    blocks = dict(zip(whole.blocks, (each.block for each in shown), strict=True))
    body = substitute(whole.body, blocks)
    body = replace(body, params=(*whole.ids, *blocks.values()))
    return with_pipeline(kernel, whole.showing(shown, body).to_op())


class _Extents(IndexArrays):
    """Up to where accesses of blocks count, and which blocks stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[Place, int] = {}
        self.fixed: set[Value | Place] = set()

    def wanted(self, shown: Shown) -> Mapping[int, int]:
        """The sizes that dimensions of a window should have, by those of the array."""
        window, shape = shown.window, shown.array.ref.shape
        if shown.block in self.fixed or window.space != "block":
            return {}
        kept = [n for n, d in enumerate(window.dims) if d.kind != "squeezed"]
        found = {}
        for place, d in enumerate(kept):
            end = self.ends.get((shown.block, place), 0)
            is_free = window.dims[d] == BlockDim(shape[d]) and end > shape[d]
            if is_free and (shown.block, place) not in self.fixed:
                found[d] = end
        return found

    def rewritten(self, op: Op) -> tuple[Op]:
        refs = [v for v in op.operands if v.is_ref]
        if op.name in ("load", "store"):
            self.note(op, Access.of(op))
        elif op.name != "pipeline":
            self.fixed.update(refs)
        return (op,)

    def note(self, op: Op, access: Access) -> None:
        masked = Positions(self.facts, self.producers, access.mask)
        pairs = zip(access.split_index(), access.ref.ref.shape, strict=True)
        for d, ((entry, operand), n) in enumerate(pairs):
            if operand is None:
                continue  # verified to be inside
            place, fact = (access.ref, d), self.facts.of(operand)
            if isinstance(entry, Gather):
                end = self.end(access, operand)
                if end is not None:
                    reached = masked.range(masked.of(operand))
                    is_on = reached.within(0, n - 1) or op.name == "store"
                    if is_on and fact.low >= 0:
                        self.ends[place] = max(self.ends.get(place, 0), end)
                        continue
            size = entry.extent if isinstance(entry, Span) else 1
            if not fact.within(0, n - size):
                self.fixed.add(place)

    def end(self, access: Access, places: Value) -> int | None:
        """One past the last place that an index array counts to, under a mask."""
        count = self.count(places)
        spans = any(isinstance(e, Span) for e in access.index)
        if access.mask is None or spans or count is None or count.starts:
            return None
        if count.dim is None:
            return None
        return count.offset + places.tile.shape[count.dim]


def _widened(shown: Shown, wanted: Mapping[Place, int]) -> Shown:
    dims = tuple(
        replace(dim, size=wanted.get((shown.array, d), dim.size))
        for d, dim in enumerate(shown.window.dims)
    )
    if dims == shown.window.dims:
        return shown
    window = replace(shown.window, dims=dims)
    block = RefType(window.block_shape, shown.array.ref.dtype, window.space)
    return shown._replace(window=window, block=Value(block, shown.block.name))
