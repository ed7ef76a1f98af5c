"""The explicit level of GPUs: barriers with phases, copies and matmuls in flight.

A barrier (mbarrier) counts arrivals and bytes; a phase is complete when all have
arrived. Copies to shared memory land, stores by the copy engine read their source, and
matmuls read their operands, when the schedule picks them: between their start and the
wait that ends them. Each role is one context; its warpgroups run the same code
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from pallasite.interpret.copies import Copy, End, InFlight
from pallasite.interpret.devices import DeviceWalker
from pallasite.interpret.numbers import run_pure
from pallasite.interpret.numpy_memory import Elements
from pallasite.interpret.schedule import Context, Pause, Steps
from pallasite.interpret.shadow_tiles import Partly
from pallasite.interpret.views import entries_of
from pallasite.ir.nodes import Block, Op, Value, full_index, walk
from pallasite.ir.roles import Roles, Wgmma
from pallasite.ops.gpu import is_group_load, product_of

Array = Any
WARPS, THREADS = 4, 128  # of a warpgroup
GPU_OPS = ("barrier_expect", "barrier_arrive", "barrier_wait", "wgmma", "wgmma_wait")
GPU_OPS = (*GPU_OPS, "named_barrier", "fence_async", "bulk_commit", "bulk_wait")
GPU_OPS = (*GPU_OPS, "cluster_barrier", "cluster_arrive", "cluster_copy")
GPU_OPS = (*GPU_OPS, "tensor_mma", "tensor_copy", "tensor_commit")
GPU_OPS = (*GPU_OPS, "barrier_test", "async_store", "peer_block", "load_wait")


def uses_gpu_level(block: Block) -> bool:
    return any(op.name in GPU_OPS or is_group_load(op) for op in walk(block))


def _bytes(end: End) -> int:
    type_ = end.ref.ref
    return type_.size * type_.dtype.bits // 8


@dataclass(eq=False)
class Barrier:
    """One mbarrier: its phase, and what has arrived in it."""

    end: End
    arrivals: int  # that complete a phase
    phase: int = 0  # how many are complete
    arrived: int = 0
    missing: int = 0  # bytes expected and not landed; below 0: landed, not expected
    expected: int = 0  # bytes, in this phase

    def facts(self, name: str) -> list[tuple[str, Any]]:
        return [
            ("barrier", name),
            ("phase", f"{self.phase} (parity {self.phase % 2})"),
            ("arrivals", f"{self.arrived} of {self.arrivals}"),
            ("bytes", f"{self.expected - self.missing} of {self.expected} expected"),
        ]


class Load(Copy):
    """A copy to shared memory that arrives at a barrier."""

    fix: ClassVar[str] = "wait for the phase of its barrier first"
    fix_left: ClassVar[str] = "wait for the phase of its barrier (plgpu.barrier_wait)"
    barrier: Barrier
    phase: int


@dataclass(eq=False)
class ValueStore(Load):
    """A store of a value to shared memory that arrives at a barrier."""

    kind: ClassVar[str] = "store"
    data: Any = None
    atomic: str | None = None

    @cached_property
    def reads(self) -> dict[str, End]:
        return {}


class Poll(Pause):
    """A look at a barrier, perhaps one of many until its phase is over."""

    polls = True

    def __init__(self, op: Op, walker: "GpuWalker", barrier: Barrier):
        super().__init__(op)
        self.walker, self.barrier = walker, barrier

    def wanted(self) -> Sequence[InFlight]:
        return self.walker.signalling(self.barrier)


class GroupLoad(Copy):
    """A copy to shared memory that its context waits for."""

    fix = "wait for it first (plgpu.wait_gmem_to_smem)"
    fix_left = "wait for it (plgpu.wait_gmem_to_smem)"
    semaphore_key = "load"  # type: ignore[assignment]  # no copy_wait is for it


class Store(Copy):
    """A copy from shared memory, in a group that its context waits for."""

    fix = "wait for its group first (plgpu.wait_smem_to_gmem)"
    fix_left = (
        "commit its group and wait for it (plgpu.commit_smem_to_gmem_group, "
        "plgpu.wait_smem_to_gmem)"
    )
    semaphore_key = "bulk"  # type: ignore[assignment]  # no copy_wait is for it
    write_lane = 0


@dataclass(eq=False)
class Product(InFlight):
    """A wgmma in flight. `sums` is a value, or the matmul that produces it."""

    op: Op
    sums: Any
    lhs: Any  # an End, or the tile
    rhs: End
    others: list["Product"]  # in flight in the same context, in order
    starter: Context | None
    program: str | None
    state: Any
    lane: int
    moved: bool = False
    value: Any = None

    kind: ClassVar[str] = "wgmma"
    fix: ClassVar[str] = "wgmma_wait for it first"
    fix_left: ClassVar[str] = "wgmma_wait(0), or read the accumulator"
    through_window: ClassVar[bool] = False
    writes: ClassVar[dict[str, End]] = {}

    @property
    def reads(self) -> dict[str, End]:
        ends = {"left operand": self.lhs, "right operand": self.rhs}
        return {name: end for name, end in ends.items() if isinstance(end, End)}

    @property
    def ends(self) -> list[End]:
        return list(self.reads.values())

    @property
    def next_to_move(self) -> "Product":
        return next((p for p in self.others if not p.moved), self)


class PhaseWait(Pause):
    """Until the phase of a parity is complete: this one, or the one before it."""

    def __init__(self, op: Op, walker: "GpuWalker", barrier: Barrier, parity: int):
        super().__init__(op)
        self.walker, self.barrier = walker, barrier
        same = barrier.phase % 2 == parity
        self.phase = barrier.phase if same else barrier.phase - 1
        self.is_over = False
        # How many phases whoever waits has seen the end of; more may have ended.
        self.seen = walker.phases_seen.get((walker.schedule.current, barrier), 0)

    def ready(self) -> bool:
        return self.barrier.phase > self.phase

    def wanted(self) -> Sequence[InFlight]:
        return self.walker.signalling(self.barrier)

    def text(self) -> str:
        name = self.walker.monitor.describe(self.barrier.end.ref)
        place = list(self.walker.place(self.barrier))
        b = self.barrier
        missing = f", {b.missing} bytes missing" if b.missing > 0 else ""
        if b.missing < 0:
            missing = f", {-b.missing} bytes arrived that no copy here expects"
        late = f"; {b.phase} ended, it saw {self.seen}" if self._is_late() else ""
        return (
            f"waits for phase {self.phase} (parity {self.phase % 2}) of {name} at "
            f"{place}, which has {b.arrived} of {b.arrivals} arrivals{missing}{late}"
        )

    def _is_late(self) -> bool:
        """Phases completed that it has not waited for: a wait sees only parities."""
        return self.phase == self.barrier.phase and self.barrier.phase >= self.seen + 2

    def report(self) -> None:
        what = "a wait for a barrier phase that never completes"
        if self._is_late():
            what = "barrier phases completed without a wait for each of them"
            fix = (
                "count every copy and arrival of a phase in num_arrivals, and let the "
                "next phase complete only after a wait for this one"
            )
        elif self.barrier.arrived == self.barrier.arrivals:
            fix = "expect as many bytes as the copies bring"
        else:
            fix = "arrive as often as the barrier counts, or wait for the other parity"
        facts = [("waits for", f"phase {self.phase} (parity {self.phase % 2})")]
        if self._is_late():
            facts = [
                ("phases", f"{self.barrier.phase} completed, {self.seen} waited for")
            ]
        self.walker.report_barrier(self.barrier, what, facts, fix)


@dataclass(eq=False)
class Meeting:
    """A named barrier of the running roles: threads that have arrived."""

    rounds: int = 0
    threads: int = 0


class MeetingWait(Pause):
    """Until enough threads have arrived at a named barrier."""

    def __init__(self, op: Op, walker: "GpuWalker", meeting: Meeting):
        super().__init__(op)
        self.walker, self.meeting, self.round = walker, meeting, meeting.rounds

    def ready(self) -> bool:
        return self.meeting.rounds > self.round

    def text(self) -> str:
        attrs, here = self.op.attrs, self.meeting.threads
        return f"waits at barrier {attrs['id']}: {here} of {attrs['threads']} threads"

    def report(self) -> None:
        facts = [
            ("barrier", self.op.attrs["id"]),
            ("threads", f"{self.meeting.threads} of {self.op.attrs['threads']}"),
        ]
        what = "too few threads reach a named barrier"
        fix = "let as many threads reach it as it expects"
        self.walker.monitor.report("copies", what, facts, fix)


class GpuWalker(DeviceWalker):
    """The walker with barriers, copies and matmuls of GPUs."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.is_gpu = uses_gpu_level(self.kernel.body)
        self.barriers: dict[Any, Barrier] = {}
        self.phases_seen: dict[Any, int] = {}  # by context and barrier
        self.meetings: dict[Any, Meeting] = {}
        self.warpgroups: dict[Context, int] = {}
        self.products: dict[Context | None, list[Product]] = {}
        # Groups of stores per context; the last one is open.
        self.stores: dict[Context | None, list[list[Store]]] = {}
        self.group_loads: dict[Context | None, list[GroupLoad]] = {}
        self.unfenced: dict[Value, np.ndarray] = {}  # per element: number of a write
        self.plain_writes: list[tuple[int, int, Op | None]] = [(0, 0, None)]
        self._sums: dict[Op, Block] = {}

    def forked(self, op: Op, roles: Sequence[Context]) -> None:
        notes = Roles.of(op)
        for role, name, count in zip(roles, notes.names, notes.warpgroups, strict=True):
            role.name, self.warpgroups[role] = name, count
        super().forked(op, roles)

    def _warpgroups(self) -> int:
        context = self.schedule.current
        return 1 if context is None else self.warpgroups.get(context, 1)

    # --- barriers ---

    def allocate(self, root: Value) -> None:
        super().allocate(root)
        self.races.renew(root)
        self.unfenced.pop(root, None)
        if root.ref.space == "mbarrier":
            for key in [k for k in self.barriers if k[0] is root]:
                del self.barriers[key]

    def barrier(self, ref: Value) -> Barrier:
        return self.barrier_of(self._end(ref))

    def barrier_of(self, end: End) -> Barrier:
        known = self.barriers.get(end.key)
        if known is None:
            layout = end.root.ref.layout
            known = Barrier(end, layout.numbers[0] if layout is not None else 1)
            self.barriers[end.key] = known
        return known

    def place(self, barrier: Barrier) -> tuple[int, ...]:
        return tuple(low for low, _ in barrier.end.elements.box)

    def loads(self, barrier: Barrier) -> list[Load]:
        flying = self.copies.flying
        return [c for c in flying if isinstance(c, Load) and c.barrier is barrier]

    def signalling(self, barrier: Barrier) -> list[Any]:
        """What is in flight to a barrier, and may move now."""
        return [c for c in self.loads(barrier) if not c.moved]

    def phase_seen(self, barrier: Barrier, phase: int) -> None:
        """A context has waited for the end of a phase."""
        for load in self.loads(barrier):
            if load.phase <= phase and load.moved:
                self.copies.flying.remove(load)
                self.races.retire(load.lane)

    def report_barrier(
        self, barrier: Barrier, what: str, facts: Sequence[Any], fix: str
    ) -> None:
        name = f"{self.monitor.describe(barrier.end.root)} at {self.place(barrier)}"
        self.monitor.report("copies", what, [*barrier.facts(name), *facts], fix)

    def _arrive(self, barrier: Barrier, count: int) -> None:
        if barrier.arrived + count > barrier.arrivals:
            what = "more arrivals at a barrier than its phase expects"
            facts = [("arrives", f"{count} times")]
            fix = "count every arrival (each warp that runs barrier_arrive is one)"
            self.report_barrier(barrier, what, facts, fix)
        self.races.arrive((barrier, barrier.phase))
        barrier.arrived = min(barrier.arrived + count, barrier.arrivals)
        self._look_at_phase(barrier)

    def _look_at_phase(self, barrier: Barrier) -> None:
        """Complete the phase if everything has arrived."""
        if barrier.arrived < barrier.arrivals or barrier.missing > 0:
            return
        loads = [c for c in self.loads(barrier) if c.phase == barrier.phase]
        if barrier.missing < 0 or any(not c.moved for c in loads):
            what = "a barrier expects fewer bytes than its copies bring"
            brought = sum(_bytes(c.target) for c in loads)
            facts = [("copies bring", f"{brought} bytes")]
            facts += [("copy at", c.op.loc) for c in loads]
            fix = "expect the bytes of all copies of the phase"
            self.report_barrier(barrier, what, facts, fix)
        barrier.phase += 1
        barrier.arrived = barrier.missing = barrier.expected = 0
        for context in self.schedule.contexts:
            wait = context.pause
            if isinstance(wait, PhaseWait) and wait.barrier is barrier:
                self._look_at_wait(context, wait)

    def _look_at_wait(self, context: Context, wait: PhaseWait) -> None:
        """A wait sees only parities: two phases later, it waits for another one."""
        if wait.is_over or wait.barrier.phase - wait.phase < 2:
            return
        what = "a barrier phase completes before a wait for the previous one"
        facts = [
            ("waits", f"{context.name}, for phase {wait.phase}"),
            ("  at", wait.op.loc),
        ]
        fix = "complete the next phase only after this one was waited for"
        self.report_barrier(wait.barrier, what, facts, fix)

    def steps_barrier_expect(self, op: Op) -> Steps:
        barrier = self.barrier(op.operands[0])
        barrier.missing += op.attrs["bytes"]
        barrier.expected += op.attrs["bytes"]
        self._arrive(barrier, 1)
        yield Pause(op)

    def steps_barrier_arrive(self, op: Op) -> Steps:
        self._arrive(self.barrier(op.operands[0]), WARPS * self._warpgroups())
        yield Pause(op)

    def steps_barrier_wait(self, op: Op) -> Steps:
        barrier = self.barrier(op.operands[0])
        parity = self.numbers.certain(self.env[op.operands[1]], "a barrier's parity")
        wait = PhaseWait(op, self, barrier, int(parity) % 2)
        yield wait
        wait.is_over = True
        self._saw_end(barrier, wait.phase)

    def _saw_end(self, barrier: Barrier, phase: int) -> None:
        self.races.meet((barrier, phase))
        self.phases_seen[self.schedule.current, barrier] = phase + 1
        self.phase_seen(barrier, phase)

    def steps_barrier_test(self, op: Op) -> Steps:
        barrier = self.barrier(op.operands[0])
        yield Poll(op, self, barrier)
        parity = self.numbers.certain(self.env[op.operands[1]], "a barrier's parity")
        is_over = barrier.phase % 2 != int(parity) % 2
        if is_over:
            self._saw_end(barrier, barrier.phase - 1)
        return (np.bool_(is_over),)

    def steps_named_barrier(self, op: Op) -> Steps:
        context, attrs = self.schedule.current, op.attrs
        group = context.siblings[0] if context and context.siblings else None
        meeting = self.meetings.setdefault((group, attrs["id"]), Meeting())
        wait = MeetingWait(op, self, meeting)
        self.races.arrive((meeting, meeting.rounds))
        meeting.threads += THREADS * self._warpgroups()
        if meeting.threads >= attrs["threads"]:
            meeting.rounds, meeting.threads = meeting.rounds + 1, 0
        if attrs["arrive_only"]:
            yield Pause(op)
            return
        yield wait
        self.races.meet((meeting, wait.round))

    # --- the copy engine ---

    def steps_copy_start(self, op: Op) -> Steps:
        if len(op.operands) > 2 and op.operands[2].ref.space == "mbarrier":
            return self._steps_load(op)
        if len(op.operands) == 2 and self.is_gpu:
            if is_group_load(op):
                return self._steps_group_load(op)
            return self._steps_store(op)
        return super().steps_copy_start(op)

    def _started(self, kind: type, op: Op, semaphore: End | None) -> Any:
        source, target = (self._end(v) for v in op.operands[:2])
        program = self.monitor.program_text(self.monitor.program)
        where = self.schedule.current, program, self.state()
        lane = self.races.start_copy()
        return kind(op, source, target, semaphore, False, *where, lane)

    def _steps_load(self, op: Op) -> Steps:
        barrier = self.barrier(op.operands[2])
        self.start_load(self._started(Load, op, barrier.end), barrier)
        yield Pause(op)

    def steps_async_store(self, op: Op) -> Steps:
        barrier, target = self.barrier(op.operands[2]), self._end(op.operands[1])
        barrier.missing += _bytes(target)
        barrier.expected += _bytes(target)
        program = self.monitor.program_text(self.monitor.program)
        lane = self.races.start_copy()
        where = False, self.schedule.current, program, self.state(), lane
        store = ValueStore(op, target, target, barrier.end, *where)
        store.data, store.atomic = self.env[op.operands[0]], op.attrs["atomic"]
        self.start_load(store, barrier)
        self._arrive(barrier, 1)
        yield Pause(op)

    def _move_data(self, copy: Copy) -> None:
        if not isinstance(copy, ValueStore):
            super()._move_data(copy)
            return
        everything = entries_of(full_index(copy.target.ref.ref.shape), ())
        if copy.atomic is None:
            self.write(copy.target.view, everything, copy.data, None)
        else:
            self.update(copy.target.view, everything, copy.atomic, copy.data)

    def start_load(self, load: Load, barrier: Barrier) -> None:
        load.barrier, load.phase = barrier, barrier.phase
        self._set_off(load)

    def _set_off(self, load: Copy) -> None:
        how = "writes" if getattr(load, "atomic", None) is None else "updates"
        with self.races.as_lane(load.lane):
            if load.reads:
                self.races.access(load.source.root, "reads", load.source.elements)
            self.races.access(load.target.root, how, load.target.elements)
        self.copies.start(load)
        if self.schedule.is_early:
            self.move(load)

    def _steps_group_load(self, op: Op) -> Steps:
        load: GroupLoad = self._started(GroupLoad, op, None)
        self._set_off(load)
        self.group_loads.setdefault(self.schedule.current, []).append(load)
        yield Pause(op)

    def steps_load_wait(self, op: Op) -> Steps:
        yield Pause(op)
        flying = self.group_loads.setdefault(self.schedule.current, [])
        self._end_oldest(flying, op.attrs["pending"])

    def _end_oldest(self, flying: list[Any], pending: int) -> None:
        """End what started first, until at most `pending` are in flight."""
        done = max(0, len(flying) - pending)
        for each in flying[:done]:
            if not each.moved:
                self.move(each)
            self.copies.flying.remove(each)
            self.races.end_copy(each.lane)
        del flying[:done]

    def _steps_store(self, op: Op) -> Steps:
        store: Store = self._started(Store, op, None)
        store.write_lane = self.races.start_copy()
        self._look_at_fences(store.source, op)
        with self.races.as_lane(store.lane):
            self.races.access(store.source.root, "reads", store.source.elements)
        with self.races.as_lane(store.write_lane):
            self.races.access(store.target.root, "writes", store.target.elements)
        self.copies.start(store)
        self._groups()[-1].append(store)
        if self.schedule.is_early:
            self.move(store)
        yield Pause(op)

    def _groups(self) -> list[list[Store]]:
        return self.stores.setdefault(self.schedule.current, [[]])

    def steps_bulk_commit(self, op: Op) -> Steps:
        self._groups().append([])
        yield Pause(op)

    def steps_bulk_wait(self, op: Op) -> Steps:
        yield Pause(op)
        groups = self._groups()
        done = max(0, len(groups) - 1 - op.attrs["pending"])
        for store in (s for group in groups[:done] for s in group):
            if not store.moved:
                self.move(store)
            if store in self.copies.flying:  # its source is free
                self.copies.flying.remove(store)
                self.races.end_copy(store.lane)
            if not op.attrs["read"]:
                self.races.end_copy(store.write_lane)
        if op.attrs["read"]:  # a later wait may be for what they write
            return
        del groups[:done]

    def move(self, copy: Any) -> None:
        if isinstance(copy, Product):
            self._multiply(copy)
            return
        if not isinstance(copy, Load):
            super().move(copy)
            return
        semaphore, copy.semaphore = copy.semaphore, None
        super().move(copy)
        copy.semaphore = semaphore
        barrier = copy.barrier
        with self.races.as_lane(copy.lane):
            self.races.arrive((barrier, barrier.phase))
        barrier.missing -= _bytes(copy.target)
        self._look_at_phase(barrier)

    # --- ordinary stores not yet visible to the copy engine and matmuls ---

    def wrote_shared(self, root: Value, elements: Elements) -> None:
        """An ordinary store to shared memory."""
        if root not in self.unfenced:
            self.unfenced[root] = np.zeros(root.ref.shape, np.int32)
        clocks = self.races.clocks
        time = len(clocks.accesses) if clocks is not None else 0
        elements.set(self.unfenced[root], len(self.plain_writes))
        self.plain_writes.append((self.races.lane, time, self.monitor.op))

    def steps_fence_async(self, op: Op) -> Steps:
        clocks, lane = self.races.clocks, self.races.lane
        known = clocks.known(lane) if clocks is not None else {}
        for root, writes in self.unfenced.items():
            for number in np.unique(writes):
                writer, time, _ = self.plain_writes[number]
                if writer == lane or known.get(writer, 0) >= time:
                    self.unfenced[root] = np.where(writes == number, 0, writes)
                    writes = self.unfenced[root]
        yield Pause(op)

    def _look_at_fences(self, end: End, op: Op) -> None:
        writes = self.unfenced.get(end.root)
        if writes is None:
            return
        found = np.ravel(np.asarray(end.elements.of(writes)))
        if not found.any():
            return
        n = int(np.argmax(found != 0))
        stored = self.plain_writes[int(found[n])][2]
        facts = [
            ("ref", self.monitor.describe(end.ref)),
            ("element", end.elements.position(writes.shape, n)),
            ("stored at", stored.loc if stored is not None else None),
        ]
        who = "a wgmma" if op.name == "wgmma" else "the copy engine"
        what = f"{who} reads what a store wrote, without a fence in between"
        fix = "fence_async (plgpu.commit_smem) after the store"
        self.monitor.report("copies", what, facts, fix)

    # --- matmuls ---

    def steps_wgmma(self, op: Op) -> Steps:
        parts, others = Wgmma.of(op), self._in_flight()
        lhs = self._end(parts.lhs) if parts.lhs.is_ref else self.env[parts.lhs]
        product = Product(
            op,
            self.env[parts.sums],
            lhs,
            self._end(parts.rhs),
            others,
            self.schedule.current,
            self.monitor.program_text(self.monitor.program),
            self.state(),
            self.races.start_copy(),
        )
        for end in product.ends:
            self._look_at_fences(end, op)
            with self.races.as_lane(product.lane):
                self.races.access(end.root, "reads", end.elements)
        self.copies.start(product)
        others.append(product)
        if self.schedule.is_early:
            self.move(product)
        yield Pause(op)
        return (product,)

    def _in_flight(self) -> list[Product]:
        return self.products.setdefault(self.schedule.current, [])

    def _multiply(self, product: Product) -> None:
        saved, product.moved = self.state(), True
        self._set_state(product.state)
        self.moving = True
        operands = [_value(product.sums)]
        for side in (product.lhs, product.rhs):
            is_ref = isinstance(side, End)
            operands.append(self._seen(self.read(side.view)) if is_ref else side)
        if product.op not in self._sums:
            self._sums[product.op] = product_of(product.op)
        block = self._sums[product.op]
        env = dict(zip(block.params, operands, strict=True))
        for op in block.ops:
            (env[op.result],) = run_pure(
                self.numbers, op, [env[v] for v in op.operands]
            )
        product.value = env[block.yields[0]]
        product.sums = None
        self.moving = False
        self._set_state(saved)

    def _seen(self, value: Array) -> Array:
        if type(value) is Partly:
            return Partly(value.value, self.monitor.recode(value.codes))
        return value

    def steps_wgmma_wait(self, op: Op) -> Steps:
        yield Pause(op)
        left = self._in_flight()
        self._end_oldest(left, op.attrs["pending"])
        found = [self.env[v] for v in op.operands]
        for tile in found:
            if isinstance(tile, Product) and tile in left:
                what = (
                    "a wgmma_wait returns an accumulator whose matmul is still in "
                    "flight"
                )
                facts = [
                    ("started at", tile.op.loc),
                    ("leaves pending", op.attrs["pending"]),
                    ("started after it", len(left) - 1 - left.index(tile)),
                ]
                fix = "wait until at most as many are pending as were started after it"
                self.monitor.report("copies", what, facts, fix)
                self.move(tile)
        return [_value(x) for x in found]

    def steps_inline_cuda(self, op: Op) -> Steps:
        yield Pause(op)
        return self.do_inline_cuda(op)

    def steps_set_registers(self, op: Op) -> Steps:
        yield Pause(op)

    RESUMABLE: ClassVar = {
        **DeviceWalker.RESUMABLE,
        "copy_start": steps_copy_start,
        "barrier_expect": steps_barrier_expect,
        "barrier_arrive": steps_barrier_arrive,
        "barrier_wait": steps_barrier_wait,
        "barrier_test": steps_barrier_test,
        "async_store": steps_async_store,
        "named_barrier": steps_named_barrier,
        "bulk_commit": steps_bulk_commit,
        "bulk_wait": steps_bulk_wait,
        "load_wait": steps_load_wait,
        "fence_async": steps_fence_async,
        "wgmma": steps_wgmma,
        "wgmma_wait": steps_wgmma_wait,
        "set_registers": steps_set_registers,
        "inline_cuda": steps_inline_cuda,
    }


def _value(x: Any) -> Array:
    return x.value if isinstance(x, Product) else x
