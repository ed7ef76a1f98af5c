"""filled_slots: scratch that copies fill ahead by hand is read where they copy from.

In: a loop that reads one of several slots of scratch in each iteration, and fills that
of a later one, as `buf[i % 2]` with copies of `x[(i + 1) * n]`; the first slots are
filled before the loop. Out: each iteration loads from the array itself, and the scratch
is gone. Threads of a GPU have no use for the author's buffers: a copy waits where it
starts, and slots would be in main memory. What is left is a loop in normal form, whose
loads the backend starts ahead.

Proof. Let iteration i fill slot `(i + d) % n` and read slot `i % n`, with 0 < d < n. It
reads what iteration i - d stored: the stores in between fill the slots of i - d + 1 to
i + d, which are others. Its guard let that store run, as i is before the loop's end. In
the first d iterations it is what was stored before the loop, from where the formula of
the others says. Nothing writes the array, so a later load gives the same.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import is_pure, substitute, with_regions
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.guards import guard_of
from pallasite.passes.analysis.memory import Roots, constant_inputs
from pallasite.passes.lower.plain_copies import plain_copies
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.optimise.unused import drop_unused

T = TypeVar("T")
# Comparisons that say that one operand is below the other, and the step between them.
_BELOW = {("lt", True): 1, ("gt", True): -1, ("ge", False): 1, ("le", False): -1}


def filled_slots(kernel: Kernel) -> Kernel:
    """The kernel without such scratch, in normal form; the same if there is none."""
    if not any(op.name == "copy_start" for op in walk(kernel.body)):
        return kernel
    plain = canonicalize(plain_copies(kernel))
    new = _Slots(plain).kernel()
    return kernel if new is plain else normalize(drop_unused(new))


class _NotSo(Exception):
    """Something is not as in the proof."""


def _check(holds: object) -> None:
    if not holds:
        raise _NotSo


def _the(found: T | None) -> T:
    if found is None:
        raise _NotSo
    return found


class _Sum(NamedTuple):
    """A number plus terms, each with a factor; equal ones are equal numbers."""

    const: int
    terms: frozenset[tuple[Hashable, int]] = frozenset()

    @staticmethod
    def of(term: Hashable) -> "_Sum":
        return _Sum(0, frozenset({(term, 1)}))

    def plus(self, other: "_Sum", sign: int = 1) -> "_Sum":
        factors = dict(self.terms)
        for term, factor in other.terms:
            factors[term] = factors.get(term, 0) + sign * factor
        terms = frozenset((t, n) for t, n in factors.items() if n)
        return _Sum(self.const + sign * other.const, terms)

    def minus(self, other: "_Sum") -> int:
        """The difference, which has to be a number."""
        difference = self.plus(other, -1)
        _check(not difference.terms)
        return difference.const

    def times(self, factor: int) -> "_Sum":
        terms = frozenset((t, factor * n) for t, n in self.terms if factor)
        return _Sum(factor * self.const, terms)


class _Slot(NamedTuple):
    """`at % count`."""

    at: _Sum
    count: int


class _Ring(NamedTuple):
    """How slots are filled: by the loads of a loop's iterations.

    Attributes:
        loop: the loop.
        inside: its ops.
        ahead: iterations from a store to the load of its slot.
        source: the load in the loop whose result is stored.
    """

    loop: Loop
    inside: frozenset[Op]
    ahead: int
    source: Op


class _Slots:
    def __init__(self, kernel: Kernel):
        self.old, self.constant = kernel, constant_inputs(kernel)
        self.roots, self.ops = Roots(kernel), list(walk(kernel.body))
        self.made = {v: op for op in self.ops for v in op.results}
        regions = [kernel.body, *(r for op in self.ops for r in op.regions)]
        self.homes = {op: block for block in regions for op in block.ops}

    def kernel(self) -> Kernel:
        loads, stores = dict[Op, _Ring](), set[Op]()
        for op in self.ops:
            if op.name == "alloc" and op.result.ref.rank > 1:
                uses = [o for o in self.ops if op.result in o.operands]
                try:
                    ring = self.ring(op.result, uses)
                except _NotSo:
                    continue
                loads |= {o: ring for o in uses if o.name == "load"}
                stores |= {o for o in uses if o.name == "store"}
        if not loads:
            return self.old
        return self.old.with_(body=self.rewritten(self.old.body, loads, stores))

    # --- what has to hold ---

    def ring(self, ref: Value, uses: Sequence[Op]) -> _Ring:
        loads, stores = ([o for o in uses if o.name == n] for n in ("load", "store"))
        _check(loads and len(loads) + len(stores) == len(uses))
        home = self.homes[loads[0]]
        loops = [o for o in self.ops if o.name == "for" and o.regions[0] is home]
        _check(loops and all(self.homes[op] is home for op in loads))
        loop = Loop.of(loops[0])
        inside = frozenset(walk(loop.body))
        filling = [op for op in stores if op in inside]
        _check(len(filling) == 1 and self.sum(loop.step) == _Sum(1))
        filled, read, *others = (self.slot(op) for op in (*filling, *loads))
        _check(all(slot == read for slot in others) and filled.count == read.count)
        ahead = filled.at.minus(read.at)
        _check(0 < ahead < read.count <= ref.ref.shape[0])
        ring = _Ring(loop, inside, ahead, self.source(filling[0]))
        _check(all(self.can_move(v, ring) for v in ring.source.operands))
        self.check_runs(filling[0], ring)
        self.check_before([op for op in stores if op not in inside], ring, read)
        return ring

    def slot(self, op: Op) -> _Slot:
        """Which slot an access has, if it has all of that."""
        access = Access.of(op)
        first, *rest = access.index
        sizes = access.ref.ref.shape
        whole = all(e == Span(0, n) for e, n in zip(rest, sizes[1:], strict=True))
        _check(isinstance(first, At) and whole and access.mask is None)
        if isinstance(first, At) and first.start is not None:
            return _Slot(_Sum(first.start), sizes[0])
        number = _the(self.made.get(access.index_operands[0]))
        _check(number.name == "rem")
        at, count = map(self.sum, number.operands)
        _check(not count.terms and count.const > 0)
        return _Slot(at, count.const)

    def source(self, store: Op) -> Op:
        """The load whose result is stored, of memory that nothing writes."""
        load = _the(self.made.get(store.operands[1]))
        _check(self.is_constant(load) and Access.of(load).mask is None)
        return load

    def is_constant(self, op: Op) -> bool:
        return op.name == "load" and self.roots.of(op.operands[0]) in self.constant

    def can_move(self, value: Value, ring: _Ring) -> bool:
        """Whether another iteration can compute what this one does for itself."""
        op = self.made.get(value)
        if op is None:
            params = ring.loop.carried
            nested = (p for o in ring.inside for r in o.regions for p in r.params)
            return value not in params and value not in set(nested)
        if op not in ring.inside:
            return True
        again = is_pure(op) or self.is_constant(op) or op.name == "subview"
        return again and all(self.can_move(v, ring) for v in op.operands)

    def check_runs(self, store: Op, ring: _Ring) -> None:
        """The store runs unless the loop ends before the iteration that it is for."""
        home, index = self.homes[store], _Sum.of(ring.loop.index)
        if home is ring.loop.body:
            return
        conds = [op for op in ring.loop.body.ops if home in op.regions]
        _check(conds)
        guard = _the(guard_of(conds[0], self.made))
        _check(guard.taken is home)
        last = self.sum(ring.loop.limit).plus(index, -1)
        for part in guard.parts:
            test = _the(self.made.get(part.value))
            _check((test.name, part.truth) in _BELOW)
            x, y = map(self.sum, test.operands[:: _BELOW[test.name, part.truth]])
            # i + ahead < limit has to imply x < y.
            _check(y.plus(x, -1).minus(last) + ring.ahead >= 0)

    def check_before(self, before: Sequence[Op], ring: _Ring, read: _Slot) -> None:
        """The first slots hold what the loop would have stored to them."""
        home, index = self.homes[ring.loop.op], ring.loop.index
        early = home.ops[: home.ops.index(ring.loop.op)]
        _check(len(before) == ring.ahead and all(op in early for op in before))
        first = self.sum(ring.loop.first).minus(_Sum(0))
        base = read.at.minus(_Sum.of(index))
        _check(first + base >= 0)
        found = {self.slot(op).at.minus(_Sum(0)) % read.count: op for op in before}
        for n in range(first, first + ring.ahead):
            store = _the(found.get((n + base) % read.count))
            given = {index: _Sum(n - ring.ahead)}
            here = self.place(self.source(store), None)
            _check(here == self.place(ring.source, given))

    def place(self, load: Op, given: Mapping[Value, _Sum] | None) -> Hashable:
        """Where a load is, comparable with others."""
        access, entries = Access.of(load), list[Hashable]()
        for entry, start in access.split_index():
            if isinstance(entry, Gather):
                raise _NotSo
            fixed = _Sum(entry.start or 0)
            at = fixed if start is None else self.sum(start, given)
            size = (entry.size, entry.stride) if isinstance(entry, Span) else None
            entries.append((size, at))
        return access.ref, tuple(entries)

    def sum(self, value: Value, given: Mapping[Value, _Sum] | None = None) -> _Sum:
        """An integer as a sum; what some values are is given."""
        op = self.made.get(value)
        if given and value in given:
            return given[value]
        if op is None or not (is_pure(op) or self.is_constant(op)):
            return _Sum.of(value)
        if op.name == "constant" and not value.type.shape:
            return _Sum(op.attrs["value"])
        if op.name in ("add", "sub", "mul"):
            x, y = (self.sum(v, given) for v in op.operands)
            if op.name != "mul":
                return x.plus(y, 1 if op.name == "add" else -1)
            if not (x.terms and y.terms):
                return x.times(y.const) if not y.terms else y.times(x.const)
        if op.name == "load" and Access.of(op).mask is None:
            return _Sum.of(self.place(op, given))
        parts = (v if v.is_ref else self.sum(v, given) for v in op.operands)
        return _Sum.of((op.name, str(op.attrs), *parts))

    # --- code ---

    def rewritten(
        self, block: Block, loads: Mapping[Op, _Ring], stores: set[Op]
    ) -> Block:
        b, new = Builder(), dict[Value, Value]()
        for op in block.ops:
            if op in loads:
                b.loc = op.loc
                new[op.result] = self.loaded(b, loads[op])
            elif op not in stores:
                regions = [self.rewritten(r, loads, stores) for r in op.regions]
                b.ops.append(with_regions(op, regions))
        return substitute(Block(block.params, tuple(b.ops), block.yields), new)

    def loaded(self, b: Builder, ring: _Ring) -> Value:
        """What was stored `ahead` iterations before this one."""
        made = dict[Value, Value]()

        def again(value: Value) -> Value:
            if value not in made:
                made[value] = self.shifted(b, value, ring, again)
            return made[value]

        operands = map(again, ring.source.operands)
        (new,) = b.emit("load", *operands, **ring.source.attrs)
        return new

    def shifted(
        self, b: Builder, value: Value, ring: _Ring, again: Callable[[Value], Value]
    ) -> Value:
        """A value as it was `ahead` iterations before this one."""
        op, index = self.made.get(value), ring.loop.index
        offset = None if value.is_ref else self.sum(value).plus(_Sum.of(index), -1)
        if offset is not None and not offset.terms:
            more = offset.const - ring.ahead
            return b.add(index, b.index(more)) if more else index
        if op is None or op not in ring.inside:
            return value
        (new,) = b.emit(op.name, *map(again, op.operands), **op.attrs)
        return new
