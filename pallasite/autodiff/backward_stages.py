"""Splits a reversed program into stages that each visit memory in their own order.

A program that accumulated along a sequential grid axis has a reverse whose loop over
that axis only adds to cotangents: its iterations can run in any order, so they become
grid steps, which can then be ordered so that each block of a cotangent is visited once
(`backward_windows.py`). What such a loop needs from the code before it is recomputed if
that is cheap, and otherwise saved to memory by a first stage.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pallasite.autodiff.iterations_apart import iterations_apart
from pallasite.autodiff.op_derivative import is_pure
from pallasite.autodiff.reverse_activity import defined, facts_of
from pallasite.autodiff.sink_sums import sink_sums
from pallasite.autodiff.sorted_steps import named_views
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, BlockDim, Op, Value, Window, walk
from pallasite.ir.rewrite import clone, producers_of, substitute, used_values
from pallasite.ir.roles import Loop, number_of
from pallasite.ir.types import INDEX, RefType
from pallasite.passes.analysis.affine import Forms
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program

MOST_STEPS = 1 << 16  # of a loop with a computed trip count, as a grid axis


@dataclass(frozen=True)
class Stages:
    """Programs in execution order; `saved` refs pass data between them."""

    programs: tuple[Program, ...]
    saved: tuple[Value, ...] = ()

    def with_more(self, programs: Iterable[Program]) -> "Stages":
        """With others that depend on none of them."""
        return replace(self, programs=(*self.programs, *programs))


def split(
    program: Program, may_cut: Callable[[Program], bool], named: bool = False
) -> Stages:
    """Turn every loop that can be a grid into a stage, recursively.

    Args:
        program: what to split.
        may_cut: whether to make a stage of a loop, given as that stage.
        named: also loops that add to blocks which memory names.
    """
    program = program.simplified()
    apart = iterations_apart(program) if named else None
    if apart is not None:
        main, last, array = apart
        first = split(main, may_cut, named)
        return Stages((*first.programs, last), (array, *first.saved))
    for op in program.body.ops:
        free = _free_loop(program, op, named)
        if free is None:
            continue
        main, loop, saved = _cut(*free)
        if may_cut(loop):
            first, rest = (split(part, may_cut, named) for part in (main, loop))
            programs = (*first.programs, *rest.programs)
            return Stages(programs, (*saved, *first.saved, *rest.saved))
    return Stages((program,) if _is_needed(program) else ())


def sums_apart(stages: Stages, may_join: Callable[[Program], bool]) -> Stages | None:
    """A stage for the products that are added to a cotangent, or for each of them.

    Others before it save their factors, where these are costly. So products can have
    blocks of their own, whereas one kernel has to hold all sums at the same time.

    Args:
        stages: what to split.
        may_join: whether all products of a cotangent may be one stage, given as that.

    Returns:
        More stages; None if there are no such products.
    """
    programs, saved = list[Program](), [*stages.saved]
    for stage in stages.programs:
        found = _stage_apart(stage, may_join)
        programs += filter(_is_needed, found.programs)
        saved += found.saved
    if len(programs) == len(stages.programs):
        return None
    return Stages(tuple(programs), tuple(saved))


def _stage_apart(stage: Program, may_join: Callable[[Program], bool]) -> Stages:
    body, slicer, roots = stage.body, Slice(stage.body.ops), Roots(stage.body)
    adds = [op for op in body.ops if op.name == "atomic_rmw"]
    factors = {
        op: [v for dot in dots for v in dot.operands]
        for op in adds
        if (dots := slicer.products(op))
    }
    every = dict.fromkeys(v for values in factors.values() for v in values)
    axis = rows_axis(body)
    refs = {v: saved_ref(v, stage.sizes, axis) for v in slicer.to_save(every, every)}

    def adding(ops: Sequence[Op]) -> Program:
        operands = (v for op in ops for v in op.operands)
        ops = (*slicer.closure(operands, list(refs)), *ops)
        return stage.with_body(_with_saved(body.params, ops, refs, axis)).simplified()

    others = [op for op in body.ops if op not in factors]
    rest = _saving(body.params, others, refs, axis)
    programs = [stage.with_body(rest).simplified()]
    targets: dict[Value, list[Op]] = {}
    for op in factors:
        targets.setdefault(roots.of(op.operands[0]), []).append(op)
    for ops in targets.values():
        joined = adding(ops)
        is_one = len(ops) == 1 or may_join(joined)
        programs += [joined] if is_one else [adding([op]) for op in ops]
    return Stages(tuple(programs), tuple(refs.values()))


def _is_needed(program: Program) -> bool:
    return any(op.name in ("atomic_rmw", "store") for op in walk(program.body))


def _free_loop(program: Program, op: Op, named: bool) -> tuple[Program, Op] | None:
    """The program with this loop replaced by one that can be a grid axis.

    It has a known trip count, carries nothing and adds to blocks it moves over, or
    (`named`) to blocks that memory names for each iteration.
    """
    if op.name != "for":
        return None
    loop = Loop.of(op)
    forms = Forms([*program.body.params, loop.index])
    forms.add_ops(o for o in program.body.ops if not o.regions)
    forms.add_ops(loop.body.ops)
    views = {v.result for v in walk(loop.body) if _moves(v, forms)}
    if named:
        views |= named_views(program.body, loop)
    # With nothing to carry, loops inside it may be the ones that add.
    inside = _outside_loops(loop.body) if op.results else walk(loop.body)
    adds = (o for o in inside if o.name == "atomic_rmw")
    if not any(o.operands[0] in views for o in adds):
        return None
    if op.results:
        sunk = sink_sums(program.body, op)
        if sunk is None:
            return None
        body, op = sunk
        program = program.with_body(body)
    return _with_known_length(program, op)


def _outside_loops(block: Block) -> Iterable[Op]:
    """The ops of a block and of its branches."""
    for op in block.ops:
        yield op
        if op.name == "cond":
            for region in op.regions:
                yield from _outside_loops(region)


def _with_known_length(program: Program, op: Op) -> tuple[Program, Op] | None:
    """Make iterations outside limits that the program computes do nothing."""
    body, loop = program.body, Loop.of(op)
    if trip_count(op, body) is not None:
        return program, op
    first, _, step = (number_of(producers_of(body), v) for v in loop.bounds)
    before = Slice(body.ops[: body.ops.index(op)])
    facts = facts_of(body, program.sizes)
    most = facts.most_steps(loop) if first == 0 else facts.of(loop.limit).high
    if step != 1 or facts.of(loop.first).low < 0 or not most or most > MOST_STEPS:
        return None
    if not before.is_cheap([loop.first, loop.limit]):
        return None
    b, inside = Builder(op.loc), Builder(op.loc)
    is_step = _is_before(inside, loop.index, loop.limit, program)
    if first != 0:
        is_step = inside.op("and", inside.op("ge", loop.index, loop.first), is_step)
    steps = (Block(), Block((), loop.body.ops))
    inside.emit("cond", inside.cast(is_step, INDEX.dtype), regions=steps)
    zero, limit = b.constant(0, loop.first.tile), b.constant(most, loop.limit.tile)
    region = inside.block((loop.index,))
    new = loop.with_(first=zero, limit=limit, body=region).to_op()
    ops = [o for old in body.ops for o in ((*b.ops, new) if old is op else (old,))]
    return program.with_body(Block(body.params, tuple(ops))), new


def _is_before(b: Builder, index: Value, limit: Value, program: Program) -> Value:
    """Whether an index is below a limit; for a quotient, without the division.

    `i < x // 64` is `(i + 1) * 64 <= x`, which passes can solve for the operands of `x`
    (`passes/optimise/guard_bounds.py`).
    """
    op = producers_of(program.body).get(limit)
    if op is not None and op.name == "div":
        x, by = op.operands
        number = number_of(producers_of(program.body), by)
        low = facts_of(program.body, program.sizes).of(x).low
        if number is not None and number > 0 and low >= 0:
            after = b.add(b.cast(index, x.tile.dtype), b.like(1, x))
            return b.op("le", b.mul(after, b.like(number, x)), x)
    return b.op("lt", index, limit)


def _moves(op: Op, forms: Forms) -> bool:
    """Whether an op shows another block at each step of the loop, one after another.

    The loop's index is the last of `forms`; grid indices may choose where it starts.
    """
    if op.name != "block_view":
        return False
    found = [forms.of(index).affine for index in op.operands[1:]]
    return any(f is not None and f.const == 0 and f.coeffs[-1] == 1 for f in found)


def trip_count(op: Op, body: Block) -> int | None:
    """The trip count of a loop from 0 by 1, if it is known."""
    first, limit, step = (number_of(producers_of(body), v) for v in Loop.of(op).bounds)
    return limit if (first, step) == (0, 1) else None


def _cut(program: Program, loop: Op) -> tuple[Program, Program, list[Value]]:
    body, loop = _factors_before(program.body, loop)
    count = trip_count(loop, body)
    assert count is not None
    region = Loop.of(loop).body
    before = body.ops[: body.ops.index(loop)]
    slicer = Slice(before)
    needed = _captured(region)
    factors = {v for op in walk(region) if op.name == "dot" for v in op.operands}
    costly = slicer.to_save([v for v in needed if not v.is_ref], factors)
    axis = rows_axis(body)
    refs = {v: saved_ref(v, program.sizes, axis) for v in costly}
    main = _saving(body.params, [op for op in body.ops if op is not loop], refs, axis)
    ops = (*slicer.closure(needed, costly), *region.ops)
    moved = _with_saved(body.params, ops, refs, axis, Loop.of(loop).index)
    sizes = (*program.sizes, count)
    inner = replace(program, body=moved, sizes=sizes)
    return program.with_body(main), inner, list(refs.values())


def _saving(
    ids: Sequence[Value], ops: Iterable[Op], refs: Mapping[Value, Value], axis: int
) -> Block:
    """Code of a program, which then stores some of its values in refs."""
    b = Builder()
    b.ops += ops
    for value, ref in refs.items():
        b.store(save_block(b, ref, ids, value, "out", axis), value)
    return Block(tuple(ids), tuple(b.ops))


def _with_saved(
    ids: Sequence[Value],
    ops: Sequence[Op],
    refs: Mapping[Value, Value],
    axis: int,
    *more: Value,
) -> Block:
    """A copy of code that loads these values from refs; `more`: indices of its own."""
    b = Builder()
    blocks = {v: save_block(b, ref, ids, v, "in", axis) for v, ref in refs.items()}
    loaded = {v: b.load(block) for v, block in blocks.items()}
    moved = substitute(Block((), tuple(ops)), loaded)
    return clone(Block((*ids, *more), (*b.ops, *moved.ops)))


def _factors_before(body: Block, op: Op) -> tuple[Block, Op]:
    """Hoist loop-invariant factors of a loop's products."""
    loop = Loop.of(op)
    made = producers_of(loop.body)
    variant = {*loop.body.params}
    moved: list[Op] = []
    for inner in walk(loop.body):
        if is_pure(inner) and not any(v in variant for v in inner.operands):
            moved.append(inner)
        else:
            variant.update(inner.results)
            variant.update(v for region in inner.regions for v in region.params)
    factors = [v for o in walk(loop.body) if o.name == "dot" for v in o.operands]
    pending, needed = factors, set[Op]()
    while pending:
        each = made.get(pending.pop())
        if each is not None and each in moved and each not in needed:
            needed.add(each)
            pending += each.operands
    if not needed:
        return body, op

    def rest(block: Block) -> Block:
        ops = [
            o.with_(regions=tuple(map(rest, o.regions))) if o.regions else o
            for o in block.ops
            if o not in needed
        ]
        return Block(block.params, tuple(ops), block.yields)

    new = loop.with_(body=rest(loop.body)).to_op()
    early = [o for o in moved if o in needed]
    ops = [o for old in body.ops for o in ((*early, new) if old is op else (old,))]
    return Block(body.params, tuple(ops), body.yields), new


