"""Gives blocks of a cotangent that computed indices choose programs of their own.

Steps whose index says to which block they add (tokens by their expert, pages of a
table, rows of an embedding, columns of a sparse matrix) could only run in sequence.
Instead the steps are sorted by their block, and a program for each block goes through
its own steps in order: every program is parallel, sums are in registers, nothing is
written twice, and the order of additions is fixed, so results are the same in every
run. Steps that a guard skips are sorted behind all others.

Proof: a step adds to one block, whose number is a function of grid indices and of
memory that no step writes, so the steps sorted under a number are all that add to it.
Block indices outside the array are clamped before they are sorted, as windows are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from pallasite.autodiff.backward_windows import block_count, only
from pallasite.autodiff.step_order import Sorting
from pallasite.ir import types as T
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Gather,
    Kernel,
    Op,
    Span,
    Value,
    Window,
    full_index,
    walk,
)
from pallasite.ir.rewrite import (
    Rewriter,
    clone,
    map_ops,
    producers_of,
    replace_ops,
    used_values,
)
from pallasite.ir.roles import Cond, Loop, number_of
from pallasite.passes.analysis.index_code import IndexCode
from pallasite.passes.analysis.intervals import Facts
from pallasite.passes.analysis.memory import is_from_memory
from pallasite.passes.lower.per_program import Program, main_refs

MOST_STEPS = 1 << 24  # that are sorted


@dataclass(frozen=True)
class SortedSteps:
    """The program of blocks: its steps are a loop, from `firsts` to `firsts`."""

    program: Program
    sorting: Sorting
    # The same with a loop of as many steps as a block has on average, for estimates.
    typical: Program


def sorted_steps(program: Program, refs: Sequence[Value]) -> list[tuple[Value, ...]]:
    """Those of some cotangents that sorted steps may add to, in groups of one order."""
    found = dict[object, list[Value]]()
    for ref in refs:
        chosen = _Chosen.of(program, ref)
        if chosen is not None:
            found.setdefault(chosen.key, []).append(ref)
    return [tuple(group) for group in found.values()]


def by_sorted_steps(program: Program, refs: Sequence[Value]) -> SortedSteps:
    """The program of the blocks of cotangents that `sorted_steps` found together."""
    stage = only(with_row_views(program, refs), refs)
    every = [_Chosen.of(stage, ref) for ref in refs]
    chosen = [each for each in every if each is not None]
    for ref in refs:
        stage, _ = _without_guards(stage, ref)
    return _Sorted(chosen, stage).made()


def with_row_views(program: Program, refs: Sequence[Value]) -> Program:
    """Additions to rows that memory names, as additions to a block of these rows."""
    made, facts = producers_of(program.body), Facts()
    facts.note_block(program.body)

    def rewrite(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "atomic_rmw":
            return None
        access = Access.of(op)
        view = made.get(access.ref)
        if view is not None and view.name != "block_view":
            return None  # the program's own memory, or a part of something
        ref = access.ref if view is None else view.operands[0]
        if not any(ref is each for each in refs) or access.mask is not None:
            return None
        if view is not None and not _is_whole(view, made):
            return None
        places = _row(access, made, facts)
        if places is None:
            return None
        dims, indices = list[BlockDim](), list[Value]()
        for (entry, start), n in zip(places, ref.ref.shape, strict=True):
            if start is not None:
                size = entry.size if isinstance(entry, Span) else 1
                is_point = isinstance(entry, At)
                dims.append(BlockDim(1, "squeezed") if is_point else BlockDim(size))
                first = b.as_index(start)
                indices.append(first if size == 1 else b.div(first, b.index(size)))
            else:
                dims.append(BlockDim(n))
                indices.append(b.index(0))
        window = Window(tuple(dims), "out")
        block = b.op("block_view", ref, *indices, window=window)
        new = Access(block, full_index(block.ref.shape), (), access.value)
        attrs = {"kind": op.attrs["kind"], "index": new.index, "mask": False}
        return b.emit(op.name, *access_operands(new), **attrs)

    return program.with_body(map_ops(program.body, rewrite))


def _is_whole(view: Op, made: Mapping[Value, Op]) -> bool:
    """Whether a view shows all of an array."""
    sizes = zip(view.attrs["window"].dims, view.operands[0].ref.shape, strict=True)
    whole = all(d.kind == "blocked" and d.size == n for d, n in sizes)
    return whole and all(number_of(made, v) == 0 for v in view.operands[1:])


def _row(
    access: Access, made: Mapping[Value, Op], facts: Facts
) -> list[tuple[At | Span | Gather, Value | None]] | None:
    """An index that is whole but for one element that memory names, or one block."""
    places, named = access.split_index(), 0
    for (entry, start), n in zip(places, access.ref.ref.shape, strict=True):
        if start is None:
            if entry != Span(0, n):
                return None
            continue
        size = entry.size if isinstance(entry, Span) else 1
        is_block = n % size == facts.of(start).multiple % size == 0
        if isinstance(entry, Gather) or not is_block or start.tile.shape:
            return None
        if not is_from_memory(start, made):
            return None
        named += 1
    return places if named == 1 else None


def named_views(body: Block, loop: Loop) -> set[Value]:
    """Blocks in a loop that memory names anew for each of its iterations."""
    code, found = IndexCode(Block((*body.params, loop.index), body.ops)), set[Value]()
    own = len(body.params)
    for op in walk(loop.body):
        if op.name == "block_view":
            keys = list(map(code.key, op.operands[1:]))
            if any(_has_load(key) and own in _axes(key) for key in keys):
                found.add(op.result)
    return found


def _has_load(key: Any) -> bool:
    is_op = isinstance(key, tuple) and bool(key)
    return is_op and (key[0] == "load" or any(map(_has_load, key)))


def _axes(key: Any) -> set[int]:
    """The grid axes that a key of `IndexCode` depends on."""
    if not isinstance(key, tuple):
        return set()
    if len(key) == 2 and key[0] == "id":
        return {key[1]}
    return {axis for part in key for axis in _axes(part)}


@dataclass(frozen=True)
class _Chosen:
    """Where a program adds to a cotangent: at one block, of which data names one index.

    Attributes:
        program: with the code that a guard runs in place of the guard.
        ref: the cotangent.
        guards: the tests; all must hold for a step to add.
        dim: the dimension along which data names the block.
        index: the name.
        count: how many blocks there are along it.
        own: the axes that choose the block along other dimensions.
    """

    program: Program
    ref: Value
    guards: tuple[Value, ...]
    dim: int
    index: Value
    count: int
    own: frozenset[int]

    @staticmethod
    def of(program: Program, ref: Value) -> "_Chosen | None":
        program = only(with_row_views(program, [ref]), [ref])
        program, guards = _without_guards(program, ref)
        body, code = program.body, IndexCode(program.body)
        uses = [op for op in walk(body) if ref in op.operands]
        views = {op.result for op in uses}
        adds = [op for op in walk(body) if views & {*op.operands}]
        if not uses or any(op.name != "block_view" for op in uses):
            return None
        if any(op.name != "atomic_rmw" or op.attrs["kind"] != "add" for op in adds):
            return None
        if any(op not in set(body.ops) for op in adds):
            return None
        view, chosen, own = uses[0], list[int](), set[int]()
        keys = [tuple(map(code.key, op.operands[1:])) for op in uses]
        windows = {op.attrs["window"] for op in uses}
        if len(windows) > 1 or any(key != keys[0] or None in key for key in keys):
            return None
        dims = zip(view.attrs["window"].dims, ref.ref.shape, strict=True)
        for d, (dim, n) in enumerate(dims):
            index = view.operands[1 + d]
            count = block_count(dim, n)
            axes = code.digits(index, program.sizes)
            if count is None:
                return None
            if axes and prod(program.sizes[a] for a in axes) == count:
                if own & {*axes}:
                    return None
                own.update(axes)
            elif count > 1 or number_of(code.made, index) != 0:
                chosen.append(d)
        if len(chosen) != 1 or not _has_load(keys[0][chosen[0]]):
            return None
        (d,) = chosen
        count = block_count(view.attrs["window"].dims[d], ref.ref.shape[d]) or 0
        found = _Chosen(
            program, ref, guards, d, view.operands[1 + d], count, frozenset(own)
        )
        steps = prod(program.sizes[a] for a in found.sorted_axes)
        blocks = found.blocks
        fits = 1 < steps <= MOST_STEPS and 1 < blocks <= MOST_STEPS
        return found if fits else None

    @cached_property
    def code(self) -> IndexCode:
        return IndexCode(self.program.body)

    @cached_property
    def key(self) -> object:
        """What must be equal for two cotangents to be added to by one program."""
        guards = tuple(map(self.code.key, self.guards))
        return self.code.key(self.index), guards, self.count, self.own

    @cached_property
    def sorted_axes(self) -> list[int]:
        """Those of the steps that are sorted: others choose the same for all steps."""
        used = {a for v in (self.index, *self.guards) for a in _axes(self.code.key(v))}
        every = range(len(self.program.sizes))
        return [a for a in every if a in used or a not in self.own]

    @property
    def shared(self) -> list[int]:
        """The sorted axes that choose the block along other dimensions, too."""
        return [a for a in self.sorted_axes if a in self.own]

    @property
    def blocks(self) -> int:
        return prod(self.program.sizes[a] for a in self.shared) * self.count

    def combined(self, b: Builder, ids: Mapping[int, Value], block: Value) -> Value:
        """The number of a block among all that are sorted."""
        total: Value | None = None
        for axis in self.shared:
            size = b.index(self.program.sizes[axis])
            total = ids[axis] if total is None else b.add(b.mul(total, size), ids[axis])
        if total is None:
            return block
        return b.add(b.mul(total, b.index(self.count)), block)

    def number(self) -> tuple[Kernel, tuple[Value, ...]]:
        """The kernel of one step's block, and the arrays that it reads."""
        b, params = Builder(), self.program.body.params
        refs = {a: Value(T.RefType((), T.I32, "any")) for a in self.sorted_axes}
        ids = {a: b.load(ref, ()) for a, ref in refs.items()}
        known = {params[a]: value for a, value in ids.items()}
        index = b.as_index(self.code.emit(b, self.index, known))
        index = b.clamp(b.index(0), index, b.index(self.count - 1))
        number = self.combined(b, ids, index)
        for guard in self.guards:
            runs = self.code.emit(b, guard, known)
            is_true = b.op("ne", runs, b.like(0, runs))
            number = b.select(is_true, number, b.index(self.blocks))
        result = Value(T.RefType((), T.I32, "any"))
        b.store(result, number, ())
        body = clone(b.block())
        inside = {*refs.values(), result}
        tables = tuple(ref for ref in main_refs(body) if ref not in inside)
        return Kernel("number", (*refs.values(), *tables, result), body, 1), tables


