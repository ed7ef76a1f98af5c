"""Collectives written as kernels with copies between devices: rings and all-to-all.

Each is a function of one device's block, to be called inside `shard_map`. Devices are
those along `axis` of the mesh, `size` of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
IN_VMEM = pl.BlockSpec(memory_space=pltpu.VMEM)


def neighbours(axis: str, size: int) -> tuple[Any, Any, Any]:
    """This device's number along the axis, the one before it and the one after."""
    me = lax.axis_index(axis)
    return me, lax.rem(me + size - 1, size), lax.rem(me + 1, size)


def meet(axis: str, *others: Any) -> None:
    """Wait until all of some devices run the kernel; they wait for this one too."""
    barrier = pltpu.get_barrier_semaphore()
    for other in others:
        pl.semaphore_signal(barrier, 1, device_id={axis: other})
    pl.semaphore_wait(barrier, len(others))


def all_gather(x: jax.Array, axis: str, size: int, **call: Any) -> jax.Array:
    """Every device's block, passed on around the ring."""

    def kernel(x_ref, o_ref, send_sem, recv_sems, local_sem):
        me, left, right = neighbours(axis, size)
        meet(axis, left, right)
        own = pltpu.async_copy(x_ref, o_ref.at[me], local_sem)
        own.wait()

        def pass_on(step, carry):
            slot = lax.rem(me + size - step, size)
            copy = pltpu.make_async_remote_copy(
                o_ref.at[slot],
                o_ref.at[slot],
                send_sem,
                recv_sems.at[step],
                device_id={axis: right},
            )
            copy.start()
            copy.wait()
            return carry

        lax.fori_loop(0, size - 1, pass_on, 0)

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((size, *x.shape), x.dtype),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        scratch_shapes=[DMA, DMA((size - 1,)), DMA],
        compiler_params=pltpu.CompilerParams(collective_id=0),
        **call,
    )(x)


def reduce_scatter(x: jax.Array, axis: str, size: int, **call: Any) -> jax.Array:
    """The sum over devices of `x[n]`, on device n: partial sums go around the ring.

    A device tells its left neighbour when a slot may be overwritten.
    """

    def kernel(x_ref, o_ref, slots, send_sem, recv_sem, free_sem):
        me, left, right = neighbours(axis, size)
        meet(axis, left, right)
        slots[0] = x_ref[lax.rem(me + size - 1, size)]

        def add(step, carry):
            here, there = lax.rem(step, 2), lax.rem(step + 1, 2)

            @pl.when(step > 0)
            def _():
                pl.semaphore_wait(free_sem, 1)

            copy = pltpu.make_async_remote_copy(
                slots.at[here],
                slots.at[there],
                send_sem,
                recv_sem,
                device_id={axis: right},
            )
            copy.start()
            copy.wait()

            @pl.when(step < size - 2)
            def _():
                pl.semaphore_signal(free_sem, 1, device_id={axis: left})

            block = lax.rem(me + 2 * size - step - 2, size)
            slots[there] = slots[there] + x_ref[block]
            return carry

        lax.fori_loop(0, size - 1, add, 0)
        o_ref[...] = slots[(size - 1) % 2]

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        in_specs=[IN_VMEM],
        out_specs=IN_VMEM,
        scratch_shapes=[pltpu.VMEM((2, *x.shape[1:]), x.dtype), DMA, DMA, REGULAR],
        compiler_params=pltpu.CompilerParams(collective_id=1),
        **call,
    )(x)


def all_to_all(x: jax.Array, axis: str, size: int, **call: Any) -> jax.Array:
    """Block n of every device, on device n: all copies in flight at once."""

    def kernel(x_ref, o_ref, local_sem, send_sems, recv_sems):
        me = lax.axis_index(axis)
        others = [lax.rem(me + n, size) for n in range(1, size)]
        meet(axis, *others)
        own = pltpu.async_copy(x_ref.at[me], o_ref.at[me], local_sem)
        copies = [
            pltpu.async_remote_copy(
                x_ref.at[other],
                o_ref.at[me],
                send_sems.at[n],
                recv_sems.at[n],
                device_id={axis: other},
            )
            for n, other in enumerate(others)
        ]
        own.wait()
        for copy in copies:
            copy.wait()

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        scratch_shapes=[DMA, DMA((size - 1,)), DMA((size - 1,))],
        compiler_params=pltpu.CompilerParams(collective_id=2),
        **call,
    )(x)


def gathered_matmul(
    x: jax.Array, w: jax.Array, axis: str, size: int, **call: Any
) -> jax.Array:
    """All devices' rows of `x` times this device's columns `w`.

    Rows go around the ring while those that have arrived are multiplied.
    """

    def kernel(x_ref, w_ref, o_ref, slots, local_sem, send_sems, recv_sems):
        me, left, right = neighbours(axis, size)
        meet(axis, left, right)
        pltpu.async_copy(x_ref, slots.at[0], local_sem).wait()

        def multiply(step, carry):
            copy = pltpu.make_async_remote_copy(
                slots.at[step],
                slots.at[step + 1],
                send_sems.at[step],
                recv_sems.at[step],
                device_id={axis: right},
            )

            @pl.when(step < size - 1)
            def _():
                copy.start()

            rows = lax.rem(me + size - step, size)
            product = jnp.dot(
                slots[step], w_ref[...], preferred_element_type=jnp.float32
            )
            o_ref[rows] = product

            @pl.when(step < size - 1)
            def _():
                copy.wait()

            return carry

        lax.fori_loop(0, size, multiply, 0)

    rows, columns = x.shape[0], w.shape[1]
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((size, rows, columns), jnp.float32),
        in_specs=[ANYWHERE, IN_VMEM],
        out_specs=IN_VMEM,
        scratch_shapes=[
            pltpu.VMEM((size + 1, *x.shape), x.dtype),
            DMA,
            DMA((size,)),
            DMA((size,)),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=3),
        **call,
    )(x, w)


def over_mesh(fn: Callable[..., Any], size: int, **call: Any) -> Callable[..., Any]:
    """A collective as a function of arrays whose first dimension is the device's."""
    mesh = jax.make_mesh((size,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")

    def each(*blocks: jax.Array) -> jax.Array:
        return fn(*(b[0] for b in blocks), axis="x", size=size, **call)[None]

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(mapped(each, check_vma=False))
