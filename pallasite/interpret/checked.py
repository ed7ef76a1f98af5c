"""Checked mode: the evaluator over numpy with shadow memory (`interpret=pl.Checked()`).

`run_checked` runs a kernel one program after another and raises CheckError at the first
thing a correct kernel never does. The walker is the same that defines the language;
here it is watched: `bounds.py` looks at indices, `shadow.py` at undefined values,
`races.py` at programs that may run at once, `copies.py` at async copies.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallasite.interpret.bounds import Indices
from pallasite.interpret.copies import Copies, Copy, End
from pallasite.interpret.monitor import UNWRITTEN, Monitor, Origin
from pallasite.interpret.numbers import Picks
from pallasite.interpret.numpy_memory import Elements, region_of
from pallasite.interpret.races import Races, racing_axes, top_level_memory
from pallasite.interpret.shadow import CheckedNumbers
from pallasite.interpret.shadow_tiles import Partly, codes_of, partly, value_of
from pallasite.interpret.views import View, whole_picks
from pallasite.interpret.walker import Walker
from pallasite.ir.nodes import Access, Block, Kernel, Op, Span, Value
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.memory import Roots

Array = Any


def run_checked(
    kernel: Kernel, arrays: Sequence[np.ndarray], options: Any
) -> list[np.ndarray]:
    """Run a kernel and report the first bug.

    Args:
        kernel: Kernel IR, as imported.
        arrays: the operands.
        options: a `pl.Checked`: which kinds of bugs to look for.

    Returns:
        The results.

    Raises:
        CheckError: with the kind of bug, the ref, the program and the line.
    """
    with np.errstate(all="ignore"):
        return CheckedWalker(kernel, options).run(arrays)


class CheckedWalker(Walker):
    """One watched run of a kernel."""

    numbers: CheckedNumbers

    def __init__(self, kernel: Kernel, options: Any):
        self.monitor = Monitor(kernel, Roots(kernel), options)
        super().__init__(kernel, CheckedNumbers(self.monitor))
        self.index = Indices(self.monitor, self.numbers)
        self.races = Races(self.monitor, racing_axes(kernel) if options.races else ())
        self.copies = Copies(self.monitor)
        self.output_roots = {self.roots.of(param) for param in kernel.outputs}
        # Which program wrote each element of an output last.
        self.writers: dict[Value, np.ndarray] = {}
        self.unwritten: dict[Value, int] = {}  # the code of untouched elements
        self.touched: Elements | None = None  # stands for the picks of a view
        self.atomic = False
        self.quiet = False
        self.signals: dict[Value, Op] = {}  # the last signal of each semaphore
        self._allocs: dict[Block, tuple[Value, ...]] = {}
        self._in_window: dict[Value, bool] = {}

    # --- the whole run ---

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        kernel = self.kernel
        changed = set(self.roots.written(kernel.body))
        own = [
            np.array(x) if p in changed else np.asarray(x)
            for p, x in zip(kernel.inputs, inputs, strict=True)
        ]
        for param in kernel.params:
            root = self.roots.of(param)
            if root in changed and root not in self.races.memories:
                self.races.add(root, private=False)
        for op in top_level_memory(kernel):
            if not op.result.ref.is_semaphore:
                self.races.add(op.result, private=True)
        results = super().run(own)
        self.monitor.op = None
        self._look_at_outputs()
        return [value_of(x) for x in results]

    def _add_root(self, param: Value, array: Array) -> None:
        super()._add_root(param, array)
        self._begin(param)

    def _begin(self, root: Value) -> None:
        """Memory with nothing in it yet."""
        memory = self.memory[root]
        if type(memory) is Partly:
            origin = Origin(UNWRITTEN, self.monitor.describe(root))
            code = self.unwritten[root] = self.monitor.code(origin)
            memory.codes[...] = code
        if root in self.output_roots:
            self.writers[root] = np.zeros(root.ref.shape, np.int32)

    def do_alloc(self, op: Op) -> tuple[View]:
        result = super().do_alloc(op)
        self._begin(op.result)
        return result

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
            "a value that is not defined is stored in an output",
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

    def block(self, block: Block, args: Sequence[Any] = ()) -> list[Any]:
        results = super().block(block, args)
        allocs = self._allocs.get(block)
        if allocs is None:
            found = (op.result for op in block.ops if op.name == "alloc")
            allocs = self._allocs[block] = tuple(found)
        if block is self.kernel.body:
            self.copies.end_kernel()
        if allocs:
            self._end_of(allocs)
        return results

    def _end_of(self, allocs: tuple[Value, ...]) -> None:
        if self.copies.flying:
            self.copies.end_memory(allocs)
        for root in allocs:
            if root.ref.is_semaphore and np.any(self.memory[root]):
                count = int(np.ravel(self.memory[root])[_flat_first(self.memory[root])])
                facts = [("semaphore", self.monitor.describe(root)), ("count", count)]
                what = "a semaphore is not back at zero when it is gone"
                fix = "wait for as much as is signalled"
                last = self.signals.get(root)
                at = None if last is None else last.loc
                self.monitor.report("copies", what, facts, fix, at)

    def before_program(self, op: Op, ids: list[Array]) -> None:
        self.monitor.enter_program(op, ids)
        if len(self.monitor.programs) == 1:
            self.races.enter_program(ids)

    def after_program(self, op: Op, ids: list[Array]) -> None:
        if self.copies.flying:
            self.copies.end_program()
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

    def do_load(self, op: Op) -> tuple[Array]:
        (value,) = super().do_load(op)
        if self._unsure is not None:
            value = self._from_unsure_places(value)
        return (self._read_here(value),)

    def _from_unsure_places(self, value: Array) -> Array:
        """What undefined gather indices name: gathered dimensions come first."""
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
        if self.quiet:
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
        if not self.quiet:
            self._watch(root, "writes", picks, mask, value)
        super().put(root, picks, value, mask)

    def rmw(self, root: Value, picks: Picks, kind: str, value: Array, mask) -> Array:
        self._watch(root, "updates", picks, mask)
        return super().rmw(root, picks, kind, value, mask)

    def _watch(
        self, root: Value, how: str, picks: Picks, mask: Array | None, value: Any = None
    ) -> None:
        writer = self.writers.get(root) if how != "reads" else None
        if writer is None and not self.copies.flying and not self.races.memories:
            return
        elements = self.touched
        if elements is None:
            region = region_of(picks, root.ref.shape)
            elements = region.elements(value_of(mask))
        if writer is not None:
            self._wrote(root, writer, elements, value)
        if self.copies.flying:
            if how == "reads":
                self.copies.read(root, elements)
            else:
                self.copies.written(root, elements)
        self.races.access(root, "updates" if self.atomic else how, elements)

    def _wrote(
        self, root: Value, writer: np.ndarray, elements: Elements, value: Any
    ) -> None:
        """Remember who wrote; of undefined values on top of such, the first."""
        program, memory = self.monitor.program, self.memory[root]
        if type(value) is Partly and type(memory) is Partly:
            codes = elements.of(memory.codes)
            already = (codes != 0) & (codes != self.unwritten.get(root))
            program = np.where(already, elements.of(writer), program)
        elements.set(writer, program)

    @contextlib.contextmanager
    def _touching(self, view: View, entries: Any, mask: Array | None) -> Iterator[None]:
        """Know exactly what an access through a reshaped or bitcast view touches."""
        self.touched = self._painted(view, entries, mask)
        try:
            yield
        finally:
            self.touched = None

    def _painted(self, view: View, entries: Any, mask: Array | None) -> Elements:
        """Write ones into zeros through the view, and see where they are."""
        root = view.root
        memory = self.memory[root]
        blank = np.zeros(memory.shape, memory.dtype)
        self.memory[root], self.quiet = blank, True
        try:
            if entries is None:
                shape = np.shape(Walker.read(self, view))
                entries = [(Span(0, n), None) for n in shape]
            paint = _ones_like(Walker.read(self, view, entries))
            Walker.write(self, view, entries, paint, value_of(mask))
        finally:
            self.memory[root], self.quiet = memory, False
        painted = blank.reshape(-1).view(np.uint8).reshape(*blank.shape, -1)
        return Elements(np.nonzero(painted.any(axis=-1)))

    # --- copies and semaphores ---

    def do_copy_start(self, op: Op) -> None:
        super().do_copy_start(op)
        source, target = (self._end(v) for v in op.operands[:2])
        monitor = self.monitor
        self.copies.start(
            Copy(
                op,
                source,
                target,
                self._semaphore(op),
                monitor.program_text(monitor.program),
                any(self._is_block(v) for v in op.operands[:2]),
            )
        )

    def do_copy_wait(self, op: Op) -> None:
        self.copies.wait(self._semaphore(op), self._end(op.operands[1]))
        super().do_copy_wait(op)

    def _end(self, ref: Value) -> End:
        view: View = self.env[ref]
        if view.steps:
            return End(ref, view.root, self._painted(view, None, None))
        region = region_of(whole_picks(view.ranges), view.root.ref.shape)
        return End(ref, view.root, region.elements())

    def _semaphore(self, op: Op) -> tuple[Value, tuple] | None:
        if len(op.operands) < 3:
            return None
        end = self._end(op.operands[2])
        return end.root, tuple(end.elements.box())

    def _is_block(self, ref: Value) -> bool:
        """Whether a ref is a window's block, or part of one."""
        if ref not in self._in_window:
            blocks = {
                p
                for op in self.kernel.body.ops
                if op.name == "pipeline"
                for p in Pipeline.of(op).blocks
            }
            wholes = self.roots.reached([ref])
            self._in_window[ref] = not blocks.isdisjoint(wholes)
        return self._in_window[ref]

    def do_sem_signal(self, op: Op) -> None:
        self._plain_amount(op)
        self.signals[self.roots.of(op.operands[0])] = op
        super().do_sem_signal(op)

    def do_sem_wait(self, op: Op) -> None:
        amount = int(self._plain_amount(op))
        count = int(np.min(self.read(self.env[op.operands[0]]), initial=2**31 - 1))
        if count < amount:
            facts = [
                ("semaphore", self.monitor.describe(op.operands[0])),
                ("waits for", amount),
                ("count", count),
            ]
            what = "a wait for a semaphore that nobody signals"
            self.monitor.report("copies", what, facts, "signal it before the wait")
        super().do_sem_wait(op)

    def _plain_amount(self, op: Op) -> Array:
        amount = self.numbers.certain(self.env[op.operands[1]], "a semaphore's count")
        self.env[op.operands[1]] = amount
        return amount

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
            what = "a promise made with pl.multiple_of is broken"
            self.monitor.report("promises", what, facts)
        return (value,)


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])


def _flat_first(where: np.ndarray) -> int:
    return int(np.argmax(np.ravel(where) != 0))


def _counted(first: tuple[int, ...], where: np.ndarray) -> str:
    return f"{int(where.sum())} of {where.size}, first {first}"


def _ones_like(value: Array) -> np.ndarray:
    """Every bit set."""
    value = np.asarray(value)
    raw = np.full(value.size * value.dtype.itemsize, 0xFF, np.uint8)
    return raw.view(value.dtype).reshape(value.shape)