def _without_guards(program: Program, ref: Value) -> tuple[Program, tuple[Value, ...]]:
    """The program that always adds, and the tests of whether it would."""
    guards = list[Value]()
    while (op := _guard(program.body, ref)) is not None:
        guards.append(op.operands[0])
        inside = Cond.of(op).branches[1].ops
        ops = [o for old in program.body.ops for o in (inside if old is op else (old,))]
        program = program.with_body(Block(program.body.params, tuple(ops)))
    return program, tuple(guards)


def _guard(body: Block, ref: Value) -> Op | None:
    """The branch that has all additions to a cotangent, if grid indices choose it."""
    views = {op.result for op in walk(body) if ref in op.operands and op.results}
    adds = lambda block: any(views & {*op.operands} for op in walk(block))
    holding = [op for op in body.ops if any(map(adds, op.regions))]
    if len(holding) != 1 or any(views & {*op.operands} for op in body.ops):
        return None
    (op,) = holding
    if op.name != "cond" or op.results or len(op.regions) != 2:
        return None
    is_one = not adds(op.regions[0])
    return op if is_one and IndexCode(body).key(op.operands[0]) is not None else None


class _Sorted:
    def __init__(self, chosen: Sequence[_Chosen], program: Program):
        self.chosen, self.first, self.program = chosen, chosen[0], program

    def made(self) -> SortedSteps:
        first = self.first
        kernel, tables = first.number()
        sizes = tuple(self.program.sizes[a] for a in first.sorted_axes)
        name = first.ref.name.removesuffix("_ref")
        array = lambda n, what: Value(T.RefType((n,), T.I32, "smem"), f"{what}_{name}")
        firsts = array(first.blocks + 1, "firsts")
        order = array(prod(sizes), "order")
        sorting = Sorting(sizes, first.blocks, kernel, tables, firsts, order)
        return SortedSteps(
            self.of_blocks(sorting, None),
            sorting,
            self.of_blocks(sorting, sorting.typical),
        )

    def of_blocks(self, sorting: Sorting, steps: int | None) -> Program:
        """The program of a block; `steps`: how many it has, if not as sorted."""
        program, first = self.program, self.first
        own = sorted(first.own)
        params = {a: Value(T.INDEX, program.body.params[a].name) for a in own}
        block = Value(T.INDEX, "block")
        b, inner = Builder(program.loc), Builder(program.loc)
        if steps is None:
            at = first.combined(b, params, block)
            start = b.load(sorting.firsts, (At(),), [at])
            limit = b.load(sorting.firsts, (At(),), [b.add(at, b.index(1))])
        else:
            start, limit = b.index(0), b.index(steps)
        place = Value(T.INDEX, "place")
        step = inner.load(sorting.order, (At(),), [place])
        ids = dict(params)
        for axis in reversed(first.sorted_axes):
            n = program.sizes[axis]
            if axis not in ids:
                is_last = axis == first.sorted_axes[0]
                ids[axis] = step if is_last else inner.op("rem", step, inner.index(n))
            if axis != first.sorted_axes[0]:
                step = inner.op("div", step, inner.index(n))
        env = {program.body.params[a]: value for a, value in ids.items()}
        body = _with_block(program.body, self.chosen, block)
        copied = clone(Block((), body.ops), env).ops
        varies = {place, *(v for op in inner.ops for v in op.results)}
        for op in copied:
            (inner if _depends(op, varies) else b).ops.append(op)
        b.emit("for", start, limit, b.index(1), regions=(inner.block((place,)),))
        sizes = (*(program.sizes[a] for a in own), first.count)
        new = Block((*params.values(), block), tuple(b.ops))
        return replace(program, body=clone(new), sizes=sizes).simplified()


def _with_block(body: Block, chosen: Sequence[_Chosen], block: Value) -> Block:
    """Code of a step, where the index of its block is known.

    Windows on other arrays with as many blocks have it for the same index; elsewhere
    the index may be outside.
    """
    code, first = IndexCode(body), chosen[0]
    key = first.code.key(first.index)
    made = dict[Op, Op]()
    for op in walk(body):
        if op.name == "block_view":
            operands, dims = list(op.operands), op.attrs["window"].dims
            sizes = zip(dims, op.operands[0].ref.shape, strict=True)
            for d, (dim, n) in enumerate(sizes):
                same = code.key(operands[1 + d]) == key
                if same and block_count(dim, n) == first.count:
                    operands[1 + d] = block
            made[op] = op.with_(operands=tuple(operands))
    return replace_ops(body, lambda op: (made[op],) if op in made else None)


def _depends(op: Op, varies: set[Value]) -> bool:
    """Whether an op belongs into the loop over steps, whose values are collected."""
    used = {*op.operands, *(v for region in op.regions for v in used_values(region))}
    writes = op.name == "atomic_rmw" or bool(op.regions)
    if writes or used & varies or op.name == "alloc":
        varies |= {*op.results}
        return True
    return False
