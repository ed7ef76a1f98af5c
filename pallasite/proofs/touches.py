"""Which elements of memory the ops of a kernel touch, step by step.

`Walk` goes through a kernel once and collects its accesses (`Use`) and windows
(`Shows`), each with the tables of its indices, for `bounds.py`; and for `coverage.py`
and `races.py` what the accesses touch in whole arrays (`Touch`): the views and windows
between an access and its array are composed into one start per dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    Window,
)
from pallasite.ir.opdef import Effect, table
from pallasite.ir.roles import Loop, Pipeline
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.memory import read_refs, written_refs
from pallasite.proofs.assume import Given
from pallasite.proofs.tables import MOST_ENTRIES, Place, Table, Tables

Entries = Sequence[tuple[At | Span | Gather, Value | None]]


def extent_of(entry: At | Span) -> int:
    return entry.extent if isinstance(entry, Span) else 1


@dataclass(frozen=True)
class Part:
    """A range along one dimension of an array: `size` elements, `stride` apart."""

    start: Table
    size: int
    stride: int = 1
    dim: int | None = None  # of the ref that shows it


@dataclass(frozen=True)
class View:
    """What a ref shows of an array. Without `parts` only the array is known.

    `whole` is a view with the same elements in another shape.
    """

    root: Value
    parts: tuple[Part, ...] | None
    whole: "View | None" = None
    exact: bool = True  # False: it shows at most these elements


@dataclass(frozen=True)
class Touch:
    """Elements of an array that an op reads or writes, at the steps of its place.

    Either `parts` (a range per dimension), or `points` (per dimension a table of
    positions with the dimensions of the access's tile, and `on`, where the mask is on),
    or neither: it may be any element. Only if `exact` are all these elements touched.
    """

    op: Op
    root: Value
    writes: bool
    reads: bool
    place: Place
    parts: tuple[Part, ...] | None = None
    points: tuple[Table, ...] | None = None
    on: Table | None = None
    exact: bool = True
    why: str = ""

    @property
    def sure(self) -> bool:
        return self.exact and self.place.sure

    @property
    def atomic(self) -> bool:
        return self.op.name.startswith("atomic") or self.op.name == "fetch_and_add"


@dataclass(frozen=True)
class Use:
    """An access or a view, and when it happens."""

    op: Op
    place: Place


@dataclass(frozen=True)
class Shows:
    """A window of a pipeline, and when the pipeline's steps happen."""

    pipeline: Pipeline
    number: int
    place: Place


class Walk:
    """One pass over a kernel."""

    def __init__(self, kernel: Kernel, given: Given | None = None):
        self.kernel, self.given = kernel, given or Given(kernel)
        self.tables = Tables(kernel.body)
        self.uses: list[Use] = []
        self.shows: list[Shows] = []
        self.touches: list[Touch] = []
        self.views: dict[Value, View] = {}
        same = kernel.aliased_results
        for param in kernel.params:
            self.views[param] = self._whole(param, same.get(param, param))
        start = Place(0, self.tables.everywhere())
        self._block(kernel.body, start)

    def _whole(self, ref: Value, root: Value) -> View:
        zero = self.tables.scalar(0)
        parts = (Part(zero, n, 1, d) for d, n in enumerate(ref.ref.shape))
        return View(root, tuple(parts))

    # --- control ---

    def _block(self, block: Block, place: Place) -> None:
        for op in block.ops:
            self._op(op, place)

    def _op(self, op: Op, place: Place) -> None:
        tables = self.tables
        self._note(op)
        if op.name == "pipeline":
            self._pipeline(Pipeline.of(op), place)
        elif op.name == "for":
            inside = tables.loop(Loop.of(op), place)
            if inside is not None:
                self._block(op.regions[0], inside)
        elif op.name == "cond":
            for region, inside in tables.branches(op, place):
                self._block(region, inside)
            tables.join(op)
        elif op.name in ("roles", "warps"):
            for region in op.regions:
                self._block(region, place)
        elif op.regions:
            why = f"a {op.name} may run any number of times"
            for region in op.regions:
                self._regions_params(region)
                self._block(region, place.unsure(why, op))
        else:
            self._memory(op, place)

    def _note(self, op: Op) -> None:
        """Make the tables of an op's results."""
        self.tables.add(op)
        if op.name == "load":
            made = self._loaded(op)
            if made is not None:
                self.tables.known[op.result] = made

    def _loaded(self, op: Op) -> Table | None:
        """What a load reads of an operand whose contents are given."""
        access = Access.of(op)
        contents = self.given.contents(access.ref)
        placed = None if access.mask is not None else self._positions(access)
        if contents is None or placed is None or not contents.size:
            return None
        places, rank = placed
        chosen = list[Table]()
        for entry, place, n in zip(access.index, places, contents.shape, strict=True):
            inside = np.clip(place, 0, n - 1)
            if isinstance(entry, Span) and np.any(inside != place):
                return None  # its start is clamped, not its elements
            chosen.append(inside)
        if not chosen:
            return self.tables.with_tile(self.tables.scalar(int(contents)), rank)
        shape = np.broadcast_shapes(*(c.shape for c in chosen))
        if np.prod(shape, dtype=np.int64) > MOST_ENTRIES:
            return None
        return contents[tuple(np.broadcast_to(c, shape) for c in chosen)]

    def _regions_params(self, region: Block) -> None:
        for param in region.params:
            if param.is_ref:
                self.views[param] = View(param, None)

    def _pipeline(self, pipeline: Pipeline, place: Place) -> None:
        inside = self.tables.grid(pipeline, place)
        if inside is None:
            return
        for number, (array, window, index_map, block) in enumerate(pipeline.shown):
            self._block(index_map, inside)
            self.shows.append(Shows(pipeline, number, inside))
            self.views[block] = self._window(array, window, index_map.yields)
        self._block(pipeline.body, inside)

    # --- views ---

    def _window(self, array: Value, window: Window, found: Sequence[Value]) -> View:
        outer = self.views[array]
        if outer.parts is None:
            return View(outer.root, None)
        pending, exact, own = iter(found), outer.exact, 0
        parts, shape = list(outer.parts), array.ref.shape
        at = {part.dim: d for d, part in enumerate(parts) if part.dim is not None}
        for d, (dim, n) in enumerate(zip(window.dims, shape, strict=True)):
            index = self.tables.of(next(pending))
            if dim.kind == "bounded":
                next(pending)
                exact = False
            if index is None:
                return View(outer.root, None)
            start = np.clip(index.astype(np.int64), 0, last_number(dim, n))
            start = start * dim.size if dim.kind == "blocked" else start
            start = start - dim.padding[0]
            part, size = parts[at[d]], 1 if dim.kind == "squeezed" else dim.size
            kept = None if dim.kind == "squeezed" else own
            own += kept is not None
            if n != outer.root.ref.shape[d] and window.may_hang_over(shape):
                exact = False  # past this edge is more of the array
            parts[at[d]] = Part(
                part.start + start * part.stride, size, part.stride, kept
            )
        return View(outer.root, tuple(parts), exact=exact)

    def _view(self, op: Op) -> View:
        outer = self.views.get(op.operands[0])
        if outer is None:
            return View(op.operands[0], None)
        if op.name == "subview":
            access = Access.of(op)
            return self._selected(outer, access.split_index(), access.ref.ref.shape)
        if op.name == "transpose_view" and outer.parts is not None:
            new = {old: d for d, old in enumerate(op.attrs["perm"])}
            parts = (
                p if p.dim is None else replace(p, dim=new[p.dim]) for p in outer.parts
            )
            return replace(outer, parts=tuple(parts))
        if op.name == "block_view":
            return self._window(op.operands[0], op.attrs["window"], op.operands[1:])
        return View(outer.root, None, outer.whole or outer, outer.exact)

    def _selected(self, outer: View, entries: Entries, shape: Sequence[int]) -> View:
        """Part of a view, by an index without gathers; starts are clamped to fit."""
        if outer.whole is not None and self._is_full(entries, shape):
            return outer
        if outer.parts is None:
            return View(outer.root, None)
        parts, own = list(outer.parts), 0
        at = {part.dim: d for d, part in enumerate(parts) if part.dim is not None}
        for d, ((entry, operand), n) in enumerate(zip(entries, shape, strict=True)):
            start = self._start(entry, operand)
            if start is None or isinstance(entry, Gather):
                return View(outer.root, None)
            start = np.clip(start, 0, max(n - extent_of(entry), 0))
            part, kept = parts[at[d]], None if isinstance(entry, At) else own
            own += kept is not None
            size, stride = (
                (1, 1) if isinstance(entry, At) else (entry.size, entry.stride)
            )
            parts[at[d]] = Part(
                part.start + start * part.stride, size, part.stride * stride, kept
            )
        return View(outer.root, tuple(parts), exact=outer.exact)

    def _is_full(self, entries: Entries, shape: Sequence[int]) -> bool:
        pairs = zip(entries, shape, strict=True)
        return all(e == Span(0, n) for (e, _), n in pairs)

    def _start(self, entry: At | Span | Gather, operand: Value | None) -> Table | None:
        if operand is None:
            assert not isinstance(entry, Gather)
            return self.tables.scalar(entry.start or 0)
        found = self.tables.of(operand)
        return None if found is None else found.astype(np.int64)

    # --- accesses ---

    def _memory(self, op: Op, place: Place) -> None:
        row = table()[op.name]
        if op.name == "alloc":
            self.views[op.result] = self._whole(op.result, op.result)
        elif op.results and op.results[0].is_ref and op.operands:
            self.views[op.result] = self._view(op)
            if row.indexed:
                self.uses.append(Use(op, place))
        elif row.indexed:
            self.uses.append(Use(op, place))
            self._access(op, place)
        elif row.effect is not Effect.PURE:
            self._whole_refs(op, place)

    def _whole_refs(self, op: Op, place: Place) -> None:
        """Copies, semaphores: they take views, and use all that these show."""
        if op.name == "copy_wait":
            return
        local = op.name == "copy_start"
        for ref in dict.fromkeys((*written_refs(op), *read_refs(op))):
            if ref.ref.is_semaphore:
                continue
            view = self.views.get(ref, View(ref, None))
            if view.parts is None and view.whole is not None:
                view = view.whole
            writes, reads = ref in written_refs(op), ref in read_refs(op)
            self.touches.append(
                Touch(
                    op,
                    view.root,
                    writes,
                    reads,
                    place,
                    view.parts if local else None,
                    exact=local and view.exact and view.parts is not None,
                    why=f"which elements a {op.name} touches is not followed",
                )
            )

    def _access(self, op: Op, place: Place) -> None:
        access = Access.of(op)
        writes, reads = op in _writers(op), op.name != "store"
        view = self.views.get(access.ref, View(access.ref, None))
        touch = Touch(op, view.root, writes, reads, place, exact=False)
        entries, shape = access.split_index(), access.ref.ref.shape
        mask = None if access.mask is None else self.tables.of(access.mask)
        plain = access.mask is None or (mask is not None and bool(np.all(mask)))
        gathers = any(isinstance(e, Gather) for e, _ in entries)
        if (
            plain
            and not gathers
            and (access.mask is None or self._fits(entries, shape))
        ):
            chosen = self._selected(view, entries, shape)
            chosen = chosen.whole or chosen
            if chosen.parts is None:
                touch = replace(
                    touch, why="where it writes depends on values read from memory"
                )
            else:
                touch = replace(touch, parts=chosen.parts, exact=chosen.exact)
        else:
            touch = self._points(touch, access, view, mask)
        self.touches.append(touch)

    def _fits(self, entries: Entries, shape: Sequence[int]) -> bool:
        """Whether starts are known to need no clamp (which masks change)."""
        for (entry, operand), n in zip(entries, shape, strict=True):
            start = self._start(entry, operand)
            if start is None or isinstance(entry, Gather):
                return False
            if np.any(start < 0) or np.any(start + extent_of(entry) > n):
                return False
        return True

    def _points(
        self, touch: Touch, access: Access, view: View, mask: Table | None
    ) -> Touch:
        """An access element by element."""
        unknown = replace(
            touch,
            why="where it writes depends on values read from memory, or on a mask",
        )
        if view.parts is None:
            return unknown
        placed = self._positions(access)
        if placed is None:
            return unknown
        places, rank = placed
        on = self.tables.everywhere()
        on = self.tables.with_tile(on, rank)
        exact = view.exact
        if access.mask is not None:
            exact = exact and mask is not None
            on = on if mask is None else self.tables.with_tile(mask, rank)
        reading = touch.op.name == "load"
        for d, n in enumerate(access.ref.ref.shape):
            if isinstance(access.index[d], Gather):
                places[d] = np.where(places[d] < 0, places[d] + n, places[d])
            inside = (places[d] >= 0) & (places[d] < n)
            if reading:
                places[d] = np.clip(places[d], 0, max(n - 1, 0))
            else:
                shape = np.broadcast_shapes(on.shape, inside.shape)
                if np.prod(shape, dtype=np.int64) > MOST_ENTRIES:
                    return unknown
                on = on & inside
        found: list[Table] = []
        for part in view.parts:
            start = self.tables.with_tile(part.start, rank)
            found.append(
                start if part.dim is None else start + places[part.dim] * part.stride
            )
        return replace(touch, points=tuple(found), on=on, exact=exact)

    def _positions(self, access: Access) -> tuple[list[Table], int] | None:
        """Per dimension of the ref, the position of each element of the access."""
        entries = access.split_index()
        gathered = next(
            (
                v.tile.rank
                for e, v in entries
                if isinstance(e, Gather) and v is not None
            ),
            0,
        )
        rank = gathered + sum(isinstance(e, Span) for e, _ in entries)
        places, axis = list[Table](), gathered
        for entry, operand in entries:
            start = self._start(entry, operand)
            if start is None:
                return None
            start = self.tables.with_tile(start, rank)
            if isinstance(entry, Span):
                shape = [1] * (self.tables.rank + rank)
                shape[self.tables.rank + axis] = entry.size
                start = start + (np.arange(entry.size) * entry.stride).reshape(shape)
                axis += 1
            places.append(start)
        return places, rank


def _writers(op: Op) -> tuple[Op, ...]:
    return (op,) if written_refs(op) else ()
