"""`plgpu.emit_pipeline` and its variant with a warpgroup that only copies.

Both are plain code that authors could write themselves: a ring of slots in shared
memory, copies tracked by barriers, and waits.
"""

import enum
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasite import jaxcompat
from pallasite.errors import SpecError, UnsupportedError
from pallasite.language import gpu, gpu_memory
from pallasite.language.helpers import when
from pallasite.language.memory_spaces import as_axes
from pallasite.language.refs import ds, run_scoped
from pallasite.language.trace import location_of, user_location

REGISTERS = 512  # of an SM, per thread of one warpgroup
MAX_REGISTERS = 248  # per thread, in multiples of 8


@dataclass(frozen=True, init=False)
class BlockSpec:
    """`plgpu.BlockSpec`: a block, its memory space, and the lifetime of its slot.

    Args:
        block_shape: ints; None takes one element and drops the dimension.
        index_map: from grid indices to block indices.
        memory_space: shared memory.
        transforms: the block's layout on chip; does not change results.
        delay_release: for how many more steps a matmul may read the slot; the slot is
            refilled when at most that many matmuls are in flight.
        collective_axes: cluster axes whose thread blocks share what they load, in
            `emit_pipeline_warp_specialized`.
    """

    block_shape: Any
    index_map: Any
    transforms: tuple[Any, ...]
    delay_release: int
    collective_axes: tuple[Hashable, ...]

    def __init__(
        self,
        block_shape: Any = None,
        index_map: Any = None,
        *,
        memory_space: Any = None,
        transforms: Any = (),
        delay_release: int = 0,
        collective_axes: Any = (),
        oob_fill_mode: gpu_memory.OOBFillMode = gpu_memory.OOBFillMode.ZEROS,
        **more: Any,
    ):
        if more:
            raise UnsupportedError(
                f"plgpu.BlockSpec({next(iter(more))}=...) is not supported",
                at=user_location(),
                fix="remove it",
            )
        del memory_space, oob_fill_mode
        object.__setattr__(self, "collective_axes", as_axes(collective_axes))
        object.__setattr__(self, "transforms", tuple(transforms))
        object.__setattr__(self, "block_shape", block_shape)
        object.__setattr__(self, "index_map", index_map)
        object.__setattr__(self, "delay_release", delay_release)


