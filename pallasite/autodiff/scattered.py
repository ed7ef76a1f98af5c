"""Cotangents that programs scatter: added to where blocks overlap or indices say.

Programs that add to places which others may add to as well (rows of an embedding,
overlapping windows, whole refs) could only run in sequence. Instead every program
writes what it adds to a block of its own, and where: `scattered` changes the program,
`Merge` adds up. Where places advance with the grid by a fixed stride, shifted copies
are added; otherwise rows are sorted by their place, and one program per place adds its
rows in that order. Either way the order is fixed, so results are the same in every run.

Proof: an access is at one place for each element that it has, whatever names it: an
index, a slice from a start, or index arrays, which advance together. Dimensions up to
the last one of which not all is accessed say which row an element belongs to, in mixed
radix, so that addends of one row have equal numbers; what a mask drops adds zero, and
what is outside has a number that no row has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallasite.autodiff.backward_stages import save_block, saved_ref
from pallasite.autodiff.backward_windows import index_count
from pallasite.autodiff.overlaps import sum_of_overlaps
from pallasite.emulation.step_order import sorted_by
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.parse import parse_kernel
from pallasite.ir.rewrite import producers_of
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program
from pallasite.target import Machine

MOST_ROWS = (1 << 31) - 2  # that have numbers
MOST_COLUMNS = 1024  # of the rows that one program adds up


class Stride(NamedTuple):
    """Where a dimension of an addend starts: `first + step * index` of a grid axis."""

    axis: int | None
    step: int
    first: int


class Place(NamedTuple):
    """Where an addend is along a dimension of the array."""

    start: Value  # or each part's place, where an index array names it
    size: int
    # What is not among so many places from the first one is not added; None: all is.
    shown: tuple[Value, int] | None = None


@dataclass(frozen=True)
class Addend:
    """What every program adds to one array: a tile of its own, and its place.

    Either the place is affine in the grid indices (`strides`, one per dimension), or
    the tile is rows of the array, whose numbers `rows` has, in the order of the tile's.
    The first `lead` dimensions of the array say which row it is.
    """

    values: Value
    tile: tuple[int, ...]
    strides: tuple[Stride, ...] = ()
    rows: Value | None = None
    lead: int = 1


@dataclass(frozen=True)
class Merge:
    """Adds up the addends of all programs."""

    target: Value
    sizes: tuple[int, ...]  # the grid
    addends: tuple[Addend, ...]

    @property
    def refs(self) -> tuple[Value, ...]:
        found = [(a.values, a.rows) for a in self.addends]
        return tuple(ref for pair in found for ref in pair if ref is not None)

    @property
    def is_rows(self) -> bool:
        """Whether all addends are rows, sorted before they are added."""
        return all(addend.rows is not None for addend in self.addends)


def merge_seconds(merge: Merge, machine: Machine) -> float:
    """Estimated time to add up: all are read, all sums written; one core sorts."""
    refs = [*merge.refs, merge.target]
    moved = sum(ref.ref.size * ref.ref.dtype.bytes for ref in refs)
    rows = sum(a.rows.ref.size for a in merge.addends if a.rows is not None)
    compared = rows * max(rows - 1, 1).bit_length()
    sorting = machine.cores * machine.starting(steps=compared)
    return machine.copying(moved) + sorting + len(refs) * machine.launch


def scattered(program: Program, ref: Value) -> tuple[Program, Merge] | None:
    """The program that writes addends of one array instead of adding to it.

    None if a place is neither affine nor a row, if an op in a loop or branch adds, or
    if places do not overlap: then a grid order serves better (`backward_windows.py`).
    """
    walker = _Scatter(program, ref)
    uses = [op for op in walk(program.body) if walker.is_use(op)]
    adds = [op for op in uses if op.name == "atomic_rmw"]
    top = set(program.body.ops)
    if not adds or not program.sizes or not all(op in top for op in uses):
        return None
    b = Builder(program.loc)
    places = [walker.places(b, op) for op in adds]
    found = [starts for starts in places if starts is not None]
    if len(found) < len(adds):
        return None
    lead = max(map(walker.lead, found))
    if prod(ref.ref.shape[:lead]) > MOST_ROWS:
        return None
    pairs = zip(adds, found, strict=True)
    addends = [walker.addend(b, op, starts, lead) for op, starts in pairs]
    if not any(map(_overlaps, addends)):
        return None
    ops = [op for op in program.body.ops if op not in adds]
    body = Block(program.body.params, (*ops, *b.ops))
    merge = Merge(ref, program.sizes, tuple(addends))
    return program.with_body(body).simplified(), merge


def _overlaps(addend: Addend) -> bool:
    """Whether programs may add to parts of what others add to."""
    pairs = zip(addend.strides, addend.tile, strict=addend.rows is None)
    return addend.rows is not None or any(
        stride.axis is not None and size > stride.step for stride, size in pairs
    )


class _Scatter:
    def __init__(self, program: Program, ref: Value):
        self.program, self.ref = program, ref
        self.made = producers_of(program.body)
        self.forms = Forms(program.body.params)
        self.forms.add_ops(program.body.ops)
        self.written = Roots(program.body).written(program.body)

    def is_use(self, op: Op) -> bool:
        return any(v is self.ref or self.view(v) is not None for v in op.operands)

    def view(self, value: Value) -> Op | None:
        """The `block_view` of the array that a value is."""
        op = self.made.get(value)
        is_view = op is not None and op.name == "block_view"
        return op if is_view and op.operands[0] is self.ref else None  # type: ignore[union-attr]

    def places(self, b: Builder, op: Op) -> list[Place] | None:
        """What `starts` has, if an op adds."""
        access, view = Access.of(op), self.view(op.operands[0])
        known = op.operands[0] is self.ref or view is not None
        adds = known and op.attrs["kind"] == "add"
        return self.starts(b, access, view) if adds else None

    def strides(self, starts: Sequence[Place]) -> tuple[Stride, ...] | None:
        """How places advance with the grid, if each axis advances one dimension."""
        found = [self.stride(p.start) for p in starts]
        strides = tuple(s for s in found if s is not None)
        axes = [s.axis for s in strides if s.axis is not None]
        known = len(strides) == len(found) and all(p.shown is None for p in starts)
        return strides if known and len(set(axes)) == len(axes) else None

    def lead(self, starts: Sequence[Place]) -> int:
        """How many dimensions of the array say to which of its rows an addend belongs.

        The others it has as a whole.
        """
        if self.strides(starts) is not None:
            return 1
        parts = [d for d, start in enumerate(starts) if not self.is_whole(d, start)]
        return 1 + max(parts, default=0)

    def addend(self, b: Builder, op: Op, starts: Sequence[Place], lead: int) -> Addend:
        access, ids = Access.of(op), self.program.body.params
        value = access.value
        assert value is not None
        if access.mask is not None:
            value = b.select(access.mask, value, b.like(0, value))
        values = self.kept(b, self.narrow(value), ids)
        strides = self.strides(starts)
        if strides is not None:
            return Addend(values, tuple(p.size for p in starts), strides=strides)
        rows = self.kept(b, self.rows(b, starts[:lead]), ids)
        return Addend(values, value.tile.shape, rows=rows, lead=lead)

    def rows(self, b: Builder, starts: Sequence[Place]) -> Value:
        """The numbers of the rows that the parts of an addend belong to.

        In the order in which an addend has them: what index arrays name comes first,
        then dimensions of which it has several places.
        """
        named = next((p.start.tile.shape for p in starts if p.start.tile.shape), ())
        spans = [d for d, p in enumerate(starts) if not p.start.tile.shape]
        spans = [d for d in spans if starts[d].size > 1]
        shape = (*named, *(starts[d].size for d in spans))
        total = missing = None
        for d, (start, _, shown) in enumerate(starts):
            own = range(len(named)) if start.tile.shape else ()
            place = b.broadcast(b.as_index(start), shape, tuple(own))
            if d in spans:
                along = len(named) + spans.index(d)
                place = b.add(place, b.op("iota", type=place.tile, dim=along))
            limits = [] if shown is None else [shown]
            if d and not self.is_in_array(b, d, starts[d]):
                # Outside it along the first dimension, there is no such row.
                limits.append((b.index(0), self.ref.ref.shape[d]))
            for low, count in limits:
                first = b.broadcast(low, shape, ())
                limit = b.add(first, b.like(count, first))
                outside = b.or_(b.lt(place, first), b.op("ge", place, limit))
                missing = outside if missing is None else b.or_(missing, outside)
            size = b.like(self.ref.ref.shape[d], place)
            total = place if total is None else b.add(b.mul(total, size), place)
        assert total is not None
        return total if missing is None else b.select(missing, b.like(-1, total), total)

    def is_whole(self, dim: int, place: Place) -> bool:
        """Whether an addend has all of a dimension."""
        return self.constant(place.start) == 0 and place.size == self.ref.ref.shape[dim]

    def starts(self, b: Builder, access: Access, view: Op | None) -> list[Place] | None:
        """For each dimension of the array, where the addend is."""
        entries = iter(access.split_index())
        if view is None:
            outer: list[tuple[Value | None, bool]] = [
                (None, True) for _ in self.ref.ref.shape
            ]
        else:
            outer = []
            dims = view.attrs["window"].dims
            blocks = zip(dims, self.ref.ref.shape, view.operands[1:], strict=True)
            for dim, n, index in blocks:
                if dim.kind not in ("blocked", "element", "squeezed"):
                    return None
                start = b.as_index(index)
                count = index_count(dim, n)
                if count is not None:  # as the window that the program was shown
                    start = self.clamped(b, start, count - 1)
                if dim.kind == "blocked":
                    start = b.mul(start, b.index(dim.size))
                elif dim.padding[0]:
                    start = b.sub(start, b.index(dim.padding[0]))
                outer.append((start, dim.kind != "squeezed"))
        found: list[Place] = []
        for number, (start, is_shown) in enumerate(outer):
            if not is_shown:
                assert start is not None
                found.append(Place(start, 1))
                continue
            entry, operand = next(entries)
            shown = self.ref.ref.shape[number]
            if view is not None:
                shown = view.attrs["window"].dims[number].size
            inner = self.inner(b, entry, operand, shown, access.mask is not None)
            if inner is None:
                return None
            if start is not None:
                known = inner.shown is None
                shape = inner.start.tile.shape
                first = b.add(b.broadcast(start, shape, ()), inner.start)
                inner = Place(first, inner.size, None if known else (start, shown))
            found.append(inner)
        self.note(b.ops)
        return found

    def inner(
        self,
        b: Builder,
        entry: Any,
        operand: Value | None,
        shown: int,
        masked: bool,
    ) -> Place | None:
        """Beside a mask, what is outside is dropped; a slice without one is clamped."""
        if isinstance(entry, Gather):
            assert operand is not None
            return Place(b.as_index(operand), 1, (b.index(0), shown))
        if isinstance(entry, Span) and entry.stride != 1:
            return None
        assert isinstance(entry, (At, Span))
        size = entry.size if isinstance(entry, Span) else 1
        if operand is None:
            return Place(b.index(entry.start or 0), size)
        start = b.as_index(operand)
        if masked and not self.is_inside(b, start, shown - size):
            return Place(start, size, (b.index(0), shown))
        return Place(self.clamped(b, start, shown - size), size)

    def clamped(self, b: Builder, start: Value, last: int) -> Value:
        """A start as accesses clamp it; unchanged where it is known to be inside."""
        if self.is_inside(b, start, last):
            return start
        return b.clamp(b.index(0), start, b.index(last))

    def is_inside(self, b: Builder, start: Value, last: int) -> bool:
        """Whether a start is known not to be clamped."""
        self.note(b.ops)
        form = self.forms.of(start).affine
        if form is None or form.const is None:
            return False
        sizes = zip(form.coeffs, self.program.sizes, strict=True)
        ends = [c * (n - 1) for c, n in sizes]
        low, high = (form.const + sum(f(e, 0) for e in ends) for f in (min, max))
        return low >= 0 and high <= last

    def is_in_array(self, b: Builder, d: int, place: Place) -> bool:
        """Whether no block hangs over the array's edge there, as far as is known."""
        last = self.ref.ref.shape[d] - place.size
        return not place.start.tile.shape and self.is_inside(b, place.start, last)

    def note(self, ops: Iterable[Op]) -> None:
        self.forms.add_ops(ops)
        self.made |= {v: op for op in ops for v in op.results}

    def constant(self, value: Value) -> int | None:
        form = self.forms.of(value)
        return form.affine.number if form.affine is not None else None

    def stride(self, start: Value) -> Stride | None:
        form = self.forms.of(start)
        if form.affine is None or form.affine.const is None or form.spread:
            return None
        axes = [a for a, c in enumerate(form.affine.coeffs) if c]
        if len(axes) > 1 or start.tile.shape:
            return None
        axis = axes[0] if axes else None
        step = form.affine.coeffs[axis] if axis is not None else 1
        return Stride(axis, step, form.affine.const) if step > 0 else None

    def narrow(self, value: Value) -> Value:
        """What a value was widened from."""
        op = self.made.get(value)
        if op is None or op.name != "cast":
            return value
        (x,) = op.operands
        is_wider = x.tile.dtype.is_float and x.tile.dtype.bits < value.tile.dtype.bits
        return x if is_wider and x.tile.dtype.bits >= 16 else value

    def kept(self, b: Builder, value: Value, ids: Sequence[Value]) -> Value:
        """An array with a value of every program: what it is loaded from, or new."""
        array = self.loaded(value)
        if array is not None:
            return array
        if not value.tile.shape:
            value = b.broadcast(value, (1,), ())
        ref = saved_ref(value, self.program.sizes)
        ref = replace(ref, name=f"part_{self.ref.name}")
        b.store(save_block(b, ref, ids, value, "out"), value)
        return ref

    def loaded(self, value: Value) -> Value | None:
        """The array of which each program loads its own tile, if these follow another.

        So rows of a result's cotangent are added up where they lie.
        """
        op = self.made.get(value)
        view = (
            None if op is None or op.name != "load" else self.made.get(op.operands[0])
        )
        if op is None or view is None or view.name != "block_view":
            return None
        array, *numbers = view.operands
        whole = covers_whole(op.operands[0].ref.shape, op.attrs["index"])
        if not whole or Access.of(op).mask is not None or array in self.written:
            return None
        axes, is_last = list(range(len(self.program.sizes))), False
        pairs = zip(view.attrs["window"].dims, numbers, array.ref.shape, strict=True)
        for dim, number, n in pairs:
            if dim.kind not in ("blocked", "squeezed") or any(dim.padding):
                return None
            count = 0 if is_last else self.digits(number, axes)
            steps = prod(self.program.sizes[a] for a in axes[:count])
            if count and n == steps * dim.size:
                del axes[:count]
                is_last = dim.size > 1  # what follows is inside a tile
            elif n == dim.size and self.constant(number) == 0:
                is_last |= n > 1
            else:
                return None
        return None if axes else array

    def digits(self, number: Value, axes: Sequence[int]) -> int:
        """How many of the first of these axes are the digits of a number."""
        form = self.forms.of(number)
        if form.affine is None or form.affine.const != 0 or form.spread:
            return 0
        coeffs, unit = form.affine.coeffs, 1
        count = sum(coeffs[a] != 0 for a in axes)
        for axis in reversed(axes[:count]):
            if coeffs[axis] != unit:
                return 0
            unit *= self.program.sizes[axis]
        return count


