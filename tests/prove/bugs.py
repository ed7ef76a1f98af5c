"""Kernels with one seeded bug each, and the claim that it breaks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import tpu as pltpu


@dataclass(frozen=True)
class Bug:
    """A function of nothing but its operands' shapes; `seen`: checked mode sees it."""

    function: Callable[..., Any]
    claim: str
    shapes: tuple[tuple[int, ...], ...]
    seen: bool = True

    def __repr__(self) -> str:
        return self.function.__name__

    @property
    def operands(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]


BUGS: list[Bug] = []


def bug(claim: str, *shapes: tuple[int, ...], seen: bool = True) -> Callable[..., Any]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        BUGS.append(Bug(function, claim, shapes, seen))
        return function

    return register


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def blocks(size, index=lambda i: (i,)):
    return pl.BlockSpec((size,), index)


def call(kernel, shape, grid, ins, outs, parallel=(), **options):
    if parallel:
        params = pltpu.CompilerParams(dimension_semantics=parallel)
        options["compiler_params"] = params
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=grid,
        in_specs=ins,
        out_specs=outs,
        **options,
    )


# --- bounds: index maps ---


@bug("bounds", (64,))
def map_one_too_far(x):
    return call(copy_kernel, (64,), 8, [blocks(8, lambda i: (i + 1,))], blocks(8))(x)


@bug("bounds", (64,))
def map_one_too_early(x):
    return call(copy_kernel, (64,), 8, [blocks(8, lambda i: (i - 1,))], blocks(8))(x)


@bug("bounds", (64,))
def map_in_elements(x):
    return call(copy_kernel, (64,), 8, [blocks(8, lambda i: (i * 8,))], blocks(8))(x)


@bug("bounds", (64,))
def output_map_too_far(x):
    return call(copy_kernel, (64,), 9, [blocks(8, lambda i: (i % 8,))], blocks(8))(x)


@bug("bounds", (16, 32))
def map_swaps_dimensions(x):
    spec = pl.BlockSpec((8, 8), lambda i, j: (j, i))
    out = pl.BlockSpec((8, 8), lambda i, j: (i, j))
    return call(copy_kernel, (16, 32), (2, 4), [spec], out)(x)


@bug("bounds", (64,))
def grid_rounded_up_twice(x):
    return call(copy_kernel, (64,), pl.cdiv(64, 8) + 1, [blocks(8)], blocks(8))(x)


@bug("bounds", (64,))
def halo_without_clamp(x):
    def kernel(x_ref, right_ref, o_ref):
        o_ref[...] = x_ref[...] + right_ref[...]

    ins = [blocks(8), blocks(8, lambda i: (i + 1,))]
    return call(kernel, (64,), 8, ins, blocks(8))(x, x)


@bug("bounds", (6, 8))
def squeezed_index_too_far(x):
    spec = pl.BlockSpec((None, 8), lambda i: (i + 1, 0))
    out = pl.BlockSpec((None, 8), lambda i: (i, 0))
    return call(copy_kernel, (6, 8), 6, [spec], out)(x)


# --- bounds: accesses ---


def whole(*shape):
    return pl.BlockSpec(shape, lambda *ids: (0,) * len(shape))


@bug("bounds", (64,))
def slice_past_the_end(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 8 + 4, 8)]

    return call(kernel, (64,), 8, [whole(64)], blocks(8))(x)


@bug("bounds", (64,))
def slice_before_the_start(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 8 - 1, 8)]

    return call(kernel, (64,), 8, [whole(64)], blocks(8))(x)


@bug("bounds", (64,))
def mask_off_by_one(x):
    def kernel(x_ref, o_ref):
        at = pl.program_id(0) * 16 + jnp.arange(16)
        x = pl.load(x_ref, (at,), mask=at <= 60, other=0.0)
        pl.store(o_ref, (at,), x, mask=at <= 60)

    return call(kernel, (60,), 4, [whole(64)], whole(60))(x)


@bug("bounds", (60,))
def no_mask_at_the_edge(x):
    def kernel(x_ref, o_ref):
        at = pl.program_id(0) * 16 + jnp.arange(16)
        o_ref[at] = x_ref[at]

    return call(kernel, (60,), 4, [whole(60)], whole(60))(x)


@bug("bounds", (8, 16))
def loop_one_too_long(x):
    def kernel(x_ref, o_ref):
        def body(n, total):
            return total + x_ref[n, :]

        o_ref[...] = jax.lax.fori_loop(0, 9, body, jnp.zeros(16, jnp.float32))

    return call(kernel, (16,), 1, [whole(8, 16)], whole(16))(x)


@bug("bounds", (8, 16))
def neighbour_in_a_loop(x):
    def kernel(x_ref, o_ref):
        def body(n, carry):
            o_ref[n, :] = x_ref[n, :] + x_ref[n + 1, :]
            return carry

        jax.lax.fori_loop(0, 8, body, 0)

    return call(kernel, (8, 16), 1, [whole(8, 16)], whole(8, 16))(x)


