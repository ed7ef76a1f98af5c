"""Resumable regions (coroutines), so that cores and roles run concurrently.

`steps` runs a block as a Python generator that yields a Pause wherever another context
may take over. Only blocks with ops that pause are run this way, decided once per block;
all others are run by the plain walker. Memory is changed in place here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.interpret.schedule import Context, Join, Schedule, Steps
from pallasite.interpret.views import View
from pallasite.interpret.walker import Walker
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.opdef import EXPLICIT, table
from pallasite.ir.roles import Pipeline
from pallasite.ops.gpu import concurrent_axes

Array = Any

CORES = ("core_parallel", "subcore_parallel")
SHARED = "vmem_shared"  # memory of the subcores of one core


def core_axes(kernel: Kernel, op: Op) -> tuple[int, ...]:
    """The axes of a kernel's own grid whose programs are run by different cores."""
    if op.name != "pipeline" or op not in kernel.body.ops:
        return ()
    grid, semantics = Pipeline.of(op).grid, Pipeline.of(op).semantics
    return tuple(n for n, s in enumerate(semantics) if s in CORES and grid[n] != 1)


class Pauses:
    """Which ops and blocks of a kernel may pause."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.rows = kernel, table()
        self._ops: dict[Op, bool] = {}

    def block(self, block: Block) -> bool:
        return any(self.op(op) for op in block.ops)

    def op(self, op: Op) -> bool:
        known = self._ops.get(op)
        if known is None:
            explicit = self.rows[op.name].level == EXPLICIT
            inside = any(self.block(region) for region in op.regions)
            known = explicit or inside or bool(core_axes(self.kernel, op))
            self._ops[op] = known
        return known


StepsRule = Callable[[Any, Op], Steps]  # (walker, op), run as a generator


class ResumableWalker(Walker):
    """The walker over an in-place number system, with contexts.

    `RESUMABLE` says which method runs which op where it may pause; `RULES` of the plain
    walker where it cannot.
    """

    numbers: NumpyNumbers
    schedule: Schedule

    def __init__(self, kernel: Kernel, numbers: NumpyNumbers):
        super().__init__(kernel, numbers)
        self.pauses = Pauses(kernel)
        self.cores: list[Context] = []  # of the mesh that runs
        # Per block: each op, and the rule that runs it in steps if it may pause.
        self._plans: dict[Block, list[tuple[Op, StepsRule | None]]] = {}

    @property
    def name(self) -> str:
        """What its outermost context is called."""
        return "the kernel"

    def run_body(self) -> None:
        if self.pauses.block(self.kernel.body):
            self.schedule.run([self])
        else:
            super().run_body()

    def kernel_steps(self) -> Steps:
        return self.steps(self.kernel.body)

    # --- blocks ---

    def block(self, block: Block, args: Sequence[Any] = ()) -> list[Any]:
        results = super().block(block, args)
        self.leave(block)
        return results

    def steps(self, block: Block, args: Sequence[Any] = ()) -> Steps:
        """Run a block, as `block` does, pausing where it may have to wait."""
        for param, arg in zip(block.params, args, strict=True):
            self.env[param] = arg
        for op, rule in self._plan(block):
            if rule is None:
                self.op(op)
                continue
            self.reach(op)
            results = yield from rule(self, op)
            for value, result in zip(op.results, results or (), strict=True):
                self.env[value] = result
        results = [self.env[v] for v in block.yields]
        self.leave(block)
        return results

    def _plan(self, block: Block) -> list[tuple[Op, StepsRule | None]]:
        known = self._plans.get(block)
        if known is None:
            known = self._plans[block] = [
                (op, self.RESUMABLE[op.name] if self.pauses.op(op) else None)
                for op in block.ops
            ]
        return known

    def reach(self, op: Op) -> None:
        """Called before an op that may pause (checked mode follows)."""

    def leave(self, block: Block) -> None:
        """Called at the end of each run of a block, before its memory is released."""

    # --- control ---

    def steps_for(self, op: Op) -> Steps:
        first, limit, step, *carry = (self.env[v] for v in op.operands)
        for i in self.numbers.counter(first, limit, step):
            carry = yield from self.steps(op.regions[0], [i, *carry])
        return carry

    def steps_while(self, op: Op) -> Steps:
        condition, body = op.regions
        carry = [self.env[v] for v in op.operands]
        while True:
            (go_on,) = yield from self.steps(condition, carry)
            if not self.numbers.truth(go_on):
                return carry
            carry = yield from self.steps(body, carry)

    def steps_cond(self, op: Op) -> Steps:
        which = self.numbers.chosen(self.env[op.operands[0]], len(op.regions))
        return (yield from self.steps(op.regions[which]))

    def steps_custom(self, op: Op) -> Steps:
        operands = [self.env[v] for v in op.operands]
        return (yield from self.steps(op.regions[0], operands))

    def steps_matrix_unit(self, op: Op) -> Steps:
        self.note_instruction(op)
        operands = [self.env[v] for v in op.operands]
        return (yield from self.steps(op.regions[0], operands))

    # --- the grid, cores and roles ---

    def steps_pipeline(self, op: Op) -> Steps:
        programs = self.grid_programs(op)
        axes = core_axes(self.kernel, op)
        if concurrent_axes(self.kernel, op):
            yield from self._clusters(op, programs)
            return
        if not axes:
            yield from self._programs(op, programs)
            return
        cores: dict[tuple[int, ...], list[list[Array]]] = {}
        for ids in programs:
            cores.setdefault(tuple(int(ids[a]) for a in axes), []).append(ids)
        group = self.schedule.fork(
            [
                (self.core_name(op, axes, place), self._core(op, mine))
                for place, mine in cores.items()
            ]
        )
        self._join_subcores(op, axes, dict(zip(cores, group, strict=True)))
        for number, context in enumerate(group):
            context.core, context.memory = number, {}
            self._give_own_memory(context)
        self.cores = group
        yield Join(op, group)

    def grid_programs(self, op: Op) -> list[list[Array]]:
        """The ids of all programs, in the order in which they run."""
        return list(self.numbers.programs(self.grid_sizes(op)))

    def do_pipeline(self, op: Op) -> None:
        for ids in self.grid_programs(op):
            self.before_program(op, ids)
            self.block(Pipeline.of(op).body, [*ids, *self.window_refs(op, ids)])
            self.after_program(op, ids)

    def _programs(self, op: Op, programs: Sequence[list[Array]]) -> Steps:
        for ids in programs:
            self.before_program(op, ids)
            refs = self.window_refs(op, ids)
            yield from self.steps(Pipeline.of(op).body, [*ids, *refs])
            self.after_program(op, ids)

    def _clusters(self, op: Op, programs: Sequence[list[Array]]) -> Steps:
        """Clusters one after another; the blocks of each concurrently. Where all blocks
        wait for each other, they are like one cluster."""
        axes = concurrent_axes(self.kernel, op)
        clusters: dict[tuple[int, ...], list[list[Array]]] = {}
        for ids in programs:
            others = (int(n) for axis, n in enumerate(ids) if axis not in axes)
            clusters.setdefault(tuple(others), []).append(ids)
        for blocks in clusters.values():
            self.cores = self.schedule.fork(
                [
                    (self.core_name(op, axes, [int(ids[a]) for a in axes]), steps)
                    for ids in blocks
                    for steps in [self._programs(op, [ids])]
                ]
            )
            for number, (context, ids) in enumerate(
                zip(self.cores, blocks, strict=True)
            ):
                context.core, context.memory = number, {}
                context.place = {axis - len(ids): int(ids[axis]) for axis in axes}
            yield Join(op, self.cores)

    def _core(self, op: Op, programs: Sequence[list[Array]]) -> Steps:
        yield from self._programs(op, programs)
        self.leave(self.kernel.body)

    def _join_subcores(
        self, op: Op, axes: Sequence[int], cores: Mapping[tuple[int, ...], Context]
    ) -> None:
        """Subcores of one core synchronise at its barriers, and share memory."""
        kinds = [Pipeline.of(op).semantics[a] for a in axes]
        if "subcore_parallel" not in kinds:
            return
        together: dict[tuple[int, ...], list[Context]] = {}
        for place, context in cores.items():
            pairs = zip(place, kinds, strict=True)
            core = tuple(n for n, kind in pairs if kind != "subcore_parallel")
            context.siblings = together.setdefault(core, [])
            context.siblings.append(context)

    def _give_own_memory(self, context: Context) -> None:
        """Memory allocated outside the grid is private to each core, or shared with the
        other subcores of its core."""
        own, first = context.memory, context.siblings[0].memory
        assert own is not None and first is not None
        for op in self.kernel.body.ops:
            if op.name != "alloc" or op.result not in context.env:
                continue
            if op.result.ref.space == SHARED and op.result in first:
                own[op.result] = first[op.result]
                continue
            own[op.result] = Value(op.result.type, op.result.name)
            self.allocate(own[op.result])
        for value, found in context.env.items():
            if isinstance(found, View) and found.root in own:
                context.env[value] = replace(found, root=own[found.root])

    def root_for(self, op: Op) -> Value:
        context = self.schedule.current
        if context is not None and context.memory is not None:
            new = Value(op.result.type, op.result.name)
            context.memory.setdefault(op.result, new)
        return self.own_root(op.result)

    def own_root(self, allocated: Value) -> Value:
        """What names an allocation's memory in the context that runs."""
        context = self.schedule.current
        if context is None or context.memory is None:
            return allocated
        return context.memory.get(allocated, allocated)

    def steps_roles(self, op: Op) -> Steps:
        group = self.schedule.fork(
            [(f"role {n}", self.steps(r)) for n, r in enumerate(op.regions)]
        )
        yield from self.side_by_side(op, group)

    def side_by_side(self, op: Op, group: Sequence[Context]) -> Steps:
        self.forked(op, group)
        yield Join(op, group)
        self.joined(group)

    def core_name(self, op: Op, axes: Sequence[int], place: Sequence[int]) -> str:
        return f"core {place}"

    def forked(self, op: Op, roles: Sequence[Context]) -> None:
        """Called after roles are made, before any of them runs."""

    def joined(self, roles: Sequence[Context]) -> None:
        """Called after roles have ended, in the context that started them."""

    # --- what a context keeps while others run, besides its values ---

    def state(self) -> Any:
        return None

    def go_to(self, context: Context) -> None:
        self.env = context.env

    RULES: ClassVar = {**Walker.RULES, "pipeline": do_pipeline}
    RESUMABLE: ClassVar[Mapping[str, StepsRule]] = {
        "for": steps_for,
        "while": steps_while,
        "cond": steps_cond,
        "custom": steps_custom,
        "matrix_unit": steps_matrix_unit,
        "pipeline": steps_pipeline,
        "roles": steps_roles,
    }
