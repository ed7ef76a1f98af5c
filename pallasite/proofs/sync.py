"""Synchronisation: every wait ends, and no signal, copy or arrival is lost.

Where neither the control around copies, semaphores and barriers nor what they act on
depends on values read from memory, every run makes the same sequence of them. Then one
run in checked mode stands for all, if the order in which signals arrive cannot change
it either: with one thread of control, or where each semaphore has one waiting role.
"""

from collections.abc import Iterator, Sequence

from pallasite.interpret.resume import Pauses, core_axes
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value
from pallasite.ir.nodes import walk as walk_ops
from pallasite.ir.opdef import Effect, Use, table
from pallasite.ir.roles import Cond, Loop, Pipeline
from pallasite.ops.gpu import concurrent_axes
from pallasite.passes.analysis.block_table import exact_meaning
from pallasite.passes.analysis.memory import Roots, read_refs, written_refs
from pallasite.proofs.replay import Replay
from pallasite.proofs.verdicts import PROVED, REFUTED, UNKNOWN, Claim

_WAITS = {"copy_wait": 2, "indexed_copy_wait": 2, "sem_wait": 0, "barrier_wait": 0}
_CONTROL = ("roles", "warps", "pipeline")


def sync(kernel: Kernel, replay: Replay) -> Claim:
    """Whether copies, semaphores, barriers and roles wait for each other rightly."""
    if not Pauses(kernel).block(kernel.body):
        return Claim("sync", PROVED, "no copies, semaphores, barriers or roles")
    if replay.report("sync"):
        first, *rest = replay.report("sync").splitlines()
        said = dict(line.strip().split(": ", 1) for line in rest if ": " in line)
        text = "; ".join(f"{k} {said[k]}" for k in ("semaphore", "count") if k in said)
        example = replay.example("sync", said.get("program", ""), text or first)
        return Claim("sync", REFUTED, first, said.get("at", ""), example)
    why, line = _not_fixed(kernel)
    if why:
        return Claim("sync", UNKNOWN, why, line)
    if replay.possible():
        return Claim("sync", UNKNOWN, f"not run: {replay.possible()}")
    if not replay.ends("sync"):
        return Claim("sync", UNKNOWN, "a run in checked mode does not come to its end")
    return Claim(
        "sync", PROVED, "every run is the same, and one ends with every wait served"
    )


def _not_fixed(kernel: Kernel) -> tuple[str, str]:
    """Why runs may differ, and the author's line; empty if they do not."""
    ops = list(walk_ops(kernel.body))
    for op in ops:
        if core_axes(kernel, op) or concurrent_axes(kernel, op):
            return "several cores or thread blocks signal each other", str(op.loc or "")
        if op.name in ("roles", "warps") and _has_phases(op):
            why = "roles wait for phases of barriers, which another order may miss"
            return why, str(op.loc or "")
        if op.name == "sem_read":
            return "it polls a semaphore", str(op.loc or "")
    shared = _waited_for_twice(kernel)
    if shared is not None:
        why = "several roles wait for one semaphore or barrier, in no fixed order"
        return why, str(shared.loc or "")
    return _Taint(kernel).reason()


def _has_phases(roles: Op) -> bool:
    ops = (op for region in roles.regions for op in walk_ops(region))
    return any(op.name == "barrier_wait" for op in ops)


def _waited_for_twice(kernel: Kernel) -> Op | None:
    roots, owner = Roots(kernel), dict[Value, object]()
    roles = [
        r
        for op in walk_ops(kernel.body)
        if op.name in ("roles", "warps")
        for r in op.regions
    ]
    inside = {op: region for region in roles for op in walk_ops(region)}
    for op in walk_ops(kernel.body):
        if op.name == "barrier" and op in inside:
            continue
        if op.name not in _WAITS or len(op.operands) <= _WAITS[op.name]:
            continue
        root = roots.of(op.operands[_WAITS[op.name]])
        role = inside.get(op)
        if owner.setdefault(root, role) is not role:
            return op
    return None


