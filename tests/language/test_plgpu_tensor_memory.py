"""Tensor memory and the products of Blackwell's tensor cores, in checked mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import CheckError, KernelTypeError
from tests.xla import put

F16, F32 = jnp.float16, jnp.float32
M, N, K, BLOCK = 32, 32, 64, 16
SLOTS = 2


def operands(*shapes, dtype=F32):
    rng = np.random.default_rng(0)
    return [put(rng.normal(size=s), dtype) for s in shapes]


def out(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tensor_barrier(**how):
    return plgpu.Barrier(orders_tensor_core=True, **how)


# --- one warpgroup ---


def matmul(wrong=""):
    def kernel(x, y, o, a, b, sums, full, done):
        @pl.loop(0, K // BLOCK)
        def step(i):
            part = pl.ds(i * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(x.at[:, part], a, full)
            plgpu.copy_gmem_to_smem(y.at[part], b, full)
            plgpu.barrier_wait(full)
            plgpu.tcgen05_mma(sums, a, b, done, accumulate=i > 0)
            if wrong != "overwrite":
                plgpu.barrier_wait(done)

        if wrong == "overwrite":
            plgpu.barrier_wait(done)
        if wrong == "read":
            plgpu.tcgen05_mma(sums, a, b)
        o[...] = plgpu.async_load_tmem(sums)
        plgpu.wait_load_tmem()

    return kernel


def run(wrong="", **options):
    x, y = operands((M, K), (K, N))
    got = plgpu.kernel(
        matmul(wrong),
        out_shape=out(M, N),
        scratch_shapes=[
            plgpu.SMEM((M, BLOCK), F32),
            plgpu.SMEM((BLOCK, N), F32),
            plgpu.TMEM((M, N), F32),
            plgpu.Barrier(num_arrivals=2),
            tensor_barrier(),
        ],
        **options,
    )(x, y)
    return got, x @ y


def test_a_product_in_tensor_memory():
    got, want = run()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("overwrite", "operand of a tcgen05_mma is written before"),
        ("read", "accumulator of a tcgen05_mma is read before"),
    ],
)
def test_what_is_left_out_is_found(wrong, message):
    with pytest.raises(CheckError, match=message):
        run(wrong)


def test_stores_to_tensor_memory_and_copies_into_it():
    x, y = operands((32, 32), (32, 32))

    def kernel(x_ref, y_ref, o_ref, xs, ys, held, sums, full, done):
        plgpu.copy_gmem_to_smem(x_ref, xs, full)
        plgpu.copy_gmem_to_smem(y_ref, ys, full)
        plgpu.barrier_wait(full)
        plgpu.async_store_tmem(sums, jnp.ones((32, 32), F32))
        plgpu.commit_tmem()
        plgpu.async_copy_smem_to_tmem(xs, held)
        plgpu.tcgen05_mma(sums, held, plgpu.transpose_ref(ys, (1, 0)))
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        o_ref[...] = plgpu.async_load_tmem(sums)

    got = plgpu.kernel(
        kernel,
        out_shape=out(32, 32),
        scratch_shapes=[
            plgpu.SMEM((32, 32), F32),
            plgpu.SMEM((32, 32), F32),
            plgpu.TMEM((32, 32), F32, packed=False),
            plgpu.TMEM((32, 32), F32),
            plgpu.Barrier(num_arrivals=2),
            tensor_barrier(),
        ],
    )(x, y)
    np.testing.assert_allclose(got, 1 + x @ y.T, rtol=1e-4, atol=1e-4)


# --- warps of a warpgroup ---


def by_warps(x_ref, y_ref, a, b, sums, full, free, done, is_later=False):
    """A warp copies, another multiplies; `is_later`: the slots were used before."""

    def per_warp(warp):
        @pl.when(warp == 0)
        def _():
            @pl.loop(0, K // BLOCK)
            def step(i):
                s, part = lax.rem(i, SLOTS), pl.ds(i * BLOCK, BLOCK)

                @pl.when((i >= SLOTS) | is_later)
                def _():
                    plgpu.barrier_wait(free.at[s])

                plgpu.copy_gmem_to_smem(x_ref.at[:, part], a.at[s], full.at[s])
                plgpu.copy_gmem_to_smem(y_ref.at[part], b.at[s], full.at[s])

        @pl.when(warp == 1)
        def _():
            @pl.loop(0, K // BLOCK)
            def step(i):
                s = lax.rem(i, SLOTS)
                plgpu.barrier_wait(full.at[s])
                plgpu.tcgen05_mma(sums, a.at[s], b.at[s], free.at[s], accumulate=i > 0)

            plgpu.tcgen05_commit_arrive(done)

    return per_warp


def twice(kernel, x, y):
    """A kernel over the memory of `by_warps` that makes the product two times."""
    return plgpu.kernel(
        kernel,
        out_shape=out(2, M, N),
        scratch_shapes=[
            plgpu.SMEM((SLOTS, M, BLOCK), F32),
            plgpu.SMEM((SLOTS, BLOCK, N), F32),
            plgpu.TMEM((M, N), F32),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            tensor_barrier(num_barriers=SLOTS),
            tensor_barrier(),
        ],
    )(x, y)


def test_a_barrier_is_waited_for_by_warps_or_by_their_warpgroup():
    def kernel(x_ref, y_ref, o_ref, *memory):
        _, _, sums, _, free, done = memory

        @pl.loop(0, 2)
        def again(n):
            plgpu.warp_map(by_warps(x_ref, y_ref, *memory))
            plgpu.barrier_wait(done)
            # What is still counted is waited for, so that both rounds are alike.
            for s in range(SLOTS):
                plgpu.barrier_wait(free.at[s])
            o_ref[n] = plgpu.async_load_tmem(sums)
            plgpu.wait_load_tmem()

    with pytest.raises(KernelTypeError, match="both a warpgroup and its warps"):
        twice(kernel, *operands((M, K), (K, N)))


def test_warps_go_on_where_they_were():
    """A warp's parities are kept from one use of the mesh to the next."""
    x, y = operands((M, K), (K, N))

    def kernel(x_ref, y_ref, o_ref, *memory):
        _, _, sums, _, _, done = memory

        @pl.loop(0, 2)
        def again(n):
            per_warp = by_warps(x_ref, y_ref, *memory, is_later=n > 0)

            @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
            def _():
                per_warp(lax.axis_index("warp"))

            plgpu.barrier_wait(done)
            o_ref[n] = plgpu.async_load_tmem(sums)
            plgpu.wait_load_tmem()

    for each in twice(kernel, x, y):
        np.testing.assert_allclose(each, x @ y, rtol=1e-4, atol=1e-4)


