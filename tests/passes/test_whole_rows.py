"""Kernels over parts of rows become those over whole rows. Text to text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.whole_rows import whole_rows
from pallasite.sites import kernels_in
from pallasite.target import GPUS
from tests.passes.normal_text import normal_text

ROWS, CHUNK, STEPS = 8, 128, 3
F32 = jnp.float32
GPU = GPUS["h200"]


def in_steps(x, width: int = CHUNK * STEPS, exact: bool = True):
    """An online softmax over a grid, then its results in a second turn."""

    def kernel(x_ref, o_ref, m_ref, l_ref):
        turn, j = pl.program_id(1), pl.program_id(2)

        @pl.when((turn == 0) & (j == 0))
        def _():
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
            l_ref[...] = jnp.zeros_like(l_ref)

        x = x_ref[...].astype(F32)

        @pl.when(turn == 0)
        def _():
            new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
            p = jnp.exp(x - new)
            kept = l_ref[...] * jnp.exp(m_ref[...] - new)
            l_ref[...] = kept + p.sum(axis=1, keepdims=True) * (1 if exact else j)
            m_ref[...] = new

        @pl.when(turn == 1)
        def _():
            o_ref[...] = (jnp.exp(x - m_ref[...]) / l_ref[...]).astype(o_ref.dtype)

    chunk = width // STEPS
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], ROWS), 2, STEPS),
        in_specs=[pl.BlockSpec((ROWS, chunk), lambda i, t, j: (i, j))],
        out_specs=pl.BlockSpec((ROWS, chunk), lambda i, t, j: (i, j * t)),
        scratch_shapes=[pltpu.VMEM((ROWS, 1), F32)] * 2,
    )(x)


def at_once(x):
    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(F32)
        top = x.max(axis=1, keepdims=True)
        p = jnp.exp(x - top)
        o_ref[...] = (p / p.sum(axis=1, keepdims=True)).astype(o_ref.dtype)

    spec = pl.BlockSpec((ROWS, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], ROWS),),
        in_specs=[spec],
        out_specs=spec,
    )(x)


def normal(function, *shape: int, dtype=F32):
    (kernel,) = kernels_in(function, jax.ShapeDtypeStruct(shape, dtype))
    return run(kernel)


def without_semantics(text: str) -> str:
    return text.replace('("arbitrary",)', '("parallel",)')


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [512, 515])
def test_steps_along_rows_mean_the_same_as_whole_rows(rows: int, dtype: str):
    steps = normal(in_steps, rows, CHUNK * STEPS, dtype=dtype)
    whole = whole_rows(steps, GPU)
    verify(whole)
    same = normal(at_once, rows, CHUNK * STEPS, dtype=dtype)
    assert normal_text(whole) == without_semantics(normal_text(same))
    x = np.random.default_rng(0).normal(size=(rows, CHUNK * STEPS))
    if dtype == "float32":
        x = x.astype(np.float32)
        one, two = (
            np.asarray(Walker(k, NumpyNumbers()).run([x])[0]) for k in (steps, whole)
        )
        np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "width", "exact"),
    [
        (64, CHUNK * STEPS, True),  # too few rows for the cores
        (512, 3 << 13, True),  # longer than a program can hold
        (512, CHUNK * STEPS, False),  # each step has a factor of its own
    ],
)
def test_other_steps_stay(rows: int, width: int, exact: bool):
    kernel = normal(lambda x: in_steps(x, width, exact), rows, width)
    assert whole_rows(kernel, GPU) is kernel


def test_tiles_that_rows_cannot_be_divided_of_are_bounded():
    """A sum over all rows of a block: they stay together."""

    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += (x_ref[...] ** 2).sum(axis=1, keepdims=True)

        @pl.when(pl.program_id(1) == 3)
        def _():
            total = acc_ref[...].sum(axis=0, keepdims=True)
            o_ref[...] = jnp.broadcast_to(total, o_ref.shape)

    def call(rows: int):
        return lambda x: pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((256, 128), F32),
            grid=(x.shape[0] // rows, 4),
            in_specs=[pl.BlockSpec((rows, 1024), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((1, 128), lambda i, j: (i, 0)),
            scratch_shapes=[pltpu.VMEM((rows, 1), F32)],
        )(x)

    few = normal(call(8), 2048, 4096)
    assert whole_rows(few, GPU) is not few
    many = normal(call(64), 16384, 4096)
    assert whole_rows(many, GPU) is many
