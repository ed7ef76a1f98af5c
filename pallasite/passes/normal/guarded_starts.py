"""guarded_starts: accumulators are started by a guarded store, then always added to.

In: `acc = select(first, acc_ref[...], start)` in a step that then stores all of
`acc_ref`. Out: `if first: acc_ref[...] = start`, then a plain load, which is how other
authors write it and what analyses of carried state read.

Proof: where `first` holds, the load now gives `start`, which the select gave; elsewhere
memory is not touched and the load gives what it gave. Between the guarded store and the
store of all of the ref nothing else reads it, so nobody sees that its contents changed
earlier.

Or in: `if first: acc_ref[...] = x`, else `acc_ref[...] += x`. Out: `if first:
acc_ref[...] = 0`, then `acc_ref[...] += x`. Proof: 0 + x is x. For floats this holds
with -0.0; a matmul is itself a sum that starts at zero, so it is added to 0.0.
"""

from collections.abc import Sequence
from operator import is_

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, full_index, walk
from pallasite.ir.rewrite import dead_code, substitute, users_of, with_regions
from pallasite.ir.types import I32
from pallasite.passes.analysis.memory import MAIN_MEMORY, VIEWS


def guarded_starts(kernel: Kernel) -> Kernel:
    """Starts by select as guarded stores, in every block of a kernel."""
    body = _Starts(kernel.body).block(kernel.body)
    return kernel if body is kernel.body else dead_code(kernel.with_(body=body))


class _Starts:
    def __init__(self, body: Block):
        self.users = users_of(body)
        ops = list(walk(body))
        self.made = {v: op for op in ops for v in op.results}
        self.viewed = {op.operands[0] for op in ops if op.name in VIEWS}

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        replaced: dict[Value, Value] = {}
        for n, op in enumerate(block.ops):
            later = self.stored_first(op)
            if later is not None:
                ops += self.always_added(op, later)
                continue
            load = self.started(block.ops, n)
            if load is None:
                ops.append(with_regions(op, [self.block(r) for r in op.regions]))
                continue
            b = Builder(op.loc)
            replaced[op.result] = self.guarded(b, op, load)
            ops += b.ops
        if not replaced and all(map(is_, ops, block.ops)):
            return block
        return substitute(Block(block.params, tuple(ops), block.yields), replaced)

    def guarded(self, b: Builder, select: Op, load: Op) -> Value:
        which, old, new = select.operands
        test, ref = self.scalar(which), load.operands[0]
        assert test is not None
        if old is load.result:
            start = new
        else:
            test, start = b.op("not", test), old
        store = Builder(select.loc)
        store.store(ref, start)
        b.emit("cond", b.cast(test, I32), regions=(Block(), store.block()))
        return b.load(ref)

    def started(self, ops: Sequence[Op], n: int) -> Op | None:
        """The load of an accumulator that the op at a position starts, if it does."""
        select = ops[n]
        if select.name != "select_n" or len(select.operands) != 3:
            return None
        if self.scalar(select.operands[0]) is None:
            return None
        for case in select.operands[1:]:
            load = self.made.get(case)
            if load is None or not _is_whole(load, "load") or load not in ops[:n]:
                continue
            ref = load.operands[0]
            on_chip = ref.ref.space not in MAIN_MEMORY and ref not in self.viewed
            unchanged = not any(_uses(op, ref) for op in ops[ops.index(load) + 1 : n])
            if on_chip and unchanged and len(self.users[case]) == 1:
                after = (op for op in ops[n + 1 :] if _uses(op, ref))
                if _is_whole(next(after, select), "store"):
                    return load
        return None

    def stored_first(self, op: Op) -> int | None:
        """The branch that adds to an accumulator what the other one stores in it."""
        if op.name != "cond" or op.results or len(op.regions) != 2:
            return None
        for later, first in ((0, 1), (1, 0)):
            adding, storing = (op.regions[n].ops for n in (later, first))
            if [o.name for o in adding] != ["load", "add", "store"]:
                continue
            load, add, store = adding
            if len(storing) != 1 or not _is_whole(storing[0], "store"):
                continue
            value, ref = Access.of(storing[0]).value, storing[0].operands[0]
            same = ref is load.operands[0] is store.operands[0]
            same = same and ref.ref.space not in MAIN_MEMORY
            whole = _is_whole(load, "load") and _is_whole(store, "store")
            terms = {*add.operands} == {load.result, value}
            if same and whole and terms and Access.of(store).value is add.result:
                return later
        return None

    def always_added(self, op: Op, later: int) -> Sequence[Op]:
        load, add, store = op.regions[later].ops
        value = next(v for v in add.operands if v is not load.result)
        made = self.made.get(value)
        is_sum = made is not None and made.name == "dot"
        zero = (0.0 if is_sum else -0.0) if value.tile.dtype.is_float else 0
        start = Builder(op.loc)
        start.store(load.operands[0], start.constant(zero, value.tile))
        regions = [Block(), start.block()]
        started = op.with_(regions=tuple(regions if later == 0 else regions[::-1]))
        return [started, load, add, store]

    def scalar(self, which: Value) -> Value | None:
        """The bool that decides for all elements alike."""
        op = self.made.get(which)
        if which.tile.shape and op is not None and op.name == "broadcast_in_dim":
            which = op.operands[0]
        return which if not which.tile.shape and which.tile.dtype.is_bool else None


def _is_whole(op: Op, name: str) -> bool:
    """Whether an op loads or stores all of a ref."""
    if op.name != name or op.attrs.get("mask"):
        return False
    access = Access.of(op)
    return access.index == full_index(access.ref.ref.shape)


def _uses(op: Op, ref: Value) -> bool:
    return any(ref in inner.operands for inner in walk(Block((), (op,))))
