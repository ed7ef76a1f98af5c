"""products_apart: a product that another's blocks would compute again, as a kernel.

In `f(x @ w) @ u`, a program that has no room for all columns of the result computes
`f(x @ w)` again for every block of them. `apart(kernel, chip)` makes two kernels: one
computes the left operand of the second product and stores it, the other loads it, and
neither computes anything twice. A longer chain becomes as many kernels as pay.

What moves to the first kernel is code of the body itself (nothing that is guarded, or
that scratch or a result hands on), so it runs at every step and depends only on inputs
and grid indices. The array between the kernels has an element for each element of the
tile at each block index that the tile depends on: dimensions that are blocks of an
operand along an axis of their own stay dimensions of one matrix, and any other axis is
a leading dimension. So no value changes, and none is read past an edge.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, BlockDim, Kernel, Op, Value, Window, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import clone, dead_code, substitute
from pallasite.ir.roles import Dot, DotSide, Pipeline, Shown
from pallasite.passes.analysis.affine import Affine
from pallasite.passes.analysis.grid import analyze, find_pipeline, with_pipeline
from pallasite.passes.analysis.loop_dims import loop_dims
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.optimise.unused import drop_unused
from pallasite.passes.schedule.gpu_blocks import LARGEST_SIDE, seconds_of_products
from pallasite.passes.schedule.split_axis import Program, Result, Step, drop_windows
from pallasite.target import Gpu, Machine

GAIN = 1.25  # estimated, of kernels that are made


def apart(kernel: Kernel, chip: Gpu) -> Program | None:
    """The kernels that compute each product once; None if one kernel is as good.

    Args:
        kernel: in normal form.
        chip: what they run on.
    """
    made = _Made([], len(kernel.inputs), chip)
    outputs = made.add(kernel, range(len(kernel.inputs)))
    if len(made.steps) < 2:
        return None
    return Program(tuple(made.steps), tuple(map(Result, outputs)))


@dataclass
class _Made:
    """The kernels of a program so far, and how many arrays they have."""

    steps: list[Step]
    arrays: int
    chip: Gpu

    def add(self, kernel: Kernel, operands: Sequence[int]) -> Sequence[int]:
        """Append a kernel, or those that replace it; gives its outputs' numbers."""
        found = best_cut(kernel, self.chip)
        number = dict(zip(kernel.inputs, operands, strict=True))
        if found is None:
            self.steps.append(Step(kernel, tuple(operands)))
            first, self.arrays = self.arrays, self.arrays + kernel.num_outputs
            return range(first, self.arrays)
        (between,) = self.add(found.first, [number[r] for r in found.first.inputs])
        number[found.array] = between
        return self.add(found.second, [number[r] for r in found.second.inputs])


@dataclass(frozen=True)
class Cut:
    """Two kernels, and the array that the first leaves for the second."""

    first: Kernel
    second: Kernel
    array: Value


def best_cut(kernel: Kernel, chip: Gpu) -> Cut | None:
    """The cut that saves most; None if none saves enough."""
    found = list(cuts(kernel))
    if not found:
        return None
    machine, own = Machine.peak(chip), seconds_of_products(kernel, chip)[1]
    if own == inf:  # other passes find blocks for it, of which nothing is known here
        return None

    def after(cut: Cut) -> float:
        between = 2 * cut.array.ref.tile.size * cut.array.ref.dtype.bytes
        both = sum(seconds_of_products(k, chip)[1] for k in (cut.first, cut.second))
        return both + machine.copying(between) + machine.launch

    best = min(found, key=after)
    return best if own > GAIN * after(best) else None


def cuts(kernel: Kernel) -> Iterator[Cut]:
    """A cut at each computed operand that programs would compute several times."""
    if kernel.aliases or sum(op.name == "dot" for op in walk(kernel.body)) < 2:
        return
    at = Cuts(kernel)
    if at.found is None or at.found.refused:
        return
    for op in at.pipeline.body.ops:
        if op.name == "dot":
            lhs, rhs = Dot.of(op).sides
            for side, other in ((lhs, rhs), (rhs, lhs)):
                cut = at.operand(side, other)
                if cut is not None:
                    yield cut


