"""rolled_copies: copies of code that the author unrolled become a loop again.

In: a body whose writes come in rounds of equal code, each with a loop in it, as a `for`
of Python leaves them around a `fori_loop`. Out: that loop, which may become an axis of
the grid (`loop_axes.py`). Copies of straight code stay: schedulers want to see all.

Proof: round `r` has the ops of copy `r`, on what that copy uses, or on the same op of
the round; numbers are `first + step * r` and equal those of the copy at every `r`.
Writes, and reads of memory that the body writes, are in the order of the copies. Other
code has no effects and reads what nobody writes, so it may move into a round.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    Gather,
    Index,
    Kernel,
    Op,
    Span,
    Value,
    walk,
)
from pallasite.ir.rewrite import dead_code, used_values, writes
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import INDEX
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.grid import with_pipeline
from pallasite.passes.analysis.memory import Roots, read_refs

_LOOPS = frozenset({"for", "while"})
Values = tuple[Value, ...]
Entry = At | Span | Gather
T = TypeVar("T")


def rolled_copies(kernel: Kernel, whole: Pipeline) -> Kernel | None:
    """The kernel with its body's copies as a loop; None if there are none."""
    roots = Roots(kernel)
    written = {*roots.written(whole.body)}
    ordered = [
        op
        for op in whole.body.ops
        if writes(op)
        or any(roots.of(r) in written for o in _inside(op) for r in read_refs(o))
    ]
    if not any(o.name in _LOOPS for o in walk(whole.body)):
        return None
    forms = Forms(whole.ids)
    forms.add_ops(whole.body.ops)
    for count in range(len(ordered), 1, -1):
        if len(ordered) % count:
            continue
        try:
            loop = _Round(whole.body, forms, ordered, count).loop()
        except _Differs:
            continue
        ops = [op for op in whole.body.ops if op not in ordered]
        body = Block(whole.body.params, (*ops, *loop))
        return dead_code(with_pipeline(kernel, whole.with_(body=body).to_op()))
    return None


class _Differs(Exception):
    """Copies are not the same code."""


def _inside(op: Op) -> Iterator[Op]:
    return walk(Block((), (op,)))


