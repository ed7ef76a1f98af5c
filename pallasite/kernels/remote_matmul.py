"""Products whose blocks one kernel copies between devices itself, for TPUs.

The rows of a device are two halves, which travel around the ring in opposite
directions: both links of a device are used, and while one half is multiplied the other
is on its way. Blocks of main memory come to the product by an inner pipeline.
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

# The chip with the least memory bandwidth per product (v5e) multiplies such blocks of
# bf16 for about as long as it reads them.
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
        """The device that is `distance` away in the direction of travel."""
        place = ring.place + self.direction * distance + ring.size
        return {ring.axis: lax.rem(place, ring.size)}

    def source(self, ring: Ring, step: Any) -> Any:
        """Whose block a device holds after `step` steps."""
        return lax.rem(ring.place - self.direction * step + ring.size, ring.size)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes that whole blocks cover, and the rows that travel together.

    An inner pipeline has no blocks that hang over an edge: operands are padded.
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
    """With zeros at the end of the last dimensions, so that these are their sizes."""
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
    """`function`, mapped as a loop: under vmap, calls that follow one another would
    be programs of one kernel, and devices do not wait for each other between them."""
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
            """Of a block to the next device, which holds it where this one does."""
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
    """The sum over devices of `x[this device] @ y`: (rows, n) of (devices, rows, k).

    A device computes its part of a block's sum onto what has arrived of it, and sends
    it on. It tells the device before it when a buffer may be written again.
    """
    how = {"ring": ring, "out_dtype": out_dtype, "config": config or BLOCKS}
    return _one_at_a_time(functools.partial(_scattered, **how))(x, y)


def _scattered(x, y, *, ring: Ring, out_dtype: Any, config: MatmulConfig):
    (size, rows, k), n = x.shape, y.shape[1]
    plan = _Plan.of(config, rows, n, k, x.dtype)
    halves, count = plan.halves, len(plan.halves)
    slots = min(2, size - 1)  # a sum arrives while the one before it is added to
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
            # What is on this device now ends, after all steps, where it belongs.
            block = x_ref.at[half.source(ring, step + 1), half.span]
            out = o_ref.at[half.span] if is_last else sent[number]
            if is_first:
                _multiply(block, y_ref, None, out, acc_ref, plan.blocks)
            else:
                before = copy(number, step - 1)
                before.wait()  # sent from here, and arrived here from another
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
    """`o = x @ y + added`, of refs in main memory. `added_ref` may be None."""
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
    """Of one device: the products of all blocks, and what it sends: all blocks but one,
    each of `width` columns."""
    elements = size * plan.rows
    moved = x.dtype.itemsize * (elements * plan.k + y.size)
    travelling = (size - 1) * plan.rows * width
    return pl.CostEstimate(
        flops=2 * elements * plan.n * plan.k,
        transcendentals=0,
        bytes_accessed=moved + 4 * elements * plan.n,
        remote_bytes_transferred=travelling * jnp.dtype(dtype).itemsize,
    )
