"""scanned_rows: a loop loads and stores what it takes and makes part by part.

In: a loop over parts of tiles, as `lax.scan` writes it: each iteration takes its part
of a tile that was loaded whole (`dynamic_slice`), and puts its result into a tile that
the loop carries (`dynamic_update_slice`), which is stored whole after the loop. Out:
each iteration loads its part, and stores its result. No tile of the whole length
remains.

Proof. Taking: nothing writes the array, so loading later gives the same, and the
counter is such that the slice is not clamped. Making: the parts are disjoint and cover
the tile, which nothing but these updates and the store sees; so each element that was
stored is the one that its iteration made. Between an iteration and the store nothing
reads or writes the ref.
"""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Kernel, Op, Span, Value, full_index, walk
from pallasite.ir.rewrite import (
    dead_code,
    substitute,
    used_values,
    users_of,
    with_regions,
)
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.memory import MAIN_MEMORY, VIEWS, Roots, constant_inputs
from pallasite.passes.normal.canonicalize import canonicalize


def scanned_rows(kernel: Kernel) -> Kernel:
    """Loops that load and store by parts, instead of slicing and updating tiles."""
    names = {op.name for op in walk(kernel.body)}
    if kernel.level != "tile" or not names & {"dynamic_slice", "dynamic_update_slice"}:
        return kernel
    body = _Parts(kernel).block(kernel.body)
    if body is kernel.body:
        return kernel
    return canonicalize(dead_code(kernel.with_(body=body)))


class _Made(NamedTuple):
    """A tile that a loop makes part by part."""

    number: int  # among the values that the loop carries
    update: Op
    cast: Op | None  # of the whole tile
    store: Op


