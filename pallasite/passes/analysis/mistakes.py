"""Mistakes that are certain from a kernel's IR, reported as warnings at trace time.

A grid without programs, an output that nothing stores, memory that is accumulated into
(`o_ref[...] += x`) but never initialised, a copy that nothing ever waits for, and one
on a semaphore that counts something else. Only what is wrong in every run is reported:
any store that may set the memory, and any wait, in any branch, loop or program, counts.
"""

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pallasite.errors import Facts, KernelWarning, compose
from pallasite.ir.nodes import Access, Kernel, Loc, Op, Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.memory import VIEWS, Roots, written_refs

# Ops whose result depends on an operand, whatever the other one is. Not so a select,
# an integer product or a bit mask: with the right operand these overwrite it.
_KEEPING = frozenset(["add", "sub", "max", "min", "neg", "or", "xor", "cast"])
_KEEPING_FLOATS = frozenset(["mul", "div"])  # undefined contents may be NaN
_SETTING_ATOMICS = ("xchg", "and")
_STARTS = ("copy_start", "indexed_copy_start", "remote_copy_start")
_INITIALISE = (
    "initialise it first, for example under @pl.when(pl.program_id(axis) == 0)"
)


@dataclass(frozen=True)
class Mistake:
    """One mistake, formatted like an error."""

    what: str
    facts: Facts
    at: Loc | None
    fix: str

    def __str__(self) -> str:
        return compose(self.what, self.facts, self.at, self.fix)


def warn_of_mistakes(kernel: Kernel, hidden: Collection[Value] = ()) -> None:
    """Warn about what `mistakes` finds, at the author's lines."""
    for mistake in mistakes(kernel, hidden):
        at = mistake.at or Loc("<unknown>", 0)
        warnings.warn_explicit(
            str(mistake), KernelWarning, at.file, at.line, registry=_said
        )


_said: dict[str | tuple[str, type[Warning], int], int] = {}


def mistakes(kernel: Kernel, hidden: Collection[Value] = ()) -> Iterator[Mistake]:
    """What is certainly wrong with a kernel. `hidden`: scratch not the author's own."""
    roots = Roots(kernel)
    results = [r for r in kernel.outputs if roots.of(r) is r and _holds_values(r)]
    pipelines = [op for op in kernel.body.ops if op.name == "pipeline"]
    grids = [Pipeline.of(op).grid for op in pipelines]
    empty = next((g for g in grids if 0 in g), None)
    if empty is not None:
        if results:
            yield _no_programs(kernel, empty, results)
        return
    ops = list(walk(kernel.body))
    allocated = [op.result for op in ops if op.name == "alloc"]
    scratch = [r for r in allocated if r not in hidden and _holds_values(r)]
    uses = _Uses(ops, roots, {*results, *scratch})
    for result in results:
        if result not in uses.writes:
            yield _never_stored(kernel, result)
    for ref in (*results, *scratch):
        if updates := uses.only_updates(ref):
            kind = "output" if ref in kernel.outputs else "scratch"
            yield _never_set(kernel, ref, kind, updates[0])
    for semaphore, start in _signalled(ops, roots).items():
        if semaphore not in allocated:  # an operand: another call may wait on it
            continue
        if semaphore.ref.space in ("sem", "barrier_sem"):
            yield _other_semaphore(kernel, semaphore, start)
        elif not _is_read(semaphore, ops, roots):
            yield _never_waited_for(kernel, semaphore, start)


def _signalled(ops: Sequence[Op], roots: Roots) -> dict[Value, Op]:
    """Semaphores that copies signal, each with the first such copy."""
    found: dict[Value, Op] = {}
    for op in ops:
        if op.name in _STARTS:
            for value in op.operands:
                if value.is_ref and value.ref.is_semaphore:
                    found.setdefault(roots.of(value), op)
    return found


def _is_read(semaphore: Value, ops: Sequence[Op], roots: Roots) -> bool:
    """Whether anything waits on a semaphore or reads it, or may do so."""
    return any(
        value.is_ref and roots.of(value) is semaphore
        for op in ops
        if op.name not in (*_STARTS, *VIEWS)
        for value in op.operands
    )


def _holds_values(ref: Value) -> bool:
    return ref.ref.size > 0 and not ref.ref.is_semaphore


