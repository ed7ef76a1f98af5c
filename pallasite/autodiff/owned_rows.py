"""Gives blocks of rows that loops add to programs of their own.

Where a program reads the rows between two offsets, one after another, its reverse adds
to these rows. Offsets are data: nothing says that no two programs have the same row, so
they could only run in sequence. As an axis of the grid, blocks of rows run in parallel:
each program goes through the steps that may reach its block, and through the iterations
that do; on a GPU it adds to all rows of the block at once. A kernel before it stores
which rows the loops of a step reach, from which the steps of a block are found
(`step_order.py`).

Proof: an iteration adds to one row, which its index is, so those whose index is in a
block are all that add to it. Each row gets its addends in the order of the steps.
Iterations whose index is outside the array are clamped to the first or the last row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from pallasite.autodiff.backward_stages import save_block, saved_ref
from pallasite.autodiff.backward_windows import block_count, only
from pallasite.autodiff.step_order import Reaching
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
from pallasite.passes.analysis.index_code import IndexCode
from pallasite.passes.analysis.memory import VIEWS, Roots
from pallasite.passes.lower.per_program import Program
from pallasite.passes.normal.stacked_code import Stacked

MOST_ELEMENTS = 1 << 13  # of a program's block
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
        steps: which steps its programs go through.
        typical: `rows` with as many steps as a block has on average, for estimates.
    """

    reach: Program
    refs: tuple[Value, Value]
    rows: Program
    steps: Reaching
    typical: Program


