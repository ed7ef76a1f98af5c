"""Random kernels with inputs: `random_kernel(choices, family)` gives a Case.

Kernels are built as IR, so that every row of the op table can occur, and are legal and
free of bugs by construction: no result depends on an unspecified value, on the order of
equal keys or on the last digit of a float. So all engines agree (`agreement.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.levels import level_of
from pallasite.ir.nodes import At, Block, BlockDim, Kernel, Span, Value, Window
from pallasite.ir.verify import verify
from tests.fuzz.arithmetic import elementwise
from tests.fuzz.choices import Choices
from tests.fuzz.control import control_op
from tests.fuzz.guards import guard, when
from tests.fuzz.inputs import random_array
from tests.fuzz.memory import add_product, allocate, load_all, memory_op, store_all
from tests.fuzz.shapes import tile_op
from tests.fuzz.softmax import softmax
from tests.fuzz.windows import (
    Side,
    covering,
    hangs_over,
    index_emitter,
    input_side,
    inside,
    map_of,
    shape_of,
    whole_side,
    window_of,
)
from tests.fuzz.writer import BITS, EXACT, ROUGH, Memory, World, Writer

ALWAYS = (T.F32, T.I32, T.BOOL)
OTHERS = tuple(T.DTYPES[n] for n in ("bf16", "f16", "i8", "u8", "i16", "u16", "u32"))
WIDE = (T.F64, T.I64, T.DTYPES["u64"])
ON_TPU = tuple(T.DTYPES[n] for n in ("bf16", "u32", "i16", "i8", "u8"))
MAX_SINKS = 4
BYTES = 384  # enough for the choices of nearly every kernel


@dataclass(frozen=True, eq=False)
class Case:
    """A kernel and arrays to run it on."""

    kernel: Kernel
    arrays: tuple[np.ndarray, ...]
    rough: frozenset[Value] = frozenset()  # values engines round differently
    exact: frozenset[Value] = frozenset()  # results that get none of those

    def __repr__(self) -> str:
        arrays = "\n".join(
            f"{a.dtype}{list(a.shape)}: {a.tolist()}" for a in self.arrays
        )
        return f"{self.kernel.text}\ninputs:\n{arrays}\n"


@dataclass(frozen=True)
class Family:
    """What kernels of one kind are made of."""

    lines: tuple[int, int]
    steps: tuple[tuple[str, int], ...]  # kinds of code, with weights
    axes: tuple[int, ...] = (1, 0, 2)
    plain_windows: bool = True
    features: int = 0  # chance in percent of each feature below
    sinks: int = MAX_SINKS


FAMILIES = {
    "elementwise": Family((4, 10), (("elementwise", 1),)),
    "tiles": Family((3, 7), (("tile", 6), ("elementwise", 2), ("softmax", 1))),
    "memory": Family(
        (3, 8), (("memory", 6), ("elementwise", 1), ("tile", 1)), features=15
    ),
    "control": Family(
        (1, 4),
        (
            ("elementwise", 4),
            ("control", 8),
            ("memory", 6),
            ("tile", 2),
            ("softmax", 1),
        ),
        features=10,
    ),
    "grids": Family(
        (1, 3),
        (("elementwise", 2), ("tile", 1), ("memory", 1), ("control", 1)),
        axes=(1, 2, 3, 0),
        plain_windows=False,
        features=30,
    ),
    "products": Family(
        (1, 4),
        (("product", 4), ("memory", 2), ("elementwise", 1), ("control", 1)),
        plain_windows=False,
        features=30,
    ),
}


def random_kernel(
    choices: Choices, family: str, wide: bool = False, for_tpu: bool = False
) -> Case:
    """A random kernel and its inputs.

    Args:
        choices: makes every choice.
        family: one of FAMILIES, or "edges".
        wide: use 64-bit types too.
        for_tpu: only windows and arrays of types that a TPU takes.
    """
    some = [d for d in OTHERS if choices.integer(0, 3) == 3]
    dtypes = (*ALWAYS, *WIDE, *some) if wide else (*ALWAYS, *some)
    if for_tpu:
        dtypes = (T.F32, T.I32, *(d for d in some if d in ON_TPU))
    world = World(choices, dtypes, for_tpu)
    maker = Maker(world, FAMILIES.get(family, FAMILIES["elementwise"]))
    kernel = maker.edges() if family == "edges" else maker.kernel()
    verify(kernel)
    rough = frozenset(v for v, level in world.level.items() if level == ROUGH)
    return Case(kernel, tuple(maker.arrays), rough, frozenset(maker.exact))


class Maker:
    """Builds one kernel: parameters, windows, then the body, then more results."""

    def __init__(self, world: World, family: Family):
        self.world, self.family = world, family
        self.rng = np.random.default_rng(world.integer(0, 2**16))
        self.inputs: list[Value] = []
        self.arrays: list[np.ndarray] = []
        self.outputs: list[Value] = []
        self.exact: set[Value] = set()
        self.aliases: list[tuple[int, int]] = []
        # Per window: its array, the window, its map and the ref the body sees.
        self.windows: list[tuple[Value, Window, Block, Value]] = []
        self.outside = Builder()  # code before the pipeline
        self.grid = self._grid()
        self.prefetch: Value | None = None
        self.body = Writer(world)
        self.ids = tuple(Value(T.INDEX, name) for name in "ijkl"[: len(self.grid)])
        for i in self.ids:
            self.body.add(i)
            world.used.add(i)

    # --- whole kernels ---

    def kernel(self) -> Kernel:
        world, family = self.world, self.family
        if self.feature():
            self.add_prefetch()
        for _ in range(world.integer(1, 3)):
            self.add_input()
        if self.feature():
            self.add_whole_input()
        features = (
            self.add_scratch,
            self.add_work_output,
            self.add_whole_output,
            self.add_accumulator,
            self.add_guarded_steps,
            self.add_alias,
            self.add_rows_in_place,
            self.add_inner_pipeline,
        )
        for add in features:
            if self.feature():
                add()
        for _ in range(world.integer(*family.lines)):
            self.step(self.body)
        for value in self._results():
            self.add_sink(value)
        return self.finish()

    def feature(self) -> bool:
        return self.family.features > 0 and self.world.chance(self.family.features)

    def step(self, w: Writer) -> None:
        kinds = [kind for kind, weight in self.family.steps for _ in range(weight)]
        kind = w.world.pick(kinds)
        if kind == "control":
            control_op(w, self.step)
        else:
            _STEPS[kind](w)

    def _grid(self) -> tuple[int, ...]:
        world = self.world
        grid: tuple[int, ...] = ()
        for _ in range(world.pick(self.family.axes)):
            size = world.pick((2, 1, 3))
            grid += (size if prod(grid) * size <= 8 else 1,)
        if grid and not self.family.plain_windows and world.chance(8):
            empty = world.integer(0, len(grid) - 1)
            grid = (*grid[:empty], 0, *grid[empty + 1 :])
        return grid

    def _results(self) -> list[Value]:
        unused = self.body.unused()
        return unused[: self.family.sinks] or [self.body.any_tile()]

    def finish(self) -> Kernel:
        """The kernel around the body; some grid sizes are read when it runs."""
        grid: list[int | None] = list(self.grid)
        sizes = []
        if grid and self.feature():
            ref = self.add_param(np.array(self.grid, np.int32), "sizes", "smem")
            for a in range(len(grid)):
                if self.world.chance(50):
                    grid[a] = None
                    sizes.append(self.outside.load(ref, (At(a),)))
        refs = [block for *_, block in self.windows]
        body = self.body.b.block((*self.ids, *refs))
        self.outside.emit(
            "pipeline",
            *sizes,
            *(array for array, *_ in self.windows),
            regions=(*(index_map for _, _, index_map, _ in self.windows), body),
            grid=tuple(grid),
            windows=tuple(window for _, window, _, _ in self.windows),
            semantics=("arbitrary",) * len(grid),
        )
        params = (*self.inputs, *self.outputs)
        block, count = self.outside.block(), len(self.outputs)
        aliases, level = tuple(self.aliases), level_of(block)
        return Kernel("random", params, block, count, aliases, level)

    # --- parameters ---

    def add_param(self, array: np.ndarray, name: str, space: str = "any") -> Value:
        dtype = T.dtype_of(array.dtype)
        assert dtype is not None
        ref = Value(T.RefType(array.shape, dtype, space), name)
        self.inputs.append(ref)
        self.arrays.append(array)
        return ref

    def random_param(self, shape: Sequence[int], dtype: T.DType, name: str) -> Value:
        style = self.world.integer(0, 3)
        return self.add_param(random_array(self.rng, shape, dtype, style), name)

    def add_output(self, type_: T.TileType, name: str) -> Value:
        """A result; with no programs to write it, it must start out as an input."""
        ref = Value(T.RefType(type_.shape, type_.dtype, "any"), name)
        self.outputs.append(ref)
        if 0 in self.grid or self.world.chance(5):
            self.alias_new(ref)
        return ref

    def alias_new(self, output: Value) -> Value:
        source = self.random_param(output.ref.shape, output.ref.dtype, "alias")
        self.aliases.append((len(self.inputs) - 1, self.outputs.index(output)))
        return source

    def add_window(
        self, array: Value, sides: Sequence[Side], mode: str, fill=None
    ) -> Value:
        window = window_of(sides, mode, fill)
        block = T.RefType(window.block_shape, array.ref.dtype, window.space)
        ref = Value(block, array.name + "_block")
        self.windows.append((array, window, map_of(sides, len(self.grid)), ref))
        return ref

    def fill_for(self, dtype: T.DType, sides: Sequence[Side]):
        """Often a value where blocks hang over; elsewhere it would not be read."""
        if self.world.chance(50 if hangs_over(sides) else 5):
            return self.world.number(dtype)
        return None

    # --- inputs ---

    def add_prefetch(self) -> None:
        values = self.rng.integers(-1, 5, self.world.integer(1, 4)).astype(np.int32)
        self.prefetch = self.add_param(values, "prefetch", "smem")
        self.body.memories.append(Memory(self.prefetch, BITS))
        for at in range(min(2, len(values))):
            self.body.add(self.body.b.load(self.prefetch, (At(at),)))

    def add_input(self) -> None:
        """An input through a window, and a load of all of it."""
        world, plain = self.world, self.family.plain_windows
        rank = world.pick((2, 1, 3) if plain else (2, 1, 3, 0))
        sides = self.input_sides(rank, plain)
        array = self.random_param(shape_of(sides), world.dtype(), "x")
        self.show_input(array, sides, BITS)

    def input_sides(self, rank: int, plain: bool) -> list[Side]:
        """On a TPU all but the first of several dimensions are whole."""
        sides = [
            input_side(self.world, len(self.grid), self.prefetch, plain)
            for _ in range(rank)
        ]
        if self.world.for_tpu:
            first = max(rank - 2, 0)
            sides[first:] = [whole_side(side.n) for side in sides[first:]]
        return sides

    def show_input(
        self, array: Value, sides: Sequence[Side], level: int, shared: bool = False
    ) -> None:
        """What hangs over is a fill value, or is masked right after loading."""
        world, w = self.world, self.body
        dtype = array.ref.dtype
        fill = self.fill_for(dtype, sides)
        block = self.add_window(array, sides, "in", fill)
        solid = fill is not None or not hangs_over(sides)
        written = not shared and self.family.features > 0 and world.chance(20)
        if written and dtype.is_float:
            level = ROUGH
        memory = Memory(block, level, written, solid, shared)
        w.memories.append(memory)
        loaded = load_all(w, memory)
        mask = None if solid else inside(w, sides, self.ids)
        if mask is not None:
            w.tiles.remove(loaded)
            w.own.remove(loaded)
            instead = w.constant(dtype, loaded.tile.shape)
            w.emit("select_n", mask, instead, loaded, most=EXACT)

    def add_whole_input(self) -> None:
        """An input without a window."""
        array = self.random_param(
            self.world.shape(ranks=(2, 1)), self.world.dtype(), "whole"
        )
        self.body.memories.append(Memory(array, BITS))

    # --- memory that lives from program to program ---

    def add_scratch(self) -> None:
        dtype = self.world.dtype()
        shape = self.world.shape(ranks=(2, 1))
        ref = self.outside.op("alloc", type=T.RefType(shape, dtype, "vmem"))
        self.start(ref, range(len(self.grid)))
        self.keep(ref)

    def keep(self, ref: Value, solid: bool = True) -> Memory:
        level = ROUGH if ref.ref.dtype.is_float else BITS
        memory = Memory(ref, level, writable=True, solid=solid)
        self.body.memories.append(memory)
        return memory

    def start(self, ref: Value, axes: Sequence[int]) -> None:
        """Fill memory at the first step along these axes, or at every step."""
        w = self.body
        value = w.constant(ref.ref.dtype, ref.ref.shape)
        if not axes or self.world.chance(20):
            store_all(w, ref, w.operand(ref.ref.dtype, ref.ref.shape))
            return
        first = None
        for a in axes:
            here = w.b.eq(self.ids[a], w.b.index(0))
            first = here if first is None else w.b.and_(first, here)
        assert first is not None
        then = Builder()
        then.store(ref, value)
        number = w.b.cast(first, T.I32)
        w.b.emit("cond", number, regions=(Block(), then.block()))

    def revisited(self, shape: Sequence[int], name: str) -> Memory:
        """A result whose blocks are seen again along some axes, filled at first."""
        axes = [a for a in range(len(self.grid)) if self.world.chance(50)]
        sides = covering(self.world, shape, self.grid, axes, may_hang=True)
        dtype = self.world.dtype()
        output = self.add_output(T.TileType(shape_of(sides), dtype), name)
        fill = self.fill_for(dtype, sides)
        block = self.add_window(output, sides, "out", fill)
        self.start(block, [a for a in range(len(self.grid)) if a not in axes])
        return self.keep(block, solid=fill is not None or not hangs_over(sides))

    def add_work_output(self) -> None:
        self.revisited(self.world.shape(ranks=(2, 1)), "work")

    def add_accumulator(self) -> None:
        """A block that every step adds something to."""
        w = self.body
        memory = self.revisited(self.world.shape(ranks=(2, 1)), "sum")
        if self.world.chance(40):
            add_product(w, memory)
            return
        block, dtype = memory.ref, memory.type.dtype
        value = w.operand(dtype, block.ref.shape)
        kind = "or" if dtype.is_bool else self.world.pick(("add", "max"))
        w.world.used.add(value)
        store_all(w, block, w.b.op(kind, w.b.load(block), value))

    def add_guarded_steps(self) -> None:
        """A block that some steps add a block of an input to, which others ignore."""
        if not self.grid:
            return
        world, w = self.world, self.body
        memory = self.revisited(world.shape(ranks=(2, 1)), "guarded")
        sides = self.input_sides(world.pick((2, 1)), self.family.plain_windows)
        dtype = memory.type.dtype
        source = self.random_param(shape_of(sides), dtype, "g")
        fill = world.number(dtype) if hangs_over(sides) else None
        block = self.add_window(source, sides, "in", fill)
        axis = world.pick(range(len(self.grid))[::-1])
        others = [i for a, i in enumerate(self.ids) if a != axis]
        if self.prefetch is not None:
            others.append(w.b.load(self.prefetch, (At(0),)))
        test = guard(w, self.ids[axis], others)
        then = w.inner()
        value = load_all(then, Memory(block, BITS))
        value = then.fit(value, memory.type.shape)
        kind = "or" if dtype.is_bool else world.pick(("add", "max"))
        store_all(then, memory.ref, then.b.op(kind, then.b.load(memory.ref), value))
        when(w, test, then.b.block())

    def add_whole_output(self) -> None:
        type_ = T.TileType(self.world.shape(ranks=(2, 1)), self.world.dtype())
        output = self.add_output(type_, "out")
        self.start(output, range(len(self.grid)))
        self.keep(output)

    def add_alias(self) -> None:
        """A result that is an operand's memory, seen through a window of each."""
        world = self.world
        sides = self.input_sides(world.pick((2, 1)), plain=False)
        type_ = T.TileType(shape_of(sides), world.dtype())
        output = Value(T.RefType(type_.shape, type_.dtype, "any"), "new")
        self.outputs.append(output)
        source = self.alias_new(output)
        level = ROUGH if type_.dtype.is_float else BITS
        self.show_input(source, sides, level, shared=True)
        others = sides  # the same blocks, for writing
        if not self.family.plain_windows and world.chance(50) and not world.for_tpu:
            others = [self.other_side(s) for s in sides]
        fill = self.fill_for(type_.dtype, others)
        block = self.add_window(output, others, "out", fill)
        self.keep(block, solid=fill is not None or not hangs_over(others))

    def add_rows_in_place(self) -> None:
        """Each program changes its row of what it sees whole, by one it may not own.

        Through a result, and through the operand that aliases it.
        """
        world, b = self.world, self.body.b
        if not self.grid or 0 in self.grid:
            return
        axis = world.integer(0, len(self.grid) - 1)
        shape, dtype = (self.grid[axis] + world.integer(0, 1), 4), world.dtype()
        output = Value(T.RefType(shape, dtype, "any"), "rows")
        self.outputs.append(output)
        source = self.alias_new(output)
        zero = lambda b, _: [b.index(0)]
        sides = [Side(n, BlockDim(n), zero) for n in shape]
        seen = self.add_window(source, sides, "in")
        block = self.add_window(output, sides, "out")
        index, away = (At(None), Span(0, 4)), b.index(world.pick((-1, 0, 1)))
        read = seen if world.chance(70) else block
        row = b.load(read, index, (b.add(self.ids[axis], away),))
        own = b.load(block, index, (self.ids[axis],))
        b.store(block, b.max(own, row), index, (self.ids[axis],))

    def other_side(self, side: Side) -> Side:
        """Another way to cut the same dimension."""
        size = self.world.integer(1, side.n)
        index = index_emitter(self.world, len(self.grid), self.prefetch)
        return Side(side.n, BlockDim(size), index, hangs=side.n % size != 0)

    def add_inner_pipeline(self) -> None:
        """A pipeline in the body, over memory of the kernel."""
        old = [m for m in self.body.memories if m.writable and m.type.rank]
        if old and self.world.chance(60):
            inner_rework(self, self.world.pick(old[::-1]))
        else:
            inner_pipeline(self)

    # --- results ---

    def add_sink(self, value: Value) -> None:
        """Store a tile where no other program stores: each value is seen."""
        world = self.world
        if world.for_tpu and value.tile.dtype.is_bool:  # it has no arrays of them
            value = self.body.b.cast(value, T.I32)
        axes = range(len(self.grid))
        sides = covering(world, value.tile.shape, self.grid, axes, may_hang=True)
        self.store_result(value, sides)

    def store_result(self, value: Value, sides: Sequence[Side]) -> None:
        dtype = value.tile.dtype
        output = self.add_output(T.TileType(shape_of(sides), dtype), "o")
        fill = self.fill_for(dtype, sides) if self.world.chance(50) else None
        store_all(self.body, self.add_window(output, sides, "out", fill), value)
        if self.body.level(value) > ROUGH:
            self.exact.add(output)

    # --- edges ---

    def edges(self) -> Kernel:
        """Elementwise code on blocks that hang over: nobody looks at the outside."""
        world, axes = self.world, range(len(self.grid))
        block = world.shape(ranks=(2, 1, 3))
        sides = covering(world, block, self.grid, axes, may_hang=True)
        shown = tuple(side.dim.size for side in sides if side.kept)
        for _ in range(world.integer(1, 3)):
            array = self.random_param(shape_of(sides), world.dtype(), "x")
            fill = self.fill_for(array.ref.dtype, sides) if world.chance(30) else None
            block = self.add_window(array, sides, "in", fill)
            memory = Memory(block, BITS, solid=False)
            world.hanging.add(load_all(self.body, memory))
        for _ in range(world.integer(*self.family.lines)):
            elementwise(self.body)
        fits = [v for v in self.body.unused() if v.tile.shape == shown]
        for value in fits[: self.family.sinks] or [self.body.operand(T.F32, shown)]:
            self.store_result(value, sides)
        return self.finish()


