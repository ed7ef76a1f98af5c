"""Products that programs share, as a kernel of their own before gradients are taken.

In `x @ w + (x @ a) @ b`, the thin product `x @ a` is the same for all blocks of columns
of the result. A program computes it for itself, which costs little; but its cotangent
is a sum over all of them, and so are those of `x` and `a` that it leads to. As a kernel
of its own, whose result the other loads, each of its derivatives is one product, too.

In: a program with an operand of a product that is itself computed by products, by code
that writes nothing and uses only some of the grid indices. Out: two programs, of which
the first stores that operand and the second loads it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, BlockDim, Op, Value, Window, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import clone, substitute
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program


@dataclass(frozen=True)
class Cut:
    """Two programs, and the array that the first leaves for the second."""

    first: Program
    second: Program
    array: Value


def cut(program: Program) -> Cut | None:
    """The program with a product that several programs share as one of its own."""
    if sum(op.name == "dot" for op in walk(program.body)) < 2:
        return None
    apart = _Cutting(program)
    for op in apart.ops:
        for value in op.operands if op.name == "dot" else ():
            found = apart.at(value)
            if found is not None:
                return found
    return None


class _Cutting:
    def __init__(self, program: Program):
        self.program = program
        self.ops = [one for op in program.body.ops for one in _apart(op)]
        self.made = {v: op for op in self.ops for v in op.results}
        self.written = set(Roots(program.body).written(program.body))

    def at(self, value: Value) -> Cut | None:
        """The program cut at an operand of a product."""
        ids, sizes = self.program.body.params, self.program.sizes
        ops = self.needed(value)
        if ops is None or not any(op.name == "dot" for op in walk(Block((), ops))):
            return None
        used = {v for op in walk(Block((), ops)) for v in op.operands}
        axes = [a for a, v in enumerate(ids) if v in used]
        if all(n == 1 or a in axes for a, n in enumerate(sizes)):
            return None  # no program computes it again
        array, window = _array(value, [sizes[a] for a in axes])
        place = [ids[a] for a in axes]
        return Cut(
            self.first(value, ops, axes, _view(array, window, "out", place)),
            self.second(value, _view(array, window, "in", place)),
            array,
        )

    def needed(self, value: Value) -> tuple[Op, ...] | None:
        """What computes a tile, in order; None if some of it must stay."""
        found, pending = set[Op](), [value]
        while pending:
            op = self.made.get(pending.pop())
            if op is None or op in found:
                continue
            inside = [*walk(Block((), (op,)))]
            for each in inside:
                writes = table()[each.name].effect is Effect.WRITE
                if writes and each.name not in ("for", "cond"):
                    return None
                if any(v in self.written for v in each.operands):
                    return None
            found.add(op)
            pending += [v for each in inside for v in each.operands]
            pending += [v for each in inside for r in each.regions for v in r.yields]
        return tuple(op for op in self.ops if op in found)

    def first(
        self, value: Value, ops: Sequence[Op], axes: Sequence[int], view: Sequence[Op]
    ) -> Program:
        b = Builder(self.program.loc)
        b.ops += [*ops, *view]
        b.store(view[-1].result, value)
        ids = [self.program.body.params[a] for a in axes]
        own = {v: Value(v.type, v.name) for v in ids}
        body = clone(Block((), tuple(b.ops)), own)
        sizes = tuple(self.program.sizes[a] for a in axes)
        name, loc = f"{self.program.name}_first", self.program.loc
        params = tuple(own.values())
        return Program(name, Block(params, body.ops), sizes, loc).simplified()

    def second(self, value: Value, view: Sequence[Op]) -> Program:
        b = Builder(self.program.loc)
        b.ops += view
        loaded = b.load(view[-1].result)
        body = substitute(Block((), tuple(self.ops)), {value: loaded})
        params = self.program.body.params
        return self.program.with_body(Block(params, (*b.ops, *body.ops))).simplified()


def _array(value: Value, sizes: Sequence[int]) -> tuple[Value, tuple[BlockDim, ...]]:
    """An array with a tile for each program: those of the first axis are its rows."""
    first, *others = sizes or [1]
    rows, *rest = value.tile.shape or (1,)
    shape = (*others, first * rows, *rest)
    dims = [BlockDim(1, "squeezed") for _ in others]
    dims += [BlockDim(n) for n in (rows, *rest)]
    return Value(T.RefType(shape, value.tile.dtype, "any"), "between"), tuple(dims)


def _view(
    array: Value, dims: tuple[BlockDim, ...], mode: str, place: Sequence[Value]
) -> Sequence[Op]:
    """The tile of a program; the last op is the view."""
    b = Builder()
    first, *others = place or [b.index(0)]
    zeros = [b.index(0)] * (len(dims) - len(others) - 1)
    window = Window(dims, mode)
    b.op("block_view", array, *others, first, *zeros, window=window)
    return b.ops


def _apart(op: Op) -> Iterator[Op]:
    """A loop that writes nothing as a loop for each group of values that depend on each
    other from one iteration to the next."""
    if op.name != "for" or len(op.results) < 2:
        yield op
        return
    loop = Loop.of(op)
    groups = _groups(loop)
    effects = (table()[o.name].effect for o in walk(loop.body))
    if len(groups) < 2 or any(effect is Effect.WRITE for effect in effects):
        yield op
        return
    for group in groups:
        params = (loop.index, *(loop.carried[n] for n in group))
        yields = tuple(loop.yields[n] for n in group)
        inner = clone(Block(params, _slice(loop.body.ops, yields), yields))
        yield loop.with_(
            inits=tuple(loop.inits[n] for n in group),
            results=tuple(loop.results[n] for n in group),
            body=inner,
        ).to_op()


def _groups(loop: Loop) -> list[list[int]]:
    """The numbers of carried values that need each other."""
    groups: list[list[int]] = []
    for n, value in enumerate(loop.yields):
        ops = _slice(loop.body.ops, [value])
        used = {v for op in walk(Block((), ops)) for v in op.operands} | {value}
        used |= {v for op in walk(Block((), ops)) for r in op.regions for v in r.yields}
        mine = {n} | {m for m, old in enumerate(loop.carried) if old in used}
        joined = [g for g in groups if mine & set(g)]
        groups = [g for g in groups if g not in joined]
        groups.append(sorted(mine.union(*joined)))
    return sorted(groups)


def _slice(ops: Sequence[Op], values: Sequence[Value]) -> tuple[Op, ...]:
    """The ops of a block that values depend on."""
    needed, kept = set(values), list[Op]()
    for op in reversed(ops):
        if needed.intersection(op.results):
            kept.append(op)
            for inner in walk(Block((), (op,))):
                needed.update(inner.operands)
                needed.update(v for r in inner.regions for v in r.yields)
    return tuple(reversed(kept))
