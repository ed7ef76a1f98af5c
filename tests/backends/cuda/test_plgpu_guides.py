"""What upstream's guides for Mosaic GPU show, each in checked mode and by NVRTC.

The kernels are ours; what they use, and how it is put together, is what the guides
teach: first kernels, pipelines of one warpgroup and of several, Blackwell step by step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.backends import base, cuda
from pallasite.backends.cuda import nvrtc
from pallasite.target import GPUS
from tests.backends.cuda import host

F16, F32 = jnp.float16, jnp.float32
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason="NVRTC is not installed (nvidia-cuda-nvrtc)"
)
pytestmark = needs_nvrtc


def operands(*shapes, dtype=F16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def out(*shape, dtype=F16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def holds(monkeypatch, tmp_path):
    """Check a function's result, and compile its kernel for a chip.

    That of Blackwell runs on the CPU, too.
    """

    def check(function, args, want, chip="h100", *parts):
        got = function(*args)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want), rtol=2e-2, atol=5e-2
        )
        monkeypatch.setattr(cuda, "_chip", lambda options: GPUS[chip])
        (kernel,) = pl.lower(function)(*args).kernels
        if chip == "b200" and host.compiler() is not None:
            on_cpu = host.run(kernel, [np.asarray(x) for x in args], tmp_path)[0]
            np.testing.assert_allclose(
                np.asarray(on_cpu, np.float32), np.asarray(want), rtol=2e-2, atol=5e-2
            )
        ptx = base.Compiled(base.get("cuda"), kernel, base.Options())["ptx"]
        assert all(part in ptx for part in parts), parts
        assert chip == "h100" or "wgmma" not in ptx

    return check


def product(x, y):
    return x.astype(F32) @ y.astype(F32)


# --- first kernels ---


def test_a_constant_and_a_grid(holds):
    @plgpu.kernel(out_type=out(128, dtype=F32))
    def filled(o_ref):
        o_ref[...] = jnp.full_like(o_ref, 7.0)

    holds(filled, (), np.full(128, 7.0))

    @plgpu.kernel(out_type=out(512, dtype=F32), grid=(4,), grid_names=("i",))
    def counted(o_ref):
        i = lax.axis_index("i")
        o_ref[pl.ds(i * 128, 128)] = jnp.arange(128, dtype=F32) + i * 128

    holds(counted, (), np.arange(512.0))


# --- pipelines on Hopper ---


@pytest.mark.parametrize("spelling", ["of the spec", "of the pipeline"])
def test_a_pipeline_with_an_accumulator_among_the_scratch(spelling, holds):
    x, y = operands((128, 192), (192, 128))
    late = dict(delay_release=1)
    spec, pipe = (late, {}) if spelling == "of the spec" else ({}, late)

    @plgpu.kernel(
        out_type=out(128, 128),
        scratch_types=dict(
            staged=plgpu.SMEM((64, 64), F16), acc=plgpu.ACC((64, 64), F32)
        ),
        grid=(2, 2),
        grid_names=("m", "n"),
    )
    def matmul(x_ref, y_ref, o_ref, staged, acc):
        m, n = pl.program_id(0), pl.program_id(1)

        def step(_, a, b):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step,
            grid=(3,),
            in_specs=[
                plgpu.BlockSpec((64, 64), lambda k: (m, k), **spec),
                plgpu.BlockSpec((64, 64), lambda k: (k, n), **spec),
            ],
            max_concurrent_steps=2,
            **pipe,
        )(x_ref, y_ref)
        staged[...] = acc[...].astype(F16)
        plgpu.commit_smem()
        place = pl.ds(m * 64, 64), pl.ds(n * 64, 64)
        plgpu.copy_smem_to_gmem(staged, o_ref.at[place])
        plgpu.wait_smem_to_gmem(0)

    holds(matmul, (x, y), product(x, y), "h100", "wgmma.mma_async")


def test_roles_with_a_context(holds):
    """Two warpgroups multiply, each half of the columns; a third one copies."""
    x, y = operands((64, 128), (128, 128))

    @plgpu.kernel(
        out_type=out(64, 128),
        scratch_types=dict(staged=plgpu.SMEM((2, 64, 64), F16, transforms=SWIZZLED)),
        num_threads=3,
        thread_name="wg",
    )
    def matmul(x_ref, y_ref, o_ref, staged):
        wg = lax.axis_index("wg")
        mine = pl.ds(wg * 64, 64)

        def context(pipeline):
            start = plgpu.layout_cast(jnp.zeros((64, 64), F32), plgpu.Layout.WGMMA)
            total = pipeline(start)
            staged[wg] = total.astype(F16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[wg], o_ref.at[:, mine])
            plgpu.wait_smem_to_gmem(0)

        def step(_, a, b, total):
            add = lambda acc: plgpu.wgmma(acc, a, b.at[:, mine])
            return pl.run_state(add)(plgpu.ACC.init(total))

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(2,),
            in_specs=[
                plgpu.BlockSpec((64, 64), lambda k: (0, k), transforms=SWIZZLED),
                plgpu.BlockSpec((64, 128), lambda k: (k, 0), transforms=SWIZZLED),
            ],
            compute_context=context,
            max_concurrent_steps=2,
            num_compute_wgs=2,
            memory_registers=40,
            wg_axis="wg",
        )(x_ref, y_ref)

    holds(matmul, (x, y), product(x, y), "h100", "setmaxnreg", "wgmma.mma_async")


# --- Blackwell, step by step ---


def tensor_barrier(count=1):
    return plgpu.Barrier(num_barriers=count, orders_tensor_core=True)


def test_blackwell_by_a_pipeline(holds):
    """Two barriers take turns: a step waits for the product before its own."""
    x, y = operands((128, 192), (192, 128))

    @plgpu.kernel(
        out_type=out(128, 128),
        scratch_types=dict(
            acc=plgpu.TMEM((128, 128), F32),
            staged=plgpu.SMEM((128, 128), F16, transforms=SWIZZLED),
            ended=tensor_barrier(2),
        ),
    )
    def matmul(x_ref, y_ref, o_ref, acc, staged, ended):
        def step(indices, a, b):
            (k,) = indices
            mine = k % 2
            plgpu.tcgen05_mma(acc, a, b, barrier=ended.at[mine], accumulate=k > 0)
            plgpu.barrier_wait(ended.at[1 - mine])

        plgpu.barrier_arrive(ended.at[1])  # for the wait of the first step
        spec = dict(transforms=SWIZZLED, delay_release=1)
        plgpu.emit_pipeline(
            step,
            grid=(3,),
            in_specs=[
                plgpu.BlockSpec((128, 64), lambda k: (0, k), **spec),
                plgpu.BlockSpec((64, 128), lambda k: (k, 0), **spec),
            ],
            max_concurrent_steps=2,
        )(x_ref, y_ref)
        plgpu.barrier_wait(ended.at[0])
        staged[...] = plgpu.async_load_tmem(acc).astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, o_ref)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    holds(matmul, (x, y), product(x, y), "b200", "tcgen05.mma")


def test_blackwell_by_warps_with_a_tiled_epilogue(holds):
    x, y = operands((128, 256), (256, 128))
    steps, slots, part = 4, 2, 64

    @plgpu.kernel(
        out_type=out(128, 128),
        scratch_types=dict(
            a=plgpu.SMEM((slots, 128, 64), F16, transforms=SWIZZLED),
            b=plgpu.SMEM((slots, 64, 128), F16, transforms=SWIZZLED),
            acc=plgpu.TMEM((128, 128), F32),
            staged=plgpu.SMEM((2, 128, part), F16, transforms=SWIZZLED),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            free=tensor_barrier(slots),
            done=tensor_barrier(),
        ),
    )
    def matmul(x_ref, y_ref, o_ref, a, b, acc, staged, full, free, done):
        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            warp = lax.axis_index("warp")

            @pl.when(warp == 0)
            def copy():
                @pl.loop(0, steps)
                def _(i):
                    s, depth = lax.rem(i, slots), pl.ds(i * 64, 64)

                    @pl.when(i >= slots)
                    def _():
                        plgpu.barrier_wait(free.at[s])

                    plgpu.copy_gmem_to_smem(x_ref.at[:, depth], a.at[s], full.at[s])
                    plgpu.copy_gmem_to_smem(y_ref.at[depth], b.at[s], full.at[s])

            @pl.when(warp == 1)
            def multiply():
                @pl.loop(0, steps)
                def _(i):
                    s = lax.rem(i, slots)
                    plgpu.barrier_wait(full.at[s])
                    plgpu.tcgen05_mma(
                        acc, a.at[s], b.at[s], free.at[s], accumulate=i > 0
                    )

                plgpu.tcgen05_commit_arrive(done)

        plgpu.barrier_wait(done)
        for n in range(128 // part):
            columns = pl.ds(n * part, part)
            staged[n % 2] = plgpu.async_load_tmem(acc.at[:, columns]).astype(F16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[n % 2], o_ref.at[:, columns])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    holds(matmul, (x, y), product(x, y), "b200", "tcgen05.mma", "tcgen05.ld")
