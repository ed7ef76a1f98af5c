"""Axes along which a program does one thing, and then another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.autodiff.normal_program import in_phases
from pallasite.ir.nodes import walk
from pallasite.passes.lower.per_program import program_of
from pallasite.passes.run import NORMAL, run
from pallasite.sites import calls_in

ROWS, CHUNK, STEPS = 8, 128, 3


def normalised(x, turns: int):
    """The first turn along the grid adds up squares, the last one writes."""

    def kernel(x_ref, o_ref, sum_ref):
        turn, j = pl.program_id(1), pl.program_id(2)

        @pl.when((turn == 0) & (j == 0))
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(turn == 0)
        def _():
            sum_ref[...] += (x_ref[...] ** 2).sum(axis=1, keepdims=True)

        @pl.when(turn == turns - 1)
        def _():
            o_ref[...] = x_ref[...] * jax.lax.rsqrt(sum_ref[...] + 1)

    at = lambda i, t, j: (i, j)
    written = lambda i, t, j: (i, j * (t // (turns - 1)))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // ROWS, turns, STEPS),
        in_specs=[pl.BlockSpec((ROWS, CHUNK), at)],
        out_specs=pl.BlockSpec((ROWS, CHUNK), written),
        scratch_shapes=[pltpu.VMEM((ROWS, 1), jnp.float32)],
    )(x)


X = jax.random.normal(jax.random.key(0), (2 * ROWS, CHUNK * STEPS))


@pytest.mark.parametrize(("turns", "loops"), [(2, 2), (3, 2), (6, 1)])
def test_few_phases_come_one_after_another(turns: int, loops: int):
    (call,) = calls_in(lambda x: normalised(x, turns), X)
    program = in_phases(program_of(run(call.kernel, NORMAL)))
    assert sum(op.name == "for" for op in program.body.ops) == loops
    assert any(op.name == "cond" for op in walk(program.body)) == (loops == 1)


@pytest.mark.parametrize("turns", [2, 3, 6])
def test_the_gradient_is_that_of_the_plain_function(turns: int):
    weights = jnp.arange(X.size, dtype=jnp.float32).reshape(X.shape) % 7
    plain = lambda x: x * jax.lax.rsqrt((x**2).sum(axis=1, keepdims=True) + 1)
    got = jax.grad(lambda x: (normalised(x, turns) * weights).sum())(X)
    want = jax.grad(lambda x: (plain(x) * weights).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