def _captured(region: Block) -> list[Value]:
    inside = defined(region)
    return [v for v in dict.fromkeys(used_values(region)) if v not in inside]


class Slice:
    """The slice of a list of ops that some values need."""

    def __init__(self, ops: Sequence[Op]):
        self.ops = ops
        self.made = {v: op for op in ops for v in op.results}
        self.stored = {op.operands[0] for op in _all(ops) if op.name == "store"}

    def closure(
        self, values: Iterable[Value], known: Sequence[Value] = ()
    ) -> tuple[Op, ...]:
        """The ops that compute some values, in order, from known ones."""
        pending, found = list(values), set[Op]()
        while pending:
            value = pending.pop()
            op = None if value in known else self.made.get(value)
            if op is not None and op not in found:
                found.add(op)
                pending += op.operands
                pending += [v for region in op.regions for v in used_values(region)]
        return tuple(op for op in self.ops if op in found)

    def is_cheap(self, values: Iterable[Value]) -> bool:
        return not any(map(self.is_costly, self.closure(values)))

    def is_costly(self, op: Op) -> bool:
        """Loops, branches, matmuls, memory that changes."""
        return (
            bool(op.regions and op.name != "custom")
            or op.name in ("alloc", "dot")
            or (op.name == "load" and op.operands[0] in self.stored)
        )

    def to_save(
        self, values: Iterable[Value], factors: Container[Value] = ()
    ) -> list[Value]:
        """What to save so that recomputing the values is cheap.

        A value itself, or what it is computed from if that takes fewer bytes: a block
        that is divided by a column is recomputed from the column. But `factors` of
        matmuls are saved as they are multiplied: matrix units take them from memory.
        """
        saved: dict[Value, None] = {}
        costly = [v for v in values if not self.is_cheap([v])]
        for value in sorted(costly, key=_bytes):
            sources = None if value in factors else self.sources(value)
            more = None
            if sources is not None:
                more = sum(_bytes(v) for v in sources if v not in saved)
            if sources is None or more is None or more >= _bytes(value):
                sources = [value]
            saved.update(dict.fromkeys(sources))
        return [v for v in self.made if v in saved]

    def products(self, op: Op) -> list[Op]:
        """The matmuls whose results an op takes, if all else that it takes is cheap."""
        value = Access.of(op).value
        sources = self.sources(value) if value is not None else None
        made = [self.made[v] for v in sources or ()]
        return made if all(each.name == "dot" for each in made) else []

    def sources(self, value: Value) -> list[Value] | None:
        """Results of costly ops from which the rest is cheap; None: not tiles."""
        found: dict[Value, None] = {}
        pending, seen = [value], set[Value]()
        while pending:
            value = pending.pop()
            op = self.made.get(value)
            if op is None or value in seen:
                continue
            seen.add(value)
            if not self.is_costly(op):
                pending += op.operands
                pending += [v for region in op.regions for v in used_values(region)]
            elif value.is_ref:
                return None
            else:
                found[value] = None
        return list(found)