class _Round:
    """Emits the code of any of the copies."""

    def __init__(self, body: Block, forms: Forms, ordered: Sequence[Op], count: int):
        self.made = {v: op for op in body.ops for v in op.results}
        self.ordered, self.count, self.forms = frozenset(ordered), count, forms
        self.later = {*ordered}  # what is not there before the loop
        for op in body.ops:
            used = used_values(Block((), (op,)))
            if any(self.made.get(v) in self.later for v in used):
                self.later.add(op)
        size = len(ordered) // count
        self.copies = [ordered[n : n + size] for n in range(0, len(ordered), size)]
        self.index = Value(INDEX, "copy")
        self.new: dict[Values, Value] = {}
        self.b = Builder(ordered[0].loc)

    def loop(self) -> tuple[Op, ...]:
        for ops in zip(*self.copies, strict=True):
            self.emit(ops)
        body = self.b.block((self.index,))
        if not any(op.name in _LOOPS for op in walk(body)):
            raise _Differs
        b = Builder(self.b.loc)
        bounds = (b.index(0), b.index(self.count), b.index(1))
        b.emit("for", *bounds, regions=(body,))
        return tuple(b.ops)

    def value(self, values: Values) -> Value:
        """What is one of these values, by the round."""
        if values in self.new:
            return self.new[values]
        ops = [self.made.get(v) for v in values]
        if all(v is values[0] for v in values):
            if ops[0] in self.later:  # of one copy
                raise _Differs
            return values[0]
        moved = self.moved_number(values)
        if moved is not None:
            self.new[values] = moved
            return moved
        known = [op for op in ops if op is not None and op not in self.ordered]
        if len(known) < len(values):
            raise _Differs
        self.emit(known)
        if values not in self.new:  # different results of one op
            raise _Differs
        return self.new[values]

    def emit(self, ops: Sequence[Op]) -> None:
        """An op of a round, from those of all copies."""
        first, attrs = ops[0], [{**op.attrs, "index": None} for op in ops]
        if any(op.name != first.name for op in ops) or first.name == "alloc":
            raise _Differs
        results = list(_columns(op.results for op in ops))
        if any(v.type != each[0].type for each in results for v in each):
            raise _Differs
        if first.name == "constant" and first.result.type == INDEX:
            self.new[results[0]] = self.number([op.attrs["value"] for op in ops])
            return
        if any(each != attrs[0] for each in attrs):
            raise _Differs
        operands, changed = self.operands(ops)
        made = tuple(Value(each[0].type, each[0].name) for each in results)
        regions = tuple(map(self.region, _columns(op.regions for op in ops)))
        attrs = {**first.attrs, **changed}
        self.b.ops.append(first.with_(
            operands=operands, results=made, attrs=attrs, regions=regions
        ))  # fmt: skip
        self.new |= zip(results, made, strict=True)

    def operands(self, ops: Sequence[Op]) -> tuple[Values, dict[str, Index]]:
        """The operands of a round's op, and the index if it accesses memory."""
        used = list(_columns(op.operands for op in ops if "index" not in op.attrs))
        if used:
            return tuple(map(self.value, used)), {}
        if "index" not in ops[0].attrs:
            return (), {}
        accesses = list(map(Access.of, ops))
        first, index, places = accesses[0], list[Entry](), list[Value]()
        roles = {
            role: self.value(tuple(getattr(a, role) for a in accesses))
            for role in ("ref", "compare", "value", "mask", "other")
            if getattr(first, role) is not None
        }
        for column in _columns(a.split_index() for a in accesses):
            entries = [entry for entry, _ in column]
            entry, place = column[0]
            if any(e != entry for e in entries):
                entry, place = self.moved(entries)
            elif place is not None:
                place = self.value(tuple(p for _, p in column if p is not None))
            index.append(entry)
            places += [] if place is None else [place]
        new = replace(
            first, **roles, index=tuple(index), index_operands=tuple(places)
        )  # fmt: skip
        return access_operands(new), {"index": new.index}

    def moved(self, entries: Sequence[Entry]) -> tuple[Entry, Value]:
        """An entry whose known start differs between copies."""
        known = [
            e for e in entries if not isinstance(e, Gather) and e.start is not None
        ]
        free = [replace(e, start=None) for e in known]
        if len(free) < len(entries) or any(e != free[0] for e in free):
            raise _Differs
        return free[0], self.number([e.start for e in known if e.start is not None])

    def moved_number(self, values: Values) -> Value | None:
        """Numbers of the grid's indices that differ by what is linear in the round."""
        if values[0].type != INDEX or self.made.get(values[0]) in self.later:
            return None
        forms = [form for v in values if not (form := self.forms.of(v)).spread]
        known = [f.affine for f in forms if f.affine and f.affine.const is not None]
        if len(known) < len(values) or any(f.coeffs != known[0].coeffs for f in known):
            return None
        numbers = [(f.const or 0) - (known[0].const or 0) for f in known]
        return self.b.add(values[0], self.number(numbers))

    def number(self, numbers: Sequence[int]) -> Value:
        """The number of a round."""
        b, first, step = self.b, numbers[0], numbers[1] - numbers[0]
        if any(n != first + step * r for r, n in enumerate(numbers)):
            raise _Differs
        if not step:
            return b.index(first)
        moved = self.index if step == 1 else b.mul(self.index, b.index(step))
        return b.add(moved, b.index(first)) if first else moved

    def region(self, copies: Sequence[Block]) -> Block:
        for each in _columns(map(_captured, copies)):
            self.value(each)  # in front of the op, where all of the round can use it
        params = list(_columns(block.params for block in copies))
        if any(v.type != each[0].type for each in params for v in each):
            raise _Differs
        new = tuple(Value(each[0].type, each[0].name) for each in params)
        self.new |= zip(params, new, strict=True)
        outer, self.b = self.b, Builder(self.b.loc)
        try:
            for ops in _columns(block.ops for block in copies):
                self.emit(ops)
            yields = map(self.value, _columns(block.yields for block in copies))
            return self.b.block(new, tuple(yields))
        finally:
            self.b = outer


def _captured(block: Block) -> list[Value]:
    """What a region uses of the code around it, in order."""
    inside = {*block.params}
    for op in walk(block):
        inside.update(op.results, *(region.params for region in op.regions))
    return [v for v in used_values(block) if v not in inside]


def _columns(copies: Iterable[Iterable[T]]) -> Iterator[tuple[T, ...]]:
    """What is at the same place in several lists.

    Raises:
        _Differs: one is longer than another.
    """
    try:
        yield from zip(*copies, strict=True)
    except ValueError:
        raise _Differs from None