# --- adding up ---


def merged(
    merge: Merge,
    arrays: Mapping[Value, Any],
    final: T.DType,
    run: Any,
    machine: Machine,
) -> Any:
    """The sum of all addends.

    Args:
        merge: what to add up.
        arrays: the addends and their rows.
        final: the type that the sum will have, perhaps narrower than while adding up.
        run: calls a kernel, given its operands.
        machine: what runs it.
    """
    shape, dtype = merge.target.ref.shape, merge.target.ref.dtype
    total, rows, values = None, list[Any](), list[Any]()
    same = len({addend.values.ref.dtype for addend in merge.addends}) == 1
    for addend in merge.addends:
        x = arrays[addend.values].reshape(*merge.sizes, *addend.tile)
        if not same or addend.rows is None:
            x = x.astype(dtype.np)
        if addend.rows is None:
            places = merge.sizes, addend.strides, shape
            alone = machine.one_unit
            part = _in_one_kernel(x, *places, run) if alone else _shifted(x, *places)
            total = part if total is None else total + part
            continue
        rows.append(arrays[addend.rows].reshape(-1))
        values.append(x.reshape(-1, prod(shape[addend.lead :])))
    if rows:
        given = merge.addends[0].values.ref.dtype.name if same else dtype.name
        lists = jnp.concatenate(rows), jnp.concatenate(values)
        stored = final if total is None else dtype
        part = _by_row(*lists, shape, (given, dtype.name, stored.name), run)
        total = part if total is None else total + part
    return total


