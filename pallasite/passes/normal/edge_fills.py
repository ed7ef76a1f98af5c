"""edge_fills: zeros that masks put past the edge of an array are its window's fill.

In: `select(i * size + iota < n, load(block), 0)`, where i numbers blocks of `size` along
a dimension of n elements. Out: the load alone, of a window with `fill=0`. Conditions
beside this one stay.

Proof: element j of block i is element i * size + j of the array, as long as the index
map gives only indices of blocks. The comparison is false exactly past the edge, where a
filled window reads 0, as the select gave. Without `fill=` what is there is undefined,
so other loads of the block may read 0 as well.

For backends that mask loads anyway, and whose copies fill with zeros: a loaded tile can
be copied straight to where it is multiplied, a computed one cannot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, full_index, walk
from pallasite.ir.rewrite import dead_code, substitute, users_of, with_regions
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.grid import with_pipeline


def edge_fills(kernel: Kernel) -> Kernel:
    """The kernel with fill values in place of masks."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return kernel
    whole = Pipeline.of(grids[0])
    masks = _Masks(whole)
    shown, kept = list[Shown](), dict[Op, list[Value]]()
    for each in whole.shown:
        found = masks.filled(each) if _may_fill(each) else {}
        kept |= found
        if found:
            zero = 0.0 if each.array.ref.dtype.is_float else 0
            each = each._replace(window=replace(each.window, fill=zero))
        shown.append(each)
    if not kept:
        return kernel
    body = _without(whole.body, kept)
    return dead_code(with_pipeline(kernel, whole.showing(shown, body).to_op()))


def _may_fill(shown: Shown) -> bool:
    window = shown.window
    readable = window.mode == "in" and window.space == "block" and not window.fill
    plain = all(d.kind in ("blocked", "squeezed") for d in window.dims)
    return readable and plain and not shown.array.ref.dtype.is_bool


class _Masks:
    """Selects of a body that put zeros past the edges of blocks."""

    def __init__(self, whole: Pipeline):
        self.whole = whole
        self.made = {v: op for op in walk(whole.body) for v in op.results}
        self.users = users_of(whole.body)
        self.forms = Forms(whole.ids)
        self.forms.add_ops(whole.body.ops)

    def filled(self, shown: Shown) -> dict[Op, list[Value]]:
        """Selects that a fill value makes needless, with the conditions that stay."""
        found = dict[Op, list[Value]]()
        edges = dict(self.edges(shown))
        for load in self.users[shown.block]:
            if not _is_whole_load(load):
                continue
            for user in self.users[load.result]:
                conditions = self.conditions(user, load.result)
                stay = [c for c in conditions if not self.is_edge(c, edges)]
                if len(stay) < len(conditions):
                    found[user] = stay
        return found

    def edges(self, shown: Shown) -> Iterator[tuple[int, tuple[Affine, int]]]:
        """Of each dimension of a block: the position of its first element, the edge."""
        forms = Forms(shown.index_map.params)
        forms.add_ops(shown.index_map.ops, loads_vary=False)
        shape, d = shown.array.ref.shape, 0
        pairs = zip(shown.window.dims, shown.index_map.yields, shape, strict=True)
        for dim, index, n in pairs:
            if dim.kind == "squeezed":
                continue
            affine = forms.of(index).affine
            if affine is not None:
                low, high = affine.range(self.whole.grid)
                if low >= 0 and high * dim.size < n:
                    yield d, (affine.times(dim.size), n)
            d += 1

    def conditions(self, op: Op, loaded: Value) -> list[Value]:
        """All of which must hold for a select to give what is loaded, and not zero."""
        if op.name != "select_n" or len(op.operands) != 3:
            return []
        which, otherwise, chosen = op.operands
        zero = self.made.get(otherwise)
        if chosen is not loaded or zero is None or zero.name != "constant":
            return []
        if zero.attrs["value"] != 0 or not which.tile.dtype.is_bool:
            return []
        return self.conjuncts(which)

    def conjuncts(self, value: Value) -> list[Value]:
        op = self.made.get(value)
        if op is None or op.name != "and":
            return [value]
        return [v for side in op.operands for v in self.conjuncts(side)]

    def is_edge(self, condition: Value, edges: dict[int, tuple[Affine, int]]) -> bool:
        """Whether a comparison holds for elements inside the array, and no others."""
        op = self.made.get(condition)
        if op is None or op.name not in ("lt", "le"):
            return False
        limit = self.forms.of(op.operands[1])
        found = self.positions(op.operands[0])
        if found is None or limit.affine is None or limit.spread:
            return False
        d, first = found
        start, n = edges.get(d, (None, 0))
        return start == first and limit.affine.number == n - (op.name == "le")

    def positions(self, value: Value) -> tuple[int, Affine] | None:
        """The dimension along which a tile counts up by one, and its least element."""
        form, op = self.forms.of(value), self.made.get(value)
        if op is not None and op.name == "add":
            ops = [self.made.get(v) for v in op.operands]
            op = next((o for o in ops if o is not None and o.name == "iota"), None)
        if op is None or op.name != "iota" or form.affine is None:
            return None
        d = op.attrs["dim"]
        is_count = form.spread == max(value.tile.shape[d] - 1, 0)
        return (d, form.affine) if is_count else None


def _is_whole_load(op: Op) -> bool:
    if op.name != "load" or op.attrs["mask"]:
        return False
    access = Access.of(op)
    return access.index == full_index(access.ref.ref.shape)


def _without(block: Block, kept: dict[Op, list[Value]]) -> Block:
    """The block with these selects only by the conditions that stay."""
    ops: list[Op] = []
    replaced: dict[Value, Value] = {}
    for op in block.ops:
        stay: Sequence[Value] | None = kept.get(op)
        if stay is None:
            ops.append(with_regions(op, [_without(r, kept) for r in op.regions]))
            continue
        _, otherwise, chosen = op.operands
        replaced[op.result] = chosen
        if stay:
            b = Builder(op.loc)
            which = stay[0]
            for condition in stay[1:]:
                which = b.and_(which, condition)
            replaced[op.result] = b.op("select_n", which, otherwise, chosen)
            ops += b.ops
    return substitute(Block(block.params, tuple(ops), block.yields), replaced)
