"""Random guarded steps: code of a loop or a grid that runs at some steps only.

The conditions compare sums of multiples of the counters, as kernels do that leave out
blocks (causal masks, windows, lengths); passes turn them into bounds.
"""

from collections.abc import Callable, Sequence

from pallasite.ir import types as T
from pallasite.ir.nodes import Block, Value
from tests.fuzz.writer import BITS, ROUGH, Writer

Step = Callable[[Writer], None]
COMPARED = ("lt", "le", "gt", "ge", "lt", "ge", "eq")


def guard(w: Writer, counter: Value, others: Sequence[Value]) -> Value:
    """A condition on a counter, and on others that do not change while it counts."""
    test = _comparison(w, counter, others)
    for _ in range(w.world.pick((0, 0, 1, 2))):
        other = w.world.pick((counter, counter, *others))
        more = _comparison(w, other, others)
        kind = w.world.pick(("and", "and", "and", "or"))
        test = w.b.op(kind, test, more)
    return test


def _comparison(w: Writer, counter: Value, others: Sequence[Value]) -> Value:
    x = _sum(w, counter)
    known = [v for v in others if v.type == counter.type]
    y = _sum(w, w.world.pick(known)) if known and w.world.chance(60) else None
    if y is None:
        y = w.small_integer(0, 9, counter.tile.dtype)
    sides = (x, y) if w.world.chance(60) else (y, x)
    return w.b.op(w.world.pick(COMPARED), *sides)


def _sum(w: Writer, value: Value) -> Value:
    b, dtype = w.b, value.tile.dtype
    factor = w.world.pick((1, 2, 3, -1) if dtype.is_signed_int else (1, 2, 3))
    if factor != 1:
        value = b.mul(value, w.number(factor, dtype))
    if w.world.chance(50):
        value = b.add(value, w.number(w.world.integer(0, 4), dtype))
    return value


def when(w: Writer, test: Value, then: Block) -> None:
    """Run a block with no results if a test holds."""
    w.b.emit("cond", w.b.cast(test, T.I32), regions=(Block(), then))


def guarded_loop(w: Writer, types: Sequence[T.TileType], step: Step) -> list[Value]:
    """A counted loop that does nothing but where its guard holds."""
    dtypes = [d for d in (T.I8, T.U32, T.I64) if d in w.world.dtypes]
    dtype = w.world.pick([T.I32, T.I32, T.I32, *dtypes])
    bounds = [w.small_integer(0, 2, dtype), w.small_integer(0, 6, dtype)]
    bounds.append(w.number(w.world.pick((1, 1, 1, 2)), dtype))
    before = [w.operand(t.dtype, t.shape) for t in types]
    inner = w.inner()
    params = [Value(T.scalar(dtype), "j"), *(Value(v.type, "c") for v in before)]
    for p in params:
        inner.add(p, ROUGH if p.tile.dtype.is_float else BITS)
    fixed = [v for v in w.tiles[::-1] if v.type == T.scalar(dtype)][:4]
    test = guard(inner, params[0], fixed)
    then = inner.inner()
    for _ in range(w.world.integer(1, 3)):
        step(then)
    yields = [then.operand(v.tile.dtype, v.tile.shape) for v in before]
    w.world.used.update((*bounds, *before, *yields))
    branches = (Block((), (), tuple(params[1:])), then.b.block((), yields))
    number = inner.b.cast(test, T.I32)
    after = inner.b.emit("cond", number, regions=branches)
    body = inner.b.block(params, after)
    return list(w.b.emit("for", *bounds, *before, regions=(body,)))