def inner_pipeline(maker: Maker) -> None:
    """Blocks of an input without a window go to a scratch, one step after another."""
    world, w = maker.world, maker.body
    steps = world.integer(1, 3)
    block = world.shape(ranks=(1, 2))
    dtype = world.dtype()
    sides = covering(world, block, (steps,), (0,), may_hang=True)
    source = maker.random_param(shape_of(sides), dtype, "inner")
    target = w.b.op("alloc", type=T.RefType(shape_of(sides), dtype, "vmem"))
    i = Value(T.INDEX, "i")
    windows = (window_of(sides, "in", world.number(dtype)), window_of(sides, "out"))
    refs = [Value(T.RefType(block, dtype)) for _ in windows]
    inner = Writer(world)
    inner.add(i)
    load_all(inner, Memory(refs[0], BITS))
    for _ in range(world.integer(1, 3)):
        elementwise(inner)
    result = inner.operand(dtype, block)
    store_all(inner, refs[1], result)
    w.b.emit(
        "pipeline",
        source,
        target,
        regions=(map_of(sides, 1), map_of(sides, 1), inner.b.block((i, *refs))),
        grid=(steps,),
        windows=windows,
        semantics=("arbitrary",),
    )
    memory = Memory(target, ROUGH if dtype.is_float else BITS, writable=True)
    w.memories.append(memory)
    load_all(w, memory)


