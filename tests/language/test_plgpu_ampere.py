"""Kernels before Hopper: copies that are waited for in order, `mma`; named barriers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import CheckError, KernelTypeError, SpecError
from tests.xla import put

F32, BF16 = jnp.float32, jnp.bfloat16
TWO: Any = dict(num_threads=2, thread_name="group")


def operand(*shape, dtype=F32):
    return put(np.random.default_rng(0).normal(size=shape), F32).astype(dtype)


def matmul(pending=1, slots=3):
    """A pipeline of copies over k, and an accumulator in registers."""

    def kernel(a, b, o, left, right):
        def fetch(step):
            part = pl.ds(step * 32, 32)
            plgpu.copy_gmem_to_smem(a.at[:, part], left.at[lax.rem(step, slots)])
            plgpu.copy_gmem_to_smem(b.at[part], right.at[lax.rem(step, slots)])

        fetch(0)

        def step(n, sums):
            pl.when(n < 3)(lambda: fetch(n + 1))
            wait = plgpu.wait_gmem_to_smem
            pl.when(n < 3)(lambda: wait(2 * pending))
            pl.when(n == 3)(lambda: wait(0))
            slot = lax.rem(n, slots)
            return plgpu.mma(sums, left[slot], right[slot])

        o[...] = lax.fori_loop(0, 4, step, jnp.zeros(o.shape, F32))

    return kernel


def run(kernel, slots=3):
    a, b = operand(64, 128, dtype=BF16), operand(128, 32, dtype=BF16)
    scratch = [plgpu.SMEM((slots, 64, 32), BF16), plgpu.SMEM((slots, 32, 32), BF16)]
    got = plgpu.kernel(kernel, operand(64, 32), scratch_shapes=scratch)(a, b)
    return got, a.astype(F32) @ b.astype(F32)


def test_a_pipeline_of_copies_feeds_mma():
    got, want = run(matmul())
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_a_copy_that_is_not_waited_for_is_found():
    with pytest.raises(CheckError, match="destination of a copy is read before"):
        run(matmul(pending=2))


def test_a_slot_that_is_still_read_is_not_refilled():
    def kernel(a, b, o, left, right):
        for step in range(2):
            plgpu.copy_gmem_to_smem(a.at[:, pl.ds(step * 32, 32)], left.at[0])
        plgpu.wait_gmem_to_smem(0)
        o[...] = left[0].astype(F32)

    with pytest.raises(CheckError, match="destination of a copy is written before"):
        run(kernel)


def test_a_copy_is_waited_for_before_the_end():
    def kernel(a, b, o, left, right):
        plgpu.copy_gmem_to_smem(b.at[pl.ds(0, 32)], right.at[0])
        o[...] = jnp.zeros(o.shape, F32)

    with pytest.raises(CheckError, match="a copy is still in flight") as raised:
        run(kernel)
    assert "plgpu.wait_gmem_to_smem" in str(raised.value)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda a, b, left: plgpu.mma(jnp.zeros((8, 8)), left[0], left[0]),
         KernelTypeError, "mma adds the product"),
        (lambda a, b, left: plgpu.copy_gmem_to_smem(a, left, collective_axes="x"),
         SpecError, "needs a barrier"),
        (lambda a, b, left: plgpu.named_barrier(6, 256), SpecError, "no barrier 6"),
        (lambda a, b, left: plgpu.named_barrier(0, 64), SpecError, "for 64 threads"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        run(lambda a, b, o, left, right: call(a, b, left))


# --- named barriers ---


def handed_over(waits=True, threads=256):
    def kernel(x, o, buffer):
        group = lax.axis_index("group")

        @pl.when(group == 0)
        def _():
            buffer[...] = x[...] * 2
            plgpu.named_barrier(0, threads, wait=False)

        @pl.when(group == 1)
        def _():
            if waits:
                plgpu.named_barrier(0, threads)
            o[...] = buffer[...]

    return kernel


def meeting(kernel):
    x = operand(8, 32)
    scratch = [plgpu.SMEM((8, 32), F32)]
    return plgpu.kernel(kernel, x, scratch_shapes=scratch, **TWO)(x), 2 * x


def test_warpgroups_meet_at_a_numbered_barrier():
    np.testing.assert_array_equal(*meeting(handed_over()))


def test_without_it_they_race():
    with pytest.raises(CheckError, match="data race"):
        meeting(handed_over(waits=False))


def test_too_few_threads_are_reported():
    with pytest.raises(CheckError, match="too few threads reach a named barrier"):
        meeting(handed_over(threads=384))
