"""shifted_arrays: a kernel whose programs shift blocks as one program on whole arrays.

In: parallel programs that each compute a block of every result, from blocks that may
overlap (a stencil, a convolution of few taps, their cotangents): parts of blocks,
padded and joined, elementwise operations, masks by position. Out: one program whose
tiles are as large as a result, in which a part that begins elsewhere is a shifted
array. `whole_arrays.py` uses it where programs cannot be merged one after another.

Proof: by induction over the ops. The element `e` of a tile of program `i` that a
result's position `P = i * size + P % size` needs is `e = P % size + at`, for a number
`at` per dimension: those of a slice are `start` further, those of padding and of joined
pieces are found by comparing `e`, and program indices are `P / size`. A load at
`i * size + start + e` of an array is then the array's element `P + at + start`; past
its ends that is the window's fill value. What is computed for positions that a mask or
a piece beside it drops may be any number: it is never selected. So where a choice by
program drops a load, as at an edge, where its index is clamped, it may start anywhere;
where loads start is enumerated for all other programs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pallasite.ir.build import Builder, Scalar
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
)
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import dead_code, is_elementwise, producers_of
from pallasite.ir.roles import Pipeline, Shown
from pallasite.ir.types import I32, RefType, TileType
from pallasite.passes.analysis.block_table import last_number
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import constant_inputs
from pallasite.passes.analysis.step_table import StepTable

MOST_PARTS = 16  # elements of operands that one element of a result is computed from


class NotShifted(Exception):
    """The programs are no shifts of whole arrays; the message says why."""


class Place(NamedTuple):
    """An element of a tile's dimension: `position % size + at`, or only `at`.

    Attributes:
        dim: the dimension of the result whose position it follows; None: no.
        at: how much further it is.
    """

    dim: int | None
    at: int = 0


Places = tuple[Place, ...]
Steps = np.ndarray  # something at each step of the grid, as in `StepTable`


def shifted_arrays(kernel: Kernel) -> Kernel:
    """One program on whole arrays.

    Raises:
        NotShifted: the programs compute something else.
    """
    old = Pipeline.of(find_pipeline(kernel))
    if None in old.grid or 0 in old.grid:
        raise NotShifted("its grid's size is not known, or zero")
    arrays = _Arrays(kernel, old)
    results = [shown for shown in old.shown if shown.array in kernel.outputs]
    if sorted(map(id, kernel.outputs)) != sorted(id(s.array) for s in results):
        raise NotShifted("a result has not one window")
    for shown in results:
        _Result(arrays, shown).store()
    return arrays.kernel_of_one()


class _Arrays:
    """What all results have in common: the kernel, and the whole arrays."""

    def __init__(self, kernel: Kernel, old: Pipeline):
        self.kernel, self.old = kernel, old
        self.made = producers_of(old.body)
        self.constant = constant_inputs(kernel)
        self.table = StepTable(old.ids, old.grid)
        self.table.add_ops(old.body.ops)
        self.sizes = [n or 0 for n in old.grid]
        self.windows = dict(zip(old.blocks, old.shown, strict=True))
        self.b = Builder(old.op.loc)
        self.shown: dict[Value, Shown] = {}
        self.loaded: dict[Value, Value] = {}

    def whole(self, array: Value, mode: str) -> Value:
        """The block of a window on all of an array."""
        ids = [Value(v.type, v.name) for v in self.old.ids]
        b = Builder(self.old.op.loc)
        zeros = [b.index(0) for _ in array.ref.shape]
        window = Window(tuple(map(BlockDim, array.ref.shape)), mode)
        block = Value(RefType(array.ref.shape, array.ref.dtype, "block"), array.name)
        self.shown[array] = Shown(array, window, b.block(ids, zeros), block)
        return block

    def array(self, array: Value) -> Value:
        """All elements of an array that nothing writes."""
        if array not in self.loaded:
            if array not in self.constant or array not in self.kernel.inputs:
                raise NotShifted("it reads memory that it writes")
            self.loaded[array] = self.b.load(self.whole(array, "in"))
        return self.loaded[array]

    def number(self, value: Value, table: StepTable, last: int) -> Steps:
        """An index at each step, clamped."""
        found = table.of(value)
        if found is None:
            raise NotShifted("an index is not known")
        return np.clip(found.astype(np.int64), 0, last)

    def starts(self, shown: Shown) -> list[Steps]:
        """The first element of a window's block, per dimension of its array."""
        shape, found = shown.array.ref.shape, list[Steps]()
        if any(dim.kind == "bounded" for dim in shown.window.dims):
            raise NotShifted("its blocks vary in size")
        table = StepTable(shown.index_map.params, self.old.grid)
        table.add_ops(shown.index_map.ops)
        yields = shown.index_map.yields
        for dim, n, index in zip(shown.window.dims, shape, yields, strict=True):
            first = self.number(index, table, last_number(dim, n))
            first = first * (dim.size if dim.kind == "blocked" else 1)
            found.append(first - dim.padding[0])
        return found

    def along(self, axis: int) -> Steps:
        """The index along an axis at each step."""
        shape = [n if a == axis else 1 for a, n in enumerate(self.sizes)]
        return np.arange(self.sizes[axis]).reshape(shape)

    def kernel_of_one(self) -> Kernel:
        shown = [*self.shown.values()]
        ids = [Value(v.type, v.name) for v in self.old.ids]
        body = self.b.block((*ids, *(each.block for each in shown)))
        grid = (1,) * len(self.sizes)
        new = self.old.with_(grid=grid).showing(shown, body)
        ops = tuple(
            new.to_op() if o is self.old.op else o for o in self.kernel.body.ops
        )
        return dead_code(self.kernel.with_(body=replace(self.kernel.body, ops=ops)))


