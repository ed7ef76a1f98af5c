"""Matmuls whose kernel itself copies blocks between devices, for TPUs.

A device's rows are split in two halves that travel around the ring in opposite
directions: both of its links are used, and while one half is multiplied the other is
in flight. An inner pipeline brings blocks from main memory to the matmul.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.kernels import common
from pallasite.kernels.devices import Ring
from pallasite.kernels.matmul import MatmulConfig

# On the chip with the least memory bandwidth per FLOP (v5e), multiplying such bf16
# blocks takes about as long as reading them.
BLOCKS = MatmulConfig(512, 512, 512)

_ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


@dataclasses.dataclass(frozen=True)
class _Half:
    """Rows that travel in one direction: 1 to the right, -1 to the left."""

    start: int
    rows: int
    direction: int

    @property
    def span(self) -> Any:
        return pl.ds(self.start, self.rows)

    def neighbour(self, ring: Ring, distance: int) -> dict[str, Any]:
        """The device `distance` away in the direction of travel."""
        place = ring.place + self.direction * distance + ring.size
        return {ring.axis: lax.rem(place, ring.size)}

    def source(self, ring: Ring, step: Any) -> Any:
        """The device whose block this one holds after `step` steps."""
        return lax.rem(ring.place - self.direction * step + ring.size, ring.size)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes padded to whole blocks, and the rows that travel together.

    An inner pipeline has no blocks that extend past an edge, so operands are padded.
    """

    blocks: MatmulConfig
    halves: tuple[_Half, ...]
    n: int
    k: int

    @property
    def rows(self) -> int:
        return sum(half.rows for half in self.halves)

    @staticmethod
    def of(config: MatmulConfig, rows: int, n: int, k: int, dtype: Any) -> "_Plan":
        tile = 8 * 4 // jnp.dtype(dtype).itemsize
        block_n, block_k = min(config.block_n, n), min(config.block_k, k)
        if rows <= tile:  # too few for two halves of whole tiles
            block_m, halves = rows, (_Half(0, rows, 1),)
        else:
            half = pl.align_to(pl.cdiv(rows, 2), tile)
            block_m = min(config.block_m, half)
            half = pl.align_to(half, block_m)
            halves = _Half(0, half, 1), _Half(half, half, -1)
        blocks = MatmulConfig(block_m, block_n, block_k)
        return _Plan(blocks, halves, pl.align_to(n, block_n), pl.align_to(k, block_k))


def _padded(x: jax.Array, *sizes: int) -> jax.Array:
    """x with its last dimensions zero-padded at the end to these sizes."""
    start = x.ndim - len(sizes)
    widths = [(0, 0)] * start
    widths += [(0, n - have) for n, have in zip(sizes, x.shape[start:], strict=True)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def gathered(
    x: jax.Array, y: jax.Array, ring: Ring, out_dtype: Any, config: MatmulConfig | None
) -> jax.Array:
    """Every device's x (rows, k) times y (k, n): (devices, rows, n)."""
    how = {"ring": ring, "out_dtype": out_dtype, "config": config or BLOCKS}
    return _one_at_a_time(functools.partial(_gathered, **how))(x, y)


def _one_at_a_time(function: Callable) -> Callable:
    """`function`, with vmap as a loop: batching would make successive calls programs
    of one kernel, and devices do not wait for each other between programs."""
    return jax.custom_batching.sequential_vmap(function)


def _gathered(x, y, *, ring: Ring, out_dtype: Any, config: MatmulConfig):
    (rows, k), n, size = x.shape, y.shape[1], ring.size
    plan = _Plan.of(config, rows, n, k, x.dtype)
    halves, count = plan.halves, len(plan.halves)
    wide = common.statistics_dtype(x.dtype)

    def kernel(x_ref, y_ref, o_ref, *refs):
        everyone, (acc_ref, own_sem, send_sems, recv_sems) = refs[:count], refs[count:]
        for half, all_ref in zip(halves, everyone, strict=True):
            mine = all_ref.at[ring.place]
            pltpu.async_copy(x_ref.at[half.span], mine, own_sem).wait()

        def copy(number, step, held):
            """Copies a block to the same place on the next device."""
            half = halves[number]
            block = everyone[number].at[half.source(ring, held)]
            sems = send_sems.at[number, step], recv_sems.at[number, step]
            return pltpu.make_async_remote_copy(
                block, block, *sems, device_id=half.neighbour(ring, 1)
            )

        def multiply(step, carry):
            @pl.when(step < size - 1)
            def _():
                for number in range(count):
                    copy(number, step, step).start()

            for half, all_ref in zip(halves, everyone, strict=True):
                source = half.source(ring, step)
                out = o_ref.at[source, half.span]
                _multiply(all_ref.at[source], y_ref, None, out, acc_ref, plan.blocks)

            @pl.when(step < size - 1)
            def _():
                for number in range(count):
                    copy(number, step, step).wait_send()
                    copy(number, step, step + 1).wait_recv()

            return carry

        lax.fori_loop(0, size, multiply, 0)

    buffers = [jax.ShapeDtypeStruct((size, h.rows, plan.k), x.dtype) for h in halves]
    out, *_ = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((size, plan.rows, plan.n), out_dtype),
            *buffers,
        ],
        in_specs=[_ANYWHERE] * 2,
        out_specs=[_ANYWHERE] * (1 + count),
        scratch_shapes=[
            pltpu.VMEM((plan.blocks.block_m, plan.blocks.block_n), wide),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((count, size)),
            pltpu.SemaphoreType.DMA((count, size)),
        ],
        cost_estimate=_cost(x, y, plan, size, plan.k, x.dtype),
        name="all_gather_matmul",
    )(_padded(x, plan.rows, plan.k), _padded(y, plan.k, plan.n))
    return out[:, :rows, :n]


