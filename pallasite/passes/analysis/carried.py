"""Along which grid axes a scratch ref carries contents between steps.

`carried_from(body, ref, ids, sizes)` walks the body as it runs when the last axes are
at their first step: if the ref is then overwritten before anything reads it, there or
in a later step, no value crosses into that step, so only those last axes carry. Used by
`grid.py`.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from weakref import WeakKeyDictionary

import numpy as np

from pallasite.ir.nodes import Access, At, Block, Gather, Index, Op, Span, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import producers_of, used_values
from pallasite.ir.roles import Cond, Loop, Pipeline, While
from pallasite.ir.types import TileType
from pallasite.passes.analysis.affine import Sizes, fold_scalar
from pallasite.passes.analysis.memory import VIEWS
from pallasite.passes.analysis.swept_rows import (
    is_whole_rows,
    rows_at,
    rows_seen,
    sweep,
)

Known = dict[Value, int | bool]
MOST_GUARDS = 4  # whose outcomes are told apart
Part = tuple[Value, Index, Sequence[Value]]  # a ref, its index, and its operands


def carried_from(
    body: Block,
    ref: Value,
    ids: Sequence[Value],
    sizes: Sizes,
    constant: Collection[Value] = (),
) -> int:
    """The first axis along which `ref` carries a value; `len(ids)` if none does.

    Carrying along one axis implies carrying along all faster ones, because a step sees
    what the previous step in grid order left. A guard that neither a faster axis nor
    an iteration decides is the same at all of their steps, so that either outcome is a
    case of its own.

    Args:
        body: a step.
        ref: the memory.
        ids: the grid's indices.
        sizes: of the axes.
        constant: memory that no step writes.
    """
    always: Known = {i: 0 for i, n in zip(ids, sizes, strict=True) if n == 1}
    for start in range(len(ids), 0, -1):
        guards = _guards(body, frozenset(ids[start:]), constant)
        cases = product((False, True), repeat=len(guards))
        outcomes = (dict(zip(guards, case, strict=True)) for case in cases)
        if not any(_crosses(body, ref, ids[start:], always | o) for o in outcomes):
            return start
    return 0


def _crosses(body: Block, ref: Value, inner: Sequence[Value], known: Known) -> bool:
    """Whether steps along inner axes may read what a step elsewhere left."""
    state = _State()
    if _Reader({ref}, known | dict.fromkeys(inner, 0)).may_read_old(body, state):
        return True
    later = state.at_later_steps(ref)
    return bool(inner) and _Reader({ref}, dict(known)).may_read_old(body, later)


def _guards(
    body: Block, inner: frozenset[Value], constant: Collection[Value]
) -> list[Value]:
    """Conditions that are the same at all steps along inner axes, the first few."""
    made = producers_of(body)
    inside = [region for op in walk(body) for region in op.regions]
    varies = {v: True for region in inside for v in region.params}

    def is_steady(value: Value) -> bool:
        if value not in varies:
            op = made.get(value)
            effect = table()[op.name].effect if op is not None else Effect.PURE
            pure = effect is Effect.PURE and not (op is not None and op.regions)
            reads = op is not None and op.name == "load" and op.operands[0] in constant
            operands = [v for v in op.operands if not v.is_ref] if op else []
            varies[value] = (
                value in inner
                or not (pure or reads)
                or value.tile.shape != ()
                or not all(map(is_steady, operands))
            )
        return not varies[value]

    def parts(value: Value) -> list[Value]:
        op = made.get(value)
        if op is not None and op.name == "cast":
            return parts(op.operands[0])
        if op is None or not value.tile.dtype.is_bool or value.tile.shape:
            return []
        if is_steady(value):
            return [value]
        both = op.name in ("and", "or")
        return [v for each in op.operands for v in parts(each)] if both else []

    found = [v for op in walk(body) if op.name == "cond" for v in parts(op.operands[0])]
    return list(dict.fromkeys(found))[:MOST_GUARDS]


def is_overwritten(ops: Sequence[Op], ref: Value, known: Known) -> bool:
    """Whether ops overwrite all of `ref` before anything reads it.

    `known`: constants among the values from outside the ops.
    """
    state = _State()
    reader = _Reader({ref}, dict(known))
    return not reader.may_read_old(Block((), tuple(ops)), state) and state.whole


def reads_unwritten(body: Block, ref: Value, ids: Sequence[Value], axis: int) -> bool:
    """Whether the first step at position 1 along an axis reads what it finds in a ref.

    It does where only the step at 0 fills the ref. False also if uncertain: a branch
    not known to be taken, or a write that may come first.
    """
    known: Known = {i: int(a == axis) for a, i in enumerate(ids)}
    return _Reader({ref}, known).first_use(body) == "r"


@dataclass
class _State:
    """Which part of the ref is known to be overwritten in this step."""

    whole: bool = False
    parts: set[Part] = field(default_factory=set)
    rows: frozenset[int] = frozenset()  # along its first dimension

    def copy(self) -> "_State":
        return _State(self.whole, set(self.parts), self.rows)

    def at_later_steps(self, ref: Value) -> "_State":
        """What of it holds in steps where grid indices have other values."""
        same = {part for part in self.parts if part[0] is ref and not part[2]}
        return _State(self.whole, same, self.rows)

    def become(self, other: "_State") -> None:
        self.whole, self.parts, self.rows = other.whole, other.parts, other.rows


def covers_whole(shape: Sequence[int], index: Sequence[object]) -> bool:
    """Whether an index selects every element of a ref (starts are clamped to fit)."""
    return all(
        (isinstance(e, Span) and e.size == n) or (isinstance(e, At) and n == 1)
        for n, e in zip(shape, index, strict=True)
    )


def accesses_all(op: Op) -> bool:
    """Whether a load or store, unmasked, is of a whole ref as a tile of its shape."""
    return op.name in ("load", "store") and Access.of(op).is_whole


def covers(op: Op, name: str) -> bool:
    """Whether a load or a store, unmasked, is of all elements of a ref, in order.

    Its tile may lack dimensions of size 1.
    """
    if op.name != name or op.attrs.get("mask"):
        return False
    access = Access.of(op)
    whole = covers_whole(access.ref.ref.shape, access.index)
    return whole and not access.index_operands


class _Reader:
    """Walks code looking for a read of something not yet overwritten."""

    def __init__(self, refs: set[Value], known: Known):
        self.refs = refs  # the ref, then the views of it
        (self.ref,) = refs
        self.views: dict[Value, tuple[int, int]] = {}  # their first row, how many
        self.known = known

    def may_read_old(self, block: Block, state: _State) -> bool:
        return any(self.step(op, state) for op in _mattering(block))

    def step(self, op: Op, state: _State) -> bool:
        """Process one op; True if it may read what an earlier step left."""
        if op.regions and self.refs.isdisjoint(_used_in(op)):
            return False
        handler = _HANDLERS.get(op.name)
        if handler is not None:
            return handler(self, op, state)
        if op.name in VIEWS:
            if op.operands[0] in self.refs:
                self.refs.add(op.result)
                place = rows_seen(op, self.known)
                self.views.pop(op.result, None)
                if op.operands[0] is self.ref and place is not None:
                    self.views[op.result] = int(place[0]), place[1]
            return False
        if any(v in self.refs for v in op.operands):
            return not state.whole
        if len(op.results) == 1:
            number = self.fold(op)
            if number is not None:
                self.known[op.result] = number
        return False

    def fold(self, op: Op) -> int | bool | None:
        if op.name == "constant":
            value = op.attrs["value"]
            shape = op.attrs["type"].shape
            return value if isinstance(value, int) and not shape else None
        return fold_scalar(op, [self.known.get(v) for v in op.operands])

    def at_load(self, op: Op, state: _State) -> bool:
        if op.operands[0] not in self.refs or state.whole:
            return False
        access = Access.of(op)
        if (access.ref, access.index, access.index_operands) in state.parts:
            return False
        return not self.rows_of(access) <= state.rows

    def rows_of(self, access: Access) -> set[int | None]:
        """The rows of the ref that are accessed; None: not known which."""
        shape, place = self.ref.ref.shape, self.views.get(access.ref)
        if access.ref is self.ref:
            place = rows_at(access.index, access.index_operands, shape, self.known)
        return {None} if place is None else {*range(place[0], place[0] + place[1])}

    def at_store(self, op: Op, state: _State) -> bool:
        access = Access.of(op)
        if access.ref not in self.refs or access.mask is not None:
            return False
        if access.ref is self.ref and covers_whole(access.ref.ref.shape, access.index):
            state.whole = True
        state.parts.add((access.ref, access.index, access.index_operands))
        if access.ref is self.ref and is_whole_rows(access.index, self.ref.ref.shape):
            self.add_rows(state, self.rows_of(access))
        return False

    def add_rows(self, state: _State, rows: Iterable[int | None]) -> None:
        state.rows |= {row for row in rows if row is not None}
        state.whole = state.whole or len(state.rows) == self.ref.ref.shape[0]

    def at_cond(self, op: Op, state: _State) -> bool:
        if op.operands[0] in self.known:
            return self.may_read_old(self.taken(op), state)
        states = [state.copy() for _ in op.regions]
        if any(map(self.may_read_old, op.regions, states)):
            return True
        parts = set.intersection(*(s.parts for s in states))
        rows = frozenset.intersection(*(s.rows for s in states))
        state.become(_State(all(s.whole for s in states), parts, rows))
        return False

    def taken(self, op: Op) -> Block:
        """The branch of a cond whose index is known."""
        cond = Cond.of(op)
        return cond.branch(int(self.known[cond.which]))

    def at_for(self, op: Op, state: _State) -> bool:
        loop = Loop.of(op)
        body = loop.body
        first, limit = self.known.get(loop.first), self.known.get(loop.limit)
        if first is None:
            return self.may_read_old(body, state.copy())
        inside, known, refs = state.copy(), dict(self.known), set(self.refs)
        self.known[loop.index] = first
        is_old = self.may_read_old(body, inside)
        self.known = known
        later = state.copy()
        is_old = is_old or (not inside.whole and self.may_read_old(body, later))
        self.known, self.refs = dict(known), refs
        if is_old:
            return not self.sweeps(loop, state)
        if limit is not None and first < limit:
            state.whole = inside.whole or self.is_swept(loop, later)
            if not state.whole:
                self.sweeps(loop, state)
        return False

    def sweeps(self, loop: Loop, state: _State) -> bool:
        """Whether iterations together read no row before it is overwritten."""
        shape = self.ref.ref.shape
        if self.refs - self.views.keys() != {self.ref} or not shape:
            return False
        rows = np.isin(np.arange(shape[0]), sorted(state.rows))
        after = sweep(loop, self.ref, self.known, rows, self.views)
        if after is not None:
            self.add_rows(state, map(int, np.flatnonzero(after)))
        return after is not None

    def is_swept(self, loop: Loop, each: _State) -> bool:
        """Whether the parts that iterations store side by side are all of the ref.

        `each` holds what any of them stores.
        """
        shape = self.ref.ref.shape
        bounds = [self.known.get(v) for v in loop.bounds]
        for ref, index, starts in each.parts:
            if ref is not self.ref or starts != (loop.index,):
                continue
            for d, (entry, n) in enumerate(zip(index, shape, strict=True)):
                size = entry.size if isinstance(entry, Span) else 1
                rest = (*index[:d], Span(0, n), *index[d + 1 :])
                if bounds == [0, n, size] and covers_whole(shape, rest):
                    return not any(isinstance(e, Gather) for e in index)
        return False

    def at_while(self, op: Op, state: _State) -> bool:
        loop = While.of(op)
        return self.may_read_old(loop.condition, state) or self.may_read_old(
            loop.body, state.copy()
        )

    def at_pipeline(self, op: Op, state: _State) -> bool:
        pipeline = Pipeline.of(op)
        ids, grid = pipeline.ids, pipeline.grid
        for array, window, _, block in pipeline.shown:
            if array not in self.refs or state.whole:
                continue
            # The next step may see another block, without what this step leaves.
            fresh = carried_from(pipeline.body, block, ids, grid) == len(grid)
            if window.mode == "in" or not fresh:
                return True
        return any(self.may_read_old(region, state.copy()) for region in op.regions)

    def at_copy_start(self, op: Op, state: _State) -> bool:
        source, target, *semaphores = op.operands
        if source in self.refs and not state.whole:
            return True
        for each in (target, *semaphores):
            if each is self.ref:
                state.whole = True
            elif each in self.views:
                self.add_rows(state, self.rows_in(each))
        return False

    def rows_in(self, view: Value) -> set[int]:
        first, size = self.views.get(view, (0, 0))
        return {*range(first, first + size)}

    def at_copy_wait(self, op: Op, state: _State) -> bool:
        waits = [s for s in op.operands[2:] if s in self.refs]
        found = [bool(r := self.rows_in(s)) and r <= state.rows for s in waits]
        return not all(found) and not state.whole

    def at_sem_read(self, op: Op, state: _State) -> bool:
        return op.operands[0] in self.refs  # a signal adds to the old value

    def at_sem_signal(self, op: Op, state: _State) -> bool:
        if op.operands[0] is self.ref:
            state.whole = True
        return False

    # --- the first op that certainly uses the ref ---

    def first_use(self, block: Block) -> str | None:
        """ "r" if the block certainly reads the ref first, "w" if it may write it."""
        for op in _mattering(block):
            use = self.use(op)
            if use is not None:
                return use
        return None

    def use(self, op: Op) -> str | None:
        if op.name == "cond" and op.operands[0] in self.known:
            return self.first_use(self.taken(op))
        if op.regions:
            inside = (v for r in op.regions for o in walk(r) for v in o.operands)
            touched = any(v in self.refs for v in (*op.operands, *inside))
            return "w" if touched else None
        if op.name != "load" or op.operands[0] not in self.refs:
            is_use = op.name not in VIEWS and any(v in self.refs for v in op.operands)
            self.step(op, _State(whole=True))
            return "w" if is_use else None
        return "r"


_HANDLERS = {
    "load": _Reader.at_load,
    "store": _Reader.at_store,
    "cond": _Reader.at_cond,
    "for": _Reader.at_for,
    "while": _Reader.at_while,
    "pipeline": _Reader.at_pipeline,
    "copy_start": _Reader.at_copy_start,
    "copy_wait": _Reader.at_copy_wait,
    "sem_read": _Reader.at_sem_read,
    "sem_signal": _Reader.at_sem_signal,
}

_found: WeakKeyDictionary[Block, tuple[Op, ...]] = WeakKeyDictionary()


def _mattering(block: Block) -> tuple[Op, ...]:
    """The ops of a block without those that only compute tiles.

    A block is walked once for each ref and axis, and most of it is arithmetic.
    """
    found = _found.get(block)
    if found is None:
        found = _found[block] = tuple(filter(_matters, block.ops))
    return found


_used: WeakKeyDictionary[Op, frozenset[Value]] = WeakKeyDictionary()


def _used_in(op: Op) -> frozenset[Value]:
    """The values that an op and its regions use."""
    found = _used.get(op)
    if found is None:
        found = _used[op] = frozenset(used_values(Block((), (op,))))
    return found


def _matters(op: Op) -> bool:
    if op.regions or op.name in _HANDLERS or any(v.is_ref for v in op.operands):
        return True
    types = [v.type for v in op.results]
    return any(not isinstance(t, TileType) or not t.shape for t in types)
