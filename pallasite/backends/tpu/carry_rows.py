"""carry_rows: vectors that loops carry, and branches return, become tiles of one row.

libtpu keeps a vector along lanes, or along sublanes if it is a sum along the last
dimension. Where a loop starts with one and yields the other, or two branches differ,
libtpu ends the process (seen with 0.0.51). A tile of shape (1, n) has one layout only.
Vectors that are sums along rows before and after stay as they are, since attention's
are used along rows.

Nor can libtpu move a mask of a vector from the layout of what was compared to that of
what it selects. So in loops with such masks all vectors are rows, also those that start
as one number, and their elementwise ops are those of rows. Kernel in, Kernel out.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import dead_code, producers_of
from pallasite.ir.roles import Cond, Loop, While
from pallasite.ir.types import TileType

_BITS = 32  # of the elements of vectors that Mosaic reshapes


def carry_rows(kernel: Kernel) -> Kernel:
    """The kernel with rows in place of vectors whose layout may change."""
    if not any(op.name in _RULES for op in walk(kernel.body)):
        return kernel
    return dead_code(kernel.with_(body=_Walk(kernel).block(kernel.body)))


class _Walk:
    def __init__(self, kernel: Kernel):
        self.made = producers_of(kernel.body)
        self.is_masked = False  # whether a loop around has masks of vectors
        self.row_of: dict[Value, Value] = {}

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        for op in block.ops:
            if op.regions:
                ops += self.with_regions(op)
            elif self.is_masked and _is_of_vectors(op):
                ops += self.of_rows(op)
            else:
                ops.append(op)
        return Block(block.params, tuple(ops), block.yields)

    def with_regions(self, op: Op) -> list[Op]:
        outside = self.is_masked
        if op.name in ("for", "while"):
            self.is_masked |= _has_vector_masks(op)
            params = [p for region in op.regions for p in region.params]
            for param in filter(_is_carried_row, params if self.is_masked else ()):
                self.row(param)  # which the region's ops then use
        op = op.with_(regions=tuple(map(self.block, op.regions)))
        rule = _RULES.get(op.name)
        ops = [op] if rule is None else rule(self, op)
        self.is_masked = outside
        return ops

    def of_rows(self, op: Op) -> list[Op]:
        """An elementwise op of vectors, done on rows."""
        b = Builder(op.loc)
        operands = [self.as_row(b, v) if v.tile.shape else v for v in op.operands]
        self.row_of[op.result] = b.op(op.name, *operands, **op.attrs)
        return [*b.ops, _as_vector(self.row_of[op.result], op.result, op)]

    def as_row(self, b: Builder, vector: Value) -> Value:
        if vector in self.row_of:
            return self.row_of[vector]
        shape, op = (1, *vector.tile.shape), self.made.get(vector)
        if op is not None and op.name == "constant":
            return b.constant(op.attrs["value"], vector.tile.with_shape(shape))
        if op is not None and self.is_uniform(vector):
            return b.broadcast(op.operands[0], shape)
        return b.op("reshape", vector, shape=shape)

    def as_rows(
        self, b: Builder, values: Sequence[Value], rows: Sequence[bool]
    ) -> list[Value]:
        pairs = zip(values, rows, strict=True)
        return [self.as_row(b, v) if is_row else v for v, is_row in pairs]

    def row(self, vector: Value) -> Value:
        """The row that takes the place of a parameter or a result."""
        tile = vector.tile
        row = Value(tile.with_shape((1, *tile.shape)), vector.name)
        return self.row_of.setdefault(vector, row)

    def loop(self, op: Op) -> list[Op]:
        loop = Loop.of(op)
        rows = self.rows(loop.inits, loop.yields)
        if not any(rows):
            return [op]
        before = Builder(op.loc)
        inits = tuple(self.as_rows(before, loop.inits, rows))
        body = self.left(self.entered(loop.body, loop.carried, rows), rows)
        new = loop.with_(inits=inits, body=body).to_op()
        return [*before.ops, *self.returned(new, rows)]

    def while_(self, op: Op) -> list[Op]:
        loop = While.of(op)
        rows = self.rows(loop.inits, loop.body.yields)
        if not any(rows):
            return [op]
        before = Builder(op.loc)
        inits = tuple(self.as_rows(before, loop.inits, rows))
        test = self.entered(loop.condition, loop.condition.params, rows)
        body = self.left(self.entered(loop.body, loop.body.params, rows), rows)
        new = op.with_(operands=inits, regions=(test, body))
        return [*before.ops, *self.returned(new, rows)]

    def rows(self, inits: Sequence[Value], yields: Sequence[Value]) -> list[bool]:
        """Which values a loop carries as rows.

        What starts as one number everywhere takes the layout of what follows.
        """
        if self.is_masked:
            return list(map(_is_carried_row, inits))
        pairs = zip(inits, yields, strict=True)
        return [not self.is_uniform(a) and self.changes(a, b) for a, b in pairs]

    def cond(self, op: Op) -> list[Op]:
        branches = Cond.of(op).branches
        results = zip(*(branch.yields for branch in branches), strict=True)
        rows = [self.changes(*values) for values in results]
        if not any(rows):
            return [op]
        regions = tuple(self.left(branch, rows) for branch in branches)
        return self.returned(op.with_(regions=regions), rows)

    def changes(self, *values: Value) -> bool:
        """Whether values that take turns may be vectors of different layouts."""
        if not _is_carried_row(values[0]):
            return False
        varying = [v for v in values if not self.is_uniform(v)]
        return not all(map(self.is_along_sublanes, varying))

    def is_uniform(self, value: Value) -> bool:
        op = self.made.get(value)
        if op is None or op.name == "constant":
            return op is not None
        return op.name == "broadcast_in_dim" and not op.operands[0].tile.shape

    def is_along_sublanes(self, value: Value) -> bool:
        """Whether a vector is a sum along rows, or computed from such sums only."""
        op = self.made.get(value)
        if op is None:
            return False
        if op.name == "reduce":
            rank = op.operands[0].tile.rank
            return rank > 1 and tuple(op.attrs["axes"]) == (rank - 1,)
        if not table()[op.name].elementwise:
            return False
        varying = [v for v in op.operands if not self.is_uniform(v)]
        return bool(varying) and all(map(self.is_along_sublanes, varying))

    def entered(
        self, region: Block, carried: Sequence[Value], rows: Sequence[bool]
    ) -> Block:
        """A region that gets rows for some of its parameters."""
        vectors = [v for v, is_row in zip(carried, rows, strict=True) if is_row]
        new = {v: self.row(v) for v in vectors}
        params = tuple(new.get(v, v) for v in region.params)
        made = [_as_vector(new[v], v) for v in vectors]
        return Block(params, (*made, *region.ops), region.yields)

    def left(self, region: Block, rows: Sequence[bool]) -> Block:
        """A region that yields rows."""
        b = Builder()
        yields = self.as_rows(b, region.yields, rows)
        return Block(region.params, (*region.ops, *b.ops), tuple(yields))

    def returned(self, op: Op, rows: Sequence[bool]) -> list[Op]:
        """An op that returns rows, and the vectors made from them."""
        pairs = list(zip(op.results, rows, strict=True))
        results = tuple(self.row(v) if is_row else v for v, is_row in pairs)
        vectors = [_as_vector(self.row(v), v, op) for v, is_row in pairs if is_row]
        return [op.with_(results=results), *vectors]


_RULES = {"for": _Walk.loop, "while": _Walk.while_, "cond": _Walk.cond}


def _may_be_row(type_: object) -> bool:
    if not isinstance(type_, TileType) or type_.rank != 1:
        return False
    return type_.dtype.is_bool or type_.dtype.bits == _BITS


def _is_carried_row(value: Value) -> bool:
    return _may_be_row(value.type) and not value.tile.dtype.is_bool


def _is_of_vectors(op: Op) -> bool:
    if not table()[op.name].elementwise or not _may_be_row(op.result.type):
        return False
    return all(not v.tile.shape or _may_be_row(v.type) for v in op.operands)


def _has_vector_masks(op: Op) -> bool:
    inside = (inner for region in op.regions for inner in walk(region))
    return any(_is_of_vectors(o) and o.result.tile.dtype.is_bool for o in inside)


def _as_vector(row: Value, vector: Value, at: Op | None = None) -> Op:
    """The op that makes `vector` from a row."""
    b = Builder(at.loc if at else None)
    b.op("reshape", row, shape=vector.tile.shape)
    return b.ops[0].with_(results=(vector,))