def inner_rework(maker: Maker, memory: Memory) -> None:
    """A pipeline over memory that is there, seen and changed through its blocks."""
    world, w = maker.world, maker.body
    fits = [m for m in w.memories if m.solid and m.type.rank]
    source = world.pick(fits[::-1]) if fits else memory
    steps, windows, maps, refs = world.integer(1, 3), [], [], []
    inner = Writer(world)
    i = Value(T.INDEX, "i")
    inner.add(i)
    for each, mode in ((source, "in"), (memory, "out")):
        dtype = each.type.dtype
        sides = [_inner_side(world, n) for n in each.type.shape]
        fill = world.number(dtype) if world.chance(60) else None
        window = window_of(sides, mode, fill)
        ref = Value(T.RefType(window.block_shape, dtype))
        solid = each.solid and (fill is not None or not hangs_over(sides))
        inside = replace(each, ref=ref, solid=solid)
        inner.memories.append(inside)
        if solid and mode == "in":
            load_all(inner, inside)
        windows.append(window)
        maps.append(map_of(sides, 1))
        refs.append(ref)
    target = inner.memories[1]
    for _ in range(world.integer(0, 2)):
        maker.step(inner)
    if world.chance(50):
        add_product(inner, target)
    else:
        value = inner.operand(target.type.dtype, target.type.shape)
        store_all(inner, target.ref, value)
    w.b.emit(
        "pipeline",
        source.ref,
        memory.ref,
        regions=(*maps, inner.b.block((i, *refs))),
        grid=(steps,),
        windows=tuple(windows),
        semantics=("arbitrary",),
    )


def _inner_side(world: World, n: int) -> Side:
    """Blocks that need not divide a dimension, all of it, or one element."""
    kind = world.pick(("blocked", "whole", "squeezed"))
    if kind == "whole" or not n:
        return Side(n, BlockDim(n), lambda b, ids: [b.index(0)])
    index = index_emitter(world, 1, None)
    if kind == "squeezed":
        return Side(n, BlockDim(1, "squeezed"), index)
    size = world.integer(1, n)
    return Side(n, BlockDim(size), index, hangs=n % size != 0)


_STEPS: dict[str, Callable[[Writer], object]] = {
    "elementwise": elementwise,
    "tile": tile_op,
    "memory": memory_op,
    "allocate": allocate,
    "product": add_product,
    "softmax": softmax,
}
