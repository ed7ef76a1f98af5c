"""Gives blocks of rows that loops add to programs of their own.

Where a program reads the rows between two offsets, one after another, its reverse adds
to these rows. Offsets are data: nothing says that no two programs have the same row, so
they could only run in sequence. As an axis of the grid, blocks of rows run in parallel:
each program goes through the steps that may reach its block, and through the iterations
that do; on a GPU it adds to all rows of the block at once. A kernel before it stores
which rows the loops of a step reach, so that the steps of a block are found by
comparing vectors.

Proof: an iteration adds to one row, which its index is, so those whose index is in a
block are all that add to it. Each row gets its addends in the order of the steps.
Iterations whose index is outside the array are clamped to the first or the last row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from pallasite.autodiff.backward_stages import save_block, saved_ref
from pallasite.autodiff.backward_windows import only
from pallasite.ir import types as T
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import (
    Access,
    At,
    Block,
    BlockDim,
    Gather,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.rewrite import clone, is_pure, producers_of
from pallasite.ir.roles import Cond, Loop, number_of
from pallasite.passes.analysis.memory import VIEWS, Roots
from pallasite.passes.lower.per_program import Program
from pallasite.passes.normal.stacked_code import Stacked

MOST_ELEMENTS = 1 << 13  # of a program's block
MOST_TESTS = 1 << 24  # of steps, in all programs: some tens of microseconds
AT_ONCE = 1 << 10  # steps that are tested at a time
State = tuple[Value, ...]
Env = Mapping[Value, Value]
_OnRow = Callable[[Builder, Op, Env, State], State]  # what to do with a loop over rows


@dataclass(frozen=True)
class OwnedRows:
    """Two programs, one after the other.

    Attributes:
        reach: stores the first row that each step adds to, and the end of them.
        refs: the arrays that hold these.
        rows: adds to the cotangent.
    """

    reach: Program
    refs: tuple[Value, Value]
    rows: Program


def owned_rows(program: Program, ref: Value, at_once: bool) -> OwnedRows | None:
    """The programs that add to one cotangent, by blocks of its rows.

    None if anything but loops over rows adds to it, or if there are too many steps.

    Args:
        program: the reverse.
        ref: the cotangent.
        at_once: add to all rows of a block at once, if what is added allows that.
    """
    program = only(program, [ref])
    loops = dict[Op, tuple[Op, ...]]()
    if not program.sizes or not ref.ref.rank or not _find(program, ref, loops):
        return None
    count, row = ref.ref.shape[0], prod(ref.ref.shape[1:])
    size = count & -count
    while size > 1 and size * row > MOST_ELEMENTS:
        size //= 2
    if count < 2 * size or count // size * prod(program.sizes) > MOST_TESTS:
        return None
    made = _Owned(program, ref, loops, size)
    reach, refs = made.reach()
    add = made.added if at_once and made.is_stacked() else made.added_in_turn
    return OwnedRows(reach, refs, made.rows(refs, add))


def _find(program: Program, ref: Value, loops: dict[Op, tuple[Op, ...]]) -> bool:
    """Collect loops over rows, with what adds in them; whether nothing else adds."""
    made = producers_of(program.body)
    written = set(Roots(program.body).written(program.body))

    def visit(block: Block) -> bool:
        for op in block.ops:
            adds = [o for o in walk(Block((), (op,))) if ref in o.operands]
            if adds and op.name == "for" and _is_over_rows(op, adds, ref, made):
                others = (o for o in Loop.of(op).body.ops if o not in adds)
                if not all(_is_repeatable(o, written) for o in others):
                    return False
                loops[op] = tuple(adds)
            elif adds:
                inside = op.name in ("for", "cond") and not op.results
                if not inside or not all(map(visit, op.regions)):
                    return False
            else:
                known = op.name in ("for", "cond") or _is_repeatable(op, written)
                if not known or not all(map(visit, op.regions)):
                    return False
        return True

    return visit(program.body) and bool(loops)


def _is_repeatable(op: Op, written: set[Value]) -> bool:
    if op.name == "load":
        return op.operands[0] not in written
    return is_pure(op) or op.name in VIEWS


def _is_over_rows(
    loop: Op, adds: Sequence[Op], ref: Value, made: Mapping[Value, Op]
) -> bool:
    own = Loop.of(loop)
    if loop.results or number_of(made, own.step) != 1 or own.index.type != T.INDEX:
        return False
    for op in adds:
        if op.name != "atomic_rmw" or op not in own.body.ops:
            return False
        access = Access.of(op)
        (entry, index), *rest = access.split_index()
        whole = all(
            isinstance(e, Span) and e == Span(0, n) and start is None
            for (e, start), n in zip(rest, ref.ref.shape[1:], strict=True)
        )
        is_row = isinstance(entry, At) and index is own.index
        is_sum = op.attrs["kind"] == "add" and access.mask is None
        if access.ref is not ref or not (whole and is_row and is_sum):
            return False
    return True


class _Owned:
    def __init__(
        self,
        program: Program,
        ref: Value,
        loops: Mapping[Op, tuple[Op, ...]],
        size: int,
    ):
        self.program, self.ref, self.loops, self.size = program, ref, loops, size
        self.count = ref.ref.shape[0]
        self.steps = prod(program.sizes)
        self.holding = {
            op
            for op in walk(program.body)
            if op not in loops and any(o in loops for o in walk(Block((), (op,))))
        }

    def is_stacked(self) -> bool:
        """Whether what loops add can be computed for all rows of a block at once."""
        self.first = Value(T.INDEX, "first")
        each = (_Rows(self, Builder(), op, {}).values() for op in self.loops)
        return all(values is not None for values in each)

    # --- which rows a step reaches ---

    def reach(self) -> tuple[Program, tuple[Value, Value]]:
        b, ids = Builder(self.program.loc), self.program.body.params
        start = (b.index(self.count), b.index(0))
        found = self.code(b, self.program.body, {}, start, self.reached)
        refs = list[Value]()
        for value in found:
            line = b.broadcast(value, (1,), ())
            made = saved_ref(line, self.program.sizes)
            refs.append(replace(made, name=f"rows_{len(refs)}"))
            b.store(save_block(b, refs[-1], ids, line, "out"), line)
        body = clone(Block(ids, tuple(b.ops)))
        low, high = refs
        return self.program.with_body(body).simplified(), (low, high)

    def reached(self, b: Builder, op: Op, env: Env, state: State) -> State:
        loop, (low, high) = Loop.of(op), state
        first, limit = (_new(env, v) for v in loop.bounds[:2])
        runs = b.lt(first, limit)
        top = b.index(self.count - 1)
        first = b.clamp(b.index(0), first, top)
        last = b.clamp(b.index(0), b.sub(limit, b.index(1)), top)
        low = b.min(low, b.select(runs, first, b.index(self.count)))
        after = b.add(last, b.index(1))
        return low, b.max(high, b.select(runs, after, b.index(0)))

    # --- rows ---

    def rows(self, refs: tuple[Value, Value], row: _OnRow) -> Program:
        number = Value(T.INDEX, "rows")
        b = Builder(self.program.loc)
        shape = (self.size, *self.ref.ref.shape[1:])
        window = Window(tuple(map(BlockDim, shape)), "out")
        zeros = [b.index(0) for _ in shape[1:]]
        self.block = b.op("block_view", self.ref, number, *zeros, window=window)
        self.first = b.mul(number, b.index(self.size))
        self.iterations_of_rows(b)
        first, limit = self.found(b, refs)
        step, inner = Value(T.INDEX, "step"), Builder(self.program.loc)
        ids = self.program.body.params
        env = dict(zip(ids, self.digits(inner, step), strict=True))
        self.code(inner, self.program.body, env, (), row)
        b.emit("for", first, limit, b.index(1), regions=(inner.block((step,)),))
        body = clone(Block((number,), tuple(b.ops)))
        sizes = (self.count // self.size,)
        return replace(self.program, body=body, sizes=sizes).simplified()

    def iterations_of_rows(self, b: Builder) -> None:
        """Where those of each row start and end: its own, and those clamped to it."""
        row = b.op("iota", type=T.TileType((self.size,), T.I32), dim=0)
        row = b.add(row, b.broadcast(self.first, (self.size,), ()))
        lowest, highest = (b.like(n, row) for n in T.I32.limits)
        is_first = b.eq(row, b.like(0, row))
        is_last = b.eq(row, b.like(self.count - 1, row))
        self.starts = b.select(is_first, lowest, row)
        self.ends = b.select(is_last, highest, b.add(row, b.like(1, row)))

    def digits(self, b: Builder, number: Value) -> list[Value]:
        """The grid indices of a step, or of a vector of them."""
        found, sizes = list[Value](), self.program.sizes
        for n in reversed(sizes[1:]):
            found.insert(0, b.op("rem", number, b.like(n, number)))
            number = b.op("div", number, b.like(n, number))
        return [number, *found]

    def found(self, b: Builder, refs: tuple[Value, Value]) -> tuple[Value, Value]:
        """The first step that may reach the block, and the end of them."""
        size = min(1 << (self.steps - 1).bit_length(), AT_ONCE)
        tile = T.TileType((size,), T.I32)
        part, inner = Value(T.INDEX, "part"), Builder(self.program.loc)
        low, high = Value(T.INDEX, "low"), Value(T.INDEX, "high")
        start = inner.broadcast(inner.mul(part, inner.index(size)), (size,), ())
        number = inner.add(inner.op("iota", type=tile, dim=0), start)
        where = self.digits(
            inner, inner.min(number, inner.like(self.steps - 1, number))
        )
        index = tuple(Gather() for _ in where)
        lows, highs = (inner.load(ref, index, where) for ref in refs)
        end = inner.add(self.first, inner.index(self.size))
        reaches = inner.and_(
            inner.lt(lows, inner.broadcast(end, (size,), ())),
            inner.gt(highs, inner.broadcast(self.first, (size,), ())),
        )
        none = inner.like(self.steps, number)
        least = inner.select(reaches, number, none)
        most = inner.select(reaches, number, inner.like(-1, number))
        least = inner.op("reduce", least, kind="min", axes=(0,))
        most = inner.op("reduce", most, kind="max", axes=(0,))
        after = inner.min(inner.add(most, inner.index(1)), inner.index(self.steps))
        yields = inner.min(low, least), inner.max(high, after)
        bounds = [b.index(n) for n in (0, -(-self.steps // size), 1)]
        starts = b.index(self.steps), b.index(0)
        region = inner.block((part, low, high), yields)
        first, limit = b.emit("for", *bounds, *starts, regions=(region,))
        return first, limit

    def added_in_turn(self, b: Builder, op: Op, env: Env, state: State) -> State:
        """The iterations of the block's rows, one after another."""
        loop, inner = Loop.of(op), Builder(op.loc)
        first, limit = (_new(env, v) for v in loop.bounds[:2])
        end = b.add(self.first, b.index(self.size))
        first = b.select(self.is_at(b, 0), first, b.max(first, self.first))
        limit = b.select(self.is_at(b, self.count - 1), limit, b.min(limit, end))
        index = Value(loop.index.type, loop.index.name)
        row = inner.sub(index, self.first)
        row = inner.clamp(inner.index(0), row, inner.index(self.size - 1))
        within = {**env, loop.index: index}
        for each in loop.body.ops:
            if each in self.loops[op]:
                access = Access.of(each)
                assert access.value is not None
                value = _new(within, access.value)
                new = Access(self.block, access.index, (row,), value, None, None)
                inner.op("atomic_rmw", *access_operands(new), **each.attrs)
                continue
            copy = clone(Block((), (each,), each.results), within)
            inner.ops += copy.ops
            within |= zip(each.results, copy.yields, strict=True)
        b.emit("for", first, limit, b.index(1), regions=(inner.block((index,)),))
        return state

    def added(self, b: Builder, op: Op, env: Env, state: State) -> State:
        """The iterations of all of the block's rows at once."""
        loop = Loop.of(op)
        first, limit = (_new(env, v) for v in loop.bounds[:2])
        # The first and the last row also get what is before and after them.
        times = b.sub(
            b.min(self.ends, b.broadcast(limit, self.ends.tile.shape, ())),
            b.max(self.starts, b.broadcast(first, self.starts.tile.shape, ())),
        )
        top = b.index(self.count - 1)
        before = b.sub(b.min(limit, b.index(1)), first)
        before = b.select(self.is_at(b, 0), before, b.index(1))
        after = b.sub(limit, b.max(first, top))
        after = b.select(self.is_at(b, self.count - 1), after, b.index(1))
        most = b.max(b.index(1), b.max(before, after))
        low, high = b.clamp(b.index(0), first, top), b.min(limit, b.index(self.count))
        end = b.add(self.first, b.index(self.size))
        reaches = b.and_(b.lt(low, end), b.gt(b.max(high, b.index(1)), self.first))
        reaches = b.and_(reaches, b.lt(first, limit))
        most = b.select(reaches, most, b.index(0))
        again, inner = Value(T.INDEX, "again"), Builder(op.loc)
        now = inner.lt(inner.broadcast(again, times.tile.shape, ()), times)
        for value in _Rows(self, inner, op, env).values() or ():
            where = inner.broadcast(now, value.tile.shape, (0,))
            # Nothing changes when -0.0 is added.
            value = inner.select(where, value, inner.like(-0.0, value))
            index = tuple(Span(0, n) for n in value.tile.shape)
            new = Access(self.block, index, (), value, None, None)
            operands = access_operands(new)
            inner.op("atomic_rmw", *operands, kind="add", index=index, mask=False)
        region = inner.block((again,))
        b.emit("for", b.index(0), most, b.index(1), regions=(region,))
        return state

    def is_at(self, b: Builder, row: int) -> Value:
        """Whether a row is in the block."""
        return b.eq(self.first, b.index(row - row % self.size))

    # --- the code of a step ---

    def code(
        self, b: Builder, block: Block, env: Env, state: State, row: _OnRow
    ) -> State:
        """Emit code, with something else for loops over rows."""
        env = dict(env)
        for op in block.ops:
            b.loc = op.loc
            if op in self.loops:
                state = row(b, op, env, state)
            elif op in self.holding and op.name == "for":
                loop, inner = Loop.of(op), Builder(op.loc)
                index = Value(loop.index.type, loop.index.name)
                carried = tuple(Value(v.type, v.name) for v in state)
                within = {**env, loop.index: index}
                yields = self.code(inner, loop.body, within, carried, row)
                region = inner.block((index, *carried), yields)
                bounds = (_new(env, v) for v in loop.bounds)
                state = tuple(b.emit("for", *bounds, *state, regions=(region,)))
            elif op in self.holding:
                regions = list[Block]()
                for branch in Cond.of(op).branches:
                    inner = Builder(op.loc)
                    yields = self.code(inner, branch, env, state, row)
                    regions.append(inner.block((), yields))
                which = _new(env, op.operands[0])
                state = tuple(b.emit("cond", which, regions=regions))
            else:
                copy = clone(Block((), (op,), op.results), env)
                b.ops += copy.ops
                env |= zip(op.results, copy.yields, strict=True)
        return state


