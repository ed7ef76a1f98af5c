"""Random control flow: branches, counted loops and while loops, nested."""

from collections.abc import Callable, Sequence

from pallasite.ir import types as T
from pallasite.ir.nodes import Block, Value
from tests.fuzz.guards import guarded_loop
from tests.fuzz.writer import BITS, ROUGH, Writer

Step = Callable[[Writer], None]
MAX_DEPTH = 2


def control_op(w: Writer, step: Step) -> None:
    """Add a branch or a loop; `step` writes one line of its code."""
    nests = (branch, counted, guarded, while_) if w.depth < MAX_DEPTH else ()
    w.world.pick((promise, *nests))(w, step)


def _lines(w: Writer, step: Step) -> None:
    for _ in range(w.world.integer(1, 4)):
        step(w)


def _result_types(w: Writer) -> list[T.TileType]:
    count = w.world.integer(0, 2)
    return [
        T.TileType(w.world.shape(ranks=(1, 0, 2)), w.world.dtype())
        for _ in range(count)
    ]


def _yields(w: Writer, types: list[T.TileType]) -> list[Value]:
    values = [w.operand(t.dtype, t.shape) for t in types]
    w.world.used.update(values)
    return values


def _add_results(w: Writer, results: Sequence[Value]) -> None:
    for value in results:
        w.add(value, ROUGH if value.tile.dtype.is_float else BITS)


def branch(w: Writer, step: Step) -> None:
    which = w.scalar() if w.world.chance(50) else w.small_integer(-1, 3)
    types = _result_types(w)
    regions = []
    for _ in range(w.world.integer(1, 3)):
        inner = w.inner()
        if types or w.world.chance(80):
            _lines(inner, step)
        regions.append(inner.b.block((), _yields(inner, types)))
    w.world.used.add(which)
    _add_results(w, w.b.emit("cond", which, regions=regions))


def counted(w: Writer, step: Step) -> None:
    dtypes = [d for d in (T.I8, T.U8, T.U32, T.I64) if d in w.world.dtypes]
    dtype = w.world.pick([T.I32, T.I32, T.I32, *dtypes])
    least = -1 if dtype.is_signed_int else 0
    bounds = [w.small_integer(least, 2, dtype), w.small_integer(0, 3, dtype)]
    bounds.append(w.small_integer(1, 2, dtype))
    carry = [w.operand(t.dtype, t.shape) for t in _result_types(w)]
    inner = w.inner()
    params = [Value(T.scalar(dtype), "i"), *(Value(v.type, "c") for v in carry)]
    for p in params:
        inner.add(p, ROUGH if p.tile.dtype.is_float else BITS)
    _lines(inner, step)
    body = inner.b.block(params, _yields(inner, [v.tile for v in carry]))
    w.world.used.update((*bounds, *carry))
    _add_results(w, w.b.emit("for", *bounds, *carry, regions=(body,)))


def guarded(w: Writer, step: Step) -> None:
    _add_results(w, guarded_loop(w, _result_types(w), step))


def while_(w: Writer, step: Step) -> None:
    """Counts up to a limit, or stops before if a carried number says so."""
    carry = [w.operand(t.dtype, t.shape) for t in _result_types(w)]
    limit = w.small_integer(0, 3)
    first = w.number(w.world.integer(0, 1), T.I32)
    types = [T.INDEX, *(v.tile for v in carry)]
    condition = _condition(w, types, limit)
    inner = w.inner()
    params = [Value(t, "w") for t in types]
    for p in params:
        inner.add(p, ROUGH if p.tile.dtype.is_float else BITS)
    _lines(inner, step)
    after = inner.emit("add", params[0], inner.number(1, T.I32))
    body = inner.b.block(params, [after, *_yields(inner, types[1:])])
    w.world.used.update((limit, *carry))
    results = w.b.emit("while", first, *carry, regions=(condition, body))
    _add_results(w, results)


def _condition(w: Writer, types: list[T.TileType], limit: Value) -> Block:
    inner = w.inner()
    params = [Value(t, "w") for t in types]
    go_on = inner.b.lt(params[0], limit)
    scalars = [p for p in params[1:] if p.type == T.scalar(T.I32)]
    if scalars and w.world.chance(50):
        seven = inner.number(7, T.I32)
        go_on = inner.b.and_(go_on, inner.b.ne(scalars[0], seven))
    w.world.used.add(limit)
    return inner.b.block(params, [go_on])


def promise(w: Writer, step: Step) -> None:
    """Ops that only say something: a multiple, a pause."""
    factor = w.world.pick((1, 2, 8))
    value = w.emit("mul", w.small_integer(-3, 3), w.number(factor, T.I32))
    w.emit("assume_multiple", value, multiple=factor)
    w.b.emit("delay", w.number(w.world.integer(0, 3), T.I32))
