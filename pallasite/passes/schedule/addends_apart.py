"""addends_apart: a kernel that maps and sums becomes one that maps, and the sums.

In: a kernel some of whose results are sums over programs: the first step sets a block
to zero, and every step adds to it. Out: a kernel with a result of what is added, before
it is summed, for each addition, in place of these; and a kernel of one program that
adds up these arrays. `whole_arrays.py` gives both to XLA, which fuses a sum with the
map that makes its addends; to backends they would be arrays in memory.

Proof: `find_sums` says of each axis along which a result stays that its block is zeroed
at the first step and otherwise only added to, with values that depend on no sum. An
addend's dimensions are those of a block that some window shows (`loop_dims.py`), or
axes of the grid; where each axis is in exactly one of them, every program writes its
addends to a place of its own. The numbers are added up in another order.
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Kernel,
    Op,
    Value,
    Window,
    walk,
)
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import dead_code, inline, is_elementwise, producers_of
from pallasite.ir.roles import Pipeline, Shown, number_of
from pallasite.ir.types import RefType
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.grid import analyze, find_pipeline, with_pipeline
from pallasite.passes.analysis.loop_dims import loop_dims
from pallasite.passes.analysis.sums import find_sums

Axes = tuple[int, ...]


class AddendsApart(NamedTuple):
    """A kernel in two.

    Attributes:
        addends: with the results that are no sums, then those to add up.
        total: adds them up; its results are the sums.
        sums: their positions among the results of the kernel.
    """

    addends: Kernel
    total: Kernel
    sums: tuple[int, ...]


def addends_apart(kernel: Kernel) -> AddendsApart | None:
    """The kernel in two; None if it has no sums, or is not known to be such a kernel.

    Args:
        kernel: what to rewrite.
    """
    try:
        return _Apart(kernel).result()
    except _NotApart:
        return None


class _NotApart(Exception):
    pass


def _check(holds: object) -> None:
    if not holds:
        raise _NotApart


class _Addend(NamedTuple):
    """A tile that programs add to a sum."""

    access: Access  # the store of the sum
    tile: Value
    reduced: Axes  # dimensions of the tile that a program sums itself
    axes: tuple[Axes, ...]  # per dimension of its array, the axes that number blocks
    array: Value


class _Unreduced(NamedTuple):
    """A tile, another one with its dimensions, and those that are summed."""

    tile: Value
    like: Value
    reduced: Axes


class _Apart:
    def __init__(self, kernel: Kernel):
        self.kernel, self.old = kernel, Pipeline.of(find_pipeline(kernel))
        self.made = producers_of(self.old.body) | producers_of(kernel.body)
        _check(not kernel.aliases and None not in self.old.grid)
        self.grid = [n or 0 for n in self.old.grid]
        self.info = analyze(kernel)
        dims = loop_dims(kernel)
        _check(dims is not None and not dims.refused)
        assert dims is not None
        self.dims = dims
        self.sums = {s.block: s for s in self.old.shown if self.is_part(s)}
        self.sums |= self.summed()
        _check(self.sums)
        self.adds = list[_Addend]()

    def is_part(self, shown: Shown) -> bool:
        """Whether a program stores sums, other than of whole rows."""
        stores = [o for o in self.old.body.ops if o.operands[:1] == (shown.block,)]
        if any(op.name != "store" for op in stores):
            return False
        found = [self.unreduced(Builder(), op.operands[1]) for op in stores]
        return any(
            d < one.like.tile.rank - 1 or not self.sees_all(one.like, d)
            for one in found
            if one is not None
            for d in one.reduced
        )

    def sees_all(self, tile: Value, d: int) -> bool:
        """Whether no other program has a part of a tile's dimension."""
        place = self.source(tile, d)
        return place is None or (
            place[0].array.ref.shape[place[1]] <= tile.tile.shape[d]
        )

    def summed(self) -> dict[Value, Shown]:
        """The results that several programs write, all of which are to be sums."""
        found, stays = dict[Value, Shown](), dict[Value, set[int]]()
        for shown, moves in zip(self.old.shown, self.info.windows, strict=True):
            still = {
                a for a, n in enumerate(self.grid) if a not in moves.axes and n > 1
            }
            if shown.array in self.kernel.outputs and still:
                found[shown.block], stays[shown.block] = shown, still
        for axis in set[int]().union(*stays.values()):
            blocks = {block for block, axes in stays.items() if axis in axes}
            _check(find_sums(self.old.op, self.info, axis, blocks).reason is None)
        return found

    def result(self) -> AddendsApart:
        shown = [s for s in self.old.shown if s.block not in self.sums]
        body = Builder(self.old.op.loc)
        for op in self.old.body.ops:
            if op.name == "cond" and self.only_zeroes(op):
                continue
            access = Access.of(op) if op.name == "store" else None
            if access is None or access.ref not in self.sums:
                body.ops.append(op)
                continue
            addend, made = self.addend(body, access)
            self.adds.append(addend)
            shown.append(made)
            body.store(made.block, addend.tile)
        loads = {
            op for op in body.ops if op.name == "load" and op.operands[0] in self.sums
        }
        body.ops = [op for op in body.ops if op not in loads]
        new = Block((*self.old.ids, *(s.block for s in shown)), tuple(body.ops))
        # Sums were why their axes had an order; another reason would be seen again.
        free = {"sequential": "arbitrary"}
        semantics = tuple(free.get(kind, kind) for kind in self.old.semantics)
        pipeline = self.old.showing(shown, new).with_(semantics=semantics).to_op()
        sums = {s.array for s in self.sums.values()}
        outputs = [p for p in self.kernel.outputs if p not in sums]
        outputs += [addend.array for addend in self.adds]
        addends = with_pipeline(self.kernel, pipeline).with_(
            params=(*self.kernel.inputs, *outputs), num_outputs=len(outputs)
        )
        addends = dead_code(addends)
        used = {v for op in walk(addends.body) for v in op.operands}
        _check(not used.intersection(self.sums))
        places = [n for n, p in enumerate(self.kernel.outputs) if p in sums]
        return AddendsApart(addends, self.total(), tuple(places))

    def only_zeroes(self, op: Op) -> bool:
        """Whether a branch only starts sums; `find_sums` has seen when it does."""
        inside = [o for region in op.regions for o in walk(region)]
        writes = [o for o in inside if table()[o.name].effect is Effect.WRITE]
        return not op.results and all(
            o.name == "store" and o.operands[0] in self.sums for o in writes
        )

    def addend(self, b: Builder, access: Access) -> tuple[_Addend, Shown]:
        """What a store adds to a sum, and the window that it is written to."""
        value = access.value
        assert value is not None
        _check(access.mask is None)
        if (add := self.made.get(value)) is not None and add.name == "add":
            x, y = add.operands
            value = y if self.is_load(x) else x if self.is_load(y) else value
        place = self.place(access)
        # A block that is not added to has at most one store to each place.
        earlier = [each.access for each in self.adds if each.access.ref is access.ref]
        stored = [self.place(each) for each in earlier]
        _check(value is not access.value or place not in stored)
        found = self.unreduced(b, value) or _Unreduced(value, value, ())
        tile, like, reduced = found
        rank = tile.tile.rank
        _check(rank)
        places = [self.source(like, d) for d in range(rank)]
        sources = [place for place in places if place is not None]
        _check(len(sources) == rank)
        axes = [self.axes_of(shown, d) for shown, d in sources]
        own = [a for each in axes for a in each]
        more = [a for a, n in enumerate(self.grid) if n > 1 and a not in own]
        _check(len({*own, *more}) == len(own) + len(more))
        sizes = zip(tile.tile.shape, axes, strict=True)
        shape = [n * prod(self.grid[a] for a in each) for n, each in sizes]
        full = [shown.array.ref.shape[d] for shown, d in sources]
        _check(shape == full)
        ref = RefType((*(self.grid[a] for a in more), *shape), tile.tile.dtype, "any")
        array = Value(ref, f"{access.ref.name}_addends")
        window = [BlockDim(1, "squeezed")] * len(more)
        window += map(BlockDim, tile.tile.shape)
        ids = [Value(v.type, v.name) for v in self.old.ids]
        index = Builder(self.old.op.loc)
        yields = [ids[a] for a in more]
        yields += [inline(index, s.index_map, ids)[d] for s, d in sources]
        block = Value(replace(ref, shape=tile.tile.shape, space="block"), array.name)
        made = Shown(
            array, Window(tuple(window), "out"), index.block(ids, yields), block
        )
        all_axes = (*((a,) for a in more), *axes)
        return _Addend(access, tile, reduced, all_axes, array), made

    def is_load(self, value: Value) -> bool:
        op = self.made.get(value)
        return op is not None and op.name == "load" and op.operands[0] in self.sums

    def place(self, access: Access) -> list[int]:
        """Where a block is stored to, which has all of it or single positions."""
        shape, found = access.ref.ref.shape, list[int]()
        for n, (entry, start) in zip(shape, access.split_index(), strict=True):
            if isinstance(entry, At):
                number = entry.start
                if start is not None:
                    number = number_of(self.made, start)
                _check(isinstance(number, int) and 0 <= number < n)
                assert isinstance(number, int)
                found.append(number)
            else:
                _check(covers_whole((n,), (entry,)))
                found.append(0)
        return found

    def unreduced(self, b: Builder, value: Value) -> _Unreduced | None:
        """A tile whose sum has the elements of a value; None if nothing is summed.

        What the value is multiplied by after the sum multiplies the tile. It may be
        rounded to a narrower type, which the sum of all is, too.
        """
        op = self.made.get(value)
        if op is None or not value.tile.dtype.is_float:
            return None
        if op.name == "reduce" and op.attrs["kind"] == "sum":
            (tile,) = op.operands
            return _Unreduced(tile, tile, op.attrs["axes"])
        moves = op.name in ("reshape", "broadcast_in_dim", "cast")
        if moves and op.operands[0].tile.size == value.tile.size:
            return self.unreduced(b, op.operands[0])
        linear = table()[op.name].linear if is_elementwise(op) else ()
        for n in linear:
            found = self.unreduced(b, op.operands[n])
            if found is None:
                continue
            shape = found.tile.tile.shape
            kept = [d for d in range(len(shape)) if d not in found.reduced]
            operands = list[Value]()
            for m, each in enumerate(op.operands):
                if m != n:
                    each = b.op("reshape", each, shape=tuple(shape[d] for d in kept))
                    each = b.broadcast(each, shape, kept)
                operands.append(found.tile if m == n else each)
            return found._replace(tile=b.op(op.name, *operands, **op.attrs))
        return None

    def source(self, tile: Value, d: int) -> tuple[Shown, int] | None:
        """A window that shows a dimension of a tile, and the dimension there."""
        for dim in self.dims.dims:
            if dim.members.get(tile) != d or dim.is_twice:
                continue
            for number, place in dim.windows:
                shown = self.old.shown[number]
                size = shown.window.dims[place].size
                kinds = {each.kind for each in shown.window.dims}
                plain = kinds <= {"blocked", "squeezed"}
                if plain and size == tile.tile.shape[d]:
                    return shown, place
        return None

    def axes_of(self, shown: Shown, d: int) -> Axes:
        """The axes whose indices are the digits of a block's number, the first most."""
        forms = Forms(shown.index_map.params)
        forms.add_ops(shown.index_map.ops)
        affine = forms.of(shown.index_map.yields[d]).affine
        _check(affine is not None and affine.const == 0)
        assert affine is not None
        sizes = zip(affine.coeffs, self.grid, strict=True)
        own = [(c, a) for a, (c, n) in enumerate(sizes) if c and n > 1]
        place = 1
        for c, a in sorted(own):
            _check(c == place)
            place *= self.grid[a]
        return tuple(a for _, a in sorted(own, reverse=True))

    # --- adding up ---

    def total(self) -> Kernel:
        """One program that adds up the arrays of addends."""
        b = Builder(self.old.op.loc)
        shown = list[Shown]()
        totals = dict[Value, Value]()
        for addend in self.adds:
            shown.append(_whole(addend.array, "in"))
            value = self.sum_of(b, addend, b.load(shown[-1].block))
            ref = addend.access.ref
            totals[ref] = b.add(totals[ref], value) if ref in totals else value
        outputs = list[Value]()
        for array in self.kernel.outputs:
            for ref, value in totals.items():
                if self.sums[ref].array is array:
                    shown.append(_whole(array, "out"))
                    b.store(shown[-1].block, b.cast(value, array.ref.dtype))
                    outputs.append(array)
        _check(len(outputs) == len(self.sums))
        body = b.block([each.block for each in shown])
        new = self.old.with_(grid=(), semantics=()).showing(shown, body)
        params = (*(addend.array for addend in self.adds), *outputs)
        made = self.kernel.with_(
            name=f"{self.kernel.name}_total",
            params=params,
            num_outputs=len(outputs),
            body=Block((), (new.to_op(),)),
        )
        return made

    def sum_of(self, b: Builder, addend: _Addend, value: Value) -> Value:
        """The sum of an array's addends, as the array that it is added to."""
        shown = self.sums[addend.access.ref]
        places = [self.axes_of(shown, d) for d in range(shown.array.ref.rank)]
        kept = [a for each in places for a in each]
        # Per dimension of the addends: the axes of the grid, then the block.
        tile = addend.tile.tile.shape
        more = len(addend.axes) - len(tile)
        split, shape = list[int | None](), list[int]()
        for n, axes in enumerate(addend.axes):
            split += [*axes, *([None] if n >= more else [])]
            shape += [self.grid[a] for a in axes]
            shape += [tile[n - more]] if n >= more else []
        value = b.op("reshape", value, shape=tuple(shape))
        blocks = [n for n, a in enumerate(split) if a is None]
        gone = [n for n, a in enumerate(split) if a is not None and a not in kept]
        gone += [blocks[d] for d in addend.reduced]
        value = b.op("reduce", value, kind="sum", axes=tuple(sorted(gone)))
        left = [a for n, a in enumerate(split) if n not in gone]
        order = [left.index(a) for a in kept]
        order += [n for n, a in enumerate(left) if a is None]
        value = b.op("transpose", value, perm=tuple(order))
        lead = tuple(self.grid[a] for a in kept)
        value = self.placed(b, addend.access, value, lead)
        # The axes of each dimension before its part of the block.
        order, at, taken = list[int](), len(kept), 0
        for dim, axes in zip(shown.window.dims, places, strict=True):
            order += range(taken, taken + len(axes))
            taken += len(axes)
            if dim.kind != "squeezed":
                order.append(at)
                at += 1
        value = b.op("transpose", value, perm=tuple(order))
        return b.op("reshape", value, shape=shown.array.ref.shape)

    def placed(
        self, b: Builder, access: Access, value: Value, lead: tuple[int, ...]
    ) -> Value:
        """Blocks that are zero outside of what is stored to."""
        block, none = access.ref.ref.shape, (0,) * len(lead)
        pairs = zip(block, access.index, strict=True)
        part = [1 if isinstance(entry, At) else n for n, entry in pairs]
        value = b.op("reshape", value, shape=(*lead, *part))
        if part == [*block]:
            return value
        low = self.place(access)
        high = [n - m - p for n, m, p in zip(block, part, low, strict=True)]
        zero = b.constant(0, value.tile.with_shape(()))
        interior = (0,) * value.tile.rank
        low, high = (*none, *low), (*none, *high)
        return b.op("pad", value, zero, low=low, high=high, interior=interior)


def _whole(array: Value, mode: str) -> Shown:
    window = Window(tuple(map(BlockDim, array.ref.shape)), mode)
    b = Builder()
    zeros = [b.index(0) for _ in array.ref.shape]
    block = Value(replace(array.ref, space="block"), array.name)
    return Shown(array, window, b.block((), zeros), block)
