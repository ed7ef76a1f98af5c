"""Exponentials to base two: `exp(c * x - m)` becomes `exp2(c' * x - m')`.

A chip whose exponential has base two multiplies by log2(e) for any other base. This
pass moves that factor up to where the numbers originate, through everything that
commutes with a positive factor (maxima, differences, selects, loop-carried values), and
folds it into an existing multiplication or division by a constant, and into constants.
The running maximum of a softmax is then kept in base two.

Where the factor needs a multiplication of its own, that must be on fewer elements than
there are exponentials; on less than half as many, if the numbers are not results of
arithmetic that rounds. Equal numbers stay equal and finite constants stay finite:
`exp(x - x)` is 1 for masked scores, however large the masking value. The error is that
of rounding `c` once more. What is stored has its own base again, as the maxima that an
attention has as results; constants among it, such as the masking value, are exact.

Nothing becomes infinite by the factor: what comes from memory, such as a mask for each
key, is kept finite as constants are. (Numbers beyond `LARGEST / log2(e)`, 2.4e38, may
become equal.) Results of arithmetic are taken to be smaller than that, unless a
constant of the author's made them large: `x / 1e-38` is left alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import e, isinf, log, log2

import numpy as np

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import dead_code
from pallasite.ir.roles import Loop, number_of
from pallasite.ir.types import F32

LOG2_E, LN_2 = log2(e), log(2)
LARGEST = float(np.finfo(np.float32).max)
ORDINARY = 2.0**64  # factors up to which products are taken to be far from infinite

# Ops that commute with a positive factor; for a select, its cases do.
_COMMUTING = ("sub", "add", "neg", "max", "min", "select_n", "concatenate")
_COMPARING = ("lt", "le", "gt", "ge", "eq", "ne")
# Uses that round anyway, so that one more rounding before them is acceptable.
_ROUNDING = ("add", "sub", "mul", "div")


def fold_exp2(kernel: Kernel) -> Kernel:
    """Convert every exponential to base two whose argument is cheaper in base two."""
    code = _Code(kernel.body)
    groups = [group for group in _groups(code) if group.pays(code)]
    if not groups:
        return kernel
    return dead_code(kernel.with_(body=_Scaling(code, groups).block(kernel.body)))


@dataclass(frozen=True)
class _Use:
    """A use of a value: as an operand of an op, or as a yield of a region."""

    op: Op
    place: int
    region: Block | None = None  # None: as an operand


class _Code:
    """The definition and the uses of each value of a kernel."""

    def __init__(self, body: Block):
        self.makers: dict[Value, Op] = {}
        self.carried: dict[Value, tuple[Loop, int]] = {}
        self.uses: dict[Value, list[_Use]] = {}
        self.exps: list[Op] = []
        self._visit(body)

    def _visit(self, block: Block) -> None:
        for op in block.ops:
            self.makers.update(dict.fromkeys(op.results, op))
            for n, value in enumerate(op.operands):
                self.uses.setdefault(value, []).append(_Use(op, n))
            if op.name == "exp" and op.result.tile.dtype == F32:
                self.exps.append(op)
            if op.name == "for":
                loop = Loop.of(op)
                for n, value in enumerate(loop.carried):
                    self.carried[value] = loop, n
            for region in op.regions:
                for n, value in enumerate(region.yields):
                    self.uses.setdefault(value, []).append(_Use(op, n, region))
                self._visit(region)

    def sources(self, value: Value) -> Sequence[Value] | None:
        """What to scale so that a value is scaled; None: it must be multiplied."""
        op = self.makers.get(value)
        if op is None:
            if value not in self.carried:
                return None
            loop, n = self.carried[value]
            return loop.inits[n], loop.yields[n], loop.results[n]
        if op.name == "for":
            return (Loop.of(op).carried[op.results.index(value)],)
        if op.name == "cond":
            n = op.results.index(value)
            return tuple(region.yields[n] for region in op.regions)
        if op.name in _COMMUTING:
            return op.operands[op.name == "select_n" :]
        extreme = op.name == "reduce" and op.attrs["kind"] in ("max", "min")
        return op.operands if extreme or table()[op.name].moves else None

    def product(self, value: Value) -> tuple[Value, float] | None:
        """The value and the constant whose product a value is, or nearly is."""
        op = self.makers.get(value)
        if op is None or op.name not in ("mul", "div"):
            return None
        if op.name == "div":
            divisor = number_of(self.makers, op.operands[1])
            if not divisor or abs(divisor) * ORDINARY < 1:
                return None
            return op.operands[0], 1 / divisor
        for x, y in (op.operands, op.operands[::-1]):
            factor = number_of(self.makers, y)
            if factor is not None and abs(factor) <= ORDINARY:
                return x, factor
        return None

    def is_arithmetic(self, value: Value) -> bool:
        """Whether a value is a result of arithmetic that rounds."""
        maker = self.makers.get(value)
        return maker is not None and maker.name in (*_ROUNDING, "dot")

    def may_be_large(self, value: Value) -> bool:
        """Whether a constant of the author's may have made a value large."""
        op = self.makers.get(value)
        if op is None or op.name not in ("mul", "div") or self.product(value):
            return False
        factors = op.operands if op.name == "mul" else op.operands[1:]
        return any(number_of(self.makers, v) is not None for v in factors)

    def scaled_value(self, use: _Use) -> Value | None:
        """The value that is scaled if this use is scaled."""
        op = use.op
        if op.name == "for":
            n = use.place if use.region else use.place - len(Loop.of(op).bounds)
            return Loop.of(op).carried[n]
        if op.name == "cond":
            return op.results[use.place] if use.region else None
        return op.results[0] if len(op.results) == 1 else None