class _Result:
    """Computes tiles as large as one result."""

    def __init__(self, arrays: _Arrays, shown: Shown):
        self.all, self.b, self.result = arrays, arrays.b, shown
        self.shape = shown.array.ref.shape
        self.known: dict[object, Value] = {}
        self.parts = set[tuple[Value, Places]]()
        self.sizes, self.dims = list[int](), dict[int, int]()
        dims, starts = shown.window.dims, arrays.starts(shown)
        self.every = np.ones((1,) * len(arrays.sizes), bool)
        for d, (dim, n, first) in enumerate(zip(dims, self.shape, starts, strict=True)):
            self.sizes.append(1 if dim.kind == "squeezed" else dim.size)
            if not first.any() and self.sizes[d] >= n:
                continue
            axis = self.axis_of(first, d)
            if arrays.sizes[axis] * self.sizes[d] < n:
                raise NotShifted("no program writes some elements of a result")
            self.dims[axis] = d
        if any(n > 1 and a not in self.dims for a, n in enumerate(arrays.sizes)):
            raise NotShifted("several programs write a block")

    def axis_of(self, first: Steps, d: int) -> int:
        """The grid axis whose index is that of a result's block."""
        for axis in range(len(self.all.sizes)):
            own = self.sizes[d] * self.all.along(axis)
            if axis not in self.dims and not (first - own).any():
                return axis
        raise NotShifted("a result's blocks do not follow the grid")

    def store(self) -> None:
        """Compute all elements of the result."""
        block, body = self.result.block, self.all.old.body
        uses = [op for op in body.ops if block in op.operands]
        if len(uses) != 1 or uses[0].name != "store":
            raise NotShifted("a result is not stored once")
        access = Access.of(uses[0])
        whole = covers_whole(block.ref.shape, access.index)
        if not whole or access.index_operands or access.mask is not None:
            raise NotShifted("a part of a block is stored")
        assert access.value is not None
        kept = [
            d for d, n in enumerate(self.result.window.dims) if n.kind != "squeezed"
        ]
        value = self.value(access.value, tuple(map(Place, kept)), self.every)
        self.b.store(self.all.whole(self.result.array, "out"), value)

    # --- tiles ---

    def value(self, value: Value, places: Places, at: Steps) -> Value:
        """A tile's elements at all positions; `at`: of programs that use them."""
        places = tuple(Place(None, p.at) if self.span(p) == 1 else p for p in places)
        key = value, places, at.shape, at.tobytes()
        if key not in self.known:
            self.known[key] = self.made(value, places, at)
        return self.known[key]

    def span(self, place: Place) -> int:
        """How many different elements a program takes."""
        return 1 if place.dim is None else self.sizes[place.dim]

    def made(self, value: Value, places: Places, at: Steps) -> Value:
        if value in self.all.old.ids:
            return self.index(self.all.old.ids.index(value))
        op = self.all.made.get(value)
        if op is None or op.regions or len(op.results) != 1:
            raise NotShifted("a value is not computed by an op")
        self.b.loc = op.loc
        if op.name == "load":
            return self.load(op, places, at)
        rule = _RULES.get(op.name)
        if rule is not None:
            return rule(self, op, places, at)
        if table()[op.name].effect is not Effect.PURE or not is_elementwise(op):
            raise NotShifted(f"{op.name!r} is not elementwise")
        which = self.which(op, at)
        operands = [
            self.value(v, places if v.type.shape else (), used)
            for v, used in zip(op.operands, which, strict=True)
        ]
        return self.b.op(op.name, *operands, **op.attrs)

    def which(self, op: Op, at: Steps) -> list[Steps]:
        """The programs that use each operand."""
        test = op.operands[0]
        while (made := self.all.made.get(test)) and made.name == "broadcast_in_dim":
            (test,) = made.operands
        table = self.all.table.of(test)
        if op.name != "select_n" or len(op.operands) != 3 or table is None:
            return [at] * len(op.operands)
        return [at, at & ~table.astype(bool), at & table.astype(bool)]

    def index(self, axis: int) -> Value:
        """The index of the program that computes each position."""
        if axis not in self.dims:
            return self.b.constant(0, TileType(self.shape, I32))
        d = self.dims[axis]
        at = self.b.op("iota", dim=d, type=TileType(self.shape, I32))
        return self.b.div(at, self.b.like(self.sizes[d], at))

    def element(self, place: Place) -> Value:
        """The numbers of a tile's elements."""
        b, type_ = self.b, TileType(self.shape, I32)
        if place.dim is None:
            return b.constant(place.at, type_)
        found, size = b.op("iota", dim=place.dim, type=type_), self.sizes[place.dim]
        if size < self.shape[place.dim]:
            found = b.rem(found, b.like(size, found))
        return b.add(found, b.like(place.at, found)) if place.at else found

    def constant(self, op: Op, places: Places, at: Steps) -> Value:
        return self.b.constant(op.attrs["value"], op.result.tile.with_shape(self.shape))

    def iota(self, op: Op, places: Places, at: Steps) -> Value:
        found = self.element(places[op.attrs["dim"]])
        return self.b.cast(found, op.result.tile.dtype)

    def broadcast(self, op: Op, places: Places, at: Steps) -> Value:
        (x,) = op.operands
        pairs = zip(x.tile.shape, op.attrs["dims"], strict=True)
        whole = op.result.tile.shape
        inner = (Place(None) if n == 1 != whole[d] else places[d] for n, d in pairs)
        return self.value(x, tuple(inner), at)

    def reshape(self, op: Op, places: Places, at: Steps) -> Value:
        """Dimensions of one element come and go."""
        (x,) = op.operands
        long = [p for p, n in zip(places, op.result.tile.shape, strict=True) if n != 1]
        if [n for n in x.tile.shape if n != 1] != [
            n for n in op.result.tile.shape if n != 1
        ]:
            raise NotShifted("a reshape moves elements")
        pending = iter(long)
        inner = (Place(None) if n == 1 else next(pending) for n in x.tile.shape)
        return self.value(x, tuple(inner), at)

    def transpose(self, op: Op, places: Places, at: Steps) -> Value:
        inner = [Place(None)] * len(places)
        for place, d in zip(places, op.attrs["perm"], strict=True):
            inner[d] = place
        return self.value(op.operands[0], tuple(inner), at)

    def slice(self, op: Op, places: Places, at: Steps) -> Value:
        if set(op.attrs["strides"]) - {1}:
            raise NotShifted("a slice has steps")
        pairs = zip(places, op.attrs["starts"], strict=True)
        moved = tuple(Place(p.dim, p.at + start) for p, start in pairs)
        return self.value(op.operands[0], moved, at)

    def pad(self, op: Op, places: Places, at: Steps) -> Value:
        x, fill = op.operands
        if any(op.attrs["interior"]):
            raise NotShifted("padding is inside a tile")
        pairs = zip(places, op.attrs["low"], strict=True)
        moved = tuple(Place(p.dim, p.at - low) for p, low in pairs)
        tests = [
            test
            for place, n in zip(moved, x.tile.shape, strict=True)
            for test in (self.is_from(0, place), self.is_before(n, place))
        ]
        if False in tests:
            return self.value(fill, (), at)
        found, rest = self.value(x, moved, at), self.value(fill, (), at)
        for test in tests:
            if isinstance(test, Value):
                found = self.b.select(test, found, rest)
        return found

    def joined(self, op: Op, places: Places, at: Steps) -> Value:
        axis, start, found = op.attrs["axis"], 0, None
        for piece in op.operands:
            end = start + piece.tile.shape[axis]
            here = self.is_from(start, places[axis])
            if here is not False and self.is_from(end, places[axis]) is not True:
                moved = [*places]
                moved[axis] = Place(places[axis].dim, places[axis].at - start)
                part = self.value(piece, tuple(moved), at)
                if found is not None and isinstance(here, Value):
                    part = self.b.select(here, part, found)
                found = part
            start = end
        if found is None:
            raise NotShifted("what is joined is not there")
        return found

    def is_from(self, limit: int, place: Place) -> Value | bool:
        """Whether elements are at least `limit`, where that is not known."""
        low, high = place.at, place.at + self.span(place) - 1
        if low >= limit or high < limit:
            return low >= limit
        element = self.element(place)
        return self.b.op("ge", element, self.b.like(limit, element))

    def is_before(self, limit: int, place: Place) -> Value | bool:
        found = self.is_from(limit, place)
        return self.b.op("not", found) if isinstance(found, Value) else not found

    # --- loads ---

    def load(self, op: Op, places: Places, at: Steps) -> Value:
        access = Access.of(op)
        if access.mask is not None:
            raise NotShifted("a load is masked")
        shown = self.all.windows.get(access.ref)
        array = access.ref if shown is None else shown.array
        if access.ref not in self.all.kernel.params and shown is None:
            raise NotShifted("it loads from a view")
        kinds = [d.kind for d in shown.window.dims] if shown is not None else []
        starts = self.all.starts(shown) if shown is not None else None
        entries, pending = iter(access.split_index()), iter(places)
        where = list[Place]()
        for k, n in enumerate(array.ref.shape):
            first = np.int64(0) * self.every if starts is None else starts[k]
            place = Place(None)
            if not kinds or kinds[k] != "squeezed":
                size = n if shown is None else shown.window.dims[k].size
                entry, operand = next(entries)
                inner, place = self.entry(entry, operand, size, pending)
                first = first + inner
            where.append(self.position(first, place, at))
        fill = shown.window.fill if shown is not None else None
        return self.elements(array, tuple(where), 0 if fill is None else fill)

    def entry(
        self,
        entry: At | Span | Gather,
        operand: Value | None,
        size: int,
        places: Iterator[Place],
    ) -> tuple[Steps, Place]:
        """Where an access starts in a block, and the elements that follow."""
        if not isinstance(entry, (At, Span)) or getattr(entry, "stride", 1) != 1:
            raise NotShifted("a load takes elements one by one")
        place = next(places) if isinstance(entry, Span) else Place(None)
        count = entry.size if isinstance(entry, Span) else 1
        if operand is None:
            return np.asarray(entry.start or 0), place
        return self.all.number(operand, self.all.table, size - count), place

    def position(self, first: Steps, place: Place, at: Steps) -> Place:
        """An array's element as a position of the result, moved."""
        ways: list[tuple[int | None, Steps]] = []
        if place.dim is None or place.dim not in self.dims.values():
            ways.append((place.dim, first))
        for axis, d in self.dims.items():
            if place.dim == d or (place.dim is None and self.sizes[d] == 1):
                ways.append((d, first - self.sizes[d] * self.all.along(axis)))
        for d, moved in ways:
            shape = np.broadcast_shapes(moved.shape, at.shape)
            used = np.broadcast_to(moved, shape)[np.broadcast_to(at, shape)]
            if not (used - used[:1]).any():
                return Place(d, place.at + (int(used[0]) if used.size else 0))
        raise NotShifted("blocks advance in another way than those of the result")

    def elements(self, array: Value, where: Places, fill: Scalar) -> Value:
        """An array's elements at all positions, each moved by a number."""
        b, found = self.b, self.all.array(array)
        self.parts.add((array, where))
        if len(self.parts) > MOST_PARTS:
            raise NotShifted("an element is computed from many others")
        dims = [p.dim for p in where if p.dim is not None]
        if len(set(dims)) < len(dims):
            raise NotShifted("it reads a diagonal")
        low, high, shape = [], [], []
        for place, n in zip(where, array.ref.shape, strict=True):
            size = 1 if place.dim is None else self.shape[place.dim]
            low.append(-place.at)
            high.append(place.at + size - n)
            shape.append(size)
            if place.at >= n or place.at + size <= 0:  # all past the end
                return b.constant(fill, TileType(self.shape, array.ref.dtype))
        if any((*low, *high)):
            zero = b.constant(fill, TileType((), array.ref.dtype))
            inner = (0,) * len(low)
            found = b.op(
                "pad", found, zero, low=tuple(low), high=tuple(high), interior=inner
            )
        if len(dims) < len(shape):
            found = b.op("reshape", found, shape=tuple(self.shape[d] for d in dims))
        if dims != sorted(dims):
            order = tuple(sorted(range(len(dims)), key=lambda n: dims[n]))
            found = b.op("transpose", found, perm=order)
        return b.broadcast(found, self.shape, sorted(dims))


_RULES: dict[str, Callable[[_Result, Op, Places, Steps], Value]] = {
    "constant": _Result.constant,
    "iota": _Result.iota,
    "broadcast_in_dim": _Result.broadcast,
    "reshape": _Result.reshape,
    "transpose": _Result.transpose,
    "slice": _Result.slice,
    "pad": _Result.pad,
    "concatenate": _Result.joined,
}
