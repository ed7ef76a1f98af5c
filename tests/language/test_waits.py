"""Waits that can end are accepted; what waits too often has a defined result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import CheckError, KernelTypeError
from pallasite.sites import kernels_in
from tests.backends.triton.harness import simulated

S = jax.ShapeDtypeStruct
X = np.arange(32, dtype=np.float32).reshape(4, 8)
DMA = pltpu.SemaphoreType.DMA
REGULAR = pltpu.SemaphoreType.REGULAR


def another_descriptor(x_ref, o_ref, sems):
    pltpu.make_async_copy(x_ref, o_ref, sems.at[1]).start()
    pltpu.make_async_copy(o_ref, o_ref, sems.at[1]).wait()


def in_branches_and_loops(x_ref, o_ref, sems):
    def row(i, slot):
        return pltpu.make_async_copy(x_ref.at[i], o_ref.at[i], sems.at[slot])

    row(0, 0).start()

    def step(i, _):
        @pl.when(i < 3)
        def _():
            row(i + 1, (i + 1) % 2).start()

        row(i, i % 2).wait()

    lax.fori_loop(0, 4, step, None)


def nothing_to_wait_for(x_ref, o_ref, sems):
    def inside(sem):
        pl.semaphore_wait(sem, 0)
        o_ref[...] = x_ref[...]

    pl.run_scoped(inside, REGULAR)


@pytest.mark.parametrize("mode", [True, pl.Checked(), False], ids=str)
@pytest.mark.parametrize(
    "kernel", [another_descriptor, in_branches_and_loops, nothing_to_wait_for]
)
def test_waits_that_can_end(kernel, mode):
    call = pl.pallas_call(
        kernel, S(X.shape, X.dtype), scratch_shapes=[DMA((2,))], interpret=mode
    )
    np.testing.assert_array_equal(call(X), X)


@pytest.mark.parametrize("mode", [True, pl.Checked(), False], ids=str)
def test_a_copy_that_is_never_started_is_refused_in_every_mode(mode):
    def kernel(x_ref, o_ref, sem):
        o_ref[...] = x_ref[...]
        pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    call = pl.pallas_call(
        kernel, S(X.shape, X.dtype), scratch_shapes=[DMA], interpret=mode
    )
    with pytest.raises(KernelTypeError, match="never starts"):
        call(X)


def waits_for_too_much(x_ref, o_ref, sem):
    pl.semaphore_signal(sem, 1)
    pl.semaphore_wait(sem, 3)
    o_ref[...] = x_ref[...] + pl.semaphore_read(sem).astype(jnp.float32)


def test_a_wait_for_too_much_leaves_a_count_below_zero():
    def call(mode):
        return pl.pallas_call(
            waits_for_too_much,
            S(X.shape, X.dtype),
            scratch_shapes=[REGULAR],
            interpret=mode,
        )

    np.testing.assert_array_equal(call(True)(X), X - 2)
    np.testing.assert_array_equal(call(False)(X), X - 2)
    (kernel,) = kernels_in(call(False), X)
    np.testing.assert_array_equal(simulated(kernel, [X])[0], X - 2)
    with pytest.raises(CheckError, match="a semaphore that nothing signals"):
        call(pl.Checked())(X)
