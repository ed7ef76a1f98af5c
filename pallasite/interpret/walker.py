"""The walker: runs a Kernel over a number system, op by op, in program order.

This is the definition of the language. Programs run one after another, last grid axis
fastest; refs are views of root arrays, one root per operand, result and allocation.
A copy is done where it starts, and no wait has to wait; `resume.py` runs the same code
with cores, roles and copies side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pallasite.errors import InternalError, UnsupportedError
from pallasite.interpret.numbers import Array, Numbers, Picks, run_pure
from pallasite.interpret.views import (
    Range,
    View,
    entries_of,
    narrow,
    picks_of,
    reach,
    whole_picks,
)
from pallasite.interpret.windows import Padding, plan_padding, window_ranges
from pallasite.ir.nodes import (
    Access,
    Block,
    Gather,
    Kernel,
    Op,
    Value,
    Window,
    full_index,
)
from pallasite.ir.roles import Loop, Pipeline, While
from pallasite.ops.fused import written_out
from pallasite.ops.gpu import SEMAPHORES, concurrent_axes, product_of
from pallasite.passes.analysis.memory import Roots, over_edges

Rule = Callable[[Any, Op], Any]  # (walker, op) -> its results, None if it has none


class Walker:
    """One run of a kernel.

    `RULES`, at the end of the class, says which method runs which op. What it does not
    name only computes tiles from tiles: the number system runs it.
    """

    def __init__(self, kernel: Kernel, numbers: Numbers):
        self.kernel, self.numbers = kernel, numbers
        self.roots = Roots(kernel)
        self.env: dict[Value, Any] = {}
        self.memory: dict[Value, Array] = {}
        self.padding: dict[Value, Padding] = {}
        # Roots that a block stands for while a branch runs (see `blocks_as_roots`).
        self.standing_for: dict[Value, Value] = {}
        self.predicate: Array | None = None
        self._accesses: dict[Op, Access] = {}
        self._blocks: dict[Op, Block] = {}  # what fused ops stand for
        self._over_edges = over_edges(kernel.body)

    # --- whole kernels ---

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run on operand arrays; the result arrays."""
        self.begin(inputs)
        self.run_body()
        return self.results()

    def begin(self, inputs: Sequence[Array]) -> None:
        """Make memory of the operand arrays, and memory for the results."""
        kernel = self.kernel
        if self.numbers.functional:  # in-place memory checks bounds instead
            self.padding = plan_padding(kernel, self.roots)
        aliased = {kernel.outputs[o]: kernel.inputs[i] for i, o in kernel.aliases}
        for param, array in zip(kernel.inputs, inputs, strict=True):
            self._add_root(param, array)
        for param in kernel.outputs:
            if param not in aliased:
                self._add_root(param, self.numbers.uninitialised(param.ref))
        for param in kernel.params:
            root = aliased.get(param, param)
            self.env[param] = self._whole(param, root)

    def results(self) -> list[Array]:
        kernel = self.kernel
        aliased = {kernel.outputs[o]: kernel.inputs[i] for i, o in kernel.aliases}
        return [
            self._result(param, aliased.get(param, param)) for param in kernel.outputs
        ]

    def run_body(self) -> None:
        self.block(self.kernel.body)

    def _add_root(self, param: Value, array: Array) -> None:
        padding = self.padding.get(param)
        if padding is not None:
            array = self.numbers.pad(array, padding.low, padding.high, padding.fill)
        self.memory[param] = array

    def _whole(self, param: Value, root: Value) -> View:
        padding = self.padding.get(root)
        low = padding.low if padding else (0,) * param.ref.rank
        ranges = [Range(lo, n) for lo, n in zip(low, param.ref.shape, strict=True)]
        return View(root, tuple(ranges))

    def _result(self, param: Value, root: Value) -> Array:
        padding = self.padding.get(root)
        array = self.memory[root]
        if padding is None:
            return array
        return self.numbers.unpad(array, padding.low, param.ref.shape)

    # --- blocks and ops ---

    def block(self, block: Block, args: Sequence[Any] = ()) -> list[Any]:
        """Run a block with its parameters bound; what it yields."""
        for param, arg in zip(block.params, args, strict=True):
            self.env[param] = arg
        for op in block.ops:
            self.op(op)
        return [self.env[v] for v in block.yields]

    def op(self, op: Op) -> None:
        rule = self.RULES.get(op.name)
        if rule is not None:
            results = rule(self, op)
        else:
            operands = [self.env[v] for v in op.operands]
            results = run_pure(self.numbers, op, operands)
        for value, result in zip(op.results, results or (), strict=True):
            self.env[value] = result

    def do_fused(self, op: Op) -> list[Array]:
        """An op that stands for several (`ops/fused.py`): run those."""
        if op not in self._blocks:
            self._blocks[op] = written_out(op)
        return self.block(self._blocks[op])

    def do_matrix_unit(self, op: Op) -> list[Array]:
        """What its region says."""
        self.note_instruction(op)
        return self.block(op.regions[0], [self.env[v] for v in op.operands])

    def note_instruction(self, op: Op) -> None:
        """Called before each instruction to a matrix unit (checked mode watches)."""

    # --- memory ---

    def access(self, op: Op) -> Access:
        known = self._accesses.get(op)
        if known is None:
            known = self._accesses[op] = Access.of(op)
        return known

    def take(self, root: Value, picks: Picks, mask=None, other=None) -> Array:
        """Read a root's elements: every read of memory comes through here."""
        return self.numbers.take(self.memory[root], picks, mask, other)

    def put(self, root: Value, picks: Picks, value: Array, mask=None) -> None:
        """Write a root's elements: every write but atomics comes through here."""
        self.memory[root] = self.numbers.put(self.memory[root], picks, value, mask)

    def do_load(self, op: Op) -> tuple[Array]:
        access = self.access(op)
        mask, other = (self._maybe(v) for v in (access.mask, access.other))
        view, entries = self._entries(access)
        return (self.read(view, entries, mask, other),)

    def do_store(self, op: Op) -> None:
        access = self.access(op)
        assert access.value is not None
        view, entries = self._entries(access)
        self.write(view, entries, self.env[access.value], self._maybe(access.mask))

    def _maybe(self, value: Value | None) -> Array | None:
        return None if value is None else self.env[value]

    def _entries(self, access: Access) -> tuple[View, list[Any]]:
        operands = [self.env[v] for v in access.index_operands]
        return self.env[access.ref], entries_of(access.index, operands)

    def read(self, view: View, entries: Any = None, mask=None, other=None) -> Array:
        """Elements of a view; all of them where `entries` is None."""
        n = self.numbers
        if not view.steps:
            if entries is None:
                picks = whole_picks(view.ranges)
            else:
                picks = picks_of(view.ranges, entries, n, mask is not None, reads=True)
            value = self.take(view.root, picks, mask, other)
            if not view.fills:
                return value
            filled = self._filled(value, view, picks)
            return filled if mask is None else n.select(mask, filled, value)
        picks = whole_picks(view.ranges)
        base = self._filled(self.take(view.root, picks), view, picks)
        for step in view.steps:
            base = self._apply_step(base, step)
        return base if entries is None else self._index(base, entries, mask, other)

    def _filled(self, value: Array, view: View, picks: Picks) -> Array:
        """What was read, with fill values where it is outside."""
        for fill in view.fills:
            value = self.numbers.fill_outside(value, fill.picks(picks), fill.value)
        return value

    def write(self, view: View, entries: Any, value: Array, mask: Array | None) -> None:
        n = self.numbers
        if self.predicate is not None:  # a branch folded into selects
            value = n.select(self.predicate, value, self.read(view, entries))
        if not view.steps:
            picks = picks_of(view.ranges, entries, n, mask is not None)
            self.put(view.root, picks, value, mask)
            return
        self._rewrite(view, lambda part: self._update(part, entries, value, mask))

    def _rewrite(self, view: View, change: Callable[[Array], Array]) -> None:
        """Change the end of a chain of views that are not rectangles."""
        picks = whole_picks(view.ranges)
        parts = [self._filled(self.take(view.root, picks), view, picks)]
        for step in view.steps:
            parts.append(self._apply_step(parts[-1], step))
        value = change(parts[-1])
        for step, before in zip(
            reversed(view.steps), reversed(parts[:-1]), strict=True
        ):
            value = self._undo_step(before, step, value)
        self.put(view.root, picks, value)

    def _apply_step(self, value: Array, step: tuple[str, Any]) -> Array:
        kind, arg = step
        if kind == "index":
            return self._index(value, arg, None, None)
        return self.numbers.reinterpret(value, kind, arg)

    def _undo_step(self, before: Array, step: tuple[str, Any], value: Array) -> Array:
        kind, arg = step
        if kind == "index":
            return self._update(before, arg, value, None)
        return self.numbers.restore(before, kind, arg, value)

    def _index(self, value: Array, entries: Any, mask: Any, other: Any) -> Array:
        ranges = [Range(0, size) for size in value.shape]
        picks = picks_of(ranges, entries, self.numbers, mask is not None, reads=True)
        return self.numbers.take(value, picks, mask, other)

    def _update(self, value: Array, entries: Any, new: Array, mask: Any) -> Array:
        ranges = [Range(0, size) for size in value.shape]
        picks = picks_of(ranges, entries, self.numbers, mask is not None)
        return self.numbers.put(value, picks, new, mask)

    def do_atomic_rmw(self, op: Op) -> tuple[Array]:
        access, kind = self.access(op), op.attrs["kind"]
        view, entries = self._entries(access)
        value, mask = self.env[access.value], self._maybe(access.mask)  # type: ignore[index]
        if view.steps:
            return (self._rmw_at_end(view, entries, kind, value, mask),)
        picks = picks_of(view.ranges, entries, self.numbers, mask is not None)
        old = self.rmw(view.root, picks, kind, value, mask)
        return (self._filled(old, view, picks),)

    def rmw(self, root: Value, picks: Picks, kind: str, value: Array, mask) -> Array:
        memory, old = self.numbers.rmw(self.memory[root], picks, kind, value, mask)
        self.memory[root] = memory
        return old

    def _rmw_at_end(self, view: View, entries: Any, kind: str, value, mask) -> Array:
        """Through views that are not rectangles: on a copy of what they show."""
        found: list[Array] = []

        def change(part: Array) -> Array:
            ranges = [Range(0, size) for size in part.shape]
            picks = picks_of(ranges, entries, self.numbers, mask is not None)
            part, old = self.numbers.rmw(part, picks, kind, value, mask)
            found.append(old)
            return part

        self._rewrite(view, change)
        return found[0]

    def do_atomic_cas(self, op: Op) -> tuple[Array]:
        access = self.access(op)
        view, entries = self._entries(access)
        compare, value = self.env[access.compare], self.env[access.value]  # type: ignore[index]
        old = self.read(view, entries)
        same = self.numbers.combine("eq", old, compare)
        self.write(view, entries, self.numbers.select(same, value, old), None)
        return (old,)

    def do_alloc(self, op: Op) -> tuple[View]:
        root = self.root_for(op)
        self.allocate(root)
        return (self._whole(op.result, root),)

    def allocate(self, root: Value) -> None:
        self.memory[root] = self.numbers.uninitialised(root.ref)

    def root_for(self, op: Op) -> Value:
        """What names the memory of an allocation."""
        return op.result

    # --- views ---

    def do_subview(self, op: Op) -> tuple[View]:
        if op.result in self._over_edges:
            view, entries = self._copied_entries(self.access(op))
            if not view.steps:
                return (reach(view, entries, self.numbers),)
        view, entries = self._entries(self.access(op))
        return (narrow(view, entries, self.numbers),)

    def _copied_entries(self, access: Access) -> tuple[View, list[Any]]:
        """Of a view that the copy engine uses."""
        return Walker._entries(self, access)

    def _add_step(self, op: Op, kind: str, arg: Any) -> tuple[View]:
        view: View = self.env[op.operands[0]]
        return (replace(view, steps=(*view.steps, (kind, arg))),)

    def do_reshape_view(self, op: Op) -> tuple[View]:
        return self._add_step(op, "reshape", op.attrs["shape"])

    def do_transpose_view(self, op: Op) -> tuple[View]:
        return self._add_step(op, "transpose", op.attrs["perm"])

    def do_block_view(self, op: Op) -> tuple[View]:
        view, *indices = (self.env[v] for v in op.operands)
        window = op.attrs["window"]
        return (window_ranges(self.numbers, window, view, indices, padded=False),)

    def do_bitcast_view(self, op: Op) -> tuple[View]:
        before, after = op.operands[0].ref, op.result.ref
        return self._add_step(op, "bitcast", (before.tile, after.tile))

    # --- copies and semaphores: a copy happens when it is started ---

    def do_copy_start(self, op: Op) -> None:
        source, target = (self.env[v] for v in op.operands[:2])
        everything = entries_of(full_index(op.operands[1].ref.shape), ())
        self.write(target, everything, self.read(source), None)
        if len(op.operands) > 2 and op.operands[2].ref.space != "mbarrier":
            self._count(self.env[op.operands[2]], op.operands[2], 1)

    def do_copy_wait(self, op: Op) -> None:
        if len(op.operands) > 2:
            self._count(self.env[op.operands[2]], op.operands[2], -1)

    def do_indexed_copy_start(self, op: Op) -> None:
        source, target, semaphore, rows = op.operands
        places = self.read(self.env[rows]) if rows.is_ref else self.env[rows]
        is_read = op.attrs["indexed"] == "source"
        table, block = (source, target) if is_read else (target, source)
        everything = full_index(block.ref.shape)
        indexed = entries_of((Gather(), *everything[1:]), [places])
        if is_read:
            value = self.read(self.env[table], indexed)
            self.write(self.env[block], entries_of(everything, ()), value, None)
        elif op.attrs["add"]:
            value = self.read(self.env[block])
            self.update(self.env[table], indexed, "add", value)
        else:
            value = self.read(self.env[block])
            self.write(self.env[table], indexed, value, None)
        self._count(self.env[semaphore], semaphore, 1)

    def update(self, view: View, entries: Any, kind: str, value: Array) -> None:
        """Combine what is there with a value, element by element."""
        if view.steps:
            self._rmw_at_end(view, entries, kind, value, None)
            return
        picks = picks_of(view.ranges, entries, self.numbers, False)
        self.rmw(view.root, picks, kind, value, None)

    def do_sem_signal(self, op: Op) -> None:
        self._count(self.env[op.operands[0]], op.operands[0], self.env[op.operands[1]])

    def do_sem_wait(self, op: Op) -> None:
        self._refuse_between_programs(op)
        amount = self.numbers.mul(self.env[op.operands[1]], -1)
        self._count(self.env[op.operands[0]], op.operands[0], amount)

    def do_sem_reach(self, op: Op) -> None:
        self._refuse_between_programs(op)

    def _refuse_between_programs(self, op: Op) -> None:
        """A wait for other programs, which here run before or after this one."""
        is_shared = op.operands[0].ref.space == SEMAPHORES
        if is_shared and any(
            concurrent_axes(self.kernel, p) for p in self.kernel.body.ops
        ):
            self.do_refuse(op)

    def _count(self, view: View, ref: Value, amount: Any) -> None:
        everything = entries_of(full_index(ref.ref.shape), ())
        self.write(view, everything, self.numbers.add(self.read(view), amount), None)

    def do_sem_read(self, op: Op) -> tuple[Array]:
        return (self.read(self.env[op.operands[0]]),)

    # --- what GPUs have: a product is done where it starts, too ---

    def do_wgmma(self, op: Op) -> Sequence[Array]:
        sums, *sides = op.operands
        tiles = [self.read(self.env[v]) if v.is_ref else self.env[v] for v in sides]
        if op not in self._blocks:
            self._blocks[op] = product_of(op)
        return self.block(self._blocks[op], [self.env[sums], *tiles])

    def do_wgmma_wait(self, op: Op) -> list[Array]:
        return [self.env[v] for v in op.operands]

    def do_order(self, op: Op) -> None:
        """Waits, arrivals and fences: one op after another, all is done already."""

    def do_refuse(self, op: Op) -> None:
        raise UnsupportedError(
            f"the emulation runs one op after another: it does not support '{op.name}'",
            [("kernel", self.kernel.name)],
            at=op.loc,
            fix="interpret=pl.Checked() runs cores and roles concurrently",
        )

    # --- debugging and promises ---

    def do_debug_print(self, op: Op) -> None:
        values = [self.env[v] for v in op.operands]
        self.numbers.debug_print(op.attrs["format"], values, self.predicate)

    def do_debug_check(self, op: Op) -> None:
        ok, *values = [self.env[v] for v in op.operands]
        self.numbers.debug_check(ok, op.attrs["message"], values, op)

    def do_delay(self, op: Op) -> None:
        return None

    def do_assume_multiple(self, op: Op) -> tuple[Array]:
        return (self.env[op.operands[0]],)

    # --- control: memory that a region may write is carried through it ---

    def written(self, *regions: Block) -> tuple[Value, ...]:
        """The memory that regions may write, as it is kept at the moment.

        None where memory is changed in place: nothing has to be carried then.
        """
        if not self.numbers.functional:
            return ()
        roots = self.roots.written(*regions)
        return tuple(self.standing_for.get(root, root) for root in roots)

    def do_for(self, op: Op) -> Sequence[Array]:
        first, limit, step, *carry = (self.env[v] for v in op.operands)
        body = Loop.of(op).body
        written = self.written(body)

        def run(i: Array, values: list[Array]) -> list[Array]:
            return self._enter(written, values, lambda v: self.block(body, [i, *v]))

        out = self.numbers.counted(first, limit, step, self._pack(written, carry), run)
        return self._unpack(written, out)

    def do_while(self, op: Op) -> Sequence[Array]:
        loop = While.of(op)
        condition, body = loop.condition, loop.body
        written = self.written(body, condition)

        def go_on(values: list[Array]) -> Array:
            def check(carried: list[Array]) -> list[Array]:
                return self.block(condition, carried)

            return self._enter(written, values, check)[-1]

        def run(values: list[Array]) -> list[Array]:
            return self._enter(written, values, lambda v: self.block(body, v))

        carry = [self.env[v] for v in loop.inits]
        out = self.numbers.while_(go_on, run, self._pack(written, carry))
        return self._unpack(written, out)

    def do_custom(self, op: Op) -> Sequence[Array]:
        return self.block(op.regions[0], [self.env[v] for v in op.operands])

    def do_inline_cuda(self, op: Op) -> Sequence[Array]:
        if not op.regions:
            raise UnsupportedError(
                "plgpu.inline_cuda without reference= runs on GPUs only",
                [("kernel", self.kernel.name), ("text", op.attrs["text"])],
                op.loc,
                "pass reference=, the same as a function of whole operands",
            )
        return self.do_custom(op)

    def do_cond(self, op: Op) -> Sequence[Array]:
        which = self.env[op.operands[0]]
        if self.numbers.functional and self.roots.folds_into_selects(op):
            return self._folded(op, which)
        functional = self.numbers.functional
        written = self.roots.written(*op.regions) if functional else ()
        with self._blocks_as_roots(op, written) as written:
            branches = [self._branch(region, written) for region in op.regions]
            out = self.numbers.branch(which, branches, self._pack(written, []))
            return self._unpack(written, out)

    def _branch(self, region: Block, written: Sequence[Value]):
        return lambda values: self._enter(written, values, lambda v: self.block(region))

    def _folded(self, op: Op, which: Array) -> Sequence[Array]:
        """A short branch without results: run it, writing only where it is taken."""
        for n, region in enumerate(op.regions):
            if not region.ops:
                continue
            outer = self.predicate
            taken = self.numbers.is_branch(which, n, len(op.regions))
            self.predicate = (
                taken if outer is None else self.numbers.combine("and", outer, taken)
            )
            self.block(region)
            self.predicate = outer
        return ()

    def _blocks_as_roots(self, op: Op, written: Sequence[Value]):
        """While a branch runs, a block it writes stands for the whole root array."""
        from pallasite.interpret.windows import blocks_as_roots

        return blocks_as_roots(self, op, written)

    def _enter(
        self,
        written: Sequence[Value],
        values: list[Array],
        run: Callable[[list[Array]], list[Array]],
    ) -> list[Array]:
        """Run a region on carried memory and values; memory and values after it."""
        if not self.numbers.functional:
            return run(values)
        # Staged values must not outlive the region they are staged in.
        saved, saved_env = dict(self.memory), dict(self.env)
        self._restore(written, values)
        results = run(values[len(written) :])
        out = [*(self.memory[r] for r in written), *results]
        self.memory, self.env = saved, saved_env
        return out

    def _pack(self, written: Sequence[Value], carry: Sequence[Array]) -> list[Array]:
        return [*(self.memory[r] for r in written), *carry]

    def _restore(self, written: Sequence[Value], values: Sequence[Array]) -> None:
        for root, array in zip(written, values, strict=False):
            self.memory[root] = array

    def _unpack(self, written: Sequence[Value], out: Sequence[Array]) -> list[Array]:
        self._restore(written, out)
        return list(out[len(written) :])

    # --- the grid ---

    def do_pipeline(self, op: Op) -> None:
        sizes, body = self.grid_sizes(op), Pipeline.of(op).body
        written = self.written(body)
        if self.predicate is not None:
            raise InternalError("a pipeline inside a folded branch", at=op.loc)

        def program(ids: list[Array], values: list[Array]) -> list[Array]:
            def run(_: list[Array]) -> list[Array]:
                self.before_program(op, ids)
                self.block(body, [*ids, *self.window_refs(op, ids)])
                self.after_program(op, ids)
                return []

            return self._enter(written, values, run)

        out = self.numbers.grid(sizes, self._pack(written, []), program)
        self._unpack(written, out)

    def _reads_padding(self, window: Window, root: Value) -> bool:
        """Is the root's padding what the window shows outside?

        A result may write into the padding that an aliased operand must read as its
        fill, and windows of one operand may want different values: those check bounds.
        """
        if window.fill is None or root not in self.padding:
            return root in self.kernel.params
        wanted = {repr(fill) for fill in self.padding[root].fills}
        written = self.roots.written(self.kernel.body)
        return wanted == {repr(window.fill)} and root not in written

    def grid_sizes(self, op: Op) -> list[Array | int]:
        sizes = Pipeline.of(op).sizes
        return [self.env[n] if isinstance(n, Value) else n for n in sizes]

    def window_refs(self, op: Op, ids: list[Array]) -> list[View]:
        """The blocks that a program sees."""
        pipeline = Pipeline.of(op)
        pads = self.numbers.functional and op in self.kernel.body.ops
        refs = []
        for n, (array, window, index_map, _) in enumerate(pipeline.shown):
            view = self.env[array]
            indices = self.indices(op, n, self.block(index_map, ids))
            padded = pads and self._reads_padding(window, view.root)
            refs.append(window_ranges(self.numbers, window, view, indices, padded))
        return refs

    def indices(self, op: Op, window: int, found: list[Array]) -> list[Array]:
        """What a window's index map gave (checked mode looks at it)."""
        return found

    def before_program(self, op: Op, ids: list[Array]) -> None:
        """Called before each program's index maps and body (checked mode watches)."""

    def after_program(self, op: Op, ids: list[Array]) -> None:
        """Called after each program's body."""

    RULES: ClassVar[Mapping[str, Rule]] = {
        "load": do_load,
        "store": do_store,
        "atomic_rmw": do_atomic_rmw,
        "atomic_cas": do_atomic_cas,
        "alloc": do_alloc,
        "subview": do_subview,
        "reshape_view": do_reshape_view,
        "transpose_view": do_transpose_view,
        "block_view": do_block_view,
        "bitcast_view": do_bitcast_view,
        "copy_start": do_copy_start,
        "copy_wait": do_copy_wait,
        "indexed_copy_start": do_indexed_copy_start,
        "indexed_copy_wait": do_copy_wait,
        "sem_signal": do_sem_signal,
        "sem_wait": do_sem_wait,
        "sem_reach": do_sem_reach,
        "sem_read": do_sem_read,
        "wgmma": do_wgmma,
        "wgmma_wait": do_wgmma_wait,
        "barrier_expect": do_order,
        "barrier_arrive": do_order,
        "barrier_wait": do_order,
        "fence_async": do_order,
        "bulk_commit": do_order,
        "bulk_wait": do_order,
        "load_wait": do_order,
        "set_registers": do_order,
        "inline_cuda": do_inline_cuda,
        "named_barrier": do_refuse,
        "warps": do_refuse,
        "tensor_mma": do_refuse,
        "tensor_copy": do_refuse,
        "tensor_commit": do_refuse,
        "tensor_wait": do_order,
        "cluster_barrier": do_refuse,
        "cluster_copy": do_refuse,
        "cluster_arrive": do_refuse,
        "roles": do_refuse,
        "barrier": do_refuse,
        "sem_signal_core": do_refuse,
        "fetch_and_add": do_refuse,
        "remote_copy_start": do_refuse,
        "peer_device": do_refuse,
        "peer_block": do_refuse,
        "async_store": do_refuse,
        "barrier_test": do_refuse,
        "sem_signal_device": do_refuse,
        "barrier_semaphore": do_refuse,
        "device_number": do_refuse,
        "debug_print": do_debug_print,
        "debug_check": do_debug_check,
        "delay": do_delay,
        "assume_multiple": do_assume_multiple,
        "dot_add": do_fused,
        "dot_store": do_fused,
        "matrix_unit": do_matrix_unit,
        "for": do_for,
        "while": do_while,
        "cond": do_cond,
        "custom": do_custom,
        "pipeline": do_pipeline,
    }
