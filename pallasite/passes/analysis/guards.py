"""Which steps a guard lets through: comparisons solved for the index that counts them.

`guard_of(op)` decomposes a `cond` with one empty branch into the conditions that must
all hold. `Solver` turns such a condition, if it compares affine forms of the index with
something invariant, into a first step or an end, computed once before all steps. The
result is exact: a condition in which the index, or a bound, may wrap around is not
solved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Loc, Op, Value
from pallasite.ir.opdef import Effect, table
from pallasite.ir.roles import Cond
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.outcomes import OUTCOMES

Producers = Mapping[Value, Op]

OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "ne": "eq", "eq": "ne"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq"}


@dataclass(frozen=True)
class Part:
    """A bool that must be `truth`."""

    value: Value
    truth: bool = True


@dataclass(frozen=True, eq=False)
class Guard:
    """A `cond` whose code runs only if every part holds."""

    op: Op
    parts: tuple[Part, ...]
    taken: Block
    idle: Block  # no code: only yields


def guard_of(op: Op, producers: Producers) -> Guard | None:
    """A cond on a bool with code on one side only."""
    if op.name != "cond" or len(op.regions) != 2:
        return None
    cond = Cond.of(op)
    cast = producers.get(cond.which)
    if cast is None or cast.name != "cast":
        return None
    (test,) = cast.operands
    if not test.tile.dtype.is_bool:
        return None
    truth = not cond.branches[0].ops
    idle, taken = cond.branches if truth else cond.branches[::-1]
    if idle.ops:
        return None
    return Guard(op, tuple(parts_of(test, truth, producers)), taken, idle)


def parts_of(test: Value, truth: bool, producers: Producers) -> list[Part]:
    """What must hold for a bool, or every element of a tile of bools, to be `truth`."""
    op = producers.get(test)
    if op is not None and op.name == "not":
        return parts_of(op.operands[0], not truth, producers)
    if op is not None and op.name == ("and" if truth else "or"):
        return [p for v in op.operands for p in parts_of(v, truth, producers)]
    return [Part(test, truth)]


@dataclass(frozen=True)
class Bounds:
    """The steps that a condition lets through, as values computed before all steps.

    A step must be at least each of `lows` and below each of `highs`; no step is let
    through unless all of `needed` hold.
    """

    lows: tuple[Value, ...] = ()
    highs: tuple[Value, ...] = ()
    needed: tuple[Value, ...] = ()

    def __and__(self, other: "Bounds") -> "Bounds":
        return Bounds(
            self.lows + other.lows,
            self.highs + other.highs,
            self.needed + other.needed,
        )

    def __bool__(self) -> bool:
        return bool(self.lows or self.highs or self.needed)


class Solver:
    """Solves conditions for one index.

    Args:
        index: counts the steps.
        first: its minimum, known before the steps.
        inside: the ops of the values that are recomputed in each step.
        outside: whether a value from elsewhere is available before the steps.
        is_stable: whether a load gives the same at every step, and before.
        facts: about the integers; extended by the ops that are emitted.
    """

    def __init__(
        self,
        index: Value,
        first: Value,
        inside: Producers,
        outside: Callable[[Value], bool],
        is_stable: Callable[[Op], bool],
        facts: Facts,
    ):
        self.index, self.inside, self.outside = index, inside, outside
        self.is_stable, self.facts = is_stable, facts
        self.first = first
        self.made: dict[Value, Value] = {index: first}
        self.ops: list[Op] = []  # computes the bounds

    def solve(self, part: Part, loc: Loc | None = None) -> Bounds | None:
        """The bounds that a condition amounts to; None if it cannot be solved."""
        made, b = dict(self.made), Builder(loc, watch=self.facts.note_op)
        bounds = self._solve(part, b)
        if bounds is None:
            self.made = made
            return self._solve_for_quotient(part, loc)
        self.ops += b.ops
        return bounds

    def hull(self, bounds: Sequence[Bounds]) -> Bounds:
        """From the first to the last step that any of several guards lets through."""
        if len(bounds) == 1:
            return bounds[0]
        b, facts = Builder(watch=self.facts.note_op), self.facts
        lows, highs = [each.lows for each in bounds], [each.highs for each in bounds]
        low = high = ()
        if all(lows):
            low = (least([greatest(v, facts, b) for v in lows], facts, b),)
        if all(highs):
            high = (greatest([least(v, facts, b) for v in highs], facts, b),)
        self.ops += b.ops
        return Bounds(low, high)

    def _solve_for_quotient(self, part: Part, loc: Loc | None) -> Bounds | None:
        """Solve a condition on `index / n`: `index / n >= k` is `index >= n k`.

        Steps of parts of a block (`cut_steps.py`) have the block index as a quotient.
        """
        low = self.facts.of(self.first).low
        for value, op in self.inside.items():
            if op.name != "div" or op.operands[0] is not self.index or low < 0:
                continue
            number = self.facts.of(op.operands[1]).number
            if not number or number < 0:
                continue
            b = Builder(loc, watch=self.facts.note_op)
            by = b.like(number, self.first)
            solver = Solver(
                value,
                b.div(self.first, by),
                {v: o for v, o in self.inside.items() if v is not value},
                lambda v: v is not self.index and self.outside(v),
                self.is_stable,
                self.facts,
            )
            bounds = solver.solve(part, loc)
            if bounds is None:
                continue
            b.ops += solver.ops
            lows, highs = (
                tuple(b.mul(v, by) for v in each)
                for each in (bounds.lows, bounds.highs)
            )
            if any(op.name == "mul" and self.facts.may_wrap(op) for op in b.ops):
                continue
            self.ops += b.ops
            return Bounds(lows, highs, bounds.needed)
        return None

    # --- invariants ---

    def is_fixed(self, value: Value) -> bool:
        return value is not self.index and self._can_replay(value, at_index=False)

    def _can_replay(self, value: Value, at_index: bool = True) -> bool:
        if value is self.index:
            return at_index
        op = self.inside.get(value)
        if op is None:
            return self.outside(value)
        if op.regions or len(op.results) != 1:
            return False
        if table()[op.name].effect is not Effect.PURE and not self.is_stable(op):
            return False
        return all(self._can_replay(v, at_index) for v in op.operands)

    def _at_first(self, value: Value, b: Builder) -> Value:
        """A value as it is in the first step."""
        op = self.inside.get(value)
        if value not in self.made and op is not None:
            operands = [self._at_first(v, b) for v in op.operands]
            self.made[value] = b.op(op.name, *operands, **op.attrs)
        return self.made.get(value, value)

    # --- conditions ---

    def _solve(self, part: Part, b: Builder) -> Bounds | None:
        if self.is_fixed(part.value):
            test = self._at_first(part.value, b)
            return Bounds(needed=(test if part.truth else b.not_(test),))
        op = self.inside.get(part.value)
        if op is None or op.name not in OPPOSITE:
            return None
        kind = op.name if part.truth else OPPOSITE[op.name]
        x, y = op.operands
        if kind == "ne" or x.tile.shape or x.tile.dtype.is_float:
            return None
        bounds = Bounds()
        for each in self._apart(kind, x, y):
            found = self._solve_comparison(*each, b)
            if found is None:
                return None
            bounds &= found
        return bounds

    def _apart(self, kind: str, x: Value, y: Value) -> list[tuple[str, Value, Value]]:
        """Comparisons that all hold where `x kind y` does, and only there.

        `j < min(a, b)` is two; `j < a / n`, where a varies, is `(j + 1) n <= a`. Sides
        whose rates are known stay as they are.
        """
        mirrored = _MIRRORED[kind], y, x
        right = self._right_apart(kind, x, y) or self._right_apart(*mirrored)
        return right or [(kind, x, y)]

    def _right_apart(
        self, kind: str, x: Value, y: Value
    ) -> list[tuple[str, Value, Value]]:
        """`_apart` by what the right side is; none if that says nothing."""
        op = self.inside.get(y)
        if op is None or kind == "eq" or self.rate(y) is not None:
            return []
        if op.name == ("min" if kind in ("lt", "le") else "max"):
            return [each for v in op.operands for each in self._apart(kind, x, v)]
        if self.rate(x) is None:
            return []
        if op.name == "neg" and not self.facts.may_wrap(op):
            other, (negated,) = self._inside("neg", x), op.operands
            return [] if other is None else self._apart(_MIRRORED[kind], other, negated)
        above, number = self._quotient(op)
        if above is None:
            return []
        of_next = {"lt": "le", "ge": "gt"}  # j < q is j + 1 <= q
        next_x = self._inside("add", x, 1) if kind in of_next else x
        product = next_x and self._inside("mul", next_x, number)
        kind = of_next.get(kind, kind)
        return [] if product is None else self._apart(kind, product, above)

    def _inside(self, name: str, x: Value, *number: int) -> Value | None:
        """A value of each step that only conditions name; None if it may wrap."""
        b = Builder(watch=self.facts.note_op)
        b.op(name, x, *(b.like(n, x) for n in number))
        if self.facts.may_wrap(b.ops[-1]):
            return None
        self.inside = {**self.inside, **{op.result: op for op in b.ops}}
        return b.ops[-1].result

    def _quotient(self, op: Op) -> tuple[Value | None, int]:
        """What an op divides by which positive number, rounding down; None if not so.

        Python's `//` is a `div`, which rounds towards zero, and one less where the
        signs differ and something remains.
        """
        if op.name == "select_n" and len(op.operands) == 3:
            which, cut, less = map(self.inside.get, op.operands)
            if which is None or cut is None or less is None or cut.name != "div":
                return None, 0
            is_less = less.name == "sub" and less.operands[0] is cut.result
            if is_less and self._number(less.operands[1]) == 1:
                return self._floored(which, cut)
        elif op.name == "div" and self.facts.of(op.operands[0]).low >= 0:
            number = self._number(op.operands[1])
            return (op.operands[0], number) if number > 0 else (None, 0)
        return None, 0

    def _floored(self, which: Op, cut: Op) -> tuple[Value | None, int]:
        """The operands of a `div`, if `which` says where it is not rounded down."""
        above, by = cut.operands
        number, asked = self._number(by), set()
        if which.name == "and" and number > 0:
            for op in map(self.inside.get, which.operands):
                made = self.inside.get(op.operands[0]) if op is not None else None
                if op is None or op.name != "ne" or made is None:
                    continue
                of, other = made.operands, self._number(op.operands[1])
                if made.name == "sign" and of[0] is above and other == 1:
                    asked.add("sign")
                if made.name == "rem" and of == cut.operands and other == 0:
                    asked.add("rem")
        return (above, number) if asked == {"sign", "rem"} else (None, 0)

    def _number(self, value: Value) -> int:
        """A known integer; one that no rule here takes if it is not known."""
        number = self.facts.of(value).number
        return -1 if number is None else number

    def _solve_comparison(
        self, kind: str, x: Value, y: Value, b: Builder
    ) -> Bounds | None:
        if self.is_fixed(x) and self.is_fixed(y):
            if OUTCOMES[kind](self.facts.of(x), self.facts.of(y)):
                return Bounds()
            sides = self._at_first(x, b), self._at_first(y, b)
            return Bounds(needed=(b.op(kind, *sides),))
        rates = self.rate(x), self.rate(y)
        if None in rates or not all(map(self._can_replay, (x, y))):
            return None
        rate = (rates[0] or 0) - (rates[1] or 0)
        if rate < 0:
            kind, x, y, rate = _MIRRORED[kind], y, x, -rate
        return self._compare(kind, x, y, rate, b) if rate else None

    def rate(self, value: Value) -> int | None:
        """The increment of an integer per step; None: not known, or it wraps."""
        if value is self.index:
            return 1
        if self.is_fixed(value):
            return 0
        op = self.inside.get(value)
        if op is None or op.name not in _RATES or self.facts.may_wrap(op):
            return None
        rates = [self.rate(v) for v in op.operands]
        numbers = [self.facts.of(v).number for v in op.operands]
        known = [r for r in rates if r is not None]
        if len(known) < len(rates):
            return None
        return _RATES[op.name](known, numbers)

    def _compare(
        self, kind: str, x: Value, y: Value, rate: int, b: Builder
    ) -> Bounds | None:
        """Bounds from `x kind y`, where `x - y` grows by `rate` > 0 per step."""
        before = len(b.ops)
        for limited in (False, True):
            del b.ops[before:]
            made = dict(self.made)
            gap = b.sub(self._side(y, x, limited, b), self._side(x, y, limited, b))
            lows: list[Value] = []
            highs: list[Value] = []
            if kind in ("lt", "le", "eq"):
                highs.append(self._step_after(gap, rate, kind != "lt", b))
            if kind in ("gt", "ge", "eq"):
                lows.append(self._step_after(gap, rate, kind == "gt", b))
            if all(self._is_sound(op) for op in b.ops):
                return Bounds(tuple(lows), tuple(highs))
            self.made = made
        return None

    def _side(self, value: Value, other: Value, limited: bool, b: Builder) -> Value:
        """One side at the first step.

        `limited`: an invariant side is clamped to the other's range. Beyond that range
        its value makes no difference, and the clamped difference cannot overflow.
        """
        made = self._at_first(value, b)
        if not limited or not self.is_fixed(value):
            return made
        span, (low, high) = self.facts.of(other), value.tile.dtype.limits
        made = b.max(made, b.like(max(low, span.low - 1), made))
        return b.min(made, b.like(min(high, span.high + 1), made))

    def _step_after(self, gap: Value, rate: int, inclusive: bool, b: Builder) -> Value:
        """The first step at which a sum has grown by `gap`; `inclusive`: by more."""
        if inclusive:
            gap = b.add(gap, b.like(1, gap))
        if self.facts.of(gap).low < 0:
            gap = b.max(gap, b.like(0, gap))
        if rate > 1:
            rounded = b.add(gap, b.like(rate - 1, gap))
            gap = b.div(rounded, b.like(rate, gap))
        gap = b.cast(gap, self.first.tile.dtype)
        return b.add(self.first, gap)

    def _is_sound(self, op: Op) -> bool:
        """Copied ops may do anything; ops created here must not wrap around."""
        is_replayed = any(value in self.replayed for value in op.results)
        return is_replayed or op.name not in _RATES or not self.facts.may_wrap(op)

    @property
    def replayed(self) -> set[Value]:
        return {v for old, v in self.made.items() if self.is_fixed(old)}


def greatest(values: Sequence[Value], facts: Facts, b: Builder) -> Value:
    return _furthest(values, b.max, lambda x, y: facts.of(x).high <= facts.of(y).low)


def least(values: Sequence[Value], facts: Facts, b: Builder) -> Value:
    return _furthest(values, b.min, lambda x, y: facts.of(y).high <= facts.of(x).low)


def _furthest(
    values: Sequence[Value],
    further: Callable[[Value, Value], Value],
    never_behind: Callable[[Value, Value], bool],
) -> Value:
    """The furthest value: the one known to be, else the result of an op.

    Args:
        values: at least one.
        further: makes the op.
        never_behind: whether the second of two values is known to be as far.
    """
    result = values[0]
    for value in values[1:]:
        if never_behind(result, value):
            result = value
        elif not never_behind(value, result):
            result = further(result, value)
    return result


def _product(rates: Sequence[int], numbers: Sequence[int | None]) -> int | None:
    for rate, other, number in zip(rates, reversed(rates), numbers[::-1], strict=True):
        if not other and number is not None:
            return rate * number
    return None


def _shifted(rates: Sequence[int], numbers: Sequence[int | None]) -> int | None:
    return None if rates[1] or numbers[1] is None else rates[0] << numbers[1]


# From the increments of the operands, and the operands that are known constants.
_RATES: dict[str, Callable[[Sequence[int], Sequence[int | None]], int | None]] = {
    "add": lambda rates, numbers: rates[0] + rates[1],
    "sub": lambda rates, numbers: rates[0] - rates[1],
    "neg": lambda rates, numbers: -rates[0],
    "mul": _product,
    "shift_left": _shifted,
    "cast": lambda rates, numbers: rates[0],
    "assume_multiple": lambda rates, numbers: rates[0],
}
