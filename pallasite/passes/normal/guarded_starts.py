"""guarded_starts: accumulators are started by a guarded store, then always added to.

In: `acc = select(first, acc_ref[...], start)` in a step that then stores all of
`acc_ref`. Out: `if first: acc_ref[...] = start`, then a plain load, which is how other
authors write it and what analyses of carried state read. `select(first, acc_ref[...] +
x, x)` is such a start, too, with nothing to add to x: minus zero, because zero plus
minus zero is zero.

Proof: where `first` holds, the load now gives `start`, which the select gave; elsewhere
memory is not touched and the load gives what it gave. Between the guarded store and the
store of all of the ref nothing else reads it, so nobody sees that its contents changed
earlier. An op of the neutral element and x gives x, bit for bit.

Or in: `if first: acc_ref[...] = x`, else `acc_ref[...] += x`, as one branch or as two
guards of which exactly one holds (`i == 0`, `i > 0`). Out: `if first: acc_ref[...] =
0`, then `acc_ref[...] += x`. Proof: 0 + x is x. For floats this holds with -0.0; a
matmul is itself a sum that starts at zero, so it is added to 0.0. Maxima and the like
start at their neutral elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import (
    dead_code,
    is_pure,
    substitute,
    users_of,
    uses,
    with_ops,
    with_regions,
)
from pallasite.ir.roles import Pipeline, number_of
from pallasite.ir.types import I32
from pallasite.ops.neutral import neutral
from pallasite.passes.analysis.carried import covers
from pallasite.passes.analysis.memory import MAIN_MEMORY, VIEWS
from pallasite.passes.analysis.old_elements import MERGES

_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
# Comparisons of a number that is not negative: whether they hold at zero only, or
# everywhere else.
_AT_ZERO = {("eq", 0): True, ("le", 0): True, ("lt", 1): True}
_AT_ZERO |= {("ne", 0): False, ("gt", 0): False, ("ge", 1): False}


def guarded_starts(kernel: Kernel) -> Kernel:
    """Starts by select as guarded stores, in every block of a kernel."""
    body = _Starts(kernel.body).block(kernel.body)
    return kernel if body is kernel.body else dead_code(kernel.with_(body=body))


@dataclass(frozen=True, eq=False)
class _Start:
    """What a select gives after the first step: the contents, or a merge with them."""

    case: Value
    load: Op
    merge: Op | None = None


class _Starts:
    def __init__(self, body: Block):
        self.users = users_of(body)
        ops = list(walk(body))
        self.made = {v: op for op in ops for v in op.results}
        self.viewed = {op.operands[0] for op in ops if op.name in VIEWS}
        self.counters = {  # integers that are never negative
            index
            for op in ops
            if op.name == "pipeline"
            for index in Pipeline.of(op).ids
        }

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        replaced: dict[Value, Value] = {}
        block = self.joined(block)
        for n, op in enumerate(block.ops):
            later = self.stored_first(op)
            if later is not None:
                ops += self.always_added(op, later)
                continue
            start = self.started(block.ops, n)
            if start is None:
                ops.append(with_regions(op, [self.block(r) for r in op.regions]))
                continue
            b = Builder(op.loc)
            replaced[op.result] = self.guarded(b, op, start)
            ops += b.ops
        block = with_ops(block, ops)
        return substitute(block, replaced) if replaced else block

    def guarded(self, b: Builder, select: Op, start: _Start) -> Value:
        which, old, new = select.operands
        test, ref = self.scalar(which), start.load.operands[0]
        assert test is not None
        if start.case is new:
            test = b.op("not", test)
        store = Builder(select.loc)
        if start.merge is None:
            value = old if start.case is new else new
        else:
            value = store.constant(_nothing(start.merge), start.load.result.tile)
        index = start.load.attrs["index"]
        store.store(ref, value, index)
        b.emit("cond", b.cast(test, I32), regions=(Block(), store.block()))
        loaded = b.load(ref, index)
        if start.merge is None:
            return loaded
        pair = (loaded if v is start.load.result else v for v in start.merge.operands)
        return b.op(start.merge.name, *pair)

    def started(self, ops: Sequence[Op], n: int) -> _Start | None:
        """How the op at a position starts an accumulator, if it does."""
        select = ops[n]
        if select.name != "select_n" or len(select.operands) != 3:
            return None
        if self.scalar(select.operands[0]) is None:
            return None
        cases = select.operands[1:]
        for case, other in (cases, cases[::-1]):
            start = self.start(case, other)
            if start is None or start.load not in ops[:n]:
                continue
            load, ref = start.load, start.load.operands[0]
            on_chip = ref.ref.space not in MAIN_MEMORY and ref not in self.viewed
            unchanged = not any(uses(op, ref) for op in ops[ops.index(load) + 1 : n])
            if on_chip and unchanged:
                after = (op for op in ops[n + 1 :] if uses(op, ref))
                if covers(next(after, select), "store"):
                    return start
        return None

    def joined(self, block: Block) -> Block:
        """Two guards, of which one starts an accumulator, as one branch."""
        ops = list(block.ops)
        for one in block.ops:
            if not _is_guard(one) or one not in ops:  # in a branch already
                continue
            after = ops[ops.index(one) + 1 :]
            other = next((op for op in after if not is_pure(op)), one)
            if not _is_guard(other) or not self.exclude(one, other):
                continue
            regions = (other.regions[1], one.regions[1])
            both = other.with_(operands=one.operands, regions=regions)
            if self.stored_first(both) is not None:
                ops[ops.index(other)] = both
                ops.remove(one)
        same = len(ops) == len(block.ops)
        return block if same else Block(block.params, tuple(ops), block.yields)

    def exclude(self, one: Op, other: Op) -> bool:
        """Whether exactly one of two guards holds: only in the first step, or later."""
        a, b = (self.at_zero(op.operands[0]) for op in (one, other))
        return a is not None and b is not None and a == (b[0], not b[1])

    def at_zero(self, test: Value) -> tuple[Value, bool] | None:
        """A counter, and whether the test holds where it is zero, or where it is not;
        None: it tests something else."""
        op = self.made.get(test)
        if op is not None and op.name in ("cast", "not"):
            found = self.at_zero(op.operands[0])
            return found and (found[0], found[1] ^ (op.name == "not"))
        if op is None or op.name not in _MIRRORED:
            return None
        name, (index, limit) = op.name, op.operands
        if index not in self.counters:
            name, index, limit = _MIRRORED[name], limit, index
        known = _AT_ZERO.get((name, number_of(self.made, limit)))
        return None if known is None or index not in self.counters else (index, known)

    def stored_first(self, op: Op) -> int | None:
        """The branch that adds to an accumulator what the other one stores in it."""
        if op.name != "cond" or op.results or len(op.regions) != 2:
            return None
        for later, first in ((0, 1), (1, 0)):
            adding, storing = (op.regions[n].ops for n in (later, first))
            if [o.name for o in adding[::2]] != ["load", "store"] or len(adding) != 3:
                continue
            load, add, store = adding
            if (
                add.name not in MERGES
                or len(storing) != 1
                or not covers(storing[0], "store")
            ):
                continue
            value, ref = Access.of(storing[0]).value, storing[0].operands[0]
            same = ref is load.operands[0] is store.operands[0]
            same = same and ref.ref.space not in MAIN_MEMORY
            whole = covers(load, "load") and covers(store, "store")
            terms = {*add.operands} == {load.result, value}
            if same and whole and terms and Access.of(store).value is add.result:
                return later
        return None

    def always_added(self, op: Op, later: int) -> Sequence[Op]:
        load, add, store = op.regions[later].ops
        value = next(v for v in add.operands if v is not load.result)
        made = self.made.get(value)
        is_sum = made is not None and made.name == "dot" and add.name == "add"
        number = 0.0 if is_sum else _nothing(add)
        start = Builder(op.loc)
        zero = start.constant(number, value.tile)
        start.store(load.operands[0], zero, store.attrs["index"])
        regions = [Block(), start.block()]
        started = op.with_(regions=tuple(regions if later == 0 else regions[::-1]))
        return [started, load, add, store]

    def start(self, case: Value, other: Value) -> _Start | None:
        """A case that is the old contents, or these merged with the other case."""
        made = self.made.get(case)
        if made is None or len(self.users[case]) != 1:
            return None
        if covers(made, "load"):
            return _Start(case, made)
        if made.name not in MERGES or other not in made.operands:
            return None
        loads = [v for v in made.operands if v is not other]
        load = self.made.get(loads[0]) if loads else None
        if load is None or not covers(load, "load"):
            return None
        return _Start(case, load, made) if len(self.users[load.result]) == 1 else None

    def scalar(self, which: Value) -> Value | None:
        """The bool that decides for all elements alike."""
        op = self.made.get(which)
        if which.tile.shape and op is not None and op.name == "broadcast_in_dim":
            which = op.operands[0]
        return which if not which.tile.shape and which.tile.dtype.is_bool else None


def _nothing(merge: Op) -> int | float:
    """What changes nothing by a merge."""
    dtype = merge.result.tile.dtype
    if merge.name == "add" and dtype.is_float:
        return -0.0
    return neutral(MERGES[merge.name], dtype)


def _is_guard(op: Op) -> bool:
    """Whether an op is a branch that runs or does nothing."""
    if op.name != "cond" or op.results or len(op.regions) != 2:
        return False
    return not op.regions[0].ops
