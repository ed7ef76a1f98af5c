"""Tensor memory and Blackwell's products as CUDA C++, compiled by NVRTC."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.backends import base, cuda
from pallasite.backends.cuda import blackwell, nvrtc
from pallasite.errors import PallasError, UnsupportedError
from pallasite.target import GPUS
from tests.backends.cuda import host

F16, F32 = jnp.float16, jnp.float32
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason="NVRTC is not installed (nvidia-cuda-nvrtc)"
)


@pytest.fixture(autouse=True)
def on_blackwell(monkeypatch):
    monkeypatch.setattr(cuda, "_chip", lambda options: GPUS["b200"])


def operands(*shapes, dtype=F16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def out(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(function, *args) -> base.Compiled:
    (kernel,) = pl.lower(function)(*args).kernels
    return base.Compiled(base.get("cuda"), kernel, base.Options())


def product(x, y, rows=128, columns=128, dtype=F16, sums=F32):
    def kernel(x_ref, y_ref, o_ref, a, b, acc, full, done):
        plgpu.copy_gmem_to_smem(x_ref, a, full)
        plgpu.copy_gmem_to_smem(y_ref, b, full)
        plgpu.barrier_wait(full)
        plgpu.async_store_tmem(acc, jnp.ones((rows, columns), sums))
        plgpu.commit_tmem()
        plgpu.tcgen05_mma(acc, a, b, done)
        plgpu.barrier_wait(done)
        o_ref[...] = plgpu.async_load_tmem(acc) * 2

    return plgpu.kernel(
        kernel,
        out(rows, columns, dtype=sums),
        scratch_shapes=[
            plgpu.SMEM(x.shape, dtype, transforms=SWIZZLED),
            plgpu.SMEM(y.shape, dtype, transforms=SWIZZLED),
            plgpu.TMEM((rows, columns), sums),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )(x, y)


@needs_nvrtc
def test_a_product_is_compiled():
    x, y = operands((128, 64), (64, 128))
    want = 2 * (1 + x.astype(F32) @ y.astype(F32))
    np.testing.assert_allclose(product(x, y), want, rtol=1e-2, atol=1e-2)
    made = compiled(product, x, y)
    text, ptx = made["cuda"], made["ptx"]
    assert ".target sm_100a" in ptx
    for part in ("alloc", "mma", "commit", "ld", "st", "wait::st", "dealloc", "fence"):
        assert f"tcgen05.{part}" in ptx, part
    # A commit arrives once, where a warpgroup's copy counts for its four warps.
    inits = [line[-3] for line in text.splitlines() if " barrier_init(s" in line]
    assert inits == ["8", "1"]
    # Threads have met between their stores and the product that adds to them.
    stored, multiplied = text.index("tensor_stored();"), text.index("= tensor_operand")
    assert "meet(1, 128);" in text[stored:multiplied]
    assert "tensor_alloc<1, 128>" in text and "tensor_free<1, 128>" in text


def test_what_an_instruction_is_told():
    # PTX ISA, "Instruction descriptor": f32 sums at bit 4, types at 7 and 10, the
    # transposed right side at 16, columns / 8 at 17, rows / 16 at 24.
    told = blackwell.instruction(128, 256, "bf16", False, True)
    assert told == 1 << 4 | 1 << 7 | 1 << 10 | 1 << 16 | 32 << 17 | 8 << 24


def pair(x, y):
    """Two blocks multiply together; warps of the first start it."""

    def kernel(x_ref, y_ref, o_ref, a, b, acc, full, done):
        rank = lax.axis_index("pair")
        how = plgpu.CopyPartition.PARTITIONED

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            warp = lax.axis_index("warp")

            @pl.when(warp == 0)
            def _():
                both = dict(collective_axes="pair")
                plgpu.copy_gmem_to_smem(x_ref, a, full, **both, leader_tracked=how(0))
                plgpu.copy_gmem_to_smem(y_ref, b, full, **both, leader_tracked=how(1))

            @pl.when((warp == 1) & (rank == 0))
            def _():
                plgpu.barrier_wait(full)
                plgpu.tcgen05_mma(acc, a, b, accumulate=False, collective_axis="pair")
                plgpu.tcgen05_commit_arrive(done, collective_axis="pair")

        plgpu.barrier_wait(done)
        o_ref[pl.ds(rank * 128, 128)] = plgpu.async_load_tmem(acc)

    return plgpu.kernel(
        kernel,
        out(256, 128),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_shapes=[
            plgpu.SMEM((128, 64), F16, transforms=SWIZZLED),
            plgpu.SMEM((64, 64), F16, transforms=SWIZZLED),
            plgpu.TMEM((128, 128), F32, collective=True),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )(x, y)


@needs_nvrtc
def test_a_product_of_two_blocks_is_compiled():
    x, y = operands((256, 64), (64, 128))
    want = x.astype(F32) @ y.astype(F32)
    np.testing.assert_allclose(pair(x, y), want, rtol=1e-2, atol=1e-2)
    ptx = compiled(pair, x, y)["ptx"]
    assert "tcgen05.mma.cta_group::2.kind::f16" in ptx
    assert "multicast::cluster" in ptx and ".cta_group::2.shared::cluster.global" in ptx


@needs_nvrtc
def test_other_types_are_compiled():
    for dtype, sums in ((jnp.bfloat16, F32), (jnp.int8, jnp.int32)):
        x, y = operands((128, 128), (128, 128), dtype=dtype)
        if dtype == jnp.int8:
            turned = lambda x, y: turned_product(x, y, dtype, sums)
        else:
            turned = lambda x, y: product(x, y, dtype=dtype, sums=sums)
        assert "tcgen05.mma" in compiled(turned, x, y)["ptx"]


@pytest.mark.skipif(host.compiler() is None, reason="needs g++")
@pytest.mark.parametrize("name", ["product", "pair", "i8"])
def test_products_run_on_the_cpu(name, tmp_path):
    """`tensor_core.h` does what the instructions do."""
    call, dtype, want = product, F16, lambda x, y: 2 * (1 + x @ y)
    shapes = ((128, 64), (64, 128))
    if name == "pair":
        call, shapes, want = pair, ((256, 64), (64, 128)), lambda x, y: x @ y
    elif name == "i8":
        call = lambda x, y: turned_product(x, y, jnp.int8, jnp.int32)
        dtype, shapes, want = jnp.int8, ((128, 128),) * 2, lambda x, y: x @ y.T
    arrays = operands(*shapes, dtype=dtype)
    (kernel,) = pl.lower(call)(*arrays).kernels
    given, timings = [np.asarray(x) for x in arrays], tuple(host.TIMINGS)
    (got,) = host.run(kernel, given, tmp_path, timings=timings)
    np.testing.assert_allclose(
        got, want(*(x.astype(F32) for x in arrays)), rtol=1e-4, atol=1e-3
    )


def turned_product(x, y, dtype, sums):
    def kernel(x_ref, y_ref, o_ref, a, b, acc, full, done):
        plgpu.copy_gmem_to_smem(x_ref, a, full)
        plgpu.copy_gmem_to_smem(y_ref, b, full)
        plgpu.barrier_wait(full)
        plgpu.tcgen05_mma(
            acc, a, plgpu.transpose_ref(b, (1, 0)), done, accumulate=False
        )
        plgpu.barrier_wait(done)
        o_ref[...] = plgpu.async_load_tmem(acc)

    return plgpu.kernel(
        kernel,
        out(128, 128, dtype=sums),
        scratch_shapes=[
            plgpu.SMEM((128, 128), dtype),
            plgpu.SMEM((128, 128), dtype),
            plgpu.TMEM((128, 128), sums),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )(x, y)


@pytest.mark.parametrize(
    "how, shapes, message",
    [
        (dict(rows=64), ((64, 64), (64, 128)), "128 rows of 32-bit elements"),
        (dict(columns=24), ((128, 64), (64, 24)), "must divide the last dimensions"),
        (dict(columns=576), ((128, 64), (64, 576)), "512 columns .* needs 576"),
    ],
)
def test_what_tensor_cores_do_not_have_is_refused(how, shapes, message):
    with pytest.raises(PallasError, match=message):
        compiled(lambda x, y: product(x, y, **how), *operands(*shapes))["cuda"]


def test_other_chips_do_not_have_them(monkeypatch):
    x, y = operands((128, 64), (64, 128))
    monkeypatch.setattr(cuda, "_chip", lambda options: GPUS["h100"])
    with pytest.raises(UnsupportedError, match="tensor_mma only on sm_100"):
        compiled(product, x, y)["cuda"]