# --- two blocks, one product ---


def test_a_product_of_two_blocks():
    x, y = operands((2 * M, BLOCK), (BLOCK, 2 * N))

    def kernel(x_ref, y_ref, o_ref, a, b, sums, full, done):
        rank = lax.axis_index("pair")
        how = plgpu.CopyPartition.PARTITIONED
        both = dict(collective_axes="pair")
        plgpu.copy_gmem_to_smem(x_ref, a, full, **both, leader_tracked=how(0))
        plgpu.copy_gmem_to_smem(y_ref, b, full, **both, leader_tracked=how(1))

        @pl.when(rank == 0)
        def _():
            plgpu.barrier_wait(full)
            plgpu.tcgen05_mma(sums, a, b, accumulate=False, collective_axis="pair")
            plgpu.tcgen05_commit_arrive(done, collective_axis="pair")

        plgpu.barrier_wait(done)
        o_ref[pl.ds(rank * M, M)] = plgpu.async_load_tmem(sums)

    got = plgpu.kernel(
        kernel,
        out_shape=out(2 * M, 2 * N),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_shapes=[
            plgpu.SMEM((M, BLOCK), F32),
            plgpu.SMEM((BLOCK, N), F32),
            plgpu.TMEM((M, 2 * N), F32, collective=True),
            plgpu.Barrier(num_arrivals=2),
            tensor_barrier(),
        ],
    )(x, y)
    np.testing.assert_allclose(got, x @ y, rtol=1e-4, atol=1e-4)


# --- work that blocks take as they go ---


def test_dynamic_scheduling_covers_the_grid():
    def kernel(o_ref):
        @plgpu.dynamic_scheduling_loop(grid_names=("i", "j"))
        def _(info):
            i, j = info.index
            o_ref[i, j] = i * 5 + j

    got = plgpu.kernel(
        kernel, out(3, 5, dtype=jnp.int32), grid=(3, 5), grid_names=("i", "j")
    )()
    np.testing.assert_array_equal(got, np.arange(15).reshape(3, 5))


# --- refusals ---


@pytest.mark.parametrize(
    "product, message",
    [
        (
            lambda s, a, b: plgpu.tcgen05_mma(a, a, b),
            "accumulator in tensor memory",
        ),
        (lambda s, a, b: plgpu.tcgen05_mma(s, a, a.at[:8]), "do not match"),
    ],
)
def test_refusals_say_what_is_wrong(product, message):
    def kernel(o_ref, sums, a, b):
        product(sums, a, b)

    memory = [plgpu.TMEM((16, 16), F32)] + [plgpu.SMEM((16, 16), F32)] * 2
    with pytest.raises(KernelTypeError, match=message):
        plgpu.kernel(kernel, out(16, 16), scratch_shapes=memory)()


# --- loads and stores that are not waited for ---


def through_tensor_memory(wrong):
    def kernel(x, y, o, ys, held, sums, full, done):
        plgpu.copy_gmem_to_smem(y, ys, full)
        plgpu.async_store_tmem(held, x[...])
        if wrong != "store":
            plgpu.commit_tmem()
        plgpu.barrier_wait(full)
        plgpu.tcgen05_mma(sums, held, ys, done, accumulate=False)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(sums)
        if wrong != "load":
            plgpu.wait_load_tmem()
        plgpu.tcgen05_mma(sums, held, ys, done, accumulate=False)
        plgpu.barrier_wait(done)

    x, y = operands((32, 32), (32, 32))
    orders = dict(orders_tensor_core=wrong != "order")
    memory = [
        plgpu.SMEM((32, 32), F32),
        plgpu.TMEM((32, 32), F32),
        plgpu.TMEM((32, 32), F32),
        plgpu.Barrier(),
        plgpu.Barrier(**orders),
    ]
    got = plgpu.kernel(kernel, out(32, 32), scratch_shapes=memory)(x, y)
    return got, x @ y


def test_through_tensor_memory():
    got, want = through_tensor_memory("")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ("store", CheckError, "read before a wait for the store"),
        ("load", CheckError, "written before a wait for the load"),
        ("order", KernelTypeError, "needs orders_tensor_core=True"),
    ],
)
def test_tensor_memory_that_is_not_waited_for(wrong, error, message):
    with pytest.raises(error, match=message):
        through_tensor_memory(wrong)
