"""Control flow: for, while, cond.

Carried scalars are phis. A carried tile has one buffer for the whole loop: the body
reads it, and what the body yields is stored there at the end of each iteration, or
computed there directly if nothing reads the old value any more.
"""

from collections.abc import Sequence

from pallasite.backends.cpu.emitter import Emitter, Meaning
from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import Val, integer
from pallasite.backends.cpu.tiles.tiles import Buffer, Root, Tile
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Op, Value
from pallasite.ir.roles import Cond, Loop, While
from pallasite.ir.types import I64, RefType


def emit_for(e: Emitter, op: Op) -> None:
    a = Loop.of(op)
    f, dtype, body = e.f, a.first.tile.dtype, a.body
    count = _trip_count(e, *map(e.index, a.bounds))
    start, stride = e.index(a.first), e.index(a.step)
    places = _carry_places(e, op, a.inits)
    with f.loop(count, _scalars(e, a.inits)) as loop:
        number = _number(e, start, loop.index, stride)
        counter = scalars.cast(f, number, I64, dtype)
        _offer_places(e, a.carried, a.yields, places)
        with e.block(body, [counter, *_merge(places, loop.carries)]) as yields:
            _store_carries(e, places, yields)
            loop.carries = [y for y in yields if isinstance(y, Val)]
    _define_results(e, op, places, loop.carries)


def _number(e: Emitter, start: Val, index: Val, stride: Val) -> Val:
    if stride.constant == 1:
        return e.f.add(start, index)
    # From far below zero to far above, the product alone may wrap.
    return e.f.binary("add", start, e.f.binary("mul", index, stride))


def _trip_count(e: Emitter, first: Val, limit: Val, step: Val) -> Val:
    """The trip count of a loop; zero if the step is zero."""
    f = e.f
    known = [n for v in (first, limit, step) if (n := v.constant) is not None]
    if len(known) == 3:
        return integer(len(range(*known)) if known[2] else 0)
    if step.constant == 1:
        some = f.compare("icmp slt", first, limit)
        return f.select(some, f.binary("sub", limit, first), integer(0))
    up = f.compare("icmp sgt", step, integer(0))
    low, high = f.select(up, first, limit), f.select(up, limit, first)
    # As unsigned, the difference of any two numbers fits.
    distance = f.binary("sub", high, low)
    size = f.select(up, step, f.binary("sub", integer(0), step))
    size = f.intrinsic("umax", size, integer(1))
    last = f.binary("udiv", f.binary("sub", distance, integer(1)), size)
    some = f.compare("icmp slt", low, high)
    moving = f.compare("icmp ne", step, integer(0))
    rounds = f.binary("add", last, integer(1))
    return f.select(f.both(some, moving), rounds, integer(0))


def emit_while(e: Emitter, op: Op) -> None:
    loop = While.of(op)
    f, carries, condition, body = e.f, loop.inits, loop.condition, loop.body
    places = _carry_places(e, op, carries)
    entering, before = _scalars(e, carries), f.block
    head, inside, done = f.labels("while", "do", "done")
    f.branch(head)
    f.label(head)
    phis = f.open_phis([v.type for v in entering])
    carried = [value for value, _ in phis]
    arguments = _merge(places, carried)
    with e.block(condition, arguments) as (goes_on,):
        assert isinstance(goes_on, Val)
        f.branch_if(goes_on, inside, done)
    f.label(inside)
    _offer_places(e, body.params, body.yields, places)
    with e.block(body, arguments) as yields:
        _store_carries(e, places, yields)
        after = [y for y in yields if isinstance(y, Val)]
    for phi, first, following in zip(phis, entering, after, strict=True):
        f.close_phi(phi, [(first, before), (following, f.block)])
    f.branch(head)
    f.label(done)
    _define_results(e, op, places, carried)