class _Taint:
    """Which values may depend on what is read from memory, and under which control."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.roots = kernel, Roots(kernel)
        self.tainted: set[Value] = set()
        self._grow()

    def _grow(self) -> None:
        before = -1
        while len(self.tainted) != before:
            before = len(self.tainted)
            for op in walk_ops(self.kernel.body):
                self._op(op)

    def _op(self, op: Op) -> None:
        if op.name == "for":
            loop = Loop.of(op)
            self._flow(loop.inits, loop.carried)
            self._flow(loop.yields, loop.carried)
            self._flow(loop.yields, op.results)
            self._flow(loop.inits, op.results)
            self._all(loop.bounds, (loop.index, *op.results))
        elif op.name == "cond":
            for branch in Cond.of(op).branches:
                self._flow(branch.yields, op.results)
            self._all(op.operands, op.results)
        elif op.regions and op.name not in _CONTROL:
            values = [v for r in op.regions for v in (*r.params, *op.results)]
            self.tainted.update(v for v in values if not v.is_ref)
        elif not op.regions:
            row = table()[op.name]
            reads = row.effect is not Effect.PURE
            rounds = row.elementwise and exact_meaning(op) is None
            if reads or rounds:
                self.tainted.update(v for v in op.results if not v.is_ref)
            self._all(op.operands, op.results)

    def _flow(self, source: Sequence[Value], target: Sequence[Value]) -> None:
        pairs = zip(source, target, strict=True)
        self.tainted.update(t for s, t in pairs if s in self.tainted)

    def _all(self, source: Sequence[Value], target: Sequence[Value]) -> None:
        if any(v in self.tainted for v in source):
            self.tainted.update(target)

    # --- what matters ---

    def reason(self) -> tuple[str, str]:
        ops = list(walk_ops(self.kernel.body))
        copied = {
            self.roots.of(ref)
            for op in ops
            if "copy" in op.name
            for ref in (*written_refs(op), *read_refs(op))
            if not ref.ref.is_semaphore
        }
        written = set(self.roots.written(self.kernel.body))
        self.watched = copied & written
        for op, control in self._involved(self.kernel.body, None):
            line = str(op.loc or "")
            if control is not None:
                why = "how often it copies, signals or waits depends on values read"
                return why, str(control.loc or line)
            if any(v in self.tainted for v in self._matters(op)):
                return (
                    "what it copies, signals or waits for depends on values read",
                    line,
                )
        return "", ""

    def _involved(
        self, block: Block, control: Op | None
    ) -> Iterator[tuple[Op, Op | None]]:
        """The ops that synchronise, or touch what is copied; and unknown control."""
        for op in block.ops:
            row = table()[op.name]
            refs = [v for v in op.operands if v.is_ref]
            touches = any(self.roots.of(r) in self.watched for r in refs)
            waits = any(r.ref.is_semaphore for r in refs) or op.name == "barrier"
            if not op.regions and Use.VIEW not in row.uses and (touches or waits):
                yield op, control
            own = control
            if own is None and self._varies(op):
                own = op
            for region in op.regions:
                yield from self._involved(region, own)

    def _varies(self, op: Op) -> bool:
        if op.name == "for":
            return any(v in self.tainted for v in Loop.of(op).bounds)
        if op.name == "cond":
            return op.operands[0] in self.tainted
        if op.name == "pipeline":
            pipeline = Pipeline.of(op)
            maps = [v for region in pipeline.maps for v in region.yields]
            decides = (*pipeline.dynamic_sizes, *maps)
            return any(v in self.tainted for v in decides)
        return bool(op.regions) and op.name not in _CONTROL

    def _matters(self, op: Op) -> Iterator[Value]:
        """The operands whose values change what an op waits for or touches."""
        if table()[op.name].indexed:
            access = Access.of(op)
            yield from (access.ref, *access.index_operands)
            if access.mask is not None:
                yield access.mask
            return
        for value in op.operands:
            if value.is_ref and not value.ref.is_semaphore:
                if self.roots.of(value) in self.watched:
                    yield value
            else:
                yield value