class _Side:
    """One operand of a pipeline: its spec, its array, its slots."""

    def __init__(self, spec: Any, array: Any, steps: "_Steps", at: Any):
        shape, self.at = spec.block_shape, at
        self.map = spec.index_map
        if shape is None or self.map is None or len(shape) != len(array.shape):
            raise SpecError(
                "an operand of a plgpu pipeline needs an index map and a block shape "
                "of its rank",
                [("block", shape), ("array", tuple(array.shape))],
                at,
                fix="plgpu.BlockSpec(block_shape, index_map), with a size per "
                "dimension",
            )
        axes = len(steps.grid)
        _check_call(self.map, axes, "the index map takes one index per grid axis", at)
        self.sizes = tuple(shape)
        self.array = array
        self.delay = getattr(spec, "delay_release", 0)
        self.transforms = getattr(spec, "transforms", ())
        self.axes = getattr(spec, "collective_axes", ())

    def memory(self, slots: int) -> Any:
        shape = (slots, *(n for n in self.sizes if n is not None))
        return gpu_memory.SharedMemory()(
            shape, self.array.dtype, transforms=self.transforms
        )

    def places(self, indices: Sequence[Any]) -> tuple[Any, ...]:
        """The block index of a step."""
        places = self.map(*indices)
        places = tuple(places) if isinstance(places, (tuple, list)) else (places,)
        if len(places) != len(self.sizes):
            raise SpecError(
                "the index map of a plgpu pipeline must return one index per dimension",
                [("block", self.sizes), ("numbers", len(places))],
                self.at,
                fix="return a tuple as long as the block shape",
            )
        return places

    def block(self, indices: Sequence[Any]) -> Any:
        """The part of the array that is a step's block."""
        entries = [
            place if size is None else ds(place * size, size)
            for size, place in zip(self.sizes, self.places(indices), strict=True)
        ]
        return self.array.at[tuple(entries)]

    def is_left(self, steps: "_Steps", step: Any) -> Any:
        """Whether a step is the last of consecutive steps with the same block.

        Plain True if no two steps share a block: the block index contains every index.
        """
        indices = steps.indices(step)
        places = self.places(indices)
        moving = [i for i, n in zip(indices, steps.grid, strict=True) if not _is_one(n)]
        if all(any(place is index for place in places) for index in moving):
            return True
        following = self.places(steps.indices(step + 1))
        left = step + 1 == steps.count
        for here, there in zip(places, following, strict=True):
            left = left | (jnp.int32(here) != jnp.int32(there))
        return left


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _check_call(fn: Callable[..., Any], count: int, what: str, at: Any) -> None:
    """Reject a function that does not accept this number of arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # it has no signature
        return
    try:
        signature.bind(*(None,) * count)
    except TypeError as error:
        raise SpecError(
            f"{what}: {count} here",
            [("it takes", signature), ("problem", str(error))],
            location_of(fn) or at,
            fix=f"a function of {count} arguments",
        ) from None


class _Steps:
    """The steps of a grid, and the slots they use in rotation."""

    def __init__(self, grid: Sequence[Any], most: int):
        self.grid, self.count = tuple(grid), math.prod(grid)
        known = isinstance(self.count, int)
        self.slots = max(1, min(most, self.count)) if known else most

    def indices(self, step: Any) -> tuple[Any, ...]:
        found, rest = [], jnp.int32(step)
        for size in reversed(self.grid[1:]):
            found.append(lax.rem(rest, jnp.int32(size)))
            rest = lax.div(rest, jnp.int32(size))
        return tuple(reversed([*found, rest][: len(self.grid)]))

    def slot(self, step: Any) -> Any:
        return lax.rem(jnp.int32(step), jnp.int32(self.slots))

    def run(self, body: Callable[..., Any], carry: Any, at: Any) -> Any:
        """Call `body(step, carry)` for each step. Refs in the carry are unchanged."""
        leaves, tree = jax.tree.flatten(carry, is_leaf=jaxcompat.is_ref)
        is_ref = [jaxcompat.is_ref(leaf) for leaf in leaves]
        refs = [leaf for leaf, ref in zip(leaves, is_ref, strict=True) if ref]

        def whole(values: Sequence[Any]) -> Any:
            pools = {True: iter(refs), False: iter(values)}
            return jax.tree.unflatten(tree, [next(pools[ref]) for ref in is_ref])

        def values_of(carry: Any) -> list[Any]:
            found = jax.tree.leaves(carry, is_leaf=jaxcompat.is_ref)
            return [leaf for leaf in found if not jaxcompat.is_ref(leaf)]

        def step(n: Any, values: Sequence[Any]) -> list[Any]:
            made = body(n, whole(values))
            if jax.tree.structure(made, is_leaf=jaxcompat.is_ref) != tree:
                _refuse_carry(carry, made, at)
            found = values_of(made)
            if any(_kind(a) != _kind(b) for a, b in zip(values, found, strict=True)):
                _refuse_carry(carry, made, at)
            return found

        return whole(lax.fori_loop(0, self.count, step, values_of(carry)))


def _kind(value: Any) -> tuple[Any, Any]:
    return jnp.shape(value), jnp.result_type(value)


def _refuse_carry(before: Any, after: Any, at: Any) -> None:
    text = lambda carry: jax.tree.map(
        lambda leaf: (
            "nothing"
            if leaf is None
            else f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        ),
        carry,
        is_leaf=lambda x: x is None or jaxcompat.is_ref(x),
    )
    raise SpecError(
        "a step of a plgpu pipeline returns a carry of another type than it was passed",
        [("given", text(before)), ("returned", text(after))],
        at,
        fix="return the next carry from the body, of the same shapes and dtypes",
    )


def _sides(
    in_specs: Any, out_specs: Any, arrays: Sequence[Any], steps: _Steps, at: Any
) -> Any:
    ins = jax.tree.leaves(in_specs, is_leaf=_is_spec)
    outs = jax.tree.leaves(out_specs, is_leaf=_is_spec)
    if len(arrays) != len(ins) + len(outs):
        raise SpecError(
            "a plgpu pipeline needs one array per spec",
            [("arrays", len(arrays)), ("specs", len(ins) + len(outs))],
            at,
            fix="pass one array per entry of in_specs and out_specs",
        )
    sides = [_Side(s, a, steps, at) for s, a in zip((*ins, *outs), arrays, strict=True)]
    return sides[: len(ins)], sides[len(ins) :]


def _is_spec(x: Any) -> bool:
    return hasattr(x, "index_map")


def _called(body: Callable[..., Any], args: Sequence[Any], carry: Any) -> Any:
    return body(*args) if carry is None else body(*args, carry)


BODY_TAKES = (
    "the body takes the indices, one ref per block, and a carry if there is one"
)


def _check_delay(delay: int, slots: int, at: Any) -> None:
    if delay and delay >= slots:
        raise SpecError(
            "a plgpu pipeline needs more slots (max_concurrent_steps) than "
            "delay_release",
            [("delay_release", delay), ("max_concurrent_steps", slots)],
            at,
            fix=f"max_concurrent_steps={delay + 1} or more",
        )


def emit_pipeline(
    body: Callable[..., Any],
    *,
    grid: Sequence[Any],
    in_specs: Any = (),
    out_specs: Any = (),
    max_concurrent_steps: int = 1,
    delay_release: int = 0,
    init_carry: Any = None,
) -> Callable[..., Any]:
    """A loop over blocks in shared memory, copied while others are processed.

    Args:
        body: `body(indices, *in_blocks, *out_blocks[, carry])`.
        grid: the steps, last axis fastest.
        in_specs, out_specs: one `plgpu.BlockSpec` per array.
        max_concurrent_steps: slots per operand.
        delay_release: the minimum for all `in_specs`; the older spelling.
        init_carry: passed to the first step; each step returns the next carry.

    Returns:
        A function of the arrays, in main memory, that returns the final carry.
    """
    at = user_location()
    steps = _Steps(grid, max_concurrent_steps)

    def run(*arrays: Any) -> Any:
        ins, outs = _sides(in_specs, out_specs, arrays, steps, at)
        if any(side.axes for side in (*ins, *outs)):
            raise UnsupportedError(
                "emit_pipeline does not support collective copies",
                at=at,
                fix="use emit_pipeline_warp_specialized, or remove collective_axes",
            )
        memory = [s.memory(steps.slots) for s in (*ins, *outs)]
        barriers = gpu_memory.Barrier(
            num_arrivals=max(1, len(ins)), num_barriers=steps.slots
        )
        delay = max((delay_release, *(s.delay for s in ins))) if ins else 0
        _check_delay(delay, max_concurrent_steps, at)
        given = 1 + len(ins) + len(outs) + (init_carry is not None)
        _check_call(body, given, BODY_TAKES, at)

        def scoped(full: Any, *slots: Any) -> Any:
            def fetch(step: Any, slot: Any) -> None:
                for side, ring in zip(ins, slots, strict=False):
                    block = side.block(steps.indices(step))
                    gpu.copy_gmem_to_smem(block, ring.at[slot], full.at[slot])

            def one(step: Any, carry: Any) -> Any:
                slot, indices = steps.slot(step), steps.indices(step)
                if ins:
                    gpu.barrier_wait(full.at[slot])
                if outs:
                    gpu.wait_smem_to_gmem(steps.slots - 1, wait_read_only=True)
                views = [ring.at[slot] for ring in slots]
                carry = _called(body, (indices, *views), carry)
                if outs:
                    gpu.commit_smem()
                    for side, ring in zip(outs, slots[len(ins) :], strict=True):
                        left = side.is_left(steps, step)
                        gpu.copy_smem_to_gmem(
                            ring.at[slot],
                            side.block(indices),
                            None if left is True else left,
                            commit_group=False,
                        )
                    gpu.commit_smem_to_gmem_group()
                ahead = step - delay + steps.slots
                due = (step >= delay) & (ahead < steps.count)
                if delay:  # the matmul that used the slot is done
                    gpu.wgmma_wait(delay)
                when(due)(lambda: fetch(ahead, steps.slot(ahead)))
                return carry

            for n in range(steps.slots):
                when(n < steps.count)(lambda n=n: fetch(n, n))
            carry = steps.run(one, init_carry, at)
            if outs:
                gpu.wait_smem_to_gmem(0)
            return carry

        return run_scoped(scoped, barriers, *memory)

    return run


class PipelinePipeline(enum.IntEnum):
    """Where a pipeline is among several that run one after another."""

    START = 0
    STEADY = 1
    STOP = 2


@dataclass(frozen=True)
class WarpSpecializedPipeline:
    """What `emit_pipeline_warp_specialized` returns: call it with the arrays."""

    body: Callable[..., Any]
    grid: Sequence[Any]
    in_specs: Any
    out_specs: Any
    max_concurrent_steps: int
    wg_axis: str
    num_compute_wgs: int
    manual_produced_barriers: bool
    manual_consumed_barriers: bool
    compute_context: Any
    memory_thread_idx: int
    memory_registers: int
    at: Any

    def get_allocations(self, *arrays: Any) -> Any:
        """The memory that the pipeline needs, for `pl.run_scoped`."""
        steps = _Steps(self.grid, self.max_concurrent_steps)
        ins, outs = _sides(self.in_specs, self.out_specs, arrays, steps, self.at)
        compute = self.num_compute_wgs
        consumed = len(ins) if self.manual_consumed_barriers else 1
        free = gpu_memory.Barrier(num_arrivals=compute, num_barriers=steps.slots)
        axes = tuple(dict.fromkeys(axis for side in ins for axis in side.axes))
        if axes:  # a slot is free when no thread block reads it
            free = gpu_memory.ClusterBarrier(
                collective_axes=axes, num_arrivals=compute, num_barriers=steps.slots
            )
        return (
            tuple(side.memory(steps.slots) for side in ins),
            tuple(side.memory(1) for side in outs),
            self._full(len(ins), steps.slots),
            (free,) * consumed,
            gpu_memory.Barrier(num_arrivals=compute),
        )

    def _full(self, inputs: int, slots: int) -> tuple[Any, ...]:
        """The barriers at which copies arrive: one per slot, or one per input, too."""
        if self.manual_produced_barriers:
            return (gpu_memory.Barrier(num_barriers=slots),) * inputs
        arrivals = max(1, inputs)
        return (gpu_memory.Barrier(num_arrivals=arrivals, num_barriers=slots),)

    def __call__(self, *arrays: Any, allocations: Any = None) -> None:
        if allocations is None:
            memory = self.get_allocations(*arrays)
            run = lambda *m: self._run(arrays, m)
            run_scoped(run, *memory, collective_axes=self.wg_axis)
        else:
            self._run(arrays, allocations)

    def _run(self, arrays: Sequence[Any], memory: Any) -> None:
        steps = _Steps(self.grid, self.max_concurrent_steps)
        ins, outs = _sides(self.in_specs, self.out_specs, arrays, steps, self.at)
        self._check(ins, outs)
        rings, results, full, free, stored = memory
        thread = lax.axis_index(self.wg_axis)
        when(thread == self.memory_thread_idx)(
            lambda: self._copy(steps, ins, rings, full, free)
        )

        def compute() -> None:
            share = (REGISTERS - self.memory_registers) // self.num_compute_wgs
            registers = min(share // 8 * 8, MAX_REGISTERS)
            gpu.set_max_registers(registers, action="increase")

            def pipeline(carry: Any = None) -> Any:
                one = lambda n, c: self._step(
                    steps, n, c, (ins, outs), rings, results, full, free, stored
                )
                carry = steps.run(one, carry, self.at)
                delay = max((s.delay for s in ins), default=0)
                if delay and not self.manual_consumed_barriers:
                    gpu.wgmma_wait(0)
                    for n in range(delay):
                        step = steps.count - delay + n
                        if not isinstance(step, int) or step >= 0:
                            gpu.barrier_arrive(free[0].at[steps.slot(step)])
                return carry

            if self.compute_context is None:
                pipeline()
            else:
                self.compute_context(pipeline)

        when(thread != self.memory_thread_idx)(compute)

    def _check(self, ins: Sequence[_Side], outs: Sequence[_Side]) -> None:
        threads, wanted = lax.axis_size(self.wg_axis), self.num_compute_wgs + 1
        if threads != wanted or not 0 <= self.memory_thread_idx < wanted:
            raise SpecError(
                "a warp-specialized pipeline needs one copying warpgroup besides the "
                "compute warpgroups",
                [
                    (f"warpgroups ({self.wg_axis!r})", threads),
                    ("num_compute_wgs", self.num_compute_wgs),
                    ("memory_thread_idx", self.memory_thread_idx),
                ],
                self.at,
                fix=f"plgpu.kernel(num_threads={wanted}), or "
                f"num_compute_wgs={threads - 1}",
            )
        delay = max((s.delay for s in ins), default=0)
        _check_delay(delay, self.max_concurrent_steps, self.at)
        if self.compute_context is None:  # otherwise it determines the carry
            barriers = len(ins) * self.manual_consumed_barriers
            barriers += len(ins) * self.manual_produced_barriers
            given = 1 + len(ins) + len(outs) + barriers
            _check_call(self.body, given, BODY_TAKES, self.at)

    def _copy(self, steps: _Steps, ins: Any, rings: Any, full: Any, free: Any) -> None:
        gpu.set_max_registers(self.memory_registers, action="decrease")

        def one(step: Any, carry: Any) -> Any:
            slot = steps.slot(step)

            @when(step >= steps.slots)
            def _() -> None:
                for barriers in free:
                    gpu.barrier_wait(barriers.at[slot])

            for n, (side, ring) in enumerate(zip(ins, rings, strict=True)):
                block = side.block(steps.indices(step))
                gpu.copy_gmem_to_smem(
                    block,
                    ring.at[slot],
                    full[n % len(full)].at[slot],
                    collective_axes=side.axes or None,
                )
            return carry

        steps.run(one, (), self.at)
        # All slots must be free at the end, so that the memory can be reused. A body
        # that releases them itself never releases those of the last steps.
        delay = max((s.delay for s in ins), default=0)
        never = delay if self.manual_consumed_barriers else 0
        for n in range(steps.slots - never):
            step = steps.count - steps.slots + n

            @when(step >= 0)
            def _(step: Any = step) -> None:
                for barriers in free:
                    gpu.barrier_wait(barriers.at[steps.slot(step)])

    def _step(
        self,
        steps: _Steps,
        step: Any,
        carry: Any,
        sides: Any,
        rings: Any,
        results: Any,
        full: Any,
        free: Any,
        stored: Any,
    ) -> Any:
        ins, outs = sides
        slot, indices = steps.slot(step), steps.indices(step)
        if ins and not self.manual_produced_barriers:
            gpu.barrier_wait(full[0].at[slot])
        views = [ring.at[slot] for ring in rings]
        views += [result.at[0] for result in results]
        if self.manual_produced_barriers:
            views += [barriers.at[slot] for barriers in full]
        delay = max((s.delay for s in ins), default=0)
        # Not negative in the first steps, which release nothing.
        released = steps.slot(step + (steps.slots - delay if delay else 0))
        if self.manual_consumed_barriers:
            views += [barriers.at[released] for barriers in free]
        carry = _called(self.body, (indices, *views), carry)
        if not self.manual_consumed_barriers:
            release = lambda: gpu.barrier_arrive(free[0].at[released])
            if delay:
                when(step >= delay)(release)
            else:
                release()
        if outs:
            self._store(indices, outs, results, stored)
        return carry

    def _store(self, indices: Any, outs: Any, results: Any, stored: Any) -> None:
        """One warpgroup copies out what all have stored, then releases the others."""

        def meet() -> None:
            gpu.barrier_arrive(stored)
            gpu.barrier_wait(stored)

        gpu.commit_smem()
        meet()
        first = 1 if self.memory_thread_idx == 0 else 0

        @when(lax.axis_index(self.wg_axis) == first)
        def _() -> None:
            for side, result in zip(outs, results, strict=True):
                gpu.copy_smem_to_gmem(result.at[0], side.block(indices))
            gpu.wait_smem_to_gmem(0)

        meet()


def emit_pipeline_warp_specialized(
    body: Callable[..., Any],
    *,
    grid: Sequence[Any],
    memory_registers: int,
    in_specs: Any = (),
    out_specs: Any = (),
    max_concurrent_steps: int = 2,
    wg_axis: str,
    num_compute_wgs: int,
    pipeline_state: Any = None,
    manual_produced_barriers: bool = False,
    manual_consumed_barriers: bool = False,
    compute_context: Any = None,
    memory_thread_idx: int | None = None,
) -> WarpSpecializedPipeline:
    """A pipeline in which one warpgroup copies and the others compute.

    Args:
        body, grid, in_specs, out_specs, max_concurrent_steps: as in `emit_pipeline`.
        memory_registers: registers per thread of the copying warpgroup; the others
            share the rest. Does not change results.
        wg_axis: name of the axis of warpgroups.
        num_compute_wgs: how many warpgroups compute.
        pipeline_state: a `PipelinePipeline`, or a value of one. Does not change
            results; here each pipeline ends before the next one starts.
        manual_produced_barriers: whether the body gets one barrier per input, after the
            blocks, for which it waits before it reads the slot.
        manual_consumed_barriers: whether the body gets one barrier per input, after
            the blocks, on which it arrives when it has read the slot.
        compute_context: called with the pipeline, a function from the initial carry to
            the final one.
        memory_thread_idx: which warpgroup copies; the last if None.
    """
    at = user_location()
    _check_state(pipeline_state, at)
    memory = num_compute_wgs if memory_thread_idx is None else memory_thread_idx
    return WarpSpecializedPipeline(
        body,
        grid,
        in_specs,
        out_specs,
        max_concurrent_steps,
        wg_axis,
        num_compute_wgs,
        manual_produced_barriers,
        manual_consumed_barriers,
        compute_context,
        memory,
        memory_registers,
        at,
    )


def _check_state(state: Any, at: Any) -> None:
    if isinstance(state, int) and state in list(PipelinePipeline):
        return
    if state is not None and getattr(state, "shape", None) != ():
        raise SpecError(
            "pipeline_state is none of plgpu.PipelinePipeline",
            [("got", repr(state))],
            at,
            "plgpu.PipelinePipeline.START, STEADY or STOP, or a value of one",
        )
