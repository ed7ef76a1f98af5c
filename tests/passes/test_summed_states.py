"""Sums in the lanes of scratch become sums of one element. Text to text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import walk
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.summed_states import summed_states
from pallasite.sites import kernels_in

ROWS, LANES, STEPS = 8, 96, 5


def in_lanes(axis, finish=lambda acc, axis: acc.sum(axis=axis, keepdims=True)):
    """A tile per step, added up along an axis at the end."""
    shape = tuple(1 if d == axis else n for d, n in enumerate((ROWS, LANES)))

    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...].astype(jnp.float32) ** 2

        @pl.when(pl.program_id(0) == STEPS - 1)
        def _():
            o_ref[...] = finish(acc_ref[...], axis)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(STEPS,),
        in_specs=[pl.BlockSpec((ROWS, LANES), lambda i: (i, 0))],
        out_specs=pl.BlockSpec(shape, lambda i: (0, 0)),
        scratch_shapes=[pltpu.VMEM((ROWS, LANES), jnp.float32)],
    )
    struct = jax.ShapeDtypeStruct((ROWS * STEPS, LANES), jnp.bfloat16)
    (made,) = kernels_in(call, struct)
    return run(made)


@pytest.mark.parametrize(("axis", "shape"), [(0, (1, LANES)), (1, (ROWS, 1))])
def test_each_step_adds_a_sum(axis: int, shape: tuple[int, ...]):
    before = in_lanes(axis)
    after = summed_states(before)
    verify(after)
    (state,) = (op for op in walk(after.body) if op.name == "alloc")
    assert state.result.ref.shape == shape
    x = np.random.default_rng(0).normal(size=(ROWS * STEPS, LANES))
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    one, two = (Walker(k, NumpyNumbers()).run([x])[0] for k in (before, after))
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_what_else_is_done_with_a_sum_keeps_its_tile():
    roots = lambda acc, axis: jnp.sqrt(acc).sum(axis=axis, keepdims=True)
    before = in_lanes(1, roots)
    assert summed_states(before) is before


def test_a_unit_dimension_indexed_away_keeps_the_tile():
    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[0, :, :] = jnp.zeros((ROWS, LANES), jnp.float32)

        acc_ref[0, :, :] += x_ref[...]

        @pl.when(pl.program_id(0) == STEPS - 1)
        def _():
            o_ref[...] = acc_ref[0, :, :].sum(axis=1, keepdims=True)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((ROWS, 1), jnp.float32),
        grid=(STEPS,),
        in_specs=[pl.BlockSpec((ROWS, LANES), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((ROWS, 1), lambda i: (0, 0)),
        scratch_shapes=[pltpu.VMEM((1, ROWS, LANES), jnp.float32)],
    )
    (made,) = kernels_in(call, jax.ShapeDtypeStruct((ROWS * STEPS, LANES), jnp.float32))
    # The sum's axes are those of the loaded tile, one less than those of the scratch.
    assert summed_states(made) is made
