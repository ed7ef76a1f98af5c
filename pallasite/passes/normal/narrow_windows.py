"""narrow_windows: parts that a program picks by its grid indices become blocks.

In: programs that see a whole array, or a larger block, and access it at `pl.ds(i * n,
n)`. Out: windows of n elements whose index maps yield `i`. A window is a view of its
array, so an access means the same if it is to the same elements: its start must be a
multiple of n, and in range at every step that reaches it (a start out of range would be
clamped). Parts that lie side by side (at `4 * i * n`, `4 * i * n + n`, ...) are parts
of one block. The last block may extend past the edge of the array if a mask says which
elements there are. Both are proved from affine forms, or by enumerating the steps. A
part that is fixed stays a part of its block, and so does one at a loop counter.

`overlapping`: parts of arrays in main memory that start anywhere in them, as windows of
elements. Chips that copy such parts then copy them a step ahead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import (
    Access,
    At,
    BlockDim,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import inline, replace_ops
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import INDEX, RefType
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.grid import find_pipeline, with_pipeline
from pallasite.passes.analysis.memory import MAIN_MEMORY, Roots
from pallasite.passes.analysis.step_table import StepTable, reached
from pallasite.passes.normal.again import Again
from pallasite.passes.normal.canonicalize import canonicalize

MOST_WINDOWS = 8  # onto one operand
_ACCESSES = ("load", "store", "atomic_rmw", "atomic_cas")


def narrow_windows(kernel: Kernel, overlapping: bool = False) -> Kernel:
    """The kernel with a block for each part that grid indices pick."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1:
        return kernel
    new = _Narrowing(kernel, overlapping).pipeline()
    return kernel if new is None else canonicalize(with_pipeline(kernel, new.to_op()))


@dataclass(frozen=True, eq=False)
class _Use:
    """One access to a block."""

    op: Op
    access: Access
    active: np.ndarray  # the steps that reach it

    @cached_property
    def entries(self) -> list[tuple[At | Span | Gather, Value | None]]:
        return self.access.split_index()


@dataclass(frozen=True, eq=False)
class _Place:
    """Where accesses start along a dimension, as a function of the grid indices."""

    start: Value
    affine: Affine | None
    table: np.ndarray | None

    def is_same(self, other: "_Place") -> bool:
        if self.start is other.start:
            return True
        if self.affine is not None:
            return self.affine == other.affine
        if self.table is None or other.table is None:
            return False
        own, others = np.broadcast_arrays(self.table, other.table)
        return np.array_equal(own, others)

    def is_block(
        self,
        size: int,
        n: int,
        active: np.ndarray,
        grid: Sequence[int | None],
        by: int | None = None,
    ) -> bool:
        """Whether it is a multiple of `by` and in range, at the active steps.

        `by` is `size` where blocks do not overlap.
        """
        by = by or size
        if self.affine is not None:
            low, high = self.affine.range(grid)
            parts = (*self.affine.coeffs, self.affine.const or 0)
            if any(c % by for c in parts):
                return False
            if low >= 0 and high <= n - size:
                return True
        if self.table is None:
            return False
        table, reached = np.broadcast_arrays(self.table, active)
        starts = table[reached]
        within = (starts >= 0) & (starts <= n - size) & (starts % by == 0)
        return bool(within.all())


_Part = tuple[int, _Place]  # how many elements, and where


