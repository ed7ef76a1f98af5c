"""Makes a grid axis of parts of a cotangent that unrolled code adds to apart.

A convolution of nine shifted matmuls multiplies by nine parts of its weights, and its
reverse adds a matmul to each part of their cotangent. On a GPU one program cannot keep
all of these sums in registers. What is added differs only in numbers, which are linear
in the place it is added to: where slices start, and which blocks are shown. With the
places as further axes of the grid there is one matmul to compile, and each program has
one sum.

Proof: the places are all parts of the array along some dimensions, each once. The code
of an addition is emitted with `first + step * place` for each number, and is therefore
that of the addition to this place. Additions commute with those to other places.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from pallasite.autodiff.backward_stages import Slice
from pallasite.autodiff.backward_windows import only
from pallasite.autodiff.gather_overlaps import without
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import producers_of
from pallasite.ir.roles import number_of
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import Affine, Forms
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program

MOST_SUMS = 1 << 15  # elements that a program adds to: half of an SM's registers
Place = tuple[int, ...]


def rerolled(
    program: Program, results: Iterable[Value]
) -> tuple[Program, list[Program]]:
    """The program without sums whose places can be axes, and a program for each."""
    found = list[Program]()
    for ref in results:
        made = _rerolled(only(program, [ref]), ref)
        if made is not None:
            found.append(made)
            program = without(program, ref)
    return program, found


class _Differs(Exception):
    """What is added at two places is not the same code."""


def _rerolled(program: Program, ref: Value) -> Program | None:
    body, top = program.body, set(program.body.ops)
    uses = [op for op in walk(body) if ref in op.operands]
    views = [op for op in uses if op.name == "block_view"]
    shown = {ref, *(op.result for op in views)}
    adds = [op for op in walk(body) if shown & {*op.operands} and op not in views]
    if len(adds) < 2 or len(views) > 1 or not {*adds, *views} <= top:
        return None
    places = _places(ref, views, adds)
    if places is None:
        return None
    values = [Access.of(op).value for op in adds]
    if sum(v.tile.size for v in values if v is not None) <= MOST_SUMS:
        return None
    try:
        return _Reroll(program, places).program_of_places()
    except _Differs:
        return None


@dataclass(frozen=True)
class _Places:
    """Where additions are: which part of the array, along some of its dimensions.

    Attributes:
        ref: the array.
        window, indices: the block that has all parts.
        dims: the dimensions of the block along which there are several parts.
        sizes: the elements of a part along each; None: one, without the dimension.
        counts: how many parts there are.
        adds: the addition to each part.
    """

    ref: Value
    window: Window
    indices: tuple[Value, ...]
    dims: tuple[int, ...]
    sizes: tuple[int | None, ...]
    counts: tuple[int, ...]
    adds: Mapping[Place, Op]


def _places(ref: Value, views: Sequence[Op], adds: Sequence[Op]) -> _Places | None:
    """None unless additions are to all parts of a block, each to another one."""
    window = Window(tuple(map(BlockDim, ref.ref.shape)), "out")
    indices = tuple[Value, ...]()
    if views:
        window, indices = views[0].attrs["window"], views[0].operands[1:]
    shown = views[0].result if views else ref
    if any(dim.kind not in ("blocked", "squeezed") for dim in window.dims):
        return None
    accesses = [Access.of(op) for op in adds]
    for op, access in zip(adds, accesses, strict=True):
        plain = op.name == "atomic_rmw" and op.attrs["kind"] == "add"
        if not plain or access.ref is not shown or access.mask is not None:
            return None
        if access.index_operands or access.index == ():
            return None
    entries = list(zip(*(a.index for a in accesses), strict=True))
    dims = tuple(d for d, found in enumerate(entries) if len(set(found)) > 1)
    if not dims:
        return None  # several additions to one place
    sizes, counts, numbers = list[int | None](), list[int](), list[list[int]]()
    for d in dims:
        first, n = entries[d][0], shown.ref.shape[d]
        if any(replace(e, start=first.start) != first for e in entries[d]):
            return None
        is_span = isinstance(first, Span)
        size = first.size if is_span else 1
        if not size or n % size or getattr(first, "stride", 1) != 1:
            return None
        if any(e.start % size for e in entries[d]):
            return None
        sizes.append(size if is_span else None)
        counts.append(n // size)
        numbers.append([e.start // size for e in entries[d]])
    by_place = dict(zip(zip(*numbers, strict=True), adds, strict=True))
    if len(by_place) != len(adds) or len(adds) != prod(counts):
        return None
    return _Places(
        ref, window, indices, dims, tuple(sizes), tuple(counts), by_place
    )  # fmt: skip


class _Reroll:
    def __init__(self, program: Program, places: _Places):
        self.program, self.places = program, places
        body = program.body
        self.b = Builder(program.loc)
        self.made = producers_of(body)
        self.roots = Roots(body)
        self.written = self.roots.written(body)
        self.forms = Forms(body.params)
        self.forms.add_ops(body.ops)
        self.axes = [Value(INDEX, "place") for _ in places.dims]
        self.order = list(product(*map(range, places.counts)))
        self.known: dict[tuple[Value, ...], Value] = {}
        self.same: dict[Value, None] = {}  # what all additions use

    def program_of_places(self) -> Program:
        adds = [self.places.adds[place] for place in self.order]
        accesses = list(map(Access.of, adds))
        values = tuple(a.value for a in accesses if a.value is not None)
        total = self.value(values)
        op, body = self.made_by(total), self.program.body
        if op is None or not any(o.name == "dot" for o in self.b.ops):
            raise _Differs
        if not Slice(body.ops).is_cheap(self.same):
            raise _Differs  # each program would compute it
        self.add(adds[0], total)
        ops = [op for op in body.ops if op not in adds]
        new = Block((*body.params, *self.axes), (*ops, *self.b.ops))
        sizes = (*self.program.sizes, *self.places.counts)
        return replace(self.program, body=new, sizes=sizes).simplified()

    def made_by(self, value: Value) -> Op | None:
        return next((op for op in self.b.ops if value in op.results), None)

    def add(self, op: Op, total: Value) -> None:
        """Add to the block of a program's place."""
        b, places, access = self.b, self.places, Access.of(op)
        zero = b.index(0)
        indices = list(places.indices or [zero] * places.ref.ref.rank)
        dims = list(places.window.dims)
        index: list[Any] = list(access.index)
        kept = [n for n, dim in enumerate(dims) if dim.kind != "squeezed"]
        for d, size, axis in zip(places.dims, places.sizes, self.axes, strict=True):
            n = kept[d]
            whole = dims[n].size == places.ref.ref.shape[n]
            if not whole or (places.indices and number_of(self.made, indices[n]) != 0):
                raise _Differs
            indices[n] = axis
            dims[n] = BlockDim(1, "squeezed") if size is None else BlockDim(size)
            index[d] = None if size is None else Span(0, size)
        window = replace(places.window, dims=tuple(dims))
        block = b.op("block_view", places.ref, *indices, window=window)
        entries = tuple(entry for entry in index if entry is not None)
        new = replace(access, ref=block, index=entries, value=total)
        attrs = {**op.attrs, "index": entries}
        b.emit("atomic_rmw", *access_operands(new), **attrs)

    # --- one code for all places ---

    def value(self, values: tuple[Value, ...]) -> Value:
        """What is one of these values, by the place."""
        if all(v is values[0] for v in values):
            self.same[values[0]] = None
            return values[0]
        if values not in self.known:
            self.known[values] = self.emitted(values)
        return self.known[values]

    def emitted(self, values: tuple[Value, ...]) -> Value:
        if not values[0].is_ref and values[0].type == INDEX:
            return self.number(values)
        ops = [self.op_of(v) for v in values]
        first = ops[0]
        self.b.loc = first.loc
        if any(op.name != first.name for op in ops):
            raise _Differs
        if first.name == "load":
            return self.load(ops)
        for op in ops:
            if op.attrs != first.attrs or len(op.operands) != len(first.operands):
                raise _Differs
        columns = zip(*(op.operands for op in ops), strict=True)
        return self.b.op(first.name, *map(self.value, columns), **first.attrs)

    def op_of(self, value: Value) -> Op:
        op = self.made.get(value)
        if op is None or op.regions or len(op.results) != 1:
            raise _Differs
        reads = op.name == "load" and self.roots.of(op.operands[0]) not in self.written
        pure = reads or op.name == "block_view"
        if not pure and table()[op.name].effect is not Effect.PURE:
            raise _Differs
        return op

    def load(self, ops: Sequence[Op]) -> Value:
        accesses = list(map(Access.of, ops))
        if any(a.mask is not None or a.other is not None for a in accesses):
            raise _Differs
        ref = self.value(tuple(a.ref for a in accesses))
        index, starts = list[Any](), list[Value]()
        for found in zip(*(a.split_index() for a in accesses), strict=True):
            entry, start = found[0]
            if all(e == entry and s is start for e, s in found):
                index.append(entry)
                starts += [] if start is None else [start]
                continue
            if not all(isinstance(e, (At, Span)) for e, _ in found):
                raise _Differs
            if any(
                replace(e, start=None) != replace(entry, start=None) for e, _ in found
            ):
                raise _Differs
            index.append(replace(entry, start=None))
            if start is None:
                starts.append(self.sum(None, self.linear([e.start for e, _ in found])))
            else:
                starts.append(self.value(tuple(s for _, s in found)))
        return self.b.load(ref, tuple(index), starts)

    def number(self, values: Sequence[Value]) -> Value:
        """Numbers that differ by what is linear in the place."""
        forms = [self.forms.of(v).affine for v in values]
        known = [f for f in forms if f is not None and f.const is not None]
        if len(known) < len(forms) or any(f.coeffs != known[0].coeffs for f in known):
            raise _Differs
        return self.sum(values[0], self.linear([f.const or 0 for f in known]))

    def linear(self, numbers: Sequence[int]) -> Affine:
        """Numbers at each place, as a sum over the axes of places."""
        at = dict(zip(self.order, numbers, strict=True))
        origin = (0,) * len(self.axes)
        steps = list[int]()
        for axis, count in enumerate(self.places.counts):
            unit = tuple(int(a == axis) for a in range(len(origin)))
            steps.append(at[unit] - at[origin] if count > 1 else 0)
        for place, number in at.items():
            moved = sum(k * n for k, n in zip(steps, place, strict=True))
            if number != at[origin] + moved:
                raise _Differs
        return Affine(tuple(steps), at[origin])

    def sum(self, first: Value | None, affine: Affine) -> Value:
        """A form of the place; `first`: the number at the first place, if there."""
        b = self.b
        total = b.index(affine.const or 0) if first is None else first
        for axis, step in zip(self.axes, affine.coeffs, strict=True):
            if step:
                more = axis if step == 1 else b.mul(axis, b.index(step))
                total = b.add(total, more)
        return total