def _bytes(value: Value) -> int:
    return value.tile.size * value.tile.dtype.bytes


def _all(ops: Sequence[Op]) -> Iterable[Op]:
    return walk(Block((), tuple(ops)))


def rows_axis(body: Block) -> int:
    """The last axis along which a program's blocks of rows adjoin."""
    places, found = {id: axis for axis, id in enumerate(body.params)}, [-1]
    for op in body.ops:
        if op.name == "block_view":
            dims = zip(op.attrs["window"].dims, op.operands[1:], strict=True)
            rows = (index for dim, index in dims if dim.size > 1)
            found.append(places.get(next(rows, op.operands[0]), -1))
    return max(found)


def saved_ref(value: Value, sizes: Sequence[int], axis: int = -1) -> Value:
    """An array of the values that all programs save.

    Those of the axis are contiguous along a dimension of the tile, so that blocks of
    several programs, or of parts of one, are blocks of it.
    """
    tile = value.tile
    name = f"saved_{value.name}" if value.name else "saved"
    shape = (*sizes, *tile.shape)
    if sizes and tile.shape:
        others, rows = [*sizes], [*tile.shape]
        rows[_long_dim(tile.shape)] *= others.pop(axis)
        shape = (*others, *rows)
    return Value(RefType(shape, tile.dtype, "any"), name)


def _long_dim(shape: Sequence[int]) -> int:
    """The first dimension of more than one element."""
    return next((d for d, n in enumerate(shape) if n > 1), 0)


def save_block(
    b: Builder,
    ref: Value,
    ids: Sequence[Value],
    value: Value,
    mode: str,
    axis: int = -1,
) -> Value:
    """The part of a saved ref that belongs to one program."""
    shape = value.tile.shape
    apart = len(ref.ref.shape) - len(shape)  # axes with a dimension of their own
    dims = [BlockDim(1, "squeezed")] * apart + [BlockDim(n) for n in shape]
    places = [*ids]
    moved = [places.pop(axis)] if apart < len(ids) else []
    places += [b.index(0) for _ in range(len(dims) - len(places))]
    for place in moved:
        places[apart + _long_dim(shape)] = place
    window = Window(tuple(dims), mode)
    return b.op("block_view", ref, *places, window=window)
