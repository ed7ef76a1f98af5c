"""edge_fills: what masks say about the edge of an array is left to its window.

In: `select(i * size + iota < n, load(block), 0)`, where i numbers blocks of `size`
elements along a dimension of n, or loads and stores with such a mask. Out: the load
alone, of a window with `fill=0` where zeros were asked for; the store alone. Conditions
beside this one stay.

Proof: element j of block i is element i * size + j of the array, as long as the index
map gives only indices of blocks. The comparison is false exactly past the edge, where a
filled window reads 0, as the select gave. Without `fill=` what is there is undefined,
so other loads of the block may read 0 as well, and a mask without zeros says nothing.
Stores past the edge write nothing.

For backends that mask loads anyway, and whose copies fill with zeros: a loaded tile can
be copied straight to where it is multiplied, a computed one cannot. A TPU masks only at
the edge, and merges steps of filled blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, full_index
from pallasite.ir.rewrite import (
    dead_code,
    producers_of,
    substitute,
    users_of,
    with_regions,
)
from pallasite.ir.roles import Pipeline, Shown, number_of
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
        found = masks.filled(each) if _is_plain(each) else {}
        kept |= found
        filled = any(op.name == "select_n" or op.attrs.get("other") for op in found)
        if filled and each.window.may_hang_over(each.array.ref.shape):
            zero = 0.0 if each.array.ref.dtype.is_float else 0
            each = each._replace(window=replace(each.window, fill=zero))
        shown.append(each)
    if not kept:
        return kernel
    body = _without(whole.body, kept)
    return dead_code(with_pipeline(kernel, whole.showing(shown, body).to_op()))


def _is_plain(shown: Shown) -> bool:
    window = shown.window
    plain = all(d.kind in ("blocked", "squeezed") for d in window.dims)
    return plain and window.space == "block" and not shown.array.ref.dtype.is_bool


class _Masks:
    """Selects of a body that put zeros past the edges of blocks."""

    def __init__(self, whole: Pipeline):
        self.whole = whole
        self.made = producers_of(whole.body)
        self.users = users_of(whole.body)
        self.forms = Forms(whole.ids)
        self.forms.add_ops(whole.body.ops)

    def filled(self, shown: Shown) -> dict[Op, list[Value]]:
        """Selects that a fill value makes needless, with the conditions that stay."""
        found = dict[Op, list[Value]]()
        edges = dict(self.edges(shown))
        may_fill = shown.window.mode == "in" and not shown.window.fill
        for op in self.users[shown.block]:
            if op.name not in ("load", "store") or not _is_whole(op):
                continue
            self.note(found, op, self.conditions_of_access(op, may_fill), edges)
            if op.name == "load" and may_fill and self.is_filled(op, found.get(op)):
                for user in self.users[op.result]:
                    self.note(found, user, self.conditions(user, op.result), edges)
        return found

    def note(
        self,
        found: dict[Op, list[Value]],
        op: Op,
        conditions: Sequence[Value],
        edges: dict[int, tuple[Affine, int]],
    ) -> None:
        stay = [c for c in conditions if not self.is_edge(c, edges)]
        if len(stay) < len(conditions):
            found[op] = stay

    def is_filled(self, load: Op, stay: Sequence[Value] | None) -> bool:
        """Whether a load gives zeros past the edges, of whose mask this stays."""
        access = Access.of(load)
        if access.mask is None or stay == []:
            return True
        return access.other is not None and number_of(self.made, access.other) == 0

    def conditions_of_access(self, op: Op, may_fill: bool) -> list[Value]:
        """All of which must hold for an element to be loaded, or stored."""
        access = Access.of(op)
        if access.mask is None or (access.other is not None and not may_fill):
            return []
        if access.other is not None and number_of(self.made, access.other) != 0:
            return []
        return self.conjuncts(access.mask)

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
        if chosen is not loaded or number_of(self.made, otherwise) != 0:
            return []
        return self.conjuncts(which) if which.tile.dtype.is_bool else []

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


def _is_whole(op: Op) -> bool:
    access = Access.of(op)
    return access.index == full_index(access.ref.ref.shape)


def _without(block: Block, kept: dict[Op, list[Value]]) -> Block:
    """The block in which only these conditions stay."""
    b = Builder()
    replaced: dict[Value, Value] = {}
    for op in block.ops:
        conditions: Sequence[Value] | None = kept.get(op)
        if conditions is None:
            b.ops.append(with_regions(op, [_without(r, kept) for r in op.regions]))
            continue
        b.loc, mask = op.loc, None
        for condition in conditions:
            mask = condition if mask is None else b.and_(mask, condition)
        if op.name == "select_n":
            _, otherwise, chosen = op.operands
            chosen = replaced.get(chosen, chosen)
            if mask is not None:
                chosen = b.op("select_n", mask, otherwise, chosen)
            replaced[op.result] = chosen
            continue
        access = Access.of(op)
        if access.value is not None:
            b.store(access.ref, access.value, access.index, mask=mask)
        else:
            other = None if mask is None else access.other
            loaded = b.load(access.ref, access.index, mask=mask, other=other)
            replaced[op.result] = loaded
    return substitute(Block(block.params, tuple(b.ops), block.yields), replaced)
