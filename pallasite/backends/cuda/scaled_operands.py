"""scaled_operands: operands of matmuls that are dequantised become `scaled` ones.

In: a kernel after `promote`, with dots of tiles that are small floats times a scale for
some along k (`x.astype(bf16) * repeat(scales)`). Out, for chips whose instructions
multiply by scales: dots of `scaled` tiles, whose scales are loaded from arrays in which
they are packed (`ops/scaled.py`). XLA packs them before the call, as the grid's note
says (`repack.py`).

Proof: these numbers and their products with a scale are exact in bf16 and f32, but for
what exceeds the exponents of these; so nothing is rounded that instructions do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pallasite.backends.cuda.instruction_sets import InstructionSet, instruction_set
from pallasite.backends.cuda.repack import REPACKED, packed_scales
from pallasite.ir.nodes import Access, BlockDim, Kernel, Op, Value, Window, walk
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, users_of
from pallasite.ir.roles import Dot
from pallasite.ir.types import BF16, F32
from pallasite.ops.scaled import COLUMNS, PACKED, ROWS
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import constant_inputs
from pallasite.target import Gpu

WIDE = (BF16, F32)  # types that hold a scaled number
MOVES = ("broadcast_in_dim", "reshape")


@dataclass(frozen=True, eq=False)
class Scaled:
    """A tile of small floats, and its scales: a block of an operand."""

    values: Value
    view: Op
    tall: int  # how many times 128 rows
    groups: int  # of scales of a row

    @property
    def param(self) -> Value:
        return self.view.operands[0]


def scaled_operands(kernel: Kernel, chip: Gpu) -> Kernel:
    """Dots of scaled tiles, where the chip multiplies by scales."""
    found = instruction_set(chip)
    if found is None or not found.scaled:
        return kernel
    looking = _Looking(kernel, found)
    sides = {op: s for op in walk(kernel.body) if (s := looking.sides(op))}
    if not sides:
        return kernel
    tall = dict[Value, int]()
    for scaled in (each for pair in sides.values() for each in pair):
        if tall.setdefault(scaled.param, scaled.tall) != scaled.tall:
            return kernel
    packing = _Packing(kernel, sides, tall)
    made = dead_code(map_ops(kernel, packing.rewrite))
    left = users_of(made.body)
    if any(param in left for param in tall):  # something else reads them
        return kernel
    return made.with_(params=tuple(packing.new.get(v, v) for v in made.params))


def is_scaled(kernel: Kernel, chip: Gpu) -> bool:
    """Whether all dots are of what the chip multiplies by scales.

    Their operands are not computed, as they seem to be where blocks are chosen.
    """
    found = instruction_set(chip)
    if found is None or not found.scaled:
        return False
    looking = _Looking(kernel, found)
    dots = [op for op in walk(kernel.body) if op.name == "dot"]
    return bool(dots) and all(
        looking.factors(v) is not None for op in dots for v in op.operands
    )


class _Looking:
    """Finds dots of dequantised operands."""

    def __init__(self, kernel: Kernel, set: InstructionSet):
        self.made = {v: op for op in walk(kernel.body) for v in op.results}
        self.constant = constant_inputs(kernel)
        self.set = set

    def sides(self, op: Op) -> tuple[Scaled, ...]:
        """Both operands of a dot, contiguous along k; empty if it is no such dot."""
        if op.name != "dot":
            return ()
        sides = Dot.of(op).sides
        if any(side.batch or side.contract != (1,) for side in sides):
            return ()
        found = [self.scaled(side.value) for side in sides]
        return tuple(s for s in found if s is not None) if all(found) else ()

    def scaled(self, value: Value) -> Scaled | None:
        found = self.factors(value)
        return None if found is None else self.fitting(*found)

    def factors(self, value: Value) -> tuple[Value, Op] | None:
        """What a tile is a product of, and the load of its scales."""
        op, outer = self.through(value)
        if op is None or op.name != "mul" or value.tile.rank != 2:
            return None
        for x, y in (op.operands, op.operands[::-1]):
            (values, inner), (scales, moves) = self.through(x), self.through(y)
            if any(o is None or o.name != "load" for o in (values, scales)):
                continue
            assert values is not None and scales is not None
            left, right = values.result.tile, scales.result.tile
            if left.rank != 2 or right.rank != 2 or left.shape != value.tile.shape:
                continue
            which = right.dtype.name, left.shape[1] // max(right.shape[1], 1)
            if self.set.scaled.get(left.dtype.name) != which:
                continue
            same = _places(values, [*outer, *inner]) == _places(values, [])
            if same and _places(scales, [*outer, *moves]) == _places(
                scales, [], which[1]
            ):
                return values.result, scales
        return None

    def through(self, value: Value) -> tuple[Op | None, list[Op]]:
        """The op whose elements a tile has, moved and widened, and what does so."""
        moves, op = list[Op](), self.made.get(value)
        while op is not None and op.name in ("cast", *MOVES):
            if op.name == "cast" and op.result.tile.dtype not in WIDE:
                return None, []
            moves.append(op)
            op = self.made.get(op.operands[0])
        return op, moves

    def fitting(self, values: Value, load: Op) -> Scaled | None:
        """The same, if the scales are blocks that can be copied as a whole."""
        (rows, _), (_, columns) = values.tile.shape, load.result.tile.shape
        access, view = Access.of(load), self.made.get(load.operands[0])
        if view is None or view.name != "block_view" or access.mask is not None:
            return None
        dims = view.attrs["window"].dims
        plain = all(d.kind == "blocked" and d.padding == (0, 0) for d in dims)
        whole = covers_whole(access.ref.ref.shape, access.index) and len(dims) == 2
        fits = rows % ROWS == 0 and columns % COLUMNS == 0
        fits = fits and -view.operands[0].ref.shape[1] % columns < COLUMNS
        if not (plain and whole and fits and view.operands[0] in self.constant):
            return None
        return Scaled(values, view, rows // ROWS, columns // COLUMNS)


def _places(load: Op, moves: Sequence[Op], times: int = 1) -> list[list[int]]:
    """Which element of a loaded tile is where, in the end, each `times` in a row."""
    tile = load.result.tile
    x = np.arange(tile.size).reshape(tile.shape)
    for op in reversed(moves):
        if op.name == "broadcast_in_dim":
            shape = [1] * len(op.attrs["shape"])
            for size, dim in zip(x.shape, op.attrs["dims"], strict=True):
                shape[dim] = size
            x = np.broadcast_to(x.reshape(shape), op.attrs["shape"])
        elif op.name == "reshape":
            x = x.reshape(op.attrs["shape"])
    return x.repeat(times, axis=-1).tolist()


class _Packing:
    """Rewrites dots of dequantised operands."""

    def __init__(
        self,
        kernel: Kernel,
        sides: Mapping[Op, tuple[Scaled, ...]],
        tall: Mapping[Value, int],
    ):
        self.sides, self.new, self.notes = sides, dict[Value, Value](), list[tuple]()
        for param, times in tall.items():
            shape = packed_scales(param.ref, times).carried_shape
            self.new[param] = Value(param.ref.with_shape(shape), param.name)
            self.notes.append((kernel.inputs.index(param), False, 0, 1.0, times))

    def rewrite(self, op: Op, b: Rewriter) -> Value | tuple[Value, ...] | None:
        if op.name == "pipeline":
            notes = (*op.attrs.get(REPACKED, ()), *self.notes)
            b.ops.append(op.with_(attrs={**op.attrs, REPACKED: notes}))
            return op.results
        sides = self.sides.get(op)
        if sides is None:
            return None
        dtypes = [v.tile.dtype for v in op.operands]
        tiles = [
            b.op("scaled", s.values, self.load(s, b), dtype=dtype)
            for s, dtype in zip(sides, dtypes, strict=True)
        ]
        return b.op("dot", *tiles, **op.attrs)

    def load(self, scaled: Scaled, b: Rewriter) -> Value:
        """The packed scales of a block."""
        _, row, column = scaled.view.operands
        sizes = (scaled.groups, scaled.tall, PACKED)
        dims = (BlockDim(1, "squeezed"), *map(BlockDim, sizes))
        where = (row, column, b.index(0), b.index(0))
        param = self.new[scaled.param]
        window = Window(dims, "in")
        return b.load(b.op("block_view", param, *where, window=window))
