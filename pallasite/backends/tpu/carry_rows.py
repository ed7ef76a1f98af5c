"""carry_rows: vectors that loops carry, and branches return, become tiles of one row.

libtpu keeps a vector along lanes, or along sublanes if it is a sum along the last
dimension. Where a loop starts with one and yields the other, or two branches differ,
libtpu ends the process (seen with 0.0.51). A tile of shape (1, n) has one layout only.
Vectors that are sums along rows before and after stay as they are, since attention's
are used along rows. Kernel in, Kernel out.
"""

from collections.abc import Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.roles import Cond, Loop, While
from pallasite.ir.types import TileType

_BITS = 32  # of the elements of vectors that Mosaic reshapes


def carry_rows(kernel: Kernel) -> Kernel:
    """The kernel with rows in place of vectors whose layout may change."""
    if not any(op.name in _RULES for op in walk(kernel.body)):
        return kernel
    return kernel.with_(body=_Walk(kernel).block(kernel.body))


class _Walk:
    def __init__(self, kernel: Kernel):
        self.made = {v: op for op in walk(kernel.body) for v in op.results}

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        for op in block.ops:
            if op.regions:
                op = op.with_(regions=tuple(map(self.block, op.regions)))
            rule = _RULES.get(op.name)
            ops += [op] if rule is None else rule(self, op)
        return Block(block.params, tuple(ops), block.yields)

    def loop(self, op: Op) -> list[Op]:
        loop = Loop.of(op)
        rows = self.rows(loop.inits, loop.yields)
        if not any(rows):
            return [op]
        before = Builder(op.loc)
        inits = tuple(_as_rows(before, loop.inits, rows))
        body = _left(_entered(loop.body, loop.carried, rows), rows)
        new = loop.with_(inits=inits, body=body).to_op()
        return [*before.ops, *_returned(new, rows)]

    def while_(self, op: Op) -> list[Op]:
        loop = While.of(op)
        rows = self.rows(loop.inits, loop.body.yields)
        if not any(rows):
            return [op]
        before = Builder(op.loc)
        inits = tuple(_as_rows(before, loop.inits, rows))
        test = _entered(loop.condition, loop.condition.params, rows)
        body = _left(_entered(loop.body, loop.body.params, rows), rows)
        new = op.with_(operands=inits, regions=(test, body))
        return [*before.ops, *_returned(new, rows)]

    def rows(self, inits: Sequence[Value], yields: Sequence[Value]) -> list[bool]:
        """Which values a loop carries as rows.

        What starts as one number everywhere takes the layout of what follows.
        """
        pairs = zip(inits, yields, strict=True)
        return [not self.is_uniform(a) and self.changes(a, b) for a, b in pairs]

    def cond(self, op: Op) -> list[Op]:
        branches = Cond.of(op).branches
        results = zip(*(branch.yields for branch in branches), strict=True)
        rows = [self.changes(*values) for values in results]
        if not any(rows):
            return [op]
        regions = tuple(_left(branch, rows) for branch in branches)
        return _returned(op.with_(regions=regions), rows)

    def changes(self, *values: Value) -> bool:
        """Whether values that take turns may be vectors of different layouts."""
        tile = values[0].type
        if not isinstance(tile, TileType) or tile.rank != 1:
            return False
        if tile.dtype.is_bool or tile.dtype.bits != _BITS:
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


_RULES = {"for": _Walk.loop, "while": _Walk.while_, "cond": _Walk.cond}


def _row(value: Value) -> Value:
    tile = value.tile
    return Value(TileType((1, *tile.shape), tile.dtype), value.name)


def _as_rows(b: Builder, values: Sequence[Value], rows: Sequence[bool]) -> list[Value]:
    return [
        b.op("reshape", v, shape=(1, *v.tile.shape)) if is_row else v
        for v, is_row in zip(values, rows, strict=True)
    ]


def _as_vector(row: Value, vector: Value, at: Op | None = None) -> Op:
    """The op that makes `vector` from a row."""
    b = Builder(at.loc if at else None)
    b.op("reshape", row, shape=vector.tile.shape)
    return b.ops[0].with_(results=(vector,))


def _entered(region: Block, carried: Sequence[Value], rows: Sequence[bool]) -> Block:
    """A region that gets rows for some of its parameters."""
    vectors = [v for v, is_row in zip(carried, rows, strict=True) if is_row]
    new = {v: _row(v) for v in vectors}
    params = tuple(new.get(v, v) for v in region.params)
    made = [_as_vector(new[v], v) for v in vectors]
    return Block(params, (*made, *region.ops), region.yields)


def _left(region: Block, rows: Sequence[bool]) -> Block:
    """A region that yields rows."""
    b = Builder()
    yields = _as_rows(b, region.yields, rows)
    return Block(region.params, (*region.ops, *b.ops), tuple(yields))


def _returned(op: Op, rows: Sequence[bool]) -> list[Op]:
    """An op that returns rows, and the vectors made from them."""
    pairs = list(zip(op.results, rows, strict=True))
    results = tuple(_row(v) if is_row else v for v, is_row in pairs)
    vectors = [
        _as_vector(row, v, op)
        for row, (v, is_row) in zip(results, pairs, strict=True)
        if is_row
    ]
    return [op.with_(results=results), *vectors]
