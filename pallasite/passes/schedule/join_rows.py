"""join_rows: programs whose matmuls have few rows become programs of many rows.

In: a kernel with a parallel axis of which each step shows one element of a dimension,
such as a row of an image, or a few around it that it takes one at a time, and
multiplies its few rows with what is the same for all. Out: `factor` steps in one:
windows show as many elements, tiles have `factor` times the rows, and matmuls too.
Matrix units are used whole, and what is the same for all steps is loaded once for
several.

Proof: the steps are independent. A tile that differs between steps is replaced by those
of the merged steps, one below the other. Ops that are the same for each row (of its
first dimension), and those that name elements differently, each step's for itself,
compute the merged tile from merged tiles; anything else is refused.
"""

from collections.abc import Callable
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Kernel,
    Op,
    Span,
    Value,
    walk,
)
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import inline, is_elementwise
from pallasite.ir.roles import Dot, Pipeline, Shown
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import Affine
from pallasite.passes.analysis.grid import analyze, find_pipeline, with_pipeline
from pallasite.passes.normal.resized_code import CannotReblock


def join_rows(kernel: Kernel, axis: int, factor: int, apart: bool = False) -> Kernel:
    """Merge `factor` neighbours along an axis.

    Args:
        kernel: what to rewrite.
        axis: of its grid.
        factor: how many of its steps become one.
        apart: whether rows of a result may be apart in memory.

    Raises:
        CannotReblock: a window does not move element by element along the axis, or the
            body does something that is not the same for each row.
    """
    return _Joining(kernel, axis, factor, apart).kernel()