def scattered(
    x: jax.Array, y: jax.Array, ring: Ring, out_dtype: Any, config: MatmulConfig | None
) -> jax.Array:
    """Sum over devices of `x[this device] @ y`: (devices, rows, k) to (rows, n).

    A device adds its part of a block's sum to what has arrived and sends it on. It
    signals the previous device when a buffer may be written again.
    """
    how = {"ring": ring, "out_dtype": out_dtype, "config": config or BLOCKS}
    return _one_at_a_time(functools.partial(_scattered, **how))(x, y)


def _scattered(x, y, *, ring: Ring, out_dtype: Any, config: MatmulConfig):
    (size, rows, k), n = x.shape, y.shape[1]
    plan = _Plan.of(config, rows, n, k, x.dtype)
    halves, count = plan.halves, len(plan.halves)
    slots = min(2, size - 1)  # one sum arrives while the previous one is added to
    wide = common.statistics_dtype(x.dtype)

    def kernel(x_ref, y_ref, o_ref, *refs):
        sent, arrived = refs[:count], refs[count : 2 * count]
        acc_ref, send_sems, recv_sems, free_sems = refs[2 * count :]

        def copy(number, step):
            slot = lax.rem(step, slots)
            return pltpu.make_async_remote_copy(
                sent[number],
                arrived[number].at[slot],
                send_sems.at[number],
                recv_sems.at[number, slot],
                device_id=halves[number].neighbour(ring, 1),
            )

        def add(number, step, is_first=False, is_last=False):
            half = halves[number]
            # The sum now on this device reaches its owner after all steps.
            block = x_ref.at[half.source(ring, step + 1), half.span]
            out = o_ref.at[half.span] if is_last else sent[number]
            if is_first:
                _multiply(block, y_ref, None, out, acc_ref, plan.blocks)
            else:
                before = copy(number, step - 1)
                before.wait()  # both the send from here and the receive
                there = arrived[number].at[lax.rem(step - 1, slots)]
                _multiply(block, y_ref, there, out, acc_ref, plan.blocks)

                @pl.when(step <= size - 3)
                def _():
                    giver = half.neighbour(ring, -1)
                    pl.semaphore_signal(free_sems.at[number], 1, device_id=giver)

            if not is_last:

                @pl.when(step >= 2)
                def _():
                    pl.semaphore_wait(free_sems.at[number], 1)

                copy(number, step).start()

        def steps(step, carry):
            for number in range(count):
                add(number, step)
            return carry

        for number in range(count):
            add(number, 0, is_first=True)
        lax.fori_loop(1, size - 1, steps, 0)
        for number in range(count):
            add(number, size - 1, is_last=True)

    buffers = [
        *(jax.ShapeDtypeStruct((h.rows, plan.n), wide) for h in halves),
        *(jax.ShapeDtypeStruct((slots, h.rows, plan.n), wide) for h in halves),
    ]
    out, *_ = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((plan.rows, plan.n), out_dtype), *buffers],
        in_specs=[_ANYWHERE] * 2,
        out_specs=[_ANYWHERE] * (1 + len(buffers)),
        scratch_shapes=[
            pltpu.VMEM((plan.blocks.block_m, plan.blocks.block_n), wide),
            pltpu.SemaphoreType.DMA((count,)),
            pltpu.SemaphoreType.DMA((count, slots)),
            pltpu.SemaphoreType.REGULAR((count,)),
        ],
        cost_estimate=_cost(x, y, plan, size, plan.n, wide),
        name="matmul_reduce_scatter",
    )(_padded(x, plan.rows, plan.k), _padded(y, plan.k, plan.n))
    return out[:rows, :n]


def _multiply(
    x_ref: Any,
    y_ref: Any,
    added_ref: Any,
    o_ref: Any,
    acc_ref: Any,
    blocks: MatmulConfig,
) -> None:
    """`o = x @ y + added`, on refs in main memory. `added_ref` may be None."""
    (m, k), n = x_ref.shape, y_ref.shape[1]
    steps = k // blocks.block_k

    def body(x_ref, y_ref, *refs):
        *added, o_ref = refs
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            acc_ref[...] = added[0][...] if added else jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(
            x_ref[...], y_ref[...], preferred_element_type=acc_ref.dtype
        )

        @pl.when(step == steps - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    tile = pl.BlockSpec((blocks.block_m, blocks.block_n), lambda i, j, s: (i, j))
    added = [] if added_ref is None else [added_ref]
    pltpu.emit_pipeline(
        body,
        grid=(m // blocks.block_m, n // blocks.block_n, steps),
        in_specs=[
            pl.BlockSpec((blocks.block_m, blocks.block_k), lambda i, j, s: (i, s)),
            pl.BlockSpec((blocks.block_k, blocks.block_n), lambda i, j, s: (s, j)),
            *[tile] * len(added),
        ],
        out_specs=[tile],
        dimension_semantics=("parallel", "parallel", "arbitrary"),
    )(x_ref, y_ref, *added, o_ref)


def _cost(x, y, plan: _Plan, size: int, width: int, dtype: Any) -> pl.CostEstimate:
    """The cost on one device: the matmuls of all blocks, and sending all blocks but
    one, each of `width` columns."""
    elements = size * plan.rows
    moved = x.dtype.itemsize * (elements * plan.k + y.size)
    travelling = (size - 1) * plan.rows * width
    return pl.CostEstimate(
        flops=2 * elements * plan.n * plan.k,
        transcendentals=0,
        bytes_accessed=moved + 4 * elements * plan.n,
        remote_bytes_transferred=travelling * jnp.dtype(dtype).itemsize,
    )
