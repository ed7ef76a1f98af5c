"""replicate_columns: replicates per-row values across all lanes.

In: tiles of shape (rows, 1), as reductions with `keepdims` give them (the maxima and
sums of a softmax, the mean of a norm), and tiles of shape (rows,) that are combined
with row reductions or broadcast along rows. A TPU keeps the former in one lane of each
vreg and the latter along the lanes of a few vregs, and moves them to the other lanes
for every row that they are combined with. Out: the same values as tiles of shape (rows,
lanes), which take as many vregs as (rows, 1); scratch for them is reshaped too.
Broadcasting a row's value along a wider tile then only reuses the same vregs. Columns
of blocks, and ops that no rule here covers, stay.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import dead_code, users_of
from pallasite.ir.roles import Loop
from pallasite.ir.types import BOOL, F32, I32, Type
from pallasite.passes.analysis.carried import accesses_all

_DTYPES = (F32, I32)  # of columns that are replicated to all lanes
_SHAPES = {"broadcast_in_dim", "reshape", "constant"}


def replicate_columns(kernel: Kernel, lanes: int) -> Kernel:
    """Replicate columns that are combined with rows to all `lanes` of the rows."""
    columns = _Columns(kernel, lanes)
    if not any(map(columns.is_repeated, walk(kernel.body))):
        return kernel
    new = kernel.with_(body=_Walk(kernel, columns, lanes).block(kernel.body))
    return dead_code(new)


class _Columns:
    """Which values have one number per row.

    By shape, those of shape (rows, 1); by use, those of shape (rows,) that are combined
    with a row reduction or broadcast along rows. Those rows have at least `lanes`
    elements, so that no tile becomes larger than existing ones.
    """

    def __init__(self, kernel: Kernel, lanes: int):
        self.parent: dict[Value, Value] = {}
        users = users_of(kernel.body)
        seeds: list[Value] = []
        for op in walk(kernel.body):
            row = table()[op.name]
            if row.elementwise:
                for value in op.operands:
                    if value.type.shape == op.result.type.shape:
                        self._join(value, op.result)
            elif accesses_all(op):
                tile = op.result if op.results else op.operands[1]
                if op.operands[0].ref.space == "vmem":
                    self._join(op.operands[0], tile)
            elif op.name == "reduce" and op.operands[0].tile.rank > 1:
                *outer, last = op.operands[0].tile.shape
                if tuple(op.attrs["axes"]) == (len(outer),) and last >= lanes:
                    seeds.append(op.result)
            elif op.name == "broadcast_in_dim" and _adds_last_dim(op):
                widths = [op.attrs["shape"][-1]]
                if widths == [1]:
                    widths += [
                        u.result.type.shape[-1]
                        for u in users[op.result]
                        if u.name == "broadcast_in_dim"
                    ]
                if max(widths) >= lanes:
                    seeds.append(op.operands[0])
            elif op.name in ("for", "cond"):
                self._join_taking_turns(op)
        self.roots = {self._root(value) for value in seeds}

    def _join_taking_turns(self, op: Op) -> None:
        """What a loop carries, or what branches return, has one form."""
        groups = [op.results, *(region.yields for region in op.regions)]
        if op.name == "for":
            loop = Loop.of(op)
            groups += [loop.inits, loop.carried]
        for result, *others in zip(*groups, strict=True):
            for value in others:
                self._join(value, result)

    def _root(self, value: Value) -> Value:
        while (up := self.parent.get(value)) is not None:
            value = up
        return value

    def _join(self, a: Value, b: Value) -> None:
        a, b = self._root(a), self._root(b)
        if a is not b:
            self.parent[a] = b

    def is_line(self, value: Value) -> bool:
        """Whether a value has shape (rows,)."""
        shape = value.type.shape
        return bool(shape) and shape[-1] > 1 and self._root(value) in self.roots

    def has(self, value: Value, dtypes: Sequence[object] = (*_DTYPES, BOOL)) -> bool:
        *_, rows, columns = (1, 1, *value.type.shape)
        if value.type.dtype not in dtypes:
            return False
        return (columns == 1 and rows > 1) or self.is_line(value)

    def is_repeated(self, op: Op) -> bool:
        """Whether an op broadcasts a column along rows."""
        if op.name != "broadcast_in_dim" or not self.has(op.operands[0], _DTYPES):
            return False
        (x,), shape = op.operands, tuple(op.attrs["shape"])
        if self.is_line(x):
            return _adds_last_dim(op) and shape[-1] > 1
        same_rows = shape[:-1] == x.tile.shape[:-1]
        in_order = tuple(op.attrs["dims"]) == tuple(range(len(shape)))
        return same_rows and in_order and shape[-1] > 1


def _adds_last_dim(op: Op) -> bool:
    shape, (x,) = tuple(op.attrs["shape"]), op.operands
    in_order = tuple(op.attrs["dims"]) == tuple(range(x.tile.rank))
    return in_order and bool(x.tile.rank) and shape[:-1] == x.tile.shape


class _Walk:
    """Rebuilds blocks; `wide` has the replicated form of columns, where one exists.

    A column has its narrow form, its wide form, or both: a missing one is made from the
    other on demand.
    """

    def __init__(self, kernel: Kernel, columns: _Columns, lanes: int):
        self.columns, self.lanes = columns, lanes
        self.wide: dict[Value, Value] = {}
        self.new: dict[Value, Value] = {}
        self.replaced: set[Value] = set()  # columns without their narrow form
        self.scratch = _scratch(kernel, columns)

    # --- values ---

    def type(self, value: Value) -> Type:
        shape = value.type.shape
        rows = shape if self.columns.is_line(value) else shape[:-1]
        return value.type.with_shape((*rows, self.lanes))

    def narrow(self, b: Builder, value: Value) -> Value:
        if value not in self.replaced:
            return self.new.get(value, value)
        wide = self.wide[value]
        limits = (*wide.tile.shape[:-1], 1)
        starts, strides = (0,) * len(limits), (1,) * len(limits)
        column = b.op("slice", wide, starts=starts, limits=limits, strides=strides)
        if column.tile.shape == value.tile.shape:
            return column
        return b.op("reshape", column, shape=value.tile.shape)

    def widened(self, b: Builder, value: Value) -> Value:
        if value in self.wide:
            return self.wide[value]
        shape, rank = self.type(value).shape, len(value.type.shape)
        return b.broadcast(self.new.get(value, value), shape, range(rank))

    def operands(self, b: Builder, op: Op) -> tuple[Value, ...]:
        return tuple(self.narrow(b, v) for v in op.operands)

    def set_wide(self, old: Value, wide: Value) -> None:
        self.wide[old] = wide
        self.replaced.add(old)

    # --- blocks and ops ---

    def block(self, block: Block, wide: Sequence[bool] = ()) -> Block:
        """`wide`: which parameters, from the second on, and which yields are wide."""
        b = Builder()
        for op in block.ops:
            b.loc = op.loc
            self.op(b, op)
        yields = [
            self.widened(b, v) if is_wide else self.narrow(b, v)
            for v, is_wide in zip(
                block.yields, wide or (False,) * len(block.yields), strict=True
            )
        ]
        params = [
            self.wide.get(p, p) if p in self.replaced else p for p in block.params
        ]
        return b.block(params, yields)

    def op(self, b: Builder, op: Op) -> None:
        if op.name == "alloc" and op.result in self.scratch:
            type_ = self.type(op.result)
            self.new[op.result] = b.op("alloc", type=type_)
        elif op.name == "load" and op.operands[0] in self.scratch:
            self.set_wide(op.result, b.load(self.new[op.operands[0]]))
        elif op.name == "store" and op.operands[0] in self.scratch:
            ref, value = op.operands
            b.store(self.new[ref], self.widened(b, value))
        elif op.name in ("cond", "for"):
            self.control(b, op)
        elif self.columns.is_repeated(op):
            self.new[op.result] = self.repeated(b, op)
        elif not (self.is_wide_shape(b, op) or self.is_wide_elementwise(b, op)):
            self.kept(b, op)

    def kept(self, b: Builder, op: Op) -> None:
        regions = tuple(self.block(region) for region in op.regions)
        b.ops.append(op.with_(operands=self.operands(b, op), regions=regions))

    def control(self, b: Builder, op: Op) -> None:
        """Values carried by branches and loops are wide."""
        wide = [self.columns.has(v, _DTYPES) for v in op.results]
        if not any(wide):
            self.kept(b, op)
            return
        results = [
            Value(self.type(v), v.name) if is_wide else v
            for v, is_wide in zip(op.results, wide, strict=True)
        ]
        operands = list(self.operands(b, op))
        if op.name == "for":
            loop = Loop.of(op)
            first = len(operands) - len(wide)
            for n, is_wide in enumerate(wide):
                if is_wide:
                    operands[first + n] = self.widened(b, op.operands[first + n])
                    old = loop.carried[n]
                    self.set_wide(old, Value(self.type(old), old.name))
        regions = tuple(self.block(region, wide) for region in op.regions)
        for old, new, is_wide in zip(op.results, results, wide, strict=True):
            if is_wide:
                self.set_wide(old, new)
        changed = op.with_(
            operands=tuple(operands), results=tuple(results), regions=regions
        )
        b.ops.append(changed)

    def repeated(self, b: Builder, op: Op) -> Value:
        """Broadcast a row's value along a tile: its vregs, repeated."""
        wide, (*_, n) = self.widened(b, op.operands[0]), op.attrs["shape"]
        copies = [wide] * -(-n // self.lanes)
        joined = wide
        if len(copies) > 1:
            joined = b.op("concatenate", *copies, axis=len(op.attrs["shape"]) - 1)
        if joined.tile.shape[-1] == n:
            return joined
        shape = op.attrs["shape"]
        whole = dict(starts=(0,) * len(shape), strides=(1,) * len(shape))
        return b.op("slice", joined, limits=shape, **whole)

    def is_wide_shape(self, b: Builder, op: Op) -> bool:
        """Handle a column made from a constant, or from one number per row."""
        if op.name not in _SHAPES or not self.columns.has(op.result, _DTYPES):
            return False
        shape = self.type(op.result).shape
        if op.name == "constant":
            type_ = op.result.tile.with_shape(shape)
            self.set_wide(op.result, b.constant(op.attrs["value"], type_))
            return True
        (x,) = op.operands
        is_column = op.name == "reshape" or _adds_last_dim(op)
        if is_column and x in self.wide and self.wide[x].tile.shape == shape:
            self.set_wide(op.result, self.wide[x])  # (rows,) to (rows, 1), or back
            return True
        if op.name == "reshape":
            if x.tile.shape != shape[:-1] or self.columns.is_line(op.result):
                return False
            dims = tuple(range(len(shape) - 1))
        else:
            dims = tuple(op.attrs["dims"])
            if len(shape) - 1 in dims:
                return False  # it has a last dimension of its own
        self.set_wide(op.result, b.broadcast(self.narrow(b, x), shape, dims))
        return True

    def is_wide_elementwise(self, b: Builder, op: Op) -> bool:
        """Handle an elementwise op on columns."""
        if not table()[op.name].elementwise or not self.columns.has(op.result):
            return False
        columns = [v for v in op.operands if v.type.shape]
        if not any(v in self.wide for v in columns):
            return False
        for value in columns:
            if value not in self.wide and value.type.dtype not in _DTYPES:
                return False
        operands = [
            self.widened(b, v) if v.type.shape else self.narrow(b, v)
            for v in op.operands
        ]
        self.set_wide(op.result, b.op(op.name, *operands, **op.attrs))
        return True


def _scratch(kernel: Kernel, columns: _Columns) -> set[Value]:
    """Scratch that holds columns and is only accessed as a whole."""
    users = users_of(kernel.body)
    return {
        op.result
        for op in walk(kernel.body)
        if op.name == "alloc"
        and op.result.ref.space == "vmem"
        and columns.has(op.result, _DTYPES)
        and all(map(accesses_all, users[op.result]))
    }