@dataclass
class _Group:
    """Exponentials whose arguments must be converted to base two together."""

    exps: list[Op]
    inner: set[Value] = field(default_factory=set)  # computed from scaled values
    leaves: set[Value] = field(default_factory=set)  # multiplied by the factor

    def pays(self, code: _Code) -> bool:
        costs = [
            self.use_cost(value, use, code)
            for value in self.inner
            for use in code.uses.get(value, ())
        ]
        costs += [self.leaf_cost(v, code) for v in self.leaves]
        if len(self.cut(code)) > 1 or any(map(code.may_be_large, self.leaves)):
            return False
        if any(cost is None for cost in costs):
            return False
        total = sum(cost for cost in costs if cost is not None)
        return total < sum(op.result.tile.size for op in self.exps)

    def cut(self, code: _Code) -> set[float]:
        """Finite constants that would overflow with the factor, or that are stored."""
        numbers = {number_of(code.makers, v) for v in self.leaves}
        kept = {n for n in numbers if n and not isinf(n)}
        return kept if self.is_stored(code) else set(filter(_is_cut, kept))

    def is_stored(self, code: _Code) -> bool:
        """Whether a scaled value is stored, in its own base."""
        uses = (use for v in self.inner for use in code.uses.get(v, ()))
        return any("store" in _ends(u, code) for u in uses if not self.is_own(u, code))

    def rounds(self, code: _Code) -> bool:
        """Whether all but constants are products of what has been rounded before."""
        others = [v for v in self.leaves if number_of(code.makers, v) is None]
        products = [code.product(v) for v in others]
        makers = [code.makers.get(p[0]) for p in products if p is not None]
        known = [m.name for m in makers if m is not None]
        return len(known) == len(others) and {*_ROUNDING, "dot"}.issuperset(known)

    def leaf_cost(self, value: Value, code: _Code) -> int:
        """How many elements a leaf multiplies; twice that if its value was exact."""
        if number_of(code.makers, value) is not None:
            return 0
        elsewhere = [u for u in code.uses[value] if not self.is_own(u, code)]
        if code.product(value) is not None and not elsewhere:
            return 0
        return value.tile.size * (1 if code.is_arithmetic(value) else 2)

    def use_cost(self, value: Value, use: _Use, code: _Code) -> int | None:
        """How many elements a use must unscale; None: it cannot be unscaled."""
        if self.is_own(use, code):
            return 0
        if use.region is None and use.op.name in _COMPARING:
            compared = [
                v in self.inner or number_of(code.makers, v) for v in use.op.operands
            ]
            return None if None in compared or False in compared else 0
        ends, may_end = _ends(use, code), {*_ROUNDING}
        if "store" in ends and self.rounds(code):
            may_end.add("store")
        return value.tile.size if ends <= may_end else None

    def is_own(self, use: _Use, code: _Code) -> bool:
        if use.region is None and use.op in self.exps:
            return True
        return code.scaled_value(use) in self.inner


def _ends(use: _Use, code: _Code) -> set[str]:
    """What a value is used by at last, after ops that only move its elements."""
    if use.region is not None:
        return {"yield"}
    if table()[use.op.name].moves:
        uses = code.uses.get(use.op.result, ())
        return set[str]().union(*(_ends(u, code) for u in uses))
    return {use.op.name}