class _Uses:
    """The writers of each piece of memory, and which values depend on its contents."""

    def __init__(self, ops: Sequence[Op], roots: Roots, memory: Collection[Value]):
        self.producers: dict[Value, Op] = {}
        self.writes: dict[Value, list[Op]] = {}
        self.kept: dict[Value, frozenset[Op]] = {}  # the loads that a value depends on
        for op in ops:
            self.producers.update(dict.fromkeys(op.results, op))
            # A window lets its body write; the body's own ops say whether it does.
            for ref in written_refs(op) if op.name != "pipeline" else ():
                self.writes.setdefault(roots.of(ref), []).append(op)
            if op.name == "load" and roots.of(op.operands[0]) in memory:
                self.kept[op.result] = frozenset([op])
            elif _keeps_operands(op):
                self._keep(op)

    def _keep(self, op: Op) -> None:
        kept: frozenset[Op] = frozenset()
        for value in op.operands:
            kept ^= self.kept.get(value, frozenset())  # a difference may cancel
        if kept:
            self.kept[op.result] = kept

    def only_updates(self, ref: Value) -> list[Op]:
        """The writes to memory, if each depends on the old contents."""
        writes = self.writes.get(ref, [])
        return writes if all(map(self._is_update, writes)) else []

    def _is_update(self, op: Op) -> bool:
        if op.name == "atomic_rmw":
            return op.attrs["kind"] not in _SETTING_ATOMICS
        if op.name != "store":
            return False
        value = Access.of(op).value
        loads = self.kept.get(value, ()) if value is not None else ()
        return any(self._same_elements(load, op) for load in loads)

    def _same_elements(self, load: Op, store: Op) -> bool:
        read, written = Access.of(load), Access.of(store)
        return (
            (read.index, read.index_operands) == (written.index, written.index_operands)
            and read.other is None
            and self._same_ref(read.ref, written.ref)
        )

    def _same_ref(self, a: Value, b: Value) -> bool:
        """Whether two refs are one, or equal views of one."""
        while a is not b:
            x, y = self.producers.get(a), self.producers.get(b)
            if x is None or y is None or not x.operands:
                return False
            if (x.name, x.attrs, x.operands[1:]) != (y.name, y.attrs, y.operands[1:]):
                return False
            a, b = x.operands[0], y.operands[0]
        return True


def _keeps_operands(op: Op) -> bool:
    if op.name in _KEEPING:
        return True
    return op.name in _KEEPING_FLOATS and op.result.tile.dtype.is_float


def _described(ref: Value) -> str:
    dims = ",".join(map(str, ref.ref.shape))
    return f"{ref.name + ', ' if ref.name else ''}{ref.ref.dtype}[{dims}]"


def _no_programs(
    kernel: Kernel, grid: Sequence[int | None], results: list[Value]
) -> Mistake:
    return Mistake(
        "the grid has no programs: the outputs are never written",
        [
            ("kernel", kernel.name),
            ("grid", grid),
            ("outputs", "; ".join(map(_described, results))),
        ],
        kernel.loc,
        "count blocks with pl.cdiv(size, block), which rounds up",
    )


def _never_stored(kernel: Kernel, result: Value) -> Mistake:
    return Mistake(
        "the kernel never stores to an output: its contents are undefined",
        [("kernel", kernel.name), ("output", _described(result))],
        kernel.loc,
        f"store to it: {result.name or 'o_ref'}[...] = value",
    )


def _never_set(kernel: Kernel, ref: Value, kind: str, update: Op) -> Mistake:
    return Mistake(
        f"the kernel accumulates into {'an output' if kind == 'output' else kind} "
        "that is never initialised: its contents are undefined",
        [("kernel", kernel.name), (kind, _described(ref))],
        update.loc or kernel.loc,
        _INITIALISE,
    )


def _never_waited_for(kernel: Kernel, semaphore: Value, start: Op) -> Mistake:
    return Mistake(
        "the kernel starts a copy and never waits for it: the copied data may be read "
        "before it has arrived",
        [("kernel", kernel.name), ("semaphore", _described(semaphore))],
        start.loc or kernel.loc,
        "wait before the copied data is used and before the kernel ends: copy.wait()",
    )


def _other_semaphore(kernel: Kernel, semaphore: Value, start: Op) -> Mistake:
    return Mistake(
        "a copy signals a semaphore that is not a DMA semaphore: TPUs require one",
        [("kernel", kernel.name), ("semaphore", semaphore.type)],
        start.loc or kernel.loc,
        "use pltpu.SemaphoreType.DMA in scratch_shapes or pl.run_scoped",
    )
