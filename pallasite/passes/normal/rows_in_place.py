"""rows_in_place: tiles that a loop uses or makes slice by slice stay in memory.

In: `lax.scan` over a loaded tile, whose results are stored: a load of everything, a
loop with `dynamic_slice` of it, a carried tile with `dynamic_update_slice`, a store of
everything. Out: loads and stores of slices in the loop, which is how the same loop is
written by `fori_loop` and refs. Nothing then holds whole tiles on chip a second time,
and no chip can index registers.

Proof. Loads: nothing in the kernel writes the array, so a later load of a part gives
what the whole had there; both clamp starts into the same range. Stores: the carried
tile is used only to be updated, and what it becomes only for the store; from the loop
to the store nothing else accesses the memory, so nobody sees that parts arrive earlier.
Where the loop may not store every element, the initial tile is stored before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Index, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import dead_code, substitute, users_of, with_regions
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.memory import Roots, constant_inputs


def rows_in_place(kernel: Kernel) -> Kernel:
    """Loads and stores of slices in loops instead of slices of tiles."""
    names = {op.name for op in walk(kernel.body)}
    if not names & {"dynamic_slice", "dynamic_update_slice"} or "for" not in names:
        return kernel
    found = _InPlace(kernel)
    body = found.block(kernel.body)
    return kernel if body is kernel.body else dead_code(kernel.with_(body=body))


@dataclass(frozen=True, eq=False)
class _Built:
    """A tile that a loop carries and updates, and the store of what it becomes."""

    number: int  # of the carried value
    update: Op
    store: Op
    init: Value
    is_complete: bool  # every element is updated


class _InPlace:
    def __init__(self, kernel: Kernel):
        self.roots, self.constant = Roots(kernel), constant_inputs(kernel)
        self.users = users_of(kernel.body)
        ops = list(walk(kernel.body))
        self.made = {v: op for op in ops for v in op.results}
        looped = (op for op in ops if op.name in ("for", "while"))
        self.in_loops = {o for op in looped for r in op.regions for o in walk(r)}

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        stored = set[Op]()
        mapping: dict[Value, Value] = {}
        changed = False
        for n, op in enumerate(block.ops):
            if op in stored:
                continue
            part = self.part_of(op)
            built = self.built(block.ops, n) if op.name == "for" else []
            if part is not None:
                b = Builder(op.loc)
                mapping[op.result] = self.load(b, part, op)
                ops += b.ops
            elif built:
                stored |= {each.store for each in built}
                ops += self.stores_first(built)
                op = self.loop(Loop.of(op), built)
                ops.append(with_regions(op, [self.block(r) for r in op.regions]))
            else:
                new = with_regions(op, [self.block(r) for r in op.regions])
                ops.append(new)
                changed |= new is not op
                continue
            changed = True
        if not changed:
            return block
        return substitute(Block(block.params, tuple(ops), block.yields), mapping)

    # --- loads ---

    def part_of(self, op: Op) -> Op | None:
        """The load of a tile of which an op in a loop takes a slice."""
        load = self.made.get(op.operands[0]) if op.name == "dynamic_slice" else None
        if load is None or load.name != "load" or op not in self.in_loops:
            return None
        access = Access.of(load)
        if self.roots.of(access.ref) not in self.constant:
            return None
        if access.mask is not None or not _is_whole(access):
            return None
        if not all(self.is_part(user) for user in self.users[load.result]):
            return None
        return load

    def is_part(self, op: Op) -> bool:
        return op.name == "dynamic_slice" and op in self.in_loops

    def load(self, b: Builder, load: Op, part: Op) -> Value:
        access = Access.of(load)
        index, starts = _part(access, part.attrs["sizes"], part.operands[1:])
        return b.load(access.ref, index, starts)

    # --- stores ---

    def built(self, ops: Sequence[Op], n: int) -> list[_Built]:
        """The tiles that a loop makes for stores in the block that it is in."""
        loop = Loop.of(ops[n])
        found: list[_Built] = []
        for number, carried in enumerate(loop.carried):
            update = self.made.get(loop.yields[number])
            result, init = loop.results[number], loop.inits[number]
            if update is None or update.name != "dynamic_update_slice":
                continue
            alone = self.users[carried] == [update] and update in loop.body.ops
            alone &= update.operands[0] is carried and update.operands[1] is not carried
            alone &= self.users[update.result] == [loop.op]  # which yields it
            users = self.users.get(result, [])
            if not alone or len(users) != 1:
                continue
            store = users[0]
            if store in ops[n + 1 :] and self.can_store(ops, n, store, result):
                complete = _is_complete(loop, update, self.made)
                found.append(_Built(number, update, store, init, complete))
        refs = [self.roots.of(each.store.operands[0]) for each in found]
        return found if len(set(refs)) == len(refs) else []

    def can_store(self, ops: Sequence[Op], n: int, store: Op, result: Value) -> bool:
        """Whether all of a ref is stored that nothing else accesses meanwhile."""
        if store.name != "store" or store.attrs["mask"]:
            return False
        access = Access.of(store)
        ref = access.ref
        if access.value is not result or not _is_whole(access):
            return False
        defined = self.made.get(ref)
        if defined is not None and defined in ops[n:]:
            return False
        root = self.roots.of(ref)
        for op in ops[n : ops.index(store)]:
            touched = self.roots.touched(op)
            if touched is None or root in touched[0] | touched[1]:
                return False
        return True

    def stores_first(self, built: Sequence[_Built]) -> list[Op]:
        b = Builder()
        for each in built:
            if not each.is_complete:
                b.loc = each.store.loc
                access = Access.of(each.store)
                b.store(access.ref, each.init, access.index)
        return b.ops

    def loop(self, loop: Loop, built: Sequence[_Built]) -> Op:
        """The loop without the carried tiles, with stores where they were updated."""
        dropped = {each.number for each in built}
        updates = {each.update: each for each in built}
        ops: list[Op] = []
        for op in loop.body.ops:
            if op not in updates:
                ops.append(op)
                continue
            access, value = Access.of(updates[op].store), op.operands[1]
            b = Builder(op.loc)
            index, starts = _part(access, value.tile.shape, op.operands[2:])
            b.store(access.ref, value, index, starts)
            ops += b.ops
        keep = [n for n in range(len(loop.carried)) if n not in dropped]
        params = (loop.index, *(loop.carried[n] for n in keep))
        body = Block(params, tuple(ops), tuple(loop.yields[n] for n in keep))
        inits = tuple(loop.inits[n] for n in keep)
        results = tuple(loop.results[n] for n in keep)
        return loop.with_(inits=inits, body=body, results=results).to_op()


def _is_whole(access: Access) -> bool:
    """Whether an index has elements and whole dimensions only, fixed ones."""
    return all(
        entry.start is not None if isinstance(entry, At) else entry == Span(0, n)
        for n, entry in zip(access.ref.ref.shape, access.index, strict=True)
    )


def _part(
    access: Access, sizes: Sequence[int], starts: Sequence[Value]
) -> tuple[Index, list[Value]]:
    """Where in a ref a slice of what is accessed is."""
    index: list[At | Span] = []
    operands: list[Value] = []
    slices = iter(zip(sizes, starts, strict=True))
    for n, entry in zip(access.ref.ref.shape, access.index, strict=True):
        if isinstance(entry, At):
            index.append(entry)
            continue
        size, start = next(slices)
        index.append(Span(0 if size == n else None, size))
        operands += [] if size == n else [start]
    return tuple(index), operands


def _is_complete(loop: Loop, update: Op, made: dict[Value, Op]) -> bool:
    """Whether the iterations update every row of the tile, one by one."""
    shape, sizes = update.result.tile.shape, update.operands[1].tile.shape
    parts = [d for d, n in enumerate(shape) if sizes[d] != n]
    if len(parts) != 1 or sizes[parts[0]] != 1:
        return not parts
    if update.operands[2 + parts[0]] is not loop.index:
        return False
    known = [made[v].attrs.get("value") if v in made else None for v in loop.bounds]
    return known == [0, shape[parts[0]], 1]
