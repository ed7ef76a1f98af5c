"""Converts sums that a loop keeps relative to a running maximum to plain sums.

A loop that carries `m = max(m, ...)` and sums of `exp(x - m)`, rescaled whenever `m`
grows, computes the same as a loop over `exp(x - final m)`: an online softmax, a
logsumexp, attention. As a chain of rescalings, its reverse must go through the
iterations from the last to the first, with every iteration's carried values kept; as
plain sums over a known maximum, the iterations can run in any order and are independent
(`backward_stages.py`).

`plain_sums` proves it by exponents: every value is tracked as `u`, `u + p * m` or `u *
exp(p * m)` with `u` independent of `m`. If each carried value keeps its exponent and
nothing that leaves the program depends on `m`, then `m` has no cotangent, and any `m`
gives the same results. Sums that do not start at zero (a sink of attention, what an
earlier loop summed) are rescaled once, from the initial maximum to the final one.

Where the maximum is a result itself, or something else depends on it, it is that of the
plain loop's terms which are equal to it, their sum divided by their number, and each
sum is multiplied by `exp(p * (that - m))`: numbers that do not change, as `m` is what
it was, with the cotangents of the maximum. Equal terms share its cotangent evenly.

The same holds of the maximum of a whole row (`exp(x - max(x)) / sum(exp(x - max(x)))`):
if what follows it does not depend on it, it has no cotangent.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pallasite.autodiff.reverse_activity import is_float
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import producers_of, substitute, with_regions
from pallasite.ir.roles import Loop, number_of
from pallasite.passes.analysis.exponents import (
    ANY,
    LN2,
    UNKNOWN,
    Known,
    Power,
    Powers,
    relative,
    same_powers,
)
from pallasite.passes.analysis.memory import Roots

# Ops that keep a sum of exponentials one, as do products with what rescales it.
SUMS = ("add", "reduce", "broadcast_in_dim", "reshape", "cast")
# Floats below it are apart from it by more than what any positive float is the exp of.
LOW = -(2.0**63)


@dataclass(frozen=True)
class PlainSums:
    """A program in which loops of rescaled sums are followed by their plain sums."""

    body: Block
    scales: frozenset[Value]  # maxima of rows: they count as constants
    same: Mapping[Value, Value]  # the plain sums, by their values in the first loop


def plain_sums(body: Block, unseen: Iterable[Value] = ()) -> PlainSums:
    """Follow each loop of rescaled sums by one of plain sums, used from there on.

    Args:
        body: a program.
        unseen: refs in main memory whose contents may depend on a maximum: results
            without a cotangent.
    """
    roots, unseen = Roots(body), set(unseen)
    stores = [op for op in walk(body) if op.name == "store"]
    hidden = {op.operands[0] for op in stores if roots.of(op.operands[0]) in unseen}
    walker = _Walk(producers_of(body), frozenset(hidden))
    return PlainSums(walker.block(body), frozenset(walker.scales), walker.same)


# --- loops ---


class _Walk:
    def __init__(self, made: Mapping[Value, Op], unseen: frozenset[Value]):
        self.made, self.unseen = dict(made), unseen
        self.scales: set[Value] = set()
        self.same: dict[Value, Value] = {}

    def block(self, block: Block) -> Block:
        """The last loop first: what precedes it may start the sums it continues."""
        ops = [
            with_regions(op, [self.block(r) for r in op.regions]) for op in block.ops
        ]
        yields = block.yields
        for place in reversed(range(len(ops))):
            if self.is_free(ops[place], ops[place + 1 :], yields):
                self.scales.add(ops[place].result)
            if ops[place].name != "for":
                continue
            found = self.rescaled(Loop.of(ops[place]), ops[place + 1 :], yields)
            chosen = None
            if found is None:
                found = self.chosen(Loop.of(ops[place]))
                chosen = _Chosen.of(*found) if found is not None else None
            if found is None:
                continue
            loop, known = found
            if chosen is not None:
                ops[place : place + 1] = chosen.ops
                place += len(chosen.ops) - 1
            plain, same = _plain(loop, known, chosen)
            self.made |= {v: op for op in plain for v in op.results}
            self.scales.add(loop.results[known.scale])
            self.scales.update(ops[place].results[len(loop.results) :])
            self.same |= {new: old for old, new in same.items()}
            if chosen is not None:
                self.same |= chosen.same
            rest = substitute(Block((), tuple(ops[place + 1 :]), yields), same)
            ops[place + 1 :] = [*plain, *rest.ops]
            yields = rest.yields
        return Block(block.params, tuple(ops), yields)

    def is_free(self, op: Op, after: Sequence[Op], yields: Sequence[Value]) -> bool:
        """Whether an op is the maximum of rows, and what follows does not depend on
        it."""
        if op.name != "reduce" or op.attrs["kind"] != "max" or not is_float(op.result):
            return False
        powers = Powers(self.made, {}, unseen=self.unseen)
        powers.add_scale(op.result)
        powers.block(o for o in after if not any(r in self.scales for r in o.results))
        return not powers.escapes and all(powers.of(v) is None for v in yields)

    def rescaled(
        self, loop: Loop, after: Sequence[Op], yields: Sequence[Value]
    ) -> "tuple[Loop, _Steps] | None":
        """Whether some carried value is a scale, and how the others relate to it."""
        compared = {v for o in walk(loop.body) if o.name == "max" for v in o.operands}
        for n, carry in enumerate(loop.carried):
            if carry not in compared or not is_float(carry):
                continue
            steps = self.steps(loop, n)
            if steps is not None and self.is_hidden(loop, steps, after, yields):
                return loop, steps
        return None

    def chosen(self, loop: Loop) -> "tuple[Loop, _Steps] | None":
        """Whether some carried value is a maximum of terms that depend on none, and how
        the others relate to it."""
        made = producers_of(loop.body)
        if any(op.name in ("dot", "cond") for op in walk(loop.body)):
            return None  # each iteration is computed again
        for n, carry in enumerate(loop.carried):
            op = made.get(loop.yields[n])
            if op is None or op.name != "max" or carry not in op.operands:
                continue
            if not is_float(carry) or number_of(self.made, loop.inits[n]) is None:
                continue
            steps = self.steps(loop, n, least=0)
            if steps is None:
                continue
            if any(steps.known.get(v) is not None for v in op.operands if v != carry):
                continue
            long = {d for d, size in enumerate(carry.tile.shape) if size > 1}
            sums = [now for now in steps.after if isinstance(now, Power)]
            if all(_unit(now) and long <= {*now.axes} for now in sums):
                return loop, steps
        return None

    def steps(self, loop: Loop, scale: int, least: int = 1) -> "_Steps | None":
        """The exponents of the carried values, if every iteration preserves them.

        `least`: how many of them have to be relative to the maximum.
        """
        floats = [n for n, c in enumerate(loop.carried) if n != scale and is_float(c)]
        first = {loop.carried[n]: ANY for n in floats}
        found = self.one_step(loop, scale, first)
        if found is None:
            return None
        if sum(isinstance(found.after[n], Power) for n in floats) < least:
            return None
        carry = loop.carried[scale]
        assumed: dict[Value, Known] = {}
        for n in floats:
            now = relative(found.after[n], loop.yields[scale], carry)
            if now is ANY or now is UNKNOWN:
                return None
            if isinstance(now, Power):
                started = number_of(self.made, loop.inits[n]) != 0
                if not now.is_factor or (started and _unit(now) is None):
                    return None
                now = replace(now, is_pure=False)
            assumed[loop.carried[n]] = now
        proved = self.one_step(loop, scale, assumed)
        if proved is None:
            return None
        for n in floats:
            now = relative(proved.after[n], loop.yields[scale], carry)
            before = assumed[loop.carried[n]]
            both = isinstance(now, Power) and isinstance(before, Power)
            if not (same_powers(now, before) if both else now is before is None):  # type: ignore[arg-type]
                return None
        return proved

    def one_step(
        self, loop: Loop, scale: int, carries: Mapping[Value, Known]
    ) -> "_Steps | None":
        powers = Powers(self.made, dict(carries))
        powers.add_scale(loop.carried[scale])
        powers.block(loop.body.ops)
        if powers.escapes or loop.yields[scale] not in powers.scales:
            return None
        after = tuple(map(powers.of, loop.yields))
        zeros = frozenset(v for v in loop.inits if number_of(self.made, v) == 0)
        return _Steps(scale, powers.known, frozenset(powers.scales), after, zeros)

    def is_hidden(
        self, loop: Loop, steps: "_Steps", after: Sequence[Op], yields: Sequence[Value]
    ) -> bool:
        """Whether the code after the loop gives the same for every scale."""
        covering = _covering(loop, steps, self.made)
        powers = Powers(self.made, {}, unseen=self.unseen, covering=covering)
        scale = loop.results[steps.scale]
        powers.add_scale(scale)
        for result, now in zip(loop.results, steps.after, strict=True):
            if result is not scale:
                powers.known[result] = relative(now, loop.yields[steps.scale], scale)
        # A later loop that is followed by its plain sums gives nothing but its maximum,
        # and no result depends on that.
        powers.block(o for o in after if not any(r in self.scales for r in o.results))
        return not powers.escapes and all(powers.of(v) is None for v in yields)


@dataclass(frozen=True)
class _Steps:
    """What is known about one iteration of a loop of rescaled sums."""

    scale: int  # the carried value that is the maximum
    known: Mapping[Value, Known]
    scales: frozenset[Value]
    after: tuple[Known, ...]  # of the iteration's yields
    zeros: frozenset[Value]  # initial values that are zero


def _covering(loop: Loop, steps: _Steps, made: Mapping[Value, Op]) -> dict[Value, bool]:
    """Results that are zero only where all sums are, and whether else at least one.

    They are sums of the exponentials that the others are sums of, too: where these add
    up to zero, all of them are zero (`where(l == 0, 1, l)` divides nothing else).
    """
    terms = {n: _terms(loop.yields[n], steps, made) for n in _factors(steps)}
    if len({frozenset(found) for found in terms.values()}) != 1:
        return {}
    covering = dict[Value, bool]()
    for n, found in terms.items():
        now = steps.after[n]
        assert isinstance(now, Power)
        shape = zip(loop.carried[n].tile.shape, now.axes, strict=True)
        is_row = all(size == 1 or axis is not None for size, axis in shape)
        plain = all(found.values()) and len(found) == 1
        if is_row and plain and loop.inits[n] in steps.zeros:
            (term,) = found
            covering[loop.results[n]] = _has_one(term, loop, steps, made)
    return covering


def _has_one(term: Value, loop: Loop, steps: _Steps, made: Mapping[Value, Op]) -> bool:
    """Whether a row of exponentials, relative to its maximum, has a one or only zeros.

    The element that is the maximum gives a one. What is not an element, the maximum's
    start and what a mask puts in, is so low that numbers below it differ from it by
    more than an exponential can hold; an element that is equal to it gives a one, too.
    """
    pred, place, exponential = _masked(made[term], made)
    exponent = made.get(made[exponential].operands[0])
    if exponent is not None and exponent.name == "mul":
        is_steeper = (number_of(made, exponent.operands[1]) or 0) >= 1
        exponent = made.get(exponent.operands[0]) if is_steeper else None
    if exponent is None or exponent.name != "sub":
        return False
    x, most = exponent.operands[0], _unmoved(exponent.operands[1], made)
    ops = [op for v in steps.scales if (op := made.get(v)) is not None]
    if [op.result for op in ops if op.name == "max"] != [most]:
        return False
    rows = [made.get(_unmoved(v, made)) for v in made[most].operands]
    is_of = [op for op in rows if op is not None and op.name == "reduce"]
    if len(is_of) != 1 or is_of[0].operands[0] is not x:
        return False
    low = [loop.inits[steps.scale]]
    if pred is not None:
        chosen = made.get(x)
        if (
            chosen is None
            or chosen.name != "select_n"
            or chosen.operands[0] is not pred
        ):
            return False
        low.append(chosen.operands[place])
    numbers = [number_of(made, v) for v in low]
    return all(n is not None and n <= LOW for n in numbers)


def _masked(op: Op, made: Mapping[Value, Op]) -> tuple[Value | None, int, Value]:
    """The mask of an exponential that is zero elsewhere, which operand is the zero, and
    the exponential."""
    if op.name != "select_n":
        return None, 0, op.result
    pred, *cases = op.operands
    place = next(n for n, v in enumerate(cases, 1) if number_of(made, v) == 0)
    return pred, place, op.operands[3 - place]


def _unmoved(value: Value, made: Mapping[Value, Op]) -> Value:
    op = made.get(value)
    while op is not None and op.name in ("broadcast_in_dim", "reshape"):
        value = op.operands[0]
        op = made.get(value)
    return value


def _factors(steps: _Steps) -> list[int]:
    """The carried values that are sums relative to the maximum."""
    return [n for n, now in enumerate(steps.after) if n != steps.scale and now]


def _terms(value: Value, steps: _Steps, made: Mapping[Value, Op]) -> dict[Value, bool]:
    """The exponentials in a sum, and whether it is nothing but their sum.

    One that a mask makes zero elsewhere counts as one that is itself zero there.
    """

    def is_exponential(op: Op | None) -> bool:
        return op is not None and op.name in ("exp", "exp2")

    def is_masked(op: Op) -> bool:
        cases = op.operands[1:]
        kept = [v for v in cases if number_of(made, v) != 0]
        is_choice = op.name == "select_n" and len(cases) == 2
        return is_choice and len(kept) == 1 and is_exponential(made.get(kept[0]))

    def rescales(value: Value) -> bool:
        now = steps.known.get(value)
        return isinstance(now, Power) and now.is_factor and now.is_pure

    found: dict[Value, bool] = {}
    pending, seen = [(value, True)], set[tuple[Value, bool]]()
    while pending:
        value, plain = pending.pop()
        now, op = steps.known.get(value), made.get(value)
        if op is None or now is None or (value, plain) in seen:
            continue
        seen.add((value, plain))
        if rescales(value):
            continue
        if is_exponential(op) or is_masked(op):
            found[value] = found.get(value, True) and plain
        elif op.name == "cond":
            place = op.results.index(value)
            pending += [(region.yields[place], plain) for region in op.regions]
        else:
            plain &= op.name in SUMS or any(map(rescales, op.operands))
            pending += [(v, plain) for v in op.operands]
    return found


@dataclass(frozen=True)
class _Chosen:
    """A maximum as the mean of the terms that are equal to it.

    Attributes:
        term: what an iteration takes the maximum with.
        ops: the loop, which also counts these terms, and what comes before it.
        same: values that are known, by those of the mean's code; is extended.
    """

    term: Value
    ops: tuple[Op, ...]
    same: dict[Value, Value]

    @staticmethod
    def of(loop: Loop, steps: "_Steps") -> "_Chosen":
        carry, new = loop.carried[steps.scale], loop.yields[steps.scale]
        (op,) = (o for o in loop.body.ops if new in o.results)
        (term,) = (v for v in op.operands if v is not carry)
        start, b = Builder(loop.op.loc), Builder(loop.op.loc)
        count, counted = (Value(carry.type, "count") for _ in range(2))
        none = start.like(0, carry)
        more = b.select(b.eq(term, new), b.like(1, carry), none)
        kept = b.select(b.eq(carry, new), count, none)
        yields = (*loop.yields, b.add(kept, more))
        body = Block((*loop.body.params, count), (*loop.body.ops, *b.ops), yields)
        counting = loop.op.with_(
            operands=(*loop.op.operands, none),
            results=(*loop.results, counted),
            regions=(body,),
        )
        return _Chosen(term, (*start.ops, counting), {})

    @property
    def count(self) -> Value:
        return self.ops[-1].results[-1]


def _plain(
    loop: Loop, steps: _Steps, chosen: _Chosen | None
) -> tuple[list[Op], dict[Value, Value]]:
    """The loop with its final maximum in place of the running one."""
    final = loop.results[steps.scale]
    kept = [n for n in range(len(loop.carried)) if n != steps.scale]
    code = _Plain(steps, final)
    params = [code.fresh(v) for v in (loop.index, *(loop.carried[n] for n in kept))]
    code.new[loop.carried[steps.scale]] = final
    body = [*code.block(loop.body.ops)]
    yields = [code.value(loop.yields[n]) for n in kept]
    b = Builder(loop.op.loc)
    inits = [_started(b, loop, steps, n) for n in kept]
    names = [loop.results[n].name for n in kept]
    if chosen is not None:
        inside, term = Builder(loop.op.loc), code.value(chosen.term)
        params.append(Value(final.type, "chosen"))
        inits.append(b.like(0, final))
        one = inside.select(inside.eq(term, final), term, inits[-1])
        yields.append(inside.add(params[-1], one))
        names.append("chosen")
        body += inside.ops
    region = Block(tuple(params), tuple(body), tuple(yields))
    results = b.emit("for", *loop.bounds, *inits, regions=(region,), names=names)
    same = {loop.results[n]: r for n, r in zip(kept, results, strict=False)}
    if chosen is None:
        return b.ops, same
    shape = [n for n in final.tile.shape if n > 1]
    unit = b.constant(1, final.tile.with_shape(shape))
    same[final] = b.op("div", results[-1], chosen.count)
    for n in kept:
        now, value = steps.after[n], same[loop.results[n]]
        if isinstance(now, Power):
            new, factor = _rescaled(b, value, now, final, same[final])
            same[loop.results[n]] = new
            chosen.same[value] = loop.results[n]
            chosen.same[factor] = unit
    return b.ops, same


def _started(b: Builder, loop: Loop, steps: _Steps, carry: int) -> Value:
    """The initial value of a sum, relative to the final maximum."""
    value, now = loop.inits[carry], steps.after[carry]
    if not isinstance(now, Power) or value in steps.zeros:
        return value
    scales = loop.inits[steps.scale], loop.results[steps.scale]
    return _rescaled(b, value, now, *scales)[0]


def _rescaled(
    b: Builder, value: Value, now: Power, old: Value, new: Value
) -> tuple[Value, Value]:
    """A value relative to another scale, and by what it was multiplied."""
    unit = _unit(now)
    assert unit is not None
    name, number = unit
    apart = b.sub(old, new)
    if number != 1:
        apart = b.mul(apart, b.like(number, apart))
    # The scale's dimensions of size one vary along nothing.
    lengths = [n for n in apart.tile.shape if n > 1]
    axes = [d for d, n in enumerate(apart.tile.shape) if n > 1]
    dims = [now.axes.index(axis) for axis in axes]
    factor = b.op(name, b.op("reshape", apart, shape=tuple(lengths)))
    wide = b.cast(b.broadcast(factor, value.tile.shape, dims), value.tile.dtype)
    return b.mul(value, wide), factor


def _unit(now: Power) -> tuple[str, int] | None:
    """An exponent `p` as an op and a whole number: `exp(-p x)` is the op of `n x`."""
    for name, base in (("exp", 1.0), ("exp2", LN2)):
        number = -now.total / base
        if abs(number - round(number)) < 1e-5:
            return name, round(number)
    return None


class _Plain:
    """Copies code with one value for every scale."""

    def __init__(self, steps: _Steps, final: Value):
        self.known, self.scales, self.final = steps.known, steps.scales, final
        self.new: dict[Value, Value] = {}
        self.ones: set[Value] = set()

    def value(self, value: Value) -> Value:
        return self.new.get(value, value)

    def fresh(self, value: Value) -> Value:
        self.new[value] = Value(value.type, value.name)
        return self.new[value]

    def block(self, ops: Iterable[Op]) -> tuple[Op, ...]:
        b = Builder()
        for op in ops:
            b.loc = op.loc
            if op.name == "cond":
                self.cond(b, op)
            elif not self.is_replaced(b, op):
                operands = tuple(map(self.value, op.operands))
                regions = tuple(self.region(region) for region in op.regions)
                results = tuple(map(self.fresh, op.results))
                new = op.with_(operands=operands, regions=regions, results=results)
                b.ops.append(new)
        return tuple(b.ops)

    def region(self, region: Block) -> Block:
        params = tuple(map(self.fresh, region.params))
        ops = self.block(region.ops)
        return Block(params, ops, tuple(map(self.value, region.yields)))

    def is_replaced(self, b: Builder, op: Op) -> bool:
        """Scales are one value; their differences are 0, whose exponential is 1."""
        if len(op.results) != 1:
            return False
        result, now = op.result, self.known.get(op.result)
        if result in self.scales:
            self.new[result] = self.final
        elif isinstance(now, Power) and now.is_pure and now.total == 0:
            self.new[result] = b.like(int(now.is_factor), result)
            if now.is_factor:
                self.ones.add(result)
        elif op.name == "mul" and any(v in self.ones for v in op.operands):
            x, y = op.operands
            self.new[result] = self.value(x if y in self.ones else y)
        else:
            return False
        return True

    def cond(self, b: Builder, op: Op) -> None:
        kept = [n for n, r in enumerate(op.results) if r not in self.scales]
        regions = []
        for branch in op.regions:
            region = self.region(branch)
            yields = tuple(region.yields[n] for n in kept)
            regions.append(replace(region, yields=yields))
        made = b.emit("cond", self.value(op.operands[0]), regions=regions)
        self.new |= {op.results[n]: r for n, r in zip(kept, made, strict=True)}
        self.new |= {r: self.final for r in op.results if r in self.scales}
