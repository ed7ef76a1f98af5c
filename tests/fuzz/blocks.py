"""Random kernels whose bodies work along a dimension of their blocks.

`block_kernel(choices)` gives a Case in which at least one dimension, the *rows*, is in
every output: rows are masked, reduced across, multiplied, carried in scratch along
another axis, looked up and laid out in several ways, but never mixed with each other
(or only where `mixed` is drawn). All numbers are small integers, so that the order of
sums makes no difference and results are equal to the bit.
"""

from collections.abc import Sequence

import numpy as np

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Kernel, Span, Value, Window
from pallasite.ir.verify import verify
from tests.fuzz.choices import Choices, chance, pick
from tests.fuzz.generate import Case

LIMIT = 20.0  # of numbers, kept by clamps


def block_kernel(choices: Choices) -> Case:
    """A random kernel with rows, and inputs for it."""
    return _Maker(choices).case()


class _Maker:
    def __init__(self, choices: Choices):
        self.choices = choices
        self.rng = np.random.default_rng(choices.integer(0, 2**16))
        self.plain = self.chance(50)  # as most kernels are: windows follow one axis
        self.rows = self.pick(4, 8, 6, 12, 2)
        self.cols = self.pick(4, 1, 3, 6)
        self.depth = self.pick(4, 2, 8)
        # Axes: one that numbers blocks of rows, others that steps go along.
        self.grid: list[int] = [self.pick(2, 1, 3, 4)]
        self.row_axis = 0
        if self.chance(60):
            self.grid.append(self.pick(2, 3, 1))
        if self.chance(25):
            self.grid.insert(0, 2)
            self.row_axis = 1
        self.step_axis = (
            len(self.grid) - 1 if len(self.grid) > 1 + self.row_axis else None
        )
        self.short = self.integer(0, self.rows - 1) if self.chance(40) else 0
        if self.chance(10):  # more than a block is missing: only where nothing clamps
            self.short = min(self.rows - 1, self.short + self.rows // 2)
        self.ids = tuple(Value(T.INDEX, name) for name in "abc"[: len(self.grid)])
        self.inputs: list[Value] = []
        self.arrays: list[np.ndarray] = []
        self.outputs: list[Value] = []
        self.aliases: list[tuple[int, int]] = []
        self.windows: list[tuple[Value, Window, Block, Value]] = []
        self.outside, self.body = Builder(), Builder()
        self.pool: list[Value] = []  # tiles of shape (rows,) or (rows, cols)

    # --- choices ---

    def pick(self, *options):
        return pick(self.choices, options)

    def integer(self, low: int, high: int) -> int:
        return self.choices.integer(low, high)

    def chance(self, percent: int) -> bool:
        return chance(self.choices, percent)

    # --- the kernel ---

    def case(self) -> Case:
        self.prefetch = self.param(
            self.rng.integers(0, self.grid[self.row_axis], 4).astype(np.int32),
            "table",
            "smem",
        )
        for _ in range(self.integer(1, 3)):
            self.add_input()
        if self.chance(40):
            self.add_product()
        if self.chance(40):
            self.add_scratch()
        if self.chance(25):
            self.add_counter()
        for _ in range(self.integer(2, 6)):
            self.pool.append(self.line(self.body, self.pool))
        if self.chance(30):
            self.add_branch()
        if self.chance(30):
            self.add_loop()
        for _ in range(self.integer(1, 2)):
            self.add_output()
        body = self.body.block((*self.ids, *(block for *_, block in self.windows)))
        self.outside.emit(
            "pipeline",
            *(array for array, *_ in self.windows),
            regions=(*(m for _, _, m, _ in self.windows), body),
            grid=tuple(self.grid),
            windows=tuple(w for _, w, _, _ in self.windows),
            semantics=("arbitrary",) * len(self.grid),
        )
        params = (*self.inputs, *self.outputs)
        block, aliases = self.outside.block(), tuple(self.aliases)
        kernel = Kernel("blocks", params, block, len(self.outputs), aliases)
        verify(kernel)
        return Case(kernel, tuple(self.arrays))

    def param(self, array: np.ndarray, name: str, space: str = "any") -> Value:
        dtype = T.dtype_of(array.dtype)
        assert dtype is not None
        ref = Value(T.RefType(array.shape, dtype, space), name)
        self.inputs.append(ref)
        self.arrays.append(array)
        return ref

    def numbers(self, shape: Sequence[int]) -> np.ndarray:
        return self.rng.integers(-5, 6, shape).astype(np.float32)

    def tile(self, *shape: int) -> T.TileType:
        return T.TileType(shape, T.F32)

    # --- windows ---

    def row_map(self, kinds: Sequence[str], length: int):
        """How the number of a block of rows depends on the grid."""
        kind, axis = self.pick(*kinds), self.row_axis

        def number(b: Builder, ids: Sequence[Value]) -> Value:
            i = ids[axis]
            if kind == "backwards":
                return b.sub(b.index(length - 1), i)
            if kind == "looked up":
                return b.load(self.prefetch, (At(None),), [b.rem(i, b.index(4))])
            if kind == "past":  # numbers past the end are the last block
                return b.add(i, b.index(1))
            return b.index(0) if kind == "fixed" else i

        return number

    def show(
        self,
        array: Value,
        sides: Sequence[tuple[BlockDim, object]],
        mode: str,
        fill: float | None = None,
    ) -> Value:
        window = Window(tuple(dim for dim, _ in sides), mode, fill=fill)
        ref = Value(T.RefType(window.block_shape, T.F32), array.name + "_block")
        b, ids = (
            Builder(),
            tuple(Value(T.INDEX, name) for name in "abc"[: len(self.grid)]),
        )
        yields = [number(b, ids) for _, number in sides]  # type: ignore[operator]
        self.windows.append((array, window, b.block(ids, yields), ref))
        return ref

    def other_side(self, size: int):
        """A side that has all of a dimension, or moves along the steps."""
        step = self.step_axis
        if step is not None and self.chance(50):
            return self.grid[step] * size, BlockDim(size), lambda b, ids: ids[step]
        return size, BlockDim(size), lambda b, ids: b.index(0)

    def sides(self, wide: bool, kinds: Sequence[str], length: int):
        """Rows, and maybe columns and a squeezed dimension, in any order."""
        blocks = self.grid[self.row_axis] if kinds != ("fixed",) else 1
        rows = blocks * self.rows - self.short
        found = [(rows, BlockDim(self.rows), self.row_map(kinds, length))]
        if wide:
            found.append(self.other_side(self.cols))
        if self.chance(20) and not self.plain:
            axis = self.integer(0, len(self.grid) - 1)
            side = (self.grid[axis], BlockDim(1, "squeezed"), lambda b, ids: ids[axis])
            found.insert(self.integer(0, len(found)), side)
        return found

    def add_input(self) -> None:
        wide = self.chance(70)
        kinds = ("own", "own", "own", "backwards", "looked up", "past", "fixed")
        kinds = ("own",) if self.plain else kinds
        found = self.sides(wide, kinds, self.grid[self.row_axis])
        swapped = wide and self.chance(30)
        found = found[::-1] if swapped else found
        array = self.param(self.numbers([n for n, *_ in found]), "x")
        fill = float(self.integer(-3, 3)) if self.chance(50) else None
        block = self.show(array, [side[1:] for side in found], "in", fill)
        value = self.body.load(block)
        if swapped:
            value = self.body.transpose(value, perm=(1, 0))
        self.pool.append(value)

    # --- code: every tile of the pool has rows first ---

    def line(self, b: Builder, pool: Sequence[Value]) -> Value:
        kind = self.pick(*(_LINES[:-2] if self.plain else _LINES))
        x = self.pick(*pool)
        return self.small(b, getattr(self, f"line_{kind}")(b, x, pool))

    def small(self, b: Builder, x: Value) -> Value:
        bounds = (b.constant(v, self.tile()) for v in (-LIMIT, LIMIT))
        low, high = bounds
        return b.clamp(low, x, high)

    def like(self, b: Builder, x: Value, shape: tuple[int, ...]) -> Value:
        """A tile of rows with another number of dimensions."""
        if x.tile.shape == shape:
            return x
        if len(shape) == 2:
            return b.broadcast(x, shape, (0,))
        return b.op("reduce", x, kind=self.pick("max", "sum"), axes=(1,))

    def line_binary(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        y = self.like(b, self.pick(*pool), x.tile.shape)
        return b.op(self.pick("add", "sub", "max", "mul"), x, y)

    def line_widen(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        return self.like(b, x, self.pick((self.rows, self.cols), (self.rows,)))

    def line_positions(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        """The number of each row in the block or in the array, or of each column."""
        shape = x.tile.shape
        dim = self.integer(0, len(shape) - 1)
        line = b.op("iota", type=T.TileType(shape, T.I32), dim=dim)
        if self.chance(60):
            i = b.mul(
                self.ids[self.row_axis], b.index(self.pick(self.rows, self.rows, 1))
            )
            line = b.add(b.broadcast(i, shape), line)
        if self.chance(30):
            line = b.mul(line, b.broadcast(b.index(self.pick(2, -1)), shape))
        return b.add(x, b.cast(line, T.F32))

    def line_masked(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        shape = x.tile.shape
        line = b.op("iota", type=T.TileType(shape, T.I32), dim=0)
        first = b.mul(self.ids[self.row_axis], b.index(self.rows))
        line = b.add(line, b.broadcast(first, shape))
        end = b.constant(self.integer(0, 3 * self.rows), T.TileType(shape, T.I32))
        other = self.like(b, self.pick(*pool), shape)
        return b.select(b.lt(line, end), x, other)

    def line_swapped(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        if x.tile.rank < 2:
            return b.neg(x)
        return b.transpose(b.neg(b.transpose(x, perm=(1, 0))), perm=(1, 0))

    def line_reshaped(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        shape = x.tile.shape
        wider = b.reshape(x, shape=self.pick((1, *shape), (*shape, 1)))
        return b.reshape(b.neg(wider), shape=shape)

    def line_scanned(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        if x.tile.rank < 2:
            return b.abs(x)
        kind = self.pick("sum", "max")
        return b.op("scan", x, kind=kind, axis=1, reverse=self.chance(50))

    def line_mixed(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        if not self.chance(20):
            return b.square(x)
        return b.op("rev", x, axes=(0,))

    def line_whole(self, b: Builder, x: Value, pool: Sequence[Value]) -> Value:
        """Rows of an array without a window, from a place that may be clamped."""
        size, stride = self.pick((self.rows, 1), (self.rows, 2))
        length = (size - 1) * stride + 1 + self.integer(0, 3)
        ref = self.param(self.numbers((length,)), "whole")
        if self.chance(50):
            return b.add(
                b.load(ref, (Span(0, size, stride),)), self.like(b, x, (size,))
            )
        start = b.add(self.ids[-1], b.index(self.integer(-1, 2)))
        part = b.load(ref, (Span(None, size, stride),), [start])
        return b.add(part, self.like(b, x, (size,)))

    # --- larger pieces ---

    def add_product(self) -> None:
        """Rows times a matrix: of which windows show all, or a part at each step."""
        b = self.body
        depth, dim, number = self.other_side(self.depth)
        rows = self.grid[self.row_axis] * self.rows - self.short
        own = (BlockDim(self.rows), lambda b, ids: ids[self.row_axis])
        x = self.param(self.numbers((rows, depth)), "left")
        y = self.param(self.numbers((depth, self.cols)), "right")
        whole = (BlockDim(self.cols), lambda b, ids: b.index(0))
        left = b.load(self.show(x, [own, (dim, number)], "in"))
        right = b.load(self.show(y, [(dim, number), whole], "in"))
        if self.chance(50):
            left = b.neg(left)
        if self.chance(30):
            line = b.op("iota", type=T.TileType(right.tile.shape, T.I32), dim=0)
            right = b.add(right, b.cast(line, T.F32))
        self.pool.append(self.small(b, _dot(b, left, right)))

    def add_scratch(self) -> None:
        """Sums carried along the steps, begun at the first."""
        b, value = self.body, self.pick(*self.pool)
        type_ = T.RefType(value.tile.shape, T.F32, "vmem")
        ref = self.outside.op("alloc", type=type_)
        start = b.constant(float(self.integer(-2, 2)), value.tile)
        if self.step_axis is None:
            b.store(ref, start)
        else:
            then = Builder()
            then.store(ref, start)
            first = b.eq(self.ids[self.step_axis], b.index(0))
            b.emit("cond", b.cast(first, T.I32), regions=(Block(), then.block()))
        old = b.load(ref)
        new = self.small(b, b.op(self.pick("add", "max"), old, value))
        b.store(ref, new)
        self.pool += [old, new]

    def add_counter(self) -> None:
        """A number in scratch without rows, counted from a first step."""
        b, x = self.body, self.pick(*self.pool)
        ref = self.outside.op("alloc", type=T.RefType((1,), T.F32, "smem"))
        then = Builder()
        then.store(ref, then.constant(0.0, self.tile()), (At(0),))
        first = b.constant(True, T.TileType((), T.BOOL))
        for i in self.ids[self.integer(0, len(self.ids)) :]:
            first = b.and_(first, b.eq(i, b.index(0)))
        b.emit("cond", b.cast(first, T.I32), regions=(Block(), then.block()))
        new = b.add(b.load(ref, (At(0),)), b.constant(1.0, self.tile()))
        b.store(ref, new, (At(0),))
        self.pool.append(b.add(x, b.broadcast(new, x.tile.shape)))

    def add_branch(self) -> None:
        """One of two tiles, by a number that is the same for all rows of a block."""
        b, x = self.body, self.pick(*self.pool)
        shape = x.tile.shape
        branches = []
        for _ in range(2):
            inner = Builder()
            branches.append(
                (inner, self.like(inner, self.line(inner, self.pool), shape))
            )
        axis = len(self.grid) - 1 if self.plain or self.chance(70) else self.row_axis
        which = b.rem(self.ids[axis], b.index(2))
        regions = [inner.block((), (made,)) for inner, made in branches]
        self.pool += b.emit("cond", which, regions=regions)

    def add_loop(self) -> None:
        b, x = self.body, self.pick(*self.pool)
        inner, i, carried = Builder(), Value(T.INDEX, "n"), Value(x.tile, "carried")
        made = self.line(inner, [*self.pool, carried])
        step = inner.add(carried, self.like(inner, made, x.tile.shape))
        region = inner.block((i, carried), (self.small(inner, step),))
        bounds = [b.index(0), b.index(self.integer(0, 3)), b.index(1)]
        self.pool += b.emit("for", *bounds, x, regions=(region,))

    def add_output(self) -> None:
        """A result with a block of rows for each program, or seen again along steps."""
        b, value = (
            self.body,
            self.pool[-1] if self.chance(60) else self.pick(*self.pool),
        )
        kinds = ("own",) if self.plain or self.chance(80) else ("backwards",)
        sides = self.sides_of_output(value.tile.shape, kinds)
        shape = [n for n, *_ in sides]
        out = Value(T.RefType(tuple(shape), T.F32, "any"), "o")
        self.outputs.append(out)
        show = [side[1:] for side in sides]
        if self.chance(20):
            source = self.param(self.numbers(shape), "alias")
            self.aliases.append((len(self.inputs) - 1, len(self.outputs) - 1))
            if self.chance(50):
                value = b.add(value, b.load(self.show(source, show, "in")))
        block = self.show(out, show, "out")
        if self.step_axis is None or not self.chance(40):
            b.store(block, value)
            return
        then = Builder()
        then.store(block, then.constant(1.0, value.tile))
        first = b.eq(self.ids[self.step_axis], b.index(0))
        b.emit("cond", b.cast(first, T.I32), regions=(Block(), then.block()))
        b.store(block, self.small(b, b.add(b.load(block), value)))

    def sides_of_output(self, shape: Sequence[int], kinds: Sequence[str]):
        rows = self.grid[self.row_axis] * self.rows - self.short
        blocks = self.grid[self.row_axis]
        sides = [(rows, BlockDim(self.rows), self.row_map(kinds, blocks))]
        sides += [(n, BlockDim(n), lambda b, ids: b.index(0)) for n in shape[1:]]
        if self.row_axis:  # the axis before the rows' has results of its own
            sides.insert(
                self.integer(0, 1),
                (self.grid[0], BlockDim(1, "squeezed"), lambda b, ids: ids[0]),
            )
        return sides


_LINES = (
    "binary",
    "binary",
    "widen",
    "positions",
    "masked",
    "swapped",
    "reshaped",
    "scanned",
    "whole",
    "mixed",
)


def _dot(b: Builder, left: Value, right: Value) -> Value:
    dims = dict(contract=((1,), (0,)), batch=((), ()))
    return b.op("dot", left, right, dtype=T.F32, precision=None, **dims)
