"""Tensor memory: matmuls and copies that the tensor core runs asynchronously.

What one context starts runs in that order, each when the schedule picks it. A commit
follows those before it: it arrives at its barrier when its turn comes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pallasite.interpret.clusters import ClusterWalker
from pallasite.interpret.copies import End, InFlight
from pallasite.interpret.gpu_level import Barrier
from pallasite.interpret.numbers import run_pure
from pallasite.interpret.numpy_memory import Elements
from pallasite.interpret.schedule import Context, Pause, Steps
from pallasite.interpret.shadow_tiles import value_of
from pallasite.interpret.views import entries_of
from pallasite.ir.nodes import Block, Op, Value, full_index
from pallasite.ir.roles import TensorMma
from pallasite.ops.tensor_memory import mma_of

KINDS = {"tensor_mma": "tcgen05_mma", "tensor_copy": "copy to tensor memory"}


@dataclass(eq=False)
class Work(InFlight):
    """Work started on the tensor core."""

    op: Op
    reads: dict[str, End]
    writes: dict[str, End]
    do: Callable[[], None]
    queue: list["Work"]  # of the same context, in order
    starter: Context | None
    program: str | None
    state: Any
    moved: bool = False
    # Of a commit: the barriers, and the phase that it was an arrival of.
    barriers: list[Barrier] = field(default_factory=list[Barrier])
    phases: list[int] = field(default_factory=list[int])

    fix: ClassVar[str] = (
        "wait for its barrier, or for that of a later tcgen05_commit_arrive"
    )
    through_window: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return KINDS.get(self.op.name, "commit")

    @property
    def ends(self) -> list[End]:
        return [*self.reads.values(), *self.writes.values()]

    @property
    def next_to_move(self) -> "Work":
        return next((w for w in self.queue if not w.moved), self)


def _named(name: str, ends: Sequence[End]) -> dict[str, End]:
    """Each under the name that reports have for it."""
    return {f"{name}{n or ''}": end for n, end in enumerate(ends)}


class Unfinished:
    """Loads or stores of tensor memory that were not waited for, by element."""

    def __init__(self) -> None:
        self.marks: dict[Value, np.ndarray] = {}  # numbers of accesses, 0 for none
        self.accesses: dict[int, tuple[int, Op | None]] = {}  # lane, and where
        self.count = 0

    def add(self, root: Value, elements: Elements, lane: int, op: Op | None) -> None:
        if root not in self.marks:
            self.marks[root] = np.zeros(root.ref.shape, np.int32)
        self.count += 1
        elements.set(self.marks[root], self.count)
        self.accesses[self.count] = lane, op

    def end(self, lane: int) -> None:
        """A lane has waited for its own."""
        done = [n for n, (by, _) in self.accesses.items() if by == lane]
        for root, marks in self.marks.items():
            self.marks[root] = np.where(np.isin(marks, done), 0, marks)
        for n in done:
            del self.accesses[n]

    def find(self, root: Value, elements: Elements) -> tuple[Any, Op | None] | None:
        """The place of an element that one is in flight for, and the access."""
        marks = self.marks.get(root)
        if marks is None:
            return None
        found = np.ravel(np.asarray(elements.of(marks)))
        if not found.any():
            return None
        n = int(np.argmax(found != 0))
        return elements.position(marks.shape, n), self.accesses[int(found[n])][1]


class TensorWalker(ClusterWalker):
    """The walker with tensor memory."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.queues: dict[Any, list[Work]] = {}
        self.tensor_lanes: dict[Any, int] = {}
        self._products: dict[Op, Block] = {}
        self.tensor_loads, self.tensor_stores = Unfinished(), Unfinished()

    def steps_warps(self, op: Op) -> Steps:
        group = self.schedule.fork(
            [(f"warp {n}", self.steps(r)) for n, r in enumerate(op.regions)]
        )
        yield from self.side_by_side(op, group)

    def allocate(self, root: Value) -> None:
        super().allocate(root)
        for unfinished in (self.tensor_loads, self.tensor_stores):
            unfinished.marks.pop(root, None)

    # --- loads and stores by threads ---

    def touched_tensor_memory(self, root: Value, how: str, elements: Elements) -> None:
        """A warpgroup loads or stores elements; each kind has its own wait."""
        lane, op = self.races.lane, self.monitor.op
        self._look_at_threads(root, how, elements)
        kept = self.tensor_loads if how == "reads" else self.tensor_stores
        kept.add(root, elements, lane, op)

    def _look_at_threads(self, root: Value, how: str, elements: Elements) -> None:
        """Report what is read before a store of it, or written before a load of it,
        was waited for."""
        unfinished = self.tensor_stores if how == "reads" else self.tensor_loads
        found = unfinished.find(root, elements)
        if found is None:
            return
        place, earlier = found
        facts = [
            ("ref", self.monitor.describe(root)),
            ("element", place),
            ("accessed at", earlier.loc if earlier is not None else None),
        ]
        if how == "reads":
            what = "tensor memory is read before a wait for the store to it"
            fix = "plgpu.commit_tmem() after plgpu.async_store_tmem"
        else:
            what = "tensor memory is written before a wait for the load from it"
            fix = "plgpu.wait_load_tmem() after plgpu.async_load_tmem"
        self.monitor.report("copies", what, facts, fix)

    # --- what is started ---

    def _who(self) -> Any:
        """A thread of the chip: warps go on where they were."""
        context = self.schedule.current
        return None if context is None else (context.core, context.name)

    def _start(self, op: Op, reads: Any, writes: Any, do: Any) -> Work:
        who, races = self._who(), self.races
        queue = self.queues.setdefault(who, [])
        if who not in self.tensor_lanes:
            self.tensor_lanes[who] = races.start_copy()
        lane = self.tensor_lanes[who]
        if races.clocks is not None:
            races.clocks.fork(races.lane, lane)
        program = self.monitor.program_text(self.monitor.program)
        where = self.schedule.current, program, self.state()
        work = Work(op, reads, writes, do, queue, *where)
        for end in reads.values():
            if end.root.ref.space == "smem":
                self._look_at_fences(end, op)
        for how, ends in (("reads", reads), ("writes", writes)):
            for end in ends.values():
                self._look_at_threads(end.root, how, end.elements)
        with races.as_lane(lane):
            for how, ends in (("reads", reads), ("writes", writes)):
                for end in ends.values():
                    races.access(end.root, how, end.elements)
        # The tensor core keeps the order of its own work.
        flying, own = self.copies.flying, list(queue)
        self.copies.flying = [c for c in flying if c not in own]
        self.copies.start(work)
        self.copies.flying = [*flying, work]
        queue.append(work)
        if self.schedule.is_early:
            self.move(work)
        return work

    def move(self, copy: Any) -> None:
        if not isinstance(copy, Work):
            super().move(copy)
            return
        saved, copy.moved = self.state(), True
        self._set_state(copy.state)
        self.moving = True
        copy.do()
        self.moving = False
        self._set_state(saved)

    # --- matmuls and copies ---

    def steps_tensor_mma(self, op: Op) -> Steps:
        mma = TensorMma.of(op)
        adds = bool(value_of(self.numbers.certain(self.env[mma.adds], "accumulate")))
        parts = [mma.sums, mma.lhs, mma.rhs, *mma.scales]
        parts += [] if mma.places is None else [mma.places]
        ends = [self._in_blocks(op, v) for v in parts]
        sums = _named("accumulator", ends[0])
        reads = _named("left operand", ends[1]) | _named("right operand", ends[2])
        names = ("left scale", "right scale") if mma.scales else ()
        for name, more in zip((*names, "metadata"), ends[3:], strict=False):
            reads |= _named(name, more)
        if adds:
            reads |= sums
        self._start(op, reads, sums, lambda: self._multiply_pair(op, ends, adds))
        yield Pause(op)

    def _in_blocks(self, op: Op, ref: Value) -> list[End]:
        """A ref of this block, or the same one of each block that takes part."""
        own = self._end(ref)
        if not op.attrs["axes"]:
            return [own]
        return [self.end_at(own, block) for block in self.peers(op)]

    def _multiply_pair(self, op: Op, ends: Sequence[Sequence[End]], adds: bool) -> None:
        all_sums, all_left, all_right, *scales = ends
        along = TensorMma.of(op).columns_dim
        sides = [self._seen(self.read(end.view)) for end in all_right]
        right = sides[0] if len(sides) == 1 else self._joined(sides, along)
        if op not in self._products:
            self._products[op] = mma_of(op, np.shape(value_of(right))[along])
        block = self._products[op]
        for n, (sums, left) in enumerate(zip(all_sums, all_left, strict=True)):
            tiles = [self.read(sums.view), self._seen(self.read(left.view)), right]
            tiles += [self._seen(self.read(each[n].view)) for each in scales]
            env = dict(zip(block.params, tiles, strict=True))
            for each in block.ops:
                (env[each.result],) = run_pure(
                    self.numbers, each, [env[v] for v in each.operands]
                )
            value = env[block.yields[0 if adds else 1]]
            self._put(sums, value)

    def _joined(self, parts: Sequence[Any], along: int) -> Any:
        return np.concatenate([value_of(x) for x in parts], along)

    def _put(self, end: End, value: Any) -> None:
        everything = entries_of(full_index(end.ref.ref.shape), ())
        self.write(end.view, everything, value, None)

    def steps_tensor_copy(self, op: Op) -> Steps:
        sources, targets = (self._in_blocks(op, v) for v in op.operands)

        def copy() -> None:
            for source, target in zip(sources, targets, strict=True):
                self._put(target, self.read(source.view))

        named = _named("source", sources), _named("destination", targets)
        self._start(op, *named, copy)
        yield Pause(op)

    # --- their ends ---

    def steps_tensor_commit(self, op: Op) -> Steps:
        if op.attrs["axes"]:
            barriers = self.barriers_at(op.operands[0], self.peers(op))
        else:
            barriers = [self.barrier(op.operands[0])]
        who = self._who()

        def arrive() -> None:
            with self.races.as_lane(self.tensor_lanes[who]):
                for barrier in barriers:
                    work.phases.append(barrier.phase)
                    self._arrive(barrier, 1)

        early, self.schedule.is_early = self.schedule.is_early, False
        work = self._start(op, {}, {}, arrive)
        self.schedule.is_early = early
        work.barriers = barriers
        if early:
            self.move(work)
        yield Pause(op)

    def steps_tensor_wait(self, op: Op) -> Steps:
        is_load = op.attrs["what"] == "loads"
        (self.tensor_loads if is_load else self.tensor_stores).end(self.races.lane)
        yield Pause(op)

    def signalling(self, barrier: Barrier) -> list[Any]:
        found = super().signalling(barrier)
        for queue in self.queues.values():
            if any(barrier in w.barriers for w in queue if not w.moved):
                found += [w for w in queue if not w.moved][:1]
        return found

    def phase_seen(self, barrier: Barrier, phase: int) -> None:
        """What a commit of that phase waited for is no longer in flight."""
        super().phase_seen(barrier, phase)
        for queue in self.queues.values():
            last = -1
            for n, work in enumerate(queue):
                pairs = zip(work.barriers, work.phases, strict=False)
                if any(b is barrier and p <= phase for b, p in pairs):
                    last = n
            for work in queue[: last + 1]:
                self.copies.flying.remove(work)
            del queue[: last + 1]

    RESUMABLE: ClassVar[Any] = {
        **ClusterWalker.RESUMABLE,
        "warps": steps_warps,
        "tensor_mma": steps_tensor_mma,
        "tensor_copy": steps_tensor_copy,
        "tensor_commit": steps_tensor_commit,
        "tensor_wait": steps_tensor_wait,
    }
