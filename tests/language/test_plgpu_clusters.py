"""Blocks of a cluster that copy for each other and wait for each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import CheckError, KernelTypeError, SpecError
from tests.xla import put

F32 = jnp.float32
PAIR = dict(cluster=(2,), cluster_names=("pair",))


def operand(*shape):
    return put(np.random.default_rng(0).normal(size=shape), F32)


def out(*shape):
    return jax.ShapeDtypeStruct(shape, F32)


def multicast(wrong=""):
    """Each block of a pair brings half of what both work on, again and again."""

    def kernel(x, o, buffer, full, free):
        rank, column = lax.axis_index("pair"), lax.axis_index("column")

        @pl.loop(0, 3)
        def step(i):
            if wrong != "refill":

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(free)

            columns = pl.ds(column * 32, 32)
            if wrong == "alone":

                @pl.when(rank == 0)
                def _():
                    plgpu.copy_gmem_to_smem(
                        x.at[i, :, columns], buffer, full, collective_axes="pair"
                    )

            else:
                plgpu.copy_gmem_to_smem(
                    x.at[i, :, columns], buffer, full, collective_axes="pair"
                )
            plgpu.barrier_wait(full)
            o[rank, i, :, columns] = buffer[...] * (rank + 1)
            if wrong != "arrive":
                plgpu.barrier_arrive(free)

        if not wrong:
            plgpu.barrier_wait(free)

    return kernel


def run(wrong="", x=None, **options):
    x = operand(3, 16, 64) if x is None else x
    got = plgpu.kernel(
        multicast(wrong),
        out_shape=out(2, *x.shape),
        grid=(2,),
        grid_names=("column",),
        **PAIR,
        scratch_shapes=[
            plgpu.SMEM((16, 32), F32),
            plgpu.Barrier(),
            plgpu.ClusterBarrier(collective_axes=("pair",)),
        ],
        **options,
    )(x)
    return got, jnp.stack([x, 2 * x])


def test_a_copy_is_shared_by_the_blocks_of_a_cluster():
    got, want = run()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "wrong, error",
    [("refill", CheckError), ("alone", CheckError), ("arrive", KernelTypeError)],
)
def test_what_is_left_out_is_found(wrong, error):
    with pytest.raises(error):
        run(wrong)


def test_blocks_that_share_a_copy_copy_the_same():
    def kernel(x, o, buffer, full):
        rank = lax.axis_index("pair")
        plgpu.copy_gmem_to_smem(x.at[rank], buffer, full, collective_axes="pair")
        plgpu.barrier_wait(full)
        o[rank] = buffer[...]

    memory = [plgpu.SMEM((8, 8), F32), plgpu.Barrier()]
    x = jnp.ones((2, 8, 8), F32)
    with pytest.raises(
        CheckError, match="start different copies as one collective copy"
    ):
        plgpu.kernel(kernel, x, scratch_shapes=memory, **PAIR)(x)


def test_each_block_has_its_own_memory():
    def kernel(o, buffer):
        rank = lax.axis_index("pair")
        buffer[...] = jnp.full((8, 8), rank, F32)
        o[rank] = buffer[...] + 1

    got = plgpu.kernel(
        kernel, out_shape=out(2, 8, 8), scratch_shapes=[plgpu.SMEM((8, 8), F32)], **PAIR
    )()
    np.testing.assert_array_equal(got[:, 0, 0], [1, 2])


@pytest.mark.parametrize("how", ["partitioned", "replicated"])
def test_the_first_block_counts_what_all_copy(how):
    (x,) = (operand(16, 32),)
    part = plgpu.CopyPartition.PARTITIONED(0)
    if how == "replicated":
        part = plgpu.CopyPartition.REPLICATED

    def kernel(x_ref, o_ref, buffer, full, done):
        rank = lax.axis_index("pair")
        plgpu.copy_gmem_to_smem(
            x_ref if how == "partitioned" else x_ref.at[:8],
            buffer,
            full,
            collective_axes="pair",
            leader_tracked=part,
        )

        @pl.when(rank == 0)
        def _():
            plgpu.barrier_wait(full)

        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        o_ref[rank] = buffer[...]

    got = plgpu.kernel(
        kernel,
        out_shape=out(2, 8, 32),
        **PAIR,
        scratch_shapes=[
            plgpu.SMEM((8, 32), F32),
            plgpu.Barrier(),
            plgpu.ClusterBarrier(collective_axes=("pair",)),
        ],
    )(x)
    want = x.reshape(2, 8, 32) if how == "partitioned" else jnp.stack([x[:8], x[:8]])
    np.testing.assert_array_equal(got, want)


def test_a_pipeline_of_roles_shares_copies():
    x, y = operand(2, 32, 64), operand(64, 32)

    def kernel(x_ref, y_ref, o_ref, sums):
        rank = lax.axis_index("pair")

        def context(pipeline):
            def scoped(acc):
                pipeline(acc)
                return acc[...]

            sums[...] = pl.run_scoped(scoped, plgpu.ACC((32, 32), F32))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums, o_ref.at[rank])
            plgpu.wait_smem_to_gmem(0)

        def step(indices, a, b, acc):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(0)
            return acc

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(4,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((32, 16), lambda k: (0, k)),
                plgpu.BlockSpec((16, 32), lambda k: (k, 0), collective_axes=("pair",)),
            ],
            wg_axis="wg",
            num_compute_wgs=1,
            compute_context=context,
        )(x_ref.at[rank], y_ref)

    got = plgpu.kernel(
        kernel,
        out_shape=out(2, 32, 32),
        scratch_shapes=dict(sums=plgpu.SMEM((32, 32), F32)),
        num_threads=2,
        thread_name="wg",
        **PAIR,
    )(x, y)
    np.testing.assert_allclose(got, x @ y, rtol=1e-4, atol=1e-4)


def test_refusals_say_what_is_wrong():
    def kernel(x_ref, o_ref, buffer, full):
        plgpu.copy_gmem_to_smem(x_ref, buffer, full, collective_axes="row")

    memory = [plgpu.SMEM((3, 33), F32), plgpu.Barrier()]
    call = lambda **more: plgpu.kernel(
        kernel, out_shape=out(3, 33), scratch_shapes=memory, **more
    )(operand(3, 33))
    with pytest.raises(KernelTypeError, match="is not an axis of the cluster"):
        call(grid=(2,), grid_names=("row",))
    with pytest.raises(KernelTypeError, match="2 blocks cannot share a copy of"):
        call(cluster=(2,), cluster_names=("row",))
    with pytest.raises(SpecError, match="at least one arrival"):
        plgpu.ClusterBarrier(collective_axes=("row",), num_arrivals=0)
