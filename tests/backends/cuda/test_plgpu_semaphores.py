"""Semaphores of `plgpu` kernels: in checked mode, as CUDA C++ on the CPU, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.backends import base
from pallasite.errors import CheckError, KernelTypeError, SpecError, UnsupportedError
from tests.backends.cuda import host
from tests.backends.cuda.test_plgpu import needs_compiler, needs_nvrtc

F32, BF16 = jnp.float32, jnp.bfloat16
SEMAPHORE = plgpu.SemaphoreType.REGULAR
TIMINGS = ("late products", "late copies", "late warpgroup 0")


def out(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(n, *shape, dtype=F32):
    x = np.random.default_rng(n).integers(-9, 9, (n, *shape))
    return jnp.asarray(x, dtype)


def grid(n, **more):
    return dict(grid=(n,), grid_names=("i",), **more)


# --- one kernel per way to use them: each with its operands and its result ---


def of_one_block(x):
    def kernel(x_ref, o_ref, sems):
        pl.semaphore_signal(sems.at[1], 3)
        pl.semaphore_wait(sems.at[1], 2)
        o_ref[...] = x_ref[...] + pl.semaphore_read(sems.at[1])

    return plgpu.kernel(kernel, x, scratch_shapes=[SEMAPHORE((2,))])(x)


def everyone(x, **how):
    """Each block reads what all have stored, and leaves the count to the others."""

    def kernel(x_ref, doubled_ref, o_ref):
        sem, i = pl.get_global(plgpu.SemaphoreType.BARRIER), lax.axis_index("i")
        doubled_ref[i] = x_ref[i] * 2
        pl.semaphore_signal(sem)
        pl.semaphore_wait(sem, len(x), decrement=False)
        o_ref[i] = jnp.sum(doubled_ref[...].astype(F32), axis=0).astype(x.dtype)

    return plgpu.kernel(kernel, [x, x], **grid(len(x)), **how)(x)[1]


def chain(x):
    """Each block adds to what the block after it has stored."""
    n = len(x)

    def kernel(x_ref, o_ref):
        sems, i = pl.get_global(SEMAPHORE((n,))), lax.axis_index("i")

        @pl.when(i < n - 1)
        def _():
            after = i + 1
            pl.semaphore_wait(sems.at[after])
            o_ref[i] = o_ref[after] + x_ref[i]

        @pl.when(i == n - 1)
        def _():
            o_ref[i] = x_ref[i]

        pl.semaphore_signal(sems.at[i])

    return plgpu.kernel(kernel, x, **grid(n))(x)


def tokens(x):
    """One block lets all others go on, each of which takes one of the signals."""
    n = len(x)

    def kernel(x_ref, first_ref, o_ref):
        sem, i = pl.get_global(SEMAPHORE), lax.axis_index("i")

        @pl.when(i == n - 1)
        def _():
            first_ref[...] = x_ref[0] * 3
            plgpu.semaphore_signal(sem, n, memory_scope="gpu")

        plgpu.semaphore_wait(sem, memory_scope="gpu")
        o_ref[i] = first_ref[...] + x_ref[i]

    return plgpu.kernel(kernel, [out(*x.shape[1:]), x], **grid(n))(x)[1]


def polled(x):
    """A block looks at the count until it is there."""
    n = len(x)

    def kernel(x_ref, kept_ref, o_ref):
        sem, i = pl.get_global(SEMAPHORE), lax.axis_index("i")
        kept_ref[i] = x_ref[i]
        pl.semaphore_signal(sem, 2)
        lax.while_loop(lambda c: c < 2 * n, lambda _: pl.semaphore_read(sem), 0)
        pl.semaphore_wait(sem, 2 * n, decrement=False)
        o_ref[i] = kept_ref[n - 1 - i]

    return plgpu.kernel(kernel, [x, x], **grid(n))(x)[1]


def warpgroups(x):
    """Two warpgroups of a block pass a value to each other, again and again."""

    def kernel(x_ref, o_ref, buffer, full, empty):
        wg, i = lax.axis_index("wg"), lax.axis_index("i")

        @pl.when(wg == 0)
        def _():
            @pl.loop(0, 3)
            def _(n):
                pl.when(n > 0)(lambda: pl.semaphore_wait(empty))
                buffer[...] = x_ref[i] + n
                pl.semaphore_signal(full)

        @pl.when(wg == 1)
        def _():
            @pl.loop(0, 3)
            def _(n):
                pl.semaphore_wait(full)
                o_ref[i, n] = buffer[...]
                pl.semaphore_signal(empty)

    memory = [plgpu.SMEM(x.shape[1:], x.dtype), SEMAPHORE, SEMAPHORE]
    shape = out(len(x), 3, *x.shape[1:], dtype=x.dtype)
    how = grid(len(x), num_threads=2, thread_name="wg")
    return plgpu.kernel(kernel, shape, scratch_shapes=memory, **how)(x)


def all_of_them(x):
    """All warpgroups of all blocks, by the axes of `run_scoped`; and one on its own."""
    n = len(x)

    def kernel(x_ref, kept_ref, o_ref):
        wg, i = lax.axis_index("wg"), lax.axis_index("i")

        def scoped(sem):
            kept_ref[i, wg] = x_ref[i] * (wg + 1)
            pl.semaphore_signal(sem)
            pl.semaphore_wait(sem, 2 * n, decrement=False)
            o_ref[i, wg] = kept_ref[n - 1 - i, 1 - wg]

        def own(sem):
            pl.semaphore_signal(sem)
            pl.semaphore_wait(sem)

        pl.run_scoped(own, SEMAPHORE)
        pl.run_scoped(scoped, SEMAPHORE, collective_axes=("i", "wg"))

    shape = out(n, 2, *x.shape[1:], dtype=x.dtype)
    how = grid(n, num_threads=2, thread_name="wg")
    return plgpu.kernel(kernel, [shape, shape], **how)(x)[1]


def engine(x):
    """What the copy engine has written, the copy engine of another block reads."""
    n = len(x)

    def kernel(x_ref, kept_ref, o_ref, buffer, barrier):
        sems, i = pl.get_global(SEMAPHORE((n,))), lax.axis_index("i")
        buffer[...] = x_ref[i] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, kept_ref.at[i])
        plgpu.wait_smem_to_gmem(0)
        other = lax.rem(i + 1, n)
        plgpu.semaphore_signal_parallel(
            plgpu.SemaphoreSignal(sems.at[other], device_id=None),
            plgpu.SemaphoreSignal(sems.at[i], device_id=None, inc=2),
        )
        pl.semaphore_wait(sems.at[i], 3)
        plgpu.copy_gmem_to_smem(kept_ref.at[lax.rem(i + n - 1, n)], buffer, barrier)
        plgpu.barrier_wait(barrier)
        o_ref[i] = buffer[...]

    memory = [plgpu.SMEM(x.shape[1:], x.dtype), plgpu.Barrier()]
    return plgpu.kernel(kernel, [x, x], scratch_shapes=memory, **grid(n))(x)[1]


def in_order(x):  # sums from the last row on
    return jnp.cumsum(x[::-1], axis=0)[::-1]


CASES = {
    "of one block": (of_one_block, rows(5, 33), lambda x: x + 1),
    "everyone": (everyone, rows(7, 33), lambda x: jnp.tile(2 * x.sum(0), (7, 1))),
    "everyone, bf16": (
        everyone,
        rows(4, 64, dtype=BF16),
        lambda x: jnp.tile(2 * x.sum(0), (4, 1)),
    ),
    "one block": (everyone, rows(1, 8), lambda x: 2 * x),
    "chain": (chain, rows(6, 130), in_order),
    "tokens": (tokens, rows(5, 20), lambda x: x + 3 * x[0]),
    "polled": (polled, rows(3, 40), lambda x: x[::-1]),
    "warpgroups": (
        warpgroups,
        rows(2, 64, 4),
        lambda x: jnp.stack([x + n for n in range(3)], axis=1),
    ),
    "all of them": (
        all_of_them,
        rows(3, 48),
        lambda x: jnp.stack([2 * x[::-1], x[::-1]], axis=1),
    ),
    "copy engine": (engine, rows(4, 8, 32), lambda x: 2 * jnp.roll(x, 1, axis=0)),
}
every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_checked_mode(name):
    function, x, want = CASES[name]
    np.testing.assert_array_equal(function(x), want(x))


@needs_compiler
@every_case
def test_on_the_cpu(name, tmp_path):
    function, x, want = CASES[name]
    (kernel,) = pl.lower(function)(x).kernels
    timings = TIMINGS[: 3 if name == "warpgroups" else 2]
    got = host.run(kernel, [np.asarray(x)], tmp_path, seed=1, timings=timings)
    np.testing.assert_array_equal(got[-1], want(x))


@needs_nvrtc
@every_case
def test_compiled(name):
    function, x, _ = CASES[name]
    (kernel,) = pl.lower(function)(x).kernels
    ptx = base.Compiled(base.get("cuda"), kernel, base.Options())["ptx"]
    assert "red.release.gpu" in ptx and "ld.acquire.gpu" in ptx


@pytest.mark.gpu
@every_case
def test_on_a_gpu(name):
    function, x, want = CASES[name]
    call = jax.jit(function)
    for _ in range(20):
        np.testing.assert_array_equal(call(x), want(x))


@pytest.mark.gpu
def test_calls_one_after_another_start_with_zeros():
    x = rows(8, 16)
    got = jax.jit(lambda x: lax.fori_loop(0, 50, lambda _, x: everyone(x) - x, x))(x)
    want = x
    for _ in range(50):
        want = jnp.tile(2 * want.sum(0), (8, 1)) - want
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_as_many_blocks_as_the_gpu_holds():
    x = rows(200, 4)
    np.testing.assert_array_equal(jax.jit(chain)(x), in_order(x))


def test_each_element_of_a_batch_counts_for_itself():
    x = jnp.stack([rows(3, 8), rows(3, 8) + 1])
    want = [jnp.tile(2 * each.sum(0), (3, 1)) for each in x]
    np.testing.assert_array_equal(jax.vmap(everyone)(x), jnp.stack(want))


# --- what checked mode finds ---


def waits_for(amount, signal=True):
    def kernel(x_ref, kept_ref, o_ref):
        sem, i = pl.get_global(SEMAPHORE), lax.axis_index("i")
        kept_ref[i] = x_ref[i]
        pl.when(jnp.logical_or(signal, i > 0))(lambda: pl.semaphore_signal(sem))
        pl.semaphore_wait(sem, amount, decrement=False)
        o_ref[i] = kept_ref[3 - i]

    x = rows(4, 8)
    return plgpu.kernel(kernel, [x, x], **grid(4))(x)


def test_too_few_signals_are_a_race():
    with pytest.raises(CheckError, match="data race") as raised:
        waits_for(3)
    assert "signal a semaphore" in str(raised.value)


def test_signals_that_nobody_sends_are_a_deadlock():
    with pytest.raises(CheckError, match="deadlock: everything that runs is waiting"):
        waits_for(4, signal=False)


def test_waits_that_take_more_than_is_signalled_are_a_deadlock():
    def kernel(o_ref):
        sem = pl.get_global(SEMAPHORE)
        pl.semaphore_signal(sem)
        pl.semaphore_wait(sem, 2)
        o_ref[lax.axis_index("i")] = jnp.zeros((8,), F32)

    # Two blocks, one of which gets both signals.
    with pytest.raises(CheckError, match="a semaphore that nothing signals"):
        plgpu.kernel(kernel, out(2, 8), **grid(2))()


def test_a_wait_that_nothing_ends_is_rejected():
    def kernel(o_ref, sem):
        pl.semaphore_wait(sem, 2, decrement=False)

    with pytest.raises(KernelTypeError, match="a semaphore that it never signals"):
        plgpu.kernel(kernel, out(8), scratch_shapes=[SEMAPHORE])()


# --- what is rejected ---


def test_semaphores_of_some_axes_are_rejected():
    def kernel(o_ref):
        pl.run_scoped(lambda sem: None, SEMAPHORE, collective_axes=("i",))

    how = dict(grid=(2, 2), grid_names=("i", "j"))
    with pytest.raises(KernelTypeError, match="by all thread blocks, or by none"):
        plgpu.kernel(kernel, out(8), **how)()


def test_other_memory_of_all_programs_is_rejected():
    def kernel(o_ref):
        pl.get_global(plgpu.SMEM((8,), F32))

    with pytest.raises(KernelTypeError, match="get_global allocates semaphores only"):
        plgpu.kernel(kernel, out(8))()


def test_a_scope_that_does_not_exist_is_rejected():
    with pytest.raises(SpecError, match="memory_scope must be 'sys' or 'gpu'"):
        plgpu.semaphore_wait(None, memory_scope="cta")


def test_devices_that_the_mesh_has_not_are_rejected():
    def kernel(o_ref, sem):
        plgpu.semaphore_signal_multicast(sem, collective_axes="x")

    with pytest.raises(SpecError, match="'x' is not an axis of the device mesh"):
        plgpu.kernel(kernel, out(8), scratch_shapes=[SEMAPHORE])()


def test_blocks_that_have_no_room_at_the_same_time_are_rejected():
    (kernel,) = pl.lower(chain)(rows(132 * 8 + 1, 4)).kernels
    with pytest.raises(UnsupportedError, match="run at the same time") as raised:
        host.cuda_text(kernel)
    assert "at most 132 programs" in str(raised.value)
    (kernel,) = pl.lower(chain)(rows(132 * 2, 4)).kernels
    assert "__launch_bounds__(128, 2)" in host.cuda_text(kernel)


def test_the_emulation_and_derivatives_reject_them():
    x = rows(2, 8)
    with pytest.raises(UnsupportedError, match="cannot be differentiated"):
        jax.grad(lambda x: everyone(x).sum())(x)
    with pytest.raises(UnsupportedError, match="one op after another"):
        everyone(x, interpret=True)