class _Narrowing:
    """The pipeline of a kernel, and where its body accesses which block."""

    def __init__(self, kernel: Kernel, overlapping: bool):
        self.kernel, self.overlapping = kernel, overlapping
        self.whole = Pipeline.of(find_pipeline(kernel))
        body = self.whole.body
        self.table = StepTable(self.whole.ids, self.whole.grid)
        self.table.add_ops(kernel.body.ops[: kernel.body.ops.index(self.whole.op)])
        self.table.add_ops(body.ops)
        self.forms = Forms(self.whole.ids)
        self.forms.add_ops(body.ops)
        roots = Roots(kernel)
        self.again = Again(walk(body), roots, body)
        self.written = frozenset(roots.all_written(body))
        self.uses: dict[Value, list[_Use]] = {}
        self.others: set[Value] = set()  # refs with uses of other kinds
        for op, active in reached(body, self.table):
            refs = [v for v in op.operands if v.is_ref]
            if op.name in _ACCESSES:
                use = _Use(op, Access.of(op), active)
                self.uses.setdefault(refs.pop(0), []).append(use)
            self.others.update(refs)

    # --- windows ---

    def pipeline(self) -> Pipeline | None:
        shown: list[Shown] = []
        replaced: dict[Op, tuple[Value, Mapping[int, int | None]]] = {}
        for each in (*self.whole.shown, *self.captured()):
            new = self.narrowed(each)
            if len(new) < 1 or any(not group.dims for group in new):
                shown += [each] if each in self.whole.shown else []
            for group in new:
                if group.dims:
                    shown.append(group.shown)
                    block = group.shown.block
                    replaced |= {u.op: (block, group.offsets(u)) for u in group.uses}
        if not replaced:
            return None
        narrower = lambda op: [_narrower(op, *replaced[op])] if op in replaced else None
        body = replace_ops(self.whole.body, narrower)
        blocks = (each.block for each in shown)
        body = replace(body, params=(*self.whole.ids, *blocks))
        return self.whole.showing(shown, body)

    def captured(self) -> Iterator[Shown]:
        """Arrays that the body accesses without a window, as whole blocks."""
        for ref in self.kernel.params:
            if ref not in self.uses or ref.ref.space not in MAIN_MEMORY:
                continue
            is_output = ref in self.kernel.outputs
            dims = tuple(map(BlockDim, ref.ref.shape))
            window = Window(dims, "out" if is_output else "in")
            b = Builder(self.whole.op.loc)
            ids = tuple(Value(INDEX, v.name) for v in self.whole.ids)
            index_map = b.block(ids, [b.index(0) for _ in dims])
            yield Shown(ref, window, index_map, ref)

    def narrowed(self, shown: Shown) -> "list[_Group]":
        """The accesses to a block by where they are, with a window for each place."""
        uses, ref = self.uses.get(shown.block), shown.block
        if not uses or ref in self.others or not _is_plain(shown):
            return []
        if self.overlapping and ref is not shown.array:
            return []
        aliased = self.kernel.aliased_results
        if shown.array in (*aliased, *aliased.values()):
            return []  # windows onto one memory move together
        written = ref in self.written or shown.array in self.written
        if shown.window.mode == "in" and written:
            return []
        groups: list[_Group] = []
        for use in uses:
            places = self.places(shown, use)
            group = next((g for g in groups if g.takes(places)), None)
            if group is None:
                group = _Group(places)
                groups.append(group)
            group.uses.append(use)
        if len(groups) > 1:
            joined = self.joined(shown, groups)
            if joined is not None:
                return [joined]
            if shown.window.mode == "out" or len(groups) > MOST_WINDOWS:
                return []
        for group in groups:
            self.add_window(shown, group)
        return groups

    def joined(self, shown: Shown, groups: "Sequence[_Group]") -> "_Group | None":
        """One group for parts that lie side by side along one dimension."""
        pairs = list(zip(*(group.places for group in groups), strict=True))
        apart = [d for d, p in enumerate(pairs) if not _all_same(p)]
        if len(apart) != 1:
            return None
        (d,) = apart
        whole = _side_by_side(pairs[d])
        if whole is None:
            return None
        places = [*groups[0].places[:d], whole, *groups[0].places[d + 1 :]]
        group = _Group(places, d)
        for each in groups:
            group.uses += each.uses
            starts = _const(each.places[d]) - _const(whole)
            group.starts |= dict.fromkeys(each.uses, starts)
        self.add_window(shown, group)
        return group if d in group.dims else None

    def places(self, shown: Shown, use: _Use) -> list[_Part | None]:
        """Per dimension of the block: size and place of the part; None: all of it."""
        result: list[_Part | None] = []
        for entry, operand in use.entries:
            place = None
            if operand is not None and not isinstance(entry, Gather):
                size = 1 if isinstance(entry, At) else entry.size
                dense = isinstance(entry, At) or (entry.stride == 1 and size > 0)
                found = self.place(operand)
                if dense and found is not None:
                    place = (size, found)
            result.append(place)
        return result

    def place(self, start: Value) -> _Place | None:
        if not self.again.is_scalar(start):
            return None
        form, table = self.forms.of(start), self.table.of(start)
        affine = form.affine
        if affine is None or affine.const is None or form.spread:
            affine = None
        moves = affine is not None and not affine.is_fixed
        moves |= table is not None and table.size > 1
        if not moves:
            return None
        return _Place(start, affine, table)

    def add_window(self, shown: Shown, group: "_Group") -> None:
        """Give a group a window onto the part that its accesses have in common."""
        kept = [n for n, d in enumerate(shown.window.dims) if d.kind != "squeezed"]
        dims = {}
        for d, place in enumerate(group.places):
            number = kept[d]
            dim, n = shown.window.dims[number], shown.array.ref.shape[number]
            if place is not None and (
                self.is_part(dim, n, place, group.uses)
                or self.is_inside(shown, n, place, group.uses)
            ):
                dims[d] = place
        shape = shown.block.ref.shape
        left = [dims[d][0] if d in dims else n for d, n in enumerate(shape)]
        if dims and prod(left) > 1:  # single elements stay what a program looks up
            group.dims = dims
            group.shown = self.shown_part(shown, group, dims, kept)

    def is_part(
        self, dim: BlockDim, n: int, place: _Part, uses: Sequence[_Use]
    ) -> bool:
        """Whether parts at a place are blocks of the array."""
        size, start = place
        # Of blocks that hang over the edge, some parts would be clamped.
        if size == dim.size or (dim.size != n and (dim.size % size or n % dim.size)):
            return False
        extent = _extent(dim, n, size, uses)
        return all(
            start.is_block(size, extent, u.active, self.whole.grid) for u in uses
        )

    def is_inside(
        self, shown: Shown, n: int, place: _Part, uses: Sequence[_Use]
    ) -> bool:
        """Whether parts of an array that programs only read are windows of elements."""
        size, start = place
        if not self.overlapping or size == n or shown.window.mode == "out":
            return False
        return all(start.is_block(size, n, u.active, self.whole.grid, 1) for u in uses)

    def shown_part(
        self,
        shown: Shown,
        group: "_Group",
        dims: Mapping[int, _Part],
        kept: Sequence[int],
    ) -> Shown:
        b = Builder(group.uses[0].op.loc)
        ids = tuple(Value(INDEX, v.name) for v in self.whole.ids)
        yields = list(inline(b, shown.index_map, ids))
        seen = dict(zip(self.whole.ids, ids, strict=True))
        window_dims = list(shown.window.dims)
        for d, (size, place) in dims.items():
            number = kept[d]
            old, n = window_dims[number], shown.array.ref.shape[number]
            blocked = self.is_part(old, n, (size, place), group.uses)
            by = size if blocked else 1
            inside = self.quotient(b, place, by, seen)
            always = np.ones((1,) * len(ids), bool)
            extent = _extent(old, n, size, group.uses)
            if not place.is_block(size, extent, always, self.whole.grid, by):
                last = b.index((extent - size) // by)
                inside = b.clamp(b.index(0), inside, last)
            if old.size != n:
                first = b.mul(yields[number], b.index(old.size // size))
                inside = b.add(first, inside)
            yields[number] = inside
            is_point = isinstance(group.uses[0].entries[d][0], At) and d != group.joins
            kind = "squeezed" if is_point else "blocked" if blocked else "element"
            window_dims[number] = BlockDim(size, kind)
        window = replace(shown.window, dims=tuple(window_dims))
        block = RefType(window.block_shape, shown.array.ref.dtype, window.space)
        index_map = b.block(ids, yields)
        return Shown(shown.array, window, index_map, Value(block, shown.array.name))

    def quotient(
        self, b: Builder, place: _Place, size: int, seen: Mapping[Value, Value]
    ) -> Value:
        """The number of the block that starts at a place."""
        if place.affine is not None:
            return affine_value(b, place.affine, list(seen.values()), size)
        value = place.start
        op = self.again.made.get(value)
        if op is not None and op.name == "mul":
            for x, y in (op.operands, op.operands[::-1]):
                number, factor = self.table.of(x), self.table.of(y)
                product = self.table.of(value)
                if number is None or factor is None or product is None:
                    continue
                if factor.size > 1 or int(factor.item()) % size:
                    continue
                exact = number.astype(np.int64) * int(factor.item())
                if np.array_equal(exact, product):
                    by = b.index(int(factor.item()) // size)
                    return b.mul(self.computed(b, x, seen), by)
        start = b.cast(self.computed(b, value, seen), INDEX.dtype)
        return b.div(start, b.index(size))

    def computed(self, b: Builder, value: Value, seen: Mapping[Value, Value]) -> Value:
        made = self.again.emit(b, [value], seen)
        return b.cast(made.get(value) or seen.get(value, value), INDEX.dtype)


class _Group:
    """Accesses to one operand that start at the same places; or side by side along a
    dimension (`joins`), at some elements of it (`starts`)."""

    def __init__(self, places: list[_Part | None], joins: int | None = None):
        self.places, self.joins = places, joins
        self.starts: dict[_Use, int] = {}
        self.uses: list[_Use] = []
        self.dims: dict[int, _Part] = {}
        self.shown: Shown

    def takes(self, places: list[_Part | None]) -> bool:
        return all(map(_all_same, zip(self.places, places, strict=True)))

    def offsets(self, use: _Use) -> Mapping[int, int | None]:
        """Where an access starts along the narrowed dimensions; None: it is all."""
        return {d: self.starts[use] if d == self.joins else None for d in self.dims}


def _all_same(parts: Sequence[_Part | None]) -> bool:
    first, *rest = parts
    return all(
        (first is None and each is None)
        or (
            first is not None
            and each is not None
            and first[0] == each[0]
            and first[1].is_same(each[1])
        )
        for each in rest
    )


def _const(part: _Part | None) -> int:
    affine = part[1].affine if part is not None else None
    return (affine.const or 0) if affine is not None else 0


def _side_by_side(parts: Sequence[_Part | None]) -> _Part | None:
    """The part that parts make together, if each starts where another one ends."""
    found = [part for part in parts if part is not None]
    forms = {part[1].affine and part[1].affine.coeffs for part in found}
    if len(found) < len(parts) or len(forms) > 1 or None in forms:
        return None
    found = sorted(found, key=_const)
    ends = [_const(part) + part[0] for part in found]
    if any(_const(part) > end for part, end in zip(found[1:], ends, strict=False)):
        return None
    return max(ends) - _const(found[0]), found[0][1]


def _extent(dim: BlockDim, n: int, size: int, uses: Sequence[_Use]) -> int:
    """Up to where parts of a block may extend: past the edge if they are masked."""
    masked = all(use.access.mask is not None for use in uses)
    return -(-n // size) * size if masked and dim.size == n else dim.size


def affine_value(
    b: Builder, affine: Affine, ids: Sequence[Value], divisor: int = 1
) -> Value:
    """Code for an affine form of grid indices, divided by what divides all of it."""
    assert affine.const is not None
    total: Value | None = None
    for c, index in zip(affine.coeffs, ids, strict=True):
        if c:
            factor = c // divisor
            term = index if factor == 1 else b.mul(index, b.index(factor))
            total = term if total is None else b.add(total, term)
    const = affine.const // divisor
    if total is None:
        return b.index(const)
    return b.add(total, b.index(const)) if const else total


def _is_plain(shown: Shown) -> bool:
    blocked = all(d.kind in ("blocked", "squeezed") for d in shown.window.dims)
    return blocked and shown.window.space == "block"


def _narrower(op: Op, ref: Value, starts: Mapping[int, int | None]) -> Op:
    """`starts`: in the window, along the dimensions in which it is narrower."""
    access = Access.of(op)
    index, operands = [], []
    for d, (entry, operand) in enumerate(access.split_index()):
        if d in starts:
            if isinstance(entry, Span):
                index.append(Span(starts[d] or 0, entry.size))
            elif starts[d] is not None:
                index.append(At(starts[d]))
            continue
        index.append(entry)
        operands += [] if operand is None else [operand]
    new = replace(access, ref=ref, index=tuple(index), index_operands=tuple(operands))
    attrs = {**op.attrs, "index": tuple(index)}
    return op.with_(operands=access_operands(new), attrs=attrs)
