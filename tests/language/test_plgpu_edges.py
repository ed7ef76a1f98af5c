"""Copies of `plgpu` kernels that hang over the edge of an array: zeros come from
outside, and what goes there is dropped, in emulation and in checked mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import CheckError
from tests.xla import put

F32 = jnp.float32
HOW = [True, pl.Checked()]


def array(*shape):
    return put(np.random.default_rng(0).normal(size=shape), F32)


def out(*shape):
    return jax.ShapeDtypeStruct(shape, F32)


def column_sums(interpret, rows=64, mode=plgpu.OOBFillMode.ZEROS, shift=0):
    def kernel(x, o, buffer, full):
        i = lax.axis_index("i")
        part = x.at[pl.ds(i * rows + shift, rows)]
        plgpu.copy_gmem_to_smem(part, buffer, full, oob_mode=mode)
        plgpu.barrier_wait(full)
        o[i] = buffer[...].sum(axis=0)

    return plgpu.kernel(
        kernel,
        out(2, 32),
        grid=(2,),
        grid_names=("i",),
        scratch_shapes=[plgpu.SMEM((rows, 32), F32), plgpu.Barrier()],
        interpret=interpret,
    )


@pytest.mark.parametrize("interpret", HOW)
def test_zeros_come_from_past_the_end(interpret):
    x = array(100, 32)
    want = jnp.stack([x[:64].sum(0), x[64:].sum(0)])
    np.testing.assert_allclose(column_sums(interpret)(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interpret", HOW)
def test_zeros_come_from_before_the_beginning(interpret):
    x = array(100, 32)
    want = jnp.stack([x[:54].sum(0), x[54:].sum(0)])
    got = column_sums(interpret, shift=-10)(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_copy_of_nothing_but_the_outside_is_reported():
    with pytest.raises(CheckError, match="64:128, along dimension 0, which has 64"):
        column_sums(pl.Checked())(array(64, 32))


def test_a_promise_to_stay_inside_is_checked():
    run = column_sums(pl.Checked(), mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    with pytest.raises(CheckError, match="an index is out of bounds"):
        run(array(100, 32))


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("vmapped", [False, True])
def test_a_pipeline_over_both_edges(interpret, vmapped):
    def kernel(x, o):
        def body(indices, x_block, o_block):
            o_block[...] = x_block[...] * 2

        block = plgpu.BlockSpec((8, 16), lambda i, j: (i, j))
        plgpu.emit_pipeline(
            body,
            grid=(3, 3),
            in_specs=[block],
            out_specs=[block],
            max_concurrent_steps=2,
        )(x, o)

    x = array(2, 20, 40)
    run = plgpu.kernel(kernel, out(20, 40), interpret=interpret)
    got = jax.vmap(run)(x) if vmapped else run(x[0])
    np.testing.assert_array_equal(got, 2 * x if vmapped else 2 * x[0])


def test_a_shared_copy_over_the_edge():
    def kernel(x, o, buffer, full):
        plgpu.copy_gmem_to_smem(
            x.at[pl.ds(lax.axis_index("i") * 32, 32)], buffer, full, collective_axes="c"
        )
        plgpu.barrier_wait(full)
        o[lax.axis_index("i"), lax.axis_index("c")] = buffer[...].sum(axis=0)

    x = array(40, 16)
    got = plgpu.kernel(
        kernel,
        out(2, 2, 16),
        grid=(2,),
        grid_names=("i",),
        cluster=(2,),
        cluster_names=("c",),
        scratch_shapes=[plgpu.SMEM((32, 16), F32), plgpu.Barrier()],
    )(x)
    sums = jnp.stack([x[:32].sum(0), x[32:].sum(0)])
    want = jnp.stack([sums, sums], axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_checkify_lets_copies_hang_over_the_edge():
    run = checkify.checkify(column_sums(True), errors=checkify.index_checks)
    assert run(array(100, 32))[0].get() is None
