"""program_order: programs are numbered by the block of the result that they write.

In: grids whose index maps compute the block from a program number: flattened (`p // n,
p % n`), grouped, reversed, in a snake, or with steps that a guard skips. Out: an axis
per dimension of the result along which blocks differ, in order; every index map and
every number that the body needs is then an affine form of the new indices.

Proof, by enumerating the programs: (1) the programs that are not skipped and the blocks
of one result correspond one to one, and these blocks are a box; (2) no two of them
write the same block of any result, no scratch carries a value from one to another, and
no operand is the memory of a result: so their order makes no difference; (3) each
number is equal to its affine form at every one of them. The order that the author chose
is not kept: choosing one is part of the schedule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import clone, dead_code, substitute, used_values
from pallasite.ir.roles import Cond, Pipeline, Shown
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.carried import carried_from
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.guards import guard_of
from pallasite.passes.analysis.step_table import StepTable
from pallasite.passes.normal.affine_numbers import fitted
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.narrow_windows import affine_value

_UNKNOWN = Value(INDEX, "unknown")  # an old index that is not affine in the new ones


def program_order(kernel: Kernel) -> Kernel:
    """The kernel with its programs numbered by the blocks that they write."""
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if kernel.level != "tile" or len(grids) != 1 or kernel.aliases:
        return kernel
    numbering = _Numbering.of(kernel, Pipeline.of(grids[0]))
    if numbering is None:
        return kernel
    new = numbering.kernel()
    if new is None:
        return kernel
    new = canonicalize(new)
    return kernel if new == kernel else new


def _is_plain(kernel: Kernel, whole: Pipeline) -> bool:
    """Whether the body only computes, loads and stores, and stores only to results."""
    results = {each.block for each in whole.shown if each.window.mode == "out"}
    scratch = {op.result for op in kernel.body.ops if op.name == "alloc"}
    for op in walk(whole.body):
        if op.name == "store":
            if op.operands[0] not in results | scratch:
                return False
        elif op.name != "load" and not op.regions:
            if table()[op.name].effect is not Effect.PURE:
                return False
        elif op.name == "pipeline":
            return False
    inputs = [each for each in whole.shown if each.window.mode == "in"]
    if any(each.array not in kernel.inputs for each in inputs):
        return False
    used = {v for op in walk(whole.body) for v in op.operands if v.is_ref}
    return used.isdisjoint(kernel.outputs)


def _is_simple(whole: Pipeline) -> bool:
    """Whether the maps are affine already, and count upwards, results along one axis.

    Where each core has its axis, two of them number the blocks of a dimension.
    """
    shared = any(s.endswith("core_parallel") for s in whole.semantics)
    for each in whole.shown:
        forms = Forms(each.index_map.params)
        forms.add_ops(each.index_map.ops, loads_vary=False)
        for value in each.index_map.yields:
            affine = forms.of(value).affine
            if affine is None or any(c < 0 for c in affine.coeffs):
                return False
            moving = (
                c and n != 1 for c, n in zip(affine.coeffs, whole.grid, strict=True)
            )
            if each.window.mode == "out" and sum(map(bool, moving)) > 1 and not shared:
                return False
    return True


def _skipped_by(whole: Pipeline) -> Cond | None:
    """The only op of a body that is more than arithmetic, if it is a guard."""
    rest = [op for op in whole.body.ops if not _is_scalar(op)]
    if len(rest) != 1 or rest[0].name != "cond":
        return None
    inside = {v: op for op in whole.body.ops for v in op.results}
    return None if guard_of(rest[0], inside) is None else Cond.of(rest[0])


def _is_scalar(op: Op) -> bool:
    pure = not op.regions and table()[op.name].effect is Effect.PURE
    return pure and not any(v.is_ref or v.tile.shape for v in op.results)


@dataclass(frozen=True, eq=False)
class _Numbering:
    """New coordinates for the programs along some axes."""

    whole_kernel: Kernel
    whole: Pipeline
    axes: range  # the old axes
    active: np.ndarray  # which programs along them are not skipped
    sizes: tuple[int, ...]  # of the new axes
    order: np.ndarray  # the active programs, in the order of the new axes

    @staticmethod
    def of(kernel: Kernel, whole: Pipeline) -> "_Numbering | None":
        guard = _skipped_by(whole)
        if (guard is None and _is_simple(whole)) or not _is_plain(kernel, whole):
            return None
        places = [_places(whole, s) for s in whole.shown if s.window.mode == "out"]
        if not places or any(each is None for each in places):
            return None
        tables = [t for each in places if each is not None for t in each]
        moving = {a for t in tables for a, n in enumerate(t.shape) if n > 1}
        active = _active(whole, guard)
        moving |= {a for a, n in enumerate(active.shape) if n > 1}
        axes = range(min(moving, default=0), max(moving, default=-1) + 1)
        if len(moving) != len(axes) or not axes:
            return None
        if any(whole.semantics[a] == "sequential" for a in axes):
            return None
        for op in kernel.body.ops:
            if op.name == "alloc":
                ref, ids = op.result, whole.ids
                if carried_from(whole.body, ref, ids, whole.grid) <= axes[-1]:
                    return None
        return _numbered(kernel, whole, axes, active, places)

    def kernel(self) -> Kernel | None:
        """The kernel with the new axes; None if a number is not affine in them."""
        old, grid = self.whole, self.whole.grid
        before, after = grid[: self.axes[0]], grid[self.axes[-1] + 1 :]
        new_grid = (*before, *self.sizes, *after)
        said = {old.semantics[a] for a in self.axes}
        kind = said.pop() if len(said) == 1 else "arbitrary"
        semantics = (
            *old.semantics[: self.axes[0]],
            *[kind] * len(self.sizes),
            *old.semantics[self.axes[-1] + 1 :],
        )
        blocks = tuple(Value(v.type, v.name) for v in old.blocks)
        shown = [
            each._replace(
                index_map=self.renumbered(each.index_map, each.index_map.params, {}),
                block=block,
            )
            for each, block in zip(old.shown, blocks, strict=True)
        ]
        refs = dict(zip(old.blocks, blocks, strict=True))
        body = self.renumbered(old.body, old.ids, refs)
        made = old.with_(grid=new_grid, semantics=semantics).showing(shown, body)
        new = dead_code(with_pipeline(self.whole_kernel, made.to_op()))
        return None if _UNKNOWN in used_values(new.body) else new

    def renumbered(
        self, block: Block, old_ids: Sequence[Value], refs: Mapping[Value, Value]
    ) -> Block:
        """A map, or the body, as a function of the new indices."""
        new_ids = self.new_ids(old_ids)
        own = [old_ids[a] for a in self.axes]
        known = StepTable(own, [self.whole.grid[a] for a in self.axes])
        known.add_ops(block.ops)
        b = Builder(self.whole.op.loc)
        kept = dict(zip(self.others(old_ids), self.others(new_ids, True), strict=True))
        first = self.axes[0]
        at = new_ids[first : first + len(self.sizes)]
        mapping = kept | dict.fromkeys(own, _UNKNOWN) | dict(refs)
        for value in self.needed(block, known, own):
            affine = self.fitted(known.known[value])
            if affine is not None:
                mapping[value] = _as_type(b, affine, at, value)
        code = clone(Block((), block.ops, block.yields), mapping)
        new = _replaced(code, block, mapping)
        b.ops += new.ops
        return b.block((*new_ids, *refs.values()), new.yields)

    def new_ids(self, old: Sequence[Value]) -> tuple[Value, ...]:
        count = len(old) - len(self.axes) + len(self.sizes)
        return tuple(Value(INDEX, f"i{a}") for a in range(count))

    def others(self, ids: Sequence[Value], new: bool = False) -> list[Value]:
        """The indices along the axes that stay."""
        count = len(self.sizes) if new else len(self.axes)
        first = self.axes[0]
        return [*ids[:first], *ids[first + count :]]

    def needed(
        self, block: Block, known: StepTable, own: Sequence[Value]
    ) -> list[Value]:
        """The numbers that something other than arithmetic on the indices uses."""
        varying = {v for v, t in known.known.items() if t.size > 1} | set(own)
        used: dict[Value, None] = dict.fromkeys(v for v in block.yields if v in varying)
        for op in walk(block):
            tabulated = all(v in known.known for v in op.results) and op.results
            if not tabulated:
                used.update(dict.fromkeys(v for v in op.operands if v in varying))
            for region in op.regions:
                used.update(dict.fromkeys(v for v in region.yields if v in varying))
        return [*own, *(v for v in used if v not in own)]

    def fitted(self, values: np.ndarray) -> Affine | None:
        """The affine form that a table is of the new indices, at every program."""
        full = np.broadcast_to(values, self.active.shape)[self.active]
        return fitted(full[self.order].reshape(self.sizes))


def _replaced(code: Block, old: Block, mapping: Mapping[Value, Value]) -> Block:
    """A clone of a block with some of its own values replaced."""
    fresh: dict[Value, Value] = {}
    for before, after in zip(walk(old), walk(code), strict=True):
        pairs = zip(before.results, after.results, strict=True)
        fresh.update({new: mapping[v] for v, new in pairs if v in mapping})
    return substitute(code, fresh)


def _as_type(b: Builder, affine: Affine, ids: Sequence[Value], like: Value) -> Value:
    if affine.is_fixed:
        assert affine.const is not None
        return b.constant(affine.const, like.tile)
    return b.cast(affine_value(b, affine, ids), like.tile.dtype)


def _active(whole: Pipeline, guard: Cond | None) -> np.ndarray:
    """The programs that a guard does not skip, if it is known for all of them."""
    everywhere = np.ones((1,) * len(whole.grid), bool)
    if guard is None:
        return everywhere
    known = StepTable(whole.ids, whole.grid)
    known.add_ops(whole.body.ops)
    which = known.of(guard.which)
    if which is None:
        return everywhere
    taken = np.clip(which, 0, len(guard.branches) - 1)
    skips = [not branch.ops for branch in guard.branches]
    return ~np.asarray(skips)[taken]


def _places(whole: Pipeline, shown: Shown) -> list[np.ndarray] | None:
    """The block indices of a window at all programs, clamped; None if not known."""
    dims, shape = shown.window.dims, shown.array.ref.shape
    if any(d.kind not in ("blocked", "squeezed") for d in dims):
        return None
    known = StepTable(shown.index_map.params, whole.grid)
    known.add_ops(shown.index_map.ops)
    tables = [known.of(v) for v in shown.index_map.yields]
    if any(t is None for t in tables):
        return None
    parts = zip(tables, dims, shape, strict=True)
    return [np.clip(t, 0, last_number(d, n)) for t, d, n in parts if t is not None]


def _numbered(
    kernel: Kernel,
    whole: Pipeline,
    axes: range,
    active: np.ndarray,
    places: Sequence[list[np.ndarray] | None],
) -> _Numbering | None:
    """Coordinates by the first result whose blocks are a box."""
    old = [whole.grid[a] for a in axes]
    if any(not n for n in old):
        return None
    shape = tuple(n for n in old if n is not None)
    here = _along(active, axes, shape)
    count = int(here.sum())
    if not count:
        return None  # no program does anything
    found: tuple[tuple[int, ...], np.ndarray] | None = None
    for each in places:
        assert each is not None
        rows = [_along(t, axes, shape)[here] for t in each]
        if not rows or len(np.unique(np.stack(rows), axis=1).T) != count:
            return None
        found = found or _box(rows, count)
    if found is None:
        return None
    sizes, order = found
    if sizes == shape and here.all() and np.array_equal(order, np.arange(count)):
        return None  # they are numbered so already
    return _Numbering(kernel, whole, axes, here, sizes, order)


def _along(values: np.ndarray, axes: range, shape: tuple[int, ...]) -> np.ndarray:
    """A table with dimensions for these axes only; it depends on no others."""
    kept = tuple(values.shape[a] for a in axes)
    return np.broadcast_to(values.reshape(kept), shape)


def _box(
    rows: Sequence[np.ndarray], count: int
) -> tuple[tuple[int, ...], np.ndarray] | None:
    """The sides of a box that points fill, and the points in its order."""
    lows, highs = [int(r.min()) for r in rows], [int(r.max()) for r in rows]
    sides = [high - low + 1 for low, high in zip(lows, highs, strict=True)]
    moving = [d for d, n in enumerate(sides) if n > 1]
    sizes = tuple(sides[d] for d in moving)
    if not sizes or prod(sizes) != count:
        return None
    place = np.ravel_multi_index([rows[d] - lows[d] for d in moving], sizes)
    return sizes, np.argsort(place)
