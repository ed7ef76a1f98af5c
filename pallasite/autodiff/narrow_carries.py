"""Narrows loop-carried values that repeat a column over several lanes to the column.

A TPU kernel keeps a column of statistics as wide as a vector, writes it broadcast and
reads its first lane. What such a loop really carries is the column: `narrow_carries`
makes that explicit, so that analyses see the values that the kernel computes with.
"""

from collections.abc import Mapping

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops
from pallasite.ir.roles import Loop
from pallasite.ir.types import TileType


def narrow_carries(body: Block) -> Block:
    """Narrow carried values of every loop that start constant and become columns."""
    made = {v: op for op in walk(body) for v in op.results}

    def rewrite(op: Op, b: Rewriter) -> list[Value] | None:
        return _narrowed(Loop.of(op), b, made) if op.name == "for" else None

    narrowed = map_ops(body, rewrite)
    return body if narrowed is body else map_ops(narrowed, _lanes_of_column)


def _narrowed(
    loop: Loop, b: Rewriter, outside: Mapping[Value, Op]
) -> list[Value] | None:
    inside = {v: op for op in loop.body.ops for v in op.results}
    shapes: dict[int, tuple[int, ...]] = {}
    for n, (carry, init) in enumerate(zip(loop.carried, loop.inits, strict=True)):
        start = outside.get(init)
        shape = _column(loop.yields[n], carry, inside)
        if shape is not None and start is not None and start.name == "constant":
            shapes[n] = shape
    if not shapes:
        return None
    columns = {loop.yields[n]: shape for n, shape in shapes.items()}
    inits, params, yields = list(loop.inits), list(loop.carried), list(loop.yields)
    inner = Builder(loop.op.loc)
    for n, shape in shapes.items():
        type_ = TileType(shape, params[n].tile.dtype)
        inits[n] = b.constant(outside[loop.inits[n]].attrs["value"], type_)
        params[n] = Value(type_, loop.carried[n].name)
        inner.ops.append(_broadcast(loop.carried[n], params[n]))
    for op in loop.body.ops:
        if op.name == "cond" and any(r in columns for r in op.results):
            _narrow_cond(inner, op, columns)
        else:
            inner.ops.append(op)
    for n, shape in shapes.items():
        yields[n] = _first(inner, yields[n], shape)
    region = inner.block((loop.index, *params), yields)
    made = list(b.emit("for", *loop.bounds, *inits, regions=(region,)))
    for n in shapes:
        made[n] = b.broadcast(made[n], loop.results[n].tile.shape)
    return made


def _narrow_cond(b: Builder, op: Op, columns: Mapping[Value, tuple[int, ...]]) -> None:
    """The cond with columns for wide results, which are broadcast after it."""
    regions = []
    for region in op.regions:
        inner = Builder(op.loc)
        inner.ops += region.ops
        yields = [
            _first(inner, v, columns[r]) if r in columns else v
            for v, r in zip(region.yields, op.results, strict=True)
        ]
        regions.append(inner.block(region.params, yields))
    results = [
        Value(TileType(columns[r], r.tile.dtype), r.name) if r in columns else r
        for r in op.results
    ]
    b.ops.append(op.with_(results=tuple(results), regions=tuple(regions)))
    pairs = zip(op.results, results, strict=True)
    b.ops += [_broadcast(old, new) for old, new in pairs if old is not new]


def _first(b: Builder, value: Value, shape: tuple[int, ...]) -> Value:
    """The first lanes of a value."""
    starts, strides = (0,) * len(shape), (1,) * len(shape)
    return b.op("slice", value, starts=starts, limits=shape, strides=strides)


def _broadcast(wide: Value, column: Value) -> Op:
    """The op that broadcasts a column to a wide value."""
    b = Builder()
    b.broadcast(column, wide.tile.shape)
    return b.ops[0].with_(results=(wide,))


def _lanes_of_column(op: Op, b: Rewriter) -> Value | None:
    """A slice of a broadcast column that has the column's shape is the column."""
    source = b.producer(op.operands[0], "broadcast_in_dim") if op.operands else None
    if op.name != "slice" or source is None:
        return None
    (column,) = source.operands
    is_same = column.type == op.result.type and _is_column(source)
    return column if is_same else None


def _column(
    value: Value, carry: Value, inside: Mapping[Value, Op]
) -> tuple[int, ...] | None:
    """The shape from which a carried value's next value is broadcast."""
    op = inside.get(value)
    if op is None:
        return None
    if op.name == "cond":
        n = op.results.index(value)
        found = set()
        for region in op.regions:
            made = {v: each for each in region.ops for v in each.results}
            if region.yields[n] is not carry:
                found.add(_column(region.yields[n], carry, made))
        return found.pop() if len(found) == 1 else None
    is_column = op.name == "broadcast_in_dim" and _is_column(op)
    return op.operands[0].tile.shape if is_column else None


def _is_column(op: Op) -> bool:
    """Whether a broadcast only repeats dimensions of size one, and adds none."""
    shape, wide = op.operands[0].tile.shape, op.result.tile.shape
    dims = tuple(op.attrs["dims"])
    return len(shape) == len(wide) and dims == tuple(range(len(wide))) and shape != wide