def _in_one_kernel(
    x: Any,
    sizes: Sequence[int],
    strides: Sequence[Stride],
    shape: Sequence[int],
    run: Any,
) -> Any:
    """`_shifted` by a kernel of `overlaps.py`, where tiles start at zero.

    XLA makes a pass over everything of each copy that it shifts, on a CPU.
    """
    tile = x.shape[len(sizes) :]
    starts = all(
        s.first == 0 and (s.axis is not None or t == n)
        for s, t, n in zip(strides, tile, shape, strict=True)
    )
    if not starts:
        return _shifted(x, sizes, strides, shape)
    axes = [s.axis for s in strides if s.axis is not None]
    others = [a for a in range(len(sizes)) if a not in axes]
    dims = range(len(sizes), x.ndim)
    x = x.sum(axis=tuple(others), keepdims=True).transpose(*others, *axes, *dims)
    x = x.reshape(*x.shape[len(others) :])
    steps = tuple(None if s.axis is None else s.step for s in strides)
    dtype = T.dtype_of(x.dtype)
    assert dtype is not None
    kernel = sum_of_overlaps(x.shape, dtype.name, steps, tuple(shape))
    (total,) = run(kernel, [x])
    return total


def _shifted(
    x: Any, sizes: Sequence[int], strides: Sequence[Stride], shape: Sequence[int]
) -> Any:
    """Tiles at places that advance with grid axes, added up."""
    used = [s.axis for s in strides]
    x = x.sum(axis=tuple(a for a in range(len(sizes)) if a not in used))
    axes = [a for a in range(len(sizes)) if a in used]
    for d, (stride, n) in enumerate(zip(strides, shape, strict=True)):
        place = len(axes) + d  # of the tile's dimension
        if stride.axis is not None:
            x = jnp.moveaxis(x, axes.index(stride.axis), place - 1)
            axes.remove(stride.axis)
            x = _overlapped(x, place - 1, stride.step)
            place -= 1
        length = x.shape[place]
        edges = [(0, 0, 0)] * x.ndim
        edges[place] = (stride.first, n - length - stride.first, 0)
        x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    return x