@bug("bounds", (64,))
def triangle_of_blocks(x):
    def kernel(x_ref, o_ref):
        def body(j, total):
            return total + x_ref[pl.ds(j * 8, 8)]

        zero = jnp.zeros(8, jnp.float32)
        o_ref[...] = jax.lax.fori_loop(0, pl.program_id(0) + 2, body, zero)

    return call(kernel, (64,), 8, [whole(64)], blocks(8))(x)


@bug("bounds", (64,))
def guard_one_too_wide(x):
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[...] = x_ref[pl.ds(i * 8, 8)]

        @pl.when(i <= 7)
        def _():
            o_ref[...] += x_ref[pl.ds(i * 8 + 8, 8)]

    return call(kernel, (64,), 8, [whole(64)], blocks(8))(x)


# --- coverage ---


@bug("coverage", (64,))
def grid_rounded_down(x):
    return call(copy_kernel, (60,), 60 // 8, [blocks(8)], blocks(8))(x)


@bug("coverage", (64,))
def every_other_block(x):
    return call(copy_kernel, (64,), 4, [blocks(8)], blocks(8, lambda i: (i * 2,)))(x)


@bug("coverage", (64,))
def only_half_of_each_block(x):
    def kernel(x_ref, o_ref):
        o_ref[:4] = x_ref[:4]

    return call(kernel, (64,), 8, [blocks(8)], blocks(8))(x)


@bug("coverage", (64,))
def guard_skips_the_last_block(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) < 7)
        def _():
            o_ref[...] = x_ref[...]

    return call(kernel, (64,), 8, [blocks(8)], blocks(8))(x)


@bug("coverage", (64,))
def mask_leaves_out_the_last(x):
    def kernel(x_ref, o_ref):
        at = pl.program_id(0) * 8 + jnp.arange(8)
        pl.store(o_ref, (at,), x_ref[...], mask=at < 63)

    return call(kernel, (64,), 8, [blocks(8)], whole(64))(x)


@bug("coverage", (64,))
def strided_store(x):
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(0, 4, stride=2)] = x_ref[:4]

    return call(kernel, (64,), 8, [blocks(8)], blocks(8))(x)


@bug("coverage", (8, 16))
def loop_stops_early(x):
    def kernel(x_ref, o_ref):
        def body(n, carry):
            o_ref[n, :] = x_ref[n, :]
            return carry

        jax.lax.fori_loop(0, 7, body, 0)

    return call(kernel, (8, 16), 1, [whole(8, 16)], whole(8, 16))(x)


@bug("coverage", (16, 32))
def one_column_of_blocks(x):
    spec = pl.BlockSpec((8, 8), lambda i, j: (i, j))
    out = pl.BlockSpec((8, 8), lambda i, j: (i, 0))
    return call(copy_kernel, (16, 32), (2, 4), [spec], out)(x)


@bug("coverage", (64,))
def two_outputs_one_short(x):
    def kernel(x_ref, a_ref, b_ref):
        a_ref[...] = x_ref[...]

        @pl.when(pl.program_id(0) > 0)
        def _():
            b_ref[...] = x_ref[...]

    out = jax.ShapeDtypeStruct((64,), jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=(out, out),
        grid=8,
        in_specs=[blocks(8)],
        out_specs=(blocks(8), blocks(8)),
    )(x)


# --- races ---


