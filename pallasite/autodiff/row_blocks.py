"""Programs for blocks of rows, where each has all rows of a tile that it shifts.

A program that holds a whole sequence, and adds up copies that are shifted along it, is
too large for a multiprocessor of a GPU, and there are few of them. Its reverse adds
shifted copies to a cotangent, and sums over all rows to others (the weights of a
convolution). Here the rows become an axis of the grid. Each program computes a block of
them, from blocks of the operands that overlap: elements are functions of their
position, which slices and padding move. A sum over the rows is added up by programs, as
any other (`backward_windows.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from pallasite.autodiff.moved_tiles import NotMoved
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, BlockDim, Op, Span, Value
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import is_elementwise, producers_of
from pallasite.ir.roles import number_of
from pallasite.ir.types import INDEX, TileType
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program

LARGE = 1 << 15  # elements of a tile that is too large for one program
MOST = 1 << 14  # elements of a block of its rows
LINEAR = (
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "slice",
    "cast",
    "neg",
    "add",
    "sub",
)
# Ops that are finite where their operands are.
FINITE = ("cast", "neg", "abs", "sign", "add", "sub", "mul", "max", "min", "slice")
FINITE += ("pad", "concatenate", "select_n", "tanh", "logistic", "erf", "sin", "cos")


def row_blocks(program: Program) -> Program:
    """A program for each block of rows, where tiles are shifted along all of them."""
    tiles = [v.tile for op in program.body.ops for v in op.results if not v.is_ref]
    shapes = {t.shape for t in tiles if t.rank > 1 and t.size > LARGE}
    for shape in sorted(shapes, key=prod, reverse=True):
        size = shape[0]
        others = prod(shape) // size
        rows = next((r for r in _powers(MOST // others) if size % r == 0), 0)
        if rows < 8 or rows == size:
            continue
        try:
            return _Rows(program, size, rows).program_of_blocks()
        except NotMoved:
            continue
    return program


def _powers(most: int) -> list[int]:
    return [1 << p for p in reversed(range(max(most, 1).bit_length()))]


class _Rows:
    """Computes tiles at `rows` positions, `part * rows + at` and on.

    What lies outside a tile is not defined, unless `is_zero_beyond` says so.
    """

    def __init__(self, program: Program, size: int, rows: int):
        self.program, self.size, self.rows = program, size, rows
        self.made = producers_of(program.body)
        self.roots = Roots(program.body)
        self.written = self.roots.written(program.body)
        self.part = Value(INDEX, "part")
        self.reach: dict[Op, tuple[int, int]] = {}
        self.start_afresh()

    def start_afresh(self) -> None:
        self.b = Builder(self.program.loc)
        self.known: dict[tuple[Value, int, int], Value] = {}
        self.views: dict[Op, Value] = {}
        self.first = self.b.mul(self.part, self.b.index(self.rows))

    def program_of_blocks(self) -> Program:
        body = self.program.body
        adds = [op for op in body.ops if op.name == "atomic_rmw"]
        if any(op.regions or op.name == "store" for op in body.ops) or not adds:
            raise NotMoved
        for _ in range(2):  # first, to see what is loaded
            self.start_afresh()
            for op in adds:
                self.add(op)
        if all(low == high for low, high in self.reach.values()):
            raise NotMoved
        ops = [op for op in body.ops if op not in adds]
        new = Block((*body.params, self.part), (*ops, *self.b.ops))
        sizes = (*self.program.sizes, self.size // self.rows)
        return replace(self.program, body=new, sizes=sizes).simplified()

    def add(self, op: Op) -> None:
        access, view = Access.of(op), self.made.get(op.operands[0])
        if op.attrs["kind"] != "add" or access.mask is not None or view is None:
            raise NotMoved
        assert access.value is not None
        self.b.loc, value = op.loc, access.value
        whole = covers_whole(access.ref.ref.shape, access.index)
        window = view.attrs["window"] if view.name == "block_view" else None
        shown = window.block_shape if window is not None else ()
        if not whole or not shown or shown[0] != self.size:
            self.b.ops.append(op.with_(operands=self.with_value(op, self.sum(value))))
            return
        ref = self.view(view, 0, 0, "blocked")
        spans = tuple(Span(0, n) for n in ref.ref.shape)
        self.b.emit(
            "atomic_rmw", ref, self.value(value, 0, 0), kind="add", index=spans,
            mask=False,
        )  # fmt: skip

    def with_value(self, op: Op, value: Value) -> tuple[Value, ...]:
        old = Access.of(op).value
        return tuple(value if v is old else v for v in op.operands)

    # --- sums over all rows ---

    def sum(self, value: Value) -> Value:
        """A block's share of a sum over all rows."""
        op = self.op_of(value)
        if op.name == "reduce" and op.attrs["kind"] == "sum":
            (x,), axes = op.operands, op.attrs["axes"]
            rows = [d for d in axes if self.size < 2 * x.tile.shape[d] <= 2 * self.size]
            if len(rows) == 1:
                return self.b.op("reduce", self.inside(x, rows[0]), **op.attrs)
        if op.name == "pad" and self.number(op.operands[1]) == 0:
            x, zero = op.operands
            return self.b.op("pad", self.sum(x), zero, **op.attrs)
        if op.name not in LINEAR:
            raise NotMoved
        return self.b.op(op.name, *map(self.sum, op.operands), **op.attrs)

    def inside(self, value: Value, d: int) -> Value:
        """The rows of a tile, and zero after its last one."""
        found, rows = self.value(value, d, 0), value.tile.shape[d]
        if rows == self.size:
            return found
        return self.b.select(
            self.is_from(rows, d, 0, found), self.b.like(0, found), found
        )

    # --- rows of a tile ---

    def op_of(self, value: Value) -> Op:
        op = self.made.get(value)
        if op is None or op.regions or len(op.results) != 1:
            raise NotMoved
        reads = op.name == "load" and self.roots.of(op.operands[0]) not in self.written
        if not (reads or table()[op.name].effect is Effect.PURE):
            raise NotMoved
        return op

    def value(self, value: Value, d: int, at: int) -> Value:
        """The elements of a tile at the block's positions along a dimension."""
        if not value.tile.shape:
            return value
        key = value, d, at
        if key not in self.known:
            op = self.op_of(value)
            self.b.loc = op.loc
            rule = _RULES.get(op.name)
            if rule is None and not is_elementwise(op):
                raise NotMoved
            self.known[key] = (rule or _Rows.elementwise)(self, op, d, at)
        return self.known[key]

    def shape(self, value: Value, d: int) -> tuple[int, ...]:
        shape = value.tile.shape
        return (*shape[:d], self.rows, *shape[d + 1 :])

    def elementwise(self, op: Op, d: int, at: int) -> Value:
        operands = [self.value(v, d, at) for v in op.operands]
        return self.b.op(op.name, *operands, **op.attrs)

    def constant(self, op: Op, d: int, at: int) -> Value:
        type_ = op.result.tile.with_shape(self.shape(op.result, d))
        return self.b.constant(op.attrs["value"], type_)

    def iota(self, op: Op, d: int, at: int) -> Value:
        type_ = op.result.tile.with_shape(self.shape(op.result, d))
        made = self.b.op("iota", dim=op.attrs["dim"], type=type_)
        if op.attrs["dim"] != d:
            return made
        first = self.b.add(self.first, self.b.index(at))
        first = self.b.cast(first, type_.dtype)
        return self.b.add(made, self.b.broadcast(first, type_.shape, ()))

    def broadcast(self, op: Op, d: int, at: int) -> Value:
        (x,), dims = op.operands, op.attrs["dims"]
        if d in dims and x.tile.shape[dims.index(d)] != 1:
            x = self.value(x, dims.index(d), at)
        return self.b.broadcast(x, self.shape(op.result, d), dims)

    def slice(self, op: Op, d: int, at: int) -> Value:
        if op.attrs["strides"][d] != 1:
            raise NotMoved
        x = self.value(op.operands[0], d, at + op.attrs["starts"][d])
        starts, limits = list(op.attrs["starts"]), list(op.attrs["limits"])
        starts[d], limits[d] = 0, self.rows
        strides = op.attrs["strides"]
        edges = tuple(starts), tuple(limits)
        if edges == ((0,) * len(starts), x.tile.shape) and set(strides) == {1}:
            return x
        return self.b.op("slice", x, starts=edges[0], limits=edges[1], strides=strides)

    def pad(self, op: Op, d: int, at: int) -> Value:
        x, fill = op.operands
        low, high, inner = (list(op.attrs[k]) for k in ("low", "high", "interior"))
        before, end = low[d], low[d] + x.tile.shape[d]
        if inner[d]:
            raise NotMoved
        found = self.value(x, d, at - before)
        low[d] = high[d] = 0
        if any((*low, *high, *inner)):
            sides = dict(low=tuple(low), high=tuple(high), interior=tuple(inner))
            found = self.b.op("pad", found, fill, **sides)
        other = self.b.broadcast(fill, found.tile.shape, ())
        zero = self.number(fill) == 0
        if before > 0 and not (zero and self.is_zero_before(x, d)):
            found = self.b.select(self.is_from(before, d, at, found), found, other)
        if end < at + self.size and not (zero and self.is_zero_after(x, d)):
            found = self.b.select(self.is_from(end, d, at, found), other, found)
        return found

    def joined(self, op: Op, d: int, at: int) -> Value:
        axis, found = op.attrs["axis"], None
        if axis != d:
            parts = [self.value(v, d, at) for v in op.operands]
            return self.b.op("concatenate", *parts, axis=axis)
        start = 0
        for piece in op.operands:
            part = self.value(piece, d, at - start)
            if found is not None:
                here = self.is_from(start, d, at, part)
                part = self.b.select(here, part, found)
            found, start = part, start + piece.tile.shape[d]
        assert found is not None
        return found

    def number(self, value: Value) -> object:
        op = self.made.get(value)
        return op.attrs["value"] if op is not None and op.name == "constant" else None

    def is_from(self, start: int, d: int, at: int, value: Value) -> Value:
        """Whether positions are at least `start`."""
        type_ = TileType(value.tile.shape, INDEX.dtype)
        first = self.b.add(self.first, self.b.index(at))
        here = self.b.op("iota", dim=d, type=type_)
        here = self.b.add(here, self.b.broadcast(first, type_.shape, ()))
        return self.b.op("ge", here, self.b.like(start, here))

    def load(self, op: Op, d: int, at: int) -> Value:
        access, view = Access.of(op), self.made.get(op.operands[0])
        entry = access.index[d] if len(access.index) == op.result.tile.rank else None
        fixed = not access.index_operands and access.mask is None
        if not fixed or not isinstance(entry, Span) or entry.stride != 1:
            raise NotMoved
        if (
            view is None
            or view.name != "block_view"
            or view.operands[0] in self.written
        ):
            raise NotMoved
        at += entry.start or 0
        old = self.reach.setdefault(view, (at, at))
        self.reach[view] = low, high = min(old[0], at), max(old[1], at)
        if high - low > self.rows:
            raise NotMoved
        if view not in self.views or self.reach[view] != old:
            self.views[view] = self.view(view, low, high, "element", d)
        index = list(access.index)
        index[d] = Span(at - low, self.rows)
        return self.b.load(self.views[view], tuple(index))

    def view(self, view: Op, low: int, high: int, kind: str, d: int = 0) -> Value:
        """A window on the block's rows, and those around them that are loaded."""
        array, *indices = view.operands
        window = view.attrs["window"]
        kept = [n for n, dim in enumerate(window.dims) if dim.kind != "squeezed"]
        n, dims = kept[d], list(window.dims)
        is_all = dims[n] == BlockDim(self.size) and array.ref.shape[n] == self.size
        if not is_all or number_of(self.made, indices[n]) != 0:
            raise NotMoved
        if kind == "blocked":
            dims[n], indices[n] = BlockDim(self.rows), self.part
            new = replace(window, dims=tuple(dims))
            return self.b.op("block_view", array, *indices, window=new)
        if window.fill not in (None, 0):
            raise NotMoved
        edges = max(0, -low), max(0, high)
        dims[n] = BlockDim(self.rows + high - low, "element", edges)
        indices[n] = self.b.add(self.first, self.b.index(low + edges[0]))
        new = replace(window, dims=tuple(dims), fill=0)
        return self.b.op("block_view", array, *indices, window=new)

    # --- beyond a tile ---

    def is_zero_before(self, value: Value, d: int) -> bool:
        """Whether what is computed before a tile's first row is zero."""
        return self.is_zero(value, d, lambda op: op.attrs["starts"][d] == 0)

    def is_zero_after(self, value: Value, d: int) -> bool:
        """Whether what is computed after a tile's last row is zero."""
        return self.is_zero(
            value,
            d,
            lambda op: op.attrs["limits"][d] == op.operands[0].tile.shape[d],
        )

    def is_zero(self, value: Value, d: int, at_end: Callable[[Op], bool]) -> bool:
        op = self.made.get(value)
        if op is None or not value.tile.shape:
            return False
        here = lambda v: self.is_zero(v, d, at_end)
        if op.name == "load":
            whole = covers_whole(op.operands[0].ref.shape, op.attrs["index"])
            return whole and value.tile.shape[d] == self.size
        if op.name == "slice":
            return at_end(op) and here(op.operands[0])
        if op.name in ("cast", "neg"):
            return here(op.operands[0])
        if op.name in ("add", "sub"):
            return all(map(here, op.operands))
        one, two = op.operands if op.name == "mul" else (None, None)
        pairs = ((one, two), (two, one))
        return any(v and w and here(v) and self.is_finite(w, d) for v, w in pairs)

    def is_finite(self, value: Value, d: int) -> bool:
        """Whether what is computed beyond a tile's rows is finite if its rows are.

        There are zeros for what is loaded: their logarithm or reciprocal is not.
        """
        op = self.made.get(value)
        if op is None or not value.tile.shape:
            return True  # it is the same for all rows
        if op.name == "broadcast_in_dim":
            (x,), dims = op.operands, op.attrs["dims"]
            if d not in dims or x.tile.shape[dims.index(d)] == 1:
                return True
            return self.is_finite(x, dims.index(d))
        if op.name in ("load", "constant", "iota"):
            return True
        return op.name in FINITE and all(self.is_finite(v, d) for v in op.operands)


_RULES: dict[str, Callable[[_Rows, Op, int, int], Value]] = {
    "constant": _Rows.constant,
    "iota": _Rows.iota,
    "broadcast_in_dim": _Rows.broadcast,
    "slice": _Rows.slice,
    "concatenate": _Rows.joined,
    "pad": _Rows.pad,
    "load": _Rows.load,
}