def _overlapped(x: Any, place: int, step: int) -> Any:
    """Two dimensions as one: tiles that start `step` apart, overlaps added up."""
    count, size = x.shape[place : place + 2]
    pieces = -(-size // step)
    total = None
    for number in range(pieces):
        end = min(size, (number + 1) * step)
        piece = lax.slice_in_dim(x, number * step, end, axis=place + 1)
        edges = [(0, 0, 0)] * x.ndim
        edges[place + 1] = (0, step - piece.shape[place + 1], 0)
        piece = lax.pad(piece, jnp.zeros((), x.dtype), edges)
        shape = (*x.shape[:place], count * step, *x.shape[place + 2 :])
        piece = piece.reshape(shape)
        edges = [(0, 0, 0)] * piece.ndim
        edges[place] = (number * step, (pieces - 1 - number) * step, 0)
        piece = lax.pad(piece, jnp.zeros((), x.dtype), edges)
        total = piece if total is None else total + piece
    assert total is not None
    return lax.slice_in_dim(total, 0, (count - 1) * step + size, axis=place)


def _by_row(
    rows: Any, values: Any, shape: Sequence[int], dtypes: tuple[str, str, str], run: Any
) -> Any:
    """Rows of an array, each the sum of values in the order of their programs.

    `dtypes`: of the values, of the sums, and of the sums as they are stored.
    """
    width = values.shape[1]
    count = prod(shape) // width
    inside = (rows >= 0) & (rows < count)
    rows = jnp.where(inside, rows, count).astype(jnp.int32)
    firsts, order = sorted_by(rows, count)
    kernel = row_sums(count, len(order), width, *dtypes)
    (total,) = run(kernel, [firsts, order, values])
    return total.reshape(shape)


@lru_cache(maxsize=64)
def row_sums(
    count: int, addends: int, width: int, given: str, dtype: str, stored: str
) -> Kernel:
    """A kernel that adds up rows: `order` lists them, row i from `firsts[i]` on."""
    size = next(n for n in range(min(width, MOST_COLUMNS), 0, -1) if width % n == 0)
    params = (
        f"%firsts: ref<i32[{count + 1}] smem>, %order: ref<i32[{addends}] smem>, "
        f"%values: ref<{given}[{addends},{width}] any>, "
        f"%sums: ref<{stored}[{count},{width}] any>"
    )
    grid = f"grid=({count}, {width // size}), windows=(out[squeezed 1, {size}])"
    is_wide = given == dtype
    cast = "" if is_wide else f"%wide: {dtype}[{size}] = cast %value {{dtype={dtype}}}"
    last = f"%narrow: {stored}[{size}] = cast %total {{dtype={stored}}}"
    last = "" if stored == dtype else last
    return parse_kernel(f"""
kernel @row_sums({params}) outputs 1 {{
  pipeline %sums {{{grid}, semantics=("parallel", "parallel")}}
    map (%i0: i32, %i1: i32) {{ yield %i0, %i1 }}
    body (%i2: i32, %i3: i32, %sum: ref<{stored}[{size}] block>) {{
      %one: i32 = constant {{value=1}}
      %size: i32 = constant {{value={size}}}
      %next: i32 = add %i2, %one
      %first: i32 = load %firsts[%i2]
      %limit: i32 = load %firsts[%next]
      %column: i32 = mul %i3, %size
      %zero: {dtype}[{size}] = constant {{value=0.0}}
      %total: {dtype}[{size}] = for %first, %limit, %one, %zero
        body (%i4: i32, %old: {dtype}[{size}]) {{
          %row: i32 = load %order[%i4]
          %value: {given}[{size}] = load %values[%row, %column:+{size}]
          {cast}
          %new: {dtype}[{size}] = add %old, {"%value" if is_wide else "%wide"}
          yield %new
        }}
      {last}
      store %sum[:] = {"%total" if stored == dtype else "%narrow"}
    }}
}}
""")
