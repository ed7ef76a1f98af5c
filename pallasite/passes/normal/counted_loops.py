"""counted_loops: a `while` that only counts becomes a `for`.

In: loops that go on while a carried integer has not reached a bound that the loop does
not change, in memory or not, and that add a constant to it in each iteration. Out:
loops over as many indices, in which the counter is computed from the index. What else
they carry stays.

With counter i, step s > 0 and bound n, `while i < n` runs for i = first, first + s, ...
as long as that is below n: the indices of a `for`, if i + s cannot wrap around, which
is shown from the range of n. `i <= n` is `i < n + 1`. `i != n` is `i < n` if s is 1 and
the ranges show that first <= n. A loop that counts down is the same with all signs
changed. `i * c < n`, for a power of two c, is `i < n / c` rounded up: where multiples
of c wrap around before they reach n, the loop never ends. Nor does `i < n` where s is a
power of two and i + s wraps around: i would come to the same numbers again. An integer
that is asserted to be a multiple (`pl.multiple_of`) is the same integer.

A `for` in steps of s counts its iterations: index j stands for first + s * j, as far as
that is below the limit, so there are (limit - first) / s of them, rounded up. Where
that difference could wrap around, as of offsets in memory, powers of two divide both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import clone, is_pure, substitute
from pallasite.ir.roles import Loop, While
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.facts_walk import FactsWalk
from pallasite.passes.normal.canonicalize import canonicalize

LEAST, MOST = INDEX.dtype.limits
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}


def counted_loops(kernel: Kernel) -> Kernel:
    """Turn counted `while` loops into `for` loops."""
    for name in ("while", "for"):
        if any(op.name == name for op in walk(kernel.body)):
            walker = _Walk(Roots(kernel)) if name == "while" else _UnitSteps()
            body = walker.block(kernel.body)
            if body is not kernel.body:
                kernel = canonicalize(kernel.with_(body=body))
    return kernel


class _UnitSteps(FactsWalk):
    def rewritten(self, op: Op) -> Sequence[Op]:
        loop = Loop.of(op) if op.name == "for" else None
        if loop is None or loop.index.tile != INDEX:
            return (op,)
        first, limit, step = map(self.facts.of, loop.bounds)
        by, b = step.number, Builder(op.loc)
        if by is None or by < 2:
            return (op,)
        if first.number is not None and limit.number is not None:
            trips = b.index(max(0, -((first.number - limit.number) // by)))
        else:
            ends = limit.low - first.high, limit.high - first.low + by - 1
            if ends[0] >= LEAST and ends[1] <= MOST:
                length = b.sub(loop.limit, loop.first)
                trips = b.div(b.add(length, b.index(by - 1)), b.index(by))
            elif by & (by - 1) or ends[1] - by + 1 > MOST * by:
                return (op,)
            else:
                trips = _trips(b, loop.first, loop.limit, by)
        zero, one, inner = b.index(0), b.index(1), Builder(op.loc)
        number = Value(INDEX, loop.index.name)
        index = inner.add(loop.first, inner.mul(number, inner.index(by)))
        code = substitute(replace(loop.body, params=()), {loop.index: index})
        body = Block((number, *loop.carried), (*inner.ops, *code.ops), code.yields)
        new = loop.with_(first=zero, limit=trips, step=one, body=body)
        return (*b.ops, new.to_op())


def _trips(b: Builder, first: Value, limit: Value, by: int) -> Value:
    """How many steps of a power of two are below the limit, of any two integers.

    With `first = by * q + r`, this is `(limit - r) / by` rounded up, less q. Nothing
    wraps around: as `limit >= first`, `limit - r` is at least `by * q`, a multiple of
    the power of two as the least integer is.
    """
    digits, rest = b.index(by.bit_length() - 1), b.index(by - 1)
    down = lambda x: b.op("shift_right_arithmetic", x, digits)
    part = lambda x: b.op("and", x, rest)
    up_to = b.sub(b.max(limit, first), part(first))
    up = b.add(down(up_to), b.min(part(up_to), b.index(1)))
    return b.sub(up, down(first))


@dataclass(frozen=True)
class _Counter:
    """Which carried value counts, by how much, and when the loop goes on."""

    at: int  # its place among the carried values
    step: int
    test: str
    bound: Value  # in the condition
    factor: int = 1  # of the counter in the condition


class _Walk(FactsWalk):
    def __init__(self, roots: Roots) -> None:
        super().__init__()
        self.roots = roots

    def rewritten(self, op: Op) -> Sequence[Op]:
        if op.name != "while":
            return (op,)
        loop = While.of(op)
        counter = _counter(loop)
        return (op,) if counter is None else self.counted(op, loop, counter) or (op,)

    def counted(self, op: Op, loop: While, counter: _Counter) -> Sequence[Op] | None:
        first = loop.inits[counter.at]
        b = Builder(op.loc)
        bound = self.outside(b, loop, counter.bound)
        if bound is None:
            return None
        if counter.factor > 1:
            bound = _quotient(b, bound, counter.factor)
        for made in b.ops:
            self.facts.note_op(made)
        if first.tile != INDEX:
            first, bound = self.as_index(b, first), self.as_index(b, bound)
        if first is None or bound is None:
            return None
        trips = self.trips(b, first, bound, counter)
        return None if trips is None else _for(b, op, loop, counter, first, trips)

    def outside(self, b: Builder, loop: While, bound: Value) -> Value | None:
        """The bound before the loop, if iterations do not change it."""
        condition, body = loop.condition, loop.body
        params = zip(
            condition.params, loop.inits, body.params, body.yields, strict=True
        )
        fixed = {p: init for p, init, inside, out in params if inside is out}
        needed = _needed(condition, bound)
        if not all(is_pure(op) or self.loads_the_same(op, loop) for op in needed):
            return None
        used = {v for op in needed for v in op.operands} | {bound}
        if any(p in used and p not in fixed for p in condition.params):
            return None
        copy = clone(Block((), tuple(needed), (bound,)), fixed)
        b.ops += copy.ops
        return copy.yields[0]

    def loads_the_same(self, op: Op, loop: While) -> bool:
        """Whether an op loads what iterations do not write, as the bound in memory."""
        if op.name != "load":
            return False
        root = self.roots.of(op.operands[0])
        return root not in self.roots.written(loop.condition, loop.body)

    def as_index(self, b: Builder, value: Value) -> Value | None:
        """An integer of another type as an i32, if it is known to be one."""
        made = self.producers.get(value) or next(
            (op for op in b.ops if value in op.results), None
        )
        if made is None or made.name != "constant":
            return None
        number = made.attrs["value"]
        return b.index(number) if LEAST < number < MOST else None

    def trips(
        self, b: Builder, first: Value, bound: Value, counter: _Counter
    ) -> tuple[Value, Value, Value] | None:
        """First index, limit and step of the `for`."""
        size, test = abs(counter.step), counter.test
        low, high = _range(self.facts, b, first), _range(self.facts, b, bound)
        if counter.factor > 1 and not 0 <= low[0] <= low[1] <= MOST // counter.factor:
            return None
        if counter.step < 0:  # count upwards from 0 to first - bound
            test = _SWAPPED[test]
            ends = (low[0] - high[1], low[1] - high[0])
            if ends[0] < LEAST or ends[1] > MOST - size:
                return None
            bound, first = b.sub(first, bound), b.index(0)
            low, high = (0, 0), ends
        if test == "ne" and (size != 1 or low[1] > high[0]):
            return None
        if test not in ("lt", "le", "ne"):
            return None
        # What is added to last is below the bound, or at it.
        may_wrap = high[1] > MOST - size + (test == "lt")
        if may_wrap and (test != "lt" or size & (size - 1)):
            return None
        if test == "le":
            bound = b.add(bound, b.index(1))
        return first, bound, b.index(size)


def _range(facts: Facts, b: Builder, value: Value) -> tuple[int, int]:
    made = next((op for op in b.ops if value in op.results), None)
    if made is not None and made.name == "constant":
        return made.attrs["value"], made.attrs["value"]
    fact = facts.of(value)
    return fact.low, fact.high


def _counter(loop: While) -> _Counter | None:
    """The carried integer that the condition compares and the body adds to."""
    tests = {v: op for op in loop.condition.ops for v in op.results}
    test = tests.get(loop.condition.yields[0])
    if test is None or test.name not in _SWAPPED or len(test.operands) != 2:
        return None
    params = loop.condition.params
    for (value, bound), name in (
        (test.operands, test.name),
        (test.operands[::-1], _SWAPPED[test.name]),
    ):
        value, factor = _multiplied(_asserted(value, tests), tests)
        if value not in params or value.is_ref or not value.tile.dtype.is_integer:
            continue
        step = _step(loop.body, params.index(value))
        if step and (factor == 1 or (step == 1 and name == "lt")):
            return _Counter(params.index(value), step, name, bound, factor)
    return None


def _multiplied(value: Value, made: Mapping[Value, Op]) -> tuple[Value, int]:
    """An i32 without the power of two that it is multiplied by."""
    op = made.get(value)
    if op is None or op.name != "mul" or value.tile != INDEX:
        return value, 1
    for x, by in (op.operands, op.operands[::-1]):
        constant = made.get(by)
        if constant is not None and constant.name == "constant":
            factor = constant.attrs["value"]
            if factor > 0 and not factor & (factor - 1):
                return x, factor
    return value, 1


def _quotient(b: Builder, value: Value, by: int) -> Value:
    """An integer divided by a positive one, rounded up."""
    down = b.div(value, b.like(by, value))  # rounded towards zero
    over = b.op("gt", b.op("rem", value, b.like(by, value)), b.like(0, value))
    return b.add(down, b.cast(over, value.tile.dtype))


def _step(body: Block, at: int) -> int | None:
    """The constant that an iteration adds to a carried integer."""
    makers = {v: op for op in body.ops for v in op.results}
    add = makers.get(_asserted(body.yields[at], makers))
    if add is None or add.name not in ("add", "sub"):
        return None
    x, y = (_asserted(v, makers) for v in add.operands)
    if add.name == "add" and y is body.params[at]:
        x, y = y, x
    by = makers.get(y)
    if x is not body.params[at] or by is None or by.name != "constant":
        return None
    return by.attrs["value"] if add.name == "add" else -by.attrs["value"]


def _asserted(value: Value, makers: Mapping[Value, Op]) -> Value:
    """The integer that a value is, which may be asserted to be a multiple."""
    op = makers.get(value)
    while op is not None and op.name == "assume_multiple":
        value = op.operands[0]
        op = makers.get(value)
    return value


def _needed(block: Block, value: Value) -> list[Op]:
    wanted, found = {value}, list[Op]()
    for op in reversed(block.ops):
        if not wanted.isdisjoint(op.results):
            wanted.update(op.operands)
            found.append(op)
    return found[::-1]


def _for(
    b: Builder,
    op: Op,
    loop: While,
    counter: _Counter,
    first: Value,
    bounds: tuple[Value, Value, Value],
) -> Sequence[Op]:
    """The `for` and the value of the counter after it."""
    at, body = counter.at, loop.body
    rest = [n for n in range(len(loop.inits)) if n != at]
    index = Value(INDEX, body.params[at].name)
    inner = Builder(op.loc)
    count = _counted(inner, index, first, counter.step)
    old = body.params[at].tile.dtype
    code = substitute(
        Block((), body.ops, tuple(body.yields[n] for n in rest)),
        {body.params[at]: inner.cast(count, old)},
    )
    params = (index, *(body.params[n] for n in rest))
    region = Block(params, (*inner.ops, *code.ops), code.yields)
    made = op.with_(
        name="for",
        operands=(*bounds, *(loop.inits[n] for n in rest)),
        results=tuple(op.results[n] for n in rest),
        regions=(region,),
    )
    b.ops.append(made)
    start, limit, step = bounds
    if abs(counter.step) != 1:  # the first index that is not below the limit
        length = b.max(b.sub(limit, start), b.index(0))
        up = b.add(length, b.index(abs(counter.step) - 1))
        limit = b.add(start, b.mul(b.div(up, step), step))
    end = _counted(b, b.max(start, limit), first, counter.step)
    end = b.cast(end, old)
    last = b.ops[-1]
    if end is not last.results[0]:
        end = b.add(end, b.like(0, end))
        last = b.ops[-1]
    b.ops[-1] = last.with_(results=(op.results[at],))
    return b.ops


def _counted(b: Builder, index: Value, first: Value, step: int) -> Value:
    """The counter at an index: the index itself, or as far below the first value."""
    return index if step > 0 else b.sub(first, index)
