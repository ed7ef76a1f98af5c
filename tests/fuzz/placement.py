"""Random kernels whose index maps leave their arrays, on both sides and far away.

`placed_kernel(choices)` gives a Case: a few windows of blocks, elements, or parts of
bounded length, some larger than their array, each placed by a number that grid indices
or a looked-up scalar make. Inputs are added up; outputs are overwritten or updated and
start out as an operand, so that a block nobody visits is defined too. All integers:
engines agree bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Kernel, Value, Window
from pallasite.ir.verify import verify
from tests.fuzz.choices import Choices
from tests.fuzz.generate import Case
from tests.fuzz.windows import Emit, Ids, Side, inside, map_of, shape_of, window_of
from tests.fuzz.writer import World, Writer

FAR = 1 << 30  # times a grid index wraps around


def placed_kernel(choices: Choices, for_tpu: bool = False) -> Case:
    """A kernel; `for_tpu`: of what a TPU mostly takes.

    Its blocks fit the tiles, have one length, and are not read before they are written:
    an output block is not fetched there.
    """
    maker = _Maker(World(choices, (T.I32,)), for_tpu)
    kernel = maker.kernel()
    verify(kernel)
    return Case(kernel, tuple(maker.arrays))


@dataclass
class _Maker:
    """Parameters are made in the order a TPU wants: sizes, scalars, arrays."""

    world: World
    for_tpu: bool
    inputs: list[Value] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    def kernel(self) -> Kernel:
        world = self.world
        self.rng = np.random.default_rng(world.integer(0, 2**16))
        self.before, sizes = Builder(), []
        steps = [world.integer(1, 5) for _ in range(world.integer(1, 2))]
        grid: list[int | None] = list(steps)
        for axis, size in enumerate(steps):
            if world.chance(15):
                grid[axis] = None
                ref = self.param(np.array(size, np.int32), "size", "smem")
                sizes.append(self.before.load(ref, ()))
        self.lookup = None
        if world.chance(50):
            values = self.rng.integers(-3, 8, 5).astype(np.int32)
            self.lookup = self.param(values, "lookup", "smem")
        kept = world.chance(70)
        self.block = (world.integer(1, 3) if kept else None, *self.rows_and_lanes())
        self.updates = world.chance(30) and not self.for_tpu
        is_inner, outer_ids = world.chance(20), ()
        if is_inner:
            outer_ids = (Value(T.INDEX, "outer"),)
        pipeline = self.pipeline(grid, sizes, outer_ids)
        if is_inner:
            body = Block(outer_ids, (*self.before.ops, *pipeline.ops))
            self.before = Builder()
            self.before.emit(
                "pipeline",
                regions=(body,),
                grid=(world.integer(1, 2),),
                windows=(),
                semantics=("arbitrary",),
            )
        else:
            self.before.ops += pipeline.ops
        params = (*self.inputs, *self.outputs)
        first = len(self.inputs) - len(self.outputs)
        aliases = tuple((first + n, n) for n in range(len(self.outputs)))
        block = self.before.block()
        return Kernel("placed", params, block, len(self.outputs), aliases)

    def param(self, array: np.ndarray, name: str, space: str = "any") -> Value:
        self.inputs.append(Value(T.RefType(array.shape, T.I32, space), name))
        self.arrays.append(array)
        return self.inputs[-1]

    def array(self, sides: Sequence[Side], name: str) -> Value:
        numbers = self.rng.integers(-1000, 1000, shape_of(sides))
        return self.param(numbers.astype(np.int32), name)

    # --- the grid ---

    def pipeline(
        self, grid: list[int | None], sizes: Sequence[Value], outer: Ids
    ) -> Builder:
        world = self.world
        axes = len(grid)
        ids = tuple(Value(T.INDEX, name) for name in "ij"[:axes])
        w = Writer(world)
        arrays: list[Value] = []
        windows: list[Window] = []
        maps: list[Block] = []
        blocks: list[Value] = []

        def add(array: Value, sides: Sequence[Side], mode: str, fill=None) -> Value:
            window = window_of(sides, mode, fill)
            arrays.append(array)
            windows.append(window)
            maps.append(map_of(sides, axes))
            blocks.append(Value(T.RefType(window.block_shape, T.I32), array.name))
            return blocks[-1]

        total = None
        for number in range(world.integer(1, 2)):
            sides = self.sides(axes, outer)
            fill = self.rng.integers(-9, 9).item() if world.chance(50) else None
            block = add(self.array(sides, f"x{number}"), sides, "in", fill)
            value = w.b.load(block)
            mask = inside(w, sides, ids) if fill is None else None
            if mask is not None:
                value = w.b.select(mask, value, w.b.like(7, value))
            total = value if total is None else w.b.add(total, value)
        assert total is not None
        for i, factor in zip((*ids, *outer), (1000, 10000, 100000), strict=False):
            step = w.b.mul(i, w.b.index(factor))
            total = w.b.add(total, w.b.broadcast(step, total.tile.shape))
        for number in range(world.integer(1, 2)):
            sides = self.sides(axes, outer, written=True)
            start = self.array(sides, f"start{number}")
            self.outputs.append(Value(start.type, f"o{number}"))
            block = add(self.outputs[-1], sides, "out")
            value = total
            if self.updates:
                value = w.b.add(value, w.b.mul(w.b.load(block), w.b.like(3, total)))
            w.b.store(block, value)
        made = Builder()
        made.emit(
            "pipeline",
            *sizes,
            *arrays,
            regions=(*maps, w.b.block((*ids, *blocks))),
            grid=tuple(grid),
            windows=tuple(windows),
            semantics=("arbitrary",) * axes,
        )
        return made

    # --- windows ---

    def rows_and_lanes(self) -> tuple[int, int]:
        return self.world.pick((8, 3, 8)), self.world.pick((4, 2))

    def sides(self, axes: int, outer: Ids, written: bool = False) -> list[Side]:
        first, rows, lanes = self.block
        return [
            self.side(first, axes, outer, written),
            self.rows(rows, axes, outer, written),
            self.whole(lanes, axes, outer, written),
        ]

    def side(self, size: int | None, axes: int, outer: Ids, written: bool) -> Side:
        world, n = self.world, self.world.integer(1, 7)
        index = self.index(axes, outer, written)
        if size is None:
            return Side(n, BlockDim(1, "squeezed"), index)
        kinds = ("blocked", "blocked", "blocked", "element", "bounded")
        kind = world.pick(kinds[:4] if self.for_tpu else kinds)
        if kind == "blocked":
            return Side(n, BlockDim(size), index, hangs=n % size != 0)
        if kind == "element":
            padding = world.pick(((0, 0), (1, 0), (0, 2), (2, 1), (3, 3)))
            return Side(n, BlockDim(size, "element", padding), index, hangs=True)
        length = world.pick((1, 0, 2, 5, -1, FAR))
        both: Emit = lambda b, ids: [*index(b, ids), b.index(length)]
        return Side(n, BlockDim(size, "bounded"), both, hangs=True)

    def rows(self, size: int, axes: int, outer: Ids, written: bool) -> Side:
        if size % 8:
            return self.whole(size, axes, outer, written)
        n = self.world.pick((16, 8, 24, 20, 5))
        index = self.index(axes, outer, written)
        return Side(n, BlockDim(size), index, hangs=n % size != 0)

    def whole(self, size: int, axes: int, outer: Ids, written: bool) -> Side:
        """Mostly all there is of a dimension, whatever the index map says."""
        varies = self.world.chance(20) and not self.for_tpu
        n = self.world.integer(1, 6) if varies else size
        index = self.index(axes, outer, written)
        return Side(n, BlockDim(size), index, hangs=n % size != 0)

    def index(self, axes: int, outer: Ids, written: bool) -> Emit:
        """A number from grid indices; it may be outside any array."""
        world = self.world
        axis, other = world.integer(0, axes - 1), world.integer(0, axes - 1)
        number = world.integer(-3, 7)
        kinds = ["id", "shifted", "scaled", "reversed", "sum", "fixed", "less", "half"]
        kinds += ["far", "wrapped", "captured"] if outer else ["far", "wrapped"]
        if self.lookup is not None:
            kinds += ["looked up", "looked up", "fixed scalar"]
            # Which program is last at an offset from memory is unspecified.
            kinds += [] if written else ["offset"]
        kind, lookup = world.pick(kinds), self.lookup
        factor = world.pick((2, 3, -1, -2))

        def emit(b: Builder, ids: Ids) -> list[Value]:
            i, j = ids[axis], ids[other]
            load = lambda at: b.load(lookup, (At(None),), [at])
            made = {
                "id": lambda: i,
                "shifted": lambda: b.sub(i, b.index(2)),
                "scaled": lambda: b.add(b.mul(i, b.index(factor)), b.index(number)),
                "reversed": lambda: b.sub(b.index(number), i),
                "sum": lambda: b.add(i, j),
                "fixed": lambda: b.index(number),
                "less": lambda: b.min(i, b.sub(j, b.index(1))),
                "half": lambda: b.op("div", i, b.index(2)),
                "far": lambda: b.mul(b.sub(i, b.index(1)), b.index(FAR)),
                "wrapped": lambda: b.mul(i, b.index(FAR)),
                "captured": lambda: b.add(i, b.mul(outer[0], b.index(factor))),
                "looked up": lambda: load(i),
                "fixed scalar": lambda: load(b.index(number % 5)),
                "offset": lambda: b.add(load(b.index(number % 5)), i),
            }
            return [made[kind]()]

        return emit
