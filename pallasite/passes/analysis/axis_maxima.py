"""What steps do to running maxima, and to what is kept relative to them.

A part of `axis_state.py`: sums relative to a maximum, counts of what equals it, and
what belongs to it, such as its index.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from pallasite.ir.nodes import Access, Op, Value
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.exponents import Power, Powers
from pallasite.passes.analysis.old_elements import (
    RELATIVE,
    Abstract,
    Old,
    Relative,
    Sources,
    Tainted,
    numbers,
)

MOST_BESIDE = 64  # elements that belong to maxima; a program merges those of all parts


class Maxima:
    """What a search over the code of a step knows, and finds about maxima."""

    powers: Powers
    values: dict[Value, Abstract]
    versions: dict[Value, int]
    scales: dict[Value, tuple[Value, int]]  # maxima as loaded: of which ref, and when
    counted: dict[Value, Value]

    def sources(self, value: Value) -> Sources:
        found = self.values.get(value)
        return frozenset() if found is None else found.sources

    def rescaled(self, op: Op, known: Sequence[Abstract | None]) -> Old | None:
        """A sum times `exp(m - new m)`, or that plus something relative to `new m`."""
        olds = [k for k in known if isinstance(k, Old) and not self.is_scale(k)]
        pairs = zip(op.operands, known, strict=True)
        others = [v for v, k in pairs if k not in olds]
        if op.name not in ("mul", "add") or len(olds) != 1 or len(others) != 1:
            return None
        (old,), power = olds, self.powers.of(others[0])
        if old.relative and op.name == "add" and old.relative.rate == inf:
            return old if self.counted.get(others[0]) is old.relative.new else None
        if not isinstance(power, Power) or not power.is_factor:
            return None
        powers = dict(power.powers)
        relative = old.relative
        if op.name == "add":
            if relative is None or powers != {relative.new: -relative.rate}:
                return None
            used = {ref for ref, _ in self.sources(others[0])}
            same = used == {self.scales[relative.old][0]}
            return old if same and power.axes == relative.axes else None
        if old.merge is not None or not power.is_pure or len(powers) != 2:
            return None
        before = [s for s in powers if s in self.scales]
        after = [s for s in powers if s not in self.scales]
        if len(before) != 1 or len(after) != 1 or power.total:
            return None
        (loaded,), (new,) = before, after
        rate = powers[loaded]
        if not self.is_next(loaded, new) or rate <= 0:
            return None
        relative = Relative(loaded, new, rate, power.axes)
        return replace(old, merge=RELATIVE, relative=relative)

    def is_next(self, loaded: Value, new: Value) -> bool:
        """Whether a value is the maximum of one that was loaded and something free."""
        value = self.values.get(new)
        maximum = isinstance(value, Old) and value.merge == "max"
        maximum |= isinstance(value, Tainted)  # once it is stored
        refs = {ref for ref, _ in self.sources(new)}
        return maximum and self.scales[loaded][0] in refs

    def of_equal(self, op: Op, known: Sequence[Abstract | None]) -> Old | None:
        """A count, and what is added to it, where something equals the next maximum.

        `exp(rate * (x - new m))` is one there and zero elsewhere for an infinite rate:
        such a count is a relative sum. What is more than `m` of its part is not more
        than that of all, so that only what equals the last `m` counts in either.
        """
        made = self.powers.made
        test = made.get(op.operands[0]) if op.name == "select_n" else None
        if test is None or test.name != "eq" or len(op.operands) != 3:
            return None
        x, new = test.operands
        none, value = op.operands[1:]
        most = made.get(new)
        same = new.tile.shape == value.tile.shape
        same &= most is not None and most.name == "max" and x in most.operands
        if not same or known[1] is not None or self.powers.number(none) != 0:
            return None
        if self.values.get(x) is None and known[2] is None:
            self.counted[op.result] = new
            return None
        old = known[2]
        if not isinstance(old, Old) or (old.merge, old.relative) != (None, None):
            return None
        if x not in self.scales or not self.is_next(x, new):
            return None
        axes = tuple(d if n > 1 else None for d, n in enumerate(new.tile.shape))
        relative = Relative(x, new, inf, axes)
        return replace(old, merge=RELATIVE, relative=relative)

    def larger(self, op: Op, known: Sequence[Abstract | None]) -> Old | None:
        """What a select takes where something is more than a running maximum.

        The next maximum; or what belongs to it, such as its index, which remains while
        there is none larger. Of several parts the first that has the largest maximum
        has what belongs to it, as the steps before had none as large, and those after
        it none larger. (A maximum that is not a number has nothing.)
        """
        if op.name != "select_n" or len(known) != 3 or known[2]:
            return None
        pair, state = self.compared(op.operands[0]), known[1]
        if pair is None or not isinstance(state, Old):
            return None
        if op.operands[1:] == pair[::-1]:
            return state.merged("max")
        relative = self.beside(*pair, op.result)
        if relative is None or state.merge or state.relative:
            return None
        return replace(state, merge=RELATIVE, relative=relative)

    def compared(self, test: Value) -> tuple[Value, Value] | None:
        """Something free and a running maximum, if a test says whether it is more."""
        made = self.powers.made.get(test)
        if made is None or made.name not in ("gt", "lt"):
            return None
        x, old = made.operands[:: 1 if made.name == "gt" else -1]
        free = old in self.scales and self.values.get(x) is None
        return (x, old) if free else None

    def is_larger(self, op: Op, relative: Relative) -> bool:
        """Whether an op is the larger one of a maximum and what may be the next."""
        pair = relative.new, relative.old
        if op.name == "select_n":
            return self.compared(op.operands[0]) == pair == op.operands[:0:-1]
        return op.name == "max" and {*op.operands} == {*pair}

    def beside(self, x: Value, old: Value, value: Value) -> Relative | None:
        """How what belongs to a maximum is kept; `x`: what may be the next one."""
        if value.tile.size > MOST_BESIDE or old.tile.shape != value.tile.shape:
            return None
        axes = tuple(d if n > 1 else None for d, n in enumerate(old.tile.shape))
        return Relative(old, x, inf, axes, first=True)

    def guarded(self, access: Access, test: Value | None) -> Old | None:
        """What a store is to a state that only happens where a maximum is exceeded."""
        ref, value = access.ref, access.value
        pair = self.compared(test) if test is not None else None
        whole = covers_whole(ref.ref.shape, access.index) and access.mask is None
        if pair is None or value is None or not whole or self.values.get(value):
            return None
        version = self.versions.get(ref, 0)
        state = Old(ref, None, numbers(value.tile.shape), None, version)
        if self.scales[pair[1]] == (ref, version):
            return state.merged("max") if value is pair[0] else None
        relative = self.beside(*pair, value)
        if relative is None:
            return None
        return replace(state, merge=RELATIVE, relative=relative)

    def is_scale(self, known: Old) -> bool:
        """Whether a value is a running maximum rather than a sum."""
        return known.merge == "max"


def without_units(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n > 1)