@bug("races", (64,))
def halves_share_a_block(x):
    out = blocks(8, lambda i: (i // 2,))
    return call(copy_kernel, (32,), 8, [blocks(8)], out, parallel=("parallel",))(x)


@bug("races", (64,))
def sums_along_a_parallel_axis(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros(8, jnp.float32)

        o_ref[...] += x_ref[...]

    out = blocks(8, lambda i: (0,))
    return call(kernel, (8,), 8, [blocks(8)], out, parallel=("parallel",))(x)


@bug("races", (64,))
def blocks_that_overlap(x):
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(pl.program_id(0) * 8, 16)] = x_ref[pl.ds(0, 16)]

    parallel = ("parallel",)
    return call(kernel, (72,), 8, [whole(64)], whole(72), parallel=parallel)(x)


@bug("races", (16, 32))
def wrong_axis_parallel(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros((8, 8), jnp.float32)

        o_ref[...] += x_ref[...]

    spec = pl.BlockSpec((8, 8), lambda i, k: (i, k))
    out = pl.BlockSpec((8, 8), lambda i, k: (i, 0))
    parallel = ("arbitrary", "parallel")
    return call(kernel, (16, 8), (2, 4), [spec], out, parallel=parallel)(x)


@bug("races", (64,))
def scratch_along_a_parallel_axis(x):
    def kernel(x_ref, o_ref, sum_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros(8, jnp.float32)

        sum_ref[...] += x_ref[...]
        o_ref[...] = sum_ref[...]

    scratch = [pltpu.VMEM((8,), jnp.float32)]
    return call(
        kernel,
        (64,),
        8,
        [blocks(8)],
        blocks(8),
        parallel=("parallel",),
        scratch_shapes=scratch,
    )(x)


@bug("races", (64,))
def clamped_to_the_last_block(x):
    out = blocks(8, lambda i: (jnp.minimum(i, 6),))
    return call(copy_kernel, (56,), 8, [blocks(8)], out, parallel=("parallel",))(x)


@bug("order", (64,))
def last_program_wins(x):
    out = blocks(8, lambda i: (0,))
    return call(copy_kernel, (8,), 8, [blocks(8)], out, parallel=("parallel",))(x)


# --- synchronisation ---

ANY = pl.BlockSpec(memory_space=pl.ANY)


def copying(body, x, semaphores=1, grid=1):
    def kernel(x_ref, o_ref, buffer_ref, sem):
        body(x_ref, buffer_ref, sem)
        o_ref[...] = buffer_ref[0]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        grid=grid,
        in_specs=[ANY],
        out_specs=whole(8),
        scratch_shapes=[
            pltpu.VMEM((2, 8), jnp.float32),
            pltpu.SemaphoreType.DMA((semaphores,)),
        ],
    )(x)


@bug("sync", (2, 8))
def one_wait_too_many(x):
    def body(x_ref, buffer_ref, sem):
        copy = pltpu.make_async_copy(x_ref.at[0], buffer_ref.at[0], sem.at[0])
        copy.start()
        copy.wait()
        copy.wait()

    return copying(body, x)


@bug("sync", (2, 8))
def one_wait_too_few(x):
    def body(x_ref, buffer_ref, sem):
        for n in range(2):
            copy = pltpu.make_async_copy(x_ref.at[n], buffer_ref.at[n], sem.at[0])
            copy.start()
        copy.wait()

    return copying(body, x)


@bug("sync", (2, 8))
def wait_for_another_semaphore(x):
    def body(x_ref, buffer_ref, sem):
        target = buffer_ref.at[0]
        pltpu.make_async_copy(x_ref.at[0], target, sem.at[0]).start()
        pltpu.make_async_copy(x_ref.at[0], target, sem.at[1]).wait()

    return copying(body, x, semaphores=2)


@bug("sync", (2, 8))
def wait_before_start(x):
    def body(x_ref, buffer_ref, sem):
        copy = pltpu.make_async_copy(x_ref.at[0], buffer_ref.at[0], sem.at[0])
        copy.wait()
        copy.start()

    return copying(body, x)


@bug("sync", (2, 8))
def read_before_wait(x):
    def body(x_ref, buffer_ref, sem):
        copy = pltpu.make_async_copy(x_ref.at[0], buffer_ref.at[0], sem.at[0])
        copy.start()
        buffer_ref[1] = buffer_ref[0]
        copy.wait()

    return copying(body, x)


@bug("sync", (2, 8))
def waits_in_all_steps_but_one(x):
    def body(x_ref, buffer_ref, sem):
        copy = pltpu.make_async_copy(x_ref.at[0], buffer_ref.at[0], sem.at[0])
        copy.start()

        @pl.when(pl.program_id(0) != 2)
        def _():
            copy.wait()

    return copying(body, x, grid=4)


def counting(body):
    def kernel(o_ref, sem):
        body(sem)
        o_ref[...] = jnp.zeros(8, jnp.float32)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        scratch_shapes=[pltpu.SemaphoreType.REGULAR],
    )()


@bug("sync")
def signal_one_wait_two():
    def body(sem):
        pl.semaphore_signal(sem, 1)
        pl.semaphore_wait(sem, 2)

    return counting(body)


@bug("sync")
def signal_in_a_loop_wait_once():
    def body(sem):
        def step(n, carry):
            pl.semaphore_signal(sem, 1)
            return carry

        jax.lax.fori_loop(0, 3, step, 0)
        pl.semaphore_wait(sem, 1)

    return counting(body)


# --- batch invariance ---


def rows(kernel, x, size=8, **options):
    spec = pl.BlockSpec((size, x.shape[1]), lambda i: (i, 0))
    n = x.shape[0]
    return call(kernel, x.shape, n // size, [spec], spec, **options)(x)


@bug("batch", (32, 16))
def mean_over_the_block(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] - x_ref[...].mean(axis=0, keepdims=True)

    return rows(kernel, x)


@bug("batch", (32, 16))
def scaled_by_the_program(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * pl.program_id(0).astype(jnp.float32)

    return rows(kernel, x)


@bug("batch", (32, 16))
def scaled_by_the_place_in_the_block(x):
    def kernel(x_ref, o_ref):
        place = jax.lax.broadcasted_iota(jnp.int32, (8, 16), 0)
        o_ref[...] = x_ref[...] * place.astype(jnp.float32)

    return rows(kernel, x)


@bug("batch", (32, 16))
def running_maximum_from_row_to_row(x):
    def kernel(x_ref, o_ref, most_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            most_ref[...] = jnp.full((8, 16), -1.0)

        most_ref[...] = jnp.maximum(most_ref[...], x_ref[...])
        o_ref[...] = most_ref[...]

    return rows(kernel, x, scratch_shapes=[pltpu.VMEM((8, 16), jnp.float32)])
