"""Whether outputs are sums over a grid axis: zeroed at its first step, then added to.

`find_sums(op, info, axis, blocks)` analyses a pipeline's body. Some refs carry their
contents along the axis: the given output blocks and scratch. Each must be one of

- an accumulator: zeroed at the first step of the axis, otherwise only added to, with
  values that depend on none of these refs;
- a copy: stored after the accumulation, as a linear function of accumulators.

Then parts of the axis can run independently and their results can be added.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from pallasite.ir.nodes import Access, Block, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import producers_of, users_of
from pallasite.ir.roles import Cond, Pipeline, filling, number_of
from pallasite.passes.analysis.carried import carried_from, covers_whole
from pallasite.passes.analysis.grid import GridInfo

FIRST, LAST = "first", "last"
# Linear in the first operand, with the others fixed.


@dataclass(frozen=True)
class Sums:
    """What `find_sums` found.

    `reason` says what is not a sum, None if all are. `gates` are the comparisons of
    the axis' index with its first or last step that guard the zeroing and the copying.
    """

    reason: str | None
    gates: dict[Value, str] = field(default_factory=dict[Value, str])


class _NoSum(Exception):
    pass


def find_sums(op: Op, info: GridInfo, axis: int, blocks: Set[Value]) -> Sums:
    """Analyse a pipeline.

    Args:
        op: the pipeline.
        info: its grid analysis.
        axis: the grid axis; its size is known.
        blocks: block refs of the outputs that do not vary along the axis.
    """
    search = _Search(op, info, axis, blocks)
    try:
        search.run()
    except _NoSum as found:
        return Sums(str(found))
    return Sums(None, search.used_gates)


@dataclass
class _Kept:
    """The accesses to one ref that carries its contents along the axis."""

    name: str
    zeroed: list[int] = field(default_factory=list[int])
    added: list[int] = field(default_factory=list[int])
    copied: list[int] = field(default_factory=list[int])
    sources: set[Value] = field(default_factory=set[Value])


@dataclass(frozen=True)
class _Taint:
    """A value computed from carried refs: linearly, or as a load plus something."""

    sources: frozenset[Value]
    load: Op | None = None  # the load itself, or the one that an addition adds to
    is_sum: bool = False


@dataclass(frozen=True)
class _Place:
    """The position of an op in the body."""

    gates: frozenset[str] = frozenset()
    in_loop: bool = False


class _Search:
    def __init__(self, op: Op, info: GridInfo, axis: int, blocks: Set[Value]):
        pipeline = Pipeline.of(op)
        grid, ids, self.body = pipeline.grid, pipeline.ids, pipeline.body
        size = grid[axis]
        assert size is not None
        self.id, self.last = ids[axis], size - 1
        self.producers = producers_of(self.body)
        self.uses = users_of(self.body)
        self.kept = {r: _Kept(r.name or "an output") for r in blocks}
        for ref in self.scratch():
            if carried_from(self.body, ref, ids, grid) <= axis:
                self.kept[ref] = _Kept(ref.name or "scratch")
        shown = zip(pipeline.blocks, info.windows, strict=True)
        self.still = {ref for ref, w in shown if w.mode == "in" and axis not in w.axes}
        self.taints: dict[Value, _Taint] = {}
        self.used_gates: dict[Value, str] = {}
        self.clock = 0

    def scratch(self) -> Iterable[Value]:
        """Refs captured by the body, other than arrays."""
        inside = {v for o in walk(self.body) for v in o.results} | set(self.body.params)
        inside |= {v for o in walk(self.body) for r in o.regions for v in r.params}
        used = (v for o in walk(self.body) for v in o.operands if v.is_ref)
        spaces = ("any", "hbm", "host", "smem")
        return [
            v
            for v in dict.fromkeys(used)
            if v not in inside
            and (
                v.ref.space not in spaces or any(o.name != "load" for o in self.uses[v])
            )
        ]

    def run(self) -> None:
        self.block(self.body, _Place())
        for kept in self.kept.values():
            self.check(kept)
        for gate in self.used_gates:
            self.check_gate(gate)

    def check(self, kept: _Kept) -> None:
        name = kept.name
        if kept.added and kept.copied:
            raise _NoSum(f"{name} is accumulated into and also overwritten")
        if kept.added and not kept.zeroed:
            raise _NoSum(f"{name} is not set to zero at the first step")
        if kept.added and max(kept.zeroed) > min(kept.added):
            raise _NoSum(f"{name} is accumulated into before it is set to zero")
        if not kept.added and not kept.copied:
            raise _NoSum(f"{name} is not written as a sum")
        for source in kept.sources:
            adds = self.kept[source].added
            if not adds or max(adds) > min(kept.copied):
                raise _NoSum(f"{name} is not copied from a finished sum")

    def check_gate(self, gate: Value) -> None:
        """A gate may guard only zeroing and copying."""
        for op in self.uses.get(gate, ()):
            if op.name in ("cast", "and"):
                self.check_gate(op.result)
            elif op.name != "cond" or not self.guards_sums(op):
                raise _NoSum("its first or last step does something besides the sum")

    def guards_sums(self, cond: Op) -> bool:
        inside = [o for r in cond.regions for o in walk(r)]
        changes = [o for o in inside if table()[o.name].effect is Effect.WRITE]
        return not cond.results and all(
            o.name in ("store", "cond")
            and (o.name == "cond" or o.operands[0] in self.kept)
            for o in changes
        )

    # --- the walk ---

    def block(self, block: Block, place: _Place) -> None:
        for op in block.ops:
            self.clock += 1
            self.step(op, place)
        for value in block.yields:
            if value in self.taints:
                self.refuse(self.taints[value])

    def step(self, op: Op, place: _Place) -> None:
        refs = [v for v in op.operands if v in self.kept]
        if op.name == "load" and refs:
            self.taints[op.result] = _Taint(frozenset(refs), op)
        elif op.name == "store" and refs:
            self.store(op, place)
        elif op.name == "atomic_rmw" and op.operands[0] in self.kept:
            self.atomic(op, place)
        elif refs:
            raise _NoSum(f"{self.kept[refs[0]].name} is used by {op.name}")
        elif any(v in self.taints for v in op.operands):
            self.compute(op)
        for number, region in enumerate(op.regions):
            self.block(region, self.place_in(op, number, place))

    def place_in(self, op: Op, number: int, place: _Place) -> _Place:
        if op.name != "cond":
            return _Place(place.gates, True)
        if number != 1 or len(op.regions) != 2:
            return place
        gates = self.gates(op.operands[0])
        return _Place(place.gates | frozenset(gates.values()), place.in_loop)

    def gates(self, value: Value) -> dict[Value, str]:
        """Comparisons with the axis' ends that must hold for `value` to hold."""
        op = self.producers.get(value)
        if op is None:
            return {}
        if op.name == "cast":
            return self.gates(op.operands[0])
        if op.name == "and":
            return self.gates(op.operands[0]) | self.gates(op.operands[1])
        if op.name == "eq" and self.id in op.operands:
            (other,) = [v for v in op.operands if v is not self.id] or [self.id]
            number = number_of(self.producers, other)
            if number == 0:
                return {value: FIRST}
            if number == self.last:
                return {value: LAST}
        return {}

    def compute(self, op: Op) -> None:
        """An op on values computed from carried refs."""
        taints = [self.taints.get(v) for v in op.operands]
        known = [t for t in taints if t is not None]
        sources = frozenset[Value]().union(*(t.sources for t in known))
        one = len(known) == 1
        if op.name == "add" and one and self.used_once(op, taints):
            self.taints[op.result] = _Taint(sources, known[0].load, True)
        elif any(t.is_sum for t in known) or len(op.results) != 1:
            self.refuse(known[0])
        elif (op.name in ("add", "sub") and not one) or self.is_linear(op, taints):
            self.taints[op.result] = _Taint(sources)
        else:
            self.refuse(known[0])

    def used_once(self, op: Op, taints: Sequence[_Taint | None]) -> bool:
        """Whether the load that an addition adds to has no other use."""
        pairs = zip(op.operands, taints, strict=True)
        return all(len(self.uses[v]) == 1 for v, taint in pairs if taint is not None)

    def is_linear(self, op: Op, taints: Sequence[_Taint | None]) -> bool:
        """Whether an op is linear in its one tainted operand, the same at every step.

        Rounding to a narrower float counts as linear: parts are then rounded before
        they are added, as XLA does when it partitions a matmul.
        """
        pairs = list(zip(op.operands, taints, strict=True))
        others = [v for v, taint in pairs if taint is None]
        if len(others) != len(pairs) - 1 or any(map(self.varies, others)):
            return False
        if op.name == "cast":
            return op.result.tile.dtype.is_float
        if op.name == "dot":
            return False  # it would be computed for each part
        tainted = next(n for n, taint in enumerate(taints) if taint is not None)
        return tainted in table()[op.name].linear

    def varies(self, value: Value) -> bool:
        """Whether a value may differ between steps of the axis."""
        op = self.producers.get(value)
        if op is None:
            return value is self.id or value not in self.body.params
        if op.regions:
            return True
        if op.name == "load" and op.operands[0] not in self.still:
            return True
        return any(self.varies(v) for v in op.operands if not v.is_ref)

    def refuse(self, taint: _Taint) -> None:
        name = self.kept[min(taint.sources, key=list(self.kept).index)].name
        raise _NoSum(f"{name} carries values along it that are not a plain sum")

    # --- stores ---

    def store(self, op: Op, place: _Place) -> None:
        access = Access.of(op)
        if op.operands[0] not in self.kept or access.value is None:
            raise _NoSum(
                f"{op.operands[0].name} is stored together with an accumulated value"
            )
        kept = self.kept[access.ref]
        taint = self.taints.get(access.value)
        if taint is None and filling(self.producers, access.value) == 0:
            self.zero(kept, access, place)
        elif taint is not None and taint.is_sum and self.adds_to(access, taint):
            if place.gates:
                raise _NoSum(
                    f"{kept.name} is accumulated into only at its first or last step"
                )
            kept.added.append(self.clock)
        elif taint is not None and not taint.is_sum:
            self.copy(kept, access, taint, place)
        else:
            raise _NoSum(f"several steps write {kept.name}, not only by adding to it")

    def zero(self, kept: _Kept, access: Access, place: _Place) -> None:
        whole = covers_whole(access.ref.ref.shape, access.index)
        if place.gates != {FIRST} or place.in_loop or access.mask or not whole:
            raise _NoSum(f"{kept.name} is set to zero elsewhere than at the first step")
        kept.zeroed.append(self.clock)
        self.note_gates(access)

    def copy(self, kept: _Kept, access: Access, taint: _Taint, place: _Place) -> None:
        if access.ref in taint.sources or FIRST in place.gates or place.in_loop:
            raise _NoSum(f"{kept.name} is overwritten along it")
        kept.copied.append(self.clock)
        kept.sources |= taint.sources
        self.note_gates(access)

    def note_gates(self, access: Access) -> None:
        """Record the comparisons around a zeroing or copying store."""
        for op in walk(self.body):
            if op.name == "cond" and _holds(op, access):
                self.used_gates |= self.gates(op.operands[0])

    def adds_to(self, access: Access, taint: _Taint) -> bool:
        """Whether the stored sum started with a load from the same place."""
        if access.value is None or taint.load is None or taint.sources != {access.ref}:
            return False
        read = Access.of(taint.load)
        same = (read.index, read.index_operands) == (
            access.index,
            access.index_operands,
        )
        return same and len(self.uses[access.value]) == 1

    def atomic(self, op: Op, place: _Place) -> None:
        kept = self.kept[op.operands[0]]
        used = any(self.uses.get(v) for v in op.results)
        value = Access.of(op).value
        if op.attrs["kind"] != "add" or used or place.gates or value in self.taints:
            raise _NoSum(f"{kept.name} is used by atomics that are not a plain sum")
        kept.added.append(self.clock)


def _holds(cond: Op, access: Access) -> bool:
    """Whether a cond's second branch contains the store of this access."""
    *_, branch = Cond.of(cond).branches
    stores = (o for o in walk(branch) if o.name == "store")
    return any(Access.of(o) == access for o in stores)
