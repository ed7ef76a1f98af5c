"""Residuals: what a forward kernel keeps so that the backward need not run it again.

The first stage of a reverse computes what the others need from the program (in
attention, the maximum and sum of each row) from the operands alone, by running all of
it. `keep` splits such a stage in two: the program itself, with these values as extra
results, and a stage that loads them. A value from which a result was computed by a
division, such as an accumulator in attention, is recovered from the result instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pallasite.autodiff.backward_stages import Slice, rows_axis, save_block, saved_ref
from pallasite.autodiff.backward_windows import only
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Op, Value, walk
from pallasite.ir.rewrite import clone, producers_of, substitute
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.per_program import Program, main_refs

INVERTIBLE = ("cast", "reshape", "transpose", "div", "mul")
WRITES = ("store", "atomic_rmw")


def _costly(ops: Iterable[Op]) -> int:
    """How many loops and matmuls there are."""
    inside = walk(Block((), tuple(ops)))
    return sum(op.name in ("for", "while", "dot") for op in inside)


@dataclass(frozen=True)
class Kept:
    """A stage of a reverse, split in two."""

    forward: Program  # writes the kernel's results and `refs`
    stage: Program  # reads them, and the cotangents of the results
    refs: tuple[Value, ...]


def keep(
    stage: Program, seeds: Sequence[Value], results: Sequence[Value]
) -> Kept | None:
    """Split a stage; None if it is not the program followed by something.

    Args:
        stage: code that stores the program's results and what other stages need.
        seeds: the refs of the cotangents of the results.
        results: the program's results.
    """
    return _Keep(stage, seeds, results).run()


class _Keep:
    def __init__(
        self, stage: Program, seeds: Sequence[Value], results: Sequence[Value]
    ):
        self.program, self.results = stage, results
        self.body, self.roots = stage.body, Roots(stage.body)
        self.made = producers_of(self.body)
        self.later = self.depends_on(seeds)
        self.stores = [op for op in self.body.ops if op.name == "store"]
        self.repeated = _costly(op for op in self.body.ops if op in self.later)

    def run(self) -> Kept | None:
        early = [op for op in self.body.ops if op not in self.later]
        inside = [op for op in walk(Block((), tuple(early))) if op.name in WRITES]
        written = self.roots.written(self.body)
        if any(op not in self.stores for op in inside):
            return None
        if not {*written}.issuperset(self.results):
            return None
        slicer = Slice(self.body.ops)
        kept = slicer.to_save([v for v in self.handed_on() if not v.is_ref])
        found = {v: way for v in kept if (way := self.way_to_result(v)) is not None}
        # What is a result itself may be a divisor of others.
        ways = dict(sorted(found.items(), key=lambda item: len(item[1].ops)))
        loads = [v for v in kept if v not in ways]
        known = [*loads]
        for value, way in ways.items():
            if not way.is_cheap(slicer, known):
                return None
            known.append(value)
        ids, after, b = self.body.params, Builder(), Builder()
        loaded: dict[Value, Value] = {}
        axis = rows_axis(self.body)
        refs = [saved_ref(v, self.program.sizes, axis) for v in loads]
        for value, ref in zip(loads, refs, strict=True):
            after.store(save_block(after, ref, ids, value, "out", axis), value)
            loaded[value] = b.load(save_block(b, ref, ids, value, "in", axis))
        for value, way in ways.items():
            loaded[value] = way.undone(b, slicer, loaded)
        rest = self.with_known(b, loaded)
        early = [
            root
            for op in self.stores
            if (root := self.roots.of(op.operands[0])) not in self.results
            and op not in self.later
        ]
        forward = Block(ids, (*self.body.ops, *after.ops))
        mine = [*self.results, *early, *refs]
        others = [r for r in written if r not in mine]
        first = only(self.program.with_body(forward), mine)
        second = only(self.program.with_body(rest), others)
        # The program must not have to run again after all.
        if _costly(second.body.ops) > self.repeated:
            return None
        if not main_refs(second.body):
            return None
        return Kept(first, second, (*early, *refs))

    def depends_on(self, refs: Sequence[Value]) -> set[Value | Op]:
        """Values and ops that depend on some refs."""
        found: set[Value | Op] = set(refs)
        for op in self.body.ops:
            inside = [*walk(Block((), (op,)))]
            used = [v for o in inside for v in o.operands]
            used += [v for o in inside for r in o.regions for v in r.yields]
            if any(v in found for v in used):
                found |= {op, *op.results}
        return found

    def handed_on(self) -> list[Value]:
        """What later ops use from the program."""
        found: dict[Value, None] = {}
        for op in self.body.ops:
            if op not in self.later:
                continue
            for inner in walk(Block((), (op,))):
                yields = (v for region in inner.regions for v in region.yields)
                for value in (*inner.operands, *yields):
                    if value in self.made and value not in self.later:
                        found[value] = None
        return list(found)

    def with_known(self, b: Builder, loaded: Mapping[Value, Value]) -> Block:
        body = substitute(self.body, loaded)
        return Block(self.body.params, (*b.ops, *body.ops), body.yields)

    def way_to_result(self, value: Value) -> "_Way | None":
        """How a result was computed from a value, if that is invertible."""
        for op in self.stores:
            access, view = Access.of(op), self.made.get(op.operands[0])
            root = self.roots.of(op.operands[0])
            if root not in self.results or access.mask is not None or view is None:
                continue
            if view.name != "block_view":
                continue
            ops = self.steps(value, access.value)
            if ops is not None and covers_whole(access.ref.ref.shape, access.index):
                return _Way(access, view, ops)
        return None

    def steps(self, source: Value, stored: Value | None) -> list[Op] | None:
        """The ops from one value to another, if all of them are invertible."""
        if stored is source:
            return []
        op = self.made.get(stored) if stored is not None else None
        if op is None or op.name not in INVERTIBLE:
            return None
        if not all(v.tile.dtype.is_float for v in (*op.operands, op.result)):
            return None
        for place in range(2 if op.name == "mul" else 1):
            before = self.steps(source, op.operands[place])
            if op.name == "mul" and not self.is_reciprocal(op.operands[1 - place]):
                continue
            if before is not None:
                return [*before, _first(op, place)]
        return None

    def is_reciprocal(self, value: Value) -> bool:
        """Whether a factor is a normaliser such as `1 / sum`, so never zero."""
        op = self.made.get(value)
        if op is None:
            return False
        if op.name == "constant":
            return op.attrs["value"] != 0
        if op.name == "select_n":
            return all(map(self.is_reciprocal, op.operands[1:]))
        if op.name in ("div", "broadcast_in_dim", "reshape"):
            return self.is_reciprocal(op.operands[0])
        return op.name == "integer_pow" and op.attrs["y"] < 0


def _first(op: Op, place: int) -> Op:
    """A product with one of its operands first."""
    x = op.operands[place]
    others = [v for n, v in enumerate(op.operands) if n != place]
    return op.with_(operands=(x, *others))


@dataclass(frozen=True, eq=False)
class _Way:
    """How a result was computed from a value: `INVERTIBLE` ops, then a store."""

    stored: Access
    view: Op
    ops: list[Op]

    @property
    def needed(self) -> list[Value]:
        """Divisors and factors, then what chooses the block and the place in it."""
        others = [op.operands[1] for op in self.ops if len(op.operands) > 1]
        return [*others, *self.view.operands[1:], *self.stored.index_operands]

    def is_cheap(self, slicer: Slice, known: Sequence[Value]) -> bool:
        """Whether all of that is cheap, given the known values."""
        return not any(map(slicer.is_costly, slicer.closure(self.needed, known)))

    def undone(self, b: Builder, slicer: Slice, known: Mapping[Value, Value]) -> Value:
        """The value, recovered from the result; past the edge: zero."""
        ops = slicer.closure(self.needed, list(known))
        again = clone(Block((), ops, tuple(self.needed)), dict(known))
        b.ops += again.ops
        array, *numbers = self.view.operands
        count = len(again.yields) - len(self.stored.index_operands)
        pending = list(again.yields[: count - len(numbers)])
        numbers, starts = again.yields[len(pending) : count], again.yields[count:]
        window = replace(self.view.attrs["window"], mode="in", fill=0)
        block = b.op("block_view", array, *numbers, window=window)
        value = b.load(block, self.stored.index, starts)
        for op in reversed(self.ops):
            x = op.operands[0].tile
            if op.name == "cast":
                value = b.cast(value, x.dtype)
            elif op.name == "reshape":
                value = b.op("reshape", value, shape=x.shape)
            elif op.name == "transpose":
                perm = tuple(op.attrs["perm"].index(d) for d in range(x.rank))
                value = b.op("transpose", value, perm=perm)
            elif op.name == "mul":
                value = b.div(value, pending.pop())
            else:
                value = b.mul(value, pending.pop())
        return value
