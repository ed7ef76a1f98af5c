"""Integers that a proof speaks of: linear forms in symbols, and what is known of these.

A symbol is any integer between two numbers (a thread's number, what memory holds, a
quotient); facts are linear forms that are not negative. `Path` collects what holds at
a place of a program. The greatest value of a form is first derived from ranges, then,
if that is not enough, by linear programming over all facts that concern it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import linprog

FAR = 1 << 70  # further than any integer of a kernel
MOST_SYMBOLS = 200  # of one linear program


class Symbol:
    """Any integer from `low` to `high`, about which `facts` hold."""

    __slots__ = ("facts", "high", "implies", "low", "number")
    made = 0

    def __init__(self, low: int, high: int):
        self.low, self.high = low, high
        self.facts: list[Linear] = []
        # What holds where this is between two numbers.
        self.implies: list[tuple[int, int, Condition]] = []
        Symbol.made += 1
        self.number = Symbol.made


@dataclass(frozen=True, eq=False)
class Linear:
    """A sum of symbols times numbers, and a number."""

    terms: Mapping[Symbol, int]
    constant: int = 0

    @cached_property
    def key(self) -> tuple:
        return (*sorted((s.number, c) for s, c in self.terms.items()), self.constant)

    def __add__(self, other: "Linear | int") -> "Linear":
        if isinstance(other, int):
            return Linear(self.terms, self.constant + other)
        terms = dict(self.terms)
        for symbol, n in other.terms.items():
            terms[symbol] = terms.get(symbol, 0) + n
            if not terms[symbol]:
                del terms[symbol]
        return Linear(terms, self.constant + other.constant)

    def __mul__(self, n: int) -> "Linear":
        if not n:
            return Linear({})
        return Linear({s: c * n for s, c in self.terms.items()}, self.constant * n)

    def __sub__(self, other: "Linear | int") -> "Linear":
        return self + other * -1

    @property
    def number(self) -> int | None:
        return None if self.terms else self.constant


def constant(n: int) -> Linear:
    return Linear({}, n)


def symbol(low: int, high: int) -> Linear:
    return Linear({Symbol(low, high): 1})


# --- conditions ---


@dataclass(frozen=True, eq=False)
class Condition:
    """`kind`: "least" (form >= 0), "zero", "other" (form != 0), "and", "or", "any"."""

    kind: str
    parts: tuple[Any, ...] = ()

    @cached_property
    def negated(self) -> "Condition":
        if self.kind == "least":
            return Condition("least", (self.parts[0] * -1 - 1,))
        if self.kind in ("and", "or"):
            other = "or" if self.kind == "and" else "and"
            return Condition(other, tuple(p.negated for p in self.parts))
        # Of what is not known, the opposite is not known either.
        swapped = {"zero": "other", "other": "zero"}.get(self.kind, "any")
        return Condition(swapped, self.parts)


ALWAYS = Condition("and")
NEVER = Condition("or")


# --- what holds at a place ---


@dataclass(frozen=True, eq=False)
class Path:
    """Facts that hold at a place, and the ranges of symbols that follow from them."""

    facts: tuple[Linear, ...] = ()
    ranges: Mapping[Symbol, tuple[int, int]] = field(default_factory=dict)
    dead: bool = False

    def range(self, form: Linear) -> tuple[int, int]:
        low = high = form.constant
        for s, n in form.terms.items():
            a, b = self.ranges.get(s, (s.low, s.high))
            low += n * (a if n > 0 else b)
            high += n * (b if n > 0 else a)
        return low, high

    def assume(self, condition: Condition) -> "Path":
        kind, parts = condition.kind, condition.parts
        if self.dead:
            return self
        if kind == "and":
            path = self
            for part in parts:
                path = path.assume(part)
            return path
        if kind == "or":
            possible = [p for p in parts if not self.assume(p).dead]
            if not possible:
                return Path(dead=True)
            return self.assume(possible[0]) if len(possible) == 1 else self
        if kind == "least":
            return self._with(parts[0])
        if kind == "zero":
            return self._with(parts[0])._with(parts[0] * -1)
        if kind == "other":
            low, high = self.range(parts[0])
            if low == high == 0:
                return Path(dead=True)
            if low == 0:
                return self._with(parts[0] - 1)
            if high == 0:
                return self._with(parts[0] * -1 - 1)
        return self

    def _with(self, fact: Linear) -> "Path":
        if self.dead:
            return self
        if (step := math.gcd(*fact.terms.values())) > 1:
            # What is at least 3 and a multiple of 4 is at least 4.
            fact = Linear(fact.terms, fact.constant // step * step)
        low, high = self.range(fact)
        if high < 0:
            return Path(dead=True)
        if low >= 0:
            return self
        ranges = dict(self.ranges)
        made = Path((*self.facts, fact), ranges)
        for s, n in fact.terms.items():
            a, b = before = ranges.get(s, (s.low, s.high))
            # n * s >= -(the most that the rest can be)
            rest = high - n * (b if n > 0 else a)
            if n > 0:
                a = max(a, -(rest // n))
            else:
                b = min(b, rest // -n)
            if a > b:
                return Path(dead=True)
            ranges[s] = (a, b)
            for least, most, condition in s.implies:
                was = least <= before[0] and before[1] <= most
                if not was and least <= a and b <= most:
                    made = made.assume(condition)
                    if made.dead:
                        return made
                    ranges = {**made.ranges, s: (a, b)}
                    made = Path(made.facts, ranges)
        return made

    def at_most(self, form: Linear, limit: int) -> bool:
        """Whether a form is never above a limit here."""
        if self.dead or self.range(form)[1] <= limit:
            return True
        most = greatest(form, self)
        return most is not None and most < limit + 0.5

    def at_least(self, form: Linear, limit: int) -> bool:
        return self.at_most(form * -1, -limit)


def greatest(form: Linear, path: Path) -> float | None:
    """The most that a form can be, by all facts that concern its symbols."""
    facts = _facts_about(form, path)
    symbols = {s for f in (form, *facts) for s in f.terms}
    if len(symbols) > MOST_SYMBOLS or not facts:
        return None
    order = {s: n for n, s in enumerate(symbols)}
    aim = np.zeros(len(order))
    for s, n in form.terms.items():
        aim[order[s]] = -n
    matrix, limits = np.zeros((len(facts), len(order))), np.zeros(len(facts))
    for row, fact in enumerate(facts):
        # Numbers of one size keep the solver's tolerances meaningful.
        scale = max(abs(n) for n in fact.terms.values())
        for s, n in fact.terms.items():
            matrix[row, order[s]] = -n / scale
        limits[row] = fact.constant / scale
    ranges = [path.ranges.get(s, (s.low, s.high)) for s in order]
    found = linprog(aim, A_ub=matrix, b_ub=limits, bounds=ranges, method="highs")
    if found.status == 2:  # nothing meets all facts: this place is never reached
        return -math.inf
    return form.constant - found.fun if found.status == 0 else None


def _facts_about(form: Linear, path: Path) -> list[Linear]:
    """Those of its symbols, of symbols in those, and of the path that share one."""
    known: set[Symbol] = set()
    chosen: dict[int, Linear] = {}
    pending: list[Symbol] = list(form.terms)
    by_symbol: dict[Symbol, list[Linear]] = {}
    for fact in path.facts:
        for s in fact.terms:
            by_symbol.setdefault(s, []).append(fact)
    while pending:
        s = pending.pop()
        if s in known:
            continue
        known.add(s)
        for fact in (*s.facts, *by_symbol.get(s, ())):
            if id(fact) not in chosen:
                chosen[id(fact)] = fact
                pending += fact.terms
    return [f for f in chosen.values() if f.terms]