def emit_cond(e: Emitter, op: Op) -> None:
    f, branches = e.f, Cond.of(op).branches
    which = e.scalar(Cond.of(op).which)
    clamped = f.clamp(which, integer(0, "i32"), integer(len(branches) - 1, "i32"))
    (done,) = f.labels("joined")
    labels = [f.labels(f"branch{n}")[0] for n in range(len(branches))]
    targets = {
        result: Tile(result.tile.shape, result.tile.dtype, e.lasting(result))
        for result in op.results
        if result.tile.rank
    }
    arms = " ".join(f"i32 {n}, label %{label}" for n, label in enumerate(labels))
    f.line(f"switch {clamped}, label %{labels[-1]} [ {arms} ]")
    ends: list[tuple[list[Val], str]] = []
    for label, branch in zip(labels, branches, strict=True):
        f.label(label)
        with e.block(branch, ()) as yields:
            for result, value in zip(op.results, yields, strict=True):
                if isinstance(value, Tile):
                    buffer = targets[result].buffer
                    assert buffer is not None
                    e.fill(buffer, value)
            ends.append(([y for y in yields if isinstance(y, Val)], f.block))
        f.branch(done)
    f.label(done)
    chosen = iter(
        f.phi(values[0].type, [*zip(values, (end for _, end in ends), strict=True)])
        for values in zip(*(values for values, _ in ends), strict=True)
    )
    for result in list(op.results):
        e.define(result, targets[result] if result.tile.rank else next(chosen))


# --- carried values ---


def _scalars(e: Emitter, values: Sequence[Value]) -> list[Val]:
    return [e.scalar(v) for v in values if not v.is_ref and not v.tile.rank]


def _carry_places(e: Emitter, op: Op, carries: Sequence[Value]) -> list[Tile | None]:
    """A buffer per carried tile, holding its initial value; None for scalars."""
    places: list[Tile | None] = []
    for value, result in zip(carries, op.results, strict=True):
        if isinstance(value.type, RefType):
            raise UnsupportedError(
                "backend 'cpu' cannot carry a ref through a loop",
                fix="load from the ref before the loop and carry the value, or "
                "use the ref in its body",
            )
        if not value.tile.rank:
            places.append(None)
            continue
        memory = e.lasting(result)
        root = Root("carried", mutable=False)
        buffer = Buffer(memory.pointer, memory.strides, root)
        e.fill(buffer, e.tile(value))
        places.append(Tile(value.tile.shape, value.tile.dtype, buffer))
    return places


def _offer_places(
    e: Emitter,
    params: Sequence[Value],
    yields: Sequence[Value],
    places: Sequence[Tile | None],
) -> None:
    """Let ops of a body find the destination buffers of their results."""
    for param, value, place in zip(params, yields, places, strict=True):
        if place is not None and place.buffer is not None and value is not param:
            e.offered[value] = (param, place.buffer)


def _merge(places: list[Tile | None], registers: Sequence[Val]) -> list[Meaning]:
    pending = iter(registers)
    return [next(pending) if place is None else place for place in places]


def _store_carries(
    e: Emitter, places: list[Tile | None], yields: Sequence[Meaning]
) -> None:
    """Store what the body yields, as if simultaneously.

    A yield is stored directly if no other yield reads its target and it itself reads
    there only the element it replaces; the others go through temporary buffers.
    """
    pairs = [
        (place.buffer, value)
        for place, value in zip(places, yields, strict=True)
        if place is not None and isinstance(value, Tile)
        if place.buffer is not value.buffer
    ]
    direct, waiting = [], []
    for target, value in pairs:
        assert target is not None
        others = [v for other, v in pairs if other is not target]
        alone = not any(target.root in other.reads() for other in others)
        if alone and value.may_overwrite(target):
            direct.append((target, value))
        else:
            waiting.append((target, Tile(value.shape, value.dtype, e.force(value))))
    for target, value in [*direct, *waiting]:
        e.fill(target, value)


def _define_results(
    e: Emitter, op: Op, places: list[Tile | None], registers: Sequence[Val]
) -> None:
    for result, meaning in zip(op.results, _merge(places, registers), strict=True):
        e.define(result, meaning)


RULES = {"for": emit_for, "while": emit_while, "cond": emit_cond}