class Cuts:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.info = analyze(kernel)
        self.found = loop_dims(kernel)
        body = self.pipeline.body
        self.made = {v: op for op in body.ops for v in op.results}
        self.roots = Roots(body)
        self.written = {*self.roots.all_written(body), *kernel.outputs}
        self.shown = {s.block: n for n, s in enumerate(self.pipeline.shown)}

    def operand(self, side: DotSide, other: DotSide) -> Cut | None:
        """The kernel cut at an operand of a product.

        None if it is not computed by a product that can run before the rest, or if no
        program computes it again.
        """
        value, grid = side.value, self.pipeline.grid
        ops = self.needed(value)
        if ops is None or not any(op.name == "dot" for op in ops):
            return None
        axes = self.axes_of(ops)
        if any(grid[a] is None for a in axes):
            return None
        width = prod(other.value.tile.shape[d] for d in other.free)
        is_kept = all(n == 1 or a in axes for a, n in enumerate(grid))
        if is_kept and width <= LARGEST_SIDE:
            return None
        place = self.place(value, axes)
        return Cut(self.first(value, ops, axes, place), *self.second(value, place))

    def needed(self, value: Value) -> list[Op] | None:
        """What computes a tile, in order; None if some of it must stay where it is."""
        found, pending = set[Op](), [value]
        while pending:
            op = self.made.get(pending.pop())
            if op is None or op in found:
                continue
            if not self.may_move(op):
                return None
            found.add(op)
            pending += [v for each in walk(Block((), (op,))) for v in each.operands]
        return [op for op in self.pipeline.body.ops if op in found]

    def may_move(self, op: Op) -> bool:
        for each in walk(Block((), (op,))):
            if table()[each.name].effect is Effect.WRITE and each.name != "for":
                return False
            for ref in (v for v in each.operands if v.is_ref):
                root = self.roots.of(ref)
                is_input = root in self.kernel.inputs or root in self.shown
                if not is_input or root in self.written:
                    return False
        return True

    def axes_of(self, ops: Sequence[Op]) -> list[int]:
        """The axes along which a tile may differ."""
        used = {v for op in walk(Block((), tuple(ops))) for v in op.operands}
        axes = {a for a, each in enumerate(self.pipeline.ids) if each in used}
        for block, n in self.shown.items():
            if block in used:
                axes |= self.info.windows[n].axes
        return sorted(axes)

    def place(self, value: Value, axes: Sequence[int]) -> "_Place":
        """Which axis each dimension of the array between goes along."""
        along: list[int | None] = []
        left = list(axes)
        for d in range(value.tile.rank):
            dims = self.found.dims if self.found is not None else ()
            windows = (w for x in dims if x.members.get(value) == d for w in x.windows)
            axis = next((a for w in windows if (a := self.axis_of(*w)) in left), None)
            along.append(axis)
            if axis is not None:
                left.remove(axis)
        dims = [BlockDim(1, "squeezed") for _ in left]
        dims += [BlockDim(n) for n in value.tile.shape]
        grid = self.pipeline.grid
        shape = [grid[a] or 1 for a in left]
        for n, axis in zip(value.tile.shape, along, strict=True):
            shape.append(n if axis is None else n * (grid[axis] or 1))
        array = Value(T.RefType(tuple(shape), value.tile.dtype, "any"), "between")
        return _Place(array, Window(tuple(dims), "in"), (*left, *along))

    def axis_of(self, number: int, dim: int) -> int | None:
        """The axis whose steps are the blocks of a window along a dimension."""
        form = self.info.windows[number].forms[dim].affine
        for axis in range(len(self.pipeline.grid)):
            unit = tuple(int(a == axis) for a in range(len(self.pipeline.grid)))
            if form == Affine(unit):
                return axis
        return None

    # --- the kernels ---

    def first(
        self, value: Value, ops: Sequence[Op], axes: Sequence[int], place: "_Place"
    ) -> Kernel:
        """Computes the tile at each step of the axes that it depends on."""
        old = self.pipeline
        ids = {a: Value(old.ids[a].type, old.ids[a].name) for a in axes}
        mapping = {old.ids[a]: v for a, v in ids.items()}
        shown = [
            self.along(each, axes) for each in old.shown if each.window.mode == "in"
        ]
        array = Value(place.array.type, place.array.name)
        block = Value(T.RefType(value.tile.shape, value.tile.dtype), "between")
        window = replace(place.window, mode="out")
        shown.append(Shown(array, window, place.index_map(axes), block))
        b = Builder(old.op.loc)
        b.ops += ops
        b.store(block, value)
        body = clone(Block((), tuple(b.ops)), mapping)
        params = (*(ids[a] for a in axes), *(each.block for each in shown))
        new = old.with_(
            grid=tuple(old.grid[a] for a in axes),
            semantics=tuple(old.semantics[a] for a in axes),
            dynamic_sizes=(),
        ).showing(shown, Block(params, body.ops))
        kernel = with_pipeline(self.kernel, new.to_op())
        kernel = kernel.with_(
            name=f"{self.kernel.name}_first",
            params=(*self.kernel.inputs, array),
            num_outputs=1,
        )
        return _cleaned(kernel)

    def along(self, shown: Shown, axes: Sequence[int]) -> Shown:
        """A window of a grid that has only some of the axes, at the others' start."""
        region = shown.index_map
        b = Builder()
        mapping, params = dict[Value, Value](), []
        for axis, old in enumerate(region.params):
            if axis in axes:
                params.append(old)
            else:
                mapping[old] = b.index(0)
        inner = clone(
            substitute(Block(tuple(params), region.ops, region.yields), mapping)
        )
        return shown._replace(
            index_map=Block(inner.params, (*b.ops, *inner.ops), inner.yields)
        )

    def second(self, value: Value, place: "_Place") -> tuple[Kernel, Value]:
        """The kernel with a load in place of what computes the tile."""
        old = self.pipeline
        block = Value(T.RefType(value.tile.shape, value.tile.dtype), "between")
        region = place.index_map(range(len(old.grid)))
        shown = [s for s in old.shown if s.window.mode == "in"]
        shown += [Shown(place.array, place.window, region, block)]
        shown += [s for s in old.shown if s.window.mode == "out"]
        maker = self.made[value]
        ops: list[Op] = []
        for op in old.body.ops:
            if op is maker:
                b = Builder(op.loc)
                (loaded,) = [b.load(block)]
                ops += b.ops
            else:
                ops.append(op)
        params = (*old.ids, *(each.block for each in shown))
        body = substitute(Block(params, tuple(ops), old.body.yields), {value: loaded})
        kernel = with_pipeline(self.kernel, old.showing(shown, body).to_op())
        inputs = (*self.kernel.inputs, place.array)
        kernel = kernel.with_(
            name=f"{self.kernel.name}_second",
            params=(*inputs, *self.kernel.outputs),
        )
        return _cleaned(kernel), place.array


@dataclass(frozen=True)
class _Place:
    """Where a tile is in the array between two kernels.

    Attributes:
        array: it.
        window: one tile of it.
        along: per dimension of the array, the axis whose step is its block's index.
    """

    array: Value
    window: Window
    along: tuple[int | None, ...]

    def index_map(self, axes: Sequence[int]) -> Block:
        """The map of a grid with these of the axes."""
        ids = [Value(T.INDEX, f"i{n}") for n in range(len(axes))]
        at = dict(zip(axes, ids, strict=True))
        b = Builder()
        yields = [b.index(0) if a is None else at[a] for a in self.along]
        return b.block(tuple(ids), tuple(yields))


def _cleaned(kernel: Kernel) -> Kernel:
    """Without operands that only the other kernel uses."""
    kernel = drop_windows(drop_unused(dead_code(kernel)))
    used = {v for op in walk(kernel.body) for v in op.operands}
    inputs = tuple(ref for ref in kernel.inputs if ref in used)
    return kernel.with_(params=(*inputs, *kernel.outputs))
