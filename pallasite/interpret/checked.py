"""Checked mode: the evaluator over numpy with shadow memory (`interpret=pl.Checked()`).

`run_checked` runs a kernel one program after another and raises CheckError at the first
bug. It uses the walker that defines the language, with checks: `bounds.py` checks
indices, `shadow.py` tracks undefined values, `races.py` finds races between concurrent
programs, `copies.py` checks async copies. Cores, roles and copies run concurrently
(`resume.py`, `waits.py`, `gpu_level.py`) in several orders (`schedule.py`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from pallasite.interpret.bounds import Indices
from pallasite.interpret.clocks import Clocks
from pallasite.interpret.copies import InFlight
from pallasite.interpret.machine import core_of, placed_programs
from pallasite.interpret.matrix_units import MatrixUnits
from pallasite.interpret.monitor import UNWRITTEN, Monitor, Origin
from pallasite.interpret.numbers import Picks
from pallasite.interpret.numpy_memory import Elements, region_of
from pallasite.interpret.races import Races, racing_axes, top_level_memory
from pallasite.interpret.resume import SHARED, Pauses, core_axes
from pallasite.interpret.schedule import Order, Schedule
from pallasite.interpret.shadow import CheckedNumbers
from pallasite.interpret.shadow_tiles import Partly, codes_of, partly, value_of
from pallasite.interpret.tensor_memory import TensorWalker
from pallasite.interpret.views import View
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ops.gpu import SEMAPHORES, concurrent_axes
from pallasite.passes.analysis.memory import Roots
from pallasite.passes.lower.device_numbers import talks_to_devices

Array = Any


def run_checked(
    kernel: Kernel, arrays: Sequence[np.ndarray], options: Any
) -> list[np.ndarray]:
    """Run a kernel, in each order if there is a choice, and report the first bug.

    Args:
        kernel: Kernel IR, as imported.
        arrays: the operands.
        options: a `pl.Checked`: which kinds of bugs to look for, in which orders.

    Returns:
        The results of the first order.

    Raises:
        CheckError: with the kind of bug, the ref, the program and the line.
    """
    return run_devices(kernel, [arrays], [None], options)[0]


def run_devices(
    kernel: Kernel,
    arrays: Sequence[Sequence[np.ndarray]],
    names: Sequence[str | None],
    options: Any,
) -> list[list[np.ndarray]]:
    """The same on several devices, which may copy to and signal each other.

    Args:
        kernel: Kernel IR, as imported.
        arrays: for each device the operands.
        names: what to call each device in reports.
        options: a `pl.Checked`.

    Returns:
        For each device the results of the first order.
    """
    first, *others = options.orders or ("early",)
    if not Pauses(kernel).block(kernel.body):
        others = []
    with np.errstate(all="ignore"):
        results = _run_in_order(kernel, arrays, names, options, first, True)
        for order in others:
            _run_in_order(kernel, arrays, names, options, order, False)
    return results


def _run_in_order(
    kernel: Kernel,
    arrays: Sequence[Sequence[np.ndarray]],
    names: Sequence[str | None],
    options: Any,
    order: Order,
    prints: bool,
) -> list[list[np.ndarray]]:
    schedule = Schedule(order)
    together = len(names) > 1 or talks_to_devices(kernel.body)
    clocks = Clocks() if together or _runs_side_by_side(kernel) else None
    roots, monitors = Roots(kernel), list[Monitor]()
    for name in names:
        like = monitors[0] if monitors else None
        monitors.append(Monitor(kernel, roots, options, order, name, like))
    walkers = [
        CheckedWalker(kernel, monitor, schedule, clocks, number, prints)
        for number, monitor in enumerate(monitors)
    ]
    for walker, own in zip(walkers, arrays, strict=True):
        walker.devices = walkers
        walker.begin(own)
    if walkers[0].pauses.block(kernel.body):
        for walker in walkers if together else ():
            walker.races.enter_kernel()
        schedule.run(walkers)
    else:
        for walker in walkers:
            walker.block(kernel.body)
    return [walker.results() for walker in walkers]


class CheckedWalker(TensorWalker):
    """One checked run of a kernel."""

    def __init__(
        self,
        kernel: Kernel,
        monitor: Monitor,
        schedule: Schedule,
        clocks: Clocks | None,
        device: int,
        prints: bool,
    ):
        axes = racing_axes(kernel) if monitor.options.races else ()
        races = Races(monitor, axes, clocks, device)
        super().__init__(kernel, CheckedNumbers(monitor, prints), races, schedule)
        self.index = Indices(self.monitor, self.numbers)
        self.units = MatrixUnits(self.monitor)
        self.output_roots = {self.roots.of(param) for param in kernel.outputs}
        # The program that last wrote each element of an output.
        self.writers: dict[Value, np.ndarray] = {}
        self.unwritten: dict[Value, int] = {}  # the code of untouched elements
        self.atomic = False
        self._allocs: dict[Block, tuple[Value, ...]] = {}

    # --- the whole run ---

    def begin(self, inputs: Sequence[np.ndarray]) -> None:
        kernel = self.kernel
        changed = set(self.roots.written(kernel.body))
        own = [
            np.array(x) if p in changed else np.asarray(x)
            for p, x in zip(kernel.inputs, inputs, strict=True)
        ]
        for param in kernel.params:
            root = self.roots.of(param)
            if root in changed:
                self.races.add(root, private=False)
        for op in top_level_memory(kernel):
            if not op.result.ref.is_semaphore:
                self.races.add(op.result, private=True)
        super().begin(own)

    def results(self) -> list[np.ndarray]:
        self._move(self.copies.flying)
        self.monitor.op = None
        self.units.end()
        self._look_at_outputs()
        return [value_of(x) for x in super().results()]

    def _add_root(self, param: Value, array: Array) -> None:
        super()._add_root(param, array)
        self._begin(param)

    def _begin(self, root: Value) -> None:
        """Memory that is not written yet."""
        memory = self.memory[root]
        if type(memory) is Partly:
            origin = Origin(UNWRITTEN, self.monitor.describe(root))
            code = self.unwritten[root] = self.monitor.code(origin)
            memory.codes[...] = code
        if root in self.output_roots:
            self.writers[root] = np.zeros(root.ref.shape, np.int32)

    def allocate(self, root: Value) -> None:
        super().allocate(root)
        self._begin(root)
        if root.ref.space == SHARED:
            self.races.add(root, private=False)

    def _look_at_outputs(self) -> None:
        """Undefined values that stayed in an output, then elements never written."""
        undefined, unwritten = [], []
        for param in self.kernel.outputs:
            memory = self.memory[self.roots.of(param)]
            if type(memory) is not Partly:
                continue
            own = self.unwritten.get(param, 0)
            missing = memory.codes == own if own else np.zeros(memory.shape, bool)
            undefined.append((param, (memory.codes != 0) & ~missing))
            unwritten.append((param, missing))
        for param, where in undefined:
            if where.any():
                self._report_stored(param, where)
        for param, where in unwritten:
            if where.any():
                self._report_unwritten(param, where)

    def _report_stored(self, param: Value, where: np.ndarray) -> None:
        root = self.roots.of(param)
        first = _first(where)
        code = int(self.memory[root].codes[first])
        origin = self.monitor.origins[code]
        program = self.writers.get(root)
        self.monitor.report_undefined(
            code,
            "an undefined value is stored in an output",
            facts=[
                ("output", self.monitor.describe(param)),
                ("elements", _counted(first, where)),
            ],
            at=origin.stored_at or origin.read_at,
            program=self.monitor.program_text(
                0 if program is None else int(program[first])
            ),
        )

    def _report_unwritten(self, param: Value, where: np.ndarray) -> None:
        facts = [
            ("output", self.monitor.describe(param)),
            ("elements", _counted(_first(where), where)),
        ]
        fix = "check that the grid covers the array and that every program stores"
        what = "elements of an output are never written"
        self.monitor.report("unwritten", what, facts, fix)

    # --- following the program ---

    def op(self, op: Op) -> None:
        self.monitor.op = op
        super().op(op)

    def reach(self, op: Op) -> None:
        self.monitor.op = op

    def note_instruction(self, op: Op) -> None:
        context = self.schedule.current
        self.units.note(op, context.core if context is not None else None)

    def leave(self, block: Block) -> None:
        allocs = self._allocs.get(block)
        if allocs is None:
            found = (op.result for op in block.ops if op.name == "alloc")
            allocs = self._allocs[block] = tuple(found)
        if block is self.kernel.body:
            context = self.schedule.current
            is_core = context is not None and context.core is not None
            self.copies.end_kernel(context if is_core else None)
            if not is_core:
                self._end_of(self.barriers_of_devices())
        if allocs:  # other subcores may still use what they share
            own = (v for v in allocs if v.ref.space != SHARED)
            self._end_of([self.own_root(v) for v in own])

    def _move(self, copies: Sequence[InFlight]) -> None:
        """Finish copies that were not waited for, where that is not reported."""
        for copy in copies:
            if not copy.moved:
                self.schedule.move(copy.next_to_move)
            if not copy.moved:
                self.move(copy)

    def _end_of(self, roots: Sequence[Value]) -> None:
        if self.copies.flying:
            self._move(self.copies.end_memory(roots))
        for root in roots:
            if root.ref.space == SEMAPHORES:  # of a GPU, where others may keep them
                continue
            if root.ref.is_semaphore and np.any(self.memory[root]):
                count = int(np.ravel(self.memory[root])[_flat_first(self.memory[root])])
                facts = [("semaphore", self.monitor.describe(root)), ("count", count)]
                what = "a semaphore is not zero at the end of its lifetime"
                fix = "wait for as much as is signalled"
                last = self.signals.get(root)
                at = None if last is None else last.loc
                self.monitor.report("copies", what, facts, fix, at)

    def grid_programs(self, op: Op) -> list[list[Array]]:
        programs, machine = super().grid_programs(op), self.monitor.options.machine
        if op not in self.kernel.body.ops:
            return programs
        sizes = [int(value_of(n)) for n in self.grid_sizes(op)]
        return placed_programs(programs, op, sizes, machine)

    def before_program(self, op: Op, ids: list[Array]) -> None:
        if op in self.kernel.body.ops:
            self._record(op, ids)
        self.monitor.enter_program(op, ids)
        if len(self.monitor.programs) == 1:
            self.races.enter_program(ids)

    def _record(self, op: Op, ids: list[Array]) -> None:
        machine, context = self.monitor.options.machine, self.schedule.current
        if machine.recorder is None:
            return
        sizes = [int(value_of(n)) for n in self.grid_sizes(op)]
        core = context.core if context is not None else None
        if core is None:
            core = core_of(op, ids, sizes, machine.cores)
        machine.recorder(tuple(np.int32(i) for i in ids), np.int32(core))

    def after_program(self, op: Op, ids: list[Array]) -> None:
        if self.copies.flying:
            self.copies.end_program(self.schedule.current)
        self.monitor.leave_program()

    def indices(self, op: Op, window: int, found: list[Array]) -> list[Array]:
        self.monitor.op = op
        return self.index.window(op, window, found)

    # --- accesses ---

    def _entries(self, access: Access) -> tuple[View, list[Any]]:
        view, entries = super()._entries(access)
        op = self.monitor.op
        reads = op is not None and op.name == "load"
        entries, self._unsure = self.index.access(
            access, entries, self._maybe(access.mask), reads
        )
        return view, entries

    def _copied_entries(self, access: Access) -> tuple[View, list[Any]]:
        view, entries = super()._copied_entries(access)
        return view, self.index.copied(access, entries)

    def do_load(self, op: Op) -> tuple[Array]:
        if self.monitor.options.machine.reads_outside:
            value = self._load_partly_outside(op)
            if value is not None:
                return (value,)
        (value,) = super().do_load(op)
        if self._unsure is not None:
            value = self._from_unsure_places(value)
        return (self._read_here(value),)

    def _load_partly_outside(self, op: Op) -> Array | None:
        """A load with elements out of bounds: those are treated as unwritten."""
        access = self.access(op)
        if access.mask is not None:
            return None
        inside = self.index.inside(access, super()._entries(access)[1])
        if inside is None:
            return None
        view, entries = self._entries(access)
        blank = self.numbers.uninitialised(access.ref.ref.with_shape(inside.shape))
        if not inside.any():
            return blank
        return self.read(view, entries, inside, blank)

    def _from_unsure_places(self, value: Array) -> Array:
        """The elements of undefined gather indices; gathered dimensions come first."""
        unsure = self._unsure
        assert unsure is not None
        codes = unsure.reshape(unsure.shape + (1,) * (np.ndim(value) - unsure.ndim))
        codes = np.broadcast_to(codes, np.shape(value))
        before = codes_of(value)
        codes = codes if before is None else np.maximum(codes, before)
        return partly(value_of(value), codes)

    def _read_here(self, value: Array) -> Array:
        if type(value) is Partly:
            return Partly(value.value, self.monitor.recode(value.codes))
        return value

    def do_atomic_rmw(self, op: Op) -> tuple[Array]:
        with self._atomically():
            (old,) = super().do_atomic_rmw(op)
        return (self._read_here(old),)

    def do_atomic_cas(self, op: Op) -> tuple[Array]:
        with self._atomically():
            (old,) = super().do_atomic_cas(op)
        return (self._read_here(old),)

    @contextlib.contextmanager
    def _atomically(self) -> Iterator[None]:
        self.atomic = True
        try:
            yield
        finally:
            self.atomic = False

    def read(self, view: View, entries: Any = None, mask=None, other=None) -> Array:
        if not view.steps or self.quiet:
            return super().read(view, entries, mask, other)
        with self._touching(view, entries, mask):
            return super().read(view, entries, mask, other)

    def write(self, view: View, entries: Any, value: Array, mask: Array | None) -> None:
        if type(value) is Partly and self.roots.of(view.root) in self.writers:
            value = Partly(value.value, self.monitor.recode(value.codes, stored=True))
        if not view.steps or self.quiet:
            super().write(view, entries, value, mask)
            return
        with self._touching(view, entries, mask):
            super().write(view, entries, value, mask)

    # --- elements ---

    def take(self, root: Value, picks: Picks, mask=None, other=None) -> Array:
        value = super().take(root, picks, mask, other)
        if self.quiet or root in self.elsewhere:
            return value
        self._watch(root, "reads", picks, mask)
        if root in self.races.memories:
            region = region_of(picks, root.ref.shape)
            stale = self.races.stale(root, region)
            if stale is not None:
                if mask is not None:
                    stale = np.where(value_of(mask), stale, 0)
                before = codes_of(value)
                stale = stale if before is None else np.maximum(stale, before)
                return partly(value_of(value), stale)
        return value

    def put(self, root: Value, picks: Picks, value: Array, mask=None) -> None:
        if not self.quiet and root not in self.elsewhere:
            self._watch(root, "writes", picks, mask, value)
        super().put(root, picks, value, mask)

    def rmw(self, root: Value, picks: Picks, kind: str, value: Array, mask) -> Array:
        if root not in self.elsewhere:
            self._watch(root, "updates", picks, mask)
        return super().rmw(root, picks, kind, value, mask)

    def _watch(
        self, root: Value, how: str, picks: Picks, mask: Array | None, value: Any = None
    ) -> None:
        writer = self.writers.get(root) if how != "reads" else None
        watched = self.copies.flying or self.races.is_watching
        watched = bool(watched) and not self.moving
        shared = self.is_gpu and how != "reads" and root.ref.space == "smem"
        shared = shared and not self.moving
        tensor = root.ref.space == "tmem" and not self.moving
        if writer is None and not watched and not shared and not tensor:
            return
        elements = self.touched
        if elements is None:
            region = region_of(picks, root.ref.shape)
            elements = region.elements(value_of(mask))
        if writer is not None:
            self._wrote(root, writer, elements, value)
        if shared:
            self.wrote_shared(root, elements)
        if tensor:
            self.touched_tensor_memory(root, how, elements)
        if not watched:
            return
        if self.copies.flying:
            if how == "reads":
                self.copies.read(root, elements)
            else:
                self.copies.written(root, elements)
        self.races.access(root, "updates" if self.atomic else how, elements)

    def _wrote(
        self, root: Value, writer: np.ndarray, elements: Elements, value: Any
    ) -> None:
        """Record who wrote; an undefined value over another keeps the first."""
        program, memory = self.monitor.program, self.memory[root]
        if type(value) is Partly and type(memory) is Partly:
            codes = elements.of(memory.codes)
            already = (codes != 0) & (codes != self.unwritten.get(root))
            program = np.where(already, elements.of(writer), program)
        elements.set(writer, program)

    @contextlib.contextmanager
    def _touching(self, view: View, entries: Any, mask: Array | None) -> Iterator[None]:
        """Find what an access through a reshaped or bitcast view touches."""
        self.touched = self._painted(view, entries, mask)
        try:
            yield
        finally:
            self.touched = None

    # --- promises ---

    def do_assume_multiple(self, op: Op) -> tuple[Array]:
        (value,) = super().do_assume_multiple(op)
        multiple = op.attrs["multiple"]
        broken = np.asarray(value_of(value) % multiple != 0)
        if type(value) is Partly:
            broken = broken & (value.codes == 0)
        if broken.any():
            found = np.ravel(value_of(value))[_flat_first(broken)]
            facts = [("value", int(found)), ("promised", f"a multiple of {multiple}")]
            what = "a pl.multiple_of assumption is false"
            self.monitor.report("promises", what, facts)
        return (value,)

    RULES: ClassVar = {
        **TensorWalker.RULES,
        "load": do_load,
        "atomic_rmw": do_atomic_rmw,
        "atomic_cas": do_atomic_cas,
        "assume_multiple": do_assume_multiple,
    }


def _runs_side_by_side(kernel: Kernel) -> bool:
    ops = list(walk(kernel.body))
    return any(
        op.name in ("roles", "warps")
        or core_axes(kernel, op)
        or concurrent_axes(kernel, op)
        for op in ops
    )


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])


def _flat_first(where: np.ndarray) -> int:
    return int(np.argmax(np.ravel(where) != 0))


def _counted(first: tuple[int, ...], where: np.ndarray) -> str:
    return f"{int(where.sum())} of {where.size}, first {first}"
