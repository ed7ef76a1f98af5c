"""Scratch that keeps a part of the previous block becomes a window one step behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import sites
from pallasite import tpu as pltpu
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.run import run
from pallasite.passes.schedule.previous_blocks import previous_blocks

F32 = jnp.float32
ROWS, WIDTH = 8, 16


def first():
    return pl.when(pl.program_id(1) == 0)


def taps(x_ref, o_ref, last_ref):
    """Joined with the rows before, which the last ones replace."""

    @first()
    def _():
        last_ref[...] = jnp.full_like(last_ref, 2)

    x = jnp.concatenate([last_ref[...], x_ref[...].astype(F32)], axis=0)
    y = jnp.zeros((ROWS, WIDTH), F32)
    for n in range(3):
        y += x[n + 1 : n + 1 + ROWS] * (n + 1)
    o_ref[...] = y.astype(o_ref.dtype)
    last_ref[...] = x[ROWS:]


def difference(x_ref, o_ref, last_ref):
    """Some rows are kept, and used twice."""

    @first()
    def _():
        last_ref[...] = jnp.zeros_like(last_ref)

    x = x_ref[5:8, :].astype(F32)
    o_ref[...] = jnp.broadcast_to(
        (x - last_ref[...])[:1] + last_ref[...][1:2], o_ref.shape
    ).astype(o_ref.dtype)
    last_ref[...] = x


def kernel_of(body, dtype=F32) -> Kernel:
    shape = jax.ShapeDtypeStruct((2, 5 * ROWS, WIDTH), dtype)
    spec = pl.BlockSpec((None, ROWS, WIDTH), lambda i, j: (i, j, 0))
    call = pl.pallas_call(
        body,
        out_shape=shape,
        grid=(2, 5),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM((3, WIDTH), F32)],
    )
    return run(sites.kernels_in(call, shape)[0])


def evaluated(kernel: Kernel) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(2, 5 * ROWS, WIDTH))
    x = x.astype(kernel.inputs[0].ref.dtype.np)
    return np.asarray(Walker(kernel, NumpyNumbers()).run([x])[0])


@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
@pytest.mark.parametrize("body", [taps, difference])
def test_a_window_one_step_behind(body, dtype):
    before = kernel_of(body, dtype)
    assert analyze(before).sequential
    after = previous_blocks(before)
    verify(after)
    assert "alloc" not in after.text and not analyze(after).sequential
    np.testing.assert_array_equal(evaluated(before), evaluated(after))


def recurrent(x_ref, o_ref, last_ref):
    """What is kept depends on what was kept."""

    @first()
    def _():
        last_ref[...] = jnp.zeros_like(last_ref)

    new = last_ref[...] + x_ref[:3, :].astype(F32)
    o_ref[...] = jnp.broadcast_to(new[:1], o_ref.shape).astype(o_ref.dtype)
    last_ref[...] = new


def early(x_ref, o_ref, last_ref):
    """The scratch is loaded after it is stored."""

    @first()
    def _():
        last_ref[...] = jnp.zeros_like(last_ref)

    last_ref[...] = x_ref[:3, :].astype(F32)
    o_ref[...] = jnp.broadcast_to(last_ref[...][:1], o_ref.shape).astype(o_ref.dtype)


def sometimes(x_ref, o_ref, last_ref):
    """The scratch is not stored in every step."""

    @first()
    def _():
        last_ref[...] = jnp.zeros_like(last_ref)

    o_ref[...] = jnp.broadcast_to(last_ref[...][:1], o_ref.shape).astype(o_ref.dtype)

    @pl.when(x_ref[0, 0] > 0)
    def _():
        last_ref[...] = x_ref[:3, :].astype(F32)


@pytest.mark.parametrize("body", [recurrent, early, sometimes])
def test_others_stay(body):
    before = kernel_of(body)
    assert previous_blocks(before) is before