class _Joining:
    def __init__(self, kernel: Kernel, axis: int, factor: int, apart: bool):
        self.whole, self.axis, self.factor = kernel, axis, factor
        self.apart = apart
        self.pipeline = Pipeline.of(find_pipeline(kernel))
        self.info = analyze(kernel)
        steps = self.pipeline.grid[axis]
        if kernel.level != TILE or kernel.aliases:
            raise CannotReblock("operands alias results, or it has explicit copies")
        if steps is None or steps % factor or not self.info.axes[axis].parallel:
            raise CannotReblock(f"{steps} steps are not a multiple of {factor}")
        used = {v for op in walk(self.pipeline.body) for v in op.operands}
        if self.pipeline.ids[axis] in used:
            raise CannotReblock("what a program computes depends on its number")
        self.steps = steps
        self.new: dict[Value, Value] = {}  # by values that differ between steps
        self.around = set[Value]()  # blocks of which a step shows several rows

    def kernel(self) -> Kernel:
        old = self.pipeline
        grid = list(old.grid)
        grid[self.axis] = self.steps // self.factor
        shown = [self.window(n, each) for n, each in enumerate(old.shown)]
        b = Builder(old.op.loc)
        for op in old.body.ops:
            b.loc = op.loc
            self.op(op, b)
        body = b.block((*old.ids, *(each.block for each in shown)))
        made = old.with_(grid=tuple(grid)).showing(shown, body)
        return with_pipeline(self.whole, made.to_op())

    # --- windows ---

    def window(self, number: int, shown: Shown) -> Shown:
        """The elements of all merged steps; the same if it does not move."""
        moves = self.info.windows[number]
        if self.axis not in moves.axes:
            if moves.written:
                raise CannotReblock(f"programs share {moves.name}")
            return shown
        unit = tuple(int(a == self.axis) for a in range(len(self.pipeline.grid)))
        dims, extents = shown.window.dims, shown.array.ref.shape
        along = [d for d, form in enumerate(moves.forms) if self.axis in form.axes]
        if len(along) != 1 or len(moves.forms) != len(dims):
            raise CannotReblock(f"{moves.name} moves along several dimensions")
        (d,) = along
        form = moves.forms[d].affine
        first = None if form is None else form.const
        around = dims[d].kind == "element"
        one = around or dims[d].kind == "squeezed"
        if first is None or form != Affine(unit, first) or not one:
            raise CannotReblock(f"{moves.name} does not move element by element")
        more = (dims[d].size or 0) - 1 if around else 0
        extent = extents[d] + sum(dims[d].padding)
        inside = first >= 0 and first + self.steps + more <= extent
        before = any(dim.kind != "squeezed" for dim in dims[:d])
        if not inside or before or (moves.written and first):
            raise CannotReblock(f"{moves.name} is not made of whole rows")
        aligned = first % self.factor == 0 and extents[d] % self.factor == 0
        kind = "blocked" if aligned and not around else "element"
        inner = zip(dims[d + 1 : -1], extents[d + 1 : -1], strict=True)
        apart = any(dim.kind != "blocked" or dim.size != n for dim, n in inner)
        if moves.written and (kind != "blocked" or (apart and not self.apart)):
            raise CannotReblock(f"rows of {moves.name} are apart in memory")
        rows = BlockDim(self.factor + more, kind, dims[d].padding)
        wide = replace(shown.window, dims=(*dims[:d], rows, *dims[d + 1 :]))
        rest = shown.block.ref.shape[1 if around else 0 :]
        block = Value(shown.block.ref.with_shape((rows.size, *rest)), shown.block.name)
        self.new[shown.block] = block
        if around:
            self.around.add(shown.block)
        return Shown(shown.array, wide, self.map(shown, d, first, kind), block)

    def map(self, shown: Shown, d: int, first: int, kind: str) -> Block:
        b, ids = Builder(), [Value(INDEX, v.name) for v in shown.index_map.params]
        yields = list(inline(b, shown.index_map, ids))
        yields[d] = ids[self.axis]
        if kind == "element":
            yields[d] = b.mul(yields[d], b.index(self.factor))
            yields[d] = b.add(yields[d], b.index(first))
        elif first:
            yields[d] = b.add(yields[d], b.index(first // self.factor))
        return b.block(ids, yields)

    # --- code ---

    def op(self, op: Op, b: Builder) -> None:
        inside = (v for region in op.regions for o in walk(region) for v in o.operands)
        if not any(v in self.new for v in (*op.operands, *inside)):
            if op.name == "store":
                raise CannotReblock("programs store to the same place")
            b.ops.append(op)
            return
        rule = _RULES.get(op.name)
        if rule is None and is_elementwise(op):
            rule = _Joining.elementwise
        if rule is None:
            raise CannotReblock(f"'{op.name}' is not the same for each row")
        rule(self, op, b)

    def shape(self, value: Value) -> tuple[int, ...]:
        rows, *rest = value.tile.shape
        return (self.factor * rows, *rest)

    def index(self, access: Access) -> tuple:
        if access.mask is not None or any(v in self.new for v in access.index_operands):
            raise CannotReblock("an access has a mask or a computed place")
        if access.ref not in self.around:
            return (Span(0, self.factor), *access.index)
        row, *rest = access.index
        if not isinstance(row, At) or row.start is None:
            raise CannotReblock("a step takes several of the rows that it shows")
        return (Span(row.start, self.factor), *rest)

    def load(self, op: Op, b: Builder) -> None:
        access = Access.of(op)
        rows = access.index[access.ref in self.around :][:1]
        if not op.result.tile.rank or not all(isinstance(e, Span) for e in rows):
            raise CannotReblock("a program loads a single element")
        ref, index = self.new[access.ref], self.index(access)
        tile = b.load(ref, index, access.index_operands)
        self.new[op.result] = b.reshape(tile, shape=self.shape(op.result))

    def store(self, op: Op, b: Builder) -> None:
        access = Access.of(op)
        value = None if access.value is None else self.new.get(access.value)
        if access.ref not in self.new or value is None or access.value is None:
            raise CannotReblock("programs store the same, or to the same place")
        shape = (self.factor, *access.value.tile.shape)
        tile = b.reshape(value, shape=shape)
        ref, index = self.new[access.ref], self.index(access)
        b.store(ref, tile, index, access.index_operands)

    def elementwise(self, op: Op, b: Builder) -> None:
        made = [self.tile(v, b) for v in op.operands]
        self.new[op.result] = b.op(op.name, *made, **op.attrs)

    def tile(self, value: Value, b: Builder) -> Value:
        """A merged tile; of one that is the same for all rows, too."""
        if value in self.new or not value.tile.rank:
            return self.new.get(value, value)
        op = next((o for o in self.pipeline.body.ops if value in o.results), None)
        if op is not None and op.name == "constant":
            return b.constant(
                op.attrs["value"], value.tile.with_shape(self.shape(value))
            )
        if op is not None and op.name == "broadcast_in_dim":
            (x,) = op.operands
            places = zip(op.attrs["dims"], x.tile.shape, strict=True)
            if all(d > 0 or n == 1 for d, n in places):
                return b.broadcast(x, self.shape(value), op.attrs["dims"])
        raise CannotReblock("rows are computed with what is the same for all programs")

    def broadcast(self, op: Op, b: Builder) -> None:
        (x,), dims = op.operands, op.attrs["dims"]
        if dims[:1] != (0,) or x.tile.shape[0] != op.result.tile.shape[0]:
            raise CannotReblock("rows become columns")
        new = b.broadcast(self.new[x], self.shape(op.result), dims)
        self.new[op.result] = new

    def reshape(self, op: Op, b: Builder) -> None:
        shape = self.shape(op.result)
        self.new[op.result] = b.reshape(self.new[op.operands[0]], shape=shape)

    def transpose(self, op: Op, b: Builder) -> None:
        (x,), perm = op.operands, op.attrs["perm"]
        tile = b.reshape(self.new[x], shape=(self.factor, *x.tile.shape))
        tile = b.op("transpose", tile, perm=(0, *(d + 1 for d in perm)))
        self.new[op.result] = b.reshape(tile, shape=self.shape(op.result))

    def reduce(self, op: Op, b: Builder) -> None:
        if 0 in op.attrs["axes"]:
            raise CannotReblock("rows are added up")
        self.new[op.result] = b.op("reduce", self.new[op.operands[0]], **op.attrs)

    def dot(self, op: Op, b: Builder) -> None:
        lhs, rhs = Dot.of(op).sides
        if rhs.value in self.new or lhs.batch or lhs.free[:1] != (0,):
            raise CannotReblock("a matmul has another right operand for each program")
        self.new[op.result] = b.op("dot", self.new[lhs.value], rhs.value, **op.attrs)


_RULES: dict[str, Callable[[_Joining, Op, Builder], None]] = {
    "load": _Joining.load,
    "store": _Joining.store,
    "broadcast_in_dim": _Joining.broadcast,
    "reshape": _Joining.reshape,
    "transpose": _Joining.transpose,
    "reduce": _Joining.reduce,
    "dot": _Joining.dot,
}