def owned_rows(program: Program, ref: Value, at_once: bool) -> OwnedRows | None:
    """The programs that add to one cotangent, by blocks of its rows.

    None if anything but loops over rows adds to it.

    Args:
        program: the reverse.
        ref: the cotangent.
        at_once: add to all rows of a block at once, if what is added allows that.
    """
    program = only(program, [ref])
    shown = _Shown.of(program, ref) if program.sizes and ref.ref.rank else None
    loops = dict[Op, tuple[Op, ...]]()
    if shown is None or not _find(program, shown, loops):
        return None
    count = ref.ref.shape[0]
    made = _Owned(program, shown, loops, 1)
    is_stacked = at_once and made.is_stacked()
    size = count & -count
    if at_once:  # a step has about as many
        size = min(size, max(1, count // made.steps) if is_stacked else 1)
        size = 1 << (size.bit_length() - 1)
    while size > 1 and size * prod(shown.row) > MOST_ELEMENTS:
        size //= 2
    if count < 2 * size:
        return None
    made = _Owned(program, shown, loops, size)
    return made.programs(made.added if is_stacked else made.added_in_turn)


@dataclass(frozen=True)
class _Shown:
    """A cotangent as a program sees it: all of its rows, perhaps a part of each.

    Attributes:
        ref: the cotangent.
        views: the `block_view`s of it; none: it is added to as it is.
        own: the axes of the grid that choose the part.
    """

    ref: Value
    views: tuple[Op, ...]
    own: tuple[int, ...]

    @property
    def refs(self) -> set[Value]:
        return {op.result for op in self.views} or {self.ref}

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row, or of the part of it."""
        (shown, *_) = self.refs
        return shown.ref.shape[1:]

    @staticmethod
    def of(program: Program, ref: Value) -> "_Shown | None":
        """None if programs show parts that are not known by their grid indices."""
        uses = [op for op in walk(program.body) if ref in op.operands]
        views = tuple(op for op in uses if op.name == "block_view")
        if not views:
            return _Shown(ref, (), ())
        code, own, first = IndexCode(program.body), list[int](), views[0]
        keys = {tuple(map(code.key, op.operands[1:])) for op in views}
        alike = len(keys) == len({op.attrs["window"] for op in views}) == 1
        if len(views) < len(uses) or not alike:
            return None
        dims = zip(first.attrs["window"].dims, ref.ref.shape, strict=True)
        for d, (dim, n) in enumerate(dims):
            index = first.operands[1 + d]
            count, axes = block_count(dim, n), code.digits(index, program.sizes)
            if (
                dim.kind == "blocked"
                and count == 1
                and number_of(code.made, index) == 0
            ):
                continue
            is_own = prod(program.sizes[a] for a in axes) == count and not {*axes} & {
                *own
            }
            if d == 0 or not axes or not is_own:
                return None
            own += axes
        if first.attrs["window"].dims[0].size != ref.ref.shape[0]:
            return None
        return _Shown(ref, views, tuple(sorted(own)))


def _find(program: Program, shown: _Shown, loops: dict[Op, tuple[Op, ...]]) -> bool:
    """Collect loops over rows, with what adds in them; whether nothing else adds."""
    refs = shown.refs
    made = producers_of(program.body)
    written = set(Roots(program.body).written(program.body))

    def visit(block: Block) -> bool:
        for op in block.ops:
            adds = [o for o in walk(Block((), (op,))) if refs & {*o.operands}]
            if adds and op.name == "for" and _is_over_rows(op, adds, made):
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


def _is_over_rows(loop: Op, adds: Sequence[Op], made: Mapping[Value, Op]) -> bool:
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
            for (e, start), n in zip(rest, access.ref.ref.shape[1:], strict=True)
        )
        is_row = isinstance(entry, At) and index is own.index
        is_sum = op.attrs["kind"] == "add" and access.mask is None
        if not (whole and is_row and is_sum):
            return False
    return True


class _Owned:
    def __init__(
        self,
        program: Program,
        shown: _Shown,
        loops: Mapping[Op, tuple[Op, ...]],
        size: int,
    ):
        self.program, self.shown, self.loops, self.size = program, shown, loops, size
        self.ref = shown.ref
        self.count = self.ref.ref.shape[0]
        self.axes = [a for a in range(len(program.sizes)) if a not in shown.own]
        self.steps = prod(program.sizes[a] for a in self.axes)
        self.holding = {
            op
            for op in walk(program.body)
            if op not in loops and any(o in loops for o in walk(Block((), (op,))))
        }

    def programs(self, row: _OnRow) -> OwnedRows:
        reach, (low, high) = self.reach()
        name = self.ref.name.removesuffix("_ref")
        count = self.count // self.size
        array = lambda what: Value(T.RefType((count,), T.I32, "smem"), f"{what}_{name}")
        sizes, rows = self.program.sizes, (self.count, self.size)
        each = array("firsts"), array("limits")
        steps = Reaching(sizes, self.shown.own, rows, low, high, *each)
        typical = 1 + self.steps // count
        return OwnedRows(
            reach, (low, high), self.rows(steps, row, None), steps,
            self.rows(steps, row, min(typical, self.steps)),
        )  # fmt: skip

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

    def rows(self, steps: Reaching, row: _OnRow, typical: int | None) -> Program:
        """The program of a block; `typical`: how many steps it has, if not as found."""
        number, b = Value(T.INDEX, "rows"), Builder(self.program.loc)
        old = self.program.body.params
        own = {a: Value(T.INDEX, old[a].name) for a in self.shown.own}
        known = {old[a]: value for a, value in own.items()}
        dims = tuple(map(BlockDim, self.ref.ref.shape))
        indices = [b.index(0) for _ in dims]
        if self.shown.views:
            view, code = self.shown.views[0], IndexCode(self.program.body)
            dims, within = view.attrs["window"].dims, {**known}
            indices = [code.emit(b, v, within) for v in view.operands[1:]]
        window = Window((BlockDim(self.size), *dims[1:]), "out")
        self.block = b.op("block_view", self.ref, number, *indices[1:], window=window)
        self.first = b.mul(number, b.index(self.size))
        self.iterations_of_rows(b)
        limits = b.index(0), b.index(typical or 0)
        if typical is None:
            first, limit = (
                b.load(ref, (At(),), [number]) for ref in (steps.firsts, steps.limits)
            )
            limits = first, limit
        step, inner = Value(T.INDEX, "step"), Builder(self.program.loc)
        env = known | self.digits(inner, step)
        self.code(inner, self.program.body, env, (), row)
        b.emit("for", *limits, b.index(1), regions=(inner.block((step,)),))
        body = clone(Block((*own.values(), number), tuple(b.ops)))
        sizes = (*(self.program.sizes[a] for a in own), self.count // self.size)
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

    def digits(self, b: Builder, step: Value) -> dict[Value, Value]:
        """The grid indices of a step."""
        found, program = dict[Value, Value](), self.program
        for axis in reversed(self.axes[1:]):
            n = b.index(program.sizes[axis])
            found[program.body.params[axis]] = b.op("rem", step, n)
            step = b.op("div", step, n)
        for axis in self.axes[:1]:
            found[program.body.params[axis]] = step
        return found

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
                made = self.wide(value, self.owned.shown.row)
                if made is None:
                    return None
                found.append(made)
            elif not self.emit(op):
                return None
        return found

    def access(self, op: Op) -> Value | None:
        """The rows of another array, or numbers of rows, at the same places.

        Or rows that numbers of rows name: at least one element of each.
        """
        if op.name != "load":
            return None
        access, owned = Access.of(op), self.owned
        (entry, index), *rest = access.split_index()
        others = [v for v in op.operands[1:] if v is not index]
        if access.mask is not None or index is None or self.depends(others):
            return None
        if any(isinstance(e, Gather) for e, _ in (*rest, (entry, index))):
            return None
        starts = [self.new(s) for _, s in rest if s is not None]
        count = access.ref.ref.shape[0]
        if index is self.index:
            if not isinstance(entry, At) or count != owned.count:
                return None
            entries = (Span(None, owned.size), *(e for e, _ in rest))
            return self.b.load(self.new(access.ref), entries, [owned.first, *starts])
        is_one = isinstance(entry, At) or entry == Span(None, 1)
        if not is_one or index not in self.varies:
            return None
        where = self.new(index)
        if where.tile.shape != (self.size,) or where.tile.dtype != T.I32:
            return None
        where = self.b.clamp(
            self.b.like(0, where), where, self.b.like(count - 1, where)
        )
        entries = (Gather(), *(e for e, _ in rest))
        found = self.b.load(self.new(access.ref), entries, [where, *starts])
        shape = (self.size, *op.result.tile.shape)
        return (
            found if isinstance(entry, At) else self.b.op("reshape", found, shape=shape)
        )
