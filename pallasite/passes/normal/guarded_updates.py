"""guarded_updates: memory that only one branch changes is loaded and stored in it.

In: `old = ref[...]`, a branch that gives `old` or something new, and a store of all of
`ref` with what it gave, as carried values of a loop are once it is a grid axis. Out: a
branch that loads and stores, which is how authors write it (`pl.when`) and what
analyses of steps read (`step_sums.py`).

Proof: where the branch is not taken, memory keeps what the store would have put back.
Where it is taken, it loads what was loaded before, because nothing stores to the ref in
between, and stores the same; nothing reads or stores the ref between the branch and the
old place of the store.
"""

from collections.abc import Sequence
from operator import is_

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import clone, dead_code, users_of, uses, with_regions
from pallasite.passes.analysis.carried import covers
from pallasite.passes.analysis.memory import MAIN_MEMORY, VIEWS


def guarded_updates(kernel: Kernel) -> Kernel:
    """Loads and stores of what one branch changes, in that branch."""
    body = _Updates(kernel.body).block(kernel.body)
    return kernel if body is kernel.body else dead_code(kernel.with_(body=body))


class _Updates:
    def __init__(self, body: Block):
        self.users = users_of(body)
        ops = list(walk(body))
        self.viewed = {op.operands[0] for op in ops if op.name in VIEWS}

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        dropped = set[Op]()
        for n, op in enumerate(block.ops):
            stores = self.stores(block.ops, n)
            if op in dropped:
                continue
            if stores:
                dropped.update(stores)
                op = self.guarded(block.ops, op, stores)
            ops.append(with_regions(op, [self.block(r) for r in op.regions]))
        if len(ops) == len(block.ops) and all(map(is_, ops, block.ops)):
            return block
        return Block(block.params, tuple(ops), block.yields)

    def stores(self, ops: Sequence[Op], n: int) -> list[Op]:
        """The stores of what a branch gives, if all of it goes where it was loaded."""
        cond = ops[n]
        if cond.name != "cond" or not cond.results:
            return []
        idle = self.idle(ops[:n], cond)
        stores = [self.store_of(ops, n, result) for result in cond.results]
        found = [store for store in stores if store is not None]
        if idle is None or len(found) < len(stores):
            return []
        pairs = zip(idle, found, strict=True)
        same = all(load.operands[0] is store.operands[0] for load, store in pairs)
        refs = {store.operands[0] for store in found}
        return found if same and len(refs) == len(found) else []

    def store_of(self, ops: Sequence[Op], n: int, result: Value) -> Op | None:
        """The store of a result to all of a ref that nothing uses before it."""
        users = self.users[result]
        if len(users) != 1 or not covers(users[0], "store"):
            return None
        (store,) = users
        ref = store.operands[0]
        on_chip = ref.ref.space not in MAIN_MEMORY and ref not in self.viewed
        if not on_chip or store not in ops[n:] or Access.of(store).value is not result:
            return None
        between = ops[n + 1 : ops.index(store)]
        return None if any(uses(op, ref) for op in between) else store

    def idle(self, before: Sequence[Op], cond: Op) -> list[Op] | None:
        """The loads whose results one of two branches gives without doing anything."""
        made = {v: op for op in before for v in op.results}
        for region in cond.regions if len(cond.regions) == 2 else ():
            loads = [made.get(v) for v in region.yields]
            if not region.ops and all(o and covers(o, "load") for o in loads):
                found = [op for op in loads if op is not None]
                if all(self.is_unchanged(before, load) for load in found):
                    return found
        return None

    def is_unchanged(self, before: Sequence[Op], load: Op) -> bool:
        """Whether nothing stores to what a load read before the branch."""
        ref = load.operands[0]
        after = before[before.index(load) + 1 :]
        return not any(uses(op, ref) and not covers(op, "load") for op in after)

    def guarded(self, ops: Sequence[Op], cond: Op, stores: Sequence[Op]) -> Op:
        loads = self.idle(ops[: ops.index(cond)], cond)
        assert loads is not None
        regions = list[Block]()
        old = tuple(load.result for load in loads)
        for region in cond.regions:
            if not region.ops and region.yields == old:
                regions.append(Block())
                continue
            b = Builder(cond.loc)
            new = {}
            for load in loads:
                new[load.result] = b.load(load.operands[0], load.attrs["index"])
            inner = clone(region, new)
            b.ops += inner.ops
            for store, value in zip(stores, inner.yields, strict=True):
                b.loc = store.loc
                b.store(store.operands[0], value, store.attrs["index"])
            regions.append(b.block())
        return cond.with_(results=(), regions=tuple(regions))
