"""Random softmaxes: exponentials of scaled scores less their maximum, row by row.

At once, or a running maximum and sum over the steps of a loop, as attention has them;
some scores are masked by a number that stands for minus infinity.
"""

from pallasite.ir import types as T
from pallasite.ir.nodes import Value
from tests.fuzz.writer import ROUGH, Writer

MASKS = (-1e4, -1e30, -2.381976426469702e38)


def softmax(w: Writer) -> None:
    """Rows of weights and their sums; or the state of a running softmax."""
    rows, columns = w.world.pick((4, 3, 1)), w.world.pick((4, 5, 8))
    mask = w.world.pick(MASKS)
    scores = w.operand(T.F32, (rows, columns))
    w.world.used.add(scores)
    low = w.number(mask, T.F32, (rows, 1))
    zero = w.number(0.0, T.F32, (rows, 1))
    if w.world.chance(50):
        state = _absorb(w, scores, low, zero, mask)
        _add(w, state)
        return
    inner = w.inner()
    j, top, total = Value(T.INDEX, "j"), Value(low.type, "m"), Value(zero.type, "s")
    moved = inner.b.cast(j, T.F32)
    moved = inner.b.broadcast(moved, (rows, columns), ())
    state = _absorb(inner, inner.b.add(scores, moved), top, total, mask)
    body = inner.b.block((j, top, total), state[:2])
    bounds = [w.number(n, T.I32) for n in (0, w.world.integer(0, 3), 1)]
    _add(w, w.b.emit("for", *bounds, low, zero, regions=(body,)))


def _absorb(
    w: Writer, scores: Value, top: Value, total: Value, mask: float
) -> tuple[Value, ...]:
    """Maximum, sum and weights after some more scores."""
    world, b, shape = w.world, w.b, scores.tile.shape
    rows = shape[0]
    factor = world.pick((0.5, 0.30000001192092896, 1.7000000476837158))
    z = b.mul(scores, w.number(factor, T.F32, shape))
    if world.chance(60):
        at = b.iota(type=T.TileType(shape, T.I32), dim=1)
        limit = b.broadcast(w.small_integer(0, shape[1]), shape, ())
        z = b.select(b.lt(at, limit), z, w.number(mask, T.F32, shape))
    highest = b.reshape(b.reduce(z, kind="max", axes=(1,)), shape=(rows, 1))
    new_top = b.max(top, highest)
    weights = b.exp(b.sub(z, b.broadcast(new_top, shape, (0, 1))))
    shrink = b.exp(b.sub(top, new_top))
    sums = b.reshape(b.reduce(weights, kind="sum", axes=(1,)), shape=(rows, 1))
    return new_top, b.add(b.mul(total, shrink), sums), weights


def _add(w: Writer, values: tuple[Value, ...]) -> None:
    """Make results known; the maximum goes into a sum, or nothing sees it."""
    top, *others = values
    for value in others:
        w.add(value, ROUGH)
    if w.world.chance(50):
        w.add(w.b.add(top, others[0]), ROUGH)
    elif w.world.chance(50):
        w.add(top, ROUGH)
