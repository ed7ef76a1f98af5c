"""Whether steps only update maxima and add to sums, so that they can be merged.

`widen_steps.py` merges several steps into one, `whole_loops.py` all of them. It is
equivalent because each sum, times the exponential of its maximum, only grows by the
contribution of the step's own block (`analysis/exponents.py`). Results differ by the
rounding of sums.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pallasite.ir.nodes import Access, Op, Span, Value
from pallasite.ir.rewrite import is_elementwise
from pallasite.ir.roles import number_of
from pallasite.passes.analysis.exponents import UNKNOWN, Power, Powers
from pallasite.passes.analysis.guards import Part as Condition
from pallasite.passes.analysis.loop_dims import LoopDim
from pallasite.passes.normal.resized_code import CannotReblock

# Ops that compute the same at each position when there are more positions.
_BY_POSITION = {"constant", "iota", "broadcast_in_dim", "transpose", "load"}
_BY_POSITION |= {"dot", "reduce"}  # of other dimensions, unless they sum over it
_SHAPE_ONLY = {"broadcast_in_dim", "reshape", "transpose"}


class State(NamedTuple):
    """Something that is carried from step to step."""

    old: Value
    new: Value
    is_finite: bool  # whether its initial value is known to be finite


@dataclass(frozen=True)
class Sum:
    """`new = old * factor + part`, where `part` adds up sums over the dimension."""

    state: State
    part: Value
    terms: tuple[tuple[Value, ...], ...]  # of each sum: what is multiplied and summed


class Fill(NamedTuple):
    """What elements of a value become unless all conditions hold."""

    number: float
    unless: tuple[Condition, ...]


class Steps:
    """Proves that a step only updates maxima and adds to sums.

    Args:
        ops: the ops of a step, in order.
        states: what it carries on.
        dim: the dimension along which it steps.
        made: the op that defines each value, including those before the step.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        states: Sequence[State],
        dim: LoopDim,
        made: Mapping[Value, Op],
    ):
        self.dim, self.made = dim, made
        self.inside = {v: op for op in ops for v in op.results}
        self.states = [s for s in states if s.old is not s.new]
        self.olds = {s.old for s in self.states}
        for op in ops:
            self._check_positions(op)
        self.maxima = {s: x for s in self.states if (x := self._maximum(s)) is not None}
        self.powers = Powers(made, dict.fromkeys(self.olds, UNKNOWN))
        for state in self.maxima:
            self.powers.add_scale(state.old)
        self.powers.block(ops)
        self.sums = [self._sum(s) for s in self.states if s not in self.maxima]

    def _check_positions(self, op: Op) -> None:
        """Wider operands must make the result wider and change nothing else."""
        values = (*op.operands, *op.results)
        if not any(v in self.dim.members for v in values):
            return
        same = op.name in _BY_POSITION or is_elementwise(op)
        if not same and not self._sums_over(op):
            raise CannotReblock(f"'{op.name}' needs all of a block")
        d = self.dim.members.get(op.operands[0]) if op.name == "load" else None
        if d is not None:
            access = Access.of(op)
            if access.index[d] != Span(0, self.dim.size) or access.mask is not None:
                raise CannotReblock(
                    "a load selects a part of the dimension that steps iterate over"
                )

    def _sums_over(self, op: Op) -> bool:
        """Whether an op reduces or contracts the dimension."""
        if op.name == "dot":
            return op in self.dim.products
        axis = self.dim.members.get(op.operands[0]) if op.operands else None
        return op.name == "reduce" and axis is not None and axis in op.attrs["axes"]

    def _maximum(self, state: State) -> Value | None:
        """What a running maximum is taken over, if it is one."""
        op = self.inside.get(state.new)
        if op is None or op.name != "max" or state.old not in op.operands:
            return None
        others = [v for v in op.operands if v is not state.old]
        source = self._without_shape(others[0]) if others else None
        if source is None or source.name != "reduce" or not self._sums_over(source):
            return None
        (x,) = source.operands
        if source.attrs["kind"] != "max" or not self._is_own((x,), ()):
            return None
        return x

    def _sum(self, state: State) -> Sum:
        op = self.inside.get(state.new)
        if op is not None and op.name == "add":
            for kept, part in (op.operands, op.operands[::-1]):
                terms = self._terms(state, kept, part)
                if terms is not None:
                    return Sum(state, part, terms)
        raise CannotReblock(
            "steps carry a value that is neither a maximum nor such a sum"
        )

    def _terms(
        self, state: State, kept: Value, part: Value
    ) -> tuple[tuple[Value, ...], ...] | None:
        terms = self._summed(part)
        if not terms or not self._keeps_exponent(state, kept, part):
            return None
        known = [s.new for s in self.maxima]
        return terms if all(self._is_own(each, known) for each in terms) else None

    def _summed(self, value: Value) -> tuple[tuple[Value, ...], ...]:
        """The terms of all sums over the dimension that a value adds up; none: it
        is something else."""
        op = self._without_shape(value)
        if op is None:
            return ()
        if op.name == "neg":
            return self._summed(op.operands[0])
        if op.name == "add":
            sides = [self._summed(v) for v in op.operands]
            return sides[0] + sides[1] if all(sides) else ()
        if op.name == "mul":  # by a number
            numbers = [number_of(self.made, v) for v in op.operands]
            others = [v for v, n in zip(op.operands, numbers, strict=True) if n is None]
            return self._summed(others[0]) if len(others) == 1 else ()
        is_sum = op.name == "dot" or op.attrs.get("kind") == "sum"
        return (op.operands[:2],) if is_sum and self._sums_over(op) else ()

    def _keeps_exponent(self, state: State, kept: Value, part: Value) -> bool:
        """Whether the old sum is rescaled as the part is scaled."""
        scale = self.powers.of(part)
        if kept is state.old:
            return scale is None
        op = self.inside.get(kept)
        if op is None or op.name != "mul" or state.old not in op.operands:
            return False
        factor = next((v for v in op.operands if v is not state.old), state.old)
        change = self.powers.of(factor)
        if not isinstance(scale, Power) or not isinstance(change, Power):
            return False
        if not scale.is_factor or not change.is_factor or not change.is_pure:
            return False
        if len(scale.powers) != 1 or scale.axes != change.axes:
            return False
        ((new, power),) = scale.powers
        old = next((s.old for s in self.maxima if s.new is new), None)
        return dict(change.powers) == {old: -power, new: power}

    def _is_own(self, values: Sequence[Value], known: Iterable[Value]) -> bool:
        """Whether values depend only on the step's own block and on `known`."""
        seen, pending = set(known), [*values]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            op = self.inside.get(value)
            if value in self.olds or (op is not None and self._sums_over(op)):
                return False
            pending += op.operands if op is not None else ()
        return True

    def _without_shape(self, value: Value) -> Op | None:
        op = self.inside.get(value)
        while op is not None and op.name in _SHAPE_ONLY:
            op = self.inside.get(op.operands[0])
        return op

    # --- contributions that must vanish ---

    def fills(
        self, skips: tuple[Condition, ...], same: tuple[Condition, ...]
    ) -> dict[Value, "Fill"]:
        """The neutral values for skipped steps, by the value that needs them.

        Args:
            skips: conditions that hold for the steps that are not skipped.
            same: those of them that are the same for all programs. The second factor
                of a product with zero is zeroed by these alone, so that programs that
                skip different steps can still be merged.
        """
        found: dict[Value, Fill] = {}
        for x in self.maxima.values():
            if not x.tile.dtype.is_float:
                raise CannotReblock("skipped steps compute a maximum of integers")
            found[x] = Fill(-inf, skips)
        for terms in (terms for each in self.sums for terms in each.terms):
            first, *others = sorted(terms, key=lambda t: self.powers.of(t) is None)
            if not self._vanishes(first):
                found[first] = Fill(0.0, skips)
            for other in others if same else ():
                found[other] = Fill(0.0, same)
        return found

    def fills_along(
        self, dim: LoopDim, skips: tuple[Condition, ...]
    ) -> dict[Value, "Fill"]:
        """The neutral values for programs, along another dimension, that skip a step.

        A maximum that is still minus infinity does no harm if the program has taken a
        step: the step rescaled the sums by exp(maximum - maximum), so they are NaN.

        Args:
            dim: of the rows of several programs.
            skips: conditions that hold for the programs that do not.
        """
        found: dict[Value, Fill] = {}
        for x in self.maxima.values():
            if not x.tile.dtype.is_float or x not in dim.members:
                raise CannotReblock("skipped steps compute a maximum of other elements")
            found[x] = Fill(-inf, skips)
        for terms in (terms for each in self.sums for terms in each.terms):
            mine = [term for term in terms if term in dim.members]
            if not mine:
                raise CannotReblock("skipped steps add a sum of other elements")
            if not any(self._vanishes(term, started=True) for term in mine):
                found[mine[0]] = Fill(0.0, skips)
        return found

    def _vanishes(self, term: Value, started: bool = False) -> bool:
        """Whether it is `exp(x - maximum)`: zero for an x of minus infinity.

        This does not hold if the maximum may be minus infinity too. `started`: where it
        is, the sums are NaN anyway.
        """
        op = self.inside.get(term)
        while op is not None and op.name == "cast":
            op = self.inside.get(op.operands[0])
        if op is None or op.name not in ("exp", "exp2"):
            return False
        difference = self.inside.get(op.operands[0])
        if difference is None or difference.name != "sub":
            return False
        x, top = difference.operands
        top = self._shown(top)
        return any(
            (state.is_finite or started) and state.new is top and over is x
            for state, over in self.maxima.items()
        )

    def _shown(self, value: Value) -> Value:
        op = self.inside.get(value)
        while op is not None and op.name in _SHAPE_ONLY:
            (value,) = op.operands
            op = self.inside.get(value)
        return value