class _Parts:
    def __init__(self, kernel: Kernel):
        self.made = {v: op for op in walk(kernel.body) for v in op.results}
        self.users = users_of(kernel.body)
        self.constant, self.roots = constant_inputs(kernel), Roots(kernel)
        self.may_alias = bool(kernel.aliases)
        ops = list(walk(kernel.body))
        self.viewed = {op.operands[0] for op in ops if op.name in VIEWS}
        self.counts = dict[Value, range]()  # of the counters of loops

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        gone, replaced = set[Op](), dict[Value, Value]()
        for n, op in enumerate(block.ops):
            if op in gone:
                continue
            if op.name == "for":
                made = self.found(Loop.of(op), block.ops[n + 1 :])
                gone |= {o for each in made for o in (each.cast, each.store) if o}
                ops.append(self.loop(Loop.of(op), made))
                continue
            if op.name == "dynamic_slice" and self.is_loaded(op):
                b = Builder(op.loc)
                replaced[op.result] = self.loaded(op, b)
                ops += b.ops
                continue
            ops.append(with_regions(op, [self.block(r) for r in op.regions]))
        if len(ops) == len(block.ops) and all(map(is_, ops, block.ops)):
            return block
        return substitute(Block(block.params, tuple(ops), block.yields), replaced)

    # --- taking ---

    def is_loaded(self, op: Op) -> bool:
        """Whether a slice, as it is, is a part of an array that nothing writes."""
        load = self.made.get(op.operands[0])
        if load is None or not _is_whole(load, "load"):
            return False
        if self.roots.of(load.operands[0]) not in self.constant:
            return False
        whole, sizes = op.operands[0].tile.shape, op.attrs["sizes"]
        triples = zip(whole, sizes, op.operands[1:], strict=True)
        return all(self.is_inside(start, n - size) for n, size, start in triples)

    def is_inside(self, start: Value, last: int) -> bool:
        """Whether an index is known to be in 0 ... last."""
        counter, op = self.counts.get(start), self.made.get(start)
        if op is not None and op.name == "constant":
            return 0 <= op.attrs["value"] <= last
        return bool(counter) and counter[0] >= 0 and counter[-1] <= last

    def loaded(self, op: Op, b: Builder) -> Value:
        (ref,) = self.made[op.operands[0]].operands
        return b.load(
            ref, tuple(Span(None, n) for n in op.attrs["sizes"]), op.operands[1:]
        )

    # --- making ---

    def found(self, loop: Loop, after: Sequence[Op]) -> list[_Made]:
        """The tiles that a loop makes part by part and that are stored after it."""
        counts = self.count(loop)
        found = list[_Made]()
        if counts is None or self.may_alias:
            return found
        for number, carried in enumerate(loop.carried):
            made = self.stored(loop, number, after)
            if made is None or not self.covers(loop, made.update, counts):
                continue
            users, ref = self.users[carried], made.store.operands[0]
            inside = ref in used_values(loop.body)
            before = after[: after.index(made.store)]
            between = any(ref in used_values(Block((), (op,))) for op in before)
            if users == [made.update] and not inside and not between:
                found.append(made)
        return found

    def stored(self, loop: Loop, number: int, after: Sequence[Op]) -> "_Made | None":
        update = self.made.get(loop.yields[number])
        is_update = update is not None and update.name == "dynamic_update_slice"
        if update is None or not is_update or update not in loop.body.ops:
            return None
        if update.operands[0] is not loop.carried[number]:
            return None
        if self.users[update.result] != [loop.op]:
            return None
        value, cast = loop.results[number], None
        users = self.users[value]
        if len(users) == 1 and users[0].name == "cast":
            (cast,) = users
            value = cast.result
            users = self.users[value]
        if len(users) != 1 or users[0] not in after or not _is_whole(users[0], "store"):
            return None
        (store,) = users
        ref = store.operands[0]
        if store.operands[1] is not value or ref in self.viewed:
            return None
        if ref.ref.space in MAIN_MEMORY:
            return None
        return _Made(number, update, cast, store)

    def covers(self, loop: Loop, update: Op, counts: range) -> bool:
        """Whether the parts are disjoint and make up the whole."""
        whole, part = (v.tile.shape for v in update.operands[:2])
        pairs = zip(whole, part, strict=True)
        dims = [d for d, (n, size) in enumerate(pairs) if n != size]
        if len(dims) != 1:
            return False
        (d,) = dims
        starts = update.operands[2:]
        zero = all(self.is_inside(v, 0) for k, v in enumerate(starts) if k != d)
        size, n = part[d], whole[d]
        return zero and starts[d] is loop.index and counts == range(0, n, size)

    def count(self, loop: Loop) -> range | None:
        ops = [self.made.get(v) for v in loop.bounds]
        if any(op is None or op.name != "constant" for op in ops):
            return None
        first, limit, step = (op.attrs["value"] for op in ops if op is not None)
        return range(first, limit, step) if step else None

    # --- the loop ---

    def loop(self, loop: Loop, made: Sequence[_Made]) -> Op:
        counts = self.count(loop)
        if counts is not None:
            self.counts[loop.index] = counts
        stores = {each.update: each for each in made}
        body = self.block(self.storing(loop.body, stores))
        if body is loop.body:
            return loop.op
        gone = {each.number for each in made}
        kept = [n for n in range(len(loop.carried)) if n not in gone]
        params = (loop.index, *(loop.carried[n] for n in kept))
        new = loop.with_(
            inits=tuple(loop.inits[n] for n in kept),
            results=tuple(loop.results[n] for n in kept),
            body=Block(params, body.ops, tuple(body.yields[n] for n in kept)),
        )
        return new.to_op()

    def storing(self, block: Block, stores: Mapping[Op, _Made]) -> Block:
        """The body with stores in place of updates."""
        if not stores:
            return block
        b = Builder()
        for op in block.ops:
            each = stores.get(op)
            if each is None:
                b.ops.append(op)
                continue
            b.loc = each.store.loc
            _, part, *starts = op.operands
            if each.cast is not None:
                part = b.cast(part, each.cast.result.tile.dtype)
            index = tuple(Span(None, n) for n in part.tile.shape)
            b.store(each.store.operands[0], part, index, starts)
        return Block(block.params, tuple(b.ops), block.yields)


def _is_whole(op: Op, name: str) -> bool:
    """Whether an op loads or stores all of a ref."""
    if op.name != name or op.attrs.get("mask"):
        return False
    access = Access.of(op)
    return access.index == full_index(access.ref.ref.shape)