def _new(env: Env, value: Value) -> Value:
    return env.get(value, value)


class _Rows(Stacked):
    """What a loop adds to rows, for all rows of a block at once."""

    def __init__(self, owned: _Owned, b: Builder, op: Op, env: Env):
        super().__init__(b, Loop.of(op).index, owned.size, env)
        self.owned, self.ops, self.adds = owned, Loop.of(op).body.ops, owned.loops[op]

    def values(self) -> list[Value] | None:
        """What each of its ops adds; None if it has to be added row by row."""
        found = list[Value]()
        for op in self.ops:
            if op in self.adds:
                value = Access.of(op).value
                assert value is not None
                made = self.wide(value, self.owned.ref.ref.shape[1:])
                if made is None:
                    return None
                found.append(made)
            elif not self.emit(op):
                return None
        return found

    def access(self, op: Op) -> Value | None:
        """The rows of another array, or numbers of rows, at the same places."""
        if op.name != "load":
            return None
        access, owned = Access.of(op), self.owned
        (entry, index), *rest = access.split_index()
        others = [v for v in op.operands[1:] if v is not index]
        is_row = isinstance(entry, At) and index is self.index
        is_alike = access.ref.ref.shape[0] == owned.count
        if not is_row or not is_alike or access.mask is not None:
            return None
        if self.depends(others) or any(isinstance(e, Gather) for e, _ in rest):
            return None
        entries = (Span(None, owned.size), *(e for e, _ in rest))
        starts = [self.new(s) for _, s in rest if s is not None]
        return self.b.load(self.new(access.ref), entries, [owned.first, *starts])
