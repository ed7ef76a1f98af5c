"""Exponents: how values depend on the running maxima that sums are kept relative to.

Code that carries `m = max(m, ...)` and sums of `exp(x - m)` has values of three kinds:
`u`, `u + p * m` and `u * exp(p * m)`, with `u` independent of `m`. `Powers` follows
them through code. `autodiff/rescaled_sums.py` asks whether results depend on `m`,
`passes/schedule/widen_steps.py` whether a step only adds to sums.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log

from pallasite.ir.nodes import Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.roles import Cond, Dot, DotSide, filling

LN2 = log(2)


@dataclass(frozen=True)
class Power:
    """A value as `u + power * scale`, or `u * exp(power * scale)` if `is_factor`.

    `axes`: for each dimension of the value, the scale's dimension that it varies along,
    if any. `is_stopped`: the scale is a constant to derivatives; what depends on it so
    and what does not are not taken together, since only equal derivatives cancel.
    """

    powers: tuple[tuple[Value, float], ...]
    axes: tuple[int | None, ...]
    is_factor: bool
    is_pure: bool  # without `u`
    is_stopped: bool = False

    def times(self, number: float) -> "Power | None":
        return _power({s: p * number for s, p in self.powers}, self)

    @property
    def total(self) -> float:
        """The exponent if all scales are the same."""
        return round(sum(p for _, p in self.powers), 6)


class _Unknown:
    """The scale may matter in some other way."""


class _Any:
    """The initial assumption for a carried value, until its exponent is known."""


UNKNOWN, ANY = _Unknown(), _Any()
Known = Power | _Unknown | _Any | None  # None: independent of every scale


def _power(powers: Mapping[Value, float], like: Power, **changes: bool) -> Power | None:
    kept = {s: round(p, 6) for s, p in powers.items() if round(p, 6)}
    if not kept and not like.is_pure:
        return None
    return replace(like, powers=tuple(kept.items()), **changes)


def _combined(x: Known, y: Known, sign: int = 1) -> Known:
    """For a sum (of sums) or a product (of factors): exponents add up."""
    if x is None and y is None:
        return None
    if isinstance(x, Power) and isinstance(y, Power):
        if _kind(x) != _kind(y):
            return UNKNOWN
        powers = dict(x.powers)
        for scale, p in y.powers:
            powers[scale] = powers.get(scale, 0.0) + sign * p
        pure = x.is_pure and y.is_pure
        return _power(powers, replace(x, is_pure=pure))
    if isinstance(x, Power) and y is None:
        return replace(x, is_pure=False)
    if isinstance(y, Power) and x is None:
        return _power({s: sign * p for s, p in y.powers}, replace(y, is_pure=False))
    return UNKNOWN


def _alike(values: Iterable[Known]) -> Known:
    """For a sum of factors, or a select: all must have the same exponents."""
    found: list[Known] = [v for v in values if v is not ANY]
    if not found:
        return ANY
    first = found[0]
    if first is None:
        return None if all(v is None for v in found) else UNKNOWN
    if not isinstance(first, Power):
        return UNKNOWN
    for other in found[1:]:
        if not isinstance(other, Power) or not same_powers(first, other):
            return UNKNOWN
    is_pure = first.is_pure and len(found) == 1
    return replace(first, is_pure=is_pure)


def same_powers(x: Power, y: Power) -> bool:
    return _kind(x) == _kind(y) and dict(x.powers) == dict(y.powers)


def _kind(x: Power) -> tuple[object, ...]:
    """What values have in common whose exponents add up."""
    return x.axes, x.is_factor, x.is_stopped


@dataclass
class Powers:
    """Walks code and gives each value its exponents."""

    made: Mapping[Value, Op]
    known: dict[Value, Known]
    scales: set[Value] = field(default_factory=set[Value])
    escapes: bool = False  # an effect may depend on a scale
    unseen: frozenset[Value] = frozenset()  # refs whose contents may depend on scales
    # Values that are zero only where everything that depends on a scale is, and whether
    # they are at least one elsewhere.
    covering: Mapping[Value, bool] = field(default_factory=dict[Value, bool])
    tests: dict[Value, bool] = field(default_factory=dict[Value, bool])

    def of(self, value: Value) -> Known:
        return self.known.get(value)

    def add_scale(self, value: Value) -> None:
        self.scales.add(value)
        axes = tuple(d if n > 1 else None for d, n in enumerate(value.tile.shape))
        self.known[value] = Power(((value, 1.0),), axes, False, True)

    def block(self, ops: Iterable[Op]) -> None:
        for op in ops:
            self.op(op)

    def op(self, op: Op) -> None:
        if op.name == "cond":
            self.at_cond(op)
            return
        given = [self.of(v) for v in _used(op)]
        if all(v is None for v in given):
            return
        rule = _RULES.get(op.name)
        if rule is not None and not op.regions:
            self.known[op.result] = rule(self, op)
            return
        if op.name == "store" and op.operands[0] in self.unseen:
            return
        if op.regions or table()[op.name].effect is not Effect.PURE:
            self.escapes = True
        self.known.update(dict.fromkeys(op.results, UNKNOWN))

    def at_cond(self, op: Op) -> None:
        cond = Cond.of(op)
        self.escapes |= self.of(cond.which) is not None
        for branch in cond.branches:
            self.block(branch.ops)
        columns = list(zip(*(b.yields for b in cond.branches), strict=True))
        scale = next((n for n, c in enumerate(columns) if self.is_scale(c)), None)
        if scale is not None:
            self.add_scale(op.results[scale])
        for n, (result, column) in enumerate(zip(op.results, columns, strict=True)):
            if n == scale:
                continue
            found = [self.of(v) for v in column]
            if scale is not None:
                new = op.results[scale]
                pairs = zip(found, columns[scale], strict=True)
                found = [relative(x, old, new) for x, old in pairs]
            self.known[result] = _alike(found)

    def is_scale(self, values: Sequence[Value]) -> bool:
        """Whether each value is a scale, and they are not all the same."""
        return all(v in self.scales for v in values) and len(set(values)) > 1

    def number(self, value: Value) -> float | None:
        number = filling(self.made, value)
        return None if number is None else float(number)

    # --- rules ---

    def moved(self, op: Op, axes: Sequence[int | None]) -> Known:
        """The elements of the operand in another shape."""
        x = self.of(op.operands[0])
        return replace(x, axes=tuple(axes)) if isinstance(x, Power) else x

    def at_broadcast(self, op: Op) -> Known:
        x = self.of(op.operands[0])
        if not isinstance(x, Power):
            return x
        axes: list[int | None] = [None] * len(op.attrs["shape"])
        for axis, dim in zip(x.axes, op.attrs["dims"], strict=True):
            axes[dim] = axis
        return self.moved(op, axes)

    def at_reshape(self, op: Op) -> Known:
        """Dimensions that a scale varies along stay; others may be merged or split."""
        x = self.of(op.operands[0])
        if not isinstance(x, Power):
            return x
        axes: list[int | None] = []
        for old, new in _groups(op.operands[0].tile.shape, op.result.tile.shape):
            varies = [x.axes[d] for d, n in old if n > 1 and x.axes[d] is not None]
            long = [n for _, n in (*old, *new) if n > 1]
            if varies and len(long) != 2:
                return UNKNOWN
            axes += [varies[0] if varies and n > 1 else None for _, n in new]
        return self.moved(op, axes)

    def at_transpose(self, op: Op) -> Known:
        x = self.of(op.operands[0])
        if not isinstance(x, Power):
            return x
        return self.moved(op, [x.axes[d] for d in op.attrs["perm"]])

    def at_cast(self, op: Op) -> Known:
        is_float = op.result.tile.dtype.is_float
        return self.of(op.operands[0]) if is_float else UNKNOWN

    def at_stop(self, op: Op) -> Known:
        """Of the scale; of what else depends on it, derivatives would differ."""
        x = self.of(op.operands[0])
        if not isinstance(x, Power):
            return x
        is_scale = x.is_pure and not x.is_factor
        return replace(x, is_stopped=True) if is_scale else UNKNOWN

    def at_neg(self, op: Op) -> Known:
        x = self.of(op.operands[0])
        if not isinstance(x, Power):
            return x
        return replace(x, is_pure=False) if x.is_factor else x.times(-1)

    def at_sum(self, op: Op) -> Known:
        x, y = map(self.of, op.operands)
        if any(isinstance(v, Power) and v.is_factor for v in (x, y)) or ANY in (x, y):
            return _alike([x, y])
        return _combined(x, y, -1 if op.name == "sub" else 1)

    def at_product(self, op: Op) -> Known:
        x, y = map(self.of, op.operands)
        sign = -1 if op.name == "div" else 1
        if UNKNOWN in (x, y):
            return UNKNOWN
        if ANY in (x, y):
            return ANY if x is ANY else UNKNOWN if op.name == "div" else ANY
        if not any(isinstance(v, Power) and not v.is_factor for v in (x, y)):
            return _combined(x, y, sign)
        if isinstance(x, Power) and y is None:
            number = self.number(op.operands[1])
        elif isinstance(y, Power) and x is None and sign == 1:
            x, number = y, self.number(op.operands[0])
        else:
            return UNKNOWN
        if not number:
            return UNKNOWN
        return x.times(number**sign)

    def at_exp(self, op: Op) -> Known:
        x = self.of(op.operands[0])
        if not isinstance(x, Power) or x.is_factor:
            return UNKNOWN
        base = LN2 if op.name == "exp2" else 1.0
        powers = {s: p * base for s, p in x.powers}
        return _power(powers, x, is_factor=True)

    def at_log(self, op: Op) -> Known:
        x = self.of(op.operands[0])
        if not isinstance(x, Power) or not x.is_factor:
            return UNKNOWN
        base = LN2 if op.name == "log2" else 1.0
        return _power({s: p / base for s, p in x.powers}, x, is_factor=False)

    def at_integer_pow(self, op: Op) -> Known:
        x = self.of(op.operands[0])
        if not isinstance(x, Power) or not x.is_factor:
            return UNKNOWN
        return x.times(op.attrs["y"])

    def at_max(self, op: Op) -> Known:
        """The maximum of a scale and something independent is the next scale.

        That of a sum that has a one or only zeros, and of a number that is less than
        one, is a choice by whether the sum is zero.
        """
        for x, y in (op.operands, op.operands[::-1]):
            if self.covering.get(x) and 0 < (self.number(y) or 0) <= 1:
                now = self.of(x)
                return replace(now, is_pure=False) if isinstance(now, Power) else now
        scales = [v for v in op.operands if v in self.scales]
        others = [v for v in op.operands if v not in self.scales]
        if len(scales) != 1 or self.of(others[0]) is not None:
            return UNKNOWN
        self.add_scale(op.result)
        return self.known[op.result]

    def at_reduce(self, op: Op) -> Known:
        x = self.of(op.operands[0])
        if not isinstance(x, Power):
            return x if op.attrs["kind"] == "sum" else UNKNOWN
        axes = op.attrs["axes"]
        if not x.is_factor or op.attrs["kind"] != "sum" or _varies(x, axes):
            return UNKNOWN
        kept = [a for d, a in enumerate(x.axes) if d not in axes]
        return replace(x, axes=tuple(kept), is_pure=False)

    def at_compare(self, op: Op) -> Known:
        """Factors are positive: whether a value is zero is independent of scales."""
        x, y = op.operands
        now = self.of(x)
        if not isinstance(now, Power) or not now.is_factor or self.number(y) != 0:
            return UNKNOWN
        if x in self.covering and op.name in _ZERO_IF:
            self.tests[op.result] = _ZERO_IF[op.name]
        return None

    def zero_case(self, pred: Value) -> int | None:
        """Which case of a select is for rows without anything but zeros, if any is."""
        op = self.made.get(pred)
        while op is not None and op.name in ("broadcast_in_dim", "reshape"):
            pred = op.operands[0]
            op = self.made.get(pred)
        return None if pred not in self.tests else int(self.tests[pred])

    def at_select(self, op: Op) -> Known:
        pred, *cases = op.operands
        unused = self.zero_case(pred)
        if unused is not None and len(cases) == 2:
            cases.pop(unused)
        if self.of(pred) is not None:
            return UNKNOWN
        factor = any(isinstance(x := self.of(v), Power) and x.is_factor for v in cases)
        if factor:  # zero times anything is zero
            cases = [v for v in cases if self.number(v) != 0]
        found = _alike(map(self.of, cases))
        return replace(found, is_pure=False) if isinstance(found, Power) else found

    def at_dot(self, op: Op) -> Known:
        dot = Dot.of(op)
        left, right = self.side(dot.lhs), self.side(dot.rhs)
        if len(op.operands) != 2 or UNKNOWN in (left, right):
            return UNKNOWN
        if ANY in (left, right):
            return ANY
        free = len(dot.lhs.free), len(dot.rhs.free)
        batch = len(dot.lhs.batch)
        if isinstance(left, Power) and right is None:
            return replace(left, axes=(*left.axes, *[None] * free[1]))
        if isinstance(right, Power) and left is None:
            lead, rest = right.axes[:batch], right.axes[batch:]
            return replace(right, axes=(*lead, *[None] * free[0], *rest))
        return UNKNOWN

    def side(self, side: DotSide) -> Known:
        """An operand of a dot without its contracted dimensions."""
        x = self.of(side.value)
        if not isinstance(x, Power):
            return x
        if not x.is_factor or _varies(x, side.contract):
            return UNKNOWN
        axes = tuple(x.axes[d] for d in (*side.batch, *side.free))
        return replace(x, axes=axes, is_pure=False)


# Comparisons with zero of what is not negative, and what they say of zero.
_ZERO_IF = {"eq": True, "le": True, "ne": False, "gt": False}

_RULES = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), Powers.at_compare),
    "broadcast_in_dim": Powers.at_broadcast,
    "reshape": Powers.at_reshape,
    "transpose": Powers.at_transpose,
    "cast": Powers.at_cast,
    "stop_gradient": Powers.at_stop,
    "neg": Powers.at_neg,
    "add": Powers.at_sum,
    "sub": Powers.at_sum,
    "mul": Powers.at_product,
    "div": Powers.at_product,
    "exp": Powers.at_exp,
    "exp2": Powers.at_exp,
    "log": Powers.at_log,
    "log2": Powers.at_log,
    "integer_pow": Powers.at_integer_pow,
    "max": Powers.at_max,
    "reduce": Powers.at_reduce,
    "select_n": Powers.at_select,
    "dot": Powers.at_dot,
}


Dims = list[tuple[int, int]]  # number and size


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[Dims, Dims]]:
    """Runs of dimensions of two shapes that hold the same elements, the shortest."""
    groups: list[tuple[Dims, Dims]] = []
    left, right = list(enumerate(old)), list(enumerate(new))
    while left or right:
        mine: tuple[Dims, Dims] = ([], [])
        sizes = [1, 1]
        while not (mine[0] or mine[1]) or sizes[0] != sizes[1]:
            side = 0 if left and (sizes[0] <= sizes[1] or not right) else 1
            each = (left, right)[side].pop(0)
            mine[side].append(each)
            sizes[side] *= each[1]
        groups.append(mine)
    return groups


def _used(op: Op) -> Iterable[Value]:
    """The values that an op and its regions use."""
    for inner in (op, *(i for region in op.regions for i in walk(region))):
        yield from inner.operands
        for region in inner.regions:
            yield from region.yields


def _varies(x: Power, dims: Iterable[int]) -> bool:
    return any(x.axes[d] is not None for d in dims)


def relative(x: Known, old: Value, new: Value) -> Known:
    """A value that depends on one scale, in terms of another name of that scale."""
    if not isinstance(x, Power):
        return x
    if any(scale is not old for scale, _ in x.powers):
        return UNKNOWN
    return replace(x, powers=tuple((new, p) for _, p in x.powers))