def _groups(code: _Code) -> Iterator[_Group]:
    groups: list[_Group] = []
    for op in code.exps:
        new = _Group([op])
        pending = [op.operands[0]]
        while pending:
            value = pending.pop()
            if value in new.inner or value in new.leaves:
                continue
            sources = code.sources(value)
            (new.leaves if sources is None else new.inner).add(value)
            pending += sources or ()
        joined = [g for g in groups if not g.inner.isdisjoint(new.inner)]
        for group in joined:
            new.exps += group.exps
            new.inner |= group.inner
            new.leaves |= group.leaves
        groups = [g for g in groups if g not in joined] + [new]
    yield from groups


def _is_cut(number: float) -> bool:
    """Whether a finite number would overflow with the factor."""
    return not isinf(number) and abs(number) * LOG2_E > LARGEST


class _Scaling:
    """Rewrites code so that the values of groups carry the factor."""

    def __init__(self, code: _Code, groups: Sequence[_Group]):
        self.code = code
        self.exps = {op for group in groups for op in group.exps}
        self.inner = set[Value]().union(*(group.inner for group in groups))
        self.leaves = set[Value]().union(*(group.leaves for group in groups))
        self.cut = {v: n for g in groups for n in g.cut(code) for v in g.inner}
        self.scaled: dict[Value, Value] = {}

    def block(self, block: Block, has_factor: Sequence[bool] = ()) -> Block:
        b = Builder()
        self.give(block.params, b)
        for op in block.ops:
            b.loc = op.loc
            b.ops.append(self.op(op, b))
            self.give(op.results, b)
        pairs = zip(
            block.yields, has_factor or [False] * len(block.yields), strict=True
        )
        yields = [self.two(v) if two else self.natural(v, b) for v, two in pairs]
        return b.block(block.params, yields)

    def op(self, op: Op, b: Builder) -> Op:
        if op.name == "for":
            return self.loop(Loop.of(op), b)
        is_own = op in self.exps or any(v in self.inner for v in op.results)
        has_factor = [v in self.inner for v in op.results if op.name == "cond"]
        regions = tuple(self.block(region, has_factor) for region in op.regions)
        is_compared = op.name in _COMPARING and any(
            v in self.inner for v in op.operands
        )
        new: Callable[[Value], Value] = lambda v: self.natural(v, b)
        if (is_own and not op.regions) or is_compared:
            new = self.two
        name = "exp2" if op in self.exps else op.name
        operands = tuple(map(new, op.operands))
        return op.with_(name=name, operands=operands, regions=regions)

    def loop(self, loop: Loop, b: Builder) -> Op:
        has_factor = [v in self.inner for v in loop.carried]
        pairs = zip(loop.inits, has_factor, strict=True)
        inits = [self.two(v) if two else self.natural(v, b) for v, two in pairs]
        body = self.block(loop.body, has_factor)
        return loop.with_(inits=tuple(inits), body=body).to_op()

    def two(self, value: Value) -> Value:
        """A value with the factor."""
        return self.scaled.get(value, value)

    def natural(self, value: Value, b: Builder) -> Value:
        """A value without the factor."""
        if value not in self.inner:
            return value
        result = b.mul(value, b.like(LN_2, value))
        if value in self.cut:
            number = self.cut[value]
            is_cut = b.eq(value, b.like(_scaled_number(number), value))
            result = b.select(is_cut, b.like(number, value), result)
        return result

    def give(self, values: Sequence[Value], b: Builder) -> None:
        """Multiply the leaves by the factor."""
        for value in values:
            if value not in self.leaves:
                continue
            number = number_of(self.code.makers, value)
            product = self.code.product(value)
            if number is not None:
                made = b.like(_scaled_number(number), value)
            elif product is not None:
                x, factor = product
                made = b.mul(x, b.like(factor * LOG2_E, value))
            else:
                made = b.mul(value, b.like(LOG2_E, value))
                if not self.code.is_arithmetic(value):
                    made = _finite_as(value, made, b)
            self.scaled[value] = made


def _finite_as(value: Value, scaled: Value, b: Builder) -> Value:
    """A scaled value that is finite where the value is."""
    most, least = b.like(LARGEST, value), b.like(-LARGEST, value)
    kept = b.min(b.max(scaled, least), most)
    is_infinite = b.ne(value, b.min(b.max(value, least), most))
    return b.select(is_infinite, value, kept)


def _scaled_number(number: float) -> float:
    """As a multiplication would give it, but finite if the number is."""
    with np.errstate(over="ignore"):
        scaled = float(np.float32(number) * np.float32(LOG2_E))
    return scaled if isinf(number) else min(max(scaled, -LARGEST), LARGEST)
